"""Llama (Touvron et al. 2023; Llama team 2024): rotary positions, RMSNorm, a gated MLP, grouped heads."""

from core.models.family import Family, Key, Names, activation

FAMILY = Family(
    name="llama",
    architecture="LlamaForCausalLM",
    keys={
        "vocab_size": Key("vocab_size", 32000),
        "dim": Key("hidden_size", 4096),
        "num_layers": Key("num_hidden_layers", 32),
        "num_heads": Key("num_attention_heads", 32),
        "num_kv_heads": Key(
            "num_key_value_heads", None,
            lambda number, fields: number if number != fields["num_heads"] else None,
            lambda config: config.kv_heads,
        ),
        "head_dim": Key(
            "head_dim", None,
            lambda size, fields: size if size != fields["dim"] // fields["num_heads"] else None,
            lambda config: config.head_size,
        ),
        "ffn_dim": Key("intermediate_size", 11008),
        "max_length": Key("max_position_embeddings", 2048),
        "norm_eps": Key("rms_norm_eps", 1e-6),
        "activation": activation("hidden_act", "silu", gated=True),
        "attention_bias": Key("attention_bias", False),
        "mlp_bias": Key("mlp_bias", False),
        "tied_head": Key("tie_word_embeddings", False),
    },
    fixed={"positions": "rotary", "norm": "rms_norm"},
    names=Names(
        prefix="model.",
        modules={
            "embedding.tokens": "embed_tokens",
            "blocks.{n}.attention_norm": "layers.{n}.input_layernorm",
            "blocks.{n}.attention.out": "layers.{n}.self_attn.o_proj",
            "blocks.{n}.mlp_norm": "layers.{n}.post_attention_layernorm",
            "blocks.{n}.mlp.up": "layers.{n}.mlp.up_proj",
            "blocks.{n}.mlp.gate": "layers.{n}.mlp.gate_proj",
            "blocks.{n}.mlp.down": "layers.{n}.mlp.down_proj",
            "norm": "norm",
        },
        qkv=("layers.{n}.self_attn.q_proj", "layers.{n}.self_attn.k_proj", "layers.{n}.self_attn.v_proj"),
        ignored=(".rotary_emb.inv_freq",),
    ),
    rope_theta=10_000.0,
    rope_kinds={kind: kind for kind in ("linear", "dynamic", "yarn", "llama3")},
    gated=True,
)  # fmt: skip
