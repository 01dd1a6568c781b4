"""Frozen dataclasses are the configuration; recipes are functions that return one; the command line derives from both.

`parse(recipes, argv, command)` turns `--recipe NAME --field.sub value …` into one frozen dataclass: the recipe gives
the defaults, and every field is an option. Options are spelled --mesh.tp-mode, with a space or `=` before the value,
and `mesh.tp-mode=2d` works too. What was spelled or called otherwise in the version before is taken with a line that
says so (`Renamed`).

Whatever the user got wrong is a `UserError`: one line that says what was given, what is allowed and what to do.
`run_command` prints it and returns exit code 2.
"""

import contextlib
import dataclasses
import difflib
import enum
import errno
import gc
import io
import json
import math
import os
import re
import select
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, TypeVar, get_args, get_origin, get_type_hints

Config = TypeVar("Config")

_WORD = 2**63


class UserError(ValueError):
    """A mistake of the user's, told in one line: what was given, what is allowed, what to do. Commands exit with 2."""


HELP = frozenset(("-h", "--help", "--help-all"))


def parse(
    recipes: Mapping[str, Callable[[], Config]],
    argv: list[str],
    command: str,
    default: str,
    places: tuple[str, ...] = (),
) -> Config:
    """The recipe named by --recipe (else `default`), changed by the options that follow.

    places  options whose values may stand, in this order, before the first option: IN OUT for --model IN --out OUT

    Raises UserError for an unknown recipe or option and for an ill-typed value. --help and --help-all print the options
    and exit; where the config's class has an `ESSENTIAL`, --help shows these.
    """
    import tyro

    name, options = _take_recipe(argv, default)
    if name not in recipes:
        raise UserError(f"no recipe '{name}'{_nearest(name, recipes)}; the recipes are {', '.join(recipes)}")
    config = _as_named(recipes[name](), options)
    options, notes = _spelled_out(_placed(options, places, config), config)
    if HELP & set(options):
        about = f"--recipe NAME gives the defaults, here {name}; the recipes are {', '.join(recipes)}"
        _print_help(config, command, about if len(recipes) > 1 else "", "--help-all" in options)
    _check_names(options, config, command)
    tell_notes(notes)
    options = _none_spelled(options, config)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            # Docstrings are the texts of options; to look for comments beside them takes longer than to parse.
            no_comments = (tyro.conf.HelptextFromCommentsOff,)
            found = tyro.cli(type(config), default=config, args=options, prog=command, config=no_comments)
    except SystemExit:
        said = _in_plain_words(_one_line(_as_called(complaint.getvalue(), config)), options, config)
        raise UserError(f"{said}; see {command} --help-all") from None
    _check_values(found, config)
    _refuse_unread(found, options, command)
    return found


class Essential(Protocol):
    """A configuration with more options than most people need."""

    ESSENTIAL: ClassVar[tuple[str, ...]]
    """Dotted names of those that they do, in the order in which --help shows them."""


def _print_help(config: Any, command: str, about: str, everything: bool) -> None:
    """Exits."""
    import tyro

    essential: tuple[str, ...] = () if everything else getattr(type(config), "ESSENTIAL", ())
    printed = io.StringIO()
    captured = bool(essential or _called(config))
    with contextlib.redirect_stdout(printed if captured else sys.stdout), contextlib.suppress(SystemExit):
        tyro.cli(type(config), default=config, args=["--help"], prog=command, description=about)
    if captured and not essential:
        print(_as_called(printed.getvalue(), config), end="")
    if essential:
        described = _described(printed.getvalue())
        print(f"usage: {command} [--option value …]\n\n{about}\n")
        for name in essential:
            print(_as_called("\n".join(described[name]), config))
        print(f"\n{command} --help-all lists {sum(name not in essential for name in option_names(config))} more")
    raise SystemExit(0)


