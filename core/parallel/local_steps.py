"""0/1 Adam's local steps: ranks go on by themselves between two sums of momenta, whose distances grow.

From step F on second moments stay as they are, and momenta are added up in the steps k_0 = F, k_(j+1) = k_j +
min(2^floor(j / `each`), `most`), and in the last step of a run. In a step of rate lr and weight decay l, which is the
t-th of its parameter, each of n ranks w does, with the gradient g_w of its own rows (their sum is the step's),

    m_w = beta1 m_w + (1 - beta1) g_w
    u_w = (1 - lr l) u_w + lr / (1 - beta1^t) m_w          u: the way that its momenta have come since the last sum
    x_w = D x - n u_w / r                                  what it computes the next step with

where x are the weights behind the last sum, r the root of second moments (`core.optim.frozen`) and D the product of
1 - lr l since then: the weights that AdamW would make of the momenta n m_w. When they add up,

    u = sum over w of u_w, sent in signs as u / s;  x = D x - u / r;  m = u / s;  m_w = m / n;  u_w = 0

with s what u is of momenta that are 1. A sum of one step's momenta is a step without local ones. Errors are in units of
momenta, without rates. No element goes further than the bound of `core.optim.frozen` times the sum of the rates.

x_w is there while microbatches run. Before and behind them a rank has x, which evaluations, averages and checkpoints
are of, and of which ZeRO's masters are rows: so these stay, and need not be sent, until the next sum. m_w, u_w, r and a
copy of x lie whole on every rank. In bf16 and fp16 x is what parameters are, cast anew for each step.

In checkpoints m_w and u_w are a tensor [ranks, *shape] each. On another number of ranks all go on from their mean.

Lu et al. 2022, 0/1 Adam, arXiv:2202.06009, algorithm 1 and section 6, there without correction of beta1's bias and
without weight decay apart.
"""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Rates(Protocol):
    """What this asks of an optimizer, whose groups are alike on all ranks.

    bound  of a step of rate 1
    """

    beta1: float
    bound: float

    def rate(self, group: int) -> tuple[float, float]:
        """Learning rate and weight decay of a group of parameters in the step that is made."""
        ...


