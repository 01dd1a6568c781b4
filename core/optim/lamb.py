"""LAMB (You et al. 2020, arXiv:1904.00962, algorithm 2): Adam whose step is as long as the layer's weights ask for.

    m <- beta1 m + (1 - beta1) g                    v <- beta2 v + (1 - beta2) g^2
    u  = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + eps) + weight_decay p
    p <- p - lr phi(|p|) / |u| u

|.| is the norm of the whole parameter, however it is sharded: the sums of squares of all parameters travel in one
message a process group. u is computed twice rather than kept. phi(z) = min(z, max_norm), and the ratio is 1 where
either norm is zero.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from core.optim.adamw import two_moments
from core.optim.pieces import pieces
from core.optim.sharded import Batch, Held, Reduction, ShardedOptimizer
from core.optim.spec import OptimConfig, OptimizerSpec, check_moments, check_options, decay_groups, own_values

OF_RATIO = ("ratio", "factor")
OF_BEFORE = 0.9
"""What an average of ratios keeps of itself (Li et al. 2021, arXiv:2104.06069, algorithm 1)."""


class Lamb(ShardedOptimizer):
    """LAMB for plain tensors, DTensors and local tensors with a layout.

    adapt            scale by the trust ratio; give False in the group of norms and biases, as the authors' code does
    max_norm         bound of phi; None: none
    bias_correction  divide m and v by what their averages lack in the first steps
    tracks           keep what steps need whose momenta are sent in signs (`core.optim.frozen`): the average of the
                     ratio, its correction, and a second moment that goes on where v stays

    Raises UserError for values out of range.
    """

    def __init__(
        self, params: Any, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6,
        weight_decay: float = 0.01, *, adapt: bool = True, max_norm: float | None = None,
        bias_correction: bool = True, maximize: bool = False, tracks: bool = False,
    ):  # fmt: skip
        _check(lr, betas, eps, weight_decay, max_norm)
        defaults = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "adapt": adapt, "max_norm": max_norm,
            "bias_correction": bias_correction, "maximize": maximize, "tracks": tracks,
        }  # fmt: skip
        super().__init__(params, defaults)

    def _new_state(self, parameter: Tensor, options: dict[str, Any]) -> dict[str, Any]:
        found = {"exp_avg": self._zeros(parameter), "exp_avg_sq": self._zeros(parameter)}
        if options["tracks"]:
            found |= {key: self._zeros(parameter, collapsed=self._collapsed(parameter, key)) + 1 for key in OF_RATIO}
            found["fresh_sq"] = self._zeros(parameter)
        return found

    def _collapsed(self, parameter: Tensor, key: str) -> tuple[int, ...]:
        return tuple(range(parameter.ndim)) if key in OF_RATIO else ()

    def _update(self, batches: list[Batch]) -> None:
        norms = [_average_and_measure(batch) for batch in batches]
        Reduction(
            (row, h.place.over()) for batch, squares in zip(batches, norms) for row, h in zip(squares, batch.held)
        ).wait()
        for batch, squares in zip(batches, norms):
            ratios = _apply(batch, squares)
            if batch.options["tracks"]:
                _track(batch, ratios)


def _average_and_measure(batch: Batch) -> Tensor:
    """m and v in place; the sums of p^2 and u^2 over this rank's shards, [parameters, 2]."""
    beta1, beta2 = batch.options["betas"]
    sign = -1.0 if batch.options["maximize"] else 1.0
    squares = torch.zeros(len(batch.held), 2, dtype=batch.wide, device=batch.device)
    for indices, (values, grads, ms, vs) in pieces(*_lists(batch)):
        grads = [g.to(batch.wide) for g in grads]
        torch._foreach_mul_(ms, beta1)
        torch._foreach_add_(ms, grads, alpha=sign * (1 - beta1))
        torch._foreach_mul_(vs, beta2)
        torch._foreach_addcmul_(vs, grads, grads, value=1 - beta2)
        if batch.options["adapt"]:
            lists = [[p.to(batch.wide) for p in values], _directions(batch, values, ms, vs)]
            norms = torch.stack([torch.stack(torch._foreach_norm(tensors)) for tensors in lists], 1)
            squares.index_add_(0, torch.tensor(indices, device=batch.device), norms.square())
    return squares


def _apply(batch: Batch, squares: Tensor) -> Tensor:
    """p <- p - lr ratio u, from complete sums of squares.  Returns the ratios."""
    ratios = torch.ones(len(batch.held), dtype=batch.wide, device=batch.device)
    if batch.options["adapt"]:
        of_p, of_u = squares.sqrt().unbind(1)
        bounded = of_p if batch.options["max_norm"] is None else of_p.clamp(max=batch.options["max_norm"])
        ratios = torch.where((of_p > 0) & (of_u > 0), bounded / of_u, ratios)
    steps = (-batch.options["lr"] * ratios).tolist()
    for indices, (values, _, ms, vs) in pieces(*_lists(batch)):
        directions = _directions(batch, values, ms, vs)
        torch._foreach_mul_(directions, [steps[index] for index in indices])
        torch._foreach_add_(values, directions)
    return ratios


def _track(batch: Batch, ratios: Tensor) -> None:
    for h, ratio in zip(batch.held, ratios):
        average = h.own("ratio")
        average.copy_(ratio if batch.step == 1 else OF_BEFORE * average + (1 - OF_BEFORE) * ratio)
        h.own("factor").fill_(1.0)
        h.own("fresh_sq").copy_(h.own("exp_avg_sq"))


def _directions(batch: Batch, values: list[Tensor], ms: list[Tensor], vs: list[Tensor]) -> list[Tensor]:
    """u of some pieces, in the wide format."""
    options, (beta1, beta2) = batch.options, batch.options["betas"]
    rest1, rest2 = (1 - beta1**batch.step, 1 - beta2**batch.step) if options["bias_correction"] else (1.0, 1.0)
    roots = torch._foreach_sqrt(vs)
    torch._foreach_mul_(roots, rest1 / math.sqrt(rest2))
    torch._foreach_add_(roots, rest1 * options["eps"])
    directions = torch._foreach_div(ms, roots)
    if options["weight_decay"]:
        torch._foreach_add_(directions, [p.to(batch.wide) for p in values], alpha=options["weight_decay"])
    return list(directions)


def _lists(batch: Batch) -> tuple[list[Tensor], ...]:
    def of(h: Held) -> tuple[Tensor, ...]:
        return h.value, h.grad, h.own("exp_avg"), h.own("exp_avg_sq")

    return tuple(map(list, zip(*map(of, batch.held))))


def _check(lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, max_norm: float | None) -> None:
    check_moments("lamb", lr, betas, eps, weight_decay)
    check_options("lamb", max_norm=(max_norm, max_norm is None or max_norm > 0, "a number > 0, or None"))


@dataclass(frozen=True)
class LambConfig(OptimConfig):
    name: str = "lamb"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01
    """of matrices; vectors (norms, biases) are never decayed"""
    max_norm: float | None = None
    """bound of the weights' norm in the trust ratio; by default there is none"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **own_values(self))


def _build(config: LambConfig, masters: Mapping[str, Tensor]) -> Lamb:
    matrices, vectors = decay_groups(masters, config.weight_decay)
    return Lamb([matrices, vectors | {"adapt": False}], lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(LambConfig, two_moments, _build)