def _described(text: str) -> dict[str, list[str]]:
    """option -> its lines in a parser's help."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        inside = line[1:].rstrip()  # blanks stand in the place of the box, because the text goes to no terminal
        if start := re.match(r" (?:-\w, )?--([\w.-]+)", inside):
            found[start[1].replace("-", "_")] = lines = []
        elif not inside.startswith("  "):
            lines = []  # a border or a title: what follows belongs to no option
        lines.append(inside)
    return found


class Unread(Protocol):
    """A part of a configuration of which some fields are read only where others say so."""

    def unread(self) -> Mapping[str, str]:
        """name -> why nothing reads it as the others are, and what to give. Of a recipe it is left as it is; typed, it
        is refused, because it would be ignored."""
        ...


class Renamed(Protocol):
    """A configuration of which some options were called otherwise in the version before."""

    RENAMED: ClassVar[Mapping[str, str]]
    """former name -> name, or name=UNIT where a number is to get its unit: {"memory_gb": "memory=GB"}"""


FORMER_MODEL = ("source", "weights", "run")
"""What --model was called, in one command or another: each of them takes all three."""


class Called(Protocol):
    """A configuration of which some fields cannot be called as their options."""

    CALLED: ClassVar[Mapping[str, str]]
    """field -> option: {"source": "model"} beside a field `model` with options of its own"""


class Named(Protocol):
    """A part of a configuration whose class, and so whose options, go by its field `name`."""

    name: str

    def named(self, name: str) -> Any:
        """The configuration of another name."""
        ...

    def foreign(self, option: str) -> str | None:
        """The reason to refuse an option that belongs to another name; None where it belongs to none."""
        ...


def _as_named(config: Config, options: list[str], prefix: str = "") -> Config:
    """The config, each part that goes by a name of the one that the user types."""
    if hasattr(config, "named"):
        for word, after in zip(options, [*options[1:], ""]):
            name, equals, value = word.removeprefix("--").partition("=")
            if name == f"{prefix}name" and (equals or word.startswith("--")):
                config = config.named(value if equals else after)  # pyright: ignore[reportAttributeAccessIssue]
    changed = {}
    for item in dataclasses.fields(config):  # pyright: ignore[reportArgumentType]
        part = getattr(config, item.name)
        if is_dataclass(part) and (found := _as_named(part, options, f"{prefix}{item.name}.")) is not part:
            changed[item.name] = found
    return dataclasses.replace(config, **changed) if changed else config  # pyright: ignore[reportArgumentType]


def _foreign(config: Any, name: str) -> str | None:
    """Why an option by its dotted name is refused that a part of another name has."""
    first, _, rest = name.partition(".")
    if rest:
        return _foreign(getattr(config, first), rest) if is_dataclass(getattr(config, first, 0)) else None
    return config.foreign(name) if hasattr(config, "foreign") else None


def option(name: str, config: Any = None) -> str:
    """--mesh.tp-mode of mesh.tp_mode, of a configuration with this field."""
    return "--" + _called(config).get(name, name).replace("_", "-")


def _called(config: Any) -> Mapping[str, str]:
    return getattr(type(config), "CALLED", {})


def _as_called(text: str, config: Any) -> str:
    """The parser's output, with the options' own names, the right border of its box where it was."""
    for name, called in _called(config).items():
        lines = [re.sub(rf"--{name}(?=[ '])", f"--{called}", line) for line in text.split("\n")]
        widths = map(len, text.split("\n"))
        text = "\n".join(f"{new[:-1]}{' ' * (width - len(new))}{new[-1:]}" for new, width in zip(lines, widths))
    return text


def typed(argv: list[str], config: Any) -> set[str]:
    """Dotted names of the fields whose options the user typed, of a config that `parse` made of them."""
    options, _ = _spelled_out(_take_recipe(argv, "")[1], config)
    return {_option_name(option) for option in options if option.startswith("--")} & set(option_names(config))


def recipe_of(argv: list[str], default: str) -> str:
    """The recipe that the words name, or the default."""
    return _take_recipe(argv, default)[0]


def _refuse_unread(config: Any, options: list[str], command: str) -> None:
    typed = {_option_name(option) for option in options if option.startswith("--")}
    for name, why in _unread(config):
        if name in typed:
            raise UserError(f"{option(name, config)} {why}; see {command} --help-all")


def _unread(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    if hasattr(config, "unread"):
        yield from ((f"{prefix}{name}", why) for name, why in config.unread().items())
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from _unread(value, f"{prefix}{item.name}.")


def _option_name(option: str) -> str:
    """--mesh.tp-mode=2d and --mesh.no-tp-mode, as the field is called."""
    path, _, last = option.removeprefix("--").partition("=")[0].replace("-", "_").rpartition(".")
    return f"{path}.{last.removeprefix('no_')}" if path else last.removeprefix("no_")


def _negated(name: str) -> str:
    """log.no_tensorboard of log.tensorboard"""
    group, dot, last = name.rpartition(".")
    return f"{group}{dot}no_{last}"


def _take_recipe(argv: list[str], default: str) -> tuple[str, list[str]]:
    """The value of --recipe, and the other options."""
    rest, name, tokens = [], default, iter(argv)
    for token in tokens:
        if token == "--recipe":
            name = next(tokens, "")
        elif token.startswith(("--recipe=", "recipe=")):
            name = token.partition("=")[2]
        else:
            rest.append(token)
    return name, rest


def _placed(options: list[str], places: tuple[str, ...], config: Any) -> list[str]:
    """Words before the first option become the values of `places`.  Raises UserError for one that is given twice."""
    names = {*option_names(config), *dict(_renamed(config))}
    named = []
    for place, word in zip(places, options):
        name, equals, _ = word.partition("=")
        if word.startswith("-") or (equals and name.replace("-", "_") in names):
            break
        if any(other.partition("=")[0] in (option(place), place) for other in options):
            raise UserError(f"{word} and {option(place)}, which means the same; give one of them")
        named.append(f"{option(place)}={word}")
    return named + options[len(named) :]


_BARE = ("--resume", "--ray")
"""Options that need no value, which then is auto."""


def _spelled_out(options: list[str], config: Any) -> tuple[list[str], list[str]]:
    """The options as the parser takes them, and a line for each spelling and name of the version before.

    `field=value` gets its dashes, and an option of `_BARE` its value.  Raises UserError for an option under two names.
    """
    fields = {called: name for name, called in _called(config).items()}
    names, renamed = {*option_names(config), *fields}, dict(_renamed(config))
    given = {_option_name(o) for o in options if o.startswith("--")}
    spelled, notes, unit = [], [], ""
    for word in options:
        name, equals, value = word.removeprefix("--").partition("=")
        field = name.replace("-", "_")
        if not word.startswith("--") and not (equals and (field in names or field in renamed)):
            spelled.append(f"{word}{unit}")
            unit = ""
            continue
        unit = ""
        if "_" in name:
            notes.append(f"--{name} is spelled {option(name)} now; underscores go with the next version")
        if field in renamed:
            now, _, unit = renamed[field].partition("=")
            if now in given:
                raise UserError(f"{option(now)} and {option(field)}, its former name; give {option(now)} alone")
            notes.append(f"{option(field)} is called {option(now)} now; the former name goes with the next version")
            field = now
        name = fields.get(field, field).replace("_", "-")
        spelled.append(f"--{name}={value}{unit}" if equals else f"--{name}")
        unit = "" if equals else unit
    for index, word in enumerate(spelled):
        if word in _BARE and (index + 1 == len(spelled) or spelled[index + 1].startswith("--")):
            spelled[index] = f"{word}=auto"
    return spelled, notes


def _renamed(config: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(former name, name) of the options of a dataclass instance, dotted; see `Renamed`."""
    if not prefix:
        called = {_called(config).get(name, name) for name in option_names(config)}
        yield from ((old, "model") for old in FORMER_MODEL if "model" in called and old not in called)
    yield from ((f"{prefix}{old}", f"{prefix}{new}") for old, new in getattr(type(config), "RENAMED", {}).items())
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from _renamed(value, f"{prefix}{item.name}.")


