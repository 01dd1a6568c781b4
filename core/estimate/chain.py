"""What a model's blocks cost, one by one: the chain (`core.trace.chain`) that segments are chosen for.

Steps of the run's run on tensors without memory, as `core.estimate.step` runs them: one in which every block is a
segment of its own, so that it keeps its input and runs again, one in which all blocks keep everything, one for each
kind of operators whose results they can keep, and one for each way in which activations can wait elsewhere. Marks
where blocks begin and end, in both directions, cut them into
sections, and of these come the levels and peaks of each block, whatever it is: bytes of its own tensors, of the
gradients that it makes, of buckets and messages between.

Blocks before and behind the chain that a forward calls several times (a stack that runs once a template, layers that
share their weights) are left out of it: each of their calls keeps its input and runs again, as in mode full.
"""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate, groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.estimate.step import StepAccount, make_state, traced, update, without_memory
from core.mesh import MeshConfig, build_mesh, mesh_shape
from core.optim.average import WeightAverage, unbiased
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.parallel_model import ParallelModel
from core.parallel.plan import blocks_of
from core.parallel.recompute_chain import RecomputedChain, chain_of
from core.parallel.results import OPERATORS
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan
from core.runtime import pretended
from core.trace.account import plain_tensors
from core.trace.alike import Label
from core.trace.chain import Chain, ChainBlock, Kept, Line
from core.trace.machine import Speed
from core.trace.segments import Away, Form, Lean, Results, Segments


def estimate_chain(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    num_microbatches: int = 1,
    lines: Mapping[Form, Line] | None = None,
    *,
    averaged: bool = False,
) -> Chain:
    """The chain of a model's blocks in a step of a run in mode budget; its arguments are those of `estimate_step`.

    lines     of copies to where activations may wait; without any nothing waits elsewhere
    averaged  whether a moving average of the weights is on the device, too

    The levels are of the whole device: parameters, gradients, the optimizer's state. The model is left as it was.

    Raises UserError for what `parallelize` refuses, for a model without blocks, and where its forward does not call
    those that it calls once one after another.
    """
    blocks = blocks_of(model)
    if not blocks:
        raise UserError("recompute.mode=budget: the model has no list of blocks that could be computed again")
    single: Segments = ((1,),) * len(blocks)
    given = replace(model_plan(plan), recompute=single)
    with pretended(mesh_shape(mesh).size()):
        built = build_mesh(mesh, "cpu")
        with traced(built, speed) as account:
            try:
                spread = parallelize(without_memory(copy.deepcopy(model)), built, parallel, given)
                state = build_optimizer(optimizer or OptimConfig(), spread.masters)
                make_state(account, spread, state)
                averages: list[WeightAverage] = []  # which only has to be there
                if averaged:
                    averages.append(WeightAverage(spread.masters, unbiased(0.5), empty_like=spread.empty_like))
                chain = chain_of(spread.model)
                few, own = min(num_microbatches, 2), range(len(blocks))

                def steps(item: int | Lean | Away | None = None) -> _Steps:
                    """With each block of the chain so; by default each runs again from its own input."""
                    nonlocal own
                    behind = len(blocks) - own.stop
                    chain.follow(single if item is None else (*single[: own.start], item, *single[:behind]))
                    found = _steps_of(account, spread, chain, few, loss)
                    if item is None:
                        own = _called_once(found, len(blocks))
                    found = found.of_blocks(own)
                    found.least = _rest(account, spread, state, found)
                    return found

                again = steps()
                whole, lean = steps(len(own)), dict[Results, _Steps]()
                if not parallel.compile:  # of which no part runs again alone
                    products = steps(Lean(len(own), "products"))
                    for keeps in _fewer(chain.kept):
                        lean[keeps] = steps(Lean(len(own), keeps))
                    if chain.kept:
                        lean["products"] = products
                away = dict[Form, _Steps]((form, steps(Away(len(own), form))) for form in _traced_forms(lines))
                averages.clear()
            except RuntimeError as error:
                said = next(iter(str(error).splitlines()), "")
                raise UserError(
                    f"recompute.mode=budget: this model's step cannot be foreseen without values "
                    f"({type(error).__name__}: {said}); use --recompute.mode full, sqrt or recursive"
                ) from error
    found = _chain(again, whole, lean, away, len(own))
    return replace(
        _with_lines(found, lines or {}), single=parallel.zero == 3, ahead=own.start, behind=len(blocks) - own.stop
    )


