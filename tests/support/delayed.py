"""Training on weights that are some updates old, on one rank: the recurrence that asynchronous pipelines are to follow.

    w(t + 1) = w(t) - lr update(grad f(u(t))),  u(t): each parameter as max(t - delay, 0) updates have made it

with the whole history of the weights, gradients at the mixed point, and the same optimizer, clipping and schedule as in
any run. PipeDream-2BW (Narayanan et al. 2021) has delay 1 for every parameter. A loss scale is as late as the weights.
`Corrected` adds the equations of `core.parallel.correction`, written down once more with that history.
"""

from collections.abc import Callable
from typing import Any

import torch

from core.parallel.correction import CorrectionName
from core.parallel.parallel_model import ParallelModel
from core.precision import LossScale, LossScaleConfig
from core.train import train_step
from tests.support.training import Case, batch_of, build, evaluated, held, loss, moved_since, weight

Weights = dict[str, torch.Tensor]
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
        self.parallel, self.delay_of, self.made = parallel, delay_of, list[Weights]()
        self.note()
        step, parallel.update = parallel.update, lambda optimizer: self.update(optimizer, lambda: step(optimizer))

    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        self.put(self.made[-1])
        step()

    def version(self, number: int) -> Weights:
        """What a step computes with that is to have seen so many steps."""
        return self.made[number]

    def note(self) -> None:
        self.made.append({name: master.detach().clone() for name, master in self.parallel.masters.items()})

    @torch.no_grad()
    def put(self, values: Weights) -> None:
        for name, master in self.parallel.masters.items():
            master.copy_(values[name])

    def before(self, step: int) -> None:
        self.put({name: self.version(max(step - self.delay_of(name), 0))[name] for name in self.parallel.masters})
        self.parallel.publish()

    def behind(self, was_skipped: bool) -> None:
        if was_skipped:
            self.put(self.made[-1])
        self.note()
        self.parallel.publish()


class Corrected(History):
    """The same with a correction. Lists that grow with every update, and none of its state."""

    def __init__(self, parallel: ParallelModel, delay: int, name: CorrectionName, strength: float):
        self.delay, self.name, self.strength = delay, name, strength
        self.changes: list[Weights] = []  # what the optimizer made of the weights, update by update
        self.moves: list[Weights] = []  # what became of them
        self.seen: list[int] = []  # step by step, the updates before it
        super().__init__(parallel, lambda _: delay)

    def note(self) -> None:
        super().note()
        self.seen.append(len(self.moves))

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> None:
        now, used, masters = self.made[-1], self.made[max(len(self.made) - 1 - self.delay, 0)], self.parallel.masters
        self.put(now)
        for name, master in masters.items() if self.name == "dc_asgd" else ():
            assert master.grad is not None
            master.grad += self.strength * master.grad**2 * (now[name] - used[name])
        step()
        self.changes.append({name: master.detach() - now[name] for name, master in masters.items()})
        moves = [self._move(name, len(self.moves)) for name in masters]
        self.moves.append(dict(zip(masters, moves, strict=True)))
        self.put({name: now[name] + move for name, move in self.moves[-1].items()})

    def _move(self, name: str, index: int) -> torch.Tensor:
        change = self.changes[index][name]
        if self.name == "nesterov":
            before = self.moves[index - 1][name] if index else 0 * change
            return self.strength * before + (1 - self.strength) * change
        if self.name == "error_feedback" and index >= self.delay:
            return change + self.strength * (change - self.changes[index - self.delay][name])
        return change

    def version(self, number: int) -> Weights:
        weights, updates = self.made[number], self.seen[number]
        factor = {"prediction": float(self.delay), "nesterov": self.strength}.get(self.name, 0.0)
        if not factor or not updates:
            return weights
        return {name: value + factor * self.moves[updates - 1][name] for name, value in weights.items()}


def delayed_run(
    case: Case, delay_of: Callable[[str], int], history_of: Callable[..., History] = History
) -> dict[str, Any]:
    """What `training.run` finds of a case on one rank.  delay_of: name of a parameter -> updates that it is late."""
    state, config = build(case)
    state.loss_scale = LateScale(config.precision, SCALE)
    start, history, losses = held(state.parallel.masters), history_of(state.parallel, delay_of), []
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


def one_late_corrected(case: Case, name: CorrectionName, strength: float) -> dict[str, Any]:
    """2BW's recurrence with a correction."""
    return delayed_run(case, lambda _: 1, lambda parallel, _: Corrected(parallel, 1, name, strength))


def none_late(case: Case) -> dict[str, Any]:
    """That of synchronous training."""
    return delayed_run(case, lambda _: 0)
