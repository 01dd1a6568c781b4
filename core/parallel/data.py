"""Data parallelism: replicas of a model, and ZeRO's three levels, which shard what replicas hold alike.

    zero  sharded over dp_shard              how
    0     nothing                            `Replicas`: gradients all-reduced, bucket by bucket, during the backward
    1     optimizer                          `Replicas`: gradients reduce-scattered, kept whole until the step is over
    2     optimizer, gradients               `Replicas`: gradients reduce-scattered and released bucket by bucket
    3     optimizer, gradients, parameters   `FullyShardedReplicas`: torch's FSDP2

Both are a `ParallelModel`. A step has three phases:

    1. `run` accumulates: for each microbatch `with parallel.microbatch(last): loss.backward()`. Gradients are sent in
       the last one; with `reduce_each` in each, and then they stay sharded.
    2. `reduce` waits for the reductions; every master's `.grad` is the sum over all data-parallel ranks, and over
       those of context parallelism, which hold other tokens: with it, dp_shard means dp_shard+cp in this file.
    3. `publish` gathers what the optimizer has updated, where it is sharded.

The masters are the parameters themselves where nothing is sharded and the formats agree, views of their rows where
only the optimizer is sharded, and fp32 copies under bf16 and fp16. Hybrid shard: sharded over dp_shard, alike on
dp_replicate. Gradients are summed, not averaged: the loss is already divided by the whole batch's weight.

One rank sends no messages: its gradients are those that autograd leaves.

Gradients of experts are summed over the data-parallel ranks that hold copies of these experts, which are those of one
place on the ep axis, and sharded over the same ranks. A stack of experts' matrices is sharded by the matrices' rows
where there are fewer matrices than ranks.

Gradients that are compressed (`core.parallel.compress`) wait, each a tensor of its own, until `reduce`, which lets the
compression exchange them once a step; what it returns takes the place of their sum.

Rajbhandari et al. 2020, ZeRO, section 5. Not here: offload (core.gemini).
"""

import weakref
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from core.compat import concatenated, num_holders, own_part
from core.config import UserError
from core.layout import detached, is_dtensor, layout_of, local, tag, tagged_as
from core.mesh import (
    DATA_AXES,
    Zero,
    derive_axes,
    device_of,
    gradient_axis,
    group_of_ranks,
    shard_axis,
    stage_axis,
    sub_mesh,
)
from core.parallel.coded_shards import CodedShards, check_nodes
from core.parallel.compress import UNCOMPRESSED, CommConfig, compression_of
from core.parallel.parallel_model import ParallelModel
from core.parallel.plan import blocks_of, check_trained
from core.parallel.rows import own_rows, paired_rows, row_length
from core.parallel.squares import GradientSquares, when_gathered
from core.placement.table import Table, is_expert, parameter_names, placement, set_parameter
from core.precision import Precision, compute_dtype, master_dtype

BUCKET_BYTES = 32 * 1024 * 1024


