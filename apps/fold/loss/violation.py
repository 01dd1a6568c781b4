"""A structure's violations of stereochemistry: peptide bonds, their angles, clashes (supplement, 1.9.11, eq. 44 to 47).

Within a residue bonds and angles are ideal by construction, since atoms come in rigid groups; so only pairs of atoms
that are further than two bonds apart are checked there, against the sum of their radii.

Shapes: B batch, N residues, A = 14 atoms.
"""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.model.rigid import Frames
from apps.fold.model.torsions import atoms_of_frames, frames_of_torsions, table

TOLERANCE = 12.0  # standard deviations of bonds and angles that are free
OVERLAP = 1.5  # Angstrom that radii may overlap

_RADII = {"C": 1.7, "N": 1.55, "O": 1.52, "S": 1.8}
# Length of the peptide bond in Angstrom and its deviation, before proline and before others; cosines of its angles.
BOND, BOND_DEVIATION = (1.329, 1.341), (0.014, 0.016)
CA_C_N, C_N_CA = (-0.4473, 0.0311), (-0.5203, 0.0353)
_BEYOND_A_CHAIN = 2**20  # more residues than a chain has
_LONGEST_BOND = 2.0  # between heavy atoms; atoms two bonds apart are further from each other
# Of proline (Engh and Huber 1991): N-CD is 1.474; the others follow from CA-N-CD, 111.7, and N-CD-CG, 103.2 degrees.
_PROLINE_RING = (("N", "CD", 1.474), ("CA", "CD", 2.434), ("N", "CG", 2.333))


def violation_loss(atom14_BNA3: Tensor, aatype_BN: Tensor, index_BN: Tensor, asym_BN: Tensor | None = None) -> Tensor:
    """The sum of all terms, [B]: positions in Angstrom, residue types, positions in the chain, the chain of a complex.

    No bond joins residues of two chains, all of whose atoms may clash.
    """
    if asym_BN is not None:
        index_BN = index_BN + asym_BN * _BEYOND_A_CHAIN  # neither equal nor neighbours
    exists_BNA = table(residues.ATOM14_MASK, aatype_BN, atom14_BNA3.dtype)
    peptide = peptide_violations(atom14_BNA3, exists_BNA, aatype_BN, index_BN)
    clashes = clashes_between(atom14_BNA3, exists_BNA, aatype_BN, index_BN)
    inside = clashes_within(atom14_BNA3, exists_BNA, aatype_BN)
    return peptide + 2 * (clashes + inside) / (1e-6 + exists_BNA.sum((-1, -2)))


def peptide_violations(atoms: Tensor, exists: Tensor, aatype: Tensor, index: Tensor) -> Tensor:
    """Length of C-N and the angles CA-C-N and C-N-CA of neighbours in the chain, beyond the tolerance: [B]."""
    ca, c, n_next, ca_next = atoms[:, :-1, 1], atoms[:, :-1, 2], atoms[:, 1:, 0], atoms[:, 1:, 1]
    neighbours = (index[:, 1:] - index[:, :-1] == 1).to(atoms.dtype)
    there = exists[:, :-1, 1] * exists[:, :-1, 2] * exists[:, 1:, 0] * exists[:, 1:, 1] * neighbours
    proline = (aatype[:, 1:] == residues.RESTYPES.index("P")).long()
    length, deviation = (torch.tensor(pair).to(atoms)[proline] for pair in (BOND, BOND_DEVIATION))
    bond = _length(n_next - c)
    to_ca, to_n = (ca - c) / _length(ca - c)[..., None], (n_next - c) / bond[..., None]
    to_next = (ca_next - n_next) / _length(ca_next - n_next)[..., None]
    terms = (
        (bond, length, deviation),
        ((to_ca * to_n).sum(-1), *CA_C_N),
        ((-to_n * to_next).sum(-1), *C_N_CA),
    )
    total = torch.zeros_like(there[:, 0]) if there.shape[1] else atoms.new_zeros(len(atoms))
    for value, ideal, spread in terms:
        error = torch.sqrt((value - ideal) ** 2 + 1e-6)
        total = total + (torch.relu(error - TOLERANCE * spread) * there).sum(-1) / (1e-6 + there.sum(-1))
    return total


