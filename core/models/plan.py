"""How the decoder is cut: over tensor-parallel ranks, over context-parallel ranks, and into pipeline stages.

1d        Megatron's pairs of linear layers, with the sequence sharded in between
2d, 2.5d  every weight and activation on two axes of a grid
3d        on all three; the residual stream on one side of the linear layers, heads and hidden features on the other

Experts are dealt out over the ep axis and the rows of a grid; their hidden features are cut over tp, or its columns.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from types import MappingProxyType

from core.config import UserError
from core.mesh import EXPERT_AXIS, MeshConfig, TpMode, Zero
from core.models.decoder import DecoderConfig, decoder_without_memory
from core.nn.mlp import is_gated
from core.parallel import expert, grid, sequence, tensor2d, tensor3d
from core.parallel.context import ONE_AXIS, shard_sequence
from core.parallel.grid import FIRST, SECOND
from core.parallel.ring import attend_by_ring
from core.parallel.tensor1d import (
    REDUCE,
    WHOLE,
    Move,
    colwise_by,
    norm_of_heads,
    rowwise_by,
    shard_heads,
    vocab_embedding_by,
    vocab_head_by,
)
from core.parallel.ulysses import attend_by_both, attend_by_ulysses
from core.placement.stages import ALIKE, Costs, PipelinePlan
from core.placement.style import Plan, Style
from core.placement.table import ModelPlan, Placed, placement


def decoder_plan(config: DecoderConfig, mesh: MeshConfig, costs: Costs = ALIKE) -> ModelPlan:
    """How `Decoder(config)` is spread over a mesh.

    costs  what its pipeline stages are balanced by
    """
    return ModelPlan(
        tensor=tensor_parallel_plan(config, mesh.tp_mode, mesh.ep),
        context=context_parallel_plan(mesh, config),
        experts=expert_parallel_plan(config, mesh.tp_mode),
        pipeline=pipeline_plan(costs),
    )


@lru_cache(64)
def decoder_table(config: DecoderConfig, mesh: MeshConfig, zero: Zero = 0) -> Mapping[str, Placed]:
    """Where the parameters of `Decoder(config)` lie on a resolved mesh, all stages' alike.

    Raises UserError for what cannot run on it: heads, experts or a vocabulary that leave a rank without any.
    """
    return MappingProxyType(placement(decoder_without_memory(config), decoder_plan(config, mesh), mesh, zero))


def tensor_parallel_plan(config: DecoderConfig, mode: TpMode = "1d", ep: int = 1) -> Plan:
    """The plan of `Decoder(config)` over what `core.mesh.tensor_axes` gives in this mode; only modules that it has.

    ep  ranks of expert parallelism: over them, too, a grid deals experts out
    """
    has = {
        "embedding.positions": config.positions == "learned",
        "embedding.types": config.token_types > 0,
        "embedding.project_in": config.embedding_size != config.dim,
        "embedding.norm": config.embedding_norm,
        "blocks.*.attention.query_norm": config.qk_norm,
        "blocks.*.attention.key_norm": config.qk_norm,
        "blocks.*.attention_out_norm": config.out_norms,
        "blocks.*.mlp_out_norm": config.out_norms,
        "blocks.*.mlp.up": not _all_have_experts(config),
        "blocks.*.mlp.gate": is_gated(config.activation) and not _all_have_experts(config),
        "blocks.*.mlp.down": not _all_have_experts(config),
        "norm": config.final_norm,
        "project_out": config.embedding_size != config.dim,
        "head_transform": config.mlm_head,
        "head_transform.dense": config.mlm_head,
        "head_transform.norm": config.mlm_head,
    }
    if mode == "3d" and config.mlm_head:
        raise UserError(
            f"mesh.tp_mode={mode}: the layer before the head of family {config.family} leaves activations on the side "
            "of a cube where its tied head is not; use --mesh.tp-mode 1d, 2d or 2.5d"
        )
    plan = {"1d": _plan_1d, "2d": _plan_2d, "2.5d": _plan_2d, "3d": _plan_3d}[mode](config)
    if mode != "1d" and (layers := _expert_layers(config)):
        axes = FIRST.rows if ep == 1 else (EXPERT_AXIS, *FIRST.rows)
        plan = {**plan, **dict.fromkeys(layers, expert.on_grid(axes))}
    return {pattern: style for pattern, style in plan.items() if has.get(pattern, True)}


def replicated_plan(config: DecoderConfig, total: Move = REDUCE.move) -> Plan:
    """1d for inference without experts: activations between the pairs lie on every rank, two sums a block.

    For few tokens: what the sequence's sharding saves of memory is little then, and its messages are twice as many.
    total  the sum over the axis of what a rowwise layer leaves
    """
    columns, leave = colwise_by(WHOLE), replace(REDUCE, move=total)
    gate = {"blocks.*.mlp.gate": columns} if is_gated(config.activation) else {}
    return {
        "embedding.tokens": vocab_embedding_by(leave),
        "blocks.*.attention": shard_heads,
        "blocks.*.attention.qkv": columns,
        "blocks.*.attention.out": rowwise_by(leave),
        "blocks.*.mlp.up": columns,
        **gate,
        "blocks.*.mlp.down": rowwise_by(leave),
        "head": vocab_head_by(WHOLE),
    }


def _all_have_experts(config: DecoderConfig) -> bool:
    return all(map(config.moe.has_experts, range(config.num_layers)))


def _expert_layers(config: DecoderConfig) -> list[str]:
    """Names of the modules that are experts behind a router."""
    return [f"blocks.{index}.mlp" for index in range(config.num_layers) if config.moe.has_experts(index)]


def expert_parallel_plan(config: DecoderConfig, mode: TpMode = "1d") -> Plan:
    """The plan of `Decoder(config)` over the mesh's ep axis; of a grid the tensor plan has all that is to be done."""
    return dict.fromkeys(_expert_layers(config), expert.expert_parallel if mode == "1d" else Style())


