"""Large batches: how many steps and examples they take, where they stop to pay, and what they cost on held-out data.

Each part trains the same small model anew for each of its figures, three seeds each, on one core:

steps   steps and examples to a target loss against the batch, by optimizer; sgd and, on text, adamw also at the
        smallest. The rate is tuned at each batch by as many
        runs, of a seed of its own (Shallue et al. 2019, arXiv:1811.03600, section 4: untuned rates decide such
        comparisons); it begins at the best of the batch before, times the root of what the batch has grown by
noise   the noise scale along runs to the target by the code of --noise-scale, at the largest batch. Its mean over steps
        is what the critical batch of those curves ought to be: E_min / S_min is the mean along the path of little noise
        (McCandlish et al. 2018, arXiv:1812.06162, section 2.3 and appendix D). Each step is taken with its
        neighbours alone: a run has few, in which the gradient falls by far, so that an average over ten is of the first
rules   the rate that is best at the smallest batch, kept, or scaled with the batch or its root, with a warm-up or none
        (Goyal et al. 2017, arXiv:1706.02677; Krizhevsky 2014, arXiv:1404.5997)
gap     as many epochs at each batch, with a cosine, and then the error on digits that were held out. Rates are tuned on
        half of those, and errors are of the other half

The digits of UCI train a narrow ResNet (docs/examples/vision.py), and the demo's text a small decoder.
"""

import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.large_batch_tasks import (
    AVERAGE,
    CONTENDERS,
    GROUP,
    Curve,
    Task,
    best_rate,
    digits_task,
    example,
    fitted,
    interval,
    loss_of,
    noise_along,
    split_digits,
    text_task,
    to_target,
    trained,
)
from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.files import save_figure

TUNING_SEEDS = (0, 9)
"""A rate is as good as the worse of their runs: what one alone finds best may diverge with another."""
MOST = 5
"""A run that takes this many times as long as those that its rate was tuned by counts as one that did not come down."""
OF_TEXT = ("adamw", "lamb", "muon")
WHOLE = ("sgd", "adamw")
"""Optimizers that are measured at the smallest batch, too."""
RULES = ("kept", "root", "linear")
GAP_EPOCHS = 12
WARM = 0.2
"""Share of a run of so many epochs that the rate grows over, where there is a warm-up."""

Case = dict[str, str | int]


@dataclass(frozen=True)
class Size:
    """seeds of the figures; runs that a rate is tuned by; steps after which a run has not come down"""

    seeds: tuple[int, ...]
    budget: int
    limit: int
    warmup: int
    epochs: float
    of_gap: tuple[int, ...]


FULL = Size((1, 2, 3), budget=4, limit=3000, warmup=10, epochs=GAP_EPOCHS, of_gap=(GROUP, 9 * GROUP, 81 * GROUP))
QUICK = Size((1,), budget=1, limit=4, warmup=2, epochs=0.05, of_gap=(GROUP, 3 * GROUP))


class Study:
    """Figures, each made once: those that an earlier run kept are not made again."""

    def __init__(self, options: Options):
        self.size, self._kept = QUICK if options.quick else FULL, options.kept
        self._earlier = {tuple(row.case.items()): row for row in options.earlier}
        self.rows: list[Row] = []

    def row(self, case: Case, make: Callable[[], dict[str, Number]]) -> Row:
        row = self._earlier.get(tuple(case.items()))
        if row is None:
            begin = time.perf_counter()
            row = Row(case, make() | {"seconds": Number(time.perf_counter() - begin, "s")})
            self._kept(row)
        self.rows.append(row)
        return row

    def find(self, **case: Any) -> list[Row]:
        return [row for row in self.rows if case.items() <= row.case.items()]


def spread(name: str, unit: str, values: list[float]) -> dict[str, Number]:
    """The geometric mean over seeds, its interval, and each seed's."""
    mean, low, high = interval(values)
    found = {name: mean, f"{name}, low": low, f"{name}, high": high}
    found |= {f"{name}, seed {n}": value for n, value in enumerate(values, 1)}
    return {key: Number(value, unit) for key, value in found.items()}


