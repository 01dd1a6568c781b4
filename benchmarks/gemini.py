"""How large a model trains in a device's budget under Gemini, and what that costs.

measured   On a CPU, in fp32: the largest GPT-2-shaped and the largest OPT model that train in 0.25, 0.5 and 1 GiB of
           the byte-accounted tier, of all widths and depths of a grid that the host holds. Beside it plain PyTorch:
           the largest of which all tensors, counted one by one in a real step, take no more.
planned    Budgets of 8, 10 and 24 GiB, in bf16: a step is traced on fake tensors and planned as it would run.
step time  One model without Gemini, with everything resident, and in a half and a quarter of that memory; the four
           take their steps in turn, and the figure is the median.

Where a peer cannot run, the least that it needs stands for it, in closed form:

    plain PyTorch               16 bytes a parameter (fp32 weights, gradients, AdamW), or 12 beside what the trace of a
                                step has that is no parameter
    FSDP2 + CPUOffloadPolicy    what is outside the blocks and two blocks (one is fetched ahead) beside the activations
                                that the forward leaves, or beside the gradients of the larger unit; or what is outside
                                the blocks beside what the trace has that is no parameter
    DeepSpeed ZeRO-Offload      all parameters (stage 2: only gradients and optimizer are offloaded) beside what the
                                trace has that is none

whatever is most. Their buckets, staging and fp32 copies are left out, so they are taken to be better than they are.
Gemini's own need is that of its planner.

On a GPU all four really train in budgets of 8, 10 and 24 GiB, each in a process with that memory fraction, and then the
largest model that all can train is timed. Activations are recomputed by block everywhere. Host memory is nobody's limit
but that of this machine.
"""

import gc
import importlib.util
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from benchmarks.gemini_needs import (
    A100_LINK,
    DEPTHS,
    NEEDS,
    RELEASED,
    WIDTHS,
    foreseen,
    grid,
    host_holds,
    largest,
    needs_at_most,
    needs_gemini,
)
from benchmarks.offload import CONTENDERS, Ran, Shape, Training, Turn, attempt, shaped
from benchmarks.result import Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import run_command
from core.files import save_figure
from core.gemini.search import choose_chunk_size
from core.runtime import start
from core.trace.account import MemoryAccount

GIB = 2**30
OURS = "Gemini"
FAMILIES = ("GPT-2", "OPT")

PUBLISHED = (
    "Published, not measured here: Colossal-AI trained GPT-2 24 times larger and 3 times faster on the same hardware "
    "(120 times with NVMe); OPT-13B on one A100-80, 24 samples: 41.5 s against DeepSpeed ZeRO-3's 51.7 s; batch 32 ran "
    "out of memory until two ratios were tuned by hand."
)


# --- planned ----------------------------------------------------------------------------------------------------------


def planned(ladders: dict[str, list[Shape]], budgets: dict[str, int], rows: int, length: int) -> list[Row]:
    """Rows of budgets that nobody has here, in bf16."""
    figures = []
    for label, budget in budgets.items():
        for family, shapes in ladders.items():
            for contender, needs in NEEDS.items():
                how = "planned" if contender == OURS else "closed form"
                shape = largest(shapes, partial(needs_at_most, budget, contender, rows, length, "bf16"))
                found = foreseen(shape, rows, length, "bf16") if shape is not None else None
                numbers = {"device": Number(needs(found) / GIB, "GiB")} if found is not None else {}
                if found is not None and contender == OURS:
                    plan = choose_chunk_size(found.parameters, found.step, budget, A100_LINK).plan
                    numbers = {
                        "device": Number(plan.device_peak_bytes / GIB, "GiB"),
                        "host": Number(plan.host_bytes / GIB, "GiB"),
                        "moved": Number(plan.moved_bytes / GIB, "GiB"),
                        "step": Number(plan.step_s, "s"),
                    }
                figures.append(_largest_row(family, label, contender, how, shape, numbers))
    return figures


def _largest_row(
    family: str, budget: str, contender: str, how: str, shape: Shape | None, numbers: dict[str, Number]
) -> Row:
    case: dict[str, str | int] = {"what": f"largest {family}", "how": how, "budget": budget, "contender": contender}
    parameters = Number(shape.num_parameters() / 1e6 if shape is not None else 0.0, "10^6")
    return Row(case | {"model": shape.name if shape is not None else "none"}, {"parameters": parameters} | numbers)


