"""Each collective, forward and gradient, against the same sum written on one process."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.comm import collectives

NUM_RANKS = 4


def value(rank: int, length: int) -> Tensor:
    """x[2, length, 3] of a rank."""
    return torch.randn(2, length, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(10 + rank))


def slopes(rank: int, shape: torch.Size) -> Tensor:
    """The gradient that a rank's output gets."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(50 + rank))


def axis_of(size: int) -> DeviceMesh:
    """An axis over the first `size` of the ranks."""
    return DeviceMesh("cpu", list(range(size)), mesh_dim_names=("tp",))


def case(name: str, size: int, length: int, dim: int) -> tuple[Tensor, Tensor] | None:
    """(output, input gradient) on this rank; None where the axis leaves it out."""
    axis, rank = axis_of(size), dist.get_rank()
    if rank >= size:
        return None
    x = value(rank, length).requires_grad_()
    function = getattr(collectives, name)
    y = function(x, axis) if name in ("copy_to", "reduce_from") else function(x, dim, axis)
    y.backward(slopes(rank, y.shape))
    assert x.grad is not None
    return y.detach(), x.grad


def shard(x: Tensor, dim: int, rank: int, size: int) -> Tensor:
    """Rows of a rank: ceil(n / size), with zeros where they run out."""
    rows = -(-x.shape[dim] // size)
    shape = list(x.shape)
    shape[dim] = rows * size - x.shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim).narrow(dim, rank * rows, rows)


def on_one_process(name: str, xs: list[Tensor], dim: int) -> tuple[list[Tensor], list[Tensor]]:
    """Every rank's output and input gradient, as the table in `collectives` defines them."""
    size = len(xs)
    total = torch.stack(xs).sum(0)
    ys = {
        "copy_to": xs,
        "reduce_from": [total] * size,
        "gather_from": [torch.cat(xs, dim)] * size,
        "join_from": [torch.cat(xs, dim)] * size,
        "scatter_to": [shard(total, dim, r, size) for r in range(size)],
        "split_to": [shard(x, dim, r, size) for r, x in enumerate(xs)],
    }[name]
    given = [slopes(r, y.shape) for r, y in enumerate(ys)]
    gradients = {
        "copy_to": lambda rank: torch.stack(given).sum(0),
        "reduce_from": lambda rank: given[rank],
        "gather_from": lambda rank: torch.stack(given).sum(0).chunk(size, dim)[rank],
        "join_from": lambda rank: given[rank].chunk(size, dim)[rank],
        "scatter_to": lambda rank: torch.cat(given, dim).narrow(dim, 0, xs[rank].shape[dim]),
        "split_to": lambda rank: torch.cat(given, dim).narrow(dim, 0, xs[rank].shape[dim]),
    }[name]
    return ys, [gradients(rank) for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize(("length", "dim"), [(5, 1), (1, 1), (4, 2)])
@pytest.mark.parametrize("name", ["copy_to", "reduce_from", "gather_from", "scatter_to", "split_to", "join_from"])
def test_forward_and_gradient(ranks, name: str, size: int, length: int, dim: int) -> None:
    results = [r for r in ranks(NUM_RANKS).run(case, name, size, length, dim) if r is not None]
    ys, gradients = on_one_process(name, [value(r, length) for r in range(size)], dim)
    for (found, gradient), y, expected in zip(results, ys, gradients, strict=True):
        torch.testing.assert_close(found, y, rtol=1e-13, atol=1e-13)
        torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)


def plain(size: int) -> list[Tensor] | None:
    axis, rank = axis_of(size), dist.get_rank()
    if rank >= size:
        return None
    x = value(rank, 3)
    before = x.clone()
    found = [
        collectives.all_reduce(x, axis),
        collectives.all_reduce_max(x.transpose(0, 1), axis),
        collectives.all_gather(x, 0, axis),
        collectives.reduce_scatter(x.transpose(1, 2), 2, axis),
        collectives.take_shard(x, 1, axis),
    ]
    assert torch.equal(x, before), "the argument of a collective stays as it was"
    return found


@pytest.mark.parametrize("size", [1, 3])
def test_without_gradient(ranks, size: int) -> None:
    xs = [value(r, 3) for r in range(size)]
    total = torch.stack(xs).sum(0)
    for rank, found in enumerate(r for r in ranks(NUM_RANKS).run(plain, size) if r is not None):
        expected = [
            total,
            torch.stack(xs).amax(0).transpose(0, 1),
            torch.cat(xs),
            shard(total.transpose(1, 2), 2, rank, size),
            shard(xs[rank], 1, rank, size),
        ]
        for have, want in zip(found, expected, strict=True):
            torch.testing.assert_close(have, want, rtol=1e-14, atol=1e-14)