def clashes_between(atoms: Tensor, exists: Tensor, aatype: Tensor, index: Tensor) -> Tensor:
    """The sum over pairs of atoms of different residues of how much too near they are, in Angstrom: [B].

    Not for the peptide bond, nor for two sulfurs of cysteines.
    """
    earlier = index[:, :, None] < index[:, None]
    pairs = exists[:, :, None, :, None] * exists[:, None, :, None, :] * earlier[..., None, None]
    next_one = (index[:, :, None] + 1 == index[:, None])[..., None, None]
    slot = torch.arange(residues.NUM_ATOM14, device=atoms.device)
    bond = (slot == 2)[:, None] & (slot == 0)
    is_cysteine = aatype == residues.RESTYPES.index("C")
    sulfurs = is_cysteine[:, :, None] & is_cysteine[:, None]
    bridge = (slot == 5)[:, None] & (slot == 5)
    pairs = pairs * ~(next_one & bond) * ~(sulfurs[..., None, None] & bridge)
    radius = table(atom_tables().radius, aatype, atoms.dtype)
    nearest = radius[:, :, None, :, None] + radius[:, None, :, None, :] - OVERLAP
    distance = _length(atoms[:, :, None, :, None] - atoms[:, None, :, None, :], 1e-10)
    return (pairs * torch.relu(nearest - distance)).sum((1, 2, 3, 4))


def clashes_within(atoms: Tensor, exists: Tensor, aatype: Tensor) -> Tensor:
    """The same of atoms of one residue more than two bonds apart, each pair twice as the original counts: [B]."""
    tables = atom_tables()
    radius, pairs = table(tables.radius, aatype, atoms.dtype), table(tables.far, aatype, atoms.dtype)
    pairs = pairs * exists[..., :, None] * exists[..., None, :]
    nearest = radius[..., :, None] + radius[..., None, :] - OVERLAP
    distance = _length(atoms[..., :, None, :] - atoms[..., None, :, :], 1e-10)
    return (pairs * torch.relu(nearest - distance)).sum((1, 2, 3))


def _length(x: Tensor, eps: float = 1e-6) -> Tensor:
    return torch.sqrt((x * x).sum(-1) + eps)


class AtomTables(NamedTuple):
    """Of each residue type's atom14 slots, in Angstrom.

    radius[21, 14]; of pairs [21, 14, 14], 1 or 0: bonded, angles (two bonds apart) and far (more than two); their ideal
    distances, of bonded and angles
    """

    radius: np.ndarray
    far: np.ndarray
    bonded: np.ndarray
    angles: np.ndarray
    ideal: np.ndarray


@cache
def atom_tables() -> AtomTables:
    aatype = torch.arange(21)
    angles = torch.tensor([0.0, -1.0]).expand(21, 7, 2)  # all trans: no two atoms near each other that are not bonded
    frames = frames_of_torsions(aatype, Frames(torch.eye(3).expand(21, 3, 3), torch.zeros(21, 3)), angles)
    atoms, mask = atoms_of_frames(aatype, frames), torch.from_numpy(residues.ATOM14_MASK)
    ideal = torch.cdist(atoms, atoms)
    others = mask[:, :, None] * mask[:, None] * (1 - torch.eye(residues.NUM_ATOM14))
    bonds = (ideal < _LONGEST_BOND) * others
    proline, slots = residues.RESTYPES.index("P"), residues.atoms_of("P").index
    for first, second, distance in _PROLINE_RING:  # it closes on N only with its own torsions
        one, other = slots(first), slots(second)
        ideal[proline, one, other] = ideal[proline, other, one] = distance
        bonds[proline, one, other] = bonds[proline, other, one] = float(distance < _LONGEST_BOND)
    near = ((bonds + bonds @ bonds) > 0) * others
    radii = torch.zeros(21, residues.NUM_ATOM14)
    for restype, letter in enumerate(residues.RESTYPES):
        for slot, name in enumerate(residues.atoms_of(letter)):
            radii[restype, slot] = _RADII[name[0]]
    found = (radii, others * (1 - near), bonds, near * (1 - bonds), ideal)
    return AtomTables(*(table.numpy() for table in found))
