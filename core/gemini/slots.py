"""A chunk's two slots on the disk: what lies where in them, which one has the latest values, which one is durable.

A slot holds this rank's part of everything that is kept of a chunk, in up to four regions that are read apart:

    masters   in the reductions' format; of a frozen chunk there are none
    values    in the buffer's format, where that is another one or the chunk is frozen
    averages  of the masters, in their format and order, where there are any
    state     of the optimizer, whatever it keeps: tensor behind tensor

Whoever updates reads the latest slot whole and writes the one that the last durable generation does not hold, so no
byte of that generation is ever written over. Whoever fetches reads one region.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.gemini.chunk import Chunk, Member
from core.pinned import whole_blocks

STATE_ALIGNMENT = 64
"""Bytes: tensors of the state begin at multiples of it."""

AVERAGE = "average of weights"
"""The key of a master's average: no optimizer's state has one of this name."""

NARROWED_ELEMENTS = 1 << 18
"""So many averages at once are brought into the buffer's format."""


class Part(NamedTuple):
    """A tensor in a slot: of a parameter its value (key ""), its average, or one of the optimizer's state.

    offset  of its first byte from the beginning of the slot
    """

    name: str
    key: str
    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return self.dtype.itemsize * torch.Size(self.shape).numel()

    def of(self, slot: Tensor) -> Tensor:
        """Its view in a slot's bytes [slot_bytes]."""
        return slot[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)


class Region(NamedTuple):
    """Bytes of a slot from `begin` to `end`, whole blocks."""

    begin: int
    end: int


