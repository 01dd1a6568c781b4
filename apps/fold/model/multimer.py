"""AlphaFold-Multimer, versions 1 to 3 (Evans et al. 2021, bioRxiv 2021.10.04.463034), as it differs from AlphaFold.

    relative positions    within a chain; beside them whether two chains have one sequence, and which copies they are
    blocks                the outer product mean first
    templates             each chain's own pairs only; each template's stack begins with what z is, and their mean is
                          added; rows of the MSA know the four chi angles
    structure             points by heads, without biases of scalars; a unit is 20 Angstrom
    recycling             ends when distances of CA have settled (`FoldingModel.settled`)

The MSA is drawn anew in each iteration, as of monomers (features/sampling.py).

Shapes: B batch, N residues, I some of them, T templates, Z = c_z, C = c_t channels, H heads, K head size, P points.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.fold.model import config as widths
from apps.fold.model import residues
from apps.fold.model.alphafold import AlphaFold
from apps.fold.model.config import MultimerConfig, StructureConfig, TemplateConfig
from apps.fold.model.embedders import InputEmbedder, TemplateTorsionEmbedder
from apps.fold.model.evoformer import EvoformerBlock, PairUpdates
from apps.fold.model.features import ChainIds, Features, TemplateFeatures
from apps.fold.model.folding import Recycled
from apps.fold.model.layers import LayerNorm, Linear
from apps.fold.model.rigid import Frames
from apps.fold.model.structure import InvariantPointAttention, per_residue
from apps.fold.model.torsions import distance_bins

POSITIONS = 2 * widths.RELATIVE_POSITIONS + 2  # within a chain, and one more: another chain
COPIES = 2 * widths.CHAIN_REACH + 2  # of one sequence, and one more: another sequence


class RelativeChains(Linear):
    """A linear map of relative positions, of whether chains have one sequence, and of which copies they are.

    It picks columns, as one-hot vectors would (Evans et al. 2021, section 7.1).
    """

    def __init__(self, pair_dim: int):
        super().__init__(POSITIONS + 1 + COPIES, pair_dim)

    def forward(self, index_BN: Tensor, ids: ChainIds, at: slice) -> Tensor:
        """The rows `at`, [B, I, N, Z]; index_BN counts within each chain."""

        def difference(x_BN: Tensor, reach: int) -> Tensor:
            return (x_BN[:, at, None] - x_BN[:, None]).clamp(-reach, reach) + reach

        def same(x_BN: Tensor) -> Tensor:
            return x_BN[:, at, None] == x_BN[:, None]

        of_position, of_sequence, of_copy = self.weight.split([POSITIONS, 1, COPIES], 1)
        offset_BIN = difference(index_BN, widths.RELATIVE_POSITIONS).where(same(ids.asym_BN), POSITIONS - 1)
        one_sequence_BIN = same(ids.entity_BN)
        copy_BIN = difference(ids.sym_BN, widths.CHAIN_REACH).where(one_sequence_BIN, COPIES - 1)
        z_BINZ = F.embedding(offset_BIN, of_position.T) + F.embedding(copy_BIN, of_copy.T)
        return z_BINZ + one_sequence_BIN.to(z_BINZ.dtype)[..., None] * of_sequence[:, 0] + self.bias


class MultimerInputEmbedder(InputEmbedder):
    """m and z of a complex and its MSA."""

    def __init__(self, msa_dim: int, pair_dim: int):
        super().__init__(msa_dim, pair_dim, widths.MULTIMER_TARGET_DIM)
        self.position = RelativeChains(pair_dim)

    def positions(self, features: Features, at: slice) -> Tensor:
        assert features.chains is not None
        return self.position(features.residue_index_BN, features.chains, at)


class TemplateChiEmbedder(TemplateTorsionEmbedder):
    """Rows for the MSA of the templates' four chi angles; a residue without chi1 is masked."""

    shown_by = residues.CHI1 - 1

    def __init__(self, msa_dim: int):
        super().__init__(msa_dim, widths.MULTIMER_TORSION_DIM)

    def forward(self, templates: TemplateFeatures) -> Tensor:
        first = self.shown_by
        mask_BTNA = templates.torsion_mask_BTNA[..., first:]
        sin_BTNA, cos_BTNA = (templates.torsions_BTNA2[..., first:, :] * mask_BTNA[..., None]).unbind(-1)
        types = F.one_hot(templates.aatype_BTN, 22).to(sin_BTNA.dtype)
        return self.down(torch.relu(self.up(torch.cat([types, sin_BTNA, cos_BTNA, mask_BTNA], -1))))


