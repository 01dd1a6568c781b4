"""Relaxation without OpenMM: what counts as a violation, the minimizer of our own, the command and its refusals."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from apps.fold.__main__ import APP
from apps.fold.features.structures import Chain, read_structure
from apps.fold.loss.violation import violation_loss
from apps.fold.model import residues
from apps.fold.relaxation.bounded import within
from apps.fold.relaxation.protocol import Limit, OutOfTime, Round, Structure, Unstable, relax
from apps.fold.relaxation.violations import Violations
from apps.fold.toy import HELDOUT, STRUCTURES
from core.config import UserError, run_command
from tests.support.clashes import chain, clashing, num_clashes, rules_of

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def without_openmm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openmm", None)


def relaxing(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    """Exit code, stdout, stderr."""
    code = run_command(APP.dispatch, ["relax", *map(str, arguments)])
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize("path", [*sorted(STRUCTURES.glob("1*")), *HELDOUT.glob("1*")], ids=lambda path: path.name)
def test_experiments_do_not_violate_stereochemistry(path: Path) -> None:
    chains = read_structure(path)
    rules, atoms = rules_of(chains)
    assert not rules.violating(atoms).any()
    assert rules.bounds.pairs.shape[1] > 3 * atoms.shape[0]


def moved(one: Chain, row: int, atom: str, by: tuple[float, float, float]) -> Chain:
    positions = one.positions.copy()
    positions[row, residues.ATOM37.index(atom)] += by
    return replace(one, positions=positions)


def test_each_kind_of_violation_is_seen_where_it_is() -> None:
    ubiquitin = chain("1ubi.pdb")
    for row, atom in ((9, "CA"), (20, "OD2")):
        rules, atoms = rules_of([moved(ubiquitin, row, atom, (0.5, 0.5, 0.5))])
        found = np.nonzero(rules.violating(atoms))[0].tolist()
        assert {row} <= set(found) <= {row - 1, row, row + 1}, atom
    apart = ubiquitin.positions.copy()
    apart[40:] += 3.0 * (apart[40, residues.N] - apart[39, residues.C]) / 1.33
    rules, atoms = rules_of([replace(ubiquitin, positions=apart)])
    assert {39, 40} <= set(np.nonzero(rules.violating(atoms))[0].tolist())
    other = [replace(ubiquitin, positions=ubiquitin.positions + 100.0), ubiquitin]
    assert not rules_of(other)[0].violating(rules_of(other)[1]).any()  # two chains are not bonded


def test_clashes_are_those_of_the_loss() -> None:
    """The loss compares all atoms with all others; here only residues whose spheres touch are compared."""
    one = clashing(chain("1ejg.pdb"), 1)
    rules, atoms = rules_of([one])
    clashes = rules.clashes(atoms, 0.0)
    distance = (atoms.view(-1, 3)[clashes.pairs[0]] - atoms.view(-1, 3)[clashes.pairs[1]]).norm(dim=1)
    aatype, index = torch.from_numpy(rules.aatype_N)[None], torch.arange(len(one))[None]
    before = violation_loss(atoms[None], aatype, index)
    rows = clashes.pairs // residues.NUM_ATOM14
    # between residues each pair counts once, within one twice; both are divided by the atoms and doubled
    weight = 1.0 + (rows[0] == rows[1])
    expected = 2 * ((clashes.nearest - distance) * weight).sum() / rules.exists_NA.sum()
    experiment = rules_of([chain("1ejg.pdb")])[1]
    rest = violation_loss(experiment[None], aatype, index)  # peptide bonds, and none clash
    assert float(expected) > 0.01
    torch.testing.assert_close(before - rest, expected[None], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_planted_clashes_go_and_the_rest_stays(seed: int) -> None:
    one = clashing(chain("1ejg.pdb"), seed)
    assert num_clashes([one]) > 1
    found = relax([one], Violations, 60.0)
    assert found.violations_before
    assert not found.violations_after
    assert num_clashes(list(found.chains)) == 0
    assert found.rmsd < 0.3
    assert not found.cut_short
    assert found.rounds[-1].energy_after < found.rounds[0].energy_before
    np.testing.assert_array_equal(found.chains[0].b_factors, one.b_factors)
    np.testing.assert_array_equal(found.chains[0].mask.sum(1), one.mask[:, : residues.NUM_ATOM37 - 1].sum(1))


def test_atoms_in_one_place_are_drawn_apart() -> None:
    one = chain("1ejg.pdb")
    heap = replace(one, positions=np.ones_like(one.positions))
    found = relax([heap], Violations, 60.0)
    assert found.rounds[-1].energy_after < 0.05 * found.rounds[0].energy_before
    assert len(found.violations_after) < len(found.violations_before)


def test_a_limit_of_time_is_not_spent_on_imports() -> None:
    """torch's first optimizer imports its compiler, which takes seconds, and more on a busy machine."""
    script = (
        "import sys, numpy as np\n"
        "from tests.support.clashes import chain\n"
        "from apps.fold.relaxation.protocol import relax\n"
        "from apps.fold.relaxation.violations import Violations\n"
        "one = chain('1ejg.pdb')\n"
        "one.positions[:] = 1\n"
        "assert relax([one], Violations, 30.0).rounds[0].iterations\n"
        "print('torch._dynamo' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT)
    assert done.stdout == "False\n", done.stderr


class Still:
    """A minimizer that moves nothing, and notes which residues it was to hold."""

    method = "none"
    held: tuple[list[int], ...] = ()

    def __init__(self, structure: Structure, limit: Limit):
        self.structure, self.placed_NA = structure, structure.exists_NA
        Still.held = ()

    def minimize(self, held_N, limit, tell) -> Round:
        Still.held += (np.nonzero(~held_N)[0].tolist(),)
        return Round(0.0, 0.0, 1, "converged")

    def positions(self):
        return self.structure.atoms_NA3

    def atoms(self):
        return []


def test_rounds_go_on_while_there_are_violations_and_let_go_of_what_violates() -> None:
    one = clashing(chain("1ejg.pdb"), 0)
    found = relax([one], Still, 60.0)
    wrong = list(found.violations_before)
    assert wrong
    assert len(found.rounds) == 3
    assert Still.held == ([], wrong, wrong)
    assert list(found.violations_after) == wrong
    assert len(relax([chain("1ejg.pdb")], Still, 60.0).rounds) == 1


def test_a_relaxation_ends_by_its_limit_of_time() -> None:
    one = clashing(chain("1ubi.pdb"), 1)
    found = relax([one], Violations, 1e-9)
    assert found.cut_short
    assert found.rmsd == 0
    found = relax([one], Still, 60.0)
    assert not found.cut_short


def test_a_step_that_cannot_be_interrupted_is_ended_at_the_limit(tmp_path: Path) -> None:
    def endless() -> None:
        (tmp_path / "process").write_text(str(os.getpid()))
        time.sleep(60.0)

    began = time.monotonic()
    with pytest.raises(OutOfTime):
        within(Limit(1.0), endless, "sleeping")
    assert 1.0 <= time.monotonic() - began < 5.0
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "process").read_text()), 0)
    with pytest.raises(OutOfTime):
        within(Limit(-1.0), endless, "sleeping")
    assert within(Limit(60.0), lambda: np.arange(10**6), "counting")[-1] == 10**6 - 1  # more than a pipe holds


