"""Axial parallelism: a tensor with two long dims is sharded along one of them, and switched to the other by all-to-all.

What works along one dim (attention in a row, a product over a row) needs that dim whole and does not care how the other
one is cut. So a rank keeps some rows of a matrix, works along them, exchanges blocks with the others (`switch`), and
then has some columns, whole. It never holds more than its share, where tensor or data parallelism would hold it all.

    x[.., X_axial, .., Y, ..] -> switch -> x[.., X, .., Y_axial, ..]

Lengths need not divide: shards have ceil(n / ranks) rows, the last ones are filled with zeros (`core.comm`), and
whoever makes a dim whole gives its length, so that the filling is cut off again. Gradients go back the same ways.

Without gradients a square needs no second tensor for the way: `transpose_` exchanges its blocks in place, so that the
same rows of storage hold rows and then columns.

What all ranks need whole (a bias, one factor of a product) is gathered, or comes in pieces, each on its way while the
one before it is worked on (`pieces`). A `switch` may be begun early and finished late (`begin_switch`).

Cheng et al. 2022, FastFold, section 4 (dynamic axial parallelism, duality async operation).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.layout import shares


def shard_of(length: int, axis: DeviceMesh) -> slice:
    """The rows of a dim of `length` that this rank has, without the filling."""
    return shares(length, axis.size())[axis.get_local_rank()]


def switch(x: Tensor, whole: int, shard: int, length: int, axis: DeviceMesh) -> Tensor:
    """x, sharded along the dim `whole`, becomes whole along it, with `length` rows, and sharded along `shard`."""
    return begin_switch(x, whole, shard, length, axis).finish()


@dataclass(frozen=True)
class Switch:
    """A switch on its way: of what arrives, and of what it waits for."""

    x: Tensor
    whole: int
    length: int
    works: list[Any]

    def wait(self) -> None:
        """Wait for it; somebody may want no result after all, but what travels must not be freed before."""
        for work, _sent in self.works:
            if work is not None:
                work.wait()

    def finish(self) -> Tensor:
        """The result; waits for it."""
        if not self.works:
            return self.x
        return _Finish.apply(self.x, self.whole, self.length, self.works)  # pyright: ignore[reportReturnType]


def begin_switch(x: Tensor, whole: int, shard: int, length: int, axis: DeviceMesh) -> Switch:
    """Begin a `switch`; other work may be done until it is finished."""
    works = []
    if axis.size() > 1:
        x = _Begin.apply(x, shard, axis, works)  # pyright: ignore[reportAssignmentType]
    return Switch(x, whole, length, works)


def _send(x: Tensor, shard: int, axis: DeviceMesh) -> tuple[Tensor, Any]:
    """Parts of x along `shard`, one for each rank, on their way: [rank, ..] of what the ranks sent."""
    size = axis.size()
    surplus = -x.shape[shard] % size
    if surplus:
        filling = list(x.shape)
        filling[shard] = surplus
        x = torch.cat((x, x.new_zeros(filling)), shard)
    parts = x.unflatten(shard, (size, -1)).movedim(shard, 0).contiguous()
    received = torch.empty_like(parts)
    if x.is_meta:  # nothing travels, as in core.comm
        return received, (None, parts)
    work = dist.all_to_all_single(received.view(-1), parts.view(-1), group=axis.get_group(), async_op=True)
    return received, (work, parts)  # what is sent has to stay until it is


def _joined(received: Tensor, whole: int, length: int) -> Tensor:
    return received.movedim(0, whole).flatten(whole, whole + 1).narrow(whole, 0, length)


class _Begin(Function):
    # No context knows the switch, which knows what they made: in a circle tensors would wait for a collector.

    @staticmethod
    def forward(ctx, x, shard, axis, works):
        ctx.shard, ctx.axis, ctx.length = shard, axis, x.shape[shard]
        received, work = _send(x, shard, axis)
        works.append(work)
        return received

    @staticmethod
    def backward(ctx, grad):
        # The gradient came as [rank, ..] of what the ranks had sent: it goes back to them, and here its parts join.
        back = torch.empty_like(grad)
        grad = grad.contiguous()
        dist.all_to_all_single(back.view(-1), grad.view(-1), group=ctx.axis.get_group())
        return _joined(back, ctx.shard, ctx.length), None, None, None


class _Finish(Function):
    @staticmethod
    def forward(ctx, received, whole, length, works):
        work, _sent = works.pop()
        if work is not None:
            work.wait()
        ctx.whole, ctx.shape = whole, received.shape
        return _joined(received, whole, length)

    @staticmethod
    def backward(ctx, grad):
        size, whole = ctx.shape[0], ctx.whole
        surplus = size * ctx.shape[whole + 1] - grad.shape[whole]
        if surplus:
            filling = list(grad.shape)
            filling[whole] = surplus
            grad = torch.cat((grad, grad.new_zeros(filling)), whole)
        return grad.unflatten(whole, (size, -1)).movedim(whole, 0).contiguous(), None, None, None


def transpose_(x: Tensor, length: int, axis: DeviceMesh) -> Tensor:
    """x[B, I, N, ..], rows of a square of `length`, becomes the same rows of its transpose, in place; no gradient.

    Blocks are exchanged with one rank after the other: two of them stand beside x, 2 / ranks of it. The filling stays
    what it was.
    """
    size, rank, rows = axis.size(), axis.get_local_rank(), x.shape[1]
    mine = shard_of(length, axis)
    for turn in range(size):
        other = (turn - rank) % size  # whose turn it is with this rank, too
        block = x[:, : mine.stop - mine.start, min(length, other * rows) : min(length, (other + 1) * rows)]
        if block.numel() == 0:
            continue
        sent = block.transpose(1, 2).clone(memory_format=torch.contiguous_format)
        block.copy_(sent if other == rank else _exchanged(sent, block.shape, other, axis))
    return x


def _exchanged(sent: Tensor, shape: torch.Size, other: int, axis: DeviceMesh) -> Tensor:
    """The tensor that the other rank sends, of that shape, while it is sent this."""
    received = sent.new_empty(shape)
    if not sent.is_meta:
        group = axis.get_group()
        both = [(dist.isend, sent), (dist.irecv, received)]
        works = dist.batch_isend_irecv([dist.P2POp(op, x, group=group, group_peer=other) for op, x in both])
        for work in works:
            work.wait()
    return received


def pieces(x: Tensor, dim: int, length: int, axis: DeviceMesh, parts: int = 1) -> Iterator[tuple[slice, Tensor]]:
    """(rows, x of these rows) of every rank's shard, in the same order on all; no gradient.

    A shard comes in that many parts. The next one is on its way while the caller works on one, so a rank holds two
    besides its own shard.
    """
    size, rank, rows = axis.size(), axis.get_local_rank(), x.shape[dim]
    if size == 1:
        yield slice(0, length), x
        return
    each = -(-rows // parts)
    turns = [(source, first) for source in range(size) for first in range(0, rows, each)]

    def begin(source: int, first: int) -> tuple[Tensor, Any]:
        own = x.narrow(dim, first, min(each, rows - first))
        piece = own.contiguous() if source == rank else torch.empty_like(own, memory_format=torch.contiguous_format)
        if x.is_meta:
            return piece, None
        return piece, dist.broadcast(piece, group_src=source, group=axis.get_group(), async_op=True)

    coming = begin(*turns[0])
    for turn, (source, first) in enumerate(turns):
        piece, work = coming
        if work is not None:
            work.wait()
        if turn + 1 < len(turns):
            coming = begin(*turns[turn + 1])
        start = min(length, source * rows + first)
        at = slice(start, min(length, start + piece.shape[dim]))
        if at.stop > at.start:
            yield at, piece.narrow(dim, 0, at.stop - at.start)
        del piece
