"""GaLore: AdamW of gradients projected to the few directions that they have most of.

For a matrix W[M, N] with gradient G, step t = 1, 2, .. (M < N; else with G^T, so P is of the right side of square and
tall matrices)

1. each `update_gap` steps P[M, r] <- the r first left singular vectors of G, with the signs of those before
2. g = P^T G;  m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2
3. W <- (1 - lr wd) W - lr alpha P [m / (1 - b1^t) / (sqrt(v / (1 - b2^t)) + eps)]

The paper leaves m and v as they are when P changes, though they are coordinates of the old basis. With `rotate_moments`
they go along: m <- C m and v <- (C * C) v with C = P_new^T P_old, which is exact for m and for v what holds where the
old coordinates do not correlate (Robert et al. 2024, LDAdam, arXiv:2410.16103, section 3). Decompositions are in fp64.

Zhao et al. 2024, GaLore: memory-efficient LLM training by gradient low-rank projection, arXiv:2403.03507, algorithm 2.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from core.optim.matrices import (
    WHOLE,
    MatrixConfig,
    MatrixOptimizer,
    Shapes,
    batch_of,
    matrix_state_bytes,
    require_matrices,
)
from core.optim.narrow import MomentumFormat
from core.optim.sharded import Batch, Held
from core.optim.spec import OptimizerSpec, check_moments, check_options, own_values
from core.optim.spectra import has_values, is_finite, negligible, settled

_NO_OVERLAP = 1e-6
"""cosine of an old and a new direction below which the sign of the new one is not taken from it"""


class GaLore(MatrixOptimizer):
    """GaLore of matrices, AdamW of everything else.

    params  named parameters, of which the groups are found (`core.optim.matrices`), or groups that say `project`;
            without either every matrix is projected
    lr, betas, eps, weight_decay   as AdamW's, of both
    rank                           r; of a smaller matrix its shorter side
    update_gap                     steps from projection to projection
    alpha                          factor of the rate of projected matrices
    rotate_moments                 take the moments along when the projection changes

    Raises UserError for values out of range, and for options that are none.
    """

    name, flag, done = "galore", "project", "projected"

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-2, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
        weight_decay: float = 0.0, *, rank: int = 128, update_gap: int = 200, alpha: float = 0.25,
        rotate_moments: bool = False, whole: tuple[str, ...] = WHOLE,
        momentum_format: MomentumFormat = "fp32", maximize: bool = False,
    ):  # fmt: skip
        own = {"rank": rank, "update_gap": update_gap, "alpha": alpha, "rotate_moments": rotate_moments}
        _check(lr, betas, eps, weight_decay, **own)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults | own, whole, momentum_format)

    @staticmethod
    def shapes(shape: tuple[int, ...], options: Mapping[str, Any]) -> Shapes:
        batch, m, n = batch_of(shape, options)
        rank, low = min(options["rank"], m, n), (max(m, n), min(m, n))
        moments = (batch, rank, low[0]) if m < n else (batch, low[0], rank)
        return {"exp_avg": moments, "exp_avg_sq": moments, "basis": (batch, low[1], rank)}

    def _cost(self, shape: tuple[int, ...], options: dict[str, Any]) -> float:
        """Multiplications of a step: there and back, and its share of a decomposition."""
        batch, m, n = batch_of(shape, options)
        rank = min(options["rank"], m, n)
        return batch * (2.0 * m * n * rank + 10.0 * max(m, n) * min(m, n) ** 2 / options["update_gap"])

    def _update_of(self, grad_BMN: Tensor, h: Held, batch: Batch) -> Tensor:
        options, step = batch.options, batch.step
        if not is_finite(grad_BMN):
            self.fallbacks += 1
            if step == 1:
                h.own("basis").copy_(torch.eye(*h.own("basis").shape[1:], device=grad_BMN.device))
            return torch.zeros_like(grad_BMN)
        is_left = grad_BMN.shape[1] < grad_BMN.shape[2]
        grad_BKN = grad_BMN if is_left else grad_BMN.mT
        m, v = (h.own(key) if is_left else h.own(key).mT for key in ("exp_avg", "exp_avg_sq"))
        basis_BKR = h.own("basis")
        if (step - 1) % options["update_gap"] == 0:
            for index, basis in enumerate(basis_BKR):
                self._renew(basis, grad_BKN[index], m[index], v[index], options["rotate_moments"] and step > 1)
        beta1, beta2 = options["betas"]
        low = basis_BKR.mT @ grad_BKN
        m.lerp_(low, 1 - beta1)
        v.mul_(beta2).addcmul_(low, low, value=1 - beta2)
        scale = (v / (1 - beta2**step)).sqrt_().add_(options["eps"])
        update = basis_BKR @ (m / (1 - beta1**step) / scale) * options["alpha"]
        return update if is_left else update.mT

    def _renew(self, basis: Tensor, grad: Tensor, m: Tensor, v: Tensor, rotate: bool) -> None:
        """A new basis in place of the old one, which stays where there is none to be had."""
        found = principal(grad, basis.shape[1])
        if found is None:
            self.fallbacks += 1
            if has_values(basis) and not basis.any():
                basis.copy_(torch.eye(*basis.shape, device=basis.device))
            return
        turn = found.mT @ basis.double()
        ramp = torch.arange(1, len(found) + 1, dtype=found.dtype, device=found.device) @ found
        overlap = turn.diagonal()
        signs = torch.where(torch.where(overlap.abs() > _NO_OVERLAP, overlap, ramp) < 0, -1.0, 1.0).to(found.dtype)
        found, turn = found * signs, turn * signs[:, None]
        if rotate:
            m.copy_(turn.to(m.dtype) @ m)
            v.copy_(turn.square().to(v.dtype) @ v)
        basis.copy_(found)


def principal(grad_KN: Tensor, rank: int) -> Tensor | None:
    """The first left singular vectors [K, rank] of a matrix, in fp64; None where they do not converge.

    What a gradient of a smaller rank leaves open is settled by `core.optim.spectra`.
    """
    try:
        u, sizes, _ = torch.linalg.svd(grad_KN.double(), full_matrices=False)
    except torch.linalg.LinAlgError:
        return None
    if has_values(grad_KN):
        own = int((sizes > negligible(grad_KN.dtype) * sizes[0]).count_nonzero())
        u = torch.cat([u[:, :own], settled(u[:, own:])], 1) if own < rank else u
    return u[:, :rank]


def _check(
    lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, *, rank: int, update_gap: int, alpha: float,
    rotate_moments: bool,
) -> None:  # fmt: skip
    check_moments("galore", lr, betas, eps, weight_decay)
    check_options(
        "galore",
        rank=(rank, rank >= 1, "a number of directions >= 1"),
        update_gap=(update_gap, update_gap >= 1, "a number of steps >= 1"),
        alpha=(alpha, alpha > 0, "a number > 0"),
        rotate_moments=(rotate_moments, isinstance(rotate_moments, bool), "True or False"),
    )


@dataclass(frozen=True)
class GaLoreConfig(MatrixConfig):
    name: str = "galore"
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    """of matrices; vectors (norms, biases) are never decayed"""
    rank: int = 128
    """directions of each matrix"""
    update_gap: int = 200
    """steps from one projection to the next"""
    alpha: float = 0.25
    """factor of the rate of projected matrices"""
    rotate_moments: bool = False
    """take the moments along when the projection changes; the paper does not"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **self.options())


def _build(config: GaLoreConfig, masters: Mapping[str, Tensor]) -> GaLore:
    require_matrices(config, masters)
    return GaLore(masters.items(), lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(
    GaLoreConfig, partial(matrix_state_bytes, GaLore), _build, sized_by=("rank", "whole", "momentum_format")
)
