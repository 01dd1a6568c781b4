"""Steps and seconds that matrix and second-order optimizers take to the loss that AdamW ends at, on the demo's text.

A GPT-2 of the demo's kind, 4 blocks, learns from the source of this Python's standard library (apps/llm/demo.py), with
other widths, so that the whole study fits into minutes of one core. Every run decays its rate to zero at its own end,
and what is compared is the loss on held-out text there (Wen et al. 2025, arXiv:2509.02046: on the way the order of
optimizers is another).

1. each optimizer is tuned by `TUNING` short runs, a grid of rates and one option of its own, of seed 0
2. AdamW runs `steps` steps from each of `SEEDS`: the loss to be reached
3. each other one runs tenths of that length, from the same weights on the same batches, until two neighbouring tenths
   have AdamW's loss between them; where between is interpolated, for each seed by itself
4. its steps take turns with AdamW's, `STRETCH` at a time (so many that new bases and inverses are in), on the clock of
   the processor; the middle ratio of these times the share of steps is the share of seconds

Intervals are those of Student's t at 95 %, over the seeds. Runs are kept as they end, and not made again after a cut.
"""

import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from torch import nn

from apps.llm.corpus import prepare
from apps.llm.loss import num_targets, predicted, summed_loss, token_loss
from apps.llm.recipes import debug, demo
from benchmarks.result import ROOT, Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.data import BatchSize, EvalBatches, TokenBatches
from core.files import save_figure
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.optim import KFAC, OPTIMIZERS, ScheduleConfig, build_optimizer, learning_rate
from core.optim.prediction import Drawing, drawn_targets

TUNING = 12
SEEDS = (1, 2, 3)
STRETCH = 20
WARMUP = 0.07
TENTHS = range(3, 13)
"""tenths of AdamW's steps that are tried"""
DIVERGED = 20.0
"""nats, in place of a loss that is no number"""
STUDENT = {2: 12.706, 3: 4.303}
"""95 % quantiles of Student's t for the mean of so many"""
SHARE_OF_STEPS, SHARE_OF_SECONDS = 0.70, 0.85
RATES = (2e-3, 4e-3, 8e-3, 1.6e-2, 3.2e-2, 6.4e-2)


@dataclass(frozen=True)
class Contender:
    """grid: option -> its values; fixed: options that are not tuned; first: the tenth of AdamW's steps tried first"""

    label: str
    grid: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any]
    first: int

    def settings(self) -> list[dict[str, Any]]:
        return [dict(zip(self.grid, values, strict=True)) for values in product(*self.grid.values())]


CONTENDERS = {
    "adamw": Contender("AdamW", {"lr": tuple(lr / 8 for lr in RATES), "weight_decay": (0.1, 0.5)}, {}, 10),
    "muon": Contender("Muon", {"lr": RATES, "weight_decay": (0.1, 0.5)}, {}, 6),
    "soap": Contender("SOAP", {"lr": RATES, "precondition_frequency": (2, 10)}, {"weight_decay": 0.1}, 6),
    "shampoo": Contender("Shampoo", {"lr": RATES, "root": (4, 2)}, {"max_preconditioner_dim": 192}, 8),
    "galore": Contender("GaLore", {"lr": tuple(4 * lr for lr in RATES), "rank": (24, 48)}, {"update_gap": STRETCH}, 10),
    "kfac": Contender(
        "K-FAC",
        {"lr": (1e-3, 3e-3, 1e-2, 3e-2), "damping": (3e-2, 1e-1, 3e-1)},
        {"kl_clip": None, "factor_every": 2, "inverse_every": 4},
        10,
    ),
}


@dataclass(frozen=True)
class Sizes:
    """tuning_steps: of a short run; evaluated: batches of held-out text; stretches: that each optimizer is timed for"""

    model: DecoderConfig
    steps: int
    tuning_steps: int
    settings: int = TUNING
    seeds: tuple[int, ...] = SEEDS
    rows: int = 12
    evaluated: int = 24
    stretch: int = STRETCH
    stretches: int = 4


