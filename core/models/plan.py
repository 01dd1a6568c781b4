"""How the decoder is cut: over tensor-parallel ranks, the sequence sharded in between; over context-parallel ranks."""

from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.nn.mlp import is_gated
from core.parallel import sequence
from core.parallel.context import shard_sequence
from core.parallel.plan import Plan
from core.parallel.ring import attend_by_ring
from core.parallel.tensor1d import shard_heads
from core.parallel.ulysses import attend_by_both, attend_by_ulysses


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


def context_parallel_plan(mesh: MeshConfig, *, causal: bool = True) -> Plan:
    """The plan of any decoder over the cp axis. A ring's cut is zig-zag: alike much work under the causal mask.

    Without `causal` that of an encoder of the decoder's modules; Ulysses takes the `attend` that they have.
    """
    attend = {
        "ring": attend_by_ring(causal),
        "ulysses": attend_by_ulysses,
        "mixed": attend_by_both(mesh.cp_ulysses, causal),
    }
    zigzag = causal and mesh.cp_mode != "ulysses"
    return {"": shard_sequence(zigzag), "blocks.*.attention": attend[mesh.cp_mode]}
