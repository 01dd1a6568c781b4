"""The grid (tp_depth, tp_row, tp_col) of 2D, 2.5D and 3D tensor parallelism, and how activations lie on it.

Activations between two linear layers are x[B_rows, L, D_cols]: the batch is cut over two of the axes, one after the
other, the features over the third. Whole sequences stay on a rank, so attention over the local heads is a local matter,
and what works element by element (residuals, activation functions) needs nothing at all. A `Side` names the axes:

    2D, 2.5D   rows (tp_depth, tp_row), columns tp_col          everywhere; in 2D the depth is 1
    3D         rows (tp_depth, tp_row), columns tp_col          on one side of a linear layer
               rows (tp_depth, tp_col), columns tp_row          on its other side

A batch that does not divide is padded once, with sequences that no target counts, and unpadded once, where activations
leave the grid. Features are not padded: their shares are those of `core.layout`, ceil(n / s) units until they run out.

    norm          its statistics are sums over the columns' axis; weight[D_cols]
    attention     the heads of the columns, the sequences of the rows
    norm_of_heads weight[K], x[B_rows, L, H_cols, K] -> the same
    from_whole    a module whose callers hold x[B, L, D] and y[B, L, O] whole, on every rank
    drop_padding  logits[B, L, V] without the sequences of the padding

Shapes: B batch, L length, D model, H heads, K head size.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from core.comm.collectives import all_gather, all_reduce
from core.compat import uncompiled
from core.config import UserError
from core.layout import largest_share, shares
from core.mesh import AnyMesh, axis_size, sub_mesh
from core.placement.style import Cut, Message, Messages, Site, Style


@dataclass(frozen=True)
class Side:
    """The placement of x[B, .., D]: B cut over the axes `rows` in turn, D over the axis `cols`."""

    rows: tuple[str, ...] = ("tp_depth", "tp_row")
    cols: str = "tp_col"

    def swapped(self) -> "Side":
        """The other side of a 3D linear layer: columns and the last of the rows' axes change places."""
        return Side((*self.rows[:-1], self.cols), self.rows[-1])

    def lies(self) -> dict[str, Placement]:
        """`Style.inputs` or `outputs` of what lies so."""
        return {**dict.fromkeys(self.rows, Shard(0)), self.cols: Shard(-1)}

    def vector(self, unit: int = 1) -> Cut:
        """A parameter [D] of the columns (a bias, a norm's weight); its gradient is partial over the rows."""
        return Cut(0, self.cols, unit)

    def tokens(self, site: Site) -> int:
        """Tokens of activations that lie so, padding included."""
        return largest_share(site.batch, math.prod(map(site.size, self.rows))) * site.length


FIRST = Side()
SECOND = FIRST.swapped()
"""Where 3D has attention's heads and the MLP's hidden features; elsewhere they lie as the residual stream does."""


@dataclass(frozen=True)
class Spread:
    """A side on the ranks of a mesh."""

    mesh: DeviceMesh
    side: Side = FIRST

    @property
    def rows(self) -> tuple[str, ...]:
        return self.side.rows

    @property
    def cols(self) -> str:
        return self.side.cols

    @cached_property
    def col_axis(self) -> DeviceMesh:
        return sub_mesh(self.mesh, self.cols)

    @cached_property
    def row_axes(self) -> tuple[DeviceMesh, ...]:
        return tuple(sub_mesh(self.mesh, axis) for axis in self.rows)

    @cached_property
    def col(self) -> int:
        """This rank's place among the columns."""
        return self.col_axis.get_local_rank()

    @cached_property
    def row(self) -> int:
        """This rank's place among the rows: that on the first axis counts most."""
        place = 0
        for axis in self.row_axes:
            place = place * axis.size() + axis.get_local_rank()
        return place

    @cached_property
    def num_rows(self) -> int:
        return math.prod(axis.size() for axis in self.row_axes)

    def batch(self, x: Tensor, fill: float = 0, row: int | None = None) -> Tensor:
        """x[B, ..] -> [B_rows, ..]: the sequences of a place among the rows, by default this rank's, padded by `fill`.

        A view where nothing is to be padded.
        """
        size = largest_share(x.shape[0], self.num_rows)
        row = self.row if row is None else row
        own = x[row * size : (row + 1) * size]
        if len(own) == size:
            return own
        return torch.cat((own, x.new_full((size - len(own), *x.shape[1:]), fill)))

    def columns(self, size: int, unit: int = 1) -> list[slice]:
        """The shares of `size` features, one a place among the columns."""
        return shares(size, self.col_axis.size(), unit)

    def swapped(self) -> "Spread":
        return Spread(self.mesh, self.side.swapped())


