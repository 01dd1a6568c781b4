"""Stochastic gradient descent with momentum: torch's own, over this rank's shards."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_momentum, decay_groups, with_elements


@dataclass(frozen=True)
class SgdConfig(OptimConfig):
    name: str = "sgd"
    momentum: float = 0.9
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_momentum(self.name, self.lr, self.momentum, self.weight_decay)


def _build(config: SgdConfig, masters: Mapping[str, Tensor]) -> torch.optim.SGD:
    groups = decay_groups(with_elements(masters), config.weight_decay)
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum, foreach=True)


def one_moment(_: OptimConfig, part: Part) -> int:
    return part.num_bytes


SPEC = OptimizerSpec(SgdConfig, one_moment, _build)
