"""Asking a server of ColabFold's protocol for alignments: ours, or any other.

1. what was asked before is in the cache, and stays there until its file is removed
2. a ticket for the sequences of a record; of a complex another for its chains' paired rows
3. every request that fails is repeated after a pause twice as long, `_TRIES` times in a row at most; a server that is
   busy is asked again until `wait_s` are over; one that refuses, or that has been given up, is not asked again
4. of the result the files that are expected are read, in memory: nothing of it is unpacked
5. an A3M of what came: of a complex one as ColabFold writes it, paired rows first

Only sequences and numbers in the place of names leave this machine.
"""

import base64
import contextlib
import hashlib
import http.client
import io
import json
import random
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from apps.fold.features.alignment import check_query, parse_a3m
from apps.fold.features.sequences import Record
from apps.fold.service.answers import ENVIRONMENTAL, PAIRED, UNIREF
from apps.fold.service.protocol import Kind
from core.config import UserError
from core.files import replace_file

MODES: Mapping[Kind, str] = {"msa": "env", "pair": "pairgreedy"}
_FIRST = 101  # the name of the first record of a ticket
_TRIES = 6
_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 60.0
_LOOK_S, _LONGEST_LOOK_S = 0.5, 10.0  # between looks at a ticket
_TIMEOUT_S = 60.0
_MOST_BYTES = 1 << 31  # of an answer, unpacked: a small file may unpack to any length
_REFUSING = (401, 403)

Rows = list[tuple[str, str]]


class GivenUp(UserError):
    """The server is down, or refuses: no other record need ask it."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """A key is sent to the address that the user gave, and to no other."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        return None