class DataParallel(ParallelModel):
    """A model spread over the data axes, in whatever form: what a loop and a pipeline's stages ask of it."""

    completion: "Completion"
    scale: float = 1.0
    """of the gradients of the step that runs"""
    stays: bool = False
    """Whether the update that is made has left masters as they were: there is nothing to publish."""

    @contextmanager
    def foreseen(self) -> Iterator[None]:
        """Surround the part of a step that `prepare` was shown."""
        yield

    @abstractmethod
    @contextmanager
    def microbatch(self, last: bool, names: frozenset[str] | None = None) -> Iterator[None]:
        """Surround one microbatch's backward; gradients accumulate, and only the last one communicates.

        names  the masters that it has gradients for, where it is that of one stage of several; None: all
        """
        yield

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device_type)
        self.scale = scale
        if self.coded is not None and self.coded.unsent is not None:
            self.coded.unsent.scale = scale
        for index, microbatch in enumerate(microbatches):
            with self.microbatch(last=index == len(microbatches) - 1):
                value = loss(microbatch)
                (value * scale if scale != 1.0 else value).backward()
                total += value.detach()
        return total

    def release(self) -> None:
        self.completion.used.clear()
        for master in self.masters.values():
            master.grad = None

    @torch.no_grad()
    def exchange(self, kept: dict[str, Tensor], used: set[str]) -> Collection[str]:
        """Let the compression exchange gradients that wait for it, of parameters that any rank used.  Returns those.

        kept  of this rank, whole, in the format of masters; they are taken over
        """
        if self.coded is not None and self.coded.unsent is not None:
            self.coded.unsent.complete(self.masters, used)
        if self.compression is None or not self.compression.is_on:
            return ()
        names = [name for name in self.compression.names if name in used]
        found = dict.fromkeys(names)
        device = device_of(self.mesh)
        for name in names:
            if name not in kept:  # used on others
                shape, dtype = self.table[name].layout.local_shape(), self.masters[name].dtype
                kept[name] = torch.zeros(shape, dtype=dtype, device=device)
        grads = {name: kept[name] for name in names}
        for axis in dict.fromkeys(axis for name in names for axis in self.table[name].partial):
            self.completion.sum_partial([grads[n] for n in names if axis in self.table[n].partial], axis)
        for name, grad in self.compression.reduce(grads, self.scale).items():
            if self.is_sharded(name):
                grad = own_rows(grad, self.shard_axis(name), self.shard_dim(name)).clone()
            self.masters[name].grad = grad
            found[name] = None  # also one that was used in steps before
        return [*found]

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        if self.compression is not None:
            self.stays = not self.compression.update(optimizer)
            return
        if self.unsent is not None:
            self.unsent.commit()
        super().update(optimizer)

    def skip(self) -> None:
        super().skip()
        if self.unsent is not None:
            self.unsent.discard()

    def is_sharded(self, name: str) -> bool:
        """Return whether ZeRO cuts a parameter's master: any but a scalar's."""
        return not self.table[name].whole

    def shard_dim(self, name: str) -> int:
        return self.table[name].master.cuts[-1][1] if self.is_sharded(name) else 0

    def shard_axis(self, name: str) -> DeviceMesh:
        """The ranks that hold copies of a parameter, over which ZeRO shards."""
        return shard_axis(self.mesh, self.table[name].layout.axes())


class Completion:
    """The end of every form's reductions: gradients are complete, and all ranks agree on which there are.

    used  masters that a loss of this rank has had a gradient for since the last `release`
    """

    def __init__(self, mesh: DeviceMesh, table: Table):
        self.mesh, self.table, self.stage = mesh, table, stage_axis(mesh)
        self.used: set[str] = set()

    def complete(
        self,
        masters: Mapping[str, Tensor],
        together: Collection[str] = (),
        compressed: Callable[[set[str]], Collection[str]] = lambda used: (),
    ) -> None:
        """Complete gradients: some where any rank used the parameter, else none; partial ones summed over their axes.

        together    masters that every rank must use in the same steps
        compressed  used masters -> those of them that it has completed
        """
        used = self.used_anywhere(masters, together)
        done = compressed(used)
        for name, master in masters.items():
            if name not in used and name not in done:
                master.grad = None
            elif master.grad is None:
                master.grad = torch.zeros_like(master)
        for axis in dict.fromkeys(axis for row in self.table.values() for axis in row.partial):
            rest = (n for n in masters if axis in self.table[n].partial and n not in done)
            self.sum_partial([masters[n].grad for n in rest], axis)

    def used_anywhere(self, masters: Mapping[str, Tensor], together: Collection[str]) -> set[str]:
        """Return masters for which any rank has a gradient: a stage's ranks agree on what the optimizer moves.

        Raises UserError, on all ranks, where some have one and some have none and a message needs all.
        """
        ranks = self.mesh if self.stage is None else self.stage
        if ranks.size() == 1:
            return set(self.used)
        own = [name in self.used for name in masters]
        marks = torch.tensor([own, [not used for used in own]], dtype=torch.uint8, device=device_of(self.mesh))
        group = group_of_ranks(self.mesh) if self.stage is None else self.stage.get_group()
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=group)
        used, unused = ({n for n, mark in zip(masters, row, strict=True) if mark} for row in marks.tolist())
        if apart := (used & unused).intersection(together):
            raise UserError(
                f"parameter {min(apart)} took part in the loss of some ranks and not of others, and this form of data "
                "parallelism sends its gradient when all have it; use --zero 0, 1 or 2 without --gemini.budget, or add "
                "it times zero to the loss"
            )
        return used

    def sum_partial(self, grads: list[Tensor | None], axis: str) -> None:
        """All-reduce partial gradients over a model-parallel axis, in one message."""
        present = [g for g in grads if g is not None and g.numel()]
        if not present or sub_mesh(self.mesh, axis).size() == 1:
            return
        device = device_of(self.mesh)  # where messages lie; some of the gradients may lie on the host
        flat = torch.cat([g.flatten().to(device) for g in present])
        dist.all_reduce(flat, group=sub_mesh(self.mesh, axis).get_group())
        for grad, summed in zip(present, flat.split([g.numel() for g in present]), strict=True):
            grad.copy_(summed.view_as(grad))


