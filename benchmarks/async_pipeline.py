"""Asynchronous pipelines: what their old weights cost in loss, and what is won in time.

1. By the recurrence on one rank (`benchmarks.recurrence`): held-out loss of a byte of the demo's text after 500 updates
   of 8 blocks of width 128, three seeds; pipedream at 2, 4 and 8 stages and 2bw; AdamW with every correction, Muon and
   SOAP as they are. The gap is to the same optimizer, at the same seed, without a delay, with its 95 % interval.
2. On two ranks of this machine: a training step of two microbatches by gpipe, 1f1b, zbv and the schedules that run
   ahead, turn by turn in the same processes; and the share of the time in which ranks compute. On three ranks the same
   of six microbatches, by 1f1b and 2bw on three stages, and by 2bw and pipedream on two, the first of two replicas.
3. On a clock, four stages: the same with links that take their time, a share of a microbatch's forward on a stage.

It is resumed: runs that an interrupted one has finished are kept, where the code is the same.
"""

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.ranks import device_of_rank, on_ranks
from benchmarks.recurrence import Sizes, learn, paired_interval
from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.compose import parallelize
from core.config import run_command
from core.files import save_figure
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig
from core.parallel.correction import CORRECTIONS, CorrectionName
from core.parallel.pipeline.run import Pipeline
from core.parallel.pipeline.schedule import (
    SCHEDULES,
    Kind,
    PipelineConfig,
    ScheduleName,
    bubble_fraction,
    schedule,
    simulate,
)
from core.placement.table import ModelPlan
from core.precision import LossScale
from core.train import TrainConfig, TrainState, num_rows, train_step

SEEDS = (0, 1, 2)
STAGES = (2, 4, 8)
RATES = {"adamw": 1e-3, "muon": 3e-3, "soap": 3e-3}
"""AdamW's is the best without a delay of 1e-3, 3e-3 and 6e-3 (seed 0); Muon's is the demo's."""
SYNCHRONOUS: ScheduleName = "1f1b"
PUBLISHED = {"adamw": 0.2, "muon": 0.012}
"""Gap under 2bw's delay, nats: Zmushko et al. 2026, arXiv:2606.30634, models of 360M; AdamW's is said to be larger."""


# --- what is learned --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """stages: as many for 2bw as for pipedream at most; its delay is the same at every number."""

    schedule: ScheduleName
    stages: int
    optimizer: str
    correction: CorrectionName = "none"

    def case(self, seed: int) -> dict[str, str | int]:
        case = {"schedule": self.schedule, "stages": self.stages, "optimizer": self.optimizer}
        return case | {"correction": self.correction, "seed": seed, "from": "recurrence"}

    @property
    def synchronous(self) -> "Run":
        return Run(SYNCHRONOUS, 1, self.optimizer)


def seeds_of(quick: bool) -> tuple[int, ...]:
    return SEEDS[:2] if quick else SEEDS


def runs(quick: bool) -> list[Run]:
    """The synchronous ones and 2bw first."""
    found = [Run(SYNCHRONOUS, 1, name) for name in RATES]
    late: list[tuple[ScheduleName, int]] = [("2bw", 2), *(("pipedream", stages) for stages in STAGES)]
    for name, stages in late[:2] if quick else late:
        needs = max(SCHEDULES[name].delay(stage, stages) for stage in range(stages))
        corrections = (c for c, spec in CORRECTIONS.items() if needs > 1 or not spec.needs_delays)
        found += [Run(name, stages, "adamw", correction) for correction in corrections]
        found += [Run(name, stages, other) for other in RATES if other != "adamw"]
    return found


