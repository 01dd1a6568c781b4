"""Run benchmarks: `python -m benchmarks.run [--quick | --full] [--out FOLDER] [--peers-… PATH] [NAME...]`.

A benchmark is a module of this package that has a `BENCHMARK`; without a NAME all of them run. Each writes
benchmarks/results/NAME.json (schema: `benchmarks.result`) and shows it. --quick takes seconds, shows that the benchmark
works, and writes nothing unless --out says where. NAME-MACHINE.json is a result that is kept from another machine.

A benchmark alone: `python -m benchmarks.NAME`, with the same options.
"""

import argparse
import importlib
import pkgutil
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import benchmarks
from benchmarks.result import RESULTS, Measured, Result, beginning, result_of, show, write
from core.config import UserError, run_command


@dataclass(frozen=True)
class Options:
    """What the command line says to every benchmark.

    peers_python  interpreter of an environment that has the systems under comparison which this one lacks
    peers_source  checkout of a system that is run from its source
    """

    quick: bool = False
    full: bool = False
    peers_python: Path | None = None
    peers_source: Path | None = None


@dataclass(frozen=True)
class Benchmark:
    name: str
    title: str
    measure: Callable[[Options], Measured]
    plot: Callable[[Result, Path], Path] | None = None


def known() -> dict[str, Benchmark]:
    """Every benchmark of this package, by name."""
    modules = [importlib.import_module(f"benchmarks.{m.name}") for m in pkgutil.iter_modules(benchmarks.__path__)]
    return {m.BENCHMARK.name: m.BENCHMARK for m in modules if hasattr(m, "BENCHMARK")}


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
    if only is None:
        parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args(argv)
    names = [only] if only else given.names
    benchmarks_by_name = known()
    unknown = [name for name in names if name not in benchmarks_by_name]
    if unknown:
        raise UserError(f"no benchmark '{unknown[0]}'; the benchmarks are {', '.join(benchmarks_by_name)}")
    out = given.out or (None if given.quick else RESULTS)
    options = Options(given.quick, given.full, given.peers_python, given.peers_source)
    command = shlex.join(["python", "-m", f"benchmarks.{only or 'run'}", *map(_elsewhere, argv)])
    for name in names or benchmarks_by_name:
        run(benchmarks_by_name[name], options, out, command)
    return 0


def _elsewhere(argument: str) -> str:
    """Where things lie on this machine is nobody else's: a result says PATH."""
    return "PATH" if Path(argument).is_absolute() else argument


def run(benchmark: Benchmark, options: Options, out: Path | None, command: str) -> None:
    """Measure, show and, where `out` is a folder, write."""
    began = beginning()
    measured = benchmark.measure(options)
    result = result_of(benchmark.name, benchmark.title, command, measured, began)
    show(result)
    if out is not None:
        print(f"written to {write(result, out)}")
        if benchmark.plot is not None:
            print(f"drawn in {benchmark.plot(result, out)}")


if __name__ == "__main__":
    sys.exit(run_command(main, sys.argv[1:]))
