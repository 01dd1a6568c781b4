"""`fold msa IN.fasta`: alignments of sequences with databases, as `fold predict --msa` and `fold train` take them.

By jackhmmer, hhblits and MMseqs2, at the same time. Writes OUT/NAME/DATABASE.a3m. Where it is asked for, hhsearch then
looks for templates, with the alignment of the first database: OUT/NAME/DATABASE.hhr. With --ray the nodes of a cluster
search. It does not need torch.
"""

import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from apps.fold.features.sequences import Record, alone, read_fasta
from apps.fold.search import hhblits, jackhmmer, mmseqs
from apps.fold.search.database import Database, open_database
from apps.fold.search.hhsearch import Hhsearch, ProfileJob
from apps.fold.search.hits import as_a3m, ranked
from apps.fold.search.jobs import SearchedDatabase, Searches, jobs_of
from apps.fold.search.on_ray import Cluster, S
from core.config import UserError, parse, size_in_bytes

_HIT = "\nProbab="  # once for each hit of hhsearch


@dataclass(frozen=True)
class MsaConfig:
    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("input", "databases", "hhblits_databases", "mmseqs_databases", "hhsearch_databases", "out", "shards"),
        *("workers", "threads", "ray", "max_rows"),
    )

    input: Path | None = None
    """a FASTA file; `megalith fold msa IN.fasta` means the same"""
    databases: tuple[Path, ...] = ()
    """FASTA files that jackhmmer searches, such as UniRef90 or MGnify"""
    hhblits_databases: tuple[Path, ...] = ()
    """prefixes of HH-suite databases that hhblits searches, such as UniRef30 or BFD"""
    mmseqs_databases: tuple[Path, ...] = ()
    """FASTA files or databases of MMseqs2's that it searches"""
    hhsearch_databases: tuple[Path, ...] = ()
    """prefixes of HH-suite databases of structures, such as PDB70, that hhsearch searches for templates, with the
    alignment of the first database of all that are given"""
    out: Path = Path("alignments")
    """one folder a sequence, with an A3M file for each database, or an .hhr file where templates are searched"""
    shards: int = 1
    """parts of each of jackhmmer's databases that are searched at once; hits are the same. They are copied into the
    cache"""
    workers: int | None = None
    """searches at once, by whichever tools; by default one for each core, with --ray as many as nodes have room for"""
    threads: int = 1
    """of each search"""
    ray: str | None = None
    """search on the nodes of a Ray cluster: HOST:PORT of its head; --ray alone takes the cluster that this machine is a
    node of, or starts Ray here for as long as it takes, as --ray local does always"""
    memory: str = "2GiB"
    """of each search, which Ray sets aside on a node, as it does --threads cores"""
    e_value: float = 1e-4
    """of jackhmmer and MMseqs2"""
    hhblits_e_value: float = 1e-3
    sensitivity: float = 7.5
    """of MMseqs2, 1 to 8"""
    proteins: bool = False
    """take every record as a protein, also one of the letters A C G T U N alone, which is refused as DNA or RNA"""
    max_rows: int = 10_000
    """the best rows that are kept of each database"""
    jackhmmer: str = "jackhmmer"
    """the name or path of HMMER's program"""
    hhblits: str = "hhblits"
    """of HH-suite's"""
    hhsearch: str = "hhsearch"
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
        size_in_bytes(self.memory, "memory")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        given = {
            "databases": ("shards", "jackhmmer"),
            "hhblits_databases": ("hhblits", "hhblits_e_value"),
            "hhsearch_databases": ("hhsearch",),
            "mmseqs_databases": ("mmseqs", "sensitivity"),
        }
        unread = {
            name: f"without --{databases.replace('_', '-')}; give those, too"
            for databases, names in given.items()
            if not getattr(self, databases)
            for name in names
        }
        if not self.databases and not self.mmseqs_databases:
            unread["e_value"] = "of jackhmmer and MMseqs2, without theirs"
        if self.ray is None:
            unread["memory"] = "is what Ray sets aside; give --ray, too"
        return unread

    def absolute(self) -> "MsaConfig":
        """The same, with paths that mean the same in a process that began elsewhere."""
        many = ("databases", "hhblits_databases", "mmseqs_databases", "hhsearch_databases")
        found = {name: tuple(path.absolute() for path in getattr(self, name)) for name in many}
        programs = ("jackhmmer", "hhblits", "hhsearch", "mmseqs")
        given = {name: getattr(self, name) for name in programs if os.sep in getattr(self, name)}
        programs_there = {name: os.path.abspath(program) for name, program in given.items()}
        return replace(self, cache=self.cache.absolute(), **found, **programs_there)


def main(argv: list[str]) -> int:
    """Exit code 2 when a record has no alignment; the others have theirs."""
    config = parse({"default": MsaConfig}, argv, "megalith fold msa", default="default", places=("input",))
    if config.input is None or not (config.databases or config.hhblits_databases or config.mmseqs_databases):
        raise UserError(
            "megalith fold msa needs a FASTA file and databases: IN.fasta --databases UNIREF.fasta … (jackhmmer), "
            "--hhblits-databases PREFIX … or --mmseqs-databases UNIREF.fasta …"
            + (" (hhsearch begins with an alignment)" if config.hhsearch_databases else "")
        )
    if config.ray is None:
        return _aligned_all(config, config.input, None)
    memory = size_in_bytes(config.memory, "--memory")
    with Cluster(config.ray, config.threads, memory, config.workers) as cluster:
        return _aligned_all(config.absolute(), config.input, cluster)


