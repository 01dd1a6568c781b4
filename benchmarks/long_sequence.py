"""Memory of long sequences: peak and slices for 1,000 to 16,000 residues under budgets, counted tensor by tensor.

`counted`: the planner's count on the meta device (apps/fold/subbatch): every tensor of a forward of the released model,
as a GPU would allocate it. Seconds are predicted from FLOPs and bytes at the rates that the planner assumes.

`swept`: 18 lengths, depths and cards, 30 with --full. The plan is carried out on the meta device, every slice of it,
with the whole model's weights, and what is allocated is counted: an account of its own, not the planner's sums. Where a
card is too small the plan is that of the least, which the refusal names.

`measured`: predictions that are run. On a GPU the released model, one recycling iteration, by CUDA's allocator; on a
CPU one block of each stack on few rows, by the tensors that operators allocate. Random weights and features.

`block`: seconds of an Evoformer block without gradients beside OpenFold's, of the same weights and in the same run, by
--peers-python (benchmarks/evoformer_peer.py); ours in the fastest plan's slices and in those of the least, OpenFold's
whole and in its chunks of 4 rows, which it goes in by default. On a CPU 32 rows. Beside them stands what was published:
FastFold's claim, and what a user measured of one protein on an A100 (`PRINTED_S`).

`--part blocks` measures a part alone and keeps it for the run that does the rest; `--part ?` names the parts.
"""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from apps.fold.model.config import ModelConfig, preset
from apps.fold.model.features import Features
from apps.fold.model.network import Network, network
from apps.fold.shares import Absent, plan_shares, rank_bytes
from apps.fold.subbatch import HEADS, FoldJob, How, Plan, apply_subbatches, least_bytes, longest, plan_subbatches
from apps.fold.subbatch.execute import offload_pairs
from apps.fold.subbatch.planner import meta_features, planned, stand_in, weights_bytes
from apps.fold.subbatch.reading import read_pairs
from apps.fold.subbatch.slices import every
from benchmarks.evoformer import (
    OPENFOLD,
    PEAK,
    blocks_of,
    in_place,
    inputs_of,
    openfold,
    peak_bytes,
    require_equal,
    seconds,
    slice_blocks,
)
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command
from core.kernels.operator import forced
from core.runtime import keep_freed_memory
from core.trace.account import MemoryAccount

MODEL = "model_5_ptm"
ROWS, EXTRA = 512, 1024
LENGTHS = (1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 16_000)
BUDGETS_GB = (16, 24, 40, 60, 80, 141)
PRODUCT = "blocks.*.pair.outgoing"
HALVED = (1000, 2000, 4000, 8000)
"""lengths at which a plan is compared with that of half of what it would like to have"""
SHARED = ((10_000, 2), (10_000, 4), (10_000, 8), (16_000, 8))
SWEPT = tuple((r, s, gb) for r in (1000, 2000, 4000) for s in (128, 512) for gb in (16, 40, 80))
LONG = tuple((r, s, gb) for r in (8000, 12_000) for s in (128, 512) for gb in (16, 40, 80))
"""swept with --full: a small card cuts them into so many slices that one takes up to an hour"""
UNBOUNDED = 10**15
PLANNING = "planning"
ON_CPU = (256, 512)
ON_GPU = (1000, 2000, 4000, 6000, 8000, 10_000)
BLOCKS_ON_CPU, BLOCKS_ON_GPU = (256, 384), (1000, 2000)
CHUNK = 4
"""OpenFold's chunk_size of its configuration"""
CLAIMED = (7.5, 9.5)
"""times as fast as AlphaFold and OpenFold, at long sequences (Cheng et al. 2022, FastFold)"""
PRINTED_S = {"FastFold": 262.0, "OpenFold": 125.0}
"""Seconds of CASP's T1050 on an A100 (hpcaitech/FastFold, a user's issue)."""
T1050 = 779


def job_of(residues: int, rows: int = ROWS) -> FoldJob:
    return FoldJob(preset(MODEL), residues, rows, EXTRA, dtype=torch.bfloat16, device="cuda")


def measure(options: Options) -> Measured | None:
    parts = _parts(options)
    if options.part not in ("", *parts):
        raise UserError(f"--part {options.part}: long_sequence has the parts {', '.join(parts)}")
    rows: list[Row] = []
    for part, rows_of in parts.items():
        if options.part not in ("", part):
            continue
        found = [row for row in options.earlier if row.case["part"] == part]
        if not found:
            found = [replace(row, case={"part": part, **row.case}) for row in rows_of()]
            for row in found:
                options.kept(row)
        rows += found
    if options.part:
        return None
    return Measured(tuple(rows), () if options.quick else _targets(rows), _notes(options))


