"""The one place that knows the order in which a model's transforms are applied.

    kernels  ->  tensor and sequence  ->  context  ->  experts  ->  pipeline stages  ->  precision
        ->  activation checkpointing  ->  compile  ->  data parallel (ZeRO) or Gemini  ->  materialise

What the plan makes of the parameters stands in a table (`core.placement`) before any of it is done. Kernels take the
place of torch's, and forms of parallelism may then take theirs. Tensor parallelism decides what a rank's parameters
are, so it comes first; context parallelism cuts the sequence that the model is given and what attention sees of it;
experts are dealt out as tensor parallelism left them; a pipeline leaves a rank the parameters of its stages, and before
it does dropouts learn their names; checkpointing wraps the blocks' forwards with the collectives in them; what is
compiled is the block as it then stands; data parallelism shards and hooks what the others left. Values come last, when
every rank knows its shard, so no rank ever holds a model that was not meant for it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from core.compat import allow_graphs
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.gemini.replicas import GeminiReplicas
from core.gemini.scratch import scratch_file
from core.mesh import (
    EXPERT_AXIS,
    Zero,
    axis_size,
    context_mode,
    derive_axes,
    pipeline_ranks,
    sub_mesh,
    tensor_names,
    worker_mesh,
)
from core.parallel.asynchronous import asynchronous_replicas
from core.parallel.coded_shards import check_shards
from core.parallel.compress import CommConfig
from core.parallel.data import DataParallel, agree_on_values, data_parallel
from core.parallel.draws import Draws
from core.parallel.expert import code_rows
from core.parallel.local import LocalTraining, LocalTrainingConfig, check_local
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.ahead import AheadPipeline
from core.parallel.pipeline.run import Pipeline
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig
from core.parallel.pipeline.stages import Stages, cut_into_stages, split_into_stages
from core.parallel.plan import RECOMPUTED, blocks_of, check_trained, wrap
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.placement.style import Plan, matched
from core.placement.table import NO_PLAN, ModelPlan, Table, Transforms, model_plan, place, placement
from core.precision import Precision


@dataclass(frozen=True)
class ParallelConfig:
    """The options of how a model runs; the model knows nothing of them."""

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
    gemini: GeminiConfig = field(default_factory=GeminiConfig)
    """train in a given amount of device memory: model data that does not fit lives on the host"""
    local: LocalTrainingConfig = field(default_factory=LocalTrainingConfig)
    """data parallelism whose ranks do not wait for one another, or average every so many steps"""
    comm: CommConfig = field(default_factory=CommConfig)
    """compressed messages between data-parallel ranks, for slow links"""

    def __post_init__(self) -> None:
        if self.reduce_each and self.zero < 2:
            raise UserError(f"reduce_each with zero={self.zero} keeps whole gradients all the same; use --zero 2 or 3")
        if self.compile and self.recompute.mode == "selective":
            raise UserError(
                "compile with recompute.mode=selective: torch compiles nothing where operators are told apart one by "
                "one; use --recompute.mode full, or no compile"
            )
        if self.recompute.segmented:
            self._check_segmented()
        if self.recompute.mode == "offload":
            self._check_offloaded()
        if self.local.asynchronous is not None:
            self._check_local()
        if self.comm.is_given:
            self._check_comm()
        if self.rounds is not None:
            self._check_rounds(self.rounds)

    def _check_comm(self) -> None:
        """Raises UserError for forms of data parallelism whose messages are not those that the options change."""
        comm = self.comm
        check_shards(comm, self.zero)
        every = comm.compress is not None or comm.gradients is not None
        for there, given, why, instead in (
            (
                self.gemini.budget is not None,
                f"gemini.budget={self.gemini.budget}",
                "parameters and gradients are moved and sent chunk by chunk",
                "no budget",
            ),
            (
                self.local.asynchronous is not None and comm.is_of_data,
                f"local.async={self.local.asynchronous}",
                "each rank pushes a gradient of its own",
                "no --local.async",
            ),
            (
                self.rounds is not None and comm.is_of_data,
                f"local.every={self.local.every}",
                "workers average the way they have come, which --local.bits and --local.keep compress",
                "no --local.every",
            ),
            (self.reduce_each and every, "reduce_each", "a step's gradient is compressed once", "no --reduce-each"),
        ):
            if there:
                raise UserError(f"{comm.given} with {given}: {why}; use {instead}, or no --{comm.given.split('=')[0]}")

    @property
    def rounds(self) -> LocalTrainingConfig | None:
        """How workers train locally, where they do."""
        return self.local if self.local.every else None

    def _check_rounds(self, rounds: LocalTrainingConfig) -> None:
        """Raises UserError for what is not of a worker by itself."""
        schedule = self.pipeline.schedule
        check_local(
            rounds,
            {
                (
                    f"gemini.budget={self.gemini.budget}",
                    "masters lie on two sides, and theirs and theta's would have to move together",
                    "no budget",
                ): self.gemini.budget is not None,
                (
                    "precision=fp16",
                    "each worker's loss has a scale of its own, and a checkpoint one",
                    "--precision bf16",
                ): self.precision == "fp16",
                (
                    f"pipeline.schedule={schedule}",
                    "steps of the next round begin before a round ends",
                    "--pipeline.schedule 1f1b",
                ): SCHEDULES[schedule].runs_ahead,
            },
        )

    def _check_local(self) -> None:
        """Raises UserError for what workers that do not wait for one another cannot do."""
        for there, given, why, instead in (
            (self.zero > 0, f"zero={self.zero}", "its shards meet in every step", "--zero 0"),
            (
                self.gemini.budget is not None,
                f"gemini.budget={self.gemini.budget}",
                "gradients are moved and reduced chunk by chunk, by all ranks together",
                "no budget",
            ),
            (self.precision == "fp16", "precision=fp16", "all ranks agree on its loss scale", "--precision bf16"),
            (
                self.precision == "bf16" and self.local.asynchronous == "hogwild",
                "precision=bf16",
                "masters are the parameters themselves",
                "--precision fp32",
            ),
        ):
            if there:
                raise UserError(
                    f"local.async={self.local.asynchronous} with {given}: {why}; use {instead}, or no --local.async"
                )

    def _check_segmented(self) -> None:
        """Raises UserError for what does not have the parameters of all blocks at hand in the backward of one."""
        given = f"recompute.mode={self.recompute.mode}"
        if self.zero == 3 and self.recompute.mode != "budget":
            raise UserError(
                f"{given} with zero=3: it computes earlier blocks again in a block's backward, for which only that "
                "block's parameters are gathered; use --zero 2, or --recompute.mode full"
            )
        if self.gemini.budget is not None and self.recompute.mode == "budget":
            raise UserError(
                f"{given} with gemini.budget={self.gemini.budget}: both say what a device may hold, and Gemini moves "
                "parameters until what blocks keep fits; leave one of them out, or use --recompute.mode full"
            )
        if self.gemini.budget is not None:
            raise UserError(
                f"{given} with gemini.budget={self.gemini.budget}: it computes earlier blocks again in a block's "
                "backward, for which Gemini fetches only that block's parameters; use --recompute.mode full"
            )

    def _check_offloaded(self) -> None:
        """Raises UserError for budgets of the host and drives, which know of no activations."""
        for name, given, what in (
            ("host", self.gemini.host, "counts parameters and optimizer state alone"),
            ("disk", self.gemini.disk, "takes parameters and optimizer state, and activations stay on the host"),
        ):
            if given is not None:
                raise UserError(
                    f"recompute.mode=offload with gemini.{name}={given}: it {what}; leave it out, or use "
                    "--recompute.mode full or compressed"
                )

    def check_pipeline(self, num_ranks: int) -> None:
        """Raises UserError for what does not go with a pipeline of that many ranks, 1 being none."""
        name = self.pipeline.schedule
        if num_ranks == 1:
            if self.pipeline != PipelineConfig():
                raise UserError(
                    "pipeline options with mesh.pp=1: there are no stages; leave --pipeline.* out, or use --mesh.pp 2"
                )
            return
        if self.recompute.mode == "budget":
            self._check_budget_of_stages()
        if self.recompute.stored and SCHEDULES[name].splits_backward:
            raise UserError(
                f"recompute.mode={self.recompute.mode} with pipeline.schedule={name}: its backward comes in two parts, "
                "between which what the first has asked for would stay on the device; use --pipeline.schedule 1f1b or "
                "interleaved, or --recompute.mode full"
            )
        self.pipeline.check_ranks(num_ranks)
        if self.pipeline.microbatches is not None:
            self.pipeline.check_microbatches(self.pipeline.microbatches, num_ranks)
        self.pipeline.check_delays(num_ranks)
        given = {"zero=2": self.zero == 2, "zero=3": self.zero == 3, "compile": self.compile}
        given["precision=fp16"] = self.precision == "fp16"
        refused = SCHEDULES[name].refuses
        for option, why in refused.items():
            if given.get(option):
                zero = "--zero 1" if "zero=2" in refused else "--zero 2"
                others = {"zero=2": zero, "zero=3": zero, "precision=fp16": "--precision bf16"}
                nearest = others.get(option, f"no {option}")
                raise UserError(
                    f"{option} with pipeline.schedule={name}: {why}; use --pipeline.schedule 1f1b or interleaved, "
                    f"or {nearest}"
                )

    def _check_budget_of_stages(self) -> None:
        """Raises UserError for pipelines whose stages' memory mode budget cannot divide."""
        given, spec = "recompute.mode=budget with pipeline", SCHEDULES[self.pipeline.schedule]
        if spec.splits_backward:
            raise UserError(
                f"{given}.schedule={self.pipeline.schedule}: it reckons with a backward in one part; use "
                "--pipeline.schedule 1f1b or interleaved, or --recompute.mode full, sqrt or recursive"
            )
        if spec.runs_ahead:
            raise UserError(
                f"{given}.schedule={self.pipeline.schedule}: it reckons with one version of the weights; "
                "use --pipeline.schedule 1f1b, or --recompute.mode full, sqrt or recursive"
            )
        if self.pipeline.cost == "measured" and not self.pipeline.split:
            raise UserError(
                f"{given}.cost=measured: what is computed again is chosen before the blocks are timed; leave the cost "
                "out, or give --pipeline.split"
            )


