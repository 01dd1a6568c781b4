"""The residency plan, where each chunk lives and every move of a step: a pure function of trace, budget and bandwidths.

Policies (the literature says placement policy):

    auto      Some chunks are resident: they never leave the device, and neither do their masters and optimizer state,
              so they cost no traffic and the device updates them. All others live on the host, which updates them; what
              room is left keeps their buffers between uses, farthest next use first to go, or fetches them ahead. How
              many are resident, and how much is left for fetching ahead, is what makes the step shortest; among equally
              short steps, the one that moves least.
    static    Resident chunks as above; the others leave after each use. For steps in which the order of use varies.
    cpu       Every chunk lives on the host, and leaves after each use.

Where everything fits, everything is resident, but for `cpu`. No plan exceeds its budget: what is not needed at once
(keeping, fetching ahead) is planned only where there is room, and a budget in which a single moment does not fit is
refused with the smallest that would do.

Below the host there may be a disk. What the host's budget does not hold lives there with its masters and optimizer
state: what does not learn goes first, since it is never written, and of the rest as few bytes as make the others fit.
Its gradients wait on the host, where also lie `PLACES` places in which what is on the disk is read, updated, written.
Where even that does not fit, gradients wait on the disk, too, as few bytes as do: last, since all else that goes there
is written with every durable step anyway, and a gradient is written for nothing but its room.

What is not planned: updates of which the device does a part and the host the rest of one chunk, and
streaming optimizer state through the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from core.config import UserError
from core.gemini.lifetimes import Lifetimes, keep
from core.gemini.timeline import WAITING_PLACES, Move, Timeline, run
from core.gemini.trace import ChunkInfo, Trace
from core.trace.machine import Bandwidth

Policy = Literal["auto", "static", "cpu"]

PLACES = 4
"""Of the host, each as large as the largest slot on the disk: one is read into, one is updated, one is written, and one
has values that are fetched."""

ENDURANCE_BYTES = 600e12
"""That a usual SSD of 1 TB may be written, by its maker's warranty: 600 TBW."""

BOUNDS = {
    "compute": "computing",
    "to_device": "copies to the device",
    "to_host": "copies to the host",
    "host_update": "updates on the host",
    "disk": "the disk",
}


