"""Structures as clients ask for them: their entries of the profiles' database, and their mmCIF files, in one tar.gz.

A client makes a database of HH-suite's of pdb70_a3m.ffdata and pdb70_a3m.ffindex, and searches it by itself.
"""

import io
import tarfile
import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path

from apps.fold.features.structures import structure_of
from apps.fold.features.text import read_text
from core.config import UserError

_MOST = 100
_GZIP = 31  # zlib's way to say gzip's header


class Templates:
    """The profiles of a database, by the names of chains (1abc_A), and the folder of their entries' mmCIF files."""

    def __init__(self, prefix: Path, folder: Path):
        self._data, self._index, self._folder = (
            prefix.with_name(f"{prefix.name}_a3m.ffdata"),
            prefix.with_name(f"{prefix.name}_a3m.ffindex"),
            folder,
        )

    @cached_property
    def _places(self) -> dict[str, tuple[int, int]]:
        """Offset and length, with a NUL byte behind it, of each chain's alignment."""
        found = {}
        for line in self._index.read_text(encoding="latin-1").splitlines():
            name, offset, length = line.split("\t")
            found[_plain(name.removesuffix(".a3m"))] = int(offset), int(length)
        return found

    def chosen(self, names: str) -> list[str]:
        """The chains of a list with commas, each once.  Raises UserError for one that is not here."""
        given = list(dict.fromkeys(filter(None, names.split(","))))
        if not 0 < len(given) <= _MOST:
            raise UserError(f"{len(given)} templates; ask for 1 to {_MOST}, as template/1abc_A,2def_B")
        for name in given:
            if _plain(name) not in self._places:
                raise UserError(f"this server has no template {name[:20]!r}; ask for those of a ticket's pdb70.m8")
            structure_of(_entry(name), self._folder)
        return given

    def packed(self, names: list[str]) -> Iterator[bytes]:
        """The tar.gz, piece by piece, as files are read."""
        pack, buffer = zlib.compressobj(1, wbits=_GZIP), io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w|") as tar:
            for name, content in self._contents(names):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
                yield pack.compress(buffer.getvalue())
                buffer.seek(0)
                buffer.truncate()
        yield pack.compress(buffer.getvalue()) + pack.flush()

    def _contents(self, names: list[str]) -> Iterator[tuple[str, bytes]]:
        profiles, index = bytearray(), []
        with self._data.open("rb") as file:
            for name in sorted(names):
                offset, length = self._places[_plain(name)]
                file.seek(offset)
                index.append(f"{name}\t{len(profiles)}\t{length}\n")
                profiles += file.read(length)
        yield "pdb70_a3m.ffdata", bytes(profiles)
        yield "pdb70_a3m.ffindex", "".join(index).encode()
        for entry in sorted({_entry(name) for name in names}):
            text = read_text(structure_of(entry, self._folder), "an mmCIF file")
            yield f"{entry}.cif", text.encode()


def _plain(name: str) -> str:
    """1ABC_A as 1abc_A, the way in which hits name it."""
    entry, _, chain = name.partition("_")
    return f"{entry.lower()}_{chain}"


def _entry(name: str) -> str:
    return name.partition("_")[0].lower()
