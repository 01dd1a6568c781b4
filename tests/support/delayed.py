"""Training on weights that are some updates old, on one rank: the recurrence that asynchronous pipelines are to follow.

    w(t + 1) = w(t) - lr update(grad f(u(t))),  u(t): each parameter as max(t - delay, 0) updates have made it

with the whole history of the weights, gradients at the mixed point, and the same optimizer, clipping and schedule as in
any run. Under PipeDream-2BW (Narayanan et al. 2021) every parameter has delay 1, under PipeDream (2019) those of stage
s of n have n - 1 - s, with vertical sync n - 1. A loss scale is as late as the steps that are begun with it.
`Corrected` adds the equations of `core.parallel.correction`, written down once more with that history.
"""

import math
import re
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch

from core.compose import ParallelConfig
from core.mesh import MeshConfig
from core.models.plan import decoder_plan
from core.optim.clip import scale_gradients
from core.parallel.correction import CORRECTIONS
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig
from core.placement.stages import split_by_cost, stage_ranges
from core.precision import LossScale, LossScaleConfig
from core.train import train_step
from tests.support.training import (
    CLIP,
    Case,
    batch_of,
    build,
    evaluated,
    held,
    loss,
    moved_since,
    weight,
)

Weights = dict[str, torch.Tensor]
SCALE = LossScaleConfig(2.0**22, growth_interval=3)


class LateScale(LossScale):
    """One whose factor is that of some steps before."""

    latest: float | None = None

    def update(self, finite: bool) -> bool:
        self.factor = self.latest or self.factor
        applied = super().update(finite)
        self.latest, self.factor = self.factor, self.late(self.remembers)
        return applied


class History:
    """The weights after every update of a model on one rank, and those that a step is to compute with."""

    def __init__(self, parallel: ParallelModel, delay_of: Callable[[str], int]):
        self.parallel, self.delay_of, self.made = parallel, delay_of, list[Weights]()
        self.note()
        step, parallel.update = parallel.update, lambda optimizer: self.update(lambda: step(optimizer))

    def update(self, step: Callable[[], None]) -> None:
        self.put(self.made[-1])
        step()

    def version(self, name: str, number: int) -> torch.Tensor:
        """What a step computes with that is to have seen so many steps."""
        return self.made[number][name]

    def note(self) -> None:
        self.made.append({name: master.detach().clone() for name, master in self.parallel.masters.items()})

    @torch.no_grad()
    def put(self, values: Weights) -> None:
        for name, master in self.parallel.masters.items():
            master.copy_(values[name])

    def before(self, step: int) -> None:
        self.put({name: self.version(name, max(step - self.delay_of(name), 0)) for name in self.parallel.masters})
        self.parallel.publish()

    def behind(self, was_skipped: bool) -> None:
        if was_skipped:
            self.put(self.made[-1])
        self.note()
        self.parallel.publish()


class Corrected(History):
    """The same with a correction. Lists that grow with every update, and none of its state."""

    def __init__(self, parallel: ParallelModel, delay_of: Callable[[str], int], pipeline: PipelineConfig):
        self.name, self.steps = pipeline.correction, pipeline.correction_steps
        self.strength = pipeline.correction_strength or CORRECTIONS[self.name].strength or 0.0
        self.changes: list[Weights] = []  # what the optimizer made of the weights, update by update
        self.moves: list[Weights] = []  # what became of them
        self.seen: list[int] = []  # step by step, the updates before it
        super().__init__(parallel, delay_of)

    def note(self) -> None:
        super().note()
        self.seen.append(len(self.moves))

    @torch.no_grad()
    def update(self, step: Callable[[], None]) -> None:
        now, masters = self.made[-1], self.parallel.masters
        self.put(now)
        for name, master in masters.items() if self.name == "dc_asgd" else ():
            assert master.grad is not None
            used = self.made[max(len(self.made) - 1 - self.delay_of(name), 0)][name]
            master.grad += self.strength * master.grad**2 * (now[name] - used)
        step()
        self.changes.append({name: master.detach() - now[name] for name, master in masters.items()})
        moves = [self._move(name, len(self.moves)) for name in masters]
        self.moves.append(dict(zip(masters, moves, strict=True)))
        self.put({name: now[name] + move for name, move in self.moves[-1].items()})

    def _move(self, name: str, index: int) -> torch.Tensor:
        change, delay = self.changes[index][name], self.delay_of(name)
        if self.name == "nesterov":
            before = self.moves[index - 1][name] if index else 0 * change
            return self.strength * before + (1 - self.strength) * change
        if self.name == "error_feedback" and index >= delay:
            return change + self.strength * (change - self.changes[index - delay][name])
        if self.name == "lr_by_delay":
            return change / max(delay, 1) ** max(0.0, 1 - index / self.steps)
        return change

    def version(self, name: str, number: int) -> torch.Tensor:
        value, updates = self.made[number][name], self.seen[number]
        factor = {"prediction": float(self.delay_of(name)), "nesterov": self.strength}.get(self.name, 0.0)
        return value + factor * self.moves[updates - 1][name] if factor and updates else value