def _traced_forms(lines: Mapping[Form, Line] | None) -> list[Form]:
    """One for all places, where a device's bytes are the same; the line of what is compressed is None."""
    if lines is None:
        return []
    return ["host", "compressed"] if lines else ["compressed"]


def _with_lines(chain: Chain, lines: Mapping[Form, Line]) -> Chain:
    """The chain with a way for each place to which there is a line, as long as its copies take."""

    def ways(of: ChainBlock) -> dict[Form, Kept]:
        found: dict[Form, Kept] = {}
        for form, how in of.away.items():
            if how.num_bytes - how.away < of.whole.num_bytes:
                if form == "compressed":
                    found[form] = how
                else:
                    found |= {place: _over(how, line) for place, line in lines.items()}
        return found

    return replace(chain, blocks=tuple(replace(of, away=ways(of)) for of in chain.blocks), lines=dict(lines))


def _over(how: Kept, line: Line) -> Kept:
    return replace(how, send_s=how.away / line.send_bytes_per_s, fetch_s=how.away / line.fetch_bytes_per_s)


def _fewer(kept: set[str]) -> list[Results]:
    """The kinds that are some of these operators, and not all."""
    return [keeps for keeps, operators in OPERATORS.items() if kept & operators and kept - operators]


@dataclass
class _Event:
    """A mark: what begins with it and of which block, and what was before; `away`: bytes that were sent elsewhere."""

    what: str
    block: int
    section: int
    flops: float
    seconds: float
    away: int


@dataclass
class _Steps:
    """A step's microbatches, mark by mark.

    passed, held, handed  by block, storages that it was handed, that are there for others, too, and that it hands on
    alive                 bytes at each moment of each section
    """

    microbatches: list[list[_Event]] = field(default_factory=list)
    passed: dict[int, dict[int, int]] = field(default_factory=dict)
    held: dict[int, dict[int, int]] = field(default_factory=dict)
    handed: dict[int, dict[int, int]] = field(default_factory=dict)
    alive: list[list[int]] = field(default_factory=list)
    least: int = 0

    def of_blocks(self, own: range) -> "_Steps":
        """The marks of some blocks alone, which are then counted from 0."""

        def cut(found: dict[int, dict[int, int]]) -> dict[int, dict[int, int]]:
            return {index - own.start: of for index, of in found.items() if index in own}

        marks = [
            [
                replace(event, block=max(-1, event.block - own.start))
                for event in events
                if event.block == -1 or event.block in own
            ]
            for events in self.microbatches
        ]
        return _Steps(marks, cut(self.passed), cut(self.held), cut(self.handed))


def _steps_of(
    account: StepAccount,
    spread: ParallelModel,
    chain: RecomputedChain,
    num_microbatches: int,
    loss: Callable[[nn.Module], Tensor],
) -> _Steps:
    found = _Steps()

    def mark(what: str, block: int) -> None:
        account.mark(Label(what, "chain", block))
        event = _Event(what, block, len(account.sections) - 1, account.flops, account.seconds, chain.bytes_away())
        found.microbatches[-1].append(event)

    def observe(what: str, block: int, passed: Sequence[Tensor], held: Sequence[Tensor]) -> None:
        if len(found.microbatches) == 1:
            found.held[block] = found.held.get(block, {}) | _storages(held)
            if what in ("begin", "end"):
                (found.passed if what == "begin" else found.handed)[block] = _storages(passed)
        if what == "end":
            for tensor in passed:
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: mark("back", block))
        mark(what, block)

    def forward(_: int) -> Tensor:
        if found.microbatches:
            mark("over", -1)
        found.microbatches.append([])
        return loss(spread.model)

    account.begin()
    chain.observe = observe
    spread.run(range(num_microbatches), forward)
    mark("over", -1)
    chain.observe = None
    return found


def _called_once(steps: _Steps, num_blocks: int) -> range:
    """The blocks that a forward calls once; of several such runs in the order of the model's lists the longest."""
    calls = Counter(event.block for event in steps.microbatches[0] if event.what == "begin")
    runs, begin = [range(num_blocks)], 0
    for once, some in groupby(range(num_blocks), lambda index: calls[index] == 1):
        end = begin + len(list(some))
        if once:
            runs.append(range(begin, end))
        begin = end
    return max(runs[1:] or runs, key=len)


def _storages(tensors: Sequence[Tensor]) -> dict[int, int]:
    plain = (inner.untyped_storage() for tensor in tensors for inner in plain_tensors(tensor))
    return {id(storage): storage.nbytes() for storage in plain}


