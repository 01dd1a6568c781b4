"""Memory of the host that a GPU copies from and to by itself, as much of it as is asked for.

torch's own pinned memory comes in powers of two, which for the shards of a model is up to twice what a plan counts. So
whole pages are mapped and registered with the driver, and given back when nobody holds a tensor of them any more.
"""

import mmap
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from core.config import UserError, in_words

_PORTABLE = 1  # cudaHostRegisterPortable: for every device of the process


DRIVE_BLOCK = 4096
"""Offsets, lengths and addresses of what goes past the page cache are multiples of so many bytes, on every drive."""


def whole_blocks(num_bytes: int) -> int:
    """Bytes with what fills up a drive's last block."""
    return -(-num_bytes // DRIVE_BLOCK) * DRIVE_BLOCK


def host_empty(num_elements: int, dtype: torch.dtype, pinned: bool, paged: bool = False) -> Tensor:
    """[num_elements] on the host, undefined; `pinned` in registered pages, less than one page more than it needs.

    paged  in pages of its own also where they are not registered: it begins at one, as a drive wants it

    Raises UserError where the driver locks no more memory (`ulimit -l`, the limit of a container).
    """
    if not (pinned or paged) or num_elements == 0:
        return torch.empty(num_elements, dtype=dtype, device="cpu")
    num_bytes = _whole_pages(num_elements * dtype.itemsize)
    pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    tensor = torch.frombuffer(pages, dtype=dtype, count=num_elements)
    if not pinned:
        return tensor
    _register(tensor.data_ptr(), num_bytes)
    # The tensor's storage holds the pages, so they are unmapped later than this is called.
    weakref.finalize(tensor.untyped_storage(), _unregister, tensor.data_ptr(), pages)
    return tensor


class Places:
    """Pinned memory in which what goes between host and device stops over: two places, made when first needed.

    num_bytes  the largest that is sent
    """

    PLACES = 2

    def __init__(self, num_bytes: int):
        self.num_bytes = num_bytes
        self._all: dict[int, Tensor] = {}  # by address
        self._free: list[Tensor] = []

    def take(self, like: Tensor, land: Callable[[], None]) -> Tensor:
        """A place for a tensor like this one, contiguous. land: waits for the earliest under way, and gives it back."""
        while not self._free and len(self._all) == self.PLACES:
            land()
        if not self._free:
            with torch.inference_mode(False):  # they may be used again outside of the inference that made them
                place = host_empty(self.num_bytes, torch.uint8, pinned=True)
            self._all[place.data_ptr()] = place
            self._free.append(place)
        return self._free.pop()[: like.nbytes].view(like.dtype).view(like.shape)

    def give(self, taken: Tensor) -> None:
        """Nobody reads or writes it any more."""
        self._free.append(self._all[taken.data_ptr()])


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


def _register(pointer: int, num_bytes: int) -> None:
    code = int(_driver().cudaHostRegister(pointer, num_bytes, _PORTABLE))
    if code != 0:
        raise UserError(
            f"the driver locks no further {in_words(num_bytes)} of the host's memory (CUDA error {code}); raise the "
            "limit of locked memory (ulimit -l, of a container --ulimit memlock=-1), or give the device more"
        )


def _unregister(pointer: int, pages: mmap.mmap) -> None:
    """pages: held until here, so that what is unregistered is still mapped.

    Copies that were begun may still be under way, and nobody promises that the driver waits for them.
    """
    if torch.cuda.is_initialized() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    _driver().cudaHostUnregister(pointer)


def _driver() -> Any:
    return torch.cuda.cudart()
