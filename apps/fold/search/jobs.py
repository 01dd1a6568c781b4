"""All searches of a run: every sequence in every shard of every database, by its tool, several at once.

1. a job's result is a file in the cache, named by all that it depends on: the sequence, the program and its version,
   the options, Z and the shard. What is there is not searched again, after a crash or in another run
2. the others run in a pool, each a process of the tool; the longest sequences first
3. when the last shard of a database is done, its hits are ranked together
"""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from apps.fold.search.database import Database, Shard
from apps.fold.search.hits import Hit
from core.config import UserError


class Tool(Protocol):
    """A program that searches (jackhmmer.py, hhblits.py, mmseqs.py)."""

    def told(self) -> dict[str, Any]:
        """What its results depend on: its version and options."""
        ...

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        """The hits of a sequence.  Raises UserError with what the program said, where it fails."""
        ...


@dataclass(frozen=True)
class Source:
    """A database with the tool that searches it."""

    tool: Tool
    database: Database


@dataclass(frozen=True)
class Job:
    """One sequence in one shard."""

    sequence: str
    source: Source
    shard: Shard


def jobs_of(sequences: Iterable[str], sources: Iterable[Source]) -> list[Job]:
    """Every sequence once, the longest first; of each the databases side by side, so that tools run together."""
    sources = list(sources)
    distinct = sorted(set(sequences), key=lambda sequence: (-len(sequence), sequence))
    return [Job(s, source, shard) for s in distinct for source in sources for shard in source.database.shards]


class Searches:
    """Runs jobs and keeps their results in a folder."""

    def __init__(self, cache: Path):
        self.folder = cache / "searches"
        self.folder.mkdir(parents=True, exist_ok=True)

    def path(self, job: Job) -> Path:
        """Where a job's result is kept."""
        told = {
            "sequence": job.sequence,
            **job.source.tool.told(),
            "database": job.source.database.identity,
            "Z": job.source.database.num_sequences,
            "shard": [job.shard.number, job.shard.count],
        }
        return self.folder / (hashlib.blake2b(json.dumps(told).encode(), digest_size=16).hexdigest() + ".json")

    def read(self, job: Job) -> list[Hit]:
        """The hits of a job that is done."""
        return [Hit(**hit) for hit in json.loads(self.path(job).read_text(encoding="utf-8"))]

    def run(
        self, jobs: list[Job], workers: int, done: Callable[[Job, bool], None] = lambda job, kept: None
    ) -> dict[Job, str]:
        """Run what has no result yet, `workers` at once.  Returns job -> what went wrong.

        done  called after each job, with whether its result was there before
        """
        missing = []
        for job in jobs:
            if self.path(job).exists():
                done(job, True)
            else:
                missing.append(job)
        failed: dict[Job, str] = {}
        with ThreadPoolExecutor(workers) as pool:  # a thread waits for a process of the tool
            futures = {pool.submit(self._search, job): job for job in missing}
            try:
                for future in _completed(futures):
                    try:
                        future.result()
                    except (UserError, OSError, ValueError) as error:
                        failed[futures[future]] = str(error).splitlines()[0]
                    done(futures[future], False)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        return failed

    def _search(self, job: Job) -> None:
        hits = job.source.tool.search(job.sequence, job.source.database, job.shard, self.folder)
        path = self.path(job)
        aside = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
        aside.write_text(json.dumps([asdict(hit) for hit in hits]), encoding="utf-8")
        os.replace(aside, path)


def _completed(futures: Iterable[Future]) -> Iterator[Future]:
    waiting = set(futures)
    while waiting:
        ready, waiting = wait(waiting, return_when=FIRST_COMPLETED)
        yield from ready