def optim_of(run: Run, steps: int) -> OptimConfig:
    """Alike with and without a delay; a correction that brings the momentum has an optimizer without."""
    options = {"betas": (0.0, 0.95)} if CORRECTIONS[run.correction].has_momentum else {}
    schedule = ScheduleConfig(shape="linear", warmup_steps=max(1, steps // 25), final=0.0)
    return OptimConfig(run.optimizer, lr=RATES[run.optimizer], schedule=schedule, **options)


def convergence(options: Options, sizes: Sizes) -> list[Row]:
    torch.set_num_threads(1)
    known = {tuple(row.case.items()): row for row in options.earlier}
    due = [(run, seed) for seed in seeds_of(options.quick) for run in runs(options.quick)]
    left = [(run, seed) for run, seed in due if tuple(run.case(seed).items()) not in known]
    print(f"{len(due)} runs of {sizes.steps} updates, {len(due) - len(left)} of them kept", flush=True)
    if not options.quick:
        print(f"the others take about {_expected_s(left, sizes) / 60:.0f} minutes of one core", flush=True)
    rows = []
    for run, seed in due:
        row = known.get(tuple(run.case(seed).items()))
        if row is None:
            row = learned(run, seed, sizes)
            options.kept(row)
        rows.append(row)
    return rows


def learned(run: Run, seed: int, sizes: Sizes) -> Row:
    found = learn(sizes, optim_of(run, sizes.steps), SCHEDULES[run.schedule].delay, run.stages, run.correction, seed)
    return Row(run.case(seed), {
        "held-out": Number(found.nats, "nats/byte"),
        "bits": Number(found.nats / 0.6931471805599453, "bits/byte"),
        "update": Number(1e3 * found.update_s, "ms"),
    })  # fmt: skip


def _expected_s(left: list[tuple[Run, int]], sizes: Sizes) -> float:
    """By some updates of each optimizer; SOAP's tenth, at which it renews its bases, is among them."""
    few = replace(sizes, steps=11, heldout_rows=1)
    each = {name: learned(Run("2bw", 2, name), 0, few).numbers["update"].value / 1e3 for name in RATES}
    return sum(sizes.steps * each[run.optimizer] for run, _ in left)


def gaps(rows: list[Row], quick: bool) -> list[Row]:
    """Of each kind of run the mean gap over the seeds to its optimizer without delay."""
    nats = {tuple(row.case.items()): row.numbers["held-out"].value for row in rows}
    found = []
    for run in runs(quick):
        if run.schedule == SYNCHRONOUS:
            continue
        each = [
            nats[tuple(run.case(seed).items())] - nats[tuple(run.synchronous.case(seed).items())]
            for seed in seeds_of(quick)
        ]
        low, high = paired_interval(each)
        numbers = {"gap": mean(each), "gap from": low, "gap to": high}
        if run.schedule == "2bw" and run.correction == "none" and run.optimizer in PUBLISHED:
            numbers["published"] = PUBLISHED[run.optimizer]
        case = run.case(0) | {"seed": "all", "from": "gaps"}
        found.append(Row(case, {name: Number(value, "nats/byte") for name, value in numbers.items()}))
    return found


# --- on ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """The decoder and the steps that are timed, in rounds in which each schedule has its turn."""

    dim: int = 256
    num_layers: int = 8
    rows: int = 4
    length: int = 128
    microbatches: int = 2
    steps: int = 12
    rounds: int = 5

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=512, dim=self.dim, num_layers=self.num_layers, num_heads=4, ffn_dim=4 * self.dim,
            max_length=self.length, tied_head=False,
        )  # fmt: skip


TIMED: tuple[ScheduleName, ...] = ("gpipe", "1f1b", "zbv", "2bw", "pipedream", "pipedream_sync")

Form = tuple[ScheduleName, tuple[int, ...]]
"""A schedule, and the ranks of each stage where one has several."""
ON_TWO: tuple[Form, ...] = tuple((name, ()) for name in TIMED)
ON_THREE: tuple[Form, ...] = (("1f1b", ()), ("2bw", ()), ("2bw", (2, 1)), ("pipedream", (2, 1)))


def steps_of_rank(forms: tuple[Form, ...], sizes: Steps) -> list[dict[Form, tuple[float, float]]]:
    """Of each round: form -> (seconds of a step, seconds of it in which this rank computes)."""
    states = {form: _state(*form, sizes) for form in forms}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, sizes.model.vocab_size, (sizes.rows, sizes.length), generator=generator)
    found = []
    for index in range(sizes.rounds + 1):  # the first learns shapes
        found.append({form: _turn(*states[form], {"input_ids": ids}, sizes.steps if index else 2) for form in forms})
    return found[1:]


def _state(name: ScheduleName, replicas: tuple[int, ...], sizes: Steps) -> tuple[TrainState, TrainConfig]:
    pp, device = dist.get_world_size(), device_of_rank()
    config = TrainConfig(
        mesh=MeshConfig(pp=pp),
        pipeline=PipelineConfig(name, microbatches=sizes.microbatches, replicas=replicas),
        optim=OptimConfig(lr=1e-4, schedule=ScheduleConfig("constant")),
        device=device.type,
    )
    with torch.device("meta"):
        model = Decoder(sizes.model)
    mesh = build_mesh(config.mesh.resolve(pp), device.type)
    plan = ModelPlan(pipeline=pipeline_plan())
    parallel = parallelize(model, mesh, config, plan, materialise=lambda m: initialise(m, 0))
    optimizer = build_optimizer(config.optim, parallel.masters)
    parallel.prepare(optimizer, None)
    return TrainState(parallel, optimizer, LossScale(config.precision), {}), config