def test_what_such_a_step_raises_is_raised_and_one_that_is_killed_is_said() -> None:
    with pytest.raises(Unstable, match="atoms lie"):
        within(Limit(60.0), partial(_raise, Unstable("atoms lie")), "x")
    with pytest.raises(UserError, match="the process was ended while placing atoms"):
        within(Limit(60.0), lambda: os.kill(os.getpid(), signal.SIGKILL), "placing atoms")


def _raise(error: Exception) -> None:
    raise error


def test_the_command_keeps_chains_numbers_and_confidence(tmp_path: Path, capsys) -> None:
    whole = (STRUCTURES / "1ejg.pdb").read_text().splitlines()
    atoms = [line for line in whole if line.startswith("ATOM")]
    lines = []
    for line in atoms:  # chains H and b of residues from 31, their confidence by residue
        number = int(line[22:26])
        lines.append(
            f"{line[:21]}{'H' if number <= 20 else 'b'}{number + 30:4d}{line[26:60]}{number + 40.5:6.2f}{line[66:]}"
        )
    (tmp_path / "two.pdb").write_text("\n".join([*lines, "END", ""]))
    code, said, err = relaxing(capsys, tmp_path / "two.pdb", "--out", tmp_path / "out")
    assert code == 0
    assert "without a force field; pip install" in err
    assert "violations by L-BFGS (no force field)" in said
    chains = read_structure(tmp_path / "out" / "two_relaxed.cif")
    given = read_structure(tmp_path / "two.pdb")
    for one, other in zip(chains, given, strict=True):
        assert (one.name, one.sequence, one.numbers) == (other.name, other.sequence, other.numbers)
        np.testing.assert_allclose(one.b_factors, other.b_factors, atol=0.006)
    assert [one.name for one in chains] == ["H", "b"]
    assert chains[0].b_factors[0] == 41.5
    report = json.loads((tmp_path / "out" / "two_relaxation.json").read_text())
    assert report["violating_residues_after"] == 0
    assert report["method"] == "violations by L-BFGS (no force field)"


