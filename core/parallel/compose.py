"""The one place that knows the order in which the forms of parallelism are applied to a model.

    tensor and sequence  ->  context  ->  experts  ->  pipeline stages  ->  activation checkpointing  ->  compile
        ->  data parallel (ZeRO) or Gemini  ->  materialise

Tensor parallelism decides what a rank's parameters are, so it comes first; context parallelism cuts the sequence that
the model is given and what attention sees of it; experts are dealt out as tensor parallelism left them; a pipeline
leaves a rank the parameters of its stages, and before it does dropouts learn their names; checkpointing wraps the
blocks' forwards with the collectives in them; what is compiled is the block as it then stands; data parallelism shards
and hooks what the others left (the config's `spread` says how). Values come last, when every rank knows its shard, so
no rank ever holds a model that was not meant for it.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from core.compat import allow_graphs
from core.config import UserError
from core.mesh import EXPERT_AXIS, Zero, tensor_axes
from core.parallel.data import DataParallel, data_parallel
from core.parallel.draws import Draws
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.run import Pipeline
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig
from core.parallel.pipeline.split import PipelinePlan
from core.parallel.pipeline.stages import Stages, cut_into_stages
from core.parallel.plan import Plan, apply_plan, blocks_of, check_trained
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.precision import Precision


@dataclass(frozen=True)
class ParallelConfig:
    """How a model runs; nothing of it is known to the model."""

    zero: Zero = 0
    """what data parallelism shards: 0 nothing, 1 optimizer, 2 and gradients, 3 and parameters"""
    precision: Precision = "fp32"
    """format of parameters and activations; under bf16 and fp16 masters and reductions are fp32"""
    reduce_each: bool = False
    """reduce gradients after every microbatch: sends more; ZeRO 2 and 3 never hold them whole"""
    recompute: RecomputeConfig = field(default_factory=RecomputeConfig)
    """activation checkpointing"""
    compile: bool = False
    """torch.compile each block"""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """how a step goes through the stages of --mesh.pp ranks"""

    def __post_init__(self) -> None:
        if self.reduce_each and self.zero < 2:
            raise UserError(f"reduce_each with zero={self.zero} keeps whole gradients all the same; use --zero 2 or 3")

    def spread(
        self, model: nn.Module, mesh: DeviceMesh, materialise: Callable[[nn.Module], None] = lambda model: None
    ) -> DataParallel:
        """What comes last: shard the model over the data axes, give it memory and values."""
        return data_parallel(model, mesh, self.zero, self.precision, materialise, self.reduce_each)

    def check_pipeline(self, num_ranks: int) -> None:
        """Raises UserError for what does not go with a pipeline of that many ranks, 1 being none."""
        name = self.pipeline.schedule
        if num_ranks == 1:
            if self.pipeline != PipelineConfig():
                raise UserError(
                    "pipeline options with mesh.pp=1: there are no stages; leave --pipeline.* out, or use --mesh.pp 2"
                )
            return
        given = {"zero=3": self.zero == 3, "compile": self.compile, "recompute.mode": self.recompute.mode != "none"}
        for option, why in SCHEDULES[name].refuses.items():
            if given.get(option):
                nearest = "--zero 2" if option == "zero=3" else f"no {option}"
                raise UserError(
                    f"{option} with pipeline.schedule={name}: {why}; use --pipeline.schedule 1f1b or interleaved, "
                    f"or {nearest}"
                )


class Plans(TypedDict, total=False):
    """How a model is cut, beside it.

    plan           its tensor parallelism, of the mesh's tp_mode; without one tp must be one rank
    context_plan   its context parallelism; without one the cp axis must have one rank
    expert_plan    its expert parallelism, of styles that are given the whole mesh; without one there is no ep axis
    pipeline_plan  its blocks and what comes before them; without one the pp axis must have one rank
    """

    plan: Plan | None
    context_plan: Plan | None
    expert_plan: Plan | None
    pipeline_plan: PipelinePlan | None


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    *,
    materialise: Callable[[nn.Module], None] = lambda model: None,
    **plans: Unpack[Plans],
) -> ParallelModel:
    """Spread any nn.Module over the mesh.

    materialise    fills the parameters and buffers of a model built on the meta device, each rank its shard. The
                   replicas of a model that has values take those of the first

    Raises UserError for a parameter that nothing trains (a complex one), by its name, on whatever mesh.
    """
    check_trained(model)
    stages, draws = cut(model, mesh, config, **plans)
    data = config.spread(model, mesh, materialise)
    spread = data if stages is None else Pipeline(data, stages, config.pipeline)
    spread.draws = draws
    return spread


def cut(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, **plans: Unpack[Plans]
) -> tuple[Stages | None, Draws]:
    """All forms but data parallelism: which parameters a rank has, and how it computes.

    Returns a pipeline's stages, and how dropouts draw.

    The model may lie on the meta device, and the mesh may be of ranks that do not exist (`core.runtime.pretended`).
    """
    plan, context_plan = plans.get("plan"), plans.get("context_plan")
    expert_plan, pipeline_plan = plans.get("expert_plan"), plans.get("pipeline_plan")
    tp, cp, pp = tensor_axes(mesh), mesh["cp"], mesh["pp"]
    if plan is not None and tp.size() > 1:
        apply_plan(model, plan, tp)
    elif tp.size() > 1:
        raise UserError(f"mesh.tp={tp.size()} without a plan: say how the model's modules are cut, or use mesh.tp=1")
    if context_plan is not None and cp.size() > 1:
        apply_plan(model, context_plan, cp)
    elif cp.size() > 1:
        raise UserError(f"mesh.cp={cp.size()} without a plan: say how the sequence is cut, or use mesh.cp=1")
    if EXPERT_AXIS in (mesh.mesh_dim_names or ()):
        if expert_plan is None:
            raise UserError(
                f"mesh.ep={mesh[EXPERT_AXIS].size()} without a plan: say which modules hold experts, or use mesh.ep=1"
            )
        apply_plan(model, expert_plan, mesh)
    config.check_pipeline(pp.size())
    if pipeline_plan is None and pp.size() > 1:
        raise UserError(
            f"mesh.pp={pp.size()} without a plan: say which modules are the model's blocks, or use mesh.pp=1"
        )
    draws = Draws(model, mesh)
    stages = None
    if pipeline_plan is not None and pp.size() > 1:
        stages = cut_into_stages(model, pipeline_plan, pp, config.pipeline)
    apply_recompute(model, config.recompute)
    if config.compile:
        compile_blocks(blocks_of(model))
    return stages, draws


def compile_blocks(blocks: list[nn.Module]) -> None:
    """Each by itself. Blocks that are alike share a graph; those of a U-Net, which are not, get one each.

    torch keeps the graphs of all modules in one place and gives up after eight; what comes later runs as it is. At a
    second shape it takes sizes for variable, which of unlike blocks spares no graph and takes twice as long.
    """
    kinds = {tuple((name, parameter.shape) for name, parameter in block.named_parameters()) for block in blocks}
    kinds.discard(())  # those of other stages, which are not called
    if len(kinds) > 1:
        # One each in training and in evaluation, for some shapes of a batch: sizes of pictures, the last rows.
        allow_graphs(16 * len(blocks), 64 * len(blocks))
    for block in blocks:
        block.compile(dynamic=None if len(kinds) == 1 else False)
