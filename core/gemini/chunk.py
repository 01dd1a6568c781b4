"""Chunks: parameters that come to the device together, leave together, and are sharded together.

A chunk has two sides.

    buffer  on the device, whole: the parameters back to back, as the model computes with them. It is there or it is
            not: without it each parameter keeps its name, shape and dtype, and who reads it gets an error. The buffer's
            storage is one object for good, only its memory comes and goes, so that what autograd saved of a parameter
            (a transpose, a view) is right again when the buffer is back. A gradient takes its parameter's place in it.
    shard   this rank's rows of every parameter, on the host or (resident chunks) on the device: masters and gradients
            in the reductions' format for the optimizer, and values in the buffer's format where that is another one

Where a resident chunk is one rank's alone and has one format, the two sides are one: the optimizer updates the buffer,
each gradient is its master's as autograd made it, and a step copies nothing.

Rows are dealt to ranks as everywhere in `core.layout`, so masters are boxes: optimizers, checkpoints and other meshes
need to know nothing of chunks. All parameters of a chunk have one dtype and are shared by the same ranks, and either
all learn or none does. A chunk is equally large on all ranks, also where one has fewer experts than others: all follow
one plan, and what one rank lets go, others must, too.
"""

import math
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from core.compat import own_part
from core.gemini.absent import give_back, placeholder, withdraw
from core.gemini.states import COMPUTE, FREE, HOLD, READY_TO_REDUCE, State, require_move
from core.layout import largest_share
from core.mesh import AnyMesh, axis_size, data_axes, gradient_axes, shard_axes
from core.parallel.data import own_gradient
from core.pinned import host_empty

ALIGNED = 32
"""Parameters begin at multiples of so many elements: vector loads and compiled code rely on it."""


@dataclass(frozen=True)
class Sharers:
    """The ranks that hold copies of a parameter: all of data parallelism, or of an expert those of one place of ep.

    cut    axes of data parallelism that cut it
    ranks  over which its rows are dealt out
    sends  whether gradients are added up over several of them
    """

    cut: tuple[str, ...] = ()
    ranks: int = 1
    sends: bool = False


ALONE = Sharers()


class Away(Protocol):
    """The place below the host where a chunk lives (`core.gemini.disk`)."""

    def values(self, chunk: "Chunk") -> AbstractContextManager[Tensor]: ...

    def reopen(self, chunk: "Chunk") -> None: ...


class Waits(Protocol):
    """The place below the host where a chunk's gradient waits for its update (`core.gemini.waiting`)."""

    def hold(self, chunk: "Chunk") -> None:
        """Let `chunk.grad` be memory, with what waits of it."""
        ...

    def send(self, chunk: "Chunk") -> None:
        """Let what was added up there wait."""
        ...

    def absent(self, member: "Member") -> Tensor:
        """What stands for a member's gradient meanwhile."""
        ...


def sharers(mesh: AnyMesh, axes: Collection[str], shards: bool) -> Sharers:
    """Those of a parameter that these axes of the mesh cut.  shards: chunks are sharded, and not copied."""
    cut = tuple(axis for axis in data_axes(mesh) if axis in axes and axis_size(mesh, axis) > 1)
    ranks, summed = (math.prod(axis_size(mesh, a) for a in of(mesh, cut)) for of in (shard_axes, gradient_axes))
    return Sharers(cut, ranks if shards else 1, summed > 1)


class Member:
    """One parameter in its chunk.

    name       its first name in the model
    parameter  the one that the model holds, whatever its memory
    master     this rank's rows of its value, a leaf tagged with its layout; the optimizer updates it where it learns
    sharers    the ranks that hold it
    shape      of the largest part of it on any rank
    users      modules of which a forward or backward runs now
    """

    def __init__(
        self,
        name: str,
        parameter: nn.Parameter,
        master: Tensor,
        sharers: Sharers = ALONE,
        shape: tuple[int, ...] | None = None,
    ):
        self.name, self.parameter, self.master, self.sharers = name, parameter, master, sharers
        self.trainable = parameter.requires_grad
        self.tensor = own_part(parameter) if isinstance(parameter, DTensor) else parameter
        self.kind = type(self.tensor)
        self.shape = tuple(self.tensor.shape) if shape is None else shape
        self.state: State = FREE
        self.users = 0
        self.offset = self.own_offset = 0
        self.chunk: Chunk
        self.view: Tensor
        self.absent: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def num_elements(self) -> int:
        return self.tensor.numel()

    @property
    def buffer_elements(self) -> int:
        """Elements of its place in the buffer, with padding."""
        return aligned(math.prod(self.shape))

    @property
    def own_elements(self) -> int:
        """Elements of its place in the shard of each rank, with padding."""
        rows = [largest_share(self.shape[0], self.sharers.ranks)] if self.shape else []
        return aligned(math.prod([*rows, *self.shape[1:]]))

    def move(self, to: State) -> None:
        """Raises IllegalMove where its state does not lead there."""
        count = self.chunk.count
        count[self.state] -= 1
        self.state = require_move(self.name, self.state, to)
        count[to] += 1


