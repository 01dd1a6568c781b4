"""Run benchmarks: `python -m benchmarks.run [--quick | --full] [--out FOLDER] [--peers-… PATH] [NAME...]`.

A benchmark is a module of this package that has a `BENCHMARK`; without a NAME all of them run. Each writes
benchmarks/results/NAME.json (schema: `benchmarks.result`) and shows it; figures that it tells as they come are printed,
and kept in NAME.partial.jsonl until the result is written; a benchmark that resumes takes them over after a cut, where
the code that it measures is a commit's and the same. --quick takes seconds, shows that the benchmark
works, and writes nothing unless --out says where. NAME-MACHINE.json is a result that is kept from another machine.

Several run each in a process of its own, one after another; with --quick, which measures nothing, one on each core.
One that fails is named at the end, and the exit code is 1; the others run all the same. Peers that are not installed
are left out by name.

--stale runs nothing and lists the results in benchmarks/results that are not of the code as it is (`benchmarks.stale`).

A benchmark alone: `python -m benchmarks.NAME`, with the same options.
"""

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.result import RESULTS, ROOT, Measured, Missing, Result, Row, beginning, result_of, row_of, show, write
from core.config import UserError, run_command
from tests.support.chosen import choose_in_a_moment

QUICK_LIMIT_S = 900
QUICK_FIRST = (
    *("serving_mixed", "stable_diffusion", "dreambooth", "serving_bloom", "serving", "train", "quantization", "gemini"),
    *("long_sequence", "tiny_pipeline"),
)
"""Those that take longest with --quick, begun first, so that no core is idle while the last one ends."""


@dataclass(frozen=True)
class Options:
    """What the command line says to every benchmark.

    peers_python  interpreter of an environment that has the systems under comparison which this one lacks
    peers_source  checkout of a system that is run from its source
    families      of kernels that are measured; empty: all
    part          of a benchmark that is measured part by part; empty: all
    compiled      whether torch.compile takes part where it can
    kept          what is told each figure as soon as there is one
    earlier       figures that a run which was cut had kept, of a benchmark that resumes
    """

    quick: bool = False
    full: bool = False
    peers_python: Path | None = None
    peers_source: Path | None = None
    families: tuple[str, ...] = ()
    part: str = ""
    compiled: bool = True
    kept: Callable[[Row], None] = lambda row: None
    earlier: tuple[Row, ...] = ()


@dataclass(frozen=True)
class Benchmark:
    """measures: the files and folders of the repository whose code the figures are of, the benchmark's own too.

    measure  None of a part that is not the last: its figures are kept
    takes    which of --family, --no-compile and --part it reads; a benchmark that does not is not run with them
    resumes  whether it goes on from figures that a run which was cut had kept
    """

    name: str
    title: str
    measure: Callable[[Options], Measured | None]
    measures: tuple[str, ...]
    plot: Callable[[Result, Path], Path] | None = None
    takes: tuple[str, ...] = ()
    resumes: bool = False


