"""Rows of a dim, mostly 0, dealt to ranks as torch.chunk and DTensor deal them, and messages of them rank after rank.

A message [ranks, elements] has a slot for each rank's rows of each tensor. Rows that a ragged tensor lacks are padding:
sent, never read.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.layout import largest_share


def row_length(whole: Tensor, ranks: int, dim: int = 0) -> int:
    """Elements of one rank's share of the rows of a dim; a scalar is everybody's."""
    if not whole.ndim:
        return 1
    return largest_share(whole.shape[dim], ranks) * whole.shape[:dim].numel() * whole.shape[dim + 1 :].numel()


def paired_rows(slots: Tensor, whole: Tensor, dim: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Views (slot, rows of `whole`) of equal shape: one pair where the rows divide evenly, else one pair a rank.

    dim  whose rows: another than 0 has to divide evenly
    """
    ranks = slots.shape[0]
    if whole.ndim == 0:
        yield from ((slot.view(()), whole) for slot in slots)
        return
    rows = largest_share(whole.shape[dim], ranks)
    if rows * ranks == whole.shape[dim]:
        parts = whole.unflatten(dim, (ranks, rows)).movedim(dim, 0)
        yield slots.view(parts.shape), parts
        return
    assert dim == 0
    for slot, part in zip(slots, whole.split(rows)):  # fewer parts than slots where the rows run out
        yield slot[: part.numel()].view(part.shape), part


def own_rows(whole: Tensor, axis: DeviceMesh, dim: int = 0) -> Tensor:
    """This rank's rows of a dim: a view, perhaps empty."""
    rows = largest_share(whole.shape[dim], axis.size())
    start = min(axis.get_local_rank() * rows, whole.shape[dim])
    return whole.narrow(dim, start, min(rows, whole.shape[dim] - start))
