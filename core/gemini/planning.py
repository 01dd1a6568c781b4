"""From a model and a microbatch to chunks and a plan, before the first step.

1. One step is traced on fake tensors: the order of use, and what is in memory beside parameters at each moment.
2. Parameters are packed into chunks in the order of their first use; how large a chunk is, `search` finds out.
3. The residency planner says what lives on the device, and what moves when.

All ranks follow the plan of rank 0: what they fetch and reduce, they must fetch and reduce alike.
"""

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from core.config import UserError
from core.gemini.chunk import Member
from core.gemini.residency import Policy
from core.gemini.search import Chunking, ParameterInfo, choose_chunk_size
from core.gemini.tier import in_words
from core.gemini.timeline import Bandwidth
from core.gemini.tracer import Speed, StepTrace
from core.metrics import peak_flops

SHARE_OF_PEAK = 0.4
"""Of a device's FLOP/s, what products of usual sizes reach."""

PROBE_BYTES = 1 << 22
MOST_ROUNDS = 4

MessageBytes = Callable[[Sequence[Sequence[str]]], int]


def plan(
    step: StepTrace,
    parameters: Sequence[ParameterInfo],
    budget_bytes: int,
    message_bytes: MessageBytes,
    bandwidth: Bandwidth,
    policy: Policy,
) -> Chunking:
    """The plan of rank 0, on every rank.  Raises UserError where no step fits, with the smallest budget that does.

    parameters     in the order of their first use
    message_bytes  names in each chunk -> what messages between ranks take of the budget whatever the plan
    """
    outcome: list[Chunking | str] = [""]
    if dist.get_rank() == 0:  # what differs between ranks (speeds, ragged shards) must not make plans differ
        try:
            outcome[0] = _planned(step, parameters, budget_bytes, message_bytes, bandwidth, policy)
        except UserError as error:
            outcome[0] = str(error)
    dist.broadcast_object_list(outcome, src=0)
    if isinstance(outcome[0], str):
        raise UserError(f"gemini: {outcome[0]}")
    return outcome[0]


def _planned(
    step: StepTrace,
    parameters: Sequence[ParameterInfo],
    budget_bytes: int,
    message_bytes: MessageBytes,
    bandwidth: Bandwidth,
    policy: Policy,
) -> Chunking:
    """Messages take from the budget what the chunks' sizes say, and those follow from the budget: until both agree."""
    fixed = message_bytes([[parameter.name] for parameter in parameters])
    for _ in range(MOST_ROUNDS):
        try:
            chunking = choose_chunk_size(parameters, step, max(1, budget_bytes - fixed), bandwidth, policy)
        except UserError as error:
            beside = f" beside {in_words(fixed)} for messages between ranks" if fixed else ""
            raise UserError(f"{error}{beside}") from None
        needed = message_bytes(chunking.parameters)
        if needed <= fixed:
            return chunking
        fixed = needed
    raise UserError(f"a budget of {in_words(budget_bytes)} leaves no room for messages between ranks; give more")


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
        merges = alone and member.dtype == wide
        found.append(
            ParameterInfo(
                member.name,
                member.buffer_elements * member.dtype.itemsize,
                0 if merges else reduced,
                state.get(member.name, 0) + reduced,  # the reduced gradient lies beside the master
                member.trainable,
                str(member.dtype),
            )
        )
    return found


def speed_of(device: torch.device, dtype: torch.dtype) -> Speed:
    """What the device computes and touches in a second, for want of a first step."""
    peak = peak_flops(device, dtype) or 1e11
    return Speed(SHARE_OF_PEAK * peak, 1e12 if device.type == "cuda" else 1e10)


def bandwidth_of(device: torch.device, ranks: int) -> Bandwidth:
    """Measured: copies over the link in both directions, and a pass over memory for updates on either side.

    ranks  that share a chunk: each brings its part of it over a link of its own
    """
    host = torch.empty(PROBE_BYTES, dtype=torch.uint8, pin_memory=device.type == "cuda")
    there, scratch = torch.empty_like(host, device=device), torch.empty_like(host)
    to_device, to_host = _rate(lambda: there.copy_(host)), _rate(lambda: host.copy_(there))
    host_update = _rate(lambda: scratch.copy_(host)) / 2  # as much is read as written
    device_update = _rate(lambda: there.add_(1)) / 2 if device.type == "cuda" else host_update
    return Bandwidth(ranks * to_device, ranks * to_host, host_update, device_update, latency_s=1e-5)


def _rate(pass_over: Callable[[], object]) -> float:
    """Bytes a second, the best of three."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        pass_over()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return PROBE_BYTES / max(min(seconds), 1e-9)
