"""Bytes per rank of a training step: parameters, gradients, optimizer state, activations, buffers.

State, per parameter on a rank (ZeRO divides over dp_shard x cp, each parameter by rows, the largest shard counted):

    precision      ZeRO    parameters    gradients    optimizer's side
    fp32, fp64     0-2     w             w            state
    bf16, fp16     0-2     2             2            master 4 + reduced gradient 4 + state
    all            3       wide          wide         state, and the gathered units as buffers (FSDP2)

Workers that train locally keep the weights that they began a round with and the outer momentum beside the state
(`core.estimate.local`).

The state is what the optimizer keeps of a shard (core/optim/size.py): two words an element for AdamW, rows and columns
for Adafactor.
Compressed gradients (`core.parallel.compress`), and those in few bits with feedback, leave an error of their size which
stays, and until the update that of the step before; the second copy of weights within a node
(`core.parallel.coded_shards`) stays, too, an nth of the model on each of its n ranks.
A schedule that runs ahead keeps several versions of the parameters, and gradients of several steps, the most of both
only while it updates (`ScheduleSpec.held`), and its correction a state of its own beside the optimizer's.
ZeRO-1 divides the optimizer's side, ZeRO-2 the gradients too, ZeRO-3 all three. A step of several microbatches reduces
gradients only at the last, so until then they are whole on every rank, at ZeRO-2 and 3 too.

That table and the sum over it follow the published estimates. Not everything is alive at once, and `core.parallel.data`
hands each gradient to its bucket as soon as it is there, so the peak is the largest of four moments:
1. loss       the end of the forward: all kept activations, a chunk of logits, the head's gradients
2. backward   the way back begins: the same without logits, and one block's recomputed activations and gradients
3. gradients  the way back ends: all gradients, and the first block's activations or the embedding's second gradient
4. update     the gradients of what this rank updates, the optimizer's scratch
and of one more each where gradients are compressed (they with the errors of before and what they are decompressed to)
and where replicas of a stage add theirs up, message by message.

What it leaves out: the allocator's fragmentation, the CUDA context (0.5 to 1 GB), libraries' workspaces, padding,
and what context parallelism has on its way: two blocks of keys and values and of their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from core.comm.coded_rows import AT_A_TIME
from core.config import UserError, in_words
from core.estimate.local import outer_bytes
from core.estimate.pipeline import overlapping_schedule, run_schedule, stages_of
from core.estimate.shape import BlockShape, ModelShape, Part, RunShape
from core.kernels.cross_entropy import cut
from core.layout import largest_share
from core.parallel.coded_shards import code_of
from core.parallel.compress import IN_SIGNS, FewBits
from core.parallel.correction import CORRECTIONS, CorrectionSpec
from core.parallel.data import BUCKET_BYTES
from core.parallel.encoded import coded_bytes
from core.parallel.pipeline.messages import MOST_UNFINISHED
from core.parallel.pipeline.schedule import SCHEDULES, Counts
from core.parallel.recompute import SEGMENTED, STORED
from core.placement.stages import StageSplit
from core.precision import compute_dtype
from core.trace.chain import simulate, textbook_chain
from core.trace.segments import is_kept


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank. Each kind at its own largest; `phases` say what is alive together.

    held  what lies there between backward and update: parameters, masters that are not these, what the optimizer reads
          as gradients, its state without counters of steps. The kinds above are those of the published table
    units_bytes  of the buffers, what FSDP2 has of units that it gathers and reduces
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    phases: dict[str, int]
    held: Mapping[str, int] = field(default_factory=dict)
    units_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        """All kinds together: what published estimates add up."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.buffers_bytes

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of the step: what the device must have."""
        return max(self.phases.values())

    def table(self) -> list[tuple[str, str]]:
        """Rows (kind, size) to print."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        rows = [(kind, in_words(getattr(self, f"{kind}_bytes"))) for kind in kinds]
        peak_phase = max(self.phases, key=lambda phase: self.phases[phase])
        return [
            *rows,
            ("sum", in_words(self.total_bytes)),
            (f"peak ({peak_phase})", in_words(self.peak_bytes)),
        ]


def estimate_memory(model: ModelShape, run: RunShape) -> MemoryEstimate:
    """The estimate for the rank that needs most: of a pipeline, with the microbatches that its schedule keeps."""
    return max(estimate_places(model, run).values(), key=lambda m: m.peak_bytes)


def estimate_places(model: ModelShape, run: RunShape) -> dict[int, MemoryEstimate]:
    """The estimates of those of a pipeline's ranks of which one needs most; without a pipeline of all alike."""
    stages = stages_of(model, run)
    own: list[list[Part]] = [[] for _ in range(run.pp)]
    for part in model.parts(run):
        for rank in stages.ranks_with(part.block):
            own[rank].append(part)
    sizes = {id(block): _block_bytes(block, run) for block in (model.block, model.largest_block)}
    telling = _telling(model, run, stages, own)
    return {rank: _rank_memory(model, run, stages, rank, own[rank], sizes) for rank in telling}


