"""Bytes per rank of a training step: parameters, gradients, optimizer state, activations, buffers.

State, per parameter on a rank (ZeRO divides over dp_shard, each parameter by rows, the largest shard counted):

    precision      ZeRO    parameters    gradients    optimizer's side
    fp32, fp64     0-2     w             w            words x w
    bf16, fp16     0-2     2             2            master 4 + reduced gradient 4 + words x 4
    all            3       max(4, w)     max(4, w)    words x max(4, w), and the gathered units as buffers (FSDP2)

ZeRO-1 divides the optimizer's side, ZeRO-2 the gradients too, ZeRO-3 all three. A step of several microbatches reduces
gradients only at the last, so until then they are whole on every rank, at ZeRO-2 and 3 too.

Not everything is alive at once, so the peak is the largest of four moments:
1. loss       the end of the forward: all kept activations, a chunk of logits, the head's gradients
2. backward   the way back begins: the same without logits, and one block's recomputed activations and gradients
3. gradients  the way back ends: all gradients, and the first block's activations or the embedding's second gradient
4. update     all gradients, the optimizer's scratch

What it leaves out: the allocator's fragmentation, the CUDA context (0.5 to 1 GB), libraries' workspaces, and padding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from core.config import UserError
from core.estimate.shape import STATE_WORDS, HeadShape, ModelShape, RunShape, Weight

# Gradients travel in buckets of this size where they are not gathered unit by unit.
BUCKET_BYTES = 25 << 20


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank. Each kind at its own largest; `phases` say what is alive together."""

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    buffers_bytes: int
    phases: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """All kinds together: what published estimates add up, an upper bound of the peak."""
        state = self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes
        return state + self.activations_bytes + self.buffers_bytes

    @property
    def peak_bytes(self) -> int:
        """The fullest moment of the step: what the device must have."""
        return max(self.phases.values())

    def table(self) -> list[tuple[str, str]]:
        """Rows (kind, size) to print."""
        kinds = ("parameters", "gradients", "optimizer", "activations", "buffers")
        rows = [(kind, gigabytes(getattr(self, f"{kind}_bytes"))) for kind in kinds]
        peak_phase = max(self.phases, key=lambda phase: self.phases[phase])
        return [*rows, ("sum", gigabytes(self.total_bytes)), (f"peak ({peak_phase})", gigabytes(self.peak_bytes))]


def gigabytes(num_bytes: float) -> str:
    """Decimal gigabytes, or megabytes below one."""
    return f"{num_bytes / 1e9:.1f} GB" if num_bytes >= 1e9 else f"{num_bytes / 1e6:.1f} MB"


def estimate_memory(model: ModelShape, run: RunShape) -> MemoryEstimate:
    """The estimate for the rank that needs most (with pipeline stages: the fullest stage, scheduled 1F1B)."""
    return max((_stage_memory(model, run, stage) for stage in range(run.pp)), key=lambda m: m.peak_bytes)


def require_fit(model: ModelShape, run: RunShape, device_bytes: int) -> MemoryEstimate:
    """The estimate, if it fits a device of `device_bytes`.

    Raises UserError otherwise: what it needs, what there is, and which single changes would fit.
    """
    estimate = estimate_memory(model, run)
    if estimate.peak_bytes <= device_bytes:
        return estimate
    fitting = [
        f"{option} ({gigabytes(peak)})"
        for option, changed in _single_changes(model, run)
        if (peak := estimate_memory(model, changed).peak_bytes) <= device_bytes
    ]
    advice = f"try {' or '.join(fitting)}" if fitting else "no single change suffices: combine --zero 3 with --mesh.tp"
    needs, has = gigabytes(estimate.peak_bytes), gigabytes(device_bytes)
    raise UserError(f"the run needs {needs} per rank, the device has {has}; {advice}")