def is_due(step: int, each: int, most: int | None = None) -> bool:
    """Whether a step, counted from 0, is one of those of which `each` follow at a distance: 1, 2, 4 up to `most`."""
    doublings = (step // each + 1).bit_length() - 1
    distance = 2**doublings
    if most is not None and distance >= most:
        doublings, distance = (most - 1).bit_length(), most
    return (step - each * (2**doublings - 1)) % distance == 0


def num_due(steps: int, each: int, most: int | None = None) -> int:
    """Those among so many first steps."""
    found = begin = 0
    distance = 1
    while begin < steps:
        last = most is not None and distance >= most
        distance = min(distance, most) if most is not None else distance
        left = -(-(steps - begin) // distance)
        found += left if last else min(each, left)
        if last:
            break
        begin += each * distance
        distance *= 2
    return found


@dataclass
class Pace:
    """Of a parameter's steps since the last sum.

    kept    D
    weight  s
    rate    the sum of its rates, as s without the correction of a bias: so far its bound lets it go
    """

    kept: float = 1.0
    weight: float = 0.0
    rate: float = 0.0

    def after(self, rate: float, decay: float, bias: float) -> "Pace":
        """With one step more.  bias: 1 - beta1^t"""
        kept = 1 - rate * decay
        return Pace(self.kept * kept, self.weight * kept + rate / bias, self.rate * kept + rate)


class LocalSteps:
    """What a rank has of its own steps.

    momenta  name -> m_w
    ways     name -> u_w
    roots    name -> r; 1 where nothing moves
    taken    name -> t of the last step
    groups   name -> the optimizer's group that it is in
    steps    since the last sum
    """

    def __init__(self, like: Mapping[str, Tensor], ranks: int):
        """like: name -> a tensor of the shape and format of its momentum."""
        self.ranks, self.steps = ranks, 0
        self.momenta = {name: torch.zeros_like(one) for name, one in like.items()}
        self.ways = {name: torch.zeros_like(one) for name, one in like.items()}
        self.roots: dict[str, Tensor] = {}
        self.taken, self.groups = dict.fromkeys(like, 0), dict.fromkeys(like, 0)
        self.paces = {name: Pace() for name in like}
        self._before: dict[str, Tensor] = {}

    def settle(self) -> None:
        """Be as in the midst of steps, for estimates of such."""
        self.roots = {name: torch.ones_like(one) for name, one in self.ways.items()}
        self.taken, self.steps = dict.fromkeys(self.taken, 1), 1
        self.paces = {name: Pace(1.0, 1.0, 1.0) for name in self.paces}

    def held(self) -> list[Tensor]:
        return [*self.momenta.values(), *self.ways.values(), *self.roots.values(), *self._before.values()]

    @property
    def unsent(self) -> list[str]:
        """Parameters that have moved since the last sum, alike on all ranks."""
        return [name for name, pace in self.paces.items() if pace != Pace()]

    def _pace(self, name: str, rates: Rates) -> tuple[Pace, float, float]:
        """That with the step that is made, 1 - lr l, and the rate of its momentum."""
        rate, decay = rates.rate(self.groups[name])
        bias = 1 - rates.beta1 ** (self.taken[name] + 1)
        return self.paces[name].after(rate, decay, bias), 1 - rate * decay, rate / bias

    def offer(self, name: str, grad: Tensor | None, rates: Rates) -> tuple[Tensor, Pace]:
        """u_w / s with the step that is made, in a gradient's memory: (1 - beta1) g_w; None: it takes no part in it."""
        if grad is None:
            pace = self.paces[name]
            return self.ways[name] / pace.weight if pace.weight else self.momenta[name].clone(), pace
        pace, kept, rate = self._pace(name, rates)
        m = grad.add_(self.momenta[name] * rates.beta1)
        if pace.weight:
            m.mul_(rate).add_(self.ways[name] * kept).div_(pace.weight)
        return m, pace

    def take(self, given: Mapping[str, Tensor], moves: Mapping[str, Tensor], rates: Rates) -> None:
        """A step of this rank by itself.  given: name -> (1 - beta1) g_w"""
        for name, grad in given.items():
            pace, kept, rate = self._pace(name, rates)
            m = self.momenta[name].mul_(rates.beta1).add_(grad.mul_(moves[name]))
            self.ways[name].mul_(kept).add_(m * rate)
            self.paces[name] = pace
            self.taken[name] += 1
        self.steps += 1

    def begin(self, momenta: Mapping[str, Tensor], counted: Iterable[str] = ()) -> None:
        """Go on from momenta that are alike on all ranks.  counted: names that took part in the step of the sum"""
        for name, momentum in momenta.items():
            self.momenta[name].copy_(momentum / self.ranks)
            self.ways[name].zero_()
            self.paces[name] = Pace()
        for name in counted:
            self.taken[name] += 1
        self.steps = 0

    def leave(self, parameters: Mapping[str, Tensor], rates: Rates) -> None:
        """Make parameters those of this rank by itself; `come_back` undoes it."""
        for name, parameter in parameters.items():
            if name in self._before:
                self._before[name].copy_(parameter)
            else:
                self._before[name] = parameter.clone()
            pace = self.paces[name]
            if pace == Pace() or not self.taken[name]:
                continue
            x = parameter.to(self.ways[name].dtype) * pace.kept
            if pace.rate:
                u = (self.ways[name] * (self.ranks / pace.rate)).div_(self.roots[name])
                x.sub_(u.clamp_(-rates.bound, rates.bound).mul_(pace.rate))
            parameter.copy_(x)

    def come_back(self, parameters: Mapping[str, Tensor]) -> None:
        for name, parameter in parameters.items():
            parameter.copy_(self._before[name])

    # --- checkpoints --------------------------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        return {"steps": self.steps, "paces": {name: asdict(pace) for name, pace in self.paces.items()}}

    def of_ranks(self) -> dict[str, dict[str, Tensor]]:
        """What each rank has of its own."""
        return {"local_momentum": self.momenta, "way": self.ways}

    def take_over(self, record: Mapping[str, Any]) -> None:
        self.steps = int(record["steps"])
        self.paces = {name: Pace(**record["paces"][name]) for name in self.paces}
        self.roots = {}
