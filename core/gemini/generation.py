"""A generation: the record of a step whose masters and state lie in slots of a file; and the folder that holds both.

    chunks-….bin         slots of this rank's chunks (`core.gemini.slots`)
    generation-0.json    the last generation and the one before it, turn by turn: which slot of each chunk, where in it
    generation-1.json    which tensor lies, checksums, and what a run needs beside tensors; each with its own checksum

A record is written aside and renamed when all that it tells of is on the disk. What no record names is of nobody, and
is removed (`core.gemini.drives`).
"""

import base64
import os
import sys
import uuid
from collections.abc import Collection, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from core.config import UserError
from core.files import Damaged, asides, replace_file, signed, sync_folder, unsigned
from core.gemini.direct import PROBES, DirectFile
from core.gemini.slots import Part, Slots, numbers_of
from core.run_folder import hold

RECORDS = ("generation-0.json", "generation-1.json")
FORMAT = 2
IN_MEMORY = ("tmpfs", "ramfs")
"""File systems whose files take the host's memory."""


@dataclass(frozen=True)
class StoredChunk:
    """A chunk's slot of a generation: `offset` in the file; regions, each with the checksums of its blocks."""

    file: str
    offset: int
    num_bytes: int
    regions: list[tuple[int, int]]
    checksums: list[list[int]]
    parts: list[Part]


@dataclass(frozen=True)
class Generation:
    """numbers  parameter -> what the optimizer keeps of it beside tensors
    run      what the slots are the state of: the folder of the run
    values   JSON-able; `blob` is what else goes with the step
    ranks    that have the step between them; None: not noted
    """

    step: int
    run: str
    chunks: list[StoredChunk]
    numbers: dict[str, dict[str, Any]]
    values: dict[str, Any]
    blob: bytes
    ranks: int | None = None

    @classmethod
    def of(
        cls, step: int, run: str, slots: Iterable[Slots], values: dict[str, Any], blob: bytes, ranks: int | None = None
    ) -> "Generation":
        """That of the latest slots of all chunks."""
        slots, chunks = list(slots), []
        for one in slots:
            sums, regions = one.checksums[one.latest], [(a, b) for a, b in one.regions]
            chunks.append(StoredChunk(one.file, one.offset(one.latest), one.num_bytes, regions, sums, one.parts))
        return cls(step, run, chunks, numbers_of(slots), values, blob, ranks)

    @property
    def files(self) -> list[str]:
        """The names of those that it has slots in."""
        return sorted({chunk.file for chunk in self.chunks})

    def to_bytes(self) -> bytes:
        content = {"format": FORMAT, "step": self.step, "run": self.run, "numbers": self.numbers}
        content |= {"values": self.values, "blob": base64.b64encode(self.blob).decode(), "ranks": self.ranks}
        content["chunks"] = [
            asdict(chunk)
            | {"parts": [[*part[:3], str(part.dtype).removeprefix("torch."), part.shape] for part in chunk.parts]}
            for chunk in self.chunks
        ]
        return signed(content)

    @classmethod
    def from_bytes(cls, raw: bytes) -> "Generation":
        """Raises Damaged."""
        content = unsigned(raw)
        if content["format"] != FORMAT:
            raise Damaged(f"is of format {content['format']}, and this program reads format {FORMAT}")
        chunks = []
        for chunk in content["chunks"]:
            parts = [Part(n, k, o, getattr(torch, dtype), tuple(shape)) for n, k, o, dtype, shape in chunk["parts"]]
            regions = [(a, b) for a, b in chunk["regions"]]
            where = chunk["file"], chunk["offset"], chunk["num_bytes"]
            chunks.append(StoredChunk(*where, regions, chunk["checksums"], parts))
        given = {key: content[key] for key in ("step", "run", "numbers", "values")}
        return cls(**given, chunks=chunks, blob=base64.b64decode(content["blob"]), ranks=content.get("ranks"))

    def require(self, folder: Path, tensors: Mapping[tuple[str, str], Tensor]) -> None:
        """Raises UserError where these are not the tensors that it has, by name, shape or format."""
        there = {(part.name, part.key): part for chunk in self.chunks for part in chunk.parts}
        for name, key in sorted(there.keys() ^ tensors.keys()):
            what = f"{key} of {name}" if key else name
            state = "has" if (name, key) in there else "has no"
            raise UserError(f"{folder} is of another model or optimizer: it {state} {what}; give another --gemini.disk")
        for (name, key), part in there.items():
            tensor = tensors[name, key]
            if (part.dtype, part.shape) != (tensor.dtype, tuple(tensor.shape)):
                raise UserError(
                    f"{folder} is of another shape: {key or 'the value'} of {name} is {list(part.shape)} {part.dtype} "
                    f"there, and {list(tensor.shape)} {tensor.dtype} here; give another --gemini.disk"
                )


