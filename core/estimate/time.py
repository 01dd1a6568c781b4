"""Seconds of a training step, closed form: compute + communication + pipeline bubble.

Assumptions: the model's products run at `utilisation` of the device's peak; nothing overlaps, so the sum is an upper
bound; a ring moves (n - 1) / n of the bytes for a reduce-scatter or an all-gather and twice that for an all-reduce
(Rajbhandari et al. 2020, section 7); each axis has the same bandwidth; a pipeline idles as its schedule does
with stages of equal cost (`core.estimate.pipeline` simulates what they cost). Latencies are not counted.
"""

from dataclasses import dataclass

from core.comm.volume import wire_share
from core.estimate.local import outer_message
from core.estimate.shape import Compressed, ModelShape, RunShape
from core.layout import even_shares
from core.mesh import axis_size, mesh_shape
from core.metrics import transformer_flops_per_token
from core.parallel.coded_shards import code_of
from core.parallel.compress import FewBits
from core.parallel.pipeline.schedule import SCHEDULES, bubble_in_theory
from core.parallel.recompute import SEGMENTED


@dataclass(frozen=True)
class Machine:
    """peak_flops of one device; bandwidth of a rank's link in bytes/s, one way; utilisation reached by the products."""

    peak_flops: float
    bandwidth: float = 25e9
    utilisation: float = 0.4


@dataclass(frozen=True)
class TimeEstimate:
    compute_s: float
    communication_s: float
    bubble_s: float
    tokens: int

    @property
    def step_s(self) -> float:
        return self.compute_s + self.communication_s + self.bubble_s

    @property
    def tokens_per_s(self) -> float:
        """Tokens a second of all ranks together."""
        return self.tokens / self.step_s


def estimate_time(model: ModelShape, run: RunShape, machine: Machine) -> TimeEstimate:
    """Seconds of one step of `run.num_microbatches` microbatches."""
    tokens = run.tokens * run.num_microbatches
    compute_s = step_flops(model, run) / (machine.peak_flops * machine.utilisation)
    communication_s = sent_bytes(model, run) / machine.bandwidth
    pipeline = run.pipeline
    bubble = bubble_in_theory(pipeline.schedule, run.pp, run.num_microbatches, pipeline.chunks, again=run.again)
    if SCHEDULES[pipeline.schedule].runs_ahead:
        bubble = 0.0  # once in a run, not once in a step
    bubble_s = bubble / (1 - bubble) * compute_s
    return TimeEstimate(compute_s, communication_s, bubble_s, tokens * run.num_data_ranks * run.cp)


def sent_bytes(model: ModelShape, run: RunShape) -> float:
    """Bytes that one rank sends over its link in a step, by rings; of workers that train locally in a mean one."""
    sent = data_parallel_bytes(model, run) + _model_parallel_bytes(model, run) + _pipeline_bytes(model, run)
    return sent + _stage_replicas_bytes(model, run)


def step_flops(model: ModelShape, run: RunShape) -> float:
    """FLOPs of one rank in one step, what checkpointing computes again included."""
    scores = (1, model.block.scores_dim, sum(model.keys_seen(run.sequence_length)))
    flops = transformer_flops_per_token(model.num_matmul_parameters, *scores)
    # Selective checkpointing keeps the products, so what it repeats costs next to nothing.
    stages = run.pp * run.pipeline.stages_per_rank if run.recompute in SEGMENTED and run.pp > 1 else 1
    parts = even_shares(model.num_blocks, stages)  # as the closed forms have it, of equal cost
    num_again = sum(sum(run.runs_again(range(part.start, part.stop))) for part in parts)
    flops += num_again / max(model.num_blocks, 1) * flops / 3
    return flops * run.tokens * run.num_microbatches / (run.tp * run.pp)


