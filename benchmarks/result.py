"""What every benchmark writes: one schema, one file each, one way to show it.

    name, title          the benchmark
    commit, dirty        of this repository, and whether its code differed from it
    measures             file or folder whose code the figures are of -> git's object id of it at that commit
    date, command        when it began (UTC, ISO 8601) and how it was run
    hardware             cpu, cores, memory_bytes, gpus, load (runnable processes when it began: others' work is noise)
    versions             package -> version
    figures              rows: what was measured ("case") and its numbers, each with its unit
    targets              what was aimed at, what was reached, and what bounds it where something does
    notes                what a reader must know to judge the numbers

`Result` is that; `write` puts it into NAME.json in one move, `read` takes it back or says what is wrong with it.
"""

import json
import math
import os
import platform
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from core.config import UserError

ROOT = Path(__file__).parent.parent
RESULTS = Path(__file__).parent / "results"
WIDTH = 150  # of the tables where there is no terminal to say


class Missing(UserError):
    """A benchmark cannot do without a program that is not installed."""


@dataclass(frozen=True)
class Number:
    value: float
    unit: str


@dataclass(frozen=True)
class Row:
    """One thing that was measured: which (`case`, alike over rows that are to be compared), and what came out."""

    case: dict[str, str | int]
    numbers: dict[str, Number]


@dataclass(frozen=True)
class Target:
    """A ratio that was aimed at: `reached` is at least `wanted`, or not.

    limit  what physics leaves to gain, where two formats read as many bytes or compute as much as one another
    """

    what: str
    wanted: float
    reached: float
    limit: str = ""

    @property
    def met(self) -> bool:
        return self.reached >= self.wanted


@dataclass(frozen=True)
class Measured:
    """What a benchmark hands back; the rest of the result is the same for all."""

    figures: tuple[Row, ...]
    targets: tuple[Target, ...] = ()
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] | None = None


@dataclass(frozen=True)
class Result:
    name: str
    title: str
    commit: str
    dirty: bool
    measures: dict[str, str]
    date: str
    command: str
    hardware: dict[str, Any]
    versions: dict[str, str]
    figures: tuple[Row, ...]
    targets: tuple[Target, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Beginning:
    """What holds when a benchmark begins; by its end somebody may have committed, or changed the tree."""

    commit: str
    dirty: bool
    measures: dict[str, str]
    date: str
    load: float


def beginning(measures: Iterable[str] = ()) -> Beginning:
    """measures: files and folders, from the repository's root, whose code the figures will be of."""
    return Beginning(
        commit=git("rev-parse", "HEAD") or "unknown",
        dirty=_differs(),
        measures=contents("HEAD", measures),
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        load=os.getloadavg()[0],
    )


def _differs() -> bool:
    """Whether code differs from the commit's. A result does not count: the first would make the next ones dirty."""
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)benchmarks/results")
    new = git("ls-files", "--others", "--exclude-standard", "--", "core/*.py", "apps/*.py", "benchmarks/*.py")
    return bool(changed or new)


def contents(commit: str, paths: Iterable[str]) -> dict[str, str]:
    """path -> git's object id of that file or folder at a commit; two alike hold the same. "" where there is none."""
    return {path: git("rev-parse", "--verify", "--quiet", f"{commit}:{path}") for path in paths}


def in_history(commit: str) -> bool:
    """Whether the commit that is checked out has grown from this one."""
    return commit != "" and git("merge-base", "HEAD", commit) == commit


def result_of(name: str, title: str, command: str, measured: Measured, began: Beginning) -> Result:
    """The result of a benchmark that has just run here."""
    return Result(
        name=name,
        title=title,
        commit=began.commit,
        dirty=began.dirty,
        measures=began.measures,
        date=began.date,
        command=command,
        hardware=hardware() | {"load": began.load},
        versions=versions("torch", "numpy", "transformers", "triton") | dict(measured.versions or {}),
        figures=measured.figures,
        targets=measured.targets,
        notes=measured.notes,
    )


