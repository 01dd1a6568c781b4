"""Stages, layouts and recomputation together: how a chain of blocks is spread over a cluster's ranks.

    plans = plan_stages(trace_graph(model, microbatch), cluster, microbatches=16, state=2.0)
    print(plans[0])             # 4 stages of 2 x 4 ranks, blocks 9 9 9 9, 1.23 s a step, 61.2 GiB

1. Between operators: with p stages each has ranks / p ranks, as a mesh of one or two axes. The solver
   (`core.auto.solve`) spreads the whole module over such a mesh once, without a limit of memory and within p times a
   device's; seconds and bytes of each block are read off its plan.
2. Blocks are dealt out to stages by dynamic programming, so that the slowest stage takes the least (as Zheng et al.
   2022, Alpa, section 5.2, does between operators); a stage's time counts what it has to compute again, at least, to
   fit with as many microbatches in flight as its place in the schedule holds.
3. Each stage gets the fastest segments of `core.auto.checkpointing` in the memory that is left.
4. The step runs on a clock by the schedule's actions, with messages between stages. Gradients are reduced once a step.

Plans that another one beats in both time and memory are left out. What the solver does not know
(docs/auto_solver.md) is not known here; nor are stages of unlike meshes, and skips over stages: modules whose blocks
read what blocks further ahead made (encoders beside decoders, U-Nets) are planned as one stage that keeps everything.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise

import numpy as np

from core.auto.checkpointing import Checkpointing, frontier
from core.auto.costs import Link, seconds_of
from core.auto.formulate import Formulation, formulate
from core.auto.machines import Cluster
from core.auto.simulate import simulate as count
from core.auto.solve import DoesNotFit, Plan, solve
from core.auto.specs import Spec
from core.auto.strategies import divisors
from core.config import UserError, in_words
from core.parallel.pipeline.schedule import SCHEDULES, Action, Kind, ScheduleName, schedule, span
from core.placement.stages import split_by_cost, stage_ranges
from core.trace.chain import textbook_chain
from core.trace.graph import Graph, Value, block_of
from core.trace.machine import Speed
from core.trace.segments import Segments

SLOTS = 120
"""Of the checkpoint solver, for stages of few blocks each."""
WHOLE: tuple[ScheduleName, ...] = ("1f1b", "gpipe")
"""Schedules with one stage a rank and whole backwards."""


@dataclass(frozen=True)
class Stage:
    """blocks of the chain, what they recompute, seconds of a microbatch, and the bytes of the fullest rank.

    again_s  of the backward's seconds, what is computed again
    """

    blocks: range
    segments: Segments
    forward_s: float
    backward_s: float
    again_s: float
    once_s: float
    memory_bytes: int


@dataclass(frozen=True)
class StagedPlan:
    """A way to run a step.

    mesh        ranks of a stage, by axes
    layouts     the solver's plan of the whole module on that mesh, with its optimality gap; `formulation` reads it
    parameters  their names
    """

    stages: tuple[Stage, ...]
    mesh: tuple[int, ...]
    microbatches: int
    schedule: ScheduleName
    step_s: float
    layouts: Plan
    formulation: Formulation
    parameters: tuple[str, ...]

    @property
    def memory_bytes(self) -> int:
        return max(stage.memory_bytes for stage in self.stages)

    def beats(self, other: "StagedPlan") -> bool:
        """Whether it is no worse in time and memory, and better in one."""
        mine, others = (self.step_s, self.memory_bytes), (other.step_s, other.memory_bytes)
        return mine != others and all(one <= another for one, another in zip(mine, others))

    def __str__(self) -> str:
        blocks = " ".join(str(len(stage.blocks)) for stage in self.stages)
        num, by = len(self.stages), " x ".join(map(str, self.mesh))
        return (
            f"{num} stage{'s' * (num > 1)} of {by} ranks, blocks {blocks}, {self.step_s:.4g} s a step, "
            f"{in_words(self.memory_bytes)}; layouts within {100 * self.layouts.gap:.4f} % of the best"
        )


def plan_stages(
    graph: Graph,
    cluster: Cluster,
    microbatches: int,
    *,
    speed: Speed,
    state: float = 0.0,
    schedule: ScheduleName = "1f1b",
    stages: Sequence[int] | None = None,
    time_limit_s: float = 20.0,
) -> list[StagedPlan]:
    """The plans that none beats in time and memory, the fastest first.

    graph         a training step on one microbatch of all the ranks of a stage
    microbatches  of a step
    speed         of a device
    state         bytes that the optimizer keeps by byte of a parameter
    stages        numbers of stages that are tried; by default all that divide the ranks
    time_limit_s  of the solver, for each mesh

    Raises UserError for a module without a list of blocks, for stages of one whose blocks read what blocks further
    ahead made, for a schedule that is not of `WHOLE`, and where no plan fits, with what the nearest one needs.
    """
    if schedule not in WHOLE:
        raise UserError(f"schedule={schedule}: stages are planned for {' and '.join(WHOLE)}; use one of them")
    if microbatches < 1:
        raise UserError(f"microbatches={microbatches}; give a positive number")
    chain = Chain.alike_or_not(graph)
    if chain.skip is not None and any(p > 1 for p in stages or ()):
        raise UserError(chain.skip)
    tried = [p for p in stages or divisors(cluster.ranks) if p <= (1 if chain.skip else chain.count)]
    wrong = [p for p in tried if p < 1 or cluster.ranks % p]
    if wrong or not tried:
        given = wrong[0] if wrong else min(stages or (1,))
        raise UserError(
            f"{given} stages of {chain.count} blocks on {cluster.ranks} ranks; give divisors of the ranks, at most as "
            "many as there are blocks"
        )
    found: list[StagedPlan] = []
    least: int | None = None
    for num_stages in tried:
        for mesh in _meshes(cluster.ranks // num_stages, cluster.ranks_per_machine):
            links = _links(cluster, mesh)
            formulation = formulate(graph, mesh, links, speed, state=state)
            free = solve(formulation.problem, time_limit_s=time_limit_s)
            ways = [free]
            if free.peak_bytes > num_stages * cluster.memory_bytes:
                with suppress(DoesNotFit):
                    ways.append(
                        solve(formulation.problem, num_stages * cluster.memory_bytes, time_limit_s=time_limit_s)
                    )
            for layouts in ways:
                spread = _Spread(chain, formulation, layouts, cluster, num_stages, microbatches, schedule)
                if (plan := spread.plan()) is not None:
                    found.append(plan)
                else:
                    least = min(spread.least_bytes, spread.least_bytes if least is None else least)
    if not found:
        needs = "" if least is None else f"; {in_words(least)} of a device is the least that was found"
        raise UserError(
            f"no plan fits {in_words(cluster.memory_bytes)} on {cluster.ranks} ranks with {microbatches} microbatches"
            f"{needs}: take more ranks or smaller microbatches"
        )
    front = [plan for plan in found if not any(other.beats(plan) for other in found)]
    unique = {(plan.step_s, plan.memory_bytes): plan for plan in reversed(front)}
    return sorted(unique.values(), key=lambda plan: plan.step_s)


def _meshes(ranks: int, per_machine: int) -> Iterator[tuple[int, ...]]:
    """One axis, and two with the inner one in a machine."""
    yield (ranks,)
    for inner in (2, 4, 8, 16):
        if ranks % inner == 0 and ranks > inner and inner <= per_machine:
            yield ranks // inner, inner


def _links(cluster: Cluster, mesh: tuple[int, ...]) -> tuple[Link, ...]:
    outer, *inner = mesh
    return cluster.link(math.prod(inner), outer), *(cluster.link(1, ranks) for ranks in inner)


class Chain:
    """The places of a graph's operators in its chain: 0 in front of the blocks, 1 to `count`, `count` + 1 behind.

    blocks  (list, number), in the order in which their forwards begin
    alike   blocks of lists that have alike ones; else of all lists that have several

    Raises UserError for a module without.
    """

    def __init__(self, graph: Graph, alike: bool = True):
        self.graph = graph
        self.blocks = self._blocks(alike)
        self.count = len(self.blocks)
        self.places = self._places({block: n for n, block in enumerate(self.blocks, 1)})
        self.forward_end = max((node.index for node in graph.nodes if node.kind == "forward"), default=0)

    def _blocks(self, only_alike: bool) -> list[tuple[str, str]]:
        kinds: dict[tuple[str, int], set[str]] = {}
        order: dict[tuple[str, str], None] = {}
        for node, alike in zip(self.graph.nodes, self.graph.alike, strict=True):
            if alike is not None and node.kind == "forward" and (block := block_of(node.module)) is not None:
                kinds.setdefault((block[0], alike.kind if only_alike else 0), set()).add(block[1])
                order.setdefault(block[:2])
        lists = {name for (name, _), numbers in kinds.items() if len(numbers) > 1}
        found = [block for block in order if block[0] in lists]
        if len(found) < 2:
            which = "alike blocks" if only_alike else "blocks"
            raise UserError(f"the module has no list of {which}, so it has no stages; plan its layouts alone")
        return found

    def _places(self, number: dict[tuple[str, str], int]) -> list[int]:
        """Of each operator. What stands between two blocks belongs to the one before."""
        places: list[int] = []
        of_module: dict[str, int] = {}
        now = 0
        last = self.count
        for node in self.graph.nodes:
            block = block_of(node.module)
            place = None if block is None else number.get(block[:2])
            if node.kind == "forward":
                if place is None:
                    place = last + 1 if now == last and self._is_behind(node.module, number) else now
                now = max(now, min(place, last))
                of_module[node.module] = place
            elif place is None:
                source = None if node.source is None else places[node.source]
                place = of_module.get(node.module, places[-1]) if source is None else source
            places.append(place)
        return places

    def _is_behind(self, module: str, number: dict[tuple[str, str], int]) -> bool:
        block = block_of(module)
        return block is None or block[:2] not in number

    @classmethod
    def alike_or_not(cls, graph: Graph) -> "Chain":
        """The chain of alike blocks, without those that of all."""
        try:
            return cls(graph)
        except UserError:
            return cls(graph, alike=False)

    @cached_property
    def skip(self) -> str | None:
        """A line that says where a block reads what another one than the block before it has made; None: nowhere."""
        for node in self.graph.nodes:
            if node.kind != "forward":
                continue
            for value in node.inputs:
                if value.node is None or self.graph.nodes[value.node].kind != "forward":
                    continue
                made, read = self.places[value.node], self.places[node.index]
                if 0 < made < read - 1:
                    return (
                        f"{node.module or 'the module'} reads what {self.graph.nodes[value.node].module} made, "
                        f"{read - made} blocks ahead of it; what stages of such a module take is not known, so plan one"
                    )
        return None

    @cached_property
    def handed(self) -> list[list[Value]]:
        """Behind each place but the last, what the next one reads of it."""
        found: list[dict[int, Value]] = [{} for _ in range(self.count + 1)]
        for node in self.graph.nodes:
            for value in node.inputs if node.kind == "forward" else ():
                if value.node is not None and self.graph.nodes[value.node].kind == "forward":
                    made, read = self.places[value.node], self.places[node.index]
                    if made == read - 1 and made > 0:
                        found[made][value.index] = value
        return [list(values.values()) for values in found]


class _Spread:
    """A chain under one plan of layouts, on stages of one mesh."""

    def __init__(
        self,
        chain: Chain,
        formulation: Formulation,
        layouts: Plan,
        cluster: Cluster,
        num_stages: int,
        microbatches: int,
        schedule: ScheduleName,
    ):
        self.chain, self.formulation, self.layouts, self.cluster = chain, formulation, layouts, cluster
        self.num_stages, self.microbatches = num_stages, microbatches
        self.schedule: ScheduleName = schedule
        self.least_bytes = 0
        graph, whole = chain.graph, formulation.whole
        self.choice = formulation.folded.unfold(layouts.choice)
        self.first = len(graph.inputs)
        size = chain.count + 2
        self.forward_s, self.backward_s, self.once_s = np.zeros(size), np.zeros(size), np.zeros(size)
        account = count(whole, self.choice)
        self.of_input = self._places_of_inputs()
        for node, seconds in enumerate(account.node_s):
            self._add_seconds(node, seconds)
        for edge, seconds in zip(whole.edges, account.edge_s, strict=True):
            self._add_seconds(edge.target, seconds)
        self._add_memory()

    def _places_of_inputs(self) -> list[set[int]]:
        """Of each input, the places that read it: a tied weight is in several."""
        found = []
        for value in self.chain.graph.inputs.values():
            found.append({self.chain.places[user] for user in value.users} or {0})
        return found

    def _places_of(self, node: int) -> set[int]:
        if node < self.first:
            return self.of_input[node]
        operator = node - self.first
        return {self.chain.places[operator] if operator < len(self.chain.places) else self.chain.count + 1}

    def _add_seconds(self, node: int, seconds: float) -> None:
        """An edge to a parameter is its gradient's reduction, which waits for all microbatches."""
        if not seconds:
            return
        if node < self.first:
            self.once_s[max(self.of_input[node])] += seconds
            return
        (place,) = self._places_of(node)
        operator = node - self.first
        is_forward = operator < len(self.chain.places) and self.chain.graph.nodes[operator].kind == "forward"
        (self.forward_s if is_forward else self.backward_s)[place] += seconds

    def _add_memory(self) -> None:
        """Bytes by place: there from first to last, kept by a microbatch, and alive at each point.

        Gradients, which several microbatches add up, are there from first to last.
        """
        whole, size = self.formulation.whole, self.chain.count + 2
        end = len(whole.points) - 1
        self.resident = np.zeros(size, np.int64)
        self.steps = np.zeros((size, end + 2), np.int64)
        for held in whole.held:
            num_bytes = int(held.bytes_[tuple(self.choice[node] for node in held.of)])
            stays = held.of[-1] < self.first and (len(held.of) == 1 or self.microbatches > 1)
            for place in self._places_of(held.of[-1]):
                if stays:
                    self.resident[place] += num_bytes
                else:
                    self.steps[place, held.first] += num_bytes
                    self.steps[place, held.last + 1] -= num_bytes
        self.alive = self.steps.cumsum(1)
        self.kept = self.alive[:, self.chain.forward_end].copy()

    # --- a stage ------------------------------------------------------------------------------------------------------

    def _of_stage(self, stage: int, start: int, stop: int) -> range:
        """Places of a stage that has the blocks from `start` to before `stop`, counted from 0."""
        return range(start + 1 if stage else 0, stop + 2 if stop == self.chain.count else stop + 1)

    def _in_flight(self, stage: int) -> int:
        return SCHEDULES[self.schedule].in_flight(self.num_stages, stage, self.microbatches, 2)

    def _left(self, places: range) -> int:
        return self.cluster.memory_bytes - int(self.resident[places.start : places.stop].sum())

    def _stage_s(self, stage: int, start: int, stop: int) -> float:
        """Seconds of a microbatch, with what has to be computed again at least; infinity where nothing fits."""
        places = self._of_stage(stage, start, stop)
        cut = slice(places.start, places.stop)
        seconds = float(self.forward_s[cut].sum() + self.backward_s[cut].sum())
        flying = self._in_flight(stage)
        kept = self.kept[cut].sum()
        peak = int(self.alive[cut].sum(0).max())
        over = peak + (flying - 1) * int(kept) - self._left(places)
        if over <= 0:
            return seconds
        blocks = slice(start + 1, stop + 1)
        inputs = self._input_bytes(start, stop)
        most = flying * int((self.kept[blocks] - inputs).sum()) - int(self.kept[blocks].max(initial=0))
        if over > most:
            return float("inf")
        return seconds + float(self.forward_s[blocks].sum()) * over / most

    def _input_bytes(self, start: int, stop: int) -> np.ndarray:
        return np.array([min(self._handed_bytes(n), int(self.kept[n + 1])) for n in range(start, stop)])

    def _handed_bytes(self, place: int) -> int:
        """Of a rank, what a place hands on to the next one; in front of the blocks as much as the first one does."""
        return self._handed[max(place, 1)]

    @cached_property
    def _handed(self) -> list[int]:
        specs, machine = self._specs, self.formulation.machine
        return [sum(machine.num_bytes(specs[v.index], v) for v in values) for values in self.chain.handed]

    @cached_property
    def _specs(self) -> dict[int, Spec]:
        """Of each value how the plan has it."""
        named = self.formulation.specs(self.layouts.choice)
        found: dict[int, Spec] = {}
        for node in self.chain.graph.nodes:
            found.update((value.index, spec) for value, spec in zip(node.outputs, named[node.name]))
        return found

    def _stage(self, stage: int, start: int, stop: int) -> Stage | None:
        """The stage with the fastest segments that fit; None where none do."""
        places = self._of_stage(stage, start, stop)
        cut, flying = slice(places.start, places.stop), self._in_flight(stage)
        resident = int(self.resident[cut].sum())
        forward_s, backward_s = float(self.forward_s[cut].sum()), float(self.backward_s[cut].sum())
        once_s = float(self.once_s[cut].sum())
        ends = [place for place in places if not start < place <= stop]
        beside = sum(int(self.kept[place]) for place in ends)
        whole = resident + int(self.alive[cut].sum(0).max()) + (flying - 1) * int(self.kept[cut].sum())
        blocks = range(start, stop)
        if whole <= self.cluster.memory_bytes:
            return Stage(blocks, (len(blocks),), forward_s, backward_s, 0.0, once_s, whole)
        least: int | None = None
        if self.chain.skip is not None:  # segments do not keep what is read far behind them
            self.least_bytes = max(self.least_bytes, whole)
            return None
        for way in reversed(self._frontier(start, stop)):
            needs = resident + flying * beside + (flying - 1) * way.step.forward_bytes + way.peak_bytes
            if needs <= self.cluster.memory_bytes:
                again = way.step.again_s
                return Stage(blocks, way.segments, forward_s, backward_s + again, again, once_s, needs)
            least = needs
        self.least_bytes = max(self.least_bytes, least or whole)
        return None

    def _frontier(self, start: int, stop: int) -> list[Checkpointing]:
        """Segments of the stage's blocks: what runs beside what is kept is taken from each block's own points."""
        inputs = self._input_bytes(start, stop).tolist()
        kept, forward_over, backward_over = [], [], []
        for block in range(start + 1, stop + 1):
            own = self.alive[block]
            most = int(own[: self.chain.forward_end + 1].max())
            kept.append(int(self.kept[block]))
            forward_over.append(most - int(self.kept[block]))
            backward_over.append(max(0, int(own[self.chain.forward_end + 1 :].max(initial=0)) - int(self.kept[block])))
        blocks = slice(start + 1, stop + 1)
        seconds = [self.forward_s[blocks].tolist(), self.backward_s[blocks].tolist()]
        activations = [*inputs, self._handed_bytes(stop) if stop < self.chain.count else inputs[-1]]
        return _frontier_of(
            tuple(activations), tuple(kept), *map(tuple, seconds), tuple(forward_over), tuple(backward_over)
        )

    # --- all of them --------------------------------------------------------------------------------------------------

    def plan(self) -> StagedPlan | None:
        """The step with its stages; None where no deal of the blocks fits."""
        ranges = _dealt(self.chain.count, self.num_stages, self._stage_s)
        if ranges is None:  # what even stages need says by how much
            ranges = stage_ranges(split_by_cost(self.chain.count, self.num_stages))
        found = [self._stage(n, blocks.start, blocks.stop) for n, blocks in enumerate(ranges)]
        stages = tuple(stage for stage in found if stage is not None)
        if len(stages) < len(found):
            return None
        step_s = self._clock(stages) + max(stage.once_s for stage in stages)
        return StagedPlan(
            stages, self.formulation.machine.sizes, self.microbatches, self.schedule, step_s, self.layouts,
            self.formulation, tuple(n for n, v in self.chain.graph.inputs.items() if v.storage.kind == "parameters"),
        )  # fmt: skip

    def _clock(self, stages: tuple[Stage, ...]) -> float:
        def seconds(action: Action) -> float:
            stage = stages[action.stage]
            return stage.forward_s if action.kind is Kind.FORWARD else stage.backward_s

        link = self.cluster.link(self.cluster.ranks // self.num_stages, self.num_stages)
        largest = max((self._handed_bytes(stage.blocks.stop) for stage in stages[:-1]), default=0)
        message = seconds_of("send", largest, self.num_stages, link)
        return span(schedule(self.schedule, self.num_stages, self.microbatches), seconds, message)


@lru_cache(maxsize=512)
def _frontier_of(*facts: tuple) -> list[Checkpointing]:
    return frontier(textbook_chain(*facts), SLOTS)


def _dealt(count: int, num_stages: int, seconds: Callable[[int, int, int], float]) -> list[range] | None:
    """The deal of blocks whose slowest stage takes the least, among equals the evenest; None where all are infinite."""
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, (0,))}
    for stage in range(num_stages):
        following: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        stops = (count,) if stage == num_stages - 1 else range(stage + 1, count - (num_stages - 1 - stage) + 1)
        for stop in stops:
            for start, (slowest, squares, cuts) in best.items():
                if start >= stop:
                    continue
                one = seconds(stage, start, stop)
                candidate = max(slowest, one), squares + one * one, (*cuts, stop)
                if one < float("inf") and (stop not in following or candidate < following[stop]):
                    following[stop] = candidate
        best = following
    return [range(*pair) for pair in pairwise(best[count][2])] if count in best else None
