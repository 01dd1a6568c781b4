"""Gemini as the training loop sees it: one more way to spread a model over the data axes.

    parallel.run(microbatches, loss)   chunks come and go, and gradients are reduced as they are complete; microbatches
                                       run one after the other, or by blocks (`core.gemini.order`)
    parallel.reduce()                  every master has its gradient, on the side where it lives
    parallel.update(optimizer)         chunk by chunk, each side what lives there; new values go ahead as planned
    parallel.publish()                 the next fetch brings the new values

Before the first step `prepare` packs the parameters into chunks and decides where each lives. The masters are this
rank's rows as under ZeRO, so checkpoints, clipping and every optimizer of ours or torch's work as without Gemini.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from core.compat import follows_steps, own_part
from core.config import UserError, in_words
from core.gemini.chunk import Chunk, Member, sharers
from core.gemini.config import GeminiConfig
from core.gemini.direct import drive_speeds, mapped_temporary, with_drives
from core.gemini.disk import Disk
from core.gemini.drives import Folders, deal
from core.gemini.durable import DurableSteps
from core.gemini.executor import Executor
from core.gemini.gauge import Gauge
from core.gemini.hooks import ModuleHooks, Unit, units_of
from core.gemini.order import Orders
from core.gemini.planning import corrected_plan, fullest, infos, partial_names, plan, probe_bytes
from core.gemini.report import announce, draw
from core.gemini.residency import host_bytes_of, to_disk, to_wait
from core.gemini.schedule import Schedule
from core.gemini.search import Chunking, ParameterInfo, chunk_infos, packed, piece_of_budget
from core.gemini.state_bytes import state_bytes
from core.gemini.state_device import bring_state
from core.gemini.streams import Streams
from core.gemini.tier import DeviceTier, HostTier, parse_bytes
from core.gemini.trace import ChunkInfo
from core.gemini.transport import Transport
from core.gemini.vertical import Planner, VerticalOrder, both_orders, is_in_question
from core.layout import layout_of, local, tag
from core.mesh import Zero, device_of, shard_axis, stage_axis
from core.optim.hessian_free import HessianFree
from core.optim.kfac import KFAC
from core.optim.sharded import ShardedOptimizer, step_over, steps_apart
from core.parallel.data import DataParallel, begin, cast_parameter, on_mesh, with_local
from core.parallel.parallel_model import FollowsMasters, Sample
from core.parallel.pipeline.foreseen import Unforeseen
from core.parallel.rows import own_rows
from core.placement.stages import PipelinePlan
from core.placement.table import Table, parameter_names, placement, set_parameter
from core.precision import Precision, compute_dtype, master_dtype
from core.runtime import device_bytes, give_back_freed_memory
from core.trace.machine import bandwidth_of, speed_of
from core.trace.tracer import StepTrace, trace_step

DRAWN_STEPS = 2
"""Steps that are drawn beside the plan, the later over the earlier: by the second the optimizer has its state."""


SHARE_OF_FREE = 0.8
"""Of the host's free memory, what model data may take beside a disk where no budget is given."""


