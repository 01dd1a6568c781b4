"""Two-dimensional tensor parallelism on q x q ranks (Optimus), and 2.5D on q x q x d (Tesseract): styles for a plan.

Every weight is cut on both dims and every activation x[B_rows, L, D_cols] on batch and features, so no rank ever holds
a whole one of either. The products are SUMMA's (`core.parallel.summa`).

    linear      w[O_col, I_row] or w[O_row, I_col]   x[B_rows, L, I_cols]   -> y[B_rows, L, O_cols]
    embedding   w[V_row, D_col]                      ids[B, L], whole       -> x[B_rows, L, D_cols]
    positions   w[P_row, D_col]                      positions[B or 1, L]   -> x[B_rows or 1, L, D_cols]
    head        w[V_row, D_col]                      x[B_rows, L, D_cols]   -> the sum of all tokens' losses
    norm, attention, from_whole, drop_padding        of `core.parallel.grid`

A bias b[O_col] is repeated over the rows, whose parts of its gradient are summed at the end of the backward. With a
depth the batch is cut over (tp_depth, tp_row); weights are repeated over the depth, their gradients summed likewise.

Head and loss: logits[tokens, V_cols] = x E^T is SUMMA's `abt`; three numbers a token cross the columns' axis (see
`combine_statistics`); the logits' gradient g makes dx = g E (`ab`) and dE = g^T x (`atb`) at once, by chunks of tokens,
as on one rank (`core.kernels.cross_entropy`).

Sources: see `core.parallel.summa`.  Shapes: B batch, L length, I in_features, O out_features, V vocabulary, D model,
P positions, C tokens of a chunk.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.compat import uncompiled
from core.layout import layout_of, shares
from core.mesh import sub_mesh
from core.parallel import grid_loss
from core.parallel.grid import FIRST, Spread
from core.parallel.summa import Elements, Grid, ab, abt, atb, broadcast, reduce, sent
from core.parallel.summa import linear as summa_linear
from core.parallel.tensor1d import refuse_padding
from core.placement.style import Cut, Cuts, Message, Messages, Site, Style

_DEPTH = {"weight": ("tp_depth",)}
"""Over the depth a weight is repeated, and its gradient a partial sum."""


def _by_inputs(shape: Sequence[int]) -> bool:
    """Return whether a weight [O, I] is multiplied by `ab`, with K = I: that of the two products that sends less."""
    num_out, num_in = shape
    return num_in <= num_out


def linear_in_units(in_unit: int = 1, out_unit: int = 1) -> Style:
    """nn.Linear.  x[B_rows, .., I_cols] -> y[B_rows, .., O_cols].

    in_unit, out_unit  features that stay on one rank (those of a head)
    """

    def cuts(module: Any) -> Cuts:
        out_axis, in_axis = ("tp_col", "tp_row") if _by_inputs(module.weight.shape) else ("tp_row", "tp_col")
        return {"weight": (Cut(0, out_axis, out_unit), Cut(1, in_axis, in_unit)), "bias": FIRST.vector(out_unit)}

    def wrap(module: Any, mesh: DeviceMesh) -> nn.Module:
        at, (num_out, num_in) = Spread(mesh), layout_of(module.weight).shape
        by_inputs = _by_inputs((num_out, num_in))
        sizes = at.columns(num_in, in_unit) if by_inputs else at.columns(num_out, out_unit)
        grid = Grid(mesh, [share.stop - share.start for share in sizes])

        @uncompiled  # torch.compile does not trace messages from one rank to a line of the grid, or back
        def forward(x: Tensor) -> Tensor:
            y = summa_linear(grid, x.flatten(0, -2), module.weight, by_inputs)
            y = y.view(*x.shape[:-1], y.shape[-1])
            return y if module.bias is None else y + module.bias

        module.forward = forward
        return module

    def rows(site: Site) -> int:
        return min(site.shape()) * FIRST.tokens(site)

    def columns(site: Site) -> int:
        num_out, num_in = site.shape()
        if _by_inputs((num_out, num_in)):
            return num_in * site.share(num_out, FIRST.cols, out_unit)
        return num_out * site.share(num_in, FIRST.cols, in_unit)

    def products(if_by_inputs: tuple[str, ...], if_not: tuple[str, ...]) -> tuple[Message, ...]:
        def when(elements: Elements, by_inputs: bool) -> Elements:
            return lambda site: elements(site) if _by_inputs(site.shape()) is by_inputs else 0

        return tuple(
            message
            for names, by_inputs in ((if_by_inputs, True), (if_not, False))
            for name in names
            for message in sent(name, when(rows, by_inputs), when(columns, by_inputs))
        )

    return Style(
        cuts=cuts,
        partial={**_DEPTH, "bias": FIRST.rows},
        inputs=FIRST.lies(),
        outputs=FIRST.lies(),
        messages=Messages(products(("ab",), ("abt",)), products(("abt", "atb"), ("ab", "atb"))),
        wrap=wrap,
        is_local=True,
    )


linear = linear_in_units()


# --- embedding --------------------------------------------------------------------------------------------------------


def _embedding(module: Any, mesh: DeviceMesh) -> nn.Module:
    table = _Table(module, mesh)

    def forward(ids: Tensor) -> Tensor:
        return _Lookup.apply(module.weight, ids, table)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


def _positions(module: Any, mesh: DeviceMesh) -> nn.Module:
    table = _Table(module, mesh)

    def forward(ids: Tensor) -> Tensor:
        lookup = _Lookup if ids.shape[0] > 1 else _SharedLookup
        return lookup.apply(module.weight, ids, table)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


class _Table:
    """An embedding's rows, cut over tp_row, and its features, cut over tp_col."""

    def __init__(self, module: Any, mesh: DeviceMesh):
        num_rows = layout_of(module.weight).shape[0]
        self.at, self.axis = Spread(mesh), sub_mesh(mesh, "tp_row")
        self.row, self.group = self.axis.get_local_rank(), self.axis.get_group()
        self.start = shares(num_rows, self.axis.size())[self.row].start

    def ids_of(self, ids: Tensor, row: int) -> Tensor:
        """The ids of another row of this rank's layer of the depth."""
        return self.at.batch(ids, row=self.at.row - self.row + row)

    def own(self, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """(ids among this rank's rows, whether they are)."""
        local_ids = ids - self.start
        held = (local_ids >= 0) & (local_ids < weight.shape[0])
        return local_ids.masked_fill(~held, 0), held

    def look_up(self, ids: Tensor, weight: Tensor) -> Tensor:
        """x[.., D_col] of the ids whose rows are here; zeros for the others."""
        local_ids, held = self.own(ids, weight)
        if not weight.shape[0]:
            return weight.new_zeros(*ids.shape, weight.shape[1])
        return weight[local_ids].masked_fill_(~held[..., None], 0.0)

    def add_gradient(self, dweight: Tensor, ids: Tensor, dx: Tensor) -> None:
        local_ids, held = self.own(ids, dweight)
        if dweight.shape[0]:
            dx = dx.masked_fill(~held[..., None], 0.0).flatten(0, -2)
            dweight.index_add_(0, local_ids.flatten(), dx.to(dweight.dtype))


class _Lookup(Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: _Table) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.table = table
        own = weight.new_empty(0)
        for row in range(table.axis.size()):
            summed = reduce(table.look_up(table.ids_of(ids, row), weight), row, table.group).wait()
            own = summed if row == table.row else own
        return own

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight, ids), table = ctx.saved_tensors, ctx.table
        dweight = torch.zeros_like(weight)
        for row in range(table.axis.size()):
            there = table.ids_of(ids, row)
            shape = (there.numel(), weight.shape[1])
            own = grads[0].reshape(-1, weight.shape[1])
            dx = broadcast(own, row == table.row, shape, row, table.group).wait()
            table.add_gradient(dweight, there, dx.view(*there.shape, -1))
        return dweight, None, None


