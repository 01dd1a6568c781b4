"""Training on weights that are some updates old, on one rank: the recurrence that asynchronous pipelines are to follow.

    w(t + 1) = w(t) - lr update(grad f(u(t))),  u(t): each parameter as max(t - delay, 0) updates have made it

with the whole history of the weights, gradients at the mixed point, and the same optimizer, clipping and schedule as in
any run. PipeDream-2BW (Narayanan et al. 2021) has delay 1 for every parameter. A loss scale is as late as the weights.
"""

from collections.abc import Callable
from typing import Any

import torch

from core.parallel.parallel_model import ParallelModel
from core.precision import LossScale, LossScaleConfig
from core.train import train_step
from tests.support.training import Case, batch_of, build, evaluated, held, loss, moved_since, weight

SCALE = LossScaleConfig(2.0**22, growth_interval=3)


class LateScale(LossScale):
    """One whose factor is that of one update before."""

    latest: float | None = None

    def update(self, finite: bool) -> bool:
        self.factor = self.latest or self.factor
        applied = super().update(finite)
        self.latest, self.factor = self.factor, self.before
        return applied


class History:
    """The weights after every update of a model on one rank, and those that a step is to compute with."""

    def __init__(self, parallel: ParallelModel, delay_of: Callable[[str], int]):
        self.parallel, self.delay_of, self.made = parallel, delay_of, list[dict[str, torch.Tensor]]()
        self.note()
        step, parallel.update = parallel.update, lambda optimizer: (self.put(self.made[-1]), step(optimizer))[1]

    def note(self) -> None:
        self.made.append({name: master.detach().clone() for name, master in self.parallel.masters.items()})

    @torch.no_grad()
    def put(self, values: dict[str, torch.Tensor]) -> None:
        for name, master in self.parallel.masters.items():
            master.copy_(values[name])

    def before(self, step: int) -> None:
        self.put({name: self.made[max(step - self.delay_of(name), 0)][name] for name in self.parallel.masters})
        self.parallel.publish()

    def behind(self, was_skipped: bool) -> None:
        if was_skipped:
            self.put(self.made[-1])
        self.note()
        self.parallel.publish()


def delayed_run(case: Case, delay_of: Callable[[str], int]) -> dict[str, Any]:
    """What `training.run` finds of a case on one rank.  delay_of: name of a parameter -> updates that it is late."""
    state, config = build(case)
    state.loss_scale = LateScale(config.precision, SCALE)
    start, history, losses = held(state.parallel.masters), History(state.parallel, delay_of), []
    for step in range(case.steps):
        history.before(step)
        skipped = state.loss_scale.skipped_steps
        losses.append(train_step(state, batch_of(case, step), loss, weight, config, step)["loss"])
        history.behind(state.loss_scale.skipped_steps > skipped)
    losses.append(evaluated(state, batch_of(case, case.steps - 1)))
    moved = moved_since(start, state.parallel.masters)
    return {"losses": losses, "start": start, "displacement": moved, "skipped": state.loss_scale.skipped_steps}


def one_late(case: Case) -> dict[str, Any]:
    """2BW's recurrence."""
    return delayed_run(case, lambda _: 1)


def none_late(case: Case) -> dict[str, Any]:
    """That of synchronous training."""
    return delayed_run(case, lambda _: 0)