def tell_notes(notes: list[str]) -> None:
    """Print each once: the process that launched this rank, or another rank, has told them already."""
    if os.environ.get("RANK", "0") == "0" and LAUNCHER not in os.environ:
        for note in dict.fromkeys(notes):
            print(f"note: {note}", file=sys.stderr)


LAUNCHER = "MEGALITH_LAUNCHER"
"""the environment's name of the process whose command line this rank was given; see `core.runtime.launch`"""


def _check_names(options: list[str], config: Any, command: str) -> None:
    called = _called(config)
    names = [called.get(name, name) for name in option_names(config)]
    negated = {f"no_{name}": _negated(name) for name in names if _hint(name, config) is bool}
    known = {*names, *called, *negated.values()}  # under their fields' names they come from `_spelled_out`
    for before, word in zip(["", *options], options):
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        may_be_value = before.startswith("--") and "=" not in before  # as in --out a=b
        is_option = word.startswith("--") or ("=" in word and not may_be_value)
        if is_option and name not in known:
            if (why := _foreign(config, name)) is not None:
                raise UserError(f"{why}; see {command} --help-all")
            former = {old: new.partition("=")[0] for old, new in _renamed(config)}
            near = [negated[name]] if name in negated else _nearest_names(name, [*names, *former, "recipe"])
            meant = dict.fromkeys(option(former.get(one, one)) for one in near)
            meant = f", did you mean {' or '.join(meant)}?" if meant else ""
            raise UserError(f"{command} has no option {word.partition('=')[0]}{meant}; see {command} --help-all")


