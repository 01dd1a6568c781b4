"""Vertical order: a pipeline of one rank whose stages are the blocks, each of which runs all microbatches.

    F(0, 0) F(1, 0) … F(0, 1) F(1, 1) …   forwards, block by block (of the last one in turn with its backwards, so that
                                          what the loss needs is there of one microbatch alone)
    … B(0, 1) B(1, 1) … B(0, 0) B(1, 0)   backwards, block by block from the last

Stages, actions and what is handed on between them are those of `core.parallel.pipeline`; no message is sent. Gradients
of a parameter are added up in the order of the microbatches, as in the horizontal order, and dropout draws by place
(`core.parallel.draws`), so results are the same bit for bit, but for a parameter of several blocks (a tied head) and
blocks that add to the loss by themselves.

A chunk whose parameters the next microbatch reads again keeps them: its gradients stand beside it until they are
reduced (`core.gemini.hooks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.gemini.chunk import Chunk
from core.gemini.hooks import ModuleHooks
from core.gemini.order import NotByBlocks, Order, Orders, compared, in_turn, shared_by_blocks
from core.gemini.search import Chunking
from core.parallel.data import DataParallel
from core.parallel.draws import UnplacedDraws, is_dropout
from core.parallel.pipeline.run import Held, Pipeline, PipelineStep, names_of_stages
from core.parallel.pipeline.schedule import Action, B, F, Kind, Schedule
from core.parallel.pipeline.stages import Stages, blocks_of
from core.placement.stages import PipelinePlan, StageSplit, stage_ranges
from core.trace.machine import Bandwidth
from core.trace.tracer import StepTrace

MOST_FORESEEN = 512
"""Forwards of a block in a step that is planned without being asked for."""


@lru_cache
def by_blocks(num_blocks: int, num_microbatches: int) -> Schedule:
    """The actions of a step, on one rank."""
    numbers, last = range(num_microbatches), num_blocks - 1
    actions = [F(number, block) for block in range(last) for number in numbers]
    actions += [action for number in numbers for action in (F(number, last), B(number, last))]
    actions += [B(number, block) for block in reversed(range(last)) for number in numbers]
    return Schedule((tuple(actions),), (0,) * num_blocks)


class VerticalOrder(Pipeline):
    """A model's step by blocks, on ranks that each have all of them.

    inner  spreads the model over the data axes; None: nothing runs, and the step is only foreseen
    most   microbatches of a step that was planned for
    hooks  of the chunks, once there are some
    why    results would not be those of the horizontal order bit for bit, as far as a step has been foreseen
    """

    def __init__(self, model: nn.Module, plan: PipelinePlan, mesh: DeviceMesh, inner: DataParallel | None = None):
        """Raises NotByBlocks for a model whose step by blocks would be another."""
        number = len(blocks_of(model, plan))
        split = StageSplit(tuple(stage_ranges([1] * number)), (0,) * number, plan)
        require_own_dropouts(model)
        self.model, self.mesh = model, mesh
        if inner is not None:
            self.inner = inner
        self.stages, self.rank, self.observe = Stages(model, split, 0), 0, None
        self.stages.evaluate = self.stages.compute
        self.stages.leave_before_the_loss()
        self._names = names_of_stages(model, self.stages)
        self.most = 0
        shared = shared_by_blocks([self.names_of(stage) for stage in self.stages.own])
        self.why = None if shared is None else f"blocks share '{shared}', whose gradients would be added up otherwise"
        self.hooks: ModuleHooks | None = None
        self._kept: dict[tuple[int, bool], frozenset[Chunk]] = {}

    def require_same_results(self) -> None:
        """Raises NotByBlocks where results would not be those of the horizontal order bit for bit."""
        if self.why is not None:
            raise NotByBlocks(self.why)

    def require_few(self, num_microbatches: int) -> None:
        """Raises NotByBlocks for so many microbatches that a run which did not ask for it would wait for its plan."""
        if (number := self.stages.num_stages) * num_microbatches > MOST_FORESEEN:
            raise NotByBlocks(
                f"{number} blocks of {num_microbatches} microbatches would take long to plan; to have them planned, "
                "give --gemini.order vertical"
            )

    def schedule(self, num_microbatches: int) -> Schedule:
        return by_blocks(self.stages.num_stages, num_microbatches)

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        step = _Step(self, self.schedule(len(microbatches)), microbatches, loss, scale)
        with self.inner.foreseen():
            step.run_all()
        return step.total

    def foreseen(self, losses: Sequence[Callable[[nn.Module], Tensor]]) -> Callable[[nn.Module], Iterator[None]]:
        """The step of these microbatches for `core.trace.tracer.trace_step`, before anything can run."""

        def step(_: nn.Module) -> Iterator[None]:
            foreseen = _Foreseen(self, self.schedule(len(losses)), losses, lambda of: of(self.model), 1.0)
            for action in foreseen.of.ranks[0]:
                foreseen.compute(action)
                if action.kind is Kind.BACKWARD:
                    yield
            foreseen.finish()

        return step

    @contextmanager
    def keeping(self, stage: int, is_last: bool) -> Iterator[None]:
        """Surround a backward of a block: chunks that others need after it keep their values.

        is_last  it is that of the last microbatch
        """
        hooks = self.hooks
        assert hooks is not None, "the step has not been planned"
        key = stage, is_last
        if key not in self._kept:
            names = frozenset[str]().union(*map(self.names_of, range(stage + (not is_last))))
            self._kept[key] = frozenset(c for c in hooks.chunks if any(m.name in names for m in c.members))
        hooks.kept = self._kept[key]
        try:
            yield
        finally:
            hooks.kept = frozenset()


class _Step(PipelineStep):
    """A step by blocks. A block's chunks have all of their gradients behind its last microbatch's backward."""

    pipeline: VerticalOrder

    def is_last(self, action: Action) -> bool:
        return action.microbatch == len(self.microbatches) - 1

    @contextmanager
    def _backward_of(self, action: Action, last: bool) -> Iterator[None]:
        with self.pipeline.keeping(action.stage, last), super()._backward_of(action, last):
            yield


class _Foreseen(PipelineStep):
    """The same without chunks."""

    pipeline: VerticalOrder

    def _forward(self, action: Action) -> Held:
        """Raises NotByBlocks where random numbers would be others than in the horizontal order."""
        with UnplacedDraws() as draws:
            held = super()._forward(action)
        if draws.names:
            raise NotByBlocks(
                f"the model calls {min(draws.names)}, which draws by the order of calls; set its dropout to 0, or use "
                "--gemini.order horizontal"
            )
        if held.carried is not None:
            self.pipeline.why = "blocks add to the loss by themselves, which would be added up otherwise"
        return held

    def _backward_of(self, action: Action, last: bool) -> AbstractContextManager[None]:
        return nullcontext()


def require_own_dropouts(model: nn.Module) -> None:
    """Raises NotByBlocks for a dropout that is called in several places, whose draws go by the number of its calls."""
    names: dict[nn.Module, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if module in names and is_dropout(module):
            raise NotByBlocks(
                f"{names[module]} and {name} are one dropout, and a block cannot tell the number of its calls; give "
                "each place a module of its own"
            )
        names.setdefault(module, name)


@dataclass(frozen=True)
class Planner:
    """What plans a step, in a run or before one.

    trace  a step -> its trace (`core.trace.tracer.trace_step`)
    plan   a trace -> the plan of it.  Raises UserError where it does not fit the budget
    """

    trace: Callable[[Callable[[nn.Module], Any]], StepTrace]
    plan: Callable[[StepTrace], Chunking]
    bandwidth: Bandwidth


def both_orders(
    order: Order,
    traced: StepTrace,
    planned: Chunking,
    losses: Sequence[Callable[[nn.Module], Tensor]],
    of_blocks: Callable[[], VerticalOrder],
    planner: Planner,
) -> tuple[Orders, Chunking, VerticalOrder | None]:
    """A step of these microbatches in both orders, the plan of the one that is taken, and who runs it by blocks.

    traced, planned  of one microbatch

    Raises UserError where the order by blocks is asked for, and does not go with the model or into the budget.
    """
    is_asked, turns = order == "vertical", in_turn(traced, len(losses), planned, planner.bandwidth)
    try:
        vertical = of_blocks()
        if not is_asked:
            vertical.require_few(len(losses))
            vertical.require_same_results()
        step = planner.trace(vertical.foreseen(losses))
        if not is_asked:
            vertical.require_same_results()
        vertical.most, by_blocks = len(losses), planner.plan(replace(step, by_blocks=True))
    except UserError as refused:
        if is_asked:
            raise UserError(f"gemini.order=vertical: {refused}") from refused
        return Orders("horizontal", len(losses), turns, None, str(refused)), planned, None
    orders = compared(order, len(losses), turns, by_blocks.plan)
    return (orders, by_blocks, vertical) if orders.taken == "vertical" else (orders, planned, None)


def is_in_question(order: Order, losses: Sequence[Any], planned: Chunking, blocks: PipelinePlan | None) -> bool:
    """Return whether a step of these microbatches may run by blocks, and that could spare anything."""
    if order == "horizontal" or len(losses) < 2 or blocks is None:
        return False
    return order == "vertical" or planned.plan.to_device_bytes > 0
