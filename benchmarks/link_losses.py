"""Why forms of messages learn less: held-out bits per byte of 600 steps, as one setting after another is changed.

What `slow_links` trains, of one seed on two workers:

    PowerSGD   by its rank, of gradients of 256 and more directions
    ZeRO++     by the bits of gradients, and with feedback
    DiLoCo     by its outer optimizer, by the bits of displacements, and by the steps between two averages
    one worker alone   with half of the rows, which is what local training begins from

No clock is read, so it may run beside other work, and it is resumed.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace

from benchmarks.result import Measured
from benchmarks.run import Benchmark, Options, main
from benchmarks.slow_links import ALONE, MEASURES, ROUND, ZERO3, Form, Runs, alone, learned, mean_curve, study_of
from core.config import run_command
from core.parallel.compress import CommConfig
from core.parallel.local import LocalTrainingConfig

STEPS, EVERY, WORKERS = 600, 200, 2
RANKS = (4, 16, 64)
SOONER = 10
"""Steps of a round, where averages come more often."""


def forms(ranks: Sequence[int] = RANKS) -> Iterator[Form]:
    yield Form(ZERO3, WORKERS, zero=3)
    yield from (Form(f"PowerSGD, rank {rank}", WORKERS, comm=CommConfig("powersgd", rank=rank)) for rank in ranks)
    for bits in ("int4", "int8"):
        comm = CommConfig(weights="int8", gradients=bits, secondary=True)
        yield Form(f"ZeRO++, {bits} gradients", WORKERS, zero=3, comm=comm)
    four = CommConfig(weights="int8", gradients="int4", secondary=True, feedback=True)
    yield Form("ZeRO++, int4 gradients with feedback", WORKERS, zero=3, comm=four)
    mean = LocalTrainingConfig(every=ROUND, outer_lr=1.0, outer_momentum=0.0)
    faster = replace(mean, outer_momentum=0.5)
    for how, local in {
        "as usual (0.7, 0.9)": LocalTrainingConfig(every=ROUND),
        "the mean": mean,
        "rate 1, momentum 0.5": faster,
        "rate 1, momentum 0.5, 2 bits": replace(faster, bits=2),
        f"the mean each {SOONER} steps": replace(mean, every=SOONER),
    }.items():
        yield Form(f"DiLoCo, {how}", WORKERS, local=local)
    yield from (replace(form, seeds=None) for form in alone([WORKERS]))


def measure(options: Options) -> Measured:
    study = study_of(options)
    if not options.quick:
        study = replace(study, steps=STEPS, every=EVERY)
    study = replace(study, seeds=(0,))
    runs, tried = Runs(study, options), list(forms(RANKS[:1] if options.quick else RANKS))
    curves = [mean_curve([row]) for row in runs.of([learned(study, form, 0) for form in tried])]
    last = {form.name: curve[max(curve)] for form, curve in zip(tried, curves, strict=True)}
    above = "; ".join(f"{name} {bits / last[ZERO3] - 1:+.1%}" for name, bits in last.items() if name != ZERO3)
    return Measured(
        tuple(runs.rows),
        notes=(
            f"Of one seed, {study.steps} steps of {study.config.data.global_batch} rows of all workers together, of "
            f"which {ALONE} has half. The last bits per byte beside those of {ZERO3}: {above}.",
            f"Rounds of DiLoCo are of {ROUND} steps, displacements whole, where nothing else is said. ZeRO++ has int8 "
            "weights and a second copy on each worker.",
        ),
    )


BENCHMARK = Benchmark(
    "link_losses", "Why messages in few numbers learn less", measure, (*MEASURES, "benchmarks/link_losses.py"),
    resumes=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="link_losses"), sys.argv[1:]))