# --- norms ------------------------------------------------------------------------------------------------------------


def _norm(module: Any, mesh: DeviceMesh) -> nn.Module:
    axis, (size,) = Spread(mesh).col_axis, module.normalized_shape
    centered = isinstance(module, nn.LayerNorm)

    def forward(x: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if module.eps is None else module.eps
        bias = module.bias if centered else None
        weight = module.gain() if hasattr(module, "gain") else module.weight
        return _Norm.apply(x, weight, bias, eps, size, axis, centered)  # pyright: ignore[reportReturnType]

    module.forward = forward
    return module


class _Norm(Function):
    """Statistics in fp32 or wider, as torch's kernels take them; the variance of what is centered already."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps, size, axis, centered) -> Tensor:
        dtype = torch.promote_types(x.dtype, torch.float32)
        centre = all_reduce(x.sum(-1, keepdim=True, dtype=dtype), axis) / size if centered else None
        wide = x.to(dtype) if centre is None else x - centre
        rstd = (all_reduce(wide.square().sum(-1, keepdim=True), axis) / size + eps).rsqrt_()
        ctx.save_for_backward(x, weight, centre, rstd)
        ctx.size, ctx.axis, ctx.has_bias = size, axis, bias is not None
        y = wide * rstd
        if weight is not None:
            y = y * weight
        return (y if bias is None else y + bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight, centre, rstd = ctx.saved_tensors
        normed = (x if centre is None else x - centre) * rstd
        g = grads[0].to(normed.dtype)
        over = tuple(range(x.ndim - 1))
        dweight = None if weight is None else (g * normed).sum(over).to(weight.dtype)
        dbias = g.sum(over).to(x.dtype) if ctx.has_bias else None
        if weight is not None:
            g = g * weight
        sums = [(g * normed).sum(-1, keepdim=True)]
        if centre is not None:
            sums.append(g.sum(-1, keepdim=True))
        means = all_reduce(torch.stack(sums), ctx.axis) / ctx.size
        dx = g - normed * means[0]
        if centre is not None:
            dx = dx - means[1]
        return (dx * rstd).to(x.dtype), dweight, dbias, None, None, None, None


def _statistics(site: Site) -> int:
    """Numbers a token that a norm sends each way."""
    return (2 if isinstance(site.module, nn.LayerNorm) else 1) * FIRST.tokens(site)


_SUMS = Message("all_reduce", _statistics, FIRST.cols, width="wide")

norm = Style(
    cuts={"*": FIRST.vector()},
    partial={"*": FIRST.rows},
    inputs=FIRST.lies(),
    outputs=FIRST.lies(),
    messages=Messages((_SUMS,), (_SUMS,)),
    wrap=_norm,
    is_local=True,
)
"""nn.LayerNorm or nn.RMSNorm over one dim.  x[B_rows, .., D_cols] -> the same. `gain()`, where a norm has it, is what
it multiplies with in the place of its weight.

Two all-reduces of a number a token over the columns' axis (of RMSNorm one), and one on the way back.
"""


# --- attention --------------------------------------------------------------------------------------------------------


def attention_at(side: Side) -> Style:
    """Attention of this rank's sequences over its heads: its projections are cut by other styles.

    What comes with the activations for the whole batch (positions, mask, documents) is cut to this rank's sequences,
    once a step. Raises UserError when there are ranks without a head.
    """

    def wrap(module: Any, mesh: DeviceMesh) -> nn.Module:
        at = Spread(mesh, side)
        if module.slopes is not None:
            mine = at.columns(module.num_heads, module.num_heads // module.num_kv_heads)[at.col]
            module.slopes = module.slopes[mine].clone()
        inner = module.forward

        def forward(
            x: Tensor, positions: Tensor, rotary: tuple[Tensor, Tensor] | None = None, mask: Tensor | None = None,
            context: Any = None,
        ) -> Tensor:  # fmt: skip
            return inner(x, *_of_rows(at, positions, rotary, mask, context))

        module.forward = forward
        return module

    def refuse(module: Any, mesh: AnyMesh, axis: str) -> None:
        check_grid_heads(module.num_kv_heads, axis_size(mesh, side.cols))

    return Style(inputs=FIRST.lies(), outputs=FIRST.lies(), refuse=refuse, wrap=wrap)


attention = attention_at(FIRST)


def norm_of_heads_at(side: Side) -> Style:
    """A norm over the features of each head: replicated; a rank has of its gradient the sum over its heads and rows."""
    lies = {**side.lies(), side.cols: Shard(2)}
    return Style(partial={"**": (*side.rows, side.cols)}, inputs=lies, outputs=lies)


def check_grid_heads(num_kv_heads: int, side: int, what: str = "tp_col") -> None:
    """Raises UserError unless each of `side` ranks gets a key/value head; they need not divide."""
    if shares(num_kv_heads, side)[-1].start >= num_kv_heads:
        fine = max(n for n in range(1, side) if shares(num_kv_heads, n)[-1].start < num_kv_heads)
        raise UserError(
            f"{num_kv_heads} key/value heads leave a rank of {what}={side} without one; "
            f"use a grid of at most {fine} ranks a side"
        )


@uncompiled  # it looks into what a step remembers
def _of_rows(
    at: Spread, positions: Tensor, rotary: tuple[Tensor, Tensor] | None, mask: Tensor | None, context: Any
) -> tuple:
    """What attention is given of the whole batch, of this rank's sequences; cut once a step."""
    given = (positions, *(rotary or ()), *(() if mask is None else (mask,)))

    def cut() -> tuple:
        turned = None if rotary is None else tuple(_own(angle, at) for angle in rotary)
        own_mask = None if mask is None else at.batch(mask)
        own_context = None if context is None else context.of_sequences(at.batch)
        return _own(positions, at), turned, own_mask, own_context

    return cut() if context is None else context.once(("rows", at.rows), given, cut)


def _own(x: Tensor, at: Spread) -> Tensor:
    """This rank's sequences, of what is not shared by all."""
    return at.batch(x) if x.shape[0] > 1 else x


# --- to the grid and back ---------------------------------------------------------------------------------------------


def _from_whole(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    at, inner = Spread(mesh), module.forward

    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return _FromGrid.apply(inner(_ToGrid.apply(x, at), *args, **kwargs), at, x.shape[0])

    module.forward = forward
    return module


def _drop_padding(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    inner = model.forward

    def forward(ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        out = inner(ids, *args, **kwargs)
        return out[: ids.shape[0]] if out.ndim else out

    model.forward = forward
    return model


from_whole = Style(wrap=_from_whole)
"""A module whose callers hold its first argument and its output whole, alike on every rank.

x[B, .., D] -> x[B_rows, .., D_cols] -> the module -> y[B_rows, .., O_cols] -> y[B, .., O].  Gradients likewise.
"""

drop_padding = Style(wrap=_drop_padding)
"""A model of whole ids[B, L] whose head gathers logits[B, L, V] with the sequences of the padding: without them."""


class _ToGrid(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, at: Spread) -> Tensor:
        ctx.at, ctx.batch = at, x.shape[0]
        return on_grid(x, at)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return gathered(grads[0], ctx.at)[: ctx.batch], None


class _FromGrid(Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, at: Spread, batch: int) -> Tensor:
        ctx.at = at
        return gathered(y, at)[:batch]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return on_grid(grads[0], ctx.at), None, None


def on_grid(x: Tensor, at: Spread) -> Tensor:
    """This rank's part of x[B, .., D], as memory of its own."""
    return at.batch(x)[..., at.columns(x.shape[-1])[at.col]].clone(memory_format=torch.contiguous_format)


def gathered(x: Tensor, at: Spread) -> Tensor:
    """x[B_rows, .., D_cols] -> x[B, .., D] on every rank, B padded; no gradient."""
    x = _concatenated(x.detach(), x.ndim - 1, at.col_axis)
    for axis in reversed(at.row_axes):
        x = all_gather(x, 0, axis)
    return x


def _concatenated(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Shares along `dim` of any length -> the whole: they travel as long as the longest."""
    if axis.size() == 1:
        return x
    lengths = all_gather(torch.tensor([x.shape[dim]], device=x.device), 0, axis).tolist()
    shape = list(x.shape)
    shape[dim] = max(lengths) - x.shape[dim]
    whole = all_gather(torch.cat((x, x.new_zeros(shape)), dim), dim, axis)
    parts = whole.split(max(lengths), dim) if max(lengths) else (whole,) * len(lengths)
    return torch.cat([part.narrow(dim, 0, length) for part, length in zip(parts, lengths, strict=True)], dim)
