"""Traces drawn at random or shaped like models, and three judges of a residency plan that share nothing with it.

replay    executes the moves of a plan over several steps and says what it moved and held
least     fewest bytes that any plan moves, by dynamic programming over all sets of chunks on the device
lru       what a runtime moves that lets go of what was used longest ago, and knows nothing of the future
"""

from dataclasses import dataclass
from itertools import chain, combinations

from hypothesis import strategies as st

from core.gemini.residency import ResidencyPlan
from core.gemini.trace import ChunkInfo, Moment, Trace


@st.composite
def traces(draw: st.DrawFn, most_chunks: int = 6, uniform: bool = False) -> Trace:
    """Any order of use; parents in use beside their children; frozen, unused and shared chunks; microbatches."""
    num_chunks = draw(st.integers(1, most_chunks))
    size = st.just(4) if uniform else st.integers(0, 8)
    chunks = tuple(
        ChunkInfo(i, draw(size), *((draw(size), draw(st.integers(0, 9))) if learns else (0, 0)), learns)
        for i, learns in enumerate(draw(st.lists(st.booleans(), min_size=num_chunks, max_size=num_chunks)))
    )
    learning = [c.index for c in chunks if c.trainable]
    subsets = st.lists(st.integers(0, num_chunks - 1), min_size=0, max_size=min(2, num_chunks), unique=True)
    moments: list[Moment] = []

    def add(kind, used, writes=()):
        other = draw(st.integers(0, 10))
        seconds = draw(st.sampled_from([0.0, 0.5, 3.0]))
        moments.append(Moment(kind, str(len(moments)), tuple(used), other, seconds, tuple(writes)))

    for _ in range(draw(st.integers(1, 2))):
        for used in draw(st.lists(subsets, max_size=6)):
            add("forward", used)
        backward = draw(st.lists(subsets, max_size=6))
        last = {c: i for i, used in enumerate(backward) for c in used if c in learning}
        reduced: set[int] = set()  # nothing reads these any more in this backward
        for i, used in enumerate(backward):
            add("backward", used, [c for c in used if c in learning and draw(st.booleans())])
            for c in used:
                if last.get(c) == i:  # what comes later in this backward may be in use already
                    reduced.add(c)
                    add("reduce", [c, *draw(st.sampled_from([[], [o for o in backward[-1][:1] if o not in reduced]]))])
        for c in learning:
            if c not in last:
                add("reduce", [c])
    for c in draw(st.permutations(learning)):
        add("update", [c])
    return Trace(tuple(moments), chunks)


def transformer(num_blocks: int = 12, activation_bytes: int = 0, block_seconds: float = 1.0, frozen: int = 0) -> Trace:
    """Blocks of one chunk of 2 bytes x 50, used forwards and then in reverse; each adds to the activations."""
    chunks = tuple(ChunkInfo(i, 100, *((0, 0, False) if i < frozen else (200, 400, True))) for i in range(num_blocks))
    moments = [Moment("forward", f"{i}", (i,), (i + 1) * activation_bytes, block_seconds) for i in range(num_blocks)]
    for i in reversed(range(num_blocks)):
        writes = (i,) if chunks[i].trainable else ()
        moments.append(Moment("backward", f"{i}", (i,), (i + 1) * activation_bytes, 2 * block_seconds, writes))
        moments += [Moment("reduce", f"{i}", writes, i * activation_bytes, 0.0)] if writes else []
    moments += [Moment("update", f"{i}", (i,), 0, 0.0) for i in range(frozen, num_blocks)]
    return Trace(tuple(moments), chunks)


@dataclass
class Replayed:
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    num_evictions: int = 0
    device_bytes: tuple[int, ...] = ()


