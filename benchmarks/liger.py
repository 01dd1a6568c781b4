"""Liger's kernels beside ours, where liger-kernel is installed; `.gpu-pack` brings it.

Of the families that Liger has, each case that it can compute: its norms take no residual but RMS norm's, its rotary
positions no interleaved pairs; its softmax takes no scale, which all cases of ours have. Liger writes rotary positions,
and the gradients of SwiGLU, over what it is given: nothing reads that again, since it is the last to be timed.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor

ABSENT = "Liger is left out: liger-kernel is not installed; `pip install liger-kernel`, or bring .gpu-pack"


def operators() -> Any | None:
    """The module of Liger's operators; None where it is not installed."""
    try:
        return importlib.import_module("liger_kernel.ops")
    except ImportError:
        return None


def liger(ops: Any, family: str, inputs: Mapping[str, Any]) -> Callable[..., Any] | None:
    """A function of the family's inputs that computes the same by Liger; None where Liger cannot."""
    make = _MAKERS.get(family)
    return None if make is None else make(ops, {name: x for name, x in inputs.items() if x is not None})


def _rms_norm(ops: Any, given: Mapping[str, Any]) -> Callable[..., Any] | None:
    if "weight" not in given or "bias" in given:
        return None
    if "residual" in given:
        return lambda x, residual, weight, eps=1e-6, **_: ops.LigerFusedAddRMSNormFunction.apply(
            x, residual, weight, eps
        )
    # Not in place, which would write over the gradient that is given.
    return lambda x, weight, eps=1e-6, **_: ops.LigerRMSNormFunction.apply(x, weight, eps, 0.0, "llama", False)


def _layer_norm(ops: Any, given: Mapping[str, Any]) -> Callable[..., Any] | None:
    if "residual" in given or not {"weight", "bias"} <= given.keys():
        return None
    return lambda x, weight, bias, eps=1e-5, **_: ops.LigerLayerNormFunction.apply(x, weight, bias, eps)


def _group_norm(ops: Any, given: Mapping[str, Any]) -> Callable[..., Any] | None:
    """SiLU behind it, where it is asked for, by torch: Liger has none there."""
    if not given["x"].is_contiguous():  # Liger would copy it
        return None

    def function(x: Tensor, num_groups: int, weight: Tensor, bias: Tensor, eps: float = 1e-5, silu: bool = False):
        y = ops.LigerGroupNormFunction.apply(x, weight, bias, x.shape[1], num_groups, eps)
        return F.silu(y) if silu else y

    return function


def _swiglu(ops: Any, given: Mapping[str, Any]) -> Callable[..., Any] | None:
    if "up" not in given:
        return None
    return lambda gate, up: ops.LigerSiLUMulFunction.apply(gate, up)


def _rope(ops: Any, given: Mapping[str, Any]) -> Callable[..., Any] | None:
    if given.get("interleaved"):
        return None

    def function(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, **_: Any) -> tuple[Tensor, ...]:
        """Liger's heads come before the length, of memory in which they come after it."""
        turned = 2 * cos.shape[-1]
        found = ops.LigerRopeFunction.apply(q.transpose(1, 2), k.transpose(1, 2), cos, sin, None, 1, turned)
        return tuple(x.transpose(1, 2) for x in found)

    return function


def _loss(ops: Any, given: Mapping[str, Any]) -> Callable[..., Any]:
    def function(
        x_ND: Tensor, weight_VD: Tensor, targets_N: Tensor, *, ignore_index: int = -100, label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor:  # fmt: skip
        options = (None, None, ignore_index, z_loss, label_smoothing, "sum")
        return ops.LigerFusedLinearCrossEntropyFunction.apply(x_ND, weight_VD, targets_N, *options)[0]

    return function


_MAKERS: dict[str, Callable[[Any, Mapping[str, Any]], Callable[..., Any] | None]] = {
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "group_norm": _group_norm,
    "swiglu": _swiglu,
    "rope": _rope,
    "linear_cross_entropy": _loss,
}
