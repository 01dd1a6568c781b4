"""The global gradient norm of tensors that are sharded, each in its own way, and scaling by it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.layout import layout_of
from core.mesh import device_of, group_of_ranks


class Waiting(Protocol):
    """What is known of a gradient whose values are not in memory: its `waiting`, where it has that."""

    def norm(self) -> Tensor:
        """Its 2-norm, a scalar, to the bit as `gradient_norms` has it."""
        ...

    def scale(self, factor: float) -> None:
        """Multiply it, at the latest when its values come."""
        ...


@torch.no_grad()
def gradient_norm(masters: Iterable[Tensor], mesh: DeviceMesh) -> Tensor:
    """The 2-norm of all gradients together, a scalar (fp64) alike on every rank; one all-reduce over the whole mesh.

    Each rank adds the squares of what it holds, divided by how many ranks hold the same: none of another stage of a
    pipeline, each of whose parameters is a master on one stage. Where the masters lie may differ from rank to rank,
    on the host or on the device; the message lies where the mesh sends.
    """
    total = gradient_squares(masters, mesh)
    if mesh.size() > 1:
        dist.all_reduce(total, group=group_of_ranks(mesh))
    return total.sqrt()


@torch.no_grad()
def gradient_squares(masters: Iterable[Tensor], mesh: DeviceMesh) -> Tensor:
    """This rank's part of the square of `gradient_norm`."""
    total = torch.zeros((), dtype=torch.float64, device=device_of(mesh))
    found: dict[tuple[int, torch.device], list[Tensor]] = {}  # by how many ranks hold the same, and where it lies
    for master in masters:
        if master.grad is not None and master.numel():
            found.setdefault((layout_of(master).num_holders(mesh), master.device), []).append(master.grad)
    for (copies, _), grads in found.items():
        total += torch.stack(gradient_norms(grads)).to(total).square().sum() / copies
    return total


def gradient_norms(grads: Sequence[Tensor]) -> list[Tensor]:
    """The 2-norm of each, a scalar of its format; of tensors on one device."""
    here = [grad for grad in grads if waiting_of(grad) is None]
    norms = iter(torch._foreach_norm(here) if here else ())
    return [next(norms) if (waiting := waiting_of(grad)) is None else waiting.norm() for grad in grads]


def waiting_of(grad: Tensor) -> Waiting | None:
    """None of a gradient that is in memory."""
    return getattr(grad, "waiting", None)


@torch.no_grad()
def scale_gradients(masters: Iterable[Tensor], factor: float) -> None:
    """Multiply every gradient in place."""
    if factor == 1.0:
        return
    grads = [m.grad for m in masters if m.grad is not None]
    here = [grad for grad in grads if waiting_of(grad) is None]
    if here:
        torch._foreach_mul_(here, factor)
    for grad in grads:
        if (waiting := waiting_of(grad)) is not None:
            waiting.scale(factor)
