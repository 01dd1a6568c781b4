"""GPT-2 (Radford et al. 2019), and GPT-3's shapes. Its blocks' weights are stored as [in, out]."""

from core.models.family import Family, Key, Names, activation

FAMILY = Family(
    name="gpt2",
    architecture="GPT2LMHeadModel",
    keys={
        "vocab_size": Key("vocab_size", 50257),
        "dim": Key("n_embd", 768),
        "num_layers": Key("n_layer", 12),
        "num_heads": Key("n_head", 12),
        "ffn_dim": Key("n_inner", None, lambda size, fields: size or 4 * fields["dim"]),
        "max_length": Key("n_positions", 1024),
        "norm_eps": Key("layer_norm_epsilon", 1e-5),
        "activation": activation("activation_function", "gelu_new"),
        "tied_head": Key("tie_word_embeddings", True),
    },
    names=Names(
        prefix="transformer.",
        modules={
            "embedding.tokens": "wte",
            "embedding.positions": "wpe",
            "blocks.{n}.attention_norm": "h.{n}.ln_1",
            "blocks.{n}.attention.out": "h.{n}.attn.c_proj",
            "blocks.{n}.mlp_norm": "h.{n}.ln_2",
            "blocks.{n}.mlp.up": "h.{n}.mlp.c_fc",
            "blocks.{n}.mlp.down": "h.{n}.mlp.c_proj",
            "norm": "ln_f",
        },
        qkv=("h.{n}.attn.c_attn",),
        transposed=True,
        ignored=(".attn.bias", ".attn.masked_bias"),
    ),
    aliases={
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
    },
    only={"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    written={"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
)  # fmt: skip