class _SharedLookup(Function):
    """Positions that all sequences share: every rank of a column gets the same rows."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: _Table) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.table = table
        return _all_reduced(table.look_up(ids, weight), table)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight, ids), table = ctx.saved_tensors, ctx.table
        dweight = torch.zeros_like(weight)
        table.add_gradient(dweight, ids, _all_reduced(grads[0].clone(), table))
        return dweight, None, None


def _all_reduced(x: Tensor, table: _Table) -> Tensor:
    x = x.contiguous()
    if table.group.size() > 1 and x.numel():
        dist.all_reduce(x, group=table.group)
    return x


def _columns_here(site: Site) -> int:
    """Features of an embedding on this rank."""
    return site.share(site.shape()[1], FIRST.cols)


def _rounds(site: Site) -> int:
    """Elements of a lookup's sums, one round a row of the grid."""
    return site.size("tp_row") * FIRST.tokens(site) * _columns_here(site)


def shared_rows(site: Site) -> int:
    """Elements of positions that all sequences share."""
    return site.length * _columns_here(site)


SHARED = Messages(*2 * ((Message("all_reduce", shared_rows, "tp_row"),),))
"""The sums of such positions, and of their gradients."""

_MATRIX: dict[str, Any] = {
    "cuts": {"weight": (Cut(0, "tp_row"), Cut(1, "tp_col"))},
    "partial": _DEPTH,
    "is_local": True,
}

