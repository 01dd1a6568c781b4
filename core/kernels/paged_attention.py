"""Attention over a paged KV cache: decode (one query a sequence), chunked prefill (several), and any mix of both.

A cache is a pool of pages; a sequence's row of the page table names its pages in order (Kwon et al., "Efficient Memory
Management for Large Language Model Serving with PagedAttention", 2023). Query i of n is at position t = length - n + i:

    s[u] = scale q . k[u] + slope (u - t),   u <= t;     o = sum_u softmax(s)[u] v[u]

With a window t - window < u, too, and pages that no query of a sequence sees are not read.

1. Sequences with one query: a program takes the query's heads that share a key/value head, and a part of the sequence.
   It leaves o and the log-sum-exp of its part; a second kernel merges the parts (Dao et al., "Flash-Decoding", 2023):

       lse = log sum_i exp(lse_i),   o = sum_i exp(lse_i - lse) o_i

2. Sequences with more: a program takes a tile of queries and heads that share a key/value head, and all keys that the
   tile sees (Dao, "FlashAttention-2", 2023, algorithm 1, forward only).

On a CPU the sequences with one query are `core.kernels.paged_loops`'s.

A sequence's parts follow from its own length, and its kernel from its own number of queries, so a result does not
depend on the neighbours in the batch: not a bit of it, in any mix.

int8 pages have one scale per token and key/value head. Tokens come one at a time: a scale per page would have to be
raised, and the page's earlier tokens rounded again, whenever a larger one arrives, and a token's error would depend on
its neighbours. The price is 4 bytes beside K. Both scales factor out of the products: q . k[u] is multiplied by
u's scale afterwards, and softmax(s)[u] by that of v[u].

Shapes: B sequences, T queries of all sequences, H query heads, J key/value heads, G = H / J, K head size, P pages.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from core.kernels import paged_loops
from core.kernels.blocks import Blocks, chip, tuned
from core.kernels.language import tl, triton
from core.kernels.operator import launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing
from core.kernels.torch_attention import torch_attention

MAX_HEAD_SIZE = 256
_SHORTEST_PART = 256
_EVERYTHING = 1 << 30
"""A window of more places hides none; places and distances have 32 bits in the kernels."""
_LOG2E = tl.constexpr(math.log2(math.e))
_PER_STEP = tl.constexpr(1 / 127)  # of the largest element
_SMALLEST_SCALED = tl.constexpr(1e-30)  # rows without a larger element become zeros: their scale would be subnormal

_DOT_TYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@dataclass(frozen=True)
class Span:
    """One sequence of a batch on a CPU: its queries `start … stop - 1`, its length, and the pages of what they see.

    first  the oldest place that the first query sees
    """

    start: int
    stop: int
    length: int
    table: Sequence[int]
    first: int = 0

    @property
    def num_keys(self) -> int:
        return self.length - self.first

    @cached_property
    def pages(self) -> int | Tensor:
        """The first page, where they follow each other in memory; else int64[n], the number of each."""
        in_a_row = all(page == self.table[0] + place for place, page in enumerate(self.table))
        return self.table[0] if in_a_row else torch.tensor(self.table, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Spans:
    """The sequences of a batch that have queries and keys. Layers that share a page table and a window share this, too.

    alone   those with one query, and the queries of those that are taken apart; int64[N, 4] in `queries`: of each its
            row, its sequence in the page table, its number of places, the first of them that it sees
    longer  the others
    """

    alone: list[Span]
    longer: list[Span]
    queries: Tensor
    longest_alone: int


def spans(
    tables: Sequence[Sequence[int]], lengths: Sequence[int], starts: Sequence[int], page_size: int, apart: int = 0,
    window: int | None = None,
) -> Spans:  # fmt: skip
    """apart  sequences of at most so many tokens are taken query by query (`paged_loops.longest_apart`)"""

    def span(start: int, stop: int, length: int, table: Sequence[int]) -> Span:
        first = 0 if window is None else max(0, length - (stop - start) + 1 - window)
        return Span(start, stop, length, table[first // page_size : -(-length // page_size)], first)

    alone, longer, queries = [], [], []
    for sequence, (table, length, start, stop) in enumerate(zip(tables, lengths, starts, starts[1:])):
        if length <= 0 or start >= stop:
            continue
        if stop > start + 1 and length > apart:
            longer.append(span(start, stop, length, table))
            continue
        for row in range(start, stop):
            one = span(row, row + 1, length - (stop - row - 1), table)
            alone.append(one)
            queries.append((row, sequence, one.length, one.first))
    longest = max((one.num_keys for one in alone), default=0)
    return Spans(alone, longer, torch.tensor(queries, dtype=torch.int64, device="cpu").view(-1, 4), longest)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    cu_query_lens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    max_length: int | None = None,
    prepared: Spans | None = None,
) -> Tensor:
    """o[T, H, K] of q's dtype; no gradients. The keys of the queries themselves are in the pages already.

    q                 [T, H, K] queries of sequence 0, then of sequence 1, …; the last n positions of each
    k_pages, v_pages  [P, page_size, J, K] in fp32, bf16, fp16, or int8 with scales
    page_table        int[B, max_pages]: number of the page that holds tokens page_size i …; unused entries are not
                      read, nor are those of pages that a window hides from all queries of the sequence
    lengths           int[B]: tokens of each sequence, queries included; 0 (a row that fills up a batch) gives zeros
    cu_query_lens     int[B + 1]: sequence b has queries cu[b] … cu[b + 1] - 1, none or any number up to its length;
                      None: one each
    k_scales, v_scales  fp32[P, page_size, J], with int8 pages
    slopes            [H] of ALiBi
    scale             1 / sqrt(K) when None
    window            keys `window` and more places before the query are hidden; None: none are
    max_length        no sequence is longer (the caller knows; reading `lengths` would wait for the GPU); None: what the
                      page table can hold. Less than that saves programs and memory, and changes no result.
    prepared          what `spans` says of this batch and window, for calls on a CPU that share it; None: found out each
                      time

    Raises ValueError when shapes or dtypes do not fit together.
    """
    _check(q, k_pages, v_pages, page_table, lengths, cu_query_lens, k_scales, v_scales, slopes, window)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    tensors = (q, k_pages, v_pages, page_table, lengths, cu_query_lens, k_scales, v_scales, slopes)
    if runs_kernel("paged_attention", q, unless=_unsupported(q, k_pages, v_pages)):
        capacity = page_table.shape[1] * k_pages.shape[1]
        return _forward(*tensors, scale, window, capacity if max_length is None else min(max_length, capacity))
    if paged_loops.offered(q, k_pages):
        prepared = prepared or _spans(page_table, lengths, cu_query_lens, k_pages.shape[1], window)
        return attention_on_cpu(
            q, k_pages, v_pages, page_table, prepared, k_scales=k_scales, v_scales=v_scales, slopes=slopes, scale=scale,
            window=window,
        )  # fmt: skip
    return reference(
        q, k_pages, v_pages, page_table, lengths, cu_query_lens=cu_query_lens, k_scales=k_scales, v_scales=v_scales,
        slopes=slopes, scale=scale, window=window, prepared=prepared,
    )  # fmt: skip


def attention_on_cpu(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, prepared: Spans, *, k_scales: Tensor | None = None,
    v_scales: Tensor | None = None, slopes: Tensor | None = None, scale: float | None = None, window: int | None = None,
) -> Tensor:  # fmt: skip
    """`paged_attention` of what `paged_loops.offered` takes, unchecked. Lone queries all at once, others by torch."""
    scale, o_THK = 1 / math.sqrt(q.shape[-1]) if scale is None else scale, None
    if prepared.longer or not prepared.alone:
        rest = Spans([], prepared.longer, prepared.queries[:0], 0)
        o_THK = _by_torch(q, k_pages, v_pages, rest, k_scales, v_scales, slopes, scale, window)
    if prepared.alone:
        wide = None if o_THK is None else o_THK.float()
        if wide is None and len(prepared.alone) < len(q):
            wide = torch.zeros(q.shape, dtype=torch.float32, device="cpu")
        if page_table.dtype != torch.int32 or not page_table.is_contiguous():
            page_table = page_table.to(torch.int32).contiguous()
        o_THK = paged_loops.one_query_attention(
            q, k_pages, v_pages, page_table, prepared.queries, prepared.longest_alone,
            scale=scale, k_scales=k_scales, v_scales=v_scales, slopes=slopes, out=wide,
        ).to(q.dtype)  # fmt: skip
    assert o_THK is not None
    return o_THK


def _spans(
    page_table: Tensor, lengths: Tensor, cu_query_lens: Tensor | None, page_size: int, window: int | None
) -> Spans:
    starts = range(len(lengths) + 1) if cu_query_lens is None else cu_query_lens.tolist()
    return spans(page_table.tolist(), lengths.tolist(), starts, page_size, window=window)


def reference(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    lengths: Tensor,
    *,
    cu_query_lens: Tensor | None = None,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    slopes: Tensor | None = None,
    scale: float | None = None,
    window: int | None = None,
    max_length: int | None = None,
    prepared: Spans | None = None,
) -> Tensor:
    """The same by torch, a sequence at a time; on a CPU what runs for sequences with more than one query.

    A batch of all sequences at once would be no faster: keys and values would be gathered through memory, where those
    of one sequence stay in the processor's cache or need no gathering, and a result would depend on the longest.
    """
    found = prepared or _spans(page_table, lengths, cu_query_lens, k_pages.shape[1], window)
    return _by_torch(q, k_pages, v_pages, found, k_scales, v_scales, slopes, scale, window)


def _by_torch(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, found: Spans, k_scales: Tensor | None, v_scales: Tensor | None,
    slopes: Tensor | None, scale: float | None, window: int | None,
) -> Tensor:  # fmt: skip
    dtype = _dot_dtype(q, k_pages)
    # torch's attention of one query in 16 bits widens number by number, which is slower than all at once.
    wide = torch.promote_types(dtype, torch.float32) if q.device.type == "cpu" else dtype
    every = sorted((*found.alone, *found.longer), key=lambda span: span.start)
    longest = max((span.num_keys for span in every), default=0)
    most_pages = max((len(span.table) for span in every), default=0)
    kept = ((k_pages, k_scales), (v_pages, v_scales))
    k_of, v_of = (_Gather(pages, scales, dtype, most_pages) for pages, scales in kept)
    k_alone_of, v_alone_of = (_Gather(pages, scales, wide, most_pages) for pages, scales in kept)
    J, K = k_pages.shape[2:]
    q_TJGK = q.reshape(len(q), J, -1, K).to(dtype)
    # ALiBi of one query over the longest sequence: a shorter one's is the end of it.
    bias = None if slopes is None or not every else _alibi(slopes, 1, longest, dtype).view(1, J, -1, longest)
    everyone = [span.start for span in every] == list(range(len(q)))
    o_TJGK = None if everyone else torch.zeros_like(q_TJGK)
    alone = q_TJGK[:, None].to(wide).unbind(0) if everyone else None  # cheaper than one by one
    pieces = []
    for span in every:
        if span.stop == span.start + 1:  # heads that share keys become the queries of one head: no key is repeated
            mine = None if bias is None else bias[..., longest - span.num_keys :]
            q_1JGK = q_TJGK[span.start : span.stop].to(wide) if alone is None else alone[span.start]
            o = _one_query(q_1JGK, k_alone_of(span), v_alone_of(span), mine, scale)
        else:
            o = _attention(q_TJGK[span.start : span.stop], k_of(span), v_of(span), slopes, scale, window)
        if o_TJGK is None:
            pieces.append(o)
        else:
            o_TJGK[span.start : span.stop] = o
    o_TJGK = o_TJGK if o_TJGK is not None else torch.cat(pieces) if pieces else q_TJGK
    return o_TJGK.view(q.shape).to(q.dtype)


class _Gather:
    """A span's keys or values [1, J, S, K] out of the pages: where those follow each other no copy, else one.

    All sequences of a call are gathered into the same room, so that it stays in the processor's cache.
    """

    def __init__(self, pages: Tensor, scales: Tensor | None, dtype: torch.dtype, most_pages: int):
        self.pages, self.scales, self.dtype, self.most_pages = pages, scales, dtype, most_pages
        self.page_size, (J, K) = pages.shape[1], pages.shape[2:]
        self.room: Tensor | None = None
        self.plain = scales is None and dtype == pages.dtype and pages.is_contiguous()
        self.shape, self.strides = (J, K), (0, K, J * K, 1)

    def __call__(self, span: Span) -> Tensor:
        (J, K), skipped = self.shape, span.first % self.page_size
        if isinstance(span.pages, int) and self.plain:
            first = self.pages.storage_offset() + (span.pages * self.page_size + skipped) * J * K
            return self.pages.as_strided((1, J, span.num_keys, K), self.strides, first)
        places = slice(skipped, skipped + span.num_keys)
        x_SJK = self._taken(self.pages, span)[places].to(self.dtype)
        if self.scales is not None:
            x_SJK = x_SJK * self._taken(self.scales, span)[places, :, None]
        return x_SJK.transpose(0, 1)[None]

    def _taken(self, pages: Tensor, span: Span) -> Tensor:
        num_pages = len(span.table)
        if isinstance(span.pages, int):
            return pages[span.pages : span.pages + num_pages].flatten(0, 1)
        numbers = span.pages.to(pages.device)
        if pages is not self.pages:
            return pages.index_select(0, numbers).flatten(0, 1)
        if self.room is None:
            self.room = pages.new_empty(self.most_pages, *pages.shape[1:])
        return torch.index_select(pages, 0, numbers, out=self.room[:num_pages]).flatten(0, 1)


def _one_query(q_1JGK: Tensor, k_1JSK: Tensor, v_1JSK: Tensor, bias: Tensor | None, scale: float | None) -> Tensor:
    """The last position of a sequence over all of it: [1, J, G, K]."""
    if (
        q_1JGK.device.type == "cpu" and not torch.is_grad_enabled()
    ):  # what the next line would come to, at half the cost
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(q_1JGK, k_1JSK, v_1JSK, attn_mask=bias, scale=scale)[0]
    return torch_attention(q_1JGK, k_1JSK, v_1JSK, bias, scale=scale)


def _attention(
    q_NJGK: Tensor, k_1JSK: Tensor, v_1JSK: Tensor, slopes_H: Tensor | None, scale: float | None, window: int | None
) -> Tensor:
    """The last N positions of a sequence of which S places are there: [N, J, G, K]."""
    (N, J, G, _), S = q_NJGK.shape, k_1JSK.shape[2]
    window = S if window is None else window
    bias = None if slopes_H is None else _alibi(slopes_H, N, S, q_NJGK.dtype, window)
    if bias is None and (N != S or window < S):
        bias = q_NJGK.new_ones(N, S, dtype=torch.bool).tril_(S - N).triu_(S - N - window + 1)
    causal, q_1HNK = bias is None, q_NJGK.flatten(1, 2).transpose(0, 1)[None]
    o_1HNK = torch_attention(q_1HNK, k_1JSK, v_1JSK, bias, is_causal=causal, scale=scale, enable_gqa=G > 1)
    return o_1HNK[0].transpose(0, 1).unflatten(1, (J, G))


def _alibi(slopes_H: Tensor, num_queries: int, num_keys: int, dtype: torch.dtype, window: int | None = None) -> Tensor:
    """[1, H, N, S]: slope (u - t), and -inf for later keys and those that a window hides.

    In fp32 or wider, for positions have more digits than bf16.
    """
    dtype = torch.promote_types(dtype, torch.float32)
    u_S = torch.arange(num_keys, device=slopes_H.device, dtype=dtype)
    distance_NS = u_S - u_S[num_keys - num_queries :, None]
    bias_HNS = slopes_H.to(dtype)[:, None, None] * distance_NS
    hidden_NS = distance_NS > 0 if window is None else (distance_NS > 0) | (distance_NS <= -window)
    return bias_HNS.masked_fill_(hidden_NS, -math.inf)[None]


def write_pages(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """Put new keys and values into their places in the pages.

    k, v   [T, J, K]
    slots  int[T]: page * page_size + place in the page, each at most once; negative: this token is not kept
    Pages and scales as in `paged_attention`. int8 pages get round(x / s), with s = max |x| / 127 over K in fp32.

    Raises ValueError when shapes or dtypes do not fit together.
    """
    _check_pages("write_pages", k_pages, v_pages, k_scales, v_scales)
    if k.ndim != 3 or k.shape != v.shape or k.shape[1:] != k_pages.shape[2:] or slots.shape != k.shape[:1]:
        given = f"k {list(k.shape)}, v {list(v.shape)}, slots {list(slots.shape)}"
        raise ValueError(f"write_pages: {given} for pages {list(k_pages.shape)}; k, v are [T, J, K], slots [T]")
    if runs_kernel("write_pages", k, unless=_unwritable(k, k_pages, v_pages)):
        _write(k, v, k_pages, v_pages, slots, k_scales, v_scales)
    elif paged_loops.offered(k, k_pages) and slots.dtype == torch.int64 and v.dtype == k.dtype:
        paged_loops.write(k, v, k_pages, v_pages, slots.contiguous(), k_scales=k_scales, v_scales=v_scales)
    else:
        write_reference(k, v, k_pages, v_pages, slots, k_scales=k_scales, v_scales=v_scales)


def write_reference(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
) -> None:
    """The same by torch."""
    if slots.numel() and int(slots.min()) < 0:
        kept = (slots >= 0).nonzero()[:, 0]
        k, v, slots = k[kept], v[kept], slots[kept]
    for x, pages, scales in ((k, k_pages, k_scales), (v, v_pages, v_scales)):
        if scales is not None:
            x, scale_TJ = quantized(x)
            _put(scales, slots, scale_TJ)
        _put(pages, slots, x)


def _put(pages: Tensor, slots: Tensor, x: Tensor) -> None:
    if pages.is_contiguous():
        pages.view(-1, *pages.shape[2:]).index_copy_(0, slots.long(), x.to(pages.dtype))
    else:
        pages[slots // pages.shape[1], slots % pages.shape[1]] = x.to(pages.dtype)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """(int8[.., K], fp32[..]) with int8 * fp32 nearest to x[.., K]; the arithmetic is fp32, as the scale.

    What is infinite beside a scale that is, too, gets 0: processors convert the NaN of that quotient differently.
    """
    x = x.float()
    largest = x.abs().amax(-1)
    scale = torch.where(largest > _SMALLEST_SCALED.value, largest * _PER_STEP.value, 1.0)
    return (x / scale[..., None]).round_().nan_to_num_(nan=0.0).to(torch.int8), scale


def _check(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, cu_query_lens: Tensor | None,
    k_scales: Tensor | None, v_scales: Tensor | None, slopes: Tensor | None, window: int | None,
) -> None:  # fmt: skip
    _check_pages("paged_attention", k_pages, v_pages, k_scales, v_scales)
    J, K = k_pages.shape[2:]
    if q.ndim != 3 or q.shape[2] != K or J == 0 or q.shape[1] % J:
        raise ValueError(
            f"paged_attention: q {list(q.shape)} for pages {list(k_pages.shape)}; q is [T, H, K] with K = {K} and H a "
            f"multiple of {J}"
        )
    if page_table.ndim != 2 or lengths.shape != page_table.shape[:1]:
        raise ValueError(
            f"paged_attention: page_table {list(page_table.shape)} and lengths {list(lengths.shape)}; "
            "they are [B, max_pages] and [B]"
        )
    B = lengths.shape[0]
    if cu_query_lens is None and q.shape[0] != B:
        raise ValueError(f"paged_attention: {q.shape[0]} queries for {B} sequences; give cu_query_lens [{B + 1}]")
    if cu_query_lens is not None and cu_query_lens.shape != (B + 1,):
        given = list(cu_query_lens.shape)
        raise ValueError(f"paged_attention: cu_query_lens {given} for {B} sequences; it is [{B + 1}]")
    if slopes is not None and slopes.shape != q.shape[1:2]:
        raise ValueError(f"paged_attention: slopes {list(slopes.shape)} for {q.shape[1]} heads")
    if window is not None and window < 1:
        raise ValueError(f"paged_attention: a window of {window} shows nothing; it counts the query's own place, too")


def _check_pages(name: str, k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None) -> None:
    given = f"{name}: k_pages {list(k_pages.shape)} {k_pages.dtype}, v_pages {list(v_pages.shape)} {v_pages.dtype}"
    if k_pages.ndim != 4 or k_pages.shape != v_pages.shape or k_pages.dtype != v_pages.dtype:
        raise ValueError(f"{given}; both are [P, page_size, J, K] of one dtype")
    for scales in (k_scales, v_scales):
        if k_pages.dtype == torch.int8 and (scales is None or scales.shape != k_pages.shape[:3]):
            found = None if scales is None else list(scales.shape)
            raise ValueError(f"{given}, scales {found}; int8 pages have scales {list(k_pages.shape[:3])}")
        if k_pages.dtype != torch.int8 and scales is not None:
            raise ValueError(f"{given}, scales {list(scales.shape)}; only int8 pages have scales")


def _unsupported(x: Tensor, k_pages: Tensor, v_pages: Tensor) -> str | None:
    if x.shape[-1] > MAX_HEAD_SIZE:
        return f"the kernel takes heads of at most {MAX_HEAD_SIZE} elements"
    if x.shape[-1] > 128 and x.dtype == torch.float32 and k_pages.dtype == torch.int8:
        return "the kernel takes int8 pages and heads of more than 128 elements with queries of 16 bits only"
    return _unwritable(x, k_pages, v_pages)


def _unwritable(x: Tensor, k_pages: Tensor, v_pages: Tensor) -> str | None:
    return unsupported_dtype(x, *(pages for pages in (k_pages, v_pages) if pages.dtype != torch.int8))


def _dot_dtype(q: Tensor, pages: Tensor) -> torch.dtype:
    """The dtype of products: that that holds both; int8 fits all."""
    return torch.promote_types(q.dtype, pages.dtype)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _as(x, DTYPE: tl.constexpr):
    """x as DTYPE; int8 by way of fp32, for the interpreter has no other way from integers to bf16."""
    if x.dtype == tl.int8:
        x = x.to(tl.float32)
    return x.to(DTYPE)


@triton.jit
def _attend(
    q, position, slope, first, oldest, last, window, table, k_pages, v_pages, k_scales, v_scales, K: tl.constexpr,
    scale, t1, k0, k1, k3, v0, v1, v3, ks0, ks1, vs0, vs1,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Rows q[M, K] over keys oldest … last - 1: (softmax(s) v, log2 of the sum of 2^s); zeros and -inf without keys.

    first   where their first block begins; what is before `oldest` is not read

    Scores are in base 2: `scale` and `slope` hold a factor log2(e).
    """
    column = tl.arange(0, BLOCK_K).to(tl.int64)
    greatest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    o = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for start in range(first, last, BLOCK_N):
        u = start + tl.arange(0, BLOCK_N)
        seen = u < last
        if HAS_WINDOW:
            seen = seen & (u >= oldest)
        page = tl.load(table + (u // PAGE).to(tl.int64) * t1, mask=seen, other=0).to(tl.int64)
        place = (u % PAGE).to(tl.int64)
        at = (page * k0 + place * k1)[None, :] + column[:, None] * k3
        k = tl.load(k_pages + at, mask=seen[None, :] & (column < K)[:, None], other=0.0)
        s = tl.dot(q, _as(k, q.dtype), input_precision=PRECISION) * scale
        if HAS_SCALES:
            s *= tl.load(k_scales + page * ks0 + place * ks1, mask=seen, other=0.0)[None, :]
        if HAS_SLOPES:
            s += slope[:, None] * (u[None, :] - position[:, None])
        visible = seen[None, :] & (u[None, :] <= position[:, None])
        if HAS_WINDOW:
            visible = visible & (u[None, :] > position[:, None] - window)
        s = tl.where(visible, s, float("-inf"))
        new = tl.maximum(greatest, tl.max(s, 1))
        new_or_0 = tl.where(new == float("-inf"), 0.0, new)  # rows of nobody see nothing
        p = tl.exp2(s - new_or_0[:, None])
        shrink = tl.exp2(greatest - new_or_0)
        total = total * shrink + tl.sum(p, 1)
        at = (page * v0 + place * v1)[:, None] + column[None, :] * v3
        v = tl.load(v_pages + at, mask=seen[:, None] & (column < K)[None, :], other=0.0)
        if HAS_SCALES:
            p *= tl.load(v_scales + page * vs0 + place * vs1, mask=seen, other=0.0)[None, :]
        o = o * shrink[:, None] + tl.dot(p.to(q.dtype), _as(v, q.dtype), input_precision=PRECISION)
        greatest = new
    some = tl.where(total > 0, total, 1.0)
    return o / some[:, None], greatest + tl.log2(some)


@triton.jit
def _part(length, SHORTEST: tl.constexpr, MOST: tl.constexpr):
    """Into how long parts a sequence of this length is split: at most MOST parts, whole multiples of SHORTEST."""
    return tl.cdiv(tl.cdiv(length, MOST), SHORTEST) * SHORTEST


@triton.jit(do_not_specialize=["num_parts", "t0", "t1"])
def _decode(
    q, k_pages, v_pages, table, lengths, cu, k_scales, v_scales, slopes, o, parts, lse, G, K: tl.constexpr, scale,
    window, num_parts, q0, q1, q2, k0, k1, k2, k3, v0, v1, v2, v3, t0, t1, ks0, ks1, ks2, vs0, vs1, vs2,
    SHORTEST: tl.constexpr, MOST: tl.constexpr, HEADS: tl.constexpr, IS_SPLIT: tl.constexpr, IS_RAGGED: tl.constexpr,
    DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    b = tl.program_id(2).to(tl.int64)
    tiles = tl.cdiv(G, HEADS)
    j = (tl.program_id(1) // tiles).to(tl.int64)
    length = tl.load(lengths + b)
    token = b
    if IS_RAGGED:
        token = tl.load(cu + b).to(tl.int64)
        length = tl.where(tl.load(cu + b + 1) - token == 1, length, -1)
    num_keys = tl.minimum(length, window)
    part = _part(num_keys, SHORTEST, MOST)
    first = length - num_keys + tl.program_id(0) * part
    if (first < length) | ((length == 0) & (not IS_SPLIT)):
        last = tl.minimum(length, first + part)
        row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K).to(tl.int64)
        g = (tl.program_id(1) % tiles) * HEADS + row
        head = j * G + g
        mine = (row < HEADS) & (g < G)
        inside = mine[:, None] & (column < K)[None, :]
        at = token * q0 + head[:, None] * q1 + column[None, :] * q2
        rows = tl.load(q + at, mask=inside, other=0.0).to(DOT)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + head, mask=mine, other=0.0) * _LOG2E
        position = tl.zeros([BLOCK_M], tl.int32) + (length - 1).to(tl.int32)
        found, found_lse = _attend(
            rows, position, slope, first, first, last, window, table + b * t0, k_pages + j * k2, v_pages + j * v2,
            k_scales + j * ks2, v_scales + j * vs2, K, scale, t1, k0, k1, k3, v0, v1, v3, ks0, ks1, vs0, vs1,
            BLOCK_M, BLOCK_N, BLOCK_K, PAGE, HAS_SLOPES, HAS_SCALES, False, PRECISION,
        )  # fmt: skip
        num_heads = tl.num_programs(1) // tiles * G
        if IS_SPLIT:
            at = (b * num_parts + tl.program_id(0)) * num_heads + head
            tl.store(parts + at[:, None] * K + column[None, :], found, mask=inside)
            tl.store(lse + at, found_lse, mask=mine)
        else:
            tl.store(o + (token * num_heads + head[:, None]) * K + column[None, :], found, mask=inside)


@triton.jit(do_not_specialize=["num_parts"])
def _merge(
    parts, lse, lengths, cu, o, K, window, num_parts,
    SHORTEST: tl.constexpr, MOST: tl.constexpr, IS_RAGGED: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_K: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    head, num_heads = tl.program_id(0), tl.num_programs(0)
    b = tl.program_id(1).to(tl.int64)
    length = tl.load(lengths + b)
    token = b
    num_queries = 1
    if IS_RAGGED:
        token = tl.load(cu + b).to(tl.int64)
        num_queries = (tl.load(cu + b + 1) - token).to(tl.int32)
    if num_queries == 1:
        num_keys = tl.minimum(length, window)
        used = tl.cdiv(num_keys, tl.maximum(_part(num_keys, SHORTEST, MOST), 1))
        column = tl.arange(0, BLOCK_K)
        every = tl.arange(0, BLOCK_S)
        every = tl.load(lse + (b * num_parts + every) * num_heads + head, mask=every < used, other=float("-inf"))
        greatest = tl.max(every, 0)
        greatest = tl.where(used > 0, greatest, 0.0)
        total = tl.sum(tl.exp2(every - greatest), 0)
        merged = tl.zeros([BLOCK_K], tl.float32)
        for start in range(0, used, CHUNK):
            part = start + tl.arange(0, CHUNK)
            at = (b * num_parts + part) * num_heads + head
            weight = tl.exp2(tl.load(lse + at, mask=part < used, other=float("-inf")) - greatest)
            inside = (part < used)[:, None] & (column < K)[None, :]
            found = tl.load(parts + at[:, None] * K + column[None, :], mask=inside, other=0.0)
            merged += tl.sum(weight[:, None] * found, 0)
        merged = merged / tl.where(used > 0, total, 1.0)
        tl.store(o + (token * num_heads + head) * K + column, merged, mask=column < K)


@triton.jit
def _first_tile(cu, b, BLOCK_Q: tl.constexpr):
    """Number of sequence b's first tile of queries, when each sequence is given one tile more than its queries fill."""
    return tl.load(cu + b) // BLOCK_Q + b


@triton.jit(do_not_specialize=["num_sequences", "num_halvings", "t0", "t1"])
def _prefill(
    q, k_pages, v_pages, table, lengths, cu, k_scales, v_scales, slopes, o, G, K: tl.constexpr, scale, window,
    num_sequences, num_halvings, q0, q1, q2, k0, k1, k2, k3, v0, v1, v2, v3, t0, t1, ks0, ks1, ks2, vs0, vs1, vs2,
    HEADS: tl.constexpr, BLOCK_Q: tl.constexpr, DOT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PAGE: tl.constexpr,
    HAS_SLOPES: tl.constexpr, HAS_SCALES: tl.constexpr, HAS_WINDOW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    b, high = tile * 0, tile * 0 + num_sequences - 1
    for _ in range(num_halvings):  # the last sequence that does not begin behind this tile
        middle = (b + high + 1) // 2
        begun = _first_tile(cu, middle, BLOCK_Q) <= tile
        b = tl.where(begun, middle, b)
        high = tl.where(begun, high, middle - 1)
    length = tl.load(lengths + b).to(tl.int32)
    token = tl.load(cu + b).to(tl.int64)
    num_queries = (tl.load(cu + b + 1) - token).to(tl.int32)
    first_query = ((tile - _first_tile(cu, b, BLOCK_Q)) * BLOCK_Q).to(tl.int32)
    if (first_query < num_queries) & (num_queries > 1):  # one query: `_decode`
        tiles = tl.cdiv(G, HEADS)
        j = (tl.program_id(1) // tiles).to(tl.int64)
        row, column = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K).to(tl.int64)
        query = first_query + row // HEADS
        g = (tl.program_id(1) % tiles) * HEADS + row % HEADS
        head = j * G + g
        mine = (row < BLOCK_Q * HEADS) & (query < num_queries) & (g < G)
        inside = mine[:, None] & (column < K)[None, :]
        at = (token + query)[:, None] * q0 + head[:, None] * q1 + column[None, :] * q2
        rows = tl.load(q + at, mask=inside, other=0.0).to(DOT)
        slope = tl.zeros([BLOCK_M], tl.float32)
        if HAS_SLOPES:
            slope = tl.load(slopes + head, mask=mine, other=0.0) * _LOG2E
        position = tl.where(mine, length - num_queries + query, -1)
        last = tl.minimum(length, length - num_queries + first_query + BLOCK_Q)
        oldest = tl.maximum(length - num_queries + first_query - window + 1, 0)
        # Blocks begin where they would without a window, so that a result does not depend on how a prompt is cut.
        first = oldest // BLOCK_N * BLOCK_N
        found, _lse = _attend(
            rows, position, slope, first, oldest, last, window, table + b.to(tl.int64) * t0,
            k_pages + j * k2, v_pages + j * v2, k_scales + j * ks2, v_scales + j * vs2, K, scale, t1,
            k0, k1, k3, v0, v1, v3, ks0, ks1, vs0, vs1,
            BLOCK_M, BLOCK_N, BLOCK_K, PAGE, HAS_SLOPES, HAS_SCALES, HAS_WINDOW, PRECISION,
        )  # fmt: skip
        num_heads = tl.num_programs(1) // tiles * G
        at = ((token + query)[:, None] * num_heads + head[:, None]) * K + column[None, :]
        tl.store(o + at, found, mask=inside)


@triton.jit
def _write_row(x, pages, scales, page, place, j, column, inside, K, p0, p1, p2, p3, s0, s1, s2, QUANTIZE: tl.constexpr):
    if QUANTIZE:
        x = x.to(tl.float32)
        largest = tl.max(tl.abs(x), 1)
        scale = tl.where(largest > _SMALLEST_SCALED, largest * _PER_STEP, 1.0)
        tl.store(scales + page * s0 + place * s1 + j * s2, scale, mask=inside)
        x = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        x = (x + 12582912.0) - 12582912.0  # 1.5 * 2^23: what is behind the point is rounded off, halves to even
        x = tl.where(x == x, x, 0.0).to(tl.int8)  # as `quantized` has what is infinite
    at = (page * p0 + place * p1 + j * p2)[:, None] + column[None, :] * p3
    tl.store(pages + at, x.to(pages.dtype.element_ty), mask=inside[:, None] & (column < K)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _write_rows(
    k, v, k_pages, v_pages, slots, k_scales, v_scales, num_rows, J, K, PAGE: tl.constexpr,
    x0, x1, x2, y0, y1, y2, k0, k1, k2, k3, v0, v1, v2, v3, ks0, ks1, ks2, vs0, vs1, vs2,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, QUANTIZE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK_K).to(tl.int64)
    token, j = row // J, row % J
    slot = tl.load(slots + token, mask=row < num_rows, other=-1).to(tl.int64)
    inside = slot >= 0
    page, place = slot // PAGE, slot % PAGE
    loaded = inside[:, None] & (column < K)[None, :]
    x = tl.load(k + (token * x0 + j * x1)[:, None] + column[None, :] * x2, mask=loaded, other=0.0)
    _write_row(x, k_pages, k_scales, page, place, j, column, inside, K, k0, k1, k2, k3, ks0, ks1, ks2, QUANTIZE)
    y = tl.load(v + (token * y0 + j * y1)[:, None] + column[None, :] * y2, mask=loaded, other=0.0)
    _write_row(y, v_pages, v_scales, page, place, j, column, inside, K, v0, v1, v2, v3, vs0, vs1, vs2, QUANTIZE)


# --- operators --------------------------------------------------------------------------------------------------------


@operator("paged_attention")
def _forward(
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, lengths: Tensor, cu_query_lens: Tensor | None,
    k_scales: Tensor | None, v_scales: Tensor | None, slopes: Tensor | None, scale: float, window: int | None,
    max_length: int,
) -> Tensor:  # fmt: skip
    (T, H, K), (_, page_size, J, _) = q.shape, k_pages.shape
    B, G = lengths.shape[0], H // J
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dot, most = _dot_dtype(q, k_pages), _most_parts(J)
    seen = _EVERYTHING if window is None else min(window, _EVERYTHING)
    num_parts = max(1, min(most, triton.cdiv(min(max_length, seen), _SHORTEST_PART)))
    parts = torch.empty((B, num_parts, H, K) if num_parts > 1 else 0, dtype=torch.float32, device=q.device)
    lse = torch.empty((B, num_parts, H) if num_parts > 1 else 0, dtype=torch.float32, device=q.device)
    if not launches(q):
        return o
    lengths = lengths.contiguous()
    cu = lengths if cu_query_lens is None else cu_query_lens.contiguous()
    ks, vs = (q if s is None else s for s in (k_scales, v_scales))
    alibi = q if slopes is None else slopes.to(torch.float32).contiguous()
    strides = (
        *q.stride(), *k_pages.stride(), *v_pages.stride(), *page_table.stride(), *ks.stride()[:3], *vs.stride()[:3]
    )  # fmt: skip
    constants = {
        "DOT": _DOT_TYPE[dot], "PAGE": page_size, "BLOCK_K": max(16, triton.next_power_of_2(K)),
        "HAS_SLOPES": slopes is not None, "HAS_SCALES": k_scales is not None,
        "HAS_WINDOW": window is not None, "PRECISION": _precision(),
    }  # fmt: skip
    scale2 = scale * _LOG2E.value
    blocks = _decode_blocks(K, dot, k_scales is not None)
    heads = min(G, blocks["BLOCK_M"])
    split = {"SHORTEST": _SHORTEST_PART, "MOST": most, "IS_RAGGED": cu_query_lens is not None}
    key = (
        K,
        G,
        page_size,
        dot,
        k_pages.dtype,
        slopes is not None,
        window is not None,
    )  # of the model alone: bits are to be those of any batch

    def decode(blocks: Blocks) -> None:
        _decode[(num_parts, J * triton.cdiv(G, heads), B)](
            q, k_pages, v_pages, page_table, lengths, cu, ks, vs, alibi, o, parts, lse, G, K, scale2, seen,
            num_parts,
            *strides, HEADS=heads, IS_SPLIT=num_parts > 1, **split, **constants, **blocks,
        )  # fmt: skip

    tuned("paged_decode", key, blocks, decode, num_stages=(2, 3, 4), num_warps=(2, 4, 8))
    if num_parts > 1:
        _merge[(H, B)](
            parts, lse, lengths, cu, o, K, seen, num_parts, **split, BLOCK_S=triton.next_power_of_2(most),
            BLOCK_K=triton.next_power_of_2(K), CHUNK=min(32, triton.next_power_of_2(most)), num_warps=4,
        )  # fmt: skip
    if cu_query_lens is not None:
        blocks = _prefill_blocks(K, dot, k_scales is not None)
        heads = min(G, blocks["BLOCK_M"])
        num_queries = blocks["BLOCK_M"] // heads

        def prefill(blocks: Blocks) -> None:
            _prefill[(T // num_queries + B, J * triton.cdiv(G, heads))](
                q, k_pages, v_pages, page_table, lengths, cu, ks, vs, alibi, o, G, K, scale2, seen, B,
                B.bit_length(), *strides, HEADS=heads, BLOCK_Q=num_queries, **constants, **blocks,
            )  # fmt: skip

        tuned("paged_prefill", key, blocks, prefill, num_stages=(1, 2, 3), num_warps=(4, 8))
    return o


@operator("write_pages", mutates=("k_pages", "v_pages", "k_scales", "v_scales"))
def _write(
    k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, k_scales: Tensor | None,
    v_scales: Tensor | None,
) -> None:  # fmt: skip
    if launches(k):
        T, J, K = k.shape
        block = triton.next_power_of_2(K)
        rows = max(1, 1024 // block)
        ks, vs = (k if s is None else s for s in (k_scales, v_scales))
        _write_rows[(triton.cdiv(T * J, rows),)](
            k, v, k_pages, v_pages, slots.contiguous(), ks, vs, T * J, J, K, k_pages.shape[1],
            *k.stride(), *v.stride(), *k_pages.stride(), *v_pages.stride(), *ks.stride()[:3], *vs.stride()[:3],
            ROWS=rows, BLOCK_K=block, QUANTIZE=k_scales is not None,
        )  # fmt: skip


def _most_parts(num_kv_heads: int) -> int:
    """Into how many parts a sequence is split at most: one long sequence shall fill a GPU, many need little memory.

    A function of the model alone: were it one of the batch, results would depend on neighbours.
    """
    return min(128, max(8, triton.next_power_of_2(triton.cdiv(256, num_kv_heads))))


def _precision() -> str:
    """How products of fp32 are taken: exact unless torch was told otherwise, and where all chips of a kind can."""
    return "tf32" if torch.get_float32_matmul_precision() != "highest" and chip().startswith("sm_") else "ieee"


def _decode_blocks(head_size: int, dot: torch.dtype, has_scales: bool) -> Blocks:
    """16 rows are the fewest that a matrix product takes, and more heads than share a key/value head in most models."""
    if dot == torch.float32:  # multiplied by threads, out of registers
        keys = 32 if head_size <= 64 else 16
        return {"BLOCK_M": 16, "BLOCK_N": keys, "num_warps": 8 if has_scales else 4, "num_stages": 2}
    keys = 64 if head_size <= 128 else 32
    if chip().startswith("gfx"):  # loads in flight are held in registers
        keys, num_stages = (keys // 2, 1) if has_scales else (keys, 2)
        return {"BLOCK_M": 16, "BLOCK_N": keys, "num_warps": 4, "num_stages": num_stages}
    return {"BLOCK_M": 16, "BLOCK_N": keys, "num_warps": 4, "num_stages": 3}


def _prefill_blocks(head_size: int, dot: torch.dtype, has_scales: bool) -> Blocks:
    if dot == torch.float32:
        rows, keys = (32, 32 if head_size <= 64 else 16) if head_size <= 128 else (16, 16)
        warps = 16 if 64 < head_size <= 128 and chip().startswith("sm_") else 8  # by 8 a few registers are spilled
        return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": warps, "num_stages": 1}
    if chip().startswith("gfx"):
        return {"BLOCK_M": 64, "BLOCK_N": 16 if has_scales else 32, "num_warps": 8, "num_stages": 1}
    if head_size <= 64:
        return {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 2}
    if has_scales:  # int8 becomes 16 bits in registers
        return {"BLOCK_M": 64, "BLOCK_N": 32 if head_size <= 128 else 16, "num_warps": 8, "num_stages": 2}
    rows, keys = (128, 64) if head_size <= 128 else (64, 32)
    return {"BLOCK_M": rows, "BLOCK_N": keys, "num_warps": 8, "num_stages": 2}


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    """Sequence 0 has L tokens and Q queries, the others random numbers of both, or with `even` the same.

    What is not to be read is poison: pages of nobody, places behind a sequence's end, what a window hides from all of
    its queries, unused entries of the table.
    """
    B, L, Q, J, G, K, page_size = (case[name] for name in ("B", "L", "Q", "J", "G", "K", "page"))
    lengths = torch.randint(1, max(L, 1) + 1, (B,), generator=generator)
    lengths[: B if case.get("even") else 1] = L
    queries = torch.minimum(torch.randint(0, Q + 1, (B,), generator=generator), lengths)
    queries[: B if case.get("even") else 1] = min(Q, L)
    if case.get("empty"):
        lengths[-1] = 0
        queries[-1] = 1
    cu = torch.cat((torch.zeros(1, dtype=torch.int64), queries.cumsum(0))) if Q > 1 else None
    num_pages = -(-lengths // page_size)
    P, max_pages = int(num_pages.sum()) + 2, -(-L // page_size) + 1
    order, table, taken = torch.randperm(P, generator=generator), torch.full((B, max_pages), -1), 0
    for b, count in enumerate(num_pages.tolist()):
        table[b, :count] = order[taken : taken + count]
        taken += count
    firsts = lengths - (1 if cu is None else queries)
    oldest = (firsts + 1 - (case.get("window") or L + 1)).clamp(min=0).tolist()
    for b, first in enumerate(oldest):
        table[b, : first // page_size] = -1

    draw = drawing(torch.float32, device, generator)
    k, v = draw(P, page_size, J, K), draw(P, page_size, J, K)
    inputs = {
        "q": draw(B if cu is None else int(cu[-1]), J * G, K).to(dtype),
        "page_table": table.to(device, torch.int32),
        "lengths": lengths.to(device, torch.int32),
        "cu_query_lens": None if cu is None else cu.to(device, torch.int32),
        "slopes": torch.rand(J * G, generator=generator).to(device) if case.get("slopes") else None,
        "window": case.get("window"),
        "max_length": L if case.get("bounded") else None,
    }
    nobody = torch.ones(P * page_size, dtype=torch.bool)
    for b, (length, first) in enumerate(zip(lengths.tolist(), oldest)):
        at = torch.arange(first, length)
        nobody[table[b, at // page_size] * page_size + at % page_size] = False
    nobody = nobody.view(P, page_size).to(k.device)
    for name, x in (("k", k), ("v", v)):
        if case.get("int8"):
            pages, scales = quantized(x)
            inputs[f"{name}_scales"] = scales.masked_fill_(nobody[..., None], math.nan).to(device)
        else:
            pages = x.masked_fill_(nobody[..., None, None], math.nan).to(dtype)
        inputs[f"{name}_pages"] = pages.to(device)
    return inputs


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    B, L, Q, J, G, K = (case[name] for name in "BLQJGK")
    a_head = K + 4 if case.get("int8") else dtype.itemsize * K
    window = min(L, case.get("window") or L)
    visible = sum(min(L - Q + n + 1, window) for n in range(Q))
    read = min(L, window + Q - 1)
    return Traffic(2 * B * read * J * a_head + 2 * B * Q * J * G * K * dtype.itemsize, 0, 4 * B * visible * J * G * K)


def _write_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    T, J, K, P, page_size = (case[name] for name in ("T", "J", "K", "P", "page"))
    slots = torch.randperm(P * page_size, generator=generator)[:T]
    slots[torch.rand(T, generator=generator) < case.get("dropped", 0.0)] = -1
    draw = drawing(dtype, device, generator)
    k, v = draw(T, J, K), draw(T, J, K)
    if case.get("zero"):
        k[0] = 0
    inputs = {"k": k, "v": v, "slots": slots.to(device)}
    for name in "kv":
        inputs[f"{name}_pages"] = torch.full(
            (P, page_size, J, K), 7, device=device, dtype=torch.int8 if case.get("int8") else dtype
        )
        inputs[f"{name}_scales"] = torch.full((P, page_size, J), 0.5, device=device) if case.get("int8") else None
    return inputs


def _written(k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, **new: Tensor):
    return _copies(write_pages, (k_pages, v_pages, k_scales, v_scales), new)


def _written_reference(
    k_pages: Tensor, v_pages: Tensor, k_scales: Tensor | None, v_scales: Tensor | None, **new: Tensor
):
    return _copies(write_reference, (k_pages, v_pages, k_scales, v_scales), new)


def _copies(write, cache: tuple[Tensor | None, ...], new: dict[str, Tensor]) -> tuple[Tensor, ...]:
    """The copies that `write` makes of the cache."""
    k_pages, v_pages, k_scales, v_scales = copies = [None if x is None else x.clone() for x in cache]
    write(**new, k_pages=k_pages, v_pages=v_pages, k_scales=k_scales, v_scales=v_scales)
    return tuple(x for x in copies if x is not None)


def _write_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    rows, K = 2 * case["T"] * case["J"], case["K"]
    return Traffic(rows * (dtype.itemsize * K + (K + 4 if case.get("int8") else dtype.itemsize * K)))


SPECS = (
    KernelSpec(
        name="paged_attention",
        function=paged_attention,
        reference=reference,
        inputs=_inputs,
        cases=(
            {"B": 3, "L": 600, "Q": 1, "J": 2, "G": 2, "K": 64, "page": 16, "slopes": True},
            {"B": 3, "L": 100, "Q": 40, "J": 1, "G": 3, "K": 16, "page": 32, "slopes": True, "int8": True},
            {"B": 2, "L": 63, "Q": 63, "J": 2, "G": 1, "K": 20, "page": 5},
            {"B": 2, "L": 300, "Q": 1, "J": 1, "G": 18, "K": 32, "page": 7, "int8": True, "empty": True},
            {"B": 2, "L": 1000, "Q": 1, "J": 1, "G": 1, "K": 3, "page": 1000},
            {"B": 3, "L": 20, "Q": 2, "J": 1, "G": 2, "K": 8, "page": 16, "bounded": True, "empty": True},
            {"B": 3, "L": 900, "Q": 1, "J": 2, "G": 2, "K": 32, "page": 16, "window": 600},
            {"B": 3, "L": 90, "Q": 40, "J": 1, "G": 3, "K": 16, "page": 7, "window": 20, "slopes": True, "int8": True},
            {"B": 1, "L": 1, "Q": 1, "J": 1, "G": 1, "K": 1, "page": 1},
            {"B": 1, "L": 0, "Q": 0, "J": 2, "G": 2, "K": 8, "page": 16},
        ),
        space={"B": range(1, 4), "L": range(1, 80), "Q": range(1, 20), "J": range(1, 3), "G": range(1, 4),
               "K": range(1, 40), "page": range(1, 40), "slopes": (False, True), "int8": (False, True),
               "bounded": (False, True), "window": (None, 1, 5, 30)},
        timed=(
            {"B": 1, "L": 8192, "Q": 1, "J": 8, "G": 4, "K": 128, "page": 16, "even": True},
            {"B": 32, "L": 2048, "Q": 1, "J": 16, "G": 1, "K": 64, "page": 16, "even": True, "slopes": True},
            {"B": 32, "L": 2048, "Q": 1, "J": 8, "G": 4, "K": 128, "page": 16, "even": True, "int8": True},
            {"B": 4, "L": 2048, "Q": 512, "J": 8, "G": 4, "K": 128, "page": 16, "even": True, "bounded": True},
            {"B": 4, "L": 8192, "Q": 512, "J": 8, "G": 4, "K": 128, "page": 16, "even": True, "window": 4096},
        ),
        # Scores, sums and the merge are in fp32, and 2^s of a score of 10 has 10 times its rounding. In 16 bits the
        # probabilities are rounded before they meet the values, and the result is: 2^-11 each (fp16), 2^-8 (bf16), and
        # 2^-7 by the interpreter, which cuts bf16 off.
        tolerance={torch.float32: 3e-6, torch.bfloat16: 1.6e-2, torch.float16: 1e-3},
        traffic=_traffic,
        alone=("page_table", "lengths", "cu_query_lens"),
    ),
    KernelSpec(
        name="write_pages",
        function=_written,
        reference=_written_reference,
        inputs=_write_inputs,
        cases=(
            {"T": 7, "J": 2, "K": 64, "P": 3, "page": 16, "int8": True, "zero": True, "dropped": 0.3},
            {"T": 40, "J": 3, "K": 20, "P": 9, "page": 5, "dropped": 0.3},
            {"T": 1, "J": 1, "K": 1, "P": 1, "page": 1, "int8": True},
            {"T": 0, "J": 2, "K": 8, "P": 2, "page": 4},
        ),
        space={"T": range(1, 50), "J": range(1, 4), "K": range(1, 70), "P": range(5, 9), "page": range(10, 20),
               "int8": (False, True), "dropped": (0.0, 0.5)},
        timed=(
            {"T": 4096, "J": 8, "K": 128, "P": 1024, "page": 16},
            {"T": 4096, "J": 16, "K": 64, "P": 1024, "page": 16, "int8": True},
        ),
        # Copies are exact; a scale is one product in fp32, whose rounding fp64 does not have.
        tolerance={torch.float32: 1e-7, torch.bfloat16: 1e-7, torch.float16: 1e-7},
        traffic=_write_traffic,
        alone=("slots",),
        in_place=(write_pages, write_reference),
    ),
)  # fmt: skip
