"""SM3 (Anil et al. 2019, arXiv:1901.11150, algorithm SM3-II): Adagrad whose state is a number a row and a column.

Of a parameter of k dims there is one accumulator for each index along each dim, in k tensors of size 1 along the rest:

    v   = min over the k accumulators that cover an entry + g^2
    mu  <- for each index the largest v that it covers
    p   <- p - lr m,   m <- momentum m + (1 - momentum) g / sqrt(v)              (0 where v is 0)

The update needs nothing of other ranks. Only the accumulators do, for the next step: a maximum over the axes that cut
the other dims, one message a process group, which travels while the parameters move.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.optim.sharded import Batch, Held, Reduction, ShardedOptimizer
from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_momentum, decay_groups

_ACCUMULATOR = "accumulator_"


class Sm3(ShardedOptimizer):
    """SM3 for plain tensors, DTensors and local tensors with a layout.

    momentum  0 keeps no first moment, and the state is the accumulators alone

    Raises UserError for values out of range.
    """

    def __init__(self, params: Any, lr: float = 0.1, momentum: float = 0.9, *, maximize: bool = False):
        check_momentum("sm3", lr, momentum)
        super().__init__(params, {"lr": lr, "momentum": momentum, "maximize": maximize})

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        keys = [f"{_ACCUMULATOR}{dim}" for dim in range(max(1, parameter.ndim))]
        state = {key: self._zeros(parameter, collapsed=self._collapsed(parameter, key)) for key in keys}
        return state | ({"exp_avg": self._zeros(parameter)} if options["momentum"] else {})

    def _collapsed(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        if not key.startswith(_ACCUMULATOR):
            return ()
        kept = int(key.removeprefix(_ACCUMULATOR))
        return tuple(dim for dim in range(parameter.ndim) if dim != kept)

    def _update(self, batches: list[Batch]) -> None:
        variances = [[_variance(h) for h in batch.held] for batch in batches]
        largest = [
            part for batch, vs in zip(batches, variances) for h, v in zip(batch.held, vs) for part in _largest(h, v)
        ]
        reduction = Reduction(largest, dist.ReduceOp.MAX)
        for batch, vs in zip(batches, variances):
            for h, v in zip(batch.held, vs):
                _move(h, v, batch)
        reduction.wait()
        accumulators = [x for batch in batches for h in batch.held for x in _accumulators(h)]
        for accumulator, (value, _) in zip(accumulators, largest, strict=True):
            accumulator.copy_(value)


def _accumulators(h: Held) -> list[Tensor]:
    return [h.own(f"{_ACCUMULATOR}{dim}") for dim in range(max(1, h.value.ndim))]


def _variance(h: Held) -> Tensor:
    """v of this rank's entries."""
    first, *rest = _accumulators(h)
    least = first.expand(h.value.shape)
    for other in rest:
        least = torch.minimum(least, other)
    g = h.grad.to(first.dtype)
    return torch.addcmul(least, g, g)


def _largest(h: Held, v: Tensor) -> list[tuple[Tensor, tuple]]:
    """(the largest v that each index of a dim covers here, the groups that hold the rest of what it covers) per dim."""
    if v.ndim < 2:
        return [(v.clone(), ())]
    found = []
    for kept, accumulator in enumerate(_accumulators(h)):
        others = tuple(dim for dim in range(v.ndim) if dim != kept)
        value = v.amax(others, keepdim=True) if v.numel() else torch.zeros_like(accumulator)
        found.append((value, h.place.over(others)))
    return found


def _move(h: Held, v: Tensor, batch: Batch) -> None:
    update = torch.where(v > 0, v.rsqrt(), 0.0).mul_(h.grad)
    if batch.options["momentum"]:
        update = h.own("exp_avg").lerp_(update, 1 - batch.options["momentum"])
    h.value.add_(update, alpha=batch.options["lr"] if batch.options["maximize"] else -batch.options["lr"])


@dataclass(frozen=True)
class Sm3Config(OptimConfig):
    name: str = "sm3"
    momentum: float = 0.9
    """0 keeps no first moment"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum("sm3", self.lr, self.momentum)


def _state_bytes(config: Sm3Config, part: Part) -> int:
    return part.wide_bytes * (sum(part.shape) if part.shape else 1) + (part.num_bytes if config.momentum else 0)


def _build(config: Sm3Config, masters: Mapping[str, Tensor]) -> Sm3:
    return Sm3(decay_groups(masters), lr=config.lr, momentum=config.momentum)


SPEC = OptimizerSpec(Sm3Config, _state_bytes, _build, sized_by=("momentum",))