class Slots:
    """live  what the optimizer keeps of each member, its own dict; tensors of it with dims go to the slots

    kept       averages of the masters, by name; none where nobody averages
    parts      of values and of the state
    file       the name of the one on whose drive they lie
    base       of the first slot in it; the second one follows
    latest     the slot with the latest values, durable that of the last generation
    checksums  of each slot, by region
    """

    def __init__(self, chunk: Chunk, live: dict[Member, dict[str, Any]], kept: Mapping[str, Tensor] | None = None):
        self.chunk, self.live, self.file, self.base = chunk, live, "", 0
        self.kept = kept or {}
        self.state = {member: _with_dims(kept) for member, kept in live.items()}
        self.regions: list[Region] = []
        self.parts: list[Part] = []
        self.latest = self.durable = 0
        self.checksums: list[list[list[int]]] = [[], []]
        self._end = 0
        self._masters = self._flat(chunk.wide) if chunk.trainable else None
        narrow = not chunk.trainable or chunk.dtype != chunk.wide
        self._values = self._flat(chunk.dtype) if narrow else None
        of_values = self._masters if self._masters is not None else self._values
        assert of_values is not None
        self._lay_out("", of_values, chunk.wide if chunk.trainable else chunk.dtype)
        self.averages = self._flat(chunk.wide) if self.kept and chunk.trainable else None
        if self.averages is not None:
            self._lay_out(AVERAGE, self.averages, chunk.wide)
        self._lay_out_state()
        self.num_bytes = self._end

    @property
    def fetched(self) -> Region:
        """The region that a fetch reads."""
        found = self._values or self._masters
        assert found is not None
        return found

    @property
    def updated(self) -> list[Region]:
        """The regions that an update reads: values of another format than the masters' are made of those."""
        return [region for region in self.regions if self._masters is None or region is not self._values]

    @property
    def writes_to(self) -> int:
        """The slot that may be written."""
        return 1 - self.durable

    def offset(self, slot: int) -> int:
        """Of a slot in the file."""
        return self.base + slot * self.num_bytes

    def point(self, slot: Tensor) -> None:
        """Let masters, values and state of the chunk be those bytes [slot_bytes] from now on."""
        chunk = self.chunk
        masters, values = self._masters, self._values
        chunk.masters = None if masters is None else self._own(slot, masters, chunk.wide)
        chunk.values = chunk.masters if values is None else self._own(slot, values, chunk.dtype)
        for tensor, part in self.tensors():
            tensor.data = part.of(slot)

    def fill(self, slot: Tensor) -> None:
        """Copy what the chunk has now into those bytes."""
        self.take_state()
        for tensor, part in self.tensors():
            part.of(slot).copy_(tensor)
        masters = self._masters
        if self._values is not None and masters is not None:
            self._own(slot, self._values, self.chunk.dtype).copy_(self._own(slot, masters, self.chunk.wide))

    def fetched_values(self, region: Tensor) -> Tensor:
        """[own] what fills the buffer, of the bytes of the region that a fetch reads."""
        return region[: self.chunk.own_elements * self.chunk.dtype.itemsize].view(self.chunk.dtype)

    def fetched_averages(self, region: Tensor) -> Tensor:
        """[own] the averages in the buffer's format, of the bytes of their region, in which they are brought into it.

        In order, some at a time: none is written over before it is read.
        """
        values = self.fetched_values(region)
        if self.chunk.dtype != self.chunk.wide:
            wide = region[: self.chunk.own_elements * self.chunk.wide.itemsize].view(self.chunk.wide)
            for narrow, averages in zip(values.split(NARROWED_ELEMENTS), wide.split(NARROWED_ELEMENTS), strict=True):
                narrow.copy_(averages.to(narrow.dtype))
        return values

    def settle_state(self) -> None:
        """The optimizer may have put other tensors in the place of its own: their values go to the slot."""
        for member, key, tensor in self._now():
            kept = self.state[member][key]
            if tensor is not kept:
                kept.copy_(tensor)
                self.live[member][key] = kept

    def take_state(self) -> None:
        """Of a chunk in no slot the state is what the optimizer has now: other tensors, or such on the device."""
        for member, key, tensor in self._now():
            self.state[member][key] = tensor

    def _now(self) -> Iterator[tuple[Member, str, Tensor]]:
        """The tensors that the optimizer keeps."""
        for member, live in self.live.items():
            for key, tensor in _with_dims(live).items():
                kept = self.state[member].get(key)
                if kept is None or kept.shape != tensor.shape:
                    raise RuntimeError(
                        f"{member.name}: the optimizer's {key} was not there, or of another shape, before"
                    )
                yield member, key, tensor

    @property
    def numbers(self) -> dict[str, dict[str, Any]]:
        """See `numbers_of`."""
        return numbers_of([self])

    def set_numbers(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        for member, live in self.live.items():
            for key, value in found.get(member.name, {}).items():
                if isinstance(live[key], Tensor):
                    live[key].fill_(value)
                else:
                    live[key] = value

    def tensors(self) -> Iterator[tuple[Tensor, Part]]:
        """What is kept, and its place."""
        of = {member.name: member for member in self.chunk.members}
        for part in self.parts:
            member = of[part.name]
            if part.key == AVERAGE:
                yield self.kept[part.name], part
            else:
                yield (self.state[member][part.key] if part.key else member.master), part

    def _own(self, slot: Tensor, region: Region, dtype: torch.dtype) -> Tensor:
        return slot[region.begin : region.begin + self.chunk.own_elements * dtype.itemsize].view(dtype)

    def _flat(self, dtype: torch.dtype) -> Region:
        return self._region(self.chunk.own_elements * dtype.itemsize)

    def _region(self, num_bytes: int) -> Region:
        found = Region(self._end, self._end + whole_blocks(num_bytes))
        self._end = found.end
        self.regions.append(found)
        return found

    def _lay_out(self, key: str, region: Region, dtype: torch.dtype) -> None:
        """Of each member what lies flat in a region."""
        for member in self.chunk.members:
            offset = region.begin + member.own_offset * dtype.itemsize
            self.parts.append(Part(member.name, key, offset, member.master.dtype, tuple(member.master.shape)))

    def _lay_out_state(self) -> None:
        offset = self._end
        for member, tensors in self.state.items():
            for key, tensor in tensors.items():
                self.parts.append(Part(member.name, key, offset, tensor.dtype, tuple(tensor.shape)))
                offset += -(-tensor.nbytes // STATE_ALIGNMENT) * STATE_ALIGNMENT
        if offset > self._end:
            self._region(offset - self._end)


def numbers_of(slots: Iterable[Slots]) -> dict[str, dict[str, Any]]:
    """What the optimizer keeps beside tensors with dims (how many steps it has taken): name -> key -> value.

    Those on a device are read together.
    """
    found = {
        member.name: {key: value for key, value in kept.items() if _is_number(value)}
        for one in slots for member, kept in one.live.items()
    }  # fmt: skip
    alike: dict[tuple[torch.device, torch.dtype], list[tuple[dict[str, Any], str]]] = {}
    for kept in found.values():
        for key, value in kept.items():
            if isinstance(value, Tensor):
                alike.setdefault((value.device, value.dtype), []).append((kept, key))
    for places in alike.values():
        values = torch.stack([kept[key] for kept, key in places]).tolist()
        for (kept, key), value in zip(places, values, strict=True):
            kept[key] = value
    return found


def _with_dims(kept: Mapping[str, Any]) -> dict[str, Tensor]:
    return {key: value for key, value in kept.items() if isinstance(value, Tensor) and value.ndim}


def _is_number(value: Any) -> bool:
    return value is None or isinstance(value, bool | int | float) or (isinstance(value, Tensor) and not value.ndim)
