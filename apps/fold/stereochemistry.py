"""Which residues violate stereochemistry, and by what: the counts that AlphaFold's relaxation goes by.

Bonds between residues and their angles are as in the loss (`apps.fold.loss.violation`, supplement 1.9.11), beyond 12
standard deviations; atoms overlap that are nearer than their radii and not bonded, by more than 1.5 Angstrom. Atoms of
one residue that are one or two bonds apart have their ideal distances, beyond 12 deviations of 0.02 and 0.04 Angstrom,
which stand here for those of the original's table of each bond and angle. Pairs of different chains are all looked at;
the original leaves out those at equal numbers.

Shapes: N residues, A = 14 atoms, M = N A atoms one behind the other, K pairs, J angles.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.loss.violation import BOND, BOND_DEVIATION, C_N_CA, CA_C_N, OVERLAP, TOLERANCE, atom_tables
from apps.fold.model import residues

_WITHIN_BOND, _WITHIN_ANGLE = 0.02, 0.04  # deviations of distances within a residue, in Angstrom
_A = residues.NUM_ATOM14
_N, _CA, _C, _SG = 0, 1, 2, 5  # slots of atom14
_ROWS, _PAIRS = 512, 4096  # residues that are compared with all others at a time, and pairs whose atoms are


@dataclass(frozen=True)
class Bounds:
    """pairs[2, K] of atoms, and of each its ideal distance and the deviation, in Angstrom, float64[K]."""

    pairs: Tensor
    ideal: Tensor
    deviation: Tensor


@dataclass(frozen=True)
class Clashes:
    """pairs[2, K] of atoms that must not be nearer than nearest[K], in Angstrom."""

    pairs: Tensor
    nearest: Tensor


class Stereochemistry:
    """What the atoms of chains have to obey.

    aatype_N   residue types
    exists_NA  which atoms there are
    follows_N  whether a residue is bonded to the one before it
    """

    def __init__(self, aatype_N: np.ndarray, exists_NA: np.ndarray, follows_N: np.ndarray):
        self.aatype_N, self.exists_NA, self.follows_N = aatype_N, exists_NA.astype(bool), follows_N
        self.radius_NA = atom_tables().radius[aatype_N]
        self.bounds = self._bounds()
        self.angles_J3, self.cosines_J, self.spread_J = self._angles()
        self._far = self._within(atom_tables().far)

    def violating(self, atoms_NA3: Tensor) -> np.ndarray:
        """bool[N]: residues with an atom of a violation."""
        flat = atoms_NA3.reshape(-1, 3)
        found = torch.zeros(len(flat), dtype=torch.bool)
        wrong = (distances(flat, self.bounds.pairs) - self.bounds.ideal).abs() > TOLERANCE * self.bounds.deviation
        found[self.bounds.pairs[:, wrong].flatten()] = True
        wrong = (cosines(flat, self.angles_J3) - self.cosines_J).abs() > TOLERANCE * self.spread_J
        found[self.angles_J3[wrong].flatten()] = True
        clashes = self.clashes(atoms_NA3, 0.0)
        found[clashes.pairs.flatten()] = True
        return found.view(-1, _A).any(1).numpy()

    def clashes(self, atoms_NA3: Tensor, margin: float) -> Clashes:
        """Pairs that are nearer than they may be, or by at most `margin` further."""
        found = list(self.clashes_in_parts(atoms_NA3, margin))
        return Clashes(torch.cat([part.pairs for part in found], 1), torch.cat([part.nearest for part in found]))

    def clashes_in_parts(self, atoms_NA3: Tensor, margin: float) -> Iterator[Clashes]:
        """The same, some at a time: where all atoms lie in one place, there are as many as pairs of atoms."""
        radius, flat_M3 = torch.from_numpy(self.radius_NA.reshape(-1)).double(), atoms_NA3.detach().reshape(-1, 3)
        for part in itertools.chain([self._far], self._between(atoms_NA3.detach().numpy(), margin)):
            pairs = torch.from_numpy(part)
            nearest = radius[pairs[0]] + radius[pairs[1]] - OVERLAP
            near = distances(flat_M3, pairs) < nearest + margin
            yield Clashes(pairs[:, near], nearest[near])

    def _between(self, atoms_NA3: np.ndarray, margin: float) -> Iterator[np.ndarray]:
        """Pairs of atoms of residues whose spheres touch: first by residues, then by their atoms."""
        weight = self.exists_NA[..., None]
        centre = (atoms_NA3 * weight).sum(1) / np.maximum(weight.sum(1), 1)
        reach = (np.linalg.norm(atoms_NA3 - centre[:, None], axis=-1) * self.exists_NA).max(1)
        widest = 2 * float(self.radius_NA.max()) - OVERLAP + margin
        squared = (centre**2).sum(1)
        for start in range(0, len(centre), _ROWS):
            rows = slice(start, start + _ROWS)
            apart = squared[rows, None] + squared - 2 * centre[rows] @ centre.T
            touch = apart < (reach[rows, None] + reach + widest) ** 2 + 1e-6
            i, j = np.nonzero(touch)
            i = i + start
            i, j = i[i < j], j[i < j]
            for part in range(0, len(i), _PAIRS):
                yield self._of_residues(atoms_NA3, i[part : part + _PAIRS], j[part : part + _PAIRS], widest)

    def _of_residues(self, atoms_NA3: np.ndarray, i: np.ndarray, j: np.ndarray, widest: float) -> np.ndarray:
        cysteine = self.aatype_N == residues.RESTYPES.index("C")
        apart = np.linalg.norm(atoms_NA3[i][:, :, None] - atoms_NA3[j][:, None], axis=-1)
        pairs = (apart < widest) & self.exists_NA[i][:, :, None] & self.exists_NA[j][:, None]
        pairs[:, _C, _N] &= ~((j == i + 1) & self.follows_N[j])
        pairs[:, _SG, _SG] &= ~(cysteine[i] & cysteine[j])
        pair, first, second = np.nonzero(pairs)
        return np.stack([i[pair] * _A + first, j[pair] * _A + second])

    def _within(self, table: np.ndarray) -> np.ndarray:
        """[2, K]: a table's pairs within residues, each once."""
        there = np.triu(table[self.aatype_N]) * self.exists_NA[:, :, None] * self.exists_NA[:, None]
        row, first, second = np.nonzero(there)
        return np.stack([row * _A + first, row * _A + second])

    def _bounds(self) -> Bounds:
        tables = atom_tables()
        pairs, ideal, deviation = [], [], []
        for table, spread in ((tables.bonded, _WITHIN_BOND), (tables.angles, _WITHIN_ANGLE)):
            found = self._within(table)
            pairs.append(found)
            ideal.append(tables.ideal[self.aatype_N[found[0] // _A], found[0] % _A, found[1] % _A])
            deviation.append(np.full(found.shape[1], spread))
        later = self._peptides((_C,), (_N,))
        proline = (self.aatype_N[later] == residues.RESTYPES.index("P")).astype(int)
        pairs.append(np.stack([(later - 1) * _A + _C, later * _A + _N]))
        ideal.append(np.array(BOND)[proline])
        deviation.append(np.array(BOND_DEVIATION)[proline])
        whole = (np.concatenate(ideal), np.concatenate(deviation))
        return Bounds(torch.from_numpy(np.concatenate(pairs, 1)), *(torch.from_numpy(x).double() for x in whole))

    def _angles(self) -> tuple[Tensor, Tensor, Tensor]:
        """CA-C-N and C-N-CA: atoms [J, 3], cosines as the loss has them, and their deviations."""
        first, second = self._peptides((_CA, _C), (_N,)), self._peptides((_C,), (_N, _CA))
        atoms = [np.stack([(first - 1) * _A + _CA, (first - 1) * _A + _C, first * _A + _N], 1)]
        atoms.append(np.stack([(second - 1) * _A + _C, second * _A + _N, second * _A + _CA], 1))
        values = np.concatenate([np.tile(CA_C_N, (len(first), 1)), np.tile(C_N_CA, (len(second), 1))])
        cosine, spread = torch.from_numpy(values).double().unbind(1)
        return torch.from_numpy(np.concatenate(atoms)), cosine, spread

    def _peptides(self, before: tuple[int, ...], after: tuple[int, ...]) -> np.ndarray:
        """Residues bonded to the one before them, where both have these slots."""
        later = np.nonzero(self.follows_N)[0]
        known = self.exists_NA[later - 1][:, before].all(1) & self.exists_NA[later][:, after].all(1)
        return later[known]


def distances(flat_M3: Tensor, pairs_2K: Tensor) -> Tensor:
    """[K] in Angstrom."""
    return torch.sqrt(((flat_M3[pairs_2K[0]] - flat_M3[pairs_2K[1]]) ** 2).sum(-1) + 1e-12)


def cosines(flat_M3: Tensor, angles_J3: Tensor) -> Tensor:
    """Cosines of the angles at the middle atoms, [J]."""
    first, middle, last = (flat_M3[angles_J3[:, n]] for n in range(3))
    one, other = (first - middle, last - middle)
    return (one * other).sum(-1) / torch.sqrt((one**2).sum(-1) * (other**2).sum(-1) + 1e-12)
