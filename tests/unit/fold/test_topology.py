"""Clashes and knots of predictions: what is counted, and curves of which the answer is known."""

from dataclasses import replace

import numpy as np
import pytest

from apps.fold.features.structures import read_structure
from apps.fold.model import residues
from apps.fold.output.confidence import Folded
from apps.fold.output.topology import faults, knotted
from apps.fold.toy import STRUCTURES
from tests.support.clashes import chain, clashing, num_clashes


def trefoil(turns: float = 1.0, num: int = 60) -> np.ndarray:
    """[num, 3], opened where it is furthest from its axis; of less than a whole turn it is no knot."""
    t = np.pi / 3 + np.linspace(0.02, 2 * np.pi * turns - 0.02, num)
    return 4 * np.stack([np.sin(t) + 2 * np.sin(2 * t), np.cos(t) - 2 * np.cos(2 * t), -np.sin(3 * t)], 1)


def figure_eight(num: int = 80) -> np.ndarray:
    t = np.linspace(0.02, 2 * np.pi - 0.02, num)  # it begins where it is furthest out
    radius = 2 + np.cos(2 * t)
    return 4 * np.stack([radius * np.cos(3 * t), radius * np.sin(3 * t), np.sin(4 * t)], 1)


def turned(seed: int) -> np.ndarray:
    return np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))[0]


@pytest.mark.parametrize("seed", range(3))
def test_knots_are_found_however_they_lie(seed: int) -> None:
    noise = np.random.default_rng(seed).normal(0, 0.1, (60, 3))
    assert knotted(trefoil() @ turned(seed) + noise)
    assert knotted(figure_eight() @ turned(seed) + 100.0)
    assert not knotted(trefoil(0.5) @ turned(seed) + noise)


def test_what_can_be_pulled_straight_is_no_knot() -> None:
    t = np.linspace(0, 30, 100)
    assert not knotted(np.stack([2.3 * np.cos(1.7 * t), 2.3 * np.sin(1.7 * t), 1.5 * t], 1))  # a helix
    assert not knotted(np.stack([t, 0 * t, 0 * t], 1))
    assert not knotted(np.zeros((5, 3)))
    for length in (0, 1, 2, 3):
        assert not knotted(np.eye(3)[:length])
    for path in sorted(STRUCTURES.glob("1*")):
        assert not knotted(read_structure(path)[0].positions[:, residues.CA]), path


def of(one, lengths: tuple[int, ...] = ()) -> Folded:
    return Folded(one.sequence, one.positions, one.mask, one.b_factors, None, None, None, lengths)


def test_clashes_are_those_that_relaxation_sees_and_are_told_by_chains() -> None:
    one = chain("1ejg.pdb")
    assert faults(of(one)) == {"clashes": 0, "knotted_chains": []}
    clash = clashing(one, 1)
    assert faults(of(clash))["clashes"] == num_clashes([clash]) > 1
    twice = replace(
        one,
        sequence=one.sequence * 2,
        positions=np.concatenate([clash.positions, one.positions + np.float32(0.5)]),
        mask=np.concatenate([one.mask] * 2),
        b_factors=np.tile(one.b_factors, 2),
    )
    found = faults(of(twice, (len(one), len(one))))
    (first, between), (again, second) = found["chain_pair_clashes"]
    assert (first, second) == (num_clashes([clash]), 0)
    assert between == again > 100
    assert found["clashes"] == first + between


def test_unknown_residues_do_not_clash_and_a_residue_alone_is_a_chain() -> None:
    clash = clashing(chain("1ejg.pdb"), 1)
    heap = replace(clash, positions=np.ones_like(clash.positions))
    atoms = heap.mask[:, : residues.NUM_ATOM37 - 1].sum()
    assert 0.9 * atoms**2 / 2 < faults(of(heap))["clashes"] < atoms**2 / 2
    unknown = replace(clash, sequence="X" * len(clash))
    assert faults(of(unknown))["clashes"] == 0
    assert faults(of(clash, (len(clash) - 1, 1)))["knotted_chains"] == []