_ELSEWHERE = {
    "learning_rate": "lr",
    "batch_size": "global_batch",
    "per_device_train_batch_size": "microbatch",
    "max_steps": "steps",
    "num_steps": "steps",
    "max_length": "sequence_length",
    "seq_length": "sequence_length",
    "output_dir": "out",
    "output": "out",
    "gpus": "nproc",
    "num_gpus": "nproc",
    "world_size": "nproc",
}
"""What other programs call it -> the last part of its name here."""


def _nearest_names(name: str, known: list[str]) -> list[str]:
    """The few that may be meant: what is in a group or is a group of that name, else what is spelled nearly so."""
    other = _ELSEWHERE.get(name, name)
    if near := [one for one in known if one == other or one.startswith(f"{name}.") or one.endswith(f".{other}")]:
        return near[:3]
    scores = {one: max(_alike(name, one), _alike(name, one.rpartition(".")[2])) for one in known}
    return sorted((one for one in known if scores[one] > 0.6), key=lambda one: -scores[one])[:3]


def _alike(one: str, other: str) -> float:
    """From 0 to 1, and more where they share a word: batch_size and global_batch."""
    shared = set(re.split(r"[._]", one)) & set(re.split(r"[._]", other))
    return difflib.SequenceMatcher(None, one, other).ratio() + 0.3 * bool(shared)


def _check_values(config: Any, default: Any, prefix: str = "") -> None:
    """Refuse what no option means: floats that are not finite, integers beyond 64 bits, devices that there are not."""
    for item in dataclasses.fields(config):
        name, value, usual = f"{prefix}{item.name}", getattr(config, item.name), getattr(default, item.name, None)
        if is_dataclass(value):
            _check_values(value, usual, f"{name}.")
            continue
        for one in value if isinstance(value, tuple | list) else (value,):
            require_finite(name, one)
            if isinstance(one, int) and not -_WORD <= one < _WORD:
                raise UserError(f"{name}={one}; that is too large, give a number below 2^63")
        if item.name == "seed" and isinstance(value, int) and value < 0:
            raise UserError(f"{name}={value}; give a number from 0 to below 2^63")
        if item.name == "device" and value != usual:
            require_device(name, str(value))


def require_device(name: str, value: str, numbered: bool = True) -> None:
    """Raises UserError for what is no device: auto, cpu, cuda, and where one may be `numbered` cuda:N."""
    if not re.fullmatch(r"auto|cpu|cuda(:[0-9]+)?" if numbered else r"auto|cpu|cuda", value):
        which = "cuda:N for one of several" if numbered else "CUDA_VISIBLE_DEVICES says which GPUs"
        raise UserError(f"{name}={value}; the devices are cpu and cuda ({which}), or auto for CUDA where there is one")


def require_finite(name: str, value: Any) -> None:
    """Raises UserError for a float that is infinite or not a number."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{name}={value}; give a finite number")


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f", did you mean {close[0]}?" if close else ""


def _one_line(complaint: str) -> str:
    """The parser's message, out of its box (drawn with dashes where stdout has no lines) and without its title."""
    paragraphs: list[list[str]] = [[]]
    for line in complaint.splitlines():
        text = line.strip(" │╭╮╰╯─")
        if not text.strip("-"):
            paragraphs.append([])
        elif not text.startswith(("For full helptext", "Argument helptext")):
            paragraphs[-1].append(text)
        if line.startswith("╭"):
            paragraphs.append([])
    _title, *rest = (" ".join(p) for p in paragraphs if p)
    said = re.sub(r"^Error parsing (?!--)[\w.-]+: ", "", "; ".join(rest))  # a field or class, before words of our own
    return said.rstrip(".")