def _telling(model: ModelShape, run: RunShape, stages: StageSplit, own: list[list[Part]]) -> list[int]:
    """Ranks of which one is the fullest: of those with alike stages the ones that keep more microbatches at a time."""
    if run.pp == 1:
        return [0]
    in_flight, telling = overlapping_schedule(run).in_flight, dict[Any, list[int]]()
    for rank, parts in enumerate(own):
        blocks = ((id(part.whole), part.state, run.recomputes(part.block), run.stores(part.block)) for part in parts)
        sizes = tuple(len(stages.ranges[stage]) for stage in stages.own(rank))
        stage = stages.own(rank)[0]
        ahead = _goes_on(run, stages, rank), _held(run, stage), _waiting_steps(run, stage)
        others = telling.setdefault((*blocks, sizes, rank in stages.last_ranks, *ahead), [])
        if not any(_keeps_as_much(in_flight[other], in_flight[rank]) for other in others):
            others.append(rank)
    return [rank for ranks in telling.values() for rank in ranks]


def _keeps_as_much(one: Sequence[Sequence[Counts]], other: Sequence[Sequence[Counts]]) -> bool:
    """Whether for each fullest moment of another rank there is one that is at least as full."""
    return all(
        any(all(a >= b for a, b in zip(mine, theirs, strict=True)) for mine in ours)
        for ours, others in zip(one, other, strict=True)
        for theirs in others
    )


def require_fit(
    model: ModelShape,
    run: RunShape,
    device_bytes: int,
    several: Callable[[], str] = lambda: "combine --zero 3 with --mesh.tp",
) -> MemoryEstimate:
    """The estimate, if it fits a device of `device_bytes`.

    several  what to do where no single change suffices

    Raises UserError otherwise: what it needs, what there is, and which single changes would fit.
    """
    estimate = estimate_memory(model, run)
    if estimate.peak_bytes <= device_bytes:
        return estimate
    fitting = [
        f"{option} ({in_words(peak)})"
        for option, changed in _single_changes(model, run)
        if (peak := estimate_memory(model, changed).peak_bytes) <= device_bytes
    ]
    advice = f"try {' or '.join(fitting)}" if fitting else f"no single change suffices: {several()}"
    needs, has = in_words(estimate.peak_bytes), in_words(device_bytes)
    raise UserError(f"the run needs {needs} per rank, the device has {has}; {advice}")


def _single_changes(model: ModelShape, run: RunShape) -> Iterator[tuple[str, RunShape]]:
    """(option as typed, the run with it), the mild ones first. tp, cp and pp ask for that many times more ranks."""
    if run.num_data_ranks > 1 and not run.local_every:
        for zero in range(run.zero + 1, 4):
            yield f"--zero {zero}", replace(run, zero=zero, dp_replicate=1, dp_shard=run.num_data_ranks)
    if run.recompute != "full" or run.recompute_every > 1:
        yield "--recompute.mode full", replace(run, recompute="full", recompute_every=1)
    if run.microbatch_size > 1:
        num_microbatches = run.num_microbatches * run.microbatch_size
        yield "--microbatch 1", replace(run, microbatch_size=1, num_microbatches=num_microbatches)
    for ep in range(2 * run.ep, run.num_data_ranks + 1, run.ep):
        dealt = ep * run.tp // run.tp_side  # over the rows of a grid, too
        if model.num_experts and run.num_data_ranks % ep == 0 and model.num_experts >= dealt:
            yield f"--mesh.ep {ep}", replace(run, ep=ep)
    for tp in (2 * run.tp, 4 * run.tp, 8 * run.tp):
        if run.tp_mode == "1d" and model.tp_parts % tp == 0:
            yield f"--mesh.tp {tp}", replace(run, tp=tp)
    for cp in (2 * run.cp, 4 * run.cp, 8 * run.cp):
        if run.cp_exchange == 1 and cp <= run.sequence_length:
            yield f"--mesh.cp {cp}", replace(run, cp=cp)
    for pp in (2 * run.pp, 4 * run.pp, 8 * run.pp):
        if pp * run.pipeline.stages_per_rank <= model.num_blocks:
            yield f"--mesh.pp {pp}", replace(run, pp=pp, pipeline=replace(run.pipeline, split=(), replicas=()))


@dataclass(frozen=True)
class _BlockBytes:
    """A microbatch's bytes in a block: the fields of `BlockShape`.

    stored   that stay on the device where its activations are kept in another place or form
    decoded  of compressed ones, that are there at once as they were
    coding   in all while the end of its forward compresses them
    """

    input: float
    everything: float
    selective: float
    working: float
    weighed: float | None
    stored: float
    decoded: float
    coding: float


