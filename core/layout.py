"""The layout of a local tensor: where it lies in the whole.

A `Layout` says which box of the full tensor a rank holds: the full shape, and the mesh axes that cut it, in the order
in which they cut. One cut of a dim of n rows over an axis of size s follows `torch.chunk` and DTensor: every rank gets
ceil(n / s) rows until the rows run out, so shards may be uneven or empty. Axes that do not cut replicate. Rows that
belong together (those of an attention head) are a unit: ceil(units / s) units go to every rank. Of a cut that is even
(experts, of which every rank needs one) the first n mod s ranks get a row more than the others. A dim in which several
matrices lie one behind the other (queries, keys and values in one) is cut in *parts*: of each a rank has its share, and
what it holds is the boxes of all, one behind the other.

Optimizers, clipping and checkpoints need no more than this, so they know neither parallelism nor Gemini.
"""

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise, product
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from core.mesh import AnyMesh, axis_group, axis_index, axis_size, pipeline_ranks

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

AnyTensor = TypeVar("AnyTensor", bound=Tensor)
Box = tuple[slice, ...]
Stretches = tuple[tuple[range, ...], ...]
"""For each dim of a tensor those of its indices that a part of it has, one stretch behind the other."""


@dataclass(frozen=True)
class Layout:
    """The box of a full tensor that this rank holds; of one that is cut in parts, the boxes.

    shape  the full shape
    mesh   the mesh whose ranks share it, also where no axis cuts it, or its shape where the ranks do not exist; None
           where none is known
    cuts   (axis, dim) in the order of application: tensor parallelism first, then the data-parallel shard of the rest;
           axes of a mesh without names are called by their position, "0", "1", …
    units  (axis, rows that its cut keeps together); 1 where an axis is not named
    even   axes whose cuts are even
    parts  (axis, lengths of the parts, one behind the other, of the local dim that it cuts: each of them by itself)
    absent the whole lies on one other rank, and nothing of it here
    """

    shape: tuple[int, ...]
    mesh: AnyMesh | None = None
    cuts: tuple[tuple[str, int], ...] = ()
    units: tuple[tuple[str, int], ...] = ()
    absent: bool = False
    even: tuple[str, ...] = ()
    parts: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def stretches(self, coordinate: dict[str, int] | None = None) -> Stretches:
        """What lies at `coordinate` (axis -> index on it), in its order there; by default what this rank holds."""
        held = [[range(0 if self.absent else n)] for n in self.shape]
        units, parts = dict(self.units), dict(self.parts)
        for axis, dim in self.cuts:
            index = self.axis_index(axis) if coordinate is None else coordinate[axis]
            lengths, first = parts.get(axis, (sum(map(len, held[dim])),)), 0
            found: list[range] = []
            for length in lengths:
                share = self._shares(length, axis, units.get(axis, 1))[index]
                found += _within(held[dim], first + share.start, first + share.stop)
                first += length
            held[dim] = found or [held[dim][-1][len(held[dim][-1]) :]]
        return tuple(map(tuple, held))

    def box(self, coordinate: dict[str, int] | None = None) -> Box:
        """The slices of the full tensor held at `coordinate`, of a layout without parts."""
        return tuple(slice(held.start, held.stop) for (held,) in self.stretches(coordinate))

    def boxes(self) -> Iterator[tuple[Box, Box]]:
        """(where it lies in the local tensor, where in the whole) of each box that this rank holds."""
        return boxes_of(self.stretches())

    def _shares(self, rows: int, axis: str, unit: int) -> list[slice]:
        size = self.axis_size(axis)
        return even_shares(rows, size) if axis in self.even else shares(rows, size, unit)

    def local(self, full: Tensor) -> Tensor:
        """What this rank holds of `full`: a view, unless that is several boxes."""
        return taken(full, self.stretches())

    def local_shape(self) -> tuple[int, ...]:
        return shape_of(self.stretches())

    def largest_shape(self) -> tuple[int, ...]:
        """The shape of the first rank's part, which has the most of every dim."""
        return shape_of(self.stretches(dict.fromkeys(self.axes(), 0)))

    def axes(self) -> tuple[str, ...]:
        """The axes that cut, each once."""
        return tuple(dict.fromkeys(axis for axis, _ in self.cuts))

    def axes_of(self, dim: int) -> tuple[str, ...]:
        """The axes of several ranks that cut a dim."""
        return tuple(dict.fromkeys(axis for axis, cut in self.cuts if cut == dim and self.axis_size(axis) > 1))

    def axis_size(self, axis: str) -> int:
        """Ranks on an axis; "a+b" is a and b as one."""
        assert self.mesh is not None
        return axis_size(self.mesh, axis)

    def axis_index(self, axis: str) -> int:
        """This rank's place on an axis."""
        assert self.mesh is not None
        return axis_index(self.mesh, axis)

    def axis_group(self, axis: str) -> ProcessGroup:
        """The process group of this rank's line along an axis."""
        assert self.mesh is not None
        return axis_group(self.mesh, axis)

    def num_holders(self, mesh: AnyMesh) -> int:
        """Ranks of a mesh that hold the same part; those of other stages of a pipeline hold other parameters."""
        return mesh.size() // pipeline_ranks(mesh) // math.prod(map(self.axis_size, self.axes()))

    def groups(self, dims: Iterable[int] | None = None) -> tuple[ProcessGroup, ...]:
        """Process groups of the axes of several ranks that cut one of `dims` (by default any), each once.

        A sum over all of them, one after the other, is the sum over the whole of those dims.
        """
        wanted = range(len(self.shape)) if dims is None else tuple(dims)
        axes = dict.fromkeys(axis for axis, dim in self.cuts if dim in wanted)
        return tuple(self.axis_group(axis) for axis in axes if self.axis_size(axis) > 1)

    def collapsed(self, dims: Iterable[int]) -> "Layout":
        """The layout of a statistic that has size 1 along `dims`: whole there, cut as before along the others."""
        gone = tuple(dims)
        shape = tuple(1 if dim in gone else n for dim, n in enumerate(self.shape))
        cuts = tuple((axis, dim) for axis, dim in self.cuts if dim not in gone)
        return Layout(shape, self.mesh, cuts, self.units, even=self.even, parts=self.parts)

    def on(self, mesh: AnyMesh) -> "Layout":
        """The same seen on another mesh."""
        return replace(self, mesh=mesh)

    def within(self) -> "Layout":
        """The layout of what lies in one place of dim 0: of a matrix in a stack."""
        cuts = tuple((axis, dim - 1) for axis, dim in self.cuts if dim)
        named = {axis for axis, _ in cuts}
        units = tuple((axis, unit) for axis, unit in self.units if axis in named)
        parts = tuple((axis, lengths) for axis, lengths in self.parts if axis in named)
        even = tuple(axis for axis in self.even if axis in named)
        return Layout(self.shape[1:], self.mesh, cuts, units, even=even, parts=parts)

    def cut(
        self,
        mesh: AnyMesh,
        axis: str,
        dim: int = 0,
        unit: int = 1,
        even: bool = False,
        parts: tuple[int, ...] = (),
    ) -> "Layout":
        """This layout with one more cut, of what is local now; an even one has units of one row."""
        return replace(
            self,
            mesh=mesh,
            cuts=(*self.cuts, (axis, dim)),
            units=self.units if unit == 1 else (*self.units, (axis, unit)),
            even=(*self.even, axis) if even else self.even,
            parts=(*self.parts, (axis, parts)) if parts else self.parts,
        )