def seeds_of(row: Row, name: str) -> list[float]:
    return [number.value for key, number in row.numbers.items() if key.startswith(f"{name}, seed ")]


# --- parts ------------------------------------------------------------------------------------------------------------


def measure_steps(study: Study, task: Task, optimizer: str) -> None:
    """Steps to the target at each batch, the rate tuned at each."""
    contender, size = CONTENDERS[optimizer], study.size
    begin, before = contender.rate, task.batches[0]
    for rows in task.batches if optimizer in WHOLE else task.batches[1:]:
        begin *= math.sqrt(rows / before)

        def make(rows: int = rows, begin: float = begin) -> dict[str, Number]:
            def score(rate: float, least: float) -> float:
                limit, worst = min(size.limit, 1.2 * least + 1), 0.0
                for seed in TUNING_SEEDS:
                    worst = max(worst, to_target(task, contender, rows, rate, seed, limit).score(task.target))
                    if worst > least:
                        break
                scores.append(worst)
                return worst

            scores: list[float] = []
            rate = best_rate(score, begin, size.budget)
            most = min(size.limit, MOST * min(scores))
            runs = [to_target(task, contender, rows, rate, seed, most) for seed in size.seeds]
            return {
                "rate": Number(rate, ""),
                **spread("steps", "", [run.steps for run in runs]),
                "examples": Number(interval([run.steps * rows for run in runs])[0], "rows"),
                "reached": Number(sum(run.there for run in runs) / len(runs), "of runs"),
            }

        row = study.row({"part": "steps", "task": task.name, "optimizer": optimizer, "rows": rows}, make)
        begin, before = row.numbers["rate"].value, rows


def measure_noise(study: Study, task: Task, optimizer: str) -> None:
    """The noise scale along runs to the target, at the largest batch and the best rate there."""
    *_, row = study.find(part="steps", task=task.name, optimizer=optimizer)
    rows, rate = int(row.case["rows"]), row.numbers["rate"].value

    def make() -> dict[str, Number]:
        found = [
            noise_along(task, CONTENDERS[optimizer], rows, rate, seed, max(2, round(steps)))
            for seed, steps in zip(study.size.seeds, seeds_of(row, "steps"), strict=True)
        ]
        return {
            **spread("noise scale", "rows", [_mean(noise.near) for noise in found]),
            "at first": Number(interval([noise.near[0] for noise in found])[0], "rows"),
            "averaged": Number(interval([_mean(noise.averaged) for noise in found])[0], "rows"),
        }

    study.row({"part": "noise", "task": task.name, "optimizer": optimizer, "rows": rows}, make)


def fit_curves(study: Study, task: Task, optimizer: str) -> None:
    """The critical batch of each seed's steps, and of their means."""
    rows = study.find(part="steps", task=task.name, optimizer=optimizer)
    each = [seeds_of(row, "steps") for row in rows]
    batches = [int(row.case["rows"]) for row in rows]

    def make() -> dict[str, Number]:
        by_seed = [fitted(dict(zip(batches, steps, strict=True))) for steps in zip(*each, strict=True)]
        means = curve_of(study, task, optimizer)
        return {
            **spread("critical batch", "rows", [curve.critical for curve in by_seed]),
            "of the means": Number(means.critical, "rows"),
            "fewest steps": Number(means.fewest, ""),
            "off the curve": Number(max(abs(math.log(row.numbers["steps"].value / means(b)))
                                        for row, b in zip(rows, batches, strict=True)), "log"),
        }  # fmt: skip

    study.row({"part": "curve", "task": task.name, "optimizer": optimizer}, make)


def curve_of(study: Study, task: Task, optimizer: str) -> Curve:
    rows = study.find(part="steps", task=task.name, optimizer=optimizer)
    return fitted({int(row.case["rows"]): row.numbers["steps"].value for row in rows})


