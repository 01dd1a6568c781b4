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
INTERFACE_UNIT = 20.0  # of frames and points of two chains
CENTRE_SLACK, CENTRE_UNIT = 4.0, 20.0  # Angstrom that chains may be too near, and that count as 1


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
    return _mean_error(error, frame_mask[..., :, None] * point_mask[..., None, :], clamp)


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


def _mean_error(error: Tensor, weights: Tensor, clamp: Tensor | float | None, unit: float = UNIT) -> Tensor:
    """The weighted mean over frames and points, [..]; error [.., F, P]."""
    if clamp is not None:
        error = error.clamp(max=clamp)
    return (error * weights).sum((-1, -2)) / unit / (1e-4 + weights.sum((-1, -2)))


def backbone_fape(structure: Structure, truth: Truth, unclamped: float = 0.0) -> Tensor:
    """FAPE of the backbone frames and their origins, the mean over layers (algorithm 20, line 17): [B].

    unclamped  the share of the error that is taken without the limit of 10 Angstrom
    """
    error, pairs = _backbone_errors(structure, truth)
    return _partly_limited(error, pairs, unclamped)


def complex_fape(
    structure: Structure, truth: Truth, asym_BN: Tensor, unclamped: float = 0.0, interface_clamp: float | None = None
) -> tuple[Tensor, Tensor]:
    """FAPE of the backbone within chains, as `backbone_fape`, and between them, in units of 20 Angstrom: [B] each.

    (Evans et al. 2021, section 7.4.) Between chains the limit is another; None: there is none.
    """
    error, pairs = _backbone_errors(structure, truth)
    within = (asym_BN[:, :, None] == asym_BN[:, None]).to(pairs)
    between = _mean_error(error, pairs * (1 - within), interface_clamp, INTERFACE_UNIT).mean(0)
    return _partly_limited(error, pairs * within, unclamped), between


def _backbone_errors(structure: Structure, truth: Truth) -> tuple[Tensor, Tensor]:
    """The errors [layers, B, N, N] of the backbone, and which of them are known, [B, N, N]."""
    true = Frames(truth.groups.rotation[:, :, 0], truth.groups.translation[:, :, 0])
    mask = truth.group_mask_BNG[:, :, 0]
    backbone = structure.backbone
    error = frame_aligned_errors(backbone, true, backbone.translation, true.translation)
    return error, mask[:, :, None] * mask[:, None]


def _partly_limited(error: Tensor, pairs: Tensor, unclamped: float) -> Tensor:
    limited = _mean_error(error, pairs, CLAMP).mean(0)
    return limited if not unclamped else limited.lerp(_mean_error(error, pairs, None).mean(0), unclamped)


def centre_loss(alpha_BN3: Tensor, true_BN3: Tensor, seen_BN: Tensor, asym_BN: Tensor) -> Tensor:
    """How much nearer chains are than they should be, so that they do not overlap: [B] (Evans et al. 2021, 7.4).

    The mean over pairs of chains of (max(0, true - predicted - 4 Angstrom) / 20 Angstrom)^2, distances between the
    centres of the CA that were seen. asym_BN counts chains from 1, 0 for padding.
    """
    chains = torch.arange(1, int(asym_BN.max()) + 1, device=asym_BN.device)
    member_BCN = (asym_BN[:, None] == chains[:, None]).to(alpha_BN3) * seen_BN[:, None]
    count_BC = member_BCN.sum(-1)

    def distances(x_BN3: Tensor) -> Tensor:
        centre_BC3 = (member_BCN @ x_BN3) / (1e-6 + count_BC)[..., None]
        return torch.sqrt(((centre_BC3[:, :, None] - centre_BC3[:, None]) ** 2).sum(-1) + 1e-8)

    there_BC = (count_BC > 0).to(alpha_BN3)
    pairs_BCC = there_BC[:, :, None] * there_BC[:, None] * (1 - torch.eye(len(chains)).to(alpha_BN3))
    near_BCC = torch.relu(distances(true_BN3) - distances(alpha_BN3) - CENTRE_SLACK) / CENTRE_UNIT
    return (near_BCC**2 * pairs_BCC).sum((-1, -2)) / (1e-6 + pairs_BCC.sum((-1, -2)))


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
