"""ZeRO++: what ZeRO's ranks gather and reduce of one another, in few bits, and from another node only once.

    weights    qwZ   a gather of weights is of their codes; masters stay exact, and all ranks compute with the same
                     decoded weights, the one included that has the masters
    secondary  hpZ   the first gather between two updates leaves a second copy, 1/k of it on each of a node's k ranks
                     (all of it where k is 1), in the format in which the model computes; all others, the backward's
                     too, gather that in the node
    gradients  qgZ   a reduce-scatter is an exchange of codes within the node, and one of the codes of what these come
                     to between nodes: one error of quantization each (`core.comm.coded_rows`)
    feedback       what a rank's codes of gradients leave out, of the node's sums too, goes along in its next step
                   (`CodedErrors`; Seide et al. 2014, and of ZeRO's shards Xie et al. 2024, LoCo, arXiv:2407.04480)

Matrices are coded, the rows of each rank of each in blocks of their own, so that what ZeRO 1, 2 and 3 compute with is
the same; vectors go as they are in the same message. One rank sends nothing, and nothing of it is coded.

`gather_messages` and `sum_messages` are the bytes by closed forms.

The second copy is stale with the update: whoever writes masters calls `publish`, which gathers anew.

Of 16-bit parameters of M bytes, ZeRO-3 sends 3 M into and out of the nodes together in a step of one microbatch; qwZ
with int8 M / 2, hpZ nothing in the backward, and qgZ with int4 M / 4, and each block a scale of two bytes (`BLOCKS`).

Wang et al. 2023, ZeRO++, arXiv:2306.10209. Not here: weights that are coded in the second copy.
"""

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from core.comm.block_code import RoundedCode
from core.comm.coded_rows import CodedRows, RowPart, gather_coded, sum_coded
from core.compat import gathered_together
from core.config import UserError
from core.mesh import EXPERT_AXIS, AnyMesh, axis_size, device_of, shard_axes, shard_axis, split_axis
from core.parallel.compress import CommConfig, FewBits, Message, check_axes, trained_rows
from core.parallel.feedback import Unsent, sum_together
from core.parallel.rows import paired_rows
from core.parallel.squares import when_gathered
from core.placement.table import Placed, Table

BLOCKS = {8: 256, 4: 64}
"""Bits -> numbers that share a scale. Of 4 bits fewer do, since training loses by them (docs/log.md)."""
NODES, NODE = "nodes", "node"
"""Names of the two axes of the one that ZeRO shards over: the ranks in one place of each node, and a node's."""


def code_of(bits: FewBits) -> RoundedCode:
    width = {"int8": 8, "int4": 4}[bits]
    return RoundedCode(width, BLOCKS[width])


def coded_rows(bits: FewBits, rows: Sequence[Placed], ranks: int) -> CodedRows:
    """How a message of these parameters' rows is sent."""
    parts = [RowPart(row.row_elements(ranks), is_coded=len(row.layout.shape) > 1) for row in rows]
    return CodedRows(code_of(bits), parts)


def coded_names(table: Mapping[str, Placed]) -> list[str]:
    """First names of the parameters whose gradients are coded, in the table's order."""
    return [name for name, row in trained_rows(table) if len(row.layout.shape) > 1 and not row.whole]


def shard_ranks(mesh: AnyMesh) -> int:
    return math.prod(axis_size(mesh, axis) for axis in shard_axes(mesh))


def gather_messages(comm: CommConfig, rows: Sequence[Placed], ranks: int, width: int, times: int) -> Iterator[Message]:
    """What a rank sends to gather parameters so often between two updates; the axis "" for all that shard them."""
    whole = ranks * sum(row.row_elements(ranks) for row in rows) * width
    crossing = 1 if comm.secondary else times
    coded = whole if comm.weights is None else ranks * coded_rows(comm.weights, rows, ranks).num_bytes(width)
    yield "all_gather", "", crossing * coded
    if comm.node > 1:
        yield "all_gather", NODE, (times - crossing) * whole


def sum_messages(comm: CommConfig, rows: Sequence[Placed], ranks: int, wide: int) -> Iterator[Message]:
    """What a rank sends to reduce and scatter the gradients of parameters."""
    if comm.gradients is None:
        yield "reduce_scatter", "", ranks * sum(row.row_elements(ranks) for row in rows) * wide
        return
    row_bytes = coded_rows(comm.gradients, rows, ranks).num_bytes(wide)
    if comm.node > 1:
        yield "all_to_all", NODE if comm.node < ranks else "", ranks * row_bytes
    if comm.node < ranks:
        yield "all_to_all", NODES if comm.node > 1 else "", ranks // comm.node * row_bytes