class GeminiReplicas(DataParallel):
    """config: the budget of one rank's device, for model data and all that a step has beside it.

    blocks    of the model, where it is known that they follow one another
    vertical  runs steps by blocks, where that was chosen
    """

    blocks: PipelinePlan | None = None
    vertical: VerticalOrder | None = None

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        zero: Zero,
        precision: Precision,
        materialise: Callable[[nn.Module], None],
        config: GeminiConfig,
        table: Table | None = None,
    ):
        assert config.budget is not None
        self.table = placement(model, None, mesh, zero, gemini=True) if table is None else table
        self.completion = begin(model, mesh, precision, self.table)
        self.model, self.mesh, self.zero, self.config = model, mesh, zero, config
        self.compute_dtype, self.reduce_dtype = compute_dtype(precision), master_dtype(precision)
        self.tier = DeviceTier(parse_bytes(config.budget))
        self.host = HostTier(config.host_bytes)
        self.disk: Disk | None = None
        self.planned: Chunking | None = None
        self.orders: Orders | None = None
        self._is_measured = False  # in this step
        self._warming: Gauge | None = None
        self._undrawn = DRAWN_STEPS if config.figure is not None else 0
        self.chunks: list[Chunk] = []
        self._renewed: set[Chunk] = set()  # in this step's update
        self._final: list[Chunk] = []  # in this step's last backward, and their update has not begun
        self.executor: Executor | None = None
        self.stepping: Callable[[], AbstractContextManager[None]] = nullcontext  # surrounds steps of single chunks
        self.average: FollowsMasters | None = None  # that lies with the masters on a disk
        self.folders = None if config.disk is None else self._open_folders(config.folders)
        try:
            self._spread(materialise)
        except BaseException:
            self.close()
            raise

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def frozen(self) -> dict[str, Tensor]:
        return {name: rows for name, rows in self._rows.items() if not rows.requires_grad}

    @property
    def device_peak_bytes(self) -> int | None:
        return self.tier.peak_bytes if self.device.type == "cpu" else None

    def figures(self) -> Mapping[str, Any]:
        """gemini_moved_bytes: between host and device, of the rank that moved most; gemini_host_peak_bytes: on the
        host, of the rank that had most there."""
        most = torch.tensor([self.tier.moved_bytes, self.host.peak_bytes], device=self.device)
        if self.mesh.size() > 1:
            dist.all_reduce(most, op=dist.ReduceOp.MAX)
        moved, on_host = most.tolist()
        found = {"gemini_moved_bytes": moved, "gemini_budget_bytes": self.tier.budget_bytes}
        return found | {"gemini_host_peak_bytes": on_host}

    # --- parameters ---------------------------------------------------------------------------------------------------

    def _spread(self, materialise: Callable[[nn.Module], None]) -> None:
        """Each rank's rows, on the host, stand in for the parameters until they have values."""
        self._device = device_of(self.mesh)
        if self._device.type == "cpu":  # a buffer that has left the account has left the process
            give_back_freed_memory(self.tier.budget_bytes)
        given = {names[0]: (self.model.get_parameter(names[0]), names) for names in parameter_names(self.model)}
        rows = {name: self._rows_of(name, parameter) for name, (parameter, _) in given.items()}
        for name, (_, names) in given.items():
            for shared in names:
                set_parameter(self.model, shared, rows[name])
        self._allocate_buffers()
        materialise(self.model)
        # Until `prepare` has seen a step, the model has the parameters that it was given, in the format of computing.
        computing = {name: self._cast(parameter) for name, (parameter, _) in given.items()}
        for name, (_, names) in given.items():
            for shared in names:
                set_parameter(self.model, shared, computing[name])
        self._rows = {name: tag(r.detach().requires_grad_(r.requires_grad), layout_of(r)) for name, r in rows.items()}
        self.masters = on_mesh({name: r for name, r in self._rows.items() if r.requires_grad}, self.mesh)

    def _cast(self, given: nn.Parameter) -> nn.Parameter:
        """The same parameter in the format of computing; another one only where it has no values yet."""
        if given.is_meta:
            return cast_parameter(given, self.compute_dtype)
        own = own_part(given) if isinstance(given, DTensor) else given
        if given.is_floating_point():
            own.data = own.data.to(self.compute_dtype).contiguous()
        return given

    def _rows_of(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """This rank's rows of a parameter in the format that they are kept in; without values where it has none."""
        row, whole = self.table[name], local(parameter.detach())
        if not row.whole:
            whole = own_rows(whole, self.shard_axis(name))
        dtype = whole.dtype
        if whole.is_floating_point():
            dtype = self.reduce_dtype if parameter.requires_grad else self.compute_dtype
        if self.folders is None:
            kept = torch.empty(whole.shape, dtype=dtype)
        else:  # all of them may be more than the host holds
            kept = mapped_temporary(self.folders.paths[0], whole.shape, dtype)
        if not whole.is_meta:
            kept.copy_(whole)
        return tag(nn.Parameter(kept, requires_grad=parameter.requires_grad), row.master)

    def _allocate_buffers(self) -> None:
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                if buffer.device != self.device:
                    fill = torch.empty_like(buffer, device=self.device)
                    setattr(module, name, fill if buffer.is_meta else fill.copy_(buffer))

    def _adopt(self) -> list[Member]:
        """The parameters that the model computes with: those it was given."""
        members = []
        for names in parameter_names(self.model):
            given = self.model.get_parameter(names[0])
            if given.is_meta:
                given = with_local(given, self._nothing(local(given.detach())))
                for name in names:
                    set_parameter(self.model, name, given)
            layout = self.table[names[0]].layout
            shared_by = sharers(self.mesh, layout.axes(), self.zero != 0)
            members.append(Member(names[0], given, self._rows[names[0]], shared_by, layout.largest_shape()))
        return members

    def _nothing(self, like: Tensor) -> Tensor:
        return torch.empty((), dtype=like.dtype, device=self.device).expand(like.shape)

    # --- before the first step ----------------------------------------------------------------------------------------

    def prepare(self, optimizer: torch.optim.Optimizer, sample: Sample | None) -> None:
        """Pack, and decide where each chunk lives.  Raises UserError where no step fits into the budget."""
        if self.executor is not None:
            return
        try:
            self._prepare(optimizer, sample)
        except BaseException:
            self.close()
            raise

    def _prepare(self, optimizer: torch.optim.Optimizer, sample: Sample | None) -> None:
        self._optimizer = optimizer
        if self.folders is not None:
            self._open_disk(self.folders, optimizer)
        speeds = [] if self.folders is None else drive_speeds(self.folders.paths)
        units = units_of(self.model)
        losses = [] if sample is None else sample()
        traced = self._traced(losses[0], units) if losses else None
        of = {member.name: member for member in self._adopt()}
        self.streams = Streams(self.device)
        beside = optimizer.beside_bytes if isinstance(optimizer, ShardedOptimizer) else 0
        transport = Transport(self.mesh, self.zero != 0, self.tier, self.streams, beside)
        state = state_bytes(optimizer, self.masters)
        members = [of[name] for name in (of if traced is None else traced.order)]
        partial = partial_names(self.table, self.mesh)
        parameters = infos(members, self.reduce_dtype, state, partial, self.average is not None)

        def messages(names: Sequence[Sequence[str]]) -> int:
            return transport.message_bytes([[of[name] for name in chunk] for chunk in names], self.reduce_dtype)

        if traced is None:
            chunk_bytes = piece_of_budget(parameters, self.tier.budget_bytes)
            names = [[p.name for p in chunk] for chunk in packed(parameters, chunk_bytes)]
            self._require_order()
            self._require_room(parameters, messages(names))
            chunks = chunk_infos(packed(parameters, chunk_bytes))
            on_disk, waiting = self._without_plan(chunks)
        else:
            copied = probe_bytes(sum(p.buffer_bytes for p in parameters), self.tier.budget_bytes)
            self._bandwidth = with_drives(bandwidth_of(self.device, self.ranks, copied), speeds)

            def planned(step: StepTrace) -> tuple[StepTrace, Chunking]:
                step = replace(step, updates_as_final=self.updates_as_final and self._can_update_early)
                axis, of_host = stage_axis(self.mesh), self.host.budget_bytes
                if any(member.sharers.cut for member in members):
                    step = fullest(step, axis)
                given = parameters, self.tier.budget_bytes, messages, self._bandwidth, self.config.policy, axis, of_host
                return step, plan(step, *given)

            traced, self.planned = planned(traced)
            self.planned = self._in_order(traced, self.planned, losses, units, lambda step: planned(step)[1])
            names, chunks = self.planned.parameters, self.planned.trace.chunks
            on_disk, waiting = self.planned.plan.on_disk, self.planned.plan.waiting
            if self.warms_up and self.disk is not None:  # nothing lives on the device yet, and the host is no larger
                on_disk |= to_disk(chunks, frozenset(), self.host.budget_bytes)
                waiting = to_wait(chunks, frozenset(), on_disk, self.host.budget_bytes)
                self.host.require(host_bytes_of(chunks, frozenset(), on_disk, True, waiting))
        for member in of.values():  # from here on chunks take care of its memory
            member.tensor.data = self._nothing(member.tensor)
        dealt = [] if self.disk is None else deal(chunks, on_disk, speeds, waiting)
        for index, drive in enumerate([] if self.disk is None else self.disk.drives):
            drive.reserve(2 * sum(chunk.slot_bytes for chunk in chunks if dealt[chunk.index] == index))
        for index, chunk in enumerate(names):
            self.chunks.append(Chunk(index, [of[name] for name in chunk], self.device, self.reduce_dtype))
            if self.disk is not None:
                self.disk.add(self.chunks[-1], index in on_disk, self.disk.drives[dealt[index]])
        if self.disk is not None:
            self.disk.settle()
            self.disk.waiting.land, self.disk.waiting.under_way = transport.land, int(self.streams.on_cuda)
            self.disk.let_wait(self.chunks[index] for index in sorted(waiting))
            for chunk in self.chunks if self.planned is None else ():
                if chunk.away is None:
                    self.disk.house(chunk)
        transport.allocate(self.chunks)
        self.executor = Executor(self.chunks, self.tier, transport, self.streams)
        self.hooks = ModuleHooks(
            [Unit(name, self.model.get_submodule(name), [of[n] for n in read]) for name, read in units.items() if read],
            self.chunks,
            self.executor,
        )
        if self.vertical is not None:
            self.vertical.hooks = self.hooks
        if self.planned is not None:
            announce(self.planned.plan, self.mesh, self.orders)
            if self.warms_up:
                self._warm_up(self.planned)
            else:
                self._settle(self.planned)

    @property
    def ranks(self) -> int:
        """Over which a chunk is sharded, where experts do not lie elsewhere."""
        return shard_axis(self.mesh).size() if self.zero else 1

    def _require_order(self) -> None:
        """Raises UserError where an order is asked for, and no step was foreseen to plan it by."""
        if self.config.order == "vertical":
            raise UserError(
                "gemini.order=vertical: it is run as planned, and no step of this model was foreseen; leave it out"
            )

    def _in_order(
        self,
        traced: StepTrace,
        planned: Chunking,
        losses: Sequence[Callable[[nn.Module], Any]],
        units: dict[str, list[str]],
        plan: Callable[[StepTrace], Chunking],
    ) -> Chunking:
        """The plan of the order in which a step's microbatches run: by blocks where that is shorter, or asked for.

        traced, planned  of one microbatch

        Raises UserError where it is asked for and does not go with the model, or not into the budget.
        """
        if not is_in_question(self.config.order, losses, planned, self.blocks):
            return planned
        blocks, speeds = self.blocks, [self._bandwidth]
        assert blocks is not None
        dist.broadcast_object_list(speeds)  # ranks measure unlike ones, and run in one order
        self.orders, found, self.vertical = both_orders(
            self.config.order,
            traced,
            planned,
            losses,
            lambda: VerticalOrder(self.model, blocks, self.mesh, self),
            Planner(lambda step: self._trace(step, units), plan, speeds[0]),
        )
        return found

    def _traced(self, step: Callable[[nn.Module], Any], units: dict[str, list[str]]) -> StepTrace | None:
        """A step of the model; `units` learn what they read of modules that they do not call.

        None of a model without memory that looks at values: it goes without a plan. What goes wrong on one rank does on
        all.
        """
        try:
            traced = self._trace(step, units)
        except UserError as why:
            if not any(parameter.is_meta for parameter in self.model.parameters()):
                raise
            if dist.get_rank() == 0:
                print(f"gemini: chunks come when they are needed, and no plan is made: {why}")
            return None
        for module, parameters in traced.reads.items():
            units[module] = list(dict.fromkeys([*units.get(module, ()), *parameters]))
        return traced

    def _trace(self, step: Callable[[nn.Module], Any], units: dict[str, list[str]]) -> StepTrace:
        speed = speed_of(self.device, self.compute_dtype)
        # Drawn parameters would be whole, and there is a budget because a device does not hold them whole.
        draws = self.device.type == "cpu"
        return trace_step(self.model, step, speed, self.device, units=units, draws=draws, agree=_agreed)

    @property
    def warms_up(self) -> bool:
        """True where the first step is measured with nothing resident: allocators round, libraries take memory."""
        return self.device.type == "cuda"

    def _warm_up(self, planned: Chunking) -> None:
        """Chunks come when they are needed in the first step."""
        assert self.executor is not None
        self.executor.follow(Schedule(planned.trace), [()] * (len(planned.trace.moments) + 1))
        self.executor.gauge = self._warming = self._gauge(planned)
        self._warming.__enter__()

    def _correct(self, planned: Chunking, gauge: Gauge) -> None:
        """The first step is over: now it is known what lives on the device."""
        assert self.executor is not None
        gauge.__exit__(None, None, None)
        self.executor.gauge = self._warming = None
        policy = self.config.policy
        self.planned = corrected_plan(
            planned, gauge.others, self._bandwidth, policy, stage_axis(self.mesh), self.host.budget_bytes
        )
        if self.planned.plan.resident != planned.plan.resident:
            announce(self.planned.plan, self.mesh)
        self.tier.set_other(0)
        self._settle(self.planned)

    def _settle(self, planned: Chunking) -> None:
        """Bring to the device what the plan keeps there; the rest is where it is."""
        assert self.executor is not None
        self.executor.follow(Schedule(planned.trace), planned.plan.moves)
        for chunk in self.chunks:
            self.executor.drop(chunk)
        if self.disk is not None:
            self.disk.follow(self.chunks, planned)
        for index in sorted(planned.plan.resident):
            chunk, info = self.chunks[index], planned.trace.chunks[index]
            self.tier.take(info.param_bytes + info.shard_bytes, chunk.name)
            chunk.settle()
            for member in chunk.members:
                bring_state(self._optimizer, member.master)
                if self.average is not None and member.trainable:
                    average = self.average.tensors[member.name]
                    average.data = average.detach().to(member.master.device, copy=True)
            self.executor.load(chunk)
        self.hooks.settled()
        if self.hooks.rests:  # from here on nobody tells the account of the moments of a step
            self.tier.set_other(planned.trace.other_peak_bytes)

    def _open_folders(self, given: Sequence[Path]) -> Folders:
        """This rank's folder on each drive.  Raises UserError, alike on every rank, where one cannot use its own."""
        said, opened = None, None
        try:
            opened = Folders(given, dist.get_rank())
        except UserError as error:
            said = str(error)
        every: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(every, said)
        refused = next((words for words in every if words is not None), None)
        if opened is None or refused is not None:
            if opened is not None:
                opened.close()
            raise UserError(refused or "")
        return opened

    def _open_disk(self, folders: Folders, optimizer: torch.optim.Optimizer) -> None:
        """Raises UserError for an optimizer that does not update chunk by chunk."""
        if follows_steps(optimizer) or isinstance(optimizer, KFAC | HessianFree):
            raise UserError(
                f"gemini.disk={self.config.disk} with {type(optimizer).__name__}: what follows or looks at whole steps "
                "needs all masters at once; use another --optim.name"
            )
        self.disk = Disk(folders, self.device, optimizer, self.config.durable_every)
        if self.average is not None:
            self.disk.averages = self.average.tensors
        at_once = self.mesh.size() > 1 and self._can_update_early and stage_axis(self.mesh) is None
        self.durable = DurableSteps(self.disk, folders.given[0], self.config.durable_every, at_once)
        if self.host.budget_bytes is None:
            free = device_bytes("cpu", dist.get_world_size())
            if self.device.type == "cpu":
                free -= self.tier.budget_bytes
            self.host.budget_bytes = max(0, int(SHARE_OF_FREE * free))

    def _without_plan(self, chunks: Sequence[ChunkInfo]) -> tuple[frozenset[int], frozenset[int]]:
        """The chunks that live on the disk where no step was traced, and those whose gradients wait there.

        Raises UserError where the host is too small.
        """
        has_disk = self.disk is not None
        budget_bytes = self.host.budget_bytes if has_disk else None
        on_disk = to_disk(chunks, frozenset(), budget_bytes)
        waiting = to_wait(chunks, frozenset(), on_disk, budget_bytes)
        self.host.require(host_bytes_of(chunks, frozenset(), on_disk, has_disk, waiting))
        return on_disk, waiting

    def close(self) -> None:
        """Give the disk's folder back.  A first step that is being measured is not any more."""
        if self._warming is not None and self.executor is not None:
            self._warming.give_up()
            self._warming = self.executor.gauge = None
        try:
            if self.disk is not None:
                self.give_up_updates()
                disk, self.disk, self.durable = self.disk, None, None
                disk.close()
        finally:
            if self.folders is not None:
                self.folders.close()

    def _require_room(self, parameters: Sequence[ParameterInfo], messages: int) -> None:
        """Without a trace: the least that is known to be needed."""
        least = messages + max(p.buffer_bytes for p in parameters)
        if least > self.tier.budget_bytes:
            raise UserError(
                f"gemini.budget={self.tier.budget_bytes}: the largest parameter and the messages between ranks take "
                f"{in_words(least)}; give at least {least} bytes"
            )

    # --- steps --------------------------------------------------------------------------------------------------------

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        if self.vertical is None or not 1 < len(microbatches) <= self.vertical.most:
            return super().run(microbatches, loss, scale)
        try:
            return self.vertical.run(microbatches, loss, scale)
        except BaseException:
            self.give_up_updates()
            self.hooks.give_up()
            raise

    @contextmanager
    def microbatch(self, last: bool, names: frozenset[str] | None = None) -> Iterator[None]:
        """Every microbatch is reduced, into the shards: whole gradients of two do not fit where parameters stand."""
        assert self.executor is not None, "prepare comes first"
        with self.foreseen(), self.updating_early() if last and self.updates_as_final else nullcontext():
            try:
                yield
            except BaseException:
                self.give_up_updates()
                self.hooks.give_up()
                raise
            self.hooks.end_backward(names)

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Chunks come as in a step, and none is reduced."""
        assert self.executor is not None, "prepare comes first"
        try:
            yield
        finally:
            self.hooks.give_up()

    @contextmanager
    def foreseen(self) -> Iterator[None]:
        """The first such part of a step that is to be drawn is measured."""
        executor, planned = self.executor, self.planned
        assert executor is not None
        if planned is None or executor.gauge is not None or self._is_measured or not self._undrawn:
            yield
            return
        executor.gauge = gauge = self._gauge(planned)
        try:
            with gauge:
                yield
        finally:
            executor.gauge = None
        self._is_measured, self._undrawn = True, self._undrawn - 1
        assert self.config.figure is not None
        draw(self.config.figure, planned, gauge, self.mesh)

    def _gauge(self, planned: Chunking) -> Gauge:
        gauge = Gauge(len(planned.trace.moments), self.chunks, self.tier, self._model_data(), self._host_bytes)
        gauge.add(self.model.buffers())
        return gauge

    def _model_data(self) -> list[Tensor]:
        """All tensors of parameters, masters, gradients and the optimizer's state."""
        assert self.executor is not None
        found = [*self.executor.transport.messages]
        if self.disk is not None:
            found += self.disk.storages
        for chunk in self.chunks:
            found += [chunk.buffer, *(t for t in (chunk.masters, chunk.values) if t is not None)]
            if chunk.trainable and not chunk.alone and chunk.waits is None:
                found.append(chunk.make_grad())
        found += [] if self.average is None else self.average.tensors.values()
        return found + [t for state in self._optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]

    def _host_bytes(self) -> int:
        """Bytes on the host of shards that live there, and of the optimizer's state of them."""
        housed = {} if self.disk is None else self.disk.housed
        away = [c for c in self.chunks if not c.resident and c.away is None and c not in housed]
        beside = [c for c in self.chunks if (c.away is not None or c in housed) and c.waits is None]
        kept = [c.grad for c in beside if c.grad is not None]
        places = 0 if self.disk is None else self.disk.place_bytes + sum(memory.nbytes for memory in housed.values())
        state = [t for chunk in away for m in chunk.members for t in self._optimizer.state.get(m.master, {}).values()]
        own = {id(t): t for chunk in away for t in (chunk.masters, chunk.values, chunk.grad) if t is not None}
        tensors = (*own.values(), *state, *kept)
        return places + sum(t.nbytes for t in tensors if isinstance(t, Tensor) and t.ndim)

    @property
    def _can_update_early(self) -> bool:
        """Whether a chunk that is reduced can be updated by itself, and has a slot that is left if it is not to be.

        Messages of another thread would come between those of this one; a rank that is alone sends none.
        """
        is_quiet = self.mesh.size() == 1 or steps_apart(self._optimizer)
        return self.disk is not None and is_quiet and not partial_names(self.table, self.mesh)

    @contextmanager
    def updating_early(self) -> Iterator[None]:
        """Within is a step's last backward: chunks on the disk are updated as their gradients become final."""
        self.hooks.final = self._has_final if self._can_update_early else None
        try:
            yield
        finally:
            self.hooks.final = None

    def _has_final(self, chunk: Chunk) -> None:
        """Begin the update of a chunk that has all of its gradients; on a GPU of the one before: this one's travel."""
        assert self.disk is not None
        assert self.executor is not None
        self._final.append(chunk)
        while len(self._final) > self.streams.on_cuda:
            final = self._final.pop(0)
            if self.disk.may_begin(final):
                self.executor.transport.land(final)
                self.disk.waiting.settle(final)
                self.disk.begin_update(final, partial(self._update_early, final))

    def _update_early(self, chunk: Chunk) -> None:
        """The optimizer's step of a chunk whose masters are at hand, in the thread of updates."""
        assert self.disk is not None
        with self.disk.waiting.at_hand(chunk), self.stepping():
            for member in chunk.members:
                member.master.grad = chunk.own_grad(member)
            self._update_chunk(self._optimizer, chunk)
        with torch.no_grad():
            chunk.refresh()

    def _update_chunk(self, optimizer: torch.optim.Optimizer, chunk: Chunk) -> None:
        """The optimizer's step of a chunk, if it has gradients; its average follows also without."""
        if _has_gradients(chunk):
            step_over(optimizer, [member.master for member in chunk.members])
        if self.average is not None and chunk.trainable:
            self.average.take_in(member.name for member in chunk.members)

    def give_up_updates(self) -> None:
        """No update of this step takes place, not even one that has begun."""
        self._final.clear()
        if self.disk is not None:
            self.disk.give_up()

    def reduce(self) -> None:
        assert self.executor is not None
        if self.executor.gauge is not None:
            self.executor.gauge.pause()
        self.executor.transport.finish()
        self.completion.used |= self.hooks.used
        learn = [chunk for chunk in self.chunks if chunk.trainable and not chunk.alone]
        for chunk in learn:
            if not chunk.has_grad:
                self.executor.transport.zero(chunk)
        if self.disk is not None and self.disk.waiting.of:
            self.disk.waiting.settle()
            self.disk.wait()  # updates that have begun take their gradients from there
        for chunk in learn:
            for member in chunk.members:
                member.master.grad = chunk.reduced_grad(member)
        together = [m.name for chunk in self.chunks if chunk.sharers.sends for m in chunk.members if m.trainable]
        self.completion.complete(self.masters, together)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Chunk by chunk in the planned order: one that is new comes for the next step while others are updated."""
        executor, planned, disk = self.executor, self.planned, self.disk
        is_whole = planned is None or self.hooks.rests or not steps_apart(optimizer)
        if executor is None or (disk is None and is_whole):
            optimizer.step()
            return
        gauge, executor.gauge = executor.gauge, None  # an optimizer's step is of no moment that is measured
        self._final.clear()
        with nullcontext() if disk is None else disk.updating(), self.stepping():
            self._update_chunks(optimizer, executor, self._updated_in_order(planned))
        executor.gauge = gauge

    def _update_chunks(self, optimizer: torch.optim.Optimizer, executor: Executor, learn: list[Chunk]) -> None:
        disk = self.disk
        if disk is not None:  # of what has no gradients nothing is new, and nothing is read
            self._renewed |= {chunk for chunk in self.chunks if chunk.away is not None}
            learn = [chunk for chunk in learn if self.average is not None or _has_gradients(chunk)]
            disk.wait()
        early = () if disk is None else disk.early
        at_end = [chunk for chunk in learn if chunk not in early]
        following = dict(pairwise(chunk for chunk in at_end if chunk.away is not None))
        awaited = dict(pairwise(chunk for chunk in at_end if chunk.waits is not None))
        for chunk in learn:
            if not self.hooks.rests:
                executor.at("update", chunk.name, [])
            if disk is not None and chunk in early:
                disk.accept(chunk)
                if chunk.is_outdated:
                    executor.drop(chunk)
                self._renewed.add(chunk)
                continue
            with nullcontext() if disk is None else disk.at_hand(chunk, following.get(chunk), awaited.get(chunk)):
                self._update_chunk(optimizer, chunk)
                self._renew(chunk)
            self._renewed.add(chunk)

    def empty_like(self, master: Tensor) -> Tensor:
        if self.folders is None:
            return super().empty_like(master)
        return mapped_temporary(self.folders.paths[0], master.shape, master.dtype)

    def keep_average(self, average: FollowsMasters) -> None:
        """On a disk it lies with the masters, wherever these are, and moves with their updates."""
        if self.folders is not None:
            self.average, average.in_parts = average, True

    @contextmanager
    def showing(self, average: FollowsMasters) -> Iterator[None]:
        """What lies on a disk is read from there; what lives in memory changes places with the masters.

        A collective: nothing may be written from memory meanwhile.
        """
        disk = self.disk
        if disk is None or self.average is None:
            with super().showing(average):
                yield
            return
        disk.confirm()
        there = [chunk for chunk in self.chunks if chunk.trainable and chunk.away is None]

        def exchange() -> None:
            average.exchange(member.name for chunk in there for member in chunk.members)
            self._show(there)

        with disk.showing_averages():
            exchange()
            try:
                yield
            finally:
                exchange()

    @torch.no_grad()
    def _show(self, renewed: Sequence[Chunk]) -> None:
        """Let the device have nothing old: of `renewed` there are other values in memory, of those on a disk there."""
        assert self.executor is not None
        for chunk in self.chunks:
            if chunk in renewed:
                self._renew(chunk)
            elif chunk.away is not None and chunk.is_outdated:
                self.executor.drop(chunk)

    def _updated_in_order(self, planned: Chunking | None) -> list[Chunk]:
        """Chunks that learn: as the trace has their updates, then what it has not seen."""
        traced = (
            [] if planned is None else [self.chunks[m.chunks[0]] for m in planned.trace.moments if m.kind == "update"]
        )
        return traced + [chunk for chunk in self.chunks if chunk.trainable and chunk not in traced]

    def _renew(self, chunk: Chunk) -> None:
        """Drop a chunk's old values from the device; fill anew what lives there."""
        assert self.executor is not None
        chunk.refresh()
        if chunk.is_outdated:
            self.executor.drop(chunk)
        if chunk.resident:
            self.executor.load(chunk)

    def release(self) -> None:
        self.give_up_updates()  # of a step that is skipped: `update` has left none
        super().release()
        if self.executor is not None:
            self.hooks.used.clear()
            self.executor.transport.forget()
        for chunk in self.chunks:
            chunk.has_grad = False
        if self.disk is not None:
            self.disk.waiting.forget()

    @torch.no_grad()
    def publish(self) -> None:
        if self.executor is None:
            return
        if self._warming is None:  # until then the host has what will live on the device, too
            self.host.note(self._host_bytes())
        for chunk in self.chunks:
            if chunk not in self._renewed:
                self._renew(chunk)
        self._renewed.clear()
        self._is_measured = False
        if self._warming is not None and self.planned is not None and self._warming.has_measured:
            self._correct(self.planned, self._warming)


def _has_gradients(chunk: Chunk) -> bool:
    return any(member.master.grad is not None for member in chunk.members)


def _agreed(failure: Exception | None) -> Exception | None:
    """The errors of all ranks, alike on each: causes before refusals before what follows from another rank's."""
    said: list[tuple[int, str] | None] = [None] * dist.get_world_size()
    if failure is None:
        own = None
    elif isinstance(failure, UserError):
        own = 1, str(failure)
    else:
        own = (0 if not isinstance(failure, Unforeseen) else 2), f"{type(failure).__name__}: {failure}"
    dist.all_gather_object(said, own)
    found = [(words[0], rank, words[1]) for rank, words in enumerate(said) if words is not None]
    if not found:
        return None
    order, rank, words = min(found)
    if rank == dist.get_rank():
        return failure  # it has the traceback
    return UserError(words) if order == 1 else RemoteError(f"rank {rank}: {words}")


class RemoteError(RuntimeError):
    """An error on another rank, which has the traceback."""
