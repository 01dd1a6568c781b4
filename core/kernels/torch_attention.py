"""Torch's scaled_dot_product_attention for tensors that begin anywhere, and masks wider than the queries.

On a GPU its memory-efficient kernel reads 16 bytes at once where the strides of queries, keys, values and mask allow
it, and does not look at where a tensor begins (torch 2.11 to 2.13: `preprocess_mask` in
aten/src/ATen/native/transformers/sdp_utils_cpp.h compares strides alone). A slice that begins between two such pieces,
`bias[..., 1:]`, is then a misaligned address, which ends the process's CUDA context. So all of core attends through
here, where such a slice is copied.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from core.compat import FakeTensor

_READ_AT_ONCE = 16
"""Bytes."""


def torch_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, *, is_causal: bool = False,
    scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """o[B, H, L, K] = softmax(scale q k^T + mask) v of q[B, H, L, K], k and v[B, J, S, K], mask[B or 1, H or 1, L, S].

    A mask is added or, where it is bool, says which keys are seen; all as torch's own function takes them. One that is
    wider than the queries stays so; the result has the format of the queries.
    """
    dtype = q.dtype
    q, k, v = (_begins_evenly(x) for x in in_one_format(q, k, v, mask))
    mask = None if mask is None else _begins_evenly(mask)
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return o.to(dtype)


def in_one_format(q: Tensor, k: Tensor, v: Tensor, added: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values in a format that torch's fused operator may be given together with what is added.

    A CPU's operator adds in fp32. Those of a GPU read what is added as if it had the queries' format or refuse it
    (pytorch issue 191612), so that with something wider the product is taken in its format.
    """
    if added is None or added.dtype in (torch.bool, q.dtype) or q.device.type in ("cpu", "meta"):
        return q, k, v
    wide = torch.promote_types(added.dtype, q.dtype)
    assert added.dtype == wide, f"what is added to scores is {added.dtype}, narrower than {q.dtype} of the queries"
    return q.to(wide), k.to(wide), v.to(wide)


def _begins_evenly(x: Tensor) -> Tensor:
    """x, or a copy where the chip could not read 16 bytes from its first element; dims that are expanded stay so."""
    if not _read_by_vectors(x) or torch.compiler.is_compiling() or isinstance(x, FakeTensor):
        return x
    if x.data_ptr() % _READ_AT_ONCE == 0:
        return x
    once = x[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in x.stride())]
    return once.clone(memory_format=torch.contiguous_format).expand_as(x)


def _read_by_vectors(x: Tensor) -> bool:
    return x.is_cuda
