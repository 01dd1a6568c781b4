"""Products with 8-bit weights on a CPU, through products of integers.

A row of x becomes one or more rows of small integers q with a factor f each, x[m] = sum_p f[p, m] q[p, m]:

    w8a8      one: the row in 127 steps of its largest element
    int8      two: in 127 * 2^7 steps, in digits of 7 bits
    llm.int8  one for the elements up to the threshold; three, 127 * 2^14 steps, for those above it

All of these rows go through one product of integers, which reads the weight once: y = sum_p f[p] s[o] (q[p] w^T). It is
exact, so a token's result is the same, bit for bit, whatever else is in the batch and whichever kernel multiplies. For
int8 two digits are 32,513 values from a row's smallest to its largest: what they lose is a hundredth of what rounding
the weights lost, and a third would cost half as much again.

VNNI multiplies unsigned by signed bytes, so q is kept as q + 128, one unsigned byte; 128 times the codes' sums are
taken off. The kernel is the fastest one here for the shape (measured once a process): `core.kernels.vnni`'s, for few
rows; torch's, unsigned or signed; or, where the weight has that form too (`core.quant.packed`), oneDNN's with
weights in its own order, which arranges nothing in a call and takes the sums and the scales on the way out; or fp32
products of pieces small enough to be exact, which win with many rows where a CPU has no instructions for bytes (no
VNNI), and are all that there is where its instructions saturate.

Shapes: M rows of x, I columns, O output channels, P digits, R = P M rows of integers.
"""

import weakref
from collections.abc import Callable
from functools import cache, cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor

from core.compat import FakeTensor, int_mm, multiplies_bytes
from core.kernels.llvm import available
from core.kernels.timing import fastest_from_memory
from core.kernels.traced import number_of, traced
from core.kernels.vnni import Int8Weight, digits_of, int8_product, offered
from core.quant.weight import QuantizedWeight

_DIGITS, _DIGITS_OF_OUTLIERS = 2, 3
NUM_DIGITS = {"w8a8": 1, "int8": _DIGITS, "llm.int8": 1}
"""of one row of x, by scheme, those of few outliers left out"""
# Numbers as tensors of the format that they meet: others would be converted in each call.
_PLACES = torch.tensor([127.0, 127.0 * 2**7, 127.0 * 2**14], dtype=torch.float32, device="cpu")[:, None, None]
_VALUES = 1 / _PLACES
_BASE, _MOST = (torch.tensor(value, dtype=torch.float32, device="cpu") for value in (128.0, 127.0))
_ZERO = 128
"""the byte that stands for the integer 0"""
_SMALLEST = 1e-30
_ROWS = (4, 8, 16, 32, 64, 256)
"""for which the kernels are measured"""
_MEASURED_CHANNELS, _MEASURED_BYTES, _MEASURED_WEIGHTS, _ROUNDS = 4096, 4 << 20, 64, 3
"""of a weight, and of the weights that a kernel is measured on: several, for its own instructions are in a cache"""
# Integers up to 2^24 are exact in fp32: sums of 1024 products of two bytes.
_EXACT_COLUMNS = 1024
# Of digits, and of a weight, that are in fp32 at a time.
_FLOAT_ROWS, _FLOAT_CHANNELS = 256, 1024


class Codes:
    """A weight as the kernels take it: its integers [O, I], scales [O], and oneDNN's form.

    weight  that it is of, where a graph is to know it
    """

    def __init__(self, codes_OI: Tensor, scale_O: Tensor, form: Any = None, weight: QuantizedWeight | None = None):
        self.codes_OI, self.scale_O, self.form = codes_OI, scale_O, form
        self.weight = None if weight is None else weakref.ref(weight)  # which keeps this

    @cached_property
    def sums_O(self) -> Tensor:
        """int32: the codes, added up."""
        return self.codes_OI.sum(1, dtype=torch.int32)

    @cached_property
    def stored(self) -> Int8Weight:
        return Int8Weight(self.codes_OI, self.scale_O, self.sums_O)

    @staticmethod
    def of(weight: QuantizedWeight) -> "Codes":
        codes = weight.prepared(_codes)
        codes.form = weight.packed
        return codes