def _aligned_all(config: MsaConfig, given: Path, cluster: Cluster | None) -> int:
    records, refused = read_fasta(given, proteins=config.proteins)
    for one in refused:
        print(f"error: {given}, {one}", file=sys.stderr)
    records = alone(records)
    sources, searches, structures = _sources(config), Searches(config.cache), _structures(config)
    failed = _run(searches, jobs_of([record.sequence for record in records], sources), config, cluster, "searching")
    wrong = {job.sequence: reason for job, reason in failed.items()}
    found = {}
    for record in records:
        if record.sequence not in wrong:
            found[record.sequence] = [_aligned(searches, record.sequence, source, config) for source in sources]
    profiles = {s: [ProfileJob(s, rows[0].a3m, *one) for one in structures] for s, rows in found.items()}
    if structures:
        jobs = [job for of_sequence in profiles.values() for job in of_sequence]
        wrong |= {job.sequence: reason for job, reason in _run(searches, jobs, config, cluster, "templates").items()}
    for record in records:
        if record.sequence in wrong:
            print(f"error: {given}, record {record.number} ({record.name}): {wrong[record.sequence]}", file=sys.stderr)
        if record.sequence in found:
            kept = [job for job in profiles[record.sequence] if record.sequence not in wrong]
            _write(config.out / record.safe_name, record, found[record.sequence], searches, kept)
    return 2 if refused or wrong else 0


def _sources(config: MsaConfig) -> list[SearchedDatabase]:
    """The databases of all tools.  Raises UserError for a tool that is not installed, or a database that is none."""
    _check_names([*config.databases, *config.mmseqs_databases], list(config.hhblits_databases))
    sources = []
    if config.databases:
        tool = jackhmmer.Jackhmmer(
            config.jackhmmer, jackhmmer.version(config.jackhmmer), config.e_value, config.threads
        )
        opened = [open_database(path, config.shards, config.cache, path.stem) for path in config.databases]
        sources += [SearchedDatabase(tool, database) for database in opened]
    if config.hhblits_databases:
        tool = hhblits.Hhblits(config.hhblits, hhblits.version(config.hhblits), config.hhblits_e_value, config.threads)
        opened = [hhblits.open_profiles(path, path.name) for path in config.hhblits_databases]
        sources += [SearchedDatabase(tool, database) for database in opened]
    if config.mmseqs_databases:
        version = mmseqs.version(config.mmseqs)
        tool = mmseqs.Mmseqs(config.mmseqs, version, config.e_value, config.sensitivity, config.threads)
        opened = [mmseqs.open_mmseqs(path, config.mmseqs, config.cache, path.stem) for path in config.mmseqs_databases]
        sources += [SearchedDatabase(tool, database) for database in opened]
    return sources


def _structures(config: MsaConfig) -> list[tuple[Hhsearch, Database]]:
    """Those of hhsearch.  Raises UserError where it is not installed, or a database is none."""
    if not config.hhsearch_databases:
        return []
    tool = Hhsearch(config.hhsearch, hhblits.version(config.hhsearch, "HHsearch"), config.threads)
    _check_names([], list(config.hhsearch_databases))
    return [(tool, hhblits.open_profiles(path, path.name)) for path in config.hhsearch_databases]


def _check_names(files: list[Path], prefixes: list[Path]) -> None:
    """Raises UserError where two databases would write the same file."""
    named = [(path.stem, path) for path in files] + [(path.name, path) for path in prefixes]
    for number, (name, path) in enumerate(named):
        if name in (other for other, _ in named[:number]):
            raise UserError(f"two databases are called {name} ({path}); rename one of them")


def _run(searches: Searches, jobs: list[S], config: MsaConfig, cluster: Cluster | None, what: str) -> dict[S, str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(soft_wrap=True, highlight=False), transient=True) as progress:
        task = progress.add_task(what, total=len(jobs))
        kept = 0

        def done(job: S, was_there: bool) -> None:
            nonlocal kept
            kept += was_there
            progress.advance(task)

        if cluster is None:
            failed = searches.run(jobs, config.workers or os.cpu_count() or 1, done)
        else:
            failed = searches.run_on(cluster.machines(searches, progress.console.print), jobs, done)
    kind = "searches" if what == "searching" else "searches for templates"
    print(f"{len(jobs) - kept} {kind} run, {kept} known from before")
    return failed


@dataclass(frozen=True)
class Aligned:
    """A sequence's rows of one database, as A3M."""

    database: str
    rows: int
    a3m: str


def _aligned(searches: Searches, sequence: str, source: SearchedDatabase, config: MsaConfig) -> Aligned:
    hits = [hit for job in jobs_of([sequence], [source]) for hit in searches.hits(job)]
    best = ranked(hits, config.max_rows)
    return Aligned(source.database.name, len(best), as_a3m(sequence, best))


def _write(
    folder: Path, record: Record, alignments: list[Aligned], searches: Searches, profiles: list[ProfileJob]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    files = [(f"{one.database}.a3m", one.a3m) for one in alignments]
    files += [(f"{job.database.name}.hhr", searches.read(job)) for job in profiles]
    for name, text in files:
        aside = folder / f".{name}.part"
        aside.write_text(text, encoding="utf-8")
        os.replace(aside, folder / name)
    said = [f"{one.rows} rows of {one.database}" for one in alignments]
    said += [f"{searches.read(job).count(_HIT)} templates of {job.database.name}" for job in profiles]
    print(f"{record.name}: {', '.join(said)}")
