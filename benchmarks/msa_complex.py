"""Searches of a complex's chains: all at once by `fold msa`'s pool and by Ray, beside one after another.

FastFold published 3 times for a protein, which is searched in three databases, and 3 N times for N chains, by Ray. What
of that is the schedule's is measured here: searches only wait, so a machine of any number of cores shows it. Searches
of equal length are the best case; real ones are benchmarks/msa.py's, and end with the longest.

1. N chains in three databases, one search at a time, as the original pipeline has them
2. the same at once, by threads of this process
3. by Ray, started on this machine and with its processes running, as on a cluster that is up; its start is told, too

--quick leaves Ray out.
"""

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from apps.fold.search.database import Database, Shard, open_database
from apps.fold.search.hits import Hit
from apps.fold.search.jobs import SearchedDatabase, Searches, SearchJob, jobs_of
from apps.fold.search.on_ray import OWN, Cluster, installed_ray
from apps.fold.search.schedule import Machines, Threads
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command

DATABASES = 3
CHAINS = (1, 3)
MOST = 1.15  # of the longest search, as benchmarks/msa.py allows


@dataclass(frozen=True)
class Waits:
    """A tool that waits and finds its query; every machine has it.

    gathered  a folder in which so many searches have to have begun before any of them ends
    """

    seconds: float
    gathered: tuple[Path, int] | None = None
    version: str = "1"

    def depends_on(self) -> dict[str, Any]:
        return {"seconds": self.seconds}

    def installed(self) -> str:
        return self.version

    def opened(self, database: Database, cache: Path) -> Database:
        return open_database(database.path, len(database.shards), cache, database.name)

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        time.sleep(self.seconds)
        if self.gathered:
            folder, count = self.gathered
            (folder / f"{database.name}-{sequence}").touch()
            while len(list(folder.iterdir())) < count:
                time.sleep(0.1)
        return [Hit(database.name, sequence, 1.0)]


Engine = Callable[[Searches], Callable[[Sequence[SearchJob]], Machines[SearchJob]]]


def measure(options: Options) -> Measured:
    seconds = 0.1 if options.quick else 20.0 if options.full else 10.0
    with_ray = not options.quick and find_spec("ray") is not None
    rows, targets = [], []
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="msa-complex-") as name:
        for chains in CHAINS:
            row, of_chains = _row(Path(name), chains, seconds, with_ray)
            rows.append(row)
            targets += of_chains
    versions = {"ray": installed_ray()} if with_ray else {}
    return Measured(tuple(rows), tuple(targets), _notes(seconds, before), versions)


def _row(folder: Path, chains: int, seconds: float, with_ray: bool) -> tuple[Row, list[Target]]:
    sequences = ["MKT" + "A" * number for number in range(chains)]
    at_once = chains * DATABASES
    alone, expected = _searched(folder, sequences, seconds, lambda searches: lambda _: Threads(1, searches.keep))
    pool, by_pool = _searched(folder, sequences, seconds, lambda searches: lambda _: Threads(at_once, searches.keep))
    numbers = {"one_at_a_time_s": Number(alone, "s"), "pool_s": Number(pool, "s"), "pool": Number(alone / pool, "x")}
    walls, same = {"pool": pool}, by_pool == expected
    if with_ray:
        began = time.perf_counter()
        with Cluster(OWN, 1, 2**26, at_once) as cluster:
            engine = _on(cluster)
            _searched(folder, sequences, 0.0, engine, gather=True)  # so that all processes are there
            started = time.perf_counter() - began
            ray, by_ray = _searched(folder, sequences, seconds, engine)
        same = same and by_ray == expected
        walls["Ray"] = ray
        numbers |= {"ray_s": Number(ray, "s"), "ray": Number(alone / ray, "x"), "ray_start_s": Number(started, "s")}
    case = f"{chains} chain{'s' if chains > 1 else ''} in {DATABASES} databases"
    targets = [
        Target(f"{at_once} times as fast as one at a time, to {MOST}: {case}, {by}", at_once / MOST, alone / took)
        for by, took in walls.items()
    ]
    return Row({"searches": case}, numbers), [*targets, Target(f"the same bytes (1: yes): {case}", 1, same)]


def _on(cluster: Cluster) -> Engine:
    return lambda searches: cluster.machines(searches, lambda line: None)


def _searched(
    folder: Path, sequences: list[str], seconds: float, engine: Engine, gather: bool = False
) -> tuple[float, dict[str, bytes]]:
    """Seconds that searches that were not known took, and the files that they left.

    gather  no search ends before all have begun
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        begun = Path(name) / "begun"
        begun.mkdir()
        tool = Waits(seconds, (begun, len(sequences) * DATABASES) if gather else None)
        sources = []
        for number in range(DATABASES):
            path = Path(name) / f"db{number}.fasta"
            path.write_text(f">a{number}\nMKT\n")
            os.utime(path, ns=(0, 0))  # the same database in each round
            sources.append(SearchedDatabase(tool, open_database(path, 1, Path(name) / "cache", path.stem)))
        searches = Searches(Path(name) / "cache")
        began = time.perf_counter()
        failed = searches.run_on(engine(searches), jobs_of(sequences, sources))
        wall = time.perf_counter() - began
        if failed:
            raise UserError(f"a search failed: {next(iter(failed.values()))}")
        return wall, {path.name: path.read_bytes() for path in sorted(searches.folder.iterdir())}


def _notes(seconds: float, before: float) -> tuple[str, ...]:
    return (
        f"each search waits {seconds:g} s and computes nothing; real ones at once are as fast as the cores let them be "
        "(benchmarks/msa.py)",
        "ray_start_s: to start Ray on this machine, and the processes that search, of which one has to begin for each "
        "search at once; a cluster that is up has them",
        f"load average {before:.1f} before and {os.getloadavg()[0]:.1f} after",
    )


MEASURES = (
    "apps/fold/search",
    "benchmarks/msa_complex.py",
)
BENCHMARK = Benchmark("msa_complex", "Searches of a complex's chains at once", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="msa_complex"), sys.argv[1:]))