def test_what_cannot_be_relaxed_gets_a_line_and_the_others_go_on(tmp_path: Path, capsys) -> None:
    source = tmp_path / "in"
    source.mkdir()
    whole = (STRUCTURES / "1a8o.cif").read_text()
    (source / "good.pdb.gz").write_bytes(gzip.compress((STRUCTURES / "1ejg.pdb").read_bytes()))
    (source / "cut.cif").write_text(whole[: len(whole) // 2])
    (source / "empty.cif").write_text("")
    lines = [line for line in whole.splitlines() if not (line.startswith(("ATOM", "HETATM")) and " 160 " in line)]
    assert len(lines) < len(whole.splitlines())
    (source / "holes.cif").write_text("\n".join(lines) + "\n")
    strange = (STRUCTURES / "1ejg.pdb").read_text().replace("CYS A   4 ", "XYZ A   4 ")
    (source / "strange.pdb").write_text(strange)
    (source / "notes.txt").write_text("x")
    code, _, err = relaxing(capsys, source, "--out", tmp_path / "out", "--method", "violations")
    assert code == 2
    errors = [line for line in err.splitlines() if line]
    assert len(errors) == 4, errors
    assert all(line.startswith("error: ") for line in errors)
    for part in ("cut.cif", "empty.cif", "residue 10 (", "residue 4 of chain A is none of the twenty"):
        assert part in err, part
    assert (tmp_path / "out" / "good_relaxed.cif").exists()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["good_relaxation.json", "good_relaxed.cif"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ((), "needs an mmCIF or PDB file"),
        (("FILE", "--method", "amber"), "takes OpenMM and PDBFixer"),
        (("FILE", "--time-limit", "0"), "give seconds above 0"),
        (("FILE", "--method", "violations", "--platform", "CUDA"), "--platform"),
        (("nothing.cif",), "there is no structure at nothing.cif"),
        (("FOLDER",), "holds no file that ends in .cif"),
    ],
)
def test_bad_options_get_one_line(arguments, line, tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    named = {"FILE": str(STRUCTURES / "1ejg.pdb"), "FOLDER": str(tmp_path)}
    code, _, err = relaxing(capsys, *(named.get(word, word) for word in arguments))
    assert code == 2
    assert line in err
    assert len(err.strip().splitlines()) <= 2  # of which one says which minimizer is taken
