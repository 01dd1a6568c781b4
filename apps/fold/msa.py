"""`fold msa IN.fasta`: alignments of sequences with databases, as `fold predict --msa` and `fold train` take them.

Writes OUT/NAME/DATABASE.a3m. It does not need torch.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from apps.fold.features.sequences import Record, read_fasta
from apps.fold.search.database import Database, open_database
from apps.fold.search.jackhmmer import as_a3m, ranked, version
from apps.fold.search.jobs import Job, Searches, Tool, jobs_of
from core.config import UserError, parse


@dataclass(frozen=True)
class MsaConfig:
    input: Path | None = None
    """a FASTA file; `fold msa IN.fasta` means the same"""
    databases: tuple[Path, ...] = ()
    """FASTA files that are searched, such as UniRef90 or MGnify"""
    out: Path = Path("alignments")
    """one folder a sequence, with an A3M file for each database"""
    shards: int = 1
    """parts of each database that are searched at once; hits are the same. They are copied into the cache"""
    workers: int | None = None
    """searches at once; by default one for each core"""
    threads: int = 1
    """of each search"""
    e_value: float = 1e-4
    max_rows: int = 10_000
    """the best rows that are kept of each database"""
    program: str = "jackhmmer"
    """the name or path of HMMER's program"""
    cache: Path = Path("runs/searches")
    """where results and shards are kept; a second run searches only what is not there"""

    def __post_init__(self) -> None:
        for name in ("shards", "workers", "threads", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; give a positive number")
        if self.e_value <= 0:
            raise UserError(f"e_value={self.e_value}; give a positive number")


def main(argv: list[str]) -> int:
    """Exit code 2 when a record has no alignment; the others have theirs."""
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        argv = ["--input", *argv]
    config = parse({"default": MsaConfig}, argv, "fold msa", default="default")
    if config.input is None or not config.databases:
        raise UserError("fold msa needs a FASTA file and databases: fold msa IN.fasta --databases UNIREF.fasta …")
    records, refused = read_fasta(config.input)
    for one in refused:
        print(f"error: {config.input}, {one}", file=sys.stderr)
    tool = Tool(config.program, version(config.program), config.e_value, config.threads)
    databases = [open_database(path, config.shards, config.cache, name) for name, path in _named(config.databases)]
    searches = Searches(tool, config.cache)
    failed = _run(searches, jobs_of([record.sequence for record in records], databases), config)
    wrong = {job.sequence: reason for job, reason in failed.items()}
    for record in records:
        if record.sequence in wrong:
            print(
                f"error: {config.input}, record {record.number} ({record.name}): {wrong[record.sequence]}",
                file=sys.stderr,
            )
        else:
            _write(searches, record, databases, config)
    return 2 if refused or failed else 0


def _named(paths: tuple[Path, ...]) -> list[tuple[str, Path]]:
    """Names of their own for databases, those of their files."""
    names = [path.stem for path in paths]
    for name, path in zip(names, paths):
        if names.count(name) > 1:
            raise UserError(f"two databases are called {name} ({path}); rename one of them")
    return list(zip(names, paths))


def _run(searches: Searches, jobs: list[Job], config: MsaConfig) -> dict[Job, str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(soft_wrap=True, highlight=False), transient=True) as progress:
        task = progress.add_task("searching", total=len(jobs))
        kept = 0

        def done(job: Job, was_there: bool) -> None:
            nonlocal kept
            kept += was_there
            progress.advance(task)

        failed = searches.run(jobs, config.workers or os.cpu_count() or 1, done)
    print(f"{len(jobs) - kept} searches run, {kept} known from before")
    return failed


def _write(searches: Searches, record: Record, databases: list[Database], config: MsaConfig) -> None:
    folder = config.out / record.safe_name
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for database in databases:
        hits = [hit for job in jobs_of([record.sequence], [database]) for hit in searches.read(job)]
        best = ranked(hits, config.max_rows)
        path = folder / f"{database.name}.a3m"
        aside = path.with_name(f".{path.name}.part")
        aside.write_text(as_a3m(record.sequence, best), encoding="utf-8")
        os.replace(aside, path)
        said.append(f"{len(best)} rows of {database.name}")
    print(f"{record.name}: {', '.join(said)}")
