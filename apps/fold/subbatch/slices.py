"""The cutting of an operation into slices of a dim, each result of which goes to the place that it was computed from.

Where no gradient is recorded a result is written over its slice of the input (a residual in place), so that nothing of
the input's size is allocated. Where gradients are recorded the results are put side by side.

The pair representation may lie in host memory while the model is on a device. Then the next slice is brought to the
device, and the last result taken back, while one is worked with (`each`, core/link.py): both are on the device beside
what an operation in slices allocates. While a plan is made a tensor of no storage (all strides 0) stands for one in
host memory.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor

from core.link import Coming, Copy, Link
from core.pinned import host_empty
from core.streams import DeviceStreams

Method = Literal["whole", "rows", "channels", "copy", "cross"]
Cuts = Callable[..., list[slice]]


@dataclass(frozen=True)
class How:
    """The way an operation is done.

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
    """Keep only the slices that show what a loop allocates: one, two where parts gather, three of far z."""
    return [slice(first, min(first + rows, length)) for first in range(0, length, rows)[:enough]]


def stands_for_host(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.ndim > 0 and not any(x.stride())


def enough(x: Tensor, of_loop: int = 1) -> int:
    """The slices of a loop over x that show what it allocates: where x is far two are there and a result leaves."""
    return 3 if stands_for_host(x) else of_loop


# --- where z lies -----------------------------------------------------------------------------------------------------


def link_between(x: Tensor, like: Tensor) -> Link | None:
    """The link that brings x to where `like` lies; None: it is there."""
    return None if x.device == like.device else _link_to(like.device)


@cache
def _link_to(device: torch.device) -> Link:
    """One for a device: its streams and pinned places are used again."""
    return (_Planned if device.type == "meta" else Link)(DeviceStreams(device))


class _Planned(Link):
    """Keeps what a link keeps; nothing is there to be copied."""

    def _copied(self, stream: Any, after: Any, target: Tensor, source: Tensor) -> Copy:
        return Copy(None, target, source)


def put(place: Tensor, value: Tensor) -> None:
    """Write value to where it belongs, on whichever device that is, and wait until it is there."""
    if not stands_for_host(place):
        place.copy_(value)


def host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Zeros in host memory, pinned where there is a GPU."""
    return host_empty(prod(shape), dtype, torch.cuda.is_available()).view(shape).zero_()


def empty_beside(x: Tensor, *shape: int) -> Tensor:
    """Room of x's dtype where x lies."""
    if stands_for_host(x):
        return x.new_empty(()).expand(shape)
    if x.device.type == "cpu" and x.is_pinned():
        return host_empty(prod(shape), x.dtype, pinned=True).view(shape)
    return x.new_empty(shape)


def send(place: Tensor, value: Tensor) -> None:
    """Write value to where it belongs; where that is far it is there when the next loop begins (`each`)."""
    link = link_between(place, value)
    if link is None:
        place.copy_(value)
    else:
        link.send(place, value)


def settle(far: Tensor, like: Tensor) -> None:
    """Return when the host may read and write `far` itself, which may be far from `like`."""
    link = link_between(far, like)
    if link is not None:
        link.settle()


# --- loops ------------------------------------------------------------------------------------------------------------

Item = TypeVar("Item")


def each(
    far: Tensor,
    like: Tensor,
    items: Iterable[Item],
    views: Callable[[Item], Sequence[Tensor]],
    part: Callable[..., None],
) -> None:
    """part(item, *views(item)) one after the other; the views of the next item come while this one is worked with.

    far    lies where the views do, which may be far from `like`
    views  what is read of it.  What an item sends must be in no view of a later item.
    """
    link, items = link_between(far, like), list(items)
    if link is None:
        for item in items:
            part(item, *map(Coming, views(item)))
        return
    coming = deque[list[Coming]]()
    try:
        link.begin()
        for item, following in zip(items, [*items[1:], None]):
            if not coming:
                coming.append([link.fetch(x) for x in views(item)])
            if following is not None:
                coming.append([link.fetch(x) for x in views(following)])
            part(item, *coming.popleft())
        link.end()
    except BaseException:
        link.settle()  # before anybody has the memory that is copied from and to
        raise


def update(x: Tensor, cuts: Iterable[slice], dim: int, part: Callable[[slice], Tensor]) -> Tensor:
    """x with part(at) in place of its slices along `dim`: in x itself, or a new tensor where gradients are recorded."""
    if torch.is_grad_enabled():
        return torch.cat([part(at) for at in cuts], dim)
    for at in cuts:
        x.narrow(dim, at.start, at.stop - at.start).copy_(part(at))
    return x


def update_rows(z: Tensor, like: Tensor, cuts: Iterable[slice], part: Callable[..., Tensor], *beside: Tensor) -> Tensor:
    """The same of rows of z, [B, I, N, Z], wherever it lies: part(at, z[:, at]), which comes to where `like` lies.

    beside  tensors that lie where z does, of which part is given the rows, too
    """

    def views(at: slice) -> list[Tensor]:
        return [x[:, at] for x in (z, *beside)]

    if torch.is_grad_enabled():
        return torch.cat([part(at, *map(Coming, views(at))) for at in cuts], 1)
    each(z, like, cuts, views, lambda at, *rows: send(z[:, at], part(at, *rows)))
    return z


def collect(length: int, cuts: Iterable[slice], dim: int, part: Callable[[slice], Tensor]) -> Tensor:
    """The parts side by side along `dim`, in a tensor of its own; without gradients each goes to its place at once."""
    if torch.is_grad_enabled():
        return torch.cat([part(at) for at in cuts], dim)
    together = _Together(length, dim)
    for at in cuts:
        together.place(at, part(at))
    return together.whole


def collect_rows(
    z: Tensor, like: Tensor, cuts: Iterable[slice], dim: int, part: Callable[[slice, Coming], Tensor]
) -> Tensor:
    """The same of rows of z, wherever it lies: part(at, z[:, at]), which comes to where `like` lies."""
    if torch.is_grad_enabled():
        return torch.cat([part(at, Coming(z[:, at])) for at in cuts], dim)
    together = _Together(z.shape[1], dim)
    each(z, like, cuts, lambda at: [z[:, at]], lambda at, rows: together.place(at, part(at, rows)))
    return together.whole


class _Together:
    """Parts side by side along `dim`."""

    whole: Tensor

    def __init__(self, length: int, dim: int):
        self.length, self.dim, self._begun = length, dim, False

    def place(self, at: slice, value: Tensor) -> None:
        if not self._begun:
            self.whole = value.new_empty(*value.shape[: self.dim], self.length, *value.shape[self.dim + 1 :])
            self._begun = True
        self.whole.narrow(self.dim, at.start, at.stop - at.start).copy_(value)