class TemplateChainsEmbedder(nn.Module):
    """z and what templates of single chains add to it.

    Pairs of two chains know neither distances nor directions. Of what is said of a pair each scalar has its weights:
    whether both CB are known, the unit vector from one CA to the other in the one's frame, whether both backbones are.
    """

    SCALARS = 5
    SUMMANDS = SCALARS + 4

    def __init__(self, pair_dim: int, config: TemplateConfig):
        super().__init__()
        self.query_norm = LayerNorm(pair_dim)
        self.distances = Linear(widths.TEMPLATE_BINS[2], config.dim, bias=False, init="relu")
        self.columns = Linear(22, config.dim, bias=False, init="relu")
        self.rows = Linear(22, config.dim, bias=False, init="relu")
        self.query = Linear(pair_dim, config.dim, bias=False, init="relu")
        self.scalar_weight = nn.Parameter(torch.empty(self.SCALARS * config.dim))
        self.embed_bias = nn.Parameter(torch.empty(self.SUMMANDS * config.dim))
        self.blocks = nn.ModuleList(PairUpdates(config.dim, config.pair) for _ in range(config.num_blocks))
        self.norm = LayerNorm(config.dim)
        self.out = Linear(config.dim, pair_dim, init="relu")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.scalar_weight, std=math.sqrt(2))
        nn.init.zeros_(self.embed_bias)

    def forward(self, z_BNNZ: Tensor, templates: TemplateFeatures, pair_mask_BNN: Tensor, ids: ChainIds) -> Tensor:
        """z[B, N, N, Z] and its update, the mean over all templates, those of padding included."""
        total, T = None, templates.mask_BT.shape[1]
        for t in range(T):
            t_BNNC = self.pairs(z_BNNZ, templates, t, ids)
            for block in self.blocks:
                t_BNNC = block(t_BNNC, pair_mask_BNN)
            t_BNNC = self.norm(t_BNNC)
            total = t_BNNC if total is None else total + t_BNNC
        assert total is not None
        return z_BNNZ + self.read(total, T)

    def read(self, total_BINC: Tensor, T: int) -> Tensor:
        """The update of some rows of z, from the sum over templates of what their stacks made, normalised."""
        return self.out(torch.relu(total_BINC / T))

    def pairs(
        self, z_BINZ: Tensor, templates: TemplateFeatures, t: int, ids: ChainIds, at: slice = slice(None)
    ) -> Tensor:
        """The stack's input of one template in the rows `at`, of which z_BINZ are the pairs: [B, I, N, C]."""
        assert templates.backbone_BTN33 is not None
        dtype = z_BINZ.dtype
        one_chain_BIN = (ids.asym_BN[:, at, None] == ids.asym_BN[:, None]).to(dtype)

        def both(mask_BN: Tensor) -> Tensor:
            return mask_BN[:, at, None] * mask_BN[:, None] * one_chain_BIN

        beta_BIN, backbone_BIN = both(templates.pseudo_beta_mask_BTN[:, t]), both(templates.backbone_mask_BTN[:, t])
        bins = distance_bins(templates.pseudo_beta_BTN3[:, t], *widths.TEMPLATE_BINS, at).to(dtype)
        types_BNA = F.one_hot(templates.aatype_BTN[:, t], 22).to(dtype)
        z_BINC = self.query(self.query_norm(z_BINZ)) + self.embed_bias.unflatten(0, (self.SUMMANDS, -1)).sum(0)
        z_BINC = z_BINC + self.distances(bins * beta_BIN[..., None])
        z_BINC = z_BINC + self.columns(types_BNA)[:, None] + self.rows(types_BNA)[:, at, None]
        directions = _directions(templates.backbone_BTN33[:, t], at).to(dtype)
        if templates.own_directions_BTN3 is not None:
            own_BNN3 = torch.diag_embed(templates.own_directions_BTN3[:, t].mT).movedim(1, -1)
            directions = directions + own_BNN3[:, at]
        scalars = torch.cat([beta_BIN[..., None], directions * backbone_BIN[..., None], backbone_BIN[..., None]], -1)
        return z_BINC + scalars @ self.scalar_weight.unflatten(0, (self.SCALARS, -1))


