"""The embedders of features into the MSA's and the pairs' representations: of input, last iteration and templates.

Shapes: B batch, N residues, S rows of the MSA, E extra rows, T templates, D = c_m, Z = c_z, C = c_t channels.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.fold.model import config as widths
from apps.fold.model import residues
from apps.fold.model.config import ModelConfig, TemplateConfig
from apps.fold.model.evoformer import PairUpdates
from apps.fold.model.features import Features, TemplateFeatures
from apps.fold.model.layers import LayerNorm, Linear
from apps.fold.model.torsions import distance_bins
from core.kernels.attention import attention


class InputEmbedder(nn.Module):
    """m[B, S, N, D] and z[B, N, N, Z] of the sequence and its MSA (algorithms 3 to 5)."""

    def __init__(self, msa_dim: int, pair_dim: int, target_dim: int = widths.TARGET_DIM):
        super().__init__()
        self.target = Linear(target_dim, msa_dim)
        self.msa = Linear(widths.MSA_DIM, msa_dim)
        self.left = Linear(target_dim, pair_dim)
        self.right = Linear(target_dim, pair_dim)
        self.position: Linear = RelativePosition(pair_dim)

    def forward(self, features: Features) -> tuple[Tensor, Tensor]:
        return self.rows(features), self.pairs(features)

    def rows(self, features: Features) -> Tensor:
        """m[B, S, N, D]."""
        return self.target(features.target_BNF)[:, None] + self.msa(features.msa_BSNF)

    def pairs(self, features: Features, at: slice = slice(None)) -> Tensor:
        """The rows `at` of z, [B, I, N, Z]."""
        target_BNF = features.target_BNF
        z_BINZ = self.left(target_BNF[:, at])[:, :, None] + self.right(target_BNF)[:, None]
        return z_BINZ + self.positions(features, at)

    def positions(self, features: Features, at: slice) -> Tensor:
        """The rows `at` of what relative positions give."""
        return self.position(features.residue_index_BN[:, at], features.residue_index_BN)


class RelativePosition(Linear):
    """A linear map of the one-hot difference of positions, clipped at +-32 (algorithm 4).

    Positions [B, I] and [B, N] -> [B, I, N, Z].
    """

    def __init__(self, pair_dim: int):
        super().__init__(2 * widths.RELATIVE_POSITIONS + 1, pair_dim)

    def forward(self, input: Tensor, others: Tensor) -> Tensor:
        reach = widths.RELATIVE_POSITIONS
        offset_BIN = (input[:, :, None] - others[:, None]).clamp(-reach, reach) + reach
        return F.embedding(offset_BIN, self.weight.T) + self.bias  # a one-hot vector picks a column


class RecyclingEmbedder(nn.Module):
    """The last iteration's addends to m's first row and to z (algorithm 32)."""

    def __init__(self, msa_dim: int, pair_dim: int):
        super().__init__()
        self.distance = Linear(widths.RECYCLE_BINS[2], pair_dim)
        self.msa_norm = LayerNorm(msa_dim)
        self.pair_norm = LayerNorm(pair_dim)

    def forward(self, m_BND: Tensor, z_BNNZ: Tensor, pseudo_beta_BN3: Tensor) -> tuple[Tensor, Tensor]:
        """m_BND is the last first row, z_BNNZ the last pairs, pseudo_beta_BN3 the last positions in Angstrom."""
        return self.msa_norm(m_BND), self.pairs(z_BNNZ, pseudo_beta_BN3)

    def pairs(self, z_BINZ: Tensor, pseudo_beta_BN3: Tensor, at: slice = slice(None)) -> Tensor:
        """The addend to the rows `at` of z, of which z_BINZ are the last iteration's."""
        bins = distance_bins(pseudo_beta_BN3, *widths.RECYCLE_BINS, at).to(z_BINZ.dtype)
        return self.distance(bins) + self.pair_norm(z_BINZ)


class ExtraEmbedder(nn.Module):
    """The extra MSA's representation [B, E, N, D]."""

    def __init__(self, dim: int):
        super().__init__()
        self.linear = Linear(widths.EXTRA_DIM, dim)

    def forward(self, features: Features) -> Tensor:
        return self.sequences(features)

    def sequences(self, features: Features, at: slice = slice(None)) -> Tensor:
        """The extra rows `at`."""
        letters = F.one_hot(features.extra_msa_BEN[:, at], 23).to(features.extra_deletion_BEN.dtype)
        deletions = torch.stack([features.extra_has_deletion_BEN[:, at], features.extra_deletion_BEN[:, at]], -1)
        return self.linear(torch.cat([letters, deletions], -1))


