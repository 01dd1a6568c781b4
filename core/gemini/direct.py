"""Reads and writes of a file past the page cache: O_DIRECT in pieces by a few threads, with checksums of every block.

Nothing is compiled: `os.preadv` and `os.pwritev` give up the interpreter's lock, and so does the checksum, so a few
threads keep one drive busy. They take what somebody waits for first, then what is read ahead or has to leave memory,
and last what only has to be on the drive some time. Offsets, lengths and addresses are multiples of 4096, which every
drive takes. Where a file system refuses O_DIRECT (tmpfs) the same calls go through the page cache, and `is_direct` says
so.

A checksum is a CRC-32 of at most 1 MiB (`core.files`): a block that was half written when the power went, or that the
drive has lost since, is found when it is read, and named.
"""

import errno
import itertools
import math
import mmap
import os
import tempfile
import time
import weakref
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import PriorityQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from core.files import Damaged, naming
from core.pinned import DRIVE_BLOCK, host_empty
from core.trace.machine import Bandwidth

CHECKED_BYTES = 1 << 20
PIECE_BYTES = 8 << 20
THREADS = 4
NOW, SOON, LATER = 0, 1, 2
"""How urgent a transfer is."""
PROBE_BYTES = 32 << 20
PROBES = ".probe-*"
"""Files of `drive_speed`: what a process that was killed has left of it."""
DESCRIBED_DRIVE = 3.5e9, 2.5e9
"""Bytes a second that a PCIe 3 SSD reads and writes, for a drive that is not here."""


class Transfer:
    """A read or write that is under way, in pieces."""

    def __init__(self, pieces: Sequence[Future[list[int]]]):
        self._pieces = pieces

    def wait(self) -> list[int]:
        """Return when all pieces are through: the checksums of the blocks.  Raises what went wrong, when none runs."""
        failures = [piece.exception() for piece in self._pieces]
        for failure in failures:
            if failure is not None:
                raise failure
        return [checksum for piece in self._pieces for checksum in piece.result()]

    def settle(self) -> None:
        """Return when all pieces are through, however they went."""
        wait(self._pieces)


class _Threads:
    """Threads that take the most urgent work first, of equally urgent what was given first."""

    def __init__(self, num_threads: int):
        self._work: PriorityQueue[tuple[float, int, Callable[[], None] | None]] = PriorityQueue()
        self._number = itertools.count()
        self._threads = [Thread(target=self._run, name=f"disk-{k}", daemon=True) for k in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, urgency: int, call: Callable[[], list[int]]) -> Future[list[int]]:
        future: Future[list[int]] = Future()

        def work() -> None:
            try:
                future.set_result(call())
            except BaseException as failure:
                future.set_exception(failure)

        self._work.put((urgency, next(self._number), work))
        return future

    def _run(self) -> None:
        while (work := self._work.get()[2]) is not None:
            work()
            del work  # with the file and the memory that it is of, which must not wait for the next

    def end(self) -> None:
        """Have the threads end when all that was given is done."""
        for _ in self._threads:
            self._work.put((math.inf, next(self._number), None))

    def close(self) -> None:
        """Return when all that was given is done."""
        self.end()
        for thread in self._threads:
            thread.join()


