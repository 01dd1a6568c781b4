"""BERT (Devlin et al. 2019) with its masked-language-model head: attends both ways, norms behind the residuals.

Files of pretraining also hold a pooler and a classifier of next sentences, which this head does not use.
"""

from core.models.family import Family, Key, Names, activation

FAMILY = Family(
    name="bert",
    architecture="BertForMaskedLM",
    keys={
        "vocab_size": Key("vocab_size", 30522),
        "dim": Key("hidden_size", 768),
        "num_layers": Key("num_hidden_layers", 12),
        "num_heads": Key("num_attention_heads", 12),
        "ffn_dim": Key("intermediate_size", 3072),
        "max_length": Key("max_position_embeddings", 512),
        "token_types": Key("type_vocab_size", 2),
        "norm_eps": Key("layer_norm_eps", 1e-12),
        "activation": activation("hidden_act", "gelu"),
    },
    fixed={
        "causal": False, "norm_first": False, "final_norm": False, "embedding_norm": True, "mlm_head": True,
    },
    names=Names(
        prefix="",
        modules={
            "embedding.tokens": "bert.embeddings.word_embeddings",
            "embedding.positions": "bert.embeddings.position_embeddings",
            "embedding.types": "bert.embeddings.token_type_embeddings",
            "embedding.norm": "bert.embeddings.LayerNorm",
            "blocks.{n}.attention.out": "bert.encoder.layer.{n}.attention.output.dense",
            "blocks.{n}.attention_norm": "bert.encoder.layer.{n}.attention.output.LayerNorm",
            "blocks.{n}.mlp.up": "bert.encoder.layer.{n}.intermediate.dense",
            "blocks.{n}.mlp.down": "bert.encoder.layer.{n}.output.dense",
            "blocks.{n}.mlp_norm": "bert.encoder.layer.{n}.output.LayerNorm",
            "head_transform.dense": "cls.predictions.transform.dense",
            "head_transform.norm": "cls.predictions.transform.LayerNorm",
            "head": "cls.predictions",
        },
        qkv=tuple("bert.encoder.layer.{n}.attention.self." + part for part in ("query", "key", "value")),
        head="cls.predictions.decoder.weight",
        renamed={".gamma": ".weight", ".beta": ".bias"},
        ignored=(
            "bert.embeddings.position_ids", "bert.pooler.dense.weight", "bert.pooler.dense.bias",
            "cls.seq_relationship.weight", "cls.seq_relationship.bias",
            "cls.predictions.decoder.bias",  # of a tied head, whose bias is cls.predictions.bias
        ),
    ),
    only={
        "tie_word_embeddings": True, "position_embedding_type": "absolute", "is_decoder": False,
        "add_cross_attention": False,
    },
    written={"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "tie_word_embeddings": True},
    check=lambda config: (
        "token_types is 0; family bert has at least one, the type of every token" if not config.token_types else ""
    ),
)  # fmt: skip