@dataclass(frozen=True)
class ResidencyPlan:
    """The plan that a runtime executes in each step.

    moves              moves[k], in order, come before moment k of the trace; moves[-1] after the last one
    start              chunks whose buffers are on the device when a step begins, and when it ends
    resident           chunks that are always on the device, with masters and optimizer state
    device_updated     those of them that learn; the host updates all others
    device_bytes       at each moment, everything on the device; device_peak_bytes is the most of it
    host_bytes         at most: parameters, a gradient, masters and optimizer state of what is not resident; of what is
                       on the disk gradients, and places
    on_disk            chunks whose masters and optimizer state lie on the disk
    waiting            chunks whose gradients wait there for their update
    disk_bytes         of the disk: two slots of every chunk, and gradients that wait; 0 without one
    disk_read_bytes, disk_written_bytes    in a step, of chunks that live there, and of gradients
    durable_bytes      written in a step that is made durable, of chunks that live in memory
    to_device_bytes, to_host_bytes    over the link in a step
    step_s             predicted; busy_s is how long each of "compute", "to_device", "to_host" and "host_update" works
    """

    policy: Policy
    budget_bytes: int
    moves: tuple[tuple[Move, ...], ...]
    start: frozenset[int]
    resident: frozenset[int]
    device_updated: frozenset[int]
    device_bytes: tuple[int, ...]
    host_bytes: int
    to_device_bytes: int
    to_host_bytes: int
    step_s: float
    busy_s: dict[str, float]
    on_disk: frozenset[int] = frozenset()
    disk_bytes: int = 0
    disk_read_bytes: int = 0
    disk_written_bytes: int = 0
    durable_bytes: int = 0
    waiting: frozenset[int] = frozenset()

    @property
    def device_peak_bytes(self) -> int:
        return max(self.device_bytes, default=0)

    @property
    def moved_bytes(self) -> int:
        """Over the link in a step, both ways."""
        return self.to_device_bytes + self.to_host_bytes

    def seconds_of(self, num_microbatches: int) -> float:
        """Of a step of so many microbatches, each of which takes as long as what works longest beside the updates."""
        each = max(seconds for what, seconds in self.busy_s.items() if what != "host_update")
        return self.step_s + (num_microbatches - 1) * each

    @property
    def bound(self) -> str:
        """The part that works longest in a step: one of the keys of `busy_s`."""
        return max(self.busy_s, key=lambda name: self.busy_s[name])

    def describe(self) -> str:
        """The plan in one line."""
        num_chunks = len({move.chunk for moves in self.moves for move in moves} | self.start)
        on_host = num_chunks - len(self.resident) - len(self.on_disk)
        return (
            f"{len(self.resident)} chunks live on the device, {on_host} on the host "
            f"({_gib(self.host_bytes)}){self._disk_in_words()}; {_gib(self.moved_bytes)} moved a step, at most "
            f"{_gib(self.device_peak_bytes)} of {_gib(self.budget_bytes)} on the device; a step takes about "
            f"{self.step_s:.3g} s, bound by {BOUNDS[self.bound]}"
        )

    @property
    def written_a_day(self) -> float:
        """Bytes written to the disk in a day of such steps, each of them made durable."""
        return (self.disk_written_bytes + self.durable_bytes) / max(self.step_s, 1e-9) * 86400

    @property
    def drive_days(self) -> float:
        """Days of such steps that a drive of 600 TBW lasts."""
        return ENDURANCE_BYTES / max(self.written_a_day, 1.0)

    def _disk_in_words(self) -> str:
        if not self.disk_bytes:
            return ""
        read, written = _gib(self.disk_read_bytes), _gib(self.disk_written_bytes + self.durable_bytes)
        waiting = f" and the gradients of {len(self.waiting)}" if self.waiting else ""
        return (
            f", {len(self.on_disk)}{waiting} on the disk, which takes {_gib(self.disk_bytes)}: {read} read and "
            f"{written} written a step, {self.written_a_day / 1e12:.3g} TB a day: a drive of 600 TBW lasts "
            f"{self.drive_days:.3g} days"
        )


def smallest_budget(trace: Trace) -> int:
    """Bytes of the device without which some moment of the trace does not fit, whatever else leaves."""
    lifetimes = Lifetimes(trace)
    return int(lifetimes.occupied(frozenset()).max(initial=0))


def too_small(budget_bytes: int, least_bytes: int) -> str:
    """The message to a budget in which nothing works, with the smallest that would do."""
    return (
        f"a budget of {_gib(budget_bytes)} on the device is too small for this model and batch; "
        f"give at least {_gib(least_bytes, up=True)}, or a smaller batch, or recompute activations"
    )


class HostTooSmall(UserError):
    """A refusal: of what the device does not hold, the host cannot hold the rest.

    least_bytes  of the host that would do, with this trace and the device's budget
    """

    def __init__(self, least_bytes: int, host_budget_bytes: int):
        self.least_bytes = least_bytes
        super().__init__(
            f"{_gib(least_bytes, up=True)} of model data do not fit beside the device's, and the host has "
            f"{_gib(host_budget_bytes)}; give the host that much (--gemini.host), or the device a larger budget, or "
            "take more ranks or a smaller model"
        )


