"""Tickets and results on disk, so that a server that was killed at any moment goes on with what it had promised.

STATE/secret            from which tickets' names follow; nobody else can read it
STATE/jobs/ID.json      a ticket, written before the client hears of it
STATE/results/ID.tar.gz its result
STATE/results/ID.json   how it ended, written last: a ticket without this file is not done

A ticket's name is a keyed hash of its owner and its query, so an equal query has an equal name, after a restart, too,
and nobody without the secret can guess one. Each file is written aside and renamed, and the JSON files are signed.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from apps.fold.service.protocol import Query
from core.files import Damaged, replace_file, signed, sync_folder, unsigned

_NAME = re.compile(r"[0-9a-f]{48}")


@dataclass(frozen=True)
class Job:
    """A ticket: number rises with each."""

    id: str
    owner: str
    number: int
    query: Query


@dataclass(frozen=True)
class Outcome:
    """How a ticket ended: databases' identity, bytes of the result, and why where there is none."""

    status: Literal["COMPLETE", "ERROR"]
    databases: str
    num_bytes: int = 0
    message: str = ""


class Store:
    """The folder of a server's state."""

    def __init__(self, folder: Path):
        self._jobs, self.results = folder / "jobs", folder / "results"
        for made in (self._jobs, self.results):
            made.mkdir(mode=0o700, parents=True, exist_ok=True)  # ids and sequences are nobody else's
            for part in made.glob(".*.part"):  # of a server that was killed
                part.unlink()
        self._secret = _secret(folder / "secret")

    def name(self, owner: str, query: Query) -> str:
        """The id of a ticket."""
        asked = json.dumps([owner, query.as_json()]).encode()
        return hmac.new(self._secret, asked, hashlib.sha256).hexdigest()[:48]

    def put(self, job: Job) -> None:
        """Return when the ticket is on the disk, and is one that is not done."""
        (self.results / f"{job.id}.json").unlink(missing_ok=True)
        content = {"owner": job.owner, "number": job.number, "query": job.query.as_json()}
        replace_file(self._jobs / f"{job.id}.json", signed(content))
        sync_folder(self._jobs)

    def finish(self, job: Job, outcome: Outcome, result: bytes | None = None) -> None:
        if result is not None:
            replace_file(self.result(job.id), result)
        replace_file(self.results / f"{job.id}.json", signed(vars(outcome)))
        sync_folder(self.results)

    def result(self, name: str) -> Path:
        """The path of a ticket's result."""
        assert _NAME.fullmatch(name)
        return self.results / f"{name}.tar.gz"

    def outcome(self, name: str) -> Outcome | None:
        """How a ticket ended; None where it has not, or its result is gone or damaged."""
        try:
            outcome = Outcome(**unsigned((self.results / f"{name}.json").read_bytes()))
            if outcome.status == "COMPLETE" and self.result(name).stat().st_size != outcome.num_bytes:
                return None
        except (OSError, Damaged, TypeError):
            return None
        return outcome

    def jobs(self) -> Iterator[Job]:
        """All tickets, in the order in which they came.  One that is damaged is named in a line and removed."""
        found = []
        for path in self._jobs.glob("*.json"):
            try:
                content = unsigned(path.read_bytes())
                query = Query.of_json(content["query"])
                found.append(Job(path.stem, str(content["owner"]), int(content["number"]), query))
            except (Damaged, KeyError, TypeError, ValueError) as error:
                print(f"warning: {path} {error}; the ticket is forgotten", file=sys.stderr)
                path.unlink()
        yield from sorted(found, key=lambda job: job.number)

    def remove(self, names: Iterable[str]) -> None:
        """Forget tickets, and their results."""
        for name in names:
            (self.results / f"{name}.json").unlink(missing_ok=True)
            self.result(name).unlink(missing_ok=True)
            (self._jobs / f"{name}.json").unlink(missing_ok=True)


def is_name(text: str) -> bool:
    """Whether a text has the form of a ticket's id."""
    return _NAME.fullmatch(text) is not None


def _secret(path: Path) -> bytes:
    try:
        found = path.read_bytes()
    except FileNotFoundError:
        found = b""
    if len(found) != 32:
        found, aside = secrets.token_bytes(32), path.with_name(".secret.part")
        aside.unlink(missing_ok=True)
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(found)
            file.flush()
            os.fsync(file.fileno())
        aside.rename(path)
    return found
