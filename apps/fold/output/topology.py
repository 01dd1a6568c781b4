"""Faults in the geometry of a predicted structure: atoms that clash, and chains that are knotted.

Clashes are pairs of atoms, not bonded, that overlap by more than 1.5 Angstrom, as relaxation counts them
(`apps.fold.stereochemistry`). A chain is knotted if its CA, with both ends drawn out from its centre, cannot be pulled
straight: vertices are left out, one by one, where no other segment of the chain pierces the triangle that the vertex
makes with its neighbours, and some that are not ends stay (Koniaris and Muthukumar, Phys. Rev. Lett. 66, 1991).

Shapes: N residues, V vertices, S segments.
"""

from typing import Any

import numpy as np
import torch

from apps.fold.features.sequences import chain_id
from apps.fold.model import residues
from apps.fold.output.confidence import Folded
from apps.fold.stereochemistry import Stereochemistry

_FAR = 100.0  # radii of a chain, by which its ends are drawn out


def faults(folded: Folded) -> dict[str, Any]:
    """For a prediction's json: pairs of atoms that clash, of a complex also by chains, and knotted chains by id."""
    rows, between = folded.chain_rows(), clashes(folded)
    found: dict[str, Any] = {"clashes": int(np.triu(between).sum())}
    if len(rows) > 1:
        found["chain_pair_clashes"] = between.tolist()
    there = folded.mask[:, residues.CA] > 0  # not of unknown residues
    alphas = [folded.positions[one, residues.CA][there[one]] for one in rows]
    return {**found, "knotted_chains": [chain_id(at) for at, alpha in enumerate(alphas, 1) if knotted(alpha)]}


def clashes(folded: Folded) -> np.ndarray:
    """int[chains, chains]: pairs of atoms that clash; of unknown residues none are looked at."""
    known = np.array([letter in residues.RESTYPES for letter in folded.sequence])
    aatype = np.array([max(0, residues.RESTYPES.find(letter)) for letter in folded.sequence])
    slots, there = residues.ATOM14_TO_ATOM37[aatype], residues.ATOM14_MASK[aatype] * known[:, None]
    exists = np.take_along_axis(folded.mask, slots, 1) * there
    atoms = np.take_along_axis(folded.positions.astype(np.float64), slots[..., None], 1) * exists[..., None]
    rows = folded.chain_rows()
    follows = np.ones(len(aatype), bool)
    follows[[one.start for one in rows]] = False
    chain_N = np.repeat(np.arange(len(rows)), [one.stop - one.start for one in rows])
    found = np.zeros((len(rows), len(rows)), int)
    for part in Stereochemistry(aatype, exists, follows).clashes_in_parts(torch.from_numpy(atoms), 0.0):
        np.add.at(found, tuple(chain_N[part.pairs.numpy() // residues.NUM_ATOM14]), 1)
    return found + found.T - np.diag(found.diagonal())


def knotted(alpha_N3: np.ndarray) -> bool:
    """Whether a chain with these CA, in Angstrom, is."""
    if len(alpha_N3) < 4:
        return False
    line = alpha_N3.astype(np.float64)
    centre = line.mean(0)
    out = line[[0, -1]] - centre
    radius = np.linalg.norm(line - centre, axis=1).max()
    out *= _FAR * radius / np.maximum(np.linalg.norm(out, axis=1, keepdims=True), 1e-9)
    line = np.concatenate([centre + out[:1], line, centre + out[1:]])
    before = 0
    while len(line) > 2 and len(line) != before:
        before, at = len(line), 1
        while at < len(line) - 1:
            starts, ends = line[:-1], line[1:]
            apart = np.ones(len(starts), bool)
            apart[max(0, at - 2) : at + 2] = False  # the triangle's own sides, and those that begin at its corners
            if _pierced(line[at - 1 : at + 2], starts[apart], ends[apart]):
                at += 1
            else:
                line = np.delete(line, at, 0)
    return len(line) > 2


def _pierced(triangle_33: np.ndarray, starts_S3: np.ndarray, ends_S3: np.ndarray) -> bool:
    """Whether a segment does (Moeller and Trumbore 1997)."""
    corner, one, other = triangle_33[0], triangle_33[1] - triangle_33[0], triangle_33[2] - triangle_33[0]
    along = ends_S3 - starts_S3
    across = np.cross(along, other)
    volume = across @ one
    volume = np.where(np.abs(volume) < 1e-12, np.inf, volume)  # along the triangle's plane, or no triangle at all
    arm = starts_S3 - corner
    u = (arm * across).sum(1) / volume
    turned = np.cross(arm, one)
    v, t = (along * turned).sum(1) / volume, turned @ other / volume
    hit = np.isfinite(volume) & (u >= 0) & (v >= 0) & (u + v <= 1) & (t >= 0) & (t <= 1)
    return bool(hit.any())
