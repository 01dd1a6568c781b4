"""The exponential moving average of the weights, with which a run validates and predicts (supplement, 1.11.7).

    a_0 = 0,  a_t = d a_(t-1) + (1 - d) p_t;    the average is a_t / (1 - d^t)

The divisor takes out what a_0 weighs, as in Adam, so the average is one of weights that were there, from the first step
on. It is kept among the optimizer's state: checkpoints hold it by parameter, sharded like the parameter, and a resumed
run goes on with it to the bit.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.checkpoint import read_full
from core.config import UserError
from core.parallel.parallel_model import ParallelModel

KEY = "average"


class WeightAverage:
    """Follows an AdamW optimizer over the masters of `data`."""

    def __init__(self, data: ParallelModel, optimizer: torch.optim.Optimizer, decay: float):
        if not isinstance(optimizer, torch.optim.AdamW):
            raise UserError("the average of the weights goes with --optim.name adamw; use it, or --average None")
        self.data, self.optimizer, self.decay = data, optimizer, decay
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _follow(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                state = optimizer.state[parameter]
                if KEY not in state:
                    state[KEY] = torch.zeros_like(parameter)
                state[KEY].lerp_(parameter, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the model computes with the average; afterwards with its weights, as they were."""
        kept = {name: master.detach().clone() for name, master in self.data.masters.items()}
        with torch.no_grad():
            for master in self.data.masters.values():
                state = self.optimizer.state.get(master, {})
                if KEY in state and float(state["step"]) > 0:
                    master.copy_(averaged(state[KEY], state["step"], self.decay))
            self.data.publish()
        try:
            yield
        finally:
            with torch.no_grad():
                for name, master in self.data.masters.items():
                    master.copy_(kept[name])
                self.data.publish()


def averaged(summed: Tensor, step: Tensor, decay: float) -> Tensor:
    """a_t / (1 - d^t)."""
    return summed / (1 - decay ** float(step))


def parameters_of(checkpoint: Path, learned: Mapping[str, bool], decay: float | None) -> dict[str, Tensor]:
    """The weights of a checkpoint, whole, in fp32; with a decay the average of those that learned.

    learned  name -> whether it learned or was frozen
    """
    averages = {name for name, learns in learned.items() if learns and decay is not None}
    found = read_full(checkpoint, [key for name in learned for key in _keys(name, name in averages)])

    def value(name: str) -> Tensor:
        first, *step = (found[key] for key in _keys(name, name in averages))
        return averaged(first, step[0], decay) if step and decay is not None else first

    return {name: value(name).float() for name in learned}


def _keys(name: str, average: bool) -> list[str]:
    return [f"optim/{KEY}/{name}", f"optim/step/{name}"] if average else [f"model/{name}"]
