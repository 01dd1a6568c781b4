"""The rows of a step's global batch: always the same, or growing to its full size in equal stages.

Early in training a small batch lowers the loss as much a step as a large one, at less cost (McCandlish et al. 2018,
arXiv:1812.06162, section 2.2), so runs with large batches begin with small ones (GPT-3: from 32,000 tokens, Brown et
al. 2020, arXiv:2005.14165, section 2.3). The batch of a step is a function of the step, so nothing has to be stored.
"""

from dataclasses import dataclass

from core.config import UserError


@dataclass(frozen=True)
class RampConfig:
    """A global batch that grows from `start` rows to its full size."""

    start: int | None = None
    """rows of the global batch at first; None: the full batch from the first step on"""
    steps: int = 0
    """steps over which it grows to its full size"""
    increment: int | None = None
    """rows that it grows by at a time; None: as many as it starts with"""

    def __post_init__(self) -> None:
        given = f"ramp start={self.start}, steps={self.steps}, increment={self.increment}"
        if self.start is None:
            if self.steps or self.increment is not None:
                raise UserError(f"{given}; give start, the rows of the first steps, or none of the three")
        elif self.start < 1 or self.steps < 1 or (self.increment is not None and self.increment < 1):
            raise UserError(f"{given}; give start, steps and increment of at least 1")


@dataclass(frozen=True)
class BatchSize:
    """Rows of the global batch at each step: stage k of n has start + k * increment, and each lasts steps / n steps.

    Raises UserError for a ramp that starts above `full`.
    """

    full: int
    ramp: RampConfig = RampConfig()

    def __post_init__(self) -> None:
        if self.ramp.start is not None and self.ramp.start > self.full:
            raise UserError(
                f"ramp start={self.ramp.start} is more than the global batch of {self.full} rows; start with fewer"
            )

    @property
    def stages(self) -> tuple[tuple[int, int], ...]:
        """(first step, rows) of each stage, the full batch last."""
        if self.ramp.start is None:
            return ((0, self.full),)
        increment = self.ramp.increment or self.ramp.start
        num_stages = -(-(self.full - self.ramp.start) // increment)
        growing = [(-(-k * self.ramp.steps // num_stages), self.ramp.start + k * increment) for k in range(num_stages)]
        return (*growing, (self.ramp.steps if growing else 0, self.full))

    def rows(self, step: int) -> int:
        return next(rows for first, rows in reversed(self.stages) if step >= first)

    def rows_before(self, step: int) -> int:
        """Rows of all steps before `step` together: the index of its first sample."""
        ends = [first for first, _ in self.stages[1:]]
        spans = zip(self.stages, (*ends, step))
        return sum(rows * max(min(end, step) - first, 0) for (first, rows), end in spans)


def batch_size(full: "int | BatchSize") -> BatchSize:
    return full if isinstance(full, BatchSize) else BatchSize(full)
