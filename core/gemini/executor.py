"""Brings chunks to the device and lets them go: executes a plan's moves, and never puts more there than the budget.

At each moment of a step:

1. what the plan lets go goes, then whatever else must, so that the moment's activations find room
2. what the moment needs and is not there is fetched
3. what the plan fetches ahead is fetched, if there is room

A plan is advice. What is needed is fetched whether it is planned or not, and to make room for it the chunk goes whose
next use is farthest in the traced step; without a trace, the one that was used longest ago. Chunks in use stay. A chunk
in which some gradients stand already can go, too: they are reduced early.
"""

from collections.abc import Iterable, Sequence

from core.config import UserError, in_words
from core.gemini.chunk import Chunk
from core.gemini.gauge import Gauge
from core.gemini.schedule import Schedule
from core.gemini.states import FREE
from core.gemini.streams import Streams
from core.gemini.tier import DeviceTier
from core.gemini.trace import MomentKind
from core.gemini.transport import Transport

LETS_GO = ("evict", "release")


class Executor:
    """moves: for each moment of the schedule's trace, (kind, chunk) as `timeline.Move`.

    gauge  measures each moment, while there is one
    """

    def __init__(self, chunks: Sequence[Chunk], tier: DeviceTier, transport: Transport, streams: Streams):
        self.chunks, self.tier, self.transport, self.streams = chunks, tier, transport, streams
        self.schedule: Schedule | None = None
        self.moves: Sequence[Sequence[tuple[str, int]]] = ()
        self.gauge: Gauge | None = None
        self._clock = 0
        self._used_at = dict.fromkeys(chunks, 0)
        self._where = "the start"

    def follow(self, schedule: Schedule, moves: Sequence[Sequence[tuple[str, int]]]) -> None:
        """Execute this plan from now on."""
        self.schedule, self.moves = schedule, moves

    def at(self, kind: MomentKind, name: str, needed: Sequence[Chunk]) -> None:
        """The step has come to a moment; returns when what it needs is there."""
        self._where = f"{kind} of {name}"
        if self.gauge is not None:
            self.gauge.leave()
        begun = self.schedule.advance(kind, name) if self.schedule is not None else range(0)
        if begun and self.gauge is not None:
            self.gauge.enter(begun[-1])
        if begun:
            self._let_go_of(begun, needed)
            self._set_other(begun[-1], needed)
        self.require(needed)
        self._fetch_ahead(begun)

    def _let_go_of(self, moments: Sequence[int], needed: Sequence[Chunk]) -> None:
        for k in moments:
            for what, chunk in self.moves[k]:
                if what in LETS_GO and self.chunks[chunk] not in needed:
                    self._let_go(self.chunks[chunk])

    def _set_other(self, k: int, needed: Sequence[Chunk]) -> None:
        assert self.schedule is not None
        other = self.schedule.trace.moments[k].other_bytes
        self._make_room(other - self.tier.other_bytes, needed)
        self.tier.set_other(other)

    def _fetch_ahead(self, moments: Sequence[int]) -> None:
        for k in moments:
            for what, chunk in self.moves[k]:
                if what not in LETS_GO:
                    self.load(self.chunks[chunk])

    def require(self, needed: Iterable[Chunk]) -> None:
        """Chunks that are to be read or written now; returns when they are there."""
        needed = list(needed)
        self._clock += 1
        for chunk in needed:
            self._used_at[chunk] = self._clock
            if not chunk.is_filled:
                self._make_room(0 if chunk.resident else chunk.num_bytes, needed)
                self._fetch(chunk)
            if chunk.ready is not None:
                self.streams.wait(chunk.ready)
                chunk.ready = None

    def reduce(self, chunk: Chunk, keeps: bool = False) -> None:
        """Send a chunk's gradients to the shard, and let it leave.  keeps: they stood beside it, and it stays"""
        self.transport.reduce(chunk)
        if not keeps:
            self._leave(chunk)

    def restore(self, chunk: Chunk) -> None:
        """Parameters are read again whose gradients stand in the buffer: those go to the shard, values come back."""
        self.transport.reduce(chunk)
        for member in chunk.ready_members:
            member.move(FREE)
        self.transport.fetch(chunk)
        self.streams.wait(chunk.ready)

    def drop(self, chunk: Chunk) -> None:
        """The buffer's contents are of no use any more: old parameters, or gradients of a step that was given up."""
        if chunk.is_filled:
            self._leave(chunk)

    def load(self, chunk: Chunk) -> None:
        """Fetch a chunk, if it is not there and there is room."""
        if not chunk.is_filled and (chunk.resident or chunk.num_bytes <= self.tier.room_bytes):
            self._fetch(chunk)

    def _fetch(self, chunk: Chunk) -> None:
        if not chunk.resident:
            self.tier.take(chunk.num_bytes, chunk.name)
        self.transport.fetch(chunk)

    def _leave(self, chunk: Chunk) -> None:
        self.streams.freed()
        chunk.hide()
        if not chunk.resident:
            self.tier.give(chunk.num_bytes)

    def _let_go(self, chunk: Chunk) -> None:
        """If it may go: it is there, nobody reads it, and it has a place on the host."""
        if not chunk.is_filled or chunk.in_use or chunk.resident:
            return
        if chunk.holds_gradients:
            self.transport.reduce(chunk)
        self.tier.num_evictions += 1
        self._leave(chunk)

    def _make_room(self, num_bytes: int, needed: Sequence[Chunk]) -> None:
        while num_bytes > self.tier.room_bytes:
            idle = [c for c in self.chunks if c.is_filled and not (c.in_use or c.resident or c in needed)]
            if not idle:
                missing = num_bytes - self.tier.room_bytes
                raise UserError(
                    f"gemini.budget={self.tier.budget_bytes}: at the {self._where} the device needs "
                    f"{in_words(missing)} more; give at least {self.tier.budget_bytes + missing} bytes"
                )
            self._let_go(max(idle, key=self._is_farther))

    def _is_farther(self, chunk: Chunk) -> tuple[bool, int]:
        if self.schedule is not None:
            return not chunk.holds_gradients, self.schedule.next_use(chunk.index)
        return not chunk.holds_gradients, -self._used_at[chunk]