def _none_spelled(options: list[str], config: Any) -> list[str]:
    """The options, with `none` in any case as the parser takes it, where an option may be none."""
    spelled = []
    for before, word in zip(["", *options], options):
        name, _, value = word.partition("=") if word.startswith("--") else (before, "", word)
        is_none = value.lower() == "none" and name.startswith("--") and _may_be_none(_hint(name, config))
        spelled.append(word[: len(word) - len(value)] + "None" if is_none else word)
    return spelled


def _may_be_none(hint: Any) -> bool:
    choices = get_args(hint)
    return type(None) in choices and not any("none" in get_args(one) or is_dataclass(one) for one in choices)


def _hint(name: str, config: Any) -> Any:
    """The type of the field whose option is --optim.clip-norm; None where there is no such field."""
    fields = {called: field for field, called in _called(config).items()}
    path = name.removeprefix("--").replace("-", "_")
    *groups, last = fields.get(path, path).split(".")
    for group in groups:
        config = getattr(config, group, None)
    return get_type_hints(type(config)).get(last) if is_dataclass(config) else None


_ABOUT = re.compile(r"(?:^Error parsing |argument ')(--[\w.-]+)")
_STRAY = re.compile(r"^Unrecognized options: (.*?)(?:, |; |$)")
_VALUES = {int: "whole number", float: "number", str: "value", Path: "path"}


def _in_plain_words(complaint: str, options: list[str], config: Any) -> str:
    """The parser's complaint about an option's value, as what was given and what to give; any other as it is."""
    if about := _ABOUT.search(complaint):
        name = about[1]
    elif stray := _STRAY.search(complaint):
        index = next(k for k, word in enumerate(options) if stray[1] in (word, word.partition("=")[2]))
        name = next((word.partition("=")[0] for word in options[index::-1] if word.startswith("--")), "")
        if not name:
            return f"{stray[1]} stands behind no option; options are written --name value"
    else:
        return complaint
    field = name.removeprefix("--") if _hint(name, config) is not None else _option_name(name)
    if (hint := _hint(field, config)) is None:
        return complaint
    given, is_its = [name], False
    for word in options:
        typed, equals, value = word.partition("=") if word.startswith("--") else ("", "", "")
        is_its = _as_called(f"{typed} ", config) == f"{name} " if typed else is_its
        if is_its:
            given = [f"{name}{equals}{value}"] if typed else [*given, word]
    return f"{' '.join(given)}: {_what_to_give(field, hint)}"


def _what_to_give(name: str, hint: Any) -> str:
    if hint is bool:
        return f"give {option(name)} or {option(_negated(name))}, without a value"
    if any(map(is_dataclass, get_args(hint))):
        return "this recipe has none, and an option cannot give it one; choose a recipe that has"
    return f"give {_values(hint)}"


def _values(hint: Any) -> str:
    """What an option takes: `a number, or none`."""
    choices = [one for one in get_args(hint) if one is not type(None)]
    if get_origin(hint) is Literal:
        *others, last = map(str, choices)
        return f"{', '.join(others)} or {last}" if others else last
    if get_origin(hint) is tuple:
        if get_origin(choices[0]) is Literal:
            return f"one or more of {_values(choices[0])}"
        word = _VALUES.get(choices[0], "value")
        return f"any number of {word}s" if choices[-1] is ... else f"{len(choices)} {word}s"
    if choices:
        return " or ".join(map(_values, choices)) + (", or none" if _may_be_none(hint) else "")
    return f"a {_VALUES[hint]}"


def option_names(config: Any, prefix: str = "") -> Iterator[str]:
    """Dotted names of the options of a dataclass instance."""
    for item in dataclasses.fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from option_names(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}"


_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def size_in_bytes(text: str | float, option: str, bare: Literal["", "GiB"] = "") -> int:
    """A size as users write it, such as 10GiB or "800 MB", in bytes.

    option  that it was given for; bare: the unit of a number without one, bytes or GiB

    Raises UserError for what is no positive size.
    """
    given = str(text).strip()
    digits = given.rstrip("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ ")
    unit = _UNITS.get((given[len(digits) :].strip() or bare).upper())
    try:
        size = 0 if unit is None else int(float(digits) * unit)
    except (ValueError, OverflowError):
        size = 0
    if size <= 0:
        number = "24, which is GiB" if bare else "4096"
        raise UserError(f"{option}={text}: that is no size; give one such as 10GiB, 800MB or {number}")
    return size


