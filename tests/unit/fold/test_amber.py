"""Relaxation by OpenMM beside a script of OpenMM's own calls, and its limits."""

import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from apps.fold.relax import chosen, said
from apps.fold.relaxation.amber import Amber
from apps.fold.relaxation.protocol import Limit, Relaxed, Structure, Unstable, relax
from apps.fold.relaxation.violations import Violations, drawn_apart
from apps.fold.score import compare
from core.config import UserError
from tests.support.clashes import Ticking, chain, clashing, num_clashes, one_chain_pdb

pytest.importorskip("openmm", reason="an optional extra, relax; `make install` installs it")
pytest.importorskip("pdbfixer", reason="an optional extra, relax; `make install` installs it")


def _is_the_scripts(one, folder: Path) -> None:
    from tests.support.direct_relaxation import energies

    _, after = energies(one_chain_pdb(one, folder / "x.pdb"))
    found = relax([one], Amber, 120.0)
    assert found.rounds[0].energy_after == pytest.approx(after, rel=1e-3)
    assert len(found.rounds) == 1
    assert not found.violations_after
    assert num_clashes(list(found.chains)) == 0
    assert found.rmsd < 0.35
    assert {atom.name[0] for atom in found.atoms} == {"C", "H", "N", "O", "S"}


@pytest.mark.parametrize("seed", [None, 0])
def test_energies_are_those_of_a_script_of_openmms_calls(seed: int | None, tmp_path: Path) -> None:
    one = chain("1ejg.pdb")
    _is_the_scripts(one if seed is None else clashing(one, seed), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", ["1ubi.pdb", "1ejg.pdb", "1a8o.cif"])
@pytest.mark.parametrize("seed", [None, *range(5)])
def test_energies_of_more_structures(name: str, seed: int | None, tmp_path: Path) -> None:
    one = chain(name)
    _is_the_scripts(one if seed is None else clashing(one, seed), tmp_path)


def test_a_relaxation_by_openmm_ends_by_its_limit_of_time() -> None:
    """By a clock that goes on by a second whenever it is read, so that no machine is too slow for a round.

    OpenMM makes bonds stiffer once it is stopped: some 90 looks at the energy, of a second each, are kept for that.
    """
    one = clashing(chain("1ejg.pdb"), 1)
    found = relax([one], Amber, 200.0, clock=Ticking())
    assert found.cut_short
    assert len(found.rounds) == 1
    assert found.rounds[0].end == "limit of time"
    assert 10 < found.rounds[0].iterations < 60
    assert found.seconds < 200.0 - 80.0
    assert found.rounds[0].energy_after < found.rounds[0].energy_before


def test_a_limit_that_passes_before_the_first_round_leaves_what_was_given() -> None:
    one = clashing(chain("1ejg.pdb"), 1)
    one.mask[11, 4:] = 0  # a side chain
    clock = Ticking()

    def late(structure: Structure, limit: Limit) -> Amber:
        made = Amber(structure, limit)
        clock.now += 100.0
        return made

    ends = ((Amber, 4.0, 0), (Amber, 10.0, 0), (late, 60.0, 4))  # before atoms are placed, then, and behind that
    for minimizer, limit, placed in ends:
        found = relax([one], minimizer, limit, clock=clock)
        assert found.chains[0].mask[11, 4:].sum() == placed
        _is_as_it_was(found)


def test_placing_atoms_is_ended_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """PDBFixer would take a minute; by the machine's clock, of which it knows nothing."""
    import pdbfixer

    monkeypatch.setattr(pdbfixer.PDBFixer, "addMissingHydrogens", lambda *_: time.sleep(60.0))
    found = relax([clashing(chain("1ejg.pdb"), 1)], Amber, 2.0)
    _is_as_it_was(found)
    assert found.seconds < 2.5


def _is_as_it_was(found: Relaxed) -> None:
    assert found.cut_short
    assert found.rounds == ()
    assert found.rmsd < 1e-3
    assert set(found.violations_before) <= set(found.violations_after)
    assert "the limit of time passed before the first round" in said(found)
    assert not found.report()["drawn_apart"]
    assert found.report()["rounds"] == []
    assert found.report()["cut_short"]


def test_a_heap_of_atoms_is_drawn_apart_first() -> None:
    one = chain("1ejg.pdb")
    part = slice(0, 10)
    heap = replace(
        one,
        sequence=one.sequence[part],
        numbers=one.numbers[part],
        positions=np.round(0.02 * one.positions[part]),  # on a grid of 1 Angstrom: most of them in one place
        mask=one.mask[part],
        b_factors=one.b_factors[part],
    )
    with pytest.raises(Unstable):
        relax([heap], Amber, 100.0)
    found = relax([heap], Amber, 100.0, drawn_apart=drawn_apart)
    assert found.rounds
    assert found.drawn_apart
    assert len(found.violations_before) == 10
    assert len(found.violations_after) < 10
    cut = relax([heap], Amber, 40.0, clock=Ticking(), drawn_apart=drawn_apart)  # while they are drawn apart
    assert (cut.rounds, cut.cut_short, cut.method) == ((), True, "none")
    assert 0 < cut.rmsd < found.rmsd
    for one in (found, cut):
        assert "; atoms that lay on each other were drawn apart first" in said(one)
        assert one.report()["drawn_apart"]
    assert said(cut).endswith("; the limit of time passed before the first round")


def test_missing_atoms_are_placed_and_hydrogens_are_where_they_were_before() -> None:
    one = chain("1ejg.pdb")
    one.mask[11, 4:] = 0  # a side chain
    first, second = (relax([one], Amber, 60.0) for _ in range(2))
    assert (first.chains[0].mask[11, 4:].sum(), one.mask[11, 4:].sum()) == (4, 0)
    assert not first.violations_after
    np.testing.assert_array_equal(first.chains[0].positions, second.chains[0].positions)
    assert compare(first.chains[0], one).rmsd < 0.5


def test_what_openmm_has_not_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    one = chain("1ejg.pdb")
    first = replace(
        one, sequence="T", numbers=("1",), positions=one.positions[:1], mask=one.mask[:1], b_factors=one.b_factors[:1]
    )
    with pytest.raises(UserError, match="residue 47 is bonded to no other"):
        relax([one, first], Amber, 60.0)
    assert relax([one, first], chosen("auto"), 60.0).method == Violations.method
    assert "residue 47 is bonded to no other" in capsys.readouterr().err
    with pytest.raises(UserError, match="no platform 'Quantum' here; it has Reference, CPU"):
        relax([chain("1ejg.pdb")], partial(Amber, platform="Quantum"), 60.0)
