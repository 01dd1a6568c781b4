"""How ranks of tensor parallelism share a layer's inputs and gradients, and how K-FAC has them with all features.

    one axis  all ranks have all rows, or parts of the sequence, and a part of the features on one side of a layer:
              that side is put together, one message
    a grid    x[B_rows, .., I_cols] and g[B_rows, .., O_cols] (core.parallel.grid): the ranks that have some rows
              between them put both together when the gradient comes, one message, and each goes on with its part of
              the cases
    a head    its loss shows it the gradients of logits chunk by chunk, of a loss whose own gradient comes last
    a router  ranks have the same rows of inputs, and parts of one gradient: their sum is the gradient, one message
    experts   ranks have the same rows, of which each knows all once features are put together

What ranks hold alike counts once. A sequence, or a batch, that the ranks do not divide is filled up with places that
are not counted; no gradient comes to them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from core.compat import root_of
from core.config import UserError
from core.layout import Layout, Slice, largest_share, layout_of, shares
from core.mesh import GRID_AXES, AnyMesh, axis_group, axis_index, axis_size, gradient_axis
from core.optim.kfac_layers import Layer, Sharing, Use
from core.optim.sharded import wide_dtype

DEPTH: str = GRID_AXES[0]
PLANE: tuple[str, ...] = GRID_AXES[1:]


@dataclass(frozen=True)
class OtherStages:
    """What the other stages of a pipeline have to do with a rank's layers.

    copies  name -> parameter of this rank that another one updates: each sees uses of its own
    add     (name, sums) -> None: on the rank that updates a parameter what ranks with copies have seen is added, in
            place; of a parameter that no other stage has nothing happens
    """

    copies: Mapping[str, Tensor]
    add: Callable[[str, Tensor], None]


@dataclass(frozen=True)
class Whole:
    """Inputs, or gradients of outputs, with all features.

    rows   of the batch that they are of
    share  that this rank's sums of them have in those of all ranks
    turn   (index, ranks): of the cases this rank takes one in so many
    """

    value: Tensor
    rows: int
    share: float = 1.0
    turn: tuple[int, int] = (0, 1)

    def own(self, cases: Tensor) -> Tensor:
        """Those of the cases that this rank sums."""
        index, ranks = self.turn
        return cases[index::ranks]


@dataclass(frozen=True)
class Squares:
    """Sums, over the cases, of squares of a gradient's features."""

    value: Tensor


class View(Protocol):
    """A use of a layer in one forward, as this rank sees it.

    inputs  None: they come with the first gradient
    part    of the places of this rank's part of each row those that inputs and gradients are of; None: all
    """

    inputs: Whole | None
    part: slice | None

    def arrived(self, gradient: Tensor) -> "tuple[Whole | None, Whole | Squares]":
        """(inputs, where they come now; the gradient) of the gradient of the module's output."""
        ...


@dataclass(frozen=True)
class Cut:
    """How ranks of one axis share a layer.

    copies   ranks of them, 1: none
    layout   of the weight in forwards; of a stack's, of one matrix
    dim      of the weight that is cut; None: it is whole on each
    group    those ranks
    share    that this rank's sums have in those of all; None: 1 / copies
    partial  ranks that have parts of one gradient of the outputs
    rows_of  rows of a microbatch -> how many of those that the layer is given are some; None: all
    parts_rows  whether a rank may have a part of each row's sequence
    """

    copies: int = 1
    layout: Layout | None = None
    dim: int | None = None
    group: ProcessGroup | None = None
    share: float | None = None
    partial: ProcessGroup | None = None
    rows_of: Callable[[int], int] | None = None
    parts_rows: bool = False

    def view(self, use: Use, x: Tensor, y: Tensor, rows: int, length: int | None) -> View:
        return _OneAxis(self, use, x, y, rows, length)

    def head_view(self, use: Use, shown: "Shown", rows: int) -> View:
        return _HeadOnOneAxis(self, use, shown, rows)

    def whole(self, x: Tensor, feature_dim: int) -> Tensor:
        """x with the features of all ranks, from those that this one has."""
        made = self.placed(x, feature_dim)
        dist.all_reduce(made, group=self.group)
        return made

    def placed(self, x: Tensor, feature_dim: int) -> Tensor:
        """x among zeros in the place of the features that this rank does not have."""
        assert self.layout is not None
        assert self.dim is not None
        shape = list(x.shape)
        shape[feature_dim] = self.layout.shape[self.dim]
        made, start, dim = x.new_zeros(shape), 0, feature_dim % x.ndim
        for stretch in self.layout.stretches()[self.dim]:
            made.narrow(dim, stretch.start, len(stretch)).copy_(x.narrow(dim, start, len(stretch)))
            start += len(stretch)
        return made

    def cuts(self, use: Use, role: str) -> bool:
        """Return whether the features of the layer's "input", or of its "gradient", are cut."""
        return self.dim is not None and ("input" if (self.dim == 0) == use.inputs_first else "gradient") == role


