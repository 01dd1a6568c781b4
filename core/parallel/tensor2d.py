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

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.layout import Layout, shares
from core.mesh import sub_mesh
from core.parallel import grid_loss
from core.parallel.grid import Spread, cut_vector
from core.parallel.plan import cut_parameter, mark_partial_parameter
from core.parallel.summa import Grid, ab, abt, atb, broadcast, reduce
from core.parallel.summa import linear as summa_linear


def linear(module: Any, mesh: DeviceMesh, *, in_unit: int = 1, out_unit: int = 1) -> nn.Module:
    """nn.Linear.  x[B_rows, .., I_cols] -> y[B_rows, .., O_cols].

    in_unit, out_unit  features that stay on one rank (those of a head)
    """
    at, (num_out, num_in) = Spread(mesh), module.weight.shape
    by_inputs = num_in <= num_out
    units = {"tp_col": out_unit, "tp_row": in_unit} if by_inputs else {"tp_row": out_unit, "tp_col": in_unit}
    _cut_matrix(module, mesh, ("tp_col", "tp_row") if by_inputs else ("tp_row", "tp_col"), units)
    if module.bias is not None:
        cut_vector(module, "bias", at, out_unit)
    sizes = at.columns(num_in, in_unit) if by_inputs else at.columns(num_out, out_unit)
    grid = Grid(mesh, [share.stop - share.start for share in sizes])

    def forward(x: Tensor) -> Tensor:
        y = summa_linear(grid, x.flatten(0, -2), module.weight, by_inputs)
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if module.bias is None else y + module.bias

    module.forward = forward
    return module


def _cut_matrix(
    module: nn.Module, mesh: DeviceMesh, axes: tuple[str, str], units: dict[str, int] | None = None
) -> None:
    """Cut a weight's dim 0 over the first axis, dim 1 over the second; over the depth it is repeated."""
    layout = Layout(tuple(module.get_parameter("weight").shape))
    for dim, axis in enumerate(axes):
        layout = layout.cut(mesh, axis, dim, (units or {}).get(axis, 1))
    cut_parameter(module, "weight", layout)
    if sub_mesh(mesh, "tp_depth").size() > 1:
        mark_partial_parameter(module.get_parameter("weight"), ("tp_depth",))


# --- embedding --------------------------------------------------------------------------------------------------------


def embedding(module: Any, mesh: DeviceMesh) -> nn.Module:
    """nn.Embedding.  ids[B, L], whole on every rank -> x[B_rows, L, D_cols].

    Round t: every rank of a column looks up what it has for the sequences of row t; their sum goes to that row's rank.
    """
    table = _Table(module, mesh)

    def forward(ids: Tensor) -> Tensor:
        return _Lookup.apply(module.weight, ids, table)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


def positions(module: Any, mesh: DeviceMesh) -> nn.Module:
    """nn.Embedding of positions[B, L], or of [1, L] that all sequences share -> x[B_rows or 1, L, D_cols]."""
    table = _Table(module, mesh)

    def forward(ids: Tensor) -> Tensor:
        lookup = _Lookup if ids.shape[0] > 1 else _SharedLookup
        return lookup.apply(module.weight, ids, table)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


class _Table:
    """An embedding's rows, cut over tp_row, and its features, cut over tp_col."""

    def __init__(self, module: Any, mesh: DeviceMesh):
        if getattr(module, "padding_idx", None) is not None or getattr(module, "max_norm", None) is not None:
            raise UserError("a sharded vocabulary looks up plain embeddings; build it without padding_idx and max_norm")
        num_rows = module.weight.shape[0]
        _cut_matrix(module, mesh, ("tp_row", "tp_col"))
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


# --- head and loss ----------------------------------------------------------------------------------------------------


def head(module: Any, mesh: DeviceMesh) -> nn.Module:
    """The head with its loss (core.nn.loss).  x[B_rows, L, D_cols] -> the sum of all tokens' losses, on every rank.

    Without targets logits[B, L, V], gathered on every rank: for inference, without a gradient.
    """
    at, vocabulary = Spread(mesh), module.weight.shape[0]
    sizes = [rows.stop - rows.start for rows in grid_loss.vocabulary_rows(at, vocabulary)]
    _cut_matrix(module, mesh, ("tp_row", "tp_col"))
    return grid_loss.install(module, _Products(at, Grid(mesh, sizes)))


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
