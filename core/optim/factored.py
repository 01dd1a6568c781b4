"""A second moment that is kept as its means over rows and over columns, of parameters that are sharded in any way.

Of a matrix G[R, C] the statistics are r[R, 1], the mean of G^2 over the columns, and c[1, C], that over the rows; of
more dims every matrix along the two factored dims has its own. An entry's estimate is r c / mean(r), rank one, and the
best such in generalised Kullback-Leibler divergence (Shazeer and Stern 2018, arXiv:1804.04235, section 3).

On a shard the sums over a dim that is cut are partial: rows lack what the axes that cut the columns hold elsewhere,
columns likewise, and the mean of r lacks both. The mean is linear in r, so its partial sum can travel with those of the
new squares, before r is updated: all that the update needs is one message a process group.

A statistic that lies whole on several ranks (r, where only columns are cut) is counted on the first of them.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from core.kernels.adafactor import TORCH, Phases, phases
from core.optim.adafactor_cpu import BLOCKED
from core.optim.sharded import Held, Line, Place
from core.optim.spec import Part

WhichDims = Literal["last", "largest"]
Parts = list[tuple[Tensor, tuple[Line, ...]]]


def factored_dims(shape: tuple[int, ...], which: WhichDims) -> tuple[int, int] | None:
    """(the dim of the rows, that of the columns) of a parameter; None where it is not factored.

    which  "last": the last two; "largest": the two with most elements, of equal ones the later
    """
    if len(shape) < 2:
        return None
    if which == "last":
        return len(shape) - 2, len(shape) - 1
    rows, cols = sorted(sorted(range(len(shape)), key=lambda dim: (shape[dim], dim))[-2:])
    return rows, cols


def factors_bytes(part: Part, dims: tuple[int, int] | None) -> int:
    """Bytes of the second moment of a part, factored along `dims` of the whole; None: not factored."""
    if dims is None:
        return part.num_bytes
    return sum(math.prod(part.shape) // max(1, part.shape[dim]) for dim in dims) * part.wide_bytes


@dataclass(frozen=True)
class Factors:
    """The factors of one parameter: R, C of the whole, and the ranks that its sums go over."""

    place: Place
    dims: tuple[int, int]

    @property
    def num_rows(self) -> int:
        return self.place.layout.shape[self.dims[0]]

    @property
    def num_cols(self) -> int:
        return self.place.layout.shape[self.dims[1]]

    @property
    def over_rows(self) -> tuple[Line, ...]:
        """Ranks that complete a sum over rows: those of the axes that cut them."""
        return self.place.over((self.dims[0],))

    @property
    def over_cols(self) -> tuple[Line, ...]:
        return self.place.over((self.dims[1],))

    @property
    def over_both(self) -> tuple[Line, ...]:
        return self.place.over(self.dims)

    @property
    def counts(self) -> bool:
        """True where r is counted: on the first of the ranks that hold the same rows."""
        return all(line.group.rank() == 0 for line in self.over_cols)

    def matrix(self, x: Tensor) -> Tensor:
        """The view in which the factored dims are the last two."""
        return x.movedim(self.dims, (-2, -1)) if self.dims != (x.ndim - 2, x.ndim - 1) else x


class SecondMoment:
    """The factored second moments of a list of parameters through one update.

        sums(grads, weight)   local sums; `parts` are what a Reduction has to complete
        update()              r and c in place; afterwards `means` are those of the whole r

    added  to every square (the epsilon of the paper, inside the mean)
    """

    def __init__(
        self, by: Phases, factors: Sequence[Factors], row_vars: Sequence[Tensor], col_vars: Sequence[Tensor],
        added: float,
    ):  # fmt: skip
        self.by, self.factors, self.added = by, factors, added
        self.row_vars = [f.matrix(x) for f, x in zip(factors, row_vars, strict=True)]
        self.col_vars = [f.matrix(x) for f, x in zip(factors, col_vars, strict=True)]
        self.means: list[Tensor] = []

    def sums(self, grads: Sequence[Tensor], weight: float) -> Parts:
        """Sums over this rank's part of the squares of `grads` (matrices), and of what the means of r need.

        weight  of the new squares in r and c: 1 - beta2
        """
        self.weight = weight
        self.rows, self.cols = self.by.row_col_sums(grads)
        parts: Parts = []
        for f, row, col, row_var in zip(self.factors, self.rows, self.cols, self.row_vars):
            mean = torch.zeros(0)
            if f.over_both:
                mean = row.sum(-2, keepdim=True).mul_(weight / f.num_cols)
                if f.counts:
                    mean += row_var.to(mean.dtype).sum(-2, keepdim=True).mul_(1 - weight)
                mean /= f.num_rows
            self.means.append(mean)
            parts += [(row, f.over_cols), (col, f.over_rows), (mean, f.over_both)]
        return parts

    def update(self) -> None:
        """r and c towards the new means, which are complete by now."""
        if self.added:
            for f, row, col in zip(self.factors, self.rows, self.cols):
                row.add_(self.added * f.num_cols)
                col.add_(self.added * f.num_rows)
        num_rows, num_cols = [f.num_rows for f in self.factors], [f.num_cols for f in self.factors]
        of_these_rows = self.by.update_factors(
            self.row_vars, self.col_vars, self.rows, self.cols, num_rows, num_cols, self.weight
        )
        self.means = [
            summed.add_(self.weight * self.added) if f.over_both else complete
            for f, summed, complete in zip(self.factors, self.means, of_these_rows)
        ]


def variance_squares(
    by: Phases, params: list[Tensor], grads: list[Tensor], variances: list[Tensor], weight: float, added: float,
    eps1: float,
) -> Tensor:  # fmt: skip
    """Sums of U^2 and of P^2 [len, 2] of what is not factored, its second moment updated in place."""
    if not added:
        return by.variance_squares(params, grads, variances, weight, eps1)
    found = []
    for p, g, variance in zip(params, grads, variances):
        wide = g.to(variance.dtype)
        variance.lerp_(wide.square().add_(added), weight)
        norms = (torch.linalg.vector_norm(wide * variance.rsqrt()), torch.linalg.vector_norm(p, dtype=variance.dtype))
        found.append(torch.stack(norms).square_())
    return torch.stack(found)


def phases_for(held: Held) -> Phases:
    """The code that computes the phases of an update: kernels on a GPU, blocks that fit the cache on a CPU."""
    if not held.value.numel():
        return TORCH
    return BLOCKED if held.value.device.type == "cpu" else phases([held.value], [held.grad])
