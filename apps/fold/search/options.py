"""The options of searches, those of every command that runs them, and the databases that they name."""

from dataclasses import dataclass
from pathlib import Path

from apps.fold.search import hhblits, jackhmmer, mmseqs
from apps.fold.search.database import Database, open_database
from apps.fold.search.hhsearch import Hhsearch
from apps.fold.search.jobs import SearchedDatabase
from core.config import UserError


@dataclass(frozen=True)
class SearchConfig:
    databases: tuple[Path, ...] = ()
    """FASTA files that jackhmmer searches, such as UniRef90 or MGnify"""
    hhblits_databases: tuple[Path, ...] = ()
    """prefixes of HH-suite databases that hhblits searches, such as UniRef30 or BFD"""
    mmseqs_databases: tuple[Path, ...] = ()
    """FASTA files or databases of MMseqs2's that it searches"""
    hhsearch_databases: tuple[Path, ...] = ()
    """prefixes of HH-suite databases of structures, such as PDB70, that hhsearch searches for templates, with the
    alignment of the first database of all that are given"""
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

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        given = {
            "databases": ("shards", "jackhmmer"),
            "hhblits_databases": ("hhblits", "hhblits_e_value"),
            "hhsearch_databases": ("hhsearch",),
            "mmseqs_databases": ("mmseqs", "sensitivity"),
        }
        return {
            name: f"without --{databases.replace('_', '-')}; give those, too"
            for databases, names in given.items()
            if not getattr(self, databases)
            for name in names
        } | ({} if self.databases or self.mmseqs_databases else {"e_value": "of jackhmmer and MMseqs2, without theirs"})

    @property
    def names_alignments(self) -> bool:
        """Whether databases are given that make alignments, with which hhsearch begins, too."""
        return bool(self.databases or self.hhblits_databases or self.mmseqs_databases)


def open_sources(config: SearchConfig) -> list[SearchedDatabase]:
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


def open_structures(config: SearchConfig) -> list[tuple[Hhsearch, Database]]:
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
