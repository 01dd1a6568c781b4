"""Matrix products on a CPU by the faster of torch's libraries.

In fp32 on a CPU torch multiplies through the BLAS that it was built with, mostly MKL, which on AMD leaves half of the
vector width unused. oneDNN is in the same library and does not: 1.5 to 2.3 times faster there, and never slower where
the products are large. On Intel's own CPUs MKL is as fast in the forward and twice as fast in the weights' gradients.
All else (other dtypes and devices, small products, DTensors, autocast) goes to torch's own.

Weights that learn no more can be given a second form, in the order in which oneDNN reads them (`pack_weight`): torch's
own products arrange a weight anew in each call, which for a few rows takes longer than the product.

Results are torch's, up to the order of summation. Twice differentiable. To torch.compile the call is one operator:
inductor has a way of its own with oneDNN's, which takes constant weights alone.

Shapes: M rows, K inner, N columns; x[.., I], weight[O, I].
"""

import platform
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.compat import FakeTensor
from core.kernels.operator import launches, operator
from core.kernels.parts import PartedFunction, after
from core.kernels.timing import least_seconds
from core.kernels.traced import number_of, traced

# Multiply-adds below which the extra calls cost more than the kernel gains (measured: equal at about 2 million).
_WORTH_IT = 4 << 20
_PACKED, _ROWS, _TRIES = (torch.float32, torch.bfloat16), 8, 5
"""formats with a second form; rows of x that it is made for; times that a kernel is timed"""
_NAME = "_onednn_form"
"""attribute of a parameter that has one"""
_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_fast_blas() -> bool:
    """Return whether torch's BLAS is MKL on an Intel CPU: by the maker's name, so that all ranks and resumes agree."""
    info = Path("/proc/cpuinfo")
    maker = info.read_text(errors="replace") if info.exists() else platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" in maker


_FASTER = not _has_fast_blas()


@dataclass(frozen=True)
class _Form:
    """A weight as oneDNN reads it, and where the plain one lay: one that was moved or converted since has none."""

    tensor: Tensor
    pointer: int
    dtype: torch.dtype


def pack_weight(weight: nn.Parameter) -> bool:
    """Give a weight [O, I] on a CPU, which must not change any more, a second form of its size, if that is faster.

    It serves `linear` where no gradients are recorded. Returns whether the weight has one now.
    """
    is_plain = type(weight) is nn.Parameter and weight.device.type == "cpu" and weight.is_contiguous()
    if not (is_plain and _AVAILABLE and weight.ndim == 2 and weight.numel() and weight.dtype in _PACKED):
        return False
    if not _is_offered(weight.dtype):
        return False
    if not _packing_is_faster(*weight.shape, weight.dtype, torch.get_num_threads()):
        return False
    setattr(weight, _NAME, _Form(_packed(weight.detach()), weight.data_ptr(), weight.dtype))
    return True


def _packed(weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)


def _form(x: Tensor, weight: Tensor) -> Tensor | None:
    form: _Form | None = getattr(weight, _NAME, None)
    if form is None or torch.is_grad_enabled() or x.dtype != form.dtype or not x.numel():
        return None
    return form.tensor if weight.data_ptr() == form.pointer and weight.dtype == form.dtype else None


@cache
def _is_offered(dtype: torch.dtype) -> bool:
    """Return whether oneDNN multiplies in this format here: bf16 wants AVX-512."""
    try:
        _packed(torch.ones(1, 1, dtype=dtype, device="cpu"))
    except RuntimeError:
        return False
    return True


@cache
def _packing_is_faster(num_channels: int, num_columns: int, dtype: torch.dtype, num_threads: int) -> bool:
    """For one row and for some, measured on as many of the weight's rows as tell."""
    weight = torch.ones(min(num_channels, 4096), num_columns, dtype=dtype, device="cpu")
    form = _packed(weight)
    return all(
        least_seconds(lambda x=x: _by_form(x, form), _TRIES) < least_seconds(lambda x=x: F.linear(x, weight), _TRIES)
        for x in (weight[:1], weight[:1].expand(_ROWS, -1).contiguous())
    )


def _by_form(x: Tensor, form: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, form, None, "none", [], "")


torch.library.define("megalith::packed_linear", "(Tensor x, int weight, int channels) -> Tensor")


