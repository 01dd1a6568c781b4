"""Frame-aligned point error and torsion losses.

Shapes: B batch, N residues, F frames, P points, layers of the structure module in front.
"""

import torch
from torch import Tensor

from apps.fold.loss.truth import Truth
from apps.fold.model.rigid import Frames, matmul3, rotate
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
    """The distance of points from the true ones, seen from every frame, in units of 10 Angstrom (algorithm 28): [..].

    frames [.., F] and points [.., P, 3] in Angstrom; masks [.., F] and [.., P]; frames hold rotations
    clamp  the largest error that counts, in Angstrom; None: none
    """
    error = frame_aligned_errors(frames, true_frames, points, true_points)
    return _mean_error(error, frame_mask, point_mask, clamp)


def frame_aligned_errors(frames: Frames, true_frames: Frames, points: Tensor, true_points: Tensor) -> Tensor:
    """|T^-1 x - T'^-1 x'| for all frames and points, [.., F, P] in Angstrom.

    A rotation keeps lengths, so it is |x - Q x' - (t - Q t')| with one rotation Q = R R'^T a frame: a few sums over
    F x P, component by component.
    """
    turn = matmul3(frames.rotation, true_frames.rotation.transpose(-1, -2))
    shift = frames.translation - rotate(turn, true_frames.translation)
    squared = None
    for axis in range(3):
        part = points[..., None, :, axis] - shift[..., :, None, axis]
        for other in range(3):
            part = torch.addcmul(part, turn[..., :, None, axis, other], true_points[..., None, :, other], value=-1)
        squared = part * part if squared is None else torch.addcmul(squared, part, part)
    assert squared is not None
    return torch.sqrt(squared + 1e-4)


def _mean_error(error: Tensor, frame_mask: Tensor, point_mask: Tensor, clamp: Tensor | float | None) -> Tensor:
    if clamp is not None:
        error = error.clamp(max=clamp)
    weights = frame_mask[..., :, None] * point_mask[..., None, :]
    return (error * weights).sum((-1, -2)) / UNIT / (1e-4 + frame_mask.sum(-1) * point_mask.sum(-1))


def backbone_fape(structure: Structure, truth: Truth, unclamped: float = 0.0) -> Tensor:
    """FAPE of the backbone frames and their origins, the mean over layers (algorithm 20, line 17): [B].

    unclamped  the share of the error that is taken without the limit of 10 Angstrom
    """
    true = Frames(truth.groups.rotation[:, :, 0], truth.groups.translation[:, :, 0])
    mask = truth.group_mask_BNG[:, :, 0]
    backbone = structure.backbone
    error = frame_aligned_errors(backbone, true, backbone.translation, true.translation)
    limited = _mean_error(error, mask, mask, CLAMP).mean(0)
    return limited if not unclamped else limited.lerp(_mean_error(error, mask, mask, None).mean(0), unclamped)


def side_chain_fape(structure: Structure, truth: Truth) -> Tensor:
    """FAPE of all atoms in all rigid groups of the last layer (line 28): [B].  The truth is `renamed`.

    About half of the groups and of the atoms are there; the others are left out before anything is computed.
    """
    frame_mask, point_mask = truth.group_mask_BNG.flatten(1), truth.atom14_mask_BNA.flatten(1)
    groups, points = _present(frame_mask), _present(point_mask)

    def frames(given: Frames) -> Frames:
        return given.map(lambda x: _taken(x.flatten(1, 2), groups))

    return fape(
        frames(structure.groups.map(lambda x: x[-1])),
        frames(truth.groups),
        _taken(frame_mask, groups),
        _taken(structure.atom14[-1].flatten(1, 2), points),
        _taken(truth.atom14_BNA3.flatten(1, 2), points),
        _taken(point_mask, points),
    )


def _present(mask_BX: Tensor) -> Tensor:
    """Places [B, Y] of what is there, Y the most of any row (rows with less take what is not there, too)."""
    count = int((mask_BX > 0).sum(-1).max().clamp(min=1))
    return mask_BX.argsort(dim=-1, descending=True, stable=True)[:, :count]


def _taken(x: Tensor, places_BY: Tensor) -> Tensor:
    """x[B, X, ..] at the places: [B, Y, ..]."""
    index = places_BY.reshape(*places_BY.shape, *[1] * (x.ndim - 2))
    return x.gather(1, index.expand(*places_BY.shape, *x.shape[2:]))


def chi_loss(structure: Structure, truth: Truth) -> Tensor:
    """Squared chord between predicted and true chi, the nearer of both where they are symmetric (algorithm 27): [B]."""
    predicted = structure.torsions[..., 3:, :]
    errors = [((predicted - x[..., 3:, :]) ** 2).sum(-1) for x in (truth.torsions_BNT2, truth.alternative_BNT2)]
    mask = truth.torsion_mask_BNT[..., 3:]
    layers = len(predicted)
    total = (torch.minimum(*errors) * mask).sum((0, -1, -2))
    return total / (1e-10 + layers * mask.sum((-1, -2)))


def angle_norm_loss(structure: Structure, mask_BN: Tensor) -> Tensor:
    """The distance of unnormalized torsions from unit length (algorithm 27, line 5): [B]."""
    error = (torch.sqrt((structure.unnormalized**2).sum(-1) + 1e-6) - 1).abs().mean(-1)
    return (error * mask_BN).sum((0, -1)) / (1e-10 + len(error) * mask_BN.sum(-1))
