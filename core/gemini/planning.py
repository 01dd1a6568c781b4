"""From a model and a microbatch to chunks and a plan, before the first step.

1. One step is traced on fake tensors: the order of use, and what is in memory beside parameters at each moment.
2. Parameters are packed into chunks in the order of their first use; how large a chunk is, `search` finds out.
3. The residency planner says what lives on the device, and what moves when.
4. Where a device's allocations cannot be foreseen to the byte, it says so again after the first step, on what that had.

All ranks follow the plan of rank 0: what they fetch and reduce, they must fetch and reduce alike.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from core.config import UserError
from core.gemini.chunk import Member
from core.gemini.residency import Policy, plan_residency, smallest_budget, too_small
from core.gemini.search import PIECE_OF_BUDGET, PIECES, Chunking, MessageBytes, ParameterInfo, choose_chunk_size
from core.gemini.timeline import Bandwidth
from core.gemini.tracer import Speed, StepTrace, corrected
from core.metrics import peak_flops
from core.pinned import host_empty

SHARE_OF_PEAK = 0.4
"""Of a device's FLOP/s, what products of usual sizes reach."""

LEAST_PROBE_BYTES, MOST_PROBE_BYTES = 1 << 22, 1 << 28
"""Of less a device's copy shows how long it takes to begin, and a host's what a cache gives; more adds nothing."""
PROBED_LATENCY_BYTES = 1 << 12


def plan(
    step: StepTrace,
    parameters: Sequence[ParameterInfo],
    budget_bytes: int,
    message_bytes: MessageBytes,
    bandwidth: Bandwidth,
    policy: Policy,
    axis: DeviceMesh | None,
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
            outcome[0] = choose_chunk_size(parameters, step, budget_bytes, bandwidth, policy, message_bytes)
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


def corrected_plan(
    chunking: Chunking, others: Sequence[int | None], bandwidth: Bandwidth, policy: Policy, axis: DeviceMesh | None
) -> Chunking:
    """The same chunks with a plan on what a real step had beside model data, on the rank where it had most.

    others  [moment] bytes; None of one that did not come

    Raises UserError where that leaves too little of the budget, with the smallest budget that would do.
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
    plans = [plan_residency(trace, budget_bytes, bandwidth, policy)]
    dist.broadcast_object_list(plans, group=group, group_src=0)
    return replace(chunking, trace=trace, plan=plans[0])


def infos(
    members: Sequence[Member], ranks: int, wide: torch.dtype, state: dict[str, int], alone: bool
) -> list[ParameterInfo]:
    """What the search is told of parameters that have no chunk yet.

    state  name -> bytes of the optimizer's state of this rank's rows
    alone  gradients are this rank's only: masters in the buffer's format are the buffer, where the chunk is resident
    """
    found = []
    for member in members:
        reduced = member.own_elements(ranks) * wide.itemsize if member.trainable else 0
        own, narrow = member.own_elements(ranks) * member.dtype.itemsize, member.dtype != wide
        merges = alone and not narrow
        found.append(
            ParameterInfo(
                member.name,
                member.buffer_elements * member.dtype.itemsize,
                0 if merges else reduced,
                state.get(member.name, 0) + reduced,  # the reduced gradient lies beside the master
                member.trainable,
                str(member.dtype),
                own if not member.trainable else 2 * reduced + state.get(member.name, 0) + (own if narrow else 0),
            )
        )
    return found


def speed_of(device: torch.device, dtype: torch.dtype) -> Speed:
    """What the device computes and touches in a second, for want of a first step."""
    peak = peak_flops(device, dtype) or 1e11
    return Speed(SHARE_OF_PEAK * peak, 1e12 if device.type == "cuda" else 1e10)


def probe_bytes(parameter_bytes: int, budget_bytes: int) -> int:
    """The size of a copy that planning will ask about: of a chunk, where the model has a dozen in the budget."""
    of_chunk = min(parameter_bytes // min(PIECES), budget_bytes // PIECE_OF_BUDGET)
    return max(LEAST_PROBE_BYTES, min(of_chunk, MOST_PROBE_BYTES))


def bandwidth_of(device: torch.device, ranks: int, num_bytes: int = LEAST_PROBE_BYTES) -> Bandwidth:
    """Measured: copies over the link in both directions, and a pass over memory for updates on either side.

    ranks      that share a chunk: each brings its part of it over a link of its own
    num_bytes  of a copy; see `probe_bytes`
    """
    on_cuda = device.type == "cuda"
    host, scratch = (host_empty(num_bytes, torch.uint8, pinned=on_cuda) for _ in range(2))
    for tensor in (host, scratch):
        tensor.zero_()  # memory that nobody has written has no pages yet
    there = torch.zeros_like(host, device=device)
    few = slice(0, PROBED_LATENCY_BYTES)
    to_device = _seconds(lambda: there.copy_(host, non_blocking=True), device)
    to_host = _seconds(lambda: host.copy_(there, non_blocking=True), device)
    latency_s = _seconds(lambda: there[few].copy_(host[few], non_blocking=True), device) if on_cuda else 1e-5
    host_update = _seconds(lambda: scratch.copy_(host), device) * 2  # as much is read as written
    device_update = _seconds(lambda: there.add_(1), device) * 2 if on_cuda else host_update
    rates = [
        num_bytes / max(seconds, 1e-9)
        for seconds in (to_device - latency_s, to_host - latency_s, host_update, device_update)
    ]
    return Bandwidth(ranks * rates[0], ranks * rates[1], rates[2], rates[3], latency_s)


def _seconds(pass_over: Callable[[], object], device: torch.device) -> float:
    """The best of three."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        pass_over()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