def check_shards(comm: CommConfig, zero: int) -> None:
    """Raises UserError where ZeRO does not shard what the options are of."""
    for given, there, least, why in (
        (f"comm.weights={comm.weights}", comm.weights is not None, 1, "no weight is gathered"),
        (f"comm.gradients={comm.gradients}", comm.gradients is not None, 1, "gradients are not scattered"),
        ("comm.secondary", comm.secondary, 3, "no backward gathers weights"),
    ):
        if there and zero < least:
            raise UserError(f"{given} with zero={zero}: {why}; use --zero 3, or leave it out")


def check_nodes(comm: CommConfig, mesh: AnyMesh) -> None:
    """Raises UserError for nodes that the ranks do not make."""
    if comm.node == 1 or not comm.codes_shards:
        return
    if EXPERT_AXIS in (mesh.mesh_dim_names or ()) and axis_size(mesh, EXPERT_AXIS) > 1:
        raise UserError(
            f"comm.node={comm.node} with mesh.ep={axis_size(mesh, EXPERT_AXIS)}: experts are sharded over other ranks "
            "than the rest; use --comm.node 1"
        )
    ranks = shard_ranks(mesh)
    if ranks % comm.node:
        nodes = ", ".join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)
        raise UserError(f"comm.node={comm.node} does not divide the {ranks} ranks over which ZeRO shards; use {nodes}")
    if comm.secondary and comm.node == ranks:
        raise UserError(
            f"comm.secondary with comm.node={comm.node}: ZeRO shards over one node, and gathers within it already; "
            "leave it out"
        )


