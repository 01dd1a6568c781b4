"""`fold msa IN.fasta`: alignments of sequences with databases, as `fold predict --msa` and `fold train` take them.

By jackhmmer, hhblits and MMseqs2, at the same time. Writes OUT/NAME/DATABASE.a3m. Where it is asked for, hhsearch then
looks for templates, with the alignment of the first database: OUT/NAME/DATABASE.hhr. With --ray the nodes of a cluster
search. It does not need torch. With --server a server of ColabFold's protocol searches instead (service/client.py), and
OUT/NAME.a3m is written.
"""

import os
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from apps.fold.features.sequences import Record, Refused, alone, read_fasta
from apps.fold.search.hhsearch import ProfileJob
from apps.fold.search.jobs import Aligned, Searches, aligned, jobs_of
from apps.fold.search.on_ray import Cluster, S
from apps.fold.search.options import SearchConfig, open_sources, open_structures
from apps.fold.service.client import Service
from core.config import UserError, in_one_line, parse, size_in_bytes
from core.files import replace_file
from core.web.key import read_key

_HIT = "\nProbab="  # once for each hit of hhsearch
_ASKED_AT_ONCE = 4  # records, of a server


@dataclass(frozen=True)
class MsaConfig(SearchConfig):
    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("input", "databases", "hhblits_databases", "mmseqs_databases", "hhsearch_databases", "out", "shards"),
        *("workers", "threads", "ray", "max_rows", "server", "server_key_file"),
    )

    input: Path | None = None
    """a FASTA file; `megalith fold msa IN.fasta` means the same"""
    out: Path = Path("alignments")
    """one folder a sequence, with an A3M file for each database, or an .hhr file where templates are searched"""
    ray: str | None = None
    """search on the nodes of a Ray cluster: HOST:PORT of its head; --ray alone takes the cluster that this machine is a
    node of, or starts Ray here for as long as it takes, as --ray local does always; --workers are then as many as nodes
    have room for"""
    memory: str = "2GiB"
    """of each search, which Ray sets aside on a node, as it does --threads cores"""
    proteins: bool = False
    """take every record as a protein, also one of the letters A C G T U N alone, which is refused as DNA or RNA"""
    server: str | None = None
    """address of a server of ColabFold's protocol, such as megalith fold msa-server, that searches instead: sequences
    are sent there. Writes OUT/NAME.a3m"""
    server_key_file: Path | None = None
    """file whose first line is the key that the server asks for"""
    server_wait_s: float = 7200.0
    """longest time for the alignment of a record, that in the server's queue included"""

    def __post_init__(self) -> None:
        super().__post_init__()
        size_in_bytes(self.memory, "memory")
        if self.server_wait_s <= 0:
            raise UserError(f"server_wait_s={self.server_wait_s}; give a time in seconds")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        if self.server is not None:
            own = (*(field.name for field in fields(SearchConfig) if field.name != "cache"), "ray", "memory")
            return dict.fromkeys(own, "with --server, which searches in its own way; leave out one of the two")
        unread = super().unread()
        unread |= dict.fromkeys(("server_key_file", "server_wait_s"), "without --server; give it, too")
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
    if config.input is None or not (config.names_alignments or config.server):
        raise UserError(
            "megalith fold msa needs a FASTA file and databases: IN.fasta --databases UNIREF.fasta … (jackhmmer), "
            "--hhblits-databases PREFIX …, --mmseqs-databases UNIREF.fasta … or --server URL"
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
    if config.server is not None:
        return _from_server(config, records, refused)
    records = alone(records)
    sources, searches, structures = open_sources(config), Searches(config.cache), open_structures(config)
    failed = _run(searches, jobs_of([record.sequence for record in records], sources), config, cluster, "searching")
    wrong = {job.sequence: reason for job, reason in failed.items()}
    found = {}
    for record in records:
        if record.sequence not in wrong:
            found[record.sequence] = [aligned(searches, record.sequence, source, config.max_rows) for source in sources]
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


def _from_server(config: MsaConfig, records: list[Record], refused: list[Refused]) -> int:
    assert config.server is not None
    service = Service(config.server, read_key(config.server_key_file), config.cache, config.server_wait_s)
    service.announce(records)
    wrong = 0
    with ThreadPoolExecutor(_ASKED_AT_ONCE) as pool:
        for record, asked in [(record, pool.submit(service.alignment, record)) for record in records]:
            try:
                text = asked.result().read_bytes()
                config.out.mkdir(parents=True, exist_ok=True)
                replace_file(config.out / f"{record.safe_name}.a3m", text)
            except (UserError, OSError) as error:
                wrong += 1
                reason = in_one_line(error) or error
                print(f"error: {config.input}, record {record.number} ({record.name}): {reason}", file=sys.stderr)
            else:
                queries = 1 + len({chain.sequence for chain in record.chains})
                print(f"{record.name}: {sum(line.startswith(b'>') for line in text.splitlines()) - queries} rows")
    return 2 if refused or wrong else 0


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
    ended = f"{len(jobs) - kept - len(failed)} {kind} run, {kept} known from before"
    print(f"{ended}, {len(failed)} failed" if failed else ended)
    return failed


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
