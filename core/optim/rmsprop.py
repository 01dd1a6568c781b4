"""RMSprop (Tieleman and Hinton 2012; centered: Graves 2013, arXiv:1308.0850): torch's own, over this rank's shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.optim.spec import (
    OptimConfig,
    OptimizerSpec,
    Part,
    check_momentum,
    check_options,
    decay_groups,
    with_elements,
)


@dataclass(frozen=True)
class RmspropConfig(OptimConfig):
    name: str = "rmsprop"
    alpha: float = 0.99
    """decay of the mean of squares"""
    eps: float = 1e-8
    weight_decay: float = 0.0
    """times the parameter, added to the gradient of matrices; vectors (norms, biases) are never decayed"""
    momentum: float = 0.0
    centered: bool = False
    """divide by the standard deviation: subtract the square of the gradient's mean"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum(self.name, self.lr, self.momentum, self.weight_decay)
        check_options(
            self.name,
            alpha=(self.alpha, 0 <= self.alpha < 1, "a number from 0 to below 1"),
            eps=(self.eps, self.eps > 0, "a number > 0"),
        )


def _build(config: RmspropConfig, masters: Mapping[str, Tensor]) -> torch.optim.RMSprop:
    groups = decay_groups(with_elements(masters), config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "alpha": config.alpha, "eps": config.eps, "momentum": config.momentum}
    return torch.optim.RMSprop(groups, **options, centered=config.centered, foreach=True)


def _state_bytes(config: RmspropConfig, part: Part) -> int:
    return (1 + (config.momentum > 0) + config.centered) * part.num_bytes


SPEC = OptimizerSpec(RmspropConfig, _state_bytes, _build, sized_by=("momentum", "centered"))
