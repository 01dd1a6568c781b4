"""A rank's file of tensors: each as `torch.save` writes it, one after the other, as Distributed Checkpoint (DCP) does.

Every tensor's bytes, a *chunk*, have a checksum, taken while they are written and compared before they are unpickled.
Comparing reads the chunk, and unpickling then finds it in the page cache: the disk is read once, and what is in memory
is the tensor alone.
"""

import io
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from core.files import Damaged, crc32, crc32_of, naming, sync


@dataclass(frozen=True)
class Chunk:
    """The place of a box of a tensor.  crc32: of its bytes; None in checkpoints of format 1, which have none."""

    file: str
    first_byte: int
    num_bytes: int
    crc32: str | None


def write_chunks(path: Path, tensors: Iterable[tuple[MetadataIndex, Tensor]]) -> dict[MetadataIndex, Chunk]:
    """Write tensors to a new file, on the disk when this returns.  OSErrors name the file."""
    written = {}
    with naming(path), path.open("wb") as file:
        for index, tensor in tensors:
            first_byte, stream = file.tell(), _Counted(file)
            tensor = tensor.detach().cpu()
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # torch.save writes all of the storage that a view shows a part of
            torch.save(tensor, cast(IO[bytes], stream))
            stream.raise_failure()
            written[index] = Chunk(path.name, first_byte, file.tell() - first_byte, stream.crc32)
        sync(file)
    return written


@contextmanager
def open_chunks(folder: Path) -> "Iterator[ChunkReader]":
    """Reads chunks of a folder's files, each of which is opened once."""
    reader = ChunkReader(folder)
    try:
        yield reader
    finally:
        reader.close()


class ChunkReader:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[str, IO[bytes]] = {}
        self._checked: set[Chunk] = set()

    def check(self, chunk: Chunk) -> None:
        """Raises Damaged for bytes that were not written so."""
        if chunk.crc32 is None or chunk in self._checked:
            return
        file = self._open(chunk)
        file.seek(chunk.first_byte)
        if crc32_of(file, chunk.num_bytes) != chunk.crc32:
            last = chunk.first_byte + chunk.num_bytes - 1
            raise Damaged(
                f"{chunk.file} is damaged: its bytes {chunk.first_byte} to {last} have another checksum than when they "
                "were written"
            )
        self._checked.add(chunk)

    def read(self, chunk: Chunk) -> Tensor:
        """The tensor, by `weights_only`.  Raises Damaged before anything is unpickled."""
        self.check(chunk)
        window = cast(IO[bytes], _Window(self._open(chunk), chunk))
        return torch.load(window, map_location="cpu", weights_only=True)

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def _open(self, chunk: Chunk) -> IO[bytes]:
        if chunk.file not in self._files:
            self._files[chunk.file] = (self.folder / chunk.file).open("rb")
        return self._files[chunk.file]


class _Counted(io.RawIOBase):
    """Hands on what is written, and knows its checksum.

    torch.save's writer, which is C++, answers an exception from here with one of its own, that says nothing of a full
    disk: so the first failure is kept, and raised when torch.save is done.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._failure = file, None
        self.crc32 = crc32(b"")

    def writable(self) -> bool:
        return True

    def write(self, data) -> int:
        with memoryview(data).cast("B") as view:
            if self._failure is None:
                try:
                    self._file.write(view)
                except OSError as error:
                    self._failure = error
            self.crc32 = crc32(view, self.crc32)
            return len(view)

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


class _Window(io.RawIOBase):
    """The bytes of a chunk, as a file of their own."""

    def __init__(self, file: IO[bytes], chunk: Chunk) -> None:
        self._file, self._first_byte, self._num_bytes, self._at = file, chunk.first_byte, chunk.num_bytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = max(0, offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._num_bytes}[whence])
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer) -> int:
        with memoryview(buffer).cast("B") as view:
            wanted = max(0, min(len(view), self._num_bytes - self._at))
            self._file.seek(self._first_byte + self._at)
            self._at += (read := self._file.readinto(view[:wanted]))  # pyright: ignore[reportAttributeAccessIssue]
            return read
