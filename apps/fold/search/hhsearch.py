"""hhsearch (HH-suite 3): an alignment against a database of profiles of known structures, such as PDB70.

With the original pipeline's options. Its result, an .hhr file, names the structures and says which residues correspond
(features/hhr.py).
"""

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from apps.fold.search.database import Database, Shard
from apps.fold.search.hhblits import open_profiles, version
from apps.fold.search.program import run
from core.config import UserError

_OPTIONS = ("-maxseq", "1000000")


@dataclass(frozen=True)
class Hhsearch:
    """The search by HHsearch and its options; `version` is what the program prints."""

    program: str
    version: str
    threads: int

    def installed(self) -> str:
        return version(self.program, "HHsearch")

    def opened(self, database: Database, cache: Path) -> Database:
        return open_profiles(database.path, database.name)


@dataclass(frozen=True)
class ProfileJob:
    """One sequence, by its alignment (A3M), in one database."""

    suffix: ClassVar[str] = ".hhr"

    sequence: str
    a3m: str
    tool: Hhsearch
    database: Database

    @property
    def shard(self) -> Shard:
        return self.database.shards[0]

    def depends_on(self) -> dict[str, Any]:
        alignment = hashlib.blake2b(self.a3m.encode(), digest_size=16).hexdigest()
        return {"a3m": alignment, "version": self.tool.version, "database": self.database.identity}

    def result(self, scratch: Path) -> str:
        """Raises UserError with the last that the program said, where it fails."""
        with tempfile.TemporaryDirectory(prefix="hhsearch-", dir=scratch) as folder:
            query, hits = Path(folder, "query.a3m"), Path(folder, "found.hhr")
            query.write_text(self.a3m, encoding="utf-8")
            files = ("-i", query, "-d", self.database.path, "-o", hits)
            run([self.tool.program, *_OPTIONS, "-cpu", str(self.tool.threads), *files], self.database.path)
            text = hits.read_text(encoding="latin-1") if hits.exists() else ""
        if not text.startswith("Query"):
            raise UserError(f"{self.tool.program} wrote no result on {self.database.path}")
        self.database.check_unchanged()
        return text
