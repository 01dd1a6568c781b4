"""Products of few rows with weights in 8 and 4 bits, as they are stored, by VNNI: a CPU's dot products of bytes.

An instruction multiplies 64 unsigned bytes by 64 signed ones and adds the products, four by four, to 16 sums of 32
bits; another one 32 words of 16 bits, two by two. A few tokens are bounded by how fast weights come from memory, so
weights are read once, in the order in which they lie, and asked for some kilobytes ahead: the lines of a few channels
at once are more than the processor foresees.

8 bits (`int8_product`): rows of unsigned bytes, each 128 more than an integer q. y = scale (q w^T), with exact sums:
the same bits as any other exact kernel's.

4 bits (`int4_product`): rows of x in fp32, which are rounded to 32,767 steps of their largest element, q in 16 bits.
Each group of columns has exact sums of 32 bits; those of the groups are added in fp32, lane by lane in their order,
whatever other rows there are:

    y[m, o] = step[m] sum_g scale[o, g] sum_i q[m, i] (code[o, i] - zero[o, g])

Many rows are multiplied faster in bf16, by weights that `int4_widened` makes of some channels.

Shapes: R, M rows; I columns, a multiple of the group G for 4 bits (x may have fewer); O channels.
"""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from core.kernels.llvm import Code, Kernel, Value, looks_words_up, num_workers, x86_features

_AHEAD_BYTES = 8 << 10
"""of a weight that are asked for before they are needed"""
_LANES, _LINE = 16, 64
"""numbers of a vector, bytes of a line of memory"""
_STEPS, _SMALLEST = 32767, 1e-30
_ZERO, _ZERO_OF_4 = 128, 8
"""the byte that stands for the integer 0, and the code of symmetric ones of 4 bits"""


@cache
def width() -> int:
    """Bytes that this CPU multiplies at once: 64, 32, or 0 where it has no such instruction or LLVM is missing."""
    found = x86_features()
    if {"avx512vnni", "avx512bw"} <= found:
        return 64
    return 32 if "avxvnni" in found else 0


def offered() -> bool:
    """Return whether these products run here."""
    return width() > 0


class Int8Weight:
    """int8 codes[O, I] as `int8_product` reads them: where they lie, and the kernels of the numbers of rows so far.

    scale, sums  of each channel; sums int32: its codes, added up
    """

    def __init__(self, codes_OI: Tensor, scale_O: Tensor, sums_O: Tensor):
        self.parts = [part.contiguous() for part in (codes_OI, scale_O, sums_O)]
        self.channels, self.columns = codes_OI.shape
        self.addresses = [part.data_ptr() for part in self.parts]
        self._kernels: dict[int, Kernel] = {}

    def kernel(self, rows: int) -> Kernel:
        if rows not in self._kernels:
            self._kernels[rows] = _int8_for(rows, self.columns, self.channels, width())
        return self._kernels[rows]


def int8_product(q_RI: Tensor, weight: Int8Weight) -> Tensor:
    """uint8 rows, 128 more than integers, with a weight: fp32 [R, O]."""
    rows, channels, q_RI = q_RI.shape[0], weight.channels, q_RI.contiguous()
    y_RO = torch.empty(rows, channels, dtype=torch.float32, device="cpu")
    sizes = (y_RO.data_ptr(), rows, weight.columns, channels)
    weight.kernel(rows)(channels, q_RI.data_ptr(), *weight.addresses, *sizes)
    return y_RO


@cache
def _int8_for(rows: int, columns: int, channels: int, bytes_: int) -> Kernel:
    return _int8(*_tile(rows, channels, at_once=(4, 4), few=(8, 3)), columns >= bytes_, columns % bytes_ > 0, bytes_)


