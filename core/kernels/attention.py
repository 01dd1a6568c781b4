"""Flash attention, forward and backward: softmax(scale q k^T + bias) v, tile by tile (Dao et al. 2022; Dao 2023).

    s = scale q k^T + bias + slope (key position - query position),   -inf where a key is hidden
    lse = log sum_s exp s,   p = exp(s - lse),   o = p v
    delta = sum_k o do - dlse,   ds = p (do v^T - delta)
    dv = p^T do,   dk = scale ds^T q,   dq = scale ds k,   dbias = ds summed over the heads and sequences that share it

No matrix of L x S elements is in memory, but for a bias and its gradient. The forward goes over the keys once and keeps
the running maximum and sum of each query (Milakov and Gimelshein 2018). The backward computes p again, in up to four
kernels, of which none adds to memory that another program writes to, so that its results are the same each time:

1. delta, one number a query. A gradient for lse only shifts it, so ring attention may differentiate through its merge.
2. dk and dv by block of keys, over the query heads of its group and the queries that see it.
3. dq by block of queries.
4. dbias by tile, over the heads and sequences that share the bias; in a few parts, summed after, where tiles are few.

Visible keys are a band: -left <= key position - query position <= right. Blocks of keys outside of the band are not
visited, and those wholly inside are not compared with it. Scores are in units of log 2, where exponentials are exp2.

Shapes: B sequences, L queries, S keys, H query heads, J key/value heads, G = H / J, K head size; packed sequences have
T queries or keys in all. A query without a visible key has o = 0, lse = -inf and no gradient.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from core.compat import FakeTensor
from core.kernels import attention_loops
from core.kernels.blocks import Blocks, chip, tuned
from core.kernels.language import tl, triton
from core.kernels.operator import is_forced, launches, operator, runs_kernel, unsupported_dtype
from core.kernels.spec import Case, KernelSpec, Traffic, drawing
from core.kernels.torch_attention import torch_attention

MAX_HEAD_SIZE = 256
_EVERYTHING = 1 << 30
"""A window of more keys hides none; positions and distances have 32 bits in the kernels."""
LOG2E = tl.constexpr(math.log2(math.e))


def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None, offset: int | None = None,
    scale: float | None = None, bias: Tensor | None = None, mask: Tensor | None = None, slopes: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """softmax(scale q k^T + bias) v -> o[B, L, H, K]; gradients for q, k, v and bias.

    q[B, L, H, K], k and v[B, S, J, K] of one dtype; J divides H, and query head h takes key/value head h // G
    causal  keys after the query's position are hidden
    window  keys at a distance of `window` and more are hidden: on both sides, or before the query where causal
    offset  position of the first query, counted from the first key; None: S - L, the queries are the last ones
    scale   None: 1 / sqrt(K)
    bias    [B', H', L, S]; B' divides B, H' divides H. Each is shared by B / B' neighbours in the batch (H / H' heads)
    mask    [B, S], nonzero where a key is visible
    slopes  [H] of ALiBi: slope * (key position - query position) is added; constants

    Raises ValueError when shapes do not fit together. On a CPU this is torch's scaled_dot_product_attention, but in 16
    bits, for a gradient, `attention_loops` where that offers it, which has no second derivative.
    """
    _validate(q, k, v, window, bias, mask, slopes)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    offset = k.shape[1] - q.shape[1] if offset is None else offset
    plain = bias is None and mask is None and slopes is None
    if plain and window is None and offset == k.shape[1] - q.shape[1] and _library_is_faster(q, k, causal):
        return _dot_product(q, k, v, *_band(causal, window), offset, scale, bias, mask, slopes)
    if runs_kernel("attention", q, unless=_unsupported(q, bias)):
        return _forward(q, k, v, bias, mask, slopes, *_band(causal, window), offset, scale)[0]
    return _dot_product(q, k, v, *_band(causal, window), offset, scale, bias, mask, slopes)


def _library_is_faster(q: Tensor, k: Tensor, causal: bool) -> bool:
    """Return whether torch's operator has cuDNN's attention for Hopper, 1.5 times as fast as ours, backward 1.8 times.

    Measured on an H200 with torch 2.11 (benchmarks/results/gpu_b-kernels-h200.json), not where heads share keys. Its
    backward adds in any order, so that `torch.use_deterministic_algorithms` takes ours.
    """
    if not q.is_cuda or is_forced() or q.dtype not in (torch.bfloat16, torch.float16) or not _is_hopper():
        return False
    (L, H, K), (S, J) = q.shape[1:], k.shape[1:3]
    takes = H == J and K % 8 == 0 and K <= 128 and (L == S or not causal)
    return takes and not torch.are_deterministic_algorithms_enabled()


def _is_hopper() -> bool:
    return chip() == "sm_90"


# As torch.compiler.assume_constant_result marks it (see core.kernels.operator).
_is_hopper._dynamo_marked_constant = True  # pyright: ignore[reportFunctionMemberAccess]


def attention_with_lse(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None, offset: int | None = None,
    scale: float | None = None, bias: Tensor | None = None, mask: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention`, and the logarithm of each query's sum of exponentials, which has a gradient, too.

    Returns (o[B, L, H, K], lse fp32[B, H, L]; fp64 where q is). Parts over disjoint keys merge by their lse.
    """
    _validate(q, k, v, window, bias, mask, slopes)
    if runs_kernel("attention", q, unless=_unsupported(q, bias)):
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        offset = k.shape[1] - q.shape[1] if offset is None else offset
        return _forward(q, k, v, bias, mask, slopes, *_band(causal, window), offset, scale)
    return reference(
        q, k, v, causal=causal, window=window, offset=offset, scale=scale, bias=bias, mask=mask, slopes=slopes
    )


