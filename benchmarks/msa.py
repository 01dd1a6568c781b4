"""Searches of `fold msa`: how much longer than its longest search a run of several at once takes.

1. A FASTA file and profiles for hhblits, made from a seed; in all of them some are like the query.
2. Round by round, each set of searches one at a time, then as many at once as there are cores. What is searched is
   not in the cache; shards are cut and MMseqs2's database is made before.
3. `fold msa` again, as a command, with everything in its cache.

Sets: one database in as many shards as there are cores (jackhmmer); every tool that is installed, in one shard.
--full takes seven rounds instead of three.
"""

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from apps.fold.search import hhblits, jackhmmer, mmseqs
from apps.fold.search.database import Database, Shard, open_database
from apps.fold.search.hits import Hit, ranked
from apps.fold.search.jobs import SearchedDatabase, Searches, SearchJob, Tool, jobs_of
from benchmarks.result import ROOT, Measured, Missing, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from tests.support.hhsuite import HAS_HHSUITE, LETTERS, database, family, like

QUERY_LENGTH = 800
LENGTH = 400  # residues of each sequence
MOST = 1.15  # of the longest search
_LETTER_OF_BYTE = bytes(ord(LETTERS[byte % 20]) for byte in range(256))
_E_VALUES = {"jackhmmer": 1e-4, "hhblits": 1e-3, "mmseqs": 1e-4}


@dataclass(frozen=True)
class Sizes:
    """Sequences that jackhmmer and MMseqs2 search, families that hhblits does, and rounds."""

    jackhmmer: int
    mmseqs: int
    hhblits: int
    rounds: int


@dataclass(frozen=True)
class Timed:
    """A tool that notes how long each of its searches took, in seconds."""

    tool: Tool
    took: list[float] = field(default_factory=list, hash=False, compare=False)

    def depends_on(self) -> dict[str, Any]:
        return self.tool.depends_on()

    def search(self, sequence: str, database: Database, shard: Shard, scratch: Path) -> list[Hit]:
        began = time.perf_counter()
        found = self.tool.search(sequence, database, shard, scratch)
        self.took.append(time.perf_counter() - began)
        return found


@dataclass(frozen=True)
class Round:
    """Seconds: of each search where they run one at a time and where they run at once, and of all these together."""

    alone: list[float]
    beside: list[float]
    wall: float
    identical: bool


def measure(options: Options) -> Measured:
    cores = len(os.sched_getaffinity(0))
    sizes = Sizes(2_000, 500, 2, 1) if options.quick else Sizes(400_000, 1_000, 6, 7 if options.full else 3)
    with tempfile.TemporaryDirectory(prefix="msa-") as name:
        folder = Path(name)
        query, sources, versions = made(folder, sizes)
        sets = {"every tool, one shard of each": sources}
        if "jackhmmer" in versions:
            tool = sources[0].tool
            whole = sources[0].database
            cut = open_database(whole.path, max(2, cores), folder / "cache", whole.name)
            sets = {f"jackhmmer, {len(cut.shards)} shards": [SearchedDatabase(tool, cut)], **sets}
        rounds: dict[str, list[Round]] = {name: [] for name in sets}
        before = os.getloadavg()[0]
        for _ in range(sizes.rounds):
            for name, of_set in sets.items():
                rounds[name].append(one_round(query, of_set, folder / "cache", cores))
        again = [rerun(folder, query, sources, cores) for _ in range(1 if options.quick else max(3, sizes.rounds))]
        found = {name: _found(query, of_set, folder / "cache") for name, of_set in sets.items()}
    names = list(sets)
    same = all(one.identical for of_set in rounds.values() for one in of_set)
    if len(names) == 2:  # the shards' hits together, beside those of the database whole
        same = same and found[names[0]][0] == found[names[1]][0]
    rows = [_row(name, of_set, sum(map(len, found[name]))) for name, of_set in rounds.items()]
    known, cpu = (median(seconds) for seconds in zip(*again, strict=True))
    rows.append(Row({"searches": "fold msa, all known"}, {"wall_s": Number(known, "s"), "cpu_s": Number(cpu, "s")}))
    targets = [target for name, of_set in rounds.items() for target in _targets(name, of_set)]
    targets += [
        Target("hits at once and in shards are those of one search at a time and of the whole (1: identical)", 1, same),
        Target("1 s / fold msa with everything in its cache", 1.0, 1 / known),
    ]
    return Measured(tuple(rows), tuple(targets), _notes(cores, sizes, list(versions), before), versions)