class DirectFile:
    """A file that is read and written past the page cache.

    is_direct                 whether the file system lets it
    read_bytes, written_bytes asked for so far
    """

    def __init__(self, path: Path, create: bool = False):
        self.path = path
        self.read_bytes = self.written_bytes = 0
        flags = os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0)
        with naming(path):
            try:
                self.handle, self.is_direct = os.open(path, flags | os.O_DIRECT, 0o644), True
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                self.handle, self.is_direct = os.open(path, flags, 0o644), False
        self._threads = _Threads(THREADS)
        weakref.finalize(self, self._threads.end)

    def grow(self, offset: int, num_bytes: int) -> None:
        """Make room behind what there is, on the disk: what is full is full now, and not in step 900."""
        with naming(self.path):
            os.posix_fallocate(self.handle, offset, num_bytes)

    def map(self, offset: int, num_bytes: int) -> mmap.mmap:
        """These bytes as shared memory, whose pages come through the page cache when somebody looks at them."""
        return mmap.mmap(self.handle, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE, offset=offset)

    def read(self, offset: int, memory: Tensor, checksums: Sequence[int] | None = None, urgency: int = NOW) -> Transfer:
        """Fill page-aligned memory [num_bytes] from there; Damaged is raised for blocks of other checksums."""
        self.read_bytes += memory.nbytes
        view = _bytes_of(memory)
        return self._in_pieces(
            urgency,
            len(view),
            lambda a, b: self._read(offset + a, view[a:b], None if checksums is None else _blocks_of(checksums, a, b)),
        )

    def write(self, offset: int, memory: Tensor, urgency: int = SOON) -> Transfer:
        """Write page-aligned memory [num_bytes] to there; it must stay as it is until the transfer is over."""
        self.written_bytes += memory.nbytes
        view = _bytes_of(memory)
        return self._in_pieces(urgency, len(view), lambda a, b: self._write(offset + a, view[a:b]))

    def sync(self) -> None:
        """Return when all that was written is on the disk."""
        with naming(self.path):
            os.fdatasync(self.handle)

    def sync_maps(self) -> None:
        """Return when all that was written through mapped memory is on the disk."""
        with naming(self.path):
            os.fsync(self.handle)

    def forget(self) -> None:
        """Let the page cache have nothing of it that is not mapped."""
        os.posix_fadvise(self.handle, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        self._threads.close()
        os.close(self.handle)

    def _in_pieces(self, urgency: int, num_bytes: int, transfer: Callable[[int, int], list[int]]) -> Transfer:
        starts = range(0, num_bytes, PIECE_BYTES)
        ends = [(a, min(num_bytes, a + PIECE_BYTES)) for a in starts]
        return Transfer([self._threads.submit(urgency, partial(transfer, a, b)) for a, b in ends])

    def _read(self, offset: int, view: memoryview, expected: Sequence[int] | None) -> list[int]:
        if self._whole(os.preadv, offset, view) < len(view):
            raise Damaged(f"{self.path} ends before byte {offset + len(view)}, where there should be more")
        found = _checksums(view)
        if expected is not None and found != list(expected):
            bad = next(k for k, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)
            begin = offset + bad * CHECKED_BYTES
            end = min(begin + CHECKED_BYTES, offset + len(view))
            raise Damaged(f"{self.path} is damaged: bytes {begin} to {end - 1} are not those that were written")
        return found

    def _write(self, offset: int, view: memoryview) -> list[int]:
        if self._whole(os.pwritev, offset, view) < len(view):
            raise OSError(errno.EIO, "the drive takes no more of a write", str(self.path))
        return _checksums(view)

    def _whole(self, call: Callable[..., int], offset: int, view: memoryview) -> int:
        """Transfer all of it, also where single calls are short.  Returns less only where one transfers nothing."""
        done = 0
        with naming(self.path):
            while done < len(view):
                count = call(self.handle, [view[done:]], offset + done)
                if count == 0:
                    break
                # The next call begins at a whole block: what is left of a part of one is transferred once more.
                done = len(view) if done + count == len(view) else done + count - count % DRIVE_BLOCK
        return done


def mapped_temporary(folder: Path, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor, undefined, whose memory is a file's that nobody else sees and that is gone with the tensor."""
    num_bytes = dtype.itemsize * math.prod(shape)
    if num_bytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    with naming(folder), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        pages = mmap.mmap(file.fileno(), num_bytes)
    return torch.frombuffer(pages, dtype=dtype).view(tuple(shape))


def drive_speed(folder: Path) -> tuple[float, float]:
    """Bytes a second that are read and written in a folder, past the page cache: of the better of two tries each."""
    path = folder / PROBES.replace("*", str(os.getpid()))
    file = DirectFile(path, create=True)
    try:
        file.grow(0, PROBE_BYTES)
        memory = host_empty(PROBE_BYTES, torch.uint8, False, paged=True).zero_()
        written = [_seconds(lambda: (file.write(0, memory).wait(), file.sync())) for _ in range(2)]
        read = [_seconds(lambda: file.read(0, memory).wait()) for _ in range(2)]
    finally:
        file.close()
        path.unlink()
    return PROBE_BYTES / min(read), PROBE_BYTES / min(written)


def drive_speeds(folders: Sequence[Path]) -> list[tuple[float, float]]:
    """Bytes a second that are read and written in each folder: measured where there is one, else those of a usual SSD.

    Folders on one drive share what it does.
    """
    devices = [folder.stat().st_dev if folder.is_dir() else index for index, folder in enumerate(folders)]
    found = [drive_speed(folder) if folder.is_dir() else DESCRIBED_DRIVE for folder in folders]
    return [
        (read / devices.count(device), written / devices.count(device))
        for device, (read, written) in zip(devices, found, strict=True)
    ]


def with_drives(bandwidth: Bandwidth, speeds: Sequence[tuple[float, float]]) -> Bandwidth:
    """The bandwidth with that of all drives together, where there are any."""
    return replace(bandwidth, disk_read=sum(s[0] for s in speeds), disk_write=sum(s[1] for s in speeds))


def _seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def _bytes_of(memory: Tensor) -> memoryview:
    array: Any = memory.numpy()
    return memoryview(array)


def _checksums(view: memoryview) -> list[int]:
    return [zlib.crc32(view[a : a + CHECKED_BYTES]) for a in range(0, len(view), CHECKED_BYTES)]


def _blocks_of(checksums: Sequence[int], begin: int, end: int) -> Sequence[int]:
    return checksums[begin // CHECKED_BYTES : -(-end // CHECKED_BYTES)]
