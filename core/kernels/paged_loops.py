"""A paged KV cache on a CPU: attention of one query, for many sequences in one call, and the writing of pages.

A sequence that writes reads its keys and values once a token. By torch that is some operators a sequence and layer, and
a copy where pages do not follow each other; here it is one function for all, which reads each key and value where it
lies. For each sequence and head, S places (with a window the last of them), in 16 numbers at a time:

    1. s[u] = scale q . k[u] + slope (u - S + 1)
    2. w[u] = exp(s[u] - max s)
    3. o = sum_u w[u] v[u] / sum w

in fp32, with sums in one order that follows from S and K alone, so a result does not depend on the neighbours.

Shapes: T tokens, N of them queries; J heads of keys and values, G = H / J; K head size; P pages of a page size.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from core.compat import FakeTensor
from core.kernels.llvm import Code, Kernel, Value, bits_of, num_workers, on_all_threads

_LANES, _TOGETHER = 16, 4
"""numbers of a vector; keys whose scores are summed up together"""
_FORMATS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16", torch.int8: "i8"}
_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "i8": 1}
_GIVEN = (torch.float32, torch.bfloat16, torch.float16)
_LINE_BYTES = 64
_PER_STEP, _SMALLEST_SCALED = 1 / 127, 1e-30
"""as `core.kernels.paged_attention` rounds to int8"""


def offered(x: Tensor, pages: Tensor) -> bool:
    """Return whether queries (or new keys and values) of this format and these pages are taken here."""
    formats = x.dtype in _GIVEN and pages.dtype in _FORMATS
    there = x.device.type == "cpu" and pages.is_contiguous() and not isinstance(x, FakeTensor)
    return formats and there and on_all_threads()


def one_query_attention(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, queries_N4: Tensor, longest: int, *,
    scale: float, k_scales: Tensor | None = None, v_scales: Tensor | None = None, slopes: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """fp32 o[T, H, K], of which the rows of the queries are written. As `core.kernels.paged_attention` has it, but:

    page_table  int32[B, max_pages], contiguous
    queries     int64[N, 4], contiguous: each one's row in q, its sequence in the table, its number of places, and the
                first of them that it sees
    longest     no query sees more places
    out         where to write
    """
    (_, heads, head_size), (_, page_size, kv_heads, _) = q.shape, k_pages.shape
    q_THK = _rows(q)
    o_THK = torch.empty(q.shape, dtype=torch.float32, device="cpu") if out is None else out
    formats = (_FORMATS[q.dtype], _FORMATS[k_pages.dtype])
    kernel = _attention(head_size, heads // kv_heads, *formats, slopes is not None)
    slopes_H = None if slopes is None else slopes.float().contiguous()
    room = -(-longest // _LANES) * _LANES + _LANES
    weights = torch.empty(num_workers() * heads * room, dtype=torch.float32, device="cpu")
    given = (q_THK, k_pages, v_pages, k_scales, v_scales, page_table, queries_N4, slopes_H, o_THK, weights)
    sizes = (q_THK.stride(0), page_table.shape[1], page_size, kv_heads, room, bits_of(scale))
    kernel(len(queries_N4) * kv_heads, *map(_address, given), *sizes)
    return o_THK


def longest_apart(pages: Tensor) -> int:
    """Tokens of a sequence whose queries, a prompt's, are about as fast one by one as by torch's attention of them
    together, and much faster where only a few come at a time: keys in 32 bits leave the nearest cache sooner."""
    if not on_all_threads() or pages.dtype not in _FORMATS:
        return 0
    return 256 if pages.dtype == torch.float32 else 2048


def write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:  # fmt: skip
    """Write keys and values as `core.kernels.paged_attention.write_pages`; slots int64, contiguous."""
    (_, heads, head_size), k_TJK, v_TJK = k.shape, _rows(k), _rows(v)
    kernel = _write(head_size, _FORMATS[k.dtype], _FORMATS[k_pages.dtype])
    given = (k_TJK, v_TJK, k_pages, v_pages, k_scales, v_scales, slots)
    kernel(len(slots), *map(_address, given), k_TJK.stride(0), v_TJK.stride(0), heads)


def _rows(x_TJK: Tensor) -> Tensor:
    """With the heads of a token behind each other."""
    strides = x_TJK.stride()
    return x_TJK if strides[2] == 1 and strides[1] == x_TJK.shape[2] else x_TJK.contiguous()


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# --- attention --------------------------------------------------------------------------------------------------------


@cache
def _attention(head_size: int, group: int, queries_as: str, pages: str, has_slopes: bool) -> Kernel:
    """Page by page, in which heads lie beside each other. Items are heads of queries, those of keys and values."""
    whole, rest = divmod(head_size, _LANES)
    vectors, row_bytes = whole + (rest > 0), head_size * _BYTES[pages]

    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        q, k, v, k_scales, v_scales, tables, queries, slopes, o, rooms, *sizes = arguments
        q_row, width, page_size, kv_heads, room, scale_bits = sizes
        b, number = code.build, code.number
        one, zeros = number(1), code.filled(code.f32, _LANES, 0)
        scale = b.bitcast(b.trunc(scale_bits, code.i32), code.f32)
        heads = b.mul(kv_heads, number(group))
        own_room = b.mul(b.mul(code.worker, heads), room)

        def parts(start: Value, kind: str, *offsets: Value) -> list[Value]:
            """The head_size numbers from there, in fp32."""
            found = []
            for index in range(vectors):
                mask = None if index < whole else code.first_of(number(rest), _LANES)
                place = (*offsets, number(index * _LANES))
                found.append(_as_fp32(code, kind, start, place, mask))
            return found

        def put(values: Sequence[Value], *offsets: Value) -> None:
            for index, value in enumerate(values):
                count = _LANES if index < whole else rest
                code.store(code.shuffled(value, value, range(count)), o, code.f32, *offsets, number(index * _LANES))

        @contextmanager
        def runs(sequence: Value, length: Value, oldest: Value, low: Value, high: Value) -> Iterator[_Run]:
            """A loop over a sequence's pages from the oldest place that is seen, in each over the heads, in each over
            those of the queries."""
            final = b.sdiv(b.sub(length, one), page_size)
            with code.loop(b.sdiv(oldest, page_size), b.add(final, one), one) as turn:
                here, behind = (
                    b.mul(b.sext(code.load_one(tables, code.i32, b.mul(sequence, width), page), code.i64), page_size)
                    for page in (turn.at, code.smaller(b.add(turn.at, one), final))
                )
                begin = code.larger(b.mul(turn.at, page_size), oldest)
                here = b.add(here, b.srem(begin, page_size))
                count = b.sub(code.smaller(b.mul(b.add(turn.at, one), page_size), length), begin)
                with code.loop(low, high, one) as across, code.loop(number(0), number(group), one) as member:
                    line = b.add(b.mul(across.at, number(group)), member.at)
                    yield _Run(b.sub(begin, oldest), count, here, behind, across.at, line)

        @contextmanager
        def places(run: _Run, kept: Value, together: int, carried: Sequence[Value] = ()) -> Iterator[Any]:
            """A loop over a page's tokens, some together: (the first one; of each its place among all, times heads and
            with the head's own; the turn). Behind the last one it stands in for those that are not there. Those of the
            next page are asked for."""
            most = b.sub(run.count, one)
            here, behind = (b.add(b.mul(first_place, kv_heads), run.head) for first_place in (run.here, run.behind))
            with code.loop(number(0), run.count, number(together), carried) as turn:
                found = []
                for index in range(together):
                    at = turn.at if together == 1 else code.smaller(b.add(turn.at, number(index)), most)
                    offset = b.mul(at, kv_heads)
                    for line in range(0, row_bytes, _LINE_BYTES):
                        code.prefetch(kept, b.mul(b.add(behind, offset), number(row_bytes)), number(line))
                    found.append(b.add(here, offset))
                yield turn.at, found, turn

        def kept_row(kept: Value, place: Value) -> list[Value]:
            return parts(kept, pages, b.mul(place, number(head_size)))

        def dot(mine: Sequence[Value], theirs: Sequence[Value]) -> Value:
            total = b.fmul(mine[0], theirs[0])
            for x, y in zip(mine[1:], theirs[1:], strict=True):
                total = code.fma(x, y, total)
            return total

        def score(row: Value, length: Value, run: _Run) -> None:
            given = parts(q, queries_as, b.mul(row, q_row), b.mul(run.line, number(head_size)))
            slope = code.load_one(slopes, code.f32, run.line) if has_slopes else None
            with places(run, k, _TOGETHER) as (at, found, _):
                scores = _sums(code, [dot(given, kept_row(k, place)) for place in found])
                scores = b.fmul(scores, code.spread(scale, _TOGETHER))
                if pages == "i8":
                    steps = [code.load_one(k_scales, code.f32, place) for place in found]
                    scores = b.fmul(scores, code.joined(steps))
                if slope is not None:
                    order = code.types.Constant(code.vector(code.i64, _TOGETHER), list(range(_TOGETHER)))
                    first_behind = b.sub(b.add(run.begin, at), b.sub(length, one))
                    distance = b.sitofp(b.add(code.spread(first_behind, _TOGETHER), order), scores.type)
                    scores = code.fma(code.spread(slope, _TOGETHER), distance, scores)
                # Those behind a page's end are overwritten by the next one, or not read.
                code.store(scores, rooms, code.f32, own_room, b.mul(run.line, room), run.begin, at)

        def weigh(length: Value, line: Value) -> None:
            """Scores to weights, whose sum is one."""
            start, lowest = (own_room, b.mul(line, room)), code.filled(code.f32, _LANES, -math.inf)
            with code.loop(number(0), length, number(_LANES), [lowest]) as turn:
                there = code.first_of(b.sub(length, turn.at), _LANES)
                scores = b.select(there, code.load(rooms, code.f32, _LANES, *start, turn.at), lowest)
                turn.values = [code.larger_of(turn.values[0], scores)]
            most = code.spread(code.sum(turn.values[0], code.larger_of), _LANES)
            with code.loop(number(0), length, number(_LANES), [zeros]) as turn:
                there = code.first_of(b.sub(length, turn.at), _LANES)
                weight = code.exp(b.fsub(code.load(rooms, code.f32, _LANES, *start, turn.at), most))
                weight = b.select(there, weight, zeros)
                code.store(weight, rooms, code.f32, *start, turn.at)
                turn.values = [b.fadd(turn.values[0], weight)]
            whole_weight = code.sum(turn.values[0], b.fadd)
            by = code.spread(b.fdiv(code.types.Constant(code.f32, 1.0), whole_weight), _LANES)
            with code.loop(number(0), length, number(_LANES)) as turn:
                weight = b.fmul(code.load(rooms, code.f32, _LANES, *start, turn.at), by)
                code.store(weight, rooms, code.f32, *start, turn.at)

        def gather(row: Value, run: _Run) -> None:
            target = (b.mul(b.mul(row, heads), number(head_size)), b.mul(run.line, number(head_size)))
            with places(run, v, 1, parts(o, "f32", *target)) as (at, (place,), turn):
                weight = code.load_one(rooms, code.f32, own_room, b.mul(run.line, room), run.begin, at)
                if pages == "i8":
                    weight = b.fmul(weight, code.load_one(v_scales, code.f32, place))
                spread, value = code.spread(weight, _LANES), kept_row(v, place)
                turn.values = [code.fma(spread, one, total) for one, total in zip(value, turn.values, strict=True)]
            put(turn.values, *target)

        begin, end = b.sdiv(first, kv_heads), b.add(b.sdiv(b.sub(last, one), kv_heads), one)
        with code.loop(begin, end, one) as turn:
            before = b.mul(turn.at, kv_heads)
            low = b.sub(code.larger(first, before), before)
            high = b.sub(code.smaller(last, b.add(before, kv_heads)), before)
            row, sequence, length, oldest = (
                code.load_one(queries, code.i64, b.mul(turn.at, number(4)), number(index)) for index in range(4)
            )
            seen = b.sub(length, oldest)
            with runs(sequence, length, oldest, low, high) as run:
                score(row, seen, run)
            with code.loop(b.mul(low, number(group)), b.mul(high, number(group)), one) as line:
                weigh(seen, line.at)
                put([zeros] * vectors, b.mul(b.add(b.mul(row, heads), line.at), number(head_size)))
            with runs(sequence, length, oldest, low, high) as run:
                gather(row, run)

    return Kernel("one_query", 16, 1, build)


@dataclass(frozen=True)
class _Run:
    """A page's tokens from `begin` of those that are seen on, for a head: their number, where they lie among all
    places, where those of the next page do; the head of keys, and that of queries."""

    begin: Value
    count: Value
    here: Value
    behind: Value
    head: Value
    line: Value


def _sums(code: Code, vectors: list[Value]) -> Value:
    """The sums of four vectors of 16, each by halves: [4]."""
    count = _LANES
    while len(vectors) > 1:  # two at a time, each half of the places of the two is added to the other one
        count //= 2
        low = [start + index for start in range(0, 2 * _LANES, 2 * count) for index in range(count)]
        high = [index + count for index in low]
        vectors = [
            code.build.fadd(code.shuffled(x, y, low), code.shuffled(x, y, high))
            for x, y in zip(vectors[::2], vectors[1::2], strict=True)
        ]
    (found,) = vectors
    while count > 1:
        count //= 2
        places = found.type.count
        low = [start + index for start in range(0, places, 2 * count) for index in range(count)]
        found = code.build.fadd(
            code.shuffled(found, found, low), code.shuffled(found, found, [index + count for index in low])
        )
    return found


def _as_fp32(code: Code, kind: str, start: Value, place: Sequence[Value], mask: Value) -> Value:
    b, floats = code.build, code.vector(code.f32, _LANES)
    if kind == "f32":
        return code.load(start, code.f32, _LANES, *place, mask=mask)
    if kind == "i8":
        return b.sitofp(code.load(start, code.i8, _LANES, *place, mask=mask), floats)
    halves = code.load(start, code.i16, _LANES, *place, mask=mask)
    if kind == "f16":
        return b.fpext(b.bitcast(halves, code.vector(code.types.HalfType(), _LANES)), floats)
    return code.from_bf16(halves)


# --- writing ----------------------------------------------------------------------------------------------------------


@cache
def _write(head_size: int, given_as: str, pages: str) -> Kernel:
    """Tokens' rows into their places; of negative ones none."""
    whole, rest = divmod(head_size, _LANES)

    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        k, v, k_kept, v_kept, k_scales, v_scales, slots, k_row, v_row, heads = arguments
        b, number = code.build, code.number
        kinds = {"f32": code.f32, "bf16": code.i16, "f16": code.i16, "i8": code.i8}

        def one_head(
            token: Value, slot: Value, head: Value, x: Value, x_row: Value, kept: Value, scales: Value
        ) -> None:
            column, target = b.mul(head, number(head_size)), b.add(b.mul(slot, heads), head)
            parts = []
            for index in range(whole + (rest > 0)):
                mask = None if index < whole else code.first_of(number(rest), _LANES)
                place = (b.mul(token, x_row), column, number(index * _LANES))
                parts.append(_as_fp32(code, given_as, x, place, mask))
            if pages == "i8":
                scale = _scale_of(code, parts)
                code.store(scale, scales, code.f32, target)
                by = code.spread(scale, _LANES)
                parts = [code.nearest(b.fdiv(part, by)) for part in parts]
            for index, part in enumerate(parts):
                count = _LANES if index < whole else rest
                rounded = _rounded(code, pages, code.shuffled(part, part, range(count)))
                code.store(rounded, kept, kinds[pages], b.mul(target, number(head_size)), number(index * _LANES))

        with code.loop(first, last, number(1)) as turn:
            slot = code.load_one(slots, code.i64, turn.at)
            with b.if_then(b.icmp_signed(">=", slot, number(0))), code.loop(number(0), heads, number(1)) as across:
                one_head(turn.at, slot, across.at, k, k_row, k_kept, k_scales)
                one_head(turn.at, slot, across.at, v, v_row, v_kept, v_scales)

    return Kernel("write", 10, 1, build)


def _scale_of(code: Code, parts: Sequence[Value]) -> Value:
    """The worth of a step of int8: a 127th of the largest of a head."""
    b = code.build
    largest = code.filled(code.f32, _LANES, 0)
    for part in parts:
        largest = code.larger_of(code.call(f"llvm.fabs.v{_LANES}f32", part.type, part), largest)
    most = code.sum(largest, code.larger_of)
    smallest, step, one = (code.types.Constant(code.f32, number) for number in (_SMALLEST_SCALED, _PER_STEP, 1.0))
    return b.select(b.fcmp_ordered(">", most, smallest), b.fmul(most, step), one)


def _rounded(code: Code, kind: str, values: Value) -> Value:
    b, count = code.build, values.type.count
    if kind == "f32":
        return values
    if kind == "i8":
        numbers = b.select(b.fcmp_ordered("ord", values, values), values, code.filled(code.f32, count, 0))
        return b.fptosi(numbers, code.vector(code.i8, count))
    if kind == "f16":
        return code.to_fp16(values)
    return code.to_bf16(values)