class Chunk:
    """Members of one dtype and the same sharers, all trainable or none, in the order of their places in the buffer.

    values    [own] this rank's rows in the buffer's format; the masters themselves where the formats agree. None where
              a resident chunk's buffer is filled from masters of another format
    masters   [own] in the reductions' format, None for a frozen chunk; `grad` beside it, filled while `has_grad`
    resident  lives on the device for good, masters and gradients too
    alone     resident, and no other rank has gradients for it: they become the masters' without passing the buffer
    merged    alone, and the buffer is the shard
    away      where it lives, if it is not in memory; masters and values are then views of a file
    aside     gradients beside the buffer, laid out as in it, whose parameters are read again; those of `set_aside`
    waits     where its gradient waits, if that is not in memory; `grad` is then there while it is added up or used
    count     state -> how many members are in it
    """

    def __init__(self, index: int, members: Sequence[Member], device: torch.device, wide: torch.dtype):
        self.index, self.members, self.device, self.wide = index, list(members), device, wide
        self.dtype, self.trainable, self.sharers = members[0].dtype, members[0].trainable, members[0].sharers
        self.num_elements = self.own_elements = 0
        self.count = dict.fromkeys(State, 0) | {FREE: len(self.members)}
        for member in self.members:
            member.chunk = self
            member.offset, member.own_offset = self.num_elements, self.own_elements
            self.num_elements += member.buffer_elements
            self.own_elements += member.own_elements
        self.resident = self.alone = self.merged = self.is_filled = self.has_grad = False
        self.away: Away | None = None
        self.waits: Waits | None = None
        self.grad: Tensor | None = None
        self.aside: Tensor | None = None
        self.set_aside: list[Member] = []
        self.ready: torch.cuda.Event | None = None  # when it is filled
        self._filled_from = 0
        self._make_buffer()
        self._make_shard()

    @property
    def name(self) -> str:
        """The members' common place in the model, for people."""
        first, last = self.members[0].name, self.members[-1].name
        return first if first == last else f"{first} … {last}"

    @property
    def ranks(self) -> int:
        """Over which it is sharded."""
        return self.sharers.ranks

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_elements * self.dtype.itemsize

    @property
    def own_bytes(self) -> int:
        """Bytes of this rank's rows in the buffer's format: a fetch copies them from the host."""
        return self.own_elements * self.dtype.itemsize

    @property
    def in_use(self) -> bool:
        return self.count[COMPUTE] > 0

    @property
    def holds_gradients(self) -> bool:
        """True where a gradient stands in the buffer."""
        return self.count[READY_TO_REDUCE] > 0

    @property
    def ready_members(self) -> list[Member]:
        """The members whose gradient stands in the buffer."""
        return [m for m in self.members if m.state is READY_TO_REDUCE]

    # --- the buffer ---------------------------------------------------------------------------------------------------

    def _make_buffer(self) -> None:
        self.buffer = torch.empty(self.num_elements, dtype=self.dtype, device=self.device)
        for member in self.members:
            member.view = self.place_in(self.buffer, member)
            member.absent = placeholder(member.view)
        self.buffer.untyped_storage().resize_(0)
        for member in self.members:
            withdraw(member.tensor, member.name, member.absent)

    @property
    def source(self) -> Tensor:
        """The tensor [own] of this rank that the buffer is filled from."""
        found = self.masters if self.values is None else self.values
        assert found is not None
        return found

    def reading(self) -> AbstractContextManager[Tensor]:
        """`source` in the host's memory, or the device's, for the length of a block."""
        return nullcontext(self.source) if self.away is None else self.away.values(self)

    @property
    def is_outdated(self) -> bool:
        """True where the buffer may hold old values: masters move in every step, frozen parameters when loaded."""
        return self.is_filled and not self.merged and (self.trainable or self._filled_from != self._version)

    @property
    def _version(self) -> int:
        return sum(m.master._version for m in self.members)

    def allocate(self) -> None:
        """Give the buffer memory; what stands in it is undefined."""
        self.buffer.untyped_storage().resize_(self.num_bytes)

    def expose(self) -> None:
        """The buffer is filled: every parameter is the value in it."""
        self.is_filled, self._filled_from = True, self._version
        for member in self.members:
            if member.state is FREE:
                member.move(HOLD)
            give_back(member.tensor, member.kind, member.view)

    def hide(self) -> None:
        """The parameters cannot be read any more; the memory goes too, unless the chunk is resident."""
        self.is_filled = False
        for member in self.members:
            if member.state is not FREE:
                member.move(FREE)
            withdraw(member.tensor, member.name, member.absent)
        if not self.resident:
            self.buffer.untyped_storage().resize_(0)

    # --- the shard ----------------------------------------------------------------------------------------------------

    def _make_shard(self) -> None:
        self.masters = self._flat(self.wide) if self.trainable else None
        same = self.masters is not None and self.dtype == self.wide
        self.values: Tensor | None = self.masters if same else self._flat(self.dtype)
        for member in self.members:
            kept = self._own(self.masters if self.masters is not None else self.values, member)
            kept.copy_(member.master)
            member.master.data = kept
        self.refresh()

    def _flat(self, dtype: torch.dtype) -> Tensor:
        return host_empty(self.own_elements, dtype, self.device.type == "cuda").zero_()

    def _own(self, flat: Tensor | None, member: Member) -> Tensor:
        assert flat is not None
        return flat.narrow(0, member.own_offset, member.master.numel()).view(member.master.shape)

    def own_grad(self, member: Member) -> Tensor:
        """The reduced gradient of this rank's rows."""
        return self._own(self.grad, member)

    def reduced_grad(self, member: Member) -> Tensor:
        """The same, or what stands for it where it waits elsewhere."""
        return self.own_grad(member) if self.waits is None else self.waits.absent(member)

    def refresh(self) -> None:
        """The masters have moved: so do the values of another format that lie beside them."""
        if self.masters is not None and self.values is not None and self.values is not self.masters:
            self.values.copy_(self.masters)

    def make_grad(self) -> Tensor:
        """Memory for the gradient of the shard, beside the masters; what stands in it is undefined."""
        if self.waits is not None:
            self.waits.hold(self)
        elif self.grad is None:
            assert self.masters is not None
            if self.masters.device.type == "cpu":
                self.grad = host_empty(self.own_elements, self.wide, self.device.type == "cuda")
            else:
                self.grad = torch.empty_like(self.masters)
        assert self.grad is not None
        return self.grad

    def settle(self) -> None:
        """Let the shard live on the device from now on."""
        self.resident, self.alone = True, not self.sharers.sends
        if self.alone and (self.dtype == self.wide or not self.trainable):
            self._merge()
        elif self.masters is not None:
            self.masters = self.masters.to(self.device)
            for member in self.members:
                member.master.data = self._own(self.masters, member)
            self.values = self.masters if self.dtype == self.wide else None

    @torch.no_grad()
    def _merge(self) -> None:
        self.allocate()
        self.buffer.copy_(self.source)
        self.values = self.buffer
        self.masters = self.buffer if self.trainable else None
        for member in self.members:
            member.master.data = self._own(self.buffer, member)
        self.merged = True
        self.expose()

    def keep_grad(self, member: Member, grad: Tensor) -> None:
        """Give the master of a chunk that is alone its gradient, added to that of earlier microbatches."""
        if member.master.grad is None:
            member.master.grad = own_gradient(grad, self.wide)
        else:
            member.master.grad.add_(grad)

    def put_aside(self, member: Member, grad: Tensor) -> None:
        """Put a parameter's gradient beside the buffer, in which its value stays."""
        if self.aside is None:
            self.aside = torch.empty(self.num_elements, dtype=self.dtype, device=self.device)
        self.place_in(self.aside, member).copy_(grad)
        self.set_aside.append(member)

    def drop_aside(self) -> None:
        """Give back the memory beside the buffer."""
        self.aside = None
        self.set_aside.clear()

    def place_in(self, flat: Tensor, member: Member) -> Tensor:
        """A member's place in memory that is laid out as the buffer."""
        return flat.narrow(0, member.offset, member.num_elements).view(member.tensor.shape)

    def forget_grads(self) -> None:
        """Forget the gradients in the shard."""
        self.has_grad = False
        self.drop_aside()
        if self.alone:
            for member in self.members:
                member.master.grad = None


def aligned(num_elements: int) -> int:
    return -(-num_elements // ALIGNED) * ALIGNED
