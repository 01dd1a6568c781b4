"""The search for the size of chunks, which plans the step of each candidate.

Small chunks waste a latency on every copy, and large ones come and go with parameters that nobody needs yet: they hold
the budget's rest together in too few pieces, and the smallest budget in which a step fits grows with them. What is best
follows from the model, the budget and the machine, so nobody is asked: every candidate is packed, its step is planned
as it will run, and the shortest step wins; of equally short ones, one that moves least, in as few copies as that takes.

No chunk takes more than an eighth of the model, unless a single parameter does: the messages between ranks have memory
for the largest chunk, several times over, and where everything is resident no plan would mind one chunk as large as the
model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from core.config import UserError
from core.gemini.moments import on_chunks
from core.gemini.residency import HostTooSmall, Policy, ResidencyPlan, plan_residency, smallest_budget, too_small
from core.gemini.trace import ChunkInfo, Trace
from core.pinned import whole_blocks
from core.trace.machine import Bandwidth
from core.trace.tracer import StepTrace

PIECES = (8, 16, 32, 64)
"""Candidates: the model's parameters in so many chunks; a part of the budget; no two parameters together."""

PIECE_OF_BUDGET = 16
"""A chunk takes at most this part of the budget, where nothing says that another size is better."""

SLOT_PADDING_BYTES = 4 * 4096
"""What fills up the regions of a slot on the disk, at most."""

MessageBytes = Callable[[Sequence[Sequence[str]]], int]
"""Names in each chunk -> what messages between ranks take of the budget, whatever the plan."""


def no_messages(parameters: Sequence[Sequence[str]]) -> int:
    """Bytes of messages of one rank: none."""
    return 0


@dataclass(frozen=True)
class ParameterInfo:
    """A parameter before it has a chunk. buffer_bytes are its part of the buffer, padding included; see `ChunkInfo`.

    away_bytes  of all parameters or of none; those behind `cut` with it
    cut         the axes of data parallelism that cut it: chunks of experts are of other ranks than all else
    may_wait    its gradient may leave memory before the update
    """

    name: str
    buffer_bytes: int
    master_bytes: int
    optim_bytes: int
    trainable: bool
    dtype: str = ""
    away_bytes: int | None = None
    cut: tuple[str, ...] = ()
    grad_bytes: int = 0
    slot_bytes: int = 0
    own_bytes: int = 0
    read_bytes: int = 0
    may_wait: bool = False


@dataclass(frozen=True)
class Chunking:
    """parameters[i] are the names in chunk i; the trace and the plan are those of the step on these chunks."""

    chunk_bytes: int
    parameters: tuple[tuple[str, ...], ...]
    trace: Trace
    plan: ResidencyPlan


def packed(parameters: Sequence[ParameterInfo], chunk_bytes: int) -> list[list[ParameterInfo]]:
    """Pack parameters, in order, into chunks of at most `chunk_bytes`; a larger parameter has a chunk of its own.

    Those of one dtype and the same ranks that learn, and those that do not, have chunks apart.
    """
    chunks: list[list[ParameterInfo]] = []
    filling: dict[tuple[str, bool, tuple[str, ...]], tuple[list[ParameterInfo], int]] = {}
    for parameter in parameters:
        kind = parameter.dtype, parameter.trainable, parameter.cut
        chunk, room = filling.get(kind, ([], 0))
        if not chunk or room < parameter.buffer_bytes:
            chunk, room = [], chunk_bytes
            chunks.append(chunk)
        chunk.append(parameter)
        filling[kind] = chunk, room - parameter.buffer_bytes
    return chunks