def measure_rules(study: Study, task: Task, optimizer: str) -> None:
    """Steps by a rate that was tuned at the smallest batch alone."""
    (tuned, *others) = study.find(part="steps", task=task.name, optimizer=optimizer)
    base, rate = int(tuned.case["rows"]), tuned.numbers["rate"].value
    for other in others[-3:] if task.name == "digits" else others[-2:]:
        rows = int(other.case["rows"])
        for rule, by in zip(RULES, (1.0, math.sqrt(rows / base), rows / base), strict=True):
            for warmup in (0, study.size.warmup) if rule != "kept" else (0,):

                def make(rows: int = rows, by: float = by, warmup: int = warmup, other: Row = other):
                    limit = min(study.size.limit, MOST * other.numbers["steps"].value)
                    runs = [
                        to_target(task, CONTENDERS[optimizer], rows, rate * by, seed, limit, warmup)
                        for seed in study.size.seeds
                    ]
                    return {
                        "rate": Number(rate * by, ""),
                        **spread("steps", "", [run.steps for run in runs]),
                        "reached": Number(sum(run.there for run in runs) / len(runs), "of runs"),
                    }

                case: Case = {"part": "rules", "task": task.name, "optimizer": optimizer, "rows": rows, "rule": rule}
                study.row(case | {"warm-up": warmup}, make)


GAP = {
    "sgd": ("sgd", False, False),
    "sgd, warm-up": ("sgd", True, False),
    "lars, warm-up": ("lars", True, False),
    "lamb, warm-up": ("lamb", True, False),
    "sgd by the linear rule": ("sgd", False, True),
    "sgd by the linear rule, warm-up": ("sgd", True, True),
}
"""name -> optimizer, whether it has a warm-up, whether its rate is that of the smallest batch, scaled"""


def measure_gap(study: Study, task: Task) -> None:
    """The error on held-out digits after as many epochs at each batch."""
    size, (training, heldout) = study.size, split_digits()
    half = len(heldout["y"]) // 2
    parts = [{k: v[cut] for k, v in heldout.items()} for cut in (slice(None, half), slice(half, None))]

    def run(optimizer: str, warm: bool, rows: int, rate: float, seed: int) -> torch.nn.Module:
        last = max(1, round(size.epochs * len(training["y"]) / rows))
        warmup = round(WARM * last) if warm else 0

        def factor(step: int) -> float:
            return ramp_then_cosine(step, warmup, last)

        for step, model in trained(task, CONTENDERS[optimizer], rows, rate, seed, factor):
            if step == last:
                return model
        raise AssertionError("training does not end by itself")

    for name, (optimizer, warm, by_rule) in GAP.items():
        for rows in size.of_gap:
            if by_rule and rows == size.of_gap[0]:
                continue  # there it is the tuned one

            def make(rows: int = rows, optimizer: str = optimizer, warm: bool = warm, by_rule: bool = by_rule):
                begins = study.find(part="steps", task=task.name, optimizer=optimizer, rows=rows)
                rate = begins[0].numbers["rate"].value if begins else CONTENDERS[optimizer].rate

                def score(rate: float, _: float) -> float:
                    found = loss_of(run(optimizer, warm, rows, rate, TUNING_SEEDS[0]), parts[0])
                    return found if math.isfinite(found) else math.inf

                if by_rule:
                    (base,) = study.find(part="gap", optimizer=optimizer, rows=size.of_gap[0])
                    rate = base.numbers["rate"].value * rows / size.of_gap[0]
                else:
                    rate = best_rate(score, rate, size.budget)
                models = [run(optimizer, warm, rows, rate, seed) for seed in size.seeds]
                errors = [max(error_of(model, parts[1]), 0.5 / half) for model in models]
                return {
                    "rate": Number(rate, ""),
                    **spread("error", "of digits", errors),
                    "held-out loss": Number(_mean(loss_of(model, parts[1]) for model in models), "nats"),
                    "training loss": Number(_mean(loss_of(model, training) for model in models), "nats"),
                }

            study.row({"part": "gap", "task": task.name, "optimizer": name, "rows": rows}, make)


def ramp_then_cosine(step: int, warmup: int, last: int) -> float:
    """Up to 1 over `warmup` steps, and down to 0 behind `last`."""
    if step <= warmup:
        return step / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - 1 - warmup) / max(1, last - warmup)))


@torch.no_grad()
def error_of(model: torch.nn.Module, rows: dict[str, torch.Tensor]) -> float:
    model.eval()
    return float((model(rows["x"]).argmax(1) != rows["y"]).double().mean())


