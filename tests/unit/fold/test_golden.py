"""The golden run of the original code, and what would not be noticed without it."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.features.arrays import features_of_arrays
from apps.fold.golden import OUTPUTS, compare
from apps.fold.weights.alphafold import load_npz
from apps.fold.weights.source import build
from tests.support.fold import GOLDEN


def test_every_output_equals_the_original_s() -> None:
    differences = compare(GOLDEN)
    assert set(differences) == set(OUTPUTS)
    assert max(differences.values()) <= 1e-5, differences


def test_in_double_precision_only_the_original_s_rounding_is_left() -> None:
    differences = compare(GOLDEN, dtype=torch.float64)
    assert max(differences.values()) <= 1e-5, differences


@pytest.mark.parametrize("what", ["incoming edges", "template", "recycling", "extra msa", "layers"])
def test_it_notices(tmp_path: Path, what: str) -> None:
    """Each part of the model moves the outputs by far more than the tolerance."""
    config, parameters = load_npz(GOLDEN / "params.npz", 1, 2)
    with np.load(GOLDEN / "batch.npz") as file:
        features = features_of_arrays(dict(file), undefined=(1.0, 0.0))
    expected = torch.from_numpy(np.load(GOLDEN / "out.npz")["structure_module/final_atom_positions"])
    rounds = 2
    if what == "incoming edges":  # a and b of one block exchanged: same shapes, another product
        weight = parameters["blocks.1.pair.incoming.in_weight"]
        a, b, gate_a, gate_b = weight.chunk(4)
        parameters["blocks.1.pair.incoming.in_weight"] = torch.cat([b, a, gate_b, gate_a])
    elif what == "template":
        features = replace(features, templates=None)
    elif what == "recycling":
        rounds = 1
    elif what == "extra msa":
        features = replace(features, extra_mask_BEN=features.extra_mask_BEN.roll(1, 1))
    else:
        config = replace(config, structure=replace(config.structure, num_layers=1))
    with torch.inference_mode():
        ours = build(config, parameters, torch.float32, "cpu")([features] * rounds).positions_BN373[0]
    assert (ours - expected).abs().max() > 1e-3 * expected.abs().max()
