"""All searches of a run: every sequence in every shard of every database, by its tool, several at once.

1. a job's result is a file in the cache, named by all that it depends on: the sequence, the program and its version,
   the options, Z and the shard. What is there is not searched again, after a crash or in another run
2. the others run side by side (schedule.py), each a process of the tool; the longest sequences first
3. when the last shard of a database is done, its hits are ranked together; hhsearch begins with what came of that
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol, TypeVar

from apps.fold.search.database import Database, Shard
from apps.fold.search.hits import Hit, as_a3m, ranked
from apps.fold.search.schedule import Machines, Threads, run_all
from core.files import replace_file


class Tool(Protocol):
    """A program that searches (jackhmmer.py, hhblits.py, mmseqs.py)."""

    def depends_on(self) -> dict[str, Any]:
        """The version and options that its results depend on."""
        ...

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        """The hits of a sequence.  Raises UserError with what the program said, where it fails."""
        ...


@dataclass(frozen=True)
class SearchedDatabase:
    """A database with the tool that searches it."""

    tool: Tool
    database: Database


class Search(Protocol):
    """A search that a process of a tool does once, and whose result is kept."""

    suffix: ClassVar[str]
    """Of the file that its result is kept in."""

    def depends_on(self) -> dict[str, Any]:
        """All that the result depends on."""
        ...

    def result(self, scratch: Path) -> str:
        """Search, and return the text to keep.  Raises UserError with the program's message, where it fails."""
        ...


S = TypeVar("S", bound=Search)


@dataclass(frozen=True)
class SearchJob:
    """One sequence in one shard."""

    suffix: ClassVar[str] = ".json"

    sequence: str
    source: SearchedDatabase
    shard: Shard

    @property
    def tool(self) -> Tool:
        return self.source.tool

    @property
    def database(self) -> Database:
        return self.source.database

    def depends_on(self) -> dict[str, Any]:
        database = self.source.database
        return {
            "sequence": self.sequence,
            **self.source.tool.depends_on(),
            "database": database.identity,
            "Z": database.num_sequences,
            "shard": [self.shard.number, self.shard.count],
        }

    def result(self, scratch: Path) -> str:
        hits = self.source.tool.search(self.sequence, self.source.database, self.shard, scratch)
        self.source.database.check_unchanged()
        return json.dumps([asdict(hit) for hit in hits])


def jobs_of(sequences: Iterable[str], sources: Iterable[SearchedDatabase]) -> list[SearchJob]:
    """Every sequence once, the longest first; of each the databases side by side, so that tools run together."""
    sources = list(sources)
    distinct = sorted(set(sequences), key=lambda sequence: (-len(sequence), sequence))
    return [SearchJob(s, source, shard) for s in distinct for source in sources for shard in source.database.shards]


class Searches:
    """Runs jobs and keeps their results in a folder."""

    def __init__(self, cache: Path):
        self.folder = cache / "searches"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, job: Search) -> Path:
        """The path of a job's result."""
        name = hashlib.blake2b(json.dumps(job.depends_on()).encode(), digest_size=16).hexdigest()
        return self.folder / (name + job.suffix)

    def read(self, job: Search) -> str:
        """The result of a job that is done."""
        return self.path(job).read_text(encoding="utf-8")

    def hits(self, job: SearchJob) -> list[Hit]:
        return [Hit(**hit) for hit in json.loads(self.read(job))]

    def run(
        self, jobs: list[S], workers: int, done: Callable[[S, bool], None] = lambda job, kept: None
    ) -> dict[S, str]:
        """Run what has no result yet on this machine, `workers` at once.  See `run_on`."""
        return self.run_on(lambda missing: Threads(workers, self.keep), jobs, done)

    def run_on(
        self,
        machines: Callable[[Sequence[S]], Machines[S]],
        jobs: list[S],
        done: Callable[[S, bool], None] = lambda job, kept: None,
    ) -> dict[S, str]:
        """Run what has no result yet.  Returns job -> what went wrong.

        machines  what runs given jobs and keeps their results here; it is not asked where every result is there
        done      called after each job, with whether its result was there before
        """
        missing = []
        for job in jobs:
            if self.path(job).exists():
                done(job, True)
            else:
                missing.append(job)
        failed: dict[S, str] = {}
        if not missing:
            return failed
        with closing(run_all(missing, machines(missing))) as ended:
            for job, reason in ended:
                if reason:
                    failed[job] = reason
                done(job, False)
        return failed

    def keep(self, job: Search) -> None:
        """Search, and keep the result.  Raises UserError where the tool fails."""
        replace_file(self.path(job), job.result(self.folder).encode())


@dataclass(frozen=True)
class Aligned:
    """A sequence's rows of one database, as A3M."""

    database: str
    rows: int
    a3m: str


def aligned(searches: Searches, sequence: str, source: SearchedDatabase, max_rows: int) -> Aligned:
    """What came of a sequence's searches in a database, all of which are done: the best rows."""
    hits = [hit for job in jobs_of([sequence], [source]) for hit in searches.hits(job)]
    best = ranked(hits, max_rows)
    return Aligned(source.database.name, len(best), as_a3m(sequence, best))
