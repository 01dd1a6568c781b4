"""Collectives that autograd understands, named by what they do to a placement.

Each is a pair: the forward moves a tensor from one placement on a mesh axis to another, the backward moves its gradient
back. `axis` is a DeviceMesh with one dim.

    function          forward                     backward of the gradient
    copy_to           replicate -> replicate      partial   -> replicate   all-reduce
    reduce_from       partial   -> replicate      replicate -> replicate   nothing         (all-reduce forward)
    gather_from       shard     -> replicate      partial   -> shard       reduce-scatter  (all-gather forward)
    scatter_to        partial   -> shard          shard     -> replicate   all-gather      (reduce-scatter forward)
    split_to          replicate -> shard          shard     -> replicate   all-gather      (a slice forward)
    join_from         shard     -> replicate      replicate -> shard       a slice         (all-gather forward)
    exchange_rows     rows of one rank -> of others                        the way back    (all-to-all, both)

`gather_from` is for an input that every rank then uses for another part of the work (its gradients are partial sums);
`join_from` for a result that every rank then uses alike.

Each backward is the forward of another line of the table, so a gradient with `create_graph` has gradients, too.

On the meta device sums and gathers send nothing: results have their shapes, so that one rank can see what a forward
would allocate.

Ragged dims: a dim of n rows over s ranks becomes s shards of ceil(n / s) rows, the last ones filled with zeros; whoever
gathers cuts the surplus off again with the length it knows.
"""

import math
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.comm.coded_rows import RowCode


def all_reduce(x: Tensor, axis: DeviceMesh) -> Tensor:
    """The sum over the axis, as a new tensor; no gradient."""
    out = x.clone(memory_format=torch.contiguous_format)
    if axis.size() > 1 and out.numel() and not x.is_meta:
        dist.all_reduce(out, group=axis.get_group())
    return out


def all_reduce_max(x: Tensor, axis: DeviceMesh) -> Tensor:
    """The elementwise maximum over the axis, as a new tensor; no gradient."""
    out = x.clone(memory_format=torch.contiguous_format)
    if axis.size() > 1 and out.numel() and not x.is_meta:
        dist.all_reduce(out, op=dist.ReduceOp.MAX, group=axis.get_group())
    return out


def all_gather(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Shards x[.., n, ..] of equal size -> [.., s n, ..]; no gradient."""
    size = axis.size()
    if size == 1:
        return x
    out, own = x.new_empty(size, *x.shape), x.contiguous()
    if not x.is_meta:
        dist.all_gather_into_tensor(out.view(-1), own.view(-1), group=axis.get_group())
    return out.movedim(0, dim).flatten(dim, dim + 1)


def reduce_scatter(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """Partial sums x[.., n, ..] -> this rank's [.., ceil(n / s), ..] of the sum; no gradient."""
    size = axis.size()
    if size == 1:
        return x
    parts = _padded(x, dim, size).unflatten(dim, (size, -1)).movedim(dim, 0).contiguous()
    out = torch.empty_like(parts[0])
    dist.reduce_scatter_tensor(out.view(-1), parts.view(-1), group=axis.get_group())
    return out


def all_to_all(parts: list[Tensor], shapes: list[tuple[int, ...]], axis: DeviceMesh) -> list[Tensor]:
    """parts[r] goes to rank r; what came from each rank, of shapes[r]; no gradient. Parts may be of different sizes."""
    if axis.size() == 1:
        return parts
    sent = torch.cat([part.reshape(-1) for part in parts])
    sizes = [math.prod(shape) for shape in shapes]
    out = sent.new_empty(sum(sizes))
    dist.all_to_all_single(out, sent, sizes, [part.numel() for part in parts], group=axis.get_group())
    return [part.view(shape) for part, shape in zip(out.split(sizes), shapes, strict=True)]


def pass_on(x: Tensor, axis: DeviceMesh) -> Callable[[], Tensor]:
    """Start to send x to the next rank of the axis, as a ring; the function waits for what the one before has sent.

    No gradient. x must be contiguous, of one shape on every rank, and stay as it is until then.
    """
    group, rank, size = axis.get_group(), axis.get_local_rank(), axis.size()
    arriving = torch.empty_like(x)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, x, dist.get_global_rank(group, (rank + 1) % size), group),
            dist.P2POp(dist.irecv, arriving, dist.get_global_rank(group, (rank - 1) % size), group),
        ]
    )

    def arrived(_sent: Tensor = x) -> Tensor:  # what travels must not be freed before
        for work in works:
            work.wait()
        return arriving

    return arrived


