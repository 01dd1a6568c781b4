"""The MSA's layers: attention along rows and columns, and the mean of outer products that goes to the pairs.

Shapes: B batch, S sequences, N residues, D = c_m channels of the MSA, Z = c_z of pairs, H heads, C outer channels.
"""

import torch
from torch import Tensor, nn

from apps.fold.model.attention import GatedAttention, GlobalAttention
from apps.fold.model.layers import LayerNorm, Linear, SharedDropout


class RowAttentionWithPairBias(nn.Module):
    """Attention among the residues of each sequence, biased by the pairs (algorithm 7); dropout by rows."""

    def __init__(self, msa_dim: int, pair_dim: int, num_heads: int, head_dim: int, dropout: float):
        super().__init__()
        self.norm = LayerNorm(msa_dim)
        self.pair_norm = LayerNorm(pair_dim)
        self.bias = Linear(pair_dim, num_heads, bias=False)
        self.attention = GatedAttention(msa_dim, num_heads, head_dim)
        self.dropout = SharedDropout(dropout)

    def forward(self, m_BSND: Tensor, z_BNNZ: Tensor, mask_BSN: Tensor) -> Tensor:
        return self.sequences(m_BSND, mask_BSN, self.pair_bias(z_BNNZ), self.dropout(m_BSND))

    def pair_bias(self, z_BINZ: Tensor) -> Tensor:
        """The bias [B, H, I, N] of some rows of z."""
        return self.bias(self.pair_norm(z_BINZ)).permute(0, 3, 1, 2)

    def sequences(
        self, m_BSND: Tensor, mask_BSN: Tensor, bias_BHNN: Tensor, factor_B1ND: Tensor | None = None
    ) -> Tensor:
        """m + attention in each of some sequences."""
        if factor_B1ND is not None:
            factor_B1ND = factor_B1ND.expand(-1, m_BSND.shape[1], -1, -1).flatten(0, 1)
        rows, mask = m_BSND.flatten(0, 1), mask_BSN.flatten(0, 1)
        return self.attention(self.norm(rows), mask, bias=bias_BHNN, residual=rows, dropout=factor_B1ND).view_as(m_BSND)


class ColumnAttention(nn.Module):
    """Attention among the sequences at each residue (algorithm 8)."""

    def __init__(self, dim: int, num_heads: int, head_dim: int):
        super().__init__()
        self.norm = LayerNorm(dim)
        self.attention = GatedAttention(dim, num_heads, head_dim)

    def forward(self, m_BSND: Tensor, mask_BSN: Tensor) -> Tensor:
        columns = m_BSND.transpose(1, 2).flatten(0, 1)
        out = self.attention(self.norm(columns), mask_BSN.transpose(1, 2).flatten(0, 1), residual=columns)
        return out.unflatten(0, (m_BSND.shape[0], -1)).transpose(1, 2)


class ColumnGlobalAttention(nn.Module):
    """The same with one query for all sequences, for the many rows of the extra MSA (algorithm 19)."""

    def __init__(self, dim: int, num_heads: int, head_dim: int):
        super().__init__()
        self.norm = LayerNorm(dim)
        self.attention = GlobalAttention(dim, num_heads, head_dim)

    def forward(self, m_BSND: Tensor, mask_BSN: Tensor) -> Tensor:
        columns = m_BSND.transpose(1, 2).flatten(0, 1)
        out = self.attention(self.norm(columns), mask_BSN.transpose(1, 2).flatten(0, 1), residual=columns)
        return out.unflatten(0, (m_BSND.shape[0], -1)).transpose(1, 2)


class OuterProductMean(nn.Module):
    """z + the mean over sequences of an outer product of residues i and j, projected (algorithm 10).

    a, b = mask (norm(m) W);   z_ij += (flat(sum_s a_si (x) b_sj) Wo + bo) / (1e-3 + sum_s mask_si mask_sj)

    The bias bo is divided, too, as in the original: where no sequence covers a pair, it counts a thousandfold.
    """

    def __init__(self, msa_dim: int, pair_dim: int, outer_dim: int):
        super().__init__()
        self.norm = LayerNorm(msa_dim)
        self.left = Linear(msa_dim, outer_dim)
        self.right = Linear(msa_dim, outer_dim)
        self.out = Linear(outer_dim * outer_dim, pair_dim, init="zero")

    def forward(self, m_BSND: Tensor, z_BNNZ: Tensor, mask_BSN: Tensor) -> Tensor:
        mask_BSN = mask_BSN.to(m_BSND.dtype)
        a_BSNC, b_BSNC = self.factors(m_BSND, mask_BSN)
        return z_BNNZ + self.update(a_BSNC, b_BSNC, mask_BSN, mask_BSN)

    def factors(self, m_BSND: Tensor, mask_BSN: Tensor) -> tuple[Tensor, Tensor]:
        """a and b, [B, S, N, C] both."""
        n = self.norm(m_BSND)
        return self.left(n) * mask_BSN[..., None], self.right(n) * mask_BSN[..., None]

    def update(self, a_BSIC: Tensor, b_BSJC: Tensor, mask_BSI: Tensor, mask_BSJ: Tensor) -> Tensor:
        """The addend of residues I and J to z: [B, I, J, Z]."""
        outer_BIJCC = torch.einsum("bsic,bsjd->bijcd", a_BSIC, b_BSJC)
        count_BIJ1 = torch.einsum("bsi,bsj->bij", mask_BSI, mask_BSJ)[..., None]
        return self.out(outer_BIJCC.flatten(-2)) / (1e-3 + count_BIJ1)