FULL = Sizes(
    DecoderConfig(vocab_size=2048, dim=96, num_layers=4, num_heads=3, ffn_dim=384, max_length=128),
    steps=250,
    tuning_steps=80,
)
QUICK = Sizes(
    DecoderConfig(vocab_size=261, dim=16, num_layers=1, num_heads=1, ffn_dim=32, max_length=16),
    steps=10, tuning_steps=2, settings=1, seeds=(1,), rows=2, evaluated=1, stretch=2, stretches=1,
)  # fmt: skip


class Text:
    """Batches of the corpus and of its held-out part."""

    def __init__(self, sizes: Sizes, *, quick: bool):
        self.sizes, length = sizes, sizes.model.max_length
        data = debug().data if quick else replace(demo().data, vocab_size=sizes.model.vocab_size)
        self.corpus = prepare(data, ROOT / "runs" / "corpora")
        assert self.corpus.heldout is not None
        held = EvalBatches(self.corpus.heldout, length, sizes.rows)
        self.heldout = [held.batch(index, 0, 1) for index in range(min(sizes.evaluated, held.num_batches))]

    @cache  # noqa: B019 (there is one)
    def batches(self, seed: int) -> TokenBatches:
        return TokenBatches(self.corpus.train, self.sizes.model.max_length, BatchSize(self.sizes.rows), seed)

    @torch.no_grad()
    def loss(self, model: nn.Module) -> float:
        """Nats a token of the held-out text."""
        summed = sum(float(summed_loss(model, batch)) for batch in self.heldout)
        found = summed / sum(int(num_targets(batch)) for batch in self.heldout)
        return min(found, DIVERGED) if math.isfinite(found) else DIVERGED


class Training:
    """A model and its optimizer, step by step, as `core.train.fit` takes them on one rank."""

    def __init__(self, text: Text, name: str, setting: Mapping[str, Any], seed: int, steps: int):
        sizes = text.sizes
        self.text, self.seed, self.steps, self.taken = text, seed, steps, 0
        self.schedule = ScheduleConfig(shape="linear", warmup_steps=max(1, round(WARMUP * steps)), final=0.0)
        self.model = Decoder(sizes.model)
        initialise(self.model, seed)
        self.config = OPTIMIZERS[name].config(**CONTENDERS[name].fixed, **setting)
        self.optimizer = build_optimizer(self.config, dict(self.model.named_parameters()))
        if isinstance(self.optimizer, KFAC):
            self.optimizer.watch(self.model)
        self.peaks = [group["lr"] for group in self.optimizer.param_groups]

    def step(self) -> float:
        """One step. Returns its loss."""
        share = learning_rate(self.taken, self.steps, 1.0, self.schedule)
        for group, peak in zip(self.optimizer.param_groups, self.peaks, strict=True):
            group["lr"] = peak * share
        batch = self.text.batches(self.seed).batch(self.taken, 0, 1)
        self._look(batch)
        loss = token_loss(self.model, batch)
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.taken += 1
        return float(loss.detach())

    def _look(self, batch: dict[str, torch.Tensor]) -> None:
        """What K-FAC asks for, as `core.train.curvature` shows it."""
        optimizer, model = self.optimizer, self.model
        if not isinstance(optimizer, KFAC) or not optimizer.due:
            return

        def drawn() -> torch.Tensor:
            with torch.no_grad():
                prediction = predicted(model, batch)
            targets = drawn_targets(prediction, batch["targets"], Drawing(self.seed, self.taken, 0))
            return token_loss(model, batch | {"targets": targets})

        rows, length = batch["input_ids"].shape
        optimizer.observe(drawn, float(num_targets(batch)), rows=rows, length=length)

    def heldout_loss(self) -> float:
        """The loss on held-out text after all steps."""
        while self.taken < self.steps:
            if not math.isfinite(self.step()):
                return DIVERGED
        return self.text.loss(self.model)


