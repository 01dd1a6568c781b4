"""What --noise-scale costs: steps of `llm pretrain` with it and without, in one process, on one rank.

Two runs take their steps in pairs, in an order drawn at random, so that what else the machine does falls on both alike;
the cost is a trimmed mean of the pairs' differences, with its interval. A step is `train_step` and what `fit` then
writes and shows of it. Both clocks are read: that on the wall, and the processor time of this process, on which others'
work does not fall. Operations that the estimate adds are counted, and are the same on every machine.

The demo is what the target is of, and the recipe debug, sixteen layers a few numbers wide, which has four times as many
gradients and hardly any work: there the hooks are seen.
"""

import math
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from io import StringIO
from pathlib import Path
from statistics import NormalDist
from typing import Any

import torch
from rich.console import Console

from apps.llm.batches import training_batches
from apps.llm.corpus import prepare
from apps.llm.loss import num_targets, token_loss
from apps.llm.recipes import RECIPES
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.compat import TorchDispatchMode
from core.compose import parallelize
from core.config import run_command
from core.metrics import Progress, RunLog
from core.models.decoder import Decoder, initialise
from core.models.plan import decoder_plan
from core.optim.build import build_optimizer
from core.precision import LossScale
from core.runtime import start
from core.train import TrainState, train_step
from core.train.noise import NoiseScale

MOST = 0.02
FIRST = 6
"""Steps that are not counted: memory is found, averages get state."""
READ = "aten::_local_scalar_dense"
TRIMMED = 0.2
"""Share of the pairs that are left out at either end: a burst of others' work falls on one step of a pair."""


@dataclass(frozen=True)
class Case:
    """microbatch: its rows, half of a step's; pairs: of steps that are measured"""

    microbatch: int
    pairs: int


CASES = {"demo": Case(8, 160), "debug": Case(12, 300)}
QUICK = 2


class Run:
    """The steps of a run of a recipe, with the estimate or without."""

    def __init__(self, recipe: str, microbatch: int, steps: int, out: Path, stack: ExitStack, *, noise_scale: bool):
        """stack  closes what the run holds"""
        config = replace(
            RECIPES[recipe](), microbatch=microbatch, steps=steps, device="cpu", precision="fp32", out=out,
            noise_scale=noise_scale,
        )  # fmt: skip
        corpus = prepare(config.data, ROOT / "runs" / "corpora")
        runtime = stack.enter_context(start(config.device, config.seed))
        self.config, self.batches = config, training_batches(config, corpus)
        mesh = runtime.mesh(config.mesh, config.zero)
        with torch.device("meta"):
            model = Decoder(config.model)
        plan = decoder_plan(config.model, config.mesh)
        parallel = parallelize(model, mesh, config, plan, materialise=lambda made: initialise(made, config.seed))
        optimizer = build_optimizer(config.optim, parallel.masters)
        self.state = TrainState(parallel, optimizer, LossScale(config.precision, config.loss_scale), {})
        if noise_scale:
            self.state.noise = NoiseScale(parallel, config.noise_scale_steps)
        self.log = stack.enter_context(RunLog(out, active=True))
        self.progress = stack.enter_context(Progress(steps, console=Console(file=StringIO())))
        self.taken = 0

    @property
    def gradient_bytes(self) -> int:
        return sum(master.nbytes for master in self.state.parallel.masters.values())

    def step(self, watched: AbstractContextManager[Any] | None = None) -> tuple[float, float]:
        """Take a step.  Returns its seconds on the wall and of the processor."""
        batch, state = self.batches.batch(self.taken, 0, 1), self.state
        with watched or nullcontext():
            began, began_cpu = time.perf_counter(), time.process_time()
            row = train_step(state, batch, token_loss, num_targets, self.config, self.taken)
            self.taken += 1
            row = {"step": self.taken, **row}
            self.log.write(row)
            self.progress.update(row)
            took = time.perf_counter() - began, time.process_time() - began_cpu
        assert ("noise_scale" in row) == self.config.noise_scale
        return took


