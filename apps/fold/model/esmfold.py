"""ESMFold (Lin et al., Science 379, 1123, 2023): structures from a sequence alone, read by a language model.

    1. ESM-2 reads the sequence; a mix of its layers is the MSA's only row                 (`LanguageEmbedder`)
    2. blocks: row attention with the pairs' bias, transition, what the row tells the pairs, the pairs' updates of
       AlphaFold                                                                            (`ESMFoldBlock`)
    3. AlphaFold's structure module
    with recycling as in AlphaFold, but for distances of a CB that is made from N, CA and C, also of glycine

So it is an Evoformer on an MSA of one row, without columns, and with another outer product. The language model is
transformers' as it is. Sequences of a batch have one length: the language model is told of no padding.

Shapes: B batch, N residues, I some of them, D = c_s of the row, Z = c_z, C channels, L layers of the language model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.fold.model import residues
from apps.fold.model.config import ESMFoldConfig, EvoformerConfig, HeadsConfig, LanguageConfig
from apps.fold.model.evoformer import PairUpdates
from apps.fold.model.features import Features
from apps.fold.model.folding import Folding, FoldingModel, Recycled
from apps.fold.model.layers import LayerNorm, Linear, Transition
from apps.fold.model.msa import RowAttentionWithPairBias
from apps.fold.model.structure import StructureModule

RECYCLE_BINS = (3.375, 21.375, 15)
"""the first and the last edge between bins of distances in Angstrom, and how many bins there are"""
LETTERS = 23
"""residue types, X, and two that are never given"""


class ESMFold(FoldingModel):
    """ESMFold; see the module's docstring."""

    config: ESMFoldConfig

    def __init__(self, config: ESMFoldConfig):
        super().__init__()
        self.config = config
        row, pair = config.msa_dim, config.pair_dim
        self.language = LanguageEmbedder(config.language, row)
        self.position = nn.Embedding(2 * config.position_bins + 2, pair)
        self.recycling_embedder = DistanceEmbedder(row, pair)
        self.blocks = nn.ModuleList(
            ESMFoldBlock(row, pair, config.evoformer) for _ in range(config.evoformer.num_blocks)
        )
        self.single = Linear(row, config.single_dim)
        self.structure_module = StructureModule(config.single_dim, config.structure_pair_dim, config.structure)
        self.structure_module.pair_norm = ProjectedNorm(pair, config.structure_pair_dim)
        self.heads = ESMFoldHeads(config)

    def forward(self, iterations: Sequence[Features]) -> "ESMFoldPrediction":
        """One recycling iteration for each element of `iterations`."""
        found = self.fold(iterations)
        logits = self.heads(found.msa_BSND, found.pair_BNNZ, found.structure.single_BND)
        return ESMFoldPrediction(**vars(found), logits=logits)

    def fold(self, iterations: Sequence[Features]) -> Folding:
        """The same without the heads.  Of the features only residue types, positions and the mask are read."""
        row_B1ND = self.language(iterations[0].aatype_BN)[:, None]
        return super().fold([replace(features, msa_BSNF=row_B1ND) for features in iterations])

    def trunk(self, features: Features, recycled: Recycled | None) -> tuple[Tensor, Tensor]:
        """m[B, 1, N, D] and z[B, N, N, Z] after the blocks; features.msa_BSNF is what the language model says."""
        if recycled is None:
            recycled = self.nothing(features)
        mask_B1N = features.mask_BN[:, None]
        pair_mask_BNN = features.mask_BN[:, :, None] * mask_B1N
        z_BNNZ = self.embed_pairs(features, recycled.pair_BNNZ, recycled.pseudo_beta_BN3)
        m_B1ND = features.msa_BSNF + self.recycling_embedder.msa_norm(recycled.msa_BND)[:, None]
        for block in self.blocks:
            m_B1ND, z_BNNZ = block(m_B1ND, z_BNNZ, mask_B1N, pair_mask_BNN)
        return m_B1ND, z_BNNZ

    def pair_rows(self, features: Features, last_BINZ: Tensor, points_BN3: Tensor, at: slice = slice(None)) -> Tensor:
        index_BN, reach = features.residue_index_BN, self.config.position_bins
        offset_BIN = (index_BN[:, None] - index_BN[:, at, None]).clamp(-reach, reach) + reach + 1  # 0 is for padding
        return self.recycling_embedder.pairs(last_BINZ, points_BN3, at) + self.position(offset_BIN)

    def beta_of(self, aatype_BN: Tensor, positions_BN373: Tensor) -> Tensor:
        """The place of every residue's CB by the backbone's geometry."""
        n, ca, c = (positions_BN373[:, :, slot] for slot in (residues.N, residues.CA, residues.C))
        along, beyond = ca - n, c - ca
        return -0.58273431 * torch.linalg.cross(along, beyond) + 0.56802827 * along - 0.54067466 * beyond + ca


