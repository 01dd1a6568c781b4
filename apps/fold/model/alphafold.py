"""AlphaFold 2, the whole (algorithm 2), one definition for training and inference.

    for each recycling iteration (folding.py)
    1. embed the input, the last iteration, templates and the extra MSA
    2. extra-MSA stack, then Evoformer
    3. structure module
    heads, on the last iteration

Each iteration may have features of its own (the original draws and clusters the MSA anew each time).

Shapes: B batch, S rows of the MSA, T template rows, N residues, D = c_m, Z = c_z.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apps.fold.model.config import ModelConfig
from apps.fold.model.embedders import ExtraEmbedder, InputEmbedder, RecyclingEmbedder, TemplateEmbedder
from apps.fold.model.evoformer import EvoformerBlock
from apps.fold.model.features import Features, TemplateFeatures
from apps.fold.model.folding import Folding, FoldingModel, Recycled
from apps.fold.model.heads import Heads, Logits
from apps.fold.model.layers import Linear
from apps.fold.model.structure import StructureModule
from apps.fold.model.torsions import pseudo_beta


@dataclass(frozen=True)
class Prediction(Folding):
    """The last iteration's results, and the logits of the heads."""

    logits: Logits


class AlphaFold(FoldingModel):
    """AlphaFold 2, monomer; see the module's docstring."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        msa, pair = config.msa_dim, config.pair_dim
        self.input_embedder = InputEmbedder(msa, pair)
        self.recycling_embedder = RecyclingEmbedder(msa, pair)
        self.template_embedder = None if config.templates is None else TemplateEmbedder(config, config.templates)
        self.extra_embedder = ExtraEmbedder(config.extra_dim)
        self.extra_blocks = nn.ModuleList(
            EvoformerBlock(config.extra_dim, pair, config.extra, global_columns=True)
            for _ in range(config.extra.num_blocks)
        )
        self.blocks = nn.ModuleList(
            EvoformerBlock(msa, pair, config.evoformer) for _ in range(config.evoformer.num_blocks)
        )
        self.single = Linear(msa, config.single_dim)
        self.structure_module = StructureModule(config.single_dim, pair, config.structure)
        self.heads = Heads(config)

    def forward(self, iterations: Sequence[Features]) -> Prediction:
        """One recycling iteration for each element of `iterations` (the same object again, or drawn anew)."""
        found = self.fold(iterations)
        logits = self.heads(found.msa_BSND, found.pair_BNNZ, found.single_BND, found.structure.single_BND)
        return Prediction(**vars(found), logits=logits)

    def trunk(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor]:
        """m[B, S + T, N, D] and z[B, N, N, Z] after the Evoformer."""
        pair_mask_BNN = features.mask_BN[:, :, None] * features.mask_BN[:, None]
        if recycled is None:
            recycled = self.nothing(features)
        z_BNNZ = self.embed_pairs(features, recycled.pair_BNNZ, recycled.pseudo_beta_BN3)
        templates = None if self.template_embedder is None else features.templates
        if self.template_embedder is not None and templates is not None:
            z_BNNZ = self.add_templates(z_BNNZ, templates, pair_mask_BNN, features)
        extra_BEND = self.extra_embedder(features)
        for block in self.extra_blocks:
            extra_BEND, z_BNNZ = block(extra_BEND, z_BNNZ, features.extra_mask_BEN, pair_mask_BNN)
        del extra_BEND
        m_BSND, msa_mask = self.embed_msa(features, templates, recycled.msa_BND)
        for block in self.blocks:
            m_BSND, z_BNNZ = block(m_BSND, z_BNNZ, msa_mask, pair_mask_BNN)
        return m_BSND, z_BNNZ

    def add_templates(
        self, z_BNNZ: Tensor, templates: TemplateFeatures, pair_mask_BNN: Tensor, features: Features
    ) -> Tensor:
        """z and what templates tell of pairs."""
        assert self.template_embedder is not None
        return self.template_embedder.pairs(z_BNNZ, templates, pair_mask_BNN)

    def pair_rows(self, features: Features, last_BINZ: Tensor, points_BN3: Tensor, at: slice = slice(None)) -> Tensor:
        return self.input_embedder.pairs(features, at) + self.recycling_embedder.pairs(last_BINZ, points_BN3, at)

    def beta_of(self, aatype_BN: Tensor, positions_BN373: Tensor) -> Tensor:
        """The CB of the atoms, CA of glycine."""
        return pseudo_beta(aatype_BN, positions_BN373)

    def embed_msa(
        self, features: Features, templates: TemplateFeatures | None, last_BND: Tensor
    ) -> tuple[Tensor, Tensor]:
        """m[B, S + T, N, D] and its mask."""
        m_BSND, mask_BSN = self.input_embedder.rows(features), features.msa_mask_BSN
        first_row = self.recycling_embedder.msa_norm(last_BND)
        rows, masks = [m_BSND[:, :1] + first_row[:, None], m_BSND[:, 1:]], [mask_BSN]
        if self.template_embedder is not None and templates is not None:
            shown_BTN = templates.torsion_mask_BTNA[..., self.template_embedder.torsions.shown_by]
            rows.append(self.template_embedder.torsions(templates))
            masks.append(shown_BTN.to(mask_BSN.dtype))
        return torch.cat(rows, 1), torch.cat(masks, 1)
