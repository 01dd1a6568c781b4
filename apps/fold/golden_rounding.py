"""What rounding makes of a vector that vanishes, in the original's templates of complexes.

The network is told the unit vector from each residue to each, in the first one's frame; of a residue and itself it is
that of R^T p + R^T (-p), divided by at least 1e-6. The original's compiler (XLA on a CPU) fuses products and sums of
the two terms in different orders, so what is left is rounding, of length 1 in the end. Here the same is computed in
fp32, operation by operation, in the orders that were found from a golden run, so that such runs can be compared;
predictions have 0 there, as the original has where it runs operation by operation.

Shapes: T templates, N residues.
"""

import numpy as np

from apps.fold.model import residues

_Vector = list[np.ndarray]  # x, y and z, float32 each


def own_directions(positions: np.ndarray) -> np.ndarray:
    """float32[T, N, 3] of atom37 positions float32[T, N, 37, 3]."""
    n, ca, c = (list(np.moveaxis(positions[:, :, slot], -1, 0)) for slot in (residues.N, residues.CA, residues.C))
    x, y = [a - b for a, b in zip(c, ca)], [a - b for a, b in zip(n, ca)]
    again = _unit(x, (1, 2, 0))  # the compiler makes it twice
    x, along = _unit(x), _dot(y, again, (1, 0, 2))
    y = _unit([_fused(-along, a, b) for a, b in zip(again, y)])
    z = [_fused(x[i - 2], y[i - 1], -(x[i - 1] * y[i - 2])) for i in range(3)]
    back = [-one for one in ca]
    left = [_dot(r, ca, (1, 0, 2)) + _dot(r, back, (0, 1, 2)) for r in (x, y, z)]
    return np.stack(_unit(left), -1)


def _dot(a: _Vector, b: _Vector, order: tuple[int, int, int]) -> np.ndarray:
    """The sum of products, the first one rounded by itself, the others fused with the sum before them."""
    first, second, third = order
    return _fused(a[third], b[third], _fused(a[second], b[second], a[first] * b[first]))


def _fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c, rounded once."""
    return (a.astype(np.float64) * b + c).astype(np.float32)


def _unit(v: _Vector, order: tuple[int, int, int] = (1, 0, 2)) -> _Vector:
    length = np.sqrt(np.maximum(_dot(v, v, order), np.float32(1e-12)))
    return [one / length for one in v]
