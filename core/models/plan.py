"""How the decoder is cut: over tensor-parallel ranks, over context-parallel ranks, and into pipeline stages.

1d        Megatron's pairs of linear layers, with the sequence sharded in between
2d, 2.5d  every weight and activation on two axes of a grid
3d        on all three; the residual stream on one side of the linear layers, heads and hidden features on the other

Experts are dealt out over the ep axis; under 1d their hidden features are cut, too.
"""

from functools import partial

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.comm.collectives import reduce_from
from core.config import UserError
from core.mesh import MeshConfig, TpMode
from core.models.decoder import DecoderConfig
from core.nn.mlp import is_gated
from core.parallel import expert, grid, sequence, tensor2d, tensor3d
from core.parallel.context import shard_sequence
from core.parallel.pipeline.split import ALIKE, Costs, PipelinePlan
from core.parallel.plan import Plan
from core.parallel.ring import attend_by_ring
from core.parallel.tensor1d import (
    Transition,
    check_heads,
    colwise,
    rowwise,
    shard_heads,
    vocab_embedding,
    vocab_head,
)
from core.parallel.ulysses import attend_by_both, attend_by_ulysses


def tensor_parallel_plan(config: DecoderConfig, mode: TpMode = "1d") -> Plan:
    """The plan of `Decoder(config)` over what `core.mesh.tensor_axes` gives in this mode; only modules that it has."""
    has = {
        "embedding.positions": config.positions == "learned",
        "embedding.project_in": config.embedding_size != config.dim,
        "embedding.norm": config.embedding_norm,
        "blocks.*.mlp.up": not _all_have_experts(config),
        "blocks.*.mlp.gate": is_gated(config.activation) and not _all_have_experts(config),
        "blocks.*.mlp.down": not _all_have_experts(config),
        "norm": config.final_norm,
        "project_out": config.embedding_size != config.dim,
    }
    if mode != "1d" and config.moe.num_experts:
        raise UserError(f"tp_mode={mode} does not cut experts; use --mesh.tp-mode 1d, or a model without them")
    plan = {"1d": _plan_1d, "2d": _plan_2d, "2.5d": _plan_2d, "3d": _plan_3d}[mode](config)
    return {pattern: style for pattern, style in plan.items() if has.get(pattern, True)}


def replicated_plan(config: DecoderConfig, total: Transition = reduce_from) -> Plan:
    """1d for inference without experts: activations between the pairs lie on every rank, two sums a block.

    For few tokens: what the sequence's sharding saves of memory is little then, and its messages are twice as many.
    total  the sum over the axis of what a rowwise layer leaves
    """
    gate = {"blocks.*.mlp.gate": _colwise_of_all} if is_gated(config.activation) else {}
    return {
        "embedding.tokens": partial(vocab_embedding, leave=total),
        "blocks.*.attention": shard_heads,
        "blocks.*.attention.qkv": _colwise_of_all,
        "blocks.*.attention.out": partial(rowwise, leave=total),
        "blocks.*.mlp.up": _colwise_of_all,
        **gate,
        "blocks.*.mlp.down": partial(rowwise, leave=total),
        "head": partial(vocab_head, enter=_as_it_is),
    }


def _as_it_is(x: Tensor, _axis: DeviceMesh) -> Tensor:
    return x


_colwise_of_all = partial(colwise, enter=_as_it_is)


def _all_have_experts(config: DecoderConfig) -> bool:
    return all(map(config.moe.has_experts, range(config.num_layers)))


def _expert_layers(config: DecoderConfig) -> list[str]:
    """Names of the modules that are experts behind a router."""
    return [f"blocks.{index}.mlp" for index in range(config.num_layers) if config.moe.has_experts(index)]


def expert_parallel_plan(config: DecoderConfig) -> Plan:
    """The plan of `Decoder(config)` over the mesh's ep axis."""
    return dict.fromkeys(_expert_layers(config), expert.expert_parallel)


def check_experts_of(config: DecoderConfig, mesh: MeshConfig) -> None:
    """Raises UserError where the model's experts cannot run on the mesh."""
    if mesh.ep > 1:
        expert.check_experts(config.moe.num_experts, mesh.ep)
    if config.moe.num_experts and mesh.tp_mode != "1d":
        raise UserError(
            f"mesh.tp_mode={mesh.tp_mode} does not cut experts; use --mesh.tp-mode 1d, or a model without them"
        )


def check_heads_of(config: DecoderConfig, mesh: MeshConfig) -> None:
    """Raises UserError where the heads cannot be dealt out over the mesh's tensor-parallel ranks."""
    if mesh.tp_mode == "1d":
        check_heads(config.num_heads, config.kv_heads, mesh.tp)
    else:
        grid.check_grid_heads(config.kv_heads, mesh.grid[-1])


