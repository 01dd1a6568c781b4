"""All numbers of a step in one buffer: filled on the host, one copy to the device, one message to the other ranks.

A layout says where each field stands. Fields begin at multiples of 64 bytes, since what reads them may want them so.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGNED = 16
"""words of int32 between beginnings of fields"""
_NUMPY: dict[torch.dtype, Any] = {torch.int32: np.int32, torch.int64: np.int64, torch.float64: np.float64}

Field = tuple[str, torch.dtype, int]
"""Name, format, how many numbers."""


class Layout:
    """The places of fields in a buffer of int32."""

    def __init__(self, fields: Iterable[Field]):
        self._places: dict[str, tuple[int, int, torch.dtype]] = {}
        at = 0
        for name, dtype, count in fields:
            stop = at + count * dtype.itemsize // 4
            self._places[name] = (at, stop, dtype)
            at = -(-stop // _ALIGNED) * _ALIGNED
        self.num_words = at

    def tensor(self, words: Tensor, name: str) -> Tensor:
        """A field of a buffer, as a view."""
        start, stop, dtype = self._places[name]
        return words[start:stop].view(dtype)

    def array(self, words: Tensor, name: str) -> np.ndarray:
        """The same of a buffer on the host, for numpy, which fills it faster from lists."""
        start, stop, dtype = self._places[name]
        return words.numpy()[start:stop].view(_NUMPY[dtype])

    def start(self, name: str) -> int:
        return self._places[name][0]
