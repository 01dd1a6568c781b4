"""Chunks and a plan from a model and a microbatch, before the first step.

1. One step is traced on fake tensors: the order of use, and what is in memory beside parameters at each moment.
2. Parameters are packed into chunks in the order of their first use; how large a chunk is, `search` finds out.
3. The residency planner says what lives on the device, and what moves when.
4. Where a device's allocations cannot be foreseen to the byte, it says so again after the first step, on what that had.

All ranks follow the plan of rank 0: what they fetch and reduce, they must fetch and reduce alike.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.gemini.chunk import Member
from core.gemini.moments import corrected
from core.gemini.residency import Policy, plan_residency, smallest_budget, too_small
from core.gemini.search import PIECE_OF_BUDGET, PIECES, Chunking, MessageBytes, ParameterInfo, choose_chunk_size
from core.mesh import AnyMesh, axis_size
from core.placement.table import Table
from core.trace.machine import LEAST_PROBE_BYTES, MOST_PROBE_BYTES, Bandwidth
from core.trace.tracer import StepTrace


def plan(
    step: StepTrace,
    parameters: Sequence[ParameterInfo],
    budget_bytes: int,
    message_bytes: MessageBytes,
    bandwidth: Bandwidth,
    policy: Policy,
    axis: DeviceMesh | None,
    host_budget_bytes: int | None = None,
) -> Chunking:
    """The plan of the first rank, on every rank.

    parameters     in the order of their first use
    message_bytes  names in each chunk -> what messages between ranks take of the budget whatever the plan
    axis           the ranks that run the same step; None: all

    Raises UserError where no step fits, with the smallest budget in which it does; on every rank there is, also those
    of other stages, whose steps may fit.
    """
    group = None if axis is None else axis.get_group()
    outcome: list[Chunking | str] = [""]
    if dist.get_rank(group) == 0:  # what differs between ranks (speeds, ragged shards) must not make plans differ
        try:
            outcome[0] = choose_chunk_size(
                parameters, step, budget_bytes, bandwidth, policy, message_bytes, host_budget_bytes
            )
        except UserError as error:
            outcome[0] = str(error)
    dist.broadcast_object_list(outcome, group=group, group_src=0)
    refused = outcome[0] if isinstance(outcome[0], str) else None
    if axis is not None:
        said: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(said, refused)
        refused = next((words for words in said if words is not None), None)
    if refused is not None or isinstance(outcome[0], str):
        raise UserError(f"gemini: {refused}")
    return outcome[0]


def fullest(step: StepTrace, axis: DeviceMesh | None) -> StepTrace:
    """The step with what the rank that had most had beside parameters: with experts apart, ranks get unequal loads.

    axis  the ranks that run the same step; None: all
    """
    group = None if axis is None else axis.get_group()
    own = [[stretch.other_bytes for stretch in stretches] for stretches in step.microbatches]
    seen = [own] * dist.get_world_size(group)
    dist.all_gather_object(seen, own, group=group)
    if any([*map(len, found)] != [*map(len, own)] for found in seen):  # they went different ways
        return step
    most = [map(max, zip(*stretches, strict=True)) for stretches in zip(*seen, strict=True)]
    microbatches = tuple(
        tuple(replace(stretch, other_bytes=num_bytes) for stretch, num_bytes in zip(stretches, found, strict=True))
        for stretches, found in zip(step.microbatches, most, strict=True)
    )
    return replace(step, microbatches=microbatches)


def corrected_plan(
    chunking: Chunking,
    others: Sequence[int | None],
    bandwidth: Bandwidth,
    policy: Policy,
    axis: DeviceMesh | None,
    host_budget_bytes: int | None = None,
) -> Chunking:
    """The same chunks with a plan on what a real step had beside model data, on the rank where it had most.

    others  [moment] bytes; None of one that did not come

    Raises UserError where that leaves too little of the budget, with the smallest budget that would do, and where it
    leaves the host more than that holds.
    """
    group = None if axis is None else axis.get_group()
    seen: list[Sequence[int | None]] = [()] * dist.get_world_size(group)
    dist.all_gather_object(seen, others, group=group)
    most = [max((n for n in found if n is not None), default=None) for found in zip(*seen, strict=True)]
    moments = chunking.trace.moments
    measured = [(m.other_bytes if n is None else n, m.seconds) for n, m in zip(most, moments, strict=True)]
    trace = corrected(chunking.trace, measured)
    least, budget_bytes = smallest_budget(trace), chunking.plan.budget_bytes
    if least > budget_bytes:
        raise UserError(f"gemini: as its first step ran, {too_small(budget_bytes, least)}")
    plans = [plan_residency(trace, budget_bytes, bandwidth, policy, host_budget_bytes)]
    dist.broadcast_object_list(plans, group=group, group_src=0)
    return replace(chunking, trace=trace, plan=plans[0])


STATE_PADDING_BYTES = 256
"""Of a slot on the disk, that tensors of one parameter's state leave between them."""


def partial_names(table: Table, mesh: AnyMesh) -> frozenset[str]:
    """The parameters whose gradients are added up over model-parallel ranks when a step's backward is over."""
    return frozenset(name for name, row in table.items() if any(axis_size(mesh, axis) > 1 for axis in row.partial))


def infos(
    members: Sequence[Member],
    wide: torch.dtype,
    state: dict[str, int],
    partial: Collection[str] = (),
    averaged: bool = False,
) -> list[ParameterInfo]:
    """The search's input: parameters that have no chunk yet.

    state     name -> bytes of the optimizer's state of this rank's rows
    partial   names of those whose gradients are looked at once more before the update
    averaged  an average of each master lies with that state
    """
    found = []
    for member in members:
        reduced = member.own_elements * wide.itemsize if member.trainable else 0
        own, narrow = member.own_elements * member.dtype.itemsize, member.dtype != wide
        beside = state.get(member.name, 0) + (reduced if averaged else 0)
        # Gradients of this rank alone: masters in the buffer's format are the buffer, where the chunk is resident.
        merges = not member.sharers.sends and not narrow
        slot = own if not member.trainable else reduced + beside + (own if narrow else 0)
        found.append(
            ParameterInfo(
                member.name,
                member.buffer_elements * member.dtype.itemsize,
                0 if merges else reduced,
                beside + reduced,  # the reduced gradient lies beside the master
                member.trainable,
                str(member.dtype),
                slot + reduced,
                member.sharers.cut,
                reduced,
                slot + STATE_PADDING_BYTES * member.trainable,
                own,
                slot - (own if narrow else 0) if member.trainable else 0,
                member.trainable and member.name not in partial,
            )
        )
    return found


def probe_bytes(parameter_bytes: int, budget_bytes: int) -> int:
    """The size of a copy that planning will ask about: of a chunk, where the model has a dozen in the budget."""
    of_chunk = min(parameter_bytes // min(PIECES), budget_bytes // PIECE_OF_BUDGET)
    return max(LEAST_PROBE_BYTES, min(of_chunk, MOST_PROBE_BYTES))
