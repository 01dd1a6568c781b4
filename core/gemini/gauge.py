"""Bytes of a real step on the device at each moment of the traced one, model data and all else; and on the host.

On a CPU every tensor that is alive is counted, but for those of chunks and of the optimizer: they are in the account of
the tier, or on the host. On CUDA the allocator is asked. Neither waits for the device. On the host it is the shards of
chunks that live there, and the optimizer's state of them.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from core.gemini.chunk import Chunk
from core.gemini.tier import DeviceTier
from core.trace.account import MemoryAccount


class Gauge:
    """`with gauge:` around what was traced; the executor says `leave` and `enter` as it goes from moment to moment.

    others   [moment] the most beside model data; None of a moment that did not come
    device   [moment] that and the model data
    host     [moment] model data there
    """

    def __init__(
        self,
        num_moments: int,
        chunks: Sequence[Chunk],
        tier: DeviceTier,
        known: Iterable[Tensor],
        host_bytes: Callable[[], int],
    ):
        """known: tensors that are not counted: those of chunks, messages, the optimizer."""
        self.chunks, self.tier, self.host_bytes = chunks, tier, host_bytes
        self.others: list[int | None] = [None] * num_moments
        self.device: list[int | None] = [None] * num_moments
        self.host: list[int | None] = [None] * num_moments
        self._place = -1
        self._peak: _CountedPeak | _AllocatedPeak
        self._peak = _AllocatedPeak(chunks) if chunks[0].device.type == "cuda" else _CountedPeak(known)

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count what was there before: the model's buffers."""
        if isinstance(self._peak, _CountedPeak):
            self._peak.add(tensors)

    @property
    def has_measured(self) -> bool:
        return any(num_bytes is not None for num_bytes in self.others)

    def __enter__(self) -> "Gauge":
        self._peak.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.leave()
        self._peak.__exit__(*error)

    def give_up(self) -> None:
        """Count nothing any more: what is under way is not a whole moment."""
        self._place = -1
        self.__exit__(None, None, None)

    def leave(self) -> None:
        """The moment is over, and what its step has there is still there."""
        place, others = self._place, self._peak.take(_kept_gradients(self.chunks))
        if place < 0:
            return
        self.others[place] = max(others, self.others[place] or 0)
        self.device[place] = max(others + self.tier.current_bytes, self.device[place] or 0)
        self.host[place] = max(self.host_bytes(), self.host[place] or 0)

    def pause(self) -> None:
        """Count what comes until the next moment (an optimizer's step) for none."""
        self.leave()
        self._place = -1

    def enter(self, place: int) -> None:
        """Count what comes now for this moment of the trace."""
        self._place = place


class _CountedPeak(MemoryAccount):
    """All tensors that are alive but those of storages that are known."""

    def __init__(self, known: Iterable[Tensor]):
        super().__init__("cpu")
        # Storages are told apart by identity, so they are kept.
        self._known = {id(storage): storage for storage in (tensor.untyped_storage() for tensor in known)}

    def _note(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._known:
            super()._note(storage)

    def take(self, known: Iterable[Tensor]) -> int:
        """The most since it was last taken; what is known from now on is not counted any more."""
        peak = self.peak_bytes
        for storage in (tensor.untyped_storage() for tensor in known):
            if id(storage) not in self._known:
                self._known[id(storage)] = storage
                _, num_bytes = self._alive.pop(id(storage), (None, 0))
                self._freed_bytes.append(num_bytes)
        self.peak_bytes = self.current_bytes
        return peak


class _AllocatedPeak(ExitStack):
    """Bytes that the CUDA allocator had beyond what it has now, and beyond the buffers that come and go."""

    def __init__(self, chunks: Sequence[Chunk]):
        super().__init__()
        self._chunks = chunks
        self._before = torch.cuda.memory_allocated() - self._coming_and_going()

    def _coming_and_going(self) -> int:
        gradients = sum(gradient.nbytes for gradient in _kept_gradients(self._chunks))
        return gradients + sum(chunk.num_bytes for chunk in self._chunks if chunk.is_filled and not chunk.resident)

    def take(self, known: Iterable[Tensor]) -> int:
        """The most since it was last taken."""
        peak = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return max(0, peak - self._before - self._coming_and_going())


def _kept_gradients(chunks: Sequence[Chunk]) -> list[Tensor]:
    """Gradients that are their masters' as autograd made them: model data, from then on."""
    masters = [member.master for chunk in chunks if chunk.alone for member in chunk.members]
    return [master.grad for master in masters if master.grad is not None]