def _parts(options: Options) -> dict[str, Callable[[], list[Row]]]:
    """What is measured, in parts that each take some minutes at most."""
    points = ((300, 128, 16),) if options.quick else (*SWEPT, *LONG) if options.full else SWEPT
    swept = {f"swept-{n}": [point for point in points if point[0] == n] for n in dict.fromkeys(r for r, *_ in points)}
    halved, shared = ((256,), ((300, 2),)) if options.quick else (HALVED, SHARED)
    return {
        "counted": partial(_counted, options),
        "halved": lambda: [_halved(residues) for residues in halved],
        "shared": lambda: [_shared(*case) for case in shared],
        **{name: partial(_all_swept, of_length) for name, of_length in swept.items()},
        "measured": partial(_run, options),
        "blocks": partial(_blocks, options),
    }


def _counted(options: Options) -> list[Row]:
    lengths = (256,) if options.quick else LENGTHS
    budgets = (16,) if options.quick else BUDGETS_GB
    rows = []
    for residues in lengths:
        job, pairs = job_of(residues), 256 * residues**2
        begin = time.process_time()
        least = least_bytes(job)
        plan = plan_subbatches(job, least)
        rows.append(_row(residues, "the least", plan, pairs, time.process_time() - begin))
        for budget in budgets:
            begin = time.process_time()
            try:
                plan = plan_subbatches(job, int(budget * 1e9))
            except UserError:
                continue  # the least says what it takes
            rows.append(_row(residues, f"{budget} GB", plan, pairs, time.process_time() - begin))
    return [*rows, *(_longest(budget) for budget in budgets)]


def _all_swept(points: list[tuple[int, int, int]]) -> list[Row]:
    return [_swept(*point) for point in points]


def _row(residues: int, budget: str, plan: Plan, pairs: int, planning_s: float) -> Row:
    product = plan.choices[PRODUCT]
    case: dict[str, str | int] = {
        "residues": residues,
        "how": "counted",
        "budget": budget,
        "triangle product": str(product),
        "pairs": "in host memory" if plan.offload else "on the device",
    }
    numbers = {
        "peak": Number(plan.peak_bytes / 1e9, "GB"),
        "of one z": Number(plan.peak_bytes / pairs, "z"),
        "predicted": Number(plan.seconds, "s"),
        PLANNING: Number(planning_s, "s"),
    }
    return Row(case, numbers)


def _longest(budget: int) -> Row:
    residues = longest(job_of(1), int(budget * 1e9))
    case: dict[str, str | int] = {"residues": "longest", "how": "counted", "budget": f"{budget} GB"}
    return Row(case, {"fits": Number(residues, "residues")})


