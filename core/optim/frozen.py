"""Updates of 1-bit Adam, 0/1 Adam and 1-bit LAMB: the momentum comes from elsewhere, the second moment stays.

Of a parameter in its t-th step, of which k have learned its second moment v, a master's gradient is the new momentum m:

    r = sqrt(v / (1 - beta2^k)) + eps
    u = m / (1 - beta1^t) / r, at most max(1, (1 - beta1) / sqrt(1 - beta2)) in magnitude
    adam, adamw   p <- (1 - lr weight_decay) p - lr u
    lamb          p <- p - lr a f (u + weight_decay p)

All elements of m that were sent as signs are as large as their mean, and where v is small u has no bound but the one
here, which Adam's own step keeps to, too (Kingma and Ba 2015, section 2.1); it is not in the papers. Elements whose
second moment's root is at most eps have a momentum of zero.

What has come of several steps (`core.parallel.local_steps`) is one update: D the product of 1 - lr weight_decay, s
what rates lr / (1 - beta1^t) add up to, R what rates lr do, of which each is decayed with the steps behind it:

    p <- D p - R u,  u = m s / R / r

LAMB's ratio |p| / |u| is not taken of such an m. a is its average (9 : 1) over the steps that learned v; f corrects it
by a second moment w that goes on, of gradients that are told from momenta:

    g = (m - beta1 m of before) / (1 - beta1)       w <- beta2 w + (1 - beta2) g^2
    f = max over the elements that move of r / (sqrt(w / (1 - beta2^t)) + eps)
    f <- s f + 1 - s, s = min(1, |u| / |u + weight_decay p|);  within [0.5, 4], and 10 % of that of the step before

Tang et al. 2021, 1-bit Adam, arXiv:2102.02888, algorithm 1; Li et al. 2021, 1-bit LAMB, arXiv:2104.06069, algorithm 1
and section 4.2; Lu et al. 2022, 0/1 Adam, arXiv:2202.06009.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from core.config import UserError
from core.layout import layout_of
from core.optim.lamb import Lamb
from core.optim.sharded import Place, Reduction, own

LEAST, MOST, AT_ONCE = 0.5, 4.0, 0.1
"""Bounds of f, and of how far it goes in a step."""


class Frozen(ABC):
    """An optimizer with momenta and second moments, by the names of masters; see `core.parallel.one_bit`.

    in_signs  name -> steps that have left its second moment as it was
    """

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]):
        self.optimizer, self.masters = optimizer, masters
        self.in_signs = dict.fromkeys(masters, 0)
        self._steps: dict[str, int] | None = None  # what the optimizer counts, once it was read
        self.groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        betas = {tuple(group["betas"]) for group in optimizer.param_groups}
        if len(betas) != 1:
            raise UserError(f"momenta sent in signs with {len(betas)} pairs of betas; give all parameters the same")
        ((self.beta1, self.beta2),) = betas
        self.bound = max(1.0, (1 - self.beta1) / (1 - self.beta2) ** 0.5)

    def _state(self, name: str) -> dict[str, Any]:
        return self.optimizer.state.get(self.masters[name], {})

    def momentum(self, name: str) -> Tensor | None:
        state = self._state(name)
        return own(state["exp_avg"]) if "exp_avg" in state else None

    def variance(self, name: str) -> Tensor | None:
        state = self._state(name)
        if "exp_avg_sq" not in state:
            return None
        return own(state["exp_avg_sq"]) / (1 - self.beta2 ** max(1, self._learned(name)))

    def moves(self, name: str) -> Tensor | None:
        found = self.variance(name)
        return None if found is None else found.sqrt() > self.groups[id(self.masters[name])]["eps"]

    def rate(self, group: int) -> tuple[float, float]:
        """Learning rate and weight decay."""
        found = self.optimizer.param_groups[group]
        return found["lr"], found["weight_decay"]

    def standing(self, name: str) -> tuple[int, int]:
        """t, 0 before the first step, and the place of its group; both 0 of a part without elements."""
        group = self.groups.get(id(self.masters[name]))
        places = (place for place, one in enumerate(self.optimizer.param_groups) if one is group)
        return self._taken.get(name, 0), next(places, 0)

    def root(self, name: str) -> Tensor | None:
        """r"""
        return self._root(name) if "exp_avg_sq" in self._state(name) else None

    def _learned(self, name: str) -> int:
        """k"""
        return self._taken[name] - self.in_signs[name]

    @property
    def _taken(self) -> dict[str, int]:
        """t of each parameter that has taken a step: fused updates count on the device, which is read once."""
        if self._steps is None:
            counts = {name: self._state(name)["step"] for name in self.masters if "step" in self._state(name)}
            read = torch.stack([torch.as_tensor(count) for count in counts.values()]).tolist() if counts else []
            self._steps = {name: int(count) for name, count in zip(counts, read, strict=True)}
        return self._steps

    @torch.no_grad()
    def step(self, in_signs: bool) -> None:
        if not in_signs:
            self.learn()
            self._steps = None
            return
        present = [name for name, master in self.masters.items() if master.grad is not None]
        self.count(present)
        self.move(self._held(present))

    def count(self, names: Iterable[str]) -> None:
        """Take note of a step of momenta."""
        for name in names:
            self.in_signs[name] += 1
            if name in self._held((name,)):
                self._taken[name] += 1
                self._state(name)["step"] += 1

    def _held(self, names: Iterable[str]) -> list[str]:
        """Those with a state; of others nothing has moved yet."""
        return [name for name in names if "exp_avg_sq" in self._state(name)]

    @torch.no_grad()
    def arrive(self, ways: Mapping[str, tuple[float, float, float]]) -> None:
        """One update of several steps of momenta, that were counted.  ways: name -> (D, s, R)"""
        raise AssertionError(f"{type(self).__name__} takes momenta step by step")

    @abstractmethod
    def learn(self) -> None:
        """A step of gradients."""

    @abstractmethod
    def move(self, names: list[str]) -> None:
        """A step of momenta."""

    def _root(self, name: str) -> Tensor:
        """r"""
        found = self.variance(name)
        assert found is not None
        return found.sqrt_().add_(self.groups[id(self.masters[name])]["eps"])

    def _direction(self, name: str, m: Tensor) -> Tensor:
        """u, without its bound"""
        return (m / (1 - self.beta1 ** self._taken[name])).div_(self._root(name))

    def _bounded(self, u: Tensor) -> Tensor:
        return u.clamp_(-self.bound, self.bound)

    def counts(self) -> dict[str, int]:
        return dict(self.in_signs)

    def restore(self, counts: Mapping[str, int]) -> None:
        self.in_signs, self._steps = {name: int(counts[name]) for name in self.masters}, None


class FrozenAdam(Frozen):
    """torch's Adam without weight decay, and AdamW."""

    def learn(self) -> None:
        """As the optimizer does it, where all steps did; else with v's own count of steps, in torch's place."""
        if not any(self.in_signs.values()):
            self.optimizer.step()
            return
        for name, master in self.masters.items():
            state = self._state(name)
            if master.grad is None or "exp_avg" not in state:
                continue
            grad, m, v = own(master.grad), own(state["exp_avg"]), own(state["exp_avg_sq"])
            m.mul_(self.beta1).add_(grad, alpha=1 - self.beta1)
            v.mul_(self.beta2).addcmul_(grad, grad, value=1 - self.beta2)
            self._taken[name] += 1
            state["step"] += 1
            self._apply(name, self._direction(name, m))

    def move(self, names: list[str]) -> None:
        for name in names:
            grad = self.masters[name].grad
            assert grad is not None
            m = own(self._state(name)["exp_avg"]).copy_(own(grad))
            self._apply(name, self._bounded(self._direction(name, m)))

    @torch.no_grad()
    def arrive(self, ways: Mapping[str, tuple[float, float, float]]) -> None:
        for name in self._held(ways):
            (kept, weight, rate), grad = ways[name], self.masters[name].grad
            assert grad is not None
            m, value = own(self._state(name)["exp_avg"]).copy_(own(grad)), own(self.masters[name].detach())
            value.mul_(kept)
            if rate:
                value.sub_(self._bounded((m * (weight / rate)).div_(self._root(name))).mul_(rate))

    def _apply(self, name: str, step: Tensor) -> None:
        master = self.masters[name]
        group, value = self.groups[id(master)], own(master.detach())
        value.mul_(1 - group["lr"] * group["weight_decay"]).sub_(step.mul_(group["lr"]))


