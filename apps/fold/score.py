"""Scores of a structure against another: lDDT, TM-score, RMSD, GDT, on residues that correspond.

All but lDDT superpose. The TM-score is the best over many starting superpositions (Zhang and Skolnick 2004): of whole
fragments of every length halved from L down to 4, each refined on the residues that it brings near; so it is a lower
bound, as in other programs, and mostly equal to theirs to three decimals.
"""

from dataclasses import dataclass

import numpy as np
import torch

from apps.fold.features.structures import Chain
from apps.fold.features.templates import align
from apps.fold.loss.heads import lddt
from apps.fold.model import residues
from core.config import UserError


@dataclass(frozen=True)
class Scores:
    """residues aligned, of how many in the reference; lDDT of all atoms and of CA; RMSD in Angstrom; the rest 0 to 1.

    lddt_per_residue  of CA, for each aligned residue; plddt_correlation with the B-factors of the prediction
    """

    aligned: int
    reference: int
    identity: float
    lddt: float
    lddt_ca: float
    tm_score: float
    rmsd: float
    gdt_ts: float
    gdt_ha: float
    plddt_correlation: float | None
    lddt_per_residue: tuple[float, ...]


def compare(predicted: Chain, reference: Chain) -> Scores:
    """Scores of a prediction against an experimental chain, aligned by their sequences.

    Raises UserError when fewer than three residues with a CA correspond.
    """
    here, there = corresponding(predicted, reference)
    mine, theirs = predicted.positions[here, residues.CA], reference.positions[there, residues.CA]
    length = len(reference)
    moved, rmsd = superpose(mine, theirs)
    per_residue = _lddt(mine, theirs, np.ones(len(here)))
    distances = np.linalg.norm(moved - theirs, axis=-1)
    same = [predicted.sequence[i] == reference.sequence[j] for i, j in zip(here, there)]
    return Scores(
        aligned=len(here),
        reference=length,
        identity=float(np.mean(same)),
        lddt=_all_atom_lddt(predicted, reference, here, there),
        lddt_ca=float(per_residue.mean()),
        tm_score=tm_score(mine, theirs, length),
        rmsd=rmsd,
        gdt_ts=_gdt(mine, theirs, length, (1, 2, 4, 8)),
        gdt_ha=_gdt(mine, theirs, length, (0.5, 1, 2, 4)),
        plddt_correlation=_correlation(predicted.b_factors[here], per_residue) if len(distances) > 2 else None,
        lddt_per_residue=tuple(round(float(x), 4) for x in per_residue),
    )


def corresponding(predicted: Chain, reference: Chain) -> tuple[np.ndarray, np.ndarray]:
    """The residues of both chains, aligned by their sequences, whose CA both have.

    Raises UserError when there are fewer than three.
    """
    here, there = align(predicted.sequence, reference.sequence).T
    both = (predicted.mask[here, residues.CA] * reference.mask[there, residues.CA]) > 0
    if both.sum() < 3:
        raise UserError(f"only {both.sum()} residues of the two chains correspond; give two structures of one protein")
    return here[both], there[both]


def superpose(x: np.ndarray, y: np.ndarray, chosen: np.ndarray | None = None) -> tuple[np.ndarray, float]:
    """Points x[n, 3] moved rigidly onto y[n, 3], and the root mean square distance (Kabsch 1976).

    chosen  the points that are to lie near each other; the distance is theirs; None: all
    """
    a, b = (x, y) if chosen is None else (x[chosen], y[chosen])
    a, b = a.astype(np.float64), b.astype(np.float64)
    centre_a, centre_b = a.mean(0), b.mean(0)
    u, _, vt = np.linalg.svd((a - centre_a).T @ (b - centre_b))
    sign = np.sign(np.linalg.det(u @ vt))
    rotation = u @ np.diag([1, 1, sign]) @ vt
    moved = (x - centre_a) @ rotation + centre_b
    near = moved if chosen is None else moved[chosen]
    return moved, float(np.sqrt(((near - b) ** 2).sum(-1).mean()))


def tm_score(x: np.ndarray, y: np.ndarray, length: int) -> float:
    """TM-score of points x[n, 3] to y[n, 3], normalised by the reference's length."""
    d0 = max(1.24 * max(length - 15, 1) ** (1 / 3) - 1.8, 0.5)

    def score(moved: np.ndarray) -> tuple[float, np.ndarray]:
        distances = np.linalg.norm(moved - y, axis=-1)
        return float((1 / (1 + (distances / d0) ** 2)).sum() / length), distances

    return _best(x, y, score, max(d0, 4.5))


def _gdt(x: np.ndarray, y: np.ndarray, length: int, limits: tuple[float, ...]) -> float:
    """The mean over limits of the largest share of residues that a superposition brings within it."""

    def share(limit: float) -> float:
        def score(moved: np.ndarray) -> tuple[float, np.ndarray]:
            distances = np.linalg.norm(moved - y, axis=-1)
            return float((distances <= limit).sum() / length), distances

        return _best(x, y, score, max(limit, 2.0))

    return float(np.mean([share(limit) for limit in limits]))


def _best(x: np.ndarray, y: np.ndarray, score, near: float) -> float:
    """The best score over superpositions of fragments, refined on the points within `near` (and more, if too few)."""
    best, size = 0.0, len(x)
    while True:
        for start in range(0, len(x) - size + 1, max(1, size // 2)):
            chosen = np.arange(start, start + size)
            for _ in range(20):
                moved, _ = superpose(x, y, chosen)
                value, distances = score(moved)
                best = max(best, value)
                limit = near
                while (distances < limit).sum() < 3:
                    limit += 0.5
                again = np.nonzero(distances < limit)[0]
                if np.array_equal(again, chosen):
                    break
                chosen = again
        if size <= 4:
            return best
        size = max(4, size // 2)


def _lddt(x: np.ndarray, y: np.ndarray, mask: np.ndarray) -> np.ndarray:
    predicted, true, there = (torch.from_numpy(np.asarray(a, np.float64)) for a in (x, y, mask))
    return lddt(predicted, true, there).numpy()


def _all_atom_lddt(predicted: Chain, reference: Chain, here: np.ndarray, there: np.ndarray) -> float:
    """lDDT over all heavy atoms that both have; distances inside a residue do not count."""
    mask = predicted.mask[here] * reference.mask[there] > 0
    residue = np.broadcast_to(np.arange(len(here))[:, None], mask.shape)[mask]
    x, y = predicted.positions[here][mask].astype(np.float64), reference.positions[there][mask].astype(np.float64)
    kept, total = 0.0, 0
    for first in range(0, len(x), 1024):  # a strip of atoms at a time: large structures have 50,000
        rows = slice(first, first + 1024)
        true = torch.cdist(torch.from_numpy(y[rows]), torch.from_numpy(y))
        error = (true - torch.cdist(torch.from_numpy(x[rows]), torch.from_numpy(x))).abs()
        counted = (true < 15) & torch.from_numpy(residue[rows, None] != residue)
        total += int(counted.sum())
        kept += sum(float((error[counted] < limit).sum()) for limit in (0.5, 1, 2, 4)) / 4
    return kept / total if total else 1.0


def _correlation(a: np.ndarray, b: np.ndarray) -> float | None:
    return float(np.corrcoef(a, b)[0, 1]) if a.std() > 0 and b.std() > 0 else None
