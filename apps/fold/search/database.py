"""FASTA databases: what identifies one, how many sequences it has, and shards of it.

A search reads its database in one thread, so a large one is searched faster in parts. An E-value grows with the number
of sequences Z; searched with the Z of the whole, the shards' hits are those of the whole.
"""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from core.config import UserError
from core.files import replace_file

_READ_BYTES = 1 << 24
_LOOKED_AT = 1 << 20  # bytes at either end that identify a database, with its size and time


@dataclass(frozen=True)
class Shard:
    """Part `number` of `count` of a database; its file is the database itself where it is the only one."""

    database: Path
    number: int
    count: int
    file: Path


@dataclass(frozen=True)
class Stamp:
    """A file's size and time of change in ns as they were; both 0 where it was not there."""

    path: Path
    size: int
    changed_ns: int

    @staticmethod
    def of(path: Path) -> "Stamp":
        try:
            stat = path.stat()
        except OSError:
            return Stamp(path, 0, 0)
        return Stamp(path, stat.st_size, stat.st_mtime_ns)


@dataclass(frozen=True)
class Database:
    """name is unique in a run; identity changes with the contents; num_sequences counts where a tool is told of it.

    stamps  of its files, taken before the identity was
    """

    name: str
    path: Path
    identity: str
    num_sequences: int
    shards: tuple[Shard, ...]
    stamps: tuple[Stamp, ...] = ()

    def check_unchanged(self) -> None:
        """Raises UserError where a file is another than when the database was opened: results are kept by that."""
        for stamp in self.stamps:
            if Stamp.of(stamp.path) != stamp:
                raise UserError(
                    f"the database {stamp.path} changed while it was in use; leave it as it is, and search again"
                )


def open_database(path: Path, num_shards: int, cache: Path, name: str) -> Database:
    """Count a database's sequences and cut it, once: the cache keeps both.

    Raises UserError for a file that is none.
    """
    stamp = Stamp.of(path)
    identity = identify(path)
    known = cache / "databases" / identity
    try:
        count = int(json.loads((known / "database.json").read_text(encoding="utf-8"))["sequences"])
    except (OSError, ValueError, KeyError):
        count = _count(path)
        known.mkdir(parents=True, exist_ok=True)
        replace_file(known / "database.json", json.dumps({"path": str(path), "sequences": count}).encode())
    if count < num_shards:
        raise UserError(f"{path} holds {count} sequences, too few for {num_shards} shards; give fewer --shards")
    database = Database(name, path, identity, count, tuple(_shards(path, num_shards, count, known)), (stamp,))
    database.check_unchanged()  # while it was counted and cut
    return database


def identify(path: Path) -> str:
    """A FASTA file's `digest_of`: reading a terabyte to know it again would be a search.

    Raises UserError for a file that is none.
    """
    digest = digest_of(path)
    with open(path, "rb") as file:
        head = file.read(_LOOKED_AT)
    if head[:2] == b"\x1f\x8b":
        raise UserError(f"{path} is compressed, which no tool reads; unpack it: gunzip --keep {path}")
    if not head.lstrip().startswith(b">"):
        raise UserError(f"{path} does not begin with '>'; a database is a FASTA file")
    return digest.hex()


def digest_of(path: Path) -> bytes:
    """A digest of a file's name, size, time of change, and both ends.  Raises UserError where it cannot be read."""
    try:
        with open(path, "rb") as file:
            stat = os.fstat(file.fileno())
            found = hashlib.blake2b(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode(), digest_size=16)
            found.update(file.read(_LOOKED_AT))
            file.seek(max(0, stat.st_size - _LOOKED_AT))
            found.update(file.read(_LOOKED_AT))
    except OSError as error:
        raise UserError(f"cannot read the database {path} ({error}); give a FASTA file") from error
    return found.digest()


def _count(path: Path) -> int:
    """Lines that begin with '>'."""
    count, before = 0, b"\n"
    with open(path, "rb") as file:
        while block := file.read(_READ_BYTES):
            count += block.count(b"\n>") + (before == b"\n" and block[:1] == b">")
            before = block[-1:]
    return count


def _shards(path: Path, num_shards: int, num_sequences: int, known: Path) -> Iterator[Shard]:
    if num_shards == 1:
        yield Shard(path, 0, 1, path)
        return
    folder = known / f"shards-{num_shards}"
    files = [folder / f"{number}.fasta" for number in range(num_shards)]
    if not folder.exists():
        aside = known / f".shards-{uuid.uuid4().hex[:8]}"
        aside.mkdir()
        _cut(path, [aside / file.name for file in files], num_sequences)
        try:
            aside.rename(folder)
        except OSError:  # another run was faster
            for file in aside.iterdir():
                file.unlink()
            aside.rmdir()
    for number, file in enumerate(files):
        yield Shard(path, number, num_shards, file)


def _cut(path: Path, files: list[Path], num_sequences: int) -> None:
    """Copy a database into shards of about as many bytes, none of them empty, sequences whole."""
    size, count = path.stat().st_size, len(files)
    number, written, seen = 0, 0, 0
    with ExitStack() as stack, open(path, "rb") as source:
        shards = [stack.enter_context(open(file, "wb")) for file in files]
        for line in source:
            if line.startswith(b">"):
                full = written >= size * (number + 1) // count
                # A sequence more in this shard, and those that are left would not be enough for the others.
                short = num_sequences - seen < count - number
                if seen > number and number + 1 < count and (full or short):
                    number += 1
                seen += 1
            shards[number].write(line)
            written += len(line)
