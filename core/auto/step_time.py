"""Seconds of a decoder's training step on a cluster: the parts of `core.estimate.time`, with the links of each axis.

1. A block's forward takes its products at the cluster's utilisation, and what it keeps once through memory and back;
   no less than its kernels take to launch. Its backward takes twice that, and what checkpointing computes again.
2. A form's messages are those of its plan (`core.placement.messages`), half of them forward, over the link of their
   axis. They are on the critical path, but for a ring's, which attention hides: max(attention, ring).
3. ZeRO-3 gathers a block while another one computes: max(block, gather). What is outside the blocks nobody hides.
4. A pipeline's stages are sums of these, run on a clock by the schedule's own actions with messages between stages; of
   a schedule whose steps overlap, a step among many.
5. Gradients are reduced while the last microbatch's backward computes, all but the last bucket: max(backward,
   reduction). Then the update goes through memory, and ZeRO-1 and 2 send the parameters. What is compressed is sent
   behind the backward, where all of a step's gradient is there; what is sent in few bits at ZeRO 1 and 2, too. Workers
   that train locally send a share of a round's message.
6. With Gemini chunks live on the device, whole and with this rank's masters and state, as long as the budget has room;
   of all others a rank's part of the parameters comes from the host before the gather, twice a microbatch. Gradients
   are reduced in every microbatch and leave, and when the last are there the host updates its share (`core.gemini`).

What it does not know stands in `UNKNOWN`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from core.auto.costs import Link, messages_sent, seconds_of
from core.auto.machines import Cluster
from core.config import UserError
from core.estimate.local import outer_message
from core.estimate.memory import estimate_memory
from core.estimate.pipeline import Timeline, run_schedule, stage_costs, stages_of, step_on_a_clock, timeline_of
from core.estimate.shape import BlockShape, Compressed, ModelShape, Part, RunShape
from core.estimate.time import coded_bytes
from core.mesh import MeshShape, axis_size, mesh_shape
from core.parallel.compress import FewBits
from core.parallel.data import BUCKET_BYTES
from core.parallel.pipeline.schedule import SCHEDULES, Action, Kind, simulate
from core.precision import compute_dtype

BLOCK_LAUNCHES = 16
"""Kernels of a block's forward, each of which takes the host a while to begin (`Cluster.launch_s`)."""
BLOCK_PRODUCTS = 4
"""Of matrices in a block: into attention and out of it, up and down; by their size a measured curve is read."""

