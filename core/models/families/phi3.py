"""Phi-3 (Microsoft 2024): Llama's layers, with the projections of attention in one tensor, the MLP's in another."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.models.families.llama import FAMILY as LLAMA
from core.models.family import Key

_PLAIN = {"attention_bias": False, "mlp_bias": False}
_FUSED = ("blocks.{n}.mlp.gate", "blocks.{n}.mlp.up")


def _refused(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    head = fields["dim"] // fields["num_heads"]
    if hf.get("head_dim", head) != head:
        return f"head_dim={hf['head_dim']}, and a Phi-3 has heads of hidden_size / num_attention_heads = {head}"
    return ""


FAMILY = replace(
    LLAMA,
    name="phi3",
    architecture="Phi3ForCausalLM",
    keys={ours: key for ours, key in LLAMA.keys.items() if ours not in _PLAIN and ours != "head_dim"}
    | {
        "vocab_size": Key("vocab_size", 32_064),
        "dim": Key("hidden_size", 3072),
        "ffn_dim": Key("intermediate_size", 8192),
        "max_length": Key("max_position_embeddings", 4096),
        "norm_eps": Key("rms_norm_eps", 1e-5),
        "window": Key("sliding_window", None),
    },
    fixed={**LLAMA.fixed, **_PLAIN},
    names=replace(
        LLAMA.names,
        modules={ours: theirs for ours, theirs in LLAMA.names.modules.items() if ours not in _FUSED},
        qkv=("layers.{n}.self_attn.qkv_proj",),
        fused={"layers.{n}.mlp.gate_up_proj": _FUSED},
    ),
    only=_PLAIN,
    refuse=_refused,
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attention_dropout": 0.0},
    rotary_share=1.0,
    original_length=4096,
    rope_kinds={"longrope": "longrope"},
)
