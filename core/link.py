"""Copies between tensors in pinned host memory and a device, beside what the device computes.

    link.begin()
    coming = link.fetch(x[a])        begins; the host goes on
    y = compute(coming.take())       computing waits for the copy, and not the host
    link.send(x[a], y)               begins when y is computed
    link.end()                       what is fetched from now on is what was sent

Fetching and sending have a stream each, since a GPU copies both ways at once. What is ordered by events:

    a fetch   begins when computing has reached the place where its memory was allocated, whose last user may have been
              computing; between `begin` and `end` it does not wait for what is sent, which has to be other parts of x
    a result  is kept until the next one is sent, or until `end`; computing then waits for its copy, and has its memory

A part of x whose bytes do not follow each other (columns of a matrix) would be copied by way of memory that is not
pinned, for which the host waits. It stops over in pinned places (`Places`), two for each direction: the host gathers
the next part while the device computes, and scatters what has arrived when its place is needed, or at `begin`.

Without streams everything happens at once, in this order, and nothing stops over.
"""

from collections import deque
from typing import NamedTuple

import torch
from torch import Tensor

from core.pinned import Places
from core.streams import DeviceStreams


class Coming:
    """A tensor that is there, or, with the event of its copy, on its way."""

    def __init__(self, x: Tensor, streams: DeviceStreams | None = None, event: torch.cuda.Event | None = None):
        self._x: Tensor | None = x
        self._streams, self._event = streams, event

    def take(self) -> Tensor:
        """The tensor, once; what computes from now on reads it when it is there."""
        x, self._x = self._x, None
        assert x is not None, "taken twice"
        if self._streams is not None:
            self._streams.wait(self._event)
        return x


class Link:
    """The link between the host and the device of these streams."""

    def __init__(self, streams: DeviceStreams):
        self.streams = streams
        self._fetching, self._sending = streams.another(), streams.another()
        self._gathered, self._arriving = _Stopovers(streams), _Stopovers(streams)
        self._sent: Copy | None = None  # the last, whose memory computing may not use yet
        self._unseen: torch.cuda.Event | None = None  # of the last before `end`; None once the host has waited for it

    def begin(self) -> None:
        """Begin a round: what is fetched from now on is what was sent before `end`."""
        self._arriving.finish()

    def fetch(self, x: Tensor) -> Coming:
        """Begin to bring x to the device."""
        there = torch.empty_like(x, device=self.streams.device)
        free = self.streams.mark()
        if not self._stops_over(x):
            return Coming(there, self.streams, self._copied(self._fetching, free, there, x).event)
        self._host_waits_for_what_was_sent()
        place = self._gathered.take(_flat(there))
        place.as_strided(there.shape, there.stride()).copy_(x)
        copy = self._copied(self._fetching, free, _flat(there), place)
        self._gathered.note(copy.event, place)
        return Coming(there, self.streams, copy.event)

    def send(self, place: Tensor, value: Tensor) -> None:
        """Begin to bring a value to its place on the host."""
        value = value.contiguous()
        self._give_back()
        computed = self.streams.mark()
        if not self._stops_over(place):
            self._sent = self._copied(self._sending, computed, place, value)
            return
        stop = self._arriving.take(value)
        self._sent = self._copied(self._sending, computed, stop, value)
        self._arriving.note(self._sent.event, stop, place)

    def end(self) -> None:
        """Let computing, and so what is fetched from now on, wait for all that was sent."""
        if self._sent is not None:
            self._unseen = self._sent.event
        self._give_back()

    def settle(self) -> None:
        """Return when all that was fetched and sent is there, and the host may read and write it."""
        self._arriving.finish()
        for stream in (self._fetching, self._sending):
            with self.streams.inside(stream):
                self.streams.host_waits(self.streams.mark())
        self._sent = self._unseen = None

    def _give_back(self) -> None:
        """Let computing have the memory of what was sent, when the copy is made."""
        if self._sent is not None:
            self.streams.wait(self._sent.event)
            self._sent = None

    def _copied(
        self, stream: torch.cuda.Stream | None, after: torch.cuda.Event | None, target: Tensor, source: Tensor
    ) -> "Copy":
        with self.streams.inside(stream):
            self.streams.wait(after)
            target.copy_(source, non_blocking=True)
            return Copy(self.streams.mark(), target, source)

    def _stops_over(self, x: Tensor) -> bool:
        return self.streams.on_cuda and not x.is_contiguous()

    def _host_waits_for_what_was_sent(self) -> None:
        if self._unseen is not None:
            self.streams.host_waits(self._unseen)
            self._unseen = None


class Copy(NamedTuple):
    """event: when it is made; until then the tensors have to stay"""

    event: torch.cuda.Event | None
    target: Tensor
    source: Tensor


class _Stopovers:
    """Tensors that stop over in pinned places on its way in one direction, the earliest first."""

    def __init__(self, streams: DeviceStreams):
        self.streams = streams
        self._places = Places(0)
        self._under_way: deque[tuple[torch.cuda.Event | None, Tensor, Tensor | None]] = deque()

    def take(self, like: Tensor) -> Tensor:
        """A free place for a tensor like this one, contiguous."""
        if like.nbytes > self._places.num_bytes:
            self.finish()
            self._places = Places(like.nbytes)
        return self._places.take(like, self._land)

    def note(self, event: torch.cuda.Event | None, stop: Tensor, onwards: Tensor | None = None) -> None:
        """The copy to or from `stop` is made at the event.  onwards: where the host then puts what arrived."""
        self._under_way.append((event, stop, onwards))

    def finish(self) -> None:
        while self._under_way:
            self._land()

    def _land(self) -> None:
        event, stop, onwards = self._under_way.popleft()
        self.streams.host_waits(event)
        if onwards is not None:
            onwards.copy_(stop)
        self._places.give(stop)


def _flat(x: Tensor) -> Tensor:
    """Its bytes as they lie, of a tensor without gaps: [elements]."""
    return x.as_strided((x.numel(),), (1,))
