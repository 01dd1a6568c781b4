"""A complex of 1,500 residues is folded within the budget that was planned: `make soak`."""

import io
import random
import tempfile
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from apps.fold.model.config import MultimerConfig, multimer_preset
from apps.fold.predict import main
from apps.fold.subbatch import FoldJob, least_bytes
from apps.fold.weights.folder import save_folder
from core.runtime import process_holding
from tests.support.fold import random_parameters
from tests.support.resident import in_child, rise_of

pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * 3600)]

CHAINS = (700, 500, 300)


def _config() -> MultimerConfig:
    """Released widths, one block of each stack, and one pass: all bytes but those of other weights."""
    config = multimer_preset("model_1_multimer_v3")
    stacks = {name: replace(getattr(config, name), num_blocks=1) for name in ("evoformer", "extra", "templates")}
    structure = replace(config.structure, num_layers=1)
    return replace(config, **stacks, structure=structure, num_recycles=0)


def _budget() -> int:
    """A third more than what a process takes at least; a complex has places for four templates, used or not."""
    config = _config()
    job = FoldJob(config, sum(CHAINS), 1, 1, config.max_templates, iterations=1, hidden=True, distances=False)
    return process_holding(int(1.33 * least_bytes(job)))


def _folded(lengths: tuple[int, ...], budget: int) -> tuple[int, int]:
    """The rise of the process's memory, and the exit code; a small complex is folded before."""
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as name, redirect_stdout(io.StringIO()):
        folder, found = Path(name), (0, 0)
        save_folder(folder / "weights", _config(), random_parameters(_config()))
        for each, memory in (((12, 8), 2**30), (lengths, budget)):
            chains = ":".join("".join(draw.choices("ACDEFGHIKLMNPQRSTVWY", k=length)) for length in each)
            (folder / "in.fasta").write_text(f">a\n{chains}\n")
            options = ["--no-plots", "--no-pdb", "--overwrite", "--memory", f"{memory}B"]
            arguments = [folder / "in.fasta", "--model", folder / "weights", "--out", folder / "out"]
            found = rise_of(partial(main, [*map(str, arguments), *options]))
    return found


def test_a_complex_of_1500_residues_stays_within_its_budget() -> None:
    budget = _budget()
    rise, code = in_child(_folded, CHAINS, budget)
    print(f"{rise / 1e9:.2f} of {budget / 1e9:.2f} GB")
    assert code == 0
    assert 0.5 * budget < rise <= budget, (rise, budget)