class Replay:
    """Executes a plan as a runtime would, and holds it to what a runtime needs.

    Every assertion is a rule: a buffer is filled once and freed once, a moment finds whole parameters of the present
    step in the buffers that it takes, no gradient is lost, the budget holds.
    """

    def __init__(self, trace: Trace, plan: ResidencyPlan):
        self.trace, self.plan = trace, plan
        self.buffers = dict.fromkeys(plan.start, "parameters")  # chunk -> what its buffer holds
        self.host = {c.index: "parameters" for c in trace.chunks if c.index not in plan.resident}
        self.found = Replayed()

    def step(self) -> Replayed:
        self.found = found = Replayed()
        levels = []
        for k, moment in enumerate(self.trace.moments):
            levels.append(self._level(moment))
            for move in self.plan.moves[k]:
                self._move(*move)
                levels[-1] = self._level(moment)
                if move.kind in ("fetch", "prefetch"):  # what goes has gone before
                    assert levels[-1] <= self.plan.budget_bytes, (k, moment, move, levels[-1])
            assert levels[-1] <= self.plan.budget_bytes, (k, moment, levels[-1])
            self._run(moment)
        for move in self.plan.moves[len(self.trace.moments)]:
            self._move(*move)
        assert set(self.buffers) == set(self.plan.start)
        assert set(self.buffers.values()) <= {"parameters"}
        found.device_bytes = tuple(levels)
        return found

    def _move(self, kind: str, chunk: int) -> None:
        size = self.trace.chunks[chunk].param_bytes
        assert chunk not in self.plan.resident
        if kind in ("fetch", "prefetch"):
            assert chunk not in self.buffers
            assert self.host[chunk] != "old parameters", "a fetch before the update"
            self.buffers[chunk] = self.host[chunk]
            self.found.to_device_bytes += size
        elif kind == "evict":
            holds = self.buffers.pop(chunk)
            assert holds in ("parameters", "gradients")
            if holds == "gradients":
                self.host[chunk] = holds
                self.found.to_host_bytes += size
            self.found.num_evictions += 1
        else:
            assert kind == "release"
            assert self.buffers.pop(chunk) == "reduced"

    def _level(self, moment: Moment) -> int:
        infos = self.trace.chunks
        shards = sum(infos[c].master_bytes + infos[c].optim_bytes for c in self.plan.resident)
        return moment.other_bytes + shards + sum(infos[c].param_bytes for c in self.buffers)

    def _run(self, moment: Moment) -> None:
        chunks = set(moment.chunks) | set(moment.writes)
        if moment.kind == "update":
            (chunk,) = chunks
            if chunk in self.plan.resident:
                assert chunk in self.buffers
                self.buffers[chunk] = "parameters"
            else:
                assert self.host[chunk] == "old parameters"
                self.host[chunk] = "parameters"
            return
        for chunk in chunks:
            assert self.buffers[chunk] in ("parameters", "gradients"), (moment, self.buffers)
        for chunk in moment.writes:
            self.buffers[chunk] = "gradients"
        if moment.kind == "reduce":
            chunk = moment.chunks[0]
            if chunk in self.plan.resident:
                self.buffers[chunk] = "parameters"  # under accumulation filled again from the masters beside it
            else:
                self.buffers[chunk] = "reduced"
                self.found.to_host_bytes += self.trace.chunks[chunk].param_bytes
                self.host[chunk] = "parameters" if self._is_reduced_again(chunk, moment) else "old parameters"

    def _is_reduced_again(self, chunk: int, moment: Moment) -> bool:
        k = next(i for i, m in enumerate(self.trace.moments) if m is moment)
        return any(m.kind == "reduce" and chunk == m.chunks[0] for m in self.trace.moments[k + 1 :])


def replay(trace: Trace, plan: ResidencyPlan, num_steps: int = 3) -> Replayed:
    """The last of several steps, all of which must be alike."""
    runtime = Replay(trace, plan)
    first, *others = [runtime.step() for _ in range(num_steps)]
    assert all(other == first for other in others)
    return first


def subsets(items) -> list[frozenset[int]]:
    items = sorted(items)
    return [frozenset(s) for s in chain.from_iterable(combinations(items, n) for n in range(len(items) + 1))]


def least(trace: Trace, budget_bytes: int, resident: frozenset[int]) -> float:
    """Fewest bytes that a step moves with these resident chunks, whatever stays when; infinite if they do not fit."""
    infos = trace.chunks
    size = [info.param_bytes for info in infos]
    always = sum(size[c] + infos[c].shard_bytes for c in resident)
    updated = {c for m in trace.moments if m.kind == "update" for c in m.chunks}
    # Only what does not learn can be on the device both before the first moment and after the last with its values.
    stay = [c for c in range(len(infos)) if c not in resident | updated]
    best = float("inf")
    for start in subsets(stay):
        held: dict[frozenset[int], float] = {start: 0.0}
        holds = dict.fromkeys(range(len(infos)), "parameters")
        for moment in trace.moments:
            needs = set() if moment.kind == "update" else (set(moment.chunks) | set(moment.writes)) - resident
            after: dict[frozenset[int], float] = {}
            for before, cost in held.items():
                for kept in subsets(before - needs):
                    now = kept | needs
                    if moment.other_bytes + always + sum(size[c] for c in now) > budget_bytes:
                        continue
                    written = sum(size[c] for c in before - now if holds[c] == "gradients")
                    moved = cost + written + sum(size[c] for c in now - before)
                    if moment.kind == "reduce" and moment.chunks[0] in needs:
                        moved += size[moment.chunks[0]]
                        now = now - {moment.chunks[0]}
                    after[frozenset(now)] = min(moved, after.get(frozenset(now), float("inf")))
            for c in moment.writes:
                holds[c] = "gradients"
            if moment.kind == "reduce":
                holds[moment.chunks[0]] = "parameters"
            held = after
        best = min([best, *(cost for end, cost in held.items() if start <= end)])
    return best


def lru(trace: Trace, budget_bytes: int, num_steps: int = 3) -> int:
    """Bytes that the last step moves when room is made by letting go of what was used longest ago.

    What was written goes to the host whenever it goes, until it is reduced: the rule of `least` and of `Replay`.
    """
    infos = trace.chunks
    recency: dict[int, None] = {}  # chunks that are there, least recently used first
    written: set[int] = set()  # those with gradients that are not reduced
    moved = 0
    for _ in range(num_steps):
        moved = 0
        for moment in trace.moments:
            needs = set() if moment.kind == "update" else set(moment.chunks) | set(moment.writes)
            for chunk in needs:
                if chunk not in recency:
                    moved += infos[chunk].param_bytes
                recency.pop(chunk, None)
                recency[chunk] = None
            written.update(moment.writes)
            for chunk in list(recency):
                if moment.other_bytes + sum(infos[c].param_bytes for c in recency) <= budget_bytes:
                    break
                assert chunk not in needs
                del recency[chunk]
                moved += infos[chunk].param_bytes if chunk in written else 0
            if moment.kind == "reduce" and needs:
                del recency[moment.chunks[0]]
                written.discard(moment.chunks[0])
                moved += infos[moment.chunks[0]].param_bytes
    return moved
