"""Products with 8-bit weights on a CPU, through products of integers.

A row of x becomes one or more rows of small integers q with a factor f each, x[m] = sum_p f[p, m] q[p, m]:

    int8      three: the row in 127 * 2^14 steps of its largest element, in digits of 7 bits
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

_STEPS = 127 * 2**14
_SHIFTS = torch.tensor([14, 7, 0], dtype=torch.int32, device="cpu")[:, None, None]
_MEASURED_CHANNELS = 4096
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


def _steps(x_MI: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """x in steps of its rows' largest elements / most: whole numbers [M, I] in fp32, and each row's step [M, 1]."""
    step_M1 = torch.linalg.vector_norm(x_MI, torch.inf, dim=1, keepdim=True).clamp_(min=1e-30).div_(most)
    return (x_MI / step_M1).round_(), step_M1


def _rounded(x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """x rounded by rows, with the codes: [M, O], without the weight's scale."""
    q_MI, step_M1 = _steps(x_MI, 127)
    return _exact(q_MI, weight.codes, lambda: weight.row_sums, len(q_MI)).float().mul_(step_M1)


def _by_digits(x_MI: Tensor, weight: QuantizedWeight, columns: Tensor | None = None) -> Tensor:
    """x with the codes (or some columns of them, those that x holds): [M, O], without the weight's scale.

    The two lower digits are 0 .. 127, the highest has the sign.
    """
    steps_MI, step_M1 = _steps(x_MI, _STEPS)
    digits_PMI = steps_MI.to(torch.int32) >> _SHIFTS
    digits_PMI[1:].bitwise_and_(127)
    codes_OI, rows = weight.codes if columns is None else weight.codes[:, columns], len(x_MI)

    def sums_O() -> Tensor:
        return weight.row_sums if columns is None else codes_OI.sum(1, dtype=torch.int32)

    y_PMO = _exact(digits_PMI.flatten(0, 1), codes_OI, sums_O, rows).float().view(3, rows, -1)
    high_MO, middle_MO, y_MO = y_PMO.unbind(0)
    y_MO = y_MO.add_(middle_MO, alpha=2**7).add_(high_MO, alpha=2**14)  # powers of two: no rounding before the sums
    return y_MO.mul_(step_M1)


def _outliers(x_MI: Tensor, apart_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """The elements kept apart with the codes, exactly: [M, O]. Only the columns that have such elements are read."""
    columns = apart_MI.any(0).nonzero().squeeze(1)
    return _by_digits(torch.where(apart_MI, x_MI, 0.0)[:, columns], weight, columns)


# --- the product of integers ------------------------------------------------------------------------------------------


def _exact(q_RI: Tensor, codes_OI: Tensor, sums_O: Callable[[], Tensor], num_signed: int) -> Tensor:
    """q codes^T, exactly: int32 [R, O]. q holds integers within +-127, of any format, and is lost.

    sums_O      the sums of the codes, if they are needed
    num_signed  the first so many rows may hold negative ones
    """
    rows, columns = q_RI.shape
    # _int_mm is slow or wrong for few columns
    name = "floats" if columns < 16 else fastest(len(codes_OI), columns, rows)
    return _KERNELS[name](q_RI, codes_OI, sums_O, num_signed)


Kernel = Callable[[Tensor, Tensor, Callable[[], Tensor], int], Tensor]


def _by_signed(q_RI: Tensor, codes_OI: Tensor, sums_O: Callable[[], Tensor], num_signed: int) -> Tensor:
    return torch._int_mm(q_RI.to(torch.int8), codes_OI.T)


def _by_unsigned(q_RI: Tensor, codes_OI: Tensor, sums_O: Callable[[], Tensor], num_signed: int) -> Tensor:
    """VNNI multiplies unsigned by signed bytes: 128 is added to signed rows, 128 times the codes' sums taken off."""
    q_RI[:num_signed] += 128
    y_RO = torch._int_mm(q_RI.to(torch.uint8), codes_OI.T)
    y_RO[:num_signed].sub_(sums_O(), alpha=128)
    return y_RO


def _by_floats(q_RI: Tensor, codes_OI: Tensor, sums_O: Callable[[], Tensor], num_signed: int) -> Tensor:
    """fp32 products of pieces whose sums are exact, added up in fp64."""
    pieces = zip(q_RI.float().split(_EXACT_COLUMNS, 1), codes_OI.split(_EXACT_COLUMNS, 1))
    return torch.stack([q @ codes.float().T for q, codes in pieces]).sum(0, dtype=torch.float64).to(torch.int32)


_KERNELS: dict[str, Kernel] = {"signed": _by_signed, "unsigned": _by_unsigned, "floats": _by_floats}


def fastest(num_channels: int, num_columns: int, rows: int) -> str:
    """The name of the fastest kernel that is exact here, for about that many rows. All give the same bits."""
    return _measured(num_channels, num_columns, 1 << min(rows - 1, 255).bit_length(), torch.get_num_threads())


@cache
def _measured(num_channels: int, num_columns: int, rows: int, num_threads: int) -> str:
    names = exact_kernels()
    if len(names) == 1:
        return names[0]
    codes_OI = torch.full((min(num_channels, _MEASURED_CHANNELS), num_columns), 5, dtype=torch.int8, device="cpu")
    sums_O, q_RI = codes_OI.sum(1, dtype=torch.int32), torch.full((rows, num_columns), 3.0, device="cpu")

    def seconds(name: str) -> float:
        taken = []
        for _ in range(3):
            start = time.perf_counter()
            _KERNELS[name](q_RI.fill_(3.0), codes_OI, lambda: sums_O, rows)
            taken.append(time.perf_counter() - start)
        return min(taken)

    return min(names, key=seconds)


@cache
def exact_kernels() -> tuple[str, ...]:
    """The kernels of integers that do not saturate on this CPU; fp32 products where there is none."""
    return tuple(name for name in ("signed", "unsigned") if _is_exact(_KERNELS[name])) or ("floats",)


def _is_exact(kernel: Kernel) -> bool:
    codes_OI = torch.full((16, 64), 127, dtype=torch.int8)
    codes_OI[1::2, ::2] = -127
    q_RI = torch.full((16, 64), 127.0)
    q_RI[1::2] = -127.0
    expected = q_RI.double() @ codes_OI.double().T
    try:
        return bool((kernel(q_RI, codes_OI, lambda: codes_OI.sum(1, dtype=torch.int32), 16) == expected).all())
    except RuntimeError:  # not offered by this torch for these formats
        return False
