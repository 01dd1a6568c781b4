"""Symmetric factors of matrices: packed, decomposed in fp64, and bases that follow from the values alone.

An eigenbasis is arbitrary where eigenvalues agree, and rounding, which is another on n ranks than on one, would choose
it. The common case is a factor without full rank: of the directions that no gradient had, the basis taken here is that
in which the diagonal matrix 1, 2, .., n is diagonal, too, so coordinates that are always zero keep their axes. A basis
that is renewed stays as near to the former one there as it can.
"""

import torch
from torch import Tensor

from core.compat import FakeTensor

_ROUNDINGS = 32
"""Eigenvalues below so many units of rounding of the largest are zero: sums of products leave about as many."""


def packed_size(n: int) -> int:
    """Elements of a symmetric matrix [n, n] without those above its diagonal."""
    return n * (n + 1) // 2


def packed(full: Tensor) -> Tensor:
    """[.., n, n], symmetric -> [.., n (n + 1) / 2]"""
    rows, columns = torch.tril_indices(full.shape[-1], full.shape[-1], device=full.device)
    return full[..., rows, columns]


def unpacked(lower: Tensor, n: int) -> Tensor:
    """The inverse of `packed`."""
    rows, columns = torch.tril_indices(n, n, device=lower.device)
    full = lower.new_empty(*lower.shape[:-1], n, n)
    full[..., rows, columns] = lower
    full[..., columns, rows] = lower
    return full


def has_values(tensor: Tensor) -> bool:
    """Return whether a tensor can be looked at: on the meta device, and where a step is only estimated, it cannot."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def is_finite(tensor: Tensor) -> bool:
    return not has_values(tensor) or bool(tensor.isfinite().all())


def negligible(dtype: torch.dtype) -> float:
    """The share of the largest eigenvalue of a factor of that format below which one is zero."""
    return _ROUNDINGS * torch.finfo(dtype).eps


def eigenbasis(factor: Tensor, share: float | None = None) -> tuple[Tensor, Tensor] | None:
    """Eigenvalues, the largest first, and eigenvectors as columns, in fp64; what is negligible is zero.

    share  of the largest eigenvalue below which one is negligible; None: what rounding leaves

    None where the factor is not finite, or the decomposition does not converge.
    """
    if not is_finite(factor):
        return None
    try:
        values, vectors = torch.linalg.eigh(factor.double())
    except torch.linalg.LinAlgError:
        return None
    values, vectors = values.flip(-1), vectors.flip(-1)
    if not has_values(factor):
        return values, vectors
    share = negligible(factor.dtype) if share is None else share
    values = torch.where(values > share * values[0], values, 0.0)
    rank = int(values.count_nonzero())
    return values, torch.cat([vectors[:, :rank], settled(vectors[:, rank:])], 1)


def settled(basis: Tensor) -> Tensor:
    """The basis of the span of orthonormal columns [n, k] in which the diagonal matrix 1, .., n is diagonal."""
    n, k = basis.shape
    if not k:
        return basis
    ramp = torch.arange(1, n + 1, dtype=basis.dtype, device=basis.device)
    return basis @ torch.linalg.eigh(basis.mT @ (ramp[:, None] * basis))[1]


def refreshed(factor: Tensor, basis: Tensor, share: float | None = None) -> tuple[Tensor, Tensor] | None:
    """One step of orthogonal iteration from a basis: (order of its columns by their eigenvalues, new basis in fp64).

    The columns are sorted by q^T L q, the largest first; the new ones are the Q of L Q. share, None as of `eigenbasis`.
    """
    if not is_finite(factor):
        return None
    share = negligible(factor.dtype) if share is None else share
    wide, old = factor.double(), basis.double()
    estimates = (old * (wide @ old)).sum(0)
    estimates = torch.where(estimates > share * estimates.amax(), estimates, 0.0)
    order = estimates.argsort(descending=True, stable=True)
    try:
        return order, _orthonormal(wide @ old[:, order], old[:, order], share)
    except torch.linalg.LinAlgError:
        return None


def _orthonormal(columns: Tensor, old: Tensor, share: float) -> Tensor:
    """Q of a QR decomposition; columns that depend on those before them are the old ones' nearest in what is left.

    So moments that are kept by columns go on to be those of about the same directions.
    """
    q, r = torch.linalg.qr(columns)
    sizes = r.diagonal().abs()
    if not has_values(columns) or bool((sizes > share * sizes.max()).all()):
        return q
    live = independent(columns, float(share * sizes.max()))
    own = torch.linalg.qr(columns[:, live], mode="complete")[0]
    rank = int(live.count_nonzero())
    u, _, vt = torch.linalg.svd(own[:, rank:].mT @ old[:, ~live])
    made = torch.empty_like(q)
    made[:, live], made[:, ~live] = own[:, :rank], own[:, rank:] @ u @ vt
    return made


def independent(columns: Tensor, least: float) -> Tensor:
    """Which columns have more than `least` that is not in the independent ones before them.

    What a QR decomposition has for a dependent column is a direction of rounding, and what later columns have of it is
    missing from their diagonal entries. So these count up to the first dependent column, and from there on anew, for
    what is left of the others.
    """
    live = torch.zeros(columns.shape[1], dtype=torch.bool, device=columns.device)
    places = torch.arange(columns.shape[1], device=columns.device)
    while len(places):
        q, r = torch.linalg.qr(columns)
        count = int((r.diagonal().abs() > least).cumprod(0).sum())
        live[places[:count]] = True
        columns, places = columns[:, max(count, 1) :], places[max(count, 1) :]
        for _ in range(2):  # the second time for what rounding left
            columns = columns - q[:, :count] @ (q[:, :count].mT @ columns)
        stay = columns.norm(dim=0) > least
        columns, places = columns[:, stay], places[stay]
    return live


def inverse_root(values: Tensor, vectors: Tensor, root: int) -> Tensor:
    """L^(-1/root) on the directions that L has; of those that it has not (eigenvalues of 0) nothing is left."""
    powers = torch.where(values > 0, values.clamp(min=torch.finfo(values.dtype).tiny).pow(-1 / root), 0.0)
    return (vectors * powers) @ vectors.mT