def parallelize(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    plan: ModelPlan | Plan = NO_PLAN,
    *,
    materialise: Callable[[nn.Module], None] = lambda model: None,
) -> ParallelModel:
    """Spread any nn.Module over the mesh.

    plan         how the model is cut and computes; a bare one is of its tensor parallelism
    materialise  fills the parameters and buffers of a model built on the meta device, each rank its shard. The
                 replicas of a model that has values take those of the first

    Raises UserError for a parameter that nothing trains (a complex one), by its name, on whatever mesh.
    """
    check_trained(model)
    whole = mesh
    if config.rounds is not None:
        derive_axes(whole)
        agree_on_values(model, whole)
        mesh = worker_mesh(whole)
    plan = with_blocks(model_plan(plan), model, mesh, config)
    table, stages, draws = cut(model, mesh, config, plan)
    parallel = _spread(model, mesh, config, table, materialise)
    if isinstance(parallel, GeminiReplicas) and stages is None:
        parallel.blocks = plan.pipeline
    spread = parallel
    if stages is not None:
        ahead = SCHEDULES[config.pipeline.schedule].runs_ahead
        spread = (AheadPipeline if ahead else Pipeline)(parallel, stages, config.pipeline)
        spread.row_code = config.comm.row_code
    spread.draws, spread.table = draws, table
    if config.rounds is not None:
        spread.all_workers, spread.local = whole, LocalTraining(spread, whole, config.rounds)
    return spread


