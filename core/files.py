"""Files that are whole or not there, and that say themselves whether they are still what was written.

Writing: `replace_file` writes aside, waits for the disk and renames; an OSError names the file it is about (`naming`),
because a full disk says nothing of where.

Reading: every durable file of ours has a CRC-32, 8 hex digits, of all of its bytes. That of a JSON file stands in the
file itself (`signed`, `unsigned`); that of another stands in a signed JSON file beside it. A CRC-32 sees every change
that lies within 32 bits, and of others all but one in 4 billion; it is against damage, not against forgery.
"""

import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from threading import get_ident
from typing import IO, Any

_PIECE_BYTES = 1 << 22
_THREADS = 4
_SIGNATURE = re.compile(rb'"crc32": "([0-9a-f]{8})"\n?\}\n?$')


class Damaged(ValueError):
    """Bytes that are not those that were written; says what is wrong, not where."""


def crc32(data: bytes | memoryview, before: str = "00000000") -> str:
    """Checksum of bytes that follow those of checksum `before`."""
    return f"{zlib.crc32(data, int(before, 16)):08x}"


def crc32_of(file: IO[bytes], num_bytes: int | None = None) -> str:
    """Checksum of a file's next bytes, by default of all that follow, of which a few MB are in memory at a time."""
    found = crc32(b"")
    while num_bytes is None or num_bytes > 0:
        piece = file.read(_PIECE_BYTES if num_bytes is None else min(num_bytes, _PIECE_BYTES))
        if not piece:
            break
        found = crc32(piece, found)
        num_bytes = None if num_bytes is None else num_bytes - len(piece)
    return found


def stamp(path: Path) -> dict[str, Any]:
    """The stamp that `check_stamp` compares a file with: its size and checksum, as JSON."""
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "crc32": crc32_of(file)}


def check_stamp(path: Path, expected: dict[str, Any]) -> None:
    """Raises Damaged for a file that is missing, of another size, or of other bytes than its stamp tells of."""
    if not path.is_file():
        raise Damaged(f"{path.name} is missing")
    if (size := path.stat().st_size) != expected["bytes"]:
        state = "truncated" if size < expected["bytes"] else "too long"
        raise Damaged(f"{path.name} is {state} ({size} of {expected['bytes']} bytes)")
    with path.open("rb") as file:
        if crc32_of(file) != expected["crc32"]:
            raise Damaged(f"{path.name} is damaged: its bytes have another checksum than when it was written")


def check_stamps(folder: Path, stamps: Mapping[str, dict[str, Any]]) -> None:
    """`check_stamp` of a folder's files by name, several at once: a checksum is computed slower than a disk reads."""
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(lambda name: check_stamp(folder / name, stamps[name]), stamps):
            pass


def signed(content: dict[str, Any]) -> bytes:
    """A JSON object whose last field is the checksum of the file, counted with zeros in the field's place."""
    text = json.dumps(content | {"crc32": "00000000"}, indent=1).encode() + b"\n"
    return _with_signature(text, crc32(text).encode())


def unsigned(raw: bytes) -> dict[str, Any]:
    """The content of what `signed` made, without the checksum.  Raises Damaged."""
    found = _SIGNATURE.search(raw)
    if found is None or crc32(_with_signature(raw, b"00000000")).encode() != found[1]:
        raise Damaged("is damaged: its bytes have another checksum than when it was written")
    content = json.loads(raw)
    del content["crc32"]
    return content


def _with_signature(text: bytes, signature: bytes) -> bytes:
    found = _SIGNATURE.search(text)
    assert found is not None
    return text[: found.start(1)] + signature + text[found.end(1) :]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of the block that names no file, as those of writing, names this one."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def write_file(path: Path, content: bytes) -> None:
    """Write, and return only when it is on the disk."""
    with naming(path):
        _write(path, content)


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        sync(file)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside a file's to write to, which takes the file's place when the block has ended well; see `naming`."""
    aside = path.with_name(f".{path.name}.{os.getpid()}-{get_ident()}.part")
    try:
        with naming(path):
            yield aside
        os.replace(aside, path)
    finally:
        aside.unlink(missing_ok=True)


def asides(path: Path) -> Iterator[Path]:
    """What was to take a file's place: where nobody writes it, of processes that were killed."""
    return path.parent.glob(f".{path.name}.*.part")


def replace_file(path: Path, content: bytes) -> None:
    """Write aside, then rename: the file is never half there, and is on the disk when this returns."""
    with replacing(path) as aside:
        _write(aside, content)


def save_figure(figure: Any, path: Path, dpi: int) -> None:
    """A matplotlib figure as a picture: a PNG, unless the name ends in another format of matplotlib's.

    It is drawn in memory, so that a full disk leaves what was there.
    """
    picture, ending = io.BytesIO(), path.suffix.removeprefix(".").lower()
    figure.savefig(picture, dpi=dpi, format=ending if ending in figure.canvas.get_supported_filetypes() else "png")
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, picture.getvalue())


def sync(file: IO[bytes]) -> None:
    """Return only when what was written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Return only when the names in a folder (new, renamed, removed) are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(handle)
    finally:
        os.close(handle)
