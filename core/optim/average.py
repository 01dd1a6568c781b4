"""The exponential moving average of what an optimizer updates: a set of weights that wanders less than the last one.

    s_t = d_t s_(t-1) + (1 - d_t) p_t        t counts the steps, from 1

    unbiased(d)  d_t = d (1 - d^(t-1)) / (1 - d^t): s_t is sum_k d^(t-k) p_k over the sum of its weights, an average of
                 weights that there were, from the first step on (Kingma and Ba 2015, Adam, section 3)
    ramp(d)      d_1 = 0, d_t = min(d, t / (t + 9)): the average reaches back over a growing number of steps
                 (TensorFlow's ExponentialMovingAverage with num_updates, and diffusers' EMAModel)

It is kept shard by shard, as the masters are, and for each parameter under its name: what a checkpoint needs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from core.config import UserError
from core.layout import layout_of, tag

Decay = Callable[[int], float]
"""step, from 1 -> the share of the average that is kept"""


def unbiased(decay: float) -> Decay:
    """See the module.  Raises UserError unless 0 <= decay < 1."""
    _check(decay)
    return lambda step: decay * (1 - decay ** (step - 1)) / (1 - decay**step)


def ramp(decay: float) -> Decay:
    """See the module.  Raises UserError unless 0 <= decay < 1."""
    _check(decay)
    return lambda step: 0.0 if step == 1 else min(decay, step / (step + 9))


def _check(decay: float) -> None:
    if not 0 <= decay < 1:
        raise UserError(f"a moving average with decay {decay}; give one from 0 to below 1")


class WeightAverage:
    """The average of masters by name (local tensors that say where they lie in the whole); `follow` after each step.

    tensors  name -> this rank's part of the average, laid out as the master; before the first step the master's value
    steps    how many it has followed
    """

    def __init__(self, masters: Mapping[str, Tensor], decay: Decay, device: str | torch.device | None = None):
        """device: where it is kept; by default with the masters, "cpu" to spare a GPU's memory."""
        self.masters, self.decay, self.steps = masters, decay, 0
        with torch.no_grad():
            self.tensors = {
                name: tag(master.detach().to(device or master.device, copy=True), layout_of(master))
                for name, master in masters.items()
            }

    @torch.no_grad()
    def follow(self) -> None:
        """Take in the masters as they are after a step."""
        self.steps += 1
        share = 1 - self.decay(self.steps)
        for name, master in self.masters.items():
            average = self.tensors[name]
            average.lerp_(master.detach().to(average.device), share)

    @contextmanager
    def in_place(self, publish: Callable[[], None]) -> Iterator[None]:
        """Within, the masters hold the average; afterwards what they held.

        publish  brings the masters' values into what computes; called at both ends
        """
        kept = {name: master.detach().clone() for name, master in self.masters.items()}
        self._give(self.tensors)
        publish()
        try:
            yield
        finally:
            self._give(kept)
            publish()

    @torch.no_grad()
    def _give(self, values: Mapping[str, Tensor]) -> None:
        for name, master in self.masters.items():
            master.copy_(values[name])
