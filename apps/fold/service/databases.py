"""The databases of a server, and what each is for.

Rows of environmental databases come in a file of their own. Of chains those rows are paired whose names tell a species
(features/pairing.py): of databases called uniprot…, which only serve that, as in `fold predict --msa`, or, where there
is none, of all that are not environmental.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from apps.fold.search import hhblits
from apps.fold.search.database import Database
from apps.fold.search.hhsearch import Hhsearch
from apps.fold.search.jobs import SearchedDatabase
from apps.fold.search.options import SearchConfig, open_sources, open_structures
from apps.fold.search.program import found
from core.config import UserError

ENVIRONMENTAL = ("bfd", "mgnify", "mgy", "metaeuk", "smag", "colabfold_env")


@dataclass(frozen=True)
class Databases:
    """Opened, by what they are for.

    hhfilter  the program that leaves out rows which are much like others
    identity  changes with all that answers depend on, beside the query
    """

    uniref: tuple[SearchedDatabase, ...]
    environmental: tuple[SearchedDatabase, ...]
    pairing: tuple[SearchedDatabase, ...]
    structures: tuple[tuple[Hhsearch, Database], ...]
    templates: Path | None
    hhfilter: str
    max_rows: int
    identity: str

    def all(self) -> list[Database]:
        sources = dict.fromkeys((*self.uniref, *self.environmental, *self.pairing))
        return [source.database for source in sources] + [database for _, database in self.structures]

    def check_unchanged(self) -> None:
        """Raises UserError where one has changed since it was opened."""
        for database in self.all():
            database.check_unchanged()


def open_databases(
    config: SearchConfig, environmental: Sequence[str], templates: Path | None, hhfilter: str
) -> Databases:
    """Raises UserError for a tool that is not installed, a database that is none, and a name that none has."""
    sources, structures = open_sources(config), open_structures(config)
    names = [source.database.name for source in sources]
    unknown = next((name for name in environmental if name not in names), None)
    if unknown is not None:
        raise UserError(f"--environmental {unknown}: no database is called so; they are {', '.join(names)}")
    env = [one for one in sources if _is_environmental(one.database.name, environmental)]
    others = [one for one in sources if one not in env]
    uniprot = [one for one in others if one.database.name.lower().startswith("uniprot")]
    uniref = [one for one in others if one not in uniprot] or others
    if not others:
        raise UserError(f"all of {', '.join(names)} are environmental; give one that is not, such as UniRef")
    program = found(hhfilter, hhblits.INSTALL)
    depends_on = {
        "sources": [[s.database.name, s.database.identity, s.tool.depends_on(), s in env] for s in sources],
        "structures": [[tool.version, database.identity] for tool, database in structures],
        "templates": str(templates),
        "max_rows": config.max_rows,
        "hhfilter": hhblits.version(program, "HHfilter"),
    }
    identity = hashlib.blake2b(json.dumps(depends_on).encode(), digest_size=16).hexdigest()
    return Databases(
        uniref=tuple(uniref),
        environmental=tuple(env),
        pairing=tuple(uniprot or uniref),
        structures=tuple(structures),
        templates=templates,
        hhfilter=program,
        max_rows=config.max_rows,
        identity=identity,
    )


def _is_environmental(name: str, given: Sequence[str]) -> bool:
    return name in given if given else name.lower().startswith(ENVIRONMENTAL)
