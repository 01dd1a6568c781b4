"""Which options of a command a run reads, and which it refuses: what is neither was accepted and ignored."""

import dataclasses
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from core.config import UserError, option_names

_READERS_OF_ALL = ("dataclasses", "tyro", "core.config", "copy", "tests.support.options")


@contextmanager
def recorded(config: Any) -> Iterator[set[str]]:
    """Inside, every option of a config like this one that code reads is added to the set, by its dotted name.

    What reads all of them alike (parsing, copying, writing as JSON) and what only checks them (`__post_init__`) does
    not count. Classes stand for places: a class that the config holds twice is read in both places or in none.
    """
    places: dict[type, list[str]] = {}
    _find(config, "", places)
    read: set[str] = set()
    before = {kind: kind.__getattribute__ for kind in places}
    try:
        for kind in places:
            kind.__getattribute__ = _recorder(kind, places[kind], read)
        yield read
    finally:
        for kind, own in before.items():
            kind.__getattribute__ = own


def _find(config: Any, prefix: str, places: dict[type, list[str]]) -> None:
    places.setdefault(type(config), []).append(prefix)
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if dataclasses.is_dataclass(value):
            _find(value, f"{prefix}{item.name}.", places)


def _recorder(kind: type, prefixes: list[str], read: set[str]) -> Callable[[Any, str], Any]:
    names = {item.name for item in dataclasses.fields(kind)}

    def get(self: Any, name: str) -> Any:
        if name in names and _counts(sys._getframe(1)):
            read.update(prefix + name for prefix in prefixes)
        return object.__getattribute__(self, name)

    return get


def _counts(frame: Any) -> bool:
    if frame.f_code.co_filename == "<string>":  # what dataclasses generate: comparing, hashing, printing
        return False
    if frame.f_globals.get("__name__", "").split(".")[0] in ("dataclasses", "tyro", "copy") or (
        frame.f_globals.get("__name__") in _READERS_OF_ALL
    ):
        return False
    while frame is not None:
        if frame.f_code.co_name == "__post_init__":
            return False
        frame = frame.f_back
    return True


def another(value: Any, given: Mapping[str, Any], name: str) -> Any:
    """A value of the same kind that is not the default."""
    if name in given:
        return given[name]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 or 1
    raise KeyError(f"{name}: no other value than {value!r} is known; give one")


def unread(config: Any, read: set[str]) -> list[str]:
    """Options of the config that no code has read."""
    return [name for name in option_names(config) if name not in read]


def refused(run: Callable[[list[str]], Any], argv: list[str]) -> str | None:
    """What the command says when it refuses these words; None where it takes them."""
    try:
        run(argv)
    except UserError as error:
        return str(error)
    return None