def _directions(backbone_BN33: Tensor, at: slice) -> Tensor:
    """Unit vectors [B, I, N, 3] from CA of the residues `at` to those of all, in I's frame, x from CA to C."""
    n, ca, c = backbone_BN33.unbind(-2)
    x = _unit(c - ca)
    y = _unit(n - ca - ((n - ca) * x).sum(-1, keepdim=True) * x)
    frames = Frames(torch.stack([x, y, torch.linalg.cross(x, y)], -1), ca)
    return _unit(frames.map(lambda f: f[:, at, None]).inverse_apply(ca[:, None]))


def _distances(x_BN3: Tensor) -> Tensor:
    """[B, N, N], by differences: products would lose what lies far from the origin."""
    return torch.cdist(x_BN3, x_BN3, compute_mode="donot_use_mm_for_euclid_dist")


def _unit(x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).sum(-1, keepdim=True).clamp(min=1e-12))


class MultimerTemplateEmbedder(nn.Module):
    """Both parts of what templates give."""

    def __init__(self, msa_dim: int, pair_dim: int, templates: TemplateConfig):
        super().__init__()
        self.torsions = TemplateChiEmbedder(msa_dim)
        self.pairs = TemplateChainsEmbedder(pair_dim, templates)


class MultimerPointAttention(InvariantPointAttention):
    """Invariant point attention with maps of their own for queries, keys and values, points by heads."""

    def build_projections(self, config: StructureConfig) -> None:
        H = config.num_heads
        self.query = Linear(config.dim, H * config.head_dim, bias=False)
        self.key = Linear(config.dim, H * config.head_dim, bias=False)
        self.value = Linear(config.dim, H * config.head_dim, bias=False)
        self.query_point = Linear(config.dim, 3 * H * config.query_points)
        self.key_point = Linear(config.dim, 3 * H * config.query_points)
        self.value_point = Linear(config.dim, 3 * H * config.value_points)

    def scalars(self, s_BND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (each(s_BND).unflatten(-1, (self.num_heads, -1)) for each in (self.query, self.key, self.value))
        return q, k, v

    def points(self, s_BND: Tensor, frames: Frames) -> tuple[Tensor, Tensor, Tensor]:
        wide, frames = frames.rotation.dtype, per_residue(frames, 2)

        def of(project: Linear) -> Tensor:
            local = project(s_BND).to(wide).unflatten(-1, (self.num_heads, 3, -1)).movedim(3, -1)
            return frames.apply(local)

        return of(self.query_point), of(self.key_point), of(self.value_point)

    def lengths(self, squared: Tensor) -> Tensor:
        return torch.sqrt(squared.clamp(min=1e-16))


class Multimer(AlphaFold):
    """AlphaFold-Multimer; see the module's docstring."""

    config: MultimerConfig

    def __init__(self, config: MultimerConfig):
        super().__init__(config)
        self.compares_alphas = config.recycle_tolerance >= 0
        assert config.templates is not None
        msa, pair = config.msa_dim, config.pair_dim
        self.input_embedder = MultimerInputEmbedder(msa, pair)
        self.template_embedder = MultimerTemplateEmbedder(msa, pair, config.templates)
        self.structure_module.attention = MultimerPointAttention(pair, config.structure)
        for block in (*self.extra_blocks, *self.blocks):
            assert isinstance(block, EvoformerBlock)
            block.outer_first = True

    def add_templates(
        self, z_BNNZ: Tensor, templates: TemplateFeatures, pair_mask_BNN: Tensor, features: Features
    ) -> Tensor:
        assert features.chains is not None
        return self.template_embedder.pairs(z_BNNZ, templates, pair_mask_BNN, features.chains)

    def settled(self, last: Recycled | None, now: Recycled, mask_BN: Tensor) -> bool:
        """Whether distances of CA changed by no more than the tolerance, by the root of the mean square."""
        if now.alpha_BN3 is None:
            return False
        before = torch.zeros_like(now.alpha_BN3) if last is None else last.alpha_BN3
        assert before is not None
        change_BNN = _distances(before) - _distances(now.alpha_BN3)
        mask_BNN = (mask_BN[:, :, None] * mask_BN[:, None]).to(change_BNN.dtype)
        mean = (mask_BNN * change_BNN**2).sum() / (1e-10 + mask_BNN.sum())
        return float(torch.sqrt(mean + 1e-8)) <= self.config.recycle_tolerance