def _single_changes(model: ModelShape, run: RunShape) -> Iterator[tuple[str, RunShape]]:
    """(option as typed, the run with it), the mild ones first. tp and pp ask for as many times more ranks."""
    if run.num_data_ranks > 1:
        for zero in range(run.zero + 1, 4):
            yield f"--zero {zero}", replace(run, zero=zero, dp_replicate=1, dp_shard=run.num_data_ranks)
    if run.checkpointing != "full":
        yield "--checkpointing full", replace(run, checkpointing="full")
    if run.microbatch_size > 1:
        yield (
            "--microbatch_size 1",
            replace(run, microbatch_size=1, num_microbatches=run.num_microbatches * run.microbatch_size),
        )
    for tp in (2 * run.tp, 4 * run.tp, 8 * run.tp):
        if model.tp_parts % tp == 0:
            yield f"--mesh.tp {tp}", replace(run, tp=tp)
    for pp in (2 * run.pp, 4 * run.pp, 8 * run.pp):
        if pp <= model.num_blocks:
            yield f"--mesh.pp {pp}", replace(run, pp=pp)


def _stage_memory(model: ModelShape, run: RunShape, stage: int) -> MemoryEstimate:
    weights = _stage_weights(model, run.pp, stage)
    parameters, gradients, optimizer = _state_bytes(weights, run)
    head = model.head if stage == run.pp - 1 else None
    kept, recomputed = _block_activations(model, run, stage)
    block = model.block
    input_bytes, everything, working = (
        run.tokens * k.bytes_per_token(run) for k in (block.input, block.everything, block.working)
    )

    # The head: its norm's input and output, the gradient that its forward already makes, its weight's gradient.
    head_tokens = _head_token_bytes(head, run, input_bytes)
    logits, weight_sum, head_gradient = _head_buffers(head, run)
    # A tied embedding waits with the head's gradient for its own; their sum is a third tensor.
    tied_gradient = head_gradient if head is not None and head.tied and run.pp == 1 else 0
    bias = 4 * max(1, run.width_bytes // 4) * math.ceil(model.bias_heads / run.tp) * run.sequence_length**2
    gathered, bucket = _communication_buffers(model, weights, run)
    scratch = _optimizer_scratch(weights, parameters, run)

    state = parameters + optimizer
    held = gradients if run.num_microbatches > 1 else 0
    before_blocks = _state_bytes([w for w in weights if w.block < 0], run)[1]
    first_block = max(held, gradients - before_blocks) + tied_gradient + input_bytes + everything + working
    embedding = gradients + tied_gradient + max(tied_gradient, input_bytes)
    common = state + held + bias + gathered
    phases = {
        "loss": common + kept + head_tokens + logits + weight_sum,
        "backward": common + kept + recomputed + working + head_gradient + bucket,
        "gradients": state + max(first_block, embedding) + bias + gathered + bucket,
        "update": state + gradients + scratch,
    }
    return MemoryEstimate(
        parameters_bytes=parameters,
        gradients_bytes=gradients,
        optimizer_bytes=optimizer,
        activations_bytes=round(kept + max(head_tokens, recomputed + working)),
        buffers_bytes=round(logits + weight_sum + 2 * tied_gradient + bias + gathered + bucket + scratch),
        phases={name: round(num_bytes) for name, num_bytes in phases.items()},
    )


def _stage_of(block: int, num_blocks: int, pp: int) -> int:
    """The stage of a block; what lies before the blocks is on the first, what lies behind them on the last."""
    return min(max(block, 0), num_blocks - 1) * pp // num_blocks


def _stage_weights(model: ModelShape, pp: int, stage: int) -> list[Weight]:
    weights = [w for w in model.weights if _stage_of(w.block, model.num_blocks, pp) == stage]
    head = model.head
    if pp > 1 and stage == pp - 1 and head is not None and head.tied:
        weights.append(Weight((head.vocab_size, head.width), model.num_blocks, tp_dim=0))
    return weights


def _num_local(weight: Weight, run: RunShape, shard: int = 1) -> int:
    """Elements of the largest shard: cut by tp, then by rows over `shard` ranks."""
    rows, *rest = weight.local_shape(run.tp)
    return -(-rows // shard) * math.prod(rest)


def _state_bytes(weights: list[Weight], run: RunShape) -> tuple[int, int, int]:
    """(parameters, gradients, the optimizer's side)."""
    whole = sum(_num_local(w, run) for w in weights)
    sharded = sum(_num_local(w, run, run.dp_shard) for w in weights)
    width, wide, words = run.width_bytes, max(4, run.width_bytes), STATE_WORDS[run.optimizer]
    gradients_whole = run.zero < 2 or run.num_microbatches > 1
    if run.zero == 3:
        return wide * sharded, wide * (whole if gradients_whole else sharded), words * wide * sharded
    side = words * wide + (8 if width < 4 else 0)
    return (
        width * whole,
        width * (whole if gradients_whole else sharded),
        side * (sharded if run.zero else whole),
    )


def _block_activations(model: ModelShape, run: RunShape, stage: int) -> tuple[float, float]:
    """(kept by all blocks of the stage, beyond that at the worst moment of the way back by recomputing one)."""
    block = model.block
    input_bytes, everything, selective = (
        run.tokens * k.bytes_per_token(run) for k in (block.input, block.everything, block.selective)
    )
    dropped_kept = input_bytes + (selective if run.checkpointing == "selective" else 0)
    recomputed = max(0.0, input_bytes + everything - dropped_kept)
    kept = worst = 0.0
    for index in range(model.num_blocks):
        if _stage_of(index, model.num_blocks, run.pp) == stage:
            kept += dropped_kept if run.recomputes(index) else input_bytes + everything
            worst = max(worst, kept + (recomputed if run.recomputes(index) else 0))
    num_in_flight = min(run.num_microbatches, run.pp - stage)
    return num_in_flight * kept, worst - kept


def _head_token_bytes(head: HeadShape | None, run: RunShape, input_bytes: float) -> float:
    return 0 if head is None else 2 * input_bytes + run.tokens * run.width_bytes * head.width


def _head_buffers(head: HeadShape | None, run: RunShape) -> tuple[float, float, float]:
    """(a chunk of logits, the weight's gradient while it is summed over chunks, that gradient when done)."""
    if head is None:
        return 0, 0, 0
    width, rows = run.width_bytes, -(-head.vocab_size // run.tp)
    num_chunks = -(-run.tokens // max(1, head.chunk_bytes // (rows * width)))
    logits = -(-run.tokens // num_chunks) * rows * width
    gradient = rows * head.width * width
    # Chunks of 16 bit are summed in fp32, beside the product of the latest.
    weight_sum = gradient if num_chunks == 1 or width >= 4 else 3 * gradient
    return logits, weight_sum, gradient


def _communication_buffers(model: ModelShape, weights: list[Weight], run: RunShape) -> tuple[float, float]:
    """(gathered parameters, gradients on their way)."""
    local = sum(_num_local(w, run) for w in weights)
    wide = max(4, run.width_bytes)
    if run.zero == 3 and run.dp_shard > 1:
        units: dict[int, int] = {}
        for weight in weights:
            inside = 0 <= weight.block < model.num_blocks
            unit = weight.block if inside else -1
            units[unit] = units.get(unit, 0) + _num_local(weight, run)
        root = units.pop(-1, 0)
        largest = max(units.values(), default=0)
        return run.width_bytes * (root + 2 * largest), wide * max(largest, root)
    if run.num_data_ranks > 1:
        return 0, min(BUCKET_BYTES, wide * local)
    return 0, 0


def _optimizer_scratch(weights: list[Weight], parameters_bytes: int, run: RunShape) -> float:
    shard = run.dp_shard if run.zero else 1
    sizes = [max(4, run.width_bytes) * _num_local(w, run, shard) for w in weights]
    return {"fused": 0, "loop": 2 * max(sizes), "foreach": sum(sizes)}[run.optimizer_kernel]
