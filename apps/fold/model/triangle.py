"""Triangle updates of the pair representation, on core's kernels.

Shapes: B batch, N residues, Z = c_z channels, C channels of the product, H heads.
"""

from typing import Any

import torch
from torch import Tensor, nn

from apps.fold.model.attention import GatedAttention
from apps.fold.model.layers import LayerNorm, Linear, SharedDropout, initialise_
from core.kernels.gated_output import gated_residual
from core.kernels.triangle import triangle_multiply


class TriangleMultiplication(nn.Module):
    """z + the triangle multiplicative update over outgoing (algorithm 11) or incoming edges (12); dropout by rows.

    Its parameters are those of `core.kernels.triangle.triangle_multiply`; in_weight holds the projections of a and of
    b, then their gates.
    """

    def __init__(self, dim: int, product_dim: int, *, outgoing: bool, dropout: float):
        super().__init__()
        self.outgoing = outgoing
        self.dropout = SharedDropout(dropout)
        shapes = {
            "norm_weight": (dim,),
            "norm_bias": (dim,),
            "in_weight": (4 * product_dim, dim),
            "in_bias": (4 * product_dim,),
            "product_norm_weight": (product_dim,),
            "product_norm_bias": (product_dim,),
            "out_weight": (dim, product_dim),
            "out_bias": (dim,),
            "gate_weight": (dim, dim),
            "gate_bias": (dim,),
        }
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for name in ("norm_weight", "product_norm_weight", "gate_bias"):
            nn.init.ones_(self.get_parameter(name))
        for name in ("norm_bias", "product_norm_bias", "out_bias", "gate_weight", "out_weight", "in_bias"):
            nn.init.zeros_(self.get_parameter(name))
        projections, gates = self.get_parameter("in_weight").data.chunk(2)
        for part in projections.chunk(2):
            initialise_(part, "lecun")
        initialise_(gates, "gate")
        nn.init.ones_(self.get_parameter("in_bias").data.chunk(2)[1])

    def forward(self, z_BNNZ: Tensor, mask_BNN: Tensor) -> Tensor:
        factor = self.dropout(z_BNNZ)
        weights: dict[str, Any] = dict(self.named_parameters())
        update = triangle_multiply(
            z_BNNZ,
            mask_BNN,
            outgoing=self.outgoing,
            residual=z_BNNZ if factor is None else None,
            **weights,
        )
        return update if factor is None else gated_residual(update, mask=factor, residual=z_BNNZ)


class TriangleAttention(nn.Module):
    """z + attention among the edges that start at a node (algorithm 13), or that end there (14).

    Around the ending node it is the same on the transpose. Dropout is shared along the dim that attention runs over
    the outside of: rows for starting nodes, columns for ending nodes.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, *, starting: bool, dropout: float):
        super().__init__()
        self.starting = starting
        self.norm = LayerNorm(dim)
        self.bias = Linear(dim, num_heads, bias=False)
        self.attention = GatedAttention(dim, num_heads, head_dim)
        self.dropout = SharedDropout(dropout)  # of z as attention sees it, transposed for ending nodes

    def forward(self, z_BNNZ: Tensor, mask_BNN: Tensor) -> Tensor:
        if not self.starting:
            return self._around(z_BNNZ.transpose(1, 2), mask_BNN.transpose(1, 2)).transpose(1, 2)
        return self._around(z_BNNZ, mask_BNN)

    def _around(self, z_BNNZ: Tensor, mask_BNN: Tensor) -> Tensor:
        n_BNNZ = self.norm(z_BNNZ)
        return self.edges(n_BNNZ, z_BNNZ, mask_BNN, self.pair_bias(n_BNNZ), self.dropout(z_BNNZ))

    def pair_bias(self, n_BINZ: Tensor) -> Tensor:
        """The bias [B, H, I, N] of some rows of the norm of z (as attention sees it)."""
        return self.bias(n_BINZ).permute(0, 3, 1, 2)

    def edges(
        self, n_BINZ: Tensor, z_BINZ: Tensor, mask_BIN: Tensor, bias_BHNN: Tensor, factor_B1NZ: Tensor | None = None
    ) -> Tensor:
        """z + attention in each of some rows, of which n is the norm; the bias is that of all rows."""
        if factor_B1NZ is not None:
            factor_B1NZ = factor_B1NZ.expand(-1, z_BINZ.shape[1], -1, -1).flatten(0, 1)
        out = self.attention(
            n_BINZ.flatten(0, 1),
            mask_BIN.flatten(0, 1),
            bias=bias_BHNN,
            residual=z_BINZ.flatten(0, 1),
            dropout=factor_B1NZ,
        )
        return out.view_as(n_BINZ)