def _codes(weight: QuantizedWeight) -> Codes:
    return Codes(weight.codes, weight.scale, weight=weight)


def integer_product(x: Tensor, weight: QuantizedWeight, bias_O: Tensor | None) -> Tensor:
    """x [.., I] of 16 or 32 bits with an 8-bit weight: [.., O] in x's dtype."""
    x_MI = x.reshape(-1, x.shape[-1]).float()
    if weight.scheme.name == "int8":
        y_MO = _by_digits(x_MI, Codes.of(weight), _DIGITS)
    elif weight.scheme.name == "w8a8":
        y_MO = _rounded(x_MI, Codes.of(weight))
    elif isinstance(x, FakeTensor):
        y_MO = torch.ops.megalith.product_with_outliers(x_MI, number_of(weight), len(weight.codes))
    else:
        y_MO = _with_outliers(x_MI, weight)
    if bias_O is not None:
        y_MO += bias_O
    return y_MO.to(x.dtype).view(*x.shape[:-1], y_MO.shape[1])


def _largest(x_MI: Tensor) -> Tensor:
    """[M, 1]: each row's largest magnitude, not zero."""
    return x_MI.abs().amax(1, keepdim=True).clamp_(min=_SMALLEST)  # vector_norm takes twenty times as long


def _rounded(x_MI: Tensor, codes: Codes) -> Tensor:
    """x rounded by rows, with the weight: [M, O]."""
    if available() and not isinstance(x_MI, FakeTensor):
        (q_MI,), largest_M1 = digits_of(x_MI, 1)
        return _product(q_MI, codes).mul_(largest_M1.div_(_MOST))
    step_M1 = _largest(x_MI).div_(_MOST)
    return _product(_as_bytes((x_MI / step_M1).round_()), codes).mul_(step_M1)


def _as_bytes(q_RI: Tensor) -> Tensor:
    """Integers within +-127, in fp32, which are lost: uint8, 128 more."""
    return q_RI.add_(_BASE).to(torch.uint8)


def _by_digits(x_MI: Tensor, codes: Codes, num_digits: int) -> Tensor:
    """x in so many digits, with the weight: [M, O].

    Rounded to 127, 127 * 2^7 and 127 * 2^14 steps; each digit is what the one before leaves of that, so the lower ones
    are within +-65.
    """
    if num_digits == 2 and available() and not isinstance(x_MI, FakeTensor):
        q_PMI, largest_M1 = digits_of(x_MI, num_digits)
    else:
        largest_M1 = _largest(x_MI)
        digits_PMI = (x_MI * (_PLACES[:num_digits] / largest_M1)).round_()
        digits_PMI[1:].sub_(digits_PMI[:-1] * _BASE)
        q_PMI = _as_bytes(digits_PMI)
    y_PMO = _product(q_PMI.flatten(0, 1), codes).view(num_digits, x_MI.shape[0], -1)
    first_MO, *others = y_PMO.mul_(largest_M1 * _VALUES[:num_digits]).unbind(0)
    return sum(others, first_MO)  # torch's sum over so short a dim takes as long as the product


def _with_outliers(x_MI: Tensor, weight: QuantizedWeight) -> Tensor:
    """Elements up to the threshold rounded, those above it not, with the weight: [M, O]."""
    apart_MI, codes = x_MI.abs() > weight.scheme.threshold, Codes.of(weight)
    if not bool(apart_MI.any()):
        return _rounded(x_MI, codes)
    return _rounded(x_MI.masked_fill(apart_MI, 0.0), codes) + _outliers(x_MI, apart_MI, codes)


def _outliers(x_MI: Tensor, apart_MI: Tensor, codes: Codes) -> Tensor:
    """The elements kept apart with the weight, exactly: [M, O]. Only the columns that have such elements are read."""
    columns = apart_MI.any(0).nonzero().squeeze(1)
    part_OI = codes.codes_OI[:, columns]
    part = Codes(part_OI, codes.scale_O)
    return _by_digits(torch.where(apart_MI, x_MI, 0.0)[:, columns], part, _DIGITS_OF_OUTLIERS)


# --- the product of integers ------------------------------------------------------------------------------------------


