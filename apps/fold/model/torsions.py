"""Conversions between atoms and angles: torsions of given atoms, and the atoms that frames and torsions make.

Torsions come as (sin, cos), in the order pre-omega, phi, psi, chi1 to chi4.

Shapes: [..] leading dims, N residues; 7 torsions, 8 rigid groups, atom14 and atom37 as in residues.py.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from apps.fold.model import residues
from apps.fold.model.rigid import Frames, frames_from_points, stack


def table(values: np.ndarray, aatype: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of a table by residue type; types beyond X (gap, masked) are looked up as X."""
    rows = torch.from_numpy(values).to(aatype.device, dtype)
    return rows[aatype.clamp(max=residues.UNKNOWN)]


@dataclass(frozen=True)
class Torsions:
    """sin_cos[.., N, 7, 2]; alternative, with those chi turned by pi whose atoms may swap names; mask[.., N, 7]."""

    sin_cos: Tensor
    alternative: Tensor
    mask: Tensor


def torsions_of_atoms(
    aatype: Tensor, positions: Tensor, atom_mask: Tensor, undefined: tuple[float, float] = (0.0, 0.0)
) -> Torsions:
    """Torsion angles of residues (supplement, 1.2.9 and table 2).

    aatype[.., N], positions[.., N, 37, 3], atom_mask[.., N, 37]
    undefined  the (sin, cos) of angles that a residue lacks, or whose atoms are not all there

    The original leaves such angles at what rounding makes of vanishing vectors, mostly 0, unless it was told to put
    (1, 0) there.
    """
    before = torch.nn.functional.pad(positions[..., :-1, :, :], (0, 0, 0, 0, 1, 0))
    before_mask = torch.nn.functional.pad(atom_mask[..., :-1, :], (0, 0, 1, 0))
    n, ca, c, o = (residues.N, residues.CA, residues.C, residues.O)

    def backbone(now: Tensor, past: Tensor, dim: int) -> Tensor:
        pick = [(past, ca), (past, c), (now, n), (now, ca), (past, c), (now, n), (now, ca), (now, c)]
        pick += [(now, n), (now, ca), (now, c), (now, o)]
        atoms = [tensor.select(dim, slot) for tensor, slot in pick]
        return torch.stack(atoms, dim).unflatten(dim, (3, 4))

    atoms_N44 = table(residues.CHI_ATOM37, aatype)
    chi = positions.gather(-2, atoms_N44.flatten(-2)[..., None].expand(*aatype.shape, 16, 3)).unflatten(-2, (4, 4))
    chi_mask = atom_mask.gather(-1, atoms_N44.flatten(-2)).unflatten(-1, (4, 4))
    points = torch.cat([backbone(positions, before, -2), chi], dim=-3)  # [.., N, 7, 4, 3]
    mask = torch.cat([backbone(atom_mask, before_mask, -1), chi_mask], dim=-2).prod(-1)
    has_chi = table(residues.CHI_MASK, aatype, mask.dtype)
    mask = mask * torch.cat([torch.ones_like(has_chi[..., :3]), has_chi], dim=-1)

    first, second, third, fourth = points.unbind(-2)
    local = frames_from_points(second, third, first).inverse_apply(fourth)
    sin_cos = torch.stack([local[..., 2], local[..., 1]], -1)
    sin_cos = sin_cos / torch.sqrt((sin_cos * sin_cos).sum(-1, keepdim=True) + 1e-8)
    signs = torch.tensor([1.0, 1, -1, 1, 1, 1, 1]).to(sin_cos)  # psi was measured to the oxygen, which lies opposite
    sin_cos = sin_cos * signs[:, None]
    placeholder = torch.tensor(undefined).to(sin_cos)
    turn = 1 - 2 * table(residues.CHI_PI_PERIODIC, aatype, sin_cos.dtype)
    turn = torch.cat([torch.ones_like(turn[..., :3]), turn], dim=-1)[..., None]
    defined = mask[..., None] > 0
    return Torsions(torch.where(defined, sin_cos, placeholder), torch.where(defined, sin_cos * turn, placeholder), mask)


