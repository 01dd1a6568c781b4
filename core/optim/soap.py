"""SOAP: AdamW in the eigenbasis of Shampoo's factors.

For a matrix W[M, N] with gradient G, the first step only begins

    L = (1 - b) G G^T,  R = (1 - b) G^T G;   Q_L, Q_R their eigenvectors

and step k = 1, 2, .. behind it is

1. m <- b1 m + (1 - b1) G                             in the parameter's own basis
2. G' = Q_L^T G Q_R;  v <- b2 v + (1 - b2) G'^2       in the eigenbasis
3. W <- (1 - lr wd) W - lr Q_L [Q_L^T (m / (1 - b1^k)) Q_R / (sqrt(v / (1 - b2^k)) + eps)] Q_R^T
4. L <- b L + (1 - b) G G^T,  R <- b R + (1 - b) G^T G
5. each `precondition_frequency` steps: the columns of Q_L sorted by their eigenvalues diag(Q_L^T L Q_L), v sorted with
   them, Q_L <- Q of the QR decomposition of L Q_L; Q_R likewise

which is the authors' order (github.com/nikhilvyas/SOAP): factors and bases never see a gradient before the step that it
makes. A side with more rows than `max_preconditioner_dim` keeps its own basis; one-sided SOAP keeps that of the longer
side. Decompositions are in fp64, L and R are packed, and where one fails the step keeps the basis that it has.

Vyas et al. 2024, SOAP: improving and stabilizing Shampoo using Adam, arXiv:2409.11321, algorithm 3.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

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
from core.optim.spectra import eigenbasis, is_finite, packed, packed_size, refreshed, unpacked

Sides = Literal["both", "one"]


class SOAP(MatrixOptimizer):
    """SOAP of matrices, AdamW of everything else.

    params  named parameters, of which the groups are found (`core.optim.matrices`), or groups that say `precondition`;
            without either every matrix is preconditioned
    lr, betas, eps, weight_decay   as AdamW's, of both
    precondition_frequency         steps from basis to basis
    max_preconditioner_dim         a longer side keeps its basis
    shampoo_beta                   b of the factors; None: the second of betas
    sides                          one: only the shorter side is rotated, of a square matrix the left
    rank_rtol                      share of a factor's largest eigenvalue below which directions get a fixed basis of
                                   their span; None: what rounding leaves

    Raises UserError for values out of range, options that are none, and a matrix without a side to factor.
    """

    name, flag, done = "soap", "precondition", "preconditioned"

    def __init__(
        self, params: Iterable[Any], lr: float = 3e-3, betas: tuple[float, float] = (0.95, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.01, *, precondition_frequency: int = 10, max_preconditioner_dim: int = 10_000,
        shampoo_beta: float | None = None, sides: Sides = "both", rank_rtol: float | None = None,
        whole: tuple[str, ...] = WHOLE, momentum_format: MomentumFormat = "fp32", maximize: bool = False,
    ):  # fmt: skip
        own = {
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": max_preconditioner_dim,
            "shampoo_beta": shampoo_beta,
            "sides": sides,
            "rank_rtol": rank_rtol,
        }
        _check(lr, betas, eps, weight_decay, **own)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults | own, whole, momentum_format)

    def _fault(self, shape: tuple[int, ...], options: Mapping[str, Any]) -> str | None:
        most = options["max_preconditioner_dim"]
        none = f"has no side of at most max_preconditioner_dim={most} rows, so there is nothing to factor; raise it"
        return super()._fault(shape, options) or (None if factored(shape, options) else none)

    @staticmethod
    def shapes(shape: tuple[int, ...], options: Mapping[str, Any]) -> Shapes:
        batch = batch_of(shape, options)[0]
        found = {"exp_avg": shape, "exp_avg_sq": shape}
        for side, rows in factored(shape, options).items():
            found |= {side: (batch, packed_size(rows)), f"{side}_basis": (batch, rows, rows)}
        return found

    def _cost(self, shape: tuple[int, ...], options: dict[str, Any]) -> float:
        """Multiplications of a step: three rotations and a factor for each side, and its share of a new basis."""
        batch, m, n = batch_of(shape, options)
        rows, frequency = factored(shape, options).values(), options["precondition_frequency"]
        return batch * sum(4.0 * m * n * k + 3.0 * k**3 / frequency for k in rows)

    def _update_of(self, grad_BMN: Tensor, h: Held, batch: Batch) -> Tensor:
        options, step = batch.options, batch.step - 1
        mine = factored(h.place.layout.shape, options)
        if not is_finite(grad_BMN):
            self.fallbacks += 1
            if not step:
                self._begin(h, options, mine)
            return torch.zeros_like(grad_BMN)
        if not step:
            self._learn(h, grad_BMN, options, mine)
            self._begin(h, options, mine)
            return torch.zeros_like(grad_BMN)
        beta1, beta2 = options["betas"]
        bases = {side: h.own(f"{side}_basis") for side in mine}
        shape = h.own("exp_avg").shape
        m = h.own("exp_avg").lerp_(grad_BMN.reshape(shape), 1 - beta1)
        turned = rotated(grad_BMN, bases).reshape(shape)
        v = h.own("exp_avg_sq").mul_(beta2).addcmul_(turned, turned, value=1 - beta2)
        scale = (v / (1 - beta2**step)).sqrt_().add_(options["eps"]).reshape(grad_BMN.shape)
        update = rotated(m.reshape(grad_BMN.shape) / (1 - beta1**step), bases).div_(scale)
        update = rotated(update, {side: basis.mT for side, basis in bases.items()})
        self._learn(h, grad_BMN, options, mine)
        if step % options["precondition_frequency"] == 0:
            self._refresh(h, grad_BMN.shape, options, mine)
        return update

    def _move(self, h: Held, update: Tensor, batch: Batch) -> None:
        if batch.step > 1:
            super()._move(h, update, batch)

    def _learn(self, h: Held, grad_BMN: Tensor, options: Mapping[str, Any], mine: Mapping[str, int]) -> None:
        beta = options["betas"][1] if options["shampoo_beta"] is None else options["shampoo_beta"]
        for side in mine:
            h.own(side).lerp_(packed(gram(grad_BMN, side)), 1 - beta)

    def _begin(self, h: Held, options: Mapping[str, Any], mine: Mapping[str, int]) -> None:
        for side, rows in mine.items():
            for lower, basis in zip(h.own(side), h.own(f"{side}_basis"), strict=True):
                found = eigenbasis(unpacked(lower, rows), options["rank_rtol"])
                self.fallbacks += found is None
                basis.copy_(torch.eye(rows, device=basis.device) if found is None else found[1])

    def _refresh(self, h: Held, shape_BMN: torch.Size, options: Mapping[str, Any], mine: Mapping[str, int]) -> None:
        v = h.own("exp_avg_sq").reshape(shape_BMN)
        for side, rows in mine.items():
            for index, (lower, basis) in enumerate(zip(h.own(side), h.own(f"{side}_basis"), strict=True)):
                found = refreshed(unpacked(lower, rows), basis, options["rank_rtol"])
                if found is None:
                    self.fallbacks += 1
                    continue
                v[index] = v[index].index_select(0 if side == "left" else 1, found[0])
                basis.copy_(found[1])
        h.own("exp_avg_sq").copy_(v.reshape(h.own("exp_avg_sq").shape))


def factored(shape: tuple[int, ...], options: Mapping[str, Any]) -> dict[str, int]:
    """left, right -> rows of the factor, of the sides that have one."""
    _, m, n = batch_of(shape, options)
    wanted = {"left": m, "right": n}
    if options["sides"] == "one":
        wanted = {"left": m} if m <= n else {"right": n}
    return {side: rows for side, rows in wanted.items() if rows <= options["max_preconditioner_dim"]}


def gram(matrix_BMN: Tensor, side: str) -> Tensor:
    """G G^T of the left side, G^T G of the right."""
    return matrix_BMN @ matrix_BMN.mT if side == "left" else matrix_BMN.mT @ matrix_BMN


def rotated(matrix_BMN: Tensor, bases: Mapping[str, Tensor]) -> Tensor:
    """Q_L^T G Q_R, with the bases that there are."""
    turned = bases["left"].mT @ matrix_BMN if "left" in bases else matrix_BMN
    return turned @ bases["right"] if "right" in bases else turned + 0


def _check(
    lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, *, precondition_frequency: int,
    max_preconditioner_dim: int, shampoo_beta: float | None, sides: str, rank_rtol: float | None,
) -> None:  # fmt: skip
    check_moments("soap", lr, betas, eps, weight_decay)
    fine = shampoo_beta is None or 0 <= shampoo_beta < 1
    check_options(
        "soap",
        precondition_frequency=(precondition_frequency, precondition_frequency >= 1, "a number of steps >= 1"),
        max_preconditioner_dim=(max_preconditioner_dim, max_preconditioner_dim >= 1, "a number of rows >= 1"),
        shampoo_beta=(shampoo_beta, fine, "a number from 0 to below 1, or None for the second of betas"),
        sides=(sides, sides in ("both", "one"), "both or one"),
        rank_rtol=(rank_rtol, rank_rtol is None or 0 <= rank_rtol < 1, "a number from 0 to below 1, or None"),
    )


@dataclass(frozen=True)
class SOAPConfig(MatrixConfig):
    name: str = "soap"
    betas: tuple[float, float] = (0.95, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.01
    """of matrices; vectors (norms, biases) are never decayed"""
    precondition_frequency: int = 10
    """steps from one eigenbasis to the next"""
    max_preconditioner_dim: int = 10_000
    """a side with more rows keeps its own basis"""
    shampoo_beta: float | None = None
    """share of a factor that a step keeps; None: the second of betas"""
    sides: Sides = "both"
    """one: only the shorter side of each matrix is rotated"""
    rank_rtol: float | None = None
    """share of a factor's largest eigenvalue below which directions get a fixed basis; None: what rounding leaves"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **self.options())


def _build(config: SOAPConfig, masters: Mapping[str, Tensor]) -> SOAP:
    require_matrices(config, masters)
    return SOAP(masters.items(), lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(
    SOAPConfig,
    partial(matrix_state_bytes, SOAP),
    _build,
    sized_by=("sides", "max_preconditioner_dim", "whole", "momentum_format"),
)
