"""What pipeline schedules cost in idle time and activations, from counts and from real ranks, beside what is published.

1. Counted, without a process: the bubble of each schedule on a clock on which forward, gradient of the input and
   gradients of the weights take alike long, and the most microbatches that a rank keeps, in microbatches of all its
   blocks. Both have closed forms, and equal them.
2. On ranks that share this machine, a decoder with an untied head: bytes of activations that the executor keeps, after
   every action, beside what the actions say (microbatches in flight x what one leaves on that stage, between I and W
   also the gradients that W needs); and the idle time of a step, beside that of its schedule with the durations just
   measured, where messages take no time.

Bytes are counted, so other load changes nothing in them; the idle time is of this machine and its load. The ranks
compute with one thread each: more ranks than cores take turns, and idle time is then not the schedule's.
"""

import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
import torch.distributed as dist

from benchmarks.ranks import device_of_rank, on_ranks
from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.compose import ParallelConfig, parallelize
from core.config import run_command
from core.estimate import RunShape, Timeline, draw_timelines, timeline_of
from core.files import save_figure
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan
from core.parallel.pipeline.run import Pipeline
from core.parallel.pipeline.schedule import (
    SCHEDULES,
    Action,
    Kind,
    PipelineConfig,
    ScheduleName,
    Times,
    bubble_fraction,
    in_flight_in_theory,
    most_in_flight,
    schedule,
    simulate,
)
from core.placement.table import ModelPlan
from core.trace.account import MemoryAccount

NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)


@dataclass(frozen=True)
class Sizes:
    """The decoder and the microbatches of the measured steps."""

    dim: int = 256
    num_layers: int = 8
    rows: int = 2
    length: int = 128
    num_microbatches: int = 8
    steps: int = 3

    @property
    def model(self) -> DecoderConfig:
        return DecoderConfig(
            vocab_size=512, dim=self.dim, num_layers=self.num_layers, num_heads=4, ffn_dim=4 * self.dim,
            max_length=self.length, tied_head=False,
        )  # fmt: skip


def measure(options: Options) -> Measured:
    sizes = Sizes(dim=32, length=32, num_microbatches=4, steps=1) if options.quick else Sizes()
    figures = [counted(*case) for case in cases(options.quick)]
    names = ("1f1b", "zbv") if options.quick else tuple(n for n in NAMES if not SCHEDULES[n].runs_ahead)
    ranks = (2,) if options.quick else (2, 4)
    figures += [measured(name, n, sizes) for n in ranks for name in names]
    return Measured(tuple(figures), tuple(targets(figures)), notes())


# --- counted ----------------------------------------------------------------------------------------------------------


def cases(quick: bool) -> list[tuple[ScheduleName, int, int]]:
    """(schedule, ranks, microbatches): two and four, and eight, a rank."""
    ranks = (2, 4) if quick else (2, 4, 8, 16, 32)
    names = (name for name in NAMES if not SCHEDULES[name].runs_ahead)  # those: benchmarks/async_pipeline.py
    return [(name, n, each * n) for name in names for n in ranks for each in ((2,) if quick else (2, 4, 8))]


def unit_timeline(name: ScheduleName, num_ranks: int, num_microbatches: int) -> Timeline:
    """In forwards of all blocks of a rank."""
    of = schedule(name, num_ranks, num_microbatches)
    run = RunShape(pp=num_ranks, pipeline=PipelineConfig(name), num_microbatches=num_microbatches)
    one = num_ranks / of.num_stages
    return timeline_of(run, of, simulate(of, lambda action: 2 * one if action.kind is Kind.BACKWARD else one))


def counted(name: ScheduleName, num_ranks: int, num_microbatches: int) -> Row:
    timeline = unit_timeline(name, num_ranks, num_microbatches)
    each = timeline.schedule.num_stages // num_ranks
    kept = max(most_in_flight(actions) for actions in timeline.schedule.ranks)
    published = max(in_flight_in_theory(name, num_ranks, num_microbatches, rank) for rank in range(num_ranks))
    case = {"schedule": name, "ranks": num_ranks, "microbatches": num_microbatches, "from": "counts"}
    return Row(case, {
        "bubble": Number(timeline.bubble, "of the step"),
        "in theory": Number(timeline.theory, "of the step"),
        "kept": Number(kept / each, "microbatches"),
        "kept in theory": Number(published / each, "microbatches"),
    })  # fmt: skip


# --- on ranks ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Found:
    """Of one rank: when its actions were, in the step that idled least; bytes kept at most, and as its actions say."""

    times: Times
    kept_bytes: int
    expected_bytes: int


