"""Linear layers with weights in 8 or 4 bits: y = x W^T + bias, where W[o, i] is a small integer times a scale.

    int8_matmul          W = w s[o], |w| <= 127; x in 16 or 32 bits (weight-only)
    int8_dynamic_matmul  the same W; each row of x is rounded to 127 steps of its largest element, too, and the product
                         is one of integers: y = s[o] t[m] sum_i w[o, i] q[m, i]. Elements of x that are outliers are
                         left out of q and multiplied as they are (LLM.int8, Dettmers et al. 2022, arXiv:2208.07339;
                         there a column of x is an outlier for all rows, here for the rows in which it is one, so that
                         a row's result does not depend on the others)
    int4_matmul          W = (w - zero[o, g]) s[o, g] for each group g of 32, 64 or 128 columns, 0 <= w <= 15;
                         without zeros (symmetric) zero is 8

Integers enter the product as they are, which is exact in bf16 and fp16, and scales multiply fp32 sums.

Packing of 4 bits: a group's columns stand in group / 2 bytes; byte j of a group holds its column j in the low half and
its column j + group / 2 in the high half, so that both halves meet contiguous pieces of x. The last group is filled up.

Ways, of which `core.kernels.ways` knows the fastest where it was measured:

    rows     for one row of x (two, where x is not in 16 bits or columns do not come in whole groups): a program reads
             some rows of the weight once and multiplies without matrix units (decode: the time is that of reading W);
             in 16 bits by words, without converting integers (x of less than 2^64)
    tile     a program makes a tile by matrix units; in 16 bits with columns in whole groups W is the left side, which
             stays in registers, and for up to 32 rows its warps share the columns. Otherwise, for up to 64 rows, the
             columns of the weight are dealt to several programs, whose sums are added after, so that all of the chip
             reads W; to how many follows from the weight's sizes alone. Among 2 to 32 rows, and among 33 to 64, a
             row's result does not depend on how many there are
    wide     for many rows: the weight is widened once, some rows at a time, and multiplied by torch's library
    library  int8_dynamic_matmul without outliers: torch's product of integers
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from core.compat import int_mm
from core.kernels.blocks import Blocks, chip, choose, tuned
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing
from core.kernels.ways import measure, way

GROUPS = (32, 64, 128)
Way = Literal["tile", "wide", "library"]
_SLAB = 1024
"""Rows of the weight that the reference widens at a time."""
_MOST_ROWS_OF_DECODE = 2
_WORDS = (
    (4, 4096, 4, False), (8, 4096, 4, False), (4, 2048, 2, False), (8, 2048, 2, False), (2, 4096, 4, False),
    (4, 1024, 1, False), (8, 1024, 1, False), (4, 2048, 4, True), (8, 2048, 4, True), (16, 2048, 4, False),
    (4, 1024, 2, True), (8, 1024, 2, True), (16, 1024, 4, True),
)  # fmt: skip
"""Ways to deal with one row of x, the default and what a tuner tries: rows of the weight, columns at a time, warps, and
whether the next columns are read ahead.

In the default a program reads whole rows of 4096 columns in one go, and leaves room on its processor for others, so
that some load while others compute."""
_MOST_ROWS_SPLIT = 32
_PIECES = 4
"""Of columns that warps of a program take side by side for so few rows, and so the order of a row's sums."""
_SMALL = 8192
"""Rows of a weight of which a program takes fewer."""
_MOST_ROWS_IN_PARTS = 64
_WIDE_FROM = 1024
"""Rows of x from which a weight is widened where nothing was measured: then that is a small part of the product."""
_WIDE_BYTES = 32 << 20
"""Of a weight that is there widened at once."""
_PROGRAMS = 528
"""Of 32 rows of the weight, four to a processor of an H100."""


def quantize_int8(w_OI: Tensor) -> tuple[Tensor, Tensor]:
    """int8 [O, I] and fp32 scales [O]: the largest element of each row becomes 127."""
    wide = w_OI.float()
    scale_O = _divided(wide.abs().amax(1) if w_OI.shape[1] else wide.new_ones(len(wide)), 127)
    scale_O = torch.where(scale_O > 0, scale_O, 1.0)
    return (wide / scale_O[:, None]).round_().to(torch.int8), scale_O


