"""The whole model (algorithm 2), one definition for training and inference.

    for each recycling iteration
    1. embed the input, the last iteration, templates and the extra MSA
    2. extra-MSA stack, then Evoformer
    3. structure module
    heads, on the last iteration

Each iteration may have features of its own (the original draws and clusters the MSA anew each time). Gradients flow
through the last one only.

Shapes: B batch, S rows of the MSA, T template rows, N residues, D = c_m, Z = c_z.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apps.fold.model import residues
from apps.fold.model.config import ModelConfig
from apps.fold.model.embedders import ExtraEmbedder, InputEmbedder, RecyclingEmbedder, TemplateEmbedder
from apps.fold.model.evoformer import EvoformerBlock
from apps.fold.model.features import Features, TemplateFeatures
from apps.fold.model.heads import Heads, Logits
from apps.fold.model.layers import Linear
from apps.fold.model.structure import Structure, StructureModule
from apps.fold.model.torsions import atom37_of_atom14, pseudo_beta, table


@dataclass(frozen=True)
class Recycled:
    """What one iteration hands to the next: m's first row, z, and positions of CB in Angstrom."""

    msa_BND: Tensor
    pair_BNNZ: Tensor
    pseudo_beta_BN3: Tensor


@dataclass(frozen=True)
class Folding:
    """What the last iteration gives, before the heads read it.

    msa_BSND, pair_BNNZ, single_BND    representations; template rows are cut off the MSA
    structure                          frames, torsions and atoms of every layer
    positions_BN373, atom_mask_BN37    atoms of the last layer, Angstrom
    """

    msa_BSND: Tensor
    pair_BNNZ: Tensor
    single_BND: Tensor
    structure: Structure
    positions_BN373: Tensor
    atom_mask_BN37: Tensor


@dataclass(frozen=True)
class Prediction(Folding):
    """The same, and the logits of the heads."""

    logits: Logits


class AlphaFold(nn.Module):
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

    def fold(self, iterations: Sequence[Features]) -> Folding:
        """The same without the heads."""
        recycled = None
        for index in range(len(iterations) - 1):  # one by one: a sequence may fetch them as they are asked for
            with torch.no_grad():
                recycled = self._recycled(iterations[index], recycled)
        features = iterations[-1]
        msa_BSND, pair_BNNZ, structure, single_BND = self._iterate(features, recycled)
        return Folding(
            msa_BSND,
            pair_BNNZ,
            single_BND,
            structure,
            atom37_of_atom14(features.aatype_BN, structure.atom14[-1]),
            table(residues.ATOM37_MASK, features.aatype_BN) * features.mask_BN[..., None],
        )

    def _recycled(self, features: Features, recycled: Recycled | None) -> Recycled:
        msa_BSND, pair_BNNZ, structure, _ = self._iterate(features, recycled)
        positions = atom37_of_atom14(features.aatype_BN, structure.atom14[-1])
        first_row = msa_BSND[:, 0].clone()  # a view would keep the whole MSA
        return Recycled(first_row, pair_BNNZ, pseudo_beta(features.aatype_BN, positions))

    def _iterate(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor, Structure, Tensor]:
        msa_BSND, pair_BNNZ = self.trunk(features, recycled)
        msa_BSND = msa_BSND[:, : features.msa_BSNF.shape[1]]
        single_BND = self.single(msa_BSND[:, 0])
        structure = self.structure_module(single_BND, pair_BNNZ, features.aatype_BN, features.mask_BN)
        return msa_BSND, pair_BNNZ, structure, single_BND

    def trunk(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor]:
        """m[B, S + T, N, D] and z[B, N, N, Z] after the Evoformer."""
        pair_mask_BNN = features.mask_BN[:, :, None] * features.mask_BN[:, None]
        if recycled is None:
            recycled = self.nothing(features)
        z_BNNZ = self.embed_pairs(features, recycled.pair_BNNZ, recycled.pseudo_beta_BN3)
        templates = None if self.template_embedder is None else features.templates
        if self.template_embedder is not None and templates is not None:
            z_BNNZ = self.template_embedder.pairs(z_BNNZ, templates, pair_mask_BNN)
        extra_BEND = self.extra_embedder(features)
        for block in self.extra_blocks:
            extra_BEND, z_BNNZ = block(extra_BEND, z_BNNZ, features.extra_mask_BEN, pair_mask_BNN)
        del extra_BEND
        m_BSND, msa_mask = self.embed_msa(features, templates, recycled.msa_BND)
        for block in self.blocks:
            m_BSND, z_BNNZ = block(m_BSND, z_BNNZ, msa_mask, pair_mask_BNN)
        return m_BSND, z_BNNZ

    def nothing(self, features: Features) -> Recycled:
        """What the first iteration gets from the one before it."""
        like, (B, N) = features.msa_BSNF, features.aatype_BN.shape
        row, pairs = like.new_zeros(B, N, self.config.msa_dim), like.new_zeros(B, N, N, self.config.pair_dim)
        return Recycled(row, pairs, torch.zeros(B, N, 3, device=like.device))

    def embed_pairs(self, features: Features, last_BNNZ: Tensor, pseudo_beta_BN3: Tensor) -> Tensor:
        """z[B, N, N, Z] of the input and of the last iteration."""
        return self.input_embedder.pairs(features) + self.recycling_embedder.pairs(last_BNNZ, pseudo_beta_BN3)

    def embed_msa(
        self, features: Features, templates: TemplateFeatures | None, last_BND: Tensor
    ) -> tuple[Tensor, Tensor]:
        """m[B, S + T, N, D] and its mask."""
        m_BSND, mask_BSN = self.input_embedder.rows(features), features.msa_mask_BSN
        first_row = self.recycling_embedder.msa_norm(last_BND)
        rows, masks = [m_BSND[:, :1] + first_row[:, None], m_BSND[:, 1:]], [mask_BSN]
        if self.template_embedder is not None and templates is not None:
            psi_mask_BTN = templates.torsion_mask_BTNA[..., 2]  # psi needs the atoms of one residue only
            rows.append(self.template_embedder.torsions(templates))
            masks.append(psi_mask_BTN.to(mask_BSN.dtype))
        return torch.cat(rows, 1), torch.cat(masks, 1)
