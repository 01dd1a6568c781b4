"""MMseqs2: one sequence against a FASTA file or a database of MMseqs2's.

A FASTA file is made a database once, in the cache. E-values depend on how many letters a database has, and there is no
option to say another number, so these databases are not cut into shards.
"""

import json
import shutil
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.fold.search.database import Database, Shard, Stamp, digest_of, identify
from apps.fold.search.hits import Hit, aligned_row
from apps.fold.search.program import found, run, said_by

_COLUMNS = ("target", "bits", "qstart", "tstart", "tend", "qaln", "taln", "theader")
_READING = 2  # of the table into hits; counted on where they become other hits, so that no old ones are taken
_MOST = 100_000
INSTALL = "apt-get install mmseqs2, or conda install -c bioconda mmseqs2"


@dataclass(frozen=True)
class Mmseqs:
    """The search by MMseqs2 and its options; sensitivity is MMseqs2's, 1 to 8."""

    program: str
    version: str
    e_value: float
    sensitivity: float
    threads: int

    def depends_on(self) -> dict[str, Any]:
        known = {"version": self.version, "e_value": self.e_value, "sensitivity": self.sensitivity}
        return {**known, "reading": _READING}

    def installed(self) -> str:
        return version(self.program)

    def opened(self, database: Database, cache: Path) -> Database:
        return open_mmseqs(database.path, self.program, cache, database.name)

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        """Raises UserError with the last that the program said, where it fails."""
        with tempfile.TemporaryDirectory(prefix="mmseqs-", dir=scratch) as folder:
            query, table = Path(folder, "query.fasta"), Path(folder, "found.tsv")
            query.write_text(f">query\n{sequence}\n", encoding="ascii")
            limits = ("-e", str(self.e_value), "-s", str(self.sensitivity), "--max-seqs", str(_MOST))
            more = ("--threads", str(self.threads), "--format-output", ",".join(_COLUMNS), "-v", "1")
            run([self.program, "easy-search", query, shard.file, table, Path(folder, "scratch"), *limits, *more],
                database.path)  # fmt: skip
            lines = table.read_text(encoding="latin-1").split("\n")
            return [_hit(line.split("\t", len(_COLUMNS) - 1), len(sequence)) for line in lines if line]


def version(program: str) -> str:
    """The version that the program prints.  Raises UserError where it is not installed."""
    said = said_by([found(program, INSTALL), "version"])
    return f"MMseqs2 {said[0].strip()}" if said else program


def open_mmseqs(path: Path, program: str, cache: Path, name: str) -> Database:
    """A database of MMseqs2's, made of a FASTA file where it is one.  Raises UserError for a file that is neither."""
    stamps = (Stamp.of(path),)
    if path.with_name(f"{path.name}.dbtype").is_file():
        identity = digest_of(path).hex()
        return Database(name, path, identity, 0, (Shard(path, 0, 1, path),), stamps)
    identity = identify(path)
    made = cache / "databases" / identity / "mmseqs"
    if not made.exists():
        made.parent.mkdir(parents=True, exist_ok=True)
        aside = made.with_name(f".mmseqs-{uuid.uuid4().hex[:8]}")
        aside.mkdir()
        try:
            run([program, "createdb", path, aside / "database", "-v", "1"], path)
            (aside / "made_of.json").write_text(json.dumps({"path": str(path)}), encoding="utf-8")
            aside.rename(made)
        except OSError:  # another run was faster
            if not made.exists():
                raise
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return Database(name, path, identity, 0, (Shard(path, 0, 1, made / "database"),), stamps)


def _hit(columns: list[str], length: int) -> Hit:
    """A row of the table; mmseqs counts residues from 1.

    It is called by the first word of the database's own line, as other tools call it: of tr|A0A146SKV9|A0A146SKV9_FUNHE
    mmseqs says A0A146SKV9 alone, and rows are paired by what comes behind that.
    """
    target, bits, first, begin, end, query, letters, header = columns
    name = next(iter(header.split()), target)
    return Hit(f"{name}/{begin}-{end}", aligned_row(query, letters, int(first) - 1, length), float(bits))