def begin(model: nn.Module, mesh: DeviceMesh, precision: Precision, table: Table) -> Completion:
    """Make what every form needs: the mesh's groups, and values that are alike on all ranks.

    Raises UserError when no parameter is to be trained, and for one that cannot be.
    """
    check_trained(model)
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError("the model has no parameter that requires a gradient; there is nothing to train")
    derive_axes(mesh)
    agree_on_values(model, mesh)
    if precision == "fp64":
        widen_buffers(model)
    return Completion(mesh, table)


def on_mesh(masters: dict[str, Tensor], mesh: DeviceMesh) -> dict[str, Tensor]:
    """Tag each master with the ranks that it lies among, also one that nothing cuts."""
    return {name: tag(master, replace(layout_of(master), mesh=mesh)) for name, master in masters.items()}


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    zero: Zero,
    precision: Precision,
    materialise: Callable[[nn.Module], None] = lambda model: None,
    reduce_each: bool = False,
    table: Table | None = None,
    comm: CommConfig = UNCOMPRESSED,
) -> DataParallel:
    """Spread a model (its tensor parallelism applied) over the data axes; values that it has become the first rank's.

    materialise  fills the model's parameters, each rank its shard, once the sharding stands and (for a model on the
                 meta device) the memory is there; all ranks must come to equal full parameters
    table        where its parameters lie, cut by its plan; None: no plan has cut them
    comm         how gradients are compressed, and shards sent
    """
    check_nodes(comm, mesh)
    table = placement(model, None, mesh, zero) if table is None else table
    if zero == 3:
        return FullyShardedReplicas(model, mesh, precision, materialise, reduce_each, table, comm)
    return Replicas(model, mesh, zero, precision, materialise, reduce_each, table, comm)


# --- ZeRO 0, 1, 2 -----------------------------------------------------------------------------------------------------


