"""The fastest segments of a chain of blocks in a given memory: what to keep, and what to compute again from where.

The dynamic programme of Beaumont, Eyraud-Dubois, Herrmann, Joly and Shilova 2019, "Optimal checkpointing for
heterogeneous chains: how to train deep neural networks with limited memory" (arXiv 1911.13214), section 4, known as
Rotor. In m bytes, blocks s … t, whose input is there, are computed and taken back in the least time

    C(s, s, m) = r_s + b_s                             it runs once more, and its backward follows
    C(s, t, m) = min of
        sum of f_s … f_k-1 + C(k, t, m - a_k) + C(s, k-1, m)   for k = s+1 … t: of s … k-1 nothing is kept but the input
                                                       of s; that of k is, and when k … t are done s … k-1 run again
        f_s + C(s+1, t, m - w_s) + b_s                 s keeps everything, w_s
        f_s + C(s+1, t, m - v_s) + u_s + b_s           s keeps results of operators, v_s, and computes the rest again
                                                       in u_s (a line for each of `core.trace.segments.Results`)
        f_s + C(s+1, t, m - v_s) + x_s + b_s           in the first forward alone: what s keeps waits elsewhere but for
                                                       v_s (a line for each `core.trace.segments.Form`), and x_s of its
                                                       copies is longer than what they run beside

where what runs has room, else infinity. Over it stands the same for the first forward, T(s, m), with the head at its
end. This gives the best of all schedules that keep what they keep until its backward (memory persistent ones).

What is more here than in the paper: the levels of `core.trace.chain`, since gradients come to be meanwhile; that the
last block of a segment runs only as far as its backward needs; blocks that no segment goes over; results of operators
that a block keeps alone. Of a pipeline's stage what the first forward keeps is charged for each microbatch in flight,
but to the blocks behind alone; the rest is known to the simulator. So are blocks whose activations wait elsewhere but
are still there, or there again, while the next block runs: of that block the least is charged that it may take. Of
them only one microbatch's are there at a time.

1. Sizes are rounded up to slots, and C is a table of blocks x blocks x slots. A second table has the lower quarter in
   as many slots, where memory is scarce.
2. From the tables come the segments of each memory that makes a difference, whatever the budget.
3. Each is run by the simulator (`core.trace.chain.simulate`), which knows bytes and no slots. The frontier keeps those
   that no other is faster and smaller than. So a larger budget never takes less memory, nor more time; and no segments
   take more than their budget.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from core.trace.chain import Chain, ChainBlock, Keeps, Kept, Simulated, item_of, keeps_of, simulate
from core.trace.segments import Form, Segments

SLOTS = 500
"""For the bytes between the least that a step takes and the most."""
_MOST_FOLD = 4
"""As many times the slots, where much else is alive in the end and little at the beginning."""
_EQUAL = 1e-9
"""Of times that only the order of sums tells apart."""


@dataclass(frozen=True)
class RankBytes:
    """A pipeline rank's bytes: on its device at most, and of all its microbatches in flight what waits elsewhere."""

    device: int
    away: Mapping[Form, int]


@dataclass(frozen=True)
class Checkpointing:
    """Segments and the step that they make; ranks: of a pipeline, what each takes."""

    segments: Segments
    step: Simulated
    ranks: tuple[RankBytes, ...] = ()

    @property
    def peak_bytes(self) -> int:
        return self.step.peak_bytes


