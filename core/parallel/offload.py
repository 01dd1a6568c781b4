"""Activations on the host: what a block saves for its backward goes there, and comes back one block ahead.

    forward    each storage is sent as soon as it is saved, while the block goes on computing; its memory on the device
               is let go when the next block's forward is over, for which computing waits for the copies
    backward   the first node of a block that asks for anything has what is missing of this block fetched, and what the
               block before it saved, last saved first; a node waits for what it asks for, alone

So at most two blocks' activations are on the device at a time, whatever the number of blocks (Rhu et al. 2016, "vDNN",
arXiv 1602.08124; Wu et al. 2024, "SSDTrain", arXiv 2408.10013). The last block's are still there when the backward
begins. On CUDA memory of the host is pinned and copies have a stream each way; it is taken again for the next storage
of the same size, so that a run takes no more than the most that were there at once and, where sizes change, as much
again. On a CPU the host's memory is the device's, and copies are made at once: what is on the host is counted, and no
account of the device sees it (`core.trace.account`).
"""

from collections import OrderedDict
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from core.compat import FakeTensor, without_modes
from core.parallel.stored import Stored, StoredBlocks
from core.pinned import host_empty
from core.streams import DeviceStreams


class HostTier:
    """The host's memory for what devices send.

    held_bytes, peak_bytes       that hold something now; the most there ever were
    sent_bytes, fetched_bytes    copied to the host so far, and back
    paged                        places begin at a page, as a drive wants them
    """

    def __init__(self, paged: bool = False) -> None:
        self.paged = paged
        self.held_bytes = self.peak_bytes = self.sent_bytes = self.fetched_bytes = 0
        self._lines: dict[torch.device, Lines] = {}
        self._free: OrderedDict[int, list[Place]] = OrderedDict()  # by size, the one used last at the end
        self._free_bytes = 0

    def lines(self, device: torch.device) -> "Lines":
        if device not in self._lines:
            streams = DeviceStreams(device)
            self._lines[device] = Lines(streams, streams.another(), streams.another())
        return self._lines[device]

    def take(self, num_bytes: int, pinned: bool) -> "Place":
        """A place for so many bytes."""
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        places = self._free.get(num_bytes)
        if places:
            self._free_bytes -= num_bytes
            return places.pop()
        while self._free and self._free_bytes + self.held_bytes > 2 * self.peak_bytes:
            size, old = self._free.popitem(last=False)
            self._free_bytes -= size * len(old)
        return Place(host_empty(num_bytes, torch.uint8, pinned, self.paged))

    def give(self, place: "Place", event: torch.cuda.Event | None) -> None:
        """Nobody will read it any more once the event has happened."""
        num_bytes = place.memory.nbytes
        self.held_bytes -= num_bytes
        self._free_bytes += num_bytes
        self._free.setdefault(num_bytes, []).append(Place(place.memory, event))
        self._free.move_to_end(num_bytes)


class Lines(NamedTuple):
    """Between the host and a device."""

    streams: DeviceStreams
    sending: torch.cuda.Stream | None
    fetching: torch.cuda.Stream | None


class Place(NamedTuple):
    """free: when it is read no more, by whoever had it before"""

    memory: Tensor
    free: torch.cuda.Event | None = None


class Elsewhere(Stored):
    """A storage that is sent over the host's lines, and fetched into new memory."""

    def __init__(self, x: Tensor, least: int, lines: Lines):
        super().__init__(x, least)
        assert self.flat is not None
        self._num_elements, self._num_bytes = self.flat.numel(), self.flat.nbytes
        self._nothing = self.flat.new_empty(0)  # of its dtype, on its device
        self._lines = lines
        self._place: Place | None = None
        self._sent: torch.cuda.Event | None = None
        self._is_fake, self._arrives = isinstance(x, FakeTensor), False

    def _empty(self) -> Tensor:
        with torch.no_grad():
            return self._nothing.new_empty(self._num_elements)

    def restored(self) -> Tensor:
        self.comes_next()
        assert self.flat is not None
        return self.flat


class _OnHost(Elsewhere):
    """A storage that is sent to the host."""

    def __init__(self, x: Tensor, least: int, tier: HostTier):
        super().__init__(x, least, tier.lines(x.device))
        self.tier = tier
        self._fetched: torch.cuda.Event | None = None

    def saved(self) -> None:
        assert self.flat is not None
        self.tier.sent_bytes += self._num_bytes
        streams, sending, _ = self._lines
        if self._is_fake:
            self.tier.held_bytes += self._num_bytes
            self.tier.peak_bytes = max(self.tier.peak_bytes, self.tier.held_bytes)
            return
        with unseen(streams):
            self._place = self.tier.take(self._num_bytes, streams.on_cuda)
            computed = streams.mark()
            with streams.inside(sending):
                streams.wait(computed)
                streams.wait(self._place.free)
                self._place.memory.view(self.flat.dtype).copy_(self.flat, non_blocking=True)
                self._sent = streams.mark()

    def next_ended(self) -> None:
        self.check()
        self._lines.streams.wait(self._sent)
        self.flat = None

    def comes_next(self) -> None:
        if self.flat is not None:
            return
        self.tier.fetched_bytes += self._num_bytes
        self.flat = self._empty()
        self.version, self._arrives = self.flat._version, True
        if self._place is None:
            return
        streams, _, fetching = self._lines
        with unseen(streams), torch.no_grad():
            free = streams.mark()
            with streams.inside(fetching):
                streams.wait(free)
                streams.wait(self._sent)
                self.flat.copy_(self._place.memory.view(self.flat.dtype), non_blocking=True)
                self._fetched = streams.mark()
        self.version = self.flat._version

    def whole(self) -> Tensor:
        flat = super().whole()
        if self._arrives:
            self._lines.streams.wait(self._fetched)
            self._arrives = False
        return flat

    def __del__(self) -> None:
        if self._place is None:
            self.tier.held_bytes -= self._num_bytes
            return
        if self._arrives:  # never asked for: its memory may be used again when the copy is made
            self._lines.streams.wait(self._fetched)
        self.tier.give(self._place, self._fetched or self._sent)
        if self.flat is not None and self._fetched is None:
            self._lines.streams.wait(self._sent)


def unseen(streams: DeviceStreams) -> AbstractContextManager[object]:
    """Inside, accounts of a CPU do not take the host's memory for the device's."""
    return nullcontext() if streams.on_cuda else without_modes()


class Offloaded(StoredBlocks):
    """Blocks whose activations wait for the backward on the host."""

    def __init__(self, blocks: list[nn.Module]):
        self.tier = HostTier()
        super().__init__(blocks, lambda x, least: _OnHost(x, least, self.tier), fetches=True)
