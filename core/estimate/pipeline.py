"""A pipeline before it runs: what its stages cost, which blocks they get, and the step on a clock.

A stage costs what its blocks cost; the first also the embedding, the last the head. Head and loss are one module whose
forward makes the gradients already (`core.kernels.cross_entropy`), so all of it is in the last stage's forward.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from core.metrics import transformer_flops_per_token
from core.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    Schedule,
    Times,
    bubble_fraction,
    bubble_in_theory,
    owners,
    schedule,
    simulate,
    span,
)
from core.placement.stages import Costs, StageSplit, split_by_cost, stage_ranges

if TYPE_CHECKING:
    from core.estimate.shape import ModelShape, RunShape
    from core.estimate.time import Machine


def stage_costs(model: ModelShape, run: RunShape) -> Costs:
    """FLOPs a token, forward and backward, of blocks, embedding and head: what stages are balanced by."""
    return model.once(("costs", run.sequence_length), lambda: _stage_costs(model, run))


def _stage_costs(model: ModelShape, run: RunShape) -> Costs:
    head = model.head.vocab_size * model.head.width if model.head is not None else 0
    multiplied = max(model.num_matmul_parameters - head, 0)
    blocks = tuple(
        transformer_flops_per_token(round(multiplied * share), 1, model.block.scores_dim, num_keys)
        for share, num_keys in zip(_shares(model), model.keys_seen(run.sequence_length), strict=True)
    )
    if not all(blocks):  # of a model whose products are not given
        return Costs((1.0,) * model.num_blocks)
    # Looking up and adding up rows: three operations an element, where a product has thousands.
    return Costs(blocks, before=3.0 * model.dim, behind=6.0 * head)


def _shares(model: ModelShape) -> list[float]:
    """Shares of the blocks in what multiplies a token: alike, or by their matrices where some have experts."""
    elements = [0.0] * model.num_blocks
    for weight in model.weights if model.num_experts else ():
        if 0 <= weight.block < model.num_blocks and len(weight.shape) >= (3 if weight.experts else 2):
            used = model.expert_rows / model.num_experts if weight.experts else 1.0
            elements[weight.block] += used * math.prod(weight.shape)
    total = sum(elements)
    return [n / total for n in elements] if total else [1 / model.num_blocks] * model.num_blocks


def stages_of(model: ModelShape, run: RunShape) -> StageSplit:
    """The stages that the run will have, where its split is given or estimated."""
    return model.once(("stages", run.pp, run.pipeline, run.sequence_length), lambda: _stages_of(model, run))


def _stages_of(model: ModelShape, run: RunShape) -> StageSplit:
    pipeline = run.pipeline
    owner_of = owners(pipeline.schedule, run.pp, pipeline.chunks, pipeline.replicas) if run.pp > 1 else (0,)
    costs = stage_costs(model, run)
    split = pipeline.split or split_by_cost(model.num_blocks, len(owner_of), costs, pipeline.replicas)
    return StageSplit(tuple(stage_ranges(split)), owner_of, replicas=pipeline.replicas)


def step_on_a_clock(run: RunShape, cost: Callable[[Action], float], message: float) -> float:
    """Seconds of a step's actions; of a schedule whose steps overlap, of one among many."""
    pipeline = run.pipeline
    spec = SCHEDULES[pipeline.schedule]
    if not spec.runs_ahead:
        return span(run_schedule(run), cost, message)
    few = 2 + spec.depth(run.num_stages)
    one, other = (span(run_schedule(run, steps), cost, message) for steps in (few, 2 * few))
    return (other - one) / few


def run_schedule(run: RunShape, steps: int = 1) -> Schedule:
    """That of so many steps, which overlap."""
    pipeline = run.pipeline
    return schedule(pipeline.schedule, run.pp, run.num_microbatches, pipeline.chunks, steps, replicas=pipeline.replicas)


def overlapping_schedule(run: RunShape) -> Schedule:
    """That of as many steps as are under way at once."""
    return run_schedule(run, SCHEDULES[run.pipeline.schedule].depth(run.num_stages) + 1)


@dataclass(frozen=True)
class Timeline:
    """A step of a pipeline: when each action began and ended, and the share of time in which ranks idle.

    theory  the published bubble of stages of equal cost
    """

    schedule: Schedule
    times: Times
    bubble: float
    theory: float

    @property
    def step_s(self) -> float:
        return max(end for _, end in self.times.values()) - min(begin for begin, _ in self.times.values())


def timeline_of(run: RunShape, of: Schedule, times: Times) -> Timeline:
    """times: measured or simulated."""
    pipeline = run.pipeline
    stages = run.num_stages if pipeline.replicas else run.pp  # what is published is of one rank a stage
    theory = bubble_in_theory(pipeline.schedule, stages, run.num_microbatches, pipeline.chunks, again=run.again)
    return Timeline(of, times, bubble_fraction(of, times), theory)


def simulated_timeline(model: ModelShape, run: RunShape, machine: Machine) -> Timeline:
    """The step of a run whose stages take their FLOPs' time, and messages their bytes'."""
    of = run_schedule(run)
    return timeline_of(run, of, simulate(of, _seconds(model, run, machine), _message_s(model, run, machine)))


def simulated_step_s(model: ModelShape, run: RunShape, machine: Machine) -> float:
    """Its seconds; of a schedule whose steps overlap, of one among many."""
    return step_on_a_clock(run, _seconds(model, run, machine), _message_s(model, run, machine))


def _message_s(model: ModelShape, run: RunShape, machine: Machine) -> float:
    return run.tokens * model.dim * run.width_bytes / run.tp / machine.bandwidth


def _seconds(model: ModelShape, run: RunShape, machine: Machine) -> Callable[[Action], float]:
    stages, costs = stages_of(model, run), stage_costs(model, run)
    second = machine.peak_flops * machine.utilisation * run.tp / run.tokens

    def seconds(action: Action) -> float:
        blocks, last = stages.ranges[action.stage], len(stages.ranges) - 1
        third = sum(costs.blocks[index] for index in blocks) / 3
        embedding = costs.before / 3 if action.stage == 0 else 0.0
        again = sum(costs.blocks[index] * runs for index, runs in zip(blocks, run.runs_again(blocks))) / 3
        if action.kind is Kind.FORWARD:
            return (third + embedding + (costs.behind if action.stage == last else 0.0)) / second
        if action.kind is Kind.INPUT:
            return (third + again) / second
        if action.kind is Kind.WEIGHTS:
            return (third + 2 * embedding) / second
        return (2 * third + 2 * embedding + again) / second

    return seconds
