"""OPT (Zhang et al. 2022). The 350m has its norms after the residual and an embedding narrower than the model."""

from core.models.family import Family, Key, Names, activation

FAMILY = Family(
    name="opt",
    architecture="OPTForCausalLM",
    keys={
        "vocab_size": Key("vocab_size", 50272),
        "dim": Key("hidden_size", 768),
        "num_layers": Key("num_hidden_layers", 12),
        "num_heads": Key("num_attention_heads", 12),
        "ffn_dim": Key("ffn_dim", 3072),
        "max_length": Key("max_position_embeddings", 2048),
        "norm_first": Key("do_layer_norm_before", True),
        "final_norm": Key(
            "_remove_final_layer_norm", False,
            lambda removed, fields: fields["norm_first"] and not removed,
            lambda config: config.norm_first and not config.final_norm,
        ),
        "norm_affine": Key("layer_norm_elementwise_affine", True),
        "activation": activation("activation_function", "relu"),
        "attention_bias": Key("enable_bias", True),
        "mlp_bias": Key("enable_bias", True),
        "embed_dim": Key(
            "word_embed_proj_dim", None,
            lambda size, fields: size if size and size != fields["dim"] else None,
            lambda config: config.embedding_size,
        ),
        "tied_head": Key("tie_word_embeddings", True),
    },
    fixed={"position_offset": 2},
    names=Names(
        prefix="model.decoder.",
        modules={
            "embedding.tokens": "embed_tokens",
            "embedding.positions": "embed_positions",
            "embedding.project_in": "project_in",
            "blocks.{n}.attention_norm": "layers.{n}.self_attn_layer_norm",
            "blocks.{n}.attention.out": "layers.{n}.self_attn.out_proj",
            "blocks.{n}.mlp_norm": "layers.{n}.final_layer_norm",
            "blocks.{n}.mlp.up": "layers.{n}.fc1",
            "blocks.{n}.mlp.down": "layers.{n}.fc2",
            "norm": "final_layer_norm",
            "project_out": "project_out",
        },
        qkv=("layers.{n}.self_attn.q_proj", "layers.{n}.self_attn.k_proj", "layers.{n}.self_attn.v_proj"),
    ),
    written={"dropout": 0.0, "attention_dropout": 0.0, "layerdrop": 0.0},
    mask_positions=True,
    check=lambda config: (
        "attention_bias and mlp_bias differ; family opt has one switch for both, so set them alike"
        if config.attention_bias != config.mlp_bias else ""
    ),
)  # fmt: skip
