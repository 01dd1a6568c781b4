"""The dims of a model's tensors as products and concatenations of axes, and which axes of different tensors are one.

A tensor's dim is a list of axes, the outermost first, whose sizes multiply to the dim's: the rows of a projection are
heads x features of a head once the model has looked at them so. An axis that a model takes apart becomes a product of
inner axes (`view`) or a concatenation of them (`split`, `chunk`, slices); one that two tensors share, since an operator
matches their elements one by one, is one axis (`unify`). What cannot be told apart any more is frozen: never cut.

Union-find with refinement: taking an axis apart takes apart all that it is one with.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from math import prod
from typing import Literal

Frozen = list[tuple["Axis", str]]
"""Axes that were forbidden to be cut, and why."""
_noted: ContextVar[Frozen | None] = ContextVar("noted", default=None)


@contextmanager
def noting() -> Iterator[Frozen]:
    """Note which axes are frozen inside, also those that were frozen before."""
    token = _noted.set(frozen := [])
    try:
        yield frozen
    finally:
        _noted.reset(token)


@dataclass(eq=False)
class Axis:
    """An axis of so many indices; what it has become is asked of `root`.

    parts, kind  the axes that it is the product or the concatenation of, the outermost or first in front
    frozen       why it is not cut; empty where it may be
    """

    size: int
    frozen: str = ""
    parts: tuple["Axis", ...] = ()
    kind: Literal["product", "concatenation"] = "product"
    _one_with: "Axis | None" = field(default=None, repr=False)

    @property
    def root(self) -> "Axis":
        axis = self
        while axis._one_with is not None:
            axis = axis._one_with
        return axis

    def freeze(self, why: str) -> None:
        """Forbid to cut it, and all that it consists of."""
        if (noted := _noted.get()) is not None:
            noted.append((self, why))
        self._stay(why)

    def _stay(self, why: str) -> None:
        root = self.root
        root.frozen = root.frozen or why
        for part in root.parts:
            part._stay(why)

    def leaves(self) -> Iterator["Axis"]:
        """The axes that are not taken apart, of which it consists."""
        root = self.root
        if not root.parts:
            yield root
        for part in root.parts:
            yield from part.leaves()

    def take_apart(self, sizes: Sequence[int], kind: Literal["product", "concatenation"]) -> tuple["Axis", ...]:
        """Make it the product or concatenation of new axes of these sizes."""
        root = self.root
        assert not root.parts
        root.parts, root.kind = tuple(Axis(size, root.frozen) for size in sizes), kind
        return root.parts


Dim = tuple[Axis, ...]
"""Outermost first; empty for a dim of one index."""
Dims = tuple[Dim, ...]


def leaves_of(dims: Iterable[Dim]) -> Iterator[Axis]:
    """The axes that are not taken apart, of all dims."""
    for dim in dims:
        for axis in dim:
            yield from axis.leaves()


def size_of(dim: Iterable[Axis]) -> int:
    return prod(axis.size for axis in dim)


def new_dim(size: int, frozen: str = "") -> Dim:
    return (Axis(size, frozen),) if size != 1 else ()


def freeze(dim: Iterable[Axis], why: str) -> None:
    for axis in dim:
        axis.freeze(why)


def flat(dim: Iterable[Axis]) -> list[Axis]:
    """The same with products taken apart: leaves and concatenations."""
    found: list[Axis] = []
    for axis in dim:
        root = axis.root
        found += flat(root.parts) if root.parts and root.kind == "product" else [root]
    return found


def unify(first: Iterable[Axis], second: Iterable[Axis]) -> None:
    """Say that two dims of one size have the same indices."""
    ours, theirs = flat(first), flat(second)
    while ours and theirs:
        a, b = ours.pop(0), theirs.pop(0)
        if a is b:
            continue
        if a.size == b.size:
            _merge(a, b)
            continue
        large, small = (a, b) if a.size > b.size else (b, a)
        rest = ours if large is a else theirs
        if large.size % small.size or large.parts:
            freeze([a, b, *ours, *theirs], "its indices are grouped in two ways")
            return
        outer, inner = large.take_apart((small.size, large.size // small.size), "product")
        _merge(outer.root, small)
        rest.insert(0, inner.root)
    if size_of(ours) != size_of(theirs):
        freeze([*ours, *theirs], "its indices are grouped in two ways")


def _merge(a: Axis, b: Axis) -> None:
    """Two roots of one size become one."""
    if a is b:
        return
    if a.parts and b.parts:
        if (a.kind, *(p.size for p in a.parts)) != (b.kind, *(p.size for p in b.parts)):
            if a.kind == b.kind == "product":
                unify(a.parts, b.parts)  # grouped otherwise, and taken apart further
            else:
                freeze((a, b), "its indices are taken apart in two ways")
                return
        else:
            for one, other in zip(a.parts, b.parts, strict=True):
                unify((one,), (other,))
    a, b = a.root, b.root
    if a is b:
        return
    kept, gone = (a, b) if a.parts or not b.parts else (b, a)
    why = a.frozen or b.frozen
    gone._one_with = kept
    if why:
        kept._stay(why)


def grouped(dims: Iterable[Axis], shape: Sequence[int], why: str) -> Dims:
    """The axes of all dims in their order, in the dims of another shape of as many elements (`view`)."""
    left = flat(dims)
    found: list[Dim] = []
    for size in shape:
        here: list[Axis] = []
        while size > 1:
            if not left:
                return _frozen(dims, shape, why)
            axis = left.pop(0).root
            if axis.size > size:
                if axis.size % size or axis.parts:
                    return _frozen(dims, shape, why)
                axis, inner = axis.take_apart((size, axis.size // size), "product")
                left.insert(0, inner)
            elif size % axis.size:
                return _frozen(dims, shape, why)
            here.append(axis)
            size //= axis.size
        found.append(tuple(here))
    return tuple(found) if not left else _frozen(dims, shape, why)


def _frozen(dims: Iterable[Axis], shape: Sequence[int], why: str) -> Dims:
    freeze(dims, why)
    return tuple(new_dim(size, why) for size in shape)


def part_of(dim: Dim, start: int, length: int, why: str) -> Dim:
    """The indices from `start` on, `length` of them: a stretch of the axis, which becomes a concatenation."""
    if (start, length) == (0, size_of(dim)):
        return dim
    axes = flat(dim)
    if len(axes) != 1:
        freeze(dim, why)
        return new_dim(length, why)
    (axis,) = axes
    pieces = _stretches(axis)
    for border in (start, start + length):
        at = 0
        for number, piece in enumerate(pieces):
            if at < border < at + piece.size:
                if piece.root.parts:
                    freeze(dim, why)
                    return new_dim(length, why)
                pieces[number : number + 1] = piece.root.take_apart(
                    (border - at, at + piece.size - border), "concatenation"
                )
                break
            at += piece.size
    at, found = 0, []
    for piece in pieces:
        if start <= at and at + piece.size <= start + length:
            found.append(piece)
        at += piece.size
    if len(found) == 1:
        return (found[0],) if length != 1 else ()
    whole = Axis(length)
    whole.parts, whole.kind = tuple(found), "concatenation"
    return (whole,)


def _stretches(axis: Axis) -> list[Axis]:
    """The pieces of which an axis is the concatenation, of all levels."""
    root = axis.root
    if not root.parts or root.kind == "product":
        return [root]
    return [piece for part in root.parts for piece in _stretches(part)]


def joined(dims: Sequence[Dim]) -> Dim:
    """The concatenation of dims (`cat`)."""
    total = sum(map(size_of, dims))
    pieces: list[Axis] = []
    for dim in dims:
        axes = flat(dim)
        if len(axes) == 1:
            pieces += _stretches(axes[0])
        else:
            one = Axis(size_of(dim))
            one.parts, one.kind = tuple(axes), "product"
            pieces.append(one)
    whole = Axis(total)
    whole.parts, whole.kind = tuple(pieces), "concatenation"
    return (whole,)
