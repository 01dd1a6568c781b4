"""Hugging Face's config.json in and out.

What a family's own forward computes and this decoder does not is refused by name, never ignored. Dropout is: it is not
part of the function that the weights define.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from core.config import UserError
from core.models.decoder import DecoderConfig, RopeScaling
from core.nn.routing import MoEConfig

_ACTIVATION_OF = {
    "gelu": "gelu", "gelu_python": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh", "relu": "relu", "silu": "silu", "swish": "silu",
}  # fmt: skip
_GATED_OF = {"silu": "swiglu", "swish": "swiglu", "gelu": "geglu"}
_NAME_OF = {"gelu": "gelu", "gelu_tanh": "gelu_new", "relu": "relu", "silu": "silu", "swiglu": "silu", "geglu": "gelu"}


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """The configuration that a config.json describes. Raises UserError for what this decoder does not compute."""
    family = hf.get("model_type")
    if family not in _FROM_HF:
        raise UserError(f"model_type is {family!r}; this decoder loads {', '.join(_FROM_HF)}")
    try:
        return _FROM_HF[family](hf)
    except KeyError as error:
        raise UserError(f"config.json of a {family} model lacks {error}; copy the folder again") from error


def _activation(name: str, table: Mapping[str, str] = _ACTIVATION_OF) -> Any:
    if name not in table:
        raise UserError(f"activation {name!r} is not one that this decoder computes: {', '.join(table)}")
    return table[name]


def _refuse(hf: Mapping[str, Any], **expected: Any) -> None:
    for name, value in expected.items():
        if hf.get(name, value) != value:
            raise UserError(f"config.json has {name}={hf[name]!r}; this decoder computes only {value!r}")


def _gpt2_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    _refuse(hf, scale_attn_weights=True, scale_attn_by_inverse_layer_idx=False, add_cross_attention=False)
    return DecoderConfig(
        family="gpt2",
        vocab_size=hf["vocab_size"],
        dim=hf["n_embd"],
        num_layers=hf["n_layer"],
        num_heads=hf["n_head"],
        ffn_dim=hf.get("n_inner") or 4 * hf["n_embd"],
        max_length=hf["n_positions"],
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        activation=_activation(hf.get("activation_function", "gelu_new")),
        tied_head=hf.get("tie_word_embeddings", True),
    )


def _gpt2_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "n_embd": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.ffn_dim,
        "n_positions": config.max_length,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": _NAME_OF[config.activation],
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
    }


def _opt_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    norm_first = hf.get("do_layer_norm_before", True)
    embed_dim = hf.get("word_embed_proj_dim") or hf["hidden_size"]
    return DecoderConfig(
        family="opt",
        vocab_size=hf["vocab_size"],
        dim=hf["hidden_size"],
        num_layers=hf["num_hidden_layers"],
        num_heads=hf["num_attention_heads"],
        ffn_dim=hf["ffn_dim"],
        max_length=hf["max_position_embeddings"],
        position_offset=2,
        norm_first=norm_first,
        final_norm=norm_first and not hf.get("_remove_final_layer_norm", False),
        norm_affine=hf.get("layer_norm_elementwise_affine", True),
        activation=_activation(hf.get("activation_function", "relu")),
        attention_bias=hf.get("enable_bias", True),
        mlp_bias=hf.get("enable_bias", True),
        embed_dim=embed_dim if embed_dim != hf["hidden_size"] else None,
        tied_head=hf.get("tie_word_embeddings", True),
    )


def _opt_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "ffn_dim": config.ffn_dim,
        "max_position_embeddings": config.max_length,
        "do_layer_norm_before": config.norm_first,
        "_remove_final_layer_norm": config.norm_first and not config.final_norm,
        "word_embed_proj_dim": config.embedding_size,
        "activation_function": _NAME_OF[config.activation],
        "enable_bias": config.attention_bias,
        "layer_norm_elementwise_affine": config.norm_affine,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "layerdrop": 0.0,
    }


def _bloom_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    dim = hf["n_embed"] if "n_embed" in hf else hf["hidden_size"]
    return DecoderConfig(
        family="bloom",
        vocab_size=hf["vocab_size"],
        dim=dim,
        num_layers=hf["n_layer"] if "n_layer" in hf else hf["num_hidden_layers"],
        num_heads=hf["n_head"] if "n_head" in hf else hf["num_attention_heads"],
        ffn_dim=4 * dim,
        max_length=hf.get("seq_length", 2048),
        positions="alibi",
        embedding_norm=True,
        norm_eps=hf.get("layer_norm_epsilon", 1e-5),
        residual_after_norm=hf.get("apply_residual_connection_post_layernorm", False),
        tied_head=hf.get("tie_word_embeddings", True),
    )


def _bloom_to_hf(config: DecoderConfig) -> dict[str, Any]:
    return {
        "architectures": ["BloomForCausalLM"],
        "hidden_size": config.dim,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "seq_length": config.max_length,
        "layer_norm_epsilon": config.norm_eps,
        "apply_residual_connection_post_layernorm": config.residual_after_norm,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
    }


def _llama_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    theta, scaling = _rope_from_hf(hf)
    dim, num_heads = hf["hidden_size"], hf["num_attention_heads"]
    head_dim, num_kv_heads = hf.get("head_dim"), hf.get("num_key_value_heads")
    return DecoderConfig(
        family="llama",
        vocab_size=hf["vocab_size"],
        dim=dim,
        num_layers=hf["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=num_kv_heads if num_kv_heads != num_heads else None,
        head_dim=head_dim if head_dim != dim // num_heads else None,
        ffn_dim=hf["intermediate_size"],
        max_length=hf["max_position_embeddings"],
        positions="rotary",
        rope_theta=theta,
        rope_scaling=scaling,
        norm="rms_norm",
        norm_eps=hf.get("rms_norm_eps", 1e-6),
        activation=_activation(hf.get("hidden_act", "silu"), _GATED_OF),
        attention_bias=hf.get("attention_bias", False),
        mlp_bias=hf.get("mlp_bias", False),
        tied_head=hf.get("tie_word_embeddings", False),
    )


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """transformers 5 writes rope_parameters; 4 wrote rope_theta and rope_scaling."""
    rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
    theta = rope.get("rope_theta") or hf.get("rope_theta", 10_000.0)
    kind = rope.get("rope_type") or rope.get("type", "default")
    _refuse(rope, partial_rotary_factor=1.0)
    if kind == "default":
        return theta, None
    if kind != "llama3":
        raise UserError(f"rotary positions of type {kind!r}; this decoder computes default and llama3")
    return theta, RopeScaling(
        factor=rope["factor"],
        low_freq_factor=rope["low_freq_factor"],
        high_freq_factor=rope["high_freq_factor"],
        original_max_length=rope["original_max_position_embeddings"],
    )


def _llama_to_hf(config: DecoderConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= {
            "rope_type": "llama3",
            "factor": config.rope_scaling.factor,
            "low_freq_factor": config.rope_scaling.low_freq_factor,
            "high_freq_factor": config.rope_scaling.high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling.original_max_length,
        }
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": config.dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_length,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": _NAME_OF[config.activation],
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "rope_parameters": rope,
    }


def _mixtral_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    _refuse(hf, sliding_window=None, attention_bias=False, mlp_bias=False, hidden_act="silu")
    moe = MoEConfig(
        num_experts=hf["num_local_experts"],
        experts_per_token=hf["num_experts_per_tok"],
        balance_weight=hf.get("router_aux_loss_coef", 0.001),
        jitter=hf.get("router_jitter_noise", 0.0),
    )
    theirs = {"rope_theta": 1e6, "rms_norm_eps": 1e-5, **hf}  # their defaults where Llama's are others
    return replace(_llama_from_hf(theirs), moe=moe)


def _mixtral_to_hf(config: DecoderConfig) -> dict[str, Any]:
    content = _llama_to_hf(config)
    del content["attention_bias"], content["mlp_bias"]
    return content | {
        "architectures": ["MixtralForCausalLM"],
        "num_local_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.per_token,
        "router_aux_loss_coef": config.moe.balance_weight,
        "router_jitter_noise": config.moe.jitter,
        "sliding_window": None,
        "attention_dropout": 0.0,
    }


NO_ARCHITECTURE = (
    "transformers has no architecture of these experts; it has Mixtral: family llama, swiglu, no biases, router topk, "
    "experts in every block"
)


def has_architecture(config: DecoderConfig) -> bool:
    """Whether transformers has a class that computes this decoder."""
    if not config.moe.num_experts:
        return True
    is_mixtral = config.family == "llama" and config.activation == "swiglu" and config.moe.router == "topk"
    return is_mixtral and config.moe.every == 1 and not (config.attention_bias or config.mlp_bias)


def model_type_of(config: DecoderConfig) -> str:
    """What transformers calls this decoder.  Raises UserError where it has no such class."""
    if not has_architecture(config):
        raise UserError(f"cannot write a Hugging Face folder: {NO_ARCHITECTURE}; the checkpoints hold the weights")
    return "mixtral" if config.moe.num_experts else config.family


_FROM_HF: dict[str, Callable[[Mapping[str, Any]], DecoderConfig]] = {
    "gpt2": _gpt2_from_hf, "opt": _opt_from_hf, "bloom": _bloom_from_hf, "llama": _llama_from_hf,
    "mixtral": _mixtral_from_hf,
}  # fmt: skip
_TO_HF = {
    "gpt2": _gpt2_to_hf, "opt": _opt_to_hf, "bloom": _bloom_to_hf, "llama": _llama_to_hf, "mixtral": _mixtral_to_hf,
}  # fmt: skip


def config_to_hf(config: DecoderConfig, special_ids: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The content of config.json. special_ids: bos_token_id, eos_token_id, pad_token_id, where there are such.

    Raises UserError where transformers has no class that computes this decoder.
    """
    kind = model_type_of(config)
    ids = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | dict(special_ids or {})
    shared = {"model_type": kind, "vocab_size": config.vocab_size, "tie_word_embeddings": config.tied_head}
    return shared | _TO_HF[kind](config) | ids
