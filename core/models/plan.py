"""How the decoder is cut over tensor-parallel ranks: one-dimensional, with the sequence sharded in between."""

from core.models.decoder import DecoderConfig
from core.nn.mlp import is_gated
from core.parallel import sequence
from core.parallel.plan import Plan
from core.parallel.tensor1d import shard_heads


def tensor_parallel_plan(config: DecoderConfig) -> Plan:
    """The plan of `Decoder(config)` over the tp axis; only modules that this configuration has."""
    has = {
        "embedding.positions": config.positions == "learned",
        "embedding.project_in": config.embedding_size != config.dim,
        "embedding.norm": config.embedding_norm,
        "blocks.*.mlp.gate": is_gated(config.activation),
        "norm": config.final_norm,
        "project_out": config.embedding_size != config.dim,
    }
    plan: Plan = {
        "embedding.tokens": sequence.vocab_embedding,
        "embedding.positions": sequence.lookup,
        "embedding.project_in": sequence.replicate,
        "embedding.norm": sequence.replicate,
        "blocks.*.attention": shard_heads,
        "blocks.*.attention.qkv": sequence.colwise,
        "blocks.*.attention.out": sequence.rowwise,
        "blocks.*.attention_norm": sequence.replicate,
        "blocks.*.mlp": sequence.gather_input,
        "blocks.*.mlp.up": sequence.colwise_of_whole,
        "blocks.*.mlp.gate": sequence.colwise_of_whole,
        "blocks.*.mlp.down": sequence.rowwise,
        "blocks.*.mlp_norm": sequence.replicate,
        "norm": sequence.replicate,
        "project_out": sequence.replicate,
        "head": sequence.vocab_head,
    }
    return {pattern: style for pattern, style in plan.items() if has.get(pattern, True)}