def frontier(chain: Chain, slots: int = SLOTS) -> list[Checkpointing]:
    """All that are worth taking: the smallest first, each larger one faster. Never empty."""
    everything: Segments = (len(chain.blocks),) if chain.blocks else ()
    found: dict[Segments, Simulated] = {everything: simulate(chain, everything)}
    least, most = _least_bytes(chain), found[everything].peak_bytes
    floor = min(
        least,
        chain.head - chain.shared,
        *(min(of.first, of.again, *(how.back for how in of.ways.values())) for of in chain.blocks),
    )
    for span in dict.fromkeys((most - least, (most - least) // 4)):
        whole = least + span - floor
        unit = max(1, -(-span // slots), -(-whole // (_MOST_FOLD * slots)))
        for segments in _Table(chain, floor, unit, -(-whole // unit)).all_segments():
            if segments not in found:
                found[segments] = simulate(chain, segments)
    ordered = sorted(found.items(), key=lambda item: (item[1].peak_bytes, item[1].seconds))
    kept: list[Checkpointing] = []
    for segments, step in ordered:
        if not kept or step.seconds < kept[-1].step.seconds * (1 - _EQUAL):
            kept.append(Checkpointing(segments, step))
    return kept


class _HasPeak(Protocol):
    @property
    def peak_bytes(self) -> int: ...


_Choice = TypeVar("_Choice", bound=_HasPeak)


def fastest(choices: Sequence[_Choice], budget_bytes: int) -> _Choice | None:
    """The one of a frontier that the budget allows; None where none fits."""
    return next((choice for choice in reversed(choices) if choice.peak_bytes <= budget_bytes), None)


def _least_bytes(chain: Chain) -> int:
    """What a step takes at least, whatever is kept."""
    levels = [chain.least, chain.head - chain.shared]
    for of in chain.blocks:
        levels.append(of.first + min(of.dropping_peak, *(how.peak for how in of.ways.values())))
        again = of.again + max(of.refill_peak, of.refilled + of.refilled_peak)
        levels.append(min(again, *(how.back + how.num_bytes + how.backward_peak for how in of.ways.values())))
    return max(levels)


class _Table:
    """C and T in slots of `unit` bytes: m slots are `floor` + m units alive at once."""

    def __init__(self, chain: Chain, floor: int, unit: int, slots: int):
        self.chain, self.floor, self.unit, self.slots = chain, floor, unit, slots
        self.count, self.flying = len(chain.blocks), chain.flying
        blocks = chain.blocks
        self.places = np.arange(slots + 1)
        self.before_s = np.concatenate([[0.0], np.cumsum([of.forward_s for of in blocks])]).astype(np.float32)
        self.ways = [_best_ways(of) for of in blocks]
        self.ends = self._ends()
        self.dropping, self.outer_dropping = self._dropping()
        shape = (self.count + 1, self.count + 1, slots + 1)
        self.inner = np.full(shape, np.inf, np.float32)
        self.charged = np.full(shape, np.inf, np.float32)  # the same, with the input of s taken from m
        self._fill_inner()
        self.outer = np.full((self.count + 1, slots + 1), np.inf, np.float32)
        self._fill_outer()

    def _ends(self) -> list[int]:
        """Of each block, where a segment that begins with it has to end."""
        ends, end = [0] * self.count, self.count
        for index in range(self.count - 1, -1, -1):
            ends[index] = index + 1 if self.chain.single else end
            if self.chain.blocks[index].begins:
                end = index
        return ends

    def _slots(self, num_bytes: int) -> int:
        return max(0, -(-num_bytes // self.unit))

    def _level(self, num_bytes: int) -> int:
        """The fewest slots at which so much may be alive."""
        return self._slots(num_bytes - self.floor)

    def _less(self, row: NDArray[np.float32], num_bytes: int) -> NDArray[np.float32]:
        """row(m - num_bytes)"""
        shift = min(self._slots(num_bytes), self.slots + 1)
        return np.concatenate([np.full(shift, np.inf, np.float32), row[: self.slots + 1 - shift]])

    def _from(self, row: NDArray[np.float32], *levels: int) -> NDArray[np.float32]:
        """The row where all levels have room, infinity elsewhere."""
        return np.where(self.places < max(map(self._level, levels)), np.float32(np.inf), row)

    def _levels(self, num_bytes: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(0, -(-(num_bytes - self.floor) // self.unit))

    def _dropping(self) -> tuple[list[NDArray[np.int64]], list[NDArray[np.int64]]]:
        """Of each s, for k = s+1, s+2, …: the most above what is beside, while s … k-1 run and keep nothing.

        And the same with what is beside each of them in the forward.
        """
        blocks = self.chain.blocks
        own, first = (np.array([getattr(of, name) for of in blocks]) for name in ("dropping_peak", "first"))
        inputs = np.array([of.input for of in blocks])
        above = [np.concatenate([own[s : s + 1], (own + inputs)[s + 1 :]]) for s in range(self.count)]
        alone = [np.maximum.accumulate(peaks) for peaks in above]
        return alone, [np.maximum.accumulate(peaks + first[s:]) for s, peaks in enumerate(above)]

    # C.

    def _fill_inner(self) -> None:
        for length in range(1, self.count + 1):
            for s in range(self.count - length + 1):
                t = s + length - 1
                if t < self.ends[s]:
                    row = (
                        self._single(s)
                        if s == t
                        else np.minimum(self._split(s, t).min(0), np.minimum.reduce(self._inner_kept(s, t)))
                    )
                    self.inner[s, t] = row
                    self.charged[s, t] = self._less(row, self.chain.blocks[s].input)

    def _single(self, s: int) -> NDArray[np.float32]:
        of = self.chain.blocks[s]
        row = np.full(self.slots + 1, of.refill_s + of.backward_s, np.float32)
        return self._from(row, of.again + of.refill_peak, of.again + of.refilled + of.refilled_peak)

    def _split(self, s: int, t: int, places: slice = slice(None)) -> NDArray[np.float32]:
        """A row for each k = s+1 … t."""
        sums = self.before_s[s + 1 : t + 1] - self.before_s[s]
        found = self.charged[s + 1 : t + 1, t, places] + self.inner[s, s:t, places] + sums[:, None]
        room = self._levels(self.dropping[s][: t - s] + self.chain.blocks[t].again)
        return np.where(self.places[None, places] < room[:, None], np.float32(np.inf), found)

    def _inner_kept(self, s: int, t: int) -> list[NDArray[np.float32]]:
        """A row for each way in which s can be kept."""
        of, beside = self.chain.blocks[s], self.chain.blocks[t].again
        return [self._kept(of, how, self.inner[s + 1, t], beside) for how in self.ways[s].values()]

    def _kept(
        self, of: ChainBlock, how: Kept, rest: NDArray[np.float32], beside: int, times: int = 1
    ) -> NDArray[np.float32]:
        """A block that is kept, of so many microbatches, and the rest with what is left."""
        stays = times * (how.num_bytes - how.away)
        kept = stays + how.away
        row = self._less(rest, stays) + np.float32(of.forward_s + how.again_s + of.backward_s)
        back = how.back + (of.shared if of.keeps_all(how) else 0)  # what is before it is not known here
        return self._from(row, beside + how.peak, back + kept + how.backward_peak)

    def _kept_away(self, s: int, form: Form, how: Kept) -> NDArray[np.float32]:
        """A block whose activations wait elsewhere; they are there while the next one runs, and when it runs back."""
        of, line, is_last = self.chain.blocks[s], self.chain.lines.get(form), s + 1 == self.count
        if is_last and how.away and self.flying < 3:  # it is still there when its backward begins
            return np.full(self.slots + 1, np.inf, np.float32)
        row = self._kept(of, how, self.outer[s + 1], of.first, self.flying)
        if line is not None:
            hidden = (of.forward_s, of.backward_s) if line.overlaps else (0.0, 0.0)
            row = row + np.float32(max(0.0, how.send_s - hidden[0]) + max(0.0, how.fetch_s - hidden[1]))
        if not how.away:
            return row
        kept = self.flying * (how.num_bytes - how.away) + how.away
        if is_last:  # that of the microbatch which ran last, beside the one that runs back
            return self._from(row, how.back + kept + how.away + how.backward_peak)
        behind = self.chain.blocks[s + 1]
        runs = min(behind.dropping_peak, *(other.peak for other in behind.ways.values()))
        again = behind.again + min(behind.refill_peak, behind.refilled + behind.refilled_peak)
        back = min(again, *(other.back + other.num_bytes + other.backward_peak for other in behind.ways.values()))
        return self._from(row, behind.first + kept + runs, back + kept)

    # T.

    def _fill_outer(self) -> None:
        self.outer[self.count] = self._from(np.zeros(self.slots + 1, np.float32), self.chain.head)
        self.outer_charged = self.outer.copy()
        self.outer_charged[self.count] = self._less(self.outer[self.count], self.flying * self.chain.output)
        for s in range(self.count - 1, -1, -1):
            self.outer[s] = np.minimum(self._outer_split(s).min(0), np.minimum.reduce(self._outer_kept(s)))
            self.outer_charged[s] = self._less(self.outer[s], self.flying * self.chain.blocks[s].input)

    def _outer_split(self, s: int, places: slice = slice(None)) -> NDArray[np.float32]:
        """A row for each k = s+1 … the end of the segment."""
        end = self.ends[s]
        sums = self.before_s[s + 1 : end + 1] - self.before_s[s]
        found = self.outer_charged[s + 1 : end + 1, places] + self.inner[s, s:end, places] + sums[:, None]
        room = self._levels(self.outer_dropping[s][: end - s])
        return np.where(self.places[None, places] < room[:, None], np.float32(np.inf), found)

    def _outer_kept(self, s: int) -> list[NDArray[np.float32]]:
        """A row for each way in which the block can be kept."""
        of, rest = self.chain.blocks[s], self.outer[s + 1]
        here = [self._kept(of, how, rest, of.first, self.flying) for how in self.ways[s].values()]
        return here + [self._kept_away(s, form, how) for form, how in of.away.items()]

    # The way back.

    def all_segments(self) -> list[Segments]:
        """Those of each number of slots at which they get faster."""
        row = self.outer[0]
        faster = np.flatnonzero(np.isfinite(row) & ~(row >= np.concatenate([[np.inf], row[:-1]]) * (1 - _EQUAL)))

        @cache
        def inner(s: int, t: int, m: int) -> Segments:
            if s == t:
                return (1,)
            splits = self._split(s, t, slice(m, m + 1))[:, 0]
            k = int(splits.argmin())
            kept = [float(row[m]) for row in self._inner_kept(s, t)]
            if splits[k] < min(kept):
                rest = inner(s + 1 + k, t, m - self._slots(self.chain.blocks[s + 1 + k].input))
                return (inner(s, s + k, m), *rest)
            keeps, how = list(self.ways[s].items())[kept.index(min(kept))]
            return _joined(keeps, inner(s + 1, t, m - self._slots(how.num_bytes)))

        @cache
        def outer(s: int, m: int) -> Segments:
            if s == self.count:
                return ()
            splits = self._outer_split(s, slice(m, m + 1))[:, 0]
            k = int(splits.argmin())
            kept = [float(row[m]) for row in self._outer_kept(s)]
            if splits[k] < min(kept):
                end = s + 1 + k
                handed = self.chain.output if end == self.count else self.chain.blocks[end].input
                return (inner(s, s + k, m), *outer(end, m - self._slots(self.flying * handed)))
            keeps, how = [*self.ways[s].items(), *self.chain.blocks[s].away.items()][kept.index(min(kept))]
            return _joined(keeps, outer(s + 1, m - self._slots(self.flying * (how.num_bytes - how.away))))

        return [outer(0, int(m)) for m in faster]


def _best_ways(of: ChainBlock) -> dict[Keeps, Kept]:
    """Those in which a block can be kept where it is and that no other one is better than in everything."""

    def costs(how: Kept) -> tuple[float, ...]:
        back = how.back + (of.shared if how is of.whole else 0)
        return how.peak, how.num_bytes, back + how.num_bytes + how.backward_peak, how.again_s

    found: dict[Keeps, Kept] = {}
    for keeps, how in of.here.items():
        if not any(all(a <= b for a, b in zip(costs(other), costs(how), strict=True)) for other in found.values()):
            found[keeps] = how
    return found


def _joined(keeps: Keeps, rest: Segments) -> Segments:
    """A block that is kept, before the rest."""
    first = item_of(keeps)
    if rest and not isinstance(rest[0], tuple) and keeps_of(rest[0]) == keeps:
        more = rest[0] + 1 if isinstance(rest[0], int) else replace(rest[0], blocks=rest[0].blocks + 1)
        return (more, *rest[1:])
    return (first, *rest)