class _OneAxis:
    """Activations are alike on the ranks, or each has a part of the sequence on one side of the layer.

    Of that each rank takes its part on the other side, too: inputs and gradients are of the same cases.
    """

    def __init__(self, cut: Cut, use: Use, x: Tensor, y: Tensor, rows: int, length: int | None):
        self.cut, self.use, self.rows = cut, use, rows
        self.part: slice | None = None
        self.of_gradient: slice | None = None  # of the places of the module's outputs
        self.share = 1 / cut.copies if cut.share is None else cut.share
        if cut.copies > 1:
            x = self._with_all_features(x, y, length)
        if cut.rows_of is not None:
            self.rows = cut.rows_of(rows)
            x = x[: self.rows]
        self.inputs: Whole | None = Whole(x, self.rows, self.share)

    def arrived(self, gradient: Tensor) -> tuple[None, Whole]:
        if self.cut.cuts(self.use, "gradient"):
            gradient = self.cut.whole(gradient, 1 if self.use.kind == "conv" else -1)
        if self.cut.partial is not None:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=self.cut.partial)
        if self.cut.rows_of is not None:
            gradient = gradient[: self.rows]
        gradient = gradient if self.of_gradient is None else gradient[:, self.of_gradient]
        return None, Whole(gradient, self.rows, self.share)

    def _with_all_features(self, x: Tensor, y: Tensor, length: int | None) -> Tensor:
        cut, use = self.cut, self.use
        in_rows = x.ndim > 1 and use.kind != "conv"
        if length == 1 and cut.dim is not None:  # its part and the whole of it are as long
            raise UserError(
                f"kfac: {use.name or 'the model'} has one token of a row, which mesh.tp={cut.copies} cannot share; "
                "use longer rows, --mesh.tp 1, or fewer ranks of --mesh.cp"
            )
        length = y.shape[1] if length is None and y.ndim > 2 else length
        cut_x = cut_y = False
        if in_rows and cut.dim is not None and y.ndim > 2:
            cut_x, cut_y = x.shape[1] < y.shape[1], y.shape[1] < x.shape[1]
        if not cut_x and cut.cuts(use, "input") and use.kind != "embedding":
            x = cut.whole(x, 1 if use.kind == "conv" else -1)
        if cut_x or cut_y:
            assert length is not None
            most = x.shape[1] if cut_x else y.shape[1]
            start = dist.get_rank(cut.group) * most
            own = max(0, min(most, length - start))
            there, here = slice(start, start + own), slice(0, own)
            self.part, self.share = there, 1.0
            self.of_gradient = there if cut_x else here
            return x[:, here] if cut_x else x[:, there]
        if in_rows and x.ndim > 2 and length is not None and x.shape[1] == -(-length // cut.copies) * cut.copies:
            self.part = self.of_gradient = slice(0, length)
            return x[:, :length]
        return x


def mesh_of(row: Any, parameter: Tensor) -> DeviceMesh | None:
    """The mesh whose ranks share a parameter.  row: its `core.placement.table.Placed`"""
    mesh = row.layout.mesh if row.layout.mesh is not None else layout_of(parameter).mesh
    return mesh if isinstance(mesh, DeviceMesh) else None


def tensor_ranks(mesh: AnyMesh | None) -> tuple[str, ...]:
    """The axes of tensor parallelism that have several ranks."""
    if mesh is None:
        return ()
    names = mesh.mesh_dim_names or ()
    return tuple(axis for axis in ("tp", *GRID_AXES) if axis in names and axis_size(mesh, axis) > 1)


def parts_of_rows(mesh: AnyMesh) -> int:
    """Ranks of context parallelism."""
    return axis_size(mesh, "cp") if "cp" in (mesh.mesh_dim_names or ()) else 1


def cut_of(use: Use, layer: Layer, parameter: Tensor, row: Any) -> "Cut | GridCut | None":
    """How ranks share a layer in forwards; None of an expert that this rank does not have.

    row  the `core.placement.table.Placed` of its weight; None: no ranks share it

    Raises UserError for ways that its sums cannot be made on.
    """
    mesh = None if row is None else mesh_of(row, parameter)
    if row is None or mesh is None:
        return Cut()
    names = tensor_ranks(mesh)
    if use.kind == "stack" and (names or row.layout.cuts or parts_of_rows(mesh) > 1):
        raise UserError(
            f"kfac: {use.name or 'the model'} has a stack of matrices of which each is looked at by itself, and ranks "
            f"of tensor, expert or context parallelism share them; leave it out: --optim.exclude '{use.name}', or use "
            "data parallelism alone"
        )
    if use.kind == "experts":
        return _cut_of_expert(layer, row.layout, tuple(axis for axis in names if axis not in row.layout.axes_of(0)))
    copies = math.prod(axis_size(mesh, axis) for axis in names)
    if copies == 1:
        return Cut()
    if row.layout.cuts:
        if names != ("tp",):
            return GridCut(copies, row.layout)
        (_, dim), *_ = row.layout.cuts
        return Cut(copies, row.layout, dim, row.layout.axis_group("tp"), parts_rows=True)
    if {*names} & {*row.partial}:
        if use.kind == "router":
            return _cut_of_router(mesh, names)
        raise UserError(
            f"kfac: {use.name or 'the model'} computes on each rank's part of the batch, of which some may be filled "
            f"up; leave it out: --optim.exclude '{use.name}', or use --mesh.tp 1"
        )
    return Cut(copies, parts_rows=True)


def _cut_of_expert(layer: Layer, layout: Layout, alike: tuple[str, ...]) -> "Cut | None":
    """alike: axes of tensor parallelism whose ranks have the same experts, and give them the same rows."""
    assert layer.expert is not None
    if Slice(layout, layer.expert).place is None:
        return None
    inner, copies = layout.within(), math.prod(layout.axis_size(axis) for axis in alike)
    share = 1.0 if layout.axes_of(0) else None  # where experts are dealt out, ranks that are alike add nothing up
    cuts = [(axis, dim) for axis, dim in inner.cuts if axis in alike]
    if not cuts:
        return Cut(copies, share=share, parts_rows=False)
    [(axis, dim)] = cuts
    return Cut(copies, inner, dim, inner.axis_group(axis), share, parts_rows=False)


def _cut_of_router(mesh: DeviceMesh, names: tuple[str, ...]) -> "Cut":
    """The ranks of tp, or of the columns of a grid, whose rows see other sequences."""
    axis = "tp" if "tp" in names else PLANE[-1]
    copies = axis_size(mesh, axis)
    partial = axis_group(mesh, axis) if copies > 1 else None
    rows_of = None if axis == "tp" else rows_on_grid(mesh)
    return Cut(copies, partial=partial, rows_of=rows_of, parts_rows=axis == "tp")


# --- experts that ranks have apart ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Apart:
    """Layers of experts that this rank has and others have not.

    layers  their places among all layers
    sums    the ranks whose sums are added up, which route other rows to them; None: this one alone
    alike   the ranks of tensor parallelism that then have the same; None: this one alone
    """

    layers: tuple[int, ...]
    sums: ProcessGroup | None
    alike: ProcessGroup | None


def dealt_out(layers: Sequence[Layer], rows: Mapping[str, Any]) -> dict[str, Layout]:
    """Weight -> layout in forwards of the stacks of which ranks have other matrices than others.

    rows  weight -> its `core.placement.table.Placed`; None: no ranks share it
    """
    stacks = {layer.weight: rows[layer.weight] for layer in layers if layer.expert is not None}
    return {name: row.layout for name, row in stacks.items() if row is not None and row.layout.axes_of(0)}


def apart(layers: Sequence[Layer], dealt: Mapping[str, Layout]) -> list[Apart]:
    """This rank's layers of those, by the axes over which they are dealt out."""
    found: dict[tuple[str, ...], list[int]] = {}
    meshes: dict[tuple[str, ...], DeviceMesh] = {}
    for index, layer in enumerate(layers):
        layout = dealt.get(layer.weight)
        if layout is not None and layer.expert is not None and Slice(layout, layer.expert).place is not None:
            assert isinstance(layout.mesh, DeviceMesh)
            axes = layout.axes_of(0)
            meshes[axes] = root_of(layout.mesh)
            found.setdefault(axes, []).append(index)
    made = []
    for axes, indices in found.items():
        mesh = meshes[axes]
        data, rest = gradient_axis(mesh, axes), [axis for axis in tensor_ranks(mesh) if axis not in axes]
        sums = data.get_group() if data.size() > 1 else None
        made.append(Apart(tuple(indices), sums, axis_group(mesh, rest[0]) if rest else None))
    return made


# --- heads ------------------------------------------------------------------------------------------------------------


@dataclass
class Shown:
    """What a head has shown of a forward: its inputs x[B, L, D], and of the gradients of logits what is needed.

    squares_only  whether sums of squares are: of each token, or with `sharing` reduce of the sums over each row
    """

    x: Tensor
    squares_only: bool
    sharing: Sharing
    gradients: list[Tensor] = field(default_factory=list)
    sums: Tensor | None = None

    def add(self, tokens: slice, g_CV: Tensor) -> None:
        """Note the gradients of some tokens' logits, of the sum of their losses."""
        g_CV = g_CV.to(wide_dtype(g_CV.dtype))
        if not self.squares_only:
            self.gradients.append(g_CV)
        elif self.sharing == "expand":
            squares = g_CV.square().sum(0)
            self.sums = squares if self.sums is None else self.sums + squares
        else:
            rows, length = self.x.shape[:2]
            of_token = torch.arange(tokens.start, tokens.start + len(g_CV), device=g_CV.device) // max(1, length)
            if self.sums is None:
                self.sums = g_CV.new_zeros(rows, g_CV.shape[1])
            self.sums.index_add_(0, of_token, g_CV)

    def squares(self) -> Tensor:
        """[V], of this rank's rows of the vocabulary."""
        assert self.sums is not None
        return self.sums if self.sharing == "expand" else self.sums.square().sum(0)

    def whole_gradient(self) -> Tensor:
        """[B, L, V]"""
        g = torch.cat(self.gradients)
        return g.view(*self.x.shape[:2], g.shape[-1])


class _HeadOnOneAxis:
    """x is whole and alike on all ranks, the logits are cut, or alike, too."""

    def __init__(self, cut: Cut, use: Use, shown: Shown, rows: int):
        self.cut, self.shown = cut, shown
        self.part: slice | None = None
        self.is_cut = cut.cuts(use, "gradient")
        self.inputs: Whole | None = self._whole(shown.x, rows)
        self.rows = rows

    def arrived(self, gradient: Tensor) -> tuple[None, Whole | Squares]:
        if self.shown.squares_only:
            squares = self.shown.squares() * gradient.square()
            return None, Squares(self.cut.placed(squares, 0) if self.is_cut else squares / self.cut.copies)
        g = self.shown.whole_gradient() * gradient
        return None, self._whole(self.cut.whole(g, -1) if self.is_cut else g, self.rows)

    def _whole(self, x: Tensor, rows: int) -> Whole:
        """Of what all have alike each takes its part of the cases, or all of them for a part of the sums."""
        if self.is_cut:
            return Whole(x, rows, turn=(dist.get_rank(self.cut.group), self.cut.copies))
        return Whole(x, rows, 1 / self.cut.copies)


# --- grids ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridCut:
    """How the ranks of a grid share a layer: rows of the batch and features, on both sides.

    copies  ranks of the grid
    layout  of the weight in forwards, on the mesh of GRID_AXES

    In 2D and 2.5D the features of both sides lie over tp_col, the rows over the other axes. In 3D, whose weights the
    depth cuts, the features of a side lie over the axis that first cuts its dim of the weight.
    """

    copies: int
    layout: Layout
    parts_rows: ClassVar[bool] = False

    @property
    def is_cube(self) -> bool:
        return DEPTH in self.layout.axes()

    def columns(self, dim: int) -> str:
        """The axis over which activations are cut that are like a dim of the weight."""
        if not self.is_cube:
            return PLANE[-1]
        return next(axis for axis, cut in self.layout.cuts if cut == dim)

    def features(self, dim: int) -> slice:
        """Those that this rank has of them."""
        unit = dict(self.layout.units).get(next(axis for axis, cut in self.layout.cuts if cut == dim), 1)
        axis = self.columns(dim)
        return shares(self.layout.shape[dim], self.layout.axis_size(axis), unit)[self.layout.axis_index(axis)]

    def view(self, use: Use, x: Tensor, y: Tensor, rows: int, length: int | None) -> View:
        size = largest_share(rows, self._places)
        given = y if use.kind == "embedding" else x
        if given.shape[0] != size:
            raise UserError(
                f"kfac: {use.name} is given {given.shape[0]} rows of the {size} that this rank has of a microbatch of "
                f"{rows}, and what it does to all of them at once has no factors; leave it out: --optim.exclude "
                f"'{use.name}'"
            )
        return _OnGrid(self, use, x, rows)

    def head_view(self, use: Use, shown: Shown, rows: int) -> View:
        return _HeadOnGrid(self, use, shown, rows)

    @property
    def _places(self) -> int:
        """Ranks that rows are cut over."""
        return self.layout.axis_size(DEPTH) * self.layout.axis_size(PLANE[0])

    def together(self, parts: list[tuple[Tensor, int]], axes: tuple[str, ...], rows: int) -> list[Tensor]:
        """Activations, each like a dim of the weight, with all features: of the rows that ranks of `axes` have.

        One message. Rows that fill up are left out.
        """
        sizes = [self.layout.shape[dim] for _, dim in parts]
        size, side = largest_share(rows, self._places), self.layout.axis_size(PLANE[0])
        depth = self.layout.axis_index(DEPTH)
        places = [depth * side + self.layout.axis_index(self._other(self.columns(dim))) for _, dim in parts]
        first = places[0] * size if len(axes) == 1 else depth * side * size
        count = size if len(axes) == 1 else side * size
        dtype = torch.promote_types(parts[0][0].dtype, parts[-1][0].dtype)
        whole_rows = max(0, min(count, rows - first))
        made = parts[0][0].new_zeros(whole_rows, *parts[0][0].shape[1:-1], sum(sizes), dtype=dtype)
        before = 0
        for (part, dim), place, of_part in zip(parts, places, sizes, strict=True):
            own, features = max(0, min(size, rows - place * size)), self.features(dim)
            at = place * size - first
            made[at : at + own, ..., before + features.start : before + features.stop] = part[:own]
            before += of_part
        group = self.group(axes)
        if made.numel() and group.size() > 1:
            dist.all_reduce(made, group=group)
        return list(made.split(sizes, -1))

    @staticmethod
    def _other(axis: str) -> str:
        """The axis that rows are cut over where features are over that one."""
        return PLANE[1 - PLANE.index(axis)]

    def group(self, axes: tuple[str, ...]) -> ProcessGroup:
        return self.layout.axis_group("+".join(axes))


class _OnGrid:
    def __init__(self, cut: GridCut, use: Use, x: Tensor, rows: int):
        self.cut, self.use, self.rows = cut, use, rows
        self.part: slice | None = None
        self.input_dim, self.output_dim = (0, 1) if use.inputs_first else (1, 0)
        looks_up = use.kind == "embedding"
        columns = {cut.columns(dim) for dim in (0, 1)} if not looks_up else {cut.columns(self.output_dim)}
        self.axes = tuple(axis for axis in PLANE if axis in columns)
        self.inputs: Whole | None = Whole(x, rows, 1 / cut.copies) if looks_up else None
        self.x = None if looks_up else x.detach()

    def arrived(self, gradient: Tensor) -> tuple[Whole | None, Whole | Squares]:
        parts = [] if self.x is None else [(self.x, self.input_dim)]
        self.x = None
        *inputs, g = self.cut.together([*parts, (gradient, self.output_dim)], self.axes, self.rows)
        return self._mine(inputs[0]) if inputs else None, self._mine(g)

    def _mine(self, whole: Tensor) -> Whole:
        group = self.cut.group(self.axes)
        return Whole(whole, len(whole), turn=(group.rank(), group.size()))


class _HeadOnGrid(_OnGrid):
    """Of long vocabularies each rank has the squares of its own rows' and columns' gradients."""

    def __init__(self, cut: GridCut, use: Use, shown: Shown, rows: int):
        super().__init__(cut, use, shown.x, rows)
        self.shown = shown
        if shown.squares_only:
            self.axes = (cut.columns(self.input_dim),)

    def arrived(self, gradient: Tensor) -> tuple[Whole | None, Whole | Squares]:
        if not self.shown.squares_only:
            return super().arrived(self.shown.whole_gradient() * gradient)
        inputs = None
        if self.x is not None:
            [x] = self.cut.together([(self.x, self.input_dim)], self.axes, self.rows)
            inputs, self.x = self._mine(x), None
        own = self.shown.squares() * gradient.square()
        squares = own.new_zeros(self.cut.layout.shape[self.output_dim])
        squares[self.cut.features(self.output_dim)] = own
        return inputs, Squares(squares)


def rows_on_grid(mesh: AnyMesh) -> Callable[[int], int]:
    """Rows of a microbatch -> those among this rank's of whole features that are none of what fills the batch up."""

    def own(rows: int) -> int:
        sizes = [axis_size(mesh, axis) for axis in (DEPTH, PLANE[0])]
        size = largest_share(rows, sizes[0] * sizes[1])
        place = axis_index(mesh, DEPTH) * sizes[1] + axis_index(mesh, PLANE[0])
        return max(0, min(size, rows - place * size))

    return own
