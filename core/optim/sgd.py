"""Stochastic gradient descent with momentum: torch's own, over this rank's shards."""

from collections.abc import Mapping
from dataclasses import dataclass

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
class SgdConfig(OptimConfig):
    name: str = "sgd"
    momentum: float = 0.9
    nesterov: bool = False
    """step by the gradient of the look-ahead"""
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum(self.name, self.lr, self.momentum, self.weight_decay)
        fine = self.momentum > 0 or not self.nesterov
        check_options(self.name, nesterov=(self.nesterov, fine, "it with a momentum above 0"))


def _build(config: SgdConfig, masters: Mapping[str, Tensor]) -> torch.optim.SGD:
    groups = decay_groups(with_elements(masters), config.weight_decay)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, nesterov=config.nesterov, foreach=True)


def one_moment(_: OptimConfig, part: Part) -> int:
    return part.num_bytes


def _state_bytes(config: SgdConfig, part: Part) -> int:
    return one_moment(config, part) if config.momentum else 0


SPEC = OptimizerSpec(SgdConfig, _state_bytes, _build, sized_by=("momentum",))
