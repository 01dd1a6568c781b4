"""Activations on a drive: as `core.parallel.offload`, and from the host's memory on to a file.

    forward    each storage is copied to a place on the host as soon as it is saved, and written from there while blocks
               go on computing; its memory on the device is let go when the next block's forward is over, and so is the
               place, for which the host waits until it is written
    backward   the first node of a block that asks for anything has what is missing of this block read, and what the
               block before it saved; a node waits for what it asks for, alone

So the host holds two blocks' activations, and the drive all (Wu et al. 2024, "SSDTrain", arXiv 2408.10013). Room in the
file is taken when a size is first needed, which is in the first step, and used again. What is read has the checksums of
what was written. The file is made by whoever may know of drives (`core.compose`), when the first tensor is sent: on
tensors without memory nothing is.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor, nn

from core.config import UserError
from core.files import Damaged
from core.parallel.offload import Elsewhere, HostTier, Place, unseen
from core.parallel.stored import StoredBlocks
from core.pinned import whole_blocks


class Transfer(Protocol):
    """A read or write under way."""

    def wait(self) -> list[int]: ...


class Drive(Protocol):
    """A file of a drive (`core.gemini.direct`)."""

    def grow(self, offset: int, num_bytes: int) -> None: ...

    def write(self, offset: int, memory: Tensor) -> Transfer: ...

    def read(self, offset: int, memory: Tensor, checksums: Sequence[int] | None = None) -> Transfer: ...


class DiskTier:
    """A file for what devices send.

    held_bytes, peak_bytes       that hold something now; the most there ever were
    sent_bytes, fetched_bytes    written so far, and read
    file_bytes                   of the file
    host                         places on the way
    name                         the option that gave the folder, with its value
    """

    def __init__(self, name: str, make: Callable[[], Drive]):
        self.name, self._make = name, make
        self._drive: Drive | None = None
        self.host = HostTier(paged=True)
        self.held_bytes = self.peak_bytes = self.sent_bytes = self.fetched_bytes = self.file_bytes = 0
        self._free: dict[int, list[int]] = {}
        self._writer, self._reader = (ThreadPoolExecutor(1, thread_name_prefix="activations") for _ in range(2))

    def hold(self, num_bytes: int) -> None:
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def take(self, num_bytes: int) -> int:
        """An offset at which there is room.  Raises UserError where the drive has none."""
        if places := self._free.get(num_bytes):
            return places.pop()
        offset = self.file_bytes
        try:
            self._file().grow(offset, num_bytes)
        except OSError as error:
            raise self.refused(error) from None
        self.file_bytes += num_bytes
        return offset

    def give(self, offset: int, num_bytes: int) -> None:
        self._free.setdefault(num_bytes, []).append(offset)

    def write(self, ready: Callable[[], None], offset: int, memory: Tensor) -> Future[list[int]]:
        """Begin to write when `ready` returns: its checksums are to come."""

        def write() -> list[int]:
            ready()
            return self._file().write(offset, memory).wait()

        return self._writer.submit(write)

    def read(self, ready: Callable[[], None], offset: int, memory: Tensor, sums: list[int]) -> Future[list[int]]:
        def read() -> list[int]:
            ready()
            return self._file().read(offset, memory, sums).wait()

        return self._reader.submit(read)

    def result(self, transfer: Future[list[int]]) -> list[int]:
        """Its checksums, when it is through.  Raises UserError where it went wrong."""
        try:
            return transfer.result()
        except (OSError, Damaged) as error:
            raise self.refused(error) from None

    def refused(self, error: Exception) -> UserError:
        return UserError(f"{self.name}: {error}; give another folder, or leave it out, and go on from a checkpoint")

    def _file(self) -> Drive:
        if self._drive is None:
            self._drive = self._make()
        return self._drive


class _OnDisk(Elsewhere):
    """A storage that is sent to a drive.

    Its place on the host is there while it is written, and while it is read; `_room` is what it has in the file.
    """

    def __init__(self, x: Tensor, least: int, tier: DiskTier):
        super().__init__(x, least, tier.host.lines(x.device))
        self.tier = tier
        self._room: int | None = None
        self._under_way: Future[list[int]] | None = None
        self._checksums: list[int] = []

    def saved(self) -> None:
        assert self.flat is not None
        self.tier.sent_bytes += self._num_bytes
        self.tier.hold(self._num_bytes)
        if self._is_fake:
            return
        streams, sending, _ = self._lines
        self._room = self.tier.take(whole_blocks(self._num_bytes))
        with unseen(streams):
            place = self._place = self.tier.host.take(whole_blocks(self._num_bytes), streams.on_cuda)
            computed = streams.mark()
            with streams.inside(sending):
                streams.wait(computed)
                streams.wait(place.free)
                self._bytes_of(place).copy_(self.flat, non_blocking=True)
                sent = self._sent = streams.mark()
        self._under_way = self.tier.write(lambda: streams.host_waits(sent), self._room, place.memory)

    def next_ended(self) -> None:
        self.check()
        self._lines.streams.wait(self._sent)
        self._settle()
        self.flat = None

    def comes_next(self) -> None:
        if self.flat is not None:
            return
        self.tier.fetched_bytes += self._num_bytes
        self.flat = self._empty()
        self.version, self._arrives = self.flat._version, not self._is_fake
        if self._is_fake:
            return
        assert self._room is not None
        streams = self._lines.streams
        with unseen(streams):
            place = self._place = self.tier.host.take(whole_blocks(self._num_bytes), streams.on_cuda)
        self._under_way = self.tier.read(
            lambda: streams.host_waits(place.free), self._room, place.memory, self._checksums
        )

    def whole(self) -> Tensor:
        flat = super().whole()
        if self._arrives:
            assert self._under_way is not None
            assert self._place is not None
            self.tier.result(self._under_way)
            streams = self._lines.streams
            with unseen(streams), torch.no_grad():
                flat.copy_(self._bytes_of(self._place), non_blocking=True)
                self.tier.host.give(self._place, streams.mark())
            self.version, self._arrives = flat._version, False
            self._under_way = self._place = None
        return flat

    def _bytes_of(self, place: Place) -> Tensor:
        return place.memory[: self._num_bytes].view(self._nothing.dtype)

    def _settle(self) -> None:
        """Return when it is on the drive, and let the place go."""
        if self._under_way is not None and not self._arrives:
            self._checksums = self.tier.result(self._under_way)
            self._let_place_go()

    def _let_place_go(self) -> None:
        if self._place is not None:
            self.tier.host.give(self._place, None)
        self._under_way = self._place = None

    def __del__(self) -> None:
        self.tier.held_bytes -= self._num_bytes
        if self._room is None:
            return
        if self._under_way is not None:
            self._under_way.exception()
            if not self._arrives and self.flat is not None:
                self._lines.streams.wait(self._sent)
        self._let_place_go()
        self.tier.give(self._room, whole_blocks(self._num_bytes))


class OnDrive(StoredBlocks):
    """Blocks whose activations wait for the backward on a drive."""

    def __init__(self, blocks: list[nn.Module], tier: DiskTier):
        self.tier = tier
        super().__init__(blocks, lambda x, least: _OnDisk(x, least, tier), fetches=True)
