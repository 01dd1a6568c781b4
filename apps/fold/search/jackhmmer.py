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

_OPTIONS = ("--noali", "-N", "1", "--F1", "0.0005", "--F2", "5e-05", "--F3", "5e-07")
INSTALL = "apt-get install hmmer, or conda install -c bioconda hmmer"


@dataclass(frozen=True)
class Jackhmmer:
    """The search by jackhmmer and its options; `version` is what the program prints."""

    program: str
    version: str
    e_value: float
    threads: int

    def depends_on(self) -> dict[str, Any]:
        return {"version": self.version, "e_value": self.e_value}

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
        files = ("-o", "/dev/null", "-A", aligned, "--tblout", table, query, database)
        run([program, *_OPTIONS, *limits, *files], database)
        if not aligned.exists() or not aligned.stat().st_size:
            return []
        return _hits(aligned.read_text(encoding="latin-1"), _scores(table.read_text(encoding="latin-1")))


def _scores(table: str) -> dict[str, float]:
    """target -> score of the full sequence."""
    rows = (line.split() for line in table.splitlines() if line and not line.startswith("#"))
    return {row[0]: float(row[5]) for row in rows}


def _hits(stockholm: str, scores: dict[str, float]) -> list[Hit]:
    rows: dict[str, list[str]] = {}
    columns: list[str] = []
    for line in stockholm.splitlines():
        if line.startswith("#=GC RF"):
            columns.append(line.split()[2])
        elif line and not line.startswith(("#", "//")):
            name, letters = line.split()
            rows.setdefault(name, []).append(letters)
    is_column = [letter not in ".-~" for letter in "".join(columns)]
    return [
        Hit(name, _a3m("".join(parts), is_column), scores[name.rpartition("/")[0]])
        for name, parts in rows.items()
        if name.rpartition("/")[0] in scores
    ]


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
