"""The Evoformer's blocks and stacks (algorithms 6, 16 and 18).

Execution is no part of it: kernels choose themselves by device, and what slices, shards or recomputes a block wraps it
from outside.

Shapes: B batch, S sequences, N residues, D = c_m channels of the MSA, Z = c_z of pairs.
"""

from torch import Tensor, nn

from apps.fold.model.config import EvoformerConfig, PairConfig
from apps.fold.model.layers import Transition
from apps.fold.model.msa import ColumnAttention, ColumnGlobalAttention, OuterProductMean, RowAttentionWithPairBias
from apps.fold.model.triangle import TriangleAttention, TriangleMultiplication


class PairUpdates(nn.Module):
    """The five updates of z: triangles over outgoing and incoming edges, around starting and ending nodes, transition.

    In an Evoformer block multiplication comes first (algorithm 6); in the template stack attention does (16), unlike
    in the paper's order of names, but as released weights were trained.
    """

    def __init__(self, dim: int, config: PairConfig, *, attention_first: bool = False):
        super().__init__()
        self.attention_first = attention_first
        self.outgoing = TriangleMultiplication(dim, config.product_dim, outgoing=True, dropout=config.dropout)
        self.incoming = TriangleMultiplication(dim, config.product_dim, outgoing=False, dropout=config.dropout)
        heads = (config.num_heads, config.head_dim)
        self.starting = TriangleAttention(dim, *heads, starting=True, dropout=config.dropout)
        self.ending = TriangleAttention(dim, *heads, starting=False, dropout=config.dropout)
        self.transition = Transition(dim, config.transition_factor)

    def forward(self, z_BNNZ: Tensor, mask_BNN: Tensor) -> Tensor:
        multiply, attend = (self.outgoing, self.incoming), (self.starting, self.ending)
        for update in (*attend, *multiply) if self.attention_first else (*multiply, *attend):
            z_BNNZ = update(z_BNNZ, mask_BNN)
        return self.transition(z_BNNZ)


class EvoformerBlock(nn.Module):
    """One block (algorithm 6). With `global_columns` it is a block of the extra MSA's stack (algorithm 18).

    In the models of complexes the outer product mean comes first (`outer_first`).
    """

    def __init__(self, msa_dim: int, pair_dim: int, config: EvoformerConfig, *, global_columns: bool = False):
        super().__init__()
        heads = (config.msa_heads, config.msa_head_dim)
        self.outer_first = False
        self.row_attention = RowAttentionWithPairBias(msa_dim, pair_dim, *heads, dropout=config.msa_dropout)
        self.column_attention = (ColumnGlobalAttention if global_columns else ColumnAttention)(msa_dim, *heads)
        self.msa_transition = Transition(msa_dim, config.msa_transition_factor)
        self.outer_product_mean = OuterProductMean(msa_dim, pair_dim, config.outer_dim)
        self.pair = PairUpdates(pair_dim, config.pair)

    def forward(
        self, m_BSND: Tensor, z_BNNZ: Tensor, msa_mask_BSN: Tensor, pair_mask_BNN: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.outer_first:
            z_BNNZ = self.outer_product_mean(m_BSND, z_BNNZ, msa_mask_BSN)
        m_BSND = self.row_attention(m_BSND, z_BNNZ, msa_mask_BSN)
        m_BSND = self.column_attention(m_BSND, msa_mask_BSN)
        m_BSND = self.msa_transition(m_BSND)
        if not self.outer_first:
            z_BNNZ = self.outer_product_mean(m_BSND, z_BNNZ, msa_mask_BSN)
        return m_BSND, self.pair(z_BNNZ, pair_mask_BNN)
