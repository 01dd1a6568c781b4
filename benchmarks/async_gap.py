"""Asynchronous pipelines: whether 2bw learns as a synchronous pipeline does, to 0.01 nats of a byte.

`benchmarks.async_pipeline` shows what every schedule and correction costs, of three seeds; their interval is wider than
0.01. This asks the one question, with seeds enough: 2bw's delay of one update, Muon and AdamW, without a correction and
with those two that cost least, `prediction` and `error_feedback`. Model, text and updates are the same, by the same
recurrence on one rank (`benchmarks.recurrence`); the held-out rows are four times as many.

1. Every form, the synchronous ones too, chooses its learning rate by the same budget: every rate of `RATES`, two seeds.
2. By these runs each optimizer chooses its correction, and the study the one form that is judged.
3. The chosen are trained with other seeds, 16 with Muon and 5 with AdamW, whose gap is wide. Pairs have a seed's
   weights and batches in common; a gap is the mean of their differences to the synchronous runs of the same optimizer,
   with its 95 % interval (Student's t).

No seed of 1. is among those of 3., so what was chosen by luck shows. Half an hour of one core alone; it is resumed.

An earlier run of 1., with the same seeds, had Muon's rates 0.002 and 0.008 too, and AdamW's 0.002. No form was best at
any of these: the nearest, Muon without a correction at 0.002, was 0.006 nats behind its best. So they are left out.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

import torch

from benchmarks.recurrence import Sizes, learn, paired_interval
from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.files import save_figure
from core.optim.build import OptimConfig
from core.optim.schedule import ScheduleConfig
from core.parallel.correction import CorrectionName
from core.parallel.pipeline.schedule import SCHEDULES

CHOOSING = (0, 1)
"""Seeds that rates and corrections are chosen by."""
JUDGING = {"muon": tuple(range(10, 26)), "adamw": tuple(range(10, 15))}
"""Seeds of the gaps."""
RATES = {"muon": (3e-3, 5e-3), "adamw": (5e-4, 1e-3)}
CORRECTED: tuple[CorrectionName, ...] = ("prediction", "error_feedback")
WANTED = 0.01


@dataclass(frozen=True)
class Form:
    """late: under 2bw's delay of one update."""

    optimizer: str
    late: bool
    correction: CorrectionName = "none"

    @property
    def synchronous(self) -> "Form":
        return Form(self.optimizer, late=False)

    def case(self, rate: float, seed: int | str, source: str) -> dict[str, str | int]:
        schedule = "2bw" if self.late else "1f1b"
        case = {"schedule": schedule, "optimizer": self.optimizer, "correction": self.correction}
        return case | {"rate": f"{rate:g}", "seed": seed, "from": source}


