"""Experimental structures as targets: atoms, rigid groups' frames, torsions, and which atoms swap names.

Shapes: B batch, N residues, A = 14 atoms, G = 8 rigid groups.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.model.rigid import Frames, frames_from_points
from apps.fold.model.torsions import table, torsions_of_atoms


@dataclass(frozen=True)
class Truth:
    """A known structure; masks are 1 where it is known.

    atom14_BNA3, atom14_mask_BNA       atoms, Angstrom
    groups, group_mask_BNG             frames of the rigid groups [B, N, 8]; group 0 is the backbone
    torsions_BNT2, alternative_BNT2    (sin, cos) of 7 torsions, and with symmetric chi turned by pi; torsion_mask_BNT
    atom37_BN373, atom37_mask_BN37     the same atoms in the other layout
    """

    aatype_BN: Tensor
    atom14_BNA3: Tensor
    atom14_mask_BNA: Tensor
    groups: Frames
    group_mask_BNG: Tensor
    torsions_BNT2: Tensor
    alternative_BNT2: Tensor
    torsion_mask_BNT: Tensor
    atom37_BN373: Tensor
    atom37_mask_BN37: Tensor


def truth_of_atoms(aatype_BN: Tensor, atom37_BN373: Tensor, atom37_mask_BN37: Tensor) -> Truth:
    """Targets of experimental atoms."""
    slots = table(residues.ATOM14_TO_ATOM37, aatype_BN)
    exists = table(residues.ATOM14_MASK, aatype_BN, atom37_mask_BN37.dtype)
    mask_BNA = atom37_mask_BN37.gather(-1, slots) * exists
    atoms_BNA3 = atom37_BN373.gather(-2, slots[..., None].expand(*slots.shape, 3)) * mask_BNA[..., None]
    torsions = torsions_of_atoms(aatype_BN, atom37_BN373, atom37_mask_BN37)
    groups, group_mask = frames_of_atoms(aatype_BN, atom37_BN373, atom37_mask_BN37)
    return Truth(
        aatype_BN,
        atoms_BNA3,
        mask_BNA,
        groups,
        group_mask,
        torsions.sin_cos,
        torsions.alternative,
        torsions.mask,
        atom37_BN373,
        atom37_mask_BN37,
    )


def _base_atoms() -> tuple[np.ndarray, np.ndarray]:
    """The three atom37 slots that span each group's frame [21, 8, 3], and which groups have one [21, 8]."""
    slots = np.zeros((21, residues.NUM_GROUPS, 3), np.int64)
    exists = np.zeros((21, residues.NUM_GROUPS), np.float32)
    slots[:, residues.BACKBONE] = (residues.C, residues.CA, residues.N)
    slots[:, residues.PSI] = (residues.CA, residues.C, residues.O)
    slots[:, residues.CHI1 :] = residues.CHI_ATOM37[..., 1:]
    exists[:20, [residues.BACKBONE, residues.PSI]] = 1
    exists[:, residues.CHI1 :] = residues.CHI_MASK
    return slots, exists


_BASE_ATOMS, _HAS_FRAME = _base_atoms()


def frames_of_atoms(aatype_BN: Tensor, atom37: Tensor, mask: Tensor) -> tuple[Frames, Tensor]:
    """Frames [B, N, 8] of the rigid groups, spanned by three atoms each (supplement, 1.8.1), and their mask."""
    slots = table(_BASE_ATOMS, aatype_BN)
    flat = slots.flatten(-2)
    points = atom37.gather(-2, flat[..., None].expand(*flat.shape, 3)).unflatten(-2, (-1, 3))
    known = mask.gather(-1, flat).unflatten(-1, (-1, 3)).prod(-1) * table(_HAS_FRAME, aatype_BN, mask.dtype)
    frames = frames_from_points(*points.unbind(-2))
    turn = torch.ones(residues.NUM_GROUPS, 3).to(atom37)
    turn[residues.BACKBONE] = torch.tensor([-1.0, 1, -1])  # x of the backbone points to C, not away from it
    return Frames(frames.rotation * turn[:, None, :], frames.translation), known


def _swapped_slots() -> tuple[np.ndarray, np.ndarray]:
    """Each residue type's atom14 slots that its slots swap with (themselves mostly), and which ones swap."""
    partner = np.tile(np.arange(residues.NUM_ATOM14), (21, 1))
    for name, pairs in residues.SWAPS.items():
        letter = residues.ONE_LETTER[name]
        atoms = residues.atoms_of(letter)
        for first, second in pairs:
            i, j = atoms.index(first), atoms.index(second)
            partner[residues.RESTYPES.index(letter), [i, j]] = (j, i)
    return partner, (partner != np.arange(residues.NUM_ATOM14)).astype(np.float32)


_PARTNER, _AMBIGUOUS = _swapped_slots()


def renamed(truth: Truth, predicted_BNA3: Tensor) -> Truth:
    """The truth with those symmetric side chains renamed that then suit the prediction better (algorithm 26).

    Better: distances to all atoms that are not ambiguous differ less. Frames of symmetric groups turn by pi about x.
    Both names suit alike where a prediction is denser than the truth, as early in training, and all distances are too
    short: then the names stay, whichever way the sums round.
    """
    aatype = truth.aatype_BN
    partner = table(_PARTNER, aatype)
    ambiguous = table(_AMBIGUOUS, aatype, truth.atom14_mask_BNA.dtype)
    swapped = truth.atom14_BNA3.gather(-2, partner[..., None].expand(*partner.shape, 3))
    swapped_mask = truth.atom14_mask_BNA.gather(-1, partner)
    mask = truth.atom14_mask_BNA
    fixed_mask = (mask * (1 - ambiguous)).flatten(1)
    fixed_true, fixed_predicted = truth.atom14_BNA3.flatten(1, 2), predicted_BNA3.detach().flatten(1, 2)
    row, place = torch.nonzero(ambiguous.any(-1), as_tuple=True)
    weights_KA1 = (mask * ambiguous)[row, place][..., None]

    def distances(x_BNA3: Tensor, fixed: Tensor) -> Tensor:
        return torch.cdist(x_BNA3[row, place], fixed[row])

    here = distances(predicted_BNA3.detach(), fixed_predicted)
    errors_K2 = torch.stack(
        [
            ((here - distances(x, fixed_true)).abs() * weights_KA1 * fixed_mask[row, None]).sum((-1, -2))
            for x in (truth.atom14_BNA3, swapped)
        ],
        -1,
    )
    better = torch.zeros_like(aatype, dtype=torch.bool)
    better[row, place] = errors_K2[:, 1] < (1 - torch.finfo(errors_K2.dtype).eps ** 0.5) * errors_K2[:, 0]
    periodic = table(residues.CHI_PI_PERIODIC, aatype, swapped.dtype)
    sign = 1 - 2 * torch.nn.functional.pad(periodic, (residues.CHI1, 0)) * better[..., None]
    turn = torch.stack([torch.ones_like(sign), sign, sign], -1)
    return Truth(
        aatype,
        torch.where(better[..., None, None], swapped, truth.atom14_BNA3),
        torch.where(better[..., None], swapped_mask, mask),
        Frames(truth.groups.rotation * turn[..., None, :], truth.groups.translation),
        truth.group_mask_BNG,
        truth.torsions_BNT2,
        truth.alternative_BNT2,
        truth.torsion_mask_BNT,
        truth.atom37_BN373,
        truth.atom37_mask_BN37,
    )
