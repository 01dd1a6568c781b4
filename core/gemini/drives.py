"""The folders of one rank, each on a drive of its own, with a file for slots in each.

A chunk's two slots lie on one drive, and chunks are dealt so that every drive takes about as long as the others for a
step's reads and writes. Every folder has every record: a record tells of slots in the files of all of them, so a step
is found, and a folder that was left out is missed, whichever of them is given.
"""

import mmap
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from core.config import UserError, in_words
from core.gemini.generation import Folder, Generation
from core.gemini.trace import ChunkInfo
from core.pinned import whole_blocks


def deal(
    chunks: Sequence[ChunkInfo],
    on_disk: frozenset[int],
    speeds: Sequence[tuple[float, float]],
    waiting: frozenset[int] = frozenset(),
) -> list[int]:
    """The drive of each chunk: the one that is then done first, the longest chunks before the others.

    on_disk  chunks that live there: they are read, too
    speeds   bytes a second that each drive reads and writes
    waiting  chunks whose gradients are written and read
    """
    busy_s, found = [0.0] * len(speeds), [0] * len(chunks)

    def seconds(chunk: ChunkInfo, drive: int) -> float:
        read, write = speeds[drive]
        fetched = chunk.read_bytes + 2 * chunk.own_bytes if chunk.index in on_disk else 0
        written = chunk.slot_bytes if chunk.trainable else 0
        waits = chunk.wait_bytes if chunk.index in waiting else 0
        return (fetched + waits) / read + (written + waits) / write

    for chunk in sorted(chunks, key=lambda chunk: -seconds(chunk, 0)):
        drive = min(range(len(speeds)), key=lambda k: busy_s[k] + seconds(chunk, k))
        busy_s[drive] += seconds(chunk, drive)
        found[chunk.index] = drive
    return found


class Drive:
    """A folder and the file in it.

    end        of the slots that have been dealt to it
    num_bytes  of the file
    bytes      [slots] of the file as mapped memory
    """

    def __init__(self, folder: Folder):
        self.folder, self.file, self.end, self.num_bytes = folder, folder.new_file(), 0, 0
        self.bytes = torch.empty(0, dtype=torch.uint8)
        self._pages: mmap.mmap | None = None

    def reserve(self, num_bytes: int) -> None:
        """Take all of the drive that slots will take.  Raises UserError where there is not so much."""
        if num_bytes == 0:
            return
        self._grow(num_bytes, "two slots of every chunk take")
        self._pages = self.file.map(0, num_bytes)
        self.bytes = torch.frombuffer(self._pages, dtype=torch.uint8)

    def more(self, num_bytes: int) -> int:
        """Where there are so many bytes more, which no record tells of.  Raises UserError where there are not."""
        return self._grow(num_bytes, "a gradient that waits takes")

    def _grow(self, num_bytes: int, what: str) -> int:
        begin, folder = whole_blocks(self.num_bytes), self.folder.path.parent
        try:
            self.file.grow(begin, num_bytes)
        except OSError as error:
            free = shutil.disk_usage(folder).free
            raise UserError(
                f"gemini.disk={folder}: {error.strerror}; {what} {in_words(num_bytes)}, and {in_words(free)} are free; "
                "give another folder"
            ) from None
        self.num_bytes = begin + num_bytes
        return begin

    def take(self, num_bytes: int) -> int:
        """Where the next slots begin."""
        begin, self.end = self.end, self.end + num_bytes
        assert self.end <= len(self.bytes), "a slot takes more than was planned"
        return begin

    def forget(self) -> None:
        """Let the page cache have nothing of the file: somebody may have looked at what lies there."""
        if self._pages is not None:
            self._pages.madvise(mmap.MADV_DONTNEED)
        self.file.forget()


class Folders:
    """This rank's folder in each of those that were given; this process holds them from now on.  Raises UserError."""

    def __init__(self, given: Sequence[Path], rank: int):
        self.given, self.opened = tuple(given), list[Folder]()
        try:
            for folder in given:
                self.opened.append(Folder(folder / f"rank-{rank}"))
            self.remove_unnamed()
        except BaseException:
            for folder in self.opened:
                folder.close()
            raise

    def drives(self) -> list[Drive]:
        """Each with a new file."""
        return [Drive(folder) for folder in self.opened]

    @property
    def paths(self) -> list[Path]:
        return [folder.path for folder in self.opened]

    @property
    def generations(self) -> Mapping[int, Generation]:
        """By step, those that are on the drives.

        Raises UserError where one has slots in a folder that was not given, and where folders are of unlike runs.
        """
        runs = {one.run: folder.path.parent for folder in self.opened for one in folder.generations.values()}
        if len(runs) > 1:
            said = ", ".join(f"{path} has steps of {run}" for run, path in runs.items())
            raise UserError(f"gemini.disk={','.join(map(str, self.given))}: {said}; give folders of one run")
        found = {step: one for folder in self.opened for step, one in folder.generations.items()}
        for generation in found.values():
            for name in generation.files:
                self.path_of(name, generation)
        return found

    def path_of(self, name: str, generation: Generation) -> Path:
        """The file of that name that a generation tells of."""
        for folder in self.opened:
            if (folder.path / name).exists():
                return folder.path / name
        raise UserError(
            f"gemini.disk={','.join(map(str, self.given))}: step {generation.step} has slots in {name}, which lies in "
            "none of these; give all folders of the run, or go on from a checkpoint with other ones"
        )

    def record(self, generation: Generation) -> None:
        """Put it in the place of the older of the two in each folder; durable when this returns."""
        has_new_files = [folder.record(generation) for folder in self.opened]
        if any(has_new_files):
            self.remove_unnamed()

    def remove_unnamed(self) -> None:
        """Remove files that no record of any folder names."""
        named = {name for folder in self.opened for one in folder.generations.values() for name in one.files}
        for folder in self.opened:
            folder.keep_only(named)

    def close(self) -> None:
        """Remove what no record names, and let other processes have the folders."""
        for folder in self.opened:
            folder.let_go()
        self.remove_unnamed()
        for folder in self.opened:
            folder.close()