def _product(q_RI: Tensor, codes: Codes) -> Tensor:
    """scale (q codes^T) in fp32 [R, O], with exact sums. q: uint8, each 128 more than the integer."""
    rows, columns = q_RI.shape
    if isinstance(q_RI, FakeTensor):
        weight = codes.weight and codes.weight()
        assert weight is not None
        return torch.ops.megalith.product_of_integers(q_RI, number_of(weight), len(codes.codes_OI))
    # _int_mm is slow or wrong for few columns
    if columns < 16:
        return _by_floats(q_RI, codes)
    return _KERNELS[fastest(len(codes.codes_OI), columns, rows, codes.form is not None)](q_RI, codes)


Kernel = Callable[[Tensor, Codes], Tensor]


def _by_signed(q_RI: Tensor, codes: Codes) -> Tensor:
    return int_mm(q_RI.bitwise_xor(_ZERO).view(torch.int8), codes.codes_OI.T) * codes.scale_O


def _by_unsigned(q_RI: Tensor, codes: Codes) -> Tensor:
    return int_mm(q_RI, codes.codes_OI.T).sub_(codes.sums_O, alpha=_ZERO) * codes.scale_O


def _by_form(q_RI: Tensor, codes: Codes) -> Tensor:
    options = (None, 1.0, 0, torch.float32, "none", [], "")
    return torch.ops.onednn.qlinear_pointwise(q_RI, 1.0, _ZERO, *codes.form, *options)


def _by_vnni(q_RI: Tensor, codes: Codes) -> Tensor:
    if not offered():
        raise RuntimeError("no VNNI here, or no LLVM")
    return int8_product(q_RI, codes.stored)


def _by_floats(q_RI: Tensor, codes: Codes) -> Tensor:
    """fp32 products of pieces whose sums are exact, added up in fp64; some rows and channels after others."""
    y_RO = torch.empty(q_RI.shape[0], len(codes.codes_OI), dtype=torch.float32, device="cpu")
    for q_SI, y_SO in zip(q_RI.split(_FLOAT_ROWS), y_RO.split(_FLOAT_ROWS)):
        _floats_of_rows(q_SI.float().sub_(_BASE), codes.codes_OI, y_SO)
    return y_RO.mul_(codes.scale_O)


def _floats_of_rows(q_SI: Tensor, codes_OI: Tensor, y_SO: Tensor) -> None:
    for codes_CI, y_SC in zip(codes_OI.split(_FLOAT_CHANNELS), y_SO.split(_FLOAT_CHANNELS, 1)):
        if q_SI.shape[1] <= _EXACT_COLUMNS:
            y_SC.copy_(q_SI @ codes_CI.float().T)
            continue
        whole_SC = torch.zeros((), dtype=torch.float64, device="cpu")
        for q_SE, codes_CE in zip(q_SI.split(_EXACT_COLUMNS, 1), codes_CI.split(_EXACT_COLUMNS, 1)):
            whole_SC = (q_SE @ codes_CE.float().T).double().add_(whole_SC)
        y_SC.copy_(whole_SC)


def float_bytes(rows: int, weight: tuple[int, int]) -> int:
    """Bytes that a product in fp32 of pieces holds beside digits and result in fp32; 0 where that way is not taken.

    rows    of digits
    weight  its rows and columns
    """
    if "floats" not in exact_kernels():
        return 0
    columns, rows, channels = weight[1], min(rows, _FLOAT_ROWS), min(weight[0], _FLOAT_CHANNELS)
    sums = 4 if columns <= _EXACT_COLUMNS else 20  # a piece's own in fp32; in fp64, and those before it
    return 4 * rows * columns + 4 * channels * min(columns, _EXACT_COLUMNS) + sums * rows * channels


_KERNELS: dict[str, Kernel] = {
    "signed": _by_signed,
    "unsigned": _by_unsigned,
    "form": _by_form,
    "vnni": _by_vnni,
    "floats": _by_floats,
}


