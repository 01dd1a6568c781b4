"""Which options of a command a run reads, and which it refuses: what is neither was accepted and ignored.

1. `options_of` asks a command's own parser for its options.
2. `recorded` notes which of them are read while the command runs.
3. `Probe` runs a command once, types each option that the run has not read, away from its default, and lists those
   that are not refused by name.
"""

import contextlib
import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import tyro

from core.config import UserError, option, option_names
from core.estimate import decoder_shape
from core.models.decoder import decoder_without_memory
from core.models.plan import decoder_table

TRAINING: dict[str, Any] = {
    "comm.activations": "int8",
    "comm.compress": "powersgd",
    "comm.feedback": True,
    "comm.gradients": "int4",
    "comm.secondary": True,
    "comm.weights": "int8",
    "local.asynchronous": "parameter_server",
    "local.every": 4,
    "gemini.order": "horizontal",
    "gemini.policy": "cpu",
    "gemini.host": "1KiB",
    "gemini.disk": Path("drive"),
    "gemini.durable_every": 2,
    "gemini.figure": Path("step.png"),
    "mesh.cp_ulysses": 2,
    "mesh.tp_depth": 2,
    "optim.betas": (0.3, 0.4),
    "pipeline.chunks": 3,
    "pipeline.clip": "last",
    "pipeline.correction": "prediction",
    "pipeline.correction_steps": 7,
    "pipeline.correction_strength": 0.5,
    "pipeline.cost": "measured",
    "pipeline.microbatches": 3,
    "pipeline.replicas": (2, 1),
    "pipeline.schedule": "gpipe",
    "pipeline.split": (1, 2),
    "recompute.bits": 8,
    "recompute.budget": "1GiB",
    "recompute.disk": Path("drive"),
    "recompute.host": "1GiB",
    "reduce_each": True,
}
"""Options of every training command, with values that are allowed in themselves."""

Main = Callable[[list[str]], int | None]

_READERS_OF_ALL = ("dataclasses", "tyro", "copy", "core.config", "tests.support.options")
"""Modules that read every option alike: to parse, to copy, to write as JSON."""


@contextmanager
def recorded(config: Any, notes: Collection[str] = ()) -> Iterator[set[str]]:
    """Inside, every option of a config like this one that code reads is added to the set, by its dotted name.

    What reads all of them alike (parsing, copying, writing as JSON) and what only checks them (`__post_init__`,
    `unread`) does not count. Classes stand for places: a class that the config holds twice is read in both places or
    in none.

    notes  names of functions that only write down what was given, which does not count either
    """
    for remembered in (decoder_without_memory, decoder_table, decoder_shape):
        remembered.cache_clear()  # what an earlier config of equal values had read
    places: dict[type, list[str]] = {}
    _find(config, "", places)
    read: set[str] = set()
    before = {kind: kind.__getattribute__ for kind in places}
    try:
        for kind in places:
            kind.__getattribute__ = _recorder(kind, places[kind], read, frozenset(("__post_init__", "unread", *notes)))
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


def _recorder(kind: type, prefixes: list[str], read: set[str], checks: frozenset[str]) -> Callable[[Any, str], Any]:
    unread = {item.name for item in dataclasses.fields(kind)}

    def get(self: Any, name: str) -> Any:
        if name in unread and _counts(sys._getframe(1), checks):
            unread.discard(name)
            read.update(prefix + name for prefix in prefixes)
        return object.__getattribute__(self, name)

    return get


def _counts(frame: Any, checks: frozenset[str]) -> bool:
    if frame.f_code.co_filename == "<string>":  # what dataclasses generate: comparing, hashing, printing
        return False
    module = frame.f_globals.get("__name__", "")
    if module in _READERS_OF_ALL or module.split(".")[0] in _READERS_OF_ALL:
        return False
    while frame is not None:
        if frame.f_code.co_name in checks:
            return False
        frame = frame.f_back
    return True


class _Parsed(Exception):
    """A command's options are parsed; it is not to run."""


@contextmanager
def _parsing(give: Callable[..., Any]) -> Iterator[None]:
    with mock.patch.object(tyro, "cli", give):
        yield


