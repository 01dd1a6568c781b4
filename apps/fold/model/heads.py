"""The heads, and what their logits say: pLDDT, PAE, pTM, distances.

Shapes: B batch, S rows of the MSA, N residues, X bins.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from apps.fold.model.config import HeadsConfig, ModelConfig
from apps.fold.model.layers import LayerNorm, Linear

PAE_LIMIT = 31.0  # Angstrom, where the last bin begins
DISTOGRAM_EDGES = (2.3125, 21.6875)  # Angstrom, of the first and the last edge


@dataclass(frozen=True)
class Logits:
    """plddt[B, N, 50], distogram[B, N, N, 64] (symmetric), masked_msa[B, S, N, 23], experimentally_resolved[B, N, 37].

    pae[B, N, N, 64], or None for models without it
    """

    plddt: Tensor
    distogram: Tensor
    masked_msa: Tensor
    experimentally_resolved: Tensor
    pae: Tensor | None


class PlddtHead(nn.Module):
    """Logits of the binned lDDT of each CA (algorithm 29)."""

    def __init__(self, dim: int, config: HeadsConfig):
        super().__init__()
        self.norm = LayerNorm(dim)
        self.first = Linear(dim, config.plddt_dim, init="relu")
        self.second = Linear(config.plddt_dim, config.plddt_dim, init="relu")
        self.out = Linear(config.plddt_dim, config.plddt_bins, init="zero")

    def forward(self, s_BND: Tensor) -> Tensor:
        return self.out(torch.relu(self.second(torch.relu(self.first(self.norm(s_BND))))))


class Heads(nn.Module):
    """All heads (supplement, 1.9.6 to 1.9.10)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        heads = config.heads
        self.plddt = PlddtHead(config.structure.dim, heads)
        self.distogram = Linear(config.pair_dim, heads.distogram_bins, init="zero")
        self.masked_msa = Linear(config.msa_dim, heads.masked_msa_types, init="zero")
        self.experimentally_resolved = Linear(config.single_dim, 37, init="zero")
        self.pae = None if heads.pae_bins is None else Linear(config.pair_dim, heads.pae_bins, init="zero")

    def forward(self, m_BSND: Tensor, z_BNNZ: Tensor, s_BND: Tensor, structure_BND: Tensor) -> Logits:
        half = self.distogram(z_BNNZ)
        return Logits(
            plddt=self.plddt(structure_BND),
            distogram=half + half.transpose(1, 2),
            masked_msa=self.masked_msa(m_BSND),
            experimentally_resolved=self.experimentally_resolved(s_BND),
            pae=None if self.pae is None else self.pae(z_BNNZ),
        )


def plddt(logits: Tensor) -> Tensor:
    """Expected lDDT of each CA, 0 to 100: logits[.., X] of bins of equal width."""
    return 100 * _expected(logits, _centres(1.0, logits.shape[-1], logits))


def predicted_aligned_error(logits: Tensor) -> Tensor:
    """Expected error in Angstrom of each residue's CA when aligned on another's frame: [.., N, N, X] -> [.., N, N].

    Row i: aligned on residue i. At most 31.75 with 64 bins.
    """
    return _expected(logits, _error_centres(logits))


def predicted_tm_score(logits: Tensor, mask: Tensor) -> Tensor:
    """Expected TM-score of the best alignment on one residue: logits[.., N, N, X], mask[.., N] -> [..].

    Supplement, 1.9.7; the length in d0 is that of the masked residues, at least 19.
    """
    aligned = aligned_tm_scores(logits, mask)
    return (aligned * mask.to(aligned.dtype)).amax(-1)


def aligned_tm_scores(logits: Tensor, mask: Tensor) -> Tensor:
    """Expected TM-score when aligned on each of some residues: logits[.., I, N, X], mask[.., N] -> [.., I]."""
    centres = _error_centres(logits)
    weights = mask.to(centres.dtype)  # in 16 bits neither a length nor its cube root is what it is
    terms = _tm_terms(centres, weights.sum(-1))
    expected = (torch.softmax(logits.to(centres.dtype), -1) * terms[..., None, None, :]).sum(-1)
    return (expected * weights[..., None, :]).sum(-1) / (1e-8 + weights.sum(-1, keepdim=True))


def chain_tm_scores(logits: Tensor, chains: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
    """Expected TM-scores when aligned on each of some residues of a complex, over residues of other chains alone.

    logits[I, N, X], chains[N] from 0 and own[I], those of the rows -> [I] over all other chains, with the complex's
    length in d0 (Evans et al. 2021, equation 2), and [I, chains] over each, with the length of both chains; the own
    chain's is over itself, with its length
    """
    centres = _error_centres(logits)
    shares = torch.softmax(logits.to(centres.dtype), -1)
    lengths = torch.bincount(chains)
    others = (chains != own[:, None]).to(shares.dtype)
    across = (shares @ _tm_terms(centres, chains.new_tensor(len(chains))) * others).sum(-1) / (1e-8 + others.sum(-1))
    by_chain = shares.new_zeros(len(own), len(lengths))
    for mine in own.unique().tolist():
        rows = own == mine
        for other in range(len(lengths)):
            length = lengths[mine] if other == mine else lengths[mine] + lengths[other]
            terms_IN = shares @ _tm_terms(centres, length)  # of all pairs: no part of the shares is copied
            by_chain[rows, other] = terms_IN[rows][:, chains == other].mean(-1)
    return across, by_chain


def _tm_terms(centres: Tensor, length: Tensor) -> Tensor:
    """1 / (1 + (error / d0)^2) of each bin, [.., X], with d0 of a length [..], at least 19."""
    d0 = 1.24 * (length.clamp(min=19) - 15) ** (1 / 3) - 1.8
    return 1 / (1 + centres**2 / d0[..., None].to(centres) ** 2)


def max_aligned_error(num_bins: int = 64) -> float:
    """The largest error that can be predicted, in Angstrom."""
    return float(_error_centres(torch.zeros(num_bins))[-1])


def distogram_edges(num_bins: int = 64) -> Tensor:
    """The num_bins - 1 edges between bins, in Angstrom."""
    return torch.linspace(*DISTOGRAM_EDGES, num_bins - 1)


def _error_centres(logits: Tensor) -> Tensor:
    """The edges go from 0 to PAE_LIMIT; the last bin, without end, has its centre as if it were like the others."""
    num_bins = logits.shape[-1]
    return _centres(PAE_LIMIT * num_bins / (num_bins - 2), num_bins, logits)


def _centres(last: float, num_bins: int, like: Tensor) -> Tensor:
    """Centres of bins of equal width from 0 to `last`."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    return last / num_bins * (torch.arange(num_bins, device=like.device, dtype=dtype) + 0.5)


def _expected(logits: Tensor, centres: Tensor) -> Tensor:
    return torch.softmax(logits.to(centres.dtype), -1) @ centres