def _rest(account: StepAccount, spread: ParallelModel, optimizer: torch.optim.Optimizer, steps: _Steps) -> int:
    """The most that is alive where no block is at work; the step is done then."""
    spread.reduce()
    update(account, spread, optimizer)
    steps.alive = [section.alive_bytes for section in account.sections[:-1]]
    at_work = {
        section
        for events in steps.microbatches
        for section in range(_first(events, "begin", 0).section, _first(events, "over", -1).section)
    }
    return max(max(alive, default=0) for index, alive in enumerate(steps.alive) if index not in at_work)


def _first(events: list[_Event], what: str, block: int) -> _Event:
    found = next((event for event in events if (event.what, event.block) == (what, block)), None)
    if found is None:
        of = f"block {block} is not computed, or has no gradient" if block >= 0 else "a microbatch has no end"
        raise UserError(f"recompute.mode=budget: {of}; use --recompute.mode full, sqrt or recursive")
    return found


class _Levels:
    """The bytes of one microbatch's marks."""

    def __init__(self, steps: _Steps, events: list[_Event], num_blocks: int):
        self.alive, self.events = steps.alive, events
        order = [event.block for event in events if event.what == "begin"]
        if order != list(range(num_blocks)):
            raise UserError(
                "recompute.mode=budget: the model's forward does not call its blocks one after another, once each; use "
                "--recompute.mode full, sqrt or recursive"
            )

    def at(self, what: str, block: int) -> int:
        return self.alive[_first(self.events, what, block).section][0]

    def spent(self, begin: tuple[str, int], end: tuple[str, int]) -> tuple[float, float]:
        """Seconds and FLOPs between two marks."""
        first, last = _first(self.events, *begin), _first(self.events, *end)
        return last.seconds - first.seconds, last.flops - first.flops

    def away(self, block: int) -> int:
        """Bytes that a block's forward has sent elsewhere."""
        return _first(self.events, "end", block).away - _first(self.events, "begin", block).away

    def most(self, begin: tuple[str, int], *ends: tuple[str, int]) -> int:
        """Between a mark and the first of others, that of it included."""
        first = _first(self.events, *begin).section
        last = min(_first(self.events, *end).section for end in ends)
        return max(max(alive) for alive in self.alive[first:last])


def _chain(
    again: _Steps, whole: _Steps, lean: dict[Results, _Steps], away: dict[Form, _Steps], num_blocks: int
) -> Chain:
    every = [again, whole, *lean.values(), *away.values()]
    levels = [[_Levels(steps, events, num_blocks) for events in steps.microbatches] for steps in every]
    held = {key for of in again.held.values() for key in of}

    def own(storages: dict[int, int]) -> int:
        return sum(num_bytes for key, num_bytes in storages.items() if key not in held)

    inputs, output = [own(again.passed[k]) for k in range(num_blocks)], own(again.handed[num_blocks - 1])
    microbatches = [
        _Microbatch(
            inputs,
            output,
            of_again,
            of_whole,
            dict(zip(lean, others[: len(lean)], strict=True)),
            dict(zip(away, others[len(lean) :], strict=True)),
        )
        for of_again, of_whole, *others in zip(*levels, strict=True)
    ]
    blocks = [
        replace(_most([of.block(k) for of in microbatches]), begins=k > 0 and not again.passed[k])
        for k in range(num_blocks)
    ]
    least = max(steps.least for steps in every)
    head, shared = max(of.head for of in microbatches), min(of.shared for of in microbatches)
    return Chain(tuple(_with_shared(blocks)), output, head, shared, least)


def _with_shared(blocks: Sequence[ChainBlock]) -> list[ChainBlock]:
    """Count what blocks share to the last of them, where another chain begins behind it.

    The levels of that one are beside the share, which is gone where all have kept everything; of the last, whether
    others have is not known.
    """
    found, shared = list(blocks), 0
    for index, (of, behind) in enumerate(pairwise(blocks)):
        shared = max(shared, of.shared) if not of.begins else of.shared
        if behind.begins:
            found[index] = replace(
                of,
                whole=replace(of.whole, num_bytes=of.whole.num_bytes + shared),
                away={form: replace(how, num_bytes=how.num_bytes + shared) for form, how in of.away.items()},
            )
    return found