def _plan_1d(config: DecoderConfig) -> Plan:
    with_experts = dict.fromkeys(_expert_layers(config), expert.tensor_parallel)
    dense = [f"blocks.{n}.mlp" for n in range(config.num_layers)] if with_experts else ["blocks.*.mlp"]
    gathered = {name: sequence.gather_input for name in dense if name not in with_experts}
    return {
        "embedding.tokens": sequence.vocab_embedding,
        "embedding.positions": sequence.lookup,
        "embedding.types": sequence.lookup,
        "embedding.project_in": sequence.replicate,
        "embedding.norm": sequence.replicate,
        "blocks.*.attention": shard_heads,
        "blocks.*.attention.qkv": sequence.colwise,
        "blocks.*.attention.query_norm": norm_of_heads,
        "blocks.*.attention.key_norm": norm_of_heads,
        "blocks.*.attention.out": sequence.rowwise,
        "blocks.*.attention_norm": sequence.replicate,
        "blocks.*.attention_out_norm": sequence.replicate,
        **gathered,
        **with_experts,
        "blocks.*.mlp.up": sequence.colwise_of_whole,
        "blocks.*.mlp.gate": sequence.colwise_of_whole,
        "blocks.*.mlp.down": sequence.rowwise,
        "blocks.*.mlp_norm": sequence.replicate,
        "blocks.*.mlp_out_norm": sequence.replicate,
        "norm": sequence.replicate,
        "project_out": sequence.replicate,
        "head_transform": sequence.replicate,
        "head": sequence.vocab_head,
    }


