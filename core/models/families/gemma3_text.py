"""Gemma 3's text model (Gemma team 2025): five layers with a window for one that sees all, and four norms a block."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from core.config import UserError
from core.models.families.llama import FAMILY as LLAMA
from core.models.family import FULL, FULL_LAYERS, LOCAL, Key, activation


def _modern(hf: Mapping[str, Any]) -> dict[str, Any]:
    """Older files tell of the layers' types by how many of them come before one that sees all, that one included."""
    hf = {key: value for key, value in hf.items() if (key, value) != ("use_bidirectional_attention", None)}
    if hf.get("layer_types") is None:
        num_layers, pattern = hf.get("num_hidden_layers", 26), hf.get("sliding_window_pattern", 6)
        if not isinstance(pattern, int) or pattern < 1:
            raise UserError(f"config.json has sliding_window_pattern={pattern!r}; give 6, or layer_types")
        hf["layer_types"] = [FULL if (n + 1) % pattern == 0 else LOCAL for n in range(num_layers)]
    return hf


def _check(config: Any) -> str:
    if config.window is None:
        return "window is None; family gemma3_text has one, so give --model.window"
    if config.rope_scaling is not None and config.local_rope_theta is None:
        return "rope_scaling stretches no layer with a window in family gemma3_text, so give --model.local-rope-theta"
    return ""


FAMILY = replace(
    LLAMA,
    name="gemma3_text",
    architecture="Gemma3ForCausalLM",
    keys={ours: key for ours, key in LLAMA.keys.items() if ours != "mlp_bias"}
    | {
        "vocab_size": Key("vocab_size", 262_208),
        "dim": Key("hidden_size", 2304),
        "num_layers": Key("num_hidden_layers", 26),
        "num_heads": Key("num_attention_heads", 8),
        "num_kv_heads": replace(LLAMA.keys["num_kv_heads"], default=4),
        "head_dim": replace(LLAMA.keys["head_dim"], default=256),
        "ffn_dim": Key("intermediate_size", 9216),
        "max_length": Key("max_position_embeddings", 131_072),
        "activation": activation("hidden_activation", "gelu_pytorch_tanh", gated=True),
        "tied_head": Key("tie_word_embeddings", True),
        "window": Key("sliding_window", 4096),
        "full_layers": FULL_LAYERS,
        "query_scalar": Key(
            "query_pre_attn_scalar", 256,
            lambda scalar, fields: scalar,
            lambda config: config.query_scalar or config.head_size,
        ),
    },
    fixed={
        "positions": "rotary", "norm": "rms_norm_from_one", "qk_norm": True, "out_norms": True, "mlp_bias": False,
        "scaled_embedding": True,
    },
    names=replace(
        LLAMA.names,
        modules={
            **LLAMA.names.modules,
            "blocks.{n}.attention.query_norm": "layers.{n}.self_attn.q_norm",
            "blocks.{n}.attention.key_norm": "layers.{n}.self_attn.k_norm",
            "blocks.{n}.attention_out_norm": "layers.{n}.post_attention_layernorm",
            "blocks.{n}.mlp_norm": "layers.{n}.pre_feedforward_layernorm",
            "blocks.{n}.mlp_out_norm": "layers.{n}.post_feedforward_layernorm",
        },
    ),
    only={"final_logit_softcapping": None, "attn_logit_softcapping": None, "use_bidirectional_attention": False},
    written={"attention_dropout": 0.0},
    modern=_modern,
    rope_theta=1e6,
    local_rope_theta=10_000.0,
    check=_check,
)  # fmt: skip
