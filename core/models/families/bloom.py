"""BLOOM (BigScience 2022): ALiBi, a norm behind the embedding, and our layout of qkv."""

from core.models.family import Family, Key, Names

FAMILY = Family(
    name="bloom",
    architecture="BloomForCausalLM",
    keys={
        "vocab_size": Key("vocab_size", 250880),
        "dim": Key("hidden_size", 64),
        "num_layers": Key("n_layer", 2),
        "num_heads": Key("n_head", 8),
        "ffn_dim": Key("hidden_size", 64, lambda dim, fields: 4 * dim, lambda config: config.dim),
        "max_length": Key("seq_length", 2048),  # transformers does not read it: ALiBi has no end
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "residual_after_norm": Key("apply_residual_connection_post_layernorm", False),
        "tied_head": Key("tie_word_embeddings", True),
    },
    fixed={"positions": "alibi", "embedding_norm": True},
    names=Names(
        prefix="transformer.",
        modules={
            "embedding.tokens": "word_embeddings",
            "embedding.norm": "word_embeddings_layernorm",
            "blocks.{n}.attention_norm": "h.{n}.input_layernorm",
            "blocks.{n}.attention.qkv": "h.{n}.self_attention.query_key_value",
            "blocks.{n}.attention.out": "h.{n}.self_attention.dense",
            "blocks.{n}.mlp_norm": "h.{n}.post_attention_layernorm",
            "blocks.{n}.mlp.up": "h.{n}.mlp.dense_h_to_4h",
            "blocks.{n}.mlp.down": "h.{n}.mlp.dense_4h_to_h",
            "norm": "ln_f",
        },
    ),
    aliases={"n_embed": "hidden_size", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    written={"hidden_dropout": 0.0, "attention_dropout": 0.0},
    mask_positions=True,
    check=lambda config: (
        f"ffn_dim is {config.ffn_dim}; family bloom has 4 * dim = {4 * config.dim}"
        if config.ffn_dim != 4 * config.dim else ""
    ),
)  # fmt: skip
