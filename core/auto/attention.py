"""Attention as a step on a CPU has it, for the devices that run the plan: CUDA gets the operator that a CPU has.

A step is traced on CPU tensors, so its attention is `_scaled_dot_product_flash_attention_for_cpu`, which returns the
output and the log of each row's sum; its gradient reads both (Dao 2023, FlashAttention-2). On CUDA it is flash
attention where that takes the format, and these products elsewhere:

    p = exp(q k^T scale + mask - logsumexp)      out = p v
    dv = p^T g      ds = p (g v^T - sum(g out))      dq = ds k scale      dk = ds^T q scale

Letters: B batch, H heads, L queries, S keys, E size of a head. Keys may have fewer heads than queries.
"""

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

_ATEN = torch.ops.aten
_FORWARD = "_scaled_dot_product_flash_attention_for_cpu"
_LARGEST_HEAD = 256


@cache
def give_to_cuda() -> torch.library.Library:
    """Register the operator and its gradient for CUDA, once in a process."""
    library = torch.library.Library("aten", "IMPL")
    library.impl(_FORWARD, forward, "CUDA")
    library.impl(f"{_FORWARD}_backward", backward, "CUDA")
    return library


def _is_flash(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None) -> bool:
    is_short = q.dtype in (torch.float16, torch.bfloat16) and q.shape[-1] <= _LARGEST_HEAD and q.shape[-1] % 8 == 0
    is_square = q.shape[-2] == k.shape[-2] or not is_causal
    return q.is_cuda and is_short and is_square and mask is None and q.shape[1] == k.shape[1]


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor]:
    """(out_BHLE, logsumexp_BHL)"""
    assert dropout_p == 0.0
    if _is_flash(query, key, is_causal, attn_mask):
        made = _ATEN._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, False, scale=scale)
        return made[0], made[1]
    key, value = _per_query_head(key, query), _per_query_head(value, query)
    scores_BHLS = _scores(query, key, is_causal, attn_mask, scale)
    logsumexp_BHL = scores_BHLS.logsumexp(-1)
    return (scores_BHLS - logsumexp_BHL[..., None]).exp().to(value.dtype) @ value, logsumexp_BHL


def backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    dropout_p: float,
    is_causal: bool,
    *,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq_BHLE, dk_BHSE, dv_BHSE)"""
    if _is_flash(query, key, is_causal, attn_mask):
        nothing = torch.zeros((), dtype=torch.int64, device=query.device)
        lengths: Any = (None, None, query.shape[-2], key.shape[-2])
        given = (grad_out, query, key, value, out, logsumexp, *lengths, 0.0, is_causal, nothing, nothing)
        return _ATEN._scaled_dot_product_flash_attention_backward(*given, scale=scale)
    heads = key.shape[1]
    key, value = _per_query_head(key, query), _per_query_head(value, query)
    p_BHLS = (_scores(query, key, is_causal, attn_mask, scale) - logsumexp[..., None]).exp()
    g_BHLE = grad_out.to(p_BHLS.dtype)
    dv = p_BHLS.mT @ g_BHLE
    ds_BHLS = p_BHLS * (g_BHLE @ value.to(p_BHLS.dtype).mT - (g_BHLE * out).sum(-1, keepdim=True))
    ds_BHLS = ds_BHLS * _scale(query, scale)
    dq, dk = ds_BHLS @ key.to(p_BHLS.dtype), ds_BHLS.mT @ query.to(p_BHLS.dtype)
    return dq.to(query.dtype), _per_key_head(dk, heads).to(key.dtype), _per_key_head(dv, heads).to(value.dtype)


def _scale(query: Tensor, scale: float | None) -> float:
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def _scores(q: Tensor, k: Tensor, is_causal: bool, mask: Tensor | None, scale: float | None) -> Tensor:
    """In fp32 at least."""
    wide = torch.promote_types(q.dtype, torch.float32)
    scores_BHLS = (q.to(wide) @ k.to(wide).mT) * _scale(q, scale)
    if is_causal:
        later = torch.ones(scores_BHLS.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores_BHLS = scores_BHLS.masked_fill(later, -math.inf)
    return scores_BHLS if mask is None else scores_BHLS + mask


def _per_query_head(x_BHSE: Tensor, query: Tensor) -> Tensor:
    times = query.shape[1] // x_BHSE.shape[1]
    return x_BHSE if times == 1 else x_BHSE.repeat_interleave(times, 1)


def _per_key_head(x_BHSE: Tensor, heads: int) -> Tensor:
    return x_BHSE if x_BHSE.shape[1] == heads else x_BHSE.unflatten(1, (heads, -1)).sum(2)
