"""Attention in 16 bits on a CPU where a gradient is wanted: scores in fp32, of which only those in 16 bits are kept.

torch's batched product rounds scores in 16 bits to 16 bits before softmax; its fused operator does not, but has no
gradient for a bias (then it goes over all scores in fp32 a dozen times), and its backward takes three times as long in
bf16 as in fp32 where sequences are short. Here two loops, which LLVM makes for the CPU, have what must be in fp32:

    forward   s = scale q k^T + bias,  p = softmax(s)                    p goes to memory rounded, and o = p v
    backward  dp = do v^T,  ds = p (dp - sum(p dp))                      scale ds goes to memory rounded
              dbias = ds summed over the sequences that share it, in fp32, one after another
              dv = p^T do,  dq = scale ds k,  dk = scale ds^T q

The products of what is rounded are torch's, which on such CPUs are twice as fast as in fp32; they sum in fp32, too. All
but p is in pieces of sequences that stay in the cache. p and ds are rounded once, as in the kernels for GPUs.

Shapes: B sequences, L queries, S keys, H heads, K head size.
"""

from collections.abc import Iterator, Sequence
from functools import cache

import torch
from torch import Tensor

from core.compat import FakeTensor
from core.kernels.llvm import Code, Kernel, Value, bits_of, num_workers, on_all_threads
from core.kernels.operator import launches, operator

_LANES, _ROWS, _WIDE = 16, 4, 2
"""numbers of a vector; queries, and vectors of keys, whose products are summed up together"""
_TILE = _LANES * _WIDE
_KINDS = {torch.bfloat16: "bf16", torch.float16: "f16"}
_PIECE_BYTES = 2 << 20
"""of p, in 16 bits, that are made and used before the next: a nearby cache's"""


def offered(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    """Return whether `attend` takes q[B, L, H, K], k and v[B, S, H, K], no band, and a bias that wants a gradient.

    Without a bias only where p takes no more memory than q, k and v together.
    """
    if torch.compiler.is_compiling():
        return False  # inductor fuses what stands around the products itself
    plain = q.device.type == "cpu" and q.dtype in _KINDS and all(type(t) in (Tensor, FakeTensor) for t in (q, k, v))
    fits = k.shape[2] == q.shape[2] and q.numel() > 0 and k.numel() > 0
    small = bias.requires_grad if bias is not None else k.shape[1] <= 3 * k.shape[3]
    return plain and fits and small and on_all_threads()


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None) -> Tensor:
    """softmax(scale q k^T + bias) v -> o[B, L, H, K]; gradients for q, k, v and bias.

    bias [B', 1 or H, L, S], B' dividing B, of any format; mask [B, S], nonzero where a key is visible
    A query without a visible key has o = 0 and no gradient.
    """
    return _forward(q, k, v, scale, bias, mask)[0]


