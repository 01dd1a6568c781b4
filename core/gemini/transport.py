"""The transport of a chunk's values to its buffer, and of its gradients to its shard.

    fetch   this rank's rows, from the host or the shard on the device, into a message [own]; all-gathered over the
            ranks that share it into [ranks, own]; copied to each parameter's place. On one rank: one copy.
    reduce  the gradients, in the reductions' format, into a message [ranks, own]; reduce-scattered, all-reduced over
            replicas; added to the gradient of the shard, where earlier microbatches have left theirs; on to a drive,
            where it waits there for its update

Messages have their own memory, as large as the largest chunk needs, on the device for good.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from core.compat import without_modes
from core.gemini.chunk import Chunk, Member
from core.gemini.streams import Streams
from core.gemini.tier import DeviceTier
from core.mesh import gradient_axis, shard_axis, sub_mesh
from core.parallel.rows import paired_rows, row_length
from core.pinned import Places


@contextmanager
def beside_the_step() -> Iterator[None]:
    """Hide what is done inside from the model: neither autograd nor a selective checkpoint is to see it.

    A selective checkpoint matches the operators of the recomputation with those of the forward, and in the one a chunk
    may come that was there already in the other.
    """
    with torch.no_grad(), without_modes():
        yield


def message_bytes(chunks: Sequence[Sequence[Member]], wide: torch.dtype) -> tuple[int, int]:
    """Bytes of the messages for (fetches, reductions) on a rank's device: as the largest chunk needs.

    wide  format of reductions
    """
    fetched = reduced = 0
    for chunk in chunks:
        own, like, ranks = sum(m.own_elements for m in chunk), chunk[0], chunk[0].sharers.ranks
        if ranks > 1:
            fetched = max(fetched, own * like.dtype.itemsize * (1 + ranks))
        if like.sharers.sends and like.trainable:
            reduced = max(reduced, own * wide.itemsize * slots_of(ranks))
    return fetched, reduced


def slots_of(ranks: int) -> int:
    """Times a chunk's rows stand in the message of a reduction: whole, and where that is cut the own sum."""
    return ranks + (1 if ranks > 1 else 0)


