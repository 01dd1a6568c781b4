"""Products with 8-bit weights on a CPU, through products of integers.

A row of x becomes one or more rows of small integers q with a factor f each, x[m] = sum_p f[p, m] q[p, m]:

    int8      three: the row in 127 steps of its largest element, and what that leaves in steps of 1/128 and 1/128^2
    w8a8      one: the row in 127 steps of its largest element
    llm.int8  one for the elements up to the threshold; three, as for int8, for those above it

All of these rows go through one product of integers, which reads the weight once: y = s[o] sum_p f[p] (q[p] w^T). It is
exact, so a token's result is the same, bit for bit, whatever else is in the batch and whichever kernel multiplies. For
int8 the three digits hold 21 bits of the row's largest element: the result is that of fp32 sums.

The kernel is `torch._int_mm` with signed or unsigned codes, whichever is faster here for the shape (measured once a
process); where this CPU's instructions saturate (no VNNI), fp32 products of pieces small enough to be exact.

Shapes: M rows of x, I columns, O output channels, P digits.
"""

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from core.quant.weight import QuantizedWeight

_DIGIT = 128.0
# Integers up to 2^24 are exact in fp32: sums of 1024 products of two bytes.
_EXACT_COLUMNS = 1024


def integer_product(x: Tensor, weight: QuantizedWeight, bias_O: Tensor | None) -> Tensor:
    """x [.., I] of 16 or 32 bits with an 8-bit weight: [.., O] in x's dtype."""
    x_MI = x.reshape(-1, x.shape[-1]).float()
    scheme = weight.scheme
    if scheme.name == "int8":
        y_MO = _by_digits(x_MI, weight)
    elif scheme.name == "w8a8":
        y_MO = _rounded(x_MI, weight)
    else:
        apart_MI = x_MI.abs() > scheme.threshold
        if bool(apart_MI.any()):
            y_MO = _rounded(x_MI.masked_fill(apart_MI, 0.0), weight) + _outliers(x_MI, apart_MI, weight)
        else:
            y_MO = _rounded(x_MI, weight)
    y_MO *= weight.scale
    if bias_O is not None:
        y_MO += bias_O
    return y_MO.to(x.dtype).view(*x.shape[:-1], y_MO.shape[1])


