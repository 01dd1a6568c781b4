"""Who may ask a server, and how much: a file with a line for each key.

KEY NAME [jobs=N] [disk=SIZE]       jobs: tickets that are not done yet, disk: of its results

A client sends its key as a bearer token, as X-API-Key, or as the password of basic authentication, which is how
ColabFold's client can do it: --host-url http://user:KEY@host:port. Without a file nobody is asked for a key.
"""

import base64
import binascii
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from core.config import UserError, size_in_bytes

_SHORTEST = 16


@dataclass(frozen=True)
class Owner:
    """Who asks: None stands for no limit of its own beside the server's."""

    name: str
    most_jobs: int | None = None
    most_bytes: int | None = None


ANYONE = Owner("anyone")


class Keys:
    """The owners by their keys."""

    def __init__(self, owners: Mapping[str, Owner]):
        self._owners = dict(owners)

    @property
    def asked_for(self) -> bool:
        return bool(self._owners)

    def owner(self, headers: Mapping[str, bytes]) -> Owner | None:
        """Who asks by these headers, whose names are in lower case; None for no key or a wrong one."""
        if not self._owners:
            return ANYONE
        given = _given(headers)
        found = None
        for key, owner in self._owners.items():  # all of them, so that the time tells nothing
            if hmac.compare_digest(key.encode(), given):
                found = owner
        return found

    def named(self, name: str) -> Owner:
        """The owner of a ticket; one whose key is gone has no limit."""
        return next((owner for owner in self._owners.values() if owner.name == name), Owner(name))


def _given(headers: Mapping[str, bytes]) -> bytes:
    if "x-api-key" in headers:
        return headers["x-api-key"].strip()
    kind, _, value = headers.get("authorization", b"").partition(b" ")
    if kind.lower() == b"basic":
        try:
            return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
        except binascii.Error:
            return b""
    return value.strip() if kind.lower() == b"bearer" else b""


def read_keys(path: Path | None) -> Keys:
    """Raises UserError for a line that is none."""
    if path is None:
        return Keys({})
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise UserError(f"cannot read the keys from {path} ({error})") from None
    owners: dict[str, Owner] = {}
    for number, line in enumerate(lines, 1):
        words = line.split("#")[0].split()
        if not words:
            continue
        owner = _owner(words, f"{path}, line {number}")
        if words[0] in owners or owner.name in {other.name for other in owners.values()}:
            raise UserError(f"{path}, line {number}: the key or the name {owner.name} stands there twice")
        owners[words[0]] = owner
    if not owners:
        raise UserError(f"{path} holds no key; put a line KEY NAME [jobs=N] [disk=SIZE] into it for each")
    return Keys(owners)


def _owner(words: list[str], where: str) -> Owner:
    key, name, *limits = [*words, ""] if len(words) == 1 else words
    if len(key) < _SHORTEST or not key.isascii():  # a header carries no others
        raise UserError(f"{where}: a key has {_SHORTEST} ASCII characters or more, as of `openssl rand -hex 16`")
    if not name or "=" in name:
        raise UserError(f"{where}: no name behind the key; write KEY NAME [jobs=N] [disk=SIZE]")
    jobs, disk = None, None
    for limit in limits:
        what, _, value = limit.partition("=")
        if what == "jobs" and value.isdecimal() and int(value) > 0:
            jobs = int(value)
        elif what == "disk":
            disk = size_in_bytes(value, f"{where}: disk")
        else:
            raise UserError(f"{where}: {limit} is no limit; they are jobs=N and disk=SIZE")
    return Owner(name, jobs, disk)