def quantize_int4(
    w_OI: Tensor,
    group: int = 128,
    symmetric: bool = True,
    scale_bits: int | None = None,
    shares: Sequence[float] = (1.0,),
) -> tuple[Tensor, Tensor, Tensor | None]:
    """uint8 [O, G group / 2] as packed above, scales [O, G], and uint8 zeros [O, G] or None where symmetric.

    Symmetric: -7 .. 7 times the scale. Otherwise 16 steps from the smallest element (or 0) to the largest (or 0).
    scale_bits  round scales up to so many significant bits, at most 8, before weights are rounded to steps of them: the
                scales are then bf16. With 5 of them a scale times a zero is a bf16, too. None: fp32
    shares      of that range which may be covered; each group has the one whose squared error is the least. What lies
                outside becomes the outermost step: the few largest elements lose, all others have finer steps
    """
    if group not in GROUPS:
        raise ValueError(f"quantize_int4: groups of {group} columns; use one of {GROUPS}")
    O, I = w_OI.shape
    G = -(-I // group)
    w_OGK = torch.nn.functional.pad(w_OI.float(), (0, G * group - I)).view(O, G, group)
    scale_OG, zero_OG = int4_steps(w_OGK, symmetric, scale_bits, shares)
    packed = pack_int4(int4_codes(w_OGK, scale_OG[..., None], zero_OG[..., None]))
    return packed, scale_OG, None if symmetric else zero_OG.to(torch.uint8)


def int4_steps(
    w_OGK: Tensor,
    symmetric: bool,
    scale_bits: int | None = None,
    shares: Sequence[float] = (1.0,),
    importance_K: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """(scales, zeros), each [O, G]; zeros as whole numbers in fp32. The options are those of `quantize_int4`.

    importance_K  by which squared errors of a group's columns count; by default alike
    """
    found = [_steps(w_OGK, symmetric, scale_bits, share) for share in shares]
    errors = [_squared_error(w_OGK, scale_OG, zero_OG, importance_K) for scale_OG, zero_OG in found]
    best_1OG = torch.stack(errors).argmin(0, keepdim=True)
    scale_OG, zero_OG = (torch.stack(each).gather(0, best_1OG)[0] for each in zip(*found))
    return scale_OG, zero_OG


def _squared_error(w_OGK: Tensor, scale_OG: Tensor, zero_OG: Tensor, importance_K: Tensor | None) -> Tensor:
    scale_OG1, zero_OG1 = scale_OG[..., None].float(), zero_OG[..., None]
    error_OGK = ((int4_codes(w_OGK, scale_OG1, zero_OG1) - zero_OG1) * scale_OG1 - w_OGK).square_()
    return (error_OGK if importance_K is None else error_OGK * importance_K).sum(2)


def _steps(w_OGK: Tensor, symmetric: bool, scale_bits: int | None, share: float) -> tuple[Tensor, Tensor]:
    if symmetric:
        scale_OG = _scale(_divided(share * w_OGK.abs().amax(2), 7), scale_bits)
        return scale_OG, torch.full_like(scale_OG, 8, dtype=torch.float32)
    low_OG, high_OG = share * w_OGK.amin(2).clamp_(max=0), share * w_OGK.amax(2).clamp_(min=0)
    scale_OG = _scale(_divided(high_OG - low_OG, 15), scale_bits)
    return scale_OG, (-low_OG / scale_OG.float()).round_().clamp_(0, 15)


def _divided(x: Tensor, by: float) -> Tensor:
    """x / by, rounded alike on every device: a GPU multiplies by a reciprocal where the divisor is a Python number."""
    return x / x.new_full((), by)


def int4_codes(w: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """0 .. 15, in w's dtype: what w is nearest to in steps of the scale above the zero. Shapes broadcast."""
    return ((w / scale.to(w.dtype)).round_() + zero.to(w.dtype)).clamp_(0, 15)


def pack_int4(codes_OGK: Tensor) -> Tensor:
    """uint8 [O, G K / 2], as the module's docstring says."""
    low, high = codes_OGK.to(torch.uint8).chunk(2, 2)
    return (low | high << 4).flatten(1)


def dequantize_int8(weight_OI: Tensor, scale_O: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """[O, I] of the dtype."""
    wide = torch.promote_types(scale_O.dtype, torch.promote_types(dtype, torch.float32))
    return (weight_OI.to(wide) * scale_O[:, None].to(wide)).to(dtype)


def dequantize_int4(
    packed: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, columns: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """[O, columns] of the dtype."""
    O, G = scale_OG.shape
    wide = torch.promote_types(scale_OG.dtype, torch.promote_types(dtype, torch.float32))
    bytes_OGK = packed.reshape(O, G, packed.shape[1] // max(G, 1))
    codes = torch.cat((bytes_OGK & 15, bytes_OGK >> 4), 2).to(wide)
    codes -= 8 if zero_OG is None else zero_OG[..., None].to(wide)
    return (codes * scale_OG[..., None].to(wide)).view(O, -1)[:, :columns].to(dtype)


def _scale(scale: Tensor, bits: int | None) -> Tensor:
    scale = torch.where(scale > 0, scale, 1.0)
    if bits is None:
        return scale
    mantissa, exponent = torch.frexp(scale)  # 0.5 <= mantissa < 1
    return torch.ldexp((mantissa * 2**bits).ceil_(), exponent - bits).to(torch.bfloat16)


def int8_matmul(
    x: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None, *, how: Way | None = None
) -> Tensor:
    """x [.., I] with int8 weights, in x's dtype: [.., O]; gradient for x.

    how  tile or wide, for three rows of x and more; None: the fastest that is known

    Raises ValueError where shapes do not fit, and for another way.
    """
    _check_way("int8_matmul", how, "tile", "wide")
    _check("int8_matmul", x, weight_OI, torch.int8, {"scale": (scale_O, (len(weight_OI),))}, bias_O)
    if x.shape[-1] == 0 or not runs_kernel("int8_matmul", x, unsupported_dtype(x, scale_O, bias_O)):
        return reference_int8(x, weight_OI, scale_O, bias_O)
    return _int8(_flat(x), weight_OI, scale_O, bias_O, False, how or "").view(*x.shape[:-1], len(weight_OI))


def int8_dynamic_matmul(
    x: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None, *,
    outliers: Tensor | None = None, threshold: float | None = None, how: Way | None = None,
) -> Tensor:  # fmt: skip
    """x [.., I], rounded to 8 bits by rows, with int8 weights, in x's dtype: [.., O]; no gradients.

    outliers   indices of columns of x that are not rounded
    threshold  elements above it (in absolute value) are not rounded, either (LLM.int8 takes 6.0)
    how        tile, or without outliers library; None: the fastest that is known

    Raises ValueError where shapes do not fit, and for another way.
    """
    _check_way("int8_dynamic_matmul", how, "tile", *(("library",) if outliers is None and threshold is None else ()))
    _check("int8_dynamic_matmul", x, weight_OI, torch.int8, {"scale": (scale_O, (len(weight_OI),))}, bias_O)
    if x.shape[-1] == 0 or not runs_kernel("int8_dynamic_matmul", x, unsupported_dtype(x, scale_O, bias_O)):
        return reference_int8_dynamic(x.detach(), weight_OI, scale_O, bias_O, outliers=outliers, threshold=threshold)
    x_MI = _flat(x.detach())
    kind_I = _outlier_columns(x_MI, outliers, threshold)
    y_MO = _int8_dynamic(x_MI, weight_OI, scale_O, bias_O, kind_I, threshold or 0.0, how or "")
    return y_MO.view(*x.shape[:-1], len(weight_OI))


def int4_matmul(
    x: Tensor, packed: Tensor, scale_OG: Tensor, zero_OG: Tensor | None = None, bias_O: Tensor | None = None, *,
    group: int = 128, how: Way | None = None,
) -> Tensor:  # fmt: skip
    """x [.., I] with 4-bit weights as `quantize_int4` packs them, in x's dtype: [.., O]; gradient for x.

    how  tile or wide, for three rows of x and more; None: the fastest that is known

    Raises ValueError where shapes do not fit, and for another way.
    """
    _check_way("int4_matmul", how, "tile", "wide")
    O, G = len(packed), -(-x.shape[-1] // group)
    factors = {"scale": (scale_OG, (O, G))} | ({} if zero_OG is None else {"zero": (zero_OG, (O, G))})
    if group not in GROUPS:
        raise ValueError(f"int4_matmul: groups of {group} columns; use one of {GROUPS}")
    _check("int4_matmul", x, packed, torch.uint8, factors, bias_O, columns=G * group // 2)
    if x.shape[-1] == 0 or not runs_kernel("int4_matmul", x, unsupported_dtype(x, scale_OG, bias_O)):
        return reference_int4(x, packed, scale_OG, zero_OG, bias_O, group=group)
    return _int4(_flat(x), packed, scale_OG, zero_OG, bias_O, group, how or "").view(*x.shape[:-1], O)


def _check_way(name: str, how: str | None, *ways: str) -> None:
    if how is not None and how not in ways:
        raise ValueError(f"{name}: how={how!r}; choose from {', '.join(ways)}, or leave it out")


def _check(
    name: str, x: Tensor, weight: Tensor, dtype: torch.dtype, factors: dict[str, tuple[Tensor, tuple[int, ...]]],
    bias_O: Tensor | None, columns: int | None = None,
) -> None:  # fmt: skip
    columns = x.shape[-1] if columns is None else columns
    if weight.dtype != dtype or weight.ndim != 2 or weight.shape[1] != columns:
        given = f"{str(weight.dtype).removeprefix('torch.')} {list(weight.shape)}"
        raise ValueError(f"{name}: x {list(x.shape)} needs a {dtype} weight [O, {columns}], not {given}")
    wanted = factors | ({} if bias_O is None else {"bias": (bias_O, (len(weight),))})
    for factor, (tensor, shape) in wanted.items():
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name}: {factor} {list(tensor.shape)} for a weight {list(weight.shape)}: {list(shape)}")


# --- by torch ---------------------------------------------------------------------------------------------------------


class _BySlabs(torch.autograd.Function):
    """x W^T for a W that is widened some rows at a time, forward and backward."""

    @staticmethod
    def forward(ctx, x_MI: Tensor, num_rows: int, rows: Callable[[int, int], Tensor]) -> Tensor:
        ctx.num_rows, ctx.rows = num_rows, rows
        return torch.cat([x_MI @ rows(at, at + _SLAB).T for at in range(0, max(num_rows, 1), _SLAB)], 1)

    @staticmethod
    def backward(ctx, *gradients: Tensor):
        (dy_MO,) = gradients
        slabs = zip(dy_MO.split(_SLAB, 1), range(0, max(ctx.num_rows, 1), _SLAB))
        return sum(dy @ ctx.rows(at, at + _SLAB) for dy, at in slabs), None, None


def reference_int8(
    x: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None, *, how: Way | None = None
) -> Tensor:
    """The same as `int8_matmul` by torch, in one way; what runs on a CPU."""
    x_MI = _rows(x)
    y_MO = _BySlabs.apply(x_MI, len(weight_OI), lambda a, b: dequantize_int8(weight_OI[a:b], scale_O[a:b], x_MI.dtype))
    return _finished(y_MO, bias_O, x)


def reference_int4(
    x: Tensor, packed: Tensor, scale_OG: Tensor, zero_OG: Tensor | None = None, bias_O: Tensor | None = None, *,
    group: int = 128, how: Way | None = None,
) -> Tensor:  # fmt: skip
    """The same as `int4_matmul` by torch, in one way; what runs on a CPU."""
    x_MI = _rows(x)

    def rows(a: int, b: int) -> Tensor:
        zero = None if zero_OG is None else zero_OG[a:b]
        return dequantize_int4(packed[a:b], scale_OG[a:b], zero, x_MI.shape[1], x_MI.dtype)

    return _finished(_BySlabs.apply(x_MI, len(packed), rows), bias_O, x)


def reference_int8_dynamic(
    x: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None = None, *,
    outliers: Tensor | None = None, threshold: float | None = None, how: Way | None = None,
) -> Tensor:  # fmt: skip
    """The same as `int8_dynamic_matmul` by torch, in one way; what runs on a CPU."""
    x_MI = _rows(x)
    kind_I = _outlier_columns(x_MI, outliers, threshold)
    apart_MI = None if kind_I is None else (kind_I == _LISTED) | ((kind_I == _SOME) & (x_MI.abs() > (threshold or 0.0)))
    usual_MI = x_MI if apart_MI is None else x_MI.masked_fill(apart_MI, 0.0)
    largest_M1 = usual_MI.abs().amax(1, keepdim=True) if x_MI.shape[1] else x_MI.new_ones(len(x_MI), 1)
    largest_M1 = torch.where(largest_M1 > 0, largest_M1, 1.0)
    codes_MI = (usual_MI * 127 / largest_M1).round_().to(torch.int8)
    y_MO = _integer_product(codes_MI, weight_OI).to(x_MI.dtype) * (largest_M1 / 127)
    if kind_I is not None:
        columns = kind_I.nonzero().squeeze(1) if not x.is_meta else torch.zeros(0, dtype=torch.long, device=x.device)
        y_MO = y_MO + (x_MI - usual_MI)[:, columns] @ weight_OI[:, columns].to(x_MI.dtype).T
    return _finished(y_MO * scale_O, bias_O, x)


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _rows(x: Tensor) -> Tensor:
    return _flat(x).to(torch.promote_types(x.dtype, torch.float32))


def _finished(y_MO: Tensor, bias_O: Tensor | None, x: Tensor) -> Tensor:
    y_MO = y_MO if bias_O is None else y_MO + bias_O
    return y_MO.to(x.dtype).view(*x.shape[:-1], y_MO.shape[1])


def _integer_product(codes_MI: Tensor, weight_OI: Tensor) -> Tensor:
    """codes weight^T, exact."""
    M, I = codes_MI.shape
    if codes_MI.device.type == "cpu" and I >= 16 and M > 0 and len(weight_OI) > 0:  # _int_mm is wrong for I = 1
        return int_mm(codes_MI.contiguous(), weight_OI.contiguous().T)
    return codes_MI.double() @ weight_OI.double().T


_SOME, _LISTED = 1, 2


def _outlier_columns(x_MI: Tensor, outliers: Tensor | None, threshold: float | None) -> Tensor | None:
    """Which columns have outliers: int8 [I], _SOME where an element is above the threshold, _LISTED where all count.

    None where no outliers are asked for; found without waiting for the device.
    """
    if outliers is None and threshold is None:
        return None
    kind_I = torch.zeros(x_MI.shape[1], dtype=torch.int8, device=x_MI.device)
    if threshold is not None and len(x_MI):
        # The norm takes one pass, unlike abs and amax.
        kind_I = (torch.linalg.vector_norm(x_MI, math.inf, dim=0) > threshold).to(torch.int8)
    if outliers is not None:
        kind_I = kind_I.index_fill(0, outliers.long(), _LISTED)
    return kind_I


# --- kernels ----------------------------------------------------------------------------------------------------------
# M rows of x, N rows of the weight (columns of y), K columns of both.


def _assembly(text: str) -> Any:
    lines = (line.strip() for line in text.split(";") if line.strip())
    return tl.constexpr("{\n" + "".join(f"{line};\n" for line in lines) + "}")


def _of_halves(magic: str, one: str) -> Any:
    """Four bytes ($4) to their four low ($0, $1) and four high halves ($2, $3) in 16 bits, less $5 and $6.

    A half of a byte is put into the last bits of a number whose steps are one (128 in bf16, 1024 in fp16), two at once.
    """
    return _assembly(
        f"""
        .reg .b32 a, b, c, d, one; mov.b32 one, {one};
        prmt.b32 a, $4, 0, 0x4140; prmt.b32 b, $4, 0, 0x4342; shr.u32 c, a, 4; shr.u32 d, b, 4;
        lop3.b32 a, a, 0x000F000F, {magic}, 0xEA; lop3.b32 b, b, 0x000F000F, {magic}, 0xEA;
        lop3.b32 c, c, 0x000F000F, {magic}, 0xEA; lop3.b32 d, d, 0x000F000F, {magic}, 0xEA;
    """
        + "".join(
            f"fma.rn.{'bf16x2' if magic == '0x43004300' else 'f16x2'} ${i}, {reg}, one, ${5 + i % 2};"
            for i, reg in enumerate("abcd")
        )
    )


_HALVES_BF16, _HALVES_FP16 = _of_halves("0x43004300", "0x3F803F80"), _of_halves("0x64006400", "0x3C003C00")
_BYTES_BF16 = _assembly("""
    .reg .b32 a, b, c, d, less; mov.b32 less, 0xBF80BF80;
    prmt.b32 a, $2, 0, 0x4140; prmt.b32 b, $2, 0, 0x4342;
    lop3.b32 c, a, 0x00800080, 0x43004300, 0xEA; lop3.b32 d, b, 0x00800080, 0x43004300, 0xEA;
    lop3.b32 a, a, 0x007F007F, 0x43004300, 0xEA; lop3.b32 b, b, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, c, less, a; fma.rn.bf16x2 $1, d, less, b;
""")
"""Signed bytes in bf16: 128 and their lower seven bits, less 128 or, where they are negative, 256."""
_BYTES_FP16 = _assembly("""
    .reg .b32 a, b, w, one, less; mov.b32 one, 0x3C003C00; mov.b32 less, 0xE480E480;
    xor.b32 w, $2, 0x80808080;
    prmt.b32 a, w, 0x64646464, 0x4140; prmt.b32 b, w, 0x64646464, 0x4342;
    fma.rn.f16x2 $0, a, one, less; fma.rn.f16x2 $1, b, one, less;
""")
"""Signed bytes in fp16: 1024 and the byte with its sign turned over, less 1152."""


@triton.jit
def _as(integers, DTYPE: tl.constexpr):
    """Small integers as floats, by way of fp32: the interpreter has no other way to bf16."""
    return integers.to(tl.float32).to(DTYPE)


@triton.jit
def _store(y, acc, bias, m, n, M, N, HAS_BIAS: tl.constexpr):
    if HAS_BIAS:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(y + m.to(tl.int64)[:, None] * N + n[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def _tile(M, BM: tl.constexpr, BN: tl.constexpr):
    """Rows and columns of this program's tile; neighbours share rows of the weight."""
    tiles = tl.cdiv(M, BM)
    return (tl.program_id(0) % tiles) * BM + tl.arange(0, BM), (tl.program_id(0) // tiles) * BN + tl.arange(0, BN)


@triton.jit
def _int8_rows(x, w, scale, bias, y, N, K, xm, xk, wn, wk, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr):
    """One row of x with BN rows of the weight."""
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros([BN, BK], tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK).to(tl.int64)
        inside = (n < N)[:, None] & (k < K)[None, :]
        codes = tl.load(w + n.to(tl.int64)[:, None] * wn + k[None, :] * wk, mask=inside, other=0)
        values = tl.load(x + tl.program_id(1).to(tl.int64) * xm + k * xk, mask=k < K, other=0.0)
        total += codes.to(tl.float32) * values.to(tl.float32)[None, :]
    sums = tl.sum(total, 1) * tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)
    _store(y, sums[None, :], bias, m, n, m + 1, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def _int8_tile(
    x, w, scale, bias, y, M, N, K, xm, xk, wn, wk, part, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, ALONG_K: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """ALONG_K: scales are of the columns of x, as they are when the weight is transposed.

    part: columns that a program takes; y then has a [M, N] for each part.
    """
    m, n = _tile(M, BM, BN)
    y += tl.program_id(1).to(tl.int64) * M * N
    first = tl.program_id(1) * part
    x += m.to(tl.int64)[:, None] * xm
    w += n.to(tl.int64)[None, :] * wn
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(first, tl.minimum(K, first + part), BK):
        k = start + tl.arange(0, BK)
        values = tl.load(x + k.to(tl.int64)[None, :] * xk, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        codes = tl.load(w + k.to(tl.int64)[:, None] * wk, mask=(n < N)[None, :] & (k < K)[:, None], other=0)
        if ALONG_K:
            factors = tl.load(scale + k, mask=k < K, other=0.0).to(tl.float32)
            values = (values.to(tl.float32) * factors[None, :]).to(values.dtype)
        acc = tl.dot(values, _as(codes, values.dtype), acc, input_precision=PRECISION)
    if not ALONG_K:
        acc *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    _store(y, acc, bias, m, n, M, N, HAS_BIAS)


@triton.jit
def _int4_rows(
    x, w, scale, zero, bias, y, N, K, G, xm, xk, wn, wk,
    BN: tl.constexpr, BG: tl.constexpr, HALF: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """One row of x with BN rows of the weight, BG groups at a time."""
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    x += tl.program_id(1).to(tl.int64) * xm
    half = tl.arange(0, HALF)
    total = tl.zeros([BN, BG], tl.float32)
    for start in range(0, G, BG):
        g = start + tl.arange(0, BG).to(tl.int64)
        inside = (n < N)[:, None] & (g < G)[None, :]
        at = n.to(tl.int64)[:, None, None] * wn + (g[:, None] * HALF + half[None, :])[None, :, :] * wk
        pair = tl.load(w + at, mask=inside[:, :, None], other=0)
        low, high = (pair & 15).to(tl.float32), (pair >> 4).to(tl.float32)
        middle = 8.0
        if HAS_ZERO:
            middle = tl.load(zero + n.to(tl.int64)[:, None] * G + g[None, :], mask=inside, other=0)
            middle = middle.to(tl.float32)[:, :, None]
        k = g[:, None] * (2 * HALF) + half[None, :]
        x_low = tl.load(x + k * xk, mask=k < K, other=0.0).to(tl.float32)
        x_high = tl.load(x + (k + HALF) * xk, mask=k + HALF < K, other=0.0).to(tl.float32)
        part = tl.sum((low - middle) * x_low[None, :, :] + (high - middle) * x_high[None, :, :], 2)
        factor = tl.load(scale + n.to(tl.int64)[:, None] * G + g[None, :], mask=inside, other=0.0)
        total += part * factor.to(tl.float32)
    _store(y, tl.sum(total, 1)[None, :], bias, m, n, m + 1, N, HAS_BIAS)


@triton.jit
def _sixteen(four, b: tl.constexpr, DTYPE: tl.constexpr):
    """The b-th of four numbers of 16 bits that stand in 64, as fp32."""
    return ((four >> (16 * b)) & 0xFFFF).to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _byte(word, b: tl.constexpr, first: tl.constexpr, mask: tl.constexpr):
    """Bits `first` and on of the b-th byte under the mask, as the fp32 that has them where they stand (or the last byte
    where the third stood, for the lower 24 bits are a number of fp32 in place): their number times a power of two.

    A number below the normal ones or the next above, which a multiplication takes like any other: so a weight costs an
    operation of bits and one multiplication and addition, where the conversion of a byte alone is four, one of them on
    units that are a quarter as many. x comes with 2^64 over the same power (`_raised`), and sums are 2^85 times smaller
    than what they are.
    """
    if b == 3:
        bits = (word >> 8) & (mask << (16 + first))
    else:
        bits = word & (mask << (8 * b + first))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _raised(x, b: tl.constexpr, first: tl.constexpr):
    if b == 3:
        raised = x * (18446744073709551616.0 / (1 << (16 + first)))
    else:
        raised = x * (18446744073709551616.0 / (1 << (8 * b + first)))
    return raised


_RAISED = tl.constexpr(2.0**85)


_LOAD_64, _LOAD_32, _LOAD_16, _LOAD_8 = (
    tl.constexpr(f"ld.global.nc.{bits} $0, [$1];") for bits in ("b64", "b32", "u16", "u8")
)


@triton.jit
def _loaded(pointer, ASSEMBLY: tl.constexpr):
    """What a plain load gives, as integers (of fewer than 64 bits in 32), in whatever layout its reader has.

    Triton gives each load a layout of its own, and 3.6 then moves what is computed of it through shared memory, number
    by number.
    """
    BITS: tl.constexpr = pointer.dtype.element_ty.primitive_bitwidth
    if ASSEMBLY:
        at = pointer.to(tl.int64)
        if BITS == 64:
            found = tl.inline_asm_elementwise(_LOAD_64, "=l,l", [at], tl.int64, is_pure=True, pack=1)
        elif BITS == 32:
            found = tl.inline_asm_elementwise(_LOAD_32, "=r,l", [at], tl.int32, is_pure=True, pack=1)
        elif BITS == 16:
            found = tl.inline_asm_elementwise(_LOAD_16, "=r,l", [at], tl.int32, is_pure=True, pack=1)
        else:
            found = tl.inline_asm_elementwise(_LOAD_8, "=r,l", [at], tl.int32, is_pure=True, pack=1)
    elif BITS == 64:
        found = tl.load(pointer.to(tl.pointer_type(tl.int64)))
    elif BITS == 32:
        found = tl.load(pointer.to(tl.pointer_type(tl.int32)))
    elif BITS == 16:
        found = tl.load(pointer.to(tl.pointer_type(tl.uint16))).to(tl.int32)
    else:
        found = tl.load(pointer.to(tl.pointer_type(tl.uint8))).to(tl.int32)
    return found


@triton.jit
def _loaded_float(pointer, ASSEMBLY: tl.constexpr):
    """A number in 16 or 32 bits, as fp32."""
    bits = _loaded(pointer, ASSEMBLY)
    if tl.float32 == pointer.dtype.element_ty:
        number = bits.to(tl.float32, bitcast=True)
    elif tl.bfloat16 == pointer.dtype.element_ty:
        number = (bits << 16).to(tl.float32, bitcast=True)
    else:
        number = bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return number


@triton.jit
def _words_at(rows, t, num_words, WHOLE: tl.constexpr):
    """Words t of each row; past a row's end 0."""
    if WHOLE:
        words = tl.load(rows + t[None, :])
    else:
        words = tl.load(rows + t[None, :], mask=t[None, :] < num_words, other=0)
    return words


@triton.jit
def _int8_words(
    x, w, scale, bias, y, N, K, xm,
    BN: tl.constexpr, BT: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr, ASSEMBLY: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_int8_rows` for x in 16 bits and rows of whole words of four columns; BT words at a time.

    A thread takes its words of all rows, so that it widens x once for them. WHOLE: BT divides a row's words. Rows past
    the last are the last once more. AHEAD: the next words are on their way while a program multiplies.
    """
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    row, num_words, at = tl.minimum(n, N - 1).to(tl.int64), K // 4, tl.arange(0, BT)
    rows = w.to(tl.pointer_type(tl.int32)) + row[:, None] * num_words
    fours = (x + tl.program_id(1).to(tl.int64) * xm).to(tl.pointer_type(tl.int64))
    total, plain = tl.zeros([BN, BT], tl.float32), tl.zeros([BT], tl.float32)
    if AHEAD:
        word = _words_at(rows, at, num_words, WHOLE)
    for start in range(0, num_words, BT):
        t = start + at
        if AHEAD:
            later = _words_at(rows, t + BT, num_words, False)
        else:
            word = _words_at(rows, t, num_words, WHOLE)
        four = _loaded(fours + (t if WHOLE else tl.minimum(t, num_words - 1)), ASSEMBLY)
        if not WHOLE:
            four = tl.where(t < num_words, four, 0)
        # The sign is turned over: -128 .. 127 as 0 .. 255, and 128 times the sum of x is taken off in the end.
        word ^= -2139062144
        for b in tl.static_range(4):
            one = _sixteen(four, b, x.dtype.element_ty)
            total += _byte(word, b, 0, 255) * _raised(one, b, 0)[None, :]
            plain += one
        if AHEAD:
            word = later
    sums = tl.sum(total * _RAISED - 128.0 * plain[None, :], 1)
    sums *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)
    _store(y, sums[None, :], bias, m, n, m + 1, N, HAS_BIAS)


@triton.jit
def _int4_words(
    x, w, scale, zero, bias, y, N, G, xm,
    BN: tl.constexpr, BC: tl.constexpr, HALF: tl.constexpr, WHOLE: tl.constexpr, AHEAD: tl.constexpr,
    ASSEMBLY: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_int4_rows` for x in 16 bits and whole groups: BC pieces of 8 bytes, of 16 numbers of one group, at a time.

    A thread takes its pieces of all rows, so that it widens x once for them. sum (q - zero) x = sum q x - zero sum x,
    so that zeros cost little. WHOLE: BC divides a row's pieces; past a row's end scales are 0.
    Rows past the last are the last once more. AHEAD: the next pieces are on their way while a program multiplies.
    """
    m = tl.program_id(1) + tl.arange(0, 1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    PIECES: tl.constexpr = HALF // 8  # of a group
    row, pieces = tl.minimum(n, N - 1).to(tl.int64), G * PIECES
    words = w.to(tl.pointer_type(tl.int64)) + row[:, None] * pieces
    fours = (x + tl.program_id(1).to(tl.int64) * xm).to(tl.pointer_type(tl.int64))
    scale += row[:, None] * G
    zero += row[:, None] * G
    total = tl.zeros([BN, BC], tl.float32)
    at = tl.arange(0, BC)
    if AHEAD:
        word = _words_at(words, at, pieces, WHOLE)
    for start in range(0, pieces, BC):
        c = start + at
        if AHEAD:
            later = _words_at(words, c + BC, pieces, False)
        else:
            word = _words_at(words, c, pieces, WHOLE)
        inside = c if WHOLE else tl.minimum(c, pieces - 1)
        g = inside // PIECES
        first = fours + (inside + g * PIECES) * 2
        factor = _loaded_float(scale + g[None, :], ASSEMBLY)
        if not WHOLE:
            factor = tl.where((c < pieces)[None, :], factor, 0.0)
        middle = _loaded(zero + g[None, :], ASSEMBLY).to(tl.float32) if HAS_ZERO else 8.0
        sums = tl.zeros([BN, BC], tl.float32)
        plain = tl.zeros([BC], tl.float32)
        for h in tl.static_range(2):
            half = (word >> (32 * h)).to(tl.int32)
            low, high = _loaded(first + h, ASSEMBLY), _loaded(first + (h + PIECES * 2), ASSEMBLY)
            for b in tl.static_range(4):
                x_low, x_high = _sixteen(low, b, x.dtype.element_ty), _sixteen(high, b, x.dtype.element_ty)
                sums += _byte(half, b, 0, 15) * _raised(x_low, b, 0)[None, :]
                sums += _byte(half, b, 4, 15) * _raised(x_high, b, 4)[None, :]
                plain += x_low + x_high
        total += (sums * _RAISED - middle * plain[None, :]) * factor
        if AHEAD:
            word = later
    _store(y, tl.sum(total, 1)[None, :], bias, m, n, m + 1, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def _int4_tile(
    x, w, scale, zero, bias, y, M, N, K, G, xm, xk, wn, wk, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HALF: tl.constexpr,
    PRECISION: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """BK bytes of a group at a time: their two halves by matrix units, then the group's scale.

    part: bytes that a program takes; y then has a [M, N] for each part.
    """
    m, n = _tile(M, BM, BN)
    y += tl.program_id(1).to(tl.int64) * M * N
    first = tl.program_id(1) * part
    x += m.to(tl.int64)[:, None] * xm
    w += n.to(tl.int64)[None, :] * wn
    rows = n.to(tl.int64) * G
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(first, tl.minimum(G * HALF, first + part), BK):
        byte, g = start + tl.arange(0, BK), start // HALF
        k = byte + g * HALF
        x_low = tl.load(x + k.to(tl.int64)[None, :] * xk, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        k += HALF
        x_high = tl.load(x + k.to(tl.int64)[None, :] * xk, mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        pair = tl.load(w + byte.to(tl.int64)[:, None] * wk, mask=(n < N)[None, :], other=0).to(tl.int32)
        middle = 8
        if HAS_ZERO:
            middle = tl.load(zero + rows + g, mask=n < N, other=0).to(tl.int32)[None, :]
        low, high = _as((pair & 15) - middle, x_low.dtype), _as((pair >> 4) - middle, x_low.dtype)
        sums = tl.dot(x_low, low, input_precision=PRECISION)
        sums = tl.dot(x_high, high, sums, input_precision=PRECISION)
        acc += sums * tl.load(scale + rows + g, mask=n < N, other=0.0).to(tl.float32)[None, :]
    _store(y, acc, bias, m, n, M, N, HAS_BIAS)


@triton.jit
def _halves(pair, middle, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """The numbers in the low and the high halves of bytes, less `middle` (fp32, broadcast), in 16 bits; exact."""
    if ASSEMBLY:
        if tl.bfloat16 == DTYPE:
            less = (-128.0 - middle).to(DTYPE)
            low, high = tl.inline_asm_elementwise(
                _HALVES_BF16, "=r,=r,=r,=r,r,r,r", [pair, less], (tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
            )
        else:
            less = (-1024.0 - middle).to(DTYPE)
            low, high = tl.inline_asm_elementwise(
                _HALVES_FP16, "=r,=r,=r,=r,r,r,r", [pair, less], (tl.float16, tl.float16), is_pure=True, pack=4
            )
    else:
        numbers = pair.to(tl.int32)
        low = ((numbers & 15).to(tl.float32) - middle).to(DTYPE)
        high = ((numbers >> 4).to(tl.float32) - middle).to(DTYPE)
    return low, high


@triton.jit
def _whole(codes, DTYPE: tl.constexpr, ASSEMBLY: tl.constexpr):
    """Signed bytes in 16 bits; exact."""
    if ASSEMBLY:
        if tl.bfloat16 == DTYPE:
            wide = tl.inline_asm_elementwise(_BYTES_BF16, "=r,=r,r", [codes], tl.bfloat16, is_pure=True, pack=4)
        else:
            wide = tl.inline_asm_elementwise(_BYTES_FP16, "=r,=r,r", [codes], tl.float16, is_pure=True, pack=4)
    else:
        wide = _as(codes, DTYPE)
    return wide


@triton.jit(do_not_specialize=["M"])
def _int8_words_tile(
    x, w, scale, bias, y, M, N, K, xm, part, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    ASSEMBLY: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_int8_tile` for x in 16 bits, K and part in whole BK. The weight is the product's left side, which stays in
    registers; rows past the last are the last once more.
    """
    m, n = _tile(M, BM, BN)
    y += tl.program_id(1).to(tl.int64) * M * N
    first, k = tl.program_id(1) * part, tl.arange(0, BK)
    x += tl.minimum(m, M - 1).to(tl.int64)[None, :] * xm + k[:, None]
    w += tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(first, tl.minimum(K, first + part), BK):
        values, codes = tl.load(x + start), tl.load(w + start)
        acc = tl.dot(_whole(codes, values.dtype, ASSEMBLY), values, acc)
    acc *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    _store(y, tl.trans(acc), bias, m, n, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M", "part"])
def _int4_words_tile(
    x, w, scale, zero, bias, y, M, N, G, xm, part,
    BM: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr, HALF: tl.constexpr,
    ASSEMBLY: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_int4_tile` for x in 16 bits, with `part` groups a program, BU at a time, of which G is a multiple.

    As `_int8_words_tile`.
    """
    m, n = _tile(M, BM, BN)
    y += tl.program_id(1).to(tl.int64) * M * N
    first, byte, row = tl.program_id(1) * part, tl.arange(0, HALF), tl.minimum(n, N - 1).to(tl.int64)
    x += tl.minimum(m, M - 1).to(tl.int64)[None, :] * xm + byte[:, None]
    w += row[:, None] * (G * HALF) + byte[None, :]
    scale += row * G
    zero += row * G
    acc = tl.zeros([BN, BM], tl.float32)
    for start in range(first, tl.minimum(G, first + part), BU):
        for u in tl.static_range(BU):
            g, at = start + u, (start + u) * HALF
            factor = tl.load(scale + g).to(tl.float32)
            if HAS_ZERO:
                middle = tl.load(zero + g).to(tl.float32)[:, None]
            else:
                middle = tl.full([BN, 1], 8.0, tl.float32)
            x_low, x_high, pair = tl.load(x + 2 * at), tl.load(x + 2 * at + HALF), tl.load(w + at)
            low, high = _halves(pair, middle, x_low.dtype, ASSEMBLY)
            acc += tl.dot(high, x_high, tl.dot(low, x_low)) * factor[:, None]
    _store(y, tl.trans(acc), bias, m, n, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def _int8_words_split(
    x, w, scale, bias, y, M, N, K, xm, BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, BK: tl.constexpr,
    WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_int8_words_tile` for few rows: warps take BS pieces of BK columns side by side, and add what they found.

    WHOLE: K comes in whole BS BK. Rows of x past the last are not read.
    """
    m, n = _tile(M, BM, BN)
    s, k = tl.arange(0, BS)[:, None, None] * BK, tl.arange(0, BK)
    x += m.to(tl.int64)[None, None, :] * xm + s + k[None, :, None]
    w += tl.minimum(n, N - 1).to(tl.int64)[None, :, None] * K + s + k[None, None, :]
    acc = tl.zeros([BS, BN, BM], tl.float32)
    for start in range(0, K, BS * BK):
        there = (m < M)[None, None, :]
        if WHOLE:
            codes = tl.load(w + start)
        else:
            there = there & (start + s < K)
            codes = tl.load(w + start, mask=start + s < K, other=0)
        values = tl.load(x + start, mask=there, other=0.0)
        acc = tl.dot(_whole(codes, values.dtype, ASSEMBLY), values, acc)
    total = tl.sum(acc, 0) * tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    _store(y, tl.trans(total), bias, m, n, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def _int4_words_split(
    x, w, scale, zero, bias, y, M, N, G, xm,
    BM: tl.constexpr, BN: tl.constexpr, BS: tl.constexpr, HALF: tl.constexpr,
    WHOLE: tl.constexpr, ASSEMBLY: tl.constexpr, HAS_ZERO: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """`_int4_words_tile` for few rows: warps take BS groups side by side, and add what they found.

    WHOLE: BS divides G. Rows of x past the last are not read.
    """
    m, n = _tile(M, BM, BN)
    s, byte, row = tl.arange(0, BS), tl.arange(0, HALF), tl.minimum(n, N - 1).to(tl.int64)
    x += m.to(tl.int64)[None, None, :] * xm + (s * (2 * HALF))[:, None, None] + byte[None, :, None]
    w += row[None, :, None] * (G * HALF) + (s * HALF)[:, None, None] + byte[None, None, :]
    scale += row[None, :] * G + s[:, None]
    zero += row[None, :] * G + s[:, None]
    acc = tl.zeros([BS, BN, BM], tl.float32)
    for g in range(0, G, BS):
        at = g * HALF
        there, middle = (m < M)[None, None, :], tl.full([BS, BN], 8.0, tl.float32)
        if WHOLE:
            factor, pair = tl.load(scale + g), tl.load(w + at)
            if HAS_ZERO:
                middle = tl.load(zero + g).to(tl.float32)
        else:
            inside = (g + s < G)[:, None]
            there = there & inside[:, :, None]
            factor = tl.load(scale + g, mask=inside, other=0.0)
            pair = tl.load(w + at, mask=inside[:, :, None], other=0)
            if HAS_ZERO:
                middle = tl.load(zero + g, mask=inside, other=0).to(tl.float32)
        x_low, x_high = tl.load(x + 2 * at, mask=there, other=0.0), tl.load(x + 2 * at + HALF, mask=there, other=0.0)
        low, high = _halves(pair, middle[:, :, None], x_low.dtype, ASSEMBLY)
        acc += tl.dot(high, x_high, tl.dot(low, x_low)) * factor.to(tl.float32)[:, :, None]
    _store(y, tl.trans(tl.sum(acc, 0)), bias, m, n, M, N, HAS_BIAS)


@triton.jit
def _is_apart(values, kind, threshold):
    """Which elements are outliers: those of a listed column (2), in other columns with some (1) the large ones."""
    return (kind == 2) | ((kind == 1) & (tl.abs(values) > threshold))


@triton.jit
def _usual(x, kinds, threshold, k, K, xk, HAS_OUTLIERS: tl.constexpr):
    """Elements k of a row, zero where they are outliers."""
    values = tl.load(x + k.to(tl.int64) * xk, mask=k < K, other=0.0).to(tl.float32)
    if HAS_OUTLIERS:
        values = tl.where(_is_apart(values, tl.load(kinds + k, mask=k < K, other=0), threshold), 0.0, values)
    return values


@triton.jit
def _quantize_rows(x, kinds, codes, largest, threshold, K, xm, xk, BK: tl.constexpr, HAS_OUTLIERS: tl.constexpr):
    """A row of x in 127 steps of its largest element, and that element; zeros where outliers are."""
    row = tl.program_id(0).to(tl.int64)
    x += row * xm
    most = tl.zeros([BK], tl.float32)
    for start in range(0, K, BK):
        most = tl.maximum(most, tl.abs(_usual(x, kinds, threshold, start + tl.arange(0, BK), K, xk, HAS_OUTLIERS)))
    top = tl.max(most)
    top = tl.where(top > 0, top, 1.0)
    tl.store(largest + row, top)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        steps = tl.div_rn(_usual(x, kinds, threshold, k, K, xk, HAS_OUTLIERS) * 127, top + k * 0.0)
        steps = (steps + 12582912.0) - 12582912.0  # 1.5 2^23: to the nearest integer, halves to even
        tl.store(codes + row * K + k, steps.to(tl.int8), mask=k < K)


@triton.jit(do_not_specialize=["M"])
def _int8_dynamic_tile(
    x, codes, largest, kinds, threshold, w, scale, bias, y, M, N, K, xm, xk, wn, wk, part,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PRECISION: tl.constexpr, HAS_OUTLIERS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Integers by integers; where a block of columns has outliers, those elements of x once more as they are.

    part: columns that a program takes; y then has a [M, N] for each part.
    """
    m, n = _tile(M, BM, BN)
    y += tl.program_id(1).to(tl.int64) * M * N
    first = tl.program_id(1) * part
    x += m.to(tl.int64)[:, None] * xm
    codes += m.to(tl.int64)[:, None] * K
    w += n.to(tl.int64)[None, :] * wn
    acc = tl.zeros([BM, BN], tl.int32)
    exact = tl.zeros([BM, BN], tl.float32)
    for start in range(first, tl.minimum(K, first + part), BK):
        k = start + tl.arange(0, BK)
        inside = (m < M)[:, None] & (k < K)[None, :]
        steps = tl.load(codes + k[None, :], mask=inside, other=0)
        weights = tl.load(w + k.to(tl.int64)[:, None] * wk, mask=(n < N)[None, :] & (k < K)[:, None], other=0)
        acc = tl.dot(steps, weights, acc, out_dtype=tl.int32)
        if HAS_OUTLIERS:
            found = tl.load(kinds + k, mask=k < K, other=0)
            if tl.max(found.to(tl.int32)) > 0:
                hot = inside & (found != 0)[None, :]
                values = tl.load(x + k.to(tl.int64)[None, :] * xk, mask=hot, other=0.0)
                apart = _is_apart(values.to(tl.float32), found[None, :], threshold)
                values = tl.where(apart, values, tl.zeros_like(values))
                exact = tl.dot(values, _as(weights, values.dtype), exact, input_precision=PRECISION)
    y_tile = acc.to(tl.float32) * (tl.load(largest + m, mask=m < M, other=0.0) / 127)[:, None]
    if HAS_OUTLIERS:
        y_tile += exact
    y_tile *= tl.load(scale + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    _store(y, y_tile, bias, m, n, M, N, HAS_BIAS)


@triton.jit(do_not_specialize=["M"])
def _merge_parts(parts, bias, y, M, N, num_parts, BN: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The sum of what programs found in their parts of the columns, in the order of the parts."""
    m, n = tl.program_id(1) + tl.arange(0, 1), tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([1, BN], tl.float32)
    parts += tl.program_id(1).to(tl.int64) * N
    for _ in range(num_parts):
        acc += tl.load(parts + n, mask=n < N, other=0.0)[None, :]
        parts += tl.cast(M, tl.int64) * N
    _store(y, acc, bias, m, n, M, N, HAS_BIAS)


@triton.jit
def _widen_int4(w, scale, zero, y, N, K, G, wn, wk, HALF: tl.constexpr, BLOCK: tl.constexpr, HAS_ZERO: tl.constexpr):
    """Some bytes of a row, as the two pieces of columns that they stand for."""
    n = tl.program_id(0).to(tl.int64)
    byte = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    g, there = byte // HALF, byte < G * HALF
    pair = tl.load(w + n * wn + byte.to(tl.int64) * wk, mask=there, other=0).to(tl.int32)
    middle = 8
    if HAS_ZERO:
        middle = tl.load(zero + n * G + g, mask=there, other=0).to(tl.int32)
    factor = tl.load(scale + n * G + g, mask=there, other=0.0).to(tl.float32)
    k = byte + g * HALF
    y += n * K
    tl.store(y + k, (((pair & 15) - middle).to(tl.float32) * factor).to(y.dtype.element_ty), mask=there & (k < K))
    k += HALF
    tl.store(y + k, (((pair >> 4) - middle).to(tl.float32) * factor).to(y.dtype.element_ty), mask=there & (k < K))


# --- operators --------------------------------------------------------------------------------------------------------


@operator("int8_matmul")
def _int8(
    x_MI: Tensor, weight_OI: Tensor, scale: Tensor, bias_O: Tensor | None, along_k: bool = False, how: str = ""
) -> Tensor:
    """along_k: `scale` is of the weight's columns, not of its rows. how: the way; by default the fastest known."""
    (M, K), N = x_MI.shape, len(weight_OI)
    y_MO = torch.empty(M, N, dtype=x_MI.dtype, device=x_MI.device)
    if not launches(x_MI) or N == 0:
        return y_MO
    scale, bias = scale.contiguous(), _contiguous(bias_O, x_MI)
    sizes = (K, *x_MI.stride(), *weight_OI.stride())
    has_bias = {"HAS_BIAS": bias_O is not None}
    words = not along_k and _in_words(x_MI, weight_OI, 32)
    if words and M == 1 and how != "tile":

        def run_words(blocks: Blocks) -> None:
            _int8_words[triton.cdiv(N, blocks["BN"]), M](
                x_MI, weight_OI, scale, bias, y_MO, N, K, x_MI.stride(0),
                WHOLE=K // 4 % blocks["BT"] == 0, ASSEMBLY=_assembles(), **has_bias, **blocks,
            )  # fmt: skip

        default, *others = (_row_blocks("BT", 4, *one) for one in _WORDS)
        run_words(choose("int8_words", (x_MI.dtype,), default, others, run_words))
        return y_MO
    if M <= _MOST_ROWS_OF_DECODE and not along_k and not words:
        _int8_rows[(triton.cdiv(N, 4), M)](x_MI, weight_OI, scale, bias, y_MO, N, *sizes, BN=4, BK=1024, **has_bias)
        return y_MO
    if (how or _how("int8_matmul", x_MI, N, along_k)) == "wide":
        return _widened(x_MI, y_MO, bias_O, lambda rows: _wide_int8(weight_OI, scale, rows, along_k, x_MI.dtype))

    if words and M <= _MOST_ROWS_SPLIT:

        def run_words_split(blocks: Blocks) -> None:
            _int8_words_split[_grid(M, N, blocks)](
                x_MI, weight_OI, scale, bias, y_MO, M, N, K, x_MI.stride(0),
                WHOLE=K % (blocks["BS"] * blocks["BK"]) == 0, ASSEMBLY=_assembles(), **has_bias, **blocks,
            )  # fmt: skip

        default, *others = (_split_blocks(M, *one) | {"BK": 64 if K % 64 == 0 else 32} for one in _splits(M, N))
        key = _rows_of(M), N, K, x_MI.dtype
        run_words_split(choose("int8_words_split", key, default, others, run_words_split))
        return y_MO
    if words:

        def run_words_tile(blocks: Blocks) -> None:
            def tile(bias, y, part: int, has_bias: bool, grid: tuple[int, int]) -> None:
                _int8_words_tile[grid](
                    x_MI, weight_OI, scale, bias, y, M, N, K, x_MI.stride(0), part,
                    ASSEMBLY=_assembles(), HAS_BIAS=has_bias, **blocks,
                )  # fmt: skip

            _in_parts(tile, K, blocks["BK"], blocks, bias_O, y_MO)

        columns = next(n for n in (128, 64, 32) if K % n == 0)
        default, *others = (_words_blocks(M, *one) | {"BK": columns} for one in _tiles(M))
        run_words_tile(choose("int8_words_tile", (_rows_of(M), N, K, x_MI.dtype), default, others, run_words_tile))
        return y_MO

    def run(blocks: Blocks) -> None:
        def tile(bias, y, part: int, has_bias: bool, grid: tuple[int, int]) -> None:
            _int8_tile[grid](
                x_MI, weight_OI, scale, bias, y, M, N, *sizes, part,
                PRECISION=_precision(), ALONG_K=along_k, HAS_BIAS=has_bias, **blocks,
            )  # fmt: skip

        _in_parts(tile, K, blocks["BK"], blocks, bias_O, y_MO)

    blocks = _blocks(M, x_MI.dtype)
    if along_k:  # scaled elements of x are in registers
        blocks["BK"] = min(64, blocks["BK"])
    _tune("int8_tile", blocks, (M, N, K, x_MI.dtype, along_k), run)
    return y_MO


@operator("int8_dynamic_matmul")
def _int8_dynamic(
    x_MI: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None, kind_I: Tensor | None, threshold: float,
    how: str = "",
) -> Tensor:  # fmt: skip
    (M, K), N = x_MI.shape, len(weight_OI)
    y_MO = torch.empty(M, N, dtype=x_MI.dtype, device=x_MI.device)
    if not launches(x_MI) or N == 0:
        return y_MO
    codes_MI = torch.empty(M, K, dtype=torch.int8, device=x_MI.device)
    largest_M = torch.empty(M, dtype=torch.float32, device=x_MI.device)
    kinds = codes_MI if kind_I is None else kind_I
    has = {"HAS_OUTLIERS": kind_I is not None}
    _quantize_rows[(M,)](x_MI, kinds, codes_MI, largest_M, threshold, K, *x_MI.stride(), BK=1024, **has)
    if kind_I is None and (how or _how("int8_dynamic_matmul", x_MI, N)) == "library":
        return _by_library(codes_MI, largest_M, weight_OI, scale_O, bias_O, y_MO)
    scale = scale_O.contiguous()

    def run(blocks: Blocks) -> None:
        def tile(bias, y, part: int, has_bias: bool, grid: tuple[int, int]) -> None:
            _int8_dynamic_tile[grid](
                codes_MI if kind_I is None else x_MI, codes_MI, largest_M, kinds, threshold, weight_OI, scale, bias, y,
                M, N, K, *x_MI.stride(), *weight_OI.stride(), part,
                PRECISION=_precision(), HAS_BIAS=has_bias, **has, **blocks,
            )  # fmt: skip

        _in_parts(tile, K, blocks["BK"], blocks, bias_O, y_MO)

    blocks = _blocks(M, torch.int8 if kind_I is None else x_MI.dtype)
    _tune("int8_dynamic_tile", blocks, (M, N, K, x_MI.dtype, kind_I is not None), run)
    return y_MO


@operator("int4_matmul")
def _int4(
    x_MI: Tensor, packed: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, bias_O: Tensor | None, group: int,
    how: str = "",
) -> Tensor:  # fmt: skip
    (M, K), (N, G) = x_MI.shape, scale_OG.shape
    y_MO = torch.empty(M, N, dtype=x_MI.dtype, device=x_MI.device)
    if not launches(x_MI) or N == 0:
        return y_MO
    given = (x_MI, packed, scale_OG.contiguous(), _contiguous(zero_OG, packed))
    sizes = (N, K, G, *x_MI.stride(), *packed.stride())
    has_zero = {"HAS_ZERO": zero_OG is not None}
    words, bias = _in_words(x_MI, packed, group), _contiguous(bias_O, x_MI)
    has = has_zero | {"HAS_BIAS": bias_O is not None}
    if words and M == 1 and how != "tile":

        def run_words(blocks: Blocks) -> None:
            _int4_words[triton.cdiv(N, blocks["BN"]), M](
                *given, bias, y_MO, N, G, x_MI.stride(0), HALF=group // 2,
                WHOLE=K // 16 % blocks["BC"] == 0, ASSEMBLY=_assembles(), **has, **blocks,
            )  # fmt: skip

        default, *others = (_row_blocks("BC", 16, *one) for one in _WORDS)
        run_words(choose("int4_words", (x_MI.dtype, group), default, others, run_words))
        return y_MO
    if M <= _MOST_ROWS_OF_DECODE and not words:
        rows = {"BN": 4, "BG": 1024 // group, "HALF": group // 2}
        _int4_rows[(triton.cdiv(N, 4), M)](*given, bias, y_MO, *sizes, **rows, **has)
        return y_MO
    if (how or _how("int4_matmul", x_MI, N, group)) == "wide":
        return _widened(x_MI, y_MO, bias_O, lambda rows: _wide_int4(packed, scale_OG, zero_OG, rows, K, x_MI.dtype))

    if words and M <= _MOST_ROWS_SPLIT:

        def run_words_split(blocks: Blocks) -> None:
            _int4_words_split[_grid(M, N, blocks)](
                *given, bias, y_MO, M, N, G, x_MI.stride(0), HALF=group // 2,
                WHOLE=G % blocks["BS"] == 0, ASSEMBLY=_assembles(), **has, **blocks,
            )  # fmt: skip

        default, *others = (_split_blocks(M, *one) for one in _splits(M, N))
        key = _rows_of(M), N, K, x_MI.dtype, group
        run_words_split(choose("int4_words_split", key, default, others, run_words_split))
        return y_MO
    if words:

        def run_words_tile(blocks: Blocks) -> None:
            def tile(bias, y, part: int, has_bias: bool, grid: tuple[int, int]) -> None:
                _int4_words_tile[grid](
                    *given, bias, y, M, N, G, x_MI.stride(0), part,
                    HALF=group // 2, ASSEMBLY=_assembles(), HAS_BIAS=has_bias, **has_zero, **blocks,
                )  # fmt: skip

            _in_parts(tile, G, blocks["BU"], blocks, bias_O, y_MO)

        at_once = next(n for n in (max(1, 128 // group), 2, 1) if G % n == 0)
        default, *others = (_words_blocks(M, *one) | {"BU": at_once} for one in _tiles(M))
        key = _rows_of(M), N, K, x_MI.dtype, group
        run_words_tile(choose("int4_words_tile", key, default, others, run_words_tile))
        return y_MO

    def run(blocks: Blocks) -> None:
        def tile(bias, y, part: int, has_bias: bool, grid: tuple[int, int]) -> None:
            _int4_tile[grid](
                *given, bias, y, M, *sizes, part, HALF=group // 2, PRECISION=_precision(), HAS_BIAS=has_bias,
                **has_zero, **blocks,
            )  # fmt: skip

        _in_parts(tile, G * group // 2, blocks["BK"], blocks, bias_O, y_MO)

    _tune("int4_tile", _int4_blocks(M, x_MI.dtype, group // 2), (M, N, K, x_MI.dtype, group), run)
    return y_MO


def _in_parts(
    tile: Callable[..., None], length: int, step: int, blocks: Blocks, bias_O: Tensor | None, y_MO: Tensor
) -> None:
    """Launch a product of tiles, for few rows in parts of the `length` that a sum is over, which are then added.

    step  that a program takes at a time
    """
    M, N = y_MO.shape
    bias, has_bias = _contiguous(bias_O, y_MO), bias_O is not None
    tiles = triton.cdiv(M, blocks["BM"]) * triton.cdiv(N, blocks["BN"])
    part = _part(length, N, step) if M <= _MOST_ROWS_IN_PARTS else length
    num_parts = triton.cdiv(length, part)
    if num_parts == 1:
        tile(bias, y_MO, part, has_bias, (tiles, 1))
        return
    sums_PMO = torch.empty(num_parts, M, N, dtype=torch.float32, device=y_MO.device)
    tile(bias, sums_PMO, part, False, (tiles, num_parts))
    _merge_parts[(triton.cdiv(N, 256), M)](sums_PMO, bias, y_MO, M, N, num_parts, BN=256, HAS_BIAS=has_bias)


def _part(length: int, N: int, step: int) -> int:
    """Whole steps, at least four; of the weight's sizes alone."""
    steps = triton.cdiv(length, step)
    num_parts = max(1, min(_PROGRAMS // triton.cdiv(N, 32), steps // 4))
    return triton.cdiv(steps, num_parts) * step


def _in_words(x_MI: Tensor, weight: Tensor, columns: int) -> bool:
    """Return whether rows of x in 16 bits and of the weight are read by 16 bytes, columns in whole such groups."""
    aligned = x_MI.is_meta or (x_MI.data_ptr() % 16 == 0 and weight.data_ptr() % 16 == 0)
    whole = x_MI.shape[1] % columns == 0 and x_MI.stride(0) % 8 == 0 and x_MI.stride(1) == 1
    return aligned and whole and weight.is_contiguous() and x_MI.dtype.itemsize == 2


def _assembles() -> bool:
    """Return whether kernels may hold assembly for NVIDIA: not under the interpreter, nor on AMD."""
    return isinstance(_int4_words_tile, triton.JITFunction) and chip().startswith("sm_")


def _rows_of(M: int) -> int:
    """Rows of a tile for so many of x."""
    return next((n for n in (8, 16, 32) if n >= M), 64)


def _splits(M: int, N: int) -> tuple[tuple[int, int, int], ...]:
    """The default and what a tuner tries for few rows: rows of the weight, warps, stages.

    Of a small weight few rows a program, so that every processor has some.
    """
    if M > 16:
        return (64, 8, 3), (32, 4, 3), (64, 8, 4), (64, 4, 3), (32, 4, 4)
    first, second = (16, 32) if N <= _SMALL else (32, 16)
    stages = 6 if M <= 8 else 5
    return (first, 4, stages), (second, 4, stages), (first, 4, 4), (first, 4, 8), (first, 8, 4), (64, 8, 4)


def _tiles(M: int) -> tuple[tuple[int, int, int], ...]:
    """The default and what a tuner tries for more rows: rows of the weight, warps, stages."""
    if M <= 64:
        return (64, 4, 4), (128, 8, 4), (32, 2, 4), (64, 4, 3), (64, 4, 5)
    return (128, 8, 4), (64, 4, 4), (128, 8, 3)


def _row_blocks(at_once: str, columns_each: int, rows: int, columns: int, warps: int, ahead: bool) -> Blocks:
    return {"BN": rows, at_once: columns // columns_each, "AHEAD": ahead, "num_warps": warps}


def _split_blocks(M: int, rows: int, warps: int, stages: int) -> Blocks:
    return _words_blocks(M, rows, warps, stages) | {"BS": _PIECES}


def _words_blocks(M: int, rows: int, warps: int, stages: int) -> Blocks:
    return {"BM": _rows_of(M), "BN": rows, "num_warps": warps, "num_stages": stages}


def _how(kernel: str, x_MI: Tensor, N: int, *more: object) -> str:
    """The fastest way that was measured; without, tiles, and for many rows what a library is known to do well."""
    M, K = x_MI.shape
    rule = "wide" if M >= _WIDE_FROM and kernel != "int8_dynamic_matmul" and x_MI.is_cuda else "tile"
    return way(kernel, M, (N, K, x_MI.dtype, *more), rule)


def _widened(x_MI: Tensor, y_MO: Tensor, bias_O: Tensor | None, wide: Callable[[slice], Tensor]) -> Tensor:
    """y, by products with some rows of the weight after others."""
    N, step = y_MO.shape[1], _rows_at_once(x_MI.shape[1], x_MI.dtype)
    for start in range(0, N, step):
        rows = slice(start, min(N, start + step))
        torch.mm(x_MI, wide(rows).T, out=y_MO[:, rows]) if step >= N else y_MO[:, rows].copy_(x_MI @ wide(rows).T)
    return y_MO if bias_O is None else y_MO.add_(bias_O)


def _rows_at_once(columns: int, dtype: torch.dtype) -> int:
    """Rows at once of a weight with so many columns that are widened to this format."""
    return max(1, _WIDE_BYTES // (columns * dtype.itemsize))


def widening_bytes(rows: int, weight: tuple[int, int], dtype: torch.dtype, bits: int) -> int:
    """The most that a product in the way `wide` holds at once beside x, the weight and y, in bytes.

    rows    of x, which is of this dtype
    weight  its rows and columns; bits: of its integers
    """
    (N, K), at_once = weight, min(weight[0], _rows_at_once(weight[1], dtype))
    piece = at_once * K * dtype.itemsize
    # 8 bits times their scales are in fp32 before they are in x's format.
    before = 4 * at_once * K if bits == 8 and dtype.itemsize < 4 else 0
    results = rows * at_once * dtype.itemsize if at_once < N else 0
    return piece + max(before, results)


def library_bytes(rows: int, weight: tuple[int, int]) -> int:
    """Bytes as `widening_bytes`, of the way `library`: codes of x, sums as integers, and those twice in fp32."""
    N, K = weight
    return rows * (K + 4) + 12 * rows * N + 4 * N  # and the bias in fp32


def _wide_int8(weight_OI: Tensor, scale: Tensor, rows: slice, along_k: bool, dtype: torch.dtype) -> Tensor:
    factors = scale[None, :] if along_k else scale[rows, None]
    return (weight_OI[rows] * factors).to(dtype)


def _wide_int4(
    packed: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, rows: slice, columns: int, dtype: torch.dtype
) -> Tensor:
    """`dequantize_int4` of some rows, by one kernel."""
    packed, scale_OG = packed[rows], scale_OG[rows].contiguous()
    (N, G), half = scale_OG.shape, packed.shape[1] // scale_OG.shape[1]
    wide_OI = torch.empty(N, columns, dtype=dtype, device=packed.device)
    zero = packed if zero_OG is None else zero_OG[rows].contiguous()
    _widen_int4[(N, triton.cdiv(packed.shape[1], 1024))](
        packed, scale_OG, zero, wide_OI, N, columns, G, *packed.stride(), HALF=half, BLOCK=1024,
        HAS_ZERO=zero_OG is not None,
    )  # fmt: skip
    return wide_OI


def _by_library(
    codes_MI: Tensor, largest_M: Tensor, weight_OI: Tensor, scale_O: Tensor, bias_O: Tensor | None, y_MO: Tensor
) -> Tensor:
    """The product of integers by torch, then the scales. torch takes no fewer than 17 rows, nor odd sizes.

    cuBLAS multiplies integers only where both matrices have their rows along I, one after the other.
    """
    sums_MO = int_mm(codes_MI, weight_OI.contiguous().T)
    y_MO.copy_(sums_MO * (largest_M[:, None] / 127) * scale_O if bias_O is None else
               torch.addcmul(bias_O.float(), sums_MO * (largest_M[:, None] / 127), scale_O))  # fmt: skip
    return y_MO


@operator("widened_int4")
def _widened_int4(packed: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, columns: int, dtype: torch.dtype) -> Tensor:
    """`dequantize_int4` of a whole weight, by one kernel."""
    if not launches(packed):
        return packed.new_empty(len(packed), columns, dtype=dtype)
    return _wide_int4(packed, scale_OG, zero_OG, slice(None), columns, dtype)


def measure_products(
    codes: Tensor, scale: Tensor, zero: Tensor | None, columns: int, dtype: torch.dtype, rows: int, *,
    group: int | None, rounds_inputs: bool,
) -> str:  # fmt: skip
    """Time the ways of a product of so many rows of x with a weight on a GPU, and take the fastest from now on.

    columns        of the weight
    group          of columns that share a scale; None: 8 bits
    rounds_inputs  x is rounded to 8 bits, too
    """
    N, x_MI = len(codes), torch.randn(rows, columns, dtype=dtype, device=codes.device)
    key: tuple = (N, columns, dtype)
    if group is not None:
        launch = {how: partial(_int4, x_MI, codes, scale, zero, None, group, how) for how in ("tile", "wide")}
        return measure("int4_matmul", rows, (*key, group), launch)
    if not rounds_inputs:
        launch = {how: partial(_int8, x_MI, codes, scale, None, False, how) for how in ("tile", "wide")}
        return measure("int8_matmul", rows, (*key, False), launch)
    names = ("tile", "library") if _library_takes(rows, N, columns) else ("tile",)
    launch = {how: partial(_int8_dynamic, x_MI, codes, scale, None, None, 0.0, how) for how in names}
    return measure("int8_dynamic_matmul", rows, key, launch)


def _library_takes(M: int, N: int, K: int) -> bool:
    return M > 16 and N % 8 == 0 and K % 8 == 0


def _setup_int8(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _gradients_int8(ctx, dy_MO: Tensor):
    weight_OI, scale_O = ctx.saved_tensors
    return _int8(dy_MO, weight_OI.T, scale_O, None, True), None, None, None, None, None


def _setup_int4(ctx, inputs, output) -> None:
    x_MI, *weight, _, _, _ = inputs
    ctx.columns = x_MI.shape[1]
    ctx.save_for_backward(*weight)


def _gradients_int4(ctx, dy_MO: Tensor):
    packed, scale_OG, zero_OG = ctx.saved_tensors
    weight_OI = _widened_int4(packed, scale_OG, zero_OG, ctx.columns, dy_MO.dtype)
    return dy_MO @ weight_OI, None, None, None, None, None, None


_int8.register_autograd(_gradients_int8, setup_context=_setup_int8)
_int4.register_autograd(_gradients_int4, setup_context=_setup_int4)


def _contiguous(tensor: Tensor | None, instead: Tensor) -> Tensor:
    return instead if tensor is None else tensor.contiguous()


def _precision() -> str:
    return "ieee" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _blocks(M: int, dtype: torch.dtype) -> Blocks:
    """Few rows: small tiles, so that every processor reads some of the weight. fp32 products keep more registers."""
    exact = dtype == torch.float32
    if M <= 32:
        return {"BM": 16 if M <= 16 else 32, "BN": 32, "BK": 32 if exact else 128, "num_warps": 4, "num_stages": 3}
    if exact:
        return {"BM": 64, "BN": 64, "BK": 32, "num_warps": 8, "num_stages": 2}
    return {"BM": 128, "BN": 128, "BK": 64, "num_warps": 8, "num_stages": 3}


def _int4_blocks(M: int, dtype: torch.dtype, half: int) -> Blocks:
    """Blocks as above with narrower tiles: there are two sums for each element, a group's and the whole."""
    if M <= 32:
        blocks = {"BM": 16 if M <= 16 else 32, "BN": 32, "num_warps": 4, "num_stages": 3}
    elif dtype == torch.float32:
        blocks = {"BM": 64, "BN": 32, "num_warps": 8, "num_stages": 2}
    else:
        blocks = {"BM": 128, "BN": 64, "num_warps": 8, "num_stages": 3}
    return blocks | {"BK": 16 if dtype == torch.float32 else min(half, 32)}


def _tune(kernel: str, blocks: Blocks, key: tuple, run: Callable[[Blocks], None]) -> None:
    """key: sizes M, N and K, and whatever else"""
    M, *others = key
    more = {} if M <= 32 else {"BM": (64, 128), "BN": (64, 128), "num_warps": (4, 8)}
    tuned(kernel, (triton.next_power_of_2(M), *others), blocks, run, num_stages=(2, 3, 4), **more)


def _grid(M: int, N: int, blocks: Blocks) -> tuple[int]:
    return (triton.cdiv(M, blocks["BM"]) * triton.cdiv(N, blocks["BN"]),)


# --- specs ------------------------------------------------------------------------------------------------------------


def _given(
    case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator
) -> tuple[dict, Tensor]:
    """x and bias, and the weight that is to be quantized."""
    M, N, K = case["M"], case["N"], case["K"]
    draw = drawing(dtype, device, generator)
    inputs: dict = {"x": draw(M, K)} | ({"how": case["how"]} if "how" in case else {})
    if case.get("bias"):
        inputs["bias_O"] = draw(N)
    return inputs, drawing(torch.float32, device, generator)(N, K)


def _int8_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    inputs, w_OI = _given(case, dtype, device, generator)
    weight_OI, scale_O = quantize_int8(w_OI)
    return inputs | {"weight_OI": weight_OI.to(device), "scale_O": scale_O.to(device)}


def _dynamic_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    inputs = _int8_inputs(case, dtype, device, generator)
    if case.get("threshold") and case["K"]:
        inputs["x"][..., case["K"] // 2] *= 20
        inputs |= {"threshold": case["threshold"], "outliers": torch.tensor([case["K"] - 1], device=device)}
    return inputs


def _int4_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    inputs, w_OI = _given(case, dtype, device, generator)
    packed, scale_OG, zero_OG = quantize_int4(w_OI, case["group"], case.get("symmetric", True))
    inputs |= {"packed": packed.to(device), "scale_OG": scale_OG.to(device), "group": case["group"]}
    return inputs if zero_OG is None else inputs | {"zero_OG": zero_OG.to(device)}


def _traffic(bits: int) -> Callable[[Case, torch.dtype], Traffic]:
    def traffic(case: Case, dtype: torch.dtype) -> Traffic:
        M, N, K = case["M"], case["N"], case["K"]
        scales = N * (-(-K // case["group"]) if "group" in case else 1)
        forward = dtype.itemsize * (M * K + M * N + N * bool(case.get("bias"))) + N * K * bits // 8 + 4 * scales
        return Traffic(forward, forward, 2 * M * N * K, 2 * M * N * K)

    return traffic


def _dynamic_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    """x is rounded before the product: its codes are written and read, and before that outliers are looked for."""
    plain, whole = _traffic(8)(case, dtype), case["M"] * case["K"]
    again = (dtype.itemsize if case.get("threshold") else 0) + 2
    return Traffic(plain.forward_bytes + again * whole, 0, plain.forward_flops)


_SPACE = {"M": range(1, 40), "N": range(1, 70), "K": range(1, 300), "bias": (False, True)}
# fp32: the sums' roundings. 16 bits: y is rounded once, and in the backward dy times the scale before.
_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}

SPECS = (
    KernelSpec(
        name="int8_matmul",
        function=int8_matmul,
        reference=reference_int8,
        inputs=_int8_inputs,
        grads=("x",),
        cases=(
            {"M": 1, "N": 63, "K": 1100, "bias": True},
            {"M": 140, "N": 100, "K": 130, "bias": True},
            {"M": 3, "N": 1, "K": 1},
            {"M": 5, "N": 40, "K": 1500, "bias": True},
            {"M": 1, "N": 11, "K": 4128, "bias": True},
            {"M": 5, "N": 70, "K": 1152, "bias": True},
            {"M": 37, "N": 40, "K": 96},
            {"M": 20, "N": 30, "K": 50, "bias": True, "how": "wide"},
            {"M": 0, "N": 3, "K": 4},
            {"M": 2, "N": 3, "K": 0, "bias": True},
        ),
        space=_SPACE | {"how": (None, "tile", "wide")},
        timed=(
            {"M": 1, "N": 12288, "K": 4096, "bias": True},
            {"M": 16, "N": 4096, "K": 4096, "bias": True},
            {"M": 4096, "N": 4096, "K": 4096},
            {"M": 4096, "N": 4096, "K": 4096, "how": "wide"},
        ),
        tolerance=_TOLERANCE,
        traffic=_traffic(8),
        gradcheck={"M": 2, "N": 3, "K": 4, "bias": True},
    ),
    KernelSpec(
        name="int8_dynamic_matmul",
        function=int8_dynamic_matmul,
        reference=reference_int8_dynamic,
        inputs=_dynamic_inputs,
        cases=(
            {"M": 1, "N": 63, "K": 1000, "bias": True},
            {"M": 140, "N": 100, "K": 130, "bias": True, "threshold": 6.0},
            {"M": 3, "N": 1, "K": 1},
            {"M": 5, "N": 40, "K": 1500, "bias": True, "threshold": 6.0},
            {"M": 20, "N": 32, "K": 64, "bias": True, "how": "library"},
            {"M": 0, "N": 3, "K": 4, "threshold": 6.0},
            {"M": 2, "N": 3, "K": 0, "bias": True, "threshold": 6.0},
        ),
        space=_SPACE | {"threshold": (None, 3.0)},
        timed=(
            {"M": 1, "N": 4096, "K": 4096, "bias": True, "threshold": 6.0},
            {"M": 4096, "N": 4096, "K": 4096},
            {"M": 4096, "N": 4096, "K": 4096, "threshold": 6.0},
            {"M": 16, "N": 4096, "K": 4096},
            {"M": 4096, "N": 4096, "K": 4096, "how": "library"},
        ),
        tolerance=_TOLERANCE,
        traffic=_dynamic_traffic,
        alone=("outliers",),
    ),
    KernelSpec(
        name="int4_matmul",
        function=int4_matmul,
        reference=reference_int4,
        inputs=_int4_inputs,
        grads=("x",),
        cases=(
            {"M": 1, "N": 63, "K": 1000, "group": 128, "bias": True},
            {"M": 140, "N": 100, "K": 130, "group": 32, "symmetric": False, "bias": True},
            {"M": 2, "N": 5, "K": 100, "group": 64, "symmetric": False},
            {"M": 2, "N": 5, "K": 1088, "group": 64, "symmetric": False, "bias": True},
            {"M": 1, "N": 9, "K": 256, "group": 128},
            {"M": 1, "N": 11, "K": 4160, "group": 32, "symmetric": False},
            {"M": 5, "N": 70, "K": 1152, "group": 32, "symmetric": False, "bias": True},
            {"M": 10, "N": 40, "K": 544, "group": 32, "bias": True},
            {"M": 37, "N": 40, "K": 256, "group": 128},
            {"M": 3, "N": 1, "K": 1, "group": 32},
            {"M": 5, "N": 40, "K": 1500, "group": 64, "symmetric": False, "bias": True},
            {"M": 20, "N": 30, "K": 2100, "group": 128, "symmetric": False, "bias": True, "how": "wide"},
            {"M": 0, "N": 3, "K": 4, "group": 64},
            {"M": 2, "N": 3, "K": 0, "group": 64, "bias": True},
        ),
        space=_SPACE | {"group": GROUPS, "symmetric": (False, True), "how": (None, "tile", "wide")},
        timed=(
            {"M": 1, "N": 12288, "K": 4096, "group": 64, "symmetric": False, "bias": True},
            {"M": 16, "N": 4096, "K": 4096, "group": 32, "symmetric": False},
            {"M": 4096, "N": 4096, "K": 4096, "group": 128, "symmetric": False},
            {"M": 4096, "N": 4096, "K": 4096, "group": 128, "symmetric": False, "how": "wide"},
        ),
        tolerance=_TOLERANCE,
        traffic=_traffic(4),
        gradcheck={"M": 2, "N": 3, "K": 4, "group": 32, "symmetric": False, "bias": True},
    ),
)