def attention_varlen(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, window: int | None = None, scale: float | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention of packed sequences of different lengths, each over its own keys -> (o[Tq, H, K], lse fp32[H, Tq]).

    q[Tq, H, K], k and v[Tk, J, K]: sequence b is rows cu_seqlens_q[b] to cu_seqlens_q[b + 1] of q, and alike for keys
    cu_seqlens  int32 or int64[B + 1], from 0 to Tq and to Tk
    max_seqlen  at least the longest sequence's length; what is longer is not computed
    The rest is as in `attention_with_lse`; queries are the last ones of their keys.

    Raises ValueError when shapes do not fit together.
    """
    _validate(q[None], k[None], v[None], window, None, None, slopes)
    if cu_seqlens_q.ndim != 1 or cu_seqlens_q.shape != cu_seqlens_k.shape or len(cu_seqlens_q) == 0:
        given = f"{list(cu_seqlens_q.shape)} and {list(cu_seqlens_k.shape)}"
        raise ValueError(f"attention: cu_seqlens_q and cu_seqlens_k are to be [sequences + 1], not {given}")
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if runs_kernel("attention_varlen", q, unless=_unsupported(q, None)):
        lengths = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return _varlen_forward(q, k, v, *lengths, slopes, *_band(causal, window), scale)
    return varlen_reference(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        causal=causal, window=window, scale=scale, slopes=slopes,
    )  # fmt: skip


def reference(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window: int | None = None, offset: int | None = None,
    scale: float | None = None, bias: Tensor | None = None, mask: Tensor | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_with_lse` by torch, with all the scores in memory."""
    wide = torch.promote_types(q.dtype, torch.float32)
    L, H, K = q.shape[1:]
    S, J = k.shape[1:3]
    scale = K**-0.5 if scale is None else scale
    offset = S - L if offset is None else offset
    q_BLJGK = q.to(wide).unflatten(2, (J, H // J))
    scores = torch.einsum("bljgk,bsjk->bjgls", q_BLJGK, k.to(wide)).flatten(1, 2) * scale
    added = _added(scores.shape, *_band(causal, window), offset, bias, mask, slopes, wide, q.device)
    if added is not None:
        scores = scores + added
    empty = (scores == -math.inf).all(-1, keepdim=True)
    scores = scores.masked_fill(empty, 0.0)
    lse_BHL = torch.logsumexp(scores, -1).masked_fill(empty[..., 0], -math.inf)
    p_BJGLS = torch.softmax(scores, -1).masked_fill(empty, 0.0).unflatten(1, (J, H // J))
    o = torch.einsum("bjgls,bsjk->bljgk", p_BJGLS, v.to(wide)).flatten(2, 3)
    return o.to(q.dtype), lse_BHL


def varlen_reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    *, causal: bool = False, window: int | None = None, scale: float | None = None, slopes: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`attention_varlen`, one sequence after another."""
    queries, keys = cu_seqlens_q.diff().tolist(), cu_seqlens_k.diff().tolist()
    parts = zip(q.split(queries), k.split(keys), v.split(keys))
    given = {"causal": causal, "window": window, "scale": scale, "slopes": slopes}
    outputs = [reference(q[None], k[None], v[None], **given) for q, k, v in parts]
    if not outputs:
        return reference(q[None], k[None], v[None], **given)[0][0], q.new_empty(q.shape[1], 0, dtype=torch.float32)
    return torch.cat([o[0] for o, _ in outputs]), torch.cat([lse[0] for _, lse in outputs], -1)


def _dot_product(
    q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None, offset: int, scale: float,
    bias: Tensor | None, mask: Tensor | None, slopes: Tensor | None,
) -> Tensor:  # fmt: skip
    """`attention` by torch's fused operator, what runs on a CPU."""
    B, L, H, _ = q.shape
    S = k.shape[1]
    causal = (left, right, offset, L) == (None, 0, 0, S) and bias is None and mask is None and slopes is None
    everything_seen = (left, right, slopes) == (None, None, None)
    if everything_seen and _records(q, k, v, bias) and attention_loops.offered(q, k, v, bias):
        return attention_loops.attend(q, k, v, scale, bias, mask)
    if _is_shared(bias, q, k, v, left, right, slopes):
        assert bias is not None
        return (_recorded if _records(q, k, v, bias) else _with_shared_bias)(q, k, v, scale, bias, mask)
    wide = torch.promote_types(q.dtype, torch.float32)
    added = None if causal else _added((B, H, L, S), left, right, offset, bias, mask, slopes, wide, q.device)
    empty = None
    if added is not None:
        empty = (added == -math.inf).all(-1, keepdim=True)
        added = added.masked_fill(empty, 0.0)
        if slopes is None:
            added = added.to(q.dtype)
    o_BHLK = _fused(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), added, causal, scale)
    return (o_BHLK if empty is None else o_BHLK.masked_fill(empty, 0.0)).transpose(1, 2)


def _fused(q_BHLK: Tensor, k_BJSK: Tensor, v_BJSK: Tensor, added: Tensor | None, causal: bool, scale: float) -> Tensor:
    if q_BHLK.is_meta and not torch.is_grad_enabled():
        # Torch would show the meta device a way with all scores in memory that a CPU does not take.
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q_BHLK, k_BJSK, v_BJSK, 0.0, causal, attn_mask=added, scale=scale
        )[0]
    grouped = q_BHLK.shape[1] != k_BJSK.shape[1]
    return torch_attention(q_BHLK, k_BJSK, v_BJSK, added, is_causal=causal, scale=scale, enable_gqa=grouped)


def _is_shared(
    bias: Tensor | None, q: Tensor, k: Tensor, v: Tensor, left: int | None, right: int | None, slopes: Tensor | None
) -> bool:
    """Return whether several sequences share a bias that, joined with the mask, need not be there for each of them."""
    if bias is None or slopes is not None or (left, right) != (None, None) or k.shape[1] == 0:
        return False
    if torch.compiler.is_compiling() or isinstance(q, FakeTensor):
        return False  # it looks into the mask
    if bias.shape[0] == q.shape[0] or bias.shape[1] not in (1, q.shape[2]):
        return False
    if not _records(q, k, v, bias):
        return True
    # In 16 bits scores would be rounded, which neither torch's operator nor attention_loops do; and keys that the bias
    # hides might leave a query without any.
    plain = q.dtype in (torch.float32, torch.float64) and not q.is_meta and k.shape[2] == q.shape[2]
    return plain and bias.requires_grad and not bool((bias == -math.inf).any())


def _records(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _recorded(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, mask: Tensor | None) -> Tensor:
    """`_dot_product` for a gradient, as plain as it goes, the bias added without a copy for each sequence.

    Where a bias wants a gradient, torch's operator keeps all scores, too, and goes over them a dozen times.
    """
    q_BHLK, k_BHSK, v_BHSK = ((t * scale if t is q else t).transpose(1, 2) for t in (q, k, v))
    scores_ABHLS = (q_BHLK @ k_BHSK.mT).unflatten(0, (bias.shape[0], -1)) + bias[:, None]
    if mask is None or bool(mask.all()):
        return (torch.softmax(scores_ABHLS.flatten(0, 1), -1) @ v_BHSK).transpose(1, 2)
    hidden_B11S = (mask == 0)[:, None, None]
    empty_B111 = hidden_B11S.all(-1, keepdim=True)
    scores_BHLS = scores_ABHLS.flatten(0, 1).masked_fill(hidden_B11S & ~empty_B111, -math.inf)
    return (torch.softmax(scores_BHLS, -1) @ v_BHSK).masked_fill(empty_B111, 0.0).transpose(1, 2)


def _with_shared_bias(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor, mask: Tensor | None) -> Tensor:
    """`_dot_product` without a gradient: mask and bias are joined once for all sequences of the same mask."""
    each = q.shape[0] // bias.shape[0]
    o_BHLK = None
    for first in range(0, q.shape[0], each):
        bias_1HLS = bias[first // each : first // each + 1].to(q.dtype)
        for rows, visible_S in _alike(mask, first, each):
            added = bias_1HLS if visible_S is None else torch.where(visible_S, bias_1HLS, -math.inf)
            empty = added.amax(-1, keepdim=True) == -math.inf
            some_empty = not empty.is_meta and bool(empty.any())
            if some_empty:
                added = added.masked_fill(empty, 0.0)
            q_, k_, v_ = (t[rows].transpose(1, 2) for t in (q, k, v))
            part = _fused(q_, k_, v_, added, False, scale)
            if some_empty:
                part.masked_fill_(empty, 0.0)
            del added
            if part.shape[0] == q.shape[0]:
                return part.transpose(1, 2)
            if o_BHLK is None:
                o_BHLK = part.new_empty(q.shape[0], *part.shape[1:])
            o_BHLK[rows] = part
    assert o_BHLK is not None
    return o_BHLK.transpose(1, 2)


def _alike(mask: Tensor | None, first: int, count: int) -> list[tuple[slice | Tensor, Tensor | None]]:
    """The sequences first.. with one mask, each with that mask [S]; None: every key is visible."""
    everything = slice(first, first + count)
    if mask is None:
        return [(everything, None)]
    visible = mask[everything] != 0
    if mask.is_meta:  # nothing can be asked: as if all were alike, and some key hidden
        return [(everything, visible[0])]
    if bool(visible.all()):
        return [(everything, None)]
    if bool((visible == visible[:1]).all()):
        return [(everything, visible[0])]
    masks, which = torch.unique(visible, dim=0, return_inverse=True)
    rows = (first + (which == number).nonzero()[:, 0] for number in range(len(masks)))
    return [(at, None if bool(one.all()) else one) for at, one in zip(rows, masks)]


def _added(
    shape: tuple[int, ...], left: int | None, right: int | None, offset: int, bias: Tensor | None, mask: Tensor | None,
    slopes: Tensor | None, dtype: torch.dtype, device: torch.device,
) -> Tensor | None:  # fmt: skip
    """The term that is added to scores of `shape` [B, H, L, S], broadcastable to it; None: nothing."""
    B, H, L, S = shape
    distance_LS = torch.arange(S, device=device) - torch.arange(offset, offset + L, device=device)[:, None]
    visible = torch.ones((), dtype=torch.bool, device=device)
    if left is not None:
        visible = visible & (distance_LS >= -left)
    if right is not None:
        visible = visible & (distance_LS <= right)
    if mask is not None:
        visible = visible & (mask != 0)[:, None, None, :]
    added = None
    if bias is not None:
        b, h = bias.shape[:2]
        added = bias.to(dtype)
        if b not in (1, B) or h not in (1, H):
            added = added[:, None, :, None].expand(-1, B // b, -1, H // h, -1, -1).reshape(B, H, L, S)
    if slopes is not None:
        alibi = slopes.to(dtype)[:, None, None] * distance_LS
        added = alibi if added is None else added + alibi
    if visible.ndim == 0:
        return added
    added = torch.zeros((), dtype=dtype, device=device) if added is None else added
    return torch.where(visible, added, -math.inf)


def _band(causal: bool, window: int | None) -> tuple[int | None, int | None]:
    """(left, right): how far before and after itself a query sees; None: to the end."""
    far = None if window is None or window > _EVERYTHING else window - 1
    return far, 0 if causal else far


def _validate(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, bias: Tensor | None, mask: Tensor | None, slopes: Tensor | None
) -> None:
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if (
        not q.ndim == k.ndim == v.ndim == 4
        or k.shape != v.shape
        or (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3])
    ):
        raise ValueError(f"attention: {shapes} are not [B, L, H, K] and twice [B, S, J, K] (packed ones without the B)")
    (B, L, H, K), (S, J) = q.shape, k.shape[1:3]
    if J == 0 or K == 0 or H % J:
        raise ValueError(f"attention: {J} key/value heads do not divide {H} query heads: {shapes}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"attention: q, k and v are to have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}")
    if window is not None and window < 1:
        raise ValueError(f"attention: a window of {window} shows nothing; it counts the query's own position, too")
    if bias is not None:
        divides = bias.ndim == 4 and all(n > 0 and of % n == 0 for n, of in zip(bias.shape[:2], (B, H)))
        if not divides or bias.shape[2:] != (L, S):
            raise ValueError(f"attention: bias {list(bias.shape)} does not broadcast to [{B}, {H}, {L}, {S}]")
    if mask is not None and mask.shape != (B, S):
        raise ValueError(f"attention: mask {list(mask.shape)} is not [{B}, {S}], one element a key")
    if slopes is not None and slopes.shape != (H,):
        raise ValueError(f"attention: slopes {list(slopes.shape)} are not [{H}], one a query head")


def _unsupported(q: Tensor, bias: Tensor | None) -> str | None:
    if q.shape[-1] > MAX_HEAD_SIZE:
        return f"the kernel takes heads of at most {MAX_HEAD_SIZE} elements"
    return unsupported_dtype(q, bias)


# --- kernels ----------------------------------------------------------------------------------------------------------


@triton.jit
def _sequence(batch, cu_q, cu_k, L, S, offset):
    """(row of the first query, row of the first key, queries, keys, position of the first query) of a sequence."""
    q_first, k_first = 0, 0
    if cu_q is not None:
        q_first, k_first = tl.load(cu_q + batch).to(tl.int64), tl.load(cu_k + batch).to(tl.int64)
        L = (tl.load(cu_q + batch + 1) - q_first).to(tl.int32)
        S = (tl.load(cu_k + batch + 1) - k_first).to(tl.int32)
        offset = S - L
    return q_first, k_first, L, S, offset


@triton.jit
def _tile(base, start, rows, strides, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr):
    """[BLOCK, BLOCK_K] from row `start` on; zeros from column K on and, at an EDGE, from row `rows` on."""
    row, column = tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_K)[None, :]
    at = base + tl.cast(start, tl.int64) * strides[1] + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[3]
    if EDGE:
        tile = tl.load(at, mask=(start + row < rows) & (column < K), other=0.0)
    elif K != BLOCK_K:
        tile = tl.load(at, mask=(row >= 0) & (column < K), other=0.0)
    else:
        tile = tl.load(at)
    return tile


@triton.jit
def _put(base, tile, start, rows, strides, K: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr):
    row, column = start + tl.arange(0, BLOCK)[:, None], tl.arange(0, BLOCK_K)[None, :]
    at = base + row.to(tl.int64) * strides[1] + column.to(tl.int64) * strides[3]
    tl.store(at, tile.to(base.dtype.element_ty), mask=(row < rows) & (column < K))


@triton.jit
def _span(first, own, length, offset, left, right, OWN: tl.constexpr, BLOCK: tl.constexpr):
    """The blocks that the rows first..first + OWN of `own` ones see of `length` columns, in blocks.

    Row r sees column c where -left <= c - (r + offset) <= right. Returns (begin, inner, outer, end): blocks of
    begin..inner and outer..end have to be compared with the band and the edges, those of inner..outer are seen whole.
    """
    last = tl.minimum(first + OWN, own) - 1
    begin, inner, outer, end = first * 0, first * 0, first * 0 + length, first * 0 + length
    if right is not None:
        end = tl.minimum(tl.maximum(last + offset + right + 1, 0), length)
        outer = tl.minimum(tl.maximum(first + offset + right + 1, 0), length)
    if left is not None:
        begin = tl.minimum(tl.maximum(first + offset - left, 0), end) // BLOCK * BLOCK
        inner = (tl.maximum(last + offset - left, 0) + BLOCK - 1) // BLOCK * BLOCK
    outer = tl.where(first + OWN > own, 0, outer // BLOCK * BLOCK)
    outer = tl.maximum(outer, begin)
    inner = tl.minimum(tl.maximum(inner, begin), outer)
    return begin, inner, outer, end


@triton.jit
def _scores(
    qk, row, column, L, S, offset, left, right, scale, bias, bias_strides, mask, mask_strides, slope, EDGE: tl.constexpr
):
    """Scores in units of log 2; row and column are of shapes that broadcast to qk's, so it may be transposed."""
    s = qk * (scale * LOG2E)
    if bias is not None:
        at = bias + row.to(tl.int64) * bias_strides[2] + column.to(tl.int64) * bias_strides[3]
        if EDGE:
            s += tl.load(at, mask=(row < L) & (column < S), other=0.0).to(tl.float32) * LOG2E
        else:
            s += tl.load(at).to(tl.float32) * LOG2E
    distance = column - (row + offset)
    if slope is not None:
        s += distance.to(tl.float32) * (slope * LOG2E)
    if mask is not None:
        if EDGE:
            seen = tl.load(mask + column.to(tl.int64) * mask_strides[1], mask=column < S, other=0)
        else:
            seen = tl.load(mask + column.to(tl.int64) * mask_strides[1])
        s = tl.where(seen != 0, s, float("-inf"))
    if EDGE:
        visible = (column < S) & (row < L)
        if left is not None:
            visible = visible & (distance >= -left)
        if right is not None:
            visible = visible & (distance <= right)
        s = tl.where(visible, s, float("-inf"))
    return s


@triton.jit
def _shared_at(batch, head, strides, sharing):
    """Where the bias of one head of one sequence begins."""
    return (batch // sharing[0]) * strides[0] + (head // sharing[1]) * strides[1]


@triton.jit
def _forward_span(
    acc, total, top, q_tile, k, v, begin, end, start_m, L, S, offset, left, right, scale, bias, mask, slope,
    k_strides, v_strides, bias_strides, mask_strides, K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    row = start_m + tl.arange(0, BLOCK_M)[:, None]
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)[None, :]
        k_tile = _tile(k, start, S, k_strides, K, BLOCK_N, BLOCK_K, EDGE)
        qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        s = _scores(
            qk, row, column, L, S, offset, left, right, scale, bias, bias_strides, mask, mask_strides, slope, EDGE
        )
        top_now = tl.maximum(top, tl.max(s, 1))
        shift = tl.where(top_now == float("-inf"), 0.0, top_now)  # nothing seen yet: -inf minus itself is NaN
        p = tl.exp2(s - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(p, 1)
        v_tile = _tile(v, start, S, v_strides, K, BLOCK_N, BLOCK_K, EDGE)
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * shrink[:, None], input_precision=PRECISION)
        top = top_now
    return acc, total, top


@triton.jit
def _attention_forward(
    q, k, v, bias, mask, slopes, cu_q, cu_k, o, lse, num_heads, group, L, S, offset, left, right, scale, sharing,
    q_strides, k_strides, v_strides, o_strides, lse_strides, bias_strides, mask_strides,
    K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head, over all the keys that they see."""
    num_blocks = tl.cdiv(L, BLOCK_M)
    index = tl.program_id(0) // num_blocks
    batch, head = (index // num_heads).to(tl.int64), (index % num_heads).to(tl.int64)
    start_m = (num_blocks - 1 - tl.program_id(0) % num_blocks) * BLOCK_M  # those with the most keys go first
    q_first, k_first, L, S, offset = _sequence(batch, cu_q, cu_k, L, S, offset)
    if start_m >= L:
        return
    q += batch * q_strides[0] + q_first * q_strides[1] + head * q_strides[2]
    k += batch * k_strides[0] + k_first * k_strides[1] + head // group * k_strides[2]
    v += batch * v_strides[0] + k_first * v_strides[1] + head // group * v_strides[2]
    if bias is not None:
        bias += _shared_at(batch, head, bias_strides, sharing)
    if mask is not None:
        mask += batch * mask_strides[0]
    slope = slopes  # no function returns it: Triton 3.6 returns no None
    if slopes is not None:
        slope = tl.load(slopes + head)

    q_tile = _tile(q, start_m, L, q_strides, K, BLOCK_M, BLOCK_K, True)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    begin, inner, outer, end = _span(start_m, L, S, offset, left, right, BLOCK_M, BLOCK_N)
    if left is not None:
        acc, total, top = _forward_span(
            acc, total, top, q_tile, k, v, begin, inner, start_m, L, S, offset, left, right, scale, bias, mask, slope,
            k_strides, v_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, True,
        )  # fmt: skip
    acc, total, top = _forward_span(
        acc, total, top, q_tile, k, v, inner, outer, start_m, L, S, offset, left, right, scale, bias, mask, slope,
        k_strides, v_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, False,
    )  # fmt: skip
    acc, total, top = _forward_span(
        acc, total, top, q_tile, k, v, outer, end, start_m, L, S, offset, left, right, scale, bias, mask, slope,
        k_strides, v_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, True,
    )  # fmt: skip

    seen = total > 0
    acc = acc / tl.where(seen, total, 1.0)[:, None]
    o += batch * o_strides[0] + q_first * o_strides[1] + head * o_strides[2]
    _put(o, acc, start_m, L, o_strides, K, BLOCK_M, BLOCK_K)
    row = start_m + tl.arange(0, BLOCK_M)
    total = tl.where(seen, (top + tl.log2(tl.where(seen, total, 1.0))) / LOG2E, float("-inf"))
    tl.store(lse + batch * lse_strides[0] + head * lse_strides[1] + q_first + row, total, mask=row < L)


@triton.jit
def _attention_delta(
    o, do, dlse, delta, num_heads, L, o_strides, do_strides, dlse_strides, delta_strides,
    K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """delta = sum_k o do - dlse. Packed sequences are one sequence here."""
    num_blocks = tl.cdiv(L, BLOCK_M)
    index = tl.program_id(0) // num_blocks
    batch, head = (index // num_heads).to(tl.int64), (index % num_heads).to(tl.int64)
    start = tl.program_id(0) % num_blocks * BLOCK_M
    row = start + tl.arange(0, BLOCK_M)
    o += batch * o_strides[0] + head * o_strides[2]
    do += batch * do_strides[0] + head * do_strides[2]
    o_tile = _tile(o, start, L, o_strides, K, BLOCK_M, BLOCK_K, True).to(tl.float32)
    do_tile = _tile(do, start, L, do_strides, K, BLOCK_M, BLOCK_K, True).to(tl.float32)
    total = tl.sum(o_tile * do_tile, 1)
    if dlse is not None:
        at = dlse + batch * dlse_strides[0] + head * dlse_strides[1] + row.to(tl.int64) * dlse_strides[2]
        total -= tl.load(at, mask=row < L, other=0.0)
    tl.store(delta + batch * delta_strides[0] + head * delta_strides[1] + row, total, mask=row < L)


@triton.jit
def _of_queries(lse, delta, start, L, BLOCK: tl.constexpr):
    """(lse in units of log 2, delta) of a block of queries; a lse of inf, so p = 0, for those that see nothing."""
    row = start + tl.arange(0, BLOCK)
    total = tl.load(lse + row, mask=row < L, other=float("inf"))
    total = tl.where(total == float("-inf"), float("inf"), total) * LOG2E
    return total, tl.load(delta + row, mask=row < L, other=0.0)


@triton.jit
def _dkdv_span(
    dk, dv, k_tile, v_tile, q, do, lse, delta, begin, end, start_n, L, S, offset, left, right, scale, bias, mask, slope,
    q_strides, do_strides, bias_strides, mask_strides, K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Scores are transposed, [BLOCK_N, BLOCK_M], as the products with p and ds take them.

    Every block is compared with the band: a second loop without it costs more registers than it saves time.
    """
    column = start_n + tl.arange(0, BLOCK_N)[:, None]
    for start in range(begin, end, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)[None, :]
        q_tile = _tile(q, start, L, q_strides, K, BLOCK_M, BLOCK_K, True)
        lse_M, delta_M = _of_queries(lse, delta, start, L, BLOCK_M)
        kq = tl.dot(k_tile, q_tile.T, input_precision=PRECISION)
        s = _scores(
            kq, row, column, L, S, offset, left, right, scale, bias, bias_strides, mask, mask_strides, slope, True
        )
        p = tl.exp2(s - lse_M[None, :])
        do_tile = _tile(do, start, L, do_strides, K, BLOCK_M, BLOCK_K, True).to(k_tile.dtype)
        dv = tl.dot(p.to(k_tile.dtype), do_tile, dv, input_precision=PRECISION)
        dp = tl.dot(v_tile, do_tile.T, input_precision=PRECISION)
        ds = p * (dp - delta_M[None, :])
        dk = tl.dot(ds.to(k_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _attention_dkdv(
    q, k, v, bias, mask, slopes, cu_q, cu_k, do, lse, delta, dk, dv, num_heads, group, L, S, offset, left, right, scale,
    sharing, q_strides, k_strides, v_strides, do_strides, lse_strides, dk_strides, bias_strides, mask_strides,
    K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a block of keys of one key/value head, over all the queries that see them."""
    num_blocks, num_kv_heads = tl.cdiv(S, BLOCK_N), num_heads // group
    index = tl.program_id(0) // num_blocks
    batch, kv_head = (index // num_kv_heads).to(tl.int64), (index % num_kv_heads).to(tl.int64)
    start_n = tl.program_id(0) % num_blocks * BLOCK_N
    q_first, k_first, L, S, offset = _sequence(batch, cu_q, cu_k, L, S, offset)
    if start_n >= S:
        return
    k += batch * k_strides[0] + k_first * k_strides[1] + kv_head * k_strides[2]
    v += batch * v_strides[0] + k_first * v_strides[1] + kv_head * v_strides[2]
    q += batch * q_strides[0] + q_first * q_strides[1]
    do += batch * do_strides[0] + q_first * do_strides[1]
    lse += batch * lse_strides[0] + q_first
    delta += batch * lse_strides[0] + q_first

    k_tile = _tile(k, start_n, S, k_strides, K, BLOCK_N, BLOCK_K, True)
    v_tile = _tile(v, start_n, S, v_strides, K, BLOCK_N, BLOCK_K, True)
    dk_tile = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    dv_tile = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)
    begin, _, _, end = _span(start_n, S, L, -offset, right, left, BLOCK_N, BLOCK_M)
    for member in range(group):
        head = kv_head * group + member
        q_head, do_head = q + head * q_strides[2], do + head * do_strides[2]
        lse_head, delta_head = lse + head * lse_strides[1], delta + head * lse_strides[1]
        bias_head = bias
        if bias is not None:
            bias_head = bias + _shared_at(batch, head, bias_strides, sharing)
        mask_head = mask
        if mask is not None:
            mask_head = mask + batch * mask_strides[0]
        slope = slopes
        if slopes is not None:
            slope = tl.load(slopes + head)
        dk_tile, dv_tile = _dkdv_span(
            dk_tile, dv_tile, k_tile, v_tile, q_head, do_head, lse_head, delta_head, begin, end, start_n,
            L, S, offset, left, right, scale, bias_head, mask_head, slope,
            q_strides, do_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip

    offset_out = batch * dk_strides[0] + k_first * dk_strides[1] + kv_head * dk_strides[2]
    _put(dk + offset_out, dk_tile * scale, start_n, S, dk_strides, K, BLOCK_N, BLOCK_K)
    _put(dv + offset_out, dv_tile, start_n, S, dk_strides, K, BLOCK_N, BLOCK_K)


@triton.jit
def _dq_span(
    dq, q_tile, do_tile, lse_M, delta_M, k, v, begin, end, start_m, L, S, offset, left, right, scale, bias, mask, slope,
    k_strides, v_strides, bias_strides, mask_strides, K: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    row = start_m + tl.arange(0, BLOCK_M)[:, None]
    for start in range(begin, end, BLOCK_N):
        column = start + tl.arange(0, BLOCK_N)[None, :]
        k_tile = _tile(k, start, S, k_strides, K, BLOCK_N, BLOCK_K, EDGE)
        v_tile = _tile(v, start, S, v_strides, K, BLOCK_N, BLOCK_K, EDGE)
        qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        s = _scores(
            qk, row, column, L, S, offset, left, right, scale, bias, bias_strides, mask, mask_strides, slope, EDGE
        )
        p = tl.exp2(s - lse_M[:, None])
        dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
        ds = p * (dp - delta_M[:, None])
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit
def _attention_dq(
    q, k, v, bias, mask, slopes, cu_q, cu_k, do, lse, delta, dq, num_heads, group, L, S, offset, left, right, scale,
    sharing, q_strides, k_strides, v_strides, do_strides, lse_strides, dq_strides, bias_strides, mask_strides,
    K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a block of queries of one head, over all the keys that they see."""
    num_blocks = tl.cdiv(L, BLOCK_M)
    index = tl.program_id(0) // num_blocks
    batch, head = (index // num_heads).to(tl.int64), (index % num_heads).to(tl.int64)
    start_m = (num_blocks - 1 - tl.program_id(0) % num_blocks) * BLOCK_M
    q_first, k_first, L, S, offset = _sequence(batch, cu_q, cu_k, L, S, offset)
    if start_m >= L:
        return
    q += batch * q_strides[0] + q_first * q_strides[1] + head * q_strides[2]
    do += batch * do_strides[0] + q_first * do_strides[1] + head * do_strides[2]
    k += batch * k_strides[0] + k_first * k_strides[1] + head // group * k_strides[2]
    v += batch * v_strides[0] + k_first * v_strides[1] + head // group * v_strides[2]
    lse += batch * lse_strides[0] + head * lse_strides[1] + q_first
    delta += batch * lse_strides[0] + head * lse_strides[1] + q_first
    if bias is not None:
        bias += _shared_at(batch, head, bias_strides, sharing)
    if mask is not None:
        mask += batch * mask_strides[0]
    slope = slopes  # no function returns it: Triton 3.6 returns no None
    if slopes is not None:
        slope = tl.load(slopes + head)

    q_tile = _tile(q, start_m, L, q_strides, K, BLOCK_M, BLOCK_K, True)
    do_tile = _tile(do, start_m, L, do_strides, K, BLOCK_M, BLOCK_K, True).to(q_tile.dtype)
    lse_M, delta_M = _of_queries(lse, delta, start_m, L, BLOCK_M)
    acc = tl.zeros((BLOCK_M, BLOCK_K), tl.float32)
    begin, inner, outer, end = _span(start_m, L, S, offset, left, right, BLOCK_M, BLOCK_N)
    if left is not None:
        acc = _dq_span(
            acc, q_tile, do_tile, lse_M, delta_M, k, v, begin, inner, start_m,
            L, S, offset, left, right, scale, bias, mask, slope,
            k_strides, v_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, True,
        )  # fmt: skip
    acc = _dq_span(
        acc, q_tile, do_tile, lse_M, delta_M, k, v, inner, outer, start_m,
        L, S, offset, left, right, scale, bias, mask, slope,
        k_strides, v_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, False,
    )  # fmt: skip
    acc = _dq_span(
        acc, q_tile, do_tile, lse_M, delta_M, k, v, outer, end, start_m,
        L, S, offset, left, right, scale, bias, mask, slope,
        k_strides, v_strides, bias_strides, mask_strides, K, PRECISION, BLOCK_M, BLOCK_N, BLOCK_K, True,
    )  # fmt: skip
    dq += batch * dq_strides[0] + q_first * dq_strides[1] + head * dq_strides[2]
    _put(dq, acc * scale, start_m, L, dq_strides, K, BLOCK_M, BLOCK_K)


@triton.jit
def _attention_dbias(
    q, k, v, bias, mask, slopes, do, lse, delta, dbias, group, L, S, offset, left, right, scale, sharing, sizes,
    q_strides, k_strides, v_strides, do_strides, lse_strides, bias_strides, mask_strides,
    K: tl.constexpr, PRECISION: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One program: a tile of one bias, over one part of the (sequence, head) that share it.

    sizes  (bias sequences, bias heads, parts); dbias[parts, bias sequences, bias heads, L, S] is contiguous
    """
    num_m, num_n = tl.cdiv(L, BLOCK_M), tl.cdiv(S, BLOCK_N)
    index = tl.program_id(0)
    start_n, index = index % num_n * BLOCK_N, index // num_n
    start_m, index = index % num_m * BLOCK_M, index // num_m
    dbias += index.to(tl.int64) * L * S
    bias_head, index = index % sizes[1], index // sizes[1]
    bias_batch, part = index % sizes[0], index // sizes[0]

    count = sharing[0] * sharing[1]
    each = tl.cdiv(count, sizes[2])
    begin, end = part * each, tl.minimum((part + 1) * each, count)
    if left is not None:  # the last key is too far before the first query
        end = tl.where(start_n + BLOCK_N - 1 - (start_m + offset) < -left, begin, end)
    if right is not None:  # the first key is too far after the last query
        end = tl.where(start_n - (start_m + BLOCK_M - 1 + offset) > right, begin, end)

    row, column = start_m + tl.arange(0, BLOCK_M)[:, None], start_n + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for member in range(begin, end):
        batch = tl.cast(bias_batch * sharing[0] + member // sharing[1], tl.int64)
        head = tl.cast(bias_head * sharing[1] + member % sharing[1], tl.int64)
        bias_at = bias
        if bias is not None:
            bias_at = bias + _shared_at(batch, head, bias_strides, sharing)
        mask_at = mask
        if mask is not None:
            mask_at = mask + batch * mask_strides[0]
        slope = slopes
        if slopes is not None:
            slope = tl.load(slopes + head)
        q_at, do_at = batch * q_strides[0] + head * q_strides[2], batch * do_strides[0] + head * do_strides[2]
        k_at = batch * k_strides[0] + head // group * k_strides[2]
        v_at = batch * v_strides[0] + head // group * v_strides[2]
        lse_at = batch * lse_strides[0] + head * lse_strides[1]
        q_tile = _tile(q + q_at, start_m, L, q_strides, K, BLOCK_M, BLOCK_K, True)
        k_tile = _tile(k + k_at, start_n, S, k_strides, K, BLOCK_N, BLOCK_K, True)
        lse_M, delta_M = _of_queries(lse + lse_at, delta + lse_at, start_m, L, BLOCK_M)
        qk = tl.dot(q_tile, k_tile.T, input_precision=PRECISION)
        s = _scores(
            qk, row, column, L, S, offset, left, right, scale, bias_at, bias_strides, mask_at, mask_strides, slope, True
        )
        p = tl.exp2(s - lse_M[:, None])
        do_tile = _tile(do + do_at, start_m, L, do_strides, K, BLOCK_M, BLOCK_K, True).to(k_tile.dtype)
        v_tile = _tile(v + v_at, start_n, S, v_strides, K, BLOCK_N, BLOCK_K, True)
        dp = tl.dot(do_tile, v_tile.T, input_precision=PRECISION)
        acc += p * (dp - delta_M[:, None])
    at = dbias + row.to(tl.int64) * S + column
    tl.store(at, acc.to(dbias.dtype.element_ty), mask=(row < L) & (column < S))


# --- operators --------------------------------------------------------------------------------------------------------


@operator("attention_forward")
def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, slopes: Tensor | None,
    left: int | None, right: int | None, offset: int, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    B, L, H, _ = q.shape
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((B, H, L), dtype=torch.float32, device=q.device)
    if launches(q):
        _launch_forward(q, k, v, bias, mask, slopes, None, None, o, lse, B, L, k.shape[1], left, right, offset, scale)
    return o, lse


@operator("attention_backward")
def _backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    slopes: Tensor | None, o: Tensor, lse: Tensor, left: int | None, right: int | None, offset: int, scale: float,
    with_dbias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv, dbias); dbias has no elements unless it is asked for."""
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if launches(q) or launches(k):
        B, L, S = q.shape[0], q.shape[1], k.shape[1]
        delta = _delta(o, do, dlse, lse)
        common = q, k, v, bias, mask, slopes, None, None, do, lse, delta
        _launch_backward(*common, dq, dk, dv, B, L, S, left, right, offset, scale)
    else:
        delta = torch.empty_like(lse)
    if bias is None or not with_dbias:
        return dq, dk, dv, q.new_empty(0)
    dbias = _launch_dbias(q, k, v, bias, mask, slopes, do, lse, delta, left, right, offset, scale)
    return dq, dk, dv, dbias


@operator("attention_varlen_forward")
def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int, slopes: Tensor | None,
    left: int | None, right: int | None, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[0]), dtype=torch.float32, device=q.device)
    B = len(cu_q) - 1
    if launches(q) and B and max_q:
        _launch_forward(q, k, v, None, None, slopes, cu_q, cu_k, o, lse, B, max_q, max_k, left, right, 0, scale)
    return o, lse


@operator("attention_varlen_backward")
def _varlen_backward(
    do: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
    max_k: int, slopes: Tensor | None, o: Tensor, lse: Tensor, left: int | None, right: int | None, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    if launches(q) or launches(k):
        delta = _delta(o, do, dlse, lse)
        common = q, k, v, None, None, slopes, cu_q, cu_k, do, lse, delta
        _launch_backward(*common, dq, dk, dv, len(cu_q) - 1, max_q, max_k, left, right, 0, scale)
    return dq, dk, dv


def _setup(ctx, inputs, output) -> None:
    q, k, v, bias, mask, slopes, *ctx.constants = inputs
    ctx.save_for_backward(q, k, v, bias, mask, slopes, *output)
    ctx.set_materialize_grads(False)


def _gradients(ctx, do: Tensor | None, dlse: Tensor | None):
    *inputs, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    with_dbias = ctx.needs_input_grad[3]
    dq, dk, dv, dbias = _backward(do, dlse, *inputs, o, lse, *ctx.constants, with_dbias)
    return dq, dk, dv, dbias if with_dbias else None, None, None, None, None, None, None


def _varlen_setup(ctx, inputs, output) -> None:
    q, k, v, cu_q, cu_k, max_q, max_k, slopes, *ctx.constants = inputs
    ctx.longest = max_q, max_k
    ctx.save_for_backward(q, k, v, cu_q, cu_k, slopes, *output)
    ctx.set_materialize_grads(False)


def _varlen_gradients(ctx, do: Tensor | None, dlse: Tensor | None):
    *inputs, slopes, o, lse = ctx.saved_tensors
    do = torch.zeros_like(o) if do is None else do
    dq, dk, dv = _varlen_backward(do, dlse, *inputs, *ctx.longest, slopes, o, lse, *ctx.constants)
    return dq, dk, dv, *[None] * 8


_forward.register_autograd(_gradients, setup_context=_setup)
_varlen_forward.register_autograd(_varlen_gradients, setup_context=_varlen_setup)


def _launch_forward(q, k, v, bias, mask, slopes, cu_q, cu_k, o, lse, B, L, S, left, right, offset, scale) -> None:
    H, K = q.shape[-2:]
    mask, slopes = _bytes(mask), _floats(slopes)

    def run(blocks: Blocks) -> None:
        _attention_forward[(triton.cdiv(L, blocks["BLOCK_M"]) * B * H,)](
            q, k, v, bias, mask, slopes, cu_q, cu_k, o, lse, H, H // k.shape[-2], L, S, offset, left, right, scale,
            _sharing(bias, B, H), _strides(q), _strides(k), _strides(v), _strides(o), _lse_strides(lse),
            _strides(bias), _mask_strides(mask), K=K, PRECISION=_precision(q), BLOCK_K=_padded(K), **blocks,
        )  # fmt: skip

    _run("forward", q, L, S, bias, run)


def _delta(o: Tensor, do: Tensor, dlse: Tensor | None, lse: Tensor) -> Tensor:
    delta = torch.empty_like(lse)
    if launches(o):
        H, K = o.shape[-2:]
        L = lse.shape[-1]
        B = o.numel() // (L * H * K)
        dlse_strides = None if dlse is None else (*[0] * (3 - dlse.ndim), *dlse.stride())
        rows = max(16, 4096 // _padded(K))
        _attention_delta[(triton.cdiv(L, rows) * B * H,)](
            o, do, dlse, delta, H, L, _strides(o), _strides(do), dlse_strides, _lse_strides(delta),
            K=K, BLOCK_M=rows, BLOCK_K=_padded(K),
        )  # fmt: skip
    return delta


def _launch_backward(
    q, k, v, bias, mask, slopes, cu_q, cu_k, do, lse, delta, dq, dk, dv, B, L, S, left, right, offset, scale
) -> None:
    H, K = q.shape[-2:]
    J = k.shape[-2]
    mask, slopes = _bytes(mask), _floats(slopes)
    inputs = q, k, v, bias, mask, slopes, cu_q, cu_k, do, lse, delta
    sizes = H, H // J, L, S, offset, left, right, scale, _sharing(bias, B, H)
    strides = _strides(q), _strides(k), _strides(v), _strides(do), _lse_strides(lse)
    added = _strides(bias), _mask_strides(mask)
    fixed = {"K": K, "PRECISION": _precision(q), "BLOCK_K": _padded(K)}

    def run_dkdv(blocks: Blocks) -> None:
        grid = (triton.cdiv(S, blocks["BLOCK_N"]) * B * J,)
        _attention_dkdv[grid](*inputs, dk, dv, *sizes, *strides, _strides(dk), *added, **fixed, **blocks)

    def run_dq(blocks: Blocks) -> None:
        grid = (triton.cdiv(L, blocks["BLOCK_M"]) * B * H,)
        _attention_dq[grid](*inputs, dq, *sizes, *strides, _strides(dq), *added, **fixed, **blocks)

    if launches(k):
        _run("dkdv", q, L, S, bias, run_dkdv)
    if launches(q):
        _run("dq", q, L, S, bias, run_dq)


def _launch_dbias(q, k, v, bias, mask, slopes, do, lse, delta, left, right, offset, scale) -> Tensor:
    B, L, H, K = q.shape
    S, J = k.shape[1:3]
    mask, slopes = _bytes(mask), _floats(slopes)
    blocks = _blocks("dbias", q.dtype, K, bias)
    tiles = triton.cdiv(L, blocks["BLOCK_M"]) * triton.cdiv(S, blocks["BLOCK_N"]) * bias.shape[0] * bias.shape[1]
    sharing = _sharing(bias, B, H)
    parts = min(sharing[0] * sharing[1], triton.cdiv(_FEW_PROGRAMS, tiles)) if tiles else 1
    parts = max(parts, 1)
    dbias = torch.empty((parts, *bias.shape), dtype=bias.dtype if parts == 1 else torch.float32, device=bias.device)
    if launches(bias):
        _attention_dbias[(tiles * parts,)](
            q, k, v, bias, mask, slopes, do, lse, delta, dbias, H // J, L, S, offset, left, right, scale, sharing,
            (*bias.shape[:2], parts), _strides(q), _strides(k), _strides(v), _strides(do), _lse_strides(lse),
            _strides(bias), _mask_strides(mask), K=K, PRECISION=_precision(q), BLOCK_K=_padded(K), **blocks,
        )  # fmt: skip
    return dbias[0] if parts == 1 else dbias.sum(0).to(bias.dtype)


_FEW_PROGRAMS = 256  # about two for each multiprocessor


def _strides(x: Tensor | None) -> tuple[int, ...] | None:
    """(sequence, row, head, element); packed sequences have no dim of sequences."""
    return None if x is None else (*[0] * (4 - x.ndim), *x.stride())


def _lse_strides(lse: Tensor) -> tuple[int, int]:
    """(sequence, head) of contiguous [B, H, L] or [H, T]."""
    return (0 if lse.ndim == 2 else lse.stride(0)), lse.stride(-2)


def _mask_strides(mask: Tensor | None) -> tuple[int, ...] | None:
    return None if mask is None else mask.stride()


def _sharing(bias: Tensor | None, B: int, H: int) -> tuple[int, int] | None:
    """How many sequences and how many heads share one bias."""
    return None if bias is None else (B // bias.shape[0], H // bias.shape[1])


def _bytes(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else (mask != 0).view(torch.uint8)


def _floats(slopes: Tensor | None) -> Tensor | None:
    return None if slopes is None else slopes.to(torch.float32).contiguous()


def _padded(head_size: int) -> int:
    return max(16, triton.next_power_of_2(head_size))


def _precision(q: Tensor) -> str:
    """The precision of products of fp32 matrices: exact unless torch's setting says otherwise."""
    rounds = torch.get_float32_matmul_precision() != "highest" and chip().startswith("sm_")
    return "tf32" if rounds and q.dtype == torch.float32 else "ieee"


def _run(kernel: str, q: Tensor, L: int, S: int, bias: Tensor | None, run: Callable[[Blocks], None]) -> None:
    K = q.shape[-1]
    default = _blocks(kernel, q.dtype, K, bias)
    key = (triton.next_power_of_2(L), triton.next_power_of_2(S), _padded(K), q.dtype, bias is not None)
    tuned(f"attention_{kernel}", key, default, run, num_stages=(1, 2, 3, 4))


def _blocks(kernel: str, dtype: torch.dtype, K: int, bias: Tensor | None) -> Blocks:
    """Tiles that leave no register to spill; a bias takes some, so its tiles have fewer queries."""
    size = max(64, _padded(K))
    table = _FP32_TILES if dtype == torch.float32 else _AMD_TILES if chip().startswith("gfx") else _TILES
    queries, keys, warps, stages = table[kernel, size]
    if table is _FP32_TILES and chip().startswith("gfx"):
        warps, stages = 4, 1  # loads in flight are held in registers there, and fewer warps have more of these
    if table is _TILES and (kernel, size) == ("dkdv", 128) and chip() == "sm_90":
        keys = 128  # operands stay in shared memory there
    if table is _TILES and kernel == "dq" and chip() == "sm_80":
        keys = 32  # and in registers there
    if table is _TILES and bias is not None and K > 32 and kernel in ("forward", "dq"):
        queries = 64
    return {"BLOCK_M": queries, "BLOCK_N": keys, "num_warps": warps, "num_stages": stages}


# (kernel, head size) -> (queries, keys, warps, stages)
_TILES = {
    ("forward", 64): (128, 64, 8, 3), ("forward", 128): (128, 64, 8, 3), ("forward", 256): (64, 32, 8, 2),
    ("dkdv", 64): (32, 64, 4, 2), ("dkdv", 128): (32, 64, 8, 2), ("dkdv", 256): (32, 32, 8, 2),
    ("dq", 64): (128, 64, 8, 2), ("dq", 128): (128, 32, 8, 2), ("dq", 256): (64, 32, 8, 2),
    ("dbias", 64): (64, 64, 8, 2), ("dbias", 128): (64, 64, 8, 1), ("dbias", 256): (32, 32, 8, 1),
}  # fmt: skip
_AMD_TILES = {  # 64 KiB of shared memory, twice the registers for a program of four warps
    ("forward", 64): (64, 32, 4, 2), ("forward", 128): (64, 32, 4, 2), ("forward", 256): (32, 32, 4, 1),
    ("dkdv", 64): (32, 64, 4, 2), ("dkdv", 128): (32, 32, 4, 1), ("dkdv", 256): (16, 32, 4, 1),
    ("dq", 64): (64, 32, 4, 2), ("dq", 128): (64, 32, 4, 1), ("dq", 256): (32, 32, 4, 1),
    ("dbias", 64): (64, 64, 8, 2), ("dbias", 128): (64, 32, 8, 1), ("dbias", 256): (32, 32, 8, 1),
}  # fmt: skip
_FP32_TILES = {
    ("forward", 64): (32, 32, 8, 2), ("forward", 128): (32, 32, 8, 2), ("forward", 256): (16, 32, 4, 1),
    ("dkdv", 64): (16, 32, 4, 1), ("dkdv", 128): (16, 32, 8, 2), ("dkdv", 256): (16, 16, 8, 1),
    ("dq", 64): (32, 32, 4, 2), ("dq", 128): (16, 32, 4, 1), ("dq", 256): (16, 16, 4, 1),
    ("dbias", 64): (32, 32, 4, 1), ("dbias", 128): (32, 32, 8, 1), ("dbias", 256): (16, 32, 8, 1),
}  # fmt: skip


# --- spec -------------------------------------------------------------------------------------------------------------


def _inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    B, L, S, J, G, K = (case[name] for name in "BLSJGK")
    draw = drawing(dtype, device, generator)
    inputs = {"q": draw(B, L, J * G, K), "k": draw(B, S, J, K), "v": draw(B, S, J, K)}
    inputs |= {name: case.get(name) for name in ("window", "offset", "scale")}
    inputs["causal"] = case.get("causal", False)
    if shares := case.get("bias"):  # dims that it has, such as "H"
        inputs["bias"] = draw(B if "B" in shares else 1, J * G if "H" in shares else 1, L, S)
    if case.get("mask"):
        mask = torch.rand(B, S, generator=generator) < 0.7
        mask[: B // 2] = False  # sequences without a visible key
        inputs["mask"] = mask.to(device)
    if case.get("alibi"):
        inputs["slopes"] = _slopes(J * G, device)
    return inputs


def _varlen_inputs(case: Case, dtype: torch.dtype, device: torch.device | str, generator: torch.Generator) -> dict:
    q_lengths, k_lengths, J, G, K = (case[name] for name in ("q_lengths", "k_lengths", *"JGK"))
    draw = drawing(dtype, device, generator)
    Tq, Tk = sum(q_lengths), sum(k_lengths)
    inputs = {"q": draw(Tq, J * G, K), "k": draw(Tk, J, K), "v": draw(Tk, J, K)}
    for name, lengths in (("q", q_lengths), ("k", k_lengths)):
        inputs[f"cu_seqlens_{name}"] = torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)
        inputs[f"max_seqlen_{name}"] = max(lengths, default=0)
    inputs |= {"causal": case.get("causal", False), "window": case.get("window")}
    if case.get("alibi"):
        inputs["slopes"] = _slopes(J * G, device)
    return inputs


def _slopes(num_heads: int, device: torch.device | str) -> Tensor:
    return torch.exp2(-8 * torch.arange(1, num_heads + 1) / num_heads).to(device)


def _traffic(case: Case, dtype: torch.dtype) -> Traffic:
    B, L, S, J, G, K = (case[name] for name in "BLSJGK")
    visible = B * J * G * _visible(L, S, case)
    shares = case.get("bias") or None
    bias = 0 if shares is None else (B if "B" in shares else 1) * (J * G if "H" in shares else 1) * L * S
    return _counted(B * L * J * G, B * S * J, K, bias, visible, dtype)


def _varlen_traffic(case: Case, dtype: torch.dtype) -> Traffic:
    J, G, K = (case[name] for name in "JGK")
    visible = J * G * sum(_visible(L, S, case) for L, S in zip(case["q_lengths"], case["k_lengths"]))
    return _counted(sum(case["q_lengths"]) * J * G, sum(case["k_lengths"]) * J, K, 0, visible, dtype)


def _visible(L: int, S: int, case: Case) -> int:
    """Pairs of a query and a key that it sees, keys of the mask included."""
    left, right = _band(case.get("causal", False), case.get("window"))
    offset = S - L if case.get("offset") is None else case["offset"]
    positions = range(offset, offset + L)
    ends = ((0 if left is None else max(0, p - left), S if right is None else min(S, p + right + 1)) for p in positions)
    return sum(max(0, end - begin) for begin, end in ends)


def _counted(queries: int, keys: int, K: int, bias: int, visible: int, dtype: torch.dtype) -> Traffic:
    """The products: two forward; backward the scores again and four of gradients."""
    forward = dtype.itemsize * (2 * queries * K + 2 * keys * K + bias) + 4 * queries
    backward = dtype.itemsize * (4 * queries * K + 4 * keys * K + 2 * bias) + 4 * queries
    return Traffic(forward, backward, 4 * visible * K, 10 * visible * K)


# Sums are in fp32, of up to 300 terms here, with cancellation in ds = p (dp - delta). In 16 bits p and ds are rounded
# once more before their products, and delta comes from the rounded o: a few roundings (2^-9 of bf16, 2^-12 of fp16).
_TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}

SPECS = (
    KernelSpec(
        name="attention",
        function=attention_with_lse,
        reference=reference,
        inputs=_inputs,
        grads=("q", "k", "v", "bias"),
        cases=(
            {"B": 1, "L": 140, "S": 140, "J": 1, "G": 1, "K": 64, "causal": True},
            {"B": 1, "L": 33, "S": 100, "J": 1, "G": 3, "K": 20, "causal": True, "alibi": True},
            {"B": 2, "L": 40, "S": 70, "J": 1, "G": 2, "K": 16, "bias": "H", "mask": True},
            {"B": 2, "L": 35, "S": 40, "J": 2, "G": 1, "K": 32, "bias": "B", "causal": True, "offset": -3},
            {"B": 1, "L": 70, "S": 300, "J": 1, "G": 1, "K": 64, "causal": True, "window": 100},
            {"B": 1, "L": 70, "S": 100, "J": 1, "G": 1, "K": 40, "window": 3, "bias": "BH"},
            {"B": 1, "L": 1, "S": 400, "J": 1, "G": 2, "K": 128},
            {"B": 1, "L": 33, "S": 3, "J": 1, "G": 1, "K": 256, "causal": True, "bias": "1", "scale": -0.1},
            {"B": 1, "L": 1, "S": 1, "J": 1, "G": 1, "K": 1},
            {"B": 1, "L": 2, "S": 0, "J": 1, "G": 1, "K": 4, "bias": "H"},
            {"B": 0, "L": 2, "S": 3, "J": 1, "G": 1, "K": 4},
        ),
        space={"B": range(1, 3), "L": range(1, 80), "S": range(1, 100), "J": range(1, 3), "G": range(1, 3),
               "K": range(1, 70), "causal": (False, True), "window": (None, 1, 50), "offset": (None, 7),
               "bias": (None, "1", "B", "H", "BH"), "mask": (False, True), "alibi": (False, True)},
        timed=(
            {"B": 4, "L": 4096, "S": 4096, "J": 16, "G": 1, "K": 64, "causal": True},
            {"B": 2, "L": 8192, "S": 8192, "J": 8, "G": 4, "K": 128, "causal": True},
            {"B": 256, "L": 256, "S": 256, "J": 8, "G": 1, "K": 32, "bias": "H", "mask": True},
            {"B": 2, "L": 4096, "S": 4096, "J": 8, "G": 1, "K": 256, "causal": True, "window": 1024, "alibi": True},
        ),
        tolerance=_TOLERANCE,
        traffic=_traffic,
        gradcheck={"B": 2, "L": 3, "S": 4, "J": 1, "G": 2, "K": 2, "causal": True, "bias": "H", "alibi": True},
    ),
    KernelSpec(
        name="attention_varlen",
        function=attention_varlen,
        reference=varlen_reference,
        inputs=_varlen_inputs,
        grads=("q", "k", "v"),
        cases=(
            {"q_lengths": (1, 70, 3), "k_lengths": (1, 70, 3), "J": 1, "G": 2, "K": 64, "causal": True},
            {"q_lengths": (5, 0, 70, 9), "k_lengths": (3, 4, 80, 0), "J": 1, "G": 1, "K": 20, "alibi": True},
            {"q_lengths": (70, 2), "k_lengths": (70, 99), "J": 2, "G": 1, "K": 16, "causal": True, "window": 9},
            {"q_lengths": (0,), "k_lengths": (0,), "J": 1, "G": 1, "K": 4},
        ),
        space={"q_lengths": ((3, 0, 1), (1, 80, 2), (65, 2, 20)), "k_lengths": ((3, 65, 2), (90, 1, 64), (0, 30, 7)),
               "J": range(1, 3), "G": range(1, 3), "K": range(1, 70), "causal": (False, True), "window": (None, 5),
               "alibi": (False, True)},
        timed=(
            {"q_lengths": (4096, 1000, 2000, 1096), "k_lengths": (4096, 1000, 2000, 1096), "J": 16, "G": 1, "K": 64,
             "causal": True},
        ),
        tolerance=_TOLERANCE,
        traffic=_varlen_traffic,
        gradcheck={"q_lengths": (2, 1), "k_lengths": (3, 1), "J": 1, "G": 2, "K": 2, "causal": True},
        alone=("cu_seqlens_q", "cu_seqlens_k"),
    ),
)  # fmt: skip
