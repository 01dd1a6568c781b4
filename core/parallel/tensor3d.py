"""Three-dimensional tensor parallelism on p x p x p ranks: styles for a plan.

Every matrix lies on all P = p^3 ranks, 1 / P on each. A product meets on p^2 of it: with ranks (i, j, l) on the axes
(tp_depth, tp_row, tp_col), a linear layer y[M, O] = x[M, I] w[O, I]^T is

    x[M_ij, I_l]   all-gather over j  -> x[M_i, I_l]
    w[O_ji, I_l]   all-gather over i  -> w[O_j, I_l]
    y[M_i, O_j]{l}                                    reduce-scatter over l -> y[M_il, O_j]

(M_ij: M cut over i, then j). So the columns of its output lie where the last cut of its rows was, and the other way
round: the two sides of a layer, `Spread` and `Spread.swapped()`. A second layer brings activations back, so that the
residual stream always lies on the first side, attention's heads and the MLP's hidden features on the second. On the way
back the same three matrices are gathered and their gradients scattered by the same collectives.

    linear      w[O_ji, I_l]    x[B_ij, L, I_l]        -> y[B_il, L, O_j]
    embedding   w[V_ji, D_l]    ids[B, L], whole       -> x[B_ij, L, D_l]
    positions   w[P_ji, D_l]    positions[B or 1, L]   -> x[B_ij or 1, L, D_l]
    head        w[V_ji, D_l]    x[B_ij, L, D_l]        -> the sum of all tokens' losses
    norm, attention, from_whole, drop_padding           of `core.parallel.grid`

Bian et al. 2021, Maximizing Parallelism in Distributed Training for Huge Neural Networks, sections 3.1 and 3.2;
Agarwal et al. 1995, A three-dimensional approach to parallel matrix multiplication.

Shapes: B batch, L length, M tokens, I in_features, O out_features, V vocabulary, D model, P positions, C tokens of a
chunk.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import all_gather, all_reduce, reduce_scatter
from core.config import UserError
from core.kernels.cross_entropy import wide_product
from core.layout import Layout, shares
from core.mesh import sub_mesh
from core.parallel import grid_loss
from core.parallel.grid import Spread, cut_vector
from core.parallel.plan import cut_parameter


def second_side(mesh: DeviceMesh) -> Spread:
    """Where attention's heads and the MLP's hidden features lie; the residual stream lies at `Spread(mesh)`."""
    return Spread(mesh).swapped()


class Matrix:
    """A weight[O, I] whose inputs lie at `at`: I cut over at.cols, O over at.rows[-1] and then tp_depth."""

    def __init__(self, module: nn.Module, at: Spread, in_unit: int = 1, out_unit: int = 1):
        self.at, self.depth = at, sub_mesh(at.mesh, "tp_depth")
        self.across, self.inner = at.row_axes[-1], at.col_axis
        shape = tuple(module.get_parameter("weight").shape)
        layout = Layout(shape).cut(at.mesh, at.rows[-1], 0, out_unit).cut(at.mesh, at.cols, 1, in_unit)
        cut_parameter(module, "weight", layout.cut(at.mesh, "tp_depth", 0))
        self.rows = shares(shape[0], self.across.size(), out_unit)[self.across.get_local_rank()]
        self.num_rows = self.rows.stop - self.rows.start
        self.own = shares(self.num_rows, self.depth.size())[self.depth.get_local_rank()]

    def gathered(self, weight: Tensor) -> Tensor:
        """w[O_ji, I_l] -> w[O_j, I_l]; shares are padded to the longest on the way."""
        longest = -(-self.num_rows // self.depth.size())
        if len(weight) < longest:
            weight = torch.cat((weight, weight.new_zeros(longest - len(weight), weight.shape[1])))
        return all_gather(weight, 0, self.depth)[: self.num_rows]

    def scattered(self, dweight: Tensor) -> Tensor:
        """dw[O_j, I_l]{i} -> dw[O_ji, I_l]."""
        return reduce_scatter(dweight, 0, self.depth)[: self.own.stop - self.own.start]


def linear(
    module: Any, mesh: DeviceMesh, *, swapped: bool = False, in_unit: int = 1, out_unit: int = 1
) -> nn.Module:  # fmt: skip
    """nn.Linear.  x[B_ij, .., I_l] -> y[B_il, .., O_j].

    swapped            from the second side to the first
    in_unit, out_unit  features that stay on one rank (those of a head)
    """
    at = second_side(mesh) if swapped else Spread(mesh)
    matrix = Matrix(module, at, in_unit, out_unit)
    if module.bias is not None:
        cut_vector(module, "bias", at.swapped(), out_unit)

    def forward(x: Tensor) -> Tensor:
        y = _Linear.apply(x, module.weight, matrix)
        return y if module.bias is None else y + module.bias

    module.forward = forward
    return module


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, matrix: Matrix) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.matrix = matrix
        return reduce_scatter(all_gather(x, 0, matrix.across) @ matrix.gathered(weight).T, 0, matrix.inner)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x, weight), matrix = ctx.saved_tensors, ctx.matrix
        dy, dx, dweight = all_gather(grads[0], 0, matrix.inner), None, None
        if ctx.needs_input_grad[0]:
            dx = reduce_scatter(dy @ matrix.gathered(weight), 0, matrix.across)
        if ctx.needs_input_grad[1]:
            x = all_gather(x, 0, matrix.across)
            dweight = matrix.scattered(dy.flatten(0, -2).T @ x.flatten(0, -2))
        return dx, dweight, None


# --- embedding --------------------------------------------------------------------------------------------------------


def embedding(module: Any, mesh: DeviceMesh, *, swapped: bool = False) -> nn.Module:
    """nn.Embedding.  ids[B, L], whole on every rank -> x[B_ij, L, D_l].  swapped: on the second side."""
    table = _Table(module, second_side(mesh) if swapped else Spread(mesh))

    def forward(ids: Tensor) -> Tensor:
        return _Lookup.apply(module.weight, table.met(ids), table, False)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


def positions(module: Any, mesh: DeviceMesh) -> nn.Module:
    """nn.Embedding of positions[B, L], or of [1, L] that all sequences share -> x[B_ij or 1, L, D_l]."""
    table = _Table(module, Spread(mesh))

    def forward(ids: Tensor) -> Tensor:
        shared = ids.shape[0] == 1
        return _Lookup.apply(module.weight, ids if shared else table.met(ids), table, shared)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


class _Table(Matrix):
    def __init__(self, module: Any, at: Spread):
        if getattr(module, "padding_idx", None) is not None or getattr(module, "max_norm", None) is not None:
            raise UserError("a sharded vocabulary looks up plain embeddings; build it without padding_idx and max_norm")
        super().__init__(module, at)

    def met(self, ids: Tensor) -> Tensor:
        """ids[B, L] -> ids[B_i, L]: those of all ranks over which the sum is scattered."""
        size, index = self.across.size(), self.across.get_local_rank()
        first = self.at.row - index
        return torch.cat([self.at.batch(ids, row=first + n) for n in range(size)])

    def own_ids(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """(ids among the rows O_j, whether they are)."""
        local_ids = ids - self.rows.start
        held = (local_ids >= 0) & (local_ids < self.num_rows)
        return local_ids.masked_fill(~held, 0), held


class _Lookup(Function):
    """shared: every rank over which the sum goes gets all of it, and the gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, table: _Table, shared: bool) -> Tensor:
        ctx.save_for_backward(weight, ids)
        ctx.table, ctx.shared = table, shared
        local_ids, held = table.own_ids(ids)
        rows = table.gathered(weight)
        x = (
            rows[local_ids].masked_fill_(~held[..., None], 0.0)
            if len(rows)
            else rows.new_zeros(*ids.shape, rows.shape[1])
        )
        return all_reduce(x, table.across) if shared else reduce_scatter(x, 0, table.across)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (weight, ids), table = ctx.saved_tensors, ctx.table
        dx = all_reduce(grads[0], table.across) if ctx.shared else all_gather(grads[0], 0, table.across)
        local_ids, held = table.own_ids(ids)
        dweight = weight.new_zeros(table.num_rows, weight.shape[1])
        if table.num_rows:
            dweight.index_add_(0, local_ids.flatten(), dx.masked_fill(~held[..., None], 0.0).flatten(0, -2))
        return table.scattered(dweight), None, None, None