def in_words(num_bytes: float) -> str:
    """`1.5 GiB`: a size to be read, three digits."""
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 999.5 * size else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes:.0f} bytes"


def time_in_words(seconds: float) -> str:
    """`3.5 hours`: a time to be read."""
    for unit, length in (("days", 86400), ("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:,.1f} {unit}"
    return f"{seconds:.1f} s"


def as_json(config: Any) -> Any:
    """A dataclass as what JSON can hold; paths and enums as strings."""
    return json.loads(json.dumps(dataclasses.asdict(config), default=_as_text))


def _as_text(value: Any) -> str:
    assert isinstance(value, Path | enum.Enum), value
    return str(value)


_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def in_one_line(error: BaseException) -> str | None:
    """The line for the user about a mistake, a path that cannot be used or a full disk; None for all else."""
    if isinstance(error, UserError):
        return str(error)
    if not isinstance(error, OSError) or (error.filename is None and error.errno not in _NO_ROOM):
        return None
    where = "" if error.filename is None else f"{error.filename}: "
    advice = "free space, or choose another path" if error.errno in _NO_ROOM else "choose another path"
    return f"{where}{error.strerror}; {advice}"


def run_command(
    command: Callable[[list[str]], int | None], argv: list[str], speaks: Callable[[], bool] = lambda: True
) -> int:
    """Run a command; a UserError, or a path that cannot be used, becomes one line on stderr and exit code 2.

    speaks  asked by a rank that has something to say: whether it is the one that does, so that a line appears once
    """
    try:
        try:
            return command(argv) or 0
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        if not _nobody_reads():
            raise
        return 128 + signal.SIGPIPE
    except (UserError, OSError) as error:
        line = in_one_line(error)
        if line is None:
            raise
        if not getattr(error, "reported", False) and speaks():
            print(f"error: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _nobody_reads() -> bool:
    """Return whether what is printed goes to a program that has ended, as in `--help | head`; then it goes nowhere."""
    output = sys.stdout.fileno()
    poll = select.poll()
    poll.register(output, 0)
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    os.dup2(os.open(os.devnull, os.O_WRONLY), output)
    return True


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Keep Python from looking for garbage inside, and later among what is there by then.

    What modules make stays. Looking through it again and again takes a good part of large packages' imports.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@dataclass(frozen=True)
class App:
    """`NAME COMMAND …`: what an app's commands are called, and how one is run.

    package   of the app; its last part is NAME
    commands  name -> what it does; the command is `main` of the package's module of that name, with _ in the place of
              -, imported only then
    usage     what stands behind COMMAND in the help
    bare      (module, line of the help) for arguments that begin with an option; without one they are refused
    """

    package: str
    commands: Mapping[str, str]
    usage: str = "[--option value …]"
    bare: tuple[str, str] | None = None

    @property
    def name(self) -> str:
        return self.package.rpartition(".")[2]

    def run(self, argv: list[str], speaks: Callable[[], bool]) -> int:
        """Run the command that argv names.  Returns its exit code; speaks: see `run_command`."""
        return run_command(self.dispatch, argv, speaks)

    def dispatch(self, argv: list[str]) -> int:
        """The same, but mistakes are raised as UserError."""
        if not argv or (argv[0] in HELP and not (self.bare and argv[0] == "--help-all")):
            print(self._help())
            return 0
        module, rest = argv[0], argv[1:]
        if self.bare and module.startswith("-"):
            module, rest = self.bare[0], argv
        elif module not in self.commands:
            without = f", or {self.bare[1].partition(':')[0]}" if self.bare else ""
            raise UserError(
                f"{self.name} has no command '{module}'{_nearest(module, self.commands)}; "
                f"the commands are {', '.join(self.commands)}{without}"
            )
        with importing():
            main = import_module(f"{self.package}.{module.replace('-', '_')}").main
        return main(rest) or 0

    def _help(self) -> str:
        lines = [self.bare[1]] if self.bare else []
        called = f"megalith {self.name} COMMAND"
        lines += [f"{called} {self.usage}; {called} --help lists the options", ""]
        return "\n".join([*lines, *(f"  {name:10} {what}" for name, what in self.commands.items())])
