"""Learning-rate schedules: pure functions of the step; and how the rate grows with the batch.

Large batches: a rate that was tuned at `base_batch` rows is multiplied by k = rows / base_batch ("linear": Goyal et al.
2017, arXiv:1706.02677, section 2.1) or by its square root ("sqrt": Krizhevsky 2014, arXiv:1404.5997, section 5; You et
al. 2020, arXiv:1904.00962, section 4), and a linear warm-up leads to it.
"""

import math
from dataclasses import dataclass
from typing import Literal

from core.config import UserError


@dataclass(frozen=True)
class ScheduleConfig:
    """Linear warm-up, then `shape` down to `final` times the peak."""

    shape: Literal["cosine", "linear", "constant", "wsd"] = "cosine"
    """cosine or linear decay, constant, or wsd: constant, then linear over the last `decay` of the steps"""
    warmup_steps: int = 0
    final: float = 0.1
    """fraction of the peak that the decay ends at, right after the last step"""
    decay: float = 0.2
    """fraction of the steps that wsd decays over"""
    scaling: Literal["none", "linear", "sqrt"] = "none"
    """how the peak grows with the global batch beyond base_batch"""
    base_batch: int = 256
    """rows of the global batch that optim.lr was tuned at; only read with scaling"""

    def __post_init__(self) -> None:
        if self.warmup_steps < 0 or not 0 <= self.final <= 1 or not 0 < self.decay <= 1:
            raise UserError(
                f"schedule warmup_steps={self.warmup_steps}, final={self.final}, decay={self.decay}; "
                "give warmup_steps >= 0, 0 <= final <= 1 and 0 < decay <= 1"
            )
        if self.base_batch < 1:
            raise UserError(f"schedule base_batch={self.base_batch}; give the rows of a batch, at least 1")

    def unread(self) -> dict[str, str]:
        found = {}
        if self.shape != "wsd":
            found["decay"] = f"with schedule.shape={self.shape}, without it; give --optim.schedule.shape wsd"
        if self.shape == "constant":
            found["final"] = "with schedule.shape=constant; give --optim.schedule.shape cosine, linear or wsd"
        if self.scaling == "none":
            found["base_batch"] = "with schedule.scaling=none; give --optim.schedule.scaling linear or sqrt"
        return found


def learning_rate(step: int, num_steps: int, peak: float, config: ScheduleConfig) -> float:
    """The rate of step `step` (the first is 0) of `num_steps`."""
    if step < config.warmup_steps:
        return peak * (step + 1) / config.warmup_steps
    after, span = step - config.warmup_steps, max(1, num_steps - config.warmup_steps)
    progress = min(after / span, 1.0)
    if config.shape == "cosine":
        fraction = 0.5 * (1 + math.cos(math.pi * progress))
    elif config.shape == "linear":
        fraction = 1 - progress
    elif config.shape == "wsd":
        fraction = min(1.0, (1 - progress) / config.decay)
    else:
        return peak
    return peak * (config.final + (1 - config.final) * fraction)


def batch_factor(rows: int, config: ScheduleConfig) -> float:
    """The factor of the rate for a global batch of `rows` rows."""
    ratio = rows / config.base_batch
    return {"none": 1.0, "linear": ratio, "sqrt": math.sqrt(ratio)}[config.scaling]