def size_targets(figures: Sequence[Row]) -> list[Target]:
    """At least as large a model as the best of the others, in each budget."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in figures:
        if "parameters" not in row.numbers:
            continue
        sizes = found.setdefault((str(row.case["what"]), str(row.case["budget"])), {})
        sizes[str(row.case["contender"])] = row.numbers["parameters"].value
    return [
        Target(f"{what} in {budget}: Gemini's / the best other's parameters", 1.0, sizes[OURS] / best)
        for (what, budget), sizes in found.items()
        if (best := max(size for contender, size in sizes.items() if contender != OURS))
    ]


# --- measured on a CPU ------------------------------------------------------------------------------------------------


def measured(
    ladders: dict[str, list[Shape]], budgets: dict[str, int], rows: int, length: int, num_steps: int
) -> list[Row]:
    """What really trains in budgets of the accounted tier, in fp32."""
    figures = []
    for label, budget in budgets.items():
        for family, shapes in ladders.items():
            for contender in NEEDS:
                run = {OURS: alone, "plain PyTorch": counted}.get(contender)
                ran: dict[Shape, Ran] = {}

                def trains(shape: Shape, b=budget, c=contender, run=run, ran=ran) -> bool:
                    if not needs_at_most(b, c, rows, length, "fp32", shape):
                        return False
                    if run is not None:
                        found = _tried(run, Turn(c, shape, rows, length, num_steps, b))
                        if found is None:
                            return False
                        ran[shape] = found
                    return True

                shape = largest(shapes, trains)
                numbers = _numbers(ran[shape]) if shape in ran else {}
                how = "closed form" if run is None else "measured"
                figures.append(_largest_row(family, label, contender, how, shape, numbers))
    return figures


def _tried(run: Callable[[Turn], Ran | None], turn: Turn) -> Ran | None:
    """None where the budget is too small."""
    found = run(turn)
    gc.collect()
    is_within = found is not None and (turn.budget_bytes is None or found.peak_bytes <= turn.budget_bytes)
    return found if is_within else None


def alone(turn: Turn) -> Ran | None:
    """In a process of its own: a large model's memory does not all go back to the system, and the host holds one."""
    return attempt(turn, Path(sys.executable))


def counted(turn: Turn) -> Ran:
    """Plain PyTorch, every tensor counted: slower, so its seconds are none."""
    training = CONTENDERS[turn.contender](turn)
    with MemoryAccount() as account:
        for _ in range(2):
            training.timed()
    return Ran([], account.peak_bytes)