class Replicas(DataParallel):
    """Whole parameters on every rank; the optimizer (zero 1) and the gradients (zero 2) sharded by rows."""

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        zero: Zero,
        precision: Precision,
        materialise: Callable[[nn.Module], None],
        reduce_each: bool,
        table: Table,
        comm: CommConfig = UNCOMPRESSED,
    ):
        """Take the arguments of `data_parallel`."""
        self.completion = begin(model, mesh, precision, table)
        self.model, self.mesh, self.zero, self._reduce_each, self.table = model, mesh, zero, reduce_each, table
        self.compute_dtype, self.reduce_dtype = compute_dtype(precision), master_dtype(precision)
        self._sync = True
        self._squares: weakref.ref[GradientSquares] | None = None
        self.coded = CodedShards(comm, mesh, table, self.reduce_dtype) if comm.codes_shards else None
        allocate(model, self.mesh.device_type)
        materialise(model)
        self.masters = {}
        for names in parameter_names(model):
            self._adopt(names, self.compute_dtype)
        self.masters = on_mesh(self.masters, mesh)
        self.parameters = {n: p for n, p in model.named_parameters() if n in self.masters}
        self.compression = compression_of(comm, mesh, table, self.reduce_dtype, device_of(mesh))
        self._buckets = self._due = self._make_buckets()
        self._next = 0
        self._listen(self.parameters)
        if self._codes_weights:
            self.publish()

    @property
    def _codes_weights(self) -> bool:
        """Whether parameters have other values than masters, and so memory of their own."""
        return self.coded is not None and self.coded.weights is not None and shard_axis(self.mesh).size() > 1

    def _listen(self, names: Collection[str]) -> None:
        for bucket in self._buckets:
            for name in bucket.names_among(names):
                self.parameters[name].register_post_accumulate_grad_hook(self._hook(name, bucket))

    def replace_parameters(self, shares: bool, names: Collection[str]) -> dict[str, nn.Parameter]:
        """Compute from now on with parameters that are other tensors, of values to come with `publish`; return all.

        Graphs that were made of the earlier ones keep those, and their gradients are added up with those of these.

        shares  they may share the memory of masters that are whole and of their format, and have their values already
        names   of those that are replaced
        """
        for bucket in self._buckets:
            for name in bucket.names_among(names):
                master, before = self.masters[name], self.parameters[name]
                is_one = shares and bucket.ranks == 1 and master.dtype == before.dtype
                value = local(before.detach())
                # `.data` counts its own changes: autograd is to see those of the parameter, not of the master.
                own = master.data.view(value.shape) if is_one else torch.empty_like(value)
                self.parameters[name] = with_local(before, own)
        self._listen(names)
        return dict(self.parameters)

    def _adopt(self, names: list[str], dtype: torch.dtype) -> None:
        """Cast a parameter for computing, and make its master: the parameter itself, its rows, or a wide copy."""
        given = self.model.get_parameter(names[0])
        if not given.is_floating_point():
            return
        parameter = cast_parameter(given, dtype)
        for name in names:
            set_parameter(self.model, name, parameter)
        if not given.requires_grad:
            return
        source = parameter if dtype == self.reduce_dtype else given
        master, layout = local(source).detach().to(self.reduce_dtype).contiguous(), self.table[names[0]].master
        if self.is_sharded(names[0]):
            master = own_rows(master, self.shard_axis(names[0]), self.shard_dim(names[0]))
            # Under another format it has memory of its own, so that the whole value can go.
            own_memory = dtype != self.reduce_dtype or self._codes_weights
            master = master.clone(memory_format=torch.contiguous_format) if own_memory else master.contiguous()
        self.masters[names[0]] = tag(master, layout).requires_grad_()

    def _make_buckets(self) -> list["_Bucket"]:
        sizes = {n: local(self.parameters[n]).numel() * self.reduce_dtype.itemsize for n in self.masters}
        apart = () if self.compression is None else self.compression.names
        return [_Bucket(names, self) for names in in_buckets(sizes, self.table, apart)]

    def _hook(self, name: str, bucket: "_Bucket") -> Callable[[Tensor], None]:
        # The garbage collector does not see into these hooks of a parameter: what they held could never be freed.
        replicas, of = weakref.ref(self), weakref.ref(bucket)

        def ready(parameter: Tensor) -> None:
            own, bucket, grad = replicas(), of(), parameter.grad
            assert grad is not None
            if own is None or bucket is None:
                return  # the model has outlived what spread it
            parameter.grad = None
            own.completion.used.add(name)
            if own._squares is not None and (squares := own._squares()) is not None:
                squares.add(name, grad)
            bucket.add(name, own_part(grad) if isinstance(grad, DTensor) else grad)
            if own._sync:
                own._launch_complete()

        return ready

    def run(self, microbatches: Sequence[Any], loss: Callable[[Any], Tensor], scale: float = 1.0) -> Tensor:
        if self.compression is None:
            return super().run(microbatches, loss, scale)
        with self.compression.apart({name: local(p.detach()) for name, p in self.parameters.items()}):
            return super().run(microbatches, loss, scale)

    def squares(self) -> GradientSquares:
        made = GradientSquares(self.mesh, self.table)
        self._squares = weakref.ref(made)
        return made

    def _launch_complete(self) -> None:
        """Start the reductions of complete buckets, in their fixed order: all ranks must send alike."""
        while self._next < len(self._due) and not self._due[self._next].waiting_for:
            if self.zero == 2 and self._next:
                # Its message has had a bucket's backward to arrive in: its whole gradients can go now.
                self._due[self._next - 1].release_whole()
            self._due[self._next].launch()
            self._next += 1

    @contextmanager
    def microbatch(self, last: bool, names: frozenset[str] | None = None) -> Iterator[None]:
        each = self._reduce_each and self.zero == 2
        self._sync = last or each
        if each and names is not None:
            # Other stages reduce theirs after their own microbatches; what this one has of them goes along.
            self._due = [b for b in self._buckets if b.filled or b.kept or not names.isdisjoint(b.names)]
        for bucket in self._due:
            bucket.waiting_for = set(bucket.names if names is None else names.intersection(bucket.names))
        yield
        if self._sync and not last:
            self._finish()
            for bucket in self._due:
                bucket.clear()

    def _finish(self) -> None:
        for bucket in self._due[self._next :]:
            bucket.launch()  # those of which not every parameter took part
        self._next = 0
        for bucket in self._due:
            if bucket.is_compressed:
                continue
            for name, grad in bucket.wait().items():
                master = self.masters[name]
                master.grad = grad if master.grad is None else master.grad.add_(grad)

    def reduce(self) -> None:
        self._finish()
        self.completion.complete(self.masters, compressed=self._reduce_compressed)

    def _reduce_compressed(self, used: set[str]) -> Collection[str]:
        kept = {n: grad for bucket in self._buckets if bucket.is_compressed for n, grad in bucket.kept.items()}
        return self.exchange(kept, used)

    def release(self) -> None:
        super().release()
        self.begin_step()

    def begin_step(self) -> None:
        """Add gradients up anew; those that are the masters' already stay."""
        self.completion.used.clear()
        for bucket in self._buckets:
            bucket.clear()

    @torch.no_grad()
    def publish(self, names: Collection[str] | None = None) -> None:
        """names: of those whose parameters take over the masters' values; all ranks of a stage say the same."""
        if self.stays:
            self.stays = False
            return
        for bucket in self._buckets:
            if among := bucket.names if names is None else bucket.names_among(names):
                bucket.publish(among)