@torch.library.impl("megalith::packed_linear", "CPU")
def _traced_linear(x: Tensor, weight: int, channels: int) -> Tensor:
    return _by_form(x, getattr(traced(weight), _NAME).tensor)


@torch.library.register_fake("megalith::packed_linear")
def _linear_shape(x: Tensor, weight: int, channels: int) -> Tensor:
    return x.new_empty(x.shape[0], channels)


def _linear_by_form(x: Tensor, weight: Tensor, form: Tensor, bias: Tensor | None) -> Tensor:
    x_MI = x.reshape(-1, x.shape[-1])
    if isinstance(x, FakeTensor):
        y_MO = torch.ops.megalith.packed_linear(x_MI, number_of(weight), weight.shape[0])
        y_MO = y_MO if bias is None else y_MO + bias
    else:
        y_MO = torch.ops.mkldnn._linear_pointwise(x_MI, form, bias, "none", [], "")
    return y_MO.view(*x.shape[:-1], weight.shape[0])


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias."""
    if (form := _form(x, weight)) is not None:
        return _linear_by_form(x, weight, form, bias)
    if not uses_onednn(x, weight, x.numel() * weight.shape[0]):
        return F.linear(x, weight, bias)
    rows: Tensor = _Linear.apply(x.reshape(-1, x.shape[-1]), weight, bias)  # pyright: ignore[reportAssignmentType]
    return rows.view(*x.shape[:-1], weight.shape[0])  # outside: nobody may write over a view that a function gives


def uses_onednn(a: Tensor, b: Tensor, multiply_adds: int) -> bool:
    plain = type(b) in (Tensor, nn.Parameter) and a.device.type == "cpu" and a.dtype == b.dtype == torch.float32
    return plain and _AVAILABLE and _FASTER and multiply_adds >= _WORTH_IT and not torch.is_autocast_enabled("cpu")


def product(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a b, by oneDNN where `uses_onednn`."""
    if not uses_onednn(a_MK, b_KN, a_MK.numel() * b_KN.shape[1]):
        return a_MK @ b_KN
    return _Product.apply(a_MK, b_KN)


def batched_product(a_CIK: Tensor, b_CJK: Tensor) -> Tensor:
    """a b^T for each of C pairs of matrices; without gradients one by one by oneDNN where `uses_onednn`."""
    C, I, K = a_CIK.shape
    J = b_CJK.shape[1]
    # Half as many multiply-adds will do: torch's batched product calls its library matrix by matrix, too.
    if torch.is_grad_enabled() or not uses_onednn(a_CIK, b_CJK, 2 * I * J * K):
        return a_CIK @ b_CJK.mT
    out = a_CIK.new_empty(C, I, J)
    for c in range(C):
        out[c] = _onednn(a_CIK[c], b_CJK[c])
    return out


def _onednn(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if not (weight.is_contiguous() or weight.T.is_contiguous()):
        weight = weight.contiguous()  # oneDNN multiplies weights with gaps by its reference loop, 250 times slower
    if torch.compiler.is_compiling():
        return _as_one_operator(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


@operator("onednn_linear")
def _as_one_operator(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if not launches(x):
        return x.new_empty(*x.shape[:-1], weight.shape[0])
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a_MK: Tensor, b_KN: Tensor) -> Tensor:
        ctx.save_for_backward(a_MK, b_KN)
        if a_MK.T.is_contiguous() and a_MK.shape[0] > b_KN.shape[1]:
            return _onednn(b_KN.T, a_MK).T  # a transposed: faster with the longer side as the columns
        return _onednn(a_MK, b_KN.T)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        a_MK, b_KN = ctx.saved_tensors
        (g_MN,) = grads
        return (
            product(g_MN, b_KN.T) if ctx.needs_input_grad[0] else None,
            product(a_MK.T, g_MN) if ctx.needs_input_grad[1] else None,
        )


class _Linear(PartedFunction):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (g_MO,), of = grads, after()
        return (
            product(g_MO, weight) if of.inputs and ctx.needs_input_grad[0] else None,
            product(g_MO.T, x) if of.weights and ctx.needs_input_grad[1] else None,
            g_MO.sum(0) if of.weights and ctx.needs_input_grad[2] else None,
        )
