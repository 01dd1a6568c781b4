"""Every move of a step by what stays on the device, with the bytes and the seconds that come of it.

Five things work beside each other: the device computes, one copy goes to it and one to the host at a time, the host
updates, and a drive below the host reads or writes. The walk goes place by place (`Lifetimes`), at each:

1. what is not kept leaves; a gradient's buffer leaves when its copy has arrived, which whoever needs the room waits for
2. what the moment needs and nobody fetched ahead is fetched, and waited for
3. while the copy to the device is idle, the next chunks in order of need are fetched ahead, if from now to their use
   there is room for them, and, where the host updates them, it has done so
4. the moment computes; a reduce starts the gradient's copy to the host, an update the host's work on it

The next step's forward waits until the host has updated everything. Chunks on a disk whose updates need not wait for
the step's end begin them when their last gradient has arrived. A gradient that waits on the drive is written when it
has arrived, from one of `WAITING_PLACES` places, of which one must be free, and read for its update.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal, NamedTuple

from core.gemini.lifetimes import Gap, Lifetimes
from core.gemini.trace import Moment
from core.trace.machine import Bandwidth

MoveKind = Literal["fetch", "prefetch", "evict", "release"]

WAITING_PLACES = 2
"""Of the host, each as large as the largest gradient that waits on the disk: one comes or goes while one is used."""


class Move(NamedTuple):
    """A move of a chunk's buffer.

    fetch     it is allocated and filled with the host's parameters; the moment that follows waits for it
    prefetch  the same for a later moment, beside what computes
    evict     it is free; gradients that it already holds are written to the host first
    release   it is free as soon as its reduced gradient has arrived where the optimizer's shard is: what takes its
              place waits for that, and so does the moment where only this makes room for it
    """

    kind: MoveKind
    chunk: int


@dataclass(frozen=True)
class Timeline:
    """A planned step.

    moves         moves[k], in order, come before moment k; the last ones after the last moment
    start         chunks whose buffers are on the device when a step begins, and when it ends
    device_bytes  at each moment, everything on the device
    busy_s        of "compute", "to_device", "to_host" and "host_update", and of the "disk"
    disk_read_bytes, disk_written_bytes    of the drive in a step
    """

    moves: tuple[tuple[Move, ...], ...]
    start: frozenset[int]
    device_bytes: tuple[int, ...]
    to_device_bytes: int
    to_host_bytes: int
    step_s: float
    busy_s: dict[str, float]
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0

    @property
    def moved_bytes(self) -> int:
        return self.to_device_bytes + self.to_host_bytes


def run(
    lifetimes: Lifetimes,
    resident: frozenset[int],
    kept: frozenset[Gap],
    budget_bytes: int,
    bandwidth: Bandwidth,
    on_disk: frozenset[int] = frozenset(),
    waiting: frozenset[int] = frozenset(),
) -> Timeline:
    """The step in which resident chunks never leave and the others stay over the gaps in `kept`, which must fit.

    on_disk  of those others, the ones whose masters and state lie there: a fetch reads their values, an update all
    waiting  the ones whose gradients wait there: a reduce writes them, an update reads them
    """
    return _Walk(lifetimes, resident, kept, budget_bytes, bandwidth, on_disk, waiting).run()


class _Walk:
    def __init__(
        self,
        lifetimes: Lifetimes,
        resident: frozenset[int],
        kept: frozenset[Gap],
        budget_bytes: int,
        bandwidth: Bandwidth,
        on_disk: frozenset[int] = frozenset(),
        waiting: frozenset[int] = frozenset(),
    ):
        self.on_disk, self.waiting = on_disk, waiting
        self.lifetimes, self.resident, self.budget_bytes, self.bandwidth = lifetimes, resident, budget_bytes, bandwidth
        self.chunks = lifetimes.trace.chunks
        num_places = len(lifetimes)
        self.level = lifetimes.occupied(resident)  # [place] bytes that are sure to be there
        self.on_device = set(resident)
        self.leaves: dict[int, list[Gap]] = {}  # place -> gaps that are not kept and begin behind it
        fetches = [(place, chunk) for place, chunk in lifetimes.fresh if chunk not in resident]
        for gap in lifetimes.gaps:
            if gap.chunk in resident:
                continue
            if gap in kept:
                for a, b in lifetimes.stretches(gap):
                    self.level[a:b] += gap.size_bytes
                if gap.end >= num_places:
                    self.on_device.add(gap.chunk)
            else:
                self.leaves.setdefault(gap.start, []).append(gap)
                fetches.append((gap.end % num_places, gap.chunk))
        self.fetches = deque(sorted(fetches))
        self.moves: list[list[Move]] = [[] for _ in range(num_places + 1)]
        self.device_bytes = [0] * num_places
        self.start: frozenset[int] = frozenset(self.on_device)
        self.leaving: dict[int, float] = {}  # chunks whose reduced gradients are on their way -> when they arrive
        self.leaving_bytes = 0
        self.ready = [0.0] * len(self.chunks)  # when the chunk's buffer is filled, or its parameters are on the host
        # Chunks of which the host has old parameters until their update, which this walk begins with.
        updates = (
            [lifetimes.trace.moments[k] for k in lifetimes.order[: lifetimes.order.index(0)]] if num_places else []
        )
        self.old = {m.chunks[0] for m in updates if m.kind == "update" and m.chunks[0] not in resident}
        self.now = self.link_in = self.link_out = self.host = 0.0  # until when each is busy
        self.busy = {"compute": 0.0, "to_device": 0.0, "to_host": 0.0, "host_update": 0.0}
        if bandwidth.has_disk:
            self.busy["disk"] = 0.0
        last_reduce = {m.chunks[0]: k for k, m in enumerate(lifetimes.trace.moments) if m.kind == "reduce"}
        early = on_disk.intersection(last_reduce) if lifetimes.trace.updates_as_final else ()
        self.early = {last_reduce[chunk]: chunk for chunk in early}  # moment -> chunk that is updated behind it
        self.in_bytes = self.out_bytes = self.read_bytes = self.written_bytes = 0
        self.drive = 0.0
        self.places = deque([0.0] * WAITING_PLACES)  # of gradients on their way to the drive: when each is free
        self.put_down: dict[int, float] = {}  # chunks of whose gradients something waits there -> since when

    def run(self) -> Timeline:
        order = self.lifetimes.order
        for place, k in enumerate(order):
            if k == 0:
                self.start = frozenset(self.on_device)
                self.now = max(self.now, self.host, self.drive)
            self._at(place, self.lifetimes.trace.moments[k], self.moves[k])
            if k in self.early:
                self._on_host(self.early[k], self.ready[self.early[k]])
        if order:
            self._close(self.moves[order[-1] + 1])
        return Timeline(
            moves=tuple(map(tuple, self.moves)),
            start=self.start,
            device_bytes=tuple(self.device_bytes),
            to_device_bytes=self.in_bytes,
            to_host_bytes=self.out_bytes,
            step_s=max(self.now, self.host, self.drive),
            busy_s=self.busy,
            disk_read_bytes=self.read_bytes,
            disk_written_bytes=self.written_bytes,
        )

    def _at(self, place: int, moment: Moment, moves: list[Move]) -> None:
        if place - 1 in self.leaves:
            self._evict(place - 1, moves)
        if self.leaving:
            again = {chunk for needed_at, chunk in self.fetches if needed_at == place}
            for chunk, arrives in list(self.leaving.items()):
                is_tight = self.level[place] + self.leaving_bytes > self.budget_bytes
                if arrives <= self.now or is_tight or chunk in again:
                    self.now = max(self.now, self._release(chunk, moves))
        issue = self.now
        while self.fetches and self.fetches[0][0] == place:
            self._fetch(self.fetches.popleft()[1], "fetch", issue, moves)
        begin = self.now
        for chunk in self.lifetimes.needs[place]:
            begin = max(begin, self.ready[chunk])
        if self.fetches:
            self._fetch_ahead(place, issue, begin + moment.seconds, moves)
        self.device_bytes[self.lifetimes.order[place]] = int(self.level[place]) + self.leaving_bytes
        self._compute(moment, begin)

    def _evict(self, place: int, moves: list[Move]) -> None:
        for gap in self.leaves.get(place, ()):
            moves.append(Move("evict", gap.chunk))
            self.on_device.remove(gap.chunk)
            if gap.dirty:
                self.now = self.ready[gap.chunk] = self._gradient_to_host(gap.chunk)

    def _release(self, chunk: int, moves: list[Move]) -> float:
        """When the buffer is free."""
        moves.append(Move("release", chunk))
        self.leaving_bytes -= self.chunks[chunk].param_bytes
        self.on_device.remove(chunk)
        return self.leaving.pop(chunk)

    def _fetch(self, chunk: int, kind: MoveKind, issue: float, moves: list[Move]) -> None:
        moves.append(Move(kind, chunk))
        self.on_device.add(chunk)
        num_bytes = self.chunks[chunk].param_bytes
        if chunk in self.on_disk:
            self.ready[chunk] = self._read_from_disk(self.chunks[chunk].own_bytes, max(issue, self.ready[chunk]))
        seconds = self.bandwidth.latency_s + num_bytes / self.bandwidth.to_device
        self.link_in = self.ready[chunk] = max(self.link_in, issue, self.ready[chunk]) + seconds
        self.busy["to_device"] += seconds
        self.in_bytes += num_bytes

    def _fetch_ahead(self, place: int, issue: float, until: float, moves: list[Move]) -> None:
        """Start what can be started before `until`."""
        while self.fetches:
            needed_at, chunk = self.fetches[0]
            num_bytes, level = self.chunks[chunk].param_bytes, self.level[place:needed_at]
            if chunk in self.on_device or chunk in self.old:
                return
            # While the host updates in the end of a step, the device has nothing to compute.
            if self.link_in > max(until, self.host) or (level + num_bytes > self.budget_bytes).any():
                return
            for leaving, arrives in list(self.leaving.items()):
                if level[0] + self.leaving_bytes + num_bytes > self.budget_bytes:
                    if arrives > until:
                        return
                    issue = max(issue, self._release(leaving, moves))
            level += num_bytes
            self.fetches.popleft()
            self._fetch(chunk, "prefetch", issue, moves)

    def _compute(self, moment: Moment, begin: float) -> None:
        seconds = moment.seconds
        if moment.kind == "update":
            seconds = self._update(moment.chunks[0], begin)
        self.now = begin + seconds
        self.busy["compute"] += seconds
        if moment.kind == "reduce" and moment.chunks[0] not in self.resident:
            chunk = moment.chunks[0]
            if moment.keeps:
                self._gradient_to_host(chunk)
                return
            self.leaving[chunk] = self.ready[chunk] = self._gradient_to_host(chunk)
            self.leaving_bytes += self.chunks[chunk].param_bytes

    def _update(self, chunk: int, begin: float) -> float:
        """Start an update; how long it keeps the device."""
        num_bytes = self.chunks[chunk].shard_bytes
        self.old.discard(chunk)
        if chunk in self.resident:
            return num_bytes / self.bandwidth.device_update
        if chunk not in self.early.values():
            self._on_host(chunk, begin)
        return 0.0

    def _on_host(self, chunk: int, begin: float) -> None:
        """The host's update of a chunk, from and to the disk where it lives there."""
        num_bytes = self.chunks[chunk].shard_bytes
        seconds, slot_bytes = num_bytes / self.bandwidth.host_update, self.chunks[chunk].slot_bytes
        if chunk in self.on_disk:
            self.ready[chunk] = self._read_from_disk(self.chunks[chunk].read_bytes, max(begin, self.ready[chunk]))
        if chunk in self.waiting:
            begin = max(begin, self.put_down.pop(chunk, 0.0))
            self.ready[chunk] = self._read_from_disk(self.chunks[chunk].wait_bytes, max(begin, self.ready[chunk]))
        self.host = self.ready[chunk] = max(self.host, begin, self.ready[chunk]) + seconds
        self.busy["host_update"] += seconds
        if chunk in self.on_disk:
            self.ready[chunk] = self._write_to_disk(slot_bytes, self.ready[chunk])

    def _gradient_to_host(self, chunk: int) -> float:
        """Start the copy of a gradient, which may go on to the drive; when it will have arrived on the host."""
        if chunk in self.waiting:
            self.now = max(self.now, self.places.popleft())
        arrives = self._to_host(self.chunks[chunk].param_bytes)
        if chunk in self.waiting:
            num_bytes, complete = self.chunks[chunk].wait_bytes, arrives
            if chunk in self.put_down:  # a part of it waits there: this one is added to it
                complete = self._read_from_disk(num_bytes, max(arrives, self.put_down[chunk]))
            self.put_down[chunk] = self._write_to_disk(num_bytes, complete)
            self.places.append(self.put_down[chunk])
        return arrives

    def _read_from_disk(self, num_bytes: int, begin: float) -> float:
        """Start a read; when it will have arrived."""
        self.read_bytes += num_bytes
        return self._drive(num_bytes / self.bandwidth.disk_read, begin)

    def _write_to_disk(self, num_bytes: int, begin: float) -> float:
        """Start a write; when it will be over."""
        self.written_bytes += num_bytes
        return self._drive(num_bytes / self.bandwidth.disk_write, begin)

    def _drive(self, seconds: float, begin: float) -> float:
        """One transfer at a time; when it is over."""
        self.drive = max(self.drive, begin) + seconds
        self.busy["disk"] += seconds
        return self.drive

    def _to_host(self, num_bytes: int) -> float:
        """Start a copy; when it will have arrived."""
        seconds = self.bandwidth.latency_s + num_bytes / self.bandwidth.to_host
        self.link_out = max(self.link_out, self.now) + seconds
        self.busy["to_host"] += seconds
        self.out_bytes += num_bytes
        return self.link_out

    def _close(self, moves: list[Move]) -> None:
        """Behind the last place everything leaves that is not there at the first; it comes before moves made there."""
        made, moves[:] = list(moves), []
        self._evict(len(self.lifetimes) - 1, moves)
        for chunk in list(self.leaving):
            self.now = max(self.now, self._release(chunk, moves))
        moves += made