embedding = Style(
    **_MATRIX,
    outputs=FIRST.lies(),
    messages=Messages((Message("reduce", _rounds, "tp_row"),), (Message("broadcast", _rounds, "tp_row"),)),
    refuse=refuse_padding,
    wrap=_embedding,
)
"""nn.Embedding.  ids[B, L], whole on every rank -> x[B_rows, L, D_cols].

Round t: every rank of a column looks up what it has for the sequences of row t; their sum goes to that row's rank.
"""

positions = Style(
    **_MATRIX,
    outputs=FIRST.lies(),
    messages=SHARED,
    refuse=refuse_padding,
    wrap=_positions,
)
"""nn.Embedding of positions[B, L], or of [1, L] that all sequences share -> x[B_rows or 1, L, D_cols].

The closed forms are of positions that are shared.
"""


# --- head and loss ----------------------------------------------------------------------------------------------------


def _head(module: Any, mesh: DeviceMesh) -> nn.Module:
    at, vocabulary = Spread(mesh), layout_of(module.weight).shape[0]
    sizes = [rows.stop - rows.start for rows in at.columns(vocabulary)]
    return grid_loss.install(module, _Products(at, Grid(mesh, sizes)))


def _head_products(*names: str) -> tuple[Message, ...]:
    """Products of a loss in one chunk; K is the vocabulary."""
    rows, columns = (lambda s: s.shape()[0] * FIRST.tokens(s)), (lambda s: s.shape()[0] * _columns_here(s))
    return tuple(message for name in names for message in sent(name, rows, columns))


head = Style(
    cuts=_MATRIX["cuts"] | {"bias": FIRST.vector()},
    partial=_DEPTH | {"bias": FIRST.rows},
    is_local=True,
    inputs=FIRST.lies(),
    messages=Messages((*_head_products("abt", "ab", "atb"), *grid_loss.messages(FIRST))),
    refuse=grid_loss.refuse_vocabulary(FIRST),
    wrap=_head,
)
"""The head with its loss (core.nn.loss).  x[B_rows, L, D_cols] -> the sum of all tokens' losses, on every rank.

Without targets logits[B, L, V], gathered on every rank: for inference, without a gradient.
"""


class _Products(grid_loss.Products):
    partials = 1

    def __init__(self, at: Spread, grid: Grid):
        self.at, self.grid = at, grid

    def begin(self, x: Tensor, weight: Tensor, with_gradients: bool) -> "_Pass":
        return _Pass(self.grid, x, weight, with_gradients)


class _Pass(grid_loss.Pass):
    """X = logits[C, V_cols], W = the weight, Y = x[C, D_cols]."""

    def __init__(self, grid: Grid, x: Tensor, weight: Tensor, with_gradients: bool):
        self.grid, self.shape, self.weight = grid, x.shape, weight
        self.x = x.flatten(0, 1)
        self.dx = torch.empty_like(self.x) if with_gradients else x.new_empty(0)
        self.dweight: Tensor | None = None

    def logits(self, tokens: slice) -> Tensor:
        return abt(self.grid, self.x[tokens], self.weight)

    def add(self, tokens: slice, g_CV: Tensor) -> None:
        self.dx[tokens] = ab(self.grid, g_CV, self.weight)
        x = self.x[tokens]
        if x.dtype == torch.float16:  # sums over tokens pass what it holds: they are in fp32 until they are scaled
            g_CV, x = g_CV.float(), x.float()
        dweight = atb(self.grid, g_CV, x)
        if self.dweight is None:
            self.dweight = dweight.to(torch.promote_types(dweight.dtype, torch.float32))
        else:
            self.dweight += dweight

    def gradients(self) -> tuple[Tensor, Tensor]:
        dtype = self.weight.dtype if self.weight.dtype != torch.float16 else torch.float32
        dweight = torch.zeros_like(self.weight, dtype=dtype) if self.dweight is None else self.dweight.to(dtype)
        return self.dx.view(self.shape), dweight