def made(folder: Path, sizes: Sizes) -> tuple[str, list[SearchedDatabase], dict[str, str]]:
    """The query, what each installed tool searches, and the tools' versions."""
    draw = random.Random(0)
    query = _random(draw, QUERY_LENGTH)
    sources, versions = [], {}
    cache = folder / "cache"
    if shutil.which("jackhmmer"):
        versions["jackhmmer"] = jackhmmer.version("jackhmmer")
        tool = jackhmmer.Jackhmmer("jackhmmer", versions["jackhmmer"], _E_VALUES["jackhmmer"], 1)
        path = fasta(folder / "sequences.fasta", query, sizes.jackhmmer, draw)
        sources.append(SearchedDatabase(Timed(tool), open_database(path, 1, cache, path.stem)))
    if HAS_HHSUITE:
        versions["hhblits"] = hhblits.version("hhblits")
        tool = hhblits.Hhblits("hhblits", versions["hhblits"], _E_VALUES["hhblits"], 1)
        path = profiles(folder / "profiles", query, sizes.hhblits, draw)
        sources.append(SearchedDatabase(Timed(tool), hhblits.open_profiles(path, path.name)))
    if shutil.which("mmseqs"):
        versions["mmseqs"] = mmseqs.version("mmseqs")
        tool = mmseqs.Mmseqs("mmseqs", versions["mmseqs"], _E_VALUES["mmseqs"], 7.5, 1)
        path = fasta(folder / "others.fasta", query, sizes.mmseqs, draw)
        sources.append(SearchedDatabase(Timed(tool), mmseqs.open_mmseqs(path, "mmseqs", cache, path.stem)))
    if not sources:
        raise Missing("there is neither jackhmmer nor hhblits nor mmseqs; apt-get install hmmer hhsuite mmseqs2")
    return query, sources, versions


def fasta(path: Path, query: str, count: int, draw: random.Random) -> Path:
    """Random sequences; every 500th has a part that is like the query."""
    with open(path, "w", encoding="ascii") as file:
        for number in range(count):
            letters = _random(draw, LENGTH)
            if number % 500 == 0:
                letters = letters[:100] + like(query[:300], draw, draw.uniform(0.3, 0.6))
            file.write(f">{path.stem}{number}\n{letters}\n")
    return path


def profiles(prefix: Path, query: str, count: int, draw: random.Random) -> Path:
    """Families, every fourth like the query."""
    families = {}
    for number in range(count):
        sequence = like(query[:LENGTH], draw, 0.4) if number % 4 == 0 else _random(draw, LENGTH)
        families[f"f{number}"] = family(f"f{number}", sequence, 10, draw)
    return database(prefix, families)


def _random(draw: random.Random, length: int) -> str:
    return draw.randbytes(length).translate(_LETTER_OF_BYTE).decode("ascii")


def one_round(query: str, sources: Sequence[SearchedDatabase], cache: Path, cores: int) -> Round:
    alone, _, first = _searched(query, sources, cache, 1)
    beside, wall, second = _searched(query, sources, cache, cores)
    return Round(alone, beside, wall, first == second)


def _searched(
    query: str, sources: Sequence[SearchedDatabase], cache: Path, workers: int
) -> tuple[list[float], float, dict[SearchJob, list[Hit]]]:
    """Seconds of each search, of all of them, and the hits; nothing of it was known."""
    searches, jobs = Searches(cache), jobs_of([query], sources)
    tools = [source.tool for source in sources if isinstance(source.tool, Timed)]
    for tool in tools:
        tool.took.clear()
    for job in jobs:
        searches.path(job).unlink(missing_ok=True)
    began = time.perf_counter()
    failed = searches.run(jobs, workers)
    wall = time.perf_counter() - began
    if failed:
        raise UserError(f"a search failed: {next(iter(failed.values()))}")
    return [took for tool in tools for took in tool.took], wall, {job: searches.hits(job) for job in jobs}


