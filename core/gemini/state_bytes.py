"""The size of an optimizer's state before there is any: asked of the optimizer, on tensors of next to no memory."""

import copy
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from core.compat import share_step_hooks
from core.layout import layout_of, tag
from core.optim.sharded import ShardedOptimizer, state_tensors

PROBE = (8, 8)
"""Shape of the parameter on which an elementwise optimizer shows what it keeps of one; of vectors as many elements."""


def state_bytes(optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]) -> dict[str, int]:
    """name -> bytes of the state that the optimizer will keep of a master; 0 of one that it does not have."""
    if isinstance(optimizer, ShardedOptimizer):
        return _asked(optimizer, masters)
    found = dict.fromkeys(masters, 0)
    name_of = {id(master): name for name, master in masters.items()}
    for index, group in enumerate(optimizer.param_groups):
        per_probe = _probed(optimizer, index) if group["params"] else 0
        for parameter in group["params"]:
            if id(parameter) in name_of:
                found[name_of[id(parameter)]] = -(-parameter.numel() * per_probe // math.prod(PROBE))
    return found


def _asked(optimizer: ShardedOptimizer, masters: Mapping[str, Tensor]) -> dict[str, int]:
    """Let a copy of the optimizer make its state of tensors on the meta device."""
    on_meta: dict[Tensor, Tensor] = {}
    for master in masters.values():
        on_meta[master] = tag(torch.empty_like(master, device="meta"), layout_of(master))
    twin = object.__new__(type(optimizer))  # a copy by torch has no more than groups and state
    vars(twin).update({**vars(optimizer), "state": defaultdict(dict), "_places": {}})
    twin.take_over(on_meta)
    twin.init_state()
    return {name: _size(twin.state.get(on_meta[master], {})) for name, master in masters.items()}


def _probed(optimizer: torch.optim.Optimizer, index: int) -> int:
    """Let a copy of an elementwise optimizer take a step of rate zero with a small tensor."""
    like = optimizer.param_groups[index]["params"][0]
    probe = torch.zeros(PROBE if like.ndim >= 2 else math.prod(PROBE), dtype=like.dtype, requires_grad=True)
    probe.grad = torch.zeros_like(probe)
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    if optimizer.state.get(like):  # torch 2.11's Adagrad makes its state with itself, and nowhere else
        twin.state[probe] = {key: _of_probe(value, like, probe) for key, value in optimizer.state[like].items()}
    twin.param_groups = [{**optimizer.param_groups[index], "params": [probe], "lr": 0.0}]
    share_step_hooks(optimizer, twin)  # such as keep an average in the state
    twin.step()
    return sum(t.numel() * t.itemsize for t in state_tensors(twin, probe).values() if t.ndim)


def _of_probe(value: Any, like: Tensor, probe: Tensor) -> Any:
    """Bytes that an optimizer keeps of a parameter, as it would of the probe."""
    if not isinstance(value, Tensor):
        return value
    return (
        torch.zeros_like(probe, dtype=value.dtype) if value.shape == like.shape and value.ndim else value.cpu().clone()
    )


def _size(state: Mapping[str, object]) -> int:
    """Room for what lies at one home is counted on every rank: all follow one plan."""
    return sum(_elements(t) * t.itemsize for t in state.values() if isinstance(t, Tensor) and t.ndim)


def _elements(tensor: Tensor) -> int:
    layout = layout_of(tensor)
    return math.prod(layout.shape) if layout.absent else tensor.numel()