class FrozenLamb(Frozen):
    """core's LAMB, which keeps a, f and w from its first step on: make this before there is any."""

    def __init__(self, optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]):
        super().__init__(optimizer, masters)
        for group in optimizer.param_groups:
            group["tracks"] = True
        self._places: dict[str, Place] = {}

    def learn(self) -> None:
        self.optimizer.step()

    def move(self, names: list[str]) -> None:
        adapted = [name for name in names if self.groups[id(self.masters[name])]["adapt"]]
        ratios, squares = dict[str, Tensor](), dict[str, Tensor]()
        for name in names:
            ratio = self._follow(name)
            if name in adapted:
                ratios[name] = ratio
                u = self._step(name)
                parts = (u, u + self.groups[id(self.masters[name])]["weight_decay"] * own(self.masters[name].detach()))
                squares[name] = torch.stack([part.square().sum() for part in parts])
        over = {name: self._place(name).over() for name in adapted}
        Reduction(((ratios[name], over[name]) for name in adapted), dist.ReduceOp.MAX).wait()
        Reduction((squares[name], over[name]) for name in adapted).wait()
        for name in names:
            group, value = self.groups[id(self.masters[name])], own(self.masters[name].detach())
            step = self._step(name).add_(value * group["weight_decay"]).mul_(group["lr"])
            if name in adapted:
                step.mul_(self._corrected(name, ratios[name], squares[name]))
            value.sub_(step)

    def _place(self, name: str) -> Place:
        if name not in self._places:
            self._places[name] = Place(layout_of(self.masters[name]))
        return self._places[name]

    def _step(self, name: str) -> Tensor:
        return self._bounded(self._direction(name, own(self._state(name)["exp_avg"])))

    def _follow(self, name: str) -> Tensor:
        """m and w.  Returns the largest ratio of roots in this rank's part, 0 of none."""
        master, state = self.masters[name], self._state(name)
        m, w, grad = own(state["exp_avg"]), own(state["fresh_sq"]), master.grad
        assert grad is not None
        told = (own(grad) - m * self.beta1).div_(1 - self.beta1)
        w.mul_(self.beta2).addcmul_(told, told, value=1 - self.beta2)
        m.copy_(own(grad))
        moves, root = self.moves(name), self._root(name)
        assert moves is not None
        fresh = (w / (1 - self.beta2 ** self._taken[name])).sqrt_().add_(self.groups[id(master)]["eps"])
        ratio = (root / fresh).mul_(moves)
        return ratio.max().reshape(1) if ratio.numel() else ratio.new_zeros(1)

    def _corrected(self, name: str, ratio: Tensor, squares: Tensor) -> Tensor:
        """a f"""
        state, (of_u, whole) = self._state(name), squares.sqrt()
        before, a = own(state["factor"]), own(state["ratio"])
        share = torch.where(whole > 0, of_u / whole, 1).clamp(max=1)
        factor = torch.where(ratio > 0, ratio * share + 1 - share, 1).clamp(LEAST, MOST).view_as(before)
        factor = torch.minimum(torch.maximum(factor, before * (1 - AT_ONCE)), before * (1 + AT_ONCE))
        before.copy_(factor)
        return a * factor


def frozen(optimizer: torch.optim.Optimizer, masters: Mapping[str, Tensor]) -> Frozen:
    """Raises UserError for an optimizer whose momenta nobody knows how to take."""
    if isinstance(optimizer, Lamb):
        return FrozenLamb(optimizer, masters)
    if isinstance(optimizer, torch.optim.Adam):  # AdamW, too
        return FrozenAdam(optimizer, masters)
    raise UserError(
        f"momenta sent in signs with {type(optimizer).__name__}: adam, adamw and lamb take them; use one of these, or "
        "--comm.compress powersgd"
    )
