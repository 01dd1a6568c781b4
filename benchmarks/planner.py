"""The planner beside published tables: GPT-3 on 128, 96 and 64 A100s, OPT under Gemini, the largest GPT-2 on a device.

fitted     the share of the peak that products reach: one constant, such that the second row of the GPT-3 table takes as
           long as was printed. Everything else below follows from it
gpt3       the four rows. Nobody published their plans: of each the planner takes the one that is nearest in memory to
           what was printed, of tensor parallelism over 8 ranks and stages over the others, with full checkpointing; of
           the row under Gemini the fastest in its memory without tensor parallelism. The case says which
ports      rows 3 and 4 on machines with fewer network cards than a DGX A100 has: what remains unexplained
better     the fastest plan that `llm plan` finds on as many GPUs
opt        seconds of OPT-13B and OPT-30B under Gemini's plan, of two lengths, since none was printed
gpt2       the deepest model 1,600 wide in a budget: all on the device, and with model data on the host
here       predicted beside measured, of decoders that train on this machine (`benchmarks.planner_here`)

The unit of the GPT-3 table's throughput is samples a second at a global batch of 192; `check_arithmetic` holds it.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from benchmarks import planner_here
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.auto.machines import GIB, Cluster, Gpu, cluster_of, gpu_named
from core.auto.step_time import StepClock, step_time
from core.auto.strategies import Job, options_of, search
from core.config import UserError, run_command
from core.estimate.memory import estimate_memory
from core.estimate.shape import ModelShape, RunShape, decoder_shape
from core.models.shapes import SHAPES
from core.parallel.pipeline.schedule import PipelineConfig

GB = 10**9
BATCH, LENGTH = 192, 2048
WITHIN, MEMORY_WITHIN = 0.15, 0.05
"""Of the printed seconds, and of the counted bytes, how far a prediction may be off."""
ROUNDS, STEPS = 5, 3
"""Of the configurations that run here, and of each in a round."""


@dataclass(frozen=True)
class Published:
    """A row as it was printed."""

    system: str
    gpus: int
    seconds: float
    memory_gb: float
    throughput: float
    gemini: bool = False


GPT3 = (
    Published("Megatron-LM", 128, 43.1, 36, 4.45),
    Published("Colossal-AI", 128, 38.5, 36, 4.99),
    Published("Colossal-AI", 96, 48.5, 40, 3.96),
    Published("Colossal-AI Gemini", 64, 111.0, 39, 1.73, gemini=True),
)
FITTED = GPT3[1]


@dataclass(frozen=True)
class PublishedOpt:
    """Seconds of a step on A100s of 80 GB; batch of one GPU."""

    shape: str
    gpus: int
    batch: int
    deepspeed: float
    colossal: float


OPT = (
    PublishedOpt("opt_13b", 1, 24, 51.74, 41.50),
    PublishedOpt("opt_30b", 8, 16, 73.95, 37.48),
)
GPT2_BUDGETS = (8, 10, 24)


def check_arithmetic() -> None:
    """Raises UserError for a row that was copied wrongly: seconds times throughput are the batch."""
    for row in GPT3:
        if abs(row.seconds * row.throughput - BATCH) > 0.5:
            raise UserError(f"{row}: {row.seconds * row.throughput:.1f} samples a step, and the batch is {BATCH}")


def measure(options: Options) -> Measured:
    check_arithmetic()
    model = decoder_shape(SHAPES["gpt3_175b"])
    gpu = gpu_named("a100-40gb")
    share = fitted(model, gpu)
    options.kept(Row({"part": "fitted"}, {"utilisation": Number(share, "of the peak")}))
    rows, targets = gpt3(model, gpu, share)
    rows += by_ports(model, gpu, share)
    rows += better((GPT3[3],) if options.quick else GPT3[1:], share, options)
    rows += opt(share)
    rows += gpt2(GPT2_BUDGETS[:1] if options.quick else GPT2_BUDGETS)
    here, of_here = measured_here(options)
    rows, targets = rows + here, targets + of_here
    first = Row({"part": "fitted"}, {"utilisation": Number(share, "of the peak")})
    return Measured((first, *rows), tuple(targets), NOTES)


NOTES = (
    "planned, not measured: closed forms and a pipeline on a clock. One constant is fitted, on the second GPT-3 row; "
    "the first row is another system's, so it has no target.",
    "machines: DGX A100, 8 GPUs on NVLink 3 and 8 ports of InfiniBand HDR; 80 % of a link's and 92 % of a memory's "
    "sheet. The published ones are not known.",
    "opt: the length of the sequences was not printed, so two are shown, without a target.",
    "10.7 % faster is 128 against 128 GPUs; the 64 GPUs of the table's last row are 2.6 times slower than 128.",
)


# --- GPT-3 ------------------------------------------------------------------------------------------------------------


def fitted(model: ModelShape, gpu: Gpu) -> float:
    """The utilisation with which the second row takes its seconds."""
    run, budget = assumed(model, FITTED, cluster_of(gpu, FITTED.gpus))
    low, high = 0.05, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        slow = step_time(model, run, cluster_of(gpu, FITTED.gpus, utilisation=middle), budget).step_s > FITTED.seconds
        low, high = (middle, high) if slow else (low, middle)
    return low


def assumed(model: ModelShape, row: Published, cluster: Cluster) -> tuple[RunShape, int | None]:
    """The plan that a row is taken to have had, and Gemini's budget."""
    printed = int(row.memory_gb * GB)
    if row.gemini:
        runs = list(_under_gemini(row, model, cluster, printed))
        return min(runs, key=lambda run: step_time(model, run, cluster, printed).step_s), printed
    return min(_in_stages(row), key=lambda run: abs(estimate_memory(model, run).peak_bytes - printed)), None


