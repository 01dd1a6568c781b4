"""The feed-forward part of a block, plain or gated.

Plain: down(act(up(x))).  Gated: down(act(gate(x)) * up(x)) (Shazeer, "GLU Variants Improve Transformer", 2020).
Shapes: B batch, L length, D model, F hidden.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor, nn

from core.nn.linear import Linear

ActivationName = Literal["gelu", "gelu_tanh", "relu", "silu", "swiglu", "geglu", "geglu_tanh"]

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
    "swiglu": F.silu,
    "geglu": F.gelu,
    "geglu_tanh": partial(F.gelu, approximate="tanh"),
}


def is_gated(activation: ActivationName) -> bool:
    return activation in ("swiglu", "geglu", "geglu_tanh")


def activation_function(activation: ActivationName) -> Callable[[Tensor], Tensor]:
    """The function between the layers; of a gated one that of the gate."""
    return _FUNCTIONS[activation]


class MLP(nn.Module):
    def __init__(self, dim: int, hidden: int, activation: ActivationName, bias: bool):
        super().__init__()
        self.up = Linear(dim, hidden, bias=bias)
        self.gate = Linear(dim, hidden, bias=bias) if is_gated(activation) else None
        self.down = Linear(hidden, dim, bias=bias)
        self.activation = activation_function(activation)

    def forward(self, x_BLD: Tensor, *_step: Any) -> Tensor:
        """x[.., D] -> [.., D]; what else a block hands on (see `core.nn.moe`) makes no difference to it."""
        if self.gate is None:
            return self.down(self.activation(self.up(x_BLD)))
        return self.down(self.activation(self.gate(x_BLD)) * self.up(x_BLD))