class CodedErrors(Unsent):
    """What codes of gradients have left out, of the rows of all ranks, as large as the gradients of a rank.

    On one rank, which codes nothing, what a checkpoint of several brings is added to the first gradient.

    scale  of the gradients of the step that runs (the loss scale)
    """

    name = "feedback"
    scale: float = 1.0
    late: frozenset[str] = frozenset()
    """parameters with errors of ranks that are gone, and no code to go along with"""

    def add(self, whole: Tensor, names: Sequence[str]) -> None:
        """To gradients whole[ranks, elements] that are to be coded."""
        for name, slots in self._slots(whole, names):
            error = self._pending.get(name, self.errors[name])
            for slot, rows in paired_rows(slots, error, self.table[name].master.cuts[-1][1]):
                slot.add_(rows, alpha=self.scale)

    def keep(self, lost: Tensor, names: Sequence[str]) -> None:
        """What the codes of these gradients lack, lost[ranks, elements], for the next step."""
        for name, slots in self._slots(lost, names):
            kept = torch.empty_like(self.errors[name])
            for slot, rows in paired_rows(slots, kept, self.table[name].master.cuts[-1][1]):
                rows.copy_(slot)
            self._pending[name] = kept if self.scale == 1.0 else kept.mul_(1 / self.scale)

    def complete(self, masters: Mapping[str, Tensor], used: set[str]) -> None:
        """Behind the sums of a step: parameters that no rank has used, and which do not move, keep their errors."""
        self._pending = {name: kept for name, kept in self._pending.items() if name in used}
        names = [name for name in self.names if name in self.late and name in used]
        late = [self.errors[name].clone() for name in names]
        sum_together(late, self.axis)
        for name, error in zip(names, late, strict=True):
            master = masters[name]
            master.grad = torch.zeros_like(master) if master.grad is None else master.grad
            master.grad.add_(error, alpha=self.scale)
            self._pending[name] = torch.zeros_like(error)

    def commit(self) -> None:
        self.late -= self._pending.keys()
        super().commit()

    def take(self, record: Mapping[str, Any], filled: Mapping[str, Tensor]) -> None:
        super().take(record, filled)
        self.late = frozenset(self.names) if shard_ranks(self.mesh) == 1 else frozenset()

    def _slots(self, message: Tensor, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        """The part [ranks, elements] of a message that belongs to each parameter which is coded."""
        at, ranks = 0, len(message)
        for name in names:
            elements = self.table[name].row_elements(ranks)
            if name in self.errors:
                yield name, message.narrow(1, at, elements)
            at += elements


class CodedShards:
    """The messages of one model's shards on this rank.

    weights, gradients  how they are coded; None: they go as they are
    unsent  what codes of gradients have left out, where that goes along
    """

    def __init__(self, comm: CommConfig, mesh: DeviceMesh, table: Table, dtype: torch.dtype = torch.float32):
        """dtype: of the reductions.  Raises UserError for a mesh whose ranks' errors have no place."""
        self.comm, self.mesh, self.table = comm, mesh, table
        self.unsent: CodedErrors | None = None
        if comm.feeds_back:
            check_axes(comm, mesh)
            self.unsent = CodedErrors(coded_names(table), mesh, table, dtype, device_of(mesh), {})
        self.weights: FewBits | None = comm.weights
        self.gradients: FewBits | None = comm.gradients
        self._axes: dict[str, tuple[DeviceMesh | None, DeviceMesh | None]] = {}
        self._copies: list[_Gather] = []
        self._reports = False
        self._sums = torch.zeros(6, dtype=torch.float64, device=device_of(mesh))

    # --- messages -----------------------------------------------------------------------------------------------------

    def axes(self, axis: DeviceMesh) -> tuple[DeviceMesh | None, DeviceMesh | None]:
        """(a node's ranks, those in the same place of other nodes) of the ranks over which ZeRO shards."""
        (name,) = axis.mesh_dim_names or ("",)
        if name not in self._axes:
            within, between = None, axis
            if self.comm.node == axis.size():
                within, between = axis, None
            elif self.comm.node > 1:
                between, within = split_axis(axis, self.comm.node, (NODES, NODE))
            self._axes[name] = within, between
        return self._axes[name]

    def rows(self, bits: FewBits, names: Sequence[str], axis: DeviceMesh) -> CodedRows:
        return coded_rows(bits, [self.table[name] for name in names], axis.size())

    def gather(self, whole: Tensor, own: Tensor, names: Sequence[str], axis: DeviceMesh) -> None:
        """own[elements] of each rank -> whole[ranks, elements], as they were sent."""
        if self.weights is None or axis.size() == 1:
            dist.all_gather_into_tensor(whole.view(-1), own.view(-1), group=axis.get_group())
            return
        given = own.clone() if self._reports else own
        gather_coded(whole, own, self.rows(self.weights, names, axis), axis.get_group())
        if self._reports:
            self._compare(whole[axis.get_local_rank()], given, names, axis, 4)

    def sum(self, whole: Tensor, names: Sequence[str], axis: DeviceMesh) -> Tensor:
        """whole[ranks, elements] of each rank, whose memory is taken over -> this rank's row of their sum, as sent."""
        assert self.gradients is not None
        true = lost = None
        if self._reports:
            true = whole.new_empty(whole.shape[1])
            dist.reduce_scatter_tensor(true, whole.reshape(-1), group=axis.get_group())
        if self.unsent is not None:
            self.unsent.add(whole, names)
            lost = torch.empty_like(whole)
        within, between = (None if one is None else one.get_group() for one in self.axes(axis))
        found = sum_coded(whole, self.rows(self.gradients, names, axis), within, between, lost)
        if self.unsent is not None and lost is not None:
            self.unsent.keep(lost, names)
        if true is not None:
            self._compare(found, true, names, axis, 0)
        return found

    def publish(self) -> None:
        """Masters have other values: what was kept of them is none of theirs."""
        for gather in self._copies:
            gather.is_fresh = False

    @property
    def copies(self) -> list[Tensor]:
        """This rank's part of the second copy, of each unit that has been gathered."""
        return [gather.copy for gather in self._copies if gather.copy is not None]

    # --- FSDP2 --------------------------------------------------------------------------------------------------------

    def take_units(self, model: nn.Module) -> None:
        """Send what FSDP2 would send of a model that it has sharded, of each of its units."""
        names = {p: name for name, p in reversed(list(model.named_parameters()))}
        listening: dict[str, _Sum] = {}
        for unit in model.modules():
            if not isinstance(unit, FSDPModule):
                continue
            together = [names[p] for p in gathered_together(unit)]
            if not together:
                continue
            axis = self._axis_of(together[0])
            if self.weights is not None or self.comm.secondary:
                gather: Any = self._gather_of(together, axis)  # of what torch asks for, whose base has no public name
                unit.set_custom_all_gather(gather)
            if self.gradients is not None:
                one = _Sum(self, together, axis)
                reduce: Any = one
                unit.set_custom_reduce_scatter(reduce)
                listening |= dict.fromkeys(together, one)
        if listening:
            when_gathered(model, _marking(listening))

    def _axis_of(self, name: str) -> DeviceMesh:
        return shard_axis(self.mesh, self.table[name].layout.axes())

    def _gather_of(self, names: Sequence[str], axis: DeviceMesh) -> "_Gather":
        gather = _Gather(self, names, axis)
        if self.comm.secondary:
            self._copies.append(gather)
        return gather

    # --- figures ------------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> None:
        every = self.comm.report_every
        self._reports = bool(every) and (step + 1) % every == 0
        self._sums.zero_()

    def row(self) -> dict[str, float]:
        """Figures of the step, where it is one that is reported; a collective of all ranks.

        gradients_cosine  between the sum of the gradients as it was sent and as it is
        gradients_error   norm of their difference over that of the sum
        weights_error     the same of the weights that were gathered
        """
        if not self._reports:
            return {}
        self._reports = False
        if self.mesh.size() > 1:
            dist.all_reduce(self._sums)
        dot, found, true, left, weights, lost = self._sums.tolist()
        figures = {}
        if found > 0 and true > 0:
            figures = {"gradients_cosine": dot / math.sqrt(found * true), "gradients_error": math.sqrt(left / true)}
        return figures | ({"weights_error": math.sqrt(lost / weights)} if weights > 0 else {})

    def _compare(self, found: Tensor, true: Tensor, names: Sequence[str], axis: DeviceMesh, at: int) -> None:
        """Add a rank's row to the figures that begin there; what several ranks hold of it counts once."""
        sizes = [self.table[name].row_elements(axis.size()) for name in names]
        for name, a, b in zip(names, found.double().split(sizes), true.double().split(sizes), strict=True):
            parts = (a * b, a.square(), b.square(), (a - b).square())
            sums = torch.stack([part.sum() for part in (parts if at == 0 else parts[2:])])
            self._sums[at : at + len(sums)] += sums / self.table[name].master.num_holders(self.mesh)


class _Gather:
    """FSDP2's gather of a unit.

    copy  this rank's part of the second one; is_fresh: the masters have not changed since
    """

    def __init__(self, shards: CodedShards, names: Sequence[str], axis: DeviceMesh):
        self.shards, self.names, self.axis = shards, names, axis
        self.node, _ = shards.axes(axis)
        self.copy: Tensor | None = None
        self.is_fresh = False

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, async_op: bool = False
    ) -> None:
        if self.is_fresh:
            assert self.copy is not None
            if self.node is None:
                output_tensor.copy_(self.copy)
            else:
                dist.all_gather_into_tensor(output_tensor, self.copy, group=self.node.get_group())
            return
        self.shards.gather(output_tensor.view(self.axis.size(), -1), input_tensor, self.names, self.axis)
        if self.shards.comm.secondary:
            own = output_tensor
            if self.node is not None:
                own = output_tensor.view(self.node.size(), -1)[self.node.get_local_rank()]
            self.copy = own.clone() if self.copy is None else self.copy.copy_(own)
            self.is_fresh = True


class _Sum:
    """FSDP2's reduce-scatter of a unit: of those of its parameters that have had gradients since the last.

    arrived  names of these
    """

    def __init__(self, shards: CodedShards, names: Sequence[str], axis: DeviceMesh):
        self.shards, self.names, self.axis = shards, names, axis
        self.arrived: set[str] = set()

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        names = [name for name in self.names if name in self.arrived]
        self.arrived.clear()
        output_tensor.copy_(self.shards.sum(input_tensor.view(self.axis.size(), -1), names, self.axis))


def _marking(sums: Mapping[str, _Sum]) -> Any:
    """Let each unit's reduction know of which parameters gradients have come, by what `when_gathered` shows."""

    def listen(name: str, parameter: Tensor) -> None:
        own = weakref.ref(sums[name]) if name in sums else None  # nobody sees into the hooks of a parameter

        def ready(_: Tensor) -> None:
            if own is not None and (one := own()) is not None:
                one.arrived.add(name)

        parameter.register_post_accumulate_grad_hook(ready)

    return listen
