"""The place of an optimizer's state: beside its masters, whichever side they live on."""

from typing import Any

import torch
from torch import Tensor

from core.layout import tagged_as


def bring_state(optimizer: torch.optim.Optimizer, master: Tensor) -> None:
    """Let the optimizer's state of a master, if there is any, be where the master is.

    A number (`step`) stays on the host, where the optimizer reads it, but for updates of one kernel: torch's fused and
    capturable ones take it from the device of the parameter.
    """
    state = optimizer.state.get(master, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device != master.device and _follows(optimizer, master, value):
            state[key] = tagged_as(value.to(master.device), value)


def _follows(optimizer: torch.optim.Optimizer, master: Tensor, value: Tensor) -> bool:
    if value.ndim:
        return True
    group: dict[str, Any] = next(g for g in optimizer.param_groups if any(p is master for p in g["params"]))
    return bool(group.get("fused") or group.get("capturable"))
