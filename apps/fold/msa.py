"""`fold msa IN.fasta`: alignments of sequences with databases, as `fold predict --msa` and `fold train` take them.

By jackhmmer, hhblits and MMseqs2, at the same time. Writes OUT/NAME/DATABASE.a3m. It does not need torch.
"""

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from apps.fold.features.sequences import Record, read_fasta
from apps.fold.search import hhblits, jackhmmer, mmseqs
from apps.fold.search.database import open_database
from apps.fold.search.hits import as_a3m, ranked
from apps.fold.search.jobs import Job, Searches, Source, jobs_of
from core.config import UserError, parse


@dataclass(frozen=True)
class MsaConfig:
    input: Path | None = None
    """a FASTA file; `fold msa IN.fasta` means the same"""
    databases: tuple[Path, ...] = ()
    """FASTA files that jackhmmer searches, such as UniRef90 or MGnify"""
    hhblits_databases: tuple[Path, ...] = ()
    """prefixes of HH-suite databases that hhblits searches, such as UniRef30 or BFD"""
    mmseqs_databases: tuple[Path, ...] = ()
    """FASTA files or databases of MMseqs2's that it searches"""
    out: Path = Path("alignments")
    """one folder a sequence, with an A3M file for each database"""
    shards: int = 1
    """parts of each of jackhmmer's databases that are searched at once; hits are the same. They are copied into the
    cache"""
    workers: int | None = None
    """searches at once, by whichever tools; by default one for each core"""
    threads: int = 1
    """of each search"""
    e_value: float = 1e-4
    """of jackhmmer and MMseqs2"""
    hhblits_e_value: float = 1e-3
    sensitivity: float = 7.5
    """of MMseqs2, 1 to 8"""
    max_rows: int = 10_000
    """the best rows that are kept of each database"""
    jackhmmer: str = "jackhmmer"
    """the name or path of HMMER's program"""
    hhblits: str = "hhblits"
    """of HH-suite's"""
    mmseqs: str = "mmseqs"
    """of MMseqs2's"""
    cache: Path = Path("runs/searches")
    """where results and shards are kept; a second run searches only what is not there"""

    def __post_init__(self) -> None:
        for name in ("shards", "workers", "threads", "max_rows"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name}={value}; give a positive number")
        for name in ("e_value", "hhblits_e_value", "sensitivity"):
            if getattr(self, name) <= 0:
                raise UserError(f"{name}={getattr(self, name)}; give a positive number")


def main(argv: list[str]) -> int:
    """Exit code 2 when a record has no alignment; the others have theirs."""
    if argv and not argv[0].startswith("-") and "=" not in argv[0]:
        argv = ["--input", *argv]
    config = parse({"default": MsaConfig}, argv, "fold msa", default="default")
    if config.input is None or not (config.databases or config.hhblits_databases or config.mmseqs_databases):
        raise UserError(
            "fold msa needs a FASTA file and databases: fold msa IN.fasta --databases UNIREF.fasta … (jackhmmer), "
            "--hhblits-databases PREFIX … or --mmseqs-databases UNIREF.fasta …"
        )
    records, refused = read_fasta(config.input)
    for one in refused:
        print(f"error: {config.input}, {one}", file=sys.stderr)
    sources, searches = _sources(config), Searches(config.cache)
    failed = _run(searches, jobs_of([record.sequence for record in records], sources), config)
    wrong = {job.sequence: reason for job, reason in failed.items()}
    for record in records:
        if record.sequence in wrong:
            print(
                f"error: {config.input}, record {record.number} ({record.name}): {wrong[record.sequence]}",
                file=sys.stderr,
            )
        else:
            _write(searches, record, sources, config)
    return 2 if refused or failed else 0


def _sources(config: MsaConfig) -> list[Source]:
    """The databases of all tools.  Raises UserError for a tool that is not installed, or a database that is none."""
    _check_names([*config.databases, *config.mmseqs_databases], list(config.hhblits_databases))
    sources = []
    if config.databases:
        tool = jackhmmer.Jackhmmer(
            config.jackhmmer, jackhmmer.version(config.jackhmmer), config.e_value, config.threads
        )
        opened = [open_database(path, config.shards, config.cache, path.stem) for path in config.databases]
        sources += [Source(tool, database) for database in opened]
    if config.hhblits_databases:
        tool = hhblits.Hhblits(config.hhblits, hhblits.version(config.hhblits), config.hhblits_e_value, config.threads)
        opened = [hhblits.open_profiles(path, path.name) for path in config.hhblits_databases]
        sources += [Source(tool, database) for database in opened]
    if config.mmseqs_databases:
        version = mmseqs.version(config.mmseqs)
        tool = mmseqs.Mmseqs(config.mmseqs, version, config.e_value, config.sensitivity, config.threads)
        opened = [mmseqs.open_mmseqs(path, config.mmseqs, config.cache, path.stem) for path in config.mmseqs_databases]
        sources += [Source(tool, database) for database in opened]
    return sources


def _check_names(files: list[Path], prefixes: list[Path]) -> None:
    """Raises UserError where two databases would write the same file."""
    named = [(path.stem, path) for path in files] + [(path.name, path) for path in prefixes]
    for number, (name, path) in enumerate(named):
        if name in (other for other, _ in named[:number]):
            raise UserError(f"two databases are called {name} ({path}); rename one of them")


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


def _write(searches: Searches, record: Record, sources: list[Source], config: MsaConfig) -> None:
    folder = config.out / record.safe_name
    folder.mkdir(parents=True, exist_ok=True)
    said = []
    for source in sources:
        hits = [hit for job in jobs_of([record.sequence], [source]) for hit in searches.read(job)]
        best, name = ranked(hits, config.max_rows), source.database.name
        path = folder / f"{name}.a3m"
        aside = path.with_name(f".{path.name}.part")
        aside.write_text(as_a3m(record.sequence, best), encoding="utf-8")
        os.replace(aside, path)
        said.append(f"{len(best)} rows of {name}")
    print(f"{record.name}: {', '.join(said)}")
