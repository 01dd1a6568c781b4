"""The structure module: from the single and pair representations to atoms (algorithms 20 to 25).

All layers share one set of weights. Geometry is computed in fp32 or wider, whatever the weights' dtype. Inside, lengths
are in units of 10 Angstrom; what comes out is in Angstrom. Between layers no gradient passes through rotations.

Shapes: B batch, N residues, D = c_s, Z = c_z channels, H heads, K head size, P query points, V value points.
"""

import math
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.fold.model.config import StructureConfig
from apps.fold.model.layers import LayerNorm, Linear
from apps.fold.model.rigid import Frames, rotation_from_quaternion, stack, turned_by
from apps.fold.model.torsions import atoms_of_frames, frames_of_torsions
from core.kernels.softmax import softmax


@dataclass(frozen=True)
class Structure:
    """The structure module's results, one entry of the first dim a layer; lengths in Angstrom.

    single_BND         the last layer's activations, for the confidence head
    backbone           frames [layers, B, N]
    groups             frames of the eight rigid groups [layers, B, N, 8]
    torsions           (sin, cos) [layers, B, N, 7, 2] of unit length; unnormalized as the network made them
    atom14             positions [layers, B, N, 14, 3]
    """

    single_BND: Tensor
    backbone: Frames
    groups: Frames
    torsions: Tensor
    unnormalized: Tensor
    atom14: Tensor


@dataclass(frozen=True)
class Keys:
    """Every residue's keys and values for invariant point attention; points in global coordinates."""

    k_BNHK: Tensor
    k_BNHP3: Tensor
    v_BNHK: Tensor
    v_BNHV3: Tensor
    mask_BN: Tensor


