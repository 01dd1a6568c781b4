"""Elementwise updates of lists of tensors, a manageable piece at a time.

An update composed of foreach operators goes over its tensors once an operator, and its intermediates are as large as
what it works on. So the tensors are cut: on a CPU into pieces that stay in the cache from operator to operator, on a
GPU into lists long enough to fill it and short enough that intermediates do not matter.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

_CPU_ELEMENTS = 1 << 15
_GPU_ELEMENTS = 1 << 26


def pieces(*lists: Sequence[Tensor]) -> Iterator[tuple[list[int], list[list[Tensor]]]]:
    """(indices of the tensors that the pieces are of, the pieces of each list); every element in one piece.

    lists  of one length; the tensors of one index have one shape, and all lie on one device. Pieces are views.
    """
    batch: list[tuple[Tensor, ...]] = []
    indices: list[int] = []
    room = 0
    for index, tensors in enumerate(zip(*lists, strict=True)):
        on_cpu = tensors[0].device.type == "cpu"
        for cut in _cut(tensors, _CPU_ELEMENTS) if on_cpu else [tensors]:
            if batch and (on_cpu or cut[0].numel() > room):
                yield indices, [list(column) for column in zip(*batch)]
                batch, indices = [], []
            room = (room if batch else _GPU_ELEMENTS) - cut[0].numel()
            batch.append(cut)
            indices.append(index)
    if batch:
        yield indices, [list(column) for column in zip(*batch)]


def _cut(tensors: tuple[Tensor, ...], most: int) -> Iterator[tuple[Tensor, ...]]:
    """Runs of at most `most` elements, where more than those lie in memory without gaps and in one order."""
    if not tensors[0].numel():
        return iter(())
    if tensors[0].numel() <= most or not all(t.is_contiguous() for t in tensors):
        return iter([tensors])
    return zip(*(t.view(-1).split(most) for t in tensors))
