"""Mistral (Jiang et al. 2023): Llama without biases, and a window over all layers in the first release."""

from dataclasses import replace

from core.models.families.llama import FAMILY as LLAMA
from core.models.family import Key

_PLAIN = {"attention_bias": False, "mlp_bias": False}

FAMILY = replace(
    LLAMA,
    name="mistral",
    architecture="MistralForCausalLM",
    keys={ours: key for ours, key in LLAMA.keys.items() if ours not in _PLAIN}
    | {
        "num_kv_heads": replace(LLAMA.keys["num_kv_heads"], default=8),
        "ffn_dim": Key("intermediate_size", 14336),
        "max_length": Key("max_position_embeddings", 131_072),
        "window": Key("sliding_window", 4096),
    },
    fixed={**LLAMA.fixed, **_PLAIN},
    only=_PLAIN,
    written={"attention_dropout": 0.0},
)
