"""Attention of queries over a part of their keys, and its gradients when the other parts lie elsewhere.

    s = scale q k^T + bias + slope (key position - query position),   -inf where a key is hidden
    forward     o = softmax(s) v and lse = log sum_s exp s, over this part's keys: parts merge by their lse
    gradients   p = exp(s - lse), with the lse and (below) the o and do of *all* keys
                dv = p^T do,   ds = p (do v^T - sum_k o do),   dq = scale ds k,   dk = scale ds^T q

That the gradients need no other part's p is what lets ring attention keep nothing but o and lse (Liu et al. 2023, Ring
Attention with Blockwise Transformers, appendix A; Dao et al. 2022, FlashAttention, algorithm 4).

On CUDA these are the kernels of `core.kernels.attention`. Elsewhere they are torch's products, over tiles of queries
that fit in a core's cache, so that no matrix of L x S scores is in memory.

Shapes: B sequences, L queries, S keys, H query heads, J key/value heads, G = H / J, K head size.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from core.kernels import attention as kernel
from core.kernels.operator import runs_kernel

TILE_BYTES = 2 << 20
"""Scores of a tile."""


@dataclass(frozen=True)
class Part:
    """The keys that are seen, and what is added to their scores.

    offset  position of the first query, counted from the part's first key; may be negative or beyond the keys
    causal  keys after the query's position are hidden
    bias    [B or 1, 1, L, S] is added to the scores; -inf hides
    slopes  [H] of ALiBi
    window  keys `window` and more places away from the query are hidden
    """

    offset: int
    causal: bool
    bias: Tensor | None = None
    slopes: Tensor | None = None
    window: int | None = None


def partial_attention(q: Tensor, k: Tensor, v: Tensor, part: Part) -> tuple[Tensor, Tensor]:
    """q[B, L, H, K], k and v[B, S, J, K] -> (o[B, L, H, K], lse[B, H, L] in fp32 or wider); no gradient.

    A query that sees no key of the part has o = 0 and lse = -inf.
    """
    scale = q.shape[-1] ** -0.5
    if runs_kernel("partial_attention", q, unless=kernel._unsupported(q, part.bias)):
        band = kernel._band(part.causal, part.window)
        return kernel._forward(q, k, v, part.bias, None, part.slopes, *band, part.offset, scale)
    wide = torch.promote_types(q.dtype, torch.float32)
    o_BLHK = torch.zeros(q.shape, dtype=q.dtype, device=q.device)
    lse_BHL = torch.full((q.shape[0], q.shape[2], q.shape[1]), -math.inf, dtype=wide, device=q.device)
    k_BJSK, v_BJSK = k.to(wide).transpose(1, 2), v.to(wide).transpose(1, 2)
    for rows, keys in _tiles(q, k, part):
        s_BHLS = _scores(_grouped(q[:, rows].to(wide), k.shape[2]), k_BJSK[:, :, keys], part, rows, keys, scale)
        lse = torch.logsumexp(s_BHLS, -1)
        p_BHLS = s_BHLS.sub_(lse.masked_fill(lse == -math.inf, 0.0)[..., None]).exp_()
        o_BJNK = p_BHLS.view(*k_BJSK.shape[:2], -1, p_BHLS.shape[-1]) @ v_BJSK[:, :, keys]
        o_BLHK[:, rows] = _ungrouped(o_BJNK, q.shape[2])
        lse_BHL[:, :, rows] = lse
    return o_BLHK, lse_BHL


def partial_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, part: Part
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv): what this part of the keys adds to the gradients.

    do, o[B, L, H, K] and lse[B, H, L] are those of attention over all keys.
    """
    scale = q.shape[-1] ** -0.5
    if runs_kernel("partial_attention", q, unless=kernel._unsupported(q, part.bias)):
        added = part.bias, None, part.slopes
        band = kernel._band(part.causal, part.window)
        return kernel._backward(do, None, q, k, v, *added, o, lse.contiguous(), *band, part.offset, scale, False)[:3]
    wide, num_kv_heads = torch.promote_types(q.dtype, torch.float32), k.shape[2]
    k_BJSK, v_BJSK = k.to(wide).transpose(1, 2), v.to(wide).transpose(1, 2)
    dq = torch.zeros(q.shape, dtype=wide, device=q.device)
    dk_BJSK, dv_BJSK = torch.zeros((2, *k_BJSK.shape), dtype=wide, device=q.device)
    for rows, keys in _tiles(q, k, part):
        q_BJNK, do_BJNK = (_grouped(x[:, rows].to(wide), num_kv_heads) for x in (q, do))
        delta_BJN1 = (_grouped(o[:, rows].to(wide), num_kv_heads) * do_BJNK).sum(-1, keepdim=True)
        s_BHLS = _scores(q_BJNK, k_BJSK[:, :, keys], part, rows, keys, scale)
        p_BHLS = s_BHLS.sub_(lse[:, :, rows, None]).exp_()
        p_BJNS = p_BHLS.view(*k_BJSK.shape[:2], -1, p_BHLS.shape[-1])
        dv_BJSK[:, :, keys] += p_BJNS.mT @ do_BJNK
        ds_BJNS = (do_BJNK @ v_BJSK[:, :, keys].mT).sub_(delta_BJN1).mul_(p_BJNS)
        dq[:, rows] = _ungrouped(ds_BJNS @ k_BJSK[:, :, keys], q.shape[2])
        dk_BJSK[:, :, keys] += ds_BJNS.mT @ q_BJNK
    dk, dv = dk_BJSK.mul_(scale).transpose(1, 2), dv_BJSK.transpose(1, 2)
    return dq.mul_(scale).to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _tiles(q: Tensor, k: Tensor, part: Part) -> Iterator[tuple[slice, slice]]:
    """(queries, the keys that they may see) of each tile; none where no key is seen."""
    (B, L, H, _), S = q.shape, k.shape[1]
    if 0 in (B, H, S):
        return
    size = max(16, TILE_BYTES // (B * H * S * torch.promote_types(q.dtype, torch.float32).itemsize))
    for start in range(0, L, size):
        stop = min(start + size, L)
        left, right = kernel._band(part.causal, part.window)
        begin = 0 if left is None else max(0, part.offset + start - left)
        end = S if right is None else min(S, part.offset + stop + right)
        if begin < end:
            yield slice(start, stop), slice(begin, end)


def _scores(q_BJNK: Tensor, k_BJSK: Tensor, part: Part, rows: slice, keys: slice, scale: float) -> Tensor:
    """s[B, H, L, S] of a tile; N = G L rows share a key/value head."""
    B, J, N, _ = q_BJNK.shape
    num_rows = rows.stop - rows.start
    s_BHLS = torch.mul(q_BJNK @ k_BJSK.mT, scale).view(B, J * N // num_rows, num_rows, -1)
    if part.bias is not None:
        s_BHLS += part.bias[:, :, rows, keys]
    left, right = kernel._band(part.causal, part.window)
    first, last = part.offset + rows.start, part.offset + rows.stop - 1
    if right is not None and first + right >= keys.stop - 1:
        right = None  # it hides nothing of this tile
    if left is not None and last - left <= keys.start:
        left = None
    if part.slopes is None and left is None and right is None:
        return s_BHLS
    key_S = torch.arange(keys.start, keys.stop, device=s_BHLS.device)
    distance_LS = key_S - torch.arange(first, first + num_rows, device=s_BHLS.device)[:, None]
    if part.slopes is not None:
        s_BHLS += part.slopes.to(s_BHLS.dtype)[:, None, None] * distance_LS
    if right is not None:
        s_BHLS.masked_fill_(distance_LS > right, -math.inf)
    if left is not None:
        s_BHLS.masked_fill_(distance_LS < -left, -math.inf)
    return s_BHLS


def _grouped(x_BLHK: Tensor, num_kv_heads: int) -> Tensor:
    """[B, L, H, K] -> [B, J, G L, K]: the rows that share a key/value head."""
    return x_BLHK.unflatten(2, (num_kv_heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)


def _ungrouped(x_BJNK: Tensor, num_heads: int) -> Tensor:
    """[B, J, G L, K] -> [B, L, H, K]."""
    B, J, N, K = x_BJNK.shape
    group = num_heads // J
    return x_BJNK.view(B, J, group, N // group, K).permute(0, 3, 1, 2, 4).flatten(2, 3)