def _plan_1d(config: DecoderConfig) -> Plan:
    with_experts = dict.fromkeys(_expert_layers(config), expert.tensor_parallel)
    dense = [f"blocks.{n}.mlp" for n in range(config.num_layers)] if with_experts else ["blocks.*.mlp"]
    gathered = {name: sequence.gather_input for name in dense if name not in with_experts}
    return {
        "embedding.tokens": sequence.vocab_embedding,
        "embedding.positions": sequence.lookup,
        "embedding.project_in": sequence.replicate,
        "embedding.norm": sequence.replicate,
        "blocks.*.attention": shard_heads,
        "blocks.*.attention.qkv": sequence.colwise,
        "blocks.*.attention.out": sequence.rowwise,
        "blocks.*.attention_norm": sequence.replicate,
        **gathered,
        **with_experts,
        "blocks.*.mlp.up": sequence.colwise_of_whole,
        "blocks.*.mlp.gate": sequence.colwise_of_whole,
        "blocks.*.mlp.down": sequence.rowwise,
        "blocks.*.mlp_norm": sequence.replicate,
        "norm": sequence.replicate,
        "project_out": sequence.replicate,
        "head": sequence.vocab_head,
    }


def _plan_2d(config: DecoderConfig) -> Plan:
    """On q x q ranks, or q x q x d: activations lie alike everywhere."""
    group = config.num_heads // config.kv_heads
    return {
        "embedding.tokens": tensor2d.embedding,
        "embedding.positions": tensor2d.positions,
        "embedding.project_in": tensor2d.linear,
        "embedding.norm": grid.norm,
        "blocks.*.attention": grid.attention,
        "blocks.*.attention.qkv": partial(tensor2d.linear, out_unit=(group + 2) * config.head_size),
        "blocks.*.attention.out": partial(tensor2d.linear, in_unit=group * config.head_size),
        "blocks.*.attention_norm": grid.norm,
        "blocks.*.mlp.up": tensor2d.linear,
        "blocks.*.mlp.gate": tensor2d.linear,
        "blocks.*.mlp.down": tensor2d.linear,
        "blocks.*.mlp_norm": grid.norm,
        "norm": grid.norm,
        "project_out": tensor2d.linear,
        "head": tensor2d.head,
        "": grid.drop_padding,
    }


def _plan_3d(config: DecoderConfig) -> Plan:
    """On p x p x p ranks. Embeddings of another size than the model's lie on the second side, before its layers."""
    group, narrow = config.num_heads // config.kv_heads, config.embedding_size != config.dim
    to_first = partial(tensor3d.linear, swapped=True)
    return {
        "embedding.tokens": partial(tensor3d.embedding, swapped=narrow),
        "embedding.positions": tensor3d.positions,
        "embedding.project_in": to_first,
        "embedding.norm": grid.norm,
        "blocks.*.attention": partial(grid.attention, spread=tensor3d.second_side),
        "blocks.*.attention.qkv": partial(tensor3d.linear, out_unit=(group + 2) * config.head_size),
        "blocks.*.attention.out": partial(to_first, in_unit=group * config.head_size),
        "blocks.*.attention_norm": grid.norm,
        "blocks.*.mlp.up": tensor3d.linear,
        "blocks.*.mlp.gate": tensor3d.linear,
        "blocks.*.mlp.down": to_first,
        "blocks.*.mlp_norm": grid.norm,
        "norm": grid.norm,
        "project_out": tensor3d.linear,
        "head": partial(tensor3d.head, swapped=narrow),
        "": grid.drop_padding,
    }


def context_parallel_plan(mesh: MeshConfig, config: DecoderConfig | None = None, *, causal: bool = True) -> Plan:
    """The plan of a decoder over the cp axis. A ring's cut is zig-zag: alike much work under the causal mask.

    config  of the decoder; without one it has no experts

    Without `causal` that of an encoder of the decoder's modules; Ulysses takes the `attend` that they have.
    """
    attend = {
        "ring": attend_by_ring(causal),
        "ulysses": attend_by_ulysses,
        "mixed": attend_by_both(mesh.cp_ulysses, causal),
    }
    zigzag = causal and mesh.cp_mode != "ulysses"
    plan = {"": shard_sequence(zigzag), "blocks.*.attention": attend[mesh.cp_mode]}
    return plan if config is None else plan | dict.fromkeys(_expert_layers(config), expert.share_rows)


def pipeline_plan(costs: Costs = ALIKE) -> PipelinePlan:
    """The plan of any decoder over the pp axis; norm, head and loss are on the last stage, behind the blocks."""
    return PipelinePlan("blocks", before=("embedding",), costs=costs)