class LanguageEmbedder(nn.Module):
    """Embed a sequence by ESM-2 and by its letters: residue types [B, N] -> [B, N, D].

    h = sum_l softmax(w)_l h_l over the embedding and the L layers, without the tokens that begin and end a sequence;
    then norm, linear, ReLU, linear; plus an embedding of the letter.
    """

    def __init__(self, config: LanguageConfig, dim: int):
        super().__init__()
        self.config = config
        self.model = language_model(config)
        self.layer_weight = nn.Parameter(torch.zeros(config.num_layers + 1))
        self.norm = LayerNorm(config.dim)
        self.up = Linear(config.dim, dim, init="relu")
        self.down = Linear(dim, dim)
        self.letters = nn.Embedding(LETTERS, dim)

    def forward(self, aatype_BN: Tensor) -> Tensor:
        with torch.no_grad():
            layers = self.model(self.tokens(aatype_BN), output_hidden_states=True).hidden_states
        shares = torch.softmax(self.layer_weight, 0)
        mixed_BND = shares[0] * layers[0][:, 1:-1]
        for share, layer_BMD in zip(shares[1:], layers[1:]):
            mixed_BND = mixed_BND + share * layer_BMD[:, 1:-1]
        return self.down(torch.relu(self.up(self.norm(mixed_BND)))) + self.letters(aatype_BN)

    def tokens(self, aatype_BN: Tensor) -> Tensor:
        """The language model's words [B, N + 2], with those that begin and end a sequence."""
        words = self.config.vocabulary
        of_type = torch.tensor([words.index(letter) for letter in (*residues.RESTYPES, "X")], device=aatype_BN.device)
        inner_BN = of_type[aatype_BN.clamp(max=residues.UNKNOWN)]
        first, last = (inner_BN.new_full((len(inner_BN), 1), words.index(word)) for word in ("<cls>", "<eos>"))
        return torch.cat([first, inner_BN, last], 1)

    def fill_buffers(self, device: str | torch.device) -> None:
        """Make buffers that no checkpoint holds and nothing reads, in the place of those on the meta device."""
        embeddings: Any = self.model.embeddings
        embeddings.position_ids = torch.zeros(embeddings.position_ids.shape, dtype=torch.long, device=device)


def language_model(config: LanguageConfig) -> nn.Module:
    """transformers' ESM-2, without the head for contacts, which nothing reads."""
    from transformers import EsmConfig, EsmModel

    model = EsmModel(EsmConfig(**config.for_transformers()), add_pooling_layer=False)
    del model.contact_head
    return model


class DistanceEmbedder(nn.Module):
    """The last iteration's addends to the row and to z (algorithm 32, with an embedding of binned distances)."""

    def __init__(self, row_dim: int, pair_dim: int):
        super().__init__()
        self.distance = nn.Embedding(RECYCLE_BINS[2], pair_dim)
        self.msa_norm = LayerNorm(row_dim)
        self.pair_norm = LayerNorm(pair_dim)

    def pairs(self, z_BINZ: Tensor, points_BN3: Tensor, at: slice = slice(None)) -> Tensor:
        """The addend to the rows `at` of z, of which z_BINZ are the last iteration's."""
        first, last, count = RECYCLE_BINS
        edges = torch.linspace(first, last, count - 1, device=points_BN3.device, dtype=points_BN3.dtype) ** 2
        squared_BIN = ((points_BN3[:, at, None] - points_BN3[:, None]) ** 2).sum(-1)
        return self.pair_norm(z_BINZ) + self.distance(torch.bucketize(squared_BIN, edges))


class ESMFoldBlock(nn.Module):
    """One block of the trunk."""

    def __init__(self, row_dim: int, pair_dim: int, config: EvoformerConfig):
        super().__init__()
        heads = (config.msa_heads, config.msa_head_dim)
        self.row_attention = RowAttentionWithPairBias(row_dim, pair_dim, *heads, dropout=config.msa_dropout)
        self.msa_transition = Transition(row_dim, config.msa_transition_factor)
        self.sequence_to_pair = SequenceToPair(row_dim, pair_dim, config.outer_dim)
        self.pair = PairUpdates(pair_dim, config.pair)

    def forward(self, m_B1ND: Tensor, z_BNNZ: Tensor, mask_B1N: Tensor, pair_mask_BNN: Tensor) -> tuple[Tensor, Tensor]:
        m_B1ND = self.msa_transition(self.row_attention(m_B1ND, z_BNNZ, mask_B1N))
        z_BNNZ = self.sequence_to_pair(m_B1ND, z_BNNZ)
        return m_B1ND, self.pair(z_BNNZ, pair_mask_BNN)


