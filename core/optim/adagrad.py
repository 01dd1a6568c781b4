"""Adagrad (Duchi, Hazan and Singer 2011): torch's own, over this rank's shards."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.optim.spec import OptimConfig, OptimizerSpec, Part, check_options, decay_groups, with_elements


@dataclass(frozen=True)
class AdagradConfig(OptimConfig):
    name: str = "adagrad"
    lr_decay: float = 0.0
    """step t has the rate lr / (1 + (t - 1) lr_decay)"""
    weight_decay: float = 0.0
    """times the parameter, added to the gradient of matrices; vectors (norms, biases) are never decayed"""
    initial_accumulator_value: float = 0.0
    eps: float = 1e-10

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least_0 = ("lr", "lr_decay", "weight_decay", "initial_accumulator_value")
        ranges = {name: (value := getattr(self, name), value >= 0, "a number >= 0") for name in at_least_0}
        check_options(self.name, **ranges, eps=(self.eps, self.eps > 0, "a number > 0"))


def _build(config: AdagradConfig, masters: Mapping[str, Tensor]) -> torch.optim.Adagrad:
    groups = decay_groups(with_elements(masters), config.weight_decay)
    options: dict[str, Any] = {"lr": config.lr, "lr_decay": config.lr_decay, "eps": config.eps}
    first = config.initial_accumulator_value
    return torch.optim.Adagrad(groups, **options, initial_accumulator_value=first, foreach=True)


def _one_sum(_: OptimConfig, part: Part) -> int:
    return part.num_bytes


SPEC = OptimizerSpec(AdagradConfig, _one_sum, _build)