def in_buckets(sizes: Mapping[str, int], table: Table, apart: Collection[str] = ()) -> list[list[str]]:
    """Cut parameters, in the order in which the backward finishes them, into messages of about BUCKET_BYTES.

    A message holds parameters that travel among the same ranks; its place in the order is that of its last one.

    sizes  bytes of each parameter's gradient, in the order of the forward
    apart  of which no message has another with it; theirs come last
    """
    buckets: list[list[str]] = []
    filling: dict[tuple[bool, bool], tuple[list[str], int]] = {}
    order = {name: place for place, name in enumerate(reversed(list(sizes)))}
    for name in order:
        kind = is_expert(table[name]), name in apart
        names, room = filling.get(kind, (None, 0))
        if names is None or sizes[name] > room:
            names, room = [], BUCKET_BYTES
            buckets.append(names)
        names.append(name)
        filling[kind] = names, room - sizes[name]
    return sorted(buckets, key=lambda names: (names[-1] in apart, order[names[-1]]))


class _Bucket:
    """Gradients of some parameters as one message, laid out so that each rank's rows are contiguous: [rank, elements].

    Rows that a ragged parameter lacks are padding: sent, never read. Where no other rank adds to them, or a compression
    sends them, there is no message, and each gradient stays a tensor of its own.
    """

    def __init__(self, names: list[str], owner: Replicas):
        self.names, self.owner = names, owner
        self.axis = owner.shard_axis(names[0]) if owner.zero else None
        self.gradient_axis = gradient_axis(owner.mesh, owner.table[names[0]].layout.axes())
        self.has_others = self.gradient_axis.size() > 1
        self.compression = owner.compression
        if self.compression is not None and names[0] not in self.compression.names:
            self.compression = None
        self.ranks = self.axis.size() if self.axis is not None else 1
        self.device = local(owner.parameters[names[0]]).device
        # Each parameter's dim that is dealt out, elements of one rank's rows, and where these begin among a rank's.
        self.dims = {n: owner.shard_dim(n) for n in names}
        self.lengths = {n: row_length(local(owner.parameters[n]), self.ranks, self.dims[n]) for n in names}
        self.offsets = dict(zip(names, accumulate([0, *self.lengths.values()])))
        self.total = sum(self.lengths.values())
        self.waiting_for = set(names)
        self._message = torch.empty if owner.coded is None else torch.zeros  # the padding is in some block
        self.clear()

    @property
    def is_compressed(self) -> bool:
        """Whether a compression sends these gradients in the step that runs."""
        return self.compression is not None and self.compression.is_on

    @property
    def is_sent(self) -> bool:
        return self.has_others and not self.is_compressed

    def clear(self) -> None:
        self.kept: dict[str, Tensor] = {}
        self.whole: Tensor | None = None
        self.own: Tensor | None = None
        self.work: dist.Work | None = None
        self.filled: set[str] = set()

    def names_among(self, names: Collection[str]) -> list[str]:
        return [name for name in self.names if name in names]

    def _slots(self, buffer: Tensor, name: str) -> Tensor:
        """The part of a [ranks, total] buffer that belongs to a parameter: [ranks, elements]."""
        return buffer.narrow(1, self.offsets[name], self.lengths[name])

    def _buffer(self) -> Tensor:
        if self.whole is None:
            self.whole = self._message(self.ranks, self.total, dtype=self.owner.reduce_dtype, device=self.device)
        return self.whole

    def add(self, name: str, grad: Tensor) -> None:
        """Accumulate one microbatch's gradient, in the reduction's format, into the message if there is one."""
        self.waiting_for.discard(name)
        if not self.is_sent:
            held = self.kept.get(name)
            self.kept[name] = own_gradient(grad, self.owner.reduce_dtype) if held is None else held.add_(grad)
            return
        first = name not in self.filled
        for slot, rows in paired_rows(self._slots(self._buffer(), name), grad, self.dims[name]):
            slot.copy_(rows) if first else slot.add_(rows)
        self.filled.add(name)

    def launch(self) -> None:
        """Start the reduction; parameters that took no part send zeros."""
        if not self.is_sent:
            return
        whole = self._buffer()
        for name in self.names:
            if name not in self.filled:
                self._slots(whole, name).zero_()
        if self.axis is None:
            self.own = whole[0]
            self.work = dist.all_reduce(whole, group=self.gradient_axis.get_group(), async_op=True)
            return
        # In place, this rank's row of the message becomes its sum; under ZeRO-2 it moves out, so that the rest can go.
        if self.owner.coded is not None and self.owner.coded.gradients is not None and self.ranks > 1:
            self.own, self.whole = self.owner.coded.sum(whole, self.names, self.axis), None
            return
        self.own = whole[self.axis.get_local_rank()]
        if self.owner.zero == 2 and self.ranks > 1:
            self.own = torch.empty_like(self.own)
        if self.ranks > 1:
            group = self.axis.get_group()
            self.work = dist.reduce_scatter_tensor(self.own, whole.view(-1), group=group, async_op=True)

    def release_whole(self) -> None:
        """Wait for the reduction and let go of the message: only this rank's sums stay."""
        if self.work is not None:
            self.work.wait()
            self.work = None
        self.whole = None

    def wait(self) -> dict[str, Tensor]:
        """Return name -> the gradient of this rank's master; of an unsent message, where there is one."""
        if not self.is_sent:
            return self.kept
        if self.work is not None:
            self.work.wait()
            self.work = None  # it holds on to the message
        if self.owner.zero == 2:
            self.whole = None
        assert self.own is not None
        replicas = sub_mesh(self.owner.mesh, "dp_replicate")
        if self.axis is not None and replicas.size() > 1:
            dist.all_reduce(self.own, group=replicas.get_group())
        masters = {n: self.owner.masters[n] for n in self.names}
        return {n: self.own.narrow(0, self.offsets[n], m.numel()).view(m.shape) for n, m in masters.items()}

    def publish(self, names: list[str]) -> None:
        """Masters -> these parameters: a copy where they are another format, an all-gather where they are sharded."""
        parameters = {n: local(self.owner.parameters[n]) for n in names}
        if self.ranks == 1:
            for name, parameter in parameters.items():
                if parameter.dtype != self.owner.masters[name].dtype:
                    parameter.copy_(self.owner.masters[name])
            return
        assert self.axis is not None
        dtype = parameters[names[0]].dtype
        own = self._message(self.total, dtype=dtype, device=self.device)
        for name in self.names:
            master = self.owner.masters[name]
            own.narrow(0, self.offsets[name], master.numel()).copy_(master.view(-1))
        whole = torch.empty(self.ranks, self.total, dtype=dtype, device=self.device)
        if self.owner.coded is None:
            dist.all_gather_into_tensor(whole.view(-1), own, group=self.axis.get_group())
        else:
            self.owner.coded.gather(whole, own, self.names, self.axis)
        for name, parameter in parameters.items():
            for slot, rows in paired_rows(self._slots(whole, name), parameter, self.dims[name]):
                rows.copy_(slot)


