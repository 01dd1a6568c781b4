"""A hundred predictions of the toy, good ones and very bad ones, are all relaxed: `make soak`."""

import json
from pathlib import Path

import numpy as np
import pytest

from apps.fold.__main__ import APP
from apps.fold.features.structures import read_structure
from apps.fold.model import residues
from apps.fold.toy import STRUCTURES
from core.config import run_command

pytest.importorskip("openmm", reason="an optional extra, relax; `make install` installs it")
pytestmark = [pytest.mark.soak, pytest.mark.timeout(2 * 3600)]

LIMIT_S = 20.0


def sequences() -> list[str]:
    """Of the proteins that the toy knows, whole or in part, with up to half of the letters exchanged; and random ones.

    Of what it does not know it makes heaps, in which all residues violate everything.
    """
    draw = np.random.default_rng(0)
    known = [read_structure(path)[0].sequence for path in sorted(STRUCTURES.glob("1*"))]
    found = list(known)
    while len(found) < 100:
        letters = list(known[draw.integers(len(known))])
        if len(found) % 4 == 3:
            letters = list(draw.choice(list(residues.RESTYPES), draw.integers(2, 60)))
        elif len(found) % 4 == 2:
            start = draw.integers(len(letters) // 2)
            letters = letters[start : start + draw.integers(2, len(letters))]
        for place in draw.permutation(len(letters))[: draw.integers(len(letters) // 2 + 1)]:
            letters[place] = draw.choice(list(residues.RESTYPES))
        found.append("".join(letters))
    return found


@pytest.mark.parametrize("part", range(10))
def test_a_hundred_predictions_are_relaxed_within_their_limit(tmp_path: Path, part: int) -> None:
    given = list(enumerate(sequences()))[part::10]
    records = [f">p{number}\n{sequence}\n" for number, sequence in given]
    (tmp_path / "in.fasta").write_text("".join(records))
    options = ["--out", str(tmp_path / "out"), "--no-plots", "--no-pdb", "--proteins", "--relax", "best"]
    limit = ["--relax-time-limit", str(LIMIT_S)]
    assert run_command(APP.dispatch, ["predict", str(tmp_path / "in.fasta"), *options, *limit]) == 0
    for number, sequence in given:
        folder = tmp_path / "out" / f"p{number}"
        report = json.loads((folder / "rank_1_relaxation.json").read_text())
        assert report["seconds"] < LIMIT_S, report
        assert report["violating_residues_after"] <= report["violating_residues_before"], report
        assert report["rounds"][-1]["energy_after_kcal_mol"] <= report["rounds"][0]["energy_before_kcal_mol"]
        (one,) = read_structure(folder / "rank_1_relaxed.cif")
        assert one.sequence == sequence
        if number < 3:
            assert report["violating_residues_after"] == 0
