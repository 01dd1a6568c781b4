"""The disk below the host: chunks whose masters and optimizer state lie in a file, and a durable copy of all others.

    fetch    a chunk's values come from the file into a *place* of the host, and from there to the device
    update   masters and state come into a place, the optimizer steps over them there, and the place goes to the chunk's
             other slot; the next chunk is read meanwhile, and the one before it written. Where nothing stands between a
             gradient and its update (no clipping, no loss scale), another thread does so as gradients become final,
             beside the backward; the step takes those slots at its end, or, where it is skipped, leaves them
    commit   what lives in memory is written too: where each step is made durable, as soon as it is updated. When all is
             on the disk a record says which slots hold the step

There are `PLACES` places, each as large as the largest slot, made once: all that the host has of chunks on the disk
beside their gradients. Between its uses a chunk's masters and state are views of the mapped file, so that whoever
looks at them by name (a checkpoint) needs to know nothing of the disk; a step of training never does.

A generation is a step whose record (`core.gemini.generation`) is on the disk. Its slots are not written again before
the next one's record is there, so a process that is killed at any moment goes on from it. Two records are kept, turn
by turn: with several ranks one may have the step that another has not come to.
"""

import mmap
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from threading import RLock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from core.config import UserError, in_words
from core.files import Damaged
from core.gemini.chunk import Chunk
from core.gemini.direct import DirectFile, Transfer
from core.gemini.generation import Folder, Generation
from core.gemini.residency import PLACES
from core.gemini.search import Chunking
from core.gemini.slots import Slots
from core.optim.sharded import make_state
from core.pinned import host_empty

GO_ON = "the drive has lost it: go on from a checkpoint, with --resume and another --gemini.disk"

FETCHES = ("fetch", "prefetch")


class _Read(NamedTuple):
    place: Tensor
    transfers: list[Transfer]


class _Write(NamedTuple):
    slots: Slots
    slot: int
    place: Tensor
    transfers: list[Transfer]