class Study:
    """The runs, each once: those that an interrupted study has finished are taken over."""

    def __init__(self, options: Options, sizes: Sizes):
        self.options, self.sizes, self.rows = options, sizes, list[Row]()
        self._known = {tuple(row.case.items()): row for row in options.earlier}
        self._nats: dict[tuple[Form, float, int], float] = {}

    def nats(self, form: Form, rate: float, seed: int, source: str) -> float:
        """Held-out, of a byte."""
        if (form, rate, seed) not in self._nats:
            case = form.case(rate, seed, source)
            row = self._known.get(tuple(case.items()))
            if row is None:
                row = Row(case, self._learned(form, rate, seed))
                self.options.kept(row)
            self.rows.append(row)
            self._nats[form, rate, seed] = row.numbers["held-out"].value
        return self._nats[form, rate, seed]

    def _learned(self, form: Form, rate: float, seed: int) -> dict[str, Number]:
        schedule = ScheduleConfig(shape="linear", warmup_steps=max(1, self.sizes.steps // 25), final=0.0)
        optim = OptimConfig(form.optimizer, lr=rate, schedule=schedule)
        delay = SCHEDULES["2bw" if form.late else "1f1b"].delay
        found = learn(self.sizes, optim, delay, 2, form.correction, seed)
        return {"held-out": Number(found.nats, "nats/byte"), "update": Number(1e3 * found.update_s, "ms")}


def forms(optimizer: str) -> list[Form]:
    """The synchronous one first."""
    late = [Form(optimizer, True, correction) for correction in ("none", *CORRECTED)]
    return [Form(optimizer, late=False), *late]


def judged(study: Study, choosing: tuple[int, ...], judging: Mapping[str, tuple[int, ...]]) -> tuple[list[Row], Form]:
    """The gaps, and the form that was chosen before them."""
    rates, before, asked = dict[Form, float](), dict[Form, float](), list[Form]()
    for optimizer, tried in RATES.items():
        for form in forms(optimizer):
            of = {rate: mean(study.nats(form, rate, seed, "choosing") for seed in choosing) for rate in tried}
            rates[form] = min(of, key=lambda rate: of[rate])
            before[form] = of[rates[form]]
        corrected = min((Form(optimizer, True, name) for name in CORRECTED), key=lambda form: before[form])
        asked += [Form(optimizer, True), corrected]
    chosen = min(asked, key=lambda form: before[form] - before[form.synchronous])
    gaps = []
    for form in asked:
        pairs = [
            (
                study.nats(form, rates[form], seed, "judging"),
                study.nats(form.synchronous, rates[form.synchronous], seed, "judging"),
            )
            for seed in judging[form.optimizer]
        ]
        differences = [late - synchronous for late, synchronous in pairs]
        low, high = paired_interval(differences)
        numbers = {"gap": mean(differences), "gap from": low, "gap to": high}
        case = form.case(rates[form], "all", "gaps") | {"chosen": int(form == chosen)}
        gaps.append(Row(case, {name: Number(value, "nats/byte") for name, value in numbers.items()}))
    return gaps, chosen


def measure(options: Options) -> Measured:
    torch.set_num_threads(1)
    sizes, seeds = replace(Sizes(), heldout_rows=768), (CHOOSING, JUDGING)
    if options.quick:
        sizes = Sizes(dim=16, num_layers=2, ffn_dim=16, rows=2, length=16, steps=3, heldout_rows=4, train_bytes=1 << 14)
        seeds = (CHOOSING[:1], {optimizer: own[:2] for optimizer, own in JUDGING.items()})
    study = Study(options, sizes)
    gaps, chosen = judged(study, *seeds)
    for row in gaps:
        options.kept(row)
    return Measured((*study.rows, *gaps), tuple(targets(gaps)), notes(chosen))


def targets(gaps: list[Row]) -> Iterator[Target]:
    for row in gaps:
        if row.case["chosen"]:
            what = f"2bw with {row.case['optimizer']}, {row.case['correction']}: {WANTED} nats /"
            for name, said in (("gap", "its gap"), ("gap to", "the upper end of its interval")):
                yield Target(f"{what} {said}", 1.0, WANTED / max(row.numbers[name].value, 1e-4))


def notes(chosen: Form) -> tuple[str, ...]:
    return (
        "gap: held-out nats of a byte beyond those of the same optimizer, seed and batches without a delay, each at "
        "the learning rate that it chose; from, to: the 95 % interval of its mean (Student's t of paired differences).",
        f"Rates, and each optimizer's correction, were chosen by runs of seeds {CHOOSING}, and so was the form that "
        f"the target is of: {chosen.optimizer}, {chosen.correction}. "
        f"The gaps are of seeds {', '.join(f'{own[0]} to {own[-1]} ({name})' for name, own in JUDGING.items())}.",
    )


def plot(result: Result, folder: Path) -> Path:
    """Gaps with their intervals, beside what was wanted."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result.figures if row.case["from"] == "gaps"]
    figure, axes = plt.subplots(figsize=(7, 3), layout="constrained")
    values = [row.numbers["gap"].value for row in rows]
    errors: Any = [[v - row.numbers["gap from"].value for v, row in zip(values, rows, strict=True)]] * 2
    axes.errorbar(values, range(len(rows)), xerr=errors, fmt="o", capsize=2)
    words = [f"{row.case['optimizer']} {row.case['correction']}".removesuffix(" none") for row in rows]
    axes.set_yticks(range(len(rows)), words, fontsize=8)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.axvline(WANTED, color="black", linewidth=0.5, linestyle="--")
    axes.set_title("2bw: held-out nats of a byte beyond those without a delay", loc="left", fontsize=9)
    png = folder / "async_gap.png"
    save_figure(figure, png, 120)
    plt.close(figure)
    return png


MEASURES = (
    "core/parallel/correction.py",
    "core/optim",
    "core/models/decoder.py",
    "apps/llm/corpus.py",
    "benchmarks/recurrence.py",
    "benchmarks/async_gap.py",
)
BENCHMARK = Benchmark("async_gap", "2bw beside a synchronous pipeline", measure, MEASURES, plot, resumes=True)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="async_gap"), sys.argv[1:]))
