"""A parameter while its chunk is not on the device: name, shape, dtype and device as ever, and no values.

It changes its class, and has the memory of one element: shape, dtype, gradient and hooks can be asked for, everything
that would compute with it raises. What gets past Python (a compiled graph, a C++ operator) reads NaN. As long as the
parameter is on the device it is exactly what it was, so nothing stands between it and the operators. A gradient that
waits on a disk is absent in the same way.
"""

from typing import Any

import torch
from torch import Tensor, nn

from core.compat import without_torch_function

_ALLOWED = {
    "__hash__", "__repr__", "__set__", "dim", "element_size", "get_device", "is_complex", "is_contiguous",
    "is_floating_point", "nelement",
    "numel", "register_hook", "register_post_accumulate_grad_hook", "requires_grad_", "size", "stride",
    "untyped_storage",
}  # fmt: skip
_VALUES = {"data", "T", "mT", "H", "mH", "real", "imag"}


def _refuse(tensor: Tensor, func: Any) -> None:
    """Raises RuntimeError unless `func` asks for something that is known without values."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        attribute = getattr(getattr(func, "__self__", None), "__name__", "")
        allowed = attribute not in _VALUES
    else:
        allowed = name in _ALLOWED
    if allowed:
        return
    named: str = tensor.gemini_name  # pyright: ignore[reportAttributeAccessIssue]
    if isinstance(tensor, AbsentGradient):
        raise RuntimeError(f"the gradient of {named} waits on the disk for its update, and {name} reads it before")
    raise RuntimeError(
        f"the parameter {named} is not on the device: Gemini brings it for the forward and backward of the module that "
        f"it belongs to, and {name} reads it outside of them"
    )


def _intercept(cls: type, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
    for tensor in (*args, *(kwargs or {}).values()):
        if isinstance(tensor, _ABSENT):
            _refuse(tensor, func)
        elif isinstance(tensor, list | tuple):
            for element in tensor:
                if isinstance(element, _ABSENT):
                    _refuse(element, func)
    with without_torch_function():
        return func(*args, **(kwargs or {}))


class AbsentParameter(nn.Parameter):
    __torch_function__ = classmethod(_intercept)  # pyright: ignore[reportAssignmentType]

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"AbsentParameter({tuple(self.shape)}, dtype={self.dtype})"


class AbsentTensor(Tensor):
    """The same for the local tensor of a DTensor."""

    __torch_function__ = classmethod(_intercept)  # pyright: ignore[reportAssignmentType]

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"AbsentTensor({tuple(self.shape)}, dtype={self.dtype})"


class AbsentGradient(Tensor):
    """A gradient that has been reduced, and waits outside of memory; `waiting` is what is known of it."""

    __torch_function__ = classmethod(_intercept)  # pyright: ignore[reportAssignmentType]
    waiting: Any

    def __repr__(self, *_: Any, **__: Any) -> str:
        return f"AbsentGradient({tuple(self.shape)}, dtype={self.dtype})"


_ABSENT = (AbsentParameter, AbsentTensor, AbsentGradient)


def placeholder(like: Tensor) -> Tensor:
    """A tensor of that shape, dtype and device with the memory of one element: NaN, of integers 0."""
    value = float("nan") if like.is_floating_point() or like.is_complex() else 0
    return torch.full((), value, dtype=like.dtype, device=like.device).expand(like.shape)


def absent_gradient(master: Tensor, name: str, waiting: Any) -> Tensor:
    """What stands for the gradient of a master, of a parameter of that name, while it waits."""
    made = placeholder(master)
    made.gemini_name = name  # pyright: ignore[reportAttributeAccessIssue]
    made.waiting = waiting  # pyright: ignore[reportAttributeAccessIssue]
    kind: Any = AbsentGradient
    made.__class__ = kind
    return made


def withdraw(tensor: Tensor, name: str, absent: Tensor) -> None:
    """Make a parameter, or the local tensor of one, absent."""
    tensor.data = absent
    tensor.gemini_name = name  # pyright: ignore[reportAttributeAccessIssue]
    kind: Any = AbsentParameter if isinstance(tensor, nn.Parameter) else AbsentTensor
    tensor.__class__ = kind


def give_back(tensor: Tensor, kind: type, value: Tensor) -> None:
    """Make it what it was, with this memory."""
    tensor.__class__ = kind
    tensor.data = value