def known() -> list[str]:
    """The names of all benchmarks. Importing all of them takes longer than most --quick runs."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return [f.stem for f in files if re.search(r"^BENCHMARK = ", f.read_text(), re.MULTILINE)]


def load(name: str) -> Benchmark:
    return importlib.import_module(f"benchmarks.{name}").BENCHMARK


def main(argv: list[str], only: str | None = None) -> int:
    """only: the benchmark of the module that is run by itself; then no names are taken."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{only or 'run'}", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--full", action="store_true", help="every size and setting; hours on two cores")
    parser.add_argument(
        "--out", type=Path, help="folder of the results (default: benchmarks/results, none with --quick)"
    )
    parser.add_argument("--peers-python", type=Path, help="interpreter that has the peers which this one lacks")
    parser.add_argument("--peers-source", type=Path, help="checkout of a peer that is run from its source")
    parser.add_argument(
        "--family", action="append", default=[], help="a family of kernels, again for each; the rest is not run"
    )
    parser.add_argument(
        "--no-compile", action="store_true", help="leave torch.compile out, which takes most of the time"
    )
    parser.add_argument(
        "--part", default="", help="of a benchmark that is measured part by part; kept for the run that does the rest"
    )
    if only is None:
        parser.add_argument("--stale", action="store_true", help="list the results that are not of the code as it is")
        parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args(argv)
    names = [only] if only else given.names or known()
    unknown = [name for name in names if name not in known()]
    if unknown:
        raise UserError(f"no benchmark '{unknown[0]}'; the benchmarks are {', '.join(known())}")
    if given.quick and given.full:
        raise UserError("--quick and --full say opposite things; give one of them")
    if only is None and given.stale:
        if given.quick or given.full or given.peers_python or given.peers_source:
            raise UserError("--stale runs nothing; leave out --quick, --full and --peers-…, or leave out --stale")
        from benchmarks.stale import list_stale

        return list_stale(names, given.out or RESULTS)
    asked = [f"--{option}" for option in ("family", "no-compile", "part") if getattr(given, option.replace("-", "_"))]
    for name in names if asked else ():
        if unread := [option for option in asked if option not in load(name).takes]:
            reads = "slow_links" if unread == ["--part"] else "kernels"
            raise UserError(f"{', '.join(unread)}: {name} does not read it; run `python -m benchmarks.{reads}` with it")
    if len(names) > 1:
        return run_each(names, given)
    out = given.out or (None if given.quick else RESULTS)
    options = Options(
        given.quick, given.full, given.peers_python, given.peers_source, tuple(given.family), given.part,
        not given.no_compile,
    )  # fmt: skip
    command = shlex.join(["python", "-m", f"benchmarks.{only or 'run'}", *map(_elsewhere, argv)])
    run(load(names[0]), options, out, command)
    return 0


def _elsewhere(argument: str) -> str:
    """Where things lie on this machine is nobody else's: a result says PATH."""
    return "PATH" if Path(argument).is_absolute() else argument


def run(benchmark: Benchmark, options: Options, out: Path | None, command: str) -> None:
    """Measure, show and, where `out` is a folder, write."""
    began = beginning(benchmark.measures)
    partial = None if out is None else out / f"{benchmark.name}.partial.jsonl"
    earlier: tuple[Row, ...] = ()
    if partial is not None:
        partial.parent.mkdir(parents=True, exist_ok=True)
        what = {"measures": began.measures, "dirty": began.dirty, "quick": options.quick, "full": options.full}
        of_what = json.dumps(what)
        earlier = _earlier(partial, of_what) if benchmark.resumes and not began.dirty else ()
        if not earlier:
            partial.write_text(of_what + "\n")

    def keep(row: Row) -> None:
        print(in_a_line(row), flush=True)
        if partial is not None:
            with partial.open("a") as lines:
                lines.write(json.dumps(asdict(row)) + "\n")

    if options.quick:
        choose_in_a_moment()
    try:
        measured = benchmark.measure(replace(options, kept=keep, earlier=earlier))
    except Missing as error:
        if not options.quick:
            raise
        print(f"{benchmark.name} is left out: {error}")
        return
    if measured is None:
        print("kept" if partial is None else f"kept in {partial} for the run that does the rest")
        return
    result = result_of(benchmark.name, benchmark.title, command, measured, began)
    show(result)
    if out is not None:
        print(f"written to {write(result, out)}")
        assert partial is not None
        partial.unlink(missing_ok=True)
        if benchmark.plot is not None:
            print(f"drawn in {benchmark.plot(result, out)}")


def _earlier(partial: Path, of_what: str) -> tuple[Row, ...]:
    """The figures in a partial file whose first line is that; a last line that was cut is cut off."""
    first, *lines = partial.read_text().splitlines(keepends=True) if partial.exists() else [""]
    if first.strip() != of_what:
        return ()
    whole = [line for line in lines if line.endswith("\n")]
    if len(whole) < len(lines):
        partial.write_text(first + "".join(whole))
    return tuple(row_of(json.loads(line)) for line in whole)


def in_a_line(row: Row) -> str:
    """A figure as soon as there is one."""
    numbers = ", ".join(f"{name} {number.value:.4g} {number.unit}".rstrip() for name, number in row.numbers.items())
    return f"{' '.join(map(str, row.case.values()))}: {numbers}"


# --- several ----------------------------------------------------------------------------------------------------------


