"""Inverses of K-FAC's damped factors, and eigenbases; each on one rank.

inverse  (R + l_R I)^-1 V (C + l_C I)^-1, with l_C = pi sqrt l, l_R = sqrt l / pi, pi^2 = (tr C / n) / (tr R / m)
         (Martens and Grosse 2015, arXiv:1503.05671, section 6.3)
eigen    Q_R [(Q_R^T V Q_C) / (r c^T + l)] Q_C^T, r and c the eigenvalues: damping of the product itself
"""

import torch
from torch import Tensor

from core.optim.kfac_layers import trace


class NotInverted(Exception):
    """A factor that no method could invert or decompose."""


def damped_inverses(r: Tensor, c: Tensor, damping: float) -> tuple[Tensor, Tensor]:
    """Of symmetric matrices, or diagonals.  Raises NotInverted."""
    mean_r, mean_c = (trace(f) / f.shape[0] for f in (r, c))
    fine = (mean_r > 0) & (mean_c > 0)
    pi = torch.where(fine, (mean_c / mean_r).sqrt(), torch.ones_like(mean_r))
    return _inverse(r, damping**0.5 / pi), _inverse(c, damping**0.5 * pi)


def _inverse(factor: Tensor, damping: Tensor) -> Tensor:
    if factor.ndim == 1:
        return _finite(1 / (factor + damping))
    damped = factor.clone()
    damped.diagonal().add_(damping)
    root, failed = torch.linalg.cholesky_ex(damped)
    if not failed.item():
        return _finite(torch.cholesky_inverse(root))
    values, basis = eigenbasis(factor)  # rounding has made it indefinite
    values = values + damping
    if not (values > 0).all():
        raise NotInverted("singular")
    return _finite(basis / values @ basis.T)


def eigenbasis(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Eigenvalues >= 0, and eigenvectors as columns; of a diagonal itself, and no vectors.  Raises NotInverted.

    In double precision, where the factor's own does not converge.
    """
    if factor.ndim == 1:
        return _finite(factor), factor.new_empty(0)
    if not factor.isfinite().all():
        raise NotInverted("not finite")
    for dtype in dict.fromkeys((factor.dtype, torch.float64)):
        try:
            values, basis = torch.linalg.eigh(factor.to(dtype))
        except torch.linalg.LinAlgError:
            continue
        return values.clamp(min=0).to(factor.dtype), basis.to(factor.dtype)
    raise NotInverted("no eigenvectors")


def _finite(x: Tensor) -> Tensor:
    if not x.isfinite().all():
        raise NotInverted("singular")
    return x


def times(left: Tensor, matrix: Tensor, right: Tensor) -> Tensor:
    """left matrix right, where each may be a diagonal."""
    matrix = left[:, None] * matrix if left.ndim == 1 else left @ matrix
    return matrix * right if right.ndim == 1 else matrix @ right


def into_basis(matrix: Tensor, q_r: Tensor, q_c: Tensor, back: bool = False) -> Tensor:
    """Q_R^T V Q_C, or back: Q_R V Q_C^T; an empty basis is that of a diagonal factor, and changes nothing."""
    if q_r.numel():
        matrix = (q_r if back else q_r.T) @ matrix
    if q_c.numel():
        matrix = matrix @ (q_c.T if back else q_c)
    return matrix