def plan_residency(
    trace: Trace,
    budget_bytes: int,
    bandwidth: Bandwidth,
    policy: Policy = "auto",
    host_budget_bytes: int | None = None,
) -> ResidencyPlan:
    """Decide where chunks live and when they move.  Raises UserError when a budget is too small for any plan.

    host_budget_bytes  for what does not live on the device; what is more goes to the disk, if the bandwidth
                       is that of a machine with one, and HostTooSmall is raised where that does not do
    """
    if policy not in get_args(Policy):
        raise UserError(f"no residency policy '{policy}'; the policies are {', '.join(get_args(Policy))}")
    least = smallest_budget(trace)
    if budget_bytes < least:
        raise UserError(too_small(budget_bytes, least))
    has_disk = bandwidth.has_disk
    search = _Search(trace, budget_bytes, bandwidth, keeps=policy == "auto", host_budget_bytes=host_budget_bytes)
    resident, timeline = search.nothing_resident() if policy == "cpu" else search.best()
    on_disk, waiting = search.away(resident)
    host_bytes = host_bytes_of(trace.chunks, resident, on_disk, has_disk, waiting)
    if host_budget_bytes is not None and host_bytes > host_budget_bytes:
        raise HostTooSmall(host_bytes, host_budget_bytes)
    copied = sum(c.slot_bytes for c in trace.chunks if c.trainable and c.index not in on_disk) if has_disk else 0
    busy_s, step_s = timeline.busy_s, timeline.step_s
    if has_disk:  # copies of what lives in memory are written beside all else
        busy_s = busy_s | {"disk": busy_s["disk"] + copied / bandwidth.disk_write}
        step_s = max(step_s, busy_s["disk"])
    return ResidencyPlan(
        policy=policy,
        budget_bytes=budget_bytes,
        moves=timeline.moves,
        start=timeline.start,
        resident=resident,
        device_updated=frozenset(c for c in resident if trace.chunks[c].trainable),
        device_bytes=timeline.device_bytes,
        host_bytes=host_bytes,
        to_device_bytes=timeline.to_device_bytes,
        to_host_bytes=timeline.to_host_bytes,
        step_s=step_s,
        busy_s=busy_s,
        on_disk=on_disk,
        disk_bytes=disk_bytes_of(trace.chunks, waiting) if has_disk else 0,
        disk_read_bytes=timeline.disk_read_bytes,
        disk_written_bytes=timeline.disk_written_bytes,
        durable_bytes=copied,
        waiting=waiting,
    )


def to_disk(chunks: Sequence[ChunkInfo], resident: frozenset[int], host_budget_bytes: int | None) -> frozenset[int]:
    """The chunks beside the resident ones that go to the disk, so that the host holds the others.

    What does not learn goes first, then the largest. Where the host cannot hold even what all of them leave there, all
    go. None: nothing has to.
    """
    if host_budget_bytes is None:
        return frozenset()
    beyond = host_bytes_of(chunks, resident, frozenset(), True) - host_budget_bytes
    outside = [chunk for chunk in chunks if chunk.index not in resident]
    saved = {c.index: c.slot_bytes for c in sorted(outside, key=lambda c: (c.trainable, -c.slot_bytes))}
    return frozenset(_as_few(saved, beyond)[0])


def to_wait(
    chunks: Sequence[ChunkInfo], resident: frozenset[int], on_disk: frozenset[int], host_budget_bytes: int | None
) -> frozenset[int]:
    """The chunks beside the resident ones whose gradients wait on the disk, so that the host holds what is left.

    As few bytes as do that; where none do, those that leave the least. None: nothing has to.
    """
    beyond = 0
    if host_budget_bytes is not None:
        beyond = host_bytes_of(chunks, resident, on_disk, True) - host_budget_bytes
    if beyond <= 0:
        return frozenset()
    may = sorted((c for c in chunks if c.index not in resident and c.wait_bytes), key=lambda c: -c.wait_bytes)
    best = beyond, 0, frozenset[int]()
    for largest in {chunk.wait_bytes for chunk in may}:  # which the places must hold
        saved = {chunk.index: chunk.grad_bytes for chunk in may if chunk.wait_bytes <= largest}
        found, still = _as_few(saved, beyond + WAITING_PLACES * largest)
        best = min(best, (max(still, 0), sum(saved[c] for c in found), frozenset(found)), key=lambda one: one[:2])
    return best[2]


def _as_few(saved: Mapping[int, int], beyond: int) -> tuple[list[int], int]:
    """The first of these, chunk -> bytes, that together save `beyond` bytes, and the bytes that are missing then."""
    found: list[int] = []
    for chunk, num_bytes in saved.items():
        if beyond > 0:
            beyond -= num_bytes
            found.append(chunk)
    for chunk in sorted(found, key=lambda c: saved[c]):  # the last one may have been larger than it had to be
        if saved[chunk] <= -beyond:
            beyond += saved[chunk]
            found.remove(chunk)
    return found, beyond