def _plan_2d(config: DecoderConfig) -> Plan:
    """On q x q ranks, or q x q x d: activations lie alike everywhere."""
    group = config.num_heads // config.kv_heads
    return {
        "embedding.tokens": tensor2d.embedding,
        "embedding.positions": tensor2d.positions,
        "embedding.types": tensor2d.positions,
        "embedding.project_in": tensor2d.linear,
        "embedding.norm": grid.norm,
        "blocks.*.attention": grid.attention,
        "blocks.*.attention.qkv": tensor2d.linear_in_units(out_unit=(group + 2) * config.head_size),
        "blocks.*.attention.query_norm": grid.norm_of_heads_at(FIRST),
        "blocks.*.attention.key_norm": grid.norm_of_heads_at(FIRST),
        "blocks.*.attention.out": tensor2d.linear_in_units(in_unit=group * config.head_size),
        "blocks.*.attention_norm": grid.norm,
        "blocks.*.attention_out_norm": grid.norm,
        "blocks.*.mlp.up": tensor2d.linear,
        "blocks.*.mlp.gate": tensor2d.linear,
        "blocks.*.mlp.down": tensor2d.linear,
        "blocks.*.mlp_norm": grid.norm,
        "blocks.*.mlp_out_norm": grid.norm,
        "norm": grid.norm,
        "project_out": tensor2d.linear,
        "head_transform.dense": tensor2d.linear,
        "head_transform.norm": grid.norm,
        "head": tensor2d.head,
        "": grid.drop_padding,
    }


def _plan_3d(config: DecoderConfig) -> Plan:
    """On p x p x p ranks. Embeddings of another size than the model's lie on the second side, before its layers."""
    group, units = config.num_heads // config.kv_heads, tensor3d.linear_in_units
    outside = FIRST if config.embedding_size == config.dim else SECOND
    return {
        "embedding.tokens": tensor3d.embedding_on(outside),
        "embedding.positions": tensor3d.positions,
        "embedding.project_in": tensor3d.linear_back,
        "embedding.norm": grid.norm,
        "blocks.*.attention": grid.attention_at(SECOND),
        "blocks.*.attention.qkv": units(FIRST, out_unit=(group + 2) * config.head_size),
        "blocks.*.attention.query_norm": grid.norm_of_heads_at(SECOND),
        "blocks.*.attention.key_norm": grid.norm_of_heads_at(SECOND),
        "blocks.*.attention.out": units(SECOND, in_unit=group * config.head_size),
        "blocks.*.attention_norm": grid.norm,
        "blocks.*.attention_out_norm": grid.norm,
        "blocks.*.mlp.up": tensor3d.linear,
        "blocks.*.mlp.gate": tensor3d.linear,
        "blocks.*.mlp.down": tensor3d.linear_back,
        "blocks.*.mlp_norm": grid.norm,
        "blocks.*.mlp_out_norm": grid.norm,
        "norm": grid.norm,
        "project_out": tensor3d.linear,
        "head": tensor3d.head_on(outside),
        "": grid.drop_padding,
    }


def context_parallel_plan(mesh: MeshConfig, config: DecoderConfig) -> Plan:
    """The plan of `Decoder(config)` over the cp axis; Ulysses takes the `attend` that the attention has.

    A ring's cut is zig-zag under the causal mask alone: then alike much work. Both ways, it is in any case.
    """
    side = {"1d": ONE_AXIS, "3d": SECOND}.get(mesh.tp_mode, FIRST)
    attend = {
        "ring": attend_by_ring(config.causal, side),
        "ulysses": attend_by_ulysses(side),
        "mixed": attend_by_both(mesh.cp_ulysses, config.causal, side),
    }
    zigzag = config.causal and mesh.cp_mode != "ulysses"
    plan = {"": shard_sequence(zigzag), "blocks.*.attention": attend[mesh.cp_mode]}
    return plan | dict.fromkeys(_expert_layers(config), expert.share_rows)


def pipeline_plan(costs: Costs = ALIKE) -> PipelinePlan:
    """The plan of any decoder over the pp axis; norm, head and loss are on the last stage, behind the blocks."""
    return PipelinePlan("blocks", before=("embedding",), costs=costs)
