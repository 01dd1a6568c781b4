"""LARS (You, Gitman and Ginsburg 2017, arXiv:1708.03888, algorithm 1): momentum with a rate of its own for each layer.

    rate = trust |p| / (|g| + weight_decay |p| + eps)         the layer's own; 1 where `adapt` is False
    m   <- momentum m + lr rate (g + weight_decay p)
    p   <- p - m

|.| is the norm of the whole parameter, however it is sharded: the sums of squares of all parameters travel in one
message a process group. The rate is 1 where |p| or |g| is zero.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.optim.pieces import pieces
from core.optim.sgd import one_moment
from core.optim.sharded import Batch, Held, Reduction, ShardedOptimizer
from core.optim.spec import OptimConfig, OptimizerSpec, check_momentum, check_options, decay_groups, own_values


class Lars(ShardedOptimizer):
    """LARS for plain tensors, DTensors and local tensors with a layout.

    trust  the coefficient eta of equation 6
    adapt  give False in the group of norms and biases, which take lr as it is

    Raises UserError for values out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1.0, momentum: float = 0.9, weight_decay: float = 5e-4, *,
        trust: float = 1e-3, eps: float = 1e-8, adapt: bool = True, maximize: bool = False,
    ):  # fmt: skip
        _check(lr, momentum, weight_decay, trust, eps)
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust, "eps": eps, "adapt": adapt,
            "maximize": maximize,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        return {"momentum_buffer": self._zeros(parameter)}

    def _update(self, batches: list[Batch]) -> None:
        norms = [_measure(batch) for batch in batches]
        Reduction(
            (row, h.place.over()) for batch, squares in zip(batches, norms) for row, h in zip(squares, batch.held)
        ).wait()
        for batch, squares in zip(batches, norms):
            _apply(batch, squares)


def _measure(batch: Batch) -> Tensor:
    """The sums of p^2 and g^2 over this rank's shards, [parameters, 2]."""
    squares = torch.zeros(len(batch.held), 2, dtype=batch.wide, device=batch.device)
    if batch.options["adapt"]:
        for indices, lists in pieces(*_lists(batch)[:2]):
            wide = [[t.to(batch.wide) for t in tensors] for tensors in lists]
            norms = torch.stack([torch.stack(torch._foreach_norm(tensors)) for tensors in wide], 1)
            squares.index_add_(0, torch.tensor(indices, device=batch.device), norms.square())
    return squares


def _apply(batch: Batch, squares: Tensor) -> None:
    """The update, from complete sums of squares."""
    options = batch.options
    rates = torch.ones(len(batch.held), dtype=batch.wide, device=batch.device)
    if options["adapt"]:
        of_p, of_g = squares.sqrt().unbind(1)
        own = options["trust"] * of_p / (of_g + options["weight_decay"] * of_p + options["eps"])
        rates = torch.where((of_p > 0) & (of_g > 0), own, rates)
    steps = (options["lr"] * rates).tolist()
    for indices, (values, grads, ms) in pieces(*_lists(batch)):
        directions = torch._foreach_mul([g.to(batch.wide) for g in grads], -1.0 if options["maximize"] else 1.0)
        torch._foreach_add_(directions, [p.to(batch.wide) for p in values], alpha=options["weight_decay"])
        torch._foreach_mul_(directions, [steps[index] for index in indices])
        torch._foreach_mul_(ms, options["momentum"])
        torch._foreach_add_(ms, directions)
        torch._foreach_sub_(values, ms)


def _lists(batch: Batch) -> tuple[list[Tensor], ...]:
    def of(h: Held) -> tuple[Tensor, ...]:
        return h.value, h.grad, h.own("momentum_buffer")

    return tuple(map(list, zip(*map(of, batch.held))))


def _check(lr: float, momentum: float, weight_decay: float, trust: float, eps: float) -> None:
    check_momentum("lars", lr, momentum, weight_decay)
    check_options("lars", trust=(trust, trust > 0, "a number > 0"), eps=(eps, eps >= 0, "a number >= 0"))


@dataclass(frozen=True)
class LarsConfig(OptimConfig):
    name: str = "lars"
    momentum: float = 0.9
    weight_decay: float = 5e-4
    """of matrices; vectors (norms, biases) are never decayed"""
    trust: float = 1e-3
    """the layers' rates are trust |p| / |g|"""
    eps: float = 1e-8

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **own_values(self))


def _build(config: LarsConfig, masters: Mapping[str, Tensor]) -> Lars:
    matrices, vectors = decay_groups(masters, config.weight_decay)
    return Lars([matrices, vectors | {"adapt": False}], lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(LarsConfig, one_moment, _build)