class Disk:
    """folder     of this rank, which the process holds
    pinned     whether a GPU copies from the places by itself
    every      steps from one that is made durable to the next
    early      chunks whose update has begun before the step's end -> what says when it is over

    Two threads take places while updates run beside the backward: that which updates at most two at once, that which
    fetches one. So there is always one that is free, is being written, or holds what was only read ahead.
    """

    def __init__(self, folder: Folder, pinned: bool, optimizer: torch.optim.Optimizer, every: int):
        self.optimizer, self.pinned, self.folder, self.every = optimizer, pinned, folder, every
        self.file: DirectFile = self.folder.new_file()
        self.slots: dict[Chunk, Slots] = {}
        self.away: set[Chunk] = set()
        self.touched: set[Chunk] = set()  # since the last generation
        self.order: Sequence[Chunk] = ()  # in which those on the disk are fetched before the updates
        self._cursor = 0
        self.copies_at_once = False  # of what lives in memory: the step is made durable, and so was the one before it
        self.updates = False  # values are being replaced: what is fetched next may be old still
        self._pages: mmap.mmap
        self._map: Tensor
        self._places: list[Tensor] = []
        self._free: list[Tensor] = []
        self._writes: deque[_Write] = deque()
        self._reads: dict[Chunk, _Read] = {}  # of whole slots
        self._ahead: dict[Chunk, _Read] = {}  # of values
        self.early: dict[Chunk, Future[None]] = {}
        self._coming: deque[Chunk] = deque()  # those of them that have not been read
        self._before: dict[Chunk, dict[str, dict[str, Any]]] = {}  # numbers of their optimizer's state
        self._returned: set[Chunk] = set()  # whose gradients were not final, though they were taken for it
        self._updater = ThreadPoolExecutor(1, thread_name_prefix="updates")
        self._lock = RLock()  # of places and of what is under way
        self._end = 0

    @property
    def place_bytes(self) -> int:
        """Bytes of the host for places."""
        return sum(place.nbytes for place in self._places)

    @property
    def storages(self) -> list[Tensor]:
        """Memory that is the disk's: places and the mapped file."""
        return [*self._places, self._map]

    # --- before the first step ----------------------------------------------------------------------------------------

    def reserve(self, num_bytes: int) -> None:
        """Take all of the drive that slots will take.  Raises UserError where there is not so much."""
        folder = self.folder.path.parent
        try:
            self.file.grow(0, num_bytes)
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise UserError(
                f"gemini.disk={folder}: {error.strerror}; two slots of every chunk take {in_words(num_bytes)}, and "
                f"{in_words(free)} are free; give another folder"
            ) from None
        self._pages = self.file.map(0, num_bytes)
        self._map = torch.frombuffer(self._pages, dtype=torch.uint8)

    @torch.no_grad()
    def add(self, chunk: Chunk, away: bool) -> None:
        """Give a chunk its slots, with its values and the state before the first step; `away`: it lives there."""
        if chunk.trainable:
            make_state(self.optimizer, [member.master for member in chunk.members])
        live = {m: self.optimizer.state.get(m.master, {}) for m in chunk.members} if chunk.trainable else {}
        slots = self.slots[chunk] = Slots(chunk, live, self._end)
        self._end += 2 * slots.num_bytes
        assert self._end <= len(self._map), "a slot takes more than was planned"
        self.touched.add(chunk)
        if away:
            place = host_empty(slots.num_bytes, torch.uint8, False, paged=True)
            slots.fill(place)
            self._written(_Write(slots, slots.latest, place, self._write(slots, slots.latest, place)))
            self._leave(chunk)

    def settle(self) -> None:
        """All chunks have been added: make the places."""
        largest = max(slots.num_bytes for slots in self.slots.values())
        self._places = [host_empty(largest, torch.uint8, self.pinned, paged=True) for _ in range(PLACES)]
        self._free = list(self._places)

    def _leave(self, chunk: Chunk) -> None:
        """From now on the chunk lives on the disk, where its values are."""
        self.away.add(chunk)
        chunk.away = self
        self._look(chunk)

    @torch.no_grad()
    def send(self, chunk: Chunk) -> None:
        """Let a chunk that lives in memory live on the disk."""
        self._copy(chunk)
        self._leave(chunk)

    @torch.no_grad()
    def bring(self, chunk: Chunk) -> None:
        """Let a chunk that lives on the disk live in memory."""
        read, slots = self._read(chunk, whole=True), self.slots[chunk]
        self._in_use(chunk, read)
        memory = host_empty(slots.num_bytes, torch.uint8, self.pinned)
        memory.copy_(read.place[: slots.num_bytes])
        self._free.append(read.place)
        slots.point(memory)
        chunk.refresh()
        self.away.discard(chunk)
        chunk.away = None
        self.touched.add(chunk)

    def _look(self, chunk: Chunk) -> None:
        """Let the chunk's tensors be views of the mapped file, of its latest slot."""
        slots = self.slots[chunk]
        begin = slots.offset(slots.latest)
        slots.point(self._map[begin : begin + slots.num_bytes])

    # --- transfers ----------------------------------------------------------------------------------------------------

    def _place(self) -> Tensor:
        """A place that nobody uses; waits for the earliest write where there is none."""
        with self._lock:
            if not self._free and self._writes:
                self._land()
            if not self._free:  # what was read ahead is not needed now
                self._free.append(_waited(self._ahead.pop(next(iter(self._ahead)))))
            return self._free.pop()

    def _read(self, chunk: Chunk, whole: bool) -> _Read:
        """Begin to read the latest slot of a chunk: what an update reads, or what fills its buffer."""
        slots = self.slots[chunk]
        wanted = slots.updated if whole else [slots.fetched]
        with self._lock:
            while any(write.slots is slots for write in self._writes):
                self._land()
        place, sums = self._place(), slots.checksums[slots.latest]
        transfers = [
            self.file.read(slots.offset(slots.latest) + region.begin, place[region.begin : region.end], sums[index])
            for index, region in enumerate(slots.regions)
            if region in wanted
        ]
        return _Read(place, transfers)

    def _write(self, slots: Slots, slot: int, place: Tensor) -> list[Transfer]:
        return [self.file.write(slots.offset(slot) + a, place[a:b]) for a, b in slots.regions]

    def _land(self) -> None:
        """Wait for the earliest write."""
        write = self._writes.popleft()
        self._written(write)
        self._free.append(write.place)

    def _written(self, write: _Write) -> None:
        write.slots.checksums[write.slot] = [transfer.wait() for transfer in write.transfers]

    def drain(self) -> None:
        """Return when all that was written has gone to the drive."""
        while self._writes:
            self._land()

    def forget_ahead(self) -> None:
        """What was read ahead is of no use any more: it becomes old."""
        while self._ahead:
            self._free.append(_waited(self._ahead.popitem()[1]))

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Surround the updates of a step, within which nothing is read ahead: it may be old still."""
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
        with self._lock:
            read = self._ahead.pop(chunk, None) or self._read(chunk, whole=False)
        self._in_use(chunk, read)
        try:
            yield self.slots[chunk].fetched_values(read.place)
        finally:
            self._free.append(read.place)
        if not self.updates:
            self._read_ahead(self._after(chunk))

    def _after(self, chunk: Chunk) -> Chunk | None:
        """The chunk that is fetched behind this one, as planned; None where updates come first."""
        ahead = [k for k in (*range(self._cursor, len(self.order)), *range(self._cursor)) if self.order[k] is chunk]
        if not ahead:
            return None
        self._cursor = ahead[0] + 1
        return self.order[self._cursor] if self._cursor < len(self.order) else None

    def _read_ahead(self, chunk: Chunk | None) -> None:
        with self._lock:
            if chunk is None or chunk.is_filled or chunk in self.early:
                return
            spare = len(self._free) - any(not future.done() for future in self.early.values())
            if spare > 0 and not self._ahead and not self._writes:
                self._ahead[chunk] = self._read(chunk, whole=False)

    def follow(self, chunks: Sequence[Chunk], planned: Chunking) -> None:
        """Let the chunks live where the plan says, and read ahead in its order."""
        for chunk in chunks:
            is_there, is_to_be = chunk in self.away, chunk.index in planned.plan.on_disk
            if is_there and not is_to_be:
                self.bring(chunk)
            elif is_to_be and not is_there:
                self.send(chunk)
        first = next((k for k, moment in enumerate(planned.trace.moments) if moment.kind == "update"), None)
        fetched = [move.chunk for moves in planned.plan.moves[:first] for move in moves if move.kind in FETCHES]
        self.order = [chunks[index] for index in fetched if chunks[index] in self.away]

    @contextmanager
    def at_hand(self, chunk: Chunk, following: Chunk | None) -> Iterator[None]:
        """Within, masters and state of a chunk are in memory; what becomes of them is written afterwards.

        following  the chunk on the disk that comes next, which is read meanwhile
        """
        if chunk not in self.away:
            yield
            self.touched.add(chunk)
            if self.copies_at_once:
                self._copy(chunk)
                self.touched.discard(chunk)
            return
        slots = self.slots[chunk]
        read = self._reads.pop(chunk, None) or self._read(chunk, whole=True)
        self._in_use(chunk, read)
        if following is not None:
            self._reads[following] = self._read(following, whole=True)
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

        It can be where its latest slot is the durable one: that stays as it is, and the update fills the other.
        """
        slots = self.slots[chunk]
        is_kept = slots.latest == slots.durable
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
        with self._lock:
            self._coming.popleft()
            read = self._reads.pop(chunk, None) or self._read(chunk, whole=True)
        self._in_use(chunk, read)
        with self._lock:
            if self._coming and len(self._free) > 1:  # one is left for what the backward fetches
                self._reads[self._coming[0]] = self._read(self._coming[0], whole=True)
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

    def _in_use(self, chunk: Chunk, read: _Read) -> None:
        """Return when it is read.  Raises UserError for bytes that are not those that were written."""
        try:
            for transfer in read.transfers:
                transfer.wait()
        except BaseException as failure:
            self._free.append(read.place)
            if isinstance(failure, Damaged):
                raise UserError(f"{failure} ({chunk.name}); {GO_ON}") from None
            raise

    # --- generations --------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def commit(self, step: int, run: str, values: Mapping[str, Any], blob: bytes) -> None:
        """Make the step durable: when this returns a process that is killed goes on from it.

        values  JSON-able, and `blob` is what else a run needs
        """
        for chunk in self.slots:
            if chunk not in self.away and chunk in self.touched:
                self._copy(chunk)
        self.drain()
        self.file.sync()
        self.folder.record(Generation.of(step, run, self.file.path.name, self.slots.values(), dict(values), blob))
        for slots in self.slots.values():
            slots.durable = slots.latest
        self.touched.clear()
        self.copies_at_once = self.every == 1
        self.forget()

    def _copy(self, chunk: Chunk) -> None:
        """Begin to write what lives in memory to the slot that no generation holds."""
        slots = self.slots[chunk]
        while any(write.slots is slots for write in self._writes):  # of a step that was not made durable
            self._land()
        place = self._place()
        slots.fill(place)
        slots.latest = slots.writes_to
        self._writes.append(_Write(slots, slots.latest, place, self._write(slots, slots.latest, place)))

    def forget(self) -> None:
        """Let the page cache have nothing of the file: somebody may have looked at what lies there."""
        self._pages.madvise(mmap.MADV_DONTNEED)
        self.file.forget()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Within, whoever writes masters or state of chunks on the disk writes into slots that no generation holds."""
        self.drain()
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
        self.file.sync_maps()
        for chunk in self.away:
            slots = self.slots[chunk]
            place = self._place()
            begin = slots.offset(slots.latest)
            sums = [self.file.read(begin + a, place[a:b]) for a, b in slots.regions]
            slots.checksums[slots.latest] = [transfer.wait() for transfer in sums]
            self._free.append(place)

    @torch.no_grad()
    def restore(self, generation: Generation) -> None:
        """Copy a generation into masters and state, whatever chunks they lie in now.

        Within `loading`.  Raises UserError for one of other names, shapes or formats, and for bytes that are not those
        that were written.
        """
        tensors = {(p.name, p.key): tensor for slots in self.slots.values() for tensor, p in slots.tensors()}
        generation.require(self.folder.path, tensors)
        file = DirectFile(self.folder.path / generation.file)
        try:
            for stored in generation.chunks:
                place = host_empty(stored.num_bytes, torch.uint8, False, paged=True)
                reads = [
                    file.read(stored.offset + a, place[a:b], sums)
                    for (a, b), sums in zip(stored.regions, stored.checksums, strict=True)
                ]
                for read in reads:
                    read.wait()
                for part in stored.parts:
                    tensors[part.name, part.key].copy_(part.of(place))
                self.file.sync_maps()  # what was copied through the map leaves memory again
                self.forget()
            for slots in self.slots.values():
                slots.set_numbers(generation.numbers)
        except Damaged as damage:
            raise UserError(f"{damage}; {GO_ON}") from None
        finally:
            file.close()

    def close(self) -> None:
        self._updater.shutdown()
        for transfers in [*(w.transfers for w in self._writes), *(r.transfers for r in self._ahead.values())]:
            for transfer in transfers:
                transfer.wait()
        self.file.close()


def _waited(read: _Read) -> Tensor:
    for transfer in read.transfers:
        transfer.wait()
    return read.place
