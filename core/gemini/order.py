"""The order of a step's microbatches: one after the other through the whole model, or all through each block.

    horizontal  each microbatch forward and backward by itself: what does not stay on the device is fetched twice for
                each of them
    vertical    each block's forward of all microbatches before the next block's, then the backwards likewise: it is
                fetched twice a step. What blocks hand on, and what autograd keeps, is there of all microbatches at
                once, and beside a chunk that is used again its gradients (Luo et al. 2025, GreedySnake,
                arXiv 2512.17570, "vertical" schedule)

Which is better follows from the plan of either, so nobody need say it: both steps are walked through as they will run,
and the shorter one is taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from core.config import UserError, in_words
from core.gemini.lifetimes import Lifetimes, keep
from core.gemini.moments import on_chunks
from core.gemini.residency import ResidencyPlan
from core.gemini.search import Chunking
from core.gemini.timeline import Timeline, run
from core.trace.machine import Bandwidth
from core.trace.tracer import StepTrace

Order = Literal["auto", "horizontal", "vertical"]

SHORTER = 0.998
"""Smaller differences of two steps are less than the prediction is good for."""


class NotByBlocks(UserError):
    """A refusal: microbatches of this model cannot run by blocks, or not with the same results."""


@dataclass(frozen=True)
class Taken:
    """A step of several microbatches as planned.

    read_bytes     from the disk
    fetched_bytes  copied to the device
    """

    read_bytes: int
    fetched_bytes: int
    step_s: float

    def describe(self) -> str:
        """Its bytes and its time."""
        read = f"{in_words(self.read_bytes)} read from the disk and " if self.read_bytes else ""
        return f"{read}{in_words(self.fetched_bytes)} brought to the device in about {self.step_s:.3g} s"


@dataclass(frozen=True)
class Orders:
    """Both orders of a step, and the one that is taken.

    vertical  None where it is refused, or nothing would be spared; `why` then says so
    """

    taken: Order
    microbatches: int
    horizontal: Taken
    vertical: Taken | None
    why: str = ""

    def describe(self) -> str:
        """The choice and its reason in one line."""
        of = f"{self.microbatches} microbatches a step"
        if self.vertical is None:
            return f"{of} one after the other: {self.why}; {self.horizontal.describe()}"
        by_blocks, in_turn = f"by blocks {self.vertical.describe()}", f"in turn {self.horizontal.describe()}"
        if self.taken == "vertical":
            return f"{of} run by blocks: {by_blocks}; {in_turn}"
        return f"{of} one after the other: {in_turn}; {by_blocks}"


def in_turn(step: StepTrace, microbatches: int, chunking: Chunking, bandwidth: Bandwidth) -> Taken:
    """The step of so many microbatches in the horizontal order, with the chunks and the residency of one.

    step  of one microbatch
    """
    plan = chunking.plan
    trace = on_chunks(
        replace(step, microbatches=step.microbatches * microbatches), chunking.trace.chunks, chunking.parameters
    )
    lifetimes = Lifetimes(trace)
    kept = keep(lifetimes, plan.resident, plan.budget_bytes, 0)
    assert kept is not None, "what fits one microbatch fits each of several"
    if plan.policy != "auto":
        kept = frozenset(gap for gap in kept if gap.end == gap.start + 1)
    return _taken(run(lifetimes, plan.resident, kept, plan.budget_bytes, bandwidth, plan.on_disk, plan.waiting))


def compared(order: Order, microbatches: int, horizontal: Taken, vertical: ResidencyPlan) -> Orders:
    """The order that is taken: the shorter one, where none is asked for."""
    by_blocks = _taken(vertical)
    is_shorter = by_blocks.step_s < SHORTER * horizontal.step_s
    taken = "vertical" if order == "vertical" or (order == "auto" and is_shorter) else "horizontal"
    return Orders(taken, microbatches, horizontal, by_blocks)


def _taken(plan: Timeline | ResidencyPlan) -> Taken:
    return Taken(plan.disk_read_bytes, plan.to_device_bytes, plan.step_s)


def shared_by_blocks(names: Sequence[frozenset[str]]) -> str | None:
    """A parameter that several blocks (or what is before or behind them) have, whose gradients vertical order adds up
    in another sequence: of all microbatches in one block, then in the other.

    names  of the parameters of each
    """
    seen: set[str] = set()
    for each in names:
        if found := seen & each:
            return min(found)
        seen |= each
    return None
