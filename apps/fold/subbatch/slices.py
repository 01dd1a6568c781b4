"""How an operation is cut: into slices of a dim, of which each result goes to the place that it was computed from.

Where no gradient is recorded a result is written over its slice of the input (a residual in place), so that nothing of
the input's size is allocated. Where gradients are recorded the results are put side by side.

The pair representation may lie in host memory while the model is on a device. `fetch` brings a slice to the device, and
`put` takes the result back. While a plan is made a tensor of no storage (all strides 0) stands for one in host memory.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Method = Literal["whole", "rows", "channels", "copy", "cross"]
Cuts = Callable[..., list[slice]]


@dataclass(frozen=True)
class How:
    """How an operation is done.

    whole     as the model has it
    rows      in slices of `rows`
    channels  a triangle product `tile` channels at a time, what comes before and after it in slices of `rows`
    copy      a triangle product with a copy of one factor, in slices of `rows`
    cross     a triangle product in the cross order, in tiles of `tile`, whose inputs are made in slices of `rows`
    """

    method: Method
    rows: int
    tile: int = 0

    def __str__(self) -> str:
        if self.method == "whole":
            return "whole"
        if self.method == "cross":
            return f"cross order, tiles of {self.tile}, slices of {self.rows}"
        if self.method == "channels":
            return f"{self.tile} channels at a time, slices of {self.rows}"
        return f"{'with a copy, ' * (self.method == 'copy')}slices of {self.rows}"


def every(length: int, rows: int, enough: int = 1) -> list[slice]:
    """All slices of at most `rows`, in order."""
    return [slice(first, min(first + rows, length)) for first in range(0, length, rows)]


def first_only(length: int, rows: int, enough: int = 1) -> list[slice]:
    """Of these only so many as are enough to see what a loop over them allocates: one, or two where results gather."""
    return [slice(first, min(first + rows, length)) for first in range(0, length, rows)[:enough]]


def stands_for_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.ndim > 0 and not any(x.stride())


def fetch(x: Tensor, like: Tensor) -> Tensor:
    """x on the device of `like`."""
    return x if x.device == like.device else x.to(like.device, non_blocking=True)


def put(place: Tensor, value: Tensor) -> None:
    """Write value to where it belongs, on whichever device that is."""
    if not stands_for_host(place):
        place.copy_(value)


def empty_beside(x: Tensor, *shape: int) -> Tensor:
    """Room of x's dtype where x lies."""
    if stands_for_host(x):
        return x.new_empty(()).expand(shape)
    pinned = x.device.type == "cpu" and x.is_pinned()
    return torch.empty(shape, dtype=x.dtype, device=x.device, pin_memory=pinned)


def update(x: Tensor, cuts: Iterable[slice], dim: int, part: Callable[[slice], Tensor]) -> Tensor:
    """x with part(at) in place of its slices along `dim`: in x itself, or a new tensor where gradients are recorded."""
    if torch.is_grad_enabled():
        return torch.cat([part(at) for at in cuts], dim)
    for at in cuts:
        put(x.narrow(dim, at.start, at.stop - at.start), part(at))
    return x


def collect(length: int, cuts: Iterable[slice], dim: int, part: Callable[[slice], Tensor]) -> Tensor:
    """The parts side by side along `dim`, in a tensor of its own; without gradients each goes to its place at once."""
    if torch.is_grad_enabled():
        return torch.cat([part(at) for at in cuts], dim)
    out: list[Tensor] = []

    def place(at: slice, value: Tensor) -> None:
        if not out:
            shape = [*value.shape[:dim], length, *value.shape[dim + 1 :]]
            out.append(torch.empty(shape, dtype=value.dtype, device=value.device))
        out[0].narrow(dim, at.start, at.stop - at.start).copy_(value)

    for at in cuts:
        place(at, part(at))
    return out[0]