@dataclass(frozen=True)
class Slice:
    """One tensor of a stack along dim 0, as it lies in itself: on ranks without a part of it, nothing.

    stack  the layout of the stack
    index  its place in that
    """

    stack: Layout
    index: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def mesh(self) -> AnyMesh | None:
        return self.stack.mesh

    def on(self, mesh: AnyMesh) -> "Slice":
        """The same seen on another mesh."""
        return replace(self, stack=self.stack.on(mesh))

    def stretches(self) -> Stretches:
        """See `Layout.stretches`."""
        first, *rest = self.stack.stretches()
        if any(self.index in held for held in first):
            return tuple(rest)
        return tuple((range(0),) for _ in rest)

    @cached_property
    def place(self) -> int | None:
        """Where it is in this rank's part of the stack; None where that has nothing of it."""
        held = [index for stretch in self.stack.stretches()[0] for index in stretch]
        return held.index(self.index) if self.index in held else None


def _within(held: Sequence[range], start: int, stop: int) -> list[range]:
    """The stretches of the whole from `start` to `stop` of a local dim, which `held` are those of."""
    found, first = [], 0
    for stretch in held:
        own = stretch[max(start - first, 0) : max(stop - first, 0)]
        found += [own] if own else []
        first += len(stretch)
    return found


def shape_of(stretches: Stretches) -> tuple[int, ...]:
    return tuple(sum(map(len, held)) for held in stretches)


def boxes_of(stretches: Stretches) -> Iterator[tuple[Box, Box]]:
    """(where it lies in the part, where in the whole) of each box that a part of a tensor consists of."""
    ends = [accumulate(map(len, held)) for held in stretches]
    dims = [
        [(slice(end - len(own), end), slice(own.start, own.stop)) for own, end in zip(held, ends_of, strict=True)]
        for held, ends_of in zip(stretches, ends, strict=True)
    ]
    for box in product(*dims):
        yield tuple(here for here, _ in box), tuple(there for _, there in box)


def taken(whole: Tensor, stretches: Stretches) -> Tensor:
    """A part of a tensor: a view, where it is one box."""
    for dim, held in enumerate(stretches):
        own = [whole.narrow(dim, stretch.start, len(stretch)) for stretch in held]
        whole = own[0] if len(own) == 1 else torch.cat(own, dim)
    return whole


