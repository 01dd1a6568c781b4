"""The disk below the host: chunks whose masters and optimizer state lie in a file, and a durable copy of all others.

    fetch    a chunk's values come from the file into a *place* of the host, and from there to the device
    update   masters and state come into a place, the optimizer steps over them there, and the place goes to the chunk's
             other slot; the next chunk is read meanwhile, and the one before it written. Where nothing stands between a
             gradient and its update (no clipping, no loss scale), another thread does so as gradients become final,
             beside the backward; the step takes those slots at its end, or, where it is skipped, leaves them
    commit   what lives in memory is written too, from where it lies: where each step is made durable, as soon as it is
             updated. Another thread waits until all of it is on the disk, beside the next forward and backward; then a
             record says which slots hold the step. The next updates wait for that

There are `PLACES` places, each as large as the largest slot, made once: all that the host has of chunks on the disk
beside their gradients, which may wait on the disk, too (`core.gemini.waiting`). The last of them takes values that are
fetched, as many ahead as there is room for. Between its uses a chunk's masters and state are views of the mapped file,
so that whoever looks at them by name (a checkpoint) needs to know nothing of the disk, once `confirm` has returned; a
step of training never does. What lives in the host's memory lies there as in a slot, in pages of its own, from which
the drive takes it.

A generation is a step whose record (`core.gemini.generation`) is on the disk. Its slots are not written again before
the next one's record is there, so a process that is killed at any moment goes on from it, or from the one before it
where the next step's updates have not begun. Two records are kept, turn by turn: with several ranks one may have the
step that another has not come to.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.config import UserError
from core.files import Damaged
from core.gemini.area import Area
from core.gemini.chunk import Chunk
from core.gemini.direct import LATER, NOW, SOON, DirectFile, Transfer
from core.gemini.drives import Drive, Folders
from core.gemini.generation import Generation
from core.gemini.residency import PLACES
from core.gemini.search import Chunking
from core.gemini.slots import Slots
from core.gemini.waiting import WaitingGradients
from core.optim.sharded import make_state
from core.pinned import host_empty
from core.streams import take_device

GO_ON = "the drive has lost it: go on from a checkpoint, with --resume and another --gemini.disk"

FETCHES = ("fetch", "prefetch")


class _Read(NamedTuple):
    place: Tensor
    transfers: list[Transfer]


@dataclass(frozen=True, eq=False)
class _Write:
    """place: free when it is over; None: of memory in which the chunk lives"""

    slots: Slots
    slot: int
    place: Tensor | None
    transfers: list[Transfer]


class Disk:
    """folders    of this rank, which the process holds
    drives     of those, with a file of this process in each
    device     where the model computes: a GPU copies from the places by itself
    every      steps from one that is made durable to the next
    early      chunks whose update has begun before the step's end -> what says when it is over
    housed     chunks that live in the host's memory -> that, laid out as a slot
    waiting    gradients that wait for their update on the drives
    agree      returns when all ranks have made a step durable: only then may the slots of the one before it be written
    ranks      that are durable together
    averages   of masters, by name: they lie with them
    shows_averages  what is fetched are those
    """

    def __init__(self, folders: Folders, device: torch.device, optimizer: torch.optim.Optimizer, every: int):
        self.optimizer, self.pinned, self.folders, self.every = optimizer, device.type == "cuda", folders, every
        self.agree: Callable[[], object] = lambda: None
        self.ranks = 1
        self.averages: Mapping[str, Tensor] = {}
        self.shows_averages = False
        self.drives: list[Drive] = folders.drives()
        self.slots: dict[Chunk, Slots] = {}
        self.away: set[Chunk] = set()
        self.touched: set[Chunk] = set()  # since the last generation
        self.order: Sequence[Chunk] = ()  # in which those on the disk are fetched before the updates
        self._cursor = 0
        self.copies_at_once = False  # of what lives in memory: the step is made durable, and so was the one before it
        self.updates = False  # values are being replaced: what is fetched next may be old still
        self._drive: dict[str, Drive] = {drive.file.path.name: drive for drive in self.drives}
        self.housed: dict[Chunk, Tensor] = {}
        self.waiting = WaitingGradients(self.pinned)
        self._places: list[Tensor] = []
        self._free: list[Tensor] = []
        self._area: Area  # of values
        self._writes: list[_Write] = []
        self._reads: dict[Chunk, _Read] = {}  # of whole slots
        self._ahead: dict[Chunk, _Read] = {}  # of values
        self.early: dict[Chunk, Future[None]] = {}
        self._coming: deque[Chunk] = deque()  # those of them that have not been read
        self._before: dict[Chunk, dict[str, dict[str, Any]]] = {}  # numbers of their optimizer's state
        self._returned: set[Chunk] = set()  # whose gradients were not final, though they were taken for it
        self._updater, self._committer = (
            ThreadPoolExecutor(1, name, initializer=take_device, initargs=(device,)) for name in ("updates", "commits")
        )
        self._committed: Future[None] | None = None  # over when the last step that was committed is durable
        self._lock = RLock()  # of places and of what is under way

    @property
    def place_bytes(self) -> int:
        """Bytes of the host for places."""
        return sum(place.nbytes for place in (*self._places, self._area.memory, *self.waiting.places))

    @property
    def storages(self) -> list[Tensor]:
        """Memory that is the disk's: places and the mapped file."""
        places = [*self._places, self._area.memory, *self.waiting.places]
        return [*places, *self.housed.values(), *(drive.bytes for drive in self.drives)]

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes read and written so far."""
        files = [drive.file for drive in self.drives]
        return sum(file.read_bytes for file in files), sum(file.written_bytes for file in files)

    # --- before the first step ----------------------------------------------------------------------------------------

    @torch.no_grad()
    def add(self, chunk: Chunk, away: bool, drive: Drive) -> None:
        """Give a chunk its slots, with its values and the state before the first step; `away`: it lives there."""
        if chunk.trainable:
            make_state(self.optimizer, [member.master for member in chunk.members])
        live = {m: self.optimizer.state.get(m.master, {}) for m in chunk.members} if chunk.trainable else {}
        slots = self.slots[chunk] = Slots(chunk, live, self.averages)
        slots.file, slots.base = drive.file.path.name, drive.take(2 * slots.num_bytes)
        self.touched.add(chunk)
        if away:
            place = host_empty(slots.num_bytes, torch.uint8, False, paged=True)
            slots.fill(place)
            self._written(_Write(slots, slots.latest, None, self._write(slots, slots.latest, place, NOW)))
            self._leave(chunk)

    def settle(self) -> None:
        """All chunks have been added: make the places."""
        largest = max(slots.num_bytes for slots in self.slots.values())
        self._places = [host_empty(largest, torch.uint8, self.pinned, paged=True) for _ in range(PLACES - 1)]
        self._free, self._area = list(self._places), Area(largest, self.pinned)

    @torch.no_grad()
    def house(self, chunk: Chunk) -> None:
        """Lay out a chunk that lives in the host's memory as in a slot."""
        slots = self.slots[chunk]
        memory = host_empty(slots.num_bytes, torch.uint8, self.pinned, paged=True)
        slots.fill(memory)
        slots.point(memory)
        self.housed[chunk] = memory

    def let_wait(self, chunks: Iterable[Chunk]) -> None:
        """Let the gradients of these chunks wait for their updates on the drives of their slots, and no others.

        Raises UserError where there is no room for them.
        """
        self.waiting.follow({chunk: self._drive[self.slots[chunk].file] for chunk in chunks})

    def _leave(self, chunk: Chunk) -> None:
        """From now on the chunk lives on the disk, where its values are."""
        self.away.add(chunk)
        chunk.away = self
        self._look(chunk)

    @torch.no_grad()
    def send(self, chunk: Chunk) -> None:
        """Let a chunk that lives in memory live on the disk."""
        self._copy(chunk)
        self._until_written(self.slots[chunk])
        self.housed.pop(chunk, None)
        self._leave(chunk)

    @torch.no_grad()
    def bring(self, chunk: Chunk) -> None:
        """Let a chunk that lives on the disk live in memory."""
        read, slots = self._read_whole(chunk), self.slots[chunk]
        self._in_use(chunk, read, self._free.append)
        memory = host_empty(slots.num_bytes, torch.uint8, self.pinned, paged=True)
        memory.copy_(read.place[: slots.num_bytes])
        self._free.append(read.place)
        slots.point(memory)
        self.housed[chunk] = memory
        chunk.refresh()
        self.away.discard(chunk)
        chunk.away = None
        self.touched.add(chunk)

    def _look(self, chunk: Chunk) -> None:
        """Let the chunk's tensors be views of the mapped file, of its latest slot."""
        slots = self.slots[chunk]
        begin = slots.offset(slots.latest)
        slots.point(self._drive[slots.file].bytes[begin : begin + slots.num_bytes])

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _place(self) -> Tensor:
        """A place that nobody uses; waits for the earliest writes where there is none."""
        while True:
            with self._lock:
                if self._free:
                    return self._free.pop()
                write = next(write for write in self._writes if write.place is not None)
            self._land(write)

    def _begun(self, slots: Slots | None = None) -> list[_Write]:
        """The writes, of a chunk or of all, that nobody has waited for."""
        with self._lock:
            return [write for write in self._writes if slots is None or write.slots is slots]

    def _until_written(self, slots: Slots) -> None:
        """Return when the latest slot is written."""
        for write in self._begun(slots):
            self._land(write)

    def _read_whole(self, chunk: Chunk) -> _Read:
        """Begin to read what an update reads of the latest slot of a chunk, into a place."""
        slots = self.slots[chunk]
        self._until_written(slots)
        place, begin, sums = self._place(), slots.offset(slots.latest), slots.checksums[slots.latest]
        wanted = [(k, region) for k, region in enumerate(slots.regions) if region in slots.updated]
        file = self._file(slots)
        return _Read(place, [file.read(begin + a, place[a:b], sums[k]) for k, (a, b) in wanted])

    def _read_values(self, chunk: Chunk, urgency: int) -> _Read | None:
        """Begin to read what fills a chunk's buffer; None where there is no room for it."""
        slots = self.slots[chunk]
        self._until_written(slots)
        averages = slots.averages if self.shows_averages else None
        region = averages or slots.fetched
        begin, end = region
        piece, sums = self._area.take(end - begin), slots.checksums[slots.latest]
        if piece is None:
            return None
        of_region = sums[slots.regions.index(region)]
        return _Read(piece, [self._file(slots).read(slots.offset(slots.latest) + begin, piece, of_region, urgency)])

    def _write(self, slots: Slots, slot: int, memory: Tensor, urgency: int = SOON) -> list[Transfer]:
        file = self._file(slots)
        return [file.write(slots.offset(slot) + a, memory[a:b], urgency) for a, b in slots.regions]

    def _file(self, slots: Slots) -> DirectFile:
        return self._drive[slots.file].file

    def _land(self, write: _Write) -> None:
        """Wait for a write.  Raises what went wrong there, whoever asks."""
        for transfer in write.transfers:
            transfer.settle()
        with self._lock:
            if write in self._writes:
                self._written(write)
                self._writes.remove(write)
                if write.place is not None:
                    self._free.append(write.place)

    def _written(self, write: _Write) -> None:
        write.slots.checksums[write.slot] = [transfer.wait() for transfer in write.transfers]

    def drain(self) -> None:
        """Return when all that was written has gone to the drive."""
        for write in self._begun():
            self._land(write)

    @contextmanager
    def showing_averages(self) -> Iterator[None]:
        """Within, between two steps, what is fetched from the disk are averages."""
        self.forget_ahead()
        self.shows_averages = True
        try:
            yield
        finally:
            self.forget_ahead()
            self.shows_averages = False

    def forget_ahead(self) -> None:
        """What was read ahead is of no use any more: it becomes old."""
        while self._ahead:
            self._area.give(_settled(self._ahead.popitem()[1]))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Surround the updates of a step, within which nothing is read ahead: it may be old still."""
        self._until_durable()
        self.forget_ahead()
        self.updates, self._cursor = True, 0
        try:
            yield
        finally:
            self.updates = self.copies_at_once = False

    # --- steps --------------------------------------------------------------------------------------------------------

    @contextmanager
    def values(self, chunk: Chunk) -> Iterator[Tensor]:
        """What fills a chunk's buffer [own], for the length of the block; what is fetched next is read behind it."""
        self.reopen(chunk)
        read = self._ahead.pop(chunk, None) or self._read_values(chunk, NOW)
        while read is None:  # what was read ahead is not needed now
            self._area.give(_settled(self._ahead.pop(max(self._ahead, key=self._place_in_order))))
            read = self._read_values(chunk, NOW)
        if not self.updates:
            self._go_on_behind(chunk)
        self._read_ahead()
        self._in_use(chunk, read, self._area.give)
        slots = self.slots[chunk]
        shows_averages = self.shows_averages and slots.averages is not None
        try:
            yield (slots.fetched_averages if shows_averages else slots.fetched_values)(read.place)
        finally:
            self._area.give(read.place)
        self._read_ahead()

    def _place_in_order(self, chunk: Chunk) -> int:
        """How many fetches come before the chunk's next one as planned; more than all where none does."""
        order = [*self.order[self._cursor :], *self.order[: self._cursor]]
        return next((place for place, one in enumerate(order) if one is chunk), len(order))

    def _go_on_behind(self, chunk: Chunk) -> None:
        """Set the cursor behind a chunk's next fetch in the planned order."""
        place = self._place_in_order(chunk)
        if place < len(self.order):
            self._cursor = (self._cursor + place) % len(self.order) + 1

    def _read_ahead(self) -> None:
        """Begin to read what is fetched next, as planned and before the updates, as far as there is room."""
        passed: set[Chunk] = set()
        for chunk in self.order[self._cursor :] if not self.updates else ():
            if chunk in passed or chunk in self.early or self._begun(self.slots[chunk]):
                return
            passed.add(chunk)
            if chunk not in self._ahead:
                read = self._read_values(chunk, SOON)
                if read is None:
                    return
                self._ahead[chunk] = read

    def follow(self, chunks: Sequence[Chunk], planned: Chunking) -> None:
        """Let the chunks live where the plan says, and read ahead in its order."""
        for chunk in chunks:
            is_there, is_to_be = chunk in self.away, chunk.index in planned.plan.on_disk
            if is_there and not is_to_be:
                self.bring(chunk)
            elif is_to_be and not is_there:
                self.send(chunk)
            if chunk.index in planned.plan.resident:  # from here on it lives on the device
                self.housed.pop(chunk, None)
            elif not is_to_be and chunk not in self.housed:
                self.house(chunk)
        self.let_wait(chunks[index] for index in sorted(planned.plan.waiting))
        first = next((k for k, moment in enumerate(planned.trace.moments) if moment.kind == "update"), None)
        fetched = [move.chunk for moves in planned.plan.moves[:first] for move in moves if move.kind in FETCHES]
        self.order = [chunks[index] for index in fetched if chunks[index] in self.away]

    @contextmanager
    def at_hand(self, chunk: Chunk, following: Chunk | None, awaited: Chunk | None = None) -> Iterator[None]:
        """Within, masters, state and gradient of a chunk are in memory; what becomes of them is written afterwards.

        following  the chunk on the disk that comes next, which is read meanwhile
        awaited    the same of waiting gradients
        """
        with self.waiting.at_hand(chunk, awaited), self._slots_at_hand(chunk, following):
            yield

    @contextmanager
    def _slots_at_hand(self, chunk: Chunk, following: Chunk | None) -> Iterator[None]:
        if chunk not in self.away:
            yield
            if chunk in self.housed:
                self.slots[chunk].settle_state()
            self.touched.add(chunk)
            if self.copies_at_once:
                self._copy(chunk)
                self.touched.discard(chunk)
            return
        slots = self.slots[chunk]
        read = self._reads.pop(chunk, None) or self._read_whole(chunk)
        self._in_use(chunk, read, self._free.append)
        if following is not None:
            self._reads[following] = self._read_whole(following)
        slots.point(read.place)
        try:
            yield
            slots.settle_state()
        except BaseException:
            self._free.append(read.place)
            self._look(chunk)
            raise
        slots.latest = slots.writes_to
        self._writes.append(_Write(slots, slots.latest, read.place, self._write(slots, slots.latest, read.place)))
        self.touched.add(chunk)
        self._look(chunk)

    # --- updates before the step's end --------------------------------------------------------------------------------

    def may_begin(self, chunk: Chunk) -> bool:
        """Return whether an update of the chunk can begin and yet be given up.

        It can be where its latest slot is the durable one, or about to be: that stays as it is, and the update fills
        the other.
        """
        slots = self.slots[chunk]
        is_kept = slots.latest == slots.durable or self._committed is not None
        return chunk in self.away and is_kept and chunk not in self.early and chunk not in self._returned

    def begin_update(self, chunk: Chunk, step: Callable[[], None]) -> None:
        """Let another thread update a chunk of which all gradients are final.

        step  updates its masters and state, which are at hand meanwhile
        """
        self._before[chunk] = self.slots[chunk].numbers
        self._coming.append(chunk)
        self.early[chunk] = self._updater.submit(self._update, chunk, step)

    def _update(self, chunk: Chunk, step: Callable[[], None]) -> None:
        slots = self.slots[chunk]
        committed = self._committed
        if committed is not None:
            committed.result()
        self._coming.popleft()
        read = self._reads.pop(chunk, None) or self._read_whole(chunk)
        self._in_use(chunk, read, self._free.append)
        if self._coming and self._free:
            self._reads[self._coming[0]] = self._read_whole(self._coming[0])
        slots.point(read.place)
        try:
            step()
            slots.settle_state()
        except BaseException:
            self._free.append(read.place)
            self._look(chunk)
            raise
        with self._lock:
            slot = slots.writes_to
            self._writes.append(_Write(slots, slot, read.place, self._write(slots, slot, read.place)))
        self._look(chunk)

    def wait(self) -> None:
        """Return when no update runs beside this thread."""
        wait(self.early.values())

    def accept(self, chunk: Chunk) -> None:
        """The step takes place: the chunk is what its early update has made of it.  Raises what went wrong there."""
        self.early.pop(chunk).result()
        del self._before[chunk]
        slots = self.slots[chunk]
        slots.latest = slots.writes_to
        self.touched.add(chunk)
        self._look(chunk)

    def reopen(self, chunk: Chunk) -> None:
        """The chunk's gradients change, or its old values are asked for: an update that has begun does not count."""
        if chunk in self.early:
            self._returned.add(chunk)
            self._give_up(chunk)

    def give_up(self) -> None:
        """The step does not take place."""
        for chunk in list(self.early):
            self._give_up(chunk)

    def _give_up(self, chunk: Chunk) -> None:
        wait([self.early.pop(chunk)])
        self.slots[chunk].set_numbers(self._before.pop(chunk))

    def _in_use(self, chunk: Chunk, read: _Read, give: Callable[[Tensor], None]) -> None:
        """Return when it is read; `give` takes its memory back where it is not.

        Raises UserError for bytes that are not those that were written.
        """
        try:
            for transfer in read.transfers:
                transfer.wait()
        except BaseException as failure:
            give(read.place)
            if isinstance(failure, Damaged):
                raise UserError(f"{failure} ({chunk.name}); {GO_ON}") from None
            raise

    # --- generations --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, step: int, run: str, values: Mapping[str, Any], blob: bytes) -> None:
        """Begin to make the step durable: `confirm` returns when a process that is killed goes on from it.

        values  JSON-able, and `blob` is what else a run needs
        """
        self._until_durable()
        for chunk in self.slots:
            if chunk not in self.away and chunk in self.touched:
                self._copy(chunk)
        self.touched.clear()
        self.copies_at_once = self.every == 1
        self._committed = self._committer.submit(self._record, step, run, dict(values), blob)
        self._read_ahead()

    def _record(self, step: int, run: str, values: dict[str, Any], blob: bytes) -> None:
        """Wait until the slots of the step are on the drive, and tell of them: in another thread."""
        self.drain()
        for drive in self.drives:
            drive.file.sync()
        self.folders.record(Generation.of(step, run, self.slots.values(), values, blob, self.ranks))
        for slots in self.slots.values():
            slots.durable = slots.latest
        self.forget()

    def confirm(self) -> None:
        """Return when the last step that was committed is durable, and all that was written is on the drive.

        A collective.  Raises what went wrong.
        """
        self._until_durable()
        self.drain()

    def _until_durable(self) -> None:
        committed = self._committed
        if committed is not None:
            wait([committed])
            self._committed = None
            committed.result()
            self.agree()

    def _copy(self, chunk: Chunk) -> None:
        """Begin to write what lives in memory to the slot that no generation holds; of the host's memory from there."""
        slots = self.slots[chunk]
        self._until_written(slots)  # of a step that was not made durable
        memory, place = self.housed.get(chunk), None
        if memory is None:
            memory = place = self._place()
            slots.fill(place)
        slots.latest = slots.writes_to
        transfers = self._write(slots, slots.latest, memory, LATER if place is None else SOON)
        with self._lock:
            self._writes.append(_Write(slots, slots.latest, place, transfers))

    def forget(self) -> None:
        """Let the page cache have nothing of the files: somebody may have looked at what lies there."""
        for drive in self.drives:
            drive.forget()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, whoever writes masters or state of chunks on the disk writes into slots that no generation holds."""
        self.confirm()
        self.forget_ahead()
        before = {chunk: self.slots[chunk].latest for chunk in self.away}
        for chunk in self.away:
            self.slots[chunk].latest = self.slots[chunk].writes_to
            self._look(chunk)
        try:
            yield
            self._seal()
        except BaseException:
            for chunk, latest in before.items():
                self.slots[chunk].latest = latest
                self._look(chunk)
            raise
        self.touched |= set(self.slots)

    def _seal(self) -> None:
        """What was written through the mapped file is on the disk, and has checksums."""
        self._sync_maps()
        for chunk in self.away:
            slots = self.slots[chunk]
            place = self._place()
            begin = slots.offset(slots.latest)
            sums = [self._file(slots).read(begin + a, place[a:b]) for a, b in slots.regions]
            slots.checksums[slots.latest] = [transfer.wait() for transfer in sums]
            self._free.append(place)

    @torch.no_grad()
    def restore(self, generation: Generation) -> None:
        """Copy a generation into masters and state, whatever chunks they lie in now.

        Within `loading`.  Raises UserError for one of other names, shapes or formats, and for bytes that are not those
        that were written.
        """
        for chunk, slots in self.slots.items():
            if chunk not in self.away and chunk not in self.housed:
                slots.take_state()
        tensors = {(p.name, p.key): tensor for slots in self.slots.values() for tensor, p in slots.tensors()}
        generation.require(self.folders.paths[0], tensors)
        files = {name: DirectFile(self.folders.path_of(name, generation)) for name in generation.files}
        try:
            for stored in generation.chunks:
                file = files[stored.file]
                place = host_empty(stored.num_bytes, torch.uint8, False, paged=True)
                reads = [
                    file.read(stored.offset + a, place[a:b], sums)
                    for (a, b), sums in zip(stored.regions, stored.checksums, strict=True)
                ]
                for read in reads:
                    read.wait()
                for part in stored.parts:
                    tensors[part.name, part.key].copy_(part.of(place))
                self._sync_maps()  # what was copied through the map leaves memory again
                self.forget()
            for slots in self.slots.values():
                slots.set_numbers(generation.numbers)
        except Damaged as damage:
            raise UserError(f"{damage}; {GO_ON}") from None
        finally:
            for file in files.values():
                file.close()

    def _sync_maps(self) -> None:
        for drive in self.drives:
            drive.file.sync_maps()

    def close(self) -> None:
        """Raises what went wrong with the last step that was committed."""
        self._updater.shutdown()
        self._committer.shutdown()
        for drive in self.drives:
            drive.file.close()
        committed, self._committed = self._committed, None
        if committed is not None:
            committed.result()


def _settled(read: _Read) -> Tensor:
    """The memory of a read that nobody asks for any more, however it went."""
    for transfer in read.transfers:
        transfer.settle()
    return read.place
