"""Rows of dim 0 dealt to ranks as torch.chunk and DTensor deal them, and messages that hold them rank after rank.

A message [ranks, elements] has a slot for each rank's rows of each tensor. Rows that a ragged tensor lacks are padding:
sent, never read.
"""

from collections.abc import Iterator

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


def row_length(whole: Tensor, ranks: int) -> int:
    """Elements of one rank's share of dim 0; a scalar is everybody's."""
    return -(-whole.shape[0] // ranks) * whole.shape[1:].numel() if whole.ndim else 1


def paired_rows(slots: Tensor, whole: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views (slot, rows of `whole`) of equal shape: one pair where the rows divide evenly, else one pair a rank."""
    ranks = slots.shape[0]
    if whole.ndim == 0:
        yield from ((slot.view(()), whole) for slot in slots)
        return
    rows = -(-whole.shape[0] // ranks)
    if rows * ranks == whole.shape[0]:
        parts = whole.unflatten(0, (ranks, rows))
        yield slots.view(parts.shape), parts
        return
    for slot, part in zip(slots, whole.split(rows)):  # fewer parts than slots where the rows run out
        yield slot[: part.numel()].view(part.shape), part


def own_rows(whole: Tensor, axis: DeviceMesh) -> Tensor:
    """This rank's rows of dim 0: a view, perhaps empty."""
    rows = -(-whole.shape[0] // axis.size())
    start = min(axis.get_local_rank() * rows, whole.shape[0])
    return whole[start : start + rows]
