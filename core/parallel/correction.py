"""Corrections of training on old weights: what a pipeline that does not wait does against its delay.

A stage's weights are tau updates late (`ScheduleSpec.delay`). w(t) are its weights after t updates, g(t) the gradient
of step t after clipping, taken at v(s), s = max(t - tau, 0), what the stage computed with then; u(t) the change that
the optimizer makes of w(t) with g(t). Without a correction w(t + 1) = w(t) + u(t) and v(s) = w(s).

lr_by_delay     u(t) at the rate eta(t) / tau^p(t), p(t) = 1 - min(t / K, 1); tau <= 1 changes nothing
                (Yang et al. 2021, PipeMare, arXiv:1910.05124, section 3.1, technique T1)
prediction      v(s) = w(s) + tau (w(s) - w(s - 1)): where tau more of the last change lead. Of SGD with momentum that
                is SpecTrain's w - tau eta m (Chen et al. 2018, arXiv:1809.02839, section 3.2), of Adam XPipe's
                w - tau eta m / sqrt(v) (Guan et al. 2019, arXiv:1911.04610, section 3)
nesterov        w(t + 1) = w(t) + gamma (w(t) - w(t - 1)) + (1 - gamma) u(t),  v(s) = w(s) + gamma (w(s) - w(s - 1)),
                with an optimizer that has no momentum of its own (Ajanthan et al. 2025, arXiv:2505.01099, section 3:
                the gradient's part of Nesterov's step discounted by 1 - gamma; gamma = 0.99 as in the authors' code,
                which has torch's NAdam: momentum before the division by sqrt(v), where here it is behind)
dc_asgd         g(t) + lambda g(t) g(t) (w(t) - w(t - tau)), element by element, in the place of g(t)
                (Zheng et al. 2017, arXiv:1609.08326, section 3, with constant lambda = 0.04)
error_feedback  w(t + 1) = w(t) + u(t) + lambda (u(t) - u(t - tau)) from t = tau on: u(t) is what step t - tau should
                have changed, u(t - tau) what it did, and the difference is the error that is fed back. With lambda = 1
                the weights are tau changes ahead of those without it.
                After Zmushko et al. 2026, arXiv:2606.30634, whose section 3 was not to be had when this was written:
                known of its rule is that it corrects updates, of any optimizer, and mixes two that follow each other.
                This is the error feedback of updates that does so; it need not be theirs to the letter

A step that is skipped changes nothing here, but that dc_asgd's weights grow one step older, as versions do.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.layout import layout_of, tag

CorrectionName = Literal["none", "lr_by_delay", "prediction", "nesterov", "dc_asgd", "error_feedback"]


class Correction:
    """A correction of one stage's masters, all of them `delay` updates late; this one corrects nothing.

    tensors  key -> name -> local tensor that lies as its master: the state, as checkpoints hold it beside `count`
    count    updates that were made; of dc_asgd steps
    """

    def __init__(self, masters: Mapping[str, Tensor], delay: int = 0, strength: float = 0.0, steps: int = 1):
        self.masters, self.delay, self.strength, self.steps, self.count = masters, delay, strength, steps, 0
        self.tensors = {key: self._alike() for key in self.keys(delay)}

    @staticmethod
    def keys(delay: int) -> tuple[str, ...]:
        """Names of the tensors that it keeps of each master."""
        return ()

    @staticmethod
    def leads(delay: int) -> bool:
        """Whether stages compute with other values than the masters'."""
        return False

    @property
    def looks_ahead(self) -> bool:
        return self.leads(self.delay)

    @torch.no_grad()
    def update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        """Update the masters.  step: the optimizer's own, of these masters"""
        self._update(optimizer, step)
        self.count += 1

    def skip(self) -> None:
        """Take note of a step that made no update."""

    @contextmanager
    def looking_ahead(self) -> Iterator[None]:
        """Within, masters hold the values that stages are to compute with, in memory of their own."""
        if not self.looks_ahead:
            yield
            return
        kept = {name: master.data for name, master in self.masters.items()}
        for name, master in self.masters.items():
            master.data = self._ahead(name, kept[name])
        try:
            yield
        finally:
            for name, master in self.masters.items():
                master.data = kept[name]

    def _update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        step()

    def _ahead(self, name: str, value: Tensor) -> Tensor:
        return value

    def _alike(self) -> dict[str, Tensor]:
        with torch.no_grad():
            return {name: tag(torch.zeros_like(m), layout_of(m)) for name, m in self.masters.items()}

    def _values(self) -> dict[str, Tensor]:
        return {name: master.detach().clone() for name, master in self.masters.items()}