PLAIN = RunShape(precision="fp16", recompute="full", sequence_length=LENGTH)


def _in_stages(row: Published) -> Iterator[RunShape]:
    for size in (1, 2, 4):
        stages = {"pp": row.gpus // 8, "pipeline": PipelineConfig("1f1b")}
        yield replace(PLAIN, tp=8, **stages, microbatch_size=size, num_microbatches=BATCH // size)


def _under_gemini(row: Published, model: ModelShape, cluster: Cluster, budget: int) -> Iterator[RunShape]:
    for size in (size for size in (1, 2, 3) if BATCH // row.gpus % size == 0):
        run = replace(PLAIN, zero=3, dp_shard=row.gpus, microbatch_size=size)
        run = replace(run, num_microbatches=BATCH // row.gpus // size)
        try:
            if StepClock(model, run, cluster, budget).host_bytes <= cluster.host_bytes:
                yield run
        except UserError:
            continue


def gpt3(model: ModelShape, gpu: Gpu, share: float) -> tuple[list[Row], list[Target]]:
    rows, targets = [], []
    for number, row in enumerate(GPT3, 1):
        cluster = cluster_of(gpu, row.gpus, utilisation=share)
        run, budget = assumed(model, row, cluster)
        time = step_time(model, run, cluster, budget)
        memory = estimate_memory(model, run).peak_bytes if budget is None else budget
        off = time.step_s / row.seconds - 1
        case = {"part": "gpt3", "system": row.system, "gpus": row.gpus, "plan": told(run, budget)}
        numbers = {
            "printed": Number(row.seconds, "s"),
            "planned": Number(time.step_s, "s"),
            "off": Number(100 * off, "%"),
            "printed_memory": Number(row.memory_gb, "GB"),
            "planned_memory": Number(memory / GB, "GB"),
        }
        rows.append(Row(case, numbers))
        if number > 2:
            what = f"row {number}, {row.system} on {row.gpus} GPUs: 1 - |planned / printed - 1|"
            targets.append(Target(what, 1 - WITHIN, 1 - abs(off)))
    return rows, targets


def by_ports(model: ModelShape, gpu: Gpu, share: float) -> list[Row]:
    """Rows 3 and 4 on machines with fewer network cards: those of the published runs are not known.

    Nothing is fitted; the printed seconds stand beside each.
    """
    rows = []
    for row in GPT3[2:]:
        run, budget = assumed(model, row, cluster_of(gpu, row.gpus, utilisation=share))
        for ports in (4, 2, 1):
            cluster = cluster_of(replace(gpu, ports=ports), row.gpus, utilisation=share)
            time = step_time(model, run, cluster, budget)
            case = {"part": "ports", "system": f"{row.system}, {ports} of HDR a machine", "gpus": row.gpus}
            numbers = {"printed": Number(row.seconds, "s"), "planned": Number(time.step_s, "s")}
            rows.append(Row(case, numbers | {"off": Number(100 * (time.step_s / row.seconds - 1), "%")}))
    return rows


def told(run: RunShape, budget: int | None = None) -> str:
    """The plan in words."""
    plain = options_of(RunShape())
    differing = {name: value for name, value in options_of(run, budget).items() if value != plain[name]}
    data = f"dp={run.num_data_ranks} " if run.num_data_ranks > 1 else ""
    return data + " ".join(f"{name.rpartition('.')[2]}={value}" for name, value in differing.items())


def better(published: Sequence[Published], share: float, options: Options) -> list[Row]:
    """The fastest plan on as many GPUs; with --quick of a smaller model on a few."""
    rows = []
    for row in published:
        name, gpus = ("gpt3_125m", 4) if options.quick else ("gpt3_175b", row.gpus)
        cluster = cluster_of(gpu_named("a100-40gb"), gpus, utilisation=share)
        found = search(Job(SHAPES[name], (BATCH,), LENGTH, "fp16"), cluster)
        plan = found.plans[0]
        case = {"part": "better", "system": name, "gpus": gpus, "plan": told(plan.run, plan.budget_bytes)}
        numbers = {} if options.quick else {"printed": Number(row.seconds, "s")}
        numbers |= {
            "planned": Number(plan.step_s, "s"),
            "planned_memory": Number(plan.memory_bytes / GB, "GB"),
            "plans": Number(len(found.plans), "of the front"),
        }
        rows.append(Row(case, numbers))
        options.kept(rows[-1])
    return rows


# --- OPT --------------------------------------------------------------------------------------------------------------


def opt(share: float) -> list[Row]:
    """The published batch as one microbatch, in whatever Gemini's budget leaves of the device."""
    rows = []
    for row in OPT:
        model = decoder_shape(SHAPES[row.shape])
        cluster = cluster_of(gpu_named("a100-80gb"), row.gpus, utilisation=share)
        for length in (1024, 2048):
            run = replace(PLAIN, zero=3, dp_shard=row.gpus, microbatch_size=row.batch, sequence_length=length)
            case = {"part": "opt", "system": f"{row.shape}, {length} tokens", "gpus": row.gpus}
            numbers = {"deepspeed": Number(row.deepspeed, "s"), "printed": Number(row.colossal, "s")}
            try:
                time = step_time(model, run, cluster, cluster.memory_bytes)
                numbers["planned"] = Number(time.step_s, "s")
                case["plan"] = told(run, cluster.memory_bytes)
            except UserError as refused:
                case["plan"] = str(refused)
            rows.append(Row(case, numbers))
    return rows


# --- GPT-2 ------------------------------------------------------------------------------------------------------------


def gpt2(budgets: Sequence[int]) -> list[Row]:
    """The deepest model of GPT-2's widest shape on a device of so many GiB, fp16 and AdamW, one row of 1,024."""
    rows = []
    run = RunShape(precision="fp16", recompute="full")
    for gib in budgets:
        cluster = cluster_of(gpu_named("a100-80gb"), 1, memory_bytes=gib * GIB)
        device = _deepest(lambda model, size=gib * GIB: estimate_memory(model, run).peak_bytes <= size)
        beside = _deepest(lambda model, size=gib * GIB, on=cluster: _fits_with_host(model, run, on, size))
        numbers = {"device": Number(device / 1e9, "1e9 parameters"), "host": Number(beside / 1e9, "1e9 parameters")}
        case = {"part": "gpt2", "system": f"{gib} GiB", "gpus": 1, "plan": "24 times larger was printed"}
        rows.append(Row(case, numbers | {"larger": Number(beside / device, "times")}))
    return rows


def _fits_with_host(model: ModelShape, run: RunShape, cluster: Cluster, budget: int) -> bool:
    try:
        clock = StepClock(model, replace(run, zero=3), cluster, budget)
        return clock.host_bytes <= cluster.host_bytes
    except UserError:
        return False


def _deepest(fits) -> int:
    """Parameters of the deepest model that fits."""
    low, high = 1, 2
    shape = SHAPES["gpt2_xl"]

    def of(layers: int) -> ModelShape:
        return decoder_shape(replace(shape, num_layers=layers))

    while fits(of(high)):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(of(middle)) else (low, middle)
    return of(low).num_parameters()


# --- measured ---------------------------------------------------------------------------------------------------------


def measured_here(options: Options) -> tuple[list[Row], list[Target]]:
    """Predicted beside measured, for configurations that run on this machine."""
    chosen = planner_here.quick_trials() if options.quick else planner_here.trials()
    ranks = max(trial.ranks for trial in chosen)
    machine = planner_here.machine_here(ranks, quick=options.quick)
    found = planner_here.measured(chosen, *((1, 1) if options.quick else (ROUNDS, STEPS)))
    rows, seconds, worst = [], {}, 0.0
    for trial, of in found.items():
        predicted_s, predicted_bytes = planner_here.predicted(trial, machine)
        seconds[trial] = predicted_s, median(of.seconds)
        off = predicted_bytes / of.peak_bytes - 1
        worst = max(worst, abs(off))
        case = {"part": "here", "system": f"{trial.model}: {trial.name}", "gpus": trial.ranks, "plan": told(trial.run)}
        numbers = {
            "measured": Number(median(of.seconds), "s"),
            "planned": Number(predicted_s, "s"),
            "measured_memory": Number(of.peak_bytes / GB, "GB"),
            "planned_memory": Number(predicted_bytes / GB, "GB"),
            "memory_off": Number(100 * off, "%"),
        }
        rows.append(Row(case, numbers))
        options.kept(rows[-1])
    if options.quick:
        return rows, []
    order = Target(f"step times here, {len(found)} runs: Spearman", 0.9, planner_here.rank_correlation(seconds))
    return rows, [order, Target("memory here: 1 - the most that it is off", 1 - MEMORY_WITHIN, 1 - worst)]


BENCHMARK = Benchmark(
    "planner",
    "Plans beside published tables",
    measure,
    measures=(
        *("benchmarks/planner.py", "benchmarks/planner_here.py", "core/auto/measure.py", "core/auto/measured.py"),
        *("core/auto/costs.py", "core/auto/machines.py", "core/auto/step_time.py", "core/auto/strategies.py"),
        *("core/estimate", "core/models/shapes.py", "core/parallel/pipeline/schedule.py"),
    ),
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="planner"), sys.argv[1:]))
