"""Memory of the host of which pieces are taken and given back in any order."""

import torch
from torch import Tensor

from core.pinned import host_empty


class Area:
    """num_bytes in pages of their own; `pinned`: a GPU copies from there by itself."""

    def __init__(self, num_bytes: int, pinned: bool):
        self.memory = host_empty(num_bytes, torch.uint8, pinned, paged=True)
        self._taken: list[tuple[int, int]] = []  # begin and end, in order

    def take(self, num_bytes: int) -> Tensor | None:
        """[num_bytes] from the first gap that is large enough; None where there is none."""
        begin = 0
        for index, (taken, end) in enumerate([*self._taken, (len(self.memory), 0)]):
            if taken - begin >= num_bytes:
                self._taken.insert(index, (begin, begin + num_bytes))
                return self.memory[begin : begin + num_bytes]
            begin = end
        return None

    def give(self, piece: Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._taken = [(begin, end) for begin, end in self._taken if begin != piece.storage_offset()]