def _block_bytes(block: BlockShape, run: RunShape) -> _BlockBytes:
    input, everything, selective, working = (
        run.tokens * k.bytes_per_token(run) for k in (block.input, block.everything, block.selective, block.working)
    )
    weighed = None if block.weighed is None else run.tokens * block.weighed.bytes_per_token(run)
    decoded = working if block.decoded is None else run.tokens * block.decoded.bytes_per_token(run)
    stored = run.tokens * _stored_per_token(block, run)
    coding = input + everything + decoded if run.recompute_bits is None else _coding_block_bytes(block, run)
    return _BlockBytes(input, everything, selective, working, weighed, stored, decoded, coding)


def _stored_per_token(block: BlockShape, run: RunShape) -> float:
    """Bytes of a block's activations that stay on the device, in the form in which the run keeps them."""
    if run.recompute == "offload":
        return 0.0
    if run.recompute_bits is not None:
        each = coded_bytes(run.recompute_bits)
        return block.input.coded_per_token(run, each) + block.everything.coded_per_token(run, each)
    whole = block.input.bytes_per_token(run) + block.everything.bytes_per_token(run)
    return whole - block.zeros.bytes_per_token(run) * (0.5 - 1 / (8 * run.width_bytes))


def _coding_block_bytes(block: BlockShape, run: RunShape) -> float:
    """What a block has at most while what it has saved is coded in few bits, storage behind storage.

    Its input, which is coded first, and its output are there as they are all the time: others hold them.
    """
    assert run.recompute_bits is not None
    saved, each = (block.input, *(block.saved or (block.everything,))), coded_bytes(run.recompute_bits)
    whole = [run.tokens * one.bytes_per_token(run) for one in saved]
    coded = [run.tokens * one.coded_per_token(run, each) for one in saved]
    statistics = run.tokens * block.everything.bytes_per_token(run) - sum(whole[1:])
    levels = []
    for place, one in enumerate(saved):
        level = sum(coded[: place + 1]) + sum(whole[max(place, 1) :])
        levels.append(level + _coder_bytes(run.tokens * one.coded_per_token(run, 1), run.wide_bytes))
    return 2 * whole[0] + statistics + max(levels)


def _rank_memory(
    model: ModelShape, run: RunShape, stages: StageSplit, rank: int, own: list[Part], sizes: Mapping[int, _BlockBytes]
) -> MemoryEstimate:
    """sizes: by the identity of the model's kinds of blocks."""
    parts, stage = own + _copies(model, run, stages, rank), stages.own(rank)[0]
    of_gradients = _gradient_bytes if run.comm.compress is None else _compressed_gradient_bytes
    state, grads = _state_bytes(parts, run, stage), of_gradients(model, parts, run, _goes_on(run, stages, rank))
    compressed = model.compressed(run)
    errors, exchanged = compressed.kept_bytes, run.wide_bytes * compressed.updated
    if run.comm.compress in IN_SIGNS:  # the new momenta, whole, and errors
        without = model.compressed(replace(run, comm=replace(run.comm, local_steps=1)))
        exchanged = without.kept_bytes - without.whole
    unsent = run.wide_bytes * model.unsent_elements(run)
    errors += unsent
    head = _head_bytes(model, run, has_head=rank in stages.last_ranks)
    growing = grads.first_block - grads.first
    kept, kept_back, recomputed = _block_activations(model, run, stages, rank, sizes, growing)
    block = sizes[id(model.largest_block)]
    bias = 0  # a ring makes it for a tile of scores at a time
    if run.cp == run.cp_exchange:
        bias = run.wide_bytes * math.ceil(model.bias_heads / run.tp_side / run.cp_exchange) * run.sequence_length**2
        bias += run.width_bytes * model.masks(run.sequence_length) * run.sequence_length**2
    ahead, kernel, sent = (
        _blocks_gathered_bytes(model, parts, run),
        _kernel_scratch(parts, run),
        _sent_bytes(parts, run),
    )
    gathered = ahead + _outside_gathered_bytes(model, parts, run)
    coding = _coding_bytes(_largest_sum(model, parts, run), run.comm.gradients, run.wide_bytes)
    first = block.input + block.everything
    if run.recompute == "compressed" and run.stores(stages.ranges[stage][0]):
        first = block.stored + block.decoded
    first_block = grads.first_block + first + block.working
    embedding = grads.whole + max(head.tied_gradient, block.input)
    if unsent:  # what codes leave out of the last messages comes with these, when no block is gathered any more
        last = _largest_sum(model, parts, run) + (_units(model, parts)[-1] if run.zero == 3 else 0)
        first_block, embedding = first_block + max(0, unsent - run.wide_bytes * last), embedding + unsent - ahead

    version, one_step = (size * _num_whole(parts) for size in (run.width_bytes, run.wide_bytes))
    late_copies = _late_copies_bytes(model, run, stages, rank)
    earlier = _waiting_steps(run, stage) * one_step + late_copies
    copy = _second_copy_bytes(parts, run)
    others = state.resident - _versions(run, stage) * version + errors + copy + bias + gathered + late_copies
    others += _on_their_way(run, block.input)
    resident = others + max(number * version + (steps - 1) * one_step for number, steps in _held(run, stage))
    phases = {
        "loss": resident - ahead // 2 + grads.held + kept + head.activations + head.scratch,
        "backward": resident + grads.first + head.tied_gradient + kept_back + recomputed + block.working,
        "gradients": resident + head.tied_gradient + max(first_block, embedding) + coding,
        "update": state.resident + errors + copy + earlier + max(grads.own + kernel + _before_update(parts, run), sent),
    }
    if errors > unsent:
        phases["compression"] = resident + grads.whole + exchanged
    if (added_up := _added_up_bytes(parts, run, stage)) > 0:
        waiting = _waiting_at_a_meeting(run, stage) * one_step
        phases["replicas"] = others + _versions(run, stage) * version + waiting + grads.whole + added_up
    if (under_way := _steps_at_an_end(run)) > 1:
        rest = state.resident - (_versions(run, stage) - 1) * version
        phases["end"] = rest + (under_way - 1) * one_step + max(grads.own + kernel + _before_update(parts, run), sent)
    return MemoryEstimate(
        parameters_bytes=state.parameters,
        gradients_bytes=state.gradients + earlier,
        optimizer_bytes=state.optimizer,
        activations_bytes=round(max(kept + head.activations, kept_back + recomputed + block.working)),
        buffers_bytes=round(
            head.scratch + 2 * head.tied_gradient + bias + gathered + copy + grads.message + max(kernel, sent)
        ),
        phases={name: round(num_bytes) for name, num_bytes in phases.items()},
        held={
            "parameters": state.parameters,
            "masters": state.masters,
            "gradients": grads.own,
            "state": sum(part.state for part in parts),
        },
        units_bytes=gathered + grads.message if run.zero == 3 else 0,
    )


