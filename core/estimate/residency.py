"""Gemini's bytes, moves and seconds of a training step in a budget, before there is any rank.

The same planner decides here and in a run (`core.gemini.search`), on the same trace of the model's modules; here on
tensors without memory, of a machine that is only described. What differs in a run: bandwidths are measured there, and
on a GPU the plan is corrected after its first step.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.compat import own_part
from core.compose import ParallelConfig, cut, with_blocks
from core.gemini.chunk import ALONE, Member, Sharers, sharers
from core.gemini.direct import drive_speeds, with_drives
from core.gemini.order import Orders
from core.gemini.planning import infos, partial_names
from core.gemini.residency import Policy, ResidencyPlan
from core.gemini.search import Chunking, choose_chunk_size, least_budget
from core.gemini.tier import parse_bytes
from core.gemini.transport import message_bytes
from core.gemini.vertical import Planner, VerticalOrder, both_orders, is_in_question
from core.layout import largest_share
from core.mesh import MeshConfig, build_mesh, mesh_shape, shard_axis
from core.optim.build import OptimConfig
from core.optim.roles import role_of
from core.optim.size import beside_bytes, state_bytes
from core.placement.style import Plan
from core.placement.table import NO_PLAN, ModelPlan, model_plan
from core.precision import compute_dtype, master_dtype
from core.runtime import device_bytes, pretended
from core.trace.machine import Bandwidth, Speed, described_bandwidth
from core.trace.tracer import StepTrace, trace_step


@dataclass(frozen=True)
class GeminiEstimate:
    """A rank's estimate.

    chunking        its chunks, and what lives and moves on its device, messages left out
    messages_bytes  of messages between ranks, on the device throughout
    least_bytes     the smallest budget in which the step fits
    orders          of a step of several microbatches, where it may run by blocks
    """

    chunking: Chunking
    messages_bytes: int
    least_bytes: int
    orders: Orders | None = None

    @property
    def plan(self) -> ResidencyPlan:
        return self.chunking.plan

    @property
    def by_blocks(self) -> bool:
        """Whether the plan is of all microbatches of a step, block by block."""
        return self.orders is not None and self.orders.taken == "vertical"

    def seconds_of(self, num_microbatches: int) -> float:
        """Of a step of so many microbatches, in the order that is taken."""
        return self.plan.step_s if self.by_blocks else self.plan.seconds_of(num_microbatches)

    @property
    def device_bytes(self) -> int:
        """The most on the device at once."""
        return self.plan.device_peak_bytes + self.messages_bytes


def estimate_gemini(
    model: nn.Module,
    step: StepTrace,
    budget_bytes: int,
    bandwidth: Bandwidth,
    optimizer: OptimConfig,
    wide: torch.dtype,
    *,
    shared_by: Callable[[str], Sharers] = lambda name: ALONE,
    policy: Policy = "auto",
    host_budget_bytes: int | None = None,
    partial: Collection[str] = (),
    averaged: bool = False,
) -> GeminiEstimate:
    """The plan of one rank.  Raises UserError where no step fits the budget, with the smallest in which one does.

    model      as it computes, in its format, without memory; a rank's part of it
    step       its trace (`core.trace.tracer.trace_step`)
    wide       format of masters, reductions and the optimizer's state
    shared_by  name of a parameter -> the ranks that share it
    partial    names of those whose gradients are added up when the backward is over
    averaged   an average of each master lies with the optimizer's state, as it does beside a disk
    """
    parameters = dict(model.named_parameters())
    members = {name: _member(name, parameters[name], shared_by(name), wide) for name in step.order}
    state = {
        name: state_bytes(
            optimizer,
            tuple(member.master.shape),
            wide.itemsize,
            whole=tuple(parameters[name].shape),
            role=role_of(name, parameters[name].shape),
        )
        for name, member in members.items()
        if member.trainable
    }
    known = infos(list(members.values()), wide, state, partial, averaged)
    looked_at = [name for name, member in members.items() if member.trainable]
    shapes = {name: tuple(parameters[name].shape) for name in looked_at}
    beside = sum(beside_bytes(optimizer, s, wide.itemsize, role_of(name, s)) for name, s in shapes.items())

    def messages(chunks: Sequence[Sequence[str]]) -> int:
        return beside + sum(message_bytes([[members[name] for name in chunk] for chunk in chunks], wide))

    chunking = choose_chunk_size(known, step, budget_bytes, bandwidth, policy, messages, host_budget_bytes)
    return GeminiEstimate(chunking, messages(chunking.parameters), least_budget(known, step, messages))


def estimate_budget(
    model: nn.Module,
    loss: Callable[[nn.Module], Tensor],
    mesh: MeshConfig,
    parallel: ParallelConfig,
    speed: Speed,
    link_bytes_per_s: float,
    plan: ModelPlan | Plan = NO_PLAN,
    optimizer: OptimConfig | None = None,
    microbatches: Sequence[Callable[[nn.Module], Tensor]] = (),
    averaged: bool = False,
    drives: Sequence[tuple[float, float]] | None = None,
) -> GeminiEstimate:
    """The plan of the first rank's device, for a step of any module on the meta device, which is cut and cast.

    loss              of a microbatch, the largest
    microbatches      the losses of all of a step, where they may run by blocks
    mesh              resolved; of one pipeline stage
    link_bytes_per_s  between a device and the host, each way
    averaged          the run keeps an average of the weights, which lies beside a disk's masters, else beside it all
    drives            bytes a second that this rank reads and writes in its folders; None: measured, and where there is
                      no folder those of a usual SSD

    A model that looks at values gets memory for the while, and drawn ones.  Raises UserError where there is too little.
    """
    assert parallel.gemini.budget is not None
    with pretended(mesh_shape(mesh).size()):
        built = build_mesh(mesh, "cpu")
        plan = with_blocks(model_plan(plan), model, built, parallel)
        table, _, _ = cut(model, built, parallel, plan)
        nn.Module.to(model, compute_dtype(parallel.precision))
        num_bytes = sum(parameter.nbytes for parameter in model.parameters())
        ranks = shard_axis(built).size() if parallel.zero else 1
        bandwidth = described_bandwidth(speed, link_bytes_per_s, ranks)
        speeds = drive_speeds(parallel.gemini.folders) if drives is None else drives
        bandwidth = with_drives(bandwidth, speeds)

        def traced(step: Callable[[nn.Module], Any]) -> StepTrace:
            return trace_step(model, step, speed, draws=num_bytes <= device_bytes("cpu", 4))

        def estimated(step: StepTrace) -> GeminiEstimate:
            return estimate_gemini(
                model,
                step,
                parse_bytes(parallel.gemini.budget or ""),
                bandwidth,
                optimizer or OptimConfig(),
                master_dtype(parallel.precision),
                shared_by=lambda name: sharers(built, table[name].layout.axes(), parallel.zero != 0),
                policy=parallel.gemini.policy,
                host_budget_bytes=parallel.gemini.host_bytes,
                partial=partial_names(table, built),
                averaged=averaged and parallel.gemini.disk is not None,
            )

        step = traced(loss)
        found, order, blocks = estimated(step), parallel.gemini.order, plan.pipeline
        if blocks is None or not is_in_question(order, microbatches, found.chunking, blocks):
            return found
        made: list[GeminiEstimate] = []

        def planned(step: StepTrace) -> Chunking:
            made.append(estimated(step))
            return made[-1].chunking

        planner = Planner(traced, planned, bandwidth)
        orders, _, vertical = both_orders(
            order, step, found.chunking, microbatches, lambda: VerticalOrder(model, blocks, built), planner
        )
        return replace(found if vertical is None else made[-1], orders=orders)


def _member(name: str, parameter: nn.Parameter, shared_by: Sharers, wide: torch.dtype) -> Member:
    """With this rank's rows: those of the first, who has the most."""
    whole: Tensor = own_part(parameter) if isinstance(parameter, DTensor) else parameter
    shape = (largest_share(whole.shape[0], shared_by.ranks), *whole.shape[1:]) if whole.ndim else ()
    return Member(name, parameter, torch.empty(shape, dtype=wide, device="meta"), shared_by)
