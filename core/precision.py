"""Number formats of a run: what is computed in, what the optimizer keeps, what is reduced in, and loss scaling.

    precision   parameters and activations   masters and optimizer state   reductions
    fp64        fp64                         the parameters                fp64
    fp32        fp32                         the parameters                fp32
    bf16        bf16                         fp32                          fp32
    fp16        fp16, scaled loss            fp32                          fp32

Micikevicius et al. 2018, Mixed Precision Training, section 3 (fp32 masters, loss scaling).
"""

from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch

from core.compat import has_amx, has_avx512_bf16
from core.config import UserError

Precision = Literal["fp64", "fp32", "bf16", "fp16"]
MatmulPrecision = Literal["highest", "high", "medium"]
"""How products in fp32 are computed: exactly, by a GPU's TF32 units with 11 bits, or as bf16."""

COMPUTE_DTYPE: dict[str, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def set_matmul_precision(precision: MatmulPrecision) -> None:
    """Let products in fp32 be computed so in this process; torch's own name, and what our kernels follow.

    Raises UserError for another name.
    """
    names = get_args(MatmulPrecision)
    if precision not in names:
        raise UserError(f"matmul_precision={precision}; give {', '.join(names[:-1])} or {names[-1]}")
    torch.set_float32_matmul_precision(precision)


def compute_dtype(precision: Precision) -> torch.dtype:
    """The dtype of parameters and activations."""
    return COMPUTE_DTYPE[precision]


def master_dtype(precision: Precision) -> torch.dtype:
    """The dtype of masters, optimizer state and reductions: fp32, or the parameters' own where that is wider."""
    return torch.float64 if precision == "fp64" else torch.float32


Bf16Units = Literal["matrix", "vector", None]


def _of_this_cpu() -> Bf16Units:
    if has_amx():
        return "matrix"
    return "vector" if has_avx512_bf16() else None


_CPU_UNITS = _of_this_cpu()  # here, so that what is compiled sees a constant


def bf16_units(device: torch.device) -> Bf16Units:
    """The units that multiply bf16 on a device: of matrices (GPUs, CPUs with AMX), of vectors (AVX512-BF16), or none.

    Without either (torch then converts to fp32 and back) a CPU multiplies bf16 several times slower than fp32.
    """
    return _CPU_UNITS if device.type == "cpu" else "matrix"


@dataclass(frozen=True)
class LossScaleConfig:
    """Dynamic loss scaling, used with fp16."""

    initial: float = 2.0**16
    growth_interval: int = 1000
    """steps without overflow after which the scale doubles"""
    minimum: float = 1.0

    def __post_init__(self) -> None:
        for name in ("initial", "minimum"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"loss_scale.{name}={getattr(self, name)}; give a positive number")
        if self.growth_interval < 1:
            raise UserError(f"loss_scale.growth_interval={self.growth_interval}; give a number of steps, at least 1")


class LossScale:
    """The factor on the loss that keeps fp16 gradients from underflow; halves on overflow, doubles after a quiet while.

    For other precisions the factor is 1 and stays so. `late` is what it was some steps earlier: a pipeline that runs
    ahead begins a step before it is known how those before it went.

    remembers  how many earlier factors are kept
    """

    remembers = 1

    def __init__(self, precision: Precision, config: LossScaleConfig = LossScaleConfig()):
        self.dynamic = precision == "fp16"
        self.config = config
        self.factor = config.initial if self.dynamic else 1.0
        self.earlier: list[float] = []
        self.good_steps = 0
        self.skipped_steps = 0

    def update(self, finite: bool) -> bool:
        """Take note of whether the step's gradients were finite; returns whether the step is to be applied."""
        self.earlier = [*self.earlier, self.factor][-self.remembers :]
        if not finite:
            self.skipped_steps += 1
            self.good_steps = 0
            if self.dynamic:
                self.factor = max(self.factor / 2, self.config.minimum)
            return False
        self.good_steps += 1
        if self.dynamic and self.good_steps % self.config.growth_interval == 0:
            self.factor *= 2
        return True

    def late(self, steps: int) -> float:
        """The factor so many steps ago; before the first what it was then."""
        known = [*self.earlier, self.factor]
        return known[max(len(known) - 1 - steps, 0)]

    def state(self) -> dict[str, Any]:
        counts = {"good_steps": self.good_steps, "skipped_steps": self.skipped_steps}
        return {"factor": self.factor, "earlier": self.earlier} | counts

    def load_state(self, state: dict[str, Any]) -> None:
        self.factor, self.earlier = float(state["factor"]), [float(factor) for factor in state.get("earlier", [])]
        self.good_steps, self.skipped_steps = int(state["good_steps"]), int(state["skipped_steps"])