# --- what lies on a rank ----------------------------------------------------------------------------------------------


def _copies(model: ModelShape, run: RunShape, stages: StageSplit, rank: int) -> list[Part]:
    """A tied head's weight where the embedding is on another rank, which then has its optimizer state."""
    head = model.head
    if head is None or not head.tied or rank not in stages.last_ranks or stages.owners[0] == rank:
        return []
    return [model.copied_part(run)]


def _late_copies_bytes(model: ModelShape, run: RunShape, stages: StageSplit, rank: int) -> int:
    """More versions of a tied head's weight, which is as late as on the first stage where those beside it are not."""
    spec = SCHEDULES[run.pipeline.schedule]
    if run.pp == 1 or not spec.updates_at_once:
        return 0
    more = spec.versions(0, run.num_stages) - spec.versions(stages.own(rank)[0], run.num_stages)
    return more * run.width_bytes * _num_whole(_copies(model, run, stages, rank))


def _goes_on(run: RunShape, stages: StageSplit, rank: int) -> bool:
    """Whether a rank runs forwards when it has gradients of earlier microbatches of a step."""
    if run.pp > 1 and SCHEDULES[run.pipeline.schedule].runs_ahead:
        return run.num_microbatches > len(stages.ranks_of(stages.own(rank)[0]))
    return run.pp == 1 or run_schedule(run).goes_on[rank]


def _versions(run: RunShape, stage: int) -> int:
    """Versions of its parameters that a rank of a stage holds."""
    return SCHEDULES[run.pipeline.schedule].versions(stage, run.num_stages) if run.pp > 1 else 1


def _held(run: RunShape, stage: int) -> tuple[tuple[int, int], ...]:
    """Versions, and gradients of steps, that it has at once when activations are most."""
    if run.pp == 1:
        return ((1, 1),)
    replicas = run.pipeline.replicas_of(run.pp)
    return SCHEDULES[run.pipeline.schedule].held(replicas, stage, run.num_microbatches)


def _waiting_steps(run: RunShape, stage: int) -> int:
    """Steps whose gradients wait for the norm of all stages, while those of another one come."""
    return SCHEDULES[run.pipeline.schedule].gradients(stage, run.num_stages) - 1 if run.pp > 1 else 0


def _waiting_at_a_meeting(run: RunShape, stage: int) -> int:
    """Steps whose gradients still wait when those of another one are whole on a stage."""
    spec, replicas = SCHEDULES[run.pipeline.schedule], run.pipeline.replicas_of(run.pp)
    if spec.updates_at_once:
        return 0
    first, own = (spec.ahead(replicas, one, run.num_microbatches) for one in (0, stage))
    return (first - own) // run.num_microbatches


def _added_up_bytes(parts: list[Part], run: RunShape, stage: int) -> float:
    """What replicas of a stage hold beside gradients while they add them up: a message, and what comes in for it."""
    replicas = run.pipeline.replicas[stage] if run.pp > 1 and run.pipeline.replicas else 1
    if replicas == 1:
        return 0.0
    return 2.0 * min(run.wide_bytes * _num_updated(parts), BUCKET_BYTES)


