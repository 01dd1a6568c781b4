"""Matrix products on a CPU by the faster of torch's libraries.

In fp32 on a CPU torch multiplies through the BLAS that it was built with, mostly MKL, which on AMD leaves half of the
vector width unused. oneDNN is in the same library and does not: 1.5 to 2.3 times faster there, and never slower where
the products are large. On Intel's own CPUs MKL is as fast in the forward and twice as fast in the weights' gradients.
All else (other dtypes and devices, small products, DTensors, autocast) goes to torch's own.

Results are torch's, up to the order of summation. Twice differentiable. To torch.compile the call is one operator:
inductor has a way of its own with oneDNN's, which takes constant weights alone.

Shapes: M rows, K inner, N columns; x[.., I], weight[O, I].
"""

import platform
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.kernels.operator import launches, operator

# Multiply-adds below which the extra calls cost more than the kernel gains (measured: equal at about 2 million).
_WORTH_IT = 4 << 20
_AVAILABLE = torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _has_fast_blas() -> bool:
    """Whether torch's BLAS is MKL on an Intel CPU: by the maker's name, so that all ranks and every resume agree."""
    info = Path("/proc/cpuinfo")
    maker = info.read_text(errors="replace") if info.exists() else platform.processor()
    return torch.backends.mkl.is_available() and "GenuineIntel" in maker


_FASTER = not _has_fast_blas()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x weight^T + bias."""
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


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        return _onednn(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        (g_MO,) = grads
        return (
            product(g_MO, weight) if ctx.needs_input_grad[0] else None,
            product(g_MO.T, x) if ctx.needs_input_grad[1] else None,
            g_MO.sum(0) if ctx.needs_input_grad[2] else None,
        )