def _steps(x_MI: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in steps of a 127th of their largest element, not yet rounded, and that step [M, 1]."""
    largest_M1 = torch.linalg.vector_norm(x_MI, torch.inf, dim=1, keepdim=True)
    largest_M1 = largest_M1.masked_fill_(largest_M1 == 0, 1.0)
    return x_MI * 127 / largest_M1, largest_M1 / 127


def _rounded(x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """x rounded by rows, with the codes: [M, O], without the weight's scale."""
    steps_MI, step_M1 = _steps(x_MI)
    return _exact(steps_MI.round_(), weight.codes, weight).float().mul_(step_M1)


def _by_digits(x_MI: Tensor, weight: QuantizedWeight, columns: Tensor | None = None) -> Tensor:
    """x with the codes (or some columns of them, those that x holds): [M, O], without the weight's scale."""
    steps_MI, step_M1 = _steps(x_MI)
    digits_PMI = x_MI.new_empty(3, *x_MI.shape)
    for digit_MI in digits_PMI:
        torch.round(steps_MI, out=digit_MI)
        steps_MI = steps_MI.sub_(digit_MI).mul_(_DIGIT)
    codes = weight.codes if columns is None else weight.codes[:, columns]
    sums_PMO = _exact(digits_PMI.flatten(0, 1), codes, weight if columns is None else None).view(3, len(x_MI), -1)
    y_MO = sums_PMO[2].float() / _DIGIT
    y_MO = y_MO.add_(sums_PMO[1]).div_(_DIGIT).add_(sums_PMO[0])
    return y_MO.mul_(step_M1)


def _outliers(x_MI: Tensor, apart_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """The elements kept apart with the codes, exactly: [M, O]. Only the columns that have such elements are read."""
    columns = apart_MI.any(0).nonzero().squeeze(1)
    return _by_digits(torch.where(apart_MI, x_MI, 0.0)[:, columns], weight, columns)


# --- the product of integers ------------------------------------------------------------------------------------------


def _exact(q_RI: Tensor, codes_OI: Tensor, weight: QuantizedWeight | None) -> Tensor:
    """q codes^T for integers q within +-127 that stand as floats: int32 [R, O].

    weight  whose codes these are; None for a selection of columns
    """
    rows, columns = q_RI.shape
    if columns < 16:  # _int_mm is slow or wrong there
        return _by_floats(q_RI, codes_OI)
    name = fastest(len(codes_OI), columns, rows)
    if name == "unsigned":
        sums = codes_OI.sum(1, dtype=torch.int32) if weight is None else weight.row_sums
        return _by_unsigned(q_RI, codes_OI, sums)
    return _KERNELS[name](q_RI, codes_OI)


def _by_signed(q_RI: Tensor, codes_OI: Tensor) -> Tensor:
    return torch._int_mm(q_RI.to(torch.int8), codes_OI.T)


def _by_unsigned(q_RI: Tensor, codes_OI: Tensor, sums_O: Tensor | None = None) -> Tensor:
    """VNNI multiplies unsigned by signed bytes: 128 is added to q, and 128 times the codes' sums taken off again."""
    sums_O = codes_OI.sum(1, dtype=torch.int32) if sums_O is None else sums_O
    return torch._int_mm((q_RI + 128).to(torch.uint8), codes_OI.T).sub_(sums_O, alpha=128)


def _by_floats(q_RI: Tensor, codes_OI: Tensor) -> Tensor:
    """fp32 products of pieces whose sums are exact, added up in fp64."""
    pieces = zip(q_RI.split(_EXACT_COLUMNS, 1), codes_OI.split(_EXACT_COLUMNS, 1))
    products = [q @ codes.to(q.dtype).T for q, codes in pieces]
    return torch.stack(products).sum(0, dtype=torch.float64).to(torch.int32)


_KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "signed": _by_signed,
    "unsigned": _by_unsigned,
    "floats": _by_floats,
}


def fastest(num_channels: int, num_columns: int, rows: int) -> str:
    """The name of the fastest kernel that is exact here, for about that many rows. All give the same bits."""
    return _measured(num_channels, num_columns, 1 << min(rows - 1, 255).bit_length(), torch.get_num_threads())


@cache
def _measured(num_channels: int, num_columns: int, rows: int, num_threads: int) -> str:
    names = exact_kernels()
    if len(names) == 1:
        return names[0]
    q_RI = torch.full((rows, num_columns), 3.0)
    codes_OI = torch.full((num_channels, num_columns), 5, dtype=torch.int8)
    return min(names, key=lambda name: _seconds(_KERNELS[name], q_RI, codes_OI))


def _seconds(kernel: Callable[[Tensor, Tensor], Tensor], q_RI: Tensor, codes_OI: Tensor) -> float:
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        kernel(q_RI, codes_OI)
        taken.append(time.perf_counter() - start)
    return min(taken)


@cache
def exact_kernels() -> tuple[str, ...]:
    """The kernels of integers that do not saturate on this CPU; fp32 products where there is none."""
    codes_OI = torch.full((16, 64), 127, dtype=torch.int8)
    codes_OI[1::2, ::2] = -127
    q_RI = torch.full((16, 64), 127.0)
    q_RI[1::2] = -127.0
    expected = q_RI.double() @ codes_OI.double().T
    return tuple(n for n in ("signed", "unsigned") if _is_exact(_KERNELS[n], q_RI, codes_OI, expected)) or ("floats",)


def _is_exact(kernel: Callable[[Tensor, Tensor], Tensor], q_RI: Tensor, codes_OI: Tensor, expected: Tensor) -> bool:
    try:
        return bool((kernel(q_RI, codes_OI) == expected).all())
    except RuntimeError:  # not offered by this torch for these formats
        return False
