"""A small BERT, with three heads, two layers and an odd vocabulary."""

from typing import Any

from core.models.decoder import DecoderConfig

SHAPE: dict[str, Any] = {
    "vocab_size": 61, "dim": 24, "num_layers": 2, "num_heads": 3, "ffn_dim": 50, "max_length": 24, "token_types": 2,
    "norm_eps": 1e-12, "activation": "gelu",
}  # fmt: skip
FIXED: dict[str, Any] = {
    "family": "bert", "causal": False, "norm_first": False, "final_norm": False, "embedding_norm": True,
    "mlm_head": True,
}  # fmt: skip


def bert(**changes: Any) -> DecoderConfig:
    return DecoderConfig(**FIXED | SHAPE | changes)