def _steps_at_an_end(run: RunShape) -> int:
    """Steps whose gradients wait behind a step that begins no other, when their versions are gone."""
    spec = SCHEDULES[run.pipeline.schedule]
    return spec.depth(run.num_stages) if run.pp > 1 and not spec.updates_at_once else 0


def _on_their_way(run: RunShape, message_bytes: float) -> float:
    """Activations and gradients that a stage has sent and not yet let go of."""
    sent = run.num_microbatches * (1 + SCHEDULES[run.pipeline.schedule].depth(run.num_stages))
    return min(MOST_UNFINISHED, sent) * message_bytes if run.pp > 1 else 0.0


def _num_whole(parts: list[Part]) -> int:
    """Elements that a rank computes with."""
    return sum(part.num_whole for part in parts)


def _num_updated(parts: list[Part]) -> int:
    """Elements that its optimizer updates."""
    return sum(part.num_updated for part in parts)


# --- parameters, gradients, optimizer ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _State:
    """Bytes by the published table; `resident` of them (all but gradients) stay through the step.

    masters  of the optimizer's side, those that are not the parameters themselves
    """

    parameters: int
    gradients: int
    optimizer: int
    resident: int
    masters: int = 0


def _corrected(run: RunShape) -> CorrectionSpec:
    return CORRECTIONS[run.pipeline.correction if run.pp > 1 else "none"]


def _before_update(parts: list[Part], run: RunShape) -> int:
    """Bytes of the weights of before that a pipeline's correction holds while the optimizer steps."""
    return run.wide_bytes * _num_updated(parts) * _corrected(run).keeps_changes


def _state_bytes(parts: list[Part], run: RunShape, stage: int) -> _State:
    whole, sharded = _num_whole(parts), _num_updated(parts)
    width, wide = run.width_bytes, run.wide_bytes
    state = sum(part.state for part in parts)
    with_gradient = whole if run.zero < 2 or run.holds_whole_gradients else sharded
    updated = sharded if run.zero else whole
    state += outer_bytes(updated, run)
    if run.comm.compress == "one_bit" and run.optimizer.name == "lamb":  # the second moment that goes on
        state += wide * updated
    if run.zero == 3:
        return _State(wide * sharded, wide * with_gradient, state, wide * sharded + state)
    master, reduced = (wide, wide) if width < wide else (0, 0)
    versions = _versions(run, stage)
    ahead = run.pp > 1 and SCHEDULES[run.pipeline.schedule].runs_ahead
    delay = SCHEDULES[run.pipeline.schedule].delay(stage, run.num_stages) if run.pp > 1 else 0
    correction = _corrected(run).make
    is_cut = run.zero > 0 and run.shard_ranks > 1
    if (ahead and (is_cut or correction.leads(delay))) or (is_cut and run.comm.weights is not None):
        master = wide  # of its own: a view would hold all of one version, or be what its code decodes to
    state += len(correction.keys(delay)) * wide * updated
    return _State(
        parameters=versions * width * whole,
        gradients=width * with_gradient,
        optimizer=state + (master + reduced) * updated,
        resident=versions * width * whole + state + master * updated,
        masters=master * updated,
    )


@dataclass(frozen=True)
class _Gradients:
    """Bytes of gradients alive, in the format of the reductions.

    held         during the forward: those of earlier microbatches
    first        when the first ones of the backward are there: a message of them, or those behind the blocks
    first_block  all but the embedding's, which come last, and where no message is made, those of the first block
    whole        at the end of the backward
    own          what the optimizer reads
    message      beyond the shards: a bucket on its way, at ZeRO-3 a unit; on one rank there is none
    """

    held: int
    first: int
    first_block: int
    whole: int
    own: int
    message: int


