"""Preconditioned conjugate gradients that stop when the quadratic model gains little, and keep some of their iterates.

Martens 2010, Deep learning via Hessian-free optimization, sections 4.4 (when to stop), 4.6 (which iterates), 4.7 (the
preconditioner).
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Solution:
    """iterates  [(x, phi(x))], those of iterations 1, 2, 3, … 1.3^j …, and the last
    iterations   how many were made
    """

    iterates: list[tuple[Tensor, float]]
    iterations: int


def solve(
    product: Callable[[Tensor], Tensor], right: Tensor, start: Tensor, precondition: Tensor, most: int, tolerance: float
) -> Solution:
    """Minimise phi(x) = x^T B x / 2 - right^T x, with B = product positive semidefinite.

    right, start   [n]
    precondition   [n], the diagonal of a matrix like B
    most           iterations
    tolerance      stop when the last k = max(10, i / 10) iterations gained less than k tolerance of phi; 0: go on until
                   the residual is rounding

    Raises ArithmeticError where B, or what it is applied to, is not finite.
    """
    x = start.clone()
    residual = (right - product(x)) if bool(x.any()) else right.clone()
    y = residual / precondition
    direction, slope = y.clone(), float(residual @ y)
    phis = [_phi(x, right, residual)]
    kept: list[tuple[Tensor, float]] = []
    least = torch.finfo(x.dtype).eps ** 2 * float(right @ (right / precondition))
    done, keep_at = 0, 1.0
    while done < most and not slope <= least:  # also of a slope that is no number, which its curvature tells
        image = product(direction)
        curvature = float(direction @ image)
        if curvature != curvature or curvature == float("inf"):
            raise ArithmeticError("the curvature is not finite")
        if curvature <= 0:
            break  # no curvature is left along it
        length = slope / curvature
        x = x + length * direction
        residual = residual - length * image
        y = residual / precondition
        new = float(residual @ y)
        direction = y + (new / slope) * direction
        slope, done = new, done + 1
        phis.append(_phi(x, right, residual))
        if done >= keep_at:
            kept.append((x, phis[-1]))
            while keep_at <= done:
                keep_at *= 1.3
        window = max(10, done // 10)
        if tolerance and done > window and phis[-1] < 0:
            gained = (phis[-1] - phis[-1 - window]) / phis[-1]
            if gained < window * tolerance:
                break
    if not kept or kept[-1][0] is not x:
        kept.append((x, phis[-1]))
    return Solution(kept, done)


def _phi(x: Tensor, right: Tensor, residual: Tensor) -> float:
    return -0.5 * float(x @ (right + residual))
