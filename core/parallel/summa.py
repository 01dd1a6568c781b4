"""SUMMA: products of matrices that are cut on both dims over a q x q grid, and a linear layer made of them.

Three matrices hang together: X[M, K], W[K, N], Y[M, N]. Rank (i, j) of the grid holds the blocks X[M_i, K_j],
W[K_i, N_j] and Y[M_i, N_j], and makes any one of the three from the other two:

    ab   Y[i, j] = sum over t of X[i, t] W[t, j]        round t: X[i, t] goes along row i, W[t, j] along column j
    abt  X[i, t] = sum over j of Y[i, j] W[t, j]^T      round t: W[t, j] goes along column j, the sum along row i to t
    atb  W[t, j] = sum over i of X[i, t]^T Y[i, j]      round t: X[i, t] goes along row i, the sum along column j to t

A round is two messages, of the sizes of X[M_i, K_t] and W[K_t, N_j]; q rounds are K (M_i + N_j) elements a rank,
whichever product it is. At no time does a rank hold more than one foreign block of each. The gradients of each product
are the other two, so they are closed under differentiation. Blocks need not be equal: sizes say what arrives.

A linear layer y[M, O] = x[M, I] w[O, I]^T is `ab` with K = I (w^T in the place of W) or `abt` with K = O (y in the
place of X). Activations lie alike in both, so each layer takes the one that sends less: the one whose K is smaller.

In 2.5D (Tesseract) every layer of the depth does this for its own part of M.

van de Geijn and Watts 1997, SUMMA; Xu et al. 2021, An Efficient 2D Method for Training Super-Large Deep Learning Models
(Optimus), algorithms 1 to 3; Wang et al. 2021, Tesseract: Parallelize the Tensor Parallelism Efficiently.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from core.mesh import sub_mesh
from core.placement.style import Message, Site

_ALONG_ROW = {"ab": "broadcast", "abt": "reduce", "atb": "broadcast"}
_ALONG_COLUMN = {"ab": "broadcast", "abt": "broadcast", "atb": "reduce"}

Elements = Callable[[Site], int]


def sent(product: str, rows: Elements, columns: Elements) -> tuple[Message, ...]:
    """The messages of a product.

    rows     K M_i, what goes along a row of the grid in q rounds
    columns  K N_j, what goes along a column
    """
    return Message(_ALONG_ROW[product], rows, "tp_col"), Message(_ALONG_COLUMN[product], columns, "tp_row")


class Grid:
    """This rank's row and column of the q x q grid, and how K is cut over it.

    mesh   has the axes tp_row and tp_col; a row's ranks differ in tp_col
    sizes  K_t of the q blocks, alike for the axis on which X is cut and that on which W is
    """

    def __init__(self, mesh: DeviceMesh, sizes: list[int]):
        rows, cols = sub_mesh(mesh, "tp_row"), sub_mesh(mesh, "tp_col")
        self.row, self.col = rows.get_local_rank(), cols.get_local_rank()
        self.along_row, self.along_col = cols.get_group(), rows.get_group()
        self.sizes = sizes
        assert len(sizes) == rows.size() == cols.size()


class Moving:
    """A block on its way: from its owner to a line of the grid, or the sum of a line on its way to its owner."""

    def __init__(self, block: Tensor, work: dist.Work | None):
        self.block, self.work = block, work

    def wait(self) -> Tensor:
        if self.work is not None:
            self.work.wait()
        return self.block


def broadcast(own: Tensor, is_mine: bool, shape: tuple[int, int], owner: int, group: ProcessGroup) -> Moving:
    """The owner's block on every rank of the group."""
    block = own.contiguous() if is_mine else own.new_empty(shape)
    assert tuple(block.shape) == shape, (tuple(block.shape), shape)
    if group.size() == 1 or not block.numel():
        return Moving(block, None)
    return Moving(block, dist.broadcast(block, group=group, group_src=owner, async_op=True))


def reduce(partial: Tensor, owner: int, group: ProcessGroup) -> Moving:
    """The sum over the group, on its owner; what others are left with is of no use."""
    if group.size() == 1 or not partial.numel():
        return Moving(partial, None)
    return Moving(partial, dist.reduce(partial, group=group, group_dst=owner, async_op=True))


def _rounds(grid: Grid, send: Callable[[int], tuple[Moving, ...]]):
    """(t, what has arrived for round t); round t + 1 is on its way meanwhile."""
    coming = send(0)
    for t in range(len(grid.sizes)):
        arrived = tuple(message.wait() for message in coming)
        if t + 1 < len(grid.sizes):
            coming = send(t + 1)
        yield t, arrived


def _x_along_row(grid: Grid, x: Tensor, t: int) -> Moving:
    return broadcast(x, t == grid.col, (x.shape[0], grid.sizes[t]), t, grid.along_row)


