"""Stacks of matrices [E, O, I] in modules of others, as transformers' experts are, for K-FAC.

Such a module says nowhere which rows each matrix sees. But where it computes with one matrix at a time,
`F.linear(x, stack[e])`, the call tells: its weight is a view of the parameter, and where it begins says which matrix it
is. While a forward is recorded, all calls of `F.linear` are looked at. What computes with several matrices at once (a
grouped product, an einsum) is not seen, and refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from core.config import UserError
from core.optim.kfac_layers import Use


@dataclass
class Stack:
    """A stack in a module that K-FAC does not know.

    layers  of each matrix its place among all layers
    seen    whether the module was ever seen to compute with a matrix
    """

    use: Use
    layers: Mapping[int, int]
    seen: bool = False

    def matrix_of(self, weight: Tensor) -> int | None:
        """Which matrix a weight is; None: it is none of them."""
        own = getattr(self.use.module, self.use.leaf)
        if isinstance(own, DTensor) or weight.shape != own.shape[1:] or weight.stride() != own.stride()[1:]:
            return None
        if weight.untyped_storage().data_ptr() != own.untyped_storage().data_ptr():
            return None
        index, rest = divmod(weight.storage_offset() - own.storage_offset(), own.stride(0))
        return index if not rest and 0 <= index < own.shape[0] else None

    def require_seen(self) -> None:
        """Raises UserError where a look has passed, and no matrix was seen in use."""
        if not self.seen:
            kind, name = type(self.use.module).__name__, self.use.name or "the model"
            raise UserError(
                f"kfac: {name}.{self.use.leaf} is a stack of {len(self.layers)} matrices, and {kind} does not say "
                "which rows each of them sees: it neither calls F.linear with one of them, as transformers' experts do "
                "with experts_implementation=eager, nor is a core.nn.experts.GroupedLinear; leave it to AdamW: "
                f"--optim.exclude … '{self.use.name}'"
            )


class LinearCalls(TorchFunctionMode):
    """Tells of each call of F.linear with a matrix of a stack: take(layer, use, x, y)."""

    def __init__(self, stacks: Sequence[Stack], take: Callable[[int, Use, Tensor, Tensor], None]):
        super().__init__()
        self._stacks, self._take = stacks, take

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        if func is F.linear and torch.is_grad_enabled():
            given = dict(zip(("input", "weight"), args)) | (kwargs or {})
            for stack in self._stacks:
                matrix = stack.matrix_of(given["weight"])
                if matrix is not None:
                    stack.seen = True
                    self._take(stack.layers[matrix], stack.use, given["input"], y)
        return y