def _turn(state: TrainState, config: TrainConfig, batch: dict[str, Any], steps: int) -> tuple[float, float]:
    def loss(model: torch.nn.Module, part: dict[str, Any]) -> torch.Tensor:
        return model(part["input_ids"], targets=part["input_ids"]) / part["input_ids"].numel()

    pipeline, busy = state.parallel, list[float]()
    assert isinstance(pipeline, Pipeline)
    pipeline.observe = lambda action, begin, end: busy.append(end - begin)
    dist.barrier()
    begin = time.perf_counter()
    depth = 0 if pipeline.ahead is None else pipeline.ahead.depth
    for step in range(steps):
        following = [batch] * min(depth, steps - 1 - step)
        train_step(state, batch, loss, num_rows, config, step, following=following)
    dist.barrier()
    return (time.perf_counter() - begin) / steps, sum(busy) / steps


def times_on_ranks(quick: bool) -> Iterator[Row]:
    """Of two ranks, then of three, each form in its turn in every round."""
    small = Steps(dim=32, num_layers=4, length=32, steps=2, rounds=1) if quick else Steps()
    yield from _timed(2, ON_TWO, small)
    yield from _timed(3, ON_THREE, replace(small, num_layers=3 * small.num_layers // 4, rows=6, microbatches=6))


def _timed(num_ranks: int, forms: tuple[Form, ...], sizes: Steps) -> Iterator[Row]:
    preload = ["core.models", "core.train", "benchmarks.async_pipeline"]
    found: list[list[dict[Form, tuple[float, float]]]] = on_ranks(
        num_ranks, steps_of_rank, forms, sizes, preload=preload
    )
    rounds = [{form: [one[form] for one in each] for form in forms} for each in zip(*found, strict=True)]
    for form in forms:
        name, replicas = form
        step_s = [max(seconds for seconds, _ in each[form]) for each in rounds]
        shares = [sum(busy for _, busy in each[form]) / (num_ranks * s) for each, s in zip(rounds, step_s, strict=True)]
        faster = [max(s for s, _ in each["1f1b", ()]) / s for each, s in zip(rounds, step_s, strict=True)]
        row = _time_row(name, len(replicas) or num_ranks, sizes.microbatches, "ranks", 0.0, {
            "utilisation": Number(median(shares), "of the time"),
            "step": Number(median(step_s), "s"),
            "1f1b / this": Number(median(faster), "x"),
        })  # fmt: skip
        yield replace(row, case=row.case | {"replicas": " ".join(map(str, replicas or (1,) * num_ranks))})


def _time_row(name: str, stages: int, microbatches: int, source: str, link: float, numbers: dict[str, Number]) -> Row:
    case = {"schedule": name, "stages": stages, "microbatches": microbatches, "link": f"{link:g}", "from": source}
    return Row(case, numbers)


# --- on a clock -------------------------------------------------------------------------------------------------------

LINKS = (0.0, 0.1, 0.25, 0.5)
"""Of a microbatch's forward on a stage: how long a message takes."""
CLOCK_STEPS = 100


def clock_s(name: ScheduleName, ranks: int, microbatches: int, link: float) -> tuple[float, float]:
    """(a step in forwards of a rank's blocks, share of it in which ranks compute), of a long run if steps overlap."""
    steps = CLOCK_STEPS if SCHEDULES[name].runs_ahead else 1
    of = schedule(name, ranks, microbatches, steps=steps)
    one = ranks / of.num_stages
    times = simulate(of, lambda action: 2 * one if action.kind is Kind.BACKWARD else one, link)
    return max(end for _, end in times.values()) / steps, 1 - bubble_fraction(of, times)


def on_a_clock(quick: bool) -> Iterator[Row]:
    for microbatches in (4,) if quick else (4, 8, 16):
        for link in LINKS[:2] if quick else LINKS:
            base, _ = clock_s("1f1b", 4, microbatches, link)
            for name in TIMED:
                step, share = clock_s(name, 4, microbatches, link)
                yield _time_row(name, 4, microbatches, "clock", link, {
                    "utilisation": Number(share, "of the time"),
                    "clock step": Number(step, "forwards"),
                    "1f1b / this": Number(base / step, "x"),
                })  # fmt: skip


# --- the result -------------------------------------------------------------------------------------------------------


def measure(options: Options) -> Measured:
    quick = options.quick
    tiny = Sizes(dim=16, num_layers=2, ffn_dim=16, rows=2, length=16, steps=3, heldout_rows=4, train_bytes=1 << 14)
    rows = convergence(options, tiny if quick else Sizes())
    rows += gaps(rows, quick)
    kept = [row for row in options.earlier if row.case["from"] == "ranks"]
    times = kept or list(times_on_ranks(quick))
    for row in times if not kept else ():
        options.kept(row)
    times += on_a_clock(quick)
    return Measured((*rows, *times), tuple(targets([*rows, *times])), notes())


def targets(rows: list[Row]) -> Iterator[Target]:
    def gap(optimizer: str, correction: str = "none") -> float:
        return next(
            row.numbers["gap"].value
            for row in rows
            if row.case["from"] == "gaps"
            and (row.case["schedule"], row.case["optimizer"], row.case["correction"]) == ("2bw", optimizer, correction)
        )

    most = max(gap(name) for name in RATES)
    yield Target("2bw: gap of AdamW / the largest of the optimizers", 1.0, gap("adamw") / most if most > 0 else 0.0)
    for source, ranks, microbatches, wanted in (("ranks", 2, 2, 1.3), ("clock", 4, 4, 1.6)):
        for row in rows:
            case = row.case
            of = (case.get(key) for key in ("from", "schedule", "stages", "microbatches"))
            if tuple(of) == (source, "2bw", ranks, microbatches):
                what = f"2bw, {ranks} stages, {microbatches} microbatches, {source}, link {case['link']}: 1f1b / 2bw"
                yield Target(what, wanted, row.numbers["1f1b / this"].value)


def notes() -> tuple[str, ...]:
    return (
        "gap: held-out nats of a byte beyond those of the same optimizer, seed and batches without a delay; from, to: "
        "the 95 % interval of its mean over the seeds (Student's t of paired differences).",
        "Rates are the same with and without a delay; nesterov has AdamW without its own momentum, and "
        "its gap is to AdamW with it. lr_by_delay gives the rate back over a quarter of the run.",
        "Gradients of all stages are clipped by one norm; under pipedream a real pipeline does not have it in time.",
        "published: of models of 360M, Zmushko et al. 2026 (arXiv:2606.30634); AdamW's is said to be above it.",
        "ranks: a whole training step, clipping and update among it, of a run that is drained once in its "
        f"{Steps().steps} steps; 1f1b / this: the median over rounds in which each had its turn. replicas: the ranks "
        "of each stage; where ranks share cores, others compute while one waits, and less is left to win.",
        f"clock: stages of equal cost, B = 2 F; schedules that run ahead for {CLOCK_STEPS} steps. link: how long a "
        "message takes, in forwards of a microbatch on a stage.",
    )


def plot(result: Result, folder: Path) -> Path:
    """Gaps with their intervals; and steps on the clock."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 6), layout="constrained", width_ratios=(2, 1))
    _draw_gaps(left, [row for row in result.figures if row.case["from"] == "gaps"])
    _draw_clock(right, [row for row in result.figures if row.case["from"] == "clock"])
    png = folder / "async_pipeline.png"
    save_figure(figure, png, 120)
    plt.close(figure)
    return png


def _draw_gaps(axes: Any, rows: list[Row]) -> None:
    kinds = list(dict.fromkeys((row.case["schedule"], row.case["stages"]) for row in rows))
    for index, (name, stages) in enumerate(kinds):
        own = [row for row in rows if (row.case["schedule"], row.case["stages"]) == (name, stages)]
        places = [place + 0.2 * index for place in range(len(own))]
        values = [row.numbers["gap"].value for row in own]
        errors = [[v - row.numbers["gap from"].value for v, row in zip(values, own, strict=True)]] * 2
        label = name if name == "2bw" else f"{name}, {stages} stages"
        axes.errorbar(values, places, xerr=errors, fmt="o", capsize=2, label=label)
    longest = max((_of_kind(rows, kind) for kind in kinds), key=len)
    words = [f"{r.case['optimizer']} {r.case['correction']}".removesuffix(" none") for r in longest]
    axes.set_yticks(range(len(words)), words, fontsize=8)
    axes.axvline(0, color="black", linewidth=0.5)
    axes.set_title("held-out nats of a byte beyond those without a delay", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


def _of_kind(rows: list[Row], kind: tuple[Any, Any]) -> list[Row]:
    return [row for row in rows if (row.case["schedule"], row.case["stages"]) == kind]


def _draw_clock(axes: Any, rows: list[Row]) -> None:
    for name in TIMED:
        own = [row for row in rows if row.case["schedule"] == name and row.case["microbatches"] == 4]
        axes.plot(
            [float(row.case["link"]) for row in own], [row.numbers["clock step"].value for row in own], label=name
        )
    axes.set_xlabel("a message, in forwards of a microbatch on a stage")
    axes.set_ylim(bottom=0)
    axes.set_title("a step of 4 microbatches on 4 stages, in such forwards", loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=8)


MEASURES = (
    "core/parallel",
    "core/optim",
    "core/models",
    "core/train",
    "apps/llm/corpus.py",
    "benchmarks/ranks.py",
    "benchmarks/recurrence.py",
    "benchmarks/async_pipeline.py",
)
BENCHMARK = Benchmark("async_pipeline", "Asynchronous pipelines: loss and time", measure, MEASURES, plot, resumes=True)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="async_pipeline"), sys.argv[1:]))
