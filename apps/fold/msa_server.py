"""`fold msa-server --databases …`: alignments for others, by ColabFold's protocol, over the searches of `fold msa`.

1. databases are opened, and the address is bound, before anything is promised
2. tickets that an earlier server had promised go on (service/tickets.py)
3. clients are answered until SIGTERM or SIGINT; what is under way then gets --drain-s, and is done at the next start
   where that was not enough
"""

import asyncio
import logging
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from apps.fold.search.jobs import SearchedDatabase, Searches
from apps.fold.search.options import SearchConfig
from apps.fold.service.databases import ENVIRONMENTAL, Databases, open_databases
from apps.fold.service.keys import Keys, read_keys
from core.config import UserError, parse, size_in_bytes
from core.run_folder import hold

if TYPE_CHECKING:
    from fastapi import FastAPI

    from apps.fold.service.tickets import Tickets
    from core.web.listen import Listener

log = logging.getLogger("msa-server")
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True)
class MsaServerConfig(SearchConfig):
    ESSENTIAL: ClassVar[tuple[str, ...]] = (
        *("databases", "hhblits_databases", "mmseqs_databases", "hhsearch_databases", "templates", "environmental"),
        *("host", "port", "api_key_file", "state", "max_queue", "max_disk", "shards", "workers", "max_rows"),
    )

    templates: Path | None = None
    """a folder of mmCIF files by the entries' names, for the hits of --hhsearch-databases"""
    environmental: tuple[str, ...] = ()
    """names of databases whose rows clients get as environmental ones; by default those that begin with bfd, mgnify,
    metaeuk, smag or colabfold_env"""
    hhfilter: str = "hhfilter"
    """the name or path of HH-suite's, by which rows are left out that are much like others"""
    host: str = "127.0.0.1"
    """address to listen on; 0.0.0.0 for all"""
    port: int = 8080
    """0: any that is free"""
    api_key_file: Path | None = None
    """file with a line KEY NAME [jobs=N] [disk=SIZE] for each client; none: no key is asked for"""
    allow_host: tuple[str, ...] = ()
    """names, beside --host and this machine's own (localhost, 127.0.0.1), under which the server may be called while it
    asks for no key; with --host 0.0.0.0 any address is fine"""
    state: Path = Path("runs/msa-server")
    """folder of tickets and results; a server that was killed goes on with them"""
    max_queue: int = 256
    """tickets that may wait; more are told to come again (RATELIMIT)"""
    tickets_at_once: int = 2
    """tickets that are searched for at the same time, each with its part of --workers"""
    max_sequences: int = 64
    """of a ticket"""
    max_residues: int = 20_000
    """of a ticket"""
    max_body: str = "4MiB"
    """largest request body, such as 4MiB"""
    max_disk: str = "50GiB"
    """half of it for results, half for those of searches in --cache; the oldest are removed"""
    drain_s: float = 30.0
    """after SIGTERM, time for tickets that are searched for"""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("max_queue", "tickets_at_once", "max_sequences", "max_residues"):
            if getattr(self, name) < 1:
                raise UserError(f"{name}={getattr(self, name)}; give a positive number")
        if self.drain_s < 0:
            raise UserError(f"drain_s={self.drain_s}; give a time in seconds, 0 for none")
        size_in_bytes(self.max_body, "max_body")
        size_in_bytes(self.max_disk, "max_disk")

    def unread(self) -> dict[str, str]:
        """See `core.config.Unread`."""
        found = super().unread()
        if not self.hhsearch_databases:
            found["templates"] = "without --hhsearch-databases; give those, too"
        if self.api_key_file is not None:
            found["allow_host"] = "with keys, which let clients in under any name; leave out one of the two"
        return found

    @property
    def workers_of_a_ticket(self) -> int:
        return max(1, (self.workers or os.cpu_count() or 1) // self.tickets_at_once)


def main(argv: list[str]) -> int:
    config = parse({"default": MsaServerConfig}, argv, "megalith fold msa-server", default="default")
    if missing := [name for name in _NEEDED if find_spec(name) is None]:
        raise UserError(f"fold msa-server needs {', '.join(missing)}; pip install 'megalith[msa-server]'")
    if not config.names_alignments:
        raise UserError(
            "megalith fold msa-server needs databases: --databases UNIREF.fasta … (jackhmmer), --hhblits-databases "
            "PREFIX … or --mmseqs-databases UNIREF.fasta …"
        )
    if config.hhsearch_databases and config.templates is None:
        raise UserError("--hhsearch-databases without --templates, the folder of their mmCIF files; give that, too")
    if len(config.hhsearch_databases) > 1:
        raise UserError(f"{len(config.hhsearch_databases)} --hhsearch-databases; clients know one, so give one")
    if config.templates is not None and not config.templates.is_dir():
        raise UserError(f"--templates {config.templates} is no folder; give one of mmCIF files (1abc.cif)")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    keys = read_keys(config.api_key_file)
    with hold(config.state, "--state"):
        return _run(config, keys)


def _run(config: MsaServerConfig, keys: Keys) -> int:
    from core.web.listen import bind

    listening = bind(config.host, config.port)
    tickets, app = build(config, keys)
    if not asyncio.run(_listen(config, keys, tickets, app, listening)):
        # Threads wait for searches, which end with this process, however it ends; their tickets are on the disk.
        log.info("%d tickets are left for the next start", tickets.num_running + tickets.num_waiting)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
    return 0


def build(config: MsaServerConfig, keys: Keys) -> "tuple[Tickets, FastAPI]":
    """The tickets and the application of a server; raises UserError for databases that are none."""
    from apps.fold.service.metrics import Metrics
    from apps.fold.service.server import HttpLimits, build_app
    from apps.fold.service.store import Store
    from apps.fold.service.templates import Templates
    from apps.fold.service.tickets import Limits, Tickets

    opened = partial(open_databases, config, config.environmental, config.templates, config.hhfilter)
    limits = Limits(
        config.max_queue,
        config.tickets_at_once,
        config.workers_of_a_ticket,
        size_in_bytes(config.max_disk, "max_disk"),
    )
    of_http = HttpLimits(
        size_in_bytes(config.max_body, "max_body"),
        config.max_sequences,
        config.max_residues,
        (config.host, *config.allow_host),
    )
    metrics = Metrics()
    tickets = Tickets(Store(config.state), Searches(config.cache), opened, keys, limits, metrics)
    templates = None if config.templates is None else Templates(config.hhsearch_databases[0], config.templates)
    return tickets, build_app(tickets, keys, metrics, of_http, templates)


async def _listen(
    config: MsaServerConfig, keys: Keys, tickets: "Tickets", app: "FastAPI", listening: socket.socket
) -> bool:
    """Answer until SIGTERM or SIGINT.  Returns whether what was under way has ended."""
    from core.web.listen import Listener, config_of

    listener = Listener(config_of(app))
    tickets.start()
    started = partial(_announce, config, tickets.databases, keys, listener)
    serving = await listener.until_stopped(listening, started)
    log.info("finishing %d tickets", tickets.num_running)
    ended = await asyncio.to_thread(tickets.stop, config.drain_s)
    listener.should_exit = True
    await serving
    return ended


def _announce(config: MsaServerConfig, databases: Databases, keys: Keys, listener: "Listener") -> None:
    from core.web.listen import address_of

    def named(sources: Sequence[SearchedDatabase]) -> str:
        return ", ".join(source.database.name for source in sources) or f"none (called {', '.join(ENVIRONMENTAL)} …)"

    log.info("rows of %s; environmental: %s", named(databases.uniref), named(databases.environmental))
    log.info("rows are paired by species, of %s", named(databases.pairing))
    if not keys.asked_for and config.host not in ("127.0.0.1", "::1", "localhost"):
        log.warning("no key is asked for: whoever reaches %s can search; --api-key-file gives keys", config.host)
    print(f"serving alignments at {address_of(config.host, listener.port)}/", flush=True)