def _gradient_bytes(model: ModelShape, parts: list[Part], run: RunShape, goes_on: bool) -> _Gradients:
    """goes_on: whether the rank runs forwards when it has gradients of earlier microbatches."""
    if run.zero == 1 and run.shard_ranks > 1 and run.comm.gradients is not None:
        run = replace(run, zero=2)  # what is decoded has memory of its own, and the message goes
    wide, sharded = run.wide_bytes, run.zero >= 2
    message, everything = wide * _largest_sum(model, parts, run), wide * sum(part.num_summed for part in parts)
    # Below ZeRO-2 a rank's rows stand in the whole message.
    own = wide * sum(part.num_updated if sharded else part.num_sent for part in parts)
    if run.holds_whole_gradients and not goes_on:  # activations are fullest before the first of them
        behind = wide * _num_whole([part for part in parts if part.block >= model.num_blocks])
        # A message is made whole with its first gradient.
        first = message if run.num_gradient_ranks > 1 else behind
        return _Gradients(0, first, everything, everything, own, 0)
    if run.holds_whole_gradients:
        return _Gradients(everything, everything, everything, everything, own, 0)
    after = [part for part in parts if part.block >= 0]
    behind_embedding = wide * sum(part.num_updated if sharded else part.num_summed for part in after)
    if run.zero < 3 and run.num_gradient_ranks == 1:  # no messages: those of what the backward has left
        blocks = {part.block for part in parts if 0 <= part.block < model.num_blocks} or {-1}
        first, first_block = (
            wide * _num_whole([part for part in parts if part.block > block]) for block in (max(blocks), min(blocks))
        )
        return _Gradients(0, first, first_block, everything, own, 0)
    if not sharded or run.shard_ranks == 1:
        return _Gradients(0, message, min(behind_embedding + message, everything), everything, own, 0)
    # One message is filled while the one before it travels; what is left of a message is its shard.
    moving = min(everything, 2 * message)
    earlier = own if run.num_microbatches > 1 else 0
    # FSDP2 adds a unit's to those of earlier microbatches as they come, ZeRO-2 all of them when all are there.
    new = (0, 0, 0) if earlier and run.zero == 3 else (0, behind_embedding, own)
    first, first_block, whole = (earlier + n + moving for n in new)
    if run.zero == 3:  # where activations are fullest, the last block's have just come, and are in no message yet
        first += wide * max((part.num_whole for part in _blocks(model, parts)), default=0) - moving
    return _Gradients(earlier, first, first_block, whole, own, message)


def _compressed_gradient_bytes(model: ModelShape, parts: list[Part], run: RunShape, goes_on: bool) -> _Gradients:
    """The same where some stay whole, each a tensor of its own, until they are exchanged."""
    found = _gradient_bytes(model, parts, replace(run, zero=min(run.zero, 1)), goes_on)
    if run.zero >= 2:
        return replace(found, own=run.wide_bytes * _num_updated(parts))
    others = run.shard_ranks - 1 if run.zero else 0
    return replace(found, own=found.own - run.wide_bytes * others * model.compressed(run).updated)


def _largest_sum(model: ModelShape, parts: list[Part], run: RunShape) -> int:
    """Elements of the largest message of gradients: those that are compressed go in none."""
    if run.zero == 3:
        return max(_units(model, parts).values())
    return max((size for (_, is_compressed), size in _messages(parts, run) if not is_compressed), default=0)


def _messages(parts: list[Part], run: RunShape) -> Iterator[tuple[tuple[bool, bool], int]]:
    """(its kind, its elements with those that fill ragged rows) of each message, cut as by `core.parallel.data`."""
    filling: dict[tuple[bool, bool], tuple[int, int]] = {}
    for part in reversed(parts):
        for kind, whole, slot in zip(reversed(part.kinds), reversed(part.whole), reversed(part.slots), strict=True):
            size, room = filling.get(kind, (0, 0))
            if run.wide_bytes * whole > room:
                if size:
                    yield kind, size
                size, room = 0, BUCKET_BYTES
            filling[kind] = size + slot, room - run.wide_bytes * whole
    yield from ((kind, size) for kind, (size, _) in filling.items())


def _units(model: ModelShape, parts: list[Part]) -> dict[int, int]:
    """Elements of each unit that FSDP2 gathers: block -> elements, -1 -> all that is outside the blocks."""
    units = {-1: 0}
    for part in parts:
        unit = part.block if 0 <= part.block < model.num_blocks else -1
        units[unit] = units.get(unit, 0) + part.num_sent
    return units


def _outside_gathered_bytes(model: ModelShape, parts: list[Part], run: RunShape) -> int:
    """ZeRO-3: what is outside the blocks."""
    return run.width_bytes * _units(model, parts)[-1] if run.zero == 3 else 0


def _blocks_gathered_bytes(model: ModelShape, parts: list[Part], run: RunShape) -> int:
    """ZeRO-3: the block that computes and the one that is fetched ahead, which behind the last one there is not."""
    return (
        2 * run.width_bytes * max((part.num_sent for part in _blocks(model, parts)), default=0) if run.zero == 3 else 0
    )


def _blocks(model: ModelShape, parts: list[Part]) -> list[Part]:
    """The parts that are blocks."""
    return [part for part in parts if 0 <= part.block < model.num_blocks]


def _second_copy_bytes(parts: list[Part], run: RunShape) -> int:
    """What a rank of a node keeps of all that has been gathered between nodes."""
    return run.width_bytes * sum(part.num_sent for part in parts) // run.comm.node if run.comm.secondary else 0


def _kernel_scratch(parts: list[Part], run: RunShape) -> int:
    """Bytes that the optimizer's kernel needs beside its state."""
    largest = max(max(part.updated) for part in parts)
    elements = {"fused": 0, "loop": 2 * largest, "foreach": _num_updated(parts)}
    return run.wide_bytes * elements[run.optimizer_kernel]


