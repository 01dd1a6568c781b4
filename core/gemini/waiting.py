"""Gradients that wait on a drive for their update: those that the host's budget does not hold.

    reduce  a gradient is added up in a *place* of the host, to what waits there of earlier microbatches. Its norm is
            taken there, and it goes to the drive, behind the slots
    clip    the norm is known, and by what the gradient is to be multiplied is noted
    update  it comes into a place, the next one meanwhile into the other, is multiplied, used and forgotten

There are `WAITING_PLACES` places, each as large as the largest of these gradients. What waits is of this process and of
this step: no record tells of it. Meanwhile the master's `grad` has no values (`core.gemini.absent`), and whoever clips
asks it for its norm (`core.optim.clip.Waiting`).
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Condition

import torch
from torch import Tensor

from core.config import UserError
from core.files import Damaged
from core.gemini.absent import absent_gradient
from core.gemini.chunk import Chunk, Member
from core.gemini.direct import Transfer
from core.gemini.drives import Drive
from core.gemini.timeline import WAITING_PLACES
from core.optim.clip import gradient_norms
from core.pinned import host_empty, whole_blocks


class _Known:
    """What is known of a member's gradient: a `core.optim.clip.Waiting`.

    taken    its norm, as it lies on the drive
    factors  by which it is to be multiplied, one after the other: each rounds
    """

    def __init__(self, gradients: "WaitingGradients", member: Member):
        self.gradients, self.member = gradients, member
        self.taken: Tensor | None = None
        self.factors: list[float] = []

    def norm(self) -> Tensor:
        if self.factors:
            self.gradients.multiply(self.member.chunk)
        assert self.taken is not None
        return self.taken

    def scale(self, factor: float) -> None:
        self.factors.append(factor)


class _Gradient:
    """A chunk's gradient, which has room in a drive's file.

    place    of the host, where it has one
    read     fills the place; `written` is the last write of the gradient
    absent   what stands for those of the members
    """

    def __init__(self, chunk: Chunk, drive: Drive, gradients: "WaitingGradients"):
        self.chunk, self.file = chunk, drive.file
        self.num_bytes = whole_blocks(chunk.own_elements * chunk.wide.itemsize)
        self.offset = drive.more(self.num_bytes)
        self.place: Tensor | None = None
        self.read: Transfer | None = None
        self.written: Transfer | None = None
        self.known = {member: _Known(gradients, member) for member in chunk.members}
        self.absent = {m: absent_gradient(m.master, m.name, known) for m, known in self.known.items()}


@dataclass(frozen=True, eq=False)
class _Leaving:
    place: Tensor
    written: Transfer


class WaitingGradients:
    """of         chunk -> its gradient, of those that wait
    land       returns when what is being copied from the device to a chunk's gradient is there
    under_way  gradients that may still be copied so while the next one is added up
    """

    def __init__(self, pinned: bool):
        self.of: dict[Chunk, _Gradient] = {}
        self.land: Callable[[Chunk], None] = lambda chunk: None
        self.under_way = 0
        self.places: list[Tensor] = []
        self._pinned = pinned
        self._with_room: dict[Chunk, _Gradient] = {}
        self._arriving: list[_Gradient] = []
        self._free: list[Tensor] = []
        self._leaving: list[_Leaving] = []
        self._changed = Condition()  # of free places and leaving ones: updates may run in another thread

    def follow(self, found: Mapping[Chunk, Drive]) -> None:
        """Let the gradients of these chunks wait from now on, and no others: between two steps.

        Raises UserError where a drive has no room for one.
        """
        self.forget()
        for chunk in self.of.keys() - found.keys():
            chunk.waits = None
        for chunk, drive in found.items():
            if chunk not in self._with_room:
                self._with_room[chunk] = _Gradient(chunk, drive, self)
            chunk.waits, chunk.grad = self, None
        self.of = {chunk: self._with_room[chunk] for chunk in found}
        while self._leaving:
            self._free_one(self._leaving[0])
        largest = max((one.num_bytes for one in self.of.values()), default=0)
        number = WAITING_PLACES if self.of else 0
        self.places.clear()  # before there are others
        self._free.clear()
        self.places = [host_empty(largest, torch.uint8, self._pinned, paged=True) for _ in range(number)]
        self._free = list(self.places)

    # --- reductions ---------------------------------------------------------------------------------------------------

    def hold(self, chunk: Chunk) -> None:
        one = self.of[chunk]
        if one in self._arriving:
            self._arriving.remove(one)
        if chunk.has_grad:
            self._begin(one)
        elif one.place is None:
            one.place = self._take()
        self._come(one)

    def send(self, chunk: Chunk) -> None:
        self._arriving.append(self.of[chunk])
        while len(self._arriving) > self.under_way:
            self._send(self._arriving.pop(0))

    def settle(self, only: Chunk | None = None) -> None:
        """Send what was added up, of one chunk or of all, without waiting for what comes next."""
        for one in [one for one in self._arriving if only is None or one.chunk is only]:
            self._arriving.remove(one)
            self._send(one)

    @torch.no_grad()
    def _send(self, one: _Gradient) -> None:
        """Begin to write it; its place is free when that is over."""
        self.land(one.chunk)
        assert one.place is not None
        members = [member for member in one.chunk.members if member.master.numel()]
        norms = gradient_norms([one.chunk.own_grad(member) for member in members])
        for member, norm in zip(members, norms, strict=True):
            one.known[member].taken = norm
        if one.written is not None:
            one.written.settle()  # of a step that was given up
        one.written = one.file.write(one.offset, one.place[: one.num_bytes])
        with self._changed:
            self._leaving.append(_Leaving(one.place, one.written))
            self._changed.notify_all()
        one.place = one.chunk.grad = None

    def absent(self, member: Member) -> Tensor:
        return self.of[member.chunk].absent[member]

    @torch.no_grad()
    def multiply(self, chunk: Chunk) -> None:
        """Multiply a gradient as was noted, and take its norms again."""
        self.hold(chunk)
        for member, known in self.of[chunk].known.items():
            _multiply(chunk.own_grad(member), known)
        self.send(chunk)
        self.settle()

    # --- updates ------------------------------------------------------------------------------------------------------

    @contextmanager
    def at_hand(self, chunk: Chunk, following: Chunk | None = None) -> Iterator[None]:
        """Within, the gradient of a chunk is in memory, multiplied; afterwards it is gone. Others are left alone.

        following  the chunk whose waiting gradient comes next, which is read meanwhile
        """
        if chunk not in self.of:
            yield
            return
        one = self.of[chunk]
        self._begin(one)
        self._come(one)
        try:
            if following is not None:
                self._begin(self.of[following])
            with torch.no_grad():
                for member, known in one.known.items():
                    if member.master.grad is not None:
                        member.master.grad = chunk.own_grad(member)
                        _multiply(member.master.grad, known)
            yield
        finally:
            for member in chunk.members:
                member.master.grad = None
            self._drop(one)

    def forget(self) -> None:
        """Nothing waits any more: the step is over, or does not take place."""
        self._arriving.clear()
        for one in self.of.values():
            if one.place is not None:
                self._drop(one)
            for known in one.known.values():
                known.taken = None
                known.factors.clear()

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _take(self) -> Tensor:
        """A place that nobody uses; waits for the earliest write, or another thread, where there is none."""
        while True:
            with self._changed:
                while not self._free and not self._leaving:
                    self._changed.wait()
                if self._free:
                    return self._free.pop()
                earliest = self._leaving[0]
            self._free_one(earliest)
            earliest.written.wait()

    def _free_one(self, leaving: _Leaving) -> None:
        """Return when it is written, however that went, and its place is free."""
        leaving.written.settle()
        with self._changed:
            if leaving in self._leaving:
                self._leaving.remove(leaving)
                self._free.append(leaving.place)
                self._changed.notify_all()

    def _begin(self, one: _Gradient) -> None:
        """Begin to read a gradient, where it has no place yet."""
        if one.place is not None:
            return
        assert one.written is not None
        checksums = one.written.wait()
        one.place = self._take()
        one.read = one.file.read(one.offset, one.place[: one.num_bytes], checksums)

    def _come(self, one: _Gradient) -> None:
        """Return when it is in its place.  Raises UserError for bytes that are not those that were written."""
        assert one.place is not None
        if one.read is not None:
            try:
                one.read.wait()
            except BaseException as failure:
                self._drop(one)
                if isinstance(failure, Damaged):
                    raise UserError(
                        f"{failure} (the gradient of {one.chunk.name}); go on from the last durable step, with --resume"
                    ) from None
                raise
        one.read = None
        elements = one.place[: one.chunk.own_elements * one.chunk.wide.itemsize]
        one.chunk.grad = elements.view(one.chunk.wide)

    def _drop(self, one: _Gradient) -> None:
        """Give its place back."""
        if one.read is not None:
            one.read.settle()
        assert one.place is not None
        with self._changed:
            self._free.append(one.place)
            self._changed.notify_all()
        one.place = one.read = one.chunk.grad = None


def _multiply(grad: Tensor, known: _Known) -> None:
    for factor in known.factors:
        grad.mul_(factor)
    known.factors.clear()