def step_time(shape: Shape, rows: int, length: int, num_rounds: int) -> tuple[list[Row], list[Target]]:
    """Steps of the four in turn, so that what the machine does meanwhile falls on all; each one's first is left out."""
    found = foreseen(shape, rows, length, "fp32")
    everything = sum(p.buffer_bytes + p.master_bytes + p.optim_bytes for p in found.parameters)
    everything += found.other_bytes
    trainings = {"none": _training(Turn("plain PyTorch", shape, rows, length, 1, None))}
    for share in (1, 2, 4):
        budget = max(everything // share, needs_gemini(found))
        label = f"{100 * budget / everything:.0f} %" if share > 1 else "everything fits"
        trainings[label] = _training(Turn(OURS, shape, rows, length, 1, budget))
    assert trainings["everything fits"].plan.moved_bytes == 0
    seconds: dict[str, list[float]] = {label: [] for label in trainings}
    moved: dict[str, int] = {}
    for index in range(num_rounds + 1):
        for label, training in trainings.items():
            before = training.moved_bytes
            taken = training.timed()
            moved[label] = training.moved_bytes - before
            if index:
                seconds[label].append(taken)
    figures = [_step_row(label, trainings[label], seconds[label], moved[label]) for label in trainings]
    plain, ours = (statistics.median(seconds[label]) for label in ("none", "everything fits"))
    return figures, [Target("step time without Gemini / with it where everything fits", 0.95, plain / ours)]


def _training(turn: Turn) -> Training:
    return CONTENDERS[turn.contender](turn)


def _step_row(label: str, training: Training, seconds: list[float], moved_bytes: int) -> Row:
    turn, gemini = training.turn, training.gemini
    case: dict[str, str | int] = {"what": "step time", "how": "measured", "budget": label}
    case |= {"contender": turn.contender, "model": turn.shape.name}
    return Row(case, _numbers(Ran(seconds, gemini.device_peak_bytes if gemini is not None else 0, moved_bytes)))


def _numbers(found: Ran) -> dict[str, Number]:
    numbers = {}
    if found.seconds:
        numbers |= {"step": Number(statistics.median(found.seconds), "s"), "best": Number(min(found.seconds), "s")}
        numbers["moved"] = Number(found.moved_bytes / GIB, "GiB")
    if found.peak_bytes:
        numbers["device"] = Number(found.peak_bytes / GIB, "GiB")
    return numbers


# --- measured on a GPU ------------------------------------------------------------------------------------------------


def on_gpu(
    ladders: dict[str, list[Shape]],
    budgets: dict[str, int],
    rows: int,
    length: int,
    run: Callable[[Turn], Ran | None],
    contenders: Sequence[str] = tuple(CONTENDERS),
) -> tuple[list[Row], list[Target]]:
    """All contenders in each budget: the largest model of each, and the seconds of the largest that all train."""
    figures: list[Row] = []
    targets: list[Target] = []
    for label, budget in budgets.items():
        for family, shapes in ladders.items():
            base = Turn(OURS, shapes[0], rows, length, 3, budget, "cuda", "bf16")
            reached = {}
            for contender in contenders:
                turn = replace(base, contender=contender)
                found, ran = climb(shapes, lambda shape, t=turn: run(replace(t, shape=shape)))
                reached[contender] = found
                numbers = _numbers(ran) if ran is not None else {}
                figures.append(_largest_row(family, label, contender, "measured", found, numbers))
            common = [shape for shape in reached.values() if shape is not None]
            if len(common) == len(contenders):
                rows_, targets_ = _at_equal_model(replace(base, shape=min(common, key=shapes.index)), contenders, run)
                figures += [replace(row, case=row.case | {"budget": label}) for row in rows_]
                targets += [replace(target, what=f"{target.what}, {family} in {label}") for target in targets_]
    return figures, targets


def climb(shapes: Sequence[Shape], run: Callable[[Shape], Ran | None]) -> tuple[Shape, Ran] | tuple[None, None]:
    """The last shape of an ascending ladder that trains, and its run; by halves, since a larger one needs more."""
    low, high, best = 0, len(shapes), None
    while low < high:
        middle = (low + high) // 2
        found = run(shapes[middle])
        if found is None:
            high = middle
        else:
            low, best = middle + 1, (shapes[middle], found)
    return best or (None, None)


def _at_equal_model(
    turn: Turn, contenders: Sequence[str], run: Callable[[Turn], Ran | None]
) -> tuple[list[Row], list[Target]]:
    """Two rounds, in turns."""
    seconds: dict[str, list[float]] = {contender: [] for contender in contenders}
    for _ in range(2):
        for contender in contenders:
            found = run(replace(turn, contender=contender))
            seconds[contender] += found.seconds if found is not None else []
    case = {"what": "step time", "how": "measured", "model": turn.shape.name}
    medians = {contender: statistics.median(taken) for contender, taken in seconds.items() if taken}
    figures = [Row(case | {"contender": name}, {"step": Number(s, "s")}) for name, s in medians.items()]
    others = {name: s for name, s in medians.items() if name not in (OURS, "plain PyTorch")}
    targets = [Target(f"{name}'s / Gemini's step time", 1.3, s / medians[OURS]) for name, s in others.items()]
    return figures, targets


# --- the benchmark ----------------------------------------------------------------------------------------------------


def measure(options: Options) -> Measured:
    with start("cpu"):
        return _measure(options)


def _measure(options: Options) -> Measured:
    there: tuple[list[Row], list[Target]] | None = None
    large = {family: [shaped(family, *form) for form in RELEASED] for family in FAMILIES}
    budgets = {f"{n} GiB": n * GIB for n in (8, 10, 24)}
    if not options.quick and torch.cuda.is_available():
        there = _gpu_part(large, budgets, options)  # first: a lent GPU is gone before the long part of the CPU is over
    if options.quick:
        tiny = {"GPT-2": [replace(s, vocab_size=64) for s in grid("GPT-2", (64,), (2, 4), 10**9)]}
        figures = measured(tiny, {"1 MiB": 2**20, "4 MiB": 2**22}, 1, 32, 1)
        figures += planned(tiny, {"2 MiB": 2**21}, 1, 32)
        steps, targets = step_time(tiny["GPT-2"][1], 1, 32, 2)
    else:
        most = host_holds()
        small = {family: grid(family, WIDTHS, DEPTHS, most) for family in FAMILIES}
        figures = measured(small, {"0.25 GiB": GIB // 4, "0.5 GiB": GIB // 2, "1 GiB": GIB}, 1, 128, 1)
        figures += planned(large, budgets, 4, 1024)
        steps, targets = step_time(shaped("GPT-2", 24, 512), 1, 256, 15 if options.full else 7)
    notes = [
        "measured, fp32: budget of the byte-accounted tier, of which `device` is the high-water mark; of plain PyTorch "
        "it is the most bytes of tensors that were counted at once.",
        "planned, bf16 with fp32 masters: a step of 4 x 1024 tokens traced on fake tensors and planned with an A100's "
        "figures; nothing ran. closed form: the least that a peer needs, see the script; it did not run either.",
        PUBLISHED,
    ]
    if there is not None:
        figures, targets = [*figures, *there[0]], [*targets, *there[1]]
    else:
        notes.append("No GPU: peers, and budgets as a GPU's memory fraction, were not measured.")
    return Measured((*figures, *steps), (*size_targets(figures), *targets), tuple(notes))


def _gpu_part(
    large: dict[str, list[Shape]], budgets: dict[str, int], options: Options
) -> tuple[list[Row], list[Target]]:
    """In the budgets that the GPU has, with shapes that the host holds."""
    memory = torch.cuda.get_device_properties(0).total_memory
    most = host_holds()
    held = {family: [s for s in shapes if s.num_parameters() <= most] for family, shapes in large.items()}
    given = {f"{label} of the GPU": budget for label, budget in budgets.items() if budget <= memory}

    def run(turn: Turn) -> Ran | None:
        is_deepspeed = turn.contender.startswith("DeepSpeed")
        return attempt(turn, options.peers_python if is_deepspeed and options.peers_python else Path(sys.executable))

    has_deepspeed = options.peers_python is not None or importlib.util.find_spec("deepspeed") is not None
    contenders = [c for c in CONTENDERS if has_deepspeed or not c.startswith("DeepSpeed")]
    return on_gpu(held, given, 4, 1024, run, contenders)


def plot(result: Result, folder: Path) -> Path:
    """Bars: the largest model of each contender in each budget, and seconds of a step."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    sizes = [row for row in result.figures if "parameters" in row.numbers]
    steps = [row for row in result.figures if row.case["what"] == "step time"]
    groups = list(dict.fromkeys((row.case["what"], row.case["budget"]) for row in sizes))
    contenders = list(dict.fromkeys(row.case["contender"] for row in sizes))
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), width_ratios=(3, 1))
    for place, contender in enumerate(contenders):
        of = {(r.case["what"], r.case["budget"]): r for r in sizes if r.case["contender"] == contender}
        bars = left.bar(
            [i + (place - (len(contenders) - 1) / 2) / (len(contenders) + 1) for i in range(len(groups))],
            [of[group].numbers["parameters"].value for group in groups],
            width=1 / (len(contenders) + 1),
            label=contender,
        )
        for bar, group in zip(bars, groups, strict=True):
            if of[group].case["how"] != "measured":
                bar.set_alpha(0.5)
    left.set_yscale("log")
    left.set_ylabel("parameters, 10^6")
    left.set_xticks(range(len(groups)), [f"{str(w).removeprefix('largest ')}\n{b}" for w, b in groups], fontsize=7)
    left.set_title("largest model that trains (pale: planned, or closed form of the least)", fontsize=9)
    left.legend(fontsize=7)
    right.bar(range(len(steps)), [row.numbers["step"].value for row in steps], color="#3b6ea5")
    right.set_xticks(
        range(len(steps)), [f"{r.case['contender']}\n{r.case.get('budget', '')}" for r in steps], fontsize=6
    )
    right.set_ylabel("s a step")
    right.set_title(str(steps[0].case["model"]), fontsize=9)
    figure.tight_layout()
    path = folder / f"{result.name}.png"
    save_figure(figure, path, 120)
    plt.close(figure)
    return path


MEASURES = (
    "core/gemini",
    "core/trace",
    "core/optim",
    "core/models",
    "core/train",
    "benchmarks/gemini_needs.py",
    "benchmarks/offload.py",
    "benchmarks/gemini.py",
)
BENCHMARK = Benchmark("gemini", "Models larger than the device", measure, MEASURES, plot)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="gemini"), sys.argv[1:]))