def _sent_bytes(parts: list[Part], run: RunShape) -> int:
    """A bucket of updated parameters on its way to all: this rank's part and the whole."""
    if run.zero not in (1, 2) or run.shard_ranks == 1:
        return 0
    elements = max(size for _, size in _messages(parts, run))
    whole = run.width_bytes * elements
    return whole + whole // run.shard_ranks + _coding_bytes(elements, run.comm.weights, 4)


def _coding_bytes(elements: int, bits: FewBits | None, wide: int) -> int:
    """A message in few bits, twice where it is a sum that goes there and comes, and the numbers that are coded."""
    if bits is None:
        return 0
    code = code_of(bits)
    return 2 * elements * code.num_bytes // code.block + _coder_bytes(elements, wide)


def _coder_bytes(elements: float, wide: int) -> int:
    """What is coded at a time: in the format in which it is rounded, in a byte each, and packed."""
    return (wide + 2) * min(math.ceil(elements), AT_A_TIME)


# --- activations and the head -----------------------------------------------------------------------------------------


def _block_activations(
    model: ModelShape,
    run: RunShape,
    stages: StageSplit,
    rank: int,
    sizes: Mapping[int, _BlockBytes],
    growing: float,
) -> tuple[float, float, float]:
    """What all blocks of a rank keep: (behind a forward, on the way back, beyond that while one is computed again).

    growing  bytes of gradients that come to be on the way back; where segments run again they count to the last
    """
    kept_by, pending_by, beyond = {}, {}, 0.0
    waiting_block = 0.0  # of offloaded ones, that is still on the device
    splits = SCHEDULES[run.pipeline.schedule].splits_backward and run.pp > 1
    segmented = run.recompute in SEGMENTED
    for stage in stages.own(rank):
        kept = pending = 0.0
        moments = []  # when a block is computed again, beside what is kept and pending of all
        blocks = stages.ranges[stage]
        dropped = dict(zip(blocks, (not whole for whole in is_kept(run.segments(len(blocks)))))) if segmented else {}
        for index in blocks:
            block = sizes[id(model.block_of(index))]
            recomputes = dropped.get(index, run.recomputes(index))
            kept_if_recomputed = block.input + (block.selective if run.recompute == "selective" else 0)
            whole = block.input + block.everything
            again = max(0.0, whole - kept_if_recomputed) if recomputes else 0.0
            kept += kept_if_recomputed if recomputes else block.stored if run.stores(index) else whole
            # Between I and W the gradients of what weights made, of products and norms, and what those were made of.
            waiting = block.selective + 2 * block.input
            if again and block.weighed is not None:
                waiting += block.input + block.weighed - kept_if_recomputed
            else:
                waiting += again
            # The way back: without parts blocks behind this one are gone, with parts those before it do not wait yet.
            pending += waiting
            moments.append(again - pending if splits else kept + again)
        if segmented:
            kept, levels = _segment_levels(model, run, blocks)
            rises = (growing * (len(blocks) - 1 - place) / len(blocks) for place in range(len(blocks)))
            moments = [level - kept if splits else level + rise for level, rise in zip(levels, rises)] or [0.0]
        if run.recompute in STORED:
            kept, last, moments = _stored_levels([sizes[id(model.block_of(i))] for i in blocks], run, blocks, growing)
            waiting_block = max(waiting_block, last)
            moments = [moment - last for moment in moments]
        kept_by[stage], pending_by[stage] = kept, pending
        beyond = max(beyond, max(moments) - (0.0 if splits else kept))
    if run.pp == 1:
        kept = sum(kept_by.values()) + waiting_block
        return kept, kept, beyond

    heads = _waiting_heads(model, run, stages, rank) + waiting_block
    behind_forwards, ever = (
        heads + max(sum(kept_by[stage] * n + pending_by[stage] * waits for stage, n, waits in one) for one in moments)
        for moments in overlapping_schedule(run).moments[rank]
    )
    return behind_forwards, ever, beyond


def _stored_levels(
    sizes: Sequence[_BlockBytes], run: RunShape, blocks: range, growing: float
) -> tuple[float, float, list[float]]:
    """What a stage's blocks keep of each microbatch, of the last one beside, and when its backward is fullest.

    Of offloaded blocks the last one is still on the device when the forward ends, and on the way back the one before
    is there, too. Of compressed ones what a node asks for is there as it was, and so is what is being encoded at the
    end of a block's forward. As activations do not become fewer on the way back, the gradients of blocks behind count.
    """
    whole = [size.input + size.everything for size in sizes]
    is_stored = [run.stores(index) for index in blocks]
    kept = [size.stored if stored else of for size, stored, of in zip(sizes, is_stored, whole)]
    chosen = [place for place, stored in enumerate(is_stored) if stored]
    offloads = run.recompute == "offload"
    last = whole[chosen[-1]] if offloads and chosen else 0.0
    levels = [sum(kept) + last]
    for place, size in enumerate(sizes):
        before = [other for other in chosen if other < place]
        level = sum(kept[: place + 1]) + growing * (len(sizes) - 1 - place) / len(sizes)
        if offloads:
            level += (whole[place] if is_stored[place] else 0.0) + (whole[before[-1]] if before else 0.0)
        elif is_stored[place]:
            level += size.decoded
            levels.append(sum(kept[:place]) + size.coding - size.working)
        levels.append(level)
    return sum(kept), last, levels


