"""The exponential moving average of what an optimizer updates: a set of weights that wanders less than the last one.

    s_t = d_t s_(t-1) + (1 - d_t) p_t        t counts the steps, from 1

    unbiased(d)  d_t = d (1 - d^(t-1)) / (1 - d^t): s_t is sum_k d^(t-k) p_k over the sum of its weights, an average of
                 weights that there were, from the first step on (Kingma and Ba 2015, Adam, section 3)
    ramp(d)      d_1 = 0, d_t = min(d, t / (t + 9)): the average reaches back over a growing number of steps
                 (TensorFlow's ExponentialMovingAverage with num_updates, and diffusers' EMAModel)

It is kept shard by shard, as the masters are, and for each parameter under its name: what a checkpoint needs. Where
masters are updated part by part, since not all of them are in memory, each part is taken in with its update.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from core.config import UserError
from core.layout import layout_of, tag

Decay = Callable[[int], float]
"""step, from 1 -> the share of the average that is kept"""

EXCHANGED_ELEMENTS = 1 << 20
"""So many at once change places between masters and average: all that this takes beside them."""


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

    tensors   name -> this rank's part of the average, laid out as the master; before the first step the master's value
    steps     how many it has followed
    in_parts  whoever updates the masters takes them in part by part (`take_in`), and `follow` counts the step
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        decay: Decay,
        device: str | torch.device | None = None,
        empty_like: Callable[[Tensor], Tensor] = torch.empty_like,
    ):
        """device: where it is kept; by default with the masters, "cpu" to spare a GPU's memory.

        empty_like  memory for the average of a master where it is kept with it (`ParallelModel.empty_like`)
        """
        self.masters, self.decay, self.steps, self.in_parts = masters, decay, 0, False
        with torch.no_grad():
            made = {
                name: empty_like(master).copy_(master) if device is None else master.detach().to(device, copy=True)
                for name, master in masters.items()
            }
        self.tensors = {name: tag(average.detach(), layout_of(masters[name])) for name, average in made.items()}

    def follow(self) -> None:
        """Take in the masters as they are after a step."""
        if not self.in_parts:
            self.take_in(self.masters)
        self.steps += 1

    @torch.no_grad()
    def take_in(self, names: Iterable[str]) -> None:
        """Take in some masters as they are after the step that comes behind the last one that it has followed."""
        share = 1 - self.decay(self.steps + 1)
        for name in names:
            average = self.tensors[name]
            average.lerp_(self.masters[name].detach().to(average.device), share)

    @contextmanager
    def in_place(self, publish: Callable[[], None]) -> Iterator[None]:
        """Within, the masters hold the average, and it what they held; afterwards all is as it was.

        publish  brings the masters' values into what computes; called at both ends
        """
        self.exchange(self.masters)
        publish()
        try:
            yield
        finally:
            self.exchange(self.masters)
            publish()

    @torch.no_grad()
    def exchange(self, names: Iterable[str]) -> None:
        """Let some masters and their averages change places."""
        for name in names:
            for one, other in _pieces(self.masters[name].detach(), self.tensors[name]):
                kept = one.clone()
                one.copy_(other)
                other.copy_(kept)


def _pieces(one: Tensor, other: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Views of both that are all of them, some rows each."""
    if not one.ndim or not one.numel():
        return iter([(one, other)])
    rows = max(1, EXCHANGED_ELEMENTS * len(one) // one.numel())
    return zip(one.split(rows), other.split(rows), strict=True)