def cut(
    model: nn.Module, mesh: DeviceMesh, config: ParallelConfig, plan: ModelPlan | Plan = NO_PLAN
) -> tuple[Table, Stages | None, Draws]:
    """All but data parallelism: which parameters a rank has, and how it computes.

    Returns where they lie, a pipeline's stages, and how dropouts draw.

    The model may lie on the meta device, and the mesh may be of ranks that do not exist (`core.runtime.pretended`).
    """
    plan = _inferred(model_plan(plan), model, mesh, config)
    steps, pp = list(plan.steps(mesh)), pipeline_ranks(mesh)
    config.check_pipeline(pp)
    split = None
    if plan.pipeline is not None and pp > 1:
        split = split_into_stages(model, plan.pipeline, pp, config.pipeline)
    transform(model, plan.kernels)
    gemini = config.gemini.budget is not None
    table = placement(model, plan, mesh, config.zero, stages=split, gemini=gemini)
    place(model, table, mesh)
    for part, axes in steps:
        wrap(model, part, mesh if axes == mesh.mesh_dim_names else sub_mesh(mesh, *axes))
    if config.comm.row_code is not None:
        code_rows(model, config.comm.row_code)
    draws = Draws(model, mesh)
    stages = None if split is None else cut_into_stages(model, split, mesh["pp"], config.pipeline)
    if stages is not None and stages.shared and config.gemini.disk is not None:
        raise UserError(
            f"gemini.disk={config.gemini.disk} with mesh.pp={pp}: stages share '{min(stages.shared)}', of which each "
            "has a copy in memory; use a model without a tied head, --mesh.pp 1, or no disk"
        )
    if plan.precision:
        transform(model, plan.precision)
        table = placement(model, None, mesh, config.zero, stages=split, gemini=gemini) | table  # what it has added
    in_parts = stages is not None and SCHEDULES[config.pipeline.schedule].splits_backward
    lengths = None if split is None else [len(blocks) for blocks in split.ranges]
    given: dict[str, Any] = {"segments": plan.recompute, "lengths": lengths, "single": config.zero == 3}
    if config.recompute.disk is not None:
        given["drive"] = partial(scratch_file, config.recompute.disk, "recompute.disk")
    apply_recompute(model, config.recompute, in_parts=in_parts, **given)
    if config.compile:
        compile_blocks(blocks_of(model))
    return table, stages, draws


