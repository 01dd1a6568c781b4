"""CAME (Luo et al. 2023, arXiv:2307.02047, algorithm 2): Adafactor with momentum that trusts it where it is steady.

For a matrix, with betas = (beta1, beta2, beta3) and eps = (eps1, eps2):

    1. r, c: averages with beta2 of the means of g^2 + eps1; U = g / sqrt(r c / mean r)         -> one message an axis
    2. U scaled down to an RMS of at most d                                                     -> one message an axis
    3. m <- beta1 m + (1 - beta1) U; R, C: averages with beta3 of the means of (U - m)^2 + eps2 -> one message an axis
    4. p <- p (1 - lr weight_decay) - lr m / sqrt(R C / mean R)

A vector keeps its second moment whole and moves by lr m. The third message cannot join the second: what the residual
is depends on the RMS, and its expansion into sums that do not would lose the digits of a small residual.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.kernels.adafactor import Phases
from core.optim.factored import (
    Factors,
    Parts,
    SecondMoment,
    factored_dims,
    factors_bytes,
    phases_for,
    variance_squares,
)
from core.optim.sharded import Batch, Held, Reduction, ShardedOptimizer
from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_options, decay_groups, own_values

_FACTORS = ("row_var", "col_var", "res_row_var", "res_col_var")


class Came(ShardedOptimizer):
    """CAME for plain tensors, DTensors and local tensors with a layout; the last two dims are factored.

    eps  (eps1, eps2): added to the squares of gradients, and of residuals
    d    updates of larger RMS than this are scaled down to it

    Raises UserError for values out of range.
    """

    def __init__(
        self, params: Any, lr: float = 2e-4, betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        eps: tuple[float, float] = (1e-30, 1e-16), d: float = 1.0, weight_decay: float = 0.0, *,
        maximize: bool = False,
    ):  # fmt: skip
        _check(lr, betas, eps, d, weight_decay)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "d": d, "weight_decay": weight_decay, "maximize": maximize
        }  # fmt: skip
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        keys = ("variance",) if parameter.ndim < 2 else _FACTORS
        made = {key: self._zeros(parameter, collapsed=self._collapsed(parameter, key)) for key in keys}
        return made | {"exp_avg": self._zeros(parameter)}

    def _collapsed(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        if key not in _FACTORS:
            return ()
        return (parameter.ndim - 1,) if key.endswith("row_var") else (parameter.ndim - 2,)

    def _update(self, batches: list[Batch]) -> None:
        ones = [_One(batch, h) for batch in batches for h in batch.held]
        Reduction([part for one in ones for part in one.sum()]).wait()
        Reduction([part for one in ones for part in one.measure()]).wait()
        Reduction([part for one in ones for part in one.average()]).wait()
        for one in ones:
            one.apply()


class _One:
    """One parameter through the phases; what `sum`, `measure` and `average` return has to be completed after each."""

    def __init__(self, batch: Batch, held: Held):
        self.options, self.held = batch.options, held
        self.by: Phases = phases_for(held)
        self.m, self.grad = held.own("exp_avg"), held.grad.to(batch.wide)
        dims = factored_dims(held.place.layout.shape, "last")
        self.factors = None if dims is None else Factors(held.place, dims)

    def _moment(self, rows: str, cols: str, added: float) -> SecondMoment:
        assert self.factors is not None
        return SecondMoment(self.by, [self.factors], [self.held.own(rows)], [self.held.own(cols)], added)

    def sum(self) -> Parts:
        if self.factors is None:
            return []
        self.squared = self._moment("row_var", "col_var", self.options["eps"][0])
        return self.squared.sums([self.grad], 1 - self.options["betas"][1])

    def measure(self) -> Parts:
        h, weight = self.held, 1 - self.options["betas"][1]
        if self.factors is None:
            lists = [h.value], [self.grad], [h.own("variance")]
            self.squares = variance_squares(self.by, *lists, weight, self.options["eps"][0], 0.0)
        else:
            self.squared.update()
            self.squares = self.by.factored_squares([h.value], [self.grad], *self._factors(self.squared), 0.0)
        return [(self.squares, h.place.over())]

    def average(self) -> Parts:
        """m, and sums of the squared residual: m changes by (1 - beta1) (U - m), and the residual is beta1 (U - m)."""
        beta1 = self.options["betas"][0]
        change = self.m.neg()
        scaled = self.squares.clone()
        scaled[:, 1] = self.held.place.num_elements  # an RMS of 1: the update is not relative to the parameter's
        second = self._factors(self.squared) if self.factors is not None else ([self.held.own("variance")], [], [])
        self._add([change], [self.grad], second, scaled, d=self.options["d"], rho=1.0, decay=1.0, ascend=True)
        self.m.add_(change, alpha=1 - beta1)
        if self.factors is None:
            return []
        self.residual = self._moment("res_row_var", "res_col_var", self.options["eps"][1])
        return self.residual.sums([change.mul_(beta1)], 1 - self.options["betas"][2])

    def apply(self) -> None:
        options, value = self.options, self.held.value
        decay = 1 - options["lr"] * options["weight_decay"]
        if self.factors is None:
            value.mul_(decay).add_(self.m, alpha=options["lr"] if options["maximize"] else -options["lr"])
            return
        self.residual.update()
        squares = torch.zeros_like(self.squares)
        squares[:, 1] = self.held.place.num_elements
        second = self._factors(self.residual)
        self._add([value], [self.m], second, squares, 1.0, options["lr"], decay, options["maximize"])

    def _add(self, targets, grads, second, squares: Tensor, d: float, rho: float, decay: float, ascend: bool) -> None:
        """targets <- decay targets -+ rho / max(1, RMS / d) grads / sqrt(second moment)."""
        sizes = [self.held.place.num_elements]
        self.by.apply(targets, grads, *second, squares, sizes, 0.0, 0.0, d, rho, decay, ascend, None)

    @staticmethod
    def _factors(moment: SecondMoment) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        return moment.row_vars, moment.col_vars, moment.means


def _check(lr: float, betas: tuple[float, ...], eps: tuple[float, float], d: float, weight_decay: float) -> None:
    check_options(
        "came",
        lr=(lr, lr >= 0, "a number >= 0"),
        betas=(betas, len(betas) == 3 and all(0 <= beta < 1 for beta in betas), "three numbers from 0 to below 1"),
        eps=(eps, all(e > 0 for e in eps), "two numbers > 0"),
        d=(d, d >= 1, "a number >= 1"),
        weight_decay=(weight_decay, weight_decay >= 0, "a number >= 0"),
    )


@dataclass(frozen=True)
class CameConfig(OptimConfig):
    name: str = "came"
    betas: tuple[float, float, float] = (0.9, 0.999, 0.9999)
    eps: float = 1e-30
    """added to the squares of gradients"""
    eps2: float = 1e-16
    """added to squared residuals"""
    d: float = 1.0
    """RMS that an update is scaled down to"""
    weight_decay: float = 0.0
    """of matrices; vectors (norms, biases) are never decayed"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, self.betas, (self.eps, self.eps2), self.d, self.weight_decay)


def _state_bytes(_: CameConfig, part: Part) -> int:
    dims = factored_dims(part.whole, "last")
    return part.num_bytes + (1 if dims is None else 2) * factors_bytes(part, dims)


def _build(config: CameConfig, masters: Mapping[str, Tensor]) -> Came:
    options = own_values(config)
    eps = options.pop("eps"), options.pop("eps2")
    return Came(decay_groups(masters, config.weight_decay), lr=config.lr, eps=eps, **options)


SPEC = OptimizerSpec(CameConfig, _state_bytes, _build)
