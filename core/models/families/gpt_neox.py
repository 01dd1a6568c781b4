"""GPT-NeoX (Black et al. 2022), and Pythia: attention and MLP side by side, a part of each head turned."""

from core.models.family import Family, Key, Names, activation

FAMILY = Family(
    name="gpt_neox",
    architecture="GPTNeoXForCausalLM",
    keys={
        "vocab_size": Key("vocab_size", 50432),
        "dim": Key("hidden_size", 6144),
        "num_layers": Key("num_hidden_layers", 44),
        "num_heads": Key("num_attention_heads", 64),
        "ffn_dim": Key("intermediate_size", 24576),
        "max_length": Key("max_position_embeddings", 2048),
        "norm_eps": Key("layer_norm_eps", 1e-5),
        "activation": activation("hidden_act", "gelu"),
        "attention_bias": Key("attention_bias", True),
        "parallel_residual": Key("use_parallel_residual", True),
        "tied_head": Key("tie_word_embeddings", False),
    },
    fixed={"positions": "rotary"},
    names=Names(
        prefix="gpt_neox.",
        modules={
            "embedding.tokens": "embed_in",
            "blocks.{n}.attention_norm": "layers.{n}.input_layernorm",
            "blocks.{n}.attention.qkv": "layers.{n}.attention.query_key_value",
            "blocks.{n}.attention.out": "layers.{n}.attention.dense",
            "blocks.{n}.mlp_norm": "layers.{n}.post_attention_layernorm",
            "blocks.{n}.mlp.up": "layers.{n}.mlp.dense_h_to_4h",
            "blocks.{n}.mlp.down": "layers.{n}.mlp.dense_4h_to_h",
            "norm": "final_layer_norm",
        },
        head="embed_out.weight",
        ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
    written={"hidden_dropout": 0.0, "attention_dropout": 0.0},
    rope_theta=10_000.0,
    rotary_share=0.25,
    rope_keys=("rotary_emb_base", "rotary_pct"),
    rope_kinds={kind: kind for kind in ("linear", "dynamic", "yarn", "llama3")},
)