def delayed_run(
    case: Case,
    delay_of: Callable[[str], int],
    clip: Callable[[ParallelModel], Any] | None = None,
    late: int = 1,
    pipeline: PipelineConfig | None = None,
) -> dict[str, Any]:
    """What `training.run` finds of a case on one rank.

    delay_of  name of a parameter -> updates that it is late
    clip      of the model: a context in which gradients are clipped in another way than by the norm of all
    late      steps that the loss scale is
    pipeline  whose correction there is; None: none
    """
    state, config = build(case)
    state.loss_scale = LateScale(config.precision, SCALE)
    state.loss_scale.remembers = late
    corrected = pipeline is not None and pipeline.correction != "none"
    history = Corrected(state.parallel, delay_of, pipeline) if corrected else History(state.parallel, delay_of)
    start, losses = held(state.parallel.masters), []
    with nullcontext() if clip is None else clip(state.parallel):
        for step in range(case.steps):
            history.before(step)
            skipped = state.loss_scale.skipped_steps
            losses.append(train_step(state, batch_of(case, step), loss, weight, config, step)["loss"])
            history.behind(state.loss_scale.skipped_steps > skipped)
    losses.append(evaluated(state, batch_of(case, case.steps - 1)))
    moved = moved_since(start, state.parallel.masters)
    return {"losses": losses, "start": start, "displacement": moved, "skipped": state.loss_scale.skipped_steps}


def of_schedule(case: Case, microbatch: int | None = None) -> dict[str, Any]:
    """What a pipelined case's recurrence comes to."""
    pipeline = case.parallel.pipeline
    stages = pipeline.num_stages(case.mesh.pp)
    spec, stage = SCHEDULES[pipeline.schedule], stage_of(case)
    precision = case.parallel.precision
    plain = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision=precision), microbatch=microbatch)

    def clip(parallel: ParallelModel) -> Any:
        return clipped_by_stage(parallel, stage, stages, pipeline.clip == "last")

    late = spec.depth(stages)
    given = clip if spec.updates_at_once else None
    return delayed_run(plain, lambda name: spec.delay(stage(name), stages), given, late, pipeline)


def stage_of(case: Case) -> Callable[[str], int]:
    """name of a parameter -> the stage that updates it."""
    plan = decoder_plan(case.model, case.mesh).pipeline
    assert plan is not None
    pipeline = case.parallel.pipeline
    last = pipeline.num_stages(case.mesh.pp) - 1
    split = pipeline.split or split_by_cost(case.model.num_layers, last + 1, plan.costs, pipeline.replicas)
    ranges = stage_ranges(split)

    def stage(name: str) -> int:
        block = re.match(rf"{plan.blocks}\.(\d+)\.", name)
        if block is None:
            return 0 if any(name.startswith(before) for before in plan.before) else last
        return next(stage for stage, blocks in enumerate(ranges) if int(block[1]) in blocks)

    return stage


@contextmanager
def clipped_by_stage(parallel: ParallelModel, stage: Callable[[str], int], stages: int, by_last: bool) -> Any:
    """Each stage's gradients are clipped by their own norm, or by that of all some steps before, once there is one."""
    of_stages: list[list[torch.Tensor]] = [[] for _ in range(stages)]
    for name, master in parallel.masters.items():
        of_stages[stage(name)].append(master)
    norms: list[float] = []

    def norm_of(masters: Iterable[torch.Tensor]) -> float:
        return math.sqrt(sum(float(m.grad.double().square().sum()) for m in masters if m.grad is not None))

    def scale(masters: Iterable[torch.Tensor], factor: float) -> None:
        norms.append(norm_of(masters))
        for own in of_stages:
            norm = norms[-1 - stages] if by_last and len(norms) > stages else norm_of(own)
            scale_gradients(own, min(1.0, CLIP / norm))

    with patch("core.train.loop.scale_gradients", scale):
        yield


def none_late(case: Case) -> dict[str, Any]:
    """The recurrence of synchronous training."""
    return delayed_run(case, lambda _: 0)
