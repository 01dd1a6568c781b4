"""What `make soak` has seen of the mutations: tests/soak/mutations.json, an entry for each, written as it is seen."""

import fcntl
import hashlib
import json
import os
import platform
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from tests.soak.mutations import Mutation

FILE = Path(__file__).with_name("mutations.json")


@dataclass(frozen=True)
class Seen:
    """The first test that was red, and the seconds that pytest took."""

    by: str
    seconds: int


def key_of(mutation: Mutation) -> str:
    """Of the text that is changed and what is made of it: an entry of another mutation says nothing of this one."""
    return hashlib.sha256("\0".join((mutation.file, mutation.old, mutation.new)).encode()).hexdigest()[:16]


def keep(mutation: Mutation, seen: Seen, file: Path = FILE) -> None:
    """Put the entry in place of the former one; complete or not at all, also beside another process that does so."""
    where = {"date": datetime.now(UTC).date().isoformat(), "cpu": platform.machine(), "torch": torch.__version__}
    aside, turn = file.with_suffix(".part"), os.open(file.parent, os.O_RDONLY)
    try:
        fcntl.flock(turn, fcntl.LOCK_EX)
        entries = kept(file) | {mutation.what: {"key": key_of(mutation), **asdict(seen), **where}}
        aside.write_text(json.dumps(dict(sorted(entries.items())), indent=1) + "\n")
        aside.replace(file)
    finally:
        os.close(turn)


def kept(file: Path = FILE) -> dict[str, dict[str, str | int]]:
    return json.loads(file.read_text()) if file.exists() else {}