class Operations(TorchDispatchMode):
    """Counts operations by name, and the bytes that norms read."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes_of_norms = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().partition(".")[0]
        self.calls[name] += 1
        if name == "aten::linalg_vector_norm":
            self.bytes_of_norms += args[0].nbytes
        return func(*args, **(kwargs or {}))

    def named(self, beginning: str) -> int:
        return sum(count for name, count in self.calls.items() if name.startswith(beginning))


def added(runs: dict[bool, Run]) -> dict[str, Number]:
    """What the estimate adds to a step: operations, passes over gradients, reads by the host, messages."""
    without, with_it = Operations(), Operations()
    runs[False].step(without)
    runs[True].step(with_it)
    passes = (with_it.bytes_of_norms - without.bytes_of_norms) / runs[True].gradient_bytes / 2
    return {
        "operations": Number(without.calls.total(), "in a step"),
        "added operations": Number(with_it.calls.total() - without.calls.total(), "in a step"),
        "passes": Number(passes, "over each microbatch's gradients"),
        "reads": Number(with_it.named(READ) - without.named(READ), "by the host, added"),
        "messages": Number(with_it.named("c10d::") - without.named("c10d::"), "added"),
    }


def trimmed(values: Sequence[float]) -> tuple[float, float]:
    """The trimmed mean, and its standard error (Tukey and McLaughlin 1963: by the winsorized variance)."""
    ordered, cut = sorted(values), int(TRIMMED * len(values))
    kept = ordered[cut : len(ordered) - cut]
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    share = len(kept) / len(ordered)
    return statistics.fmean(kept), statistics.stdev(winsorized) / (share * math.sqrt(len(ordered)))


def share_of(without: Sequence[float], with_it: Sequence[float]) -> tuple[float, float, float]:
    """What pairs of steps differ by, as a share of one without: the estimate, and its 95 % interval's ends."""
    step, _ = trimmed(without)
    mean, error = trimmed([b - a for a, b in zip(without, with_it, strict=True)])
    half = NormalDist().inv_cdf(0.975) * error
    return mean / step, (mean - half) / step, (mean + half) / step


def measured(recipe: str, case: Case, pairs: int) -> Row:
    with tempfile.TemporaryDirectory(prefix="noise-scale-") as folder, ExitStack() as stack:
        runs = {
            which: Run(recipe, case.microbatch, FIRST + 1 + pairs, Path(folder) / str(which), stack, noise_scale=which)
            for which in (False, True)
        }
        for _ in range(FIRST):
            for run in runs.values():
                run.step()
        counts, drawn = added(runs), random.Random(recipe)
        seconds: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for _ in range(pairs):
            first = drawn.random() < 0.5
            for noise_scale in (first, not first):
                seconds[noise_scale].append(runs[noise_scale].step())
    numbers = dict[str, Number]()
    for place, clock in enumerate(("wall", "processor")):
        without, with_it = ([took[place] for took in seconds[which]] for which in (False, True))
        share, low, high = share_of(without, with_it)
        prefix = "" if clock == "wall" else "processor "
        numbers |= {
            f"{prefix}step": Number(trimmed(without)[0], "s"),
            f"{prefix}share": Number(100 * share, "% of a step"),
            f"{prefix}low": Number(100 * low, "%"),
            f"{prefix}high": Number(100 * high, "%"),
        }
    return Row({"recipe": recipe, "microbatch": case.microbatch}, numbers | counts)


def measure(options: Options) -> Measured:
    cases = {"debug": CASES["debug"]} if options.quick else CASES
    rows, targets = [], []
    for recipe, case in cases.items():
        rows.append(measured(recipe, case, QUICK if options.quick else case.pairs))
        options.kept(rows[-1])
        share = rows[-1].numbers["share"].value / 100
        targets.append(Target(f"1.02 x a step without / with, {recipe}", 1.0, (1 + MOST) / (1 + share)))
    notes = (
        f"{', '.join(f'{case.pairs} pairs of {recipe}' for recipe, case in cases.items())}, fp32, one rank, "
        f"{torch.get_num_threads()} threads; means without the {TRIMMED:.0%} of pairs at either end; low and high are "
        "the ends of the 95 % interval.",
    )
    return Measured(tuple(rows), () if options.quick else tuple(targets), notes)


BENCHMARK = Benchmark(
    "noise_scale",
    "The noise scale: its share of a step's time",
    measure,
    (
        "benchmarks/noise_scale.py",
        "core/train",
        "core/metrics",
        "core/parallel/squares.py",
        "core/parallel/data.py",
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="noise_scale"), sys.argv[1:]))
