"""A model's norms, attention, rotary positions and SwiGLU by `core.kernels`, chosen from outside like a style.

    by_kernels(model)             before plans are applied; parameters, names and the model's code stay as they are
    by_kernels(model, shown())    only those that this GPU has shown right and not slower (core/kernels/shown_right.py)

On a GPU the kernels then run, on fp32, bf16 and fp16; elsewhere, and for what a kernel cannot do, what ran before. GELU
stays: torch's is one pass, too. So do additions of residuals: a norm with its residual is one kernel, but a block adds
in one place and norms in another.

Attention takes document boundaries as sequences of different lengths, so no bias of L x L is made for them; a document
is then one run of tokens. Padding that sees no token at all gets zeros, where torch's path lets it see itself: neither
reaches a token. Padding together with ALiBi or documents is left to torch's path.

Shapes: B batch, L length, T = B L, H query heads, J key/value heads, K head size, R turned pairs of a head, D model.
"""

from collections.abc import Callable, Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.kernels.activations import swiglu
from core.kernels.group_norm import group_norm
from core.kernels.norms import layer_norm, rms_norm
from core.kernels.operator import runs_kernel
from core.kernels.rope import rope
from core.nn.attention import (
    Attend,
    Attention,
    StepContext,
    attend,
    attend_both_ways,
    attention_by_kernel,
    rotate_both,
)
from core.nn.mlp import MLP
from core.nn.norm import RMSNormFromOne

DECODER = ("attention", "attention_varlen", "layer_norm", "rms_norm", "rope", "swiglu")
"""Families that a decoder takes."""
FAMILIES = (*DECODER, "group_norm")


def by_kernels(model: nn.Module, families: Collection[str] = FAMILIES) -> nn.Module:
    """The model, its attention, gated MLPs and norms changed in place to take kernels of these families where they run.

    Attention takes its two or none.
    """
    for module in model.modules():
        if isinstance(module, Attention):
            if {"attention", "attention_varlen"} <= set(families):
                module.attend = _BY_KERNEL.get(module.attend, module.attend)
            if "rope" in families:
                module.turn = turn_by_kernel
        elif isinstance(module, MLP) and module.gate is not None and module.activation is F.silu:
            if "swiglu" in families:
                _swiglu_by_kernel(module)
        elif isinstance(module, nn.LayerNorm | nn.RMSNorm) and len(module.normalized_shape) == 1:
            function = layer_norm if isinstance(module, nn.LayerNorm) else rms_norm
            if function.__name__ in families:
                _norm_by_kernel(module, function)
        elif isinstance(module, nn.GroupNorm) and module.affine and "group_norm" in families:
            _group_norm_by_kernel(module)
    return model


def attend_by_kernel(
    q_BLHK: Tensor,
    k_BLJK: Tensor,
    v_BLJK: Tensor,
    /,
    *,
    slopes: Tensor | None,
    window: int | None = None,
    mask: Tensor | None,
    positions: Tensor,
    context: StepContext | None,
) -> Tensor:
    """Causal attention of a whole sequence over itself (`Attend`), a document at a time where there are several."""
    return _by_kernel(q_BLHK, k_BLJK, v_BLJK, slopes, window, mask, positions, context, causal=True)


def attend_both_ways_by_kernel(
    q_BLHK: Tensor,
    k_BLJK: Tensor,
    v_BLJK: Tensor,
    /,
    *,
    slopes: Tensor | None,
    window: int | None = None,
    mask: Tensor | None,
    positions: Tensor,
    context: StepContext | None,
) -> Tensor:
    """The same with later keys, as an encoder's (`Attend`)."""
    return _by_kernel(q_BLHK, k_BLJK, v_BLJK, slopes, window, mask, positions, context, causal=False)


def _by_kernel(
    q_BLHK: Tensor, k_BLJK: Tensor, v_BLJK: Tensor, slopes: Tensor | None, window: int | None, mask: Tensor | None,
    positions: Tensor, context: StepContext | None, causal: bool,
) -> Tensor:  # fmt: skip
    documents = context.documents_BL if context is not None else None
    mixed = mask is not None and (slopes is not None or documents is not None)
    why = "padding together with ALiBi or documents" if mixed else None
    if not runs_kernel("attention", q_BLHK, unless=why):
        plain, seen = attend if causal else attend_both_ways, {"slopes": slopes, "window": window, "mask": mask}
        return plain(q_BLHK, k_BLJK, v_BLJK, **seen, positions=positions, context=context)
    return attention_by_kernel(q_BLHK, k_BLJK, v_BLJK, slopes, mask, context, causal, window)


_BY_KERNEL: dict[Attend, Attend] = {attend: attend_by_kernel, attend_both_ways: attend_both_ways_by_kernel}


def turn_by_kernel(q_BLHK: Tensor, k_BLJK: Tensor, cos_BLR: Tensor, sin_BLR: Tensor) -> tuple[Tensor, Tensor]:
    """Queries and keys turned by the angles of their positions, in one pass."""
    take = rope if runs_kernel("rope", q_BLHK) else rotate_both
    return take(q_BLHK, k_BLJK, cos_BLR, sin_BLR)


def _swiglu_by_kernel(mlp: MLP) -> None:
    plain, gate = mlp.forward, mlp.gate
    assert gate is not None

    def forward(x_BLD: Tensor, *_step: Any) -> Tensor:
        return mlp.down(swiglu(gate(x_BLD), mlp.up(x_BLD))) if runs_kernel("swiglu", x_BLD) else plain(x_BLD)

    mlp.forward = forward


def _norm_by_kernel(norm: Any, function: Callable[..., Any]) -> None:
    plain = norm.forward

    def forward(x: Tensor) -> Tensor:
        if not runs_kernel(function.__name__, x):
            return plain(x)
        eps = torch.finfo(x.dtype).eps if norm.eps is None else norm.eps
        weight = norm.gain() if isinstance(norm, RMSNormFromOne) else norm.weight
        y = function(x, weight, getattr(norm, "bias", None), eps)
        assert isinstance(y, Tensor)
        return y

    norm.forward = forward


def _group_norm_by_kernel(norm: nn.GroupNorm) -> None:
    plain = norm.forward

    def forward(input: Tensor) -> Tensor:
        if not runs_kernel("group_norm", input):
            return plain(input)
        return group_norm(input, norm.num_groups, norm.weight, norm.bias, eps=norm.eps)

    norm.forward = forward