class RateByDelay(Correction):
    def _update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        power = 1 - min(self.count / self.steps, 1.0)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / max(self.delay, 1) ** power
        step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Prediction(Correction):
    @staticmethod
    def keys(delay: int) -> tuple[str, ...]:
        return ("moved",) if delay else ()

    @staticmethod
    def leads(delay: int) -> bool:
        return delay > 0

    def _update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        if not self.delay:
            step()
            return
        before = self._values()
        step()
        for name, moved in self.tensors["moved"].items():
            torch.sub(self.masters[name], before[name], out=moved)

    def _ahead(self, name: str, value: Tensor) -> Tensor:
        return value + self.delay * self.tensors["moved"][name]


class Nesterov(Correction):
    @staticmethod
    def keys(delay: int) -> tuple[str, ...]:
        return ("moved",)

    @staticmethod
    def leads(delay: int) -> bool:
        return True

    def _update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        before = self._values()
        step()
        for name, moved in self.tensors["moved"].items():
            change = self.masters[name] - before[name]
            moved.mul_(self.strength).add_(change, alpha=1 - self.strength)
            torch.add(before[name], moved, out=self.masters[name].data)

    def _ahead(self, name: str, value: Tensor) -> Tensor:
        return value + self.strength * self.tensors["moved"][name]


class DelayCompensation(Correction):
    @staticmethod
    def keys(delay: int) -> tuple[str, ...]:
        return tuple(f"used_{place}" for place in range(delay))

    def _update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        if self.delay:
            used = self._used()
            for name, master in self.masters.items():
                if master.grad is not None:
                    late = master.detach() - used[name]
                    master.grad.addcmul_(master.grad.square(), late, value=self.strength)
            self._keep(used)
        step()

    @torch.no_grad()
    def skip(self) -> None:
        if self.delay:
            self._keep(self._used())
        self.count += 1

    def _used(self) -> dict[str, Tensor]:
        """The weights that this step's gradients were computed with; in their place those of now go."""
        if not self.count:
            for values in self.tensors.values():
                self._keep(values)
        return self.tensors[f"used_{self.count % self.delay}"]

    def _keep(self, place: dict[str, Tensor]) -> None:
        for name, value in place.items():
            value.copy_(self.masters[name])


class ErrorFeedback(Correction):
    @staticmethod
    def keys(delay: int) -> tuple[str, ...]:
        return tuple(f"change_{place}" for place in range(delay))

    def _update(self, optimizer: torch.optim.Optimizer, step: Callable[[], object]) -> None:
        if not self.delay:
            step()
            return
        before = self._values()
        step()
        for name, earlier in self.tensors[f"change_{self.count % self.delay}"].items():
            change = self.masters[name] - before[name]
            if self.count >= self.delay:
                self.masters[name].data.add_(change - earlier, alpha=self.strength)
            earlier.copy_(change)


@dataclass(frozen=True)
class CorrectionSpec:
    """A correction's facts.

    make           what acts
    strength       its factor by default, where it has one
    most           what the factor must be below
    optimizers     that it is defined for; empty: all that step by gradients
    has_momentum   it brings the momentum, so the optimizer must have none
    needs_delays   it changes nothing where no stage is later than one update
    keeps_changes  holds the weights of before while the optimizer steps
    """

    make: type[Correction] = Correction
    strength: float | None = None
    most: float = float("inf")
    optimizers: tuple[str, ...] = ()
    has_momentum: bool = False
    needs_delays: bool = False
    keeps_changes: bool = False


_ADAPTIVE = ("adagrad", "adam", "adamw", "rmsprop", "sgd")
CORRECTIONS: dict[CorrectionName, CorrectionSpec] = {
    "none": CorrectionSpec(),
    "lr_by_delay": CorrectionSpec(RateByDelay, needs_delays=True),
    "prediction": CorrectionSpec(Prediction, keeps_changes=True),
    "nesterov": CorrectionSpec(
        Nesterov, strength=0.99, most=1.0, optimizers=("adam", "adamw", "sgd"), has_momentum=True, keeps_changes=True
    ),
    "dc_asgd": CorrectionSpec(DelayCompensation, strength=0.04, optimizers=_ADAPTIVE),
    "error_feedback": CorrectionSpec(ErrorFeedback, strength=1.0, keeps_changes=True),
}
