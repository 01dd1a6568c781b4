"""Memory of long sequences: peak and slices for 1,000 to 16,000 residues under budgets, counted tensor by tensor.

The planner's count on the meta device (apps/fold/subbatch): every tensor of a forward of the released model, as a GPU
or a CPU would allocate it. Seconds are predicted from FLOPs and bytes at the rates that the planner assumes, and not
measured here.
"""

import sys
import time

import torch

from apps.fold.model.config import preset
from apps.fold.subbatch import Job, Plan, least_bytes, longest, plan_subbatches
from benchmarks.result import Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from core.config import UserError, run_command

MODEL = "model_5_ptm"
ROWS, EXTRA = 512, 1024
LENGTHS = (1000, 2000, 4000, 6000, 8000, 10_000, 12_000, 16_000)
BUDGETS_GB = (16, 24, 40, 60, 80, 141)
PRODUCT = "blocks.*.pair.outgoing"


def job_of(residues: int) -> Job:
    return Job(preset(MODEL), residues, ROWS, EXTRA, dtype=torch.bfloat16, device="cuda")


def measure(options: Options) -> Measured:
    lengths = (256, 1000) if options.quick else LENGTHS
    budgets = (16,) if options.quick else BUDGETS_GB
    rows, slowest = [], 0.0
    for residues in lengths:
        job, pairs = job_of(residues), 256 * residues**2
        begin = time.process_time()
        least = least_bytes(job)
        rows.append(_row(residues, "the least", plan_subbatches(job, least), pairs))
        slowest = max(slowest, time.process_time() - begin)
        for budget in budgets:
            begin = time.process_time()
            try:
                plan = plan_subbatches(job, int(budget * 1e9))
            except UserError:
                continue  # the least says what it takes
            slowest = max(slowest, time.process_time() - begin)
            rows.append(_row(residues, f"{budget} GB", plan, pairs))
    fit = [_longest(budget) for budget in budgets]
    return Measured((*rows, *fit), () if options.quick else _targets(slowest), _notes())


def _row(residues: int, budget: str, plan: Plan, pairs: int) -> Row:
    product = plan.choices[PRODUCT]
    case: dict[str, str | int] = {
        "residues": residues,
        "budget": budget,
        "triangle product": str(product),
        "pairs": "in host memory" if plan.offload else "on the device",
    }
    numbers = {
        "peak": Number(plan.peak_bytes / 1e9, "GB"),
        "of one z": Number(plan.peak_bytes / pairs, "z"),
        "predicted": Number(plan.seconds, "s"),
    }
    return Row(case, numbers)


def _longest(budget: int) -> Row:
    residues = longest(job_of(1), int(budget * 1e9))
    case: dict[str, str | int] = {"residues": "longest", "budget": f"{budget} GB"}
    return Row(case, {"fits": Number(residues, "residues")})


def _targets(slowest: float) -> tuple[Target, ...]:
    """Each as wanted bytes (or seconds) over reached ones, so that 1 or more is met."""
    z, job = 256 * 4000**2, job_of(4000)
    beside = plan_subbatches(job, 10**12).beside[PRODUCT]
    fast, least = plan_subbatches(job, beside + int(1.1 * z)), plan_subbatches(job, least_bytes(job))
    long = job_of(10_000)
    fits = plan_subbatches(long, int(60e9))
    in_copied_order = fits.choices[PRODUCT].method == "copy"
    return (
        Target("block of 4,000 residues with a copy: 2.1 z over its peak", 1.0, 2.1 * z / _block(fast, z)),
        Target("block of 4,000 residues at the least: 1.35 z over its peak", 1.0, 1.35 * z / _block(least, z)),
        Target("10,000 residues with a copy: 60 GB over the peak", 1.0, in_copied_order * 60e9 / fits.peak_bytes),
        Target("10,000 residues at the least: 40 GB over the peak", 1.0, 40e9 / least_bytes(long)),
        Target("4,000 residues on a card of 16 GB: over the least", 1.0, 16e9 / least_bytes(job)),
        Target("planning: 2 s over the slowest plan", 1.0, 2 / slowest),
    )


def _block(plan: Plan, z: int) -> int:
    """Peak of an Evoformer block: z, and what its operations allocate beside what was there before them."""
    return z + max(plan.peaks[n] - plan.beside[n] for n in plan.choices if n.startswith("blocks."))


def _notes() -> tuple[str, ...]:
    return (
        f"{MODEL}, {ROWS} + {EXTRA} rows, no templates, bf16, kernels as on a GPU; z = 256 bytes x residues^2.",
        "A block's peak leaves out the MSA (0.26 z at 4,000 residues), weights and features; the model's peak has all.",
        "Logical bytes: without an allocator's fragmentation and what CUDA's context takes (0.5 to 1 GB).",
        "Seconds are predicted, for an H100 at 300 TFLOP/s and 2.5 TB/s; not measured.",
    )


BENCHMARK = Benchmark("long_sequence", "Long sequences: memory under a budget", measure)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="long_sequence"), sys.argv[1:]))
