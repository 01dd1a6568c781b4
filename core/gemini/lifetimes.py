"""The uses of a chunk's buffer, and the idle stretches between two of them during which it stays on the device.

A step is laid on a circle of *places* that begins behind its last reduce: there only chunks that never leave have
anything on the device, so a plan ends as it began. A *gap* is a stretch between two uses of a chunk over which its
buffer could stay. Letting it go costs a fetch at the gap's end; inside a backward, where gradients have already been
written into the buffer, it must be written to the host too. Everything else follows from the gaps that are kept.

Which ones: walk over the places, and wherever more wants to stay than there is room, let go what is needed farthest in
the future (Belady, "A study of replacement algorithms for a virtual-storage computer", 1966: with chunks of one size no
choice moves fewer bytes). With unequal sizes that may leave holes, so what fits afterwards is taken back, and single
gaps are exchanged as long as that saves bytes.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from core.gemini.trace import ChunkInfo, Trace


@dataclass(frozen=True)
class Gap:
    """Chunk `chunk` idles behind place `start` until place `end`; over the end of the step, end >= number of places.

    cost_bytes  moved if the buffer is not kept
    dirty       it holds gradients, which must be written before the buffer is free
    """

    chunk: int
    start: int
    end: int
    size_bytes: int
    cost_bytes: int
    dirty: bool


class Lifetimes:
    """A trace on its circle.

    order   place -> index of the moment
    needs   place -> chunks whose buffers the moment takes; an update takes none
    others  [place] bytes beside model data
    gaps    all of them
    fresh   (place, chunk): what is fetched whatever is kept, since nothing on the device has these parameters
    """

    def __init__(self, trace: Trace):
        self.trace = trace
        reduces = [k for k, moment in enumerate(trace.moments) if moment.kind == "reduce"]
        begin = (reduces[-1] + 1) % len(trace.moments) if reduces else 0
        self.order = [*range(begin, len(trace.moments)), *range(begin)]
        self.needs = [_needs(trace, k) for k in self.order]
        self.others = np.array([trace.moments[k].other_bytes for k in self.order], dtype=np.int64)
        self.gaps: list[Gap] = []
        self.fresh: list[tuple[int, int]] = []
        self._find_gaps()

    def __len__(self) -> int:
        return len(self.order)

    @cached_property
    def needed_bytes(self) -> np.ndarray:
        """[place] bytes of the buffers that its moment takes."""
        return np.array([sum(self.trace.chunks[c].param_bytes for c in needs) for needs in self.needs], dtype=np.int64)

    def occupied(self, resident: frozenset[int]) -> np.ndarray:
        """[place] bytes that are there in any case, with chunks that never leave, and their shards."""
        chunks = self.trace.chunks
        always = sum(chunks[c].param_bytes + chunks[c].shard_bytes for c in resident)
        twice = [sum(chunks[c].param_bytes for c in needs & resident) for needs in self.needs] if resident else 0
        return self.others + self.needed_bytes + always - twice

    def stretches(self, gap: Gap) -> Iterator[tuple[int, int]]:
        """The places over which a gap's buffer would idle, as [from, to)."""
        if gap.end > len(self):
            yield 0, gap.end - len(self)
        yield gap.start + 1, min(gap.end, len(self))

    def _find_gaps(self) -> None:
        chunks = self.trace.chunks
        first: dict[int, int] = {}
        last: dict[int, tuple[int, str]] = {}
        for place, k in enumerate(self.order):
            moment = self.trace.moments[k]
            for chunk in sorted(self.needs[place]):
                first.setdefault(chunk, place)
                before, holds = last.get(chunk, (-1, "nothing"))
                if holds in ("parameters", "gradients"):
                    self.gaps.append(_gap(chunks[chunk], before, place, dirty=holds == "gradients"))
                elif holds == "reduced":
                    self.fresh.append((place, chunk))
                if moment.kind == "reduce" and chunk == moment.chunks[0] and not moment.keeps:
                    holds = "reduced"
                elif chunk in moment.writes or holds == "gradients":
                    holds = "gradients"
                else:
                    holds = "parameters"
                last[chunk] = place, holds
        for chunk, place in first.items():
            before, holds = last[chunk]
            if holds == "parameters":
                self.gaps.append(_gap(chunks[chunk], before, place + len(self), dirty=False))
            else:
                self.fresh.append((place, chunk))


