"""Every optimizer that has a name; each file of `core.optim` tells of its own."""

from collections import Counter
from collections.abc import Mapping

import torch
from torch import Tensor

from core.layout import layout_of
from core.optim import (
    adafactor,
    adagrad,
    adam,
    adamw,
    adamw8bit,
    came,
    galore,
    hessian_free,
    kfac,
    lamb,
    lars,
    matrices,
    muon,
    rmsprop,
    sgd,
    shampoo,
    sm3,
    soap,
)
from core.optim.roles import MATRICES, ROLES, Role, role_of
from core.optim.spec import OPTIMIZERS, OptimConfig, own_options

__all__ = ["OPTIMIZERS", "OptimConfig", "build_optimizer", "groups_in_words", "without_size"]

for _module in (
    *(adafactor, adagrad, adam, adamw, adamw8bit, came, galore, hessian_free, kfac),
    *(lamb, lars, muon, rmsprop, sgd, shampoo, sm3, soap),
):
    OPTIMIZERS[_module.SPEC.name] = _module.SPEC


def build_optimizer(config: OptimConfig, masters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The optimizer over the local tensors that data parallelism hands out; each says where it lies in the whole."""
    return OPTIMIZERS[config.name].build(config, masters)


def without_size(config: OptimConfig) -> tuple[str, ...]:
    """The optimizer's own options that the size of its state is the same without."""
    return ("plan", *(name for name in own_options(config) if name not in OPTIMIZERS[config.name].sized_by))


def groups_in_words(config: OptimConfig, masters: Mapping[str, Tensor]) -> str:
    """A line for each parameter: what it is, what updates it, whether it decays. Those of alike blocks have one line.

    masters  name -> local tensor that says where it lies in the whole
    """
    whole = config.whole if isinstance(config, matrices.MatrixConfig) else None
    found = Counter[tuple[Role, str]]()
    for name, master in masters.items():
        shape = layout_of(master).shape
        role = role_of(name, shape)
        update = config.name if whole is None or role in whole else "adamw"
        is_matrix = len(shape) >= 2 if whole is None else role in MATRICES
        is_decayed = is_matrix and "weight_decay" in own_options(config)
        alike = ".".join("*" if part.isdigit() else part for part in name.split("."))
        told = f"{role:<9}  {update:<{max(len(config.name), 5)}}  {'decays' if is_decayed else 'no decay':<8}"
        found[role, f"{told}  {alike} {list(shape)}"] += 1
    lines = sorted(found.items(), key=lambda item: ROLES.index(item[0][0]))
    return "\n".join(f"{line} x {count}" if count > 1 else line for (_, line), count in lines)