# --- head and loss ----------------------------------------------------------------------------------------------------


def head(module: Any, mesh: DeviceMesh, *, swapped: bool = False) -> nn.Module:
    """The head with its loss (core.nn.loss).  x[B_ij, L, D_l] -> the sum of all tokens' losses, on every rank.

    Without targets logits[B, L, V], gathered on every rank: for inference, without a gradient.
    swapped: x lies on the second side.
    """
    at = second_side(mesh) if swapped else Spread(mesh)
    grid_loss.vocabulary_rows(at.swapped(), module.weight.shape[0])
    return grid_loss.install(module, _Products(Matrix(module, at)))


class _Products(grid_loss.Products):
    def __init__(self, matrix: Matrix):
        self.matrix, self.at, self.partials = matrix, matrix.at.swapped(), matrix.inner.size()

    def begin(self, x: Tensor, weight: Tensor, with_gradients: bool) -> "_Pass":
        return _Pass(self.matrix, x, weight, with_gradients)


class _Pass(grid_loss.Pass):
    """x and weight are gathered once; a chunk is one of the tokens of each of the ranks to which logits go.

    p ranks share the sum over the columns, and have N tokens each: x[p, N, D_l].
    """

    def __init__(self, matrix: Matrix, x: Tensor, weight: Tensor, with_gradients: bool):
        self.matrix, self.shape, self.dtype = matrix, x.shape, weight.dtype
        self.weight = matrix.gathered(weight)
        self.x = all_gather(x, 0, matrix.across).reshape(matrix.inner.size(), -1, x.shape[-1])
        self.dx = torch.empty_like(self.x) if with_gradients else x.new_empty(0)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dweight = torch.zeros_like(self.weight, dtype=wide) if with_gradients else x.new_empty(0)

    def logits(self, tokens: slice) -> Tensor:
        return reduce_scatter(self.x[:, tokens].flatten(0, 1) @ self.weight.T, 0, self.matrix.inner)

    def add(self, tokens: slice, g_CV: Tensor) -> None:
        g = all_gather(g_CV, 0, self.matrix.inner)
        x = self.x[:, tokens]
        self.dx[:, tokens] = (g @ self.weight).view(x.shape)
        rows = x.flatten(0, 1)
        # Of fp16 sums over tokens pass what it holds: they are in fp32 until they are scaled.
        self.dweight += wide_product(g.T, rows) if rows.dtype == torch.float16 else g.T @ rows

    def gradients(self) -> tuple[Tensor, Tensor]:
        dx = self.dx.view(-1, *self.shape[1:])
        dtype = self.dtype if self.dtype != torch.float16 else torch.float32
        dweight = self.matrix.scattered(self.dweight.to(dtype))
        return reduce_scatter(dx, 0, self.matrix.across), dweight