def piece_of_budget(parameters: Sequence[ParameterInfo], budget_bytes: int) -> int:
    """The size of a chunk that follows from the budget; a part of the model, where the budget is more than that."""
    total = sum(parameter.buffer_bytes for parameter in parameters)
    return max(1, min(budget_bytes // PIECE_OF_BUDGET, total // min(PIECES)))


def choose_chunk_size(
    parameters: Sequence[ParameterInfo],
    step: StepTrace,
    budget_bytes: int,
    bandwidth: Bandwidth,
    policy: Policy = "auto",
    messages: MessageBytes = no_messages,
    host_budget_bytes: int | None = None,
) -> Chunking:
    """The chunk size with the shortest planned step, with its chunks and plan.

    parameters  in order of use (`StepTrace.order`)
    messages    what they take is not in the plan's budget

    Raises UserError, with the smallest budget that would do, where no candidate's step fits; HostTooSmall, with the
    least that any candidate leaves to the host, where that is too much for it.
    """
    chunkings: list[Chunking] = []
    beyond: list[HostTooSmall] = []
    for size in _candidates(parameters, budget_bytes):
        names, trace = _on_chunks(parameters, step, size)
        room = budget_bytes - messages(names)
        if smallest_budget(trace) <= room:
            try:
                plan = plan_residency(trace, room, bandwidth, policy, host_budget_bytes)
            except HostTooSmall as refusal:
                beyond.append(refusal)
            else:
                chunkings.append(Chunking(size, names, trace, plan))
    if not chunkings and beyond:
        raise min(beyond, key=lambda refusal: refusal.least_bytes)
    if not chunkings:
        raise UserError(too_small(budget_bytes, least_budget(parameters, step, messages)))
    shortest_s = min(found.plan.step_s for found in chunkings)
    # Smaller differences are less than the prediction is good for.
    as_short = [found for found in chunkings if found.plan.step_s <= 1.002 * shortest_s]
    fewest = min(found.plan.moved_bytes for found in as_short)
    return min(
        (found for found in as_short if found.plan.moved_bytes <= 1.02 * fewest),
        key=lambda found: len(found.parameters),
    )


def least_budget(parameters: Sequence[ParameterInfo], step: StepTrace, messages: MessageBytes = no_messages) -> int:
    """Bytes of the device without which the step fits with no chunk size."""
    sizes = _candidates(parameters, sum(parameter.buffer_bytes for parameter in parameters))
    packings = [_on_chunks(parameters, step, size) for size in sizes]
    return min(smallest_budget(trace) + messages(names) for names, trace in packings)


def _candidates(parameters: Sequence[ParameterInfo], budget_bytes: int) -> list[int]:
    """Sizes that lead to different chunks, smallest first."""
    total = sum(parameter.buffer_bytes for parameter in parameters)
    sizes = {max(1, total // pieces) for pieces in PIECES} | {piece_of_budget(parameters, budget_bytes), 1}
    different: dict[tuple[int, ...], int] = {}
    for size in sorted(sizes):
        different.setdefault(tuple(map(len, packed(parameters, size))), size)
    return list(different.values())


def chunk_infos(chunks: Sequence[Sequence[ParameterInfo]]) -> list[ChunkInfo]:
    """Chunks of these parameters."""
    return [
        ChunkInfo(
            index,
            sum(p.buffer_bytes for p in chunk),
            sum(p.master_bytes for p in chunk),
            sum(p.optim_bytes for p in chunk),
            chunk[0].trainable,
            None if chunk[0].away_bytes is None else sum(p.away_bytes or 0 for p in chunk),
            sum(p.grad_bytes for p in chunk),
            sum(p.slot_bytes for p in chunk) + SLOT_PADDING_BYTES,
            sum(p.own_bytes for p in chunk),
            sum(p.read_bytes for p in chunk),
            whole_blocks(sum(p.grad_bytes for p in chunk)) if all(p.may_wait for p in chunk) else 0,
        )
        for index, chunk in enumerate(chunks)
    ]


def _on_chunks(
    parameters: Sequence[ParameterInfo], step: StepTrace, chunk_bytes: int
) -> tuple[tuple[tuple[str, ...], ...], Trace]:
    chunks = packed(parameters, chunk_bytes)
    names = tuple(tuple(p.name for p in chunk) for chunk in chunks)
    return names, on_chunks(step, chunk_infos(chunks), names)
