"""Text files as databases and editors leave them: plain, packed by gzip, bzip2 or xz; in UTF-8, UTF-16 or UTF-32.

A file is known by what it begins with, not by its name.
"""

import bz2
import codecs
import gzip
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from core.config import UserError, in_words

_MOST_BYTES = 2**30  # of what was packed: a small file may unpack to any length
_PACKED: dict[bytes, tuple[str, Callable[..., Any]]] = {
    b"\x1f\x8b": (".gz", gzip.open),
    b"BZh": (".bz2", bz2.open),
    b"\xfd7zXZ\0": (".xz", lzma.open),
}
_FOREIGN = {b"PK\x03\x04": "a zip archive", b"\x28\xb5\x2f\xfd": "packed by zstd", b"7z\xbc\xaf": "a 7z archive"}
PACKED_SUFFIXES = tuple(suffix for suffix, _ in _PACKED.values())


def read_text(path: Path, wanted: str, encoding: str = "utf-8-sig", otherwise: str | None = None) -> str:
    """The file's text, unpacked; in `encoding` where no byte order mark tells another.

    What is no letter in it stands there as the replacement character.

    wanted     what the file should be, for the line that says why it cannot be read
    otherwise  the encoding of a file that is not in `encoding`

    Raises UserError for a file that is not there, packed in a way that is not read, cut off within its packing, or
    longer than 1 GiB when it is unpacked.
    """
    try:
        with open(path, "rb") as file:
            start = file.read(8)
        opened = next((opens for magic, (_, opens) in _PACKED.items() if start.startswith(magic)), None)
        with open(path, "rb") if opened is None else opened(path) as file:
            content = file.read(-1 if opened is None else _MOST_BYTES + 1)
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        raise UserError(f"cannot read {path} ({error}); give {wanted}") from error
    foreign = next((kind for magic, kind in _FOREIGN.items() if content.startswith(magic)), None)
    if foreign is not None:
        raise UserError(f"{path} is {foreign}; unpack it and give {wanted}")
    if opened is not None and len(content) > _MOST_BYTES:
        raise UserError(f"{path} unpacks to more than {in_words(_MOST_BYTES)}; unpack it, or split it")
    encoding = _encoding(content) or encoding
    if otherwise is not None:
        with suppress(UnicodeDecodeError):
            return content.decode(encoding)
    return content.decode(otherwise or encoding, "replace")


def _encoding(content: bytes) -> str | None:
    """By the mark of the order of bytes, or by which of the first four are zero; None where neither tells."""
    if content.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):
        return "utf-32"
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "utf-16"
    zeros = "".join("0" if byte == 0 else "x" for byte in content[:4])
    wide = {"x000": "utf-32-le", "000x": "utf-32-be"}
    return wide.get(zeros) or {"x0": "utf-16-le", "0x": "utf-16-be"}.get(zeros[:2])


def unpacked_name(path: Path) -> Path:
    """The path without the ending of a packed file: a.cif of a.cif.gz, whose suffix and stem say what it holds."""
    return path.with_suffix("") if path.suffix in PACKED_SUFFIXES else path
