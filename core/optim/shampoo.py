"""Shampoo: gradients multiplied by roots of the second moments of their rows and columns.

For a matrix W[M, N] with gradient G, step t = 1, 2, ..

1. L <- b L + (1 - b) G G^T,  R <- b R + (1 - b) G^T G;  with b = 1 sums instead
2. each `precondition_frequency` steps (until then at 1, 2, 4, ..) the roots of L and R, divided by 1 - b^t:
   A = L^(-1/p), B = R^(-1/p);  p = 4 of the paper, 3 or 2 on request; one-sided: A alone, or B, with p = 2
3. m <- b1 m + (1 - b1) G;  D = A m / (1 - b1^t) B
4. D <- D ||D'|| / ||D|| over the whole matrix, D' the step that is grafted: AdamW's, or the momentum itself (sgd)
5. W <- (1 - lr wd) W - lr D

A root is that of the pseudo-inverse: directions of which a factor has nothing are left out. Early factors lack most,
and (L + eps)^(-1/p) would blow up the rounding in them (facebookresearch/optimizers #265). A matrix with a side longer
than `max_preconditioner_dim` is cut into blocks of at most so many rows and columns, each with factors of its own;
blocks are of the whole, whatever shards it. Decompositions are in fp64; factors and roots are packed.

Gupta et al. 2018, Shampoo: preconditioned stochastic tensor optimization, arXiv:1802.09568, algorithm 1; Anil et al.
2020, arXiv:2002.09018, sections 3 and 4 (blocks, grafting, roots that are kept); Shi et al. 2023, arXiv:2309.06497.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import product
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
from core.optim.soap import Sides, gram
from core.optim.spec import OptimizerSpec, check_moments, check_options, own_values
from core.optim.spectra import eigenbasis, has_values, inverse_root, is_finite, packed, packed_size, unpacked

Graft = Literal["adamw", "sgd", "none"]


class Shampoo(MatrixOptimizer):
    """Shampoo of matrices, AdamW of everything else.

    params  named parameters, of which the groups are found (`core.optim.matrices`), or groups that say `precondition`;
            without either every matrix is preconditioned
    lr, betas, eps, weight_decay   as AdamW's, of both; eps of matrices only in what is grafted
    root                           p of the roots L^(-1/p): 2, 3 or 4; None: 4, one-sided 2
    sides                          one: only the shorter side has a factor, of a square matrix the left
    graft                          whose step has the length of this one: adamw, sgd or none
    precondition_frequency         steps from root to root
    max_preconditioner_dim         most rows and columns of a block
    shampoo_beta                   b of the factors, 1 for sums; None: the second of betas
    rank_rtol                      share of a factor's largest eigenvalue below which a direction is left out; None:
                                   what rounding leaves

    Raises UserError for values out of range, and for options that are none.
    """

    name, flag, done = "shampoo", "precondition", "preconditioned"

    def __init__(
        self, params: Iterable[Any], lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
        weight_decay: float = 0.1, *, root: int | None = None, sides: Sides = "both", graft: Graft = "adamw",
        precondition_frequency: int = 10, max_preconditioner_dim: int = 8192, shampoo_beta: float | None = None,
        rank_rtol: float | None = None, whole: tuple[str, ...] = WHOLE,
        momentum_format: MomentumFormat = "fp32", maximize: bool = False,
    ):  # fmt: skip
        own = {
            "root": root,
            "sides": sides,
            "graft": graft,
            "precondition_frequency": precondition_frequency,
            "max_preconditioner_dim": max_preconditioner_dim,
            "shampoo_beta": shampoo_beta,
            "rank_rtol": rank_rtol,
        }
        _check(lr, betas, eps, weight_decay, **own)
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        super().__init__(params, defaults | own, whole, momentum_format)

    @staticmethod
    def shapes(shape: tuple[int, ...], options: Mapping[str, Any]) -> Shapes:
        batch, _, _ = batch_of(shape, options)
        found = {"exp_avg": shape} | ({"exp_avg_sq": shape} if options["graft"] == "adamw" else {})
        for side in _sided(shape, options):
            size = sum(packed_size(len(block[side])) for block in _blocks(shape, options))
            found |= {side: (batch, size), f"{side}_root": (batch, size)}
        return found

    def _cost(self, shape: tuple[int, ...], options: dict[str, Any]) -> float:
        """Multiplications of a step: a factor and a product for each side, and its share of the roots."""
        frequency, cost = options["precondition_frequency"], 0.0
        for block in _blocks(shape, options):
            elements = len(block["left"]) * len(block["right"])
            rows = [len(block[side]) for side in _sided(shape, options)]
            cost += sum(2.0 * elements * k + 12.0 * k**3 / frequency for k in rows)
        return batch_of(shape, options)[0] * cost

    def _update_of(self, grad_BMN: Tensor, h: Held, batch: Batch) -> Tensor:
        options, step = batch.options, batch.step
        if not is_finite(grad_BMN):
            self.fallbacks += 1
            return torch.zeros_like(grad_BMN)
        beta1, beta2 = options["betas"]
        exp_avg = h.own("exp_avg")
        grad = grad_BMN.reshape(exp_avg.shape)
        m = (exp_avg.lerp_(grad, 1 - beta1) / (1 - beta1**step)).reshape(grad_BMN.shape)
        update = self._preconditioned(m, grad_BMN, h, batch)
        if options["graft"] == "none":
            return update
        length = m
        if options["graft"] == "adamw":
            v = h.own("exp_avg_sq").mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            length = m / (v / (1 - beta2**step)).sqrt_().add_(options["eps"]).reshape(m.shape)
        norm = torch.linalg.matrix_norm(update, keepdim=True)
        return update * torch.where(norm > 0, torch.linalg.matrix_norm(length, keepdim=True) / norm, 0.0)

    def _preconditioned(self, m_BMN: Tensor, grad_BMN: Tensor, h: Held, batch: Batch) -> Tensor:
        options, shape = batch.options, h.place.layout.shape
        beta = options["betas"][1] if options["shampoo_beta"] is None else options["shampoo_beta"]
        sided, update, first = _sided(shape, options), torch.empty_like(m_BMN), Counter[str]()
        for block in _blocks(shape, options):
            at = (slice(None), *(slice(block[side].start, block[side].stop) for side in ("left", "right")))
            made = m_BMN[at]
            for side in sided:
                rows = len(block[side])
                stretch = slice(first[side], first[side] + packed_size(rows))
                first[side] = stretch.stop
                factor, root = h.own(side)[:, stretch], h.own(f"{side}_root")[:, stretch]
                factor.mul_(beta).add_(packed(gram(grad_BMN[at], side)), alpha=1 - beta if beta < 1 else 1.0)
                if _is_due(batch.step, options["precondition_frequency"]):
                    self._renew(root, factor / (1 - beta**batch.step) if beta < 1 else factor, rows, options)
                made = unpacked(root, rows) @ made if side == "left" else made @ unpacked(root, rows)
            update[at] = made
        return update

    def _renew(self, root_BP: Tensor, factor_BP: Tensor, rows: int, options: Mapping[str, Any]) -> None:
        """New roots; where a decomposition fails the old one stays, before there is any the unit matrix."""
        power = options["root"] or (2 if options["sides"] == "one" else 4)
        for root, factor in zip(root_BP, factor_BP, strict=True):
            found = eigenbasis(unpacked(factor, rows), options["rank_rtol"])
            if found is not None:
                root.copy_(packed(inverse_root(*found, power)))
                continue
            self.fallbacks += 1
            if has_values(root) and not root.any():
                root.copy_(packed(torch.eye(rows, device=root.device)))


def _is_due(step: int, frequency: int) -> bool:
    return step % frequency == 0 if step >= frequency else step & (step - 1) == 0


def _sided(shape: tuple[int, ...], options: Mapping[str, Any]) -> tuple[str, ...]:
    """The sides with factors."""
    _, m, n = batch_of(shape, options)
    return ("left", "right") if options["sides"] == "both" else ("left",) if m <= n else ("right",)


def _blocks(shape: tuple[int, ...], options: Mapping[str, Any]) -> Iterator[dict[str, range]]:
    """left, right -> rows, columns of each block."""
    _, *lengths = batch_of(shape, options)
    most = options["max_preconditioner_dim"]
    cuts = ([range(n)[start : start + most] for start in range(0, n, most)] for n in lengths)
    for rows, columns in product(*cuts):
        yield {"left": rows, "right": columns}


def _check(
    lr: float, betas: tuple[float, ...], eps: float, weight_decay: float, *, root: int | None, sides: str, graft: str,
    precondition_frequency: int, max_preconditioner_dim: int, shampoo_beta: float | None,
    rank_rtol: float | None,
) -> None:  # fmt: skip
    check_moments("shampoo", lr, betas, eps, weight_decay)
    fine = shampoo_beta is None or 0 <= shampoo_beta <= 1
    check_options(
        "shampoo",
        root=(root, root in (None, 2, 3, 4), "2, 3 or 4, or None for 4 (one-sided 2)"),
        sides=(sides, sides in ("both", "one"), "both or one"),
        graft=(graft, graft in ("adamw", "sgd", "none"), "adamw, sgd or none"),
        precondition_frequency=(precondition_frequency, precondition_frequency >= 1, "a number of steps >= 1"),
        max_preconditioner_dim=(max_preconditioner_dim, max_preconditioner_dim >= 1, "a number of rows >= 1"),
        shampoo_beta=(shampoo_beta, fine, "a number from 0 to 1, or None for the second of betas"),
        rank_rtol=(rank_rtol, rank_rtol is None or 0 <= rank_rtol < 1, "a number from 0 to below 1, or None"),
    )


@dataclass(frozen=True)
class ShampooConfig(MatrixConfig):
    name: str = "shampoo"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.1
    """of matrices; vectors (norms, biases) are never decayed"""
    root: int | None = None
    """p of the roots L^(-1/p), 2, 3 or 4; None: 4, one-sided 2"""
    sides: Sides = "both"
    """one: only the shorter side of each matrix has a factor"""
    graft: Graft = "adamw"
    """the step whose length a matrix's has: adamw, sgd or none"""
    precondition_frequency: int = 10
    """steps from one root to the next"""
    max_preconditioner_dim: int = 8192
    """most rows and columns of a block with factors of its own"""
    shampoo_beta: float | None = None
    """share of a factor that a step keeps, 1 for sums; None: the second of betas"""
    rank_rtol: float | None = None
    """share of a factor's largest eigenvalue below which a direction is left out; None: what rounding leaves"""

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self.lr, **self.options())


def _build(config: ShampooConfig, masters: Mapping[str, Tensor]) -> Shampoo:
    require_matrices(config, masters)
    return Shampoo(masters.items(), lr=config.lr, **own_values(config))


SPEC = OptimizerSpec(
    ShampooConfig,
    partial(matrix_state_bytes, Shampoo),
    _build,
    sized_by=("sides", "graft", "max_preconditioner_dim", "whole", "momentum_format"),
)