def options_of(main: Main, argv: list[str]) -> Any:
    """The config, with a recipe's defaults, that a command makes of these words; None where it takes no options."""
    found: list[Any] = []

    def give(kind: type, *, default: Any, args: list[str], **_: Any) -> Any:
        found.append(default if "--help" in args else real(kind, default=default, args=args, prog=""))
        raise _Parsed

    real = tyro.cli
    with _parsing(give), contextlib.suppress(_Parsed, UserError):
        main(argv)
    return found[0] if found else None


def another(name: str, hint: Any, value: Any) -> Any:
    """A value of that type, and other than the one given."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint, *_) = [one for one in typing.get_args(hint) if one is not type(None)]
    if typing.get_origin(hint) is Literal:
        return next(one for one in typing.get_args(hint) if one != value)
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)
        return tuple(another(name, one, None) for one in of if one is not ...)
    if dataclasses.is_dataclass(hint):
        raise KeyError(f"{name} is a group of its own; give a value of it")
    makers: dict[Any, Callable[[], Any]] = {
        bool: lambda: not value,
        int: lambda: (value or 0) * 2 or 1,
        float: lambda: (value or 0.0) / 2 or 0.5,
        str: lambda: f"{value or ''}other",
        Path: lambda: Path(f"{value or ''}other"),
    }
    return makers[hint]()


def hint_of(config: Any, name: str) -> tuple[Any, Any]:
    """The type of an option, and the value that it has."""
    path, _, last = name.rpartition(".")
    for part in filter(None, path.split(".")):
        config = getattr(config, part)
    return typing.get_type_hints(type(config))[last], getattr(config, last)


def replaced(config: Any, name: str, value: Any) -> Any:
    """The config with one option, by its dotted name, of another value."""
    first, _, rest = name.partition(".")
    return dataclasses.replace(config, **{first: replaced(getattr(config, first), rest, value) if rest else value})


@dataclass
class Probe:
    """A command in one of its modes.

    argv     words that make it run, in a moment
    values   option -> a value that is allowed in itself, or one of its group; needed where the option is refused for
             what else is given, and not by its config's `unread`, or where its type does not say what is allowed
    also     options that the run reads without obeying them, because they are handed on with others
    ignored  options that the command takes and says to be without effect
    held     those of them that a run reads all the same, since it makes what they are values of
    notes    names of functions that only write down what was given
    """

    main: Main
    argv: list[str]
    values: Mapping[str, Any] = field(default_factory=dict)
    also: Collection[str] = ()
    ignored: Collection[str] = ()
    held: Collection[str] = ()
    notes: Collection[str] = ()

    def config(self) -> Any:
        config = options_of(self.main, self.argv)
        assert config is not None, f"{self.argv} were not parsed"
        return config

    def not_read(self) -> list[str]:
        """Options that a run of these words does not read."""
        config = self.config()
        with recorded(config, self.notes) as read:
            code = self.main(list(self.argv))
        assert not code, f"exit code {code}"
        return [name for name in option_names(config) if name not in read]

    def check(self) -> None:
        """Raises AssertionError for options that are neither read nor ignored, nor refused by name."""
        config, not_read = self.config(), self.not_read()
        wrong = [
            f"{option(name, config)}, which is read, is told to be without effect"
            for name in set(self.ignored) - set(self.held) - set(not_read)
        ]
        for name in sorted({*not_read, *self.also} - set(self.ignored)):
            if (said := self._typed(config, name)) is not None:
                wrong.append(f"{option(name, config)} {said}")
        assert not wrong, "\n".join(["neither obeyed nor refused:", *wrong])

    def _typed(self, config: Any, name: str) -> str | None:
        """None where the option is refused by name."""
        by_hand = name in self.values
        value = self.values[name] if by_hand else another(name, *hint_of(config, name))
        group = name.rpartition(".")[0]
        whole = isinstance(value, type(hint_of(config, group)[1])) if group else False

        def give(kind: type, **_: Any) -> Any:
            return replaced(config, group if whole else name, value)

        try:
            with _parsing(give):
                code = self.main([*self.argv, f"{option(name, config)}={value}"])
        except UserError as error:
            said = str(error)
            last = name.rpartition(".")[2]
            spoken = said.replace("-", "_")
            named = last in spoken or f"--{option(name, config)}".replace("-", "_").strip("_") in spoken
            named = named or (name.startswith("pipeline.") and "pipeline options" in said)
            if said.startswith(f"{option(name, config)} ") or (by_hand and named):
                return None
            return f"{value}: {said}"
        return f"{value}: exit code {code or 0}"