def frames_of_torsions(aatype: Tensor, backbone: Frames, sin_cos: Tensor) -> Frames:
    """The eight rigid groups' frames [.., N, 8] in global coordinates (algorithm 24, lines 2 to 10, and 25).

    aatype[.., N]; backbone frames [.., N] in Angstrom; sin_cos[.., N, 7, 2] of unit length
    """
    dtype = sin_cos.dtype
    rest = Frames(table(residues.GROUP_ROTATION, aatype, dtype), table(residues.GROUP_TRANSLATION, aatype, dtype))
    sin, cos = sin_cos.unbind(-1)
    one, zero = torch.ones_like(sin), torch.zeros_like(sin)
    rows = [[one, zero, zero], [zero, cos, -sin], [zero, sin, cos]]
    turn = torch.stack([torch.stack(row, -1) for row in rows], -2)
    moving = Frames(rest.rotation[..., 1:, :, :], rest.translation[..., 1:, :])
    moving = moving.compose(Frames(turn, torch.zeros_like(moving.translation)))
    groups = [Frames(rest.rotation[..., 0, :, :], rest.translation[..., 0, :])]
    for group in range(residues.NUM_TORSIONS):
        frame = Frames(moving.rotation[..., group, :, :], moving.translation[..., group, :])
        groups.append(groups[-1].compose(frame) if group + 1 > residues.CHI1 else frame)
    local = stack(groups, aatype.ndim)
    return Frames(backbone.rotation[..., None, :, :], backbone.translation[..., None, :]).compose(local)


def atoms_of_frames(aatype: Tensor, groups: Frames) -> Tensor:
    """atom14 positions [.., N, 14, 3]: each atom's ideal position in its group (algorithm 24, line 11); 0 where none.

    aatype[.., N]; groups [.., N, 8]
    """
    group = table(residues.ATOM14_GROUP, aatype)
    index = group[..., None, None].expand(*group.shape, 3, 3)
    frames = Frames(groups.rotation.gather(-3, index), groups.translation.gather(-2, index[..., 0]))
    dtype = groups.translation.dtype
    positions = frames.apply(table(residues.ATOM14_POSITION, aatype, dtype))
    return positions * table(residues.ATOM14_MASK, aatype, dtype)[..., None]


def atom37_of_atom14(aatype: Tensor, atom14: Tensor) -> Tensor:
    """[.., N, 14, 3] -> [.., N, 37, 3], 0 where the residue has no such atom."""
    slots = table(residues.ATOM37_TO_ATOM14, aatype)
    mask = table(residues.ATOM37_MASK, aatype, atom14.dtype)
    return atom14.gather(-2, slots[..., None].expand(*slots.shape, 3)) * mask[..., None]


def pseudo_beta(aatype: Tensor, positions: Tensor) -> Tensor:
    """CB of each residue, CA of glycine: positions[.., N, 37, 3] -> [.., N, 3]; a mask [.., N, 37] -> [.., N]."""
    is_glycine = aatype == residues.RESTYPES.index("G")
    if positions.ndim == aatype.ndim + 1:
        return torch.where(is_glycine, positions[..., residues.CA], positions[..., residues.CB])
    return torch.where(is_glycine[..., None], positions[..., residues.CA, :], positions[..., residues.CB, :])


def distance_bins(x: Tensor, first: float, last: float, num_bins: int, at: slice = slice(None)) -> Tensor:
    """One-hot distances of pairs of points x[.., N, 3] -> [.., I, N, num_bins]; nearer than `first`: all 0.

    at: the points whose distances from all are asked for, I of N. Bins begin at num_bins distances from `first` to
    `last`; the last has no end.
    """
    lower = torch.linspace(first, last, num_bins, device=x.device, dtype=x.dtype) ** 2
    upper = torch.cat([lower[1:], lower.new_tensor([1e8])])
    squared = ((x[..., at, None, :] - x[..., None, :, :]) ** 2).sum(-1, keepdim=True)
    return ((squared > lower) & (squared < upper)).to(x.dtype)