class Transport:
    """shards: chunks are sharded over the ranks that share them; else each of those has all of them.

    beside  bytes of the device that are taken like those of messages: what the optimizer keeps there
    """

    def __init__(self, mesh: DeviceMesh, shards: bool, tier: DeviceTier, streams: Streams, beside: int = 0):
        self.mesh, self.shards, self.tier, self.streams, self.beside = mesh, shards, tier, streams, beside
        self._fetched: Tensor | None = None
        self._reduced: Tensor | None = None

    def message_bytes(self, chunks: Sequence[Sequence[Member]], wide: torch.dtype) -> int:
        """Bytes that the messages of chunks with these members need on the device."""
        return self.beside + sum(message_bytes(chunks, wide))

    def allocate(self, chunks: Sequence[Chunk]) -> None:
        """Take memory for messages, once."""
        sizes = message_bytes([chunk.members for chunk in chunks], chunks[0].wide)
        self.tier.take(self.beside + sum(sizes), "messages")
        self.begin(chunks)
        self._fetched, self._reduced = (torch.empty(n, dtype=torch.uint8, device=chunks[0].device) for n in sizes)

    def begin(self, chunks: Sequence[Chunk]) -> None:
        """Be ready for gradients of these chunks."""
        self._arriving: deque[_Arrival] = deque()
        self._landing = Places(max(chunk.own_elements * chunk.wide.itemsize for chunk in chunks))

    @property
    def messages(self) -> list[Tensor]:
        """The memory of messages."""
        return [message for message in (self._fetched, self._reduced) if message is not None]

    # --- to the device ------------------------------------------------------------------------------------------------

    @beside_the_step()
    def fetch(self, chunk: Chunk) -> None:
        """Fill the buffer, whose bytes are booked; `chunk.ready` says when it is."""
        with self.streams.fetching(), chunk.reading() as source:
            chunk.allocate()
            if chunk.ranks == 1:
                chunk.buffer.copy_(source, non_blocking=True)
            else:
                self._gather(chunk, source)
            if not chunk.resident:
                self.tier.fetched_bytes += chunk.own_bytes
            chunk.ready = self.streams.mark()
            if chunk.away is not None:  # what it was copied from is needed for others
                self.streams.host_waits(chunk.ready)
        chunk.expose()

    def _gather(self, chunk: Chunk, source: Tensor) -> None:
        assert self._fetched is not None
        message = self._fetched[: chunk.own_bytes * (1 + chunk.ranks)].view(chunk.dtype)
        own, whole = message[: chunk.own_elements], message[chunk.own_elements :]
        own.copy_(source, non_blocking=True)
        dist.all_gather_into_tensor(whole, own, group=self._shard(chunk).get_group())
        slots = whole.view(chunk.ranks, chunk.own_elements)
        for member in chunk.members:
            for slot, rows in paired_rows(self._slots_of(slots, member), member.view):
                rows.copy_(slot)

    def _slots_of(self, slots: Tensor, member: Member) -> Tensor:
        return slots.narrow(1, member.own_offset, row_length(member.tensor, member.sharers.ranks))

    def _shard(self, chunk: Chunk) -> DeviceMesh:
        return shard_axis(self.mesh, chunk.sharers.cut)

    # --- to the shard -------------------------------------------------------------------------------------------------

    @beside_the_step()
    def reduce(self, chunk: Chunk) -> None:
        """Add the gradients that stand in the buffer, those of its `ready_members`, or beside it, to the shard's.

        Other members count as zero. All ranks that share the chunk must call it for the same chunks in the same order.
        """
        gradients, ready = chunk.buffer, chunk.ready_members
        if chunk.aside is not None:
            gradients, ready = chunk.aside, list(chunk.set_aside)
        if chunk.away is not None:
            chunk.away.reopen(chunk)
        with self.streams.reducing():
            if chunk.sharers.sends:
                self._add(chunk, self._reduce(chunk, gradients, ready), chunk.members)
            elif ready:
                self._add(chunk, gradients, ready)
            if chunk.aside is not None:
                self.streams.keep([chunk.aside])
            if chunk.waits is not None and (ready or chunk.sharers.sends):
                chunk.waits.send(chunk)
        chunk.drop_aside()

    def zero(self, chunk: Chunk) -> None:
        """No gradient has come: it is zero."""
        chunk.make_grad().zero_()
        chunk.has_grad = True
        if chunk.waits is not None:
            chunk.waits.send(chunk)

    def _reduce(self, chunk: Chunk, gradients: Tensor, ready: list[Member]) -> Tensor:
        assert self._reduced is not None
        own_bytes, ranks = chunk.own_elements * chunk.wide.itemsize, chunk.ranks
        message = self._reduced[: own_bytes * slots_of(ranks)].view(chunk.wide)
        whole = message[: chunk.own_elements * ranks]
        slots = whole.view(ranks, chunk.own_elements)
        for member in chunk.members:
            own = slots.narrow(1, member.own_offset, member.own_elements)
            if member not in ready:
                own.zero_()
                continue
            for slot, rows in paired_rows(self._slots_of(slots, member), chunk.place_in(gradients, member)):
                slot.copy_(rows)
        if not self.shards:
            dist.all_reduce(whole, group=gradient_axis(self.mesh, chunk.sharers.cut).get_group())
            return whole
        reduced = whole
        if ranks > 1:
            reduced = message[chunk.own_elements * ranks :]
            dist.reduce_scatter_tensor(reduced, whole, group=self._shard(chunk).get_group())
        replicas = sub_mesh(self.mesh, "dp_replicate")
        if replicas.size() > 1:
            dist.all_reduce(reduced, group=replicas.get_group())
        return reduced

    def _add(self, chunk: Chunk, values: Tensor, members: list[Member]) -> None:
        """values [own] to the gradient of the shard, for these members."""
        first, grad = not chunk.has_grad, chunk.make_grad()
        chunk.has_grad = True
        if len(members) == len(chunk.members):
            self._put(chunk, grad, values, first)
            return
        if first:
            grad.zero_()
        for member in members:
            place = slice(member.own_offset, member.own_offset + row_length(member.tensor, chunk.ranks))
            self._put(chunk, grad[place], values[place], False)

    def _put(self, chunk: Chunk, grad: Tensor, values: Tensor, first: bool) -> None:
        if not chunk.resident:
            self.tier.returned_bytes += values.numel() * values.itemsize
            if self.streams.on_cuda:
                self._send_home(grad, values, first)
                return
        grad.copy_(values) if first else grad.add_(values)

    def _send_home(self, grad: Tensor, values: Tensor, first: bool) -> None:
        """A copy that the host does not wait for: of a first gradient to its place, where that has its format."""
        in_place = first and grad.dtype == values.dtype
        there = grad if in_place else self._landing.take(values, lambda: self._land(self._arriving.popleft()))
        there.copy_(values, non_blocking=True)
        event = self.streams.mark()
        assert event is not None
        self._arriving.append(_Arrival(event, grad, None if in_place else there, first))

    def _land(self, arrival: "_Arrival") -> None:
        """Wait for a gradient, and add it to what is in its place."""
        arrival.event.synchronize()
        if arrival.values is not None:
            arrival.grad.copy_(arrival.values) if arrival.first else arrival.grad.add_(arrival.values)
            self._landing.give(arrival.values)

    def land(self, chunk: Chunk) -> None:
        """Return when the gradients of a chunk are in its shard."""
        if chunk.grad is None:
            return
        memory = chunk.grad.untyped_storage().data_ptr()  # what arrives may be a part of it
        while any(arrival.grad.untyped_storage().data_ptr() == memory for arrival in self._arriving):
            self._land(self._arriving.popleft())

    def forget(self) -> None:
        """No gradient that is on its way counts: the step was given up."""
        while self._arriving:
            arrival = self._arriving.popleft()
            arrival.event.synchronize()  # until then its place is not free
            if arrival.values is not None:
                self._landing.give(arrival.values)

    def finish(self) -> None:
        """Return when every gradient is in its shard."""
        while self._arriving:
            self._land(self._arriving.popleft())
        self.streams.join()


class _Arrival(NamedTuple):
    """A gradient on its way to the host.

    values  where it arrives; None: in its place
    first   it takes the place of what stands there, and is not added to it
    """

    event: torch.cuda.Event
    grad: Tensor
    values: Tensor | None
    first: bool
