"""Sharding specs: how a tensor lies on a mesh of one to three axes, dim by dim.

A spec says of every dim which mesh axes cut it, the first one into the outermost pieces, and over which axes the tensor
is a partial sum. Axes are numbered as the mesh has them:

    S0RR       dim 0 is cut over axis 0; axes that are not named replicate
    S01R       dim 0 is cut over axis 0, and each piece over axis 1; S10R are other pieces on the same ranks
    S0R{1}     besides, what ranks along axis 1 hold has to be added up
    ()         a number

Told axis by axis it is DTensor's form, in which placements apply from left to right: S0RR on a mesh of two axes is
S(0)R, S01R is S(0)S(0), S0R{1} is S(0)P; where they apply in another order it stands in brackets, S10R is
S(0)[1]S(0)[0]. `parse` reads both.

An axis cuts one dim at most, or is partial, or neither. Lengths need not divide: pieces are `core.layout.shares`, cut
by cut, so the last ones may be shorter or empty. Sequences of cuts with units, or even ones, are layouts but no specs.
"""

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from core.config import UserError
from core.layout import Layout, largest_share
from core.mesh import AnyMesh, MeshShape

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

MOST_AXES = 3
_DIM = re.compile(r"R|S(\d+)")
_SPEC = re.compile(r"\[?\s*(?P<dims>\(\)|(?:(?:R|S\d+)[\s,]*)+)\]?\s*(?:\{(?P<partial>[\d,\s]*)\})?")
_PLACEMENT = re.compile(r"R|P(?:\(sum\))?|S\((?P<dim>-?\d+)\)(?:\[(?P<turn>\d+)\])?")