def digits_of(x_MI: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """fp32 rows in one or two digits: (uint8 [P, M, I], each 128 more than an integer; the rows' largest, [M, 1]).

    In torch's arithmetic, with places p = 127 and 127 * 128: one is round(x / (largest / 127)); of two the first is
    round(x (p / largest)), and the second the same of its place less 128 of the first.
    """
    x_MI, (rows, columns) = x_MI.contiguous(), x_MI.shape
    q_PMI = torch.empty(count, rows, columns, dtype=torch.uint8, device="cpu")
    largest_M1 = torch.empty(rows, 1, dtype=torch.float32, device="cpu")
    _digits(count)(rows, x_MI.data_ptr(), q_PMI.data_ptr(), largest_M1.data_ptr(), rows, columns)
    return q_PMI, largest_M1


class Int4Weight:
    """4-bit codes as `core.kernels.quantized_matmul` packs them, bf16 scales[O, G]: as `int4_product` reads them."""

    def __init__(self, codes: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, group: int):
        self.parts = [None if part is None else part.contiguous() for part in (codes, scale_OG, zero_OG)]
        (self.channels, self.groups), self.group, self.symmetric = scale_OG.shape, group, zero_OG is None
        self.addresses = [0 if part is None else part.data_ptr() for part in self.parts]
        self._kernels: dict[int, Kernel] = {}

    def kernel(self, rows: int) -> Kernel:
        if rows not in self._kernels:
            self._kernels[rows] = _int4_for(rows, self.channels, self.group, self.symmetric, width())
        return self._kernels[rows]


def int4_product(x_MI: Tensor, weight: Int4Weight) -> Tensor:
    """fp32 rows with a weight: fp32 [M, O]."""
    x_MI, (rows, columns), channels, groups = x_MI.contiguous(), x_MI.shape, weight.channels, weight.groups
    y_MO = torch.empty(rows, channels, dtype=torch.float32, device="cpu")
    room = torch.empty(num_workers() * rows * (groups * weight.group + _LINE // 2), dtype=torch.int16, device="cpu")
    sizes = (y_MO.data_ptr(), rows, columns, groups, channels)
    weight.kernel(rows)(channels, x_MI.data_ptr(), room.data_ptr(), *weight.addresses, *sizes)
    return y_MO


@cache
def _int4_for(rows: int, channels: int, group: int, symmetric: bool, bytes_: int) -> Kernel:
    return _int4(*_tile(rows, channels, at_once=(8, 2), few=(4, 3)), group, symmetric, min(group, bytes_) // 2)


def int4_widened(codes: Tensor, scale_OG: Tensor, zero_OG: Tensor | None, group: int) -> Tensor:
    """bf16 [O, G group] of such codes, the filling of a last group included: (code - zero) scale, rounded once."""
    channels, groups = scale_OG.shape
    wide_OI = torch.empty(channels, groups * group, dtype=torch.bfloat16, device="cpu")
    zero = None if zero_OG is None else zero_OG.contiguous()
    kernel = _widened(group, zero is None, looks_words_up())
    given = (codes.contiguous().data_ptr(), scale_OG.contiguous().data_ptr(), 0 if zero is None else zero.data_ptr())
    kernel(channels * groups, *given, wide_OI.data_ptr())
    return wide_OI


def _tile(rows: int, channels: int, at_once: tuple[int, int], few: tuple[int, int]) -> tuple[int, int]:
    """(rows, channels) that are computed at a time: as `few` where there are no more rows; as even as they come, for
    the last ones overlap.

    All are as many as there are registers for; measured.
    """
    most, along = few if rows <= few[0] else at_once
    return -(-rows // -(-rows // most)), min(along, channels)


# --- 8 bits -----------------------------------------------------------------------------------------------------------


@cache
def _int8(rows: int, channels: int, has_whole: bool, has_rest: bool, bytes_: int) -> Kernel:
    """has_whole, has_rest  whether columns fill vectors, and whether some are left over"""
    lanes = bytes_ // 4

    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        q, codes, scale, sums, y, num_rows, columns, num_channels = arguments
        b, number = code.build, code.number
        rest = b.and_(columns, number(bytes_ - 1))
        whole = b.sub(columns, rest)
        nothing = [code.filled(code.i32, lanes, 0)] * (rows * channels)

        def added(
            totals: Sequence[Value], row: Value, channel: Value, column: Value, mask: Value = None
        ) -> list[Value]:
            words = code.vector(code.i32, lanes)

            def line(start: Value, of: Value, index: int) -> Value:
                place = b.mul(b.add(of, number(index)), columns)
                return b.bitcast(code.load(start, code.i8, bytes_, place, column, mask=mask), words)

            for index in range(channels):
                place = b.mul(b.add(channel, number(index)), columns)
                code.prefetch(codes, place, column, number(_AHEAD_BYTES))
            weights = [line(codes, channel, index) for index in range(channels)]
            found = []
            for index in range(rows):
                inputs = line(q, row, index)
                for at, weight in enumerate(weights):
                    found.append(_dot(code, "busd", totals[index * channels + at], inputs, weight))
            return found

        with code.tiles(first, last, channels) as across:
            channel = code.beginning(across, last, channels)
            with code.tiles(number(0), num_rows, rows) as down:
                row, totals = code.beginning(down, num_rows, rows), nothing
                if has_whole:
                    with code.loop(number(0), whole, number(bytes_), totals) as turn:
                        turn.values = added(turn.values, row, channel, turn.at)
                    totals = turn.values
                if has_rest:
                    totals = added(totals, row, channel, whole, code.first_of(rest, bytes_))
                for at in range(channels):
                    place = b.add(channel, number(at))
                    factor = code.load_one(scale, code.f32, place)
                    shift = b.mul(code.load_one(sums, code.i32, place), code.types.Constant(code.i32, _ZERO))
                    for index in range(rows):
                        whole_sum = b.sub(code.sum(totals[index * channels + at], b.add), shift)
                        target = b.mul(b.add(row, number(index)), num_channels)
                        code.store(b.fmul(b.sitofp(whole_sum, code.f32), factor), y, code.f32, target, place)

    return Kernel("int8", 8, channels, build)


def _dot(code: Code, kind: str, totals: Value, a: Value, b: Value) -> Value:
    """busd: unsigned with signed bytes, four by four; wssd: signed words of 16 bits, two by two."""
    return code.call(f"llvm.x86.avx512.vpdp{kind}.{32 * totals.type.count}", totals.type, totals, a, b)


@cache
def _digits(count: int) -> Kernel:
    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        x, q, largest, rows, columns = arguments
        b, number = code.build, code.number
        with code.loop(first, last, number(1)) as across:
            start = b.mul(across.at, columns)
            most = _largest_of(code, x, start, columns)
            code.store(most, largest, code.f32, across.at)
            places = [code.types.Constant(code.f32, 127.0 * _ZERO**index) for index in range(count)]
            factors = [code.spread(b.fdiv(place, most), _LANES) for place in places]
            step = code.spread(b.fdiv(most, places[0]), _LANES)

            def digits_of_vector(column: Value, mask: Value) -> list[Value]:
                values, base = (
                    code.load(x, code.f32, _LANES, start, column, mask=mask),
                    code.filled(code.f32, _LANES, float(_ZERO)),
                )
                if count == 1:
                    found = [code.nearest(b.fdiv(values, step))]
                else:
                    found = [code.nearest(b.fmul(values, factor)) for factor in factors]
                    found[1:] = [b.fsub(low, b.fmul(high, base)) for high, low in pairwise(found)]
                kind = code.vector(code.i8, _LANES)
                return [b.trunc(b.fptosi(b.fadd(d, base), code.vector(code.i32, _LANES)), kind) for d in found]

            rest = b.and_(columns, number(_LANES - 1))
            whole = b.sub(columns, rest)
            with b.if_then(b.icmp_signed(">", whole, number(0))), code.loop(number(0), whole, number(_LANES)) as turn:
                for index, digits in enumerate(digits_of_vector(turn.at, None)):
                    code.store(digits, q, code.i8, b.mul(b.mul(number(index), rows), columns), start, turn.at)
            with b.if_then(b.icmp_signed(">", rest, number(0))):
                mask = code.first_of(rest, _LANES)
                for index, digits in enumerate(digits_of_vector(whole, mask)):
                    target = (b.mul(b.mul(number(index), rows), columns), start, whole)
                    code.store_some(digits, q, code.i8, mask, *target)

    return Kernel("digits", 5, 1, build)


def _largest_of(code: Code, x: Value, start: Value, columns: Value) -> Value:
    """The largest magnitude of so many numbers, not zero; none if one of them is none."""
    b, number = code.build, code.number
    with code.loop(number(0), columns, number(_LANES), [code.filled(code.f32, _LANES, _SMALLEST)]) as turn:
        values = code.load(x, code.f32, _LANES, start, turn.at, mask=code.first_of(b.sub(columns, turn.at), _LANES))
        sizes = code.call("llvm.fabs.v16f32", values.type, values)
        turn.values = [_larger(code, turn.values[0], sizes)]
    return code.sum(turn.values[0], lambda p, q: _larger(code, p, q))


def _larger(code: Code, p: Value, q: Value) -> Value:
    """The larger one; a NaN stays one."""
    return code.call(f"llvm.maximum.v{p.type.count}f32", p.type, p, q)


# --- 4 bits -----------------------------------------------------------------------------------------------------------


def _round_rows(
    code: Code, x: Value, q: Value, steps: Value, rows: Value, columns: Value, groups: Value, group: int
) -> None:
    """Rows of x to integers, filled up with zeros to whole groups, and what a step of each row is worth."""
    b, number = code.build, code.number
    most = code.types.Constant(code.f32, float(_STEPS))
    with code.loop(number(0), rows, number(1)) as across:
        row = across.at

        def inputs(column: Value) -> Value:
            mask = code.first_of(b.sub(columns, column), _LANES)
            return code.load(x, code.f32, _LANES, b.mul(row, columns), column, mask=mask)

        largest = _largest_of(code, x, b.mul(row, columns), columns)
        code.store(b.fdiv(largest, most), steps, code.f32, row)
        scale, size = code.spread(b.fdiv(most, largest), _LANES), b.mul(groups, number(group))
        with code.loop(number(0), size, number(_LANES)) as turn:
            nearest = code.nearest(b.fmul(inputs(turn.at), scale))
            code.store(b.fptosi(nearest, code.vector(code.i16, _LANES)), q, code.i16, b.mul(row, size), turn.at)


@cache
def _int4(rows: int, channels: int, group: int, symmetric: bool, words: int) -> Kernel:
    """words  of 16 bits that are multiplied at once; of each byte of a group the low half is a code of its first
    columns, the high one of its last"""
    lanes, half = words // 2, group // 2
    pieces = max(1, half // words)

    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        x, room, codes, scale, zero, y, num_rows, columns, groups, num_channels = arguments
        b, number = code.build, code.number
        # Each thread rounds all rows: less work than to wait for each other. Rows in 16 bits begin where lines of
        # memory do, or a vector of them would be two lines; behind them is what a step of each is worth, in fp32.
        row_bytes = b.mul(groups, number(2 * group))
        q = b.add(room, b.mul(code.worker, b.mul(num_rows, b.add(row_bytes, number(_LINE)))))
        steps = b.add(q, b.mul(num_rows, row_bytes))
        _round_rows(code, x, q, steps, num_rows, columns, groups, group)
        floats, sums = code.vector(code.f32, lanes), code.vector(code.i32, lanes)
        nothing = [code.filled(code.f32, lanes, 0)] * (rows * channels)

        def weights(channel: Value, at: Value) -> list[Value]:
            """A group's codes, less the one that stands for zero, by vectors of columns."""
            factor = b.add(b.mul(channel, groups), at)
            place = b.mul(factor, number(half))
            code.prefetch(codes, place, number(_AHEAD_BYTES))
            if symmetric:
                taken_off = code.filled(code.i16, words, _ZERO_OF_4)
            else:
                taken_off = code.spread(b.zext(code.load_one(zero, code.i8, factor), code.i16), words)
            low, high = [], []
            for piece in range(pieces):
                both = code.load(codes, code.i8, words, place, number(piece * words))
                wide = b.zext(both, code.vector(code.i16, words))
                low.append(b.sub(b.and_(wide, code.filled(code.i16, words, 15)), taken_off))
                high.append(b.sub(b.lshr(wide, code.filled(code.i16, words, 4)), taken_off))
            return [b.bitcast(piece, sums) for piece in low + high]

        def scale_of(channel: Value, at: Value) -> Value:
            place = b.add(b.mul(channel, groups), at)
            return code.spread(code.from_bf16(code.load_one(scale, code.i16, place)), lanes)

        def added(totals: Sequence[Value], row: Value, channel: Value, at: Value) -> list[Value]:
            along = [b.add(channel, number(index)) for index in range(channels)]
            found = [(weights(one, at), scale_of(one, at)) for one in along]
            after = []
            for index in range(rows):
                place = b.mul(b.add(b.mul(b.add(row, number(index)), groups), at), number(group))
                inputs = [
                    b.bitcast(code.load(q, code.i16, words, place, number(n * words)), sums) for n in range(2 * pieces)
                ]
                for which, (parts, factor) in enumerate(found):
                    exact = code.filled(code.i32, lanes, 0)
                    for part, given in zip(parts, inputs, strict=True):
                        exact = _dot(code, "wssd", exact, given, part)
                    total = totals[index * channels + which]
                    after.append(code.fma(b.sitofp(exact, floats), factor, total))
            return after

        with code.tiles(first, last, channels) as across:
            channel = code.beginning(across, last, channels)
            with code.tiles(number(0), num_rows, rows) as down:
                row = code.beginning(down, num_rows, rows)
                with code.loop(number(0), groups, number(1), nothing) as turn:
                    turn.values = added(turn.values, row, channel, turn.at)
                for index in range(rows):
                    line = b.add(row, number(index))
                    step = code.load_one(steps, code.f32, line)
                    for at in range(channels):
                        value = b.fmul(code.sum(turn.values[index * channels + at], b.fadd), step)
                        code.store(value, y, code.f32, b.mul(line, num_channels), channel, number(at))

    return Kernel("int4", 10, channels, build)


@cache
def _widened(group: int, symmetric: bool, by_table: bool) -> Kernel:
    """by_table: a group has 16 different weights; they are made once and taken by their codes, instead of each."""
    half = group // 2
    words = min(half, 2 * _LANES) if by_table else _LANES

    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        codes, scale, zero, wide = arguments
        b, number = code.build, code.number
        whole, floats, short = (code.vector(kind, _LANES) for kind in (code.i32, code.f32, code.i16))
        with code.loop(first, last, number(1)) as turn:
            place = turn.at
            factor = code.spread(code.from_bf16(code.load_one(scale, code.i16, place)), _LANES)
            if symmetric:
                taken_off = code.filled(code.i32, _LANES, _ZERO_OF_4)
            else:
                taken_off = code.spread(b.zext(code.load_one(zero, code.i8, place), code.i32), _LANES)

            def weights(of: Value) -> Value:
                return code.to_bf16(b.fmul(b.sitofp(b.sub(b.zext(of, whole), taken_off), floats), factor))

            table = weights(code.types.Constant(short, list(range(_LANES)))) if by_table else None
            for start in range(0, half, words):
                both = code.load(codes, code.i8, words, b.mul(place, number(half)), number(start))
                low = b.zext(both, code.vector(code.i16, words))
                high = b.lshr(low, code.filled(code.i16, words, 4))
                for column, found in ((start, low), (half + start, high)):
                    if by_table:
                        values = code.looked_up(table, found)
                    else:
                        values = weights(b.and_(found, code.filled(code.i16, words, 15)))
                    code.store(values, wide, code.i16, b.mul(place, number(group)), number(column))

    return Kernel("widened", 4, 1, build)