def take_shard(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """This rank's [.., ceil(n / s), ..] of x[.., n, ..], zero rows where there are none; no communication."""
    size = axis.size()
    if size == 1:
        return x
    return _padded(x, dim, size).chunk(size, dim)[axis.get_local_rank()]


def _padded(x: Tensor, dim: int, size: int) -> Tensor:
    surplus = -x.shape[dim] % size
    if surplus == 0:
        return x
    shape = list(x.shape)
    shape[dim] = surplus
    return torch.cat((x, x.new_zeros(shape)), dim)


def _graph_goes_on() -> bool:
    """Return whether a backward is to be differentiated; a compiler's is not."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


class _CopyTo(Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return (reduce_from if _graph_goes_on() else all_reduce)(grad, ctx.axis), None


class _ReduceFrom(Function):
    @staticmethod
    def forward(ctx, x, axis):
        ctx.axis = axis
        return all_reduce(x, axis)

    @staticmethod
    def backward(ctx, grad):
        return copy_to(grad, ctx.axis) if _graph_goes_on() else grad, None


class _GatherFrom(Function):
    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis)

    @staticmethod
    def backward(ctx, grad):
        return (scatter_to if _graph_goes_on() else reduce_scatter)(grad, ctx.dim, ctx.axis), None, None


class _ScatterTo(Function):
    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.dim, ctx.axis, ctx.rows = dim, axis, x.shape[dim]
        return reduce_scatter(x, dim, axis)

    @staticmethod
    def backward(ctx, grad):
        whole = (gather_from if _graph_goes_on() else all_gather)(grad, ctx.dim, ctx.axis)
        return whole.narrow(ctx.dim, 0, ctx.rows), None, None


class _SplitTo(Function):
    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.dim, ctx.axis, ctx.rows = dim, axis, x.shape[dim]
        return take_shard(x, dim, axis)

    @staticmethod
    def backward(ctx, grad):
        whole = (join_from if _graph_goes_on() else all_gather)(grad, ctx.dim, ctx.axis)
        return whole.narrow(ctx.dim, 0, ctx.rows), None, None


class _JoinFrom(Function):
    @staticmethod
    def forward(ctx, x, dim, axis):
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis)

    @staticmethod
    def backward(ctx, grad):
        return (split_to if _graph_goes_on() else take_shard)(grad, ctx.dim, ctx.axis), None, None


class _ExchangeRows(Function):
    @staticmethod
    def forward(ctx, x, sent, received, axis, code):
        ctx.way = received, sent, axis, code
        return _send_rows(x, sent, received, axis, code)

    @staticmethod
    def backward(ctx, grad):
        return (exchange_rows if _graph_goes_on() else _send_rows)(grad, *ctx.way), None, None, None, None


def _send_rows(
    x: Tensor, sent: list[int], received: list[int], axis: DeviceMesh, code: RowCode | None = None
) -> Tensor:
    if code is not None:
        rows = code(x.shape[1])
        message = _send_rows(rows.encode(x), sent, received, axis)
        out = x.new_empty(sum(received), x.shape[1])
        rows.decode(message, out)
        return out
    # Of ranks that do not exist nothing comes; what stands in its place goes on through the model.
    make = x.new_zeros if dist.get_backend(axis.get_group()) == "fake" else x.new_empty
    out = make(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=axis.get_group())
    return out


def copy_to(x: Tensor, axis: DeviceMesh) -> Tensor:
    """replicate -> replicate; the gradient is a partial sum on each rank and is all-reduced (Megatron's f)."""
    return x if axis.size() == 1 else _CopyTo.apply(x, axis)  # pyright: ignore[reportReturnType]


def reduce_from(x: Tensor, axis: DeviceMesh) -> Tensor:
    """partial -> replicate by all-reduce; the gradient passes (Megatron's g)."""
    return x if axis.size() == 1 else _ReduceFrom.apply(x, axis)  # pyright: ignore[reportReturnType]


def gather_from(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """shard(dim) -> replicate by all-gather; the gradient is partial and is reduce-scattered."""
    return x if axis.size() == 1 else _GatherFrom.apply(x, dim, axis)  # pyright: ignore[reportReturnType]


def scatter_to(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """partial -> shard(dim) by reduce-scatter; the gradient is all-gathered."""
    return x if axis.size() == 1 else _ScatterTo.apply(x, dim, axis)  # pyright: ignore[reportReturnType]


def split_to(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """replicate -> shard(dim) by a slice; the gradient is all-gathered."""
    return x if axis.size() == 1 else _SplitTo.apply(x, dim, axis)  # pyright: ignore[reportReturnType]


def join_from(x: Tensor, dim: int, axis: DeviceMesh) -> Tensor:
    """shard(dim) -> replicate by all-gather; the gradient, alike on every rank, is sliced."""
    return x if axis.size() == 1 else _JoinFrom.apply(x, dim, axis)  # pyright: ignore[reportReturnType]


def exchange_rows(
    x: Tensor, sent: list[int], received: list[int], axis: DeviceMesh, code: RowCode | None = None
) -> Tensor:
    """x[A, ..]: the first sent[0] rows go to rank 0, … -> received[0] rows from rank 0, …; gradients go the way back.

    Always a message, of a rank without rows too: the others wait for it.

    code  of the rows of x[A, features], and of their gradients; the rank's own, too
    """
    return _ExchangeRows.apply(x, sent, received, axis, code)  # pyright: ignore[reportReturnType]