class InvariantPointAttention(nn.Module):
    """Attention whose scores are distances between points that residues carry in their frames (algorithm 22).

    score = wL (q k / sqrt(K) + b_ij - gamma wC / 2 sum_p |T_i q_ip - T_j k_jp|^2),   wL = sqrt(1/3),  wC = sqrt(2 / 9P)

    gathers values, points (in the query's frame, with their lengths) and pairs. Turning or moving all frames alike
    changes nothing.
    """

    def __init__(self, pair_dim: int, config: StructureConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.query_points, self.value_points = config.query_points, config.value_points
        H = config.num_heads
        self.build_projections(config)
        self.bias = Linear(pair_dim, H)
        self.point_weight = nn.Parameter(torch.empty(H))
        self.out = Linear(H * (config.head_dim + 4 * config.value_points + pair_dim), config.dim, init="zero")
        self.reset_parameters()

    def build_projections(self, config: StructureConfig) -> None:
        """The linear maps that `scalars` and `points` apply."""
        H = config.num_heads
        self.query = Linear(config.dim, H * config.head_dim)
        self.key_value = Linear(config.dim, 2 * H * config.head_dim)
        self.query_point = Linear(config.dim, 3 * H * config.query_points)
        self.key_value_point = Linear(config.dim, 3 * H * (config.query_points + config.value_points))

    def reset_parameters(self) -> None:
        nn.init.constant_(self.point_weight, math.log(math.e - 1))  # softplus of it is 1

    def forward(self, s_BND: Tensor, z_BNNZ: Tensor, frames: Frames, mask_BN: Tensor) -> Tensor:
        q_BNHK, k_BNHK, v_BNHK = self.scalars(s_BND)
        q_BNHP3, k_BNHP3, v_BNHV3 = self.points(s_BND, frames)
        keys = Keys(k_BNHK, k_BNHP3, v_BNHK, v_BNHV3, mask_BN)
        return self.out(self.gather(q_BNHK, q_BNHP3, frames, mask_BN, z_BNNZ, keys))

    def scalars(self, s_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [B, N, H, K]."""
        heads = (self.num_heads, -1)
        k_BNHK, v_BNHK = self.key_value(s_BND).unflatten(-1, heads).split(self.head_dim, -1)
        return self.query(s_BND).unflatten(-1, heads), k_BNHK, v_BNHK

    def points(self, s_BND: Tensor, frames: Frames) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, N, H, P, 3] and values [B, N, H, V, 3] in global coordinates."""
        q_BNHP3 = self._points(self.query_point(s_BND), frames)
        kv_BNHP3 = self._points(self.key_value_point(s_BND), frames)
        k_BNHP3, v_BNHV3 = kv_BNHP3.split([self.query_points, self.value_points], 3)
        return q_BNHP3, k_BNHP3, v_BNHV3

    def lengths(self, squared: Tensor) -> Tensor:
        """Lengths of points from their squares, with gradients at 0."""
        return torch.sqrt(squared + 1e-8)

    def gather(
        self, q_BIHK: Tensor, q_BIHP3: Tensor, frames_BI: Frames, mask_BI: Tensor, z_BINZ: Tensor, keys: "Keys"
    ) -> Tensor:
        """Gather from all residues for some: [B, I, H (K + 4 V + Z)], before the output's projection."""
        wide = frames_BI.rotation.dtype
        scores_BHIN = torch.einsum("bihk,bjhk->bhij", q_BIHK, keys.k_BNHK).to(wide)
        scores_BHIN = scores_BHIN * math.sqrt(1 / (3 * self.head_dim))
        gamma_H = F.softplus(self.point_weight.to(wide)) * math.sqrt(1 / (3 * 4.5 * self.query_points))
        scores_BHIN = scores_BHIN - 0.5 * gamma_H[:, None, None] * _squared_distances(q_BIHP3, keys.k_BNHP3)
        bias_BHIN = self.bias(z_BINZ).permute(0, 3, 1, 2).to(wide) * math.sqrt(1 / 3)
        mask_BIN = mask_BI[:, :, None] * keys.mask_BN[:, None]
        hidden_B1IN = 1e5 * (mask_BIN.to(wide) - 1)[:, None]
        weights_BHIN = softmax(scores_BHIN, mask=hidden_B1IN, bias=bias_BHIN)

        narrow = weights_BHIN.to(keys.v_BNHK.dtype)
        o_BIHK = torch.einsum("bhij,bjhk->bihk", narrow, keys.v_BNHK)
        point_BIHV3 = torch.einsum("bhij,bjhvx->bihvx", weights_BHIN, keys.v_BNHV3)
        local = per_residue(frames_BI, 2).inverse_apply(point_BIHV3).flatten(2, 3)
        length = self.lengths((local * local).sum(-1))
        pair_BIHZ = torch.einsum("bhij,bijz->bihz", narrow, z_BINZ)
        points = torch.cat([*local.unbind(-1), length], -1).to(o_BIHK.dtype)
        return torch.cat([o_BIHK.flatten(2), points, pair_BIHZ.flatten(2)], -1)

    def _points(self, x_BNX: Tensor, frames: Frames) -> Tensor:
        """Global points [B, N, H, P, 3] of local ones, which come as all x, then all y, then all z."""
        local = x_BNX.to(frames.rotation.dtype).unflatten(-1, (3, self.num_heads, -1)).movedim(2, -1)
        return per_residue(frames, 2).apply(local)


def per_residue(frames: Frames, num_dims: int) -> Frames:
    """Frames [B, N] with dims of one element behind N, for `num_dims` dims of points."""
    rotation, translation = frames.rotation, frames.translation
    for _ in range(num_dims):
        rotation, translation = rotation[:, :, None], translation[:, :, None]
    return Frames(rotation, translation)


def _squared_distances(q_BNHP3: Tensor, k_BNHP3: Tensor) -> Tensor:
    """[B, H, N, N], summed over points; by differences, since points lie far from the origin, near each other."""
    q, k = (x.transpose(1, 2).flatten(3) for x in (q_BNHP3, k_BNHP3))
    return reduce(add, ((q[:, :, :, None, x] - k[:, :, None, :, x]) ** 2 for x in range(q.shape[-1])))


class AngleResnet(nn.Module):
    """Unnormalized torsions [B, N, 7, 2] of the activations and of the initial ones (algorithm 20, lines 11 to 14)."""

    def __init__(self, dim: int, angle_dim: int, num_blocks: int):
        super().__init__()
        self.now = Linear(dim, angle_dim)
        self.initial = Linear(dim, angle_dim)
        self.blocks = nn.ModuleList(AngleBlock(angle_dim) for _ in range(num_blocks))
        self.out = Linear(angle_dim, 14)

    def forward(self, s_BND: Tensor, initial_BND: Tensor) -> Tensor:
        a = self.now(torch.relu(s_BND)) + self.initial(torch.relu(initial_BND))
        for block in self.blocks:
            a = block(a)
        return self.out(torch.relu(a)).unflatten(-1, (7, 2))


class AngleBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.up = Linear(dim, dim, init="relu")
        self.down = Linear(dim, dim, init="zero")

    def forward(self, a: Tensor) -> Tensor:
        return a + self.down(torch.relu(self.up(torch.relu(a))))


class StructureTransition(nn.Module):
    """s + a small network of it (algorithm 20, lines 8 and 9)."""

    def __init__(self, dim: int, num_layers: int):
        super().__init__()
        last = num_layers - 1
        self.layers = nn.ModuleList(Linear(dim, dim, init="zero" if n == last else "relu") for n in range(num_layers))

    def forward(self, s_BND: Tensor) -> Tensor:
        x = s_BND
        for number, layer in enumerate(self.layers):
            x = layer(torch.relu(x) if number else x)
        return s_BND + x


class StructureModule(nn.Module):
    """The loop over layers (algorithm 20)."""

    def __init__(self, single_dim: int, pair_dim: int, config: StructureConfig):
        super().__init__()
        self.num_layers, self.length_scale = config.num_layers, config.length_scale
        self.single_norm = LayerNorm(single_dim)
        self.pair_norm: nn.Module = LayerNorm(pair_dim)
        self.input = Linear(single_dim, config.dim)
        self.attention = InvariantPointAttention(pair_dim, config)
        self.attention_norm = LayerNorm(config.dim)
        self.transition = StructureTransition(config.dim, config.transition_layers)
        self.transition_norm = LayerNorm(config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.backbone = Linear(config.dim, 6, init="zero")
        self.angles = AngleResnet(config.dim, config.angle_dim, config.angle_blocks)

    def forward(self, s_BND: Tensor, z_BNNZ: Tensor, aatype_BN: Tensor, mask_BN: Tensor) -> Structure:
        """s[B, N, c_s], z[B, N, N, c_z], residue types [B, N], mask [B, N] -> atoms and how they came about."""
        initial_BND = self.single_norm(s_BND)
        z_BNNZ = self.pair_norm(z_BNNZ)
        s_BND = self.input(initial_BND)
        wide = torch.promote_types(s_BND.dtype, torch.float32)
        quaternion = F.one_hot(torch.zeros_like(aatype_BN), 4).to(wide)
        frames = Frames(rotation_from_quaternion(quaternion), quaternion.new_zeros(*aatype_BN.shape, 3))
        layers = []
        for _ in range(self.num_layers):
            s_BND = s_BND + self.attention(s_BND, z_BNNZ, frames, mask_BN)
            s_BND = self.attention_norm(self.dropout(s_BND))
            s_BND = self.transition_norm(self.dropout(self.transition(s_BND)))
            turn, shift = self.backbone(s_BND).to(wide).split(3, -1)
            moved = frames.apply(shift)
            quaternion = turned_by(quaternion, turn)
            frames = Frames(rotation_from_quaternion(quaternion), moved)
            layers.append(self._atoms(s_BND, initial_BND, frames, aatype_BN))
            quaternion = quaternion.detach()
            frames = Frames(frames.rotation.detach(), frames.translation)
        backbone, groups, torsions, unnormalized, atom14 = zip(*layers)
        return Structure(
            s_BND,
            stack(list(backbone), 0),
            stack(list(groups), 0),
            torch.stack(torsions),
            torch.stack(unnormalized),
            torch.stack(atom14),
        )

    def _atoms(
        self, s_BND: Tensor, initial_BND: Tensor, frames: Frames, aatype_BN: Tensor
    ) -> tuple[Frames, Frames, Tensor, Tensor, Tensor]:
        unnormalized = self.angles(s_BND, initial_BND).to(frames.rotation.dtype)
        torsions = unnormalized / torch.sqrt((unnormalized**2).sum(-1, keepdim=True).clamp(min=1e-12))
        backbone = frames.scaled(self.length_scale)
        groups = frames_of_torsions(aatype_BN, backbone, torsions)
        return backbone, groups, torsions, unnormalized, atoms_of_frames(aatype_BN, groups)
