"""Scores: what they are of a structure with itself, moved, noisy, or of parts of it."""

from pathlib import Path

import numpy as np
import pytest

from apps.fold.features.structures import Chain
from apps.fold.model import residues
from apps.fold.score import compare, superpose, tm_score
from core.config import UserError


def _chain(length: int = 60, seed: int = 0) -> Chain:
    """A random walk of CA with CB beside it."""
    generator = np.random.default_rng(seed)
    steps = generator.normal(size=(length, 3))
    ca = np.cumsum(3.8 * steps / np.linalg.norm(steps, axis=-1, keepdims=True), 0)
    positions, mask = np.zeros((length, 37, 3), np.float32), np.zeros((length, 37), np.float32)
    positions[:, residues.CA], mask[:, residues.CA] = ca, 1
    positions[:, residues.CB], mask[:, residues.CB] = ca + generator.normal(size=(length, 3)), 1
    letters = generator.choice(list(residues.RESTYPES), length)
    numbers = tuple(str(i) for i in range(length))
    return Chain("A", "".join(letters), numbers, positions, mask, generator.random(length).astype(np.float32))


def _changed(chain: Chain, positions: np.ndarray, keep: slice = slice(None)) -> Chain:
    return Chain(
        "A", chain.sequence[keep], chain.numbers[keep], positions[keep].astype(np.float32), chain.mask[keep],
        chain.b_factors[keep],
    )  # fmt: skip


def _turned(x: np.ndarray, seed: int = 3) -> np.ndarray:
    q, _ = np.linalg.qr(np.random.default_rng(seed).normal(size=(3, 3)))
    return x @ (q * np.linalg.det(q)) + np.array([10.0, -5, 3])


def test_a_structure_is_itself_wherever_it_lies() -> None:
    chain = _chain()
    scores = compare(_changed(chain, _turned(chain.positions)), chain)
    assert (scores.aligned, scores.reference, scores.identity) == (60, 60, 1.0)
    assert scores.rmsd < 1e-4
    for name in ("lddt", "lddt_ca", "tm_score", "gdt_ts", "gdt_ha"):
        assert getattr(scores, name) == pytest.approx(1.0, abs=1e-5), name


def test_a_mirror_image_is_another_structure() -> None:
    """Distances are the same, so lDDT does not see it; what superposes does."""
    chain = _chain()
    scores = compare(_changed(chain, chain.positions * [1, 1, -1]), chain)
    assert scores.lddt_ca == 1.0
    assert scores.tm_score < 0.6
    assert scores.rmsd > 2


def test_half_a_structure() -> None:
    chain = _chain()
    scores = compare(_changed(chain, _turned(chain.positions), slice(0, 30)), chain)
    assert (scores.aligned, scores.reference) == (30, 60)
    assert scores.tm_score == pytest.approx(0.5, abs=1e-5)
    assert scores.gdt_ts == pytest.approx(0.5)
    assert scores.lddt == 1.0


def test_gdt_counts_what_lies_within_its_limits() -> None:
    chain = _chain()
    direction = np.random.default_rng(1).normal(size=(60, 1, 3))
    distance = np.repeat([0.0, 3, 6, 12], [36, 8, 8, 8])[:, None, None]
    moved = chain.positions + distance * direction / np.linalg.norm(direction, axis=-1, keepdims=True)
    scores = compare(_changed(chain, _turned(moved)), chain)
    # Shares within 0.5, 1, 2, 4 and 8 Angstrom: 0.6, 0.6, 0.6, 44/60, 52/60.
    assert scores.gdt_ts == pytest.approx((0.6 + 0.6 + 44 / 60 + 52 / 60) / 4, abs=0.02)
    assert scores.gdt_ha == pytest.approx((0.6 + 0.6 + 0.6 + 44 / 60) / 4, abs=0.02)


def test_tm_score_weighs_distances_by_the_length() -> None:
    chain = _chain()
    direction = np.random.default_rng(1).normal(size=(60, 1, 3))
    distance = np.repeat([0.0, 6], [30, 30])[:, None, None]
    moved = chain.positions + distance * direction / np.linalg.norm(direction, axis=-1, keepdims=True)
    d0 = 1.24 * 45 ** (1 / 3) - 1.8
    expected = 0.5 + 0.5 / (1 + (6 / d0) ** 2)
    assert compare(_changed(chain, moved), chain).tm_score == pytest.approx(expected, abs=0.01)


def test_lddt_of_all_atoms_is_between_residues() -> None:
    chain = _chain()
    apart = chain.positions + 12 * np.random.default_rng(2).normal(size=(60, 1, 3))
    assert compare(_changed(chain, apart), chain).lddt < 0.3


def test_two_domains_moved_apart() -> None:
    """RMSD is large; the search finds the superposition of the larger domain."""
    chain = _chain(100)
    moved = chain.positions.copy()
    moved[60:] = _turned(moved[60:])
    scores = compare(_changed(chain, moved), chain)
    assert scores.rmsd > 5
    assert 0.6 <= scores.tm_score < 0.8
    assert 0.6 <= scores.gdt_ts < 0.75
    assert 0.5 < scores.lddt_ca < 0.8  # distances within the domains are right, those between them not


def test_scores_fall_with_noise() -> None:
    chain, generator = _chain(), np.random.default_rng(1)
    noise = generator.normal(size=chain.positions.shape)
    found = [compare(_changed(chain, chain.positions + s * noise), chain) for s in (0.1, 0.5, 1.5, 5)]
    for name in ("lddt", "lddt_ca", "tm_score", "gdt_ts"):
        values = [getattr(scores, name) for scores in found]
        assert values == sorted(values, reverse=True), name
    assert found[1].rmsd == pytest.approx(0.5 * np.sqrt(3), rel=0.15)


def test_superposition_against_its_definition() -> None:
    """No small turn or shift of the result comes nearer."""
    x, y = _chain(20, 1).positions[:, 1].astype(float), _chain(20, 2).positions[:, 1].astype(float)
    moved, rmsd = superpose(x, y)
    assert rmsd == pytest.approx(np.sqrt(((moved - y) ** 2).sum(-1).mean()))
    generator = np.random.default_rng(0)
    for _ in range(50):
        a, b, c = 0.02 * generator.normal(size=3)
        turn = np.array([[1, -c, b], [c, 1, -a], [-b, a, 1]])
        u, _, vt = np.linalg.svd(turn)
        other = moved @ (u @ vt) + 0.05 * generator.normal(size=3)
        assert ((other - y) ** 2).sum() >= ((moved - y) ** 2).sum() - 1e-9


def test_tm_score_of_unrelated_structures_is_low() -> None:
    assert tm_score(_chain(100, 1).positions[:, 1], _chain(100, 2).positions[:, 1], 100) < 0.4


def test_confidence_that_knows_correlates() -> None:
    chain, generator = _chain(), np.random.default_rng(1)
    noise = generator.normal(size=chain.positions.shape) * np.linspace(0, 4, 60)[:, None, None]
    predicted = _changed(chain, chain.positions + noise)
    knowing = Chain(*[*vars(predicted).values()][:5], np.linspace(100, 0, 60, dtype=np.float32))
    correlation = compare(knowing, chain).plddt_correlation
    assert correlation is not None
    assert correlation > 0.7


def test_structures_without_common_residues_are_refused(tmp_path: Path) -> None:
    one, other = _chain(5), _chain(5, 1)
    empty = Chain("A", other.sequence, other.numbers, other.positions, 0 * other.mask, other.b_factors)
    with pytest.raises(UserError, match="correspond"):
        compare(one, empty)