def packed_integers(codes_OI: Tensor, scale_O: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """oneDNN's form of a weight, as large as the codes, with its scales and its zeros.

    Raises RuntimeError where this torch or CPU has none.
    """
    if not hasattr(torch.ops.onednn, "qlinear_prepack"):
        raise RuntimeError("this torch is without oneDNN")
    zeros_O = torch.zeros(len(scale_O), dtype=torch.int32, device="cpu")
    return torch.ops.onednn.qlinear_prepack(codes_OI.contiguous(), None), scale_O, zeros_O


# --- while a graph is traced ------------------------------------------------------------------------------------------

torch.library.define("megalith::product_of_integers", "(Tensor q, int weight, int channels) -> Tensor")
torch.library.define("megalith::product_with_outliers", "(Tensor x, int weight, int channels) -> Tensor")


@torch.library.impl("megalith::product_of_integers", "CPU")
def _product_of_integers(q: Tensor, weight: int, channels: int) -> Tensor:
    return _product(q, Codes.of(cast(QuantizedWeight, traced(weight))))


@torch.library.impl("megalith::product_with_outliers", "CPU")
def _product_with_outliers(x: Tensor, weight: int, channels: int) -> Tensor:
    return _with_outliers(x, cast(QuantizedWeight, traced(weight)))


@torch.library.register_fake("megalith::product_of_integers")
@torch.library.register_fake("megalith::product_with_outliers")
def _product_shape(x: Tensor, weight: int, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], channels, dtype=torch.float32)  # len() would be a number in the graph


# --- which kernel -----------------------------------------------------------------------------------------------------


def fastest(num_channels: int, num_columns: int, rows: int, has_form: bool = False) -> str:
    """The name of the fastest kernel that is exact here, for about that many rows. All give the same bits."""
    return _chosen(num_channels, num_columns, rows, has_form, torch.get_num_threads())


@cache
def _chosen(num_channels: int, num_columns: int, rows: int, has_form: bool, num_threads: int) -> str:
    about = next((bucket for bucket in _ROWS if rows <= bucket), _ROWS[-1])
    # Columns of outliers are as many as there happen to be.
    return _measured(num_channels, 1 << (num_columns - 1).bit_length(), about, has_form, num_threads)


def form_is_faster(num_channels: int, num_columns: int) -> bool:
    """Return whether rows, many or few, go faster through oneDNN's form."""
    if num_columns < 16 or "form" not in exact_kernels():
        return False
    return any(fastest(num_channels, num_columns, rows, True) == "form" for rows in reversed(_ROWS))


@cache
def _measured(num_channels: int, num_columns: int, rows: int, has_form: bool, num_threads: int) -> str:
    names = [name for name in exact_kernels() if has_form or name != "form"]
    if len(names) == 1:
        return names[0]
    codes_OI = torch.full((min(num_channels, _MEASURED_CHANNELS), num_columns), 5, dtype=torch.int8, device="cpu")
    q_RI = torch.full((rows, num_columns), _ZERO + 3, dtype=torch.uint8, device="cpu")
    count = min(-(-_MEASURED_BYTES // codes_OI.nbytes), _MEASURED_WEIGHTS)
    given = {name: [_given(codes_OI.clone(), name == "form") for _ in range(count)] for name in names}
    return fastest_from_memory({name: (partial(_KERNELS[name], q_RI), given[name]) for name in names}, _ROUNDS)


@cache
def exact_kernels() -> tuple[str, ...]:
    """The kernels of integers that do not saturate on this CPU; products in fp32, where it multiplies no bytes or all
    of them saturate.
    """
    found = tuple(name for name in ("signed", "unsigned", "form", "vnni") if _is_exact(name))
    return found if found and multiplies_bytes() else (*found, "floats")


def _is_exact(name: str) -> bool:
    codes_OI = torch.full((16, 64), 127, dtype=torch.int8, device="cpu")
    codes_OI[1::2, ::2] = -127
    q_RI = torch.full((16, 64), 127.0, dtype=torch.float32, device="cpu")
    q_RI[1::2] = -127.0
    expected = q_RI.double() @ codes_OI.double().T
    try:
        return bool((_KERNELS[name](_as_bytes(q_RI), _given(codes_OI, name == "form")) == expected).all())
    except RuntimeError:  # not offered by this torch for these formats
        return False


def _given(codes_OI: Tensor, has_form: bool) -> Codes:
    scale_O = torch.ones(len(codes_OI), dtype=torch.float32, device="cpu")
    return Codes(codes_OI, scale_O, packed_integers(codes_OI, scale_O) if has_form else None)