def step_of_rank(name: ScheduleName, sizes: Sizes) -> Found:
    device = device_of_rank()
    mesh = build_mesh(MeshConfig(pp=dist.get_world_size()).resolve(dist.get_world_size()), device.type)
    with torch.device("meta"):
        model = Decoder(sizes.model)
    config = ParallelConfig(pipeline=PipelineConfig(name))
    parallel = parallelize(
        model, mesh, config, ModelPlan(pipeline=pipeline_plan()), materialise=lambda m: initialise(m, 0)
    )  # fmt: skip
    assert isinstance(parallel, Pipeline)
    generator = torch.Generator().manual_seed(0)
    batches = [
        torch.randint(0, sizes.model.vocab_size, (sizes.rows, sizes.length), generator=generator).to(device)
        for _ in range(sizes.num_microbatches)
    ]

    def run() -> None:
        parallel.run(batches, lambda ids: parallel.model(ids, targets=ids))

    kept, expected = _kept(parallel, run, sizes.num_microbatches)
    steps: list[Times] = []
    for _ in range(sizes.steps):
        steps.append({})
        parallel.observe = lambda action, begin, end: steps[-1].update({action: (begin, end)})
        dist.barrier()
        run()
    return Found(_least_idle(steps), kept, expected)


def _kept(parallel: Pipeline, run: Any, num_microbatches: int) -> tuple[int, int]:
    """Most bytes beyond those before the step, after an action; and what the actions of this rank say."""
    of = parallel.schedule(num_microbatches)
    after: dict[Action, int] = {}
    with MemoryAccount(parallel.mesh.device_type) as account:
        run()  # gradients have their memory from now on
        before = account.current_bytes
        parallel.observe = lambda action, *_: after.update({action: account.current_bytes})
        run()
    return max(after.values()) - before, _said(of.ranks[parallel.rank], after, before)


def _said(actions: tuple[Action, ...], after: dict[Action, int], before: int) -> int:
    """The most bytes kept, were every microbatch's forward, and gradient of the input, to leave what the first left."""
    left: dict[tuple[Kind, int], int] = {}
    now = most = 0
    for action in actions:
        left.setdefault((action.kind, action.stage), after[action] - before)
        before = after[action]
        if action.releases:
            now -= left[Kind.FORWARD, action.stage] + left.get((Kind.INPUT, action.stage), 0)
        else:
            now += left[action.kind, action.stage]
        most = max(most, now)
    return most


def _least_idle(steps: list[Times]) -> Times:
    """The step in which all ranks together idled least: the same one on every rank."""
    merged: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(merged, steps)
    spans = []
    for index in range(len(steps)):
        times = [interval for one in merged for interval in one[index].values()]
        busy = sum(end - begin for begin, end in times)
        spans.append(busy / (max(end for _, end in times) - min(begin for begin, _ in times)))
    return steps[spans.index(max(spans))]


def measured(name: ScheduleName, num_ranks: int, sizes: Sizes) -> Row:
    found: list[Found] = on_ranks(num_ranks, step_of_rank, name, sizes, preload=["core.models", "core.estimate"])
    times = {action: interval for one in found for action, interval in one.times.items()}
    of = schedule(name, num_ranks, sizes.num_microbatches)
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for action, (begin, end) in times.items():
        durations[action.kind, action.stage].append(end - begin)
    alike = simulate(of, lambda action: median(durations[action.kind, action.stage]))
    run = RunShape(pp=num_ranks, pipeline=PipelineConfig(name), num_microbatches=sizes.num_microbatches)
    timeline = timeline_of(run, of, times)
    fullest = max(found, key=lambda one: one.kept_bytes)
    case = {"schedule": name, "ranks": num_ranks, "microbatches": sizes.num_microbatches, "from": "ranks"}
    return Row(case, {
        "bubble": Number(timeline.bubble, "of the step"),
        "in theory": Number(timeline.theory, "of the step"),
        "of these durations": Number(bubble_fraction(of, alike), "of the step"),
        "activations": Number(fullest.kept_bytes, "bytes"),
        "as its actions say": Number(fullest.expected_bytes, "bytes"),
    })  # fmt: skip


# --- the result -------------------------------------------------------------------------------------------------------


def notes() -> tuple[str, ...]:
    return (
        "bubble: the share of all ranks' time, from the first action's beginning to the last one's end, in which they "
        "compute nothing.",
        "in theory: published, of stages of equal cost, with F, I and W of equal cost (B = I + W) and messages that "
        "take no time; of these durations: on a clock, with the medians of the step measured.",
        "More ranks than cores take turns: while one waits another has its core, and what idles is not the schedule's.",
        "kept: at most, by the rank that keeps most, in microbatches of all blocks of a rank. zb-h1 and zbv let go of "
        "activations only when the gradients of the weights are there.",
        "activations: bytes after an action beyond those before the step, on the rank that keeps most; they count what "
        "is on its way, too.",
    )