def run_each(names: list[str], given: argparse.Namespace) -> int:
    """Each in its own process. With --quick only what failed is shown, and what was left out. 1 where one failed."""
    options = [f"--{name}" for name in ("quick", "full") if getattr(given, name)]
    for name in ("out", "peers_python", "peers_source"):
        if getattr(given, name) is not None:
            options += [f"--{name.replace('_', '-')}", str(getattr(given, name).absolute())]
    if given.quick:
        names = sorted(names, key=lambda name: QUICK_FIRST.index(name) if name in QUICK_FIRST else len(QUICK_FIRST))
    runs = {name: [*options, name] for name in names}
    if given.quick:
        if not torch.cuda.is_available():
            with suppress(ImportError):  # an extra that is not installed is missed by the benchmark that needs it
                importlib.import_module("tests.support.preloaded")  # once, not in each
            gc.freeze()
        failed = _quickly({name: partial(run_command, main, argv) for name, argv in runs.items()})
    else:
        command = [sys.executable, "-m", "benchmarks.run"]
        failed = [name for name, argv in runs.items() if subprocess.call([*command, *argv], cwd=ROOT)]
    if failed:
        print(f"error: of {len(names)} benchmarks {len(failed)} failed: {', '.join(failed)}", file=sys.stderr)
    return int(bool(failed))


@dataclass(frozen=True)
class _Started:
    process: BaseProcess
    said: Path
    began: float

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.began

    def kill(self) -> None:
        """With all that it started."""
        with suppress(ProcessLookupError):  # it has ended, or is not yet a session
            os.killpg(cast(int, self.process.pid), signal.SIGKILL)
        self.process.kill()
        self.process.join()


def _quickly(benchmarks: Mapping[str, Callable[[], int]]) -> list[str]:
    """Run them, one on each core, and show a line of each as it ends, and all that a failed one said.

    Returns which failed. What does not end in time is killed with all that it started; interrupted, all that runs is.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    waiting, running, failed = dict(benchmarks), dict[str, _Started](), list[str]()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        try:
            while waiting or running:
                while waiting and len(running) < cores:
                    name = next(iter(waiting))
                    running[name] = _start(waiting.pop(name), Path(folder, name))
                left_s = QUICK_LIMIT_S - max(started.seconds for started in running.values())
                wait([started.process.sentinel for started in running.values()], max(left_s, 0))
                for name, started in list(running.items()):
                    if _has_ended(started):
                        del running[name]
                        failed += [] if _show(name, started) else [name]
        finally:
            for started in running.values():
                started.kill()
    return sorted(failed)


def _start(benchmark: Callable[[], int], said: Path) -> _Started:
    """In a fork of this process, which has imported most by then; on a GPU, which no fork can use, in a fresh one."""
    context = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    process = context.Process(target=_alone, args=(benchmark, said))
    process.start()
    return _Started(process, said, time.monotonic())


def _alone(benchmark: Callable[[], int], said: Path) -> None:
    """With one thread: the others have the other cores. A session of its own, which is killed as one."""
    os.setsid()
    sys.stdout = sys.stderr = said.open("w", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.chdir(ROOT)
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    forks: AbstractContextManager[Any] = nullcontext()
    if not torch.cuda.is_available():
        with suppress(ImportError):
            forks = importlib.import_module("tests.support.command").forked_modules("benchmarks")
    with forks:
        code = benchmark()
    sys.exit(code)


def _has_ended(started: _Started) -> bool:
    if started.process.exitcode is None and started.seconds > QUICK_LIMIT_S:
        started.kill()
        with started.said.open("a") as file:
            file.write(f"\nnot done after {QUICK_LIMIT_S} s")
    return started.process.exitcode is not None


def _show(name: str, started: _Started) -> bool:
    """Whether it succeeded."""
    said, code = started.said.read_text(errors="replace"), started.process.exitcode
    if code:
        print(f"{said}\nFAILED {name}, exit code {code}, {started.seconds:.0f} s", flush=True)
        return False
    print(f"ran {name}, {started.seconds:.0f} s", flush=True)
    for line in said.splitlines():
        if "left out" in line:
            print(f"  {line.removeprefix('- ')}", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
