"""A real server of alignments on a free port, in a thread of the test's process; small databases, and stand-ins."""

import asyncio
import io
import json
import random
import stat
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apps.fold.msa_server import MsaServerConfig, build
from apps.fold.service.keys import read_keys
from apps.fold.service.tickets import Tickets
from core.web.listen import Listener, config_of
from tests.support.hhsuite import LETTERS, like
from tests.support.programs import require_program

UBIQUITIN = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
CRAMBIN = "TTCCPSIVARSNFNVCRLPGTPEALCATYTGCIIIPGATCPGDYAN"
SLOWEST_S = 120.0

# Its one hit is the query itself without its last letter. It notes each search, and waits while there is a file `hold`.
_STAND_IN = """#!/bin/sh
if [ "$1" = -h ]; then echo "# HMMER 9"; exit 0; fi
while [ "$1" != -A ]; do shift; done
read -r _name < "$5"; letters=$(tail -n 1 "$5")
echo "$letters $6" >> {folder}/begun
while [ -e {folder}/hold ]; do sleep 0.05; done
case "$letters" in *WWWW*) echo "Fatal: out of luck" >&2; exit 1;; esac
short=${{letters%?}}
printf '# STOCKHOLM 1.0\\nquery %s\\nhit/1-9 %s-\\n#=GC RF %s\\n//\\n' "$letters" "$short" "$letters" > "$2"
echo "hit - 9 query - 9 1e-9 50.0 0 1 1 1e-9 1e-9 9 0 1 9 1 9 1 9 1 -" > "$4"
"""


def stand_in(folder: Path) -> str:
    """A jackhmmer that finds the same in every database."""
    program = folder / "jackhmmer"
    program.write_text(_STAND_IN.format(folder=folder))
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    return str(program)


def begun(folder: Path) -> list[str]:
    """The searches of a stand-in: letters and database of each."""
    path = folder / "begun"
    return path.read_text().splitlines() if path.exists() else []


def family(path: Path, name: Callable[[int], str], count: int = 24, seed: int = 0) -> Path:
    """A FASTA file in which every third sequence is like ubiquitin and every third like crambin."""
    draw = random.Random(seed)
    lines = []
    for number in range(count):
        other = "".join(draw.choice(LETTERS) for _ in range(60))
        lines.append(f">{name(number)}\n{(like(UBIQUITIN, draw, 0.2), like(CRAMBIN, draw, 0.2), other)[number % 3]}\n")
    path.write_text("".join(lines))
    return path


def databases(folder: Path) -> list[Path]:
    """One of each kind; two sequences in a row are of one species."""
    return [
        family(folder / "uniref.fasta", lambda number: f"UniRef90_{number}"),
        family(folder / "mgnify.fasta", lambda number: f"MGYP{number:06d}", seed=1),
        family(folder / "uniprot.fasta", lambda n: f"tr|A0A{n:05d}|A0A{n:05d}_SPE{n // 3:02d}", seed=2),
    ]


def configured(folder: Path, *paths: Path, **options: Any) -> MsaServerConfig:
    """Everything of a server in one folder; without databases three small ones, and a stand-in for jackhmmer."""
    require_program("hhfilter")
    given = {"databases": paths or tuple(databases(folder)), "port": 0, "workers": 2, "shards": 1}
    given |= {"state": folder / "state", "cache": folder / "cache", "drain_s": 60.0}
    given |= {} if paths else {"jackhmmer": stand_in(folder)}
    return MsaServerConfig(**given | options)


@dataclass
class Running:
    """A server under test."""

    url: str
    tickets: Tickets
    key: str | None = None

    def ask(self, path: str, form: dict[str, str] | bytes | None = None, **headers: str) -> tuple[int, bytes]:
        """Status and body of an answer."""
        data = urllib.parse.urlencode(form).encode() if isinstance(form, dict) else form
        given = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        request = urllib.request.Request(f"{self.url}/{path}", data, given | headers)
        try:
            with urllib.request.urlopen(request, timeout=SLOWEST_S) as response:
                return response.status, response.read()
        except urllib.error.HTTPError as error:
            return error.code, error.read()

    def submit(self, *sequences: str, kind: str = "msa", mode: str = "env") -> dict[str, str]:
        query = "".join(f">{number}\n{sequence}\n" for number, sequence in enumerate(sequences, 101))
        return json.loads(self.ask(f"ticket/{kind}", {"q": query, "mode": mode})[1])

    def ended(self, ticket: dict[str, str]) -> dict[str, str]:
        """The ticket when it has ended."""
        deadline = time.monotonic() + SLOWEST_S
        while ticket["status"] in ("PENDING", "RUNNING"):
            assert time.monotonic() < deadline
            time.sleep(0.02)
            ticket = json.loads(self.ask(f"ticket/{ticket['id']}")[1])
        return ticket

    def files(self, ticket: dict[str, str]) -> dict[str, str]:
        status, raw = self.ask(f"result/download/{ticket['id']}")
        assert status == 200, raw
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as tar:
            return {one.name: tar.extractfile(one).read().decode() for one in tar}


@contextmanager
def serving(config: MsaServerConfig, key: str | None = None) -> Iterator[Running]:
    tickets, app = build(config, read_keys(config.api_key_file))
    listener = Listener(config_of(app))
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()), daemon=True)
    listener.config.port = 0
    tickets.start()
    thread.start()
    while not listener.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield Running(f"http://127.0.0.1:{listener.port}", tickets, key)
    finally:
        tickets.stop(config.drain_s)
        listener.should_exit = True
        thread.join(20)
