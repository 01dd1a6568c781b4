"""Every optimizer that has a name; each file of `core.optim` tells of its own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from core.optim import (
    adafactor,
    adagrad,
    adam,
    adamw,
    adamw8bit,
    came,
    hessian_free,
    kfac,
    lamb,
    lars,
    muon,
    rmsprop,
    sgd,
    sm3,
)
from core.optim.spec import OPTIMIZERS, OptimConfig, own_options

__all__ = ["OPTIMIZERS", "OptimConfig", "build_optimizer", "without_size"]

for _module in (
    adafactor,
    adagrad,
    adam,
    adamw,
    adamw8bit,
    came,
    hessian_free,
    kfac,
    lamb,
    lars,
    muon,
    rmsprop,
    sgd,
    sm3,
):
    OPTIMIZERS[_module.SPEC.name] = _module.SPEC


def build_optimizer(config: OptimConfig, masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer over the local tensors that data parallelism hands out; each says where it lies in the whole."""
    return OPTIMIZERS[config.name].build(config, masters)


def without_size(config: OptimConfig) -> tuple[str, ...]:
    """The optimizer's own options that the size of its state is the same without."""
    return tuple(name for name in own_options(config) if name not in OPTIMIZERS[config.name].sized_by)