# --- ZeRO 3 -----------------------------------------------------------------------------------------------------------


class FullyShardedReplicas(DataParallel):
    """Everything sharded by rows over dp_shard with FSDP2; each block's parameters are gathered while it computes.

    The shards are kept in the masters' format and cast as they are gathered, so the parameters are their own masters.
    Blocks are the elements of the model's module lists; all other modules are one more unit, and with them a block that
    shares a parameter with one of them. Every rank must use the same parameters in a step: FSDP2 reduces the parameters
    that have gradients, and waits for the other ranks. Gradients that are compressed are taken before it does, and stay
    whole until the step's end.

    FSDP2 cuts rows and casts what it gathers. So a parameter without rows (a scalar, one without elements) and one of
    no floating numbers stay whole on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: DeviceMesh,
        precision: Precision,
        materialise: Callable[[nn.Module], None],
        reduce_each: bool,
        table: Table,
        comm: CommConfig = UNCOMPRESSED,
    ):
        """Take the arguments of `data_parallel`."""
        self.completion = begin(model, mesh, precision, table)
        self.model, self.mesh, self._reduce_each, self.table = model, mesh, reduce_each, table
        self.compute_dtype, self.reduce_dtype = compute_dtype(precision), master_dtype(precision)
        for names in parameter_names(model):
            parameter = cast_parameter(model.get_parameter(names[0]), self.reduce_dtype)
            for name in names:
                set_parameter(model, name, parameter)
        policy = MixedPrecisionPolicy(self.compute_dtype, reduce_dtype=self.reduce_dtype, cast_forward_inputs=False)
        rows = {p: self.table[n] for n, p in model.named_parameters()}
        whole = {p for p, row in rows.items() if row.whole}

        def shard(module: nn.Module, axis: DeviceMesh) -> None:
            fully_shard(
                module,
                mesh=_with_replicas(mesh, axis),
                shard_placement_fn=lambda p: Shard(rows[p].master.cuts[-1][1]),
                mp_policy=policy,
                ignored_params=whole,
            )

        for experts, name in expert_units(model, self.table):
            shard(experts, self.shard_axis(name))
        for block in blocks_of(model):
            if not isinstance(block, FSDPModule) and not shares_parameters(model, block):
                shard(block, shard_axis(mesh))
        shard(model, shard_axis(mesh))
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)  # gloo has no premultiplied sum
        self.coded = CodedShards(comm, mesh, table, self.reduce_dtype) if comm.codes_shards else None
        if self.coded is not None and shard_axis(mesh).size() > 1:
            self.coded.take_units(model)
        if any(p.is_meta for p in model.parameters()):
            model.to_empty(device=mesh.device_type)
        for name, parameter in model.named_parameters():
            if self.table[name].is_local and not self.table[name].whole:
                tag(parameter, self.table[name].master)  # a local tensor: FSDP2 takes it for the whole
        materialise(model)
        self._trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.masters = on_mesh({n: detached(p).requires_grad_() for n, p in self._trained.items()}, mesh)
        self.compression = compression_of(comm, mesh, table, self.reduce_dtype, device_of(mesh))
        self._kept: dict[str, Tensor] = {}
        if self.compression is not None:
            when_gathered(model, self._taking)

    @property
    def _taking(self) -> Callable[[str, Tensor], None]:
        """Take from a gathered parameter the gradients that are compressed, before FSDP2 reduces what it finds."""
        replicas = weakref.ref(self)  # the garbage collector does not see into the hooks of a parameter

        def listen(name: str, parameter: Tensor) -> None:
            def ready(parameter: Tensor) -> None:
                own, grad = replicas(), parameter.grad
                assert grad is not None
                if own is not None and own.compression is not None and own.compression.is_on:
                    parameter.grad = None
                    own._keep(name, own_part(grad) if isinstance(grad, DTensor) else grad)

            own = replicas()
            if own is not None and own.compression is not None and name in own.compression.names:
                parameter.register_post_accumulate_grad_hook(ready)

        return listen

    def _keep(self, name: str, grad: Tensor) -> None:
        held = self._kept.get(name)
        self._kept[name] = own_gradient(grad, self.reduce_dtype) if held is None else held.add_(grad)

    def release(self) -> None:
        super().release()
        self._kept = {}

    @contextmanager
    def microbatch(self, last: bool, names: frozenset[str] | None = None) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_requires_gradient_sync(last or self._reduce_each)
        yield

    def squares(self) -> GradientSquares:
        made = GradientSquares(self.mesh, self.table)
        made.watch_gathered(self.model, {n: p for n, p in self._trained.items() if self.table[n].whole})
        return made

    def reduce(self) -> None:
        self.completion.used |= {name for name, parameter in self._trained.items() if parameter.grad is not None}
        for name, parameter in self._trained.items():
            self.masters[name].grad = None if parameter.grad is None else local(parameter.grad)
            parameter.grad = None
        self._sum_scalars([m for m in self.masters.values() if m.ndim == 0])
        self.completion.used |= self._kept.keys()
        sharded = {name for name, parameter in self._trained.items() if isinstance(parameter, DTensor)}
        if self.compression is not None and self.compression.is_on:
            sharded -= set(self.compression.names)
        self.completion.complete(
            self.masters, together=sharded, compressed=lambda used: self.exchange(self._kept, used)
        )

    def _sum_scalars(self, scalars: list[Tensor]) -> None:
        """All-reduce, in one message, the gradients of non-empty parameters that FSDP2 leaves to us."""
        if not scalars:
            return
        grads = torch.stack([torch.zeros_like(s) if s.grad is None else s.grad for s in scalars])
        dist.all_reduce(grads, group=gradient_axis(self.mesh).get_group())
        for scalar, grad in zip(scalars, grads.unbind()):
            scalar.grad = grad

    def publish(self) -> None:
        """Let the next forward gather the masters, also where an earlier one (an evaluation's) left values gathered."""
        assert isinstance(self.model, FSDPModule)
        self.model.reshard()
        if self.coded is not None:
            self.coded.publish()


def shares_parameters(model: nn.Module, block: nn.Module) -> bool:
    """Return whether a module of the model outside of the block has one of its parameters."""
    own, inside = {id(p) for p in block.parameters()}, {id(m) for m in block.modules()}
    outside = (m for m in model.modules() if id(m) not in inside)
    return any(id(p) in own for m in outside for p in m.parameters(recurse=False))


def expert_units(model: nn.Module, table: Table) -> list[tuple[nn.Module, str]]:
    """The outermost modules all of whose parameters expert parallelism cuts, each with the name of one of these."""
    found: list[tuple[nn.Module, str]] = []
    inside: set[int] = set()
    for prefix, module in model.named_modules():
        if id(module) in inside:
            continue
        names = [f"{prefix}.{name}" if prefix else name for name, _ in module.named_parameters()]
        if names and all(is_expert(table[name]) for name in names):
            found.append((module, names[0]))
            inside |= {id(m) for m in module.modules()}
    return found


def _with_replicas(mesh: DeviceMesh, axis: DeviceMesh) -> DeviceMesh:
    """The axis that shards, behind dp_replicate where the shards have replicas."""
    if sub_mesh(mesh, "dp_replicate").size() == 1:
        return axis
    names = axis.mesh_dim_names
    if names == ("dp_shard",):
        return sub_mesh(mesh, *DATA_AXES)
    return concatenated([sub_mesh(mesh, "dp_replicate"), axis])


# --- parameters -------------------------------------------------------------------------------------------------------


def cast_parameter(parameter: nn.Parameter, dtype: torch.dtype) -> nn.Parameter:
    """The parameter in another format, row after row in memory; itself, where it is so already.

    Messages and fused optimizers take the memory as it lies, so a transposed parameter becomes contiguous.
    """
    value = local(parameter.detach())
    if not parameter.is_floating_point() or (parameter.dtype == dtype and value.is_contiguous()):
        return parameter
    return with_local(parameter, value.to(dtype).contiguous())


def own_gradient(grad: Tensor, dtype: torch.dtype) -> Tensor:
    """A gradient that autograd has just made, as a tensor that may be changed in place: itself, or a copy in `dtype`.

    Autograd shares memory where it can: both gradients of (a.view(6) + b.view(6)) are views of one tensor, so that
    clipping one in place clips the other. The gradient itself is taken only where nothing else refers to its memory.
    """
    memory = grad.untyped_storage()
    # This tensor and the storage's name here. A torch that counts otherwise, or not at all, makes us copy.
    is_alone = memory.nbytes() == grad.nbytes and num_holders(memory) == 2
    if grad.dtype == dtype and grad.is_contiguous() and is_alone:
        return grad
    return grad.to(dtype, copy=True, memory_format=torch.contiguous_format)


def widen_buffers(model: nn.Module) -> None:
    """Floating buffers in fp64: operators such as batch norm take statistics no narrower than their input."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.double())


@torch.no_grad()
def agree_on_values(model: nn.Module, mesh: DeviceMesh) -> None:
    """Give all replicas the first one's values, buffers too; parameters on the meta device have none yet."""
    for tensor in (*model.parameters(), *model.buffers()):
        value, axis = local(tensor), gradient_axis(mesh, layout_of(tensor).axes())
        if not value.is_meta and value.numel() and axis.size() > 1:
            value = value.contiguous()
            dist.broadcast(value, group=axis.get_group(), group_src=0)
            local(tensor).copy_(value)


def allocate(model: nn.Module, device: str) -> None:
    """Give memory, not yet values, to parameters on the meta device; shared ones stay shared."""
    for names in parameter_names(model):
        parameter = model.get_parameter(names[0])
        if parameter.is_meta:
            like = local(parameter.detach())  # empty_like of a meta tensor is computed in Python
            value = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
            real = with_local(parameter, value)
            for name in names:
                set_parameter(model, name, real)


def with_local(parameter: nn.Parameter, value: Tensor) -> nn.Parameter:
    """Return a parameter like `parameter` whose local tensor is `value`."""
    if isinstance(parameter, DTensor):
        mesh, placements, shape, stride = (
            parameter.device_mesh,
            parameter.placements,
            parameter.shape,
            parameter.stride(),
        )
        value = DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)
    made = nn.Parameter(value, requires_grad=parameter.requires_grad)
    return made if is_dtensor(parameter) else tagged_as(made, parameter)
