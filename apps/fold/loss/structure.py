"""Frame-aligned point error and torsion losses.

Shapes: B batch, N residues, F frames, P points, layers of the structure module in front.
"""

import torch
from torch import Tensor

from apps.fold.loss.truth import Truth
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import Structure

CLAMP = 10.0  # Angstrom
UNIT = 10.0  # Angstrom that count as 1


def fape(
    frames: Frames,
    true_frames: Frames,
    frame_mask: Tensor,
    points: Tensor,
    true_points: Tensor,
    point_mask: Tensor,
    clamp: Tensor | float | None = CLAMP,
) -> Tensor:
    """How far points lie from the true ones, seen from every frame, in units of 10 Angstrom (algorithm 28): [..].

    frames [.., F] and points [.., P, 3] in Angstrom; masks [.., F] and [.., P]
    clamp  the largest error that counts, in Angstrom; None: none
    """

    def local(frames: Frames, x: Tensor) -> Tensor:
        rotation, translation = frames.rotation[..., None, :, :], frames.translation[..., None, :]
        return Frames(rotation, translation).inverse_apply(x[..., None, :, :])

    difference = local(frames, points) - local(true_frames, true_points)
    error = torch.sqrt((difference**2).sum(-1) + 1e-4)
    if clamp is not None:
        error = error.clamp(max=clamp)
    weights = frame_mask[..., :, None] * point_mask[..., None, :]
    return (error * weights).sum((-1, -2)) / UNIT / (1e-4 + frame_mask.sum(-1) * point_mask.sum(-1))


def backbone_fape(structure: Structure, truth: Truth, clamp: float | None = CLAMP) -> Tensor:
    """FAPE of the backbone frames and their origins, the mean over layers (algorithm 20, line 17): [B]."""
    true = Frames(truth.groups.rotation[:, :, 0], truth.groups.translation[:, :, 0])
    mask = truth.group_mask_BNG[:, :, 0]
    backbone = structure.backbone
    return fape(backbone, true, mask, backbone.translation, true.translation, mask, clamp).mean(0)


def side_chain_fape(structure: Structure, truth: Truth) -> Tensor:
    """FAPE of all atoms in all rigid groups of the last layer (line 28): [B].  The truth is `renamed`."""

    def flat(x: Tensor) -> Tensor:
        return x.flatten(1, 2)

    return fape(
        Frames(flat(structure.groups.rotation[-1]), flat(structure.groups.translation[-1])),
        truth.groups.map(flat),
        flat(truth.group_mask_BNG),
        flat(structure.atom14[-1]),
        flat(truth.atom14_BNA3),
        flat(truth.atom14_mask_BNA),
    )


def chi_loss(structure: Structure, truth: Truth) -> Tensor:
    """Squared chord between predicted and true chi, the nearer of both where they are symmetric (algorithm 27): [B]."""
    predicted = structure.torsions[..., 3:, :]
    errors = [((predicted - x[..., 3:, :]) ** 2).sum(-1) for x in (truth.torsions_BNT2, truth.alternative_BNT2)]
    mask = truth.torsion_mask_BNT[..., 3:]
    layers = len(predicted)
    total = (torch.minimum(*errors) * mask).sum((0, -1, -2))
    return total / (1e-10 + layers * mask.sum((-1, -2)))


def angle_norm_loss(structure: Structure, mask_BN: Tensor) -> Tensor:
    """How far the unnormalized torsions are from unit length (algorithm 27, line 5): [B]."""
    error = (torch.sqrt((structure.unnormalized**2).sum(-1) + 1e-6) - 1).abs().mean(-1)
    return (error * mask_BN).sum((0, -1)) / (1e-10 + len(error) * mask_BN.sum(-1))
