"""The golden run of the original code, and what would not be noticed without it."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch

from apps.fold.features.arrays import features_of_arrays
from apps.fold.golden import OUTPUTS, compare, examine, outputs_of
from apps.fold.weights.alphafold import load_npz
from apps.fold.weights.source import build
from core.config import UserError
from tests.support.fold import GOLDEN

SHARPER = 20.0


def test_every_output_equals_the_original_s() -> None:
    differences = compare(GOLDEN)
    assert set(differences) == set(OUTPUTS)
    assert max(differences.values()) <= 1e-5, differences


def test_in_double_precision_only_the_original_s_rounding_is_left() -> None:
    differences = compare(GOLDEN, dtype=torch.float64)
    assert max(differences.values()) <= 1e-5, differences


# Keys of params.npz: of each kind of operation one, and those whose change has the least effect (template gates).
_EVOFORMER, _TEMPLATES = "evoformer/evoformer_iteration/", "single_template_embedding/template_pair_stack/"
MATRICES = (
    (_TEMPLATES, "triangle_attention_ending_node/attention//gating_w"),
    (_TEMPLATES, "triangle_attention_starting_node/attention//gating_w"),
    ("evoformer/extra_msa_stack/", "triangle_attention_starting_node//feat_2d_weights"),
    (_EVOFORMER, "triangle_attention_starting_node/attention//gating_w"),
    (_EVOFORMER, "msa_row_attention_with_pair_bias/attention//query_w"),
    (_EVOFORMER, "triangle_multiplication_incoming/left_projection//weights"),
    (_EVOFORMER, "outer_product_mean//output_w"),
    ("structure_module/", "invariant_point_attention/output_projection//weights"),
    ("predicted_lddt_head/", "logits//weights"),
)


def copied(folder: Path, parameters: dict[str, np.ndarray], out: dict[str, np.ndarray] | None = None) -> Path:
    """The golden run with other weights, which config.json does not note, and other outputs."""
    for name in ("batch.npz", "out.npz"):
        shutil.copyfile(GOLDEN / name, folder / name)
    np.savez(folder / "params.npz", **parameters)
    if out is not None:
        np.savez(folder / "out.npz", **out)
    stored = json.loads((GOLDEN / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({n: value for n, value in stored.items() if n != "params_sha256"}))
    return folder


def arrays_of(name: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / name) as file:
        return dict(file)


def found_in(path: Path) -> dict[str, bool]:
    return {name: one.well for name, one in examine(path).items()}


def test_as_it_is_it_is_well() -> None:
    assert all(found_in(GOLDEN).values()), examine(GOLDEN)


@pytest.mark.parametrize("matrix", MATRICES, ids="".join)
def test_a_hundredth_more_in_a_matrix_is_noticed(tmp_path: Path, matrix: tuple[str, str]) -> None:
    """In one block of those of a stack, which lie in one array."""
    parameters = arrays_of("params.npz")
    (name,) = [name for name in parameters if matrix[0] in name and name.endswith(matrix[1])]
    changed = parameters[name].copy()
    (changed[-1] if "stack" in name or "iteration/" in name else changed)[...] *= np.float32(1.01)
    assert not np.array_equal(changed, parameters[name])
    assert not all(found_in(copied(tmp_path, {**parameters, name: changed})).values())


def test_rounding_as_large_as_at_released_widths_is_no_sickness(tmp_path: Path) -> None:
    """A run in fp32 whose weights carry rounding far, each an ulp off: beyond the former limit of 1e-5, and well.

    An ulp in every weight rounds as another order of sums does, and no run of another code is needed for it.
    """
    generator = np.random.default_rng(0)
    sharp = {
        n: a * np.float32(SHARPER if n.endswith(("query_w", "key_w")) else 1)
        for n, a in arrays_of("params.npz").items()
    }
    other = {
        n: np.nextafter(a, np.where(generator.random(a.shape) < 0.5, -9, 9).astype(a.dtype)) for n, a in sharp.items()
    }
    (tmp_path / "other").mkdir()
    theirs = outputs_of(copied(tmp_path / "other", other), torch.float32)
    out = {name: array.astype(np.float32) for name, array in theirs.items() if array is not None}
    golden = copied(tmp_path, sharp, out)
    assert max(compare(golden).values()) > 1e-5, "no rounding to speak of"
    assert all(found_in(golden).values()), examine(golden)


def test_an_operator_that_computes_something_else_is_noticed() -> None:
    """Its own rounding seems large then, which is no excuse."""
    layer_norm = torch.nn.functional.layer_norm

    def coarse(x: torch.Tensor, *given, **more) -> torch.Tensor:
        return layer_norm(x, *given, **more) * (1 + 1e-3 * (x.dtype == torch.float32))

    with patch("torch.nn.functional.layer_norm", coarse):
        found = examine(GOLDEN)
    assert not all(one.well for one in found.values())


def test_other_weights_than_were_noted_are_refused(tmp_path: Path) -> None:
    """Also where they have no effect on the run: the queries of its only template."""
    for path in GOLDEN.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with np.load(GOLDEN / "params.npz") as file:
        arrays = dict(file)
    name = next(n for n in arrays if "template_embedding/attention//query_w" in n)
    np.savez(tmp_path / "params.npz", **{**arrays, name: arrays[name] * np.float32(1.01)})
    with pytest.raises(UserError, match="other weights than the run was made with"):
        examine(tmp_path)


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