class TemplateTorsionEmbedder(nn.Module):
    """Rows [B, T, N, D] for the MSA, of the templates' torsion angles (algorithm 2, lines 7 and 8).

    shown_by  the torsion without which a residue of a template is masked: psi, which needs one residue's atoms only
    """

    shown_by = residues.PSI - 1

    def __init__(self, msa_dim: int, dim: int = widths.TEMPLATE_TORSION_DIM):
        super().__init__()
        self.up = Linear(dim, msa_dim, init="relu")
        self.down = Linear(msa_dim, msa_dim, init="relu")

    def forward(self, templates: TemplateFeatures) -> Tensor:
        dtype = templates.torsions_BTNA2.dtype
        parts = [
            F.one_hot(templates.aatype_BTN, 22).to(dtype),
            templates.torsions_BTNA2.flatten(-2),
            templates.alternative_BTNA2.flatten(-2),
            templates.torsion_mask_BTNA,
        ]
        return self.down(torch.relu(self.up(torch.cat(parts, -1))))


class TemplatePairEmbedder(nn.Module):
    """z and what templates add to it: their own pair stack, then attention of each pair over them (algorithms 16, 17).

    The three channels of unit vectors are 0, as they were when the released weights were trained.
    """

    def __init__(self, pair_dim: int, config: TemplateConfig):
        super().__init__()
        self.num_heads, self.head_dim = config.num_heads, config.head_dim
        self.embed = Linear(widths.TEMPLATE_PAIR_DIM, config.dim, init="relu")
        self.blocks = nn.ModuleList(
            PairUpdates(config.dim, config.pair, attention_first=True) for _ in range(config.num_blocks)
        )
        self.norm = LayerNorm(config.dim)
        inner = config.num_heads * config.head_dim
        self.query = Linear(pair_dim, inner, bias=False, init="glorot")
        self.key_value = Linear(config.dim, 2 * inner, bias=False, init="glorot")
        self.out = Linear(inner, pair_dim, init="zero")
        self.attend = attention

    def forward(self, z_BNNZ: Tensor, templates: TemplateFeatures, pair_mask_BNN: Tensor) -> Tensor:
        """z[B, N, N, Z] and its update; z where a sequence has no template."""
        embedded = [self.one(templates, t, pair_mask_BNN) for t in range(templates.mask_BT.shape[1])]
        return z_BNNZ + self.read(z_BNNZ, torch.stack(embedded, 3), templates.mask_BT)

    def read(self, z_BINZ: Tensor, t_BINTC: Tensor, mask_BT: Tensor) -> Tensor:
        """The update of some rows of z from the same rows of the templates' pairs, which are normalised here."""
        heads = (self.num_heads, self.head_dim)
        q = self.query(z_BINZ).flatten(0, 2)[:, None].unflatten(-1, heads)
        k, v = self.key_value(self.norm(t_BINTC).flatten(0, 2)).unflatten(-1, (2, *heads)).unbind(2)
        mask_XT = mask_BT[:, None].expand(-1, z_BINZ.shape[1] * z_BINZ.shape[2], -1).flatten(0, 1)
        update = self.out(self.attend(q, k, v, mask=mask_XT).flatten(1)).view_as(z_BINZ)
        has_any = (mask_BT.sum(-1) > 0).to(update.dtype)
        return update * has_any[:, None, None, None]

    def one(self, templates: TemplateFeatures, t: int, pair_mask_BNN: Tensor) -> Tensor:
        """The pairs [B, N, N, C] of one template."""
        z_BNNC = self.pairs(templates, t)
        for block in self.blocks:
            z_BNNC = block(z_BNNC, pair_mask_BNN)
        return z_BNNC

    def pairs(self, templates: TemplateFeatures, t: int, at: slice = slice(None)) -> Tensor:
        """The stack's input in the rows `at`: [B, I, N, C]."""
        dtype = templates.backbone_mask_BTN.dtype
        aatype_BNA = F.one_hot(templates.aatype_BTN[:, t], 22).to(dtype)
        N = aatype_BNA.shape[1]
        beta_mask_BN, backbone_BN = templates.pseudo_beta_mask_BTN[:, t], templates.backbone_mask_BTN[:, t]
        backbone_BIN1 = (backbone_BN[:, at, None] * backbone_BN[:, None])[..., None]
        parts = [
            distance_bins(templates.pseudo_beta_BTN3[:, t], *widths.TEMPLATE_BINS, at).to(dtype),
            (beta_mask_BN[:, at, None] * beta_mask_BN[:, None])[..., None],
            aatype_BNA[:, None].expand(-1, backbone_BIN1.shape[1], -1, -1),
            aatype_BNA[:, at, None].expand(-1, -1, N, -1),
            backbone_BIN1.new_zeros(*backbone_BIN1.shape[:-1], 3),
            backbone_BIN1,
        ]
        return self.embed(torch.cat(parts, -1) * backbone_BIN1)


class TemplateEmbedder(nn.Module):
    """Both parts of what templates give."""

    def __init__(self, config: ModelConfig, templates: TemplateConfig):
        super().__init__()
        self.torsions = TemplateTorsionEmbedder(config.msa_dim)
        self.pairs = TemplatePairEmbedder(config.pair_dim, templates)