class SequenceToPair(nn.Module):
    """z + products and differences of what two residues say, projected.

    q, k = norm(m) W + b;   z_ij += [q_j k_i | q_j - k_i] Wo + bo
    """

    def __init__(self, row_dim: int, pair_dim: int, inner_dim: int):
        super().__init__()
        self.norm = LayerNorm(row_dim)
        self.project = Linear(row_dim, 2 * inner_dim)
        self.out = Linear(2 * inner_dim, pair_dim, init="zero")

    def forward(self, m_B1ND: Tensor, z_BNNZ: Tensor) -> Tensor:
        return z_BNNZ + self.update(*self.factors(m_B1ND))

    def factors(self, m_B1ND: Tensor) -> tuple[Tensor, Tensor]:
        """q and k, [B, N, C] both."""
        q_BNC, k_BNC = self.project(self.norm(m_B1ND[:, 0])).chunk(2, -1)
        return q_BNC, k_BNC

    def update(self, q_BNC: Tensor, k_BIC: Tensor) -> Tensor:
        """The addend to the rows of z whose k is given: [B, I, N, Z]."""
        q_B1NC, k_BI1C = q_BNC[:, None], k_BIC[:, :, None]
        return self.out(torch.cat([q_B1NC * k_BI1C, q_B1NC - k_BI1C], -1))


class ProjectedNorm(nn.Module):
    """The norm of z projected: what the structure module reads of pairs."""

    def __init__(self, pair_dim: int, dim: int):
        super().__init__()
        self.project = Linear(pair_dim, dim)
        self.norm = LayerNorm(dim)

    def forward(self, z_BINZ: Tensor) -> Tensor:
        return self.norm(self.project(z_BINZ))


@dataclass(frozen=True)
class ESMFoldLogits:
    """plddt[B, N, 37, 50] of each atom, distogram[B, N, N, 64] (symmetric), letters[B, N, 23], pae[B, N, N, 64]."""

    plddt: Tensor
    distogram: Tensor
    letters: Tensor
    pae: Tensor


@dataclass(frozen=True)
class ESMFoldPrediction(Folding):
    """The last iteration's results, and the logits of the heads."""

    logits: ESMFoldLogits


class AtomPlddtHead(nn.Module):
    """Logits of the binned lDDT of each atom: a norm and three linear maps with nothing in between."""

    def __init__(self, dim: int, config: HeadsConfig):
        super().__init__()
        self.bins = config.plddt_bins
        self.norm = LayerNorm(dim)
        self.first = Linear(dim, config.plddt_dim)
        self.second = Linear(config.plddt_dim, config.plddt_dim)
        self.out = Linear(config.plddt_dim, residues.NUM_ATOM37 * config.plddt_bins, init="zero")

    def forward(self, s_BND: Tensor) -> Tensor:
        """Logits of the confidence in each residue's CA, [B, N, 50], as AlphaFold's."""
        at = slice(residues.CA * self.bins, (residues.CA + 1) * self.bins)
        return F.linear(self.second(self.first(self.norm(s_BND))), self.out.weight[at], self.out.bias[at])

    def atoms(self, s_BND: Tensor) -> Tensor:
        """Logits of the confidence in all atoms, [B, N, 37, 50]."""
        return self.out(self.second(self.first(self.norm(s_BND)))).unflatten(-1, (residues.NUM_ATOM37, self.bins))


class ESMFoldHeads(nn.Module):
    """All heads.  The distogram is half of what either direction of a pair says (`distogram` holds the half)."""

    def __init__(self, config: ESMFoldConfig):
        super().__init__()
        heads = config.heads
        assert heads.pae_bins is not None
        self.plddt = AtomPlddtHead(config.structure.dim, heads)
        self.distogram = Linear(config.pair_dim, heads.distogram_bins, init="zero")
        self.letters = Linear(config.msa_dim, heads.masked_msa_types, init="zero")
        self.pae = Linear(config.pair_dim, heads.pae_bins, init="zero")

    def forward(self, m_B1ND: Tensor, z_BNNZ: Tensor, structure_BND: Tensor) -> ESMFoldLogits:
        half = self.distogram(z_BNNZ)
        return ESMFoldLogits(
            plddt=self.plddt.atoms(structure_BND),
            distogram=half + half.transpose(1, 2),
            letters=self.letters(m_B1ND[:, 0]),
            pae=self.pae(z_BNNZ),
        )