def _mean(values: Any) -> float:
    found = list(values)
    mean = sum(found) / len(found)
    return mean if math.isfinite(mean) else 1e9


# --- the whole --------------------------------------------------------------------------------------------------------


def measure(options: Options) -> Measured:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        study = Study(options)
        digits = digits_task(options.quick)
        for optimizer in CONTENDERS:
            measure_steps(study, digits, optimizer)
            fit_curves(study, digits, optimizer)
            if optimizer == "sgd":
                measure_noise(study, digits, optimizer)
                measure_rules(study, digits, optimizer)
            if optimizer == "lamb":
                measure_gap(study, digits)
        text = text_task(options.quick)
        for optimizer in OF_TEXT[:1] if options.quick else OF_TEXT:
            measure_steps(study, text, optimizer)
            fit_curves(study, text, optimizer)
            if optimizer == "adamw":
                measure_noise(study, text, optimizer)
                measure_rules(study, text, optimizer)
    finally:
        torch.set_num_threads(threads)
    return Measured(tuple(study.rows), () if options.quick else targets(study), notes(study, digits, text))


def targets(study: Study) -> tuple[Target, ...]:
    found = []
    for task, optimizer in (("digits", "sgd"), ("text", "adamw")):
        rows = study.find(part="steps", task=task, optimizer=optimizer)
        first, second, *_, last = rows
        grown = second.case["rows"] / first.case["rows"]  # pyright: ignore[reportOperatorIssue]
        (curve,) = study.find(part="curve", task=task, optimizer=optimizer)
        (noise,) = study.find(part="noise", task=task, optimizer=optimizer)
        ratio = curve.numbers["critical batch"].value / noise.numbers["noise scale"].value
        examples = last.numbers["examples"].value / first.numbers["examples"].value
        saved = first.numbers["steps"].value / second.numbers["steps"].value
        found += [
            Target(f"linear region, {task}: steps that {grown:g} times the smallest batch saves", grown**0.7, saved),
            Target(f"beyond the knee, {task}: examples at the largest batch / at the smallest", 2.0, examples),
            Target(f"critical batch and noise scale, {task}: the smaller / the larger", 0.5, min(ratio, 1 / ratio)),
        ]
    found += gap_targets(study)
    return tuple(found)


def gap_targets(study: Study) -> list[Target]:
    def error(name: str, rows: int) -> float:
        (row,) = study.find(part="gap", optimizer=name, rows=rows)
        return row.numbers["error"].value

    small, *_, large = study.size.of_gap
    rule = error("sgd by the linear rule", large)
    grown = f"gap: error at {large} rows by the linear rule / at {small} rows"
    found = [Target(grown, 1.0, rule / error("sgd", small))]
    for name in ("sgd by the linear rule, warm-up", "lars, warm-up", "lamb, warm-up"):
        found.append(
            Target(f"gap at {large} rows: sgd's error by the linear rule / {name}", 1.0, rule / error(name, large))
        )
    return found


def notes(study: Study, *tasks: Task) -> tuple[str, ...]:
    seeds = len(study.size.seeds)
    return (
        f"Means of {seeds} seeds are geometric, low and high their 95 % interval by Student's t. Rates are tuned by "
        f"{study.size.budget} tries, factors of two and their roots apart, on {len(TUNING_SEEDS)} other seeds.",
        "Targets: " + ", ".join(f"{task.name} {task.target:g} nats" for task in tasks) + "; a run that is not there in "
        f"{study.size.limit} steps, or in {MOST} times the steps of its tuning, counts with these.",
        f"Batch norm takes its statistics over {GROUP} rows whatever the batch. The noise scale is the mean over "
        f"steps, each with its neighbours; averaged: over {AVERAGE} steps, as --noise-scale-steps {AVERAGE} has it.",
        f"Errors are of {len(split_digits()[1]['y']) - len(split_digits()[1]['y']) // 2} digits after "
        f"{study.size.epochs:g} epochs; none at all counts as half a digit. {example().HELDOUT} digits are not trained "
        "on.",
    )


# --- the plot ---------------------------------------------------------------------------------------------------------