@dataclass(frozen=True, order=True)
class Spec:
    """dims: of each dim the axes that cut it, outermost first; partial: axes over which the tensor is a partial sum.

    Raises UserError where an axis stands twice, or is not one of the first three.
    """

    dims: tuple[tuple[int, ...], ...]
    partial: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "partial", tuple(sorted(self.partial)))
        for axis in self.axes:
            if not 0 <= axis < MOST_AXES:
                raise UserError(f"{self}: there is no axis {axis}; a spec has axes 0 to {MOST_AXES - 1}")
            if self.axes.count(axis) > 1:
                raise UserError(f"{self}: axis {axis} stands twice; an axis cuts one dim once, or is partial")

    def __str__(self) -> str:
        dims = "".join(f"S{''.join(map(str, axes))}" if axes else "R" for axes in self.dims) or "()"
        return dims + (f"{{{''.join(map(str, self.partial))}}}" if self.partial else "")

    @property
    def axes(self) -> tuple[int, ...]:
        """Axes that cut a dim or are partial."""
        return (*itertools.chain(*self.dims), *self.partial)

    def with_dim(self, dim: int, axes: tuple[int, ...]) -> "Spec":
        """The spec with other axes cutting one dim."""
        return Spec((*self.dims[:dim], axes, *self.dims[dim + 1 :]), self.partial)

    def summed(self) -> "Spec":
        """The spec without its partial axes, which then replicate: also how the gradient of such a tensor lies."""
        return Spec(self.dims)

    def check(self, shape: Sequence[int], sizes: Sequence[int]) -> None:
        """Raises UserError unless a tensor of this shape can lie so on a mesh of these sizes."""
        if not 1 <= len(sizes) <= MOST_AXES or min(sizes) < 1:
            raise UserError(f"a mesh of {_by(sizes)} ranks; a spec takes 1 to {MOST_AXES} axes of at least one rank")
        if len(shape) != len(self.dims):
            raise UserError(
                f"{self} is of {len(self.dims)} dims and the tensor {_by(shape)} has {len(shape)}; "
                "give R or S for each dim"
            )
        if max(self.axes, default=0) >= len(sizes):
            raise UserError(f"{self} names axis {max(self.axes)} of the mesh {_by(sizes)}, whose axes are 0 to "
                            f"{len(sizes) - 1}")  # fmt: skip

    # --- pieces -------------------------------------------------------------------------------------------------------

    def layout(self, shape: Sequence[int], mesh: AnyMesh) -> Layout:
        """The layout of a tensor of this shape; that it is a partial sum a layout does not say."""
        names = mesh.mesh_dim_names or tuple(map(str, range(len(mesh.shape))))
        cuts = tuple((names[axis], dim) for dim, axes in enumerate(self.dims) for axis in axes)
        return Layout(tuple(shape), mesh, cuts)

    def box(self, shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[slice, ...]:
        """The slices of the whole that the rank at `coordinate`, its place on every axis, holds."""
        places = {str(axis): place for axis, place in enumerate(coordinate)}
        return self.layout(shape, mesh_of(sizes)).box(places)

    def local_shape(self, shape: Sequence[int], sizes: Sequence[int], coordinate: Sequence[int]) -> tuple[int, ...]:
        """The shape of what the rank at `coordinate` holds."""
        return tuple(box.stop - box.start for box in self.box(shape, sizes, coordinate))

    def largest_shape(self, shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of the first rank's piece, which has the most of every dim."""
        return tuple(
            largest_share(rows, math.prod(sizes[axis] for axis in axes))
            for rows, axes in zip(shape, self.dims, strict=True)
        )

    def whole_shape(self, local_shape: Sequence[int], sizes: Sequence[int]) -> tuple[int, ...]:
        """The shape of the whole whose pieces are all of this shape."""
        return tuple(
            rows * math.prod(sizes[axis] for axis in axes) for rows, axes in zip(local_shape, self.dims, strict=True)
        )

    # --- DTensor ------------------------------------------------------------------------------------------------------

    def by_axis(self, num_axes: int) -> str:
        """DTensor's way to write it: S(0)R."""
        told = ["R"] * num_axes
        for axis in self.partial:
            told[axis] = "P"
        for dim, axes in enumerate(self.dims):
            for turn, axis in enumerate(axes):
                told[axis] = f"S({dim})" + ("" if list(axes) == sorted(axes) else f"[{turn}]")
        return "".join(told)

    def placements(self, num_axes: int) -> "tuple[Placement, ...]":
        """As placements of a DTensor.  Raises UserError where axes cut a dim in another order than the mesh's."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        found: list[Placement] = [Replicate()] * num_axes
        for axis in self.partial:
            found[axis] = Partial()
        for dim, axes in enumerate(self.dims):
            if list(axes) != sorted(axes):
                raise UserError(
                    f"{self}: placements of a DTensor apply in the mesh's order and cannot say that axis {axes[0]} "
                    f"cuts dim {dim} before axis {min(axes)}; use {self.with_dim(dim, tuple(sorted(axes)))}"
                )
            for axis in axes:
                found[axis] = Shard(dim)
        return tuple(found)


def mesh_of(sizes: Sequence[int], rank: int = 0) -> MeshShape:
    """A mesh of axes "0", "1", …, none of whose ranks need exist."""
    return MeshShape(tuple(map(str, range(len(sizes)))), tuple(sizes), rank)


def parse(text: str, num_dims: int | None = None) -> Spec:
    """The spec that a text such as S01RR, `S01,R,S2` or `[S0, R]{1}` tells dim by dim, or S(0)R axis by axis.

    num_dims  of the tensor: needed for the second form, and held against the first

    Raises UserError for anything else.
    """
    if "S(" in text or "P" in text:
        return _parse_by_axis(text, num_dims)
    found = _SPEC.fullmatch(text.strip())
    if found is None:
        raise UserError(
            f"'{text}' is no sharding spec; write R or S with axes for each dim, as in S01,R,S2, and partial axes "
            "behind in braces, as in S0R{1}"
        )
    dims = [tuple(map(int, axes)) for axes in _DIM.findall(found["dims"])]
    if num_dims is not None and len(dims) != num_dims:
        raise UserError(f"'{text}' is of {len(dims)} dims, and the tensor has {num_dims}; give R or S for each dim")
    return Spec(tuple(dims), tuple(int(axis) for axis in re.findall(r"\d", found["partial"] or "")))


def _parse_by_axis(text: str, num_dims: int | None) -> Spec:
    bare = re.sub(r"[\s,]", "", text)
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    if "".join(found[0] for found in _PLACEMENT.finditer(bare)) != bare:
        raise UserError(f"'{text}' is no list of placements; write R, P or S(dim) for each axis of the mesh, as S(0)R")
    if num_dims is None:
        raise UserError(f"'{text}' tells a placement for each axis; say also how many dims the tensor has")
    turns: list[list[tuple[int, int]]] = [[] for _ in range(num_dims)]
    partial = []
    for axis, found in enumerate(_PLACEMENT.finditer(bare)):
        if found["dim"] is not None:
            dim = int(found["dim"])
            _require_dim(text, dim, num_dims)
            turns[dim].append((axis if found["turn"] is None else int(found["turn"]), axis))
        elif found[0] != "R":
            partial.append(axis)
    return Spec(tuple(tuple(axis for _, axis in sorted(dim)) for dim in turns), tuple(partial))


def _require_dim(text: str, dim: int, num_dims: int) -> None:
    if not -num_dims <= dim < num_dims:
        raise UserError(f"'{text}' cuts dim {dim} of a tensor whose dims are 0 to {num_dims - 1}")


def from_placements(placements: "Sequence[Placement]", num_dims: int, sizes: Sequence[int]) -> Spec:
    """The spec of a DTensor's placements.  Raises UserError for one that no spec says, such as a partial maximum.

    A strided shard comes behind so many pieces, of axes to its right, as its split factor says: FSDP2 writes so that it
    cuts what tensor parallelism left.
    """
    dims: list[list[int]] = [[] for _ in range(num_dims)]
    partial = []
    for axis in reversed(range(len(placements))):
        placement = placements[axis]
        if placement.is_partial():
            if getattr(placement, "reduce_op", "sum") != "sum":
                raise UserError(f"{placement} on axis {axis}: a spec's partial axes are sums; use Partial()")
            partial.append(axis)
        elif not placement.is_replicate():
            dim = getattr(placement, "dim", None)
            if dim is None:
                raise UserError(f"{placement} on axis {axis} is no placement that a sharding spec can say")
            _require_dim(str(placement), dim, num_dims)
            order, place, pieces = dims[dim], 0, 1
            while pieces < getattr(placement, "split_factor", 1) and place < len(order):
                pieces *= sizes[order[place]]
                place += 1
            order.insert(place, axis)
    return Spec(tuple(map(tuple, dims)), tuple(partial))


def from_layout(layout: Layout) -> Spec:
    """The spec of a layout on a mesh.  Raises UserError where it has cuts with units, even or of joined axes."""
    mesh = layout.mesh
    if mesh is None or layout.absent:
        raise UserError("a layout without a mesh, or of a tensor that lies elsewhere, has no sharding spec")
    if layout.units or layout.even:
        named = ", ".join(dict.fromkeys((*(axis for axis, _ in layout.units), *layout.even)))
        raise UserError(f"the cuts over {named} keep units together or are even, which no sharding spec says")
    names = mesh.mesh_dim_names or tuple(map(str, range(len(mesh.shape))))
    dims: list[list[int]] = [[] for _ in layout.shape]
    for axis, dim in layout.cuts:
        if axis not in names:
            raise UserError(f"axis {axis} is none of the mesh's {', '.join(names)}, so no sharding spec names it")
        dims[dim].append(names.index(axis))
    return Spec(tuple(map(tuple, dims)))


@lru_cache
def all_specs(num_dims: int, num_axes: int, partial: bool = False) -> tuple[Spec, ...]:
    """Every spec of a tensor of so many dims on a mesh of so many axes; with partial sums, or those without."""
    found = {Spec(((),) * num_dims)}
    for _ in range(num_axes):
        more = [(spec, axis) for spec in found for axis in range(num_axes) if axis not in spec.axes]
        for spec, axis in more:
            found |= {spec.with_dim(dim, (*spec.dims[dim], axis)) for dim in range(num_dims)}
            if partial:
                found.add(Spec(spec.dims, (*spec.partial, axis)))
    return tuple(sorted(found))


def _by(sizes: Sequence[int]) -> str:
    return "x".join(map(str, sizes)) or "()"
