"""What --noise-scale costs: steps of `llm pretrain` with it and without, in turns, on one rank.

Turns of one run each way follow one another, so that what else the machine does falls on both; a step's time is the
median over all turns. The demo is what the target is of. The recipe debug, sixteen layers a few numbers wide, has as
many gradients and hardly any work: there the hooks are seen.
"""

import json
import statistics
import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from apps.llm.pretrain import main as pretrain
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command

CASES = {"demo": 8, "debug": 12}
"""Recipe -> rows of a microbatch, of which a step has two."""
MOST = 0.02
TURNS, STEPS, FIRST = 6, 12, 3
"""Turns, steps of a run, and those of its first that are not counted."""


def step_times(recipe: str, microbatch: int, steps: int, noise_scale: bool) -> list[float]:
    """Seconds of the steps of a run."""
    with tempfile.TemporaryDirectory(prefix="noise-scale-") as folder:
        out = Path(folder) / "run"
        options = [
            *("--recipe", recipe, "--microbatch", str(microbatch), "--stop-after", str(steps), "--device", "cpu"),
            *("--precision", "fp32", "--out", str(out), "--data.cache", str(ROOT / "runs" / "corpora"), "--no-hf"),
            *(["--noise-scale"] if noise_scale else []),
        ]
        with redirect_stdout(StringIO()):
            code = pretrain(options)
        if code:
            raise UserError(f"a run of {recipe} ended with exit code {code}; no result")
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert all(("noise_scale" in row) == noise_scale for row in rows)
        return [row["step_s"] for row in rows][min(FIRST, steps - 1) :]


def measure(options: Options) -> Measured:
    cases = {"debug": CASES["debug"]} if options.quick else CASES
    turns, steps = (1, 3) if options.quick else (TURNS, STEPS)
    rows, targets = [], []
    for recipe, microbatch in cases.items():
        seconds: dict[bool, list[float]] = {False: [], True: []}
        shares = []
        for turn in range(turns):
            for noise_scale in (False, True) if turn % 2 == 0 else (True, False):
                seconds[noise_scale].append(statistics.median(step_times(recipe, microbatch, steps, noise_scale)))
            shares.append(seconds[True][-1] / seconds[False][-1] - 1)
        without, with_it = (statistics.median(seconds[which]) for which in (False, True))
        numbers = {
            "without": Number(without, "s"),
            "with": Number(with_it, "s"),
            "share": Number(100 * (with_it / without - 1), "% of a step"),
            "least": Number(100 * min(shares), "% in a turn"),
            "most": Number(100 * max(shares), "% in a turn"),
        }
        rows.append(Row({"recipe": recipe, "microbatch": microbatch}, numbers))
        options.kept(rows[-1])
        if recipe == "demo" and not options.quick:
            targets.append(Target(f"1.02 x a step without / with, {recipe}", 1.0, (1 + MOST) * without / with_it))
    notes = (
        f"{turns} turns of {steps} steps each way on one rank in fp32; of each run the median behind its first {FIRST} "
        "steps, of these the median.",
    )
    return Measured(tuple(rows), tuple(targets), notes)


BENCHMARK = Benchmark(
    "noise_scale",
    "The noise scale: its share of a step's time",
    measure,
    (
        "benchmarks/noise_scale.py",
        "core/train",
        "core/parallel/squares.py",
        "core/parallel/data.py",
        "apps/llm/pretrain.py",
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="noise_scale"), sys.argv[1:]))
