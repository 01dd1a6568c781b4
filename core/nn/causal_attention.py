"""Causal attention in bf16 on a CPU, by batched products of tiles of the scores.

torch's flash kernel multiplies tiles too small for the bf16 vector units of a CPU without AMX, so that the kernel takes
several times as long as the products would: on such a machine this is about twice as fast, forward and backward. A CPU
without bf16 units is slower with it, so that one, and one with AMX (not measured), keep torch's.

1. The queries of each sequence are cut in blocks; a block sees the keys up to its own last one. A tile is the scores of
   one block for as many sequences as fit in a core's cache.
2. forward: scores = scale q k^T + mask, softmax (fp32 inside), o = p v. Nothing but o is kept.
3. backward: the tile's softmax is computed again; the gradients of keys and values are summed over blocks in fp32.

As an operator of its own, so that recomputation and compilation see one operator and not the tiles.
Dao et al., "FlashAttention" (2022), for the recomputation; without its online softmax, because a tile holds whole rows.
Not here: grouped key/value heads, biases, other formats (torch's kernel serves those).

Shapes: B batch, L length, H heads, K head size, N sequences-by-heads of a tile, Q its queries, S its keys.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from core.compat import softmax_backward
from core.precision import bf16_units

BLOCK_QUERIES = 128
# Scores of a tile, in bf16.
TILE_BYTES = 2 << 20


def fits(q_BLHK: Tensor, k_BSJK: Tensor) -> bool:
    """Return whether `causal_attention` is for these: bf16 on a CPU's vector units, no grouped heads, no cache."""
    on_cpu = q_BLHK.dtype is torch.bfloat16 and q_BLHK.device.type == "cpu" and q_BLHK.shape == k_BSJK.shape
    return on_cpu and bf16_units(q_BLHK.device) == "vector"


@torch.library.custom_op("megalith::causal_attention", mutates_args=())
def causal_attention(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(K), over keys not later than the query) v -> o[B, L, H, K], contiguous."""
    o_BLHK = _empty(q_BLHK)
    for batch, queries, keys in _tiles(q_BLHK):
        p_NQS = _probabilities(q_BLHK[batch, queries], k_BLHK[batch, keys])
        _put(o_BLHK[batch, queries], torch.bmm(p_NQS, _heads_first(v_BLHK[batch, keys])))
    return o_BLHK


@torch.library.custom_op("megalith::causal_attention_backward", mutates_args=())
def _backward(do_BLHK: Tensor, q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    scale = q_BLHK.shape[-1] ** -0.5
    dq_BLHK = _empty(q_BLHK)
    dk_BHLK, dv_BHLK = q_BLHK.new_zeros(2, *q_BLHK.transpose(1, 2).shape, dtype=torch.float32)
    for batch, queries, keys in _tiles(q_BLHK):
        q_NQK, do_NQK = _heads_first(q_BLHK[batch, queries]), _heads_first(do_BLHK[batch, queries])
        k_NSK, v_NSK = _heads_first(k_BLHK[batch, keys]), _heads_first(v_BLHK[batch, keys])
        p_NQS = _probabilities(q_BLHK[batch, queries], k_BLHK[batch, keys])
        _add(dv_BHLK[batch, :, keys], torch.bmm(p_NQS.mT, do_NQK))
        dp_NQS = torch.bmm(do_NQK, v_NSK.mT)
        ds_NQS = softmax_backward(dp_NQS, p_NQS, -1, p_NQS.dtype)
        _put(dq_BLHK[batch, queries], torch.bmm(ds_NQS, k_NSK))
        _add(dk_BHLK[batch, :, keys], torch.bmm(ds_NQS.mT, q_NQK))
    dq_BLHK.mul_(scale)
    dk_BLHK = dk_BHLK.mul_(scale).to(q_BLHK.dtype).transpose(1, 2)
    return dq_BLHK, dk_BLHK, dv_BHLK.to(q_BLHK.dtype).transpose(1, 2)


def _tiles(q_BLHK: Tensor) -> Iterator[tuple[slice, slice, slice]]:
    """(sequences, their queries, the keys that those see) of each tile."""
    batch, length, num_heads, _ = q_BLHK.shape
    for start in range(0, length, BLOCK_QUERIES):
        stop = min(start + BLOCK_QUERIES, length)
        rows = max(1, TILE_BYTES // (num_heads * (stop - start) * stop * q_BLHK.itemsize))
        for first in range(0, batch, rows):
            yield slice(first, first + rows), slice(start, stop), slice(0, stop)


def _probabilities(q_BQHK: Tensor, k_BSHK: Tensor) -> Tensor:
    """p[N, Q, S]; the queries are the last of the keys."""
    num_queries, num_keys, size = q_BQHK.shape[1], k_BSHK.shape[1], q_BQHK.shape[-1]
    later_QS = torch.full((num_queries, num_keys), -math.inf, dtype=q_BQHK.dtype).triu_(1 + num_keys - num_queries)
    scores_NQS = torch.baddbmm(later_QS, _heads_first(q_BQHK), _heads_first(k_BSHK).mT, alpha=size**-0.5)
    return torch.softmax(scores_NQS, -1)


def _heads_first(x_BLHK: Tensor) -> Tensor:
    return x_BLHK.transpose(1, 2).flatten(0, 1)


def _put(out_BLHK: Tensor, x_NLK: Tensor) -> None:
    out_BLHK.copy_(x_NLK.unflatten(0, (out_BLHK.shape[0], -1)).transpose(1, 2))


def _add(sum_BHLK: Tensor, x_NLK: Tensor) -> None:
    sum_BHLK.add_(x_NLK.view(sum_BHLK.shape))


def _empty(x_BLHK: Tensor) -> Tensor:
    return torch.empty_like(x_BLHK, memory_format=torch.contiguous_format)


@causal_attention.register_fake
def _(q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> Tensor:
    return _empty(q_BLHK)


@_backward.register_fake
def _(do_BLHK: Tensor, q_BLHK: Tensor, k_BLHK: Tensor, v_BLHK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    heads_first = torch.empty_like(q_BLHK.transpose(1, 2), memory_format=torch.contiguous_format)
    return _empty(q_BLHK), heads_first.transpose(1, 2), torch.empty_like(heads_first).transpose(1, 2)


def _keep(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


causal_attention.register_autograd(lambda ctx, do: _backward(do, *ctx.saved_tensors), setup_context=_keep)