class Folder:
    """The folder of one rank, which this process holds from now on.

    Raises UserError for one that another process holds, that cannot be written, that lies in memory, or whose record is
    damaged.
    """

    def __init__(self, path: Path):
        self.path = path
        self._stack = ExitStack()
        self._current: str | None = None  # the file of this process
        try:
            path.mkdir(parents=True, exist_ok=True)
            require_drive(path, f"gemini.disk={path.parent}")
            self._stack.enter_context(hold(path, "--gemini.disk"))
        except OSError as error:
            raise UserError(
                f"gemini.disk={path.parent}: {error}; give a folder on a drive that can be written"
            ) from None
        self.found: dict[str, Generation] = {}
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @property
    def generations(self) -> dict[int, Generation]:
        """By step, those that are on the disk."""
        return {generation.step: generation for generation in self.found.values()}

    def _open(self) -> None:
        for left in (*self.path.glob(PROBES), *(aside for name in RECORDS for aside in asides(self.path / name))):
            left.unlink()
        for name in RECORDS:
            record = self.path / name
            if not record.exists():
                continue
            try:
                self.found[name] = Generation.from_bytes(record.read_bytes())
            except (Damaged, OSError) as damage:
                raise UserError(f"{record} {damage}; remove {self.path.parent} and go on from a checkpoint") from None

    def new_file(self) -> DirectFile:
        """A file for slots, that no record names yet."""
        try:
            file = DirectFile(self.path / f"chunks-{uuid.uuid4().hex[:8]}.bin", create=True)
        except OSError as error:
            raise UserError(f"gemini.disk={self.path.parent}: {error}; give a folder that can be written") from None
        self._current = file.path.name
        if not file.is_direct:
            print(
                f"warning: {self.path} lies on a file system without O_DIRECT: its page cache takes memory beside "
                "gemini.host",
                file=sys.stderr,
            )
        return file

    def record(self, generation: Generation) -> bool:
        """Put it in the place of the older of the two; durable when this returns: whether that told of other files."""
        older = min(RECORDS, key=lambda name: self.found[name].step if name in self.found else -1)
        replace_file(self.path / older, generation.to_bytes())
        sync_folder(self.path)
        is_first = older not in self.found or self.found[older].files != generation.files
        self.found[older] = generation
        return is_first

    def keep_only(self, named: Collection[str]) -> None:
        """Remove files of other names, but for this process's own."""
        for path in self.path.glob("chunks-*.bin"):
            if path.name not in named and path.name != self._current:
                path.unlink()

    def let_go(self) -> None:
        """This process has no file of its own any more."""
        self._current = None

    def close(self) -> None:
        """Let other processes have the folder."""
        self._stack.close()


def require_drive(path: Path, given: str) -> None:
    """Raises UserError for a folder whose files lie in the host's memory.

    given  the option that gave it, with its value
    """
    device = path.stat().st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    for line in mounts:
        fields, _, behind = line.partition(" - ")
        if fields.split()[2] == number and behind.split()[0] in IN_MEMORY:
            raise UserError(
                f"{given} lies in memory ({behind.split()[0]}): what is to leave the host would stay there; give a "
                "folder on a drive"
            )