def host_bytes_of(
    chunks: Sequence[ChunkInfo],
    resident: frozenset[int],
    on_disk: frozenset[int],
    has_disk: bool,
    waiting: frozenset[int] = frozenset(),
) -> int:
    """Bytes of the host that chunks take at most, and places for the disk where there is one."""
    away = [chunk for chunk in chunks if chunk.index not in resident]
    if not has_disk:
        return sum(chunk.host_bytes for chunk in away)
    masters = sum(chunk.slot_bytes for chunk in away if chunk.index not in on_disk)
    gradients = sum(chunk.grad_bytes for chunk in away if chunk.index not in waiting)
    places = PLACES * max((chunk.slot_bytes for chunk in chunks), default=0)
    return masters + gradients + places + WAITING_PLACES * max((chunks[c].wait_bytes for c in waiting), default=0)


def disk_bytes_of(chunks: Sequence[ChunkInfo], waiting: frozenset[int]) -> int:
    """Bytes of the disk that two slots of each of these chunks take, and gradients of those that wait there."""
    return 2 * sum(c.slot_bytes for c in chunks) + sum(c.wait_bytes for c in chunks if c.index in waiting)


def _gib(num_bytes: float, up: bool = False) -> str:
    """With three digits behind the point; rounded up, so that a number given back is enough."""
    unit, name = (2**30, "GiB") if num_bytes >= 2**30 / 10 else (2**20, "MiB")
    return f"{-(-num_bytes * 1000 // unit) / 1000 if up else num_bytes / unit:.3f} {name}"


_Choice = tuple[frozenset[int], int]  # resident chunks, slack in chunks


