"""Asking a server of ColabFold's protocol for alignments: ours, or any other.

1. what was asked before is in the cache, and stays there until its file is removed
2. a ticket for the sequences of a record; of a complex another for its chains' paired rows
3. requests are repeated by the one policy of connection.py; a server that is busy is asked again for `wait_s`
4. of the result the files that are expected are read, in memory: nothing of it is unpacked
5. an A3M of what came: of a complex one as ColabFold writes it, paired rows first

Only sequences and numbers in the place of names leave this machine.
"""

import gzip
import hashlib
import io
import json
import sys
import tarfile
import time
import urllib.parse
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath

from apps.fold.features.alignment import check_query, parse_a3m
from apps.fold.features.sequences import Record
from apps.fold.service.answers import ENVIRONMENTAL, PAIRED, UNIREF
from apps.fold.service.protocol import Kind, said
from core.config import UserError, in_words
from core.files import replace_file

MODES: Mapping[Kind, str] = {"msa": "env", "pair": "pairgreedy"}
_FIRST = 101  # the name of the first record of a ticket
_LOOK_S, _LONGEST_LOOK_S = 0.5, 10.0  # between looks at a ticket
_MOST_BYTES = 1 << 31  # of an answer, unpacked: a small file may unpack to any length

Rows = list[tuple[str, str]]


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

    def __post_init__(self) -> None:
        if find_spec("httpx2") is None:
            raise UserError(f"{self.url} is asked by httpx2, which is not installed; pip install 'megalith[fold]'")
        from apps.fold.service.connection import Connection

        self._server = Connection(self.url, self.key, self.sleep)
        self.url = self._server.url

    def announce(self, records: Sequence[Record]) -> None:
        """Say what leaves this machine, where anything does."""
        asked = [record for record in records if not self.kept(record).exists()]
        if asked:
            residues = sum(len(sequence) for record in asked for sequence in _distinct(record))
            many = f"{len(asked)} of {len(records)}" if len(asked) < len(records) else f"{len(asked)}"
            many += f" record{'s' * (len(records) > 1)}"
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
        form = {"q": query, "mode": MODES[kind]}
        deadline, pauses, look = time.monotonic() + self.wait_s, self._server.pauses(), _LOOK_S
        answer = self._server.ask(f"ticket/{kind}", form)
        while answer["status"] != "COMPLETE":
            if answer["status"] not in ("UNKNOWN", "RATELIMIT", "PENDING", "RUNNING"):
                raise UserError(f"{self.url} could not align it: {said(answer)}")
            if time.monotonic() > deadline:
                raise UserError(f"{self.url} had not aligned it within {self.wait_s:g} s ({answer['status']})")
            if answer["status"] in ("UNKNOWN", "RATELIMIT"):  # it has no ticket of ours
                self.sleep(next(pauses))
                answer = self._server.ask(f"ticket/{kind}", form)
            else:
                self.sleep(look)
                look = min(1.5 * look, _LONGEST_LOOK_S)
                answer = self._server.ask(f"ticket/{_quoted(answer)}")
        return _unpacked(self._server.download(f"result/download/{_quoted(answer)}"), f"the answer of {self.url}")


def _distinct(record: Record) -> list[str]:
    return list(dict.fromkeys(chain.sequence for chain in record.chains or (record,)))


def _quoted(answer: Mapping[str, object]) -> str:
    """The name of a ticket, as a part of a path."""
    return urllib.parse.quote(str(answer.get("id", "")), safe="")


class _Bounded(gzip.GzipFile):
    """A packed file as it unpacks, up to a length: headers, names and members alike."""

    def __init__(self, raw: bytes, origin: str):
        super().__init__(fileobj=io.BytesIO(raw))
        self._origin, self._left = origin, _MOST_BYTES

    def read(self, size: int | None = -1) -> bytes:
        found = super().read(size)
        self._left -= len(found)
        if self._left < 0:
            raise UserError(f"{self._origin} unpacks to more than {in_words(_MOST_BYTES)}; nothing of it is taken")
        return found


def _unpacked(raw: bytes, origin: str) -> dict[str, str]:
    """The texts of a tar.gz.  Raises UserError for what is none, or names a file outside of its folder."""
    found: dict[str, str] = {}
    try:
        with tarfile.open(fileobj=_Bounded(raw, origin), mode="r|") as tar:
            for member in tar:
                place = PurePosixPath(member.name)
                if place.is_absolute() or ".." in place.parts or not (member.isfile() or member.isdir()):
                    raise UserError(
                        f"{origin} names {member.name[:80]!r}, outside of its folder; nothing of it is taken"
                    )
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
        lines = [line for line in part.strip().splitlines() if not line.startswith("#")]
        number = next(iter(lines[0][1:].split()), "") if lines and lines[0].startswith(">") else ""
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
        of_its_own = [(str(_FIRST + at), sequences[at]), *of_chain]  # by which ColabFold knows where its rows begin
        rows += [(name, f"{before}{letters}{behind}") for name, letters in of_its_own]
    return "".join(lines) + _text(rows)