def _needs(trace: Trace, k: int) -> frozenset[int]:
    moment = trace.moments[k]
    return frozenset() if moment.kind == "update" else frozenset((*moment.chunks, *moment.writes))


def _gap(chunk: ChunkInfo, start: int, end: int, dirty: bool) -> Gap:
    return Gap(chunk.index, start, end, chunk.param_bytes, chunk.param_bytes * (2 if dirty else 1), dirty)


def keep(lifetimes: Lifetimes, resident: frozenset[int], budget_bytes: int, slack_bytes: int) -> frozenset[Gap] | None:
    """The gaps over which buffers stay, of chunks that are not resident. None: the resident ones leave too little room.

    slack_bytes  of the budget are left free where no moment needs them, for fetching ahead
    """
    room = budget_bytes - lifetimes.occupied(resident)
    if room.min(initial=0) < 0:
        return None
    room = np.maximum(room - slack_bytes, 0)
    return _Keeper(lifetimes, [g for g in lifetimes.gaps if g.chunk not in resident], room).kept()


class _Keeper:
    """Chooses among gaps under `room` [place]; `load` [place] is what the chosen ones take of it."""

    # Beyond so many gaps the exchange of single ones is left out: it looks at all pairs.
    MOST_EXCHANGED = 150

    def __init__(self, lifetimes: Lifetimes, gaps: list[Gap], room: np.ndarray):
        self.gaps, self.room = gaps, room
        self.stretches = [[(a, b) for a, b in lifetimes.stretches(gap) if a < b] for gap in gaps]
        self.is_kept = [True] * len(gaps)
        self.load = np.zeros(len(lifetimes), dtype=np.int64)
        for index in range(len(gaps)):
            self._add(index, 1)

    def kept(self) -> frozenset[Gap]:
        self._let_go_farthest()
        self._take_back()
        if len(self.gaps) <= self.MOST_EXCHANGED and len({gap.cost_bytes for gap in self.gaps}) > 1:
            while self._exchange():
                self._take_back()
        return frozenset(gap for gap, kept in zip(self.gaps, self.is_kept, strict=True) if kept)

    def _add(self, index: int, sign: int) -> None:
        for a, b in self.stretches[index]:
            self.load[a:b] += sign * self.gaps[index].size_bytes

    def _put(self, index: int, kept: bool) -> None:
        self.is_kept[index] = kept
        self._add(index, 1 if kept else -1)

    def _fits(self, index: int) -> bool:
        size = self.gaps[index].size_bytes
        return all((self.load[a:b] + size <= self.room[a:b]).all() for a, b in self.stretches[index])

    def _let_go_farthest(self) -> None:
        begins: dict[int, list[tuple[int, int]]] = {}
        for index, (gap, stretches) in enumerate(zip(self.gaps, self.stretches, strict=True)):
            for a, b in stretches:
                # Seen from before the chunk's first use that use is next; from behind its last, the next step's is.
                next_use = gap.end if a > gap.start else b
                begins.setdefault(a, []).append((-next_use, index))
        farthest: list[tuple[int, int]] = []
        for place in range(len(self.load)):
            for entry in begins.get(place, ()):
                heapq.heappush(farthest, entry)
            while self.load[place] > self.room[place]:
                _, index = heapq.heappop(farthest)
                if self.is_kept[index]:
                    self._put(index, False)

    def _take_back(self) -> None:
        """Keep again what fits: the shortest first, of equally short ones the costliest."""
        gone = [index for index, kept in enumerate(self.is_kept) if not kept]
        for index in sorted(gone, key=lambda i: (sum(b - a for a, b in self.stretches[i]), -self.gaps[i].cost_bytes)):
            if self._fits(index):
                self._put(index, True)

    def _exchange(self) -> bool:
        """Let one gap go for another that costs more; whether there was such a pair."""
        gone = [index for index, kept in enumerate(self.is_kept) if not kept]
        held = [index for index, kept in enumerate(self.is_kept) if kept and self.stretches[index]]
        for index in sorted(gone, key=lambda i: -self.gaps[i].cost_bytes):
            for other in held:
                if self.gaps[other].cost_bytes >= self.gaps[index].cost_bytes:
                    continue
                self._put(other, False)
                if self._fits(index):
                    self._put(index, True)
                    return True
                self._put(other, True)
        return False