class Study:
    """The figures, each made once; those that a run which was cut had kept are taken over."""

    def __init__(self, text: Text, options: Options):
        self.text, self.sizes, self.options = text, text.sizes, options
        self.earlier, self.made = {_key(row.case): row for row in options.earlier}, dict[Any, Row]()
        self.best: dict[str, dict[str, Any]] = {}

    def row(self, case: dict[str, str | int], make: Callable[[], dict[str, Number]]) -> Row:
        key = _key(case)
        if key not in self.made:
            row = self.made[key] = self.earlier.get(key) or Row(case, make())
            if key not in self.earlier:
                self.options.kept(row)
        return self.made[key]

    def loss(self, what: str, name: str, setting: Mapping[str, Any], seed: int, steps: int) -> float:
        """At the end of one run."""

        def run() -> dict[str, Number]:
            return {"loss": Number(Training(self.text, name, setting, seed, steps).heldout_loss(), "nats a token")}

        case = {"optimizer": CONTENDERS[name].label, "what": what, "setting": in_words(setting)}
        return self.row(case | {"seed": seed, "steps": steps}, run).numbers["loss"].value

    def tuned(self, name: str) -> dict[str, Any]:
        """The setting whose short run ends lowest."""
        others = {"lr_others": self.best["adamw"]["lr"]} if name == "kfac" else {}
        settings = [one | others for one in CONTENDERS[name].settings()][: self.sizes.settings]
        steps = self.sizes.tuning_steps
        self.best[name] = min(settings, key=lambda setting: self.loss("tuning", name, setting, 0, steps))
        return self.best[name]

    def goals(self, setting: Mapping[str, Any]) -> dict[int, float]:
        """seed -> AdamW's loss at its end."""
        return {seed: self.loss("run", "adamw", setting, seed, self.sizes.steps) for seed in self.sizes.seeds}

    def compared(self, name: str, setting: dict[str, Any], adamw: dict[str, Any], goals: Mapping[int, float]) -> Row:
        """The shares of AdamW's steps and seconds that an optimizer takes to AdamW's loss."""
        found: dict[int, dict[int, float]] = {}
        goal, tenth = statistics.fmean(goals.values()), CONTENDERS[name].first
        while tenth in TENTHS and tenth not in found:
            steps = max(1, round(self.sizes.steps * tenth / 10))
            found[tenth] = {seed: self.loss("run", name, setting, seed, steps) for seed in goals}
            tenth += -1 if statistics.fmean(found[tenth].values()) <= goal else 1
        slower = self._slower(name, setting, adamw)
        case: dict[str, str | int] = {"optimizer": CONTENDERS[name].label, "what": "to AdamW's loss"}
        case |= {"setting": in_words(setting)}
        last = max(found)
        if statistics.fmean(found[last].values()) > goal:
            above = statistics.fmean(found[last].values()) - goal
            case["what"] = f"above AdamW's loss after {last / 10:g} of its steps"
            return self.row(case, lambda: {"loss": Number(above, "nats a token"), "seconds a step": slower})
        shares = [crossing({t: of_seeds[seed] for t, of_seeds in found.items()}, goals[seed]) / 10 for seed in goals]
        steps, low, high = interval(shares)
        numbers = {
            "share of steps": steps, "from": low, "to": high, "seconds a step": slower.value,
            "share of seconds": steps * slower.value, "seconds from": low * slower.value,
            "seconds to": high * slower.value,
        }  # fmt: skip
        return self.row(case, lambda: {name: Number(value, "of AdamW's") for name, value in numbers.items()})

    def _slower(self, name: str, setting: dict[str, Any], adamw: dict[str, Any]) -> Number:
        """The middle of the ratios of stretches of its steps to those of AdamW's that took turns with them."""
        sizes, seed = self.sizes, self.sizes.seeds[0]
        length = sizes.stretch * (sizes.stretches + 1)

        def timed() -> dict[str, Number]:
            both = [Training(self.text, *given, seed, length) for given in ((name, setting), ("adamw", adamw))]
            seconds = [[_seconds(one, sizes.stretch) for one in both] for _ in range(sizes.stretches + 1)][1:]
            ratios = [own / other for own, other in seconds]
            each = [statistics.median(of_one) / sizes.stretch for of_one in zip(*seconds, strict=True)]
            return {
                "seconds": Number(each[0], "s a step"),
                "AdamW's": Number(each[1], "s a step"),
                "seconds a step": Number(statistics.median(ratios), "of AdamW's"),
                "least": Number(min(ratios), "of AdamW's"),
                "most": Number(max(ratios), "of AdamW's"),
            }

        case: dict[str, str | int] = {"optimizer": CONTENDERS[name].label, "what": "time", "setting": in_words(setting)}
        return self.row(case | {"steps": length - sizes.stretch}, timed).numbers["seconds a step"]