def _halved(residues: int) -> Row:
    """How much longer a prediction takes in half of the memory that it would take without a budget."""
    job = job_of(residues)
    free = plan_subbatches(job, UNBOUNDED)
    half = plan_subbatches(job, free.peak_bytes // 2)
    case: dict[str, str | int] = {"residues": residues, "how": "counted", "budget": "half of what it would take"}
    numbers = {
        "peak": Number(half.peak_bytes / 1e9, "GB"),
        "predicted": Number(half.seconds, "s"),
        "slower": Number(half.seconds / free.seconds, "x"),
    }
    return Row(case, numbers)


def _shared(residues: int, ranks: int) -> Row:
    """What a rank of several allocates, as `fold predict --nproc` counts it: at the least, and with 80 GB each."""
    job, axis, pairs = replace(job_of(residues), iterations=2), Absent(ranks), 256 * residues**2
    rowwise = dict.fromkeys(planned(job, 0).choices, How("rows", 1))
    plenty = plan_shares(job, int(80e9), axis)
    case: dict[str, str | int] = {"residues": residues, "how": f"counted, each of {ranks} ranks", "budget": "80 GB"}
    numbers = {
        "peak": Number(rank_bytes(job, plenty, axis) / 1e9, "GB"),
        "least": Number(rank_bytes(job, rowwise, axis) / 1e9, "GB"),
        "least, of its share of z": Number(rank_bytes(job, rowwise, axis) * ranks / pairs, "z"),
    }
    return Row(case, numbers)


def _swept(residues: int, rows: int, budget_gb: int) -> Row:
    """What carrying out a plan allocates on the meta device, beside the budget and the plan's own peak."""
    job = replace(job_of(residues, rows), iterations=2)
    try:
        budget, said = int(budget_gb * 1e9), f"{budget_gb} GB"
        plan = plan_subbatches(job, budget)
    except UserError:
        budget, said = least_bytes(job), f"the least ({budget_gb} GB are too few)"
        plan = plan_subbatches(job, budget)
    peak = counted_peak(job, plan)
    case: dict[str, str | int] = {
        "residues": residues,
        "rows": rows,
        "how": "swept",
        "budget": said,
        "triangle product": str(plan.choices[PRODUCT]),
        "pairs": "in host memory" if plan.offload else "on the device",
    }
    numbers = {
        "peak": Number(peak / 1e9, "GB"),
        "peak over plan's": Number(peak / plan.peak_bytes, "x"),
        "budget over peak": Number(budget / peak, "x"),
    }
    return Row(case, numbers)


def counted_peak(job: FoldJob, plan: Plan) -> int:
    """The most bytes alive at once in a prediction by the plan, one block of each stack, all weights."""
    config = job.config
    stacks = {name: replace(getattr(config, name), num_blocks=1) for name in ("evoformer", "extra")}
    short = replace(config, **stacks)
    with torch.device("meta"):
        model = network(short).to(job.dtype).eval()
        others = torch.empty(weights_bytes(config, job.dtype) - weights_bytes(short, job.dtype), dtype=torch.uint8)
    apply_subbatches(model, {name: how for name, how in plan.choices.items() if name != HEADS})
    if plan.offload:
        offload_pairs(model, stand_in)
    features = meta_features(job)
    with torch.no_grad(), forced(), MemoryAccount("meta") as account:
        account.add([*model.parameters(), others])
        features.map(lambda tensor: account.add([tensor]) or tensor)
        found = model.fold([features] * job.iterations)
        slices = every(job.residues, plan.choices[HEADS].rows)
        read_pairs(model.heads, found.pair_BNNZ, features.mask_BN, slices, stand_in)
    return account.peak_bytes


# --- measured ---------------------------------------------------------------------------------------------------------


def _run(options: Options) -> list[Row]:
    """Predictions of some lengths, at the least budget and without one (where that is possible)."""
    on_gpu = torch.cuda.is_available()
    rows = []
    for residues in (48,) if options.quick else ON_GPU if on_gpu else ON_CPU:
        job = job_of(residues) if on_gpu else _small(residues)
        room = int(0.9 * torch.cuda.mem_get_info()[0]) if on_gpu else UNBOUNDED
        for budget, name in ((least_bytes(job), "the least"), (room, "what there is")):
            try:
                rows.append(_predicted(replace(job, iterations=1), max(budget, least_bytes(job)), name))
            except (UserError, torch.OutOfMemoryError) as error:
                print(f"{residues} residues, {name}: {str(error).splitlines()[0]}", file=sys.stderr)
    return rows


def _small(residues: int) -> FoldJob:
    """What a CPU does in a minute or two."""
    config = preset(MODEL)
    stacks = {name: replace(getattr(config, name), num_blocks=1) for name in ("evoformer", "extra")}
    return FoldJob(replace(config, **stacks), residues, 32, 64, dtype=torch.float32, device="cpu")


def _predicted(job: FoldJob, budget_bytes: int, name: str) -> Row:
    """One iteration under a plan: its peak and time beside those of the plan."""
    plan = plan_subbatches(job, budget_bytes)
    model, features = _model(job.config, job), _features(job)
    choices = {operation: how for operation, how in plan.choices.items() if operation != HEADS}
    apply_subbatches(model, choices, offload=plan.offload)
    on_gpu = job.device == "cuda"
    account = MemoryAccount()
    account.add(model.parameters())
    features.map(lambda tensor: account.add([tensor]) or tensor)
    if on_gpu:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    with torch.inference_mode(), account if not on_gpu else torch.no_grad():
        found = model.fold([features])
        read_pairs(model.heads, found.pair_BNNZ, features.mask_BN, every(job.residues, plan.choices[HEADS].rows))
    if on_gpu:
        torch.cuda.synchronize()
    seconds = time.perf_counter() - begin
    peak = torch.cuda.max_memory_allocated() if on_gpu else account.peak_bytes
    case: dict[str, str | int] = {
        "residues": job.residues,
        "how": f"measured, {'GPU' if on_gpu else 'CPU'}",
        "budget": name,
        "triangle product": str(plan.choices[PRODUCT]),
        "pairs": "in host memory" if plan.offload else "on the device",
    }
    numbers = {
        "peak": Number(peak / 1e9, "GB"),
        "of one z": Number(peak / (job.config.pair_dim * job.dtype.itemsize * job.residues**2), "z"),
        "peak over plan's": Number(peak / plan.peak_bytes, "x"),
        "measured": Number(seconds, "s"),
        "predicted": Number(plan.seconds, "s"),
    }
    return Row(case, numbers)


def _model(config: ModelConfig, job: FoldJob) -> Network:
    torch.manual_seed(0)
    return network(config).to(job.device, job.dtype).eval().requires_grad_(False)


def _features(job: FoldJob) -> Features:
    """Random features, nothing masked."""
    generator = torch.Generator().manual_seed(0)

    def drawn(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            return torch.rand(tensor.shape, generator=generator).to(job.device, tensor.dtype)
        return torch.randint(0, 20, tensor.shape, generator=generator).to(job.device)

    features = meta_features(job).map(drawn)
    masks = {name: torch.ones_like(getattr(features, name)) for name in ("mask_BN", "msa_mask_BSN", "extra_mask_BEN")}
    index = torch.arange(job.residues, device=job.device)[None]
    return replace(features, residue_index_BN=index, **masks)


# --- beside OpenFold --------------------------------------------------------------------------------------------------


def _blocks(options: Options) -> list[Row]:
    """Seconds of a block of ours and of OpenFold's, and what was published."""
    printed: list[Row] = []
    for contender, seconds_of_it in PRINTED_S.items():
        case = _case("printed", T1050, contender, "T1050, an A100")
        printed.append(Row(case, {"prediction": Number(seconds_of_it, "s")}))
    claimed = {name: Number(times, "x") for name, times in zip(("over OpenFold", "at most"), CLAIMED)}
    printed.append(Row(_case("printed", "long", "FastFold", "A100"), claimed))
    on_gpu = torch.cuda.is_available()
    if options.quick:
        lengths: tuple[int, ...] = (24,)
    elif on_gpu:
        lengths = BLOCKS_ON_GPU
    else:
        keep_freed_memory()  # as `fold predict` does, and OpenFold's process here
        lengths = (*BLOCKS_ON_CPU, 768) if options.full else BLOCKS_ON_CPU
    return [row for residues in lengths for row in _beside(residues, on_gpu, options.peers_python)] + printed


def _beside(residues: int, on_gpu: bool, python: Path | None) -> list[Row]:
    device, dtype = torch.device("cuda" if on_gpu else "cpu"), torch.bfloat16 if on_gpu else torch.float32
    inputs = inputs_of(ROWS if on_gpu else 32, residues, device, dtype)
    job = FoldJob(preset(MODEL), residues, inputs[0].shape[1], 1, dtype=dtype, device="cuda" if on_gpu else "cpu")
    found: dict[str, dict[str, float]] = {}
    expected: tuple[Tensor, Tensor] | None = None
    for name, budget in (("ours, the fastest plan", UNBOUNDED), ("ours, the least", least_bytes(job))):
        blocks = blocks_of(1, device, dtype)
        slice_blocks(blocks, plan_subbatches(job, budget).choices)
        got = in_place(blocks, inputs)
        expected = got if expected is None else expected
        require_equal(name, got, expected, dtype)
        found[name] = {"block": seconds(partial(in_place, blocks, inputs), device, 1)}
        if not on_gpu:
            found[name][PEAK] = peak_bytes(blocks, inputs)
    assert expected is not None
    for chunk in (None, CHUNK):
        if python is None:
            break
        name = OPENFOLD if chunk is None else f"{OPENFOLD}, chunks of {chunk}"
        taken = openfold(python, 1, inputs, expected, 1, ("forward",), chunk)
        found[name] = {"block": taken["forward"]} | {key: taken[key] for key in (PEAK,) if key in taken}
    return [_block_row(residues, name, numbers, found, on_gpu) for name, numbers in found.items()]


def _block_row(
    residues: int, name: str, taken: dict[str, float], all_of_them: dict[str, dict[str, float]], on_gpu: bool
) -> Row:
    numbers = {"block": Number(taken["block"], "s")}
    if PEAK in taken:
        numbers[PEAK] = Number(taken[PEAK] / 1e6, "MB")
    for theirs in all_of_them if name.startswith("ours") else ():
        if theirs.startswith(OPENFOLD):
            numbers[f"over {theirs}"] = Number(all_of_them[theirs]["block"] / taken["block"], "x")
    return Row(_case("block", residues, name, "a GPU, bf16" if on_gpu else "a CPU, fp32"), numbers)


def _case(how: str, residues: int | str, contender: str, device: str) -> dict[str, str | int]:
    return {"residues": residues, "how": how, "contender": contender, "device": device}


# --- what is aimed at -------------------------------------------------------------------------------------------------


def _targets(rows: list[Row]) -> tuple[Target, ...]:
    """Each as wanted bytes (or seconds) over reached ones, so that 1 or more is met."""
    slowest = max(row.numbers[PLANNING].value for row in rows if PLANNING in row.numbers)
    slower = max(row.numbers["slower"].value for row in rows if "slower" in row.numbers)
    swept = [row for row in rows if row.case["how"] == "swept"]
    z, job = 256 * 4000**2, job_of(4000)
    beside = plan_subbatches(job, 10**12).beside[PRODUCT]
    fast, least = plan_subbatches(job, beside + int(1.1 * z)), plan_subbatches(job, least_bytes(job))
    long = job_of(10_000)
    fits = plan_subbatches(long, int(60e9))
    room = min(row.numbers["budget over peak"].value for row in swept)
    off = max(abs(1 - 1 / row.numbers["peak over plan's"].value) for row in swept)
    in_copied_order = fits.choices[PRODUCT].method == "copy"
    return (
        Target("block of 4,000 residues with a copy: 2.1 z over its peak", 1.0, 2.1 * z / _block(fast, z)),
        Target("block of 4,000 residues at the least: 1.35 z over its peak", 1.0, 1.35 * z / _block(least, z)),
        Target("10,000 residues with a copy: 60 GB over the peak", 1.0, in_copied_order * 60e9 / fits.peak_bytes),
        Target("10,000 residues at the least: 40 GB over the peak", 1.0, 40e9 / least_bytes(long)),
        Target("4,000 residues on a card of 16 GB: over the least", 1.0, 16e9 / least_bytes(job)),
        Target(f"{len(swept)} lengths, depths, cards: budget over what is allocated, at worst", 1.0, room),
        Target("of these: 5 % over how far a plan's peak is off, at worst", 1.0, 0.05 / max(off, 1e-9)),
        Target("planning: 2 s over the slowest plan", 1.0, 2 / slowest),
        Target("half of the memory without a budget: 1.1 over how much slower, at worst", 1.0, 1.1 / slower),
    )


def _block(plan: Plan, z: int) -> int:
    """Peak of an Evoformer block: z, and what its operations allocate beside what was there before them."""
    return z + max(plan.peaks[n] - plan.beside[n] for n in plan.choices if n.startswith("blocks."))


def _notes(options: Options) -> tuple[str, ...]:
    without = "OpenFold is left out: --peers-python names an interpreter that finds it."
    return (
        *(() if options.peers_python is not None else (without,)),
        f"{MODEL}, {ROWS} + {EXTRA} rows, no templates, bf16, kernels as on a GPU; z = 256 bytes x residues^2.",
        "A block's peak leaves out the MSA (0.26 z at 4,000 residues), weights and features; the model's peak has all.",
        "Logical bytes: without an allocator's fragmentation and what CUDA's context takes (0.5 to 1 GB).",
        "Seconds of what is counted are predicted, for an H100 at 300 TFLOP/s and 2.5 TB/s.",
        "Measured on a CPU: one block of each stack, 32 + 64 rows, fp32; predicted for two cores at 90 GFLOP/s.",
    )


MEASURES = (
    "apps/fold/model",
    "apps/fold/subbatch",
    "apps/fold/shares.py",
    "core/kernels",
    "benchmarks/evoformer.py",
    "benchmarks/evoformer_peer.py",
    "benchmarks/long_sequence.py",
)
BENCHMARK = Benchmark(
    "long_sequence", "Long sequences: memory under a budget", measure, MEASURES, takes=("--part",), resumes=True
)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="long_sequence"), sys.argv[1:]))