def host_activations_bytes(model: ModelShape, run: RunShape) -> int:
    """Bytes that a rank's offloaded blocks have on the host at once, of the rank with most."""
    if run.recompute != "offload":
        return 0
    stages = stages_of(model, run)
    sizes = {id(block): _block_bytes(block, run) for block in (model.block, model.largest_block)}
    most = 0.0
    for rank in range(run.pp):
        of_stage = {
            stage: sum(
                sizes[id(model.block_of(index))].input + sizes[id(model.block_of(index))].everything
                for index in stages.ranges[stage]
                if run.stores(index)
            )
            for stage in stages.own(rank)
        }
        if run.pp == 1:
            return round(sum(of_stage.values()))
        _, ever = overlapping_schedule(run).moments[rank]
        most = max(most, max(sum(of_stage[stage] * n for stage, n, _ in moment) for moment in ever))
    return round(most)


def _segment_levels(model: ModelShape, run: RunShape, blocks: range) -> tuple[float, list[float]]:
    """What segments keep of a stage's blocks behind its forward, and when each block's backward begins."""
    sizes = [
        [round(run.tokens * kept.bytes_per_token(run)) for kept in (block.input, block.everything)]
        for block in map(model.block_of, blocks)
    ]
    inputs = [own for own, _ in sizes]
    activations, nothing = [*inputs, *inputs[-1:]], [0.0] * len(sizes)
    chain = textbook_chain(activations, [sum(own) for own in sizes], nothing, nothing)
    without_output = (replace(of, refilled=everything) for of, (_, everything) in zip(chain.blocks, sizes))
    step = simulate(replace(chain, blocks=tuple(without_output)), segments := run.segments(len(blocks)))
    last = chain.output if segments and is_kept(segments)[-1] else 0
    return step.forward_bytes + inputs[0] - last, [inputs[0] + level for level in step.back_bytes]


def _waiting_heads(model: ModelShape, run: RunShape, stages: StageSplit, rank: int) -> float:
    """Bytes that heads keep for backwards that do not follow at once: of gpipe, a gradient of the weight each."""
    if rank not in stages.last_ranks or model.head is None:
        return 0.0
    most = overlapping_schedule(run).heads_waiting
    weight_bytes = run.width_bytes * largest_share(model.head.vocab_size, run.tp) * model.head.width
    return (most - 1) * (_head_bytes(model, run, has_head=True).activations + weight_bytes)


@dataclass(frozen=True)
class _Head:
    """Bytes of the last stage's end; zero elsewhere.

    activations    its norm's input and output, what a composed norm keeps besides, and the gradient of the output,
                   which its forward already makes
    scratch        a chunk of logits, its softmax, the weight's gradient while it is summed over chunks
    tied_gradient  that gradient waiting for the embedding's own; their sum is a third tensor
    """

    activations: float = 0
    scratch: float = 0
    tied_gradient: float = 0


def _head_bytes(model: ModelShape, run: RunShape, has_head: bool) -> _Head:
    head = model.head
    if head is None or not has_head:
        return _Head()
    width, wide, rows = run.width_bytes, run.wide_bytes, largest_share(head.vocab_size, run.tp)
    dtype = compute_dtype(run.precision)
    chunk_tokens, sum_dtype = cut(run.tokens, rows, head.width, dtype)
    tile_tokens = (
        chunk_tokens if head.tile_bytes is None else _even_part(chunk_tokens, head.tile_bytes // (rows * wide))
    )
    softmax = 2 * tile_tokens * rows * wide
    weight_elements = rows * head.width
    stream = model.block.input.bytes_per_token(run)
    ends = {  # the output, its gradient, and on grids what a product has of its input on the way
        "1d": 2 * width * head.width,
        "3d": (2 + 3 * run.tp_side) * stream,
    }.get(run.tp_mode, 3 * stream)
    # Several chunks are summed; where in a wider dtype, the rounded sum is in the end beside that sum.
    in_parts = chunk_tokens < run.tokens or dtype == torch.float16
    summed = sum_dtype.itemsize * weight_elements if in_parts else 0
    rounded = 0 if summed and sum_dtype == dtype else width * weight_elements
    return _Head(
        activations=run.tokens * (stream + head.norm.bytes_per_token(run) + ends),
        scratch=chunk_tokens * rows * width + summed + max(softmax, rounded),
        tied_gradient=width * weight_elements if head.tied and run.pp == 1 else 0,
    )


def _even_part(total: int, largest: int) -> int:
    """The head's tiles: as few, nearly equal parts as `largest` allows."""
    num_parts = max(1, -(-total // max(1, largest)))
    return max(1, -(-total // num_parts))
