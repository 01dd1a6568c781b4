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
class Prediction:
    """What the last iteration gives.

    msa_BSND, pair_BNNZ, single_BND    representations; template rows are cut off the MSA
    structure                          frames, torsions and atoms of every layer
    positions_BN373, atom_mask_BN37    atoms of the last layer, Angstrom
    logits                             of the heads
    """

    msa_BSND: Tensor
    pair_BNNZ: Tensor
    single_BND: Tensor
    structure: Structure
    positions_BN373: Tensor
    atom_mask_BN37: Tensor
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
        recycled = None
        for features in iterations[:-1]:
            with torch.no_grad():
                msa_BSND, pair_BNNZ, structure, _ = self._iterate(features, recycled)
                positions = atom37_of_atom14(features.aatype_BN, structure.atom14[-1])
                recycled = Recycled(msa_BSND[:, 0], pair_BNNZ, pseudo_beta(features.aatype_BN, positions))
                del msa_BSND, pair_BNNZ, structure
        features = iterations[-1]
        msa_BSND, pair_BNNZ, structure, single_BND = self._iterate(features, recycled)
        return Prediction(
            msa_BSND,
            pair_BNNZ,
            single_BND,
            structure,
            atom37_of_atom14(features.aatype_BN, structure.atom14[-1]),
            table(residues.ATOM37_MASK, features.aatype_BN) * features.mask_BN[..., None],
            self.heads(msa_BSND, pair_BNNZ, single_BND, structure.single_BND),
        )

    def _iterate(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor, Structure, Tensor]:
        msa_BSND, pair_BNNZ = self.trunk(features, recycled)
        single_BND = self.single(msa_BSND[:, 0])
        structure = self.structure_module(single_BND, pair_BNNZ, features.aatype_BN, features.mask_BN)
        return msa_BSND, pair_BNNZ, structure, single_BND

    def trunk(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor]:
        """m[B, S, N, D] and z[B, N, N, Z] after the Evoformer."""
        pair_mask_BNN = features.mask_BN[:, :, None] * features.mask_BN[:, None]
        m_BSND, z_BNNZ = self.input_embedder(features)
        if recycled is None:
            points = torch.zeros(*features.aatype_BN.shape, 3, device=z_BNNZ.device)
            recycled = Recycled(torch.zeros_like(m_BSND[:, 0]), torch.zeros_like(z_BNNZ), points)
        first_row, pairs = self.recycling_embedder(recycled.msa_BND, recycled.pair_BNNZ, recycled.pseudo_beta_BN3)
        m_BSND = torch.cat([m_BSND[:, :1] + first_row[:, None], m_BSND[:, 1:]], 1)
        z_BNNZ = z_BNNZ + pairs
        num_rows, msa_mask = m_BSND.shape[1], features.msa_mask_BSN
        if self.template_embedder is not None and features.templates is not None:
            m_BSND, z_BNNZ, msa_mask = self._add_templates(
                self.template_embedder, features.templates, m_BSND, z_BNNZ, msa_mask, pair_mask_BNN
            )
        extra_BEND = self.extra_embedder(features)
        for block in self.extra_blocks:
            extra_BEND, z_BNNZ = block(extra_BEND, z_BNNZ, features.extra_mask_BEN, pair_mask_BNN)
        del extra_BEND
        for block in self.blocks:
            m_BSND, z_BNNZ = block(m_BSND, z_BNNZ, msa_mask, pair_mask_BNN)
        return m_BSND[:, :num_rows], z_BNNZ

    @staticmethod
    def _add_templates(
        embedder: TemplateEmbedder, templates: TemplateFeatures, m: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        z = z + embedder.pairs(z, templates, pair_mask)
        psi_mask_BTN = templates.torsion_mask_BTNA[..., 2]  # psi needs the atoms of one residue only
        return torch.cat([m, embedder.torsions(templates)], 1), z, torch.cat([mask, psi_mask_BTN.to(mask.dtype)], 1)
