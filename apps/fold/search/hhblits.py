"""hhblits (HH-suite 3): one sequence against a database of profiles, with the original pipeline's options.

A database is a prefix: PREFIX_a3m, PREFIX_hhm and PREFIX_cs219, each with .ffdata and .ffindex. Its hits come as A3M,
the best first; rows have no score of their own.
"""

import hashlib
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.fold.search.database import Database, Shard, Stamp, digest_of
from apps.fold.search.hits import Hit
from apps.fold.search.program import found, run, said_by
from core.config import UserError

_OPTIONS = ("-n", "3", "-maxseq", "1000000", "-realign_max", "100000", "-maxfilt", "100000")
_OPTIONS += ("-min_prefilter_hits", "1000", "-v", "1")
_PARTS = ("a3m", "hhm", "cs219")
INSTALL = "apt-get install hhsuite, or conda install -c bioconda hhsuite"


@dataclass(frozen=True)
class Hhblits:
    """The search by HHblits and its options; `version` is what the program prints."""

    program: str
    version: str
    e_value: float
    threads: int

    def depends_on(self) -> dict[str, Any]:
        return {"version": self.version, "e_value": self.e_value}

    def installed(self) -> str:
        return version(self.program)

    def opened(self, database: Database, cache: Path) -> Database:
        return open_profiles(database.path, database.name)

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        """Raises UserError with the last that the program said, where it fails."""
        with tempfile.TemporaryDirectory(prefix="hhblits-", dir=scratch) as folder:
            query, aligned = Path(folder, "query.fasta"), Path(folder, "found.a3m")
            query.write_text(f">query\n{sequence}\n", encoding="ascii")
            limits = ("-e", str(self.e_value), "-cpu", str(self.threads))
            files = ("-i", query, "-d", database.path, "-oa3m", aligned, "-o", "/dev/null")
            run([self.program, *_OPTIONS, *limits, *files], database.path)
            return rows_of(aligned.read_text(encoding="latin-1"), sequence, database.path)


def version(program: str, name: str = "HHblits") -> str:
    """The version that a program of HH-suite prints.  Raises UserError where it is not installed."""
    said = said_by([found(program, INSTALL), "-h"])
    return next((line.strip().rstrip(":") for line in said if line.startswith(name)), program)


def open_profiles(path: Path, name: str) -> Database:
    """A database of HH-suite's, known by names, sizes, times of change and both ends of its files.

    Raises UserError where a file of it is missing.
    """
    found, stamps = hashlib.blake2b(digest_size=16), []
    for part in _PARTS:
        for suffix in ("ffindex", "ffdata"):
            file = path.with_name(f"{path.name}_{part}.{suffix}")
            if not file.is_file():
                raise UserError(
                    f"there is no {file}; give the prefix of an HH-suite database, {path.name}_a3m.ffdata without _a3m"
                )
            stamps.append(Stamp.of(file))
            found.update(digest_of(file))
    return Database(name, path, found.hexdigest(), 0, (Shard(path, 0, 1, path),), tuple(stamps))


def rows_of(a3m: str, sequence: str, origin: object) -> list[Hit]:
    """Rows behind the query, scored by their place."""
    # Headers hold '>' of their own: UniRef has a (1->4)-alpha-glucan branching enzyme.
    entries = [entry.partition("\n") for entry in re.split("^>", a3m, flags=re.MULTILINE)[1:]]
    hits = []
    for number, (header, _, letters) in enumerate(entries[1:]):
        row, words = "".join(letters.split()), header.split()
        name = words[0] if words else f"hit{number}"
        if sum(not letter.islower() for letter in row) != len(sequence):
            raise UserError(f"hhblits' row {name} of {origin} does not have the query's {len(sequence)} columns")
        hits.append(Hit(name, row, -float(number)))
    return hits
