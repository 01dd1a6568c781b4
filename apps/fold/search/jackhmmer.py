"""jackhmmer (HMMER 3): one sequence against one FASTA file, with the original pipeline's options, one iteration.

Its alignment says which columns are the query's (`#=GC RF`); what a hit has between them is lower case in A3M.
"""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.fold.search.database import Database, Shard, open_database
from apps.fold.search.hits import Hit
from apps.fold.search.program import found, run, said_by
from core.config import UserError

_OPTIONS = ("--noali", "-N", "1", "--F1", "0.0005", "--F2", "5e-05", "--F3", "5e-07")
_NUMBERED = b"# WARNING: seq names have been made unique"
_DESCRIPTION = 22  # fields of the table before the last, which is text
_READING = 2  # of the program's files into hits; counted on where they become other hits, so that no old ones are taken
INSTALL = "apt-get install hmmer, or conda install -c bioconda hmmer"


@dataclass(frozen=True)
class Jackhmmer:
    """The search by jackhmmer and its options; `version` is what the program prints."""

    program: str
    version: str
    e_value: float
    threads: int

    def depends_on(self) -> dict[str, Any]:
        return {"version": self.version, "e_value": self.e_value, "reading": _READING}

    def installed(self) -> str:
        return version(self.program)

    def opened(self, database: Database, cache: Path) -> Database:
        return open_database(database.path, len(database.shards), cache, database.name)

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        return search(self.program, sequence, shard.file, database.num_sequences, self.e_value, self.threads, scratch)


def version(program: str) -> str:
    """The version that the program prints.  Raises UserError where it is not installed."""
    said = said_by([found(program, INSTALL), "-h"])
    return next((line.strip("# ").split(";")[0] for line in said if "HMMER" in line), program)


def search(
    program: str, sequence: str, database: Path, num_sequences: int, e_value: float, threads: int, scratch: Path
) -> list[Hit]:
    """The hits of a sequence in a FASTA file, E-values as if it held `num_sequences`.

    Raises UserError with the last that the program said, where it fails.
    """
    with tempfile.TemporaryDirectory(prefix="jackhmmer-", dir=scratch) as folder:
        query, aligned, table = (Path(folder, name) for name in ("query.fasta", "found.sto", "found.tbl"))
        query.write_text(f">query\n{sequence}\n", encoding="ascii")
        limits = ("-E", str(e_value), "--incE", str(e_value), "-Z", str(num_sequences), "--cpu", str(threads))
        files = ("-o", "/dev/null", "-A", aligned, "--domtblout", table, query, database)
        run([program, *_OPTIONS, *limits, *files], database)
        if not aligned.exists() or not aligned.stat().st_size:
            return []
        return _hits(aligned.read_bytes(), _parts(table.read_bytes()))


def _parts(table: bytes) -> list[tuple[bytes, float]]:
    """The parts of targets that were found, in order: their names in the alignment, and the whole targets' scores.

    A target may be in several parts, and several targets may have one name.
    """
    fields = (line.split(maxsplit=_DESCRIPTION) for line in table.splitlines() if not line.startswith((b"# ", b"#-")))
    return [(b"%b/%b-%b" % (row[0], row[17], row[18]), float(row[7])) for row in fields if len(row) >= _DESCRIPTION]


def _hits(stockholm: bytes, parts: list[tuple[bytes, float]]) -> list[Hit]:
    """The rows of the alignment behind the query, in the order of the table, which may have more.

    Where names repeat, HMMER writes numbers before all of them, which are taken off again.
    """
    rows: dict[bytes, list[bytes]] = {}
    columns, numbered = [], False
    for line in stockholm.splitlines():
        fields = line.split()
        if line.startswith(b"#=GC RF"):
            columns.append(fields[2])
        elif len(fields) == 2:  # comments and marks have more, and may begin like a name
            rows.setdefault(fields[0], []).append(fields[1])
        numbered = numbered or line.startswith(_NUMBERED)
    is_column = [letter not in ".-~" for letter in b"".join(columns).decode("ascii")]
    hits, listed = [], iter(parts)
    for number, (given, letters) in enumerate(rows.items()):
        name = given.partition(b"|")[2] if numbered else given
        if number > 0:  # the first is the query
            score = next((score for part, score in listed if part == name), None)
            text = name.decode("utf-8", "replace")
            if score is None:
                raise UserError(f"jackhmmer's table lacks {text}, a row of its alignment; give one of HMMER 3")
            hits.append(Hit(text, _a3m(b"".join(letters).decode("ascii"), is_column), score))
    return hits


def _a3m(letters: str, is_column: list[bool]) -> str:
    """Columns in upper case, '-' for gaps; insertions in lower case."""
    parts = []
    for letter, column in zip(letters, is_column):
        gap = letter in ".-"
        if column:
            parts.append("-" if gap else letter.upper())
        elif not gap:
            parts.append(letter.lower())
    return "".join(parts)
