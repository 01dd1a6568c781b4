"""Mistral (Jiang et al. 2023): Llama without biases. The first release has a window, which the decoder has not."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.models.families.llama import FAMILY as LLAMA
from core.models.family import Key

_PLAIN = {"attention_bias": False, "mlp_bias": False}


def _window(hf: Mapping[str, Any], fields: Mapping[str, Any]) -> str:
    window, length = hf.get("sliding_window", 4096), fields["max_length"]
    if window is None or window >= length:
        return ""
    return f"sliding_window={window}, and this decoder attends to all of max_position_embeddings={length} tokens"


FAMILY = replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    keys={ours: key for ours, key in LLAMA.keys.items() if ours not in _PLAIN}
    | {
        "num_kv_heads": replace(LLAMA.keys["num_kv_heads"], default=8),
        "ffn_dim": Key("intermediate_size", 14336),
        "max_length": Key("max_position_embeddings", 131_072),
    },
    fixed={**LLAMA.fixed, **_PLAIN},
    only=_PLAIN,
    refuse=_window,
    written={"sliding_window": None, "attention_dropout": 0.0},
)
