"""One transformer block: attention and MLP (or experts), each with a norm and a residual.

norm_first            x + f(norm(x))            GPT-2 and all later ones
parallel_residual     x + f(norm(x)) + g(norm'(x))   GPT-NeoX, GPT-J: attention and MLP see the same x
not norm_first        norm(x + f(x))            OPT-350m, the original transformer
residual_after_norm   n + f(n), n = norm(x)     BLOOM's `apply_residual_connection_post_layernorm`
out norms             x + norm(f(norm(x)))      Gemma 3's, of which a block has four
"""

from typing import Any

from torch import Tensor, nn

from core.nn.attention import Attention
from core.nn.mlp import MLP
from core.nn.moe import MoE


class Block(nn.Module):
    def __init__(
        self,
        attention: Attention,
        mlp: MLP | MoE,
        attention_norm: nn.Module,
        mlp_norm: nn.Module,
        *,
        norm_first: bool = True,
        residual_after_norm: bool = False,
        attention_out_norm: nn.Module | None = None,
        mlp_out_norm: nn.Module | None = None,
        parallel_residual: bool = False,
    ):
        super().__init__()
        self.attention_norm = attention_norm
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.attention_out_norm, self.mlp_out_norm = attention_out_norm, mlp_out_norm
        self.norm_first = norm_first
        self.residual_after_norm = residual_after_norm
        self.parallel_residual = parallel_residual

    def forward(
        self,
        x_BLD: Tensor,
        positions_BL: Tensor,
        rotary: tuple[Tensor, Tensor] | None = None,
        mask: Tensor | None = None,
        context: Any = None,
    ) -> Tensor:
        """x[B, L, D] -> [B, L, D]; the other arguments are handed on to attention, and to experts."""
        if not self.norm_first:
            x_BLD = self.attention_norm(x_BLD + self.attention(x_BLD, positions_BL, rotary, mask, context))
            return self.mlp_norm(x_BLD + self.mlp(x_BLD, positions_BL, mask, context))
        normed = self.attention_norm(x_BLD)
        attended = self.attention(normed, positions_BL, rotary, mask, context)
        if self.attention_out_norm is not None:
            attended = self.attention_out_norm(attended)
        x_BLD, source = (normed if self.residual_after_norm else x_BLD) + attended, x_BLD
        normed = self.mlp_norm(source if self.parallel_residual else x_BLD)
        out = self.mlp(normed, positions_BL, mask, context)
        if self.mlp_out_norm is not None:
            out = self.mlp_out_norm(out)
        return (normed if self.residual_after_norm else x_BLD) + out
