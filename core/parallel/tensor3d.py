"""Three-dimensional tensor parallelism on p x p x p ranks: styles for a plan.

Every matrix lies on all P = p^3 ranks, 1 / P on each. A product meets on p^2 of it: with ranks (i, j, l) on the axes
(tp_depth, tp_row, tp_col), a linear layer y[M, O] = x[M, I] w[O, I]^T is

    x[M_ij, I_l]   all-gather over j  -> x[M_i, I_l]
    w[O_ji, I_l]   all-gather over i  -> w[O_j, I_l]
    y[M_i, O_j]{l}                                    reduce-scatter over l -> y[M_il, O_j]

(M_ij: M cut over i, then j). So the columns of its output lie where the last cut of its rows was, and the other way
round: the two sides of a layer, a `Side` and its `swapped()`. A second layer brings activations back, so that the
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

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import all_gather, all_reduce, reduce_scatter
from core.kernels.cross_entropy import wide_product
from core.layout import largest_share, layout_of, shares
from core.mesh import sub_mesh
from core.parallel import grid_loss
from core.parallel.grid import FIRST, SECOND, Side, Spread
from core.parallel.tensor1d import refuse_padding
from core.parallel.tensor2d import SHARED
from core.placement.style import Cut, Message, Messages, Site, Style


class Matrix:
    """A weight[O, I] whose inputs lie at `at`: I cut over at.cols, O over at.rows[-1] and then tp_depth."""

    def __init__(self, module: nn.Module, at: Spread, out_unit: int = 1):
        self.at, self.depth = at, sub_mesh(at.mesh, "tp_depth")
        self.across, self.inner = at.row_axes[-1], at.col_axis
        num_rows = layout_of(module.get_parameter("weight")).shape[0]
        self.rows = shares(num_rows, self.across.size(), out_unit)[self.across.get_local_rank()]
        self.num_rows = self.rows.stop - self.rows.start
        self.own = shares(self.num_rows, self.depth.size())[self.depth.get_local_rank()]

    def gathered(self, weight: Tensor) -> Tensor:
        """w[O_ji, I_l] -> w[O_j, I_l]; shares are padded to the longest on the way."""
        longest = largest_share(self.num_rows, self.depth.size())
        if len(weight) < longest:
            weight = torch.cat((weight, weight.new_zeros(longest - len(weight), weight.shape[1])))
        return all_gather(weight, 0, self.depth)[: self.num_rows]

    def scattered(self, dweight: Tensor) -> Tensor:
        """dw[O_j, I_l]{i} -> dw[O_ji, I_l]."""
        return reduce_scatter(dweight, 0, self.depth)[: self.own.stop - self.own.start]


def matrix_cuts(side: Side, in_unit: int = 1, out_unit: int = 1) -> tuple[Cut, ...]:
    """The cuts of a `Matrix`."""
    return Cut(0, side.rows[-1], out_unit), Cut(1, side.cols, in_unit), Cut(0, "tp_depth")


@dataclass(frozen=True)
class Sizes:
    """Elements that meet in a product of a matrix whose inputs lie on a side: closed forms."""

    side: Side
    in_unit: int = 1
    out_unit: int = 1

    def tokens(self, site: Site) -> int:
        return site.size(self.side.rows[-1]) * self.side.tokens(site)

    def inputs(self, site: Site) -> int:
        """x[M_i, I_l]."""
        return self.tokens(site) * site.share(site.shape()[1], self.side.cols, self.in_unit)

    def outputs(self, site: Site) -> int:
        """y[M_i, O_j], of which as many tokens meet over the other axis."""
        return self.tokens(site) * site.share(site.shape()[0], self.side.rows[-1], self.out_unit)

    def weight(self, site: Site) -> int:
        """w[O_j, I_l], padding included."""
        rows, depth = site.share(site.shape()[0], self.side.rows[-1], self.out_unit), site.size("tp_depth")
        return depth * largest_share(rows, depth) * site.share(site.shape()[1], self.side.cols, self.in_unit)

    def sent(self, **elements: str) -> tuple[Message, ...]:
        """Messages, of operation -> the letters of what it moves: i inputs, o outputs, w weight."""
        moved = {"i": (self.inputs, self.side.rows[-1]), "o": (self.outputs, self.side.cols)}
        moved["w"] = self.weight, "tp_depth"
        return tuple(Message(op, *moved[letter]) for op, letters in elements.items() for letter in letters)


def linear_in_units(side: Side = FIRST, in_unit: int = 1, out_unit: int = 1) -> Style:
    """nn.Linear.  x[B_ij, .., I_l] -> y[B_il, .., O_j].

    side               of the input; the output lies on the other
    in_unit, out_unit  features that stay on one rank (those of a head)
    """

    def wrap(module: Any, mesh: DeviceMesh) -> nn.Module:
        matrix = Matrix(module, Spread(mesh, side), out_unit)

        def forward(x: Tensor) -> Tensor:
            y = _Linear.apply(x, module.weight, matrix)
            return y if module.bias is None else y + module.bias

        module.forward = forward
        return module

    sizes, other = Sizes(side, in_unit, out_unit), side.swapped()
    return Style(
        cuts={"weight": matrix_cuts(side, in_unit, out_unit), "bias": other.vector(out_unit)},
        partial={"bias": other.rows},
        inputs=side.lies(),
        outputs=other.lies(),
        messages=Messages(
            sizes.sent(all_gather="iw", reduce_scatter="o"), sizes.sent(all_gather="oiw", reduce_scatter="iw")
        ),
        wrap=wrap,
        is_local=True,
    )


linear, linear_back = linear_in_units(), linear_in_units(SECOND)
"""From the first side to the second, and back."""


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


def embedding_on(side: Side = FIRST) -> Style:
    """nn.Embedding.  ids[B, L], whole on every rank -> x[B_ij, L, D_l]."""

    def wrap(module: Any, mesh: DeviceMesh) -> nn.Module:
        table = _Table(module, Spread(mesh, side))

        def forward(ids: Tensor) -> Tensor:
            return _Lookup.apply(module.weight, table.met(ids), table, False)  # pyright: ignore[reportReturnType]

        module.forward = forward
        return module

    sizes = Sizes(side)
    return Style(
        cuts={"weight": matrix_cuts(side)},
        outputs=side.lies(),
        messages=Messages(
            sizes.sent(all_gather="w", reduce_scatter="i"), sizes.sent(all_gather="i", reduce_scatter="w")
        ),
        refuse=refuse_padding,
        wrap=wrap,
        is_local=True,
    )


embedding = embedding_on()


def _positions(module: Any, mesh: DeviceMesh) -> nn.Module:
    table = _Table(module, Spread(mesh))

    def forward(ids: Tensor) -> Tensor:
        shared = ids.shape[0] == 1
        return _Lookup.apply(module.weight, ids if shared else table.met(ids), table, shared)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


positions = replace(
    embedding,
    messages=Messages(Sizes(FIRST).sent(all_gather="w"), Sizes(FIRST).sent(reduce_scatter="w")) + SHARED,
    wrap=_positions,
)
"""nn.Embedding of positions[B, L], or of [1, L] that all sequences share -> x[B_ij or 1, L, D_l].

The closed forms are of positions that are shared.
"""


class _Table(Matrix):
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


def head_on(side: Side = FIRST) -> Style:
    """The head with its loss (core.nn.loss).  x[B_ij, L, D_l] -> the sum of all tokens' losses, on every rank.

    Without targets logits[B, L, V], gathered on every rank: for inference, without a gradient.
    """

    def wrap(module: Any, mesh: DeviceMesh) -> nn.Module:
        return grid_loss.install(module, _Products(Matrix(module, Spread(mesh, side))))

    sizes, other = Sizes(side), side.swapped()
    return Style(
        cuts={"weight": matrix_cuts(side)},
        inputs=side.lies(),
        messages=Messages((*sizes.sent(all_gather="iwo", reduce_scatter="oiw"), *grid_loss.messages(other))),
        refuse=grid_loss.refuse_vocabulary(other),
        wrap=wrap,
        is_local=True,
    )


head = head_on()


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
