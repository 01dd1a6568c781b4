"""Linear maps with AlphaFold's initialisations, layer norm, shared dropout, transitions.

A parameter that a fused function reads (core.kernels) belongs to the module that calls it, not to a submodule, so that
whoever gathers or moves weights module by module has it in place when it is read.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from core.kernels.norms import layer_norm
from core.nn.linear import Linear as PlainLinear

Init = Literal["lecun", "relu", "glorot", "gate", "zero"]


def initialise_(weight: Tensor, init: Init) -> None:
    """Fill weight[out, in] (supplement, 1.11.4).

    lecun   truncated normal, variance 1 / in
    relu    the same, variance 2 / in: what comes before a ReLU
    glorot  uniform, variance 2 / (in + out): queries, keys and values
    gate    0 (with a bias of 1, gates begin open)
    zero    0: what ends a residual branch

    On the meta device there is nothing to fill.
    """
    if weight.is_meta:
        return
    if init in ("gate", "zero"):
        nn.init.zeros_(weight)
    elif init == "glorot":
        nn.init.xavier_uniform_(weight)
    else:
        std = math.sqrt((2.0 if init == "relu" else 1.0) / weight.shape[1]) / 0.87962566103423978
        nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)  # cut at two deviations, whence the divisor


class Linear(PlainLinear):
    """y = x W^T + b, weight[out, in]."""

    def __init__(self, in_dim: int, out_dim: int, bias: bool = True, init: Init = "lecun"):
        self.init: Init = init
        super().__init__(in_dim, out_dim, bias=bias)

    def reset_parameters(self) -> None:
        initialise_(self.weight, self.init)
        if self.bias is not None:
            nn.init.constant_(self.bias, 1.0 if self.init == "gate" else 0.0)


class LayerNorm(nn.LayerNorm):
    """Layer norm over the last dim, with weight and bias, by core's kernel."""

    def forward(self, input: Tensor) -> Tensor:
        y = layer_norm(input, self.weight, self.bias, self.eps)
        assert isinstance(y, Tensor)
        return y


class SharedDropout(nn.Module):
    """A factor for dropout that is the same along one dim (supplement, 1.11.6): dropout by rows or by columns.

    torch's own module draws it, to which `core.parallel.draws` gives the masks of one rank.

    dim  the dim of x[.., X, Y, C] along which one draw is shared: -3 (by rows) or -2 (by columns)
    """

    def __init__(self, rate: float, dim: int = -3):
        super().__init__()
        self.drop, self.dim = nn.Dropout(rate), dim

    def forward(self, x: Tensor) -> Tensor | None:
        """The factors of an update of x's shape, [.., 1, Y, C] or [.., X, 1, C]; None: no factor."""
        if not self.training or self.drop.p == 0:
            return None
        shape = list(x.shape)
        shape[self.dim] = 1
        return self.drop(x.new_ones(shape))


class Transition(nn.Module):
    """x + W2 relu(W1 norm(x)), alike for the MSA (algorithm 9) and for pairs (15): x[.., D], `factor` D inside.

    Not masked, as the original's is not: padding holds values that nothing reads.
    """

    def __init__(self, dim: int, factor: int):
        super().__init__()
        self.norm = LayerNorm(dim)
        self.up = Linear(dim, factor * dim, init="relu")
        self.down = Linear(factor * dim, dim, init="zero")

    def forward(self, x: Tensor) -> Tensor:
        added = self.down(torch.relu_(self.up(self.norm(x))))  # its gradient is known by what comes out
        return added.add_(x) if added.dtype == x.dtype else x + added
