"""Qwen3 (Qwen team 2025): Llama with a norm of each head's query and key. Its windows are off unless a key asks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.models.families.llama import FAMILY as LLAMA
from core.models.family import Key


def _window(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    length, window = fields["max_length"], hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None
    kinds = hf.get("layer_types")
    if kinds is not None and (unknown := set(kinds) - {"full_attention", "sliding_attention"}):
        return f"layer_types with {', '.join(sorted(unknown))}, and this decoder computes full_attention"
    slides = "sliding_attention" in kinds if kinds else hf.get("max_window_layers", 28) < fields["num_layers"]
    if kinds and slides and window is None:
        return "layer_types with sliding_attention and no window; set use_sliding_window and sliding_window"
    if window is None or not slides or window >= length:
        return ""
    return f"sliding_window={window}, and this decoder attends to all of max_position_embeddings={length} tokens"


FAMILY = replace(
    LLAMA,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    keys={ours: key for ours, key in LLAMA.keys.items() if ours != "mlp_bias"}
    | {
        "vocab_size": Key("vocab_size", 151_936),
        "num_kv_heads": replace(LLAMA.keys["num_kv_heads"], default=32),
        "head_dim": replace(LLAMA.keys["head_dim"], default=128),
        "ffn_dim": Key("intermediate_size", 22_016),
        "max_length": Key("max_position_embeddings", 32_768),
    },
    fixed={**LLAMA.fixed, "mlp_bias": False, "qk_norm": True},
    names=replace(
        LLAMA.names,
        modules={
            **LLAMA.names.modules,
            "blocks.{n}.attention.query_norm": "layers.{n}.self_attn.q_norm",
            "blocks.{n}.attention.key_norm": "layers.{n}.self_attn.k_norm",
        },
    ),
    refuse=_window,
    written={"use_sliding_window": False, "sliding_window": None, "attention_dropout": 0.0},
)