def plot(result: Result, folder: Path) -> Path:
    """large_batch.png: steps against the batch of both tasks, the fitted curves and noise scales; rules; errors."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(12, 9), layout="constrained")
    for axes, task, optimizer in ((panels[0, 0], "digits", "sgd"), (panels[0, 1], "text", "adamw")):
        _draw_steps(axes, result, task, optimizer)
    _draw_rules(panels[1, 0], result)
    _draw_gap(panels[1, 1], result)
    path = folder / "large_batch.png"
    save_figure(figure, path, 120)
    plt.close(figure)
    return path


def _of(result: Result, **case: Any) -> list[Row]:
    return [row for row in result.figures if case.items() <= row.case.items()]


def _line(axes: Any, rows: list[Row], what: str, label: str, style: str = "o-") -> None:
    xs = [row.case["rows"] for row in rows]
    means = [row.numbers[what].value for row in rows]
    below = [mean - min(mean, row.numbers[f"{what}, low"].value) for row, mean in zip(rows, means, strict=True)]
    above = [max(mean, row.numbers[f"{what}, high"].value) - mean for row, mean in zip(rows, means, strict=True)]
    axes.errorbar(xs, means, yerr=(below, above), fmt=style, label=label, markersize=4, linewidth=1.2, capsize=2)


def _draw_steps(axes: Any, result: Result, task: str, optimizer: str) -> None:
    rows = _of(result, part="steps", task=task)
    for name in dict.fromkeys(str(row.case["optimizer"]) for row in rows):
        _line(axes, _of(result, part="steps", task=task, optimizer=name), "steps", name)
    (curve,) = _of(result, part="curve", task=task, optimizer=optimizer)
    (noise,) = _of(result, part="noise", task=task, optimizer=optimizer)
    form = Curve(curve.numbers["fewest steps"].value, curve.numbers["of the means"].value)
    xs = sorted({int(row.case["rows"]) for row in rows})
    axes.plot(xs, [form(x) for x in xs], "k--", linewidth=1, label=f"{optimizer}, fitted")
    axes.axvline(form.critical, color="k", linestyle=":", label=f"critical batch {form.critical:.3g}")
    low, high = (noise.numbers[f"noise scale, {end}"].value for end in ("low", "high"))
    axes.axvspan(low, high, color="k", alpha=0.12, label=f"noise scale {noise.numbers['noise scale'].value:.3g}")
    _finish(axes, f"steps to the target, {task}")


def _draw_rules(axes: Any, result: Result) -> None:
    _line(axes, _of(result, part="steps", task="digits", optimizer="sgd"), "steps", "tuned at each batch", "ko-")
    rules = _of(result, part="rules", task="digits", optimizer="sgd")
    for rule, warmup in dict.fromkeys((row.case["rule"], row.case["warm-up"]) for row in rules):
        rows = [row for row in rules if (row.case["rule"], row.case["warm-up"]) == (rule, warmup)]
        _line(axes, rows, "steps", f"{rule}{f', {warmup} steps of warm-up' if warmup else ''}")
    _finish(axes, "sgd on digits, a rate of the smallest batch by rules: steps")


def _draw_gap(axes: Any, result: Result) -> None:
    rows = _of(result, part="gap")
    for name in dict.fromkeys(str(row.case["optimizer"]) for row in rows):
        _line(axes, [row for row in rows if row.case["optimizer"] == name], "error", name)
    _finish(axes, "error on held-out digits after as many epochs")


def _finish(axes: Any, title: str) -> None:
    axes.set(xscale="log", yscale="log", xlabel="rows of a batch")
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(True, which="both", alpha=0.2)
    axes.legend(frameon=False, fontsize=8)


BENCHMARK = Benchmark(
    "large_batch",
    "Large batches: steps, examples and error against the batch",
    measure,
    (
        "benchmarks/large_batch.py",
        "benchmarks/large_batch_tasks.py",
        "benchmarks/data",
        "docs/examples/vision.py",
        "core/optim",
        "core/train/noise.py",
        "core/parallel/squares.py",
    ),
    plot,
    resumes=True,
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="large_batch"), sys.argv[1:]))