def _seconds(training: Training, steps: int) -> float:
    began = time.process_time()
    for _ in range(steps):
        training.step()
    return time.process_time() - began


def _key(case: Mapping[str, str | int]) -> tuple[tuple[str, str | int], ...]:
    return tuple(sorted(case.items()))


def in_words(setting: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {_word(value)}" for name, value in setting.items())


def _word(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def crossing(losses: Mapping[int, float], goal: float) -> float:
    """Where on the broken line through the points (length, loss) the loss is the goal; before and behind, on the line
    that goes on there."""
    points = sorted(losses.items())
    if len(points) == 1:
        return points[0][0]
    pair = next((p for p in pairwise(points) if p[0][1] > goal >= p[1][1]), None)
    if pair is None:
        pair = points[:2] if points[0][1] <= goal else points[-2:]
    (a, at_a), (b, at_b) = pair
    if at_a <= at_b:  # noise: more steps did not help
        return a if at_a <= goal else b
    return a + (b - a) * (at_a - goal) / (at_a - at_b)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean, and the ends of the 95 % interval of it."""
    mean = statistics.fmean(values)
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return mean, mean - half, mean + half


def measure(options: Options) -> Measured:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        sizes = QUICK if options.quick else FULL
        study = Study(Text(sizes, quick=options.quick), options)
        return _studied(study)
    finally:
        torch.set_num_threads(threads)


def _studied(study: Study) -> Measured:
    adamw = study.tuned("adamw")
    goals = study.goals(adamw)
    compared = {n: study.compared(n, study.tuned(n), adamw, goals) for n in CONTENDERS if n != "adamw"}
    steps, seconds, best = min(
        ((*_shares(compared[name]), name) for name in ("muon", "soap")),
        key=lambda one: max(one[0] / SHARE_OF_STEPS, one[1] / SHARE_OF_SECONDS),
    )
    label = CONTENDERS[best].label
    targets = (
        Target(f"{SHARE_OF_STEPS:.2f} of AdamW's steps / those of {label}", 1.0, SHARE_OF_STEPS / steps),
        Target(f"{SHARE_OF_SECONDS:.2f} of AdamW's seconds / those of {label}", 1.0, SHARE_OF_SECONDS / seconds),
    )
    sizes = study.sizes
    tokens = sizes.rows * sizes.model.max_length
    goal, low, high = interval(list(goals.values()))
    notes = (
        f"{sizes.model.num_layers} blocks of {sizes.model.dim}, {sizes.model.vocab_size} tokens, {tokens} tokens a "
        f"step; AdamW ({in_words(adamw)}) takes {sizes.steps} steps to {goal:.4f} nats a token of held-out text (95 % "
        f"from {low:.4f} to {high:.4f}), over seeds {', '.join(map(str, sizes.seeds))}.",
        f"Each was tuned by {sizes.settings} runs of {sizes.tuning_steps} steps of seed 0: "
        + "; ".join(f"{one.label} {_grid(one)}" for one in CONTENDERS.values())
        + ". Linear decay to zero after a warm-up of "
        f"{WARMUP:.0%} of the steps, gradients clipped at each optimizer's default.",
        *_at_an_edge(study),
    )
    return Measured(tuple(study.made.values()), () if sizes is QUICK else targets, notes)


def _shares(row: Row) -> tuple[float, float]:
    if "share of steps" not in row.numbers:
        return 99.0, 99.0
    return row.numbers["share of steps"].value, row.numbers["share of seconds"].value


def _grid(contender: Contender) -> str:
    tuned = " x ".join(f"{name} {'/'.join(map(_word, values))}" for name, values in contender.grid.items())
    return f"{tuned} ({in_words(contender.fixed)})" if contender.fixed else tuned


def _at_an_edge(study: Study) -> list[str]:
    """A note for each option whose best value is the least or the greatest of more than two: it may be better still."""
    found = []
    for name, contender in CONTENDERS.items():
        for option, values in contender.grid.items():
            best = study.best[name][option]
            if len(values) > 2 and best in (values[0], values[-1]):
                found.append(f"{contender.label}'s best {option}, {best:g}, is at the edge of its grid.")
    return found


# --- figure -----------------------------------------------------------------------------------------------------------


def plot(result: Result, folder: Path) -> Path:
    """optimizers.png: the loss at the end of runs over their steps, and the shares of AdamW's steps and seconds."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 5), layout="constrained")
    for index, contender in enumerate(CONTENDERS.values()):
        ends: dict[int, list[float]] = {}
        for row in result.figures:
            if row.case["what"] == "run" and row.case["optimizer"] == contender.label:
                ends.setdefault(int(row.case["steps"]), []).append(row.numbers["loss"].value)
        steps = sorted(ends)
        means = [statistics.fmean(ends[n]) for n in steps]
        left.plot(steps, means, "o-", color=f"C{index}", label=contender.label, markersize=4)
        for n in steps:
            left.plot([n] * len(ends[n]), ends[n], ".", color=f"C{index}", alpha=0.4)
        if contender.label == "AdamW":
            left.axhline(means[-1], color="grey", linewidth=0.8)
    left.set_xlabel("steps of a run whose rate ends at zero")
    left.set_ylabel("held-out loss at its end, nats a token")
    left.legend(frameon=False)
    rows = [row for row in result.figures if "share of steps" in row.numbers]
    for offset, (what, low, high) in enumerate(
        (("share of steps", "from", "to"), ("share of seconds", "seconds from", "seconds to"))
    ):
        values = [row.numbers[what].value for row in rows]
        errors = [
            [value - row.numbers[low].value for value, row in zip(values, rows, strict=True)],
            [row.numbers[high].value - value for value, row in zip(values, rows, strict=True)],
        ]
        places = [place + 0.4 * offset for place in range(len(rows))]
        right.bar(places, values, 0.38, yerr=errors, capsize=3, label=what.replace("share of ", ""))
    right.axhline(1.0, color="grey", linewidth=0.8)
    right.set_xticks([place + 0.2 for place in range(len(rows))], [str(row.case["optimizer"]) for row in rows])
    right.set_ylabel("to AdamW's final loss, of AdamW's own")
    right.legend(frameon=False)
    save_figure(figure, folder / "optimizers.png", 120)
    plt.close(figure)
    return folder / "optimizers.png"


MEASURES = ("core/optim", "core/models", "core/nn", "apps/llm/corpus.py", "benchmarks/optimizers.py")
BENCHMARK = Benchmark(
    "optimizers", "Steps and seconds to AdamW's loss, on the demo's text", measure, MEASURES, plot, resumes=True
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="optimizers"), sys.argv[1:]))