def _inferred(plan: ModelPlan, model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> ModelPlan:
    """The plan, and what it does not say of tensor, context and expert parallelism and stages as a forward shows it.

    Raises UserError where the forward shows none.
    """
    tp, pp = axis_size(mesh, "tp") if tensor_names(mesh) == ("tp",) else 1, pipeline_ranks(mesh)
    cp = axis_size(mesh, "cp") if "cp" in (mesh.mesh_dim_names or ()) and plan.context is None else 1
    if cp > 1:
        with _of_option("cp", cp):
            mode = _context_mode(plan, mesh, config, tp)
    if tp > 1 and plan.tensor is None:
        from core.parallel.infer import infer_plan, sample_of

        with _of_option("tp", tp):  # the length of sharded sequences is known to the first stage alone
            plan = replace(plan, tensor=infer_plan(model, tp, sample_of(model), sequence=pp == cp == 1).plan)
    if cp > 1:
        from core.parallel.infer import infer_context, sample_of

        with _of_option("cp", cp):
            plan = replace(plan, context=infer_context(model, cp, sample_of(model), mode))
    ep = axis_size(mesh, EXPERT_AXIS) if EXPERT_AXIS in (mesh.mesh_dim_names or ()) else 1
    if ep > 1 and plan.experts is None:
        from core.parallel.infer import infer_experts, sample_of

        with _of_option("ep", ep):
            plan = replace(plan, experts=infer_experts(model, ep, sample_of(model)))
    return with_stages(plan, model, pp)


def with_stages(plan: ModelPlan, model: nn.Module, pp: int) -> ModelPlan:
    """The plan of a pipeline of so many ranks; where it says no stages, with those that the model's forward shows.

    Raises UserError where it shows none.
    """
    if pp == 1 or plan.pipeline is not None:
        return plan
    from core.parallel.infer import infer_stages, sample_of

    with _of_option("pp", pp):
        return replace(plan, pipeline=infer_stages(model, sample_of(model)))


def with_blocks(plan: ModelPlan, model: nn.Module, mesh: DeviceMesh, config: ParallelConfig) -> ModelPlan:
    """The plan; where Gemini is asked to run by blocks and it names none, with those that the model's forward shows.

    Raises UserError where it shows none, and for a pipeline, whose schedule is the order of its microbatches.
    """
    if config.gemini.order != "vertical":
        return plan
    if (pp := pipeline_ranks(mesh)) > 1:
        raise UserError(
            f"gemini.order=vertical with mesh.pp={pp}: --pipeline.schedule says in which order a stage's microbatches "
            "run; use --mesh.pp 1, or leave the order out"
        )
    if plan.pipeline is not None:
        return plan
    from core.parallel.infer import infer_stages, sample_of

    try:
        return replace(plan, pipeline=infer_stages(model, sample_of(model)))
    except UserError as refused:
        raise UserError(f"gemini.order=vertical: {refused}; or use --gemini.order horizontal") from refused


def _context_mode(plan: ModelPlan, mesh: DeviceMesh, config: ParallelConfig, tp: int) -> Literal["ring", "ulysses"]:
    """Raises UserError for what does not go with context parallelism that is found in a forward."""
    mode = context_mode(mesh)
    for there, what, instead in (
        (tp > 1 and plan.tensor is not None, "a given plan of tensor parallelism", "mesh.tp=1, or leave that out, too"),
        (plan.experts is not None, "a given plan of experts", "mesh.cp=1"),
        (bool(plan.kernels or plan.precision), "kernels or formats of a given plan", "mesh.cp=1"),
        (pipeline_ranks(mesh) > 1, "stages of a pipeline", "mesh.pp=1"),
        (config.compile, "compile, whose graphs would hold the attention that is replaced", "no compile"),
    ):
        if there:
            raise UserError(f"it does not go with {what}; use {instead}, or say how the sequence is cut")
    if mode == "mixed":
        raise UserError("mesh.cp_mode=mixed takes a plan; use ring or ulysses, or say how the sequence is cut")
    return mode


@contextmanager
def _of_option(name: str, ranks: int) -> Iterator[None]:
    """What is refused inside is refused of the mesh's option."""
    try:
        yield
    except UserError as refused:
        raise UserError(f"mesh.{name}={ranks} without a plan: {refused}") from refused


def transform(model: nn.Module, transforms: Transforms) -> None:
    """Change the modules that each pattern means, in place."""
    for pattern, change in transforms.items():
        for name in matched(model, pattern):
            change(model.get_submodule(name))


def _spread(
    model: nn.Module,
    mesh: DeviceMesh,
    config: ParallelConfig,
    table: Table,
    materialise: Callable[[nn.Module], None],
) -> DataParallel:
    """Do what comes last: shard the model over the data axes, give it memory and values."""
    if config.local.asynchronous is not None:
        return asynchronous_replicas(model, mesh, config.local, config.precision, materialise, table)
    if config.gemini.budget is None:
        given = model, mesh, config.zero, config.precision, materialise, config.reduce_each
        return data_parallel(*given, table=table, comm=config.comm)
    return GeminiReplicas(model, mesh, config.zero, config.precision, materialise, config.gemini, table=table)


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
    dynamic = None if len(kinds) == 1 else False
    for block in blocks:
        recomputed = getattr(block, RECOMPUTED, None)
        if recomputed is None:
            block.compile(dynamic=dynamic)
        else:  # torch compiles nothing of what its checkpoint is called on, but what that calls
            setattr(block, RECOMPUTED, torch.compile(recomputed, dynamic=dynamic))
