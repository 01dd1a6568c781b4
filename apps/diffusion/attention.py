"""The way in which U-Net and VAE compute attention, set from outside.

    flash    torch's scaled_dot_product_attention: a flash or memory-efficient kernel where the device has one, which
             holds no matrix of scores
    sliced   the scores of a few heads at a time, for devices without such a kernel

The modules' own `set_attn_processor` is the one switch that reaches these models: diffusers' `set_attention_backend`
is accepted and changes nothing, as their processors do not look at it.

Shapes: B pictures, L positions, M positions of what is attended to, D channels, N heads of all pictures, K of a head.
"""

from typing import Any, Literal, get_args

import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from torch import Tensor

from core.config import UserError

AttentionName = Literal["flash", "sliced"]


def set_attention(module: Any, name: AttentionName, heads_at_once: int = 1) -> None:
    """Give every attention of a U-Net or a VAE its processor.

    heads_at_once  sliced: heads, counted over all pictures, whose scores are there together
    """
    if name not in get_args(AttentionName):
        raise UserError(f"no attention {name!r}; choose from {', '.join(get_args(AttentionName))}")
    if heads_at_once < 1:
        raise UserError(f"heads_at_once is {heads_at_once}; give at least 1")
    module.set_attn_processor(AttnProcessor2_0() if name == "flash" else SlicedAttention(heads_at_once))


class SlicedAttention:
    """A processor of diffusers' `Attention`, without masks and adapters, which Stable Diffusion has not."""

    def __init__(self, heads_at_once: int = 1):
        self.heads_at_once = heads_at_once

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
    ) -> Tensor:
        assert attention_mask is None
        x_BLD = hidden_states.flatten(2).mT if hidden_states.ndim == 4 else hidden_states
        if attn.group_norm is not None:
            x_BLD = attn.group_norm(x_BLD.mT).mT
        context_BMD = x_BLD if encoder_hidden_states is None else encoder_hidden_states
        q_NLK, k_NMK, v_NMK = map(
            attn.head_to_batch_dim, (attn.to_q(x_BLD), attn.to_k(context_BMD), attn.to_v(context_BMD))
        )
        slices = [slice(first, first + self.heads_at_once) for first in range(0, len(q_NLK), self.heads_at_once)]
        y_NLK = torch.cat([_attend(q_NLK[s], k_NMK[s], v_NMK[s], attn.scale) for s in slices])
        y_BLD = attn.to_out[1](attn.to_out[0](attn.batch_to_head_dim(y_NLK)))
        y = y_BLD.mT.unflatten(2, hidden_states.shape[2:]) if hidden_states.ndim == 4 else y_BLD
        return (y + hidden_states if attn.residual_connection else y) / attn.rescale_output_factor


def _attend(q_NLK: Tensor, k_NMK: Tensor, v_NMK: Tensor, scale: float) -> Tensor:
    """Scores in at least fp32: the second model's overflow in fp16."""
    scores_NLM = (
        (q_NLK * scale).float() @ k_NMK.float().mT if q_NLK.dtype != torch.float64 else q_NLK @ k_NMK.mT * scale
    )
    return scores_NLM.softmax(-1).to(v_NMK.dtype) @ v_NMK