class _Search:
    """Looks for the resident chunks and the slack that make the step shortest, by walking through the step of each."""

    GRID = 8  # sizes of a resident set that are tried before those around the best
    SLACKS = (0, 1, 2, 3, 4, 6, 8)  # in chunks of the largest size
    FEW = 12  # chunks: so few are tried one by one, in and out

    def __init__(
        self, trace: Trace, budget_bytes: int, bandwidth: Bandwidth, keeps: bool, host_budget_bytes: int | None
    ):
        self.trace, self.budget_bytes, self.bandwidth, self.keeps = trace, budget_bytes, bandwidth, keeps
        self.host_budget_bytes = host_budget_bytes
        self.lifetimes = Lifetimes(trace)
        self.largest_bytes = max((chunk.param_bytes for chunk in trace.chunks), default=0)
        self.walked: dict[tuple[frozenset[int], int], Timeline | None] = {}
        first = self.walk(frozenset(), 0)
        assert first is not None
        self.unit_s = first.step_s / 10_000 or 1.0

    def walk(self, resident: frozenset[int], slack: int) -> Timeline | None:
        """The step with these resident chunks and `slack` chunks' room for fetching ahead; None: it does not fit."""
        key = resident, slack
        if key not in self.walked:
            kept = keep(self.lifetimes, resident, self.budget_bytes, slack * self.largest_bytes)
            if kept is not None and not self.keeps:
                kept = frozenset(gap for gap in kept if gap.end == gap.start + 1)
            timeline = None
            if kept is not None:
                away = self.away(resident)
                timeline = run(self.lifetimes, resident, kept, self.budget_bytes, self.bandwidth, *away)
            self.walked[key] = timeline
        return self.walked[key]

    def host_bytes(self, resident: frozenset[int]) -> int:
        on_disk, waiting = self.away(resident)
        return host_bytes_of(self.trace.chunks, resident, on_disk, self.bandwidth.has_disk, waiting)

    def away(self, resident: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
        """The chunks that live on the disk, and those whose gradients wait there."""
        chunks, budget_bytes = self.trace.chunks, self.host_budget_bytes if self.bandwidth.has_disk else None
        on_disk = to_disk(chunks, resident, budget_bytes)
        return on_disk, to_wait(chunks, resident, on_disk, budget_bytes)

    def nothing_resident(self) -> tuple[frozenset[int], Timeline]:
        timeline = self.walk(frozenset(), 0)
        assert timeline is not None
        return frozenset(), timeline

    def best(self) -> tuple[frozenset[int], Timeline]:
        """Everything if it fits. Sizes on a grid, then around the best; the slack; of few chunks each in and out."""
        everything = frozenset(range(len(self.trace.chunks)))
        timeline = self.walk(everything, 0)
        if timeline is not None:
            return everything, timeline
        best: _Choice = frozenset(), 0
        for chunks in self._preferences():
            best = self._better(best, ((frozenset(chunks[:n]), s) for n in self._grid(len(chunks)) for s in (0, 2)))
            width = max(1, len(chunks) // self.GRID)
            while width := width // 2 if width > 1 else 0:
                best = self._better(best, self._around(best, chunks, width))
        best = self._better(best, ((best[0], s) for s in self.SLACKS))
        if len(self.trace.chunks) <= self.FEW:
            while (better := self._better(best, self._neighbours(best))) != best:
                best = better
        timeline = self.walk(*best)
        assert timeline is not None
        return best[0], timeline

    def _better(self, best: _Choice, tried: Iterable[_Choice]) -> _Choice:
        return min((best, *tried), key=lambda choice: self._cost(*choice))

    def _cost(self, resident: frozenset[int], slack: int) -> tuple[float, ...]:
        """Bytes that the host cannot hold; then the time, in steps too small to matter; then bytes."""
        timeline = self.walk(resident, slack)
        if timeline is None:
            return (float("inf"),)
        beyond = 0
        if self.host_budget_bytes is not None:
            beyond = max(0, self.host_bytes(resident) - self.host_budget_bytes)
        return beyond, round(timeline.step_s / self.unit_s), timeline.moved_bytes, timeline.step_s, len(resident)

    def _preferences(self) -> list[list[int]]:
        """Orders in which chunks become resident, each cut to those that fit together."""
        used = {c: place for place, needs in reversed(list(enumerate(self.lifetimes.needs))) for c in needs}
        by_use = sorted(used, key=lambda c: used[c])
        saved = dict.fromkeys(used, 0)
        for gap in self.lifetimes.gaps:
            saved[gap.chunk] += gap.cost_bytes
        size = {c: self.trace.chunks[c].param_bytes + self.trace.chunks[c].shard_bytes for c in used}
        by_gain = sorted(by_use, key=lambda c: -saved[c] / max(1, size[c]))
        orders = [by_use] if by_gain == by_use else [by_use, by_gain]
        return [self._fitting(order) for order in orders]

    def _fitting(self, chunks: list[int]) -> list[int]:
        room = self.budget_bytes - self.lifetimes.occupied(frozenset())
        fitting = []
        for chunk in chunks:
            info = self.trace.chunks[chunk]
            takes = [info.shard_bytes + (0 if chunk in needs else info.param_bytes) for needs in self.lifetimes.needs]
            if (room >= takes).all():
                room = room - takes
                fitting.append(chunk)
        return fitting

    def _grid(self, most: int) -> list[int]:
        return sorted({round(most * i / self.GRID) for i in range(self.GRID + 1)})

    def _around(self, best: _Choice, chunks: list[int], width: int) -> Iterator[_Choice]:
        resident, slack = best
        for n in (len(resident) - width, len(resident) + width):
            if 0 <= n <= len(chunks) and resident <= frozenset(chunks[: max(n, len(resident))]):
                yield frozenset(chunks[:n]), slack

    def _neighbours(self, best: _Choice) -> Iterator[_Choice]:
        resident, slack = best
        every = frozenset(range(len(self.trace.chunks)))
        for chunk in every:
            yield resident ^ {chunk}, slack
        for out in resident:
            for new in every - resident:
                yield resident ^ {out, new}, slack
        for other in self.SLACKS:
            yield resident, other