@dataclass
class Service:
    """A server at a URL.  Its methods may be called from several threads.

    key     as its owner gave it; a name and a password may stand in the URL instead
    cache   folder in which alignments are kept, by server, mode and sequences
    wait_s  for a ticket, its time in the server's queue included
    """

    url: str
    key: str | None
    cache: Path
    wait_s: float
    sleep: Callable[[float], None] = time.sleep
    _given_up: str = ""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UserError(f"{self.url} is no address of a server; give one such as http://127.0.0.1:8080")
        self._headers = {"User-Agent": "megalith/0.1 fold", "Accept": "application/json, application/octet-stream"}
        if self.key is not None:
            self._headers["Authorization"] = f"Bearer {self.key}"
        elif parts.username or parts.password:
            name, password = (urllib.parse.unquote(part or "") for part in (parts.username, parts.password))
            self._headers["Authorization"] = "Basic " + base64.b64encode(f"{name}:{password}".encode()).decode()
        host = parts.netloc.rpartition("@")[2]
        self.url = urllib.parse.urlunsplit((parts.scheme, host, parts.path.rstrip("/"), "", ""))
        self._opener = urllib.request.build_opener(_NoRedirect)

    def announce(self, records: Sequence[Record]) -> None:
        """Say what leaves this machine, where anything does."""
        asked = [record for record in records if not self.kept(record).exists()]
        if asked:
            residues = sum(len(sequence) for record in asked for sequence in _distinct(record))
            many = f"{len(asked)} of {len(records)} records" if len(asked) < len(records) else f"{len(asked)} records"
            print(f"note: the sequences of {many} ({residues} residues) are sent to {self.url}", file=sys.stderr)

    def kept(self, record: Record) -> Path:
        """The file in the cache that a record's alignment is, or will be."""
        asked = json.dumps([self.url, MODES, [chain.sequence for chain in record.chains or (record,)]])
        return self.cache / "service" / f"{hashlib.blake2b(asked.encode(), digest_size=16).hexdigest()}.a3m"

    def alignment(self, record: Record) -> Path:
        """The file of a record's alignment, asked for where it is not in the cache.

        Raises UserError with what is wrong, GivenUp where it would be so for other records, too.
        """
        path = self.kept(record)
        if not path.exists():
            text = self._asked(record)
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, text.encode())
        return path

    def _asked(self, record: Record) -> str:
        sequences = _distinct(record)
        found = self._ticket("msa", sequences)
        own = _entries(found, UNIREF, sequences)
        if ENVIRONMENTAL in found:
            own = [a + b for a, b in zip(own, _entries(found, ENVIRONMENTAL, sequences), strict=True)]
        if not record.chains:
            return _text([("query", record.sequence), *own[0]])
        paired: list[Rows] = [[] for _ in sequences]
        if len(sequences) > 1:
            answer = self._ticket("pair", sequences)
            paired = _entries(answer, PAIRED, sequences)
        return _complex(record, sequences, own, paired)

    def _ticket(self, kind: Kind, sequences: Sequence[str]) -> dict[str, str]:
        """The files of an answer, by their names."""
        query = "".join(f">{number}\n{sequence}\n" for number, sequence in enumerate(sequences, _FIRST))
        form = urllib.parse.urlencode({"q": query, "mode": MODES[kind]}).encode()
        deadline, pause, look = time.monotonic() + self.wait_s, _PAUSE_S, _LOOK_S
        answer = self._json(f"ticket/{kind}", form)
        while answer["status"] != "COMPLETE":
            if answer["status"] not in ("UNKNOWN", "RATELIMIT", "PENDING", "RUNNING"):
                raise UserError(f"{self.url} could not align it: {_said(answer)}")
            if time.monotonic() > deadline:
                raise UserError(f"{self.url} had not aligned it within {self.wait_s:g} s ({answer['status']})")
            if answer["status"] in ("UNKNOWN", "RATELIMIT"):  # it has no ticket of ours
                self.sleep(pause * random.uniform(1, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
                answer = self._json(f"ticket/{kind}", form)
            else:
                self.sleep(look)
                look = min(1.5 * look, _LONGEST_LOOK_S)
                answer = self._json(f"ticket/{urllib.parse.quote(str(answer.get('id', '')), safe='')}")
        name = urllib.parse.quote(str(answer.get("id", "")), safe="")
        return _unpacked(self._request(f"result/download/{name}"), f"the answer of {self.url}")

    def _json(self, path: str, form: bytes | None = None) -> dict[str, Any]:
        raw = self._request(path, form)
        try:
            answer = json.loads(raw)
            return answer | {"status": str(answer["status"])}
        except (ValueError, KeyError, TypeError):
            raise self._give_up(f"its answer to {path.partition('/')[0]} is not of ColabFold's protocol") from None

    def _request(self, path: str, form: bytes | None = None) -> bytes:
        """The one policy of retries: what fails on the way, or by the server's fault, is asked again."""
        pause, reason = _PAUSE_S, ""
        for attempt in range(_TRIES):
            if self._given_up:
                raise GivenUp(self._given_up)
            if attempt:
                self.sleep(pause * random.uniform(1, 1.5))
                pause = min(2 * pause, _LONGEST_PAUSE_S)
            request = urllib.request.Request(f"{self.url}/{path}", form, self._headers)
            try:
                with self._opener.open(request, timeout=_TIMEOUT_S) as response:
                    raw = response.read(_MOST_BYTES + 1)
                if len(raw) > _MOST_BYTES:
                    raise UserError(f"the answer of {self.url} has more than 2 GiB; ask for fewer sequences at once")
                return raw
            except urllib.error.HTTPError as error:
                body = b""
                with contextlib.suppress(OSError, http.client.HTTPException):
                    body = error.read(1 << 20)
                if error.code in _REFUSING:
                    raise self._give_up(f"it refuses ({error.code}): {_message(body)}") from None
                if error.code < 500 and _has_status(body):
                    return body
                if error.code < 500 and error.code != 429:
                    raise self._give_up(f"it answers {error.code} to {path.partition('/')[0]}") from None
                reason = f"it answers {error.code}: {_message(body)}"
            except (OSError, http.client.HTTPException) as error:
                reason = str(getattr(error, "reason", error)) or type(error).__name__
        raise self._give_up(f"it does not answer ({reason}), asked {_TRIES} times")

    def _give_up(self, reason: str) -> GivenUp:
        with self._lock:
            self._given_up = self._given_up or f"the server {self.url}: {reason}; give another, or --databases"
        return GivenUp(self._given_up)


def read_key(path: Path | None) -> str | None:
    """The first line of a key's file.  Raises UserError where there is none."""
    if path is None:
        return None
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the key from {path} ({error})") from None
    if not lines[0].strip():
        raise UserError(f"{path} holds no key; put one into its first line")
    return lines[0].strip()


def _distinct(record: Record) -> list[str]:
    return list(dict.fromkeys(chain.sequence for chain in record.chains or (record,)))


def _has_status(body: bytes) -> bool:
    try:
        return "status" in json.loads(body)
    except (ValueError, TypeError):
        return False


def _message(body: bytes) -> str:
    try:
        return _said(json.loads(body))
    except (ValueError, TypeError, AttributeError):
        return " ".join(body.decode("utf-8", "replace").split())[:200] or "no reason is given"


def _said(answer: Mapping[str, Any]) -> str:
    found = answer.get("message") or answer.get("reason") or answer.get("status") or "no reason is given"
    return " ".join(str(found).split())[:300]


def _unpacked(raw: bytes, origin: str) -> dict[str, str]:
    """The texts of a tar.gz.  Raises UserError for what is none, or names a file outside of its folder."""
    found: dict[str, str] = {}
    total = 0
    try:
        with tarfile.open(fileobj=io.BytesIO(raw), mode="r:gz") as tar:
            for member in tar:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts or not (member.isfile() or member.isdir()):
                    raise UserError(
                        f"{origin} names {member.name[:80]!r}, outside of its folder; nothing of it is taken"
                    )
                total += member.size
                if total > _MOST_BYTES:
                    raise UserError(f"{origin} unpacks to more than 2 GiB; nothing of it is taken")
                if member.isfile() and place.name in (UNIREF, ENVIRONMENTAL, PAIRED):
                    file = tar.extractfile(member)
                    found[place.name] = "" if file is None else file.read().decode("utf-8", "replace")
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise UserError(f"{origin} is no tar.gz ({error}); ask again later") from None
    return found


def _entries(files: Mapping[str, str], name: str, sequences: Sequence[str]) -> list[Rows]:
    """The rows of each sequence in a file of an answer, its own left out; a sequence may have several parts."""
    if name not in files:
        raise UserError(f"the answer holds no {name}; ask another server")
    found: list[Rows | None] = [None] * len(sequences)
    for part in files[name].split("\0"):
        if not part.strip():
            continue
        lines = part.strip().splitlines()
        number = lines[0][1:].split()[0] if len(lines[0]) > 1 else ""
        at = int(number) - _FIRST if number.isdecimal() else -1
        if not 0 <= at < len(sequences):
            raise UserError(f"{name} of the answer is of a query {number[:20]!r} that was not asked for")
        check_query(parse_a3m(part, name), sequences[at], f"{name} of the answer")  # the columns of every row, too
        rows = _rows(lines)
        found[at] = (found[at] or []) + rows[1:]
    lacking = next((at for at, rows in enumerate(found) if rows is None), None)
    if lacking is not None:
        raise UserError(f"{name} of the answer lacks sequence {lacking + 1}; ask another server")
    return [rows or [] for rows in found]


def _rows(lines: Sequence[str]) -> Rows:
    rows: Rows = []
    for line in lines:
        if line.startswith(">"):
            rows.append((line[1:].strip(), ""))
        else:
            rows[-1] = rows[-1][0], rows[-1][1] + line.strip()
    return rows


def _text(rows: Sequence[tuple[str, str]]) -> str:
    return "".join(f">{name}\n{letters}\n" for name, letters in rows)


def _complex(record: Record, sequences: Sequence[str], own: Sequence[Rows], paired: Sequence[Rows]) -> str:
    """An A3M as ColabFold writes it of a complex: its sequences side by side, each once."""
    if len({len(rows) for rows in paired}) > 1:
        raise UserError(f"{PAIRED} of the answer has not as many rows for each chain; ask another server")
    letters_of = [chain.sequence for chain in record.chains]
    copies = [letters_of.count(sequence) for sequence in sequences]
    lines = [f"#{','.join(str(len(one)) for one in sequences)}\t{','.join(map(str, copies))}\n"]
    numbers = "\t".join(str(number) for number in range(_FIRST, _FIRST + len(sequences)))
    rows = [(numbers, "".join(sequences))]
    rows += [("\t".join(n for n, _ in row), "".join(letters for _, letters in row)) for row in zip(*paired)]
    gaps = ["-" * len(sequence) for sequence in sequences]
    for at, of_chain in enumerate(own):
        before, behind = "".join(gaps[:at]), "".join(gaps[at + 1 :])
        rows += [(name, f"{before}{letters}{behind}") for name, letters in of_chain]
    return "".join(lines) + _text(rows)
