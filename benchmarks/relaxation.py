"""Relaxation by OpenMM: seconds on one thread, energies beside a script of OpenMM's own calls, and limits of time.

Experiments as they are and with side chains turned into others, alternately with the script (one round, from PDB text
to PDB text: `tests/support/direct_relaxation.py`), whose energy is to be met. Two copies of crambin, far apart, are the
least that has 80 residues. Then limits: what a relaxation takes beyond one that passes while it works.
"""

import importlib.util
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch

from apps.fold.features.structures import Chain
from apps.fold.relaxation.amber import INSTALL, Amber
from apps.fold.relaxation.protocol import relax
from apps.fold.relaxation.violations import drawn_apart
from benchmarks.result import Measured, Missing, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from tests.support.clashes import chain, clashing, one_chain_pdb

NAMES = ("1ejg.pdb", "1a8o.cif", "1ubi.pdb")
MOST_S, RESIDUES = 5.0, 80
MOST_OFF = 1e-3
LIMITS_S = (0.5, 1.0, 2.0, 4.0)
_UNLIMITED_S = 600.0
T = TypeVar("T")


def measure(options: Options) -> Measured:
    for package in ("openmm", "pdbfixer"):
        if importlib.util.find_spec(package) is None:
            raise Missing(f"the benchmark takes {package}; {INSTALL}")
    rounds = 1 if options.quick else 5
    with _one_thread():
        rows = [_energies(name, seed, rounds) for name in NAMES[: 1 if options.quick else None] for seed in (None, 0)]
        rows.append(_seconds(rounds))
        rows += [_limited(limit, rounds) for limit in (LIMITS_S[:1] if options.quick else LIMITS_S)]
    off = max(row.numbers["off"].value for row in rows if "off" in row.numbers)
    took = next(row.numbers["ours"].value for row in rows if int(row.case["residues"]) > RESIDUES)
    targets = (
        Target(f"1e-3 / the largest difference of an energy, {len(NAMES)} structures", 1.0, MOST_OFF / max(off, 1e-12)),
        Target("5 s / the seconds of 92 residues, one thread", 1.0, MOST_S / took),
    )
    note = f"medians of {rounds}; residues with violations are those after all rounds; `beyond` is the largest of all."
    return Measured(tuple(rows), () if options.quick else targets, (note,))


@contextmanager
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # of which the minimizer asks
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _energies(name: str, seed: int | None, rounds: int) -> Row:
    from tests.support.direct_relaxation import energies

    one = chain(name) if seed is None else clashing(chain(name), seed)
    with tempfile.TemporaryDirectory(prefix="relaxation-") as folder:
        pdb = one_chain_pdb(one, Path(folder) / "x.pdb")
    ours, theirs = [], []
    for _ in range(rounds):
        found, seconds = _timed(lambda: relax([one], Amber, _UNLIMITED_S))
        (_, energy), other = _timed(lambda: energies(pdb))
        ours.append(seconds)
        theirs.append(other)
    numbers = {
        "ours": Number(median(ours), "s"),
        "the script": Number(median(theirs), "s"),
        "energy": Number(found.rounds[0].energy_after, "kcal/mol"),
        "off": Number(abs(found.rounds[0].energy_after - energy) / abs(energy), "of the script's"),
        "violating": Number(len(found.violations_after), "residues"),
    }
    return Row({"structure": name, "clashes": 0 if seed is None else 1, "residues": len(one)}, numbers)


def _seconds(rounds: int) -> Row:
    one = chain("1ejg.pdb")
    both = [one, _moved(one)]
    took = [_timed(lambda: relax(both, Amber, _UNLIMITED_S))[1] for _ in range(rounds)]
    return Row(
        {"structure": "1ejg.pdb twice", "clashes": 0, "residues": 2 * len(one)}, {"ours": Number(median(took), "s")}
    )


def _moved(one: Chain) -> Chain:
    return replace(one, name="B", positions=one.positions + 100.0 * (one.mask > 0)[..., None])


def _limited(limit: float, rounds: int) -> Row:
    one = clashing(chain("1ubi.pdb"), 1)
    took = [_timed(lambda: relax([one], Amber, limit, drawn_apart=drawn_apart))[1] for _ in range(rounds)]
    numbers = {"ours": Number(median(took), "s"), "beyond": Number(max(0.0, max(took) - limit), "s")}
    return Row({"structure": f"1ubi.pdb in {limit:g} s", "clashes": 1, "residues": len(one)}, numbers)


def _timed(run: Callable[[], T]) -> tuple[T, float]:
    begun = time.perf_counter()
    found = run()
    return found, time.perf_counter() - begun


BENCHMARK = Benchmark(
    "relaxation",
    "Relaxation by OpenMM: seconds, energies, limits of time",
    measure,
    ("benchmarks/relaxation.py", "apps/fold/relaxation", "tests/support/direct_relaxation.py"),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="relaxation"), sys.argv[1:]))
