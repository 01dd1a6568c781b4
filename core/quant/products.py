"""Torch's functions on a quantized weight: products, look-ups, convolutions.

On a GPU products are `core.kernels.quantized_matmul`'s kernels, on a CPU those of `core.quant.integers` for 16 and 32
bits, and the kernels' references for 64. Inputs of a layer may be differentiated (for adapters beside frozen weights);
rounding them counts as if it were not there.

Shapes: M rows of x (tokens), I columns of x, O columns of the result.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from core.kernels.quantized_matmul import (
    int4_matmul,
    int8_dynamic_matmul,
    int8_matmul,
    library_bytes,
    widening_bytes,
)
from core.quant.integers import NUM_DIGITS, float_bytes, integer_product
from core.quant.packed import packed_product
from core.quant.scheme import Scheme
from core.quant.weight import FUNCTIONS, Function, QuantizedWeight

# Rows of the weight that are widened at a time in the backward.
_SLAB = 1024
_BY_INTEGERS = (torch.float32, torch.bfloat16, torch.float16)


def _knows(*functions: Any) -> Callable[[Function], Function]:
    """Register what `functions` of torch do where an argument is a quantized weight."""

    def register(function: Function) -> Function:
        FUNCTIONS.update(dict.fromkeys(functions, function))
        return function

    return register


@_knows(F.linear)
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if isinstance(weight, QuantizedWeight) and _are_plain(x, bias) and not weight.transposed and weight.ndim == 2:
        return product(x, weight, bias)
    return F.linear(_plain(x), _plain(weight), None if bias is None else _plain(bias))


@_knows(torch.addmm)
def _addmm(bias: Tensor, x_MI: Tensor, weight: Tensor, **factors: Any) -> Tensor:
    """GPT-2's layers of transformers are written so."""
    usual = _are_plain(x_MI, bias) and bias.ndim == 1 and not factors
    if usual and isinstance(weight, QuantizedWeight) and weight.transposed:
        return product(x_MI, weight, bias)
    return torch.addmm(_plain(bias), _plain(x_MI), _plain(weight), **factors)


@_knows(F.embedding)
def _embedding(
    ids: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    *more: Any,
    **options: Any,
) -> Tensor:
    """padding_idx and what follows matter for gradients only; max_norm would write to the weight."""
    if max_norm is not None:
        raise TypeError("max_norm would write to a quantized weight; leave it out, or the embedding as it is")
    if not isinstance(weight, QuantizedWeight) or weight.transposed or weight.ndim != 2:
        return F.embedding(ids, _plain(weight))
    return weight.matrix(ids.flatten()).view(*ids.shape, weight.shape[1])


@_knows(torch.conv1d, torch.conv2d, torch.conv3d)
def _convolution(x: Tensor, weight: Tensor, bias: Tensor | None = None, *options: Any, **more: Any) -> Tensor:
    convolve = {3: torch.conv1d, 4: torch.conv2d, 5: torch.conv3d}[weight.ndim]
    if isinstance(weight, QuantizedWeight):
        weight = weight.dequantized(x.dtype)
    return convolve(x, weight, bias, *options, **more)


def _are_plain(*tensors: Tensor | None) -> bool:
    return not any(isinstance(tensor, QuantizedWeight) for tensor in tensors)


def _plain(tensor: Tensor) -> Tensor:
    return tensor.dequantized() if isinstance(tensor, QuantizedWeight) else tensor


def product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None = None) -> Tensor:
    """x [.., I] with the weight's channels: [.., O], in x's dtype (under autocast in autocast's)."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind) and x.is_floating_point():
        x = x.to(torch.get_autocast_dtype(kind))
    if x.requires_grad and torch.is_grad_enabled():
        y = _Differentiable.apply(x, weight)
        return y if bias is None else y + bias.to(y.dtype)
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return _product(x, weight, None) + bias.to(x.dtype)
    return _product(x, weight, bias)


def _product(x: Tensor, weight: QuantizedWeight, bias: Tensor | None) -> Tensor:
    scheme = weight.scheme
    if weight.gain is not None:
        x = x * weight.gain.to(x.dtype)
    if scheme.name == "int4":
        if weight.packed is not None and x.dtype in _BY_INTEGERS and x.numel() > 0:
            return packed_product(x, weight, bias)
        return int4_matmul(x, weight.codes, weight.scale, weight.zero, bias, group=scheme.group_size)
    if x.device.type == "cpu" and x.dtype in _BY_INTEGERS and x.numel() > 0:
        return integer_product(x, weight, bias)
    if scheme.name == "int8":
        return int8_matmul(x, weight.codes, weight.scale, bias)
    threshold = scheme.threshold if scheme.name == "llm.int8" else None
    return int8_dynamic_matmul(x, weight.codes, weight.scale, bias, threshold=threshold)


def working_bytes(scheme: str, rows: int, weight: tuple[int, int], dtype: torch.dtype, kind: str) -> int:
    """The most that a product holds at once beside x, the weight and its result (on a CPU also beside the digits of x,
    and in the schemes of 8 bits alone), whichever way it goes.

    scheme  a name, such as int4
    rows    of x, which is of this dtype
    weight  its rows and columns
    kind    of the device
    """
    if kind == "cpu":
        return float_bytes(rows * NUM_DIGITS[scheme], weight) if scheme in NUM_DIGITS else 0
    if scheme == "w8a8":
        return library_bytes(rows, weight)
    if scheme == "llm.int8":  # tiles alone: x's codes, and each row's largest element
        return rows * (weight[1] + 4)
    return widening_bytes(rows, weight, dtype, Scheme(scheme).bits)


class _Differentiable(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: QuantizedWeight) -> Tensor:
        ctx.weight = weight
        return _product(x, weight, None)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (dy,) = gradients
        weight, dx = ctx.weight, None
        for start in range(0, dy.shape[-1], _SLAB):
            rows = slice(start, start + _SLAB)
            part = dy[..., rows] @ weight.matrix(rows, dy.dtype)
            dx = part if dx is None else dx + part
        return dx, None