@operator("attention_16_bits_forward")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """o and p[B, H, L, S]."""
    (B, L, H, K), S = q.shape, k.shape[1]
    o_BLHK, p_BHLS = q.new_empty(B, L, H, K), q.new_empty(B, H, L, S)
    if not launches(q):
        return o_BLHK, p_BHLS
    q, k, v = _rows(q), _rows(k), _rows(v)
    width = -(-S // _TILE) * _TILE
    hidden_BS = _hidden(mask, B, S, width)
    kernel, room = _probabilities(K, _KINDS[q.dtype], width > S, bias is not None), _room(K, width)
    for rows, added_HLS in _pieces(p_BHLS, None if bias is None else _padded(bias.float(), H, width)):
        n, at = rows.stop - rows.start, rows.start
        tensors = (q[at], k[at], added_HLS, hidden_BS[at], p_BHLS[at], room)
        strides = (*q.stride()[:3], *k.stride()[:3])
        kernel(H * -(-L // _ROWS), *map(_address, tensors), *strides, n, H, L, S, width, bits_of(scale))
        o_BLHK[rows] = _apart(_product(p_BHLS[rows].flatten(0, 1), _heads(v[rows])), n)
    return o_BLHK, p_BHLS


@operator("attention_16_bits_backward")
def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, p: Tensor, scale: float, bias_shape: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, and dbias in fp32, of the bias' shape ([0] where there is none)."""
    (_, L, H, K), S = q.shape, k.shape[1]
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    if not launches(q):
        return dq, dk, dv, q.new_empty(bias_shape, dtype=torch.float32)
    do, v = _rows(do), _rows(v)
    width = -(-S // _TILE) * _TILE
    has_bias = bias_shape != [0]
    dbias = q.new_zeros((bias_shape[0], H, L, width) if has_bias else (0,), dtype=torch.float32)
    kernel, room = _score_gradients(K, _KINDS[q.dtype], width > S, has_bias), _room(K, width)
    ds_NHLS = None
    for rows, dbias_HLS in _pieces(p, dbias if has_bias else None):
        n, at = rows.stop - rows.start, rows.start
        if ds_NHLS is None or len(ds_NHLS) != n:
            ds_NHLS = p.new_empty(n, *p.shape[1:])
        tensors = (do[at], v[at], p[at], ds_NHLS, dbias_HLS, room)
        strides = (*do.stride()[:3], *v.stride()[:3])
        kernel(H * -(-L // _ROWS), *map(_address, tensors), *strides, n, H, L, S, width, bits_of(scale))
        p_, ds_ = p[rows].flatten(0, 1), ds_NHLS.flatten(0, 1)
        dv[rows] = _apart(_product(p_.mT, _heads(do[rows])), n)
        dq[rows] = _apart(_product(ds_, _heads(k[rows])), n)
        dk[rows] = _apart(_product(ds_.mT, _heads(q[rows])), n)
    if has_bias:
        dbias = dbias[..., :S]
        dbias = dbias.sum(1, keepdim=True) if bias_shape[1] != H else dbias.contiguous()
    return dq, dk, dv, dbias


def _setup(ctx, inputs, output) -> None:
    q, k, v, ctx.scale, bias, _ = inputs
    ctx.bias = None if bias is None else (list(bias.shape), bias.dtype)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(q, k, v, output[1])


def _gradients(ctx, do: Tensor, _):
    shape, dtype = ctx.bias or ([0], torch.float32)
    dq, dk, dv, dbias = _backward(do, *ctx.saved_tensors, ctx.scale, shape)
    return dq, dk, dv, None, dbias.to(dtype) if ctx.needs_input_grad[4] else None, None


_forward.register_autograd(_gradients, setup_context=_setup)


def _product(a: Tensor, b: Tensor) -> Tensor:
    """Into memory that is there, whereby autocast leaves the format alone."""
    return torch.bmm(a, b, out=a.new_empty(len(a), a.shape[1], b.shape[2]))


def _pieces(p_BHLS: Tensor, added: Tensor | None) -> Iterator[tuple[slice, Tensor | None]]:
    """Neighbouring sequences that share a bias, and the part of `added` [B', H, L, S] that is theirs."""
    B, shares = len(p_BHLS), 1 if added is None else len(added)
    most = max(1, _PIECE_BYTES // (p_BHLS[0].numel() * p_BHLS.itemsize))
    for share in range(shares):
        first, last = share * B // shares, (share + 1) * B // shares
        for start in range(first, last, most):
            yield slice(start, min(start + most, last)), None if added is None else added[share]


def _padded(bias: Tensor, num_heads: int, width: int) -> Tensor:
    """[B', H, L, width], contiguous."""
    bias = torch.nn.functional.pad(bias, (0, width - bias.shape[-1]))
    return bias.expand(-1, num_heads, -1, -1).contiguous()


def _hidden(mask: Tensor | None, count: int, num_keys: int, width: int) -> Tensor:
    """The term added to the scores of a key: 0, or -inf where it is hidden, as what lies behind the last one is."""
    hidden = torch.full((count, width), -torch.inf, dtype=torch.float32, device="cpu")
    hidden[:, :num_keys] = 0.0 if mask is None else torch.where(mask != 0, 0.0, -torch.inf)
    return hidden


def _rows(x_BLHK: Tensor) -> Tensor:
    return x_BLHK if x_BLHK.stride(3) == 1 else x_BLHK.contiguous()


def _heads(x_BLHK: Tensor) -> Tensor:
    """[B H, L, K]."""
    return x_BLHK.transpose(1, 2).flatten(0, 1)


def _apart(x_BLK: Tensor, count: int) -> Tensor:
    return x_BLK.unflatten(0, (count, -1)).transpose(1, 2)


def _room(head_size: int, width: int) -> Tensor:
    """For each thread keys or values, some queries, their scores."""
    size = head_size * width + _ROWS * head_size + _ROWS * width
    return torch.empty(num_workers(), size, dtype=torch.float32, device="cpu")


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


# --- loops ------------------------------------------------------------------------------------------------------------


class _Work:
    """The work of both loops: for each sequence, head and some rows of queries, products of those with all columns.

    rows[N, L, H, K] (queries, or the output's gradient) and columns[N, S, H, K] (keys, or values) lie with strides. A
    worker's items, rows of heads, are within the loop over sequences, so that a head's columns are put in order once.
    """

    def __init__(self, code: Code, head_size: int, kind: str, ragged: bool, room: Value, sizes: Sequence[Value]):
        self.code, self.head_size, self.kind, self.ragged = code, head_size, kind, ragged
        self.strides, (self.count, self.heads, self.length, self.keys, self.width, scale) = sizes[:6], sizes[6:]
        b, number = code.build, code.number
        self.scale = b.bitcast(b.trunc(scale, code.i32), code.f32)
        panel = b.mul(self.width, number(head_size))
        own = b.mul(code.worker, b.add(b.add(panel, number(_ROWS * head_size)), b.mul(self.width, number(_ROWS))))
        self.room, self.panel = room, own
        self.queries = b.add(own, panel)
        self.scores = b.add(self.queries, number(_ROWS * head_size))

    def one(self, address: Value, *offsets: Value) -> Value:
        code = self.code
        value = code.load_one(address, code.i16, *offsets)
        if self.kind == "bf16":
            return code.from_bf16(value)
        return code.build.fpext(code.build.bitcast(value, code.types.HalfType()), code.f32)

    def put_columns_in_order(self, columns: Value, sequence: Value, head: Value) -> None:
        """[K, width] in fp32, zeros behind the last one."""
        code, b, number = self.code, self.code.build, self.code.number
        start = b.add(b.mul(sequence, self.strides[3]), b.mul(head, self.strides[5]))
        zero = code.types.Constant(code.f32, 0.0)
        with code.loop(number(0), number(self.head_size), number(1)) as turn:
            line = b.add(self.panel, b.mul(turn.at, self.width))
            with code.loop(number(0), self.keys, number(1)) as key:
                value = self.one(columns, start, b.mul(key.at, self.strides[4]), turn.at)
                code.build.store(value, code.place(self.room, code.f32, line, key.at))
            if self.ragged:
                with code.loop(self.keys, self.width, number(1)) as key:
                    code.build.store(zero, code.place(self.room, code.f32, line, key.at))

    def put_rows_in_order(self, rows: Value, sequence: Value, head: Value, lines: Sequence[Value], by: Value) -> None:
        """[_ROWS, K] in fp32, times a number."""
        code, b, number = self.code, self.code.build, self.code.number
        start = b.add(b.mul(sequence, self.strides[0]), b.mul(head, self.strides[2]))
        with code.loop(number(0), number(self.head_size), number(1)) as turn:
            for index, line in enumerate(lines):
                value = self.one(rows, start, b.mul(line, self.strides[1]), turn.at)
                place = code.place(self.room, code.f32, self.queries, number(index * self.head_size), turn.at)
                b.store(b.fmul(value, by) if by is not None else value, place)

    def products(self, column: Value) -> list[list[Value]]:
        """The products of the rows with a tile of columns."""
        code, b, number = self.code, self.code.build, self.code.number
        zeros = code.filled(code.f32, _LANES, 0)
        with code.loop(number(0), number(self.head_size), number(1), [zeros] * (_ROWS * _WIDE)) as turn:
            line = b.add(self.panel, b.mul(turn.at, self.width))
            keys = [code.load(self.room, code.f32, _LANES, line, column, number(w * _LANES)) for w in range(_WIDE)]
            found = []
            for index in range(_ROWS):
                offset = number(index * self.head_size)
                row = code.spread(code.load_one(self.room, code.f32, self.queries, offset, turn.at), _LANES)
                sums = turn.values[index * _WIDE : (index + 1) * _WIDE]
                found += [code.fma(row, key, total) for key, total in zip(keys, sums, strict=True)]
            turn.values = found
        return [turn.values[index * _WIDE : (index + 1) * _WIDE] for index in range(_ROWS)]

    def score_place(self, index: int, column: Value) -> tuple[Value, ...]:
        return self.scores, self.code.build.mul(self.width, self.code.number(index)), column

    def there(self, column: Value) -> Value:
        return self.code.first_of(self.code.build.sub(self.keys, column), _LANES) if self.ragged else None

    def load_half(self, address: Value, line: Value, column: Value) -> Value:
        """Half a vector of p, in fp32; 0 behind the last one."""
        code, b = self.code, self.code.build
        value = code.load(address, code.i16, _LANES, b.mul(line, self.keys), column, mask=self.there(column))
        if self.kind == "bf16":
            return code.from_bf16(value)
        halves = b.bitcast(value, code.vector(code.types.HalfType(), _LANES))
        return b.fpext(halves, code.vector(code.f32, _LANES))

    def store_half(self, value: Value, address: Value, line: Value, column: Value) -> None:
        code, b = self.code, self.code.build
        rounded = code.to_bf16(value) if self.kind == "bf16" else code.to_fp16(value)
        place = (b.mul(line, self.keys), column)
        if self.ragged:
            code.store_some(rounded, address, code.i16, self.there(column), *place)
        else:
            code.store(rounded, address, code.i16, *place)

    def items(self, columns: Value, first: Value, last: Value) -> Iterator[tuple[Value, Value, list[Value], Value]]:
        """(sequence, head, queries, the first query) within the loops; a query behind the last one is the last one."""
        code, b, number = self.code, self.code.build, self.code.number
        groups = b.sdiv(b.add(self.length, number(_ROWS - 1)), number(_ROWS))
        with code.loop(number(0), self.count, number(1)) as outer, code.loop(first, last, number(1)) as turn:
            head, group = b.sdiv(turn.at, groups), b.srem(turn.at, groups)
            starts = b.or_(b.icmp_signed("==", turn.at, first), b.icmp_signed("==", group, number(0)))
            with b.if_then(starts):
                self.put_columns_in_order(columns, outer.at, head)
            begin = b.mul(group, number(_ROWS))
            final = b.sub(self.length, number(1))
            yield outer.at, head, [code.smaller(b.add(begin, number(r)), final) for r in range(_ROWS)], begin

    def line(self, sequence: Value, head: Value, query: Value) -> Value:
        """The line of p and ds."""
        b = self.code.build
        return b.add(b.mul(b.add(b.mul(sequence, self.heads), head), self.length), query)

    def tiles(self, carried: Sequence[Value] = ()):
        return self.code.loop(self.code.number(0), self.width, self.code.number(_TILE), carried)


@cache
def _probabilities(head_size: int, kind: str, ragged: bool, has_bias: bool) -> Kernel:
    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        q, k, bias, hidden, p, room, *sizes = arguments
        b, number = code.build, code.number
        work = _Work(code, head_size, kind, ragged, room, sizes)
        lowest, zeros = code.filled(code.f32, _LANES, -3.0e38), code.filled(code.f32, _LANES, 0)
        for sequence, head, queries, _ in work.items(k, first, last):
            work.put_rows_in_order(q, sequence, head, queries, work.scale)
            with work.tiles([lowest] * _ROWS) as turn:
                most = []
                for index, sums in enumerate(work.products(turn.at)):
                    largest = turn.values[index]
                    for w, total in enumerate(sums):
                        column = b.add(turn.at, number(w * _LANES))
                        if has_bias:
                            row = b.add(b.mul(head, work.length), queries[index])
                            total = b.fadd(total, code.load(bias, code.f32, _LANES, b.mul(row, work.width), column))
                        shut = code.load(hidden, code.f32, _LANES, b.mul(sequence, work.width), column)
                        total = b.fadd(total, shut)
                        code.store(total, room, code.f32, *work.score_place(index, column))
                        largest = code.larger_of(largest, total)
                    most.append(largest)
                turn.values = most
            for index in range(_ROWS):
                top = code.spread(code.sum(turn.values[index], code.larger_of), _LANES)
                with code.loop(number(0), work.width, number(_LANES), [zeros]) as step:
                    place = work.score_place(index, step.at)
                    weight = code.exp(b.fsub(code.load(room, code.f32, _LANES, *place), top))
                    code.store(weight, room, code.f32, *place)
                    step.values = [b.fadd(step.values[0], weight)]
                whole = code.sum(step.values[0], b.fadd)
                one, zero = (code.types.Constant(code.f32, value) for value in (1.0, 0.0))
                by = code.spread(b.select(b.fcmp_ordered("==", whole, zero), zero, b.fdiv(one, whole)), _LANES)
                line = work.line(sequence, head, queries[index])
                with code.loop(number(0), work.width, number(_LANES)) as step:
                    weight = code.load(room, code.f32, _LANES, *work.score_place(index, step.at))
                    work.store_half(b.fmul(weight, by), p, line, step.at)

    return Kernel("probabilities", 18, 1, build)


@cache
def _score_gradients(head_size: int, kind: str, ragged: bool, has_bias: bool) -> Kernel:
    def build(code: Code, arguments: Sequence[Value], first: Value, last: Value) -> None:
        do, v, p, ds, dbias, room, *sizes = arguments
        b, number = code.build, code.number
        work = _Work(code, head_size, kind, ragged, room, sizes)
        zeros, scale = code.filled(code.f32, _LANES, 0), code.spread(work.scale, _LANES)
        for sequence, head, queries, begin in work.items(v, first, last):
            work.put_rows_in_order(do, sequence, head, queries, None)
            lines = [work.line(sequence, head, query) for query in queries]
            with work.tiles([zeros] * _ROWS) as turn:
                totals = []
                for index, sums in enumerate(work.products(turn.at)):
                    total = turn.values[index]
                    for w, dp in enumerate(sums):
                        column = b.add(turn.at, number(w * _LANES))
                        code.store(dp, room, code.f32, *work.score_place(index, column))
                        total = code.fma(work.load_half(p, lines[index], column), dp, total)
                    totals.append(total)
                turn.values = totals
            for index in range(_ROWS):
                delta = code.spread(code.sum(turn.values[index], b.fadd), _LANES)
                is_new = b.icmp_signed("<", b.add(begin, number(index)), work.length)
                with b.if_then(is_new), code.loop(number(0), work.width, number(_LANES)) as step:
                    dp = code.load(room, code.f32, _LANES, *work.score_place(index, step.at))
                    gradient = b.fmul(work.load_half(p, lines[index], step.at), b.fsub(dp, delta))
                    work.store_half(b.fmul(gradient, scale), ds, lines[index], step.at)
                    if has_bias:
                        row = b.add(b.mul(head, work.length), queries[index])
                        place = (b.mul(row, work.width), step.at)
                        so_far = code.load(dbias, code.f32, _LANES, *place)
                        code.store(b.fadd(so_far, gradient), dbias, code.f32, *place)

    return Kernel("score_gradients", 18, 1, build)
