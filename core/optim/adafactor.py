"""Adafactor on one rank and on any mesh (Shazeer and Stern 2018, arXiv:1804.04235, algorithms 4 to 6).

A step, with w = t^beta2_decay and rho = min(lr, 1 / sqrt t):

    1. sums of G^2 over rows and columns of every shard, and the partial means of r          -> one message an axis
       meanwhile: what is not sharded takes its whole step, and vectors update their V
    2. r, c towards the complete means; sums of U^2 and P^2, with U = G / sqrt(r c / mean r)  -> one message an axis
    3. P <- P (1 - lr weight_decay) - max(eps2, RMS P) rho / max(1, RMS U / d) U

So a process group carries at most two messages a step for all parameters together, of R + C + 1 and of 2 numbers for a
matrix [R, C] that it cuts. U is never in memory: kernels on a GPU (core/kernels/adafactor.py), cache blocks on a CPU.

Names, defaults and state dicts are those of torch.optim.Adafactor. convention="paper" is that of the paper and of
transformers.Adafactor, which differ from torch's in two places:

                    "torch"                                        "paper"
    eps1            V >= eps1^2 and mean r >= eps1; by default     added to G^2 inside the means; by default 1e-30
                    the eps of the parameter's dtype
    weight_decay    times lr                                       times the parameter's own step size

transformers' `relative_step=True, lr=None` is lr=1e-2 here, its `relative_step=False` is that of the same name.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from core.kernels.adafactor import Phases
from core.kernels.blockwise import block_bytes, dequantize, in_8_bits, quantize
from core.optim.factored import (
    Factors,
    Parts,
    SecondMoment,
    WhichDims,
    factored_dims,
    factors_bytes,
    phases_for,
    variance_squares,
)
from core.optim.narrow import MOMENTUM_FORMATS, MomentumFormat
from core.optim.sharded import CODES, SCALES, Batch, Held, Reduction, ShardedOptimizer
from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_options, decay_groups, own_values

Convention = Literal["torch", "paper"]


class Adafactor(ShardedOptimizer):
    """Adafactor for plain tensors, DTensors and local tensors with a layout; sharded results equal those of one rank.

    lr               upper bound of rho, and of decay under convention="torch"; rho itself where relative_step=False
    beta2_decay      the second moment averages with weight t^beta2_decay for the newest square
    eps              (eps1, eps2): see the module; eps2 is the least RMS that a parameter counts with
    d                updates of larger RMS than this are scaled down to it
    weight_decay     decoupled
    foreach          of torch.optim.Adafactor; there is one way here, and it changes nothing
    maximize         ascend
    beta1            decay of a first moment of the updates; None: none is kept
    momentum_format  of the first moment: fp32 (or the parameter's, where that is wider), bf16, or 8 bits in blocks
    relative_step    rho = min(lr, 1 / sqrt t), else lr
    scale_parameter  the step is relative to the parameter's RMS
    warmup_init      rho is at most 1e-6 t
    factored         the "last" two dims, as in torch, or the "largest" two
    convention       "torch" or "paper"

    Raises UserError for values out of range.
    """

    def __init__(
        self, params: Any, lr: float | Tensor = 1e-2, beta2_decay: float = -0.8,
        eps: tuple[float | None, float] = (None, 1e-3), d: float = 1.0, weight_decay: float = 0.0, *,
        foreach: bool | None = None, maximize: bool = False, beta1: float | None = None,
        momentum_format: MomentumFormat = "fp32", relative_step: bool = True, scale_parameter: bool = True,
        warmup_init: bool = False, factored: WhichDims = "last", convention: Convention = "torch",
    ):  # fmt: skip
        _check(
            lr=lr, beta2_decay=beta2_decay, eps=eps, d=d, weight_decay=weight_decay, beta1=beta1,
            momentum_format=momentum_format, factored=factored, convention=convention,
        )  # fmt: skip
        defaults = {
            "lr": lr, "beta2_decay": beta2_decay, "eps": eps, "d": d, "weight_decay": weight_decay,
            "foreach": foreach, "maximize": maximize, "beta1": beta1, "momentum_format": momentum_format,
            "relative_step": relative_step, "scale_parameter": scale_parameter, "warmup_init": warmup_init,
            "factored": factored, "convention": convention,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        dims = factored_dims(self.place(parameter).layout.shape, options["factored"])
        if dims is None:
            state: dict[str, Any] = {"variance": self._zeros(parameter)}
        else:
            state = {
                "row_var": self._zeros(parameter, collapsed=(dims[1],)),
                "col_var": self._zeros(parameter, collapsed=(dims[0],)),
            }
        if options["beta1"] is None:
            return state
        if options["momentum_format"] == "8bit" and in_8_bits(self.place(parameter).layout.shape):
            return state | self._zero_blocks(parameter, "exp_avg")
        narrow = options["momentum_format"] == "bf16" and parameter.dtype != torch.float64
        return state | {"exp_avg": self._zeros(parameter, torch.bfloat16 if narrow else None)}

    def _collapsed(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        dims = factored_dims(self.place(parameter).layout.shape, self._options_of(parameter)["factored"])
        return (dims[("col_var", "row_var").index(key)],) if dims and key in ("row_var", "col_var") else ()

    def _update(self, batches: list[Batch]) -> None:
        parts = [part for batch in batches for part in _parts_of(batch)]
        shared, alone = [p for p in parts if p.is_shared], [p for p in parts if not p.is_shared]
        sums = Reduction(_in_order([part.sum() for part in shared]))
        for part in alone:
            part.sum()
            part.meanwhile()
            part.measure()
            part.apply()
        for part in shared:
            part.meanwhile()
        sums.wait()
        Reduction(_in_order([part.measure() for part in shared])).wait()
        for part in shared:
            part.apply()


def relative_step_size(options: dict[str, Any], step: int) -> float:
    """rho of a step, counted from 1."""
    rho = float(options["lr"])
    if options["relative_step"]:
        rho = min(rho, 1 / math.sqrt(step))
    return min(rho, 1e-6 * step) if options["warmup_init"] else rho


class _Part(ABC):
    """Parameters that go through a step together: of one batch, all sharded or none, all factored or none.

    sum() -> what the first message carries of each parameter; meanwhile(); measure() -> what the second; apply()
    """

    def __init__(self, batch: Batch, held: list[Held], by: Phases):
        self.options, self.step, self.held, self.by = batch.options, batch.step, held, by
        self.is_shared = bool(held[0].place.over())
        paper = self.options["convention"] == "paper"
        eps1 = self.options["eps"][0]
        if eps1 is None:
            eps1 = 1e-30 if paper else torch.finfo(batch.dtype).eps
        self.added, self.eps1 = (eps1, 0.0) if paper else (0.0, eps1)
        self.weight = self.step ** self.options["beta2_decay"]
        self.values, self.grads = [h.value for h in held], [h.grad for h in held]
        self.squares = torch.empty(0)

    def sum(self) -> dict[int, Parts]:
        return {}

    def meanwhile(self) -> None:  # noqa: B027 (matrices have nothing to do then)
        pass

    def measure(self) -> dict[int, Parts]:
        return {h.index: [(row, h.place.over())] for row, h in zip(self.squares.unbind(), self.held)}

    def apply(self) -> None:
        """The update, from complete sums of squares."""
        sizes = [h.place.num_elements for h in self.held]
        rho, eps2, decay = relative_step_size(self.options, self.step), self.options["eps"][1], 1.0
        if not self.options["scale_parameter"]:
            eps2 = 0.0
            self.squares[:, 1] = torch.tensor(sizes, device=self.squares.device)  # an RMS of 1
        if self.options["weight_decay"] and self.options["convention"] == "paper":
            self._decay(sizes, rho, eps2)
        else:
            decay = 1 - float(self.options["lr"]) * self.options["weight_decay"]
        if self.options["beta1"] is None:
            self._move(slice(None), self.values, sizes, eps2, rho, decay, self.options["maximize"])
        else:
            self._move_by_momentum(sizes, eps2, rho, decay)

    def _decay(self, sizes: list[int], rho: float, eps2: float) -> None:
        """Each parameter by weight_decay times its own step size."""
        rms = (self.squares[:, 1] / torch.tensor(sizes, device=self.squares.device)).sqrt().clamp(min=eps2)
        factors = (1 - self.options["weight_decay"] * rho * rms).tolist()
        torch._foreach_mul_(self.values, factors)

    def _move_by_momentum(self, sizes: list[int], eps2: float, rho: float, decay: float) -> None:
        """m <- beta1 m + (1 - beta1) update;  P <- decay P - m.  The update goes straight into m."""
        beta1 = self.options["beta1"]
        for index, h in enumerate(self.held):
            packed = "exp_avg" + CODES in h.state
            m = h.own("exp_avg") if not packed else _unpacked(h)
            at = slice(index, index + 1)
            self._move(at, [self._matrix(index, m)], sizes[at], eps2, (1 - beta1) * rho, beta1, True)
            h.value.mul_(decay).add_(m, alpha=1.0 if self.options["maximize"] else -1.0)
            if packed:
                codes, scales = quantize(m, signed=True)
                h.own("exp_avg" + CODES).copy_(codes)
                h.own("exp_avg" + SCALES).copy_(scales)

    def _matrix(self, index: int, x: Tensor) -> Tensor:
        return x

    @abstractmethod
    def _move(self, at: slice, targets: list[Tensor], sizes: list[int], eps2, rho, decay, ascend: bool) -> None:
        """targets <- decay targets -+ step sizes x U, of the parameters `at`."""


def _unpacked(h: Held) -> Tensor:
    return dequantize(h.own("exp_avg" + CODES), h.own("exp_avg" + SCALES), signed=True)


class _Vectors(_Part):
    """Statistics of parameters that are not factored: V itself."""

    def meanwhile(self) -> None:
        self.variances = [h.own("variance") for h in self.held]
        lists = self.values, self.grads, self.variances
        self.squares = variance_squares(self.by, *lists, self.weight, self.added, self.eps1)

    def _move(self, at: slice, targets: list[Tensor], sizes: list[int], eps2, rho, decay, ascend: bool) -> None:
        options = (self.eps1, eps2, self.options["d"], rho, decay, ascend, None)
        self.by.apply(targets, self.grads[at], self.variances[at], [], [], self.squares[at], sizes, *options)


class _Matrices(_Part):
    def __init__(self, batch: Batch, held: list[Held], by: Phases):
        super().__init__(batch, held, by)
        dims = [factored_dims(h.place.layout.shape, self.options["factored"]) for h in held]
        self.factors = [Factors(h.place, d) for h, d in zip(held, dims) if d is not None]
        rows, cols = ([h.own(key) for h in held] for key in ("row_var", "col_var"))
        self.moment = SecondMoment(by, self.factors, rows, cols, self.added)
        self.values, self.grads = (
            [f.matrix(x) for f, x in zip(self.factors, tensors)] for tensors in (self.values, self.grads)
        )

    def sum(self) -> dict[int, Parts]:
        parts = self.moment.sums(self.grads, self.weight)
        return {h.index: parts[3 * i : 3 * i + 3] for i, h in enumerate(self.held)}

    def measure(self) -> dict[int, Parts]:
        self.moment.update()
        factors = self.moment.row_vars, self.moment.col_vars, self.moment.means
        self.squares = self.by.factored_squares(self.values, self.grads, *factors, self.eps1)
        return super().measure()

    def _matrix(self, index: int, x: Tensor) -> Tensor:
        return self.factors[index].matrix(x)

    def _move(self, at: slice, targets: list[Tensor], sizes: list[int], eps2, rho, decay, ascend: bool) -> None:
        moment = self.moment
        factors = moment.row_vars[at], moment.col_vars[at], moment.means[at]
        options = (self.eps1, eps2, self.options["d"], rho, decay, ascend, None)
        self.by.apply(targets, self.grads[at], *factors, self.squares[at], sizes, *options)


def _in_order(found: list[dict[int, Parts]]) -> Parts:
    """The parts of a message, parameter by parameter: ranks part them differently where one holds nothing of some."""
    by_index = {index: parts for one in found for index, parts in one.items()}
    return [part for index in sorted(by_index) for part in by_index[index]]


def _parts_of(batch: Batch) -> list[_Part]:
    found: dict[tuple, tuple[type[_Part], Phases, list[Held]]] = {}
    for h in batch.held:
        kind, by = _Vectors if len(h.place.layout.shape) < 2 else _Matrices, phases_for(h)
        found.setdefault((kind, id(by), bool(h.place.over())), (kind, by, []))[2].append(h)
    return [kind(batch, held, by) for kind, by, held in found.values()]


def _check(
    *, lr: Any, beta2_decay: float, eps: tuple[float | None, float], d: float, weight_decay: float,
    beta1: float | None, momentum_format: str, factored: str, convention: str, **_: bool,
) -> None:  # fmt: skip
    check_options(
        "adafactor",
        lr=(lr, float(lr) >= 0, "a number >= 0"),
        beta2_decay=(beta2_decay, beta2_decay <= 0, "a number <= 0"),
        eps=(eps, (eps[0] is None or eps[0] >= 0) and eps[1] >= 0, "two numbers >= 0, or None for the first"),
        d=(d, d >= 1, "a number >= 1"),
        weight_decay=(weight_decay, weight_decay >= 0, "a number >= 0"),
        beta1=(beta1, beta1 is None or 0 <= beta1 < 1, "a number from 0 to below 1, or None"),
        momentum_format=(momentum_format, momentum_format in MOMENTUM_FORMATS, "fp32, bf16 or 8bit"),
        factored=(factored, factored in ("last", "largest"), "last or largest"),
        convention=(convention, convention in ("torch", "paper"), "torch or paper"),
    )


@dataclass(frozen=True)
class AdafactorConfig(OptimConfig):
    name: str = "adafactor"
    beta2_decay: float = -0.8
    """the second moment averages with weight t^beta2_decay"""
    eps: float | None = None
    """of the second moment; by default that of the convention"""
    eps2: float = 1e-3
    """least RMS that a parameter counts with"""
    d: float = 1.0
    """RMS that an update is scaled down to"""
    weight_decay: float = 0.0
    """of matrices; vectors (norms, biases) are never decayed"""
    beta1: float | None = None
    """decay of a first moment; by default there is none"""
    momentum_format: MomentumFormat = "fp32"
    """of the first moment: fp32, bf16 or 8bit"""
    relative_step: bool | None = True
    """the step falls as 1 / sqrt t"""
    scale_parameter: bool | None = True
    """the step is relative to the parameter's RMS"""
    warmup_init: bool | None = False
    """the step is at most 1e-6 t"""
    factored: WhichDims = "last"
    """the last two dims, or the largest two"""
    convention: Convention = "torch"
    """epsilon and decay as in torch, or as in the paper and transformers"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(lr=self.lr, **_options(self))

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        return {} if self.beta1 is not None else {"momentum_format": "without a first moment; give --optim.beta1, too"}


def _options(config: AdafactorConfig) -> dict[str, Any]:
    options = own_values(config)
    for name in ("relative_step", "scale_parameter", "warmup_init"):
        if options[name] is None:  # on the command line an option that takes a value, and may take this one
            del options[name]
    return options | {"eps": (options["eps"], options.pop("eps2"))}


def _state_bytes(config: AdafactorConfig, part: Part) -> int:
    factors = factors_bytes(part, factored_dims(part.whole, config.factored))
    if config.beta1 is None:
        return factors
    if config.momentum_format == "8bit" and in_8_bits(part.whole):
        return factors + block_bytes(part.shape, part.wide_bytes)
    halved = config.momentum_format == "bf16" and part.wide_bytes < 8
    return factors + part.num_bytes // (2 if halved else 1)


def _build(config: AdafactorConfig, masters: Mapping[str, Tensor]) -> Adafactor:
    return Adafactor(decay_groups(masters, config.weight_decay), lr=config.lr, **_options(config))


SPEC = OptimizerSpec(AdafactorConfig, _state_bytes, _build, sized_by=("beta1", "momentum_format", "factored"))