def shares(rows: int, size: int, unit: int = 1) -> list[slice]:
    """The shares of `rows` rows cut over `size` ranks, in units of `unit` rows: the last may be shorter or empty."""
    most = largest_share(rows, size, unit)
    return [slice(min(index * most, rows), min((index + 1) * most, rows)) for index in range(size)]


def even_shares(rows: int, size: int) -> list[slice]:
    """The shares of `rows` rows over `size` ranks that differ by one row at most, the longer ones first."""
    starts = [index * (rows // size) + min(index, rows % size) for index in range(size + 1)]
    return [slice(start, stop) for start, stop in pairwise(starts)]


def largest_share(rows: int, size: int, unit: int = 1) -> int:
    """Rows of the first of `shares`, to which others are padded where they travel."""
    return -(-rows // (unit * size)) * unit


def is_dtensor(tensor: Tensor) -> "TypeGuard[DTensor]":
    """Return whether it is a DTensor, without importing them: whoever makes one has taken that third of a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def layout_of(tensor: Tensor) -> Layout:
    """The layout of a parameter or of an optimizer's tensor: tagged, DTensor, or plain (then it is whole)."""
    tagged = getattr(tensor, "layout_in_whole", None)
    if tagged is not None:
        return tagged
    if not is_dtensor(tensor):
        return Layout(tuple(tensor.shape))
    from torch.distributed.tensor import Shard

    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or tuple(map(str, range(mesh.ndim)))
    cuts = []
    # FSDP2 shards what tensor parallelism left and records that as a strided shard on the outer axis:
    # in order of application the plain shards come first.
    for strided in (False, True):
        for axis, placement in zip(names, tensor.placements, strict=True):
            is_strided = type(placement).__name__ == "_StridedShard"
            if (isinstance(placement, Shard) or is_strided) and is_strided is strided:
                cuts.append((axis, placement.dim))  # pyright: ignore[reportAttributeAccessIssue]
    return Layout(tuple(tensor.shape), mesh, tuple(cuts))


def tag(tensor: AnyTensor, layout: Layout) -> AnyTensor:
    """Note on a local tensor how it lies in the whole; `layout_of` reads it back.

    A DTensor over what other axes left (FSDP2 over a local tensor) is noted as it lies in the whole of all axes.
    """
    assert is_dtensor(tensor) or tuple(tensor.shape) == layout.local_shape(), (tuple(tensor.shape), layout)
    tensor.layout_in_whole = layout  # pyright: ignore[reportAttributeAccessIssue]
    return tensor


def tagged_as(tensor: AnyTensor, other: Tensor) -> AnyTensor:
    """The tensor, noted to lie as another one does, where that is noted."""
    return tag(tensor, layout_of(other)) if hasattr(other, "layout_in_whole") else tensor


def local(tensor: Tensor) -> Tensor:
    """The plain tensor that this rank stores, tagged with its layout; shares storage with `tensor`."""
    if is_dtensor(tensor):
        layout, own = layout_of(tensor), tensor.to_local()
        # What has no elements may still have rows; FSDP2 gives it none.
        return tag(own if own.numel() else own.new_empty(layout.local_shape()), layout)
    return tensor


def detached(tensor: Tensor) -> Tensor:
    """The same without gradient; shares storage with `tensor`, and lies as it lies."""
    return tag(local(tensor).detach(), layout_of(tensor))


def full_tensor(tensor: Tensor) -> Tensor:
    """The whole tensor on every rank that shares it (a collective over the axes that cut it). For tests and export."""
    layout = layout_of(tensor)
    value = local(tensor).detach()
    for axis, dim in reversed(layout.cuts):
        value = _undo_cut(value, layout, axis, dim)
    return value


def _undo_cut(value: Tensor, layout: Layout, axis: str, dim: int) -> Tensor:
    """Concatenate along `dim` over `axis`; shards may be uneven, so each travels padded to the largest."""
    group, size = layout.axis_group(axis), layout.axis_size(axis)
    rows = torch.tensor([value.shape[dim]], device=value.device)
    counts = [torch.empty_like(rows) for _ in range(size)]
    torch.distributed.all_gather(counts, rows, group=group)
    lengths = [int(c) for c in counts]
    padded_shape = list(value.shape)
    padded_shape[dim] = max(lengths)
    padded = value.new_zeros(padded_shape)
    padded.narrow(dim, 0, value.shape[dim]).copy_(value)
    held = [torch.empty_like(padded) for _ in range(size)]
    torch.distributed.all_gather(held, padded, group=group)
    held = [one.narrow(dim, 0, n) for one, n in zip(held, lengths, strict=True)]
    if axis in (parts := dict(layout.parts)):
        held = [of_rank for part in zip(*_by_parts(held, parts[axis], dim)) for of_rank in part]
    return torch.cat(held, dim)


def _by_parts(held: Sequence[Tensor], parts: Sequence[int], dim: int) -> Iterator[Sequence[Tensor]]:
    """What each rank has of each part."""
    for rank, own in enumerate(held):
        mine = [shares(length, len(held))[rank] for length in parts]
        yield own.split([share.stop - share.start for share in mine], dim)
