"""Gated multi-head attention over one dim, with a mask and a bias: what rows, columns and triangles have in common.

    q, k, v = x Wqkv;   o = softmax(q k^T / sqrt(K) + bias) v over the keys whose mask is not 0
    result  = residual + dropout * ((sigmoid(x Wg + bg) o) Wo + bo)

(algorithms 7, 8, 13 and 14, lines 2 to 7). `attend` is a slot: by default core's flash attention, which is torch's on a
CPU; other attention is put there from outside. A query without a visible key has o = 0.

Shapes: X batch (sequences that share a bias lie side by side), L positions, D channels, H heads, K head size.
"""

from typing import Protocol

import torch
from torch import Tensor, nn

from apps.fold.model.layers import Linear, initialise_
from core.kernels.attention import attention
from core.kernels.gated_output import gated_output


class Attend(Protocol):
    """The slot's function: q[X, L, H, K], k and v[X, S, J, K], bias[X', H, L, S] or None, mask[X, S] -> o[X, L, H, K].

    X' divides X; each bias is shared by X / X' neighbours. Query head h takes key/value head h J // H.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, mask: Tensor | None = None
    ) -> Tensor: ...


class GatedAttention(nn.Module):
    """Self-attention; see the module's docstring."""

    def __init__(self, dim: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        inner = num_heads * head_dim
        self.qkv = Linear(dim, 3 * inner, bias=False, init="glorot")
        self.gate = Linear(dim, inner, init="gate")
        self.out_weight = nn.Parameter(torch.empty(dim, inner))
        self.out_bias = nn.Parameter(torch.empty(dim))
        self.attend: Attend = attention
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_(self.out_weight, "zero")
        nn.init.zeros_(self.out_bias)

    def forward(
        self,
        x_XLD: Tensor,
        mask_XL: Tensor,
        *,
        residual: Tensor,
        bias: Tensor | None = None,
        dropout: Tensor | None = None,
    ) -> Tensor:
        """residual + dropout * attention(x), of x's shape.

        x         [X, L, D], normalised
        bias      [X', H, L, L], X' dividing X; or None
        residual  [X, L, D]; dropout broadcasts to it
        """
        q, k, v = self.qkv(x_XLD).unflatten(-1, (3, self.num_heads, self.head_dim)).unbind(2)
        o_XLHK = self.attend(q, k, v, bias=bias, mask=mask_XL)
        return gated_output(
            o_XLHK.flatten(2), self.gate(x_XLD), self.out_weight, self.out_bias, residual=residual, mask=dropout
        )


class GlobalAttention(nn.Module):
    """Attention of one query for all positions, the mean over them, with one key/value head (algorithm 19, lines 2 on).

    The result is gated and projected position by position.
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, head_dim
        inner = num_heads * head_dim
        self.query = Linear(dim, inner, bias=False, init="glorot")
        self.key_value = Linear(dim, 2 * head_dim, bias=False, init="glorot")
        self.gate = Linear(dim, inner, init="gate")
        self.out_weight = nn.Parameter(torch.empty(dim, inner))
        self.out_bias = nn.Parameter(torch.empty(dim))
        self.attend: Attend = attention
        self.reset_parameters()

    def reset_parameters(self) -> None:
        initialise_(self.out_weight, "zero")
        nn.init.zeros_(self.out_bias)

    def forward(self, x_XLD: Tensor, mask_XL: Tensor, *, residual: Tensor) -> Tensor:
        """residual + attention(x), of x's shape; x[X, L, D], normalised."""
        weight_XL1 = mask_XL.to(x_XLD.dtype)[..., None]
        mean_X1D = (weight_XL1 * x_XLD).sum(1, keepdim=True) / (weight_XL1.sum(1, keepdim=True) + 1e-10)
        q_X1HK = self.query(mean_X1D).unflatten(-1, (self.num_heads, self.head_dim))
        k, v = self.key_value(x_XLD).unflatten(-1, (2, 1, self.head_dim)).unbind(2)
        o_X1 = self.attend(q_X1HK, k, v, mask=mask_XL).flatten(2)
        gate = self.gate(x_XLD)
        return gated_output(o_X1.expand_as(gate), gate, self.out_weight, self.out_bias, residual=residual)