UNKNOWN = (
    "how much of the peak products of these sizes reach: one share is taken of all (--utilisation)",
    "links beyond their data sheets: congestion, placement of ranks in the network, NCCL's choice of algorithm",
    "what else the host does: data, logs, checkpoints, evaluations",
    "memory beyond the estimate: fragmentation, libraries' workspaces; 8 % of the device are left free for it",
    "experts' loads: they are taken as balanced",
    "how the loss falls: the global batch is taken as given",
    "Gemini's traffic beyond a closed form: `megalith llm plan --gemini.budget` traces the step itself",
)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, of the ranks that take longest.

    step_s      all of it
    compute_s   forwards and backwards of the busiest rank, without messages
    messages_s  what messages add to them, where nothing hides it
    bubble_s    in which that rank waits for others
    reduced_s   gradients and parameters over the data-parallel ranks, beyond the backward
    update_s    of the optimizer
    host_s      the host's part under Gemini, beyond what hides it
    shared_s    in which ranks that share a device wait for it
    """

    step_s: float
    compute_s: float
    messages_s: float
    bubble_s: float
    reduced_s: float
    update_s: float
    host_s: float = 0.0
    shared_s: float = 0.0


@dataclass(frozen=True)
class _Block:
    """Seconds of a microbatch in a block.

    forward, backward  computing
    weights            of the backward, the gradients of weights
    again              computed again, of a block that is
    sent, sent_again   messages of each way, and of what is computed again
    gathered           of its parameters, before the forward; gathered_again before the backward
    returned           of its gradients under Gemini, which go through the same stream as what is gathered
    """

    forward: float
    backward: float
    weights: float
    again: float
    sent: float
    sent_back: float
    sent_again: float
    gathered: float
    gathered_again: float
    returned: float

    def seconds(self, kind: Kind, recomputed: bool, cluster: Cluster, *, messages: bool = True) -> float:
        again = self.again if recomputed else 0.0
        if kind is Kind.WEIGHTS:
            return self.weights
        if kind is Kind.FORWARD:
            one, sent = self.forward, self.sent
        else:
            one = self.backward + again - (self.weights if kind is Kind.INPUT else 0.0)
            sent = self.sent_back + (self.sent_again if recomputed else 0.0)
        beside = self.gathered if kind is Kind.FORWARD else self.gathered_again + self.returned
        return cluster.beside(one + sent, beside) if messages else one


class StepClock:
    """The seconds of a run's step and of its parts.

    budget_bytes  of Gemini; None: without it
    """

    def __init__(self, model: ModelShape, run: RunShape, cluster: Cluster, budget_bytes: int | None = None):
        peak = cluster.gpu.peak_flops(compute_dtype(run.precision))
        if peak is None:
            raise UserError(f"gpu={cluster.gpu.name} has no known {run.precision} peak; give another --precision")
        self.model, self.run, self.cluster, self.budget_bytes = model, run, cluster, budget_bytes
        self.mesh: MeshShape = mesh_shape(run.mesh)
        self.stages = stages_of(model, run)
        self.costs = stage_costs(model, run)
        product = run.tokens / run.tp * max(self.costs.blocks, default=0.0) / 3 / BLOCK_PRODUCTS
        rate = cluster.gpu.flops_per_s(compute_dtype(run.precision), product)
        assert rate is not None
        self.flops = rate * cluster.utilisation

    # --- links --------------------------------------------------------------------------------------------------------

    def axis(self, *names: str) -> tuple[int, Link]:
        """Ranks of the axes that the mesh has, as one, and their link."""
        there = [name for name in names if name in self.mesh.mesh_dim_names]
        ranks = math.prod(axis_size(self.mesh, name) for name in there)
        innermost = max((self.mesh.mesh_dim_names.index(name) for name in there), default=len(self.mesh.shape) - 1)
        return ranks, self.cluster.link(math.prod(self.mesh.shape[innermost + 1 :]), ranks)

    def _form_axis(self, name: str) -> tuple[int, Link]:
        if name.startswith("cp_"):
            ranks, (_, link) = axis_size(self.mesh, name), self.axis("cp")
            return ranks, link
        return self.axis(*name.split("+"))

    @cached_property
    def _sent(self) -> tuple[float, float]:
        """Seconds of a microbatch's messages of all blocks, both ways: on the critical path, and round a ring."""
        model, run = self.model, self.run
        if model.sent is None or model.calls is None:
            return 0.0, 0.0
        one = _of_one_row(run)
        exposed = ring = 0.0
        for (operation, axis), num_bytes in model.sent(one).items():
            ranks, link = self._form_axis(axis)
            if operation == "recv" or ranks == 1:
                continue
            calls = model.calls(one)[operation, axis]
            full = run.microbatch_size * num_bytes / calls
            if operation == "all_to_all":
                full *= ranks  # messages are counted by what a rank has
            seconds = calls * seconds_of("broadcast" if operation == "reduce" else operation, full, ranks, link)
            if operation == "send":
                ring += seconds
            else:
                exposed += seconds
        return exposed, ring

    # --- a microbatch -------------------------------------------------------------------------------------------------

    def _block(self, kind: BlockShape, flops: float, keys: int, part: Part) -> _Block:
        """flops: of a token, both ways; keys: that a token's scores are taken of."""
        run, memory = self.run, self.cluster.bytes_per_s
        each = run.tokens / run.tp / self.flops
        attention = 4 * kind.scores_dim * keys / (flops / 3)  # its share
        kept, selective = (run.tokens * k.bytes_per_token(run) for k in (kind.everything, kind.selective))
        traffic = 2 * kept / memory
        forward = max(each * flops / 3 + traffic, BLOCK_LAUNCHES * self.cluster.launch_s)
        # Sums of gradients over microbatches are read and written in the format of the reductions.
        summed = part.num_whole * (2 * run.wide_bytes + run.width_bytes) / memory
        exposed, ring = (seconds / 2 / self.model.num_blocks for seconds in self._sent)
        sent, sent_back = (
            exposed + self.cluster.beside(hidden, ring) - hidden
            for hidden in (attention * forward, 2 * attention * forward)
        )
        full = run.recompute == "full"
        return _Block(
            forward=forward,
            backward=2 * forward + summed,
            weights=(1 - attention) * forward + summed,
            again=forward if full else attention * forward + 2 * max(0.0, kept - selective) / memory,
            sent=sent,
            sent_back=sent_back,
            sent_again=sent if full else 0.0,
            gathered=self._gathered(part),
            gathered_again=self._gathered(part, again=True),
            returned=0.0 if self.budget_bytes is None else self._returned(part),
        )

    def _gathered(self, part: Part, again: bool = False) -> float:
        """Seconds in which ZeRO-3 or Gemini brings a part together.

        again  not as the first of two updates, all of which a second copy spares other nodes
        """
        run = self.run
        if run.zero < 3:
            return 0.0
        (of_dense, *_), (of_experts, *_) = self._forms
        found = self._brought * part.num_whole
        for elements, (ranks, link) in ((part.num_whole - part.experts, of_dense), (part.experts, of_experts)):
            crossing = seconds_of("all_gather", self._coded(elements, run.comm.weights, run.width_bytes), ranks, link)
            if not run.comm.secondary:
                found += crossing
                continue
            node = self._node(ranks)
            within = seconds_of("all_gather", run.width_bytes * elements, node, self.cluster.link(self._stride, node))
            found += within if again else (crossing + (run.num_microbatches - 1) * within) / run.num_microbatches
        return found

    def _coded(self, elements: int, bits: FewBits | None, width: int) -> float:
        """Bytes of elements in a message of few bits, vectors as they are."""
        return coded_bytes(elements, bits, width, self.model.vectors)

    def _node(self, ranks: int) -> int:
        """Ranks of a node, of those over which ZeRO shards something."""
        return self.run.comm.node if ranks % self.run.comm.node == 0 else 1

    @property
    def _stride(self) -> int:
        """How far apart the ranks are over which ZeRO shards."""
        names = [name for name in ("dp_shard", "ep", "cp") if name in self.mesh.mesh_dim_names]
        return math.prod(self.mesh.shape[max(map(self.mesh.mesh_dim_names.index, names)) + 1 :]) if names else 1

    @cached_property
    def _blocks(self) -> list[_Block]:
        """Of each block, those that are alike as one."""
        parts = {part.block: part for part in self._parts}
        keys = self.model.keys_seen(self.run.sequence_length)
        made: dict[tuple[int, float, int, int], _Block] = {}
        blocks = []
        for index, flops in enumerate(self.costs.blocks):
            shape, part = self.model.block_of(index), parts[index]
            like = id(shape), flops, keys[index], part.num_whole
            if like not in made:
                made[like] = self._block(shape, flops, keys[index], part)
            blocks.append(made[like])
        return blocks

    @cached_property
    def _parts(self) -> tuple[Part, ...]:
        return self.model.parts(self.run)

    @cached_property
    def _alike(self) -> list[list[tuple[_Block, bool, int]]]:
        """Of each stage: a block, whether it is computed again, how many there are of it."""
        found = []
        for blocks in self.stages.ranges:
            counts: dict[tuple[int, bool], tuple[_Block, bool, int]] = {}
            for index in blocks:
                block, again = self._blocks[index], self.run.recomputes(index)
                _, _, number = counts.get((id(block), again), (block, again, 0))
                counts[id(block), again] = block, again, number + 1
            found.append(list(counts.values()))
        return found

    @cached_property
    def _outside(self) -> tuple[float, float, float]:
        """Seconds in which what is before the blocks is gathered, first and again, and what is behind them."""
        before, behind = (
            [part for part in self._parts if is_there(part.block)]
            for is_there in (lambda block: block < 0, lambda block: block >= self.model.num_blocks)
        )
        first, again = (sum(self._gathered(part, again) for part in before) for again in (False, True))
        return first, again, sum(map(self._gathered, behind))

    def action_s(self, kind: Kind, stage: int, *, messages: bool = True) -> float:
        """Seconds of one action of a microbatch on a stage."""
        run, last = self.run, len(self.stages.ranges) - 1
        alike = self._alike[stage]
        total = sum(n * block.seconds(kind, again, self.cluster, messages=messages) for block, again, n in alike)
        each = run.tokens / run.tp / self.flops
        first, again, behind = self._outside if messages else (0.0, 0.0, 0.0)
        before = first if kind is Kind.FORWARD else again
        if stage == 0:
            total += each * self.costs.before / 3 * {Kind.BACKWARD: 2, Kind.WEIGHTS: 2}.get(kind, 1) + before
        if stage == last and kind is Kind.FORWARD:
            total += each * self.costs.behind + behind
        return total

    @cached_property
    def _kinds(self) -> tuple[Kind, ...]:
        if self.run.pp > 1 and SCHEDULES[self.run.pipeline.schedule].splits_backward:
            return Kind.FORWARD, Kind.INPUT, Kind.WEIGHTS
        return Kind.FORWARD, Kind.BACKWARD

    @cached_property
    def _actions(self) -> dict[tuple[Kind, int], float]:
        return {(k, s): self.action_s(k, s) for s in range(len(self.stages.ranges)) for k in self._kinds}

    @cached_property
    def message_s(self) -> float:
        """Seconds of what one stage hands on to another."""
        _, link = self.axis("pp")
        num_bytes = self.run.tokens * self.run.row_bytes(self.model.dim) / self.run.tp
        return seconds_of("send", num_bytes, 2, link)

    # --- behind the microbatches --------------------------------------------------------------------------------------

    @cached_property
    def _forms(self) -> tuple[tuple[tuple[int, Link], ...], ...]:
        """Of what is dense, and of experts: ranks and link of a shard, of its copies, of both together."""
        workers = () if self.run.local_every else ("dp_replicate",)  # those that train locally share no gradient
        copies = self.axis(*workers)
        dense = self.axis("dp_shard", "ep", "cp"), copies, self.axis(*workers, "dp_shard", "ep", "cp")
        return dense, (self.axis("dp_shard", "cp"), copies, self.axis(*workers, "dp_shard", "cp"))

    def _reduced(self, rank: int) -> float:
        """Seconds of gradients' reductions of a rank of the pipeline, and of ZeRO's parameters, beyond its backward."""
        run = self.run
        if self.budget_bytes is not None:  # beside the backwards, but for what comes last
            outside = sum(self._returned(part) for part in self._parts if part.block < 0)
            return run.num_microbatches * max(outside, self._blocks[0].returned)
        compressed = self.model.compressed(run)
        experts = sum(part.experts for part in self._own[rank])
        dense = sum(part.num_whole for part in self._own[rank]) - experts
        # Where some are compressed, experts are not dealt out.
        wholes = (dense + experts - compressed.whole, 0) if compressed.whole else (dense, experts)
        share = 1 / run.comm.local_steps if run.comm.has_local_steps else 1.0  # a mean step's, of sums farthest apart
        reducing, publishing = 0.0, self._seldom + share * self._compressed(compressed)
        for elements, whole, (shards, copies, all_ranks) in zip((dense, experts), wholes, self._forms, strict=True):
            gradients = run.wide_bytes * whole
            if run.zero == 0:
                reducing += seconds_of("all_reduce", gradients, *all_ranks)
                continue
            if run.comm.gradients is None:
                reducing += seconds_of("reduce_scatter", gradients, *shards)
            elif run.zero == 3:
                reducing += self._coded_sum(whole, *shards)
            else:
                publishing += self._coded_sum(whole, *shards)
            reducing += seconds_of("all_reduce", gradients / shards[0], *copies)
            if run.zero < 3:
                sent = self._coded(elements, run.comm.weights, run.width_bytes)
                publishing += share * seconds_of("all_gather", sent, *shards)
        backward = sum(self._backward(stage) for stage in self.stages.own(rank))
        last_bucket = min(1.0, BUCKET_BYTES / max(1, run.wide_bytes * (dense + experts)))
        # The gathers of the same backward have the link first.
        own = (index for stage in self.stages.own(rank) for index in self.stages.ranges[stage])
        gathered = sum(self._blocks[index].gathered_again for index in own)
        hides = max(0.0, backward - gathered)
        beyond = max(self.cluster.beside(hides, reducing) - hides, last_bucket * reducing)
        times = run.num_microbatches if run.reduce_each else 1
        return times * beyond + publishing

    @property
    def _seldom(self) -> float:
        """Seconds of a step's share of a round's message between workers that train locally."""
        if not self.run.local_every:
            return 0.0
        workers, link = self.axis("dp_replicate")
        message = outer_message(self.model, self.run)
        round_s = messages_sent("all_reduce", workers) * link.latency_s + message.a_round / link.bytes_per_s
        return round_s / message.every

    def _compressed(self, compressed: Compressed) -> float:
        """Seconds of the gradients that are compressed, in about two messages there and back (PowerSGD, signs)."""
        if not compressed.whole:
            return 0.0
        ranks, link = self._forms[0][-1]
        return 2 * messages_sent("all_gather", ranks) * link.latency_s + compressed.wire_bytes / link.bytes_per_s

    def _coded_sum(self, elements: int, ranks: int, link: Link) -> float:
        """Seconds of gradients in few bits, all to all within a node and then between nodes."""
        node = self._node(ranks)
        sent = self._coded(elements, self.run.comm.gradients, self.run.wide_bytes)
        inside, nodes = self.cluster.link(self._stride, node), ranks // node
        # Of an all-to-all the full bytes are those that all ranks hold together.
        within = seconds_of("all_to_all", node * sent, node, inside)
        return within + seconds_of("all_to_all", nodes * sent / node, nodes, link)

    def _backward(self, stage: int) -> float:
        return sum(self._actions[kind, stage] for kind in self._kinds[1:])

    @cached_property
    def _own(self) -> list[list[Part]]:
        own: list[list[Part]] = [[] for _ in range(self.run.pp)]
        for part in self._parts:
            for rank in self.stages.ranks_with(part.block):
                own[rank].append(part)
        return own

    def _update(self, rank: int) -> float:
        """Seconds of a rank's update on its device."""
        run, own = self.run, self._own[rank]
        elements = (1 - self._away) * sum(part.num_updated for part in own)
        state = (1 - self._away) * sum(part.state for part in own)
        moved = elements * (3 * run.wide_bytes + run.width_bytes) + 2 * state
        return moved / self.cluster.bytes_per_s

    # --- Gemini -------------------------------------------------------------------------------------------------------

    @property
    def host_bytes(self) -> float:
        """Bytes of a rank that lie on the host: of chunks that live there parameters, gradients, masters and state."""
        run, elements = self.run, sum(part.num_updated for part in self._parts)
        narrow = run.width_bytes * elements if run.width_bytes < run.wide_bytes else 0
        return self._away * (self._shard_bytes + narrow)

    def drive_s(self, read_bytes_per_s: float, written_bytes_per_s: float) -> float:
        """Seconds of a drive that has what the cluster's host does not hold: gradients of it stay on the host.

        It is read for each forward and backward, and masters and state by the update, which writes them.
        """
        run, elements = self.run, sum(part.num_updated for part in self._parts)
        share = self._away * max(0.0, 1 - self.cluster.host_bytes / max(self.host_bytes, 1.0))
        state = self._shard_bytes - run.wide_bytes * elements
        narrow = run.width_bytes * elements if run.width_bytes < run.wide_bytes else 0
        read = state + 2 * run.num_microbatches * run.width_bytes * elements
        return share * (read / read_bytes_per_s + (state + narrow) / written_bytes_per_s)

    @cached_property
    def _shard_bytes(self) -> float:
        """Masters, gradients and state of all that a rank's optimizer updates."""
        elements = sum(part.num_updated for part in self._parts)
        return 2 * self.run.wide_bytes * elements + sum(part.state for part in self._parts)

    @cached_property
    def _away(self) -> float:
        """The share of the model that lives on the host.

        A chunk that lives on the device takes its whole buffer there, since a gathered one never leaves, and its shard;
        of one rank in the format of its masters the buffer is the masters.
        Raises UserError for a budget that leaves nothing for the model.
        """
        if self.budget_bytes is None:
            return 0.0
        run = self.run
        found = estimate_memory(self.model, run)
        room = self.budget_bytes - found.activations_bytes - (found.buffers_bytes - found.units_bytes) - self._passing
        if room < 0:
            raise UserError(f"a budget of {self.budget_bytes} bytes leaves nothing for the model's data")
        buffers = run.width_bytes * sum(part.num_whole for part in self._parts)
        if run.num_gradient_ranks == 1 and run.width_bytes == run.wide_bytes:
            buffers = 0
        return max(0.0, 1 - room / (buffers + self._shard_bytes))

    @property
    def _passing(self) -> int:
        """Bytes of chunks on their way, none of which need be more than a parameter: one that is used, one that comes.

        Between ranks also their messages: its gathered parameters, and its gradients (`core.gemini.transport`).
        """
        run, largest = self.run, max(max(part.whole) for part in self._parts)
        messages = run.width_bytes + run.wide_bytes if run.num_gradient_ranks > 1 else 0
        return largest * (2 * run.width_bytes + messages)

    @cached_property
    def _brought(self) -> float:
        """Seconds an element of what is gathered in which a rank's own part of it comes from the host first."""
        whole, own = (sum(getattr(part, name) for part in self._parts) for name in ("num_whole", "num_updated"))
        return self._away * self.run.width_bytes * own / whole / self.cluster.to_host.bytes_per_s

    def _returned(self, part: Part) -> float:
        """Seconds in which a part's gradients of a microbatch are reduced, in wide, and this rank's go to the host."""
        found, wide = 0.0, self.run.wide_bytes
        for elements, (shards, copies, _) in zip(
            (part.num_whole - part.experts, part.experts), self._forms, strict=True
        ):
            found += seconds_of("reduce_scatter", wide * elements, *shards)
            found += seconds_of("all_reduce", wide * elements / shards[0], *copies)
        # Of one rank they leave in the format in which they were computed.
        width = wide if self.run.num_gradient_ranks > 1 else self.run.width_bytes
        return found + self._away * width * part.num_updated / self.cluster.to_host.bytes_per_s

    def _host(self) -> float:
        """Seconds of the host's update, for which the next step waits."""
        return self._away * self._shard_bytes / self.cluster.host_update

    # --- the step -----------------------------------------------------------------------------------------------------

    def _busy(self, rank: int) -> float:
        of_one = sum(self._actions[kind, stage] for stage in self.stages.own(rank) for kind in self._kinds)
        return self.run.num_microbatches * of_one

    @cached_property
    def _behind(self) -> tuple[float, float, float]:
        """(reductions, update, host) of the ranks that take longest."""
        ranks = range(self.run.pp)
        reduced, update = max(map(self._reduced, ranks)), max(map(self._update, ranks))
        return reduced, update, self._host()

    def least_s(self) -> float:
        """No more than the step takes: each rank waits for its first stage's input, and others for what it sends.

        Where steps overlap nobody need wait.
        """
        if self.run.pp > 1 and SCHEDULES[self.run.pipeline.schedule].runs_ahead:
            return max(map(self._busy, range(self.run.pp))) + sum(self._behind)
        found = 0.0
        for rank in range(self.run.pp):
            first = min(self.stages.own(rank))
            ahead = [*range(first)]
            there = sum(self._actions[Kind.FORWARD, stage] for stage in ahead) + len(ahead) * self.message_s
            back = 0.0
            if Kind.BACKWARD in self._kinds:
                back = sum(self._actions[Kind.BACKWARD, stage] for stage in ahead) + len(ahead) * self.message_s
            found = max(found, there + self._busy(rank) + back)
        return found + sum(self._behind)

    def time(self) -> StepTime:
        """The step, its pipeline on a clock."""
        run = self.run
        busy = max(map(self._busy, range(run.pp)))
        inside = busy if run.pp == 1 else step_on_a_clock(run, self._cost, self.message_s)
        each = [
            run.num_microbatches
            * sum(self.action_s(kind, stage, messages=False) for stage in self.stages.own(rank) for kind in self._kinds)
            for rank in range(run.pp)
        ]
        compute = max(each)
        reduced, update, host = self._behind
        shared = self._shared(sum(each) / run.pp, max(0.0, busy - compute), inside)
        shared += (self.cluster.crowd - 1) * (update + host)
        total = inside + reduced + update + host + shared
        messages, bubble = max(0.0, busy - compute), max(0.0, inside - busy)
        return StepTime(total, compute, messages, bubble, reduced, update, host, shared)

    def _shared(self, compute_s: float, messages_s: float, inside_s: float) -> float:
        """Seconds beyond a step on devices of their own in which ranks that share some wait for one another.

        No device does more than one rank's work at a time (Brent 1974): all that is computed, by as many devices, is
        the least; a rank that waits for a stage leaves the device to others. Messages were measured in the crowd.
        """
        if self.cluster.crowd == 1:
            return 0.0
        return max(0.0, self.cluster.crowd * compute_s + messages_s - inside_s)

    def _cost(self, action: Action) -> float:
        return self._actions[action.kind, action.stage]

    def timeline(self) -> Timeline:
        """The forwards and backwards of the step, as they are drawn."""
        of = run_schedule(self.run)
        return timeline_of(self.run, of, simulate(of, self._cost, self.message_s))


def _of_one_row(run: RunShape) -> RunShape:
    """What its messages depend on, so that runs which send alike ask once."""
    return replace(
        run,
        microbatch_size=1,
        num_microbatches=1,
        recompute="none",
        recompute_every=1,
        zero=0,
        dp_replicate=run.ep,
        dp_shard=1,
        pp=1,
        reduce_each=False,
        pipeline=type(run.pipeline)(),
    )


def step_time(model: ModelShape, run: RunShape, cluster: Cluster, budget_bytes: int | None = None) -> StepTime:
    """Seconds of one step.  budget_bytes: of Gemini, with zero=3 and without a pipeline."""
    return StepClock(model, run, cluster, budget_bytes).time()
