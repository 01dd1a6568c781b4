"""Where an optimizer's state lies: beside its masters, whichever side they live on."""

from typing import Any

import torch
from torch import Tensor

from core.layout import layout_of, tag


def bring_state(optimizer: torch.optim.Optimizer, master: Tensor) -> None:
    """Let the optimizer's state of a master, if there is any, be where the master is.

    A number (`step`) stays on the host, where the optimizer reads it, but for updates of one kernel: torch's fused and
    capturable ones take it from the device of the parameter.
    """
    state = optimizer.state.get(master, {})
    for key, value in state.items():
        if isinstance(value, Tensor) and value.device != master.device and _follows(optimizer, master, value):
            moved = value.to(master.device)
            state[key] = tag(moved, layout_of(value)) if hasattr(value, "layout_in_whole") else moved


def _follows(optimizer: torch.optim.Optimizer, master: Tensor, value: Tensor) -> bool:
    if value.ndim:
        return True
    group: dict[str, Any] = next(g for g in optimizer.param_groups if any(p is master for p in g["params"]))
    return bool(group.get("fused") or group.get("capturable"))