def data_parallel_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank: gradients (fp32 or wider) once, or each microbatch; parameters once, at ZeRO-3 twice each.

    Those of experts only among the ranks that hold copies. Of workers that train locally only within each, and a share
    of the round's average.
    """
    dense, experts = (model.num_parameters(experts=which) * _held(run) / run.tp for which in (False, True))
    if run.ep == 1:  # all travel alike
        dense, experts = dense + experts, 0.0
    in_steps = _replicas_bytes(dense, run, 1, model.compressed(run), model.vectors)
    in_steps += _replicas_bytes(experts / run.ep, run, run.ep, Compressed(), model.vectors)
    return in_steps + (outer_message(model, run).a_step if run.local_every else 0.0)


def _replicas_bytes(num_parameters: float, run: RunShape, ep: int, compressed: Compressed, vectors: float) -> float:
    """The same of parameters that only one data-parallel rank in `ep` holds.  vectors: their share, which no code takes

    Where nodes are said, messages within one take no time.
    """
    comm, reductions = run.comm, run.num_microbatches if run.reduce_each else 1
    elements = reductions * (num_parameters - compressed.whole)
    if run.zero == 0:
        gradients = run.wide_bytes * elements
        return wire_share("all_reduce", run.num_gradient_ranks // ep) * gradients + compressed.wire_bytes
    gathers, shards = 2 * run.num_microbatches if run.zero == 3 else 1, run.shard_ranks // ep
    copies = 1 if run.local_every else run.dp_replicate
    between_replicas = wire_share("all_reduce", copies) * run.wide_bytes * elements / shards
    crossing = 1 if comm.secondary else gathers
    gathered = (
        wire_share("all_gather", shards)
        * crossing
        * coded_bytes(num_parameters, comm.weights, run.width_bytes, vectors)
    )
    nodes = shards // comm.node  # of one rank each, unless it is said
    reduced = (
        wire_share("all_gather", nodes) / comm.node * coded_bytes(elements, comm.gradients, run.wide_bytes, vectors)
    )
    return gathered + reduced + between_replicas + compressed.wire_bytes


def coded_bytes(elements: float, bits: FewBits | None, width: int, vectors: float) -> float:
    """Bytes of elements in a message of few bits, of which that share is of vectors."""
    if bits is None:
        return width * elements
    code = code_of(bits)
    return elements * (vectors * width + (1 - vectors) * code.num_bytes / code.block)


def _held(run: RunShape) -> float:
    """The mean share of the parameters that a rank of the pipeline has: a stage of r replicas has the work of r."""
    replicas = run.pipeline.replicas if run.pp > 1 else ()
    return sum(number**2 for number in replicas) / run.pp**2 if replicas else 1 / run.pp


def _stage_replicas_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank, in the mean: gradients among the replicas of its stage, of what ZeRO leaves it of them."""
    gradients = run.wide_bytes * model.num_parameters() / run.tp / (run.shard_ranks if run.zero else 1)
    replicas = run.pipeline.replicas if run.pp > 1 else ()
    return sum(wire_share("all_reduce", number) * gradients * (number / run.pp) ** 2 for number in replicas)


def _model_parallel_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank in the forwards and backwards of a step: by its plan, or of blocks without one as published."""
    if model.sent is None:
        published = (_tensor_parallel_bytes, _context_parallel_bytes, _expert_parallel_bytes)
        return sum(form(model, run) for form in published)
    mesh = mesh_shape(run.mesh)
    messages = model.sent(run).items()
    return run.num_microbatches / run.pp * sum(n * wire_share(op, axis_size(mesh, axis)) for (op, axis), n in messages)


def _expert_parallel_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank: the experts' rows there and back, and their gradients."""
    blocks = model.num_expert_blocks / run.pp * run.num_microbatches
    return blocks * wire_share("all_to_all", run.ep) * 4 * model.expert_rows * run.tokens * run.row_bytes(model.dim)


def _tensor_parallel_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank: four all-reduces of the activations a block and microbatch (Shoeybi et al. 2019, section 3)."""
    blocks = model.num_blocks / run.pp * run.num_microbatches
    return blocks * 4 * wire_share("all_reduce", run.tp) * run.tokens * model.dim * run.width_bytes


def _context_parallel_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank: keys and values round the ring twice, their gradients once; heads exchanged twice each way."""
    tokens = model.num_blocks / run.pp * run.num_microbatches * run.tokens / run.tp
    queries, keys = model.block.scores_dim, model.block.keys_dim
    passed = (run.cp // run.cp_exchange - 1) * 2 * keys * (2 * run.width_bytes + run.wide_bytes)
    exchanged = wire_share("all_to_all", run.cp_exchange) * 4 * (queries + keys) * run.width_bytes
    return tokens * (passed + exchanged)


def _pipeline_bytes(model: ModelShape, run: RunShape) -> float:
    """Sent by one rank: activations to the next stage, gradients to the one before, of each of its stages."""
    if run.pp == 1:
        return 0.0
    messages = 2 * run.num_stages / run.pp * run.num_microbatches
    return messages * run.tokens * run.row_bytes(model.dim) / run.tp