def _w_along_column(grid: Grid, w: Tensor, t: int, flipped: bool) -> Moving:
    """W[K_t, N_j] as it is stored: as its transpose where `flipped`."""
    shape = (w.shape[0], grid.sizes[t]) if flipped else (grid.sizes[t], w.shape[1])
    return broadcast(w, t == grid.row, shape, t, grid.along_col)


def _collected(sums: list[Moving], mine: int) -> Tensor:
    """The sum on this rank, when all have been sent."""
    return [message.wait() for message in sums][mine]


def ab(grid: Grid, x: Tensor, w: Tensor, flipped: bool = False) -> Tensor:
    """Y[M_i, N_j] from X[M_i, K_j] and W[K_i, N_j], or from W^T[N_j, K_i] where `flipped`; no gradient."""
    y = x.new_zeros(x.shape[0], w.shape[0] if flipped else w.shape[1])
    for _, (x_t, w_t) in _rounds(
        grid, lambda t: (_x_along_row(grid, x, t), _w_along_column(grid, w, t, flipped))
    ):  # fmt: skip
        y.addmm_(x_t, w_t.T if flipped else w_t)
    return y


def abt(grid: Grid, y: Tensor, w: Tensor, flipped: bool = False) -> Tensor:
    """X[M_i, K_j] from Y[M_i, N_j] and W[K_i, N_j], or from W^T[N_j, K_i] where `flipped`; no gradient."""
    sums = []
    for t, (w_t,) in _rounds(grid, lambda t: (_w_along_column(grid, w, t, flipped),)):
        if len(sums) > 1:
            sums[-2] = _kept(sums[-2], t - 2 == grid.col)
        sums.append(reduce(_product(y, w_t if flipped else w_t.T), t, grid.along_row))
    return _collected(sums, grid.col)


def atb(grid: Grid, x: Tensor, y: Tensor, flipped: bool = False) -> Tensor:
    """W[K_i, N_j] from X[M_i, K_j] and Y[M_i, N_j], or its transpose [N_j, K_i] where `flipped`; no gradient."""
    sums = []
    for t, (x_t,) in _rounds(grid, lambda t: (_x_along_row(grid, x, t),)):
        if len(sums) > 1:
            sums[-2] = _kept(sums[-2], t - 2 == grid.row)
        sums.append(reduce(_product(y.T, x_t) if flipped else _product(x_t.T, y), t, grid.along_col))
    return _collected(sums, grid.row)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in memory that a reduction may change: what selective checkpointing keeps of products must stay as it is."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _kept(message: Moving, is_mine: bool) -> Moving:
    """The sum of two rounds ago, which has had a round to travel: it stays on its owner, others let go of it."""
    block = message.wait()
    return Moving(block if is_mine else block.new_empty(0), None)


class AB(Function):
    """`ab` with gradients.  apply(grid, x, w, flipped)"""

    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor, w: Tensor, flipped: bool) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.grid, ctx.flipped = grid, flipped
        return ab(grid, x, w, flipped)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w = ctx.saved_tensors
        dx = abt(ctx.grid, grads[0], w, ctx.flipped) if ctx.needs_input_grad[1] else None
        dw = atb(ctx.grid, x, grads[0], ctx.flipped) if ctx.needs_input_grad[2] else None
        return None, dx, dw, None


class ABT(Function):
    """`abt` with gradients.  apply(grid, y, w)"""

    @staticmethod
    def forward(ctx: Any, grid: Grid, y: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(y, w)
        ctx.grid = grid
        return abt(grid, y, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        y, w = ctx.saved_tensors
        dy = ab(ctx.grid, grads[0], w) if ctx.needs_input_grad[1] else None
        dw = atb(ctx.grid, grads[0], y) if ctx.needs_input_grad[2] else None
        return None, dy, dw


class ATB(Function):
    """`atb` with gradients.  apply(grid, x, y)"""

    @staticmethod
    def forward(ctx: Any, grid: Grid, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        ctx.grid = grid
        return atb(grid, x, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, y = ctx.saved_tensors
        dx = abt(ctx.grid, y, grads[0]) if ctx.needs_input_grad[1] else None
        dy = ab(ctx.grid, x, grads[0]) if ctx.needs_input_grad[2] else None
        return None, dx, dy


def linear(grid: Grid, x: Tensor, weight: Tensor, by_inputs: bool) -> Tensor:
    """y[M_i, O_j] = x[M_i, I_j] w^T, with gradients.

    by_inputs  K = I, with weight[O_j, I_i] (`ab`); else K = O, with weight[O_i, I_j] (`abt`)
    """
    if by_inputs:
        return AB.apply(grid, x, weight, True)  # pyright: ignore[reportReturnType]
    return ABT.apply(grid, x, weight)  # pyright: ignore[reportReturnType]