def _found(query: str, sources: Sequence[SearchedDatabase], cache: Path) -> list[list[Hit]]:
    """The hits of each source, of all its shards together."""
    searches = Searches(cache)
    of_source = [[hit for job in jobs_of([query], [source]) for hit in searches.hits(job)] for source in sources]
    return [ranked(hits, len(hits)) for hits in of_source]


def rerun(folder: Path, query: str, sources: Sequence[SearchedDatabase], cores: int) -> tuple[float, float]:
    """Seconds, and those of a CPU, of the command with everything in its cache.  Raises UserError where it is not."""
    (folder / "in.fasta").write_text(f">query\n{query}\n")
    flags = {
        jackhmmer.Jackhmmer: "--databases",
        hhblits.Hhblits: "--hhblits-databases",
        mmseqs.Mmseqs: "--mmseqs-databases",
    }
    command = [sys.executable, "-m", "apps.fold", "msa", str(folder / "in.fasta"), "--workers", str(cores)]
    command += ["--out", str(folder / "out"), "--cache", str(folder / "cache")]
    for source in sources:
        assert isinstance(source.tool, Timed)
        command += [flags[type(source.tool.tool)], str(source.database.path)]
    began, before = time.perf_counter(), os.times()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    took, after = time.perf_counter() - began, os.times()
    if done.returncode or f"0 searches run, {len(sources)} known" not in done.stdout:
        raise UserError(f"fold msa searched what it knew: {' '.join((done.stderr or done.stdout).split())[-200:]}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return took, used


def _row(name: str, rounds: list[Round], hits: int) -> Row:
    numbers = {
        "wall_s": Number(median(one.wall for one in rounds), "s"),
        "longest_s": Number(median(max(one.beside) for one in rounds), "s"),
        "longest_alone_s": Number(median(max(one.alone) for one in rounds), "s"),
        "one_at_a_time_s": Number(median(sum(one.alone) for one in rounds), "s"),
        "wall/longest": Number(median(one.wall / max(one.beside) for one in rounds), ""),
        "wall/longest_alone": Number(median(one.wall / max(one.alone) for one in rounds), ""),
        "hits": Number(hits, ""),
    }
    return Row({"searches": name}, numbers)


def _targets(name: str, rounds: list[Round]) -> list[Target]:
    """Against the longest search as long as it is at once, and as long as it is beside nothing, which asks for more."""
    at_once = median(MOST * max(one.beside) / one.wall for one in rounds)
    alone = median(MOST * max(one.alone) / one.wall for one in rounds)
    return [
        Target(f"{MOST} x the longest search / wall time at once: {name}", 1.0, at_once),
        Target(f"{MOST} x the longest search by itself / wall time at once: {name}", 1.0, alone),
    ]


def _notes(cores: int, sizes: Sizes, tools: list[str], before: float) -> tuple[str, ...]:
    return (
        f"{cores} cores, so at most {cores} searches at once, each of one thread; tools: {', '.join(tools)}",
        f"jackhmmer: {sizes.jackhmmer} sequences; mmseqs: {sizes.mmseqs}; hhblits: {sizes.hhblits} families; each of "
        f"{LENGTH} residues, the query of {QUERY_LENGTH}",
        f"medians of {sizes.rounds} rounds; longest: where searches run at once; longest alone: one at a time, in the "
        "same round; hits: of one run",
        f"load average {before:.1f} before the rounds and {os.getloadavg()[0]:.1f} after them; before, more than 1 is "
        "others, who slow down what runs on every core more than one search at a time",
    )


MEASURES = (
    "apps/fold/search",
    "benchmarks/msa.py",
)
BENCHMARK = Benchmark("msa", "Searches for alignments, several at once", measure, MEASURES)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="msa"), sys.argv[1:]))
