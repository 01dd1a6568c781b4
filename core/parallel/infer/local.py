"""A part of a tensor along axes that are cut: which indices of its dims a rank has.

A dim is a product or a concatenation of axes (`axes`), so what a rank has of it need not be one stretch: of three
projections below each other it has a stretch of each.
"""

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from core.layout import shares
from core.parallel.infer.axes import Axis, Dim, flat, size_of

Cuts = Collection[Axis]
"""Roots of the axes that are cut, all over one mesh axis."""
MOST_PARTS = 64
"""Parts of a dim that are cut by themselves; each is a box of its own in checkpoints."""


def carries(dim: Dim, cuts: Cuts) -> bool:
    return any(leaf in cuts for axis in dim for leaf in axis.leaves())


def local_size(dim: Sequence[Axis], cuts: Cuts, ranks: int, index: int = 0) -> int:
    """The indices of a dim that the rank of that index has."""
    size = 1
    for axis in flat(dim):
        if axis.parts:
            size *= sum(local_size((part,), cuts, ranks, index) for part in axis.parts)
        elif axis in cuts:
            own = shares(axis.size, ranks)[index]
            size *= own.stop - own.start
        else:
            size *= axis.size
    return size


def local_shape(dims: Sequence[Dim], cuts: Cuts, ranks: int, index: int = 0) -> tuple[int, ...]:
    return tuple(local_size(dim, cuts, ranks, index) for dim in dims)


def indices(dim: Sequence[Axis], cuts: Cuts, ranks: int, index: int) -> Tensor:
    """Those of the dim that the rank has, in their order; int64, on the CPU."""
    found = torch.zeros(1, dtype=torch.int64)
    for axis in flat(dim):
        if axis.parts:
            pieces, start = [], 0
            for part in axis.parts:
                pieces.append(start + indices((part,), cuts, ranks, index))
                start += part.size
            own = torch.cat(pieces)
        elif axis in cuts:
            share = shares(axis.size, ranks)[index]
            own = torch.arange(share.start, share.stop)
        else:
            own = torch.arange(axis.size)
        found = (found[:, None] * axis.size + own).reshape(-1)
    return found


def around(dim: Sequence[Axis], cuts: Cuts) -> tuple[list[Axis], list[Axis]]:
    """The axes before the one that is cut, and that one with those behind."""
    axes = flat(dim)
    at = next(number for number, axis in enumerate(axes) if carries((axis,), cuts))
    return axes[:at], axes[at:]


def is_stretch(dim: Sequence[Axis], cuts: Cuts) -> bool:
    """Return whether every rank has one stretch of the dim: the axis that is cut is the outermost."""
    first, *rest = flat(dim)
    return first in cuts and not carries(tuple(rest), cuts)


def parts_of(dim: Sequence[Axis], cuts: Cuts) -> tuple[int, ...]:
    """Lengths of the parts of a dim, one behind the other, of each of which every rank has one stretch.

    Empty where a part has nothing that is cut, or where they are too many.
    """
    if is_stretch(dim, cuts):
        return (size_of(dim),)
    if not carries(tuple(dim), cuts):
        return ()
    first, *rest = flat(dim)
    if not carries((first,), cuts):
        return parts_of(rest, cuts) * first.size if first.size <= MOST_PARTS else ()
    if carries(tuple(rest), cuts):
        return ()
    found = [parts_of((part,), cuts) for part in first.parts]
    lengths = tuple(length * size_of(rest) for parts in found for length in parts)
    return lengths if all(found) and len(lengths) <= MOST_PARTS else ()


def rows_of_unit(dim: Sequence[Axis], cuts: Cuts) -> int:
    """The indices that a cut keeps together, of a dim of which ranks have stretches."""
    return size_of(flat(dim)[1:])