def hardware() -> dict[str, Any]:
    """The machine: CPU model, cores that this process may use, memory, GPUs."""
    import torch

    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
    }


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    facts: dict[str, str] = {}
    if info.exists():
        for line in info.read_text().splitlines():
            key, _, value = line.partition(":")
            facts.setdefault(key.strip(), value.strip())
    name = facts.get("model name", platform.processor() or platform.machine())
    return f"{name} (family {facts['cpu family']}, model {facts['model']})" if "cpu family" in facts else name


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those packages that this interpreter has."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def write(result: Result, folder: Path) -> Path:
    """folder/NAME.json, complete or not at all.  Returns its path."""
    content = asdict(result) | {"targets": [asdict(t) | {"met": t.met} for t in result.targets]}
    validate(content)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{result.name}.json"
    partial = path.with_suffix(f".json.{os.getpid()}")
    partial.write_text(json.dumps(content, indent=1) + "\n")
    partial.replace(path)
    return path


def read(path: Path) -> Result:
    """The result in a file.  Raises UserError for a file that is none."""
    try:
        content = json.loads(path.read_text())
        if isinstance(content, dict):  # results of before these fields were are kept
            content = {"measures": {}} | content
            for target in content.get("targets", ()):
                target.setdefault("limit", "")
        validate(content)
    except (OSError, ValueError) as error:
        raise UserError(f"{path} is no benchmark result: {error}; run the benchmark again") from None
    figures = tuple(map(row_of, content["figures"]))
    targets = tuple(Target(t["what"], t["wanted"], t["reached"], t["limit"]) for t in content["targets"])
    return Result(**(content | {"figures": figures, "targets": targets, "notes": tuple(content["notes"])}))


def row_of(content: Any) -> Row:
    """The row that `asdict` made this of."""
    return Row(content["case"], {name: Number(**number) for name, number in content["numbers"].items()})


_TYPES = {
    "name": str,
    "title": str,
    "commit": str,
    "dirty": bool,
    "measures": dict,
    "date": str,
    "command": str,
    "hardware": dict,
    "versions": dict,
    "figures": list | tuple,
    "targets": list | tuple,
    "notes": list | tuple,
}
assert list(_TYPES) == [f.name for f in fields(Result)]


def validate(content: Any) -> None:
    """Raises UserError that names the first thing in which `content` is not a result."""
    _require(
        isinstance(content, dict) and set(content) == set(_TYPES), "the fields of a result", f"has {_keys(content)}"
    )
    for name, kind in _TYPES.items():
        _require(isinstance(content[name], kind), f"{name} of the right type", f"has {content[name]!r}")
    _require(
        {"cpu", "cores", "memory_bytes", "gpus", "load"} <= set(content["hardware"]), "the whole hardware", "lacks some"
    )
    _require(bool(content["figures"]), "at least one figure", "has none")
    for row in content["figures"]:
        _require(set(row) == {"case", "numbers"} and row["case"] and row["numbers"], "a case and numbers", f"has {row}")
        for name, number in row["numbers"].items():
            _require(set(number) == {"value", "unit"}, "numbers with units", f"has {name}={number}")
            fine = isinstance(number["value"], int | float) and math.isfinite(number["value"])
            _require(fine, "finite numbers", f"has {name}={number['value']}")
    for target in content["targets"]:
        _require(set(target) == {f.name for f in fields(Target)} | {"met"}, "whole targets", f"has {target}")


def _require(fine: bool, wanted: str, found: str) -> None:
    if not fine:
        raise UserError(f"a benchmark result needs {wanted}, and this one {found}")


def _keys(content: Any) -> str:
    return ", ".join(map(str, content)) if isinstance(content, dict) else repr(content)


def show(result: Result, console: Console | None = None) -> None:
    """The result as tables: figures, targets, notes."""
    console = console or Console(width=None if sys.stdout.isatty() else WIDTH)
    cases = list(dict.fromkeys(key for row in result.figures for key in row.case))
    numbers = {name: number.unit for row in result.figures for name, number in row.numbers.items()}
    table = Table(title=f"{result.title} ({result.commit[:10]}{', changed' * result.dirty}, {result.hardware['cpu']})")
    for case in cases:
        table.add_column(case)
    for name, unit in numbers.items():
        table.add_column(f"{name}\n[{unit}]".replace("[", "\\["), justify="right")
    for row in result.figures:
        found = [row.numbers.get(name) for name in numbers]
        table.add_row(*(str(row.case.get(c, "")) for c in cases), *(_text(n.value) if n else "" for n in found))
    console.print(table)
    for target in result.targets:
        wanted = f"wanted {target.wanted:.2f}{target.limit and f'; {target.limit}'}"
        console.print(f"{'met   ' if target.met else 'MISSED'} {target.what}: {target.reached:.2f} ({wanted})")
    for note in result.notes:
        console.print(f"- {note}")


def _text(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
