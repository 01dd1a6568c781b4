"""The messages of a training step on a rank of any mesh, by closed forms: bytes by operation and axis.

1. computing   each microbatch's, by the styles of the plan (`core.placement.messages`), of this rank's blocks; those of
               blocks that are computed again once more, but for what the last product of such a block sends, which no
               gradient needs
2. gathered    at ZeRO-3 each unit's parameters before its forward and before its backward, those outside of the blocks
               once for both, of a stage as often as FSDP2 lets go of them; 2 to 4 in few bits where that is asked for
               (`core.parallel.coded_shards`)
3. reduced     a message of some parameters' gradients (`core.parallel.data`), all-reduced, or scattered and summed over
               copies; where they are compressed, the messages of that (`core.parallel.compress`); sums over axes where
               they are partial; then a mark of each, and the norm
4. published   at ZeRO-1 and 2 the parameters, behind the update
5. handed on   by one stage to another, and a tied head's gradient and values

Bytes are those of full messages, as `core.comm.volume` counts them on ranks; `core.auto.check` holds both together.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from core.estimate.pipeline import run_schedule, stages_of
from core.estimate.shape import RunShape, decoder_shape, momentum_bytes
from core.layout import largest_share
from core.mesh import AnyMesh, MeshShape, axis_size, data_axes, gradient_axes, mesh_shape, shard_axes
from core.models.decoder import DecoderConfig, decoder_without_memory
from core.models.plan import decoder_plan
from core.parallel.coded_shards import gather_messages, sum_messages
from core.parallel.compress import compressed_bytes, compressed_names
from core.parallel.data import in_buckets
from core.parallel.pipeline.messages import message_of
from core.parallel.pipeline.schedule import Kind
from core.placement.messages import ModuleMessage, Sent, module_messages, partial_sum_bytes
from core.placement.stages import StageSplit
from core.placement.table import Table, is_expert, parameter_names, placement

NORM_BYTES = 8
"""Of the squared norm that all ranks add up, and of the loss that stages tell each other: a number in fp64."""


def step_bytes(config: DecoderConfig, run: RunShape, place: int = 0) -> Sent:
    """Bytes that the first rank of a pipeline's place sends in a step, or of all receives over `recv`.

    Axes are called by those of several ranks that they join, such as "dp_shard+cp": see `joined_name`.
    """
    rank = _Rank(config, run, place)
    sent: dict[tuple[str, str], float] = defaultdict(float)
    for part in (rank.computing, rank.gathered, rank.reduced, rank.published, rank.handed_on):
        for operation, axis, num_bytes in part():
            sent[operation, joined_name(rank.mesh, axis)] += num_bytes
    return Counter({key: round(n) for key, n in sent.items() if n and key[1]})


def joined_name(mesh: AnyMesh, axis: str) -> str:
    """An axis by those of several ranks that it joins: of the world all of them; "" where it has one rank."""
    names = mesh.mesh_dim_names or ()
    parts = {"world": names, "dp": data_axes(mesh)}.get(axis, tuple(axis.split("+")))
    if not set(parts) <= set(names):  # a part of cp
        return axis
    return "+".join(name for name in names if name in parts and axis_size(mesh, name) > 1)


_Message = tuple[str, str, float]
"""(operation, axis, bytes)."""


@dataclass(frozen=True)
class _Rank:
    config: DecoderConfig
    run: RunShape
    place: int

    @cached_property
    def mesh(self) -> MeshShape:
        shape = mesh_shape(self.run.mesh)
        behind = shape.shape[shape.mesh_dim_names.index("pp") + 1 :]
        return shape.at(self.place * math.prod(behind))

    @cached_property
    def split(self) -> StageSplit:
        plan = decoder_plan(self.config, self.run.mesh).pipeline
        assert plan is not None
        return replace(stages_of(decoder_shape(self.config), self.run), plan=plan)

    @cached_property
    def table(self) -> Table:
        """The rows of what this rank holds, by first names."""
        model, plan = decoder_without_memory(self.config), decoder_plan(self.config, self.run.mesh)
        stages = self.split if self.run.pp > 1 else None
        table = placement(model, plan, self.mesh, self.run.zero, stages=stages)
        firsts = (names[0] for names in parameter_names(model))
        return {name: table[name] for name in firsts if self.place in table[name].owners}

    def _ranks(self, axes: tuple[str, ...] | str) -> int:
        return math.prod(axis_size(self.mesh, axis) for axis in ((axes,) if isinstance(axes, str) else axes))

    # --- a microbatch -------------------------------------------------------------------------------------------------

    @cached_property
    def length(self) -> int:
        """Tokens of a sequence on this rank."""
        return self.run.tokens // self.run.microbatch_size

    def computing(self) -> Iterator[_Message]:
        run, model = self.run, decoder_without_memory(self.config)
        widths = run.widths(self.config.dim)
        plan = decoder_plan(self.config, run.mesh)
        for one in module_messages(model, plan, self.mesh, run.microbatch_size, self.length, widths):
            times = run.num_microbatches * self._times(one)
            yield (*one.key, times * one.num_bytes)
            if one.key[0] == "send":  # round a ring
                yield "recv", one.key[1], times * one.num_bytes

    def _times(self, one: ModuleMessage) -> int:
        """How often in a microbatch: not at all on another stage, twice where it is computed again."""
        if self.split.owners[self.split.stage_of(f"{one.module}.")] != self.place and one.module:
            return 0
        if not one.is_forward or not one.module.startswith("blocks."):
            return 1
        index = int(one.module.split(".")[1])
        return 1 + (self._recomputes(index) and not one.module.endswith(".mlp.down"))

    def _recomputes(self, block: int) -> bool:
        stage = self.split.ranges[self.split.stage_of_block(block)]
        return self.run.recompute != "none" and self.run.recomputes(block) and block in stage

    # --- gathers ------------------------------------------------------------------------------------------------------

    @cached_property
    def _units(self) -> dict[tuple[int, bool], list[str]]:
        """The parameters that FSDP2 gathers together: of a block or of all outside, experts apart."""
        units: dict[tuple[int, bool], list[str]] = {}
        for name, row in self.table.items():
            if not row.whole:
                block = int(name.split(".")[1]) if name.startswith("blocks.") else -1
                units.setdefault((block, is_expert(row)), []).append(name)
        return units

    def _shares(self, names: list[str]) -> tuple[tuple[str, ...], int, int]:
        """(axes over which some parameters are sharded, their ranks, elements of a rank's padded rows)."""
        axes = shard_axes(self.mesh, self.table[names[0]].layout.axes())
        ranks = self._ranks(axes)
        return axes, ranks, sum(self.table[name].row_elements(ranks) for name in names)

    def gathered(self) -> Iterator[_Message]:
        run = self.run
        if run.zero < 3:
            return
        for (block, _), names in self._units.items():
            axes, ranks, _ = self._shares(names)
            rows = [self.table[name] for name in names]
            for operation, axis, num_bytes in gather_messages(
                run.comm, rows, ranks, run.width_bytes, self._gathers[block]
            ):
                yield operation, axis or "+".join(axes), num_bytes

    @cached_property
    def _gathers(self) -> Counter[int]:
        """How often each block is gathered in a step, and, as -1, what is outside of them.

        What is outside stays behind a forward and goes, as all does, behind each backward. A backward of a block also
        gathers what stood before it in the order of the forwards since the last backward, needed or not.
        """
        blocks, found = {block for block, _ in self._units}, Counter[int]()
        if self.run.pp == 1:
            return Counter({block: self.run.num_microbatches * (2 if block >= 0 else 1) for block in blocks})
        there, order = set[int](), list[int]()
        outside = [-1] if -1 in blocks else []

        def gather(block: int) -> None:
            found[block] += block not in there
            there.add(block)

        for action in run_schedule(self.run).ranks[self.place]:
            own = [*self.split.ranges[action.stage]]
            if action.kind is Kind.FORWARD:
                for block in (*outside, *own):
                    gather(block)
                there.difference_update(own)
                order += [*own, *outside]
                continue
            is_last = action.stage == len(self.split.ranges) - 1  # whose head is behind its blocks
            back = [*outside, *own[::-1]] if is_last else [*own[-1:], *outside, *own[-2::-1]]
            waiting = set() if is_last or not outside else set(own[-1:])
            for block in back:
                gather(block)
                if block in order and (place := len(order) - 1 - order[::-1].index(block)):
                    gather(order[place - 1])
                if block == -1:
                    there -= waiting
                elif block not in waiting:
                    there.discard(block)
            there.clear()
            order.clear()
        return found

    # --- gradients and parameters -------------------------------------------------------------------------------------

    @cached_property
    def _buckets(self) -> list[list[str]]:
        if self.run.zero == 3:
            return list(self._units.values())
        sizes = {name: self.run.wide_bytes * math.prod(row.layout.local_shape()) for name, row in self.table.items()}
        return in_buckets(sizes, self.table, self._compressed)

    @cached_property
    def _compressed(self) -> frozenset[str]:
        return frozenset(compressed_names(self.table, self.run.comm))

    def reduced(self) -> Iterator[_Message]:
        run, wide = self.run, self.run.wide_bytes
        times = run.num_microbatches if run.reduce_each and run.zero >= 2 else 1
        whole = ([name for name in names if name not in self._compressed] for names in self._buckets)
        for names in filter(None, whole):
            axes = gradient_axes(self.mesh, self.table[names[0]].layout.axes())
            if run.zero == 0:
                elements = sum(math.prod(self.table[name].layout.local_shape()) for name in names)
                yield "all_reduce", "+".join(axes), wide * elements
                continue
            shards, ranks, total = self._shares(names)
            rows = [self.table[name] for name in names]
            for operation, axis, num_bytes in sum_messages(run.comm, rows, ranks, wide):
                yield operation, axis or "+".join(shards), times * num_bytes
            yield "all_reduce", "dp_replicate", times * wide * total
        beside = "+".join(name for name in self.mesh.mesh_dim_names if name != "pp")
        yield "all_reduce", beside, 2 * len(self.table)
        yield from ((*key, n) for key, n in compressed_bytes(self.table, run.comm, self.mesh, wide).items())
        yield from self._momenta()
        # Partial sums of what is compressed are of all that a rank computes with, not only of what it updates.
        wider = {name: replace(self.table[name], master=self.table[name].layout) for name in self._compressed}
        yield from ((*key, n) for key, n in partial_sum_bytes(self.table | wider, wide).items())
        yield "all_reduce", "world", NORM_BYTES

    def _momenta(self) -> Iterator[_Message]:
        """Of a step in signs behind one whose gradients were whole (`core.parallel.one_bit.InSigns`)."""
        if self.run.comm.compress == "zero_one" and not self.run.comm.has_local_steps:
            for name in self._compressed:
                row = self.table[name]
                if not row.whole:
                    axis, _ = row.master.cuts[-1]
                    yield "all_reduce", axis, momentum_bytes(math.prod(row.layout.local_shape()), self.run.wide_bytes)

    def published(self) -> Iterator[_Message]:
        if self.run.zero in (1, 2):
            for names in self._buckets:
                axes, ranks, _ = self._shares(names)
                rows = [self.table[name] for name in names]
                for operation, _, num_bytes in gather_messages(self.run.comm, rows, ranks, self.run.width_bytes, 1):
                    yield operation, "+".join(axes), num_bytes

    # --- stages -------------------------------------------------------------------------------------------------------

    def handed_on(self) -> Iterator[_Message]:
        run = self.run
        if run.pp == 1:
            return
        yield "all_reduce", "pp", NORM_BYTES
        # Experts' routers add to the loss: what they have added up to there travels beside, a number in fp64.
        of, each = run_schedule(run), self._activation_bytes + (NORM_BYTES if self.config.moe.num_experts else 0)
        for action in (action for actions in of.ranks for action in actions):
            if (message := message_of(action, of)) is not None and self.place in (message.sender, message.receiver):
                yield ("send" if message.sender == self.place else "recv"), "pp", each
        shared = {name: row for name, row in self.table.items() if len(row.owners) > 1}
        yield "all_reduce", "pp", self._num_shared
        for row in shared.values():
            num_bytes = run.wide_bytes * math.prod(row.master.local_shape())
            is_owner = row.owners[0] == self.place
            copies = len(row.owners) - 1 if is_owner else 1
            for operation in ("recv", "send"):  # its gradient, and its values
                yield operation, "pp", copies * num_bytes

    @property
    def _activation_bytes(self) -> int:
        run = self.run
        if run.tp_mode == "1d":
            tokens = run.microbatch_size * largest_share(self.length, run.tp)
            return tokens * run.row_bytes(self.config.dim)
        return run.tokens * self.config.dim * run.width_bytes // run.tp

    @property
    def _num_shared(self) -> int:
        """Parameters that several stages hold, of which all ranks tell whether they used them."""
        names = parameter_names(decoder_without_memory(self.config))
        return sum(len(self.split.holders(of)) > 1 for of in names)
