"""Conversions between sharding specs, executed on ranks: each step of a path is one collective over one axis.

    whole = convert(piece, parse("S01R"), parse("RR"), mesh)

The path is the cheapest (`core.auto.conversion`), alike on every rank, and what a rank sends is what its steps say.
Pieces of lengths that do not divide are padded for gathers and scatters, and the padding is cut off again; a line of
ranks that has nothing of the tensor sends nothing.

The gradient takes the way back: pieces get pieces of it, and what was a partial sum gets the gradient of the sum, whole
on every rank. It is taken to be alike on ranks on which the result replicates, as DTensor does.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh

from core.auto.conversion import Path, Step, cheapest, first_of_line
from core.auto.costs import Link
from core.auto.specs import Spec
from core.comm.collectives import all_gather, all_reduce, all_to_all, reduce_scatter
from core.config import UserError
from core.layout import largest_share, shares
from core.mesh import sub_mesh

ALIKE = (Link(latency_s=1e-5, bytes_per_s=25e9),)
"""Of axes of whose links nothing is known."""


def convert(
    local: Tensor,
    source: Spec,
    target: Spec,
    mesh: DeviceMesh,
    shape: Sequence[int] | None = None,
    links: tuple[Link, ...] = ALIKE,
) -> Tensor:
    """What this rank holds of a tensor under `target`, of what it holds under `source`; a collective of the mesh.

    local  of the shape that `source` gives this rank; the result may share its storage
    shape  of the whole tensor; by default that of equal pieces
    links  of each axis of the mesh, or one for all, the same on every rank: by them the path is chosen

    Raises UserError where a tensor of this shape cannot lie so on the mesh, or `local` is not the piece of it.
    """
    sizes = tuple(mesh.shape)
    if local.dim() != len(source.dims):
        raise UserError(
            f"{source} is of {len(source.dims)} dims, and the local tensor has the shape {_of(local.shape)}"
        )
    source.check(local.shape, sizes)
    whole = source.whole_shape(local.shape, sizes) if shape is None else tuple(shape)
    if mesh.mesh_dim_names is None:
        raise UserError("the mesh has no names of axes; give mesh_dim_names where it is made")
    path = cheapest(source, target, whole, local.element_size(), sizes, links)
    held = source.local_shape(whole, sizes, _coordinate(mesh))
    if tuple(local.shape) != held:
        raise UserError(
            f"{source} gives this rank {_of(held)} of a tensor {_of(whole)}, and the local tensor is {_of(local.shape)}"
        )
    return _Convert.apply(local, path, mesh, whole, links)  # pyright: ignore[reportReturnType]


def follow(local: Tensor, path: Path, mesh: DeviceMesh, shape: Sequence[int]) -> Tensor:
    """The same along a given path, such as the greedy one; without a gradient."""
    for step in path.steps:
        local = _take(step, local, mesh, tuple(shape))
    return local


class _Convert(Function):
    @staticmethod
    def forward(ctx, x, path, mesh, shape, links):
        ctx.way = path, mesh, shape, links
        out = follow(x, path, mesh, shape)
        return x.view_as(x) if out is x else out

    @staticmethod
    def backward(ctx, grad):
        path, mesh, shape, links = ctx.way
        target = path.steps[-1].target if path.steps else path.source
        back = cheapest(target.summed(), path.source.summed(), shape, grad.element_size(), tuple(mesh.shape), links)
        return follow(grad, back, mesh, shape), None, None, None, None


def _take(step: Step, local: Tensor, mesh: DeviceMesh, shape: tuple[int, ...]) -> Tensor:
    """One step; on what no rank of the line has anything of, without a message."""
    sizes, coordinate = tuple(mesh.shape), _coordinate(mesh)
    ranks, place = sizes[step.axis], coordinate[step.axis]
    held = step.target.local_shape(shape, sizes, coordinate)
    if step.operation == "split":
        assert step.entered is not None
        share = shares(local.shape[step.entered], ranks)[place]
        return local.narrow(step.entered, share.start, share.stop - share.start)
    if step.operation == "embed":
        return _embedded(local, step, held, ranks, place)
    axis = sub_mesh(mesh, (mesh.mesh_dim_names or ())[step.axis])
    if step.full_bytes(shape, 1, sizes, first_of_line(coordinate, step.axis)) == 0:
        return local.new_zeros(held)
    if step.operation == "all_reduce":
        return all_reduce(local, axis)
    if step.operation == "all_gather":
        assert step.left is not None
        padded = _padded(local, step.left, largest_share(held[step.left], ranks))
        return all_gather(padded, step.left, axis).narrow(step.left, 0, held[step.left])
    assert step.entered is not None
    if step.operation == "reduce_scatter":
        return reduce_scatter(local, step.entered, axis).narrow(step.entered, 0, held[step.entered])
    assert step.left is not None
    return _exchanged(local, step.left, step.entered, held, axis)


def _exchanged(local: Tensor, left: int, entered: int, held: tuple[int, ...], axis: DeviceMesh) -> Tensor:
    """All to all: every rank's rows of dim `left`, in exchange for pieces of dim `entered`."""
    ranks = axis.size()
    parts = [
        local.narrow(entered, share.start, share.stop - share.start) for share in shares(local.shape[entered], ranks)
    ]
    shapes = []
    for share in shares(held[left], ranks):
        shape = list(held)
        shape[left] = share.stop - share.start
        shapes.append(tuple(shape))
    return torch.cat(all_to_all(parts, shapes, axis), left)


def _embedded(local: Tensor, step: Step, held: tuple[int, ...], ranks: int, place: int) -> Tensor:
    """A term of the sum over the axis that is the tensor: this rank's piece, or the whole on the first one."""
    out = local.new_zeros(held)
    if step.left is not None:
        share = shares(held[step.left], ranks)[place]
        out.narrow(step.left, share.start, share.stop - share.start).copy_(local)
    elif place == 0:
        out.copy_(local)
    return out


def _padded(local: Tensor, dim: int, rows: int) -> Tensor:
    if local.shape[dim] == rows:
        return local
    shape = list(local.shape)
    shape[dim] = rows - local.shape[dim]
    return torch.cat((local, local.new_zeros(shape)), dim)


def _coordinate(mesh: DeviceMesh) -> tuple[int, ...]:
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise UserError("this rank is not one of the mesh's; only those convert")
    return tuple(coordinate)


def _of(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "()"
