"""Qwen3 (Qwen team 2025): Llama with a norm of each head's query and key. Its windows are off unless a key asks."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.models.families.llama import FAMILY as LLAMA
from core.models.family import FULL, FULL_LAYERS, LOCAL, Key


def _modern(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The window, if it is switched on, and each layer's type; older files count the layers before those with one."""
    window, types = hf.get("sliding_window", 4096) if hf.get("use_sliding_window") else None, hf.get("layer_types")
    if types is None:
        before = hf.get("num_hidden_layers", 32) if window is None else hf.get("max_window_layers", 28)
        types = [FULL if n < before else LOCAL for n in range(hf.get("num_hidden_layers", 32))]
    return {**hf, "sliding_window": window, "layer_types": types}


def _refused(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    if LOCAL in hf["layer_types"] and fields["window"] is None:
        return f"layer_types with {LOCAL} and no window; set use_sliding_window and sliding_window"
    return ""


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
        "window": Key("sliding_window", 4096),
        "full_layers": FULL_LAYERS,
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
    modern=_modern,
    refuse=_refused,
    written={"use_sliding_window": lambda config: config.window is not None, "attention_dropout": 0.0},
)