def targets(rows: list[Row]) -> list[Target]:
    of_counts = [row.numbers for row in rows if row.case["from"] == "counts"]
    bubble = max(abs(n["bubble"].value - n["in theory"].value) for n in of_counts)
    kept = max(abs(n["kept"].value - n["kept in theory"].value) for n in of_counts)
    found = [
        Target(f"counted bubble as published, {len(of_counts)} cases: 1 - largest difference", 1 - 1e-9, 1 - bubble),
        Target("counted microbatches kept as published: 1 - largest difference", 1 - 1e-9, 1 - kept),
    ]  # fmt: skip
    for row in rows:
        if "activations" in row.numbers:
            kept_bytes, expected = (row.numbers[n].value for n in ("activations", "as its actions say"))
            case = f"{row.case['schedule']}, {row.case['ranks']} ranks"
            found.append(Target(f"{case}: activations, said / kept", 0.9, expected / kept_bytes))
    return found


def plot(result: Result, folder: Path) -> Path:
    """pipeline-figures.png; and pipeline.png: the schedules on a clock, as `llm plan --timeline` draws them."""
    timelines = {name: unit_timeline(name, 4, 8) for name in NAMES}
    draw_timelines(folder / "pipeline.png", timelines, "forwards of all blocks of a rank")
    return draw_figures(result, folder / "pipeline-figures.png")


def draw_figures(result: Result, png: Path) -> Path:
    """Counted bubbles and microbatches over their closed forms, then what ranks did beside what their actions say."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    counts = [row for row in result.figures if row.case["from"] == "counts"]
    ranks = [row for row in result.figures if row.case["from"] == "ranks"]
    figure, panels = plt.subplots(2, 2, figsize=(11, 8), layout="constrained")
    titles = ("bubble, counted (lines: in theory)", "most microbatches kept, counted (lines: in theory)")
    for axes, what, title in zip(panels[0], ("bubble", "kept"), titles, strict=True):
        _over_microbatches(axes, counts, what, "in theory" if what == "bubble" else "kept in theory")
        axes.set_title(title, loc="left", fontsize=9)
    _bars(
        panels[1, 0], ranks, {"bubble": "measured", "of these durations": "these durations", "in theory": "in theory"}
    )
    panels[1, 0].set_title("bubble of a step on ranks of this machine", loc="left", fontsize=9)
    _bars(panels[1, 1], ranks, {"activations": "kept", "as its actions say": "as its actions say"}, scale=1e-6)
    panels[1, 1].set_title("most activations of a rank, MB", loc="left", fontsize=9)
    save_figure(figure, png, 120)
    plt.close(figure)
    return png


def _over_microbatches(axes: Any, rows: list[Row], what: str, theory: str) -> None:
    """On 4 ranks, by microbatches: points counted, lines published."""
    for name in NAMES:
        own = sorted(
            (row.case["microbatches"], row.numbers[what].value, row.numbers[theory].value)
            for row in rows
            if row.case["schedule"] == name and row.case["ranks"] == 4
        )
        (line,) = axes.plot([m for m, _, _ in own], [published for *_, published in own], label=name)
        axes.plot([m for m, _, _ in own], [count for _, count, _ in own], "o", color=line.get_color())
    axes.set_xlabel("microbatches, on 4 ranks")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8)


def _bars(axes: Any, rows: list[Row], numbers: dict[str, str], scale: float = 1.0) -> None:
    """A group a case, a bar a number."""
    width = 0.8 / len(numbers)
    for index, (number, label) in enumerate(numbers.items()):
        places = [place + (index - (len(numbers) - 1) / 2) * width for place in range(len(rows))]
        axes.bar(places, [scale * row.numbers[number].value for row in rows], width, label=label)
    labels = [f"{row.case['schedule']}\n{row.case['ranks']} ranks" for row in rows]
    axes.set_xticks(range(len(rows)), labels, fontsize=7)
    axes.legend(frameon=False, fontsize=8)


MEASURES = (
    "core/parallel",
    "core/placement",
    "core/estimate",
    "core/models",
    "benchmarks/ranks.py",
    "benchmarks/pipeline.py",
)
BENCHMARK = Benchmark("pipeline", "Pipeline schedules: bubble and activations", measure, MEASURES, plot)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="pipeline"), sys.argv[1:]))
