"""The gradient noise scale, estimated while training: the batch beyond which more rows hardly save steps.

A batch of B rows has a gradient G of expectation g and covariance Sigma / B, so E|G|^2 = |g|^2 + tr(Sigma) / B. The
microbatches of a step are smaller batches of the same rows: microbatch i, with a share q_i of the rows, contributes
c_i, and G is the sum of all c_i, over all ranks. From the squares of both,

    E sum |c_i|^2 = s |g|^2 + tr(Sigma) / B,    s = sum q_i^2
    |g|^2         ~ (|G|^2 - sum |c_i|^2) / (1 - s)
    tr(Sigma)     ~ B (sum |c_i|^2 - s |G|^2) / (1 - s)

which for equal microbatches of b rows, s = b / B, is McCandlish et al. 2018, arXiv:1812.06162, appendix A.1. Both are
free of bias, also where microbatches have unequal rows. The squares of what a rank has accumulated, sums of the same
c_i, would add nothing to what these two say. The noise scale tr(Sigma) / |g|^2 (equation 2.9) is a ratio, whose
estimate would be biased: numerator and denominator are averaged over steps, each for itself.

Rows are the unit: tokens of a row have correlated gradients. A row counts with the weight that the loss gives it, so
rows with more tokens have larger gradients, which is part of the noise. The trained parameters are those that the norm
of the gradients is of.
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from core.config import UserError
from core.parallel.parallel_model import ParallelModel


class Estimate(NamedTuple):
    """trace: of the covariance of one row's gradient; square: of the norm of the true gradient. Either may be < 0."""

    trace: float
    square: float


def estimate(parts: float, whole: float, sizes: Sequence[int]) -> Estimate:
    """One step's unbiased estimates.

    parts  sum over microbatches of the squared norm of what each contributes to the step's gradient
    whole  squared norm of the step's gradient
    sizes  rows of each microbatch, of all ranks; at least two
    """
    rows = sum(sizes)
    share = sum(size**2 for size in sizes) / rows**2
    return Estimate(rows * (parts - share * whole) / (1 - share), (whole - parts) / (1 - share))


class NoiseScale:
    """The estimate of a run.

    average_over  steps: the mean of all until then, from there on a moving one with that time constant
    """

    def __init__(self, parallel: ParallelModel, average_over: int):
        self.squares, self.average_over = parallel.squares(), average_over
        self.trace = self.square = 0.0
        self.steps = self.rows = 0

    @property
    def value(self) -> float | None:
        """Rows; None while the average of |g|^2 is not above 0: the noise hides the gradient."""
        return max(self.trace, 0.0) / self.square if self.square > 0 else None

    def take(self, sizes: Sequence[int], num_ranks: int) -> Tensor:
        """What `update` needs, of this rank: see `GradientSquares.take`.

        sizes      rows of each microbatch of the step on this rank
        num_ranks  that have other rows, as many

        Raises UserError, alike on every rank, for a step of one microbatch.
        """
        if len(sizes) * num_ranks == 1:
            raise UserError(
                f"noise_scale: a step is one microbatch of {sizes[0]} row{'s' * (sizes[0] > 1)} on one rank, and noise "
                "is seen between batches of two sizes; give --microbatch fewer rows than a step has, more "
                "data-parallel ranks, or no --noise-scale"
            )
        return self.squares.take(len(sizes))

    def update(self, parts: float, apart: float, whole: float, sizes: Sequence[int]) -> dict[str, float | None]:
        """Take a step's estimates into the averages.  Returns its figures.

        parts, apart  what `take` returned, summed over all ranks, without the loss scale
        whole, sizes  as in `estimate`, of all ranks

        Raises UserError where gradients came in parts that nobody can square.
        """
        if apart:
            raise UserError(
                "noise_scale: a parameter's gradient came in several parts in one microbatch (stages of one rank, or "
                "blocks that are computed again apart, share it); use mesh.pp=1 and --recompute.mode full or none, or "
                "no --noise-scale"
            )
        self.rows = sum(sizes)
        step = estimate(parts, whole, sizes)
        self.steps += 1
        share = 1 / min(self.steps, self.average_over)
        self.trace += share * (step.trace - self.trace)
        self.square += share * (step.square - self.square)
        return {"noise_scale": self.value, "noise_trace": step.trace, "noise_square": step.square}

    def suggestion(self) -> str:
        """The critical batch, in a line, for the end of a run."""
        if self.value is None:
            return (
                f"no critical batch: over {self.steps} steps the noise hides the gradient; average over more "
                "(--noise-scale-steps), or train longer"
            )
        return (
            f"critical batch about {max(self.value, 1.0):,.3g} rows (the gradient noise scale), now {self.rows}: "
            f"expect {1 + self.value / self.rows:.3g} times the fewest steps, "
            f"and {1 + self.rows / max(self.value, 1e-30):.3g} times the fewest rows, to the same loss"
        )

    def state(self) -> dict[str, float]:
        return {"trace": self.trace, "square": self.square, "steps": self.steps, "rows": self.rows}

    def load_state(self, state: dict[str, float]) -> None:
        self.trace, self.square, self.steps = float(state["trace"]), float(state["square"]), int(state["steps"])
        self.rows = int(state.get("rows", 0))  # states of before lack it