def _most(values: Sequence[Any]) -> Any:
    """The largest of each field, whatever is inside."""
    if isinstance(values[0], dict):
        return {key: _most([value[key] for value in values]) for key in values[0]}
    if not is_dataclass(values[0]):
        return max(values)
    return replace(values[0], **{f.name: _most([getattr(v, f.name) for v in values]) for f in fields(values[0])})  # pyright: ignore[reportArgumentType]


class _Microbatch:
    """The levels of one, in each way: its blocks run again, keep everything, keep some results, keep all elsewhere."""

    def __init__(
        self,
        inputs: Sequence[int],
        output: int,
        again: _Levels,
        whole: _Levels,
        lean: dict[Results, _Levels],
        away: dict[Form, _Levels],
    ):
        self.again, self.whole, self.lean, self.away = again, whole, lean, away
        self.inputs, self.output, self.last = inputs, output, len(inputs) - 1
        self.kept_inputs = list(accumulate(inputs))
        self.first = [again.at("begin", k) - self.kept_inputs[k] for k in range(len(inputs))]
        self.head = again.most(("end", self.last), ("ask", self.last)) - self.kept_inputs[self.last] - output
        behind = whole.most(("end", self.last), ("back", self.last))
        self.shared = max(0, self.head + self._kept_before(whole, self.last + 1) - behind)

    def block(self, k: int) -> ChainBlock:
        of = self.again
        ask, filled = of.at("ask", k), of.at("filled", k)
        following = ("ask", k - 1) if k else ("over", -1)
        forward_s, forward_flops = of.spent(("begin", k), ("end", k))
        refill_s, refill_flops = of.spent(("ask", k), ("filled", k))
        whole = self._kept(self.whole, k)
        handed_on = self.inputs[k + 1] if k < self.last else self.output  # which is gone by then, and counted as kept
        shared = of.at("back", k) - self.kept_inputs[k] - whole.back - handed_on
        return ChainBlock(
            input=self.inputs[k],
            first=self.first[k],
            again=ask - self.kept_inputs[k],
            dropping_peak=of.most(("begin", k), ("end", k)) - of.at("begin", k),
            whole=whole,
            refill_peak=of.most(("ask", k), ("filled", k)) - ask,
            refilled=filled - ask,
            refilled_peak=of.most(("filled", k), following) - filled,
            forward_s=forward_s,
            refill_s=refill_s,
            backward_s=of.spent(("filled", k), following)[0],
            forward_flops=forward_flops,
            refill_flops=refill_flops,
            shared=max(0, shared),
            lean={keeps: self._lean(levels, k) for keeps, levels in self.lean.items()},
            away={form: self._away(levels, k) for form, levels in self.away.items()},
        )

    def _lean(self, of: _Levels, k: int) -> Kept:
        more = (a - b for a, b in zip(self._spent_back(of, k), self._spent_back(self.whole, k), strict=True))
        again_s, again_flops = (max(0.0, n) for n in more)
        return replace(self._kept(of, k), again_s=again_s, again_flops=again_flops)

    def _away(self, of: _Levels, k: int) -> Kept:
        """What is sent elsewhere is here until the next block has run, and again when that one's backward begins."""
        before = of.away(k - 1) if k else 0
        kept, own = self._kept(of, k), of.away(k)
        running = (("begin", k), ("end", k))
        ways = ((levels.spent(*running)[0], self._spent_back(levels, k)[0]) for levels in (of, self.whole))
        more_s = sum(next(ways)) - sum(next(ways))
        return replace(
            kept,
            num_bytes=kept.num_bytes + before,
            backward_peak=kept.backward_peak - before,
            again_s=max(0.0, more_s),
            away=own,
        )

    def _spent_back(self, of: _Levels, k: int) -> tuple[float, float]:
        return of.spent(("back", k), ("back", k - 1) if k else ("over", -1))

    def _kept(self, of: _Levels, k: int) -> Kept:
        """Where blocks are kept; what they have kept is told beside what else is alive when a forward begins."""
        before, behind = self._kept_before(of, k), self._kept_before(of, k + 1)
        back = of.at("back", k)
        return Kept(
            peak=of.most(("begin", k), ("end", k)) - of.at("begin", k),
            num_bytes=behind - before,
            back=back - behind,
            backward_peak=of.most(("back", k), ("back", k - 1) if k else ("over", -1)) - back,
        )

    def _kept_before(self, of: _Levels, k: int) -> int:
        if k <= self.last:
            return of.at("begin", k) - self.first[k]
        return self._kept_before(of, self.last) + of.at("end", self.last) - of.at("begin", self.last)
