"""Why forms of messages learn less: held-out bits per byte of some hundred steps, as one setting after another changes.

What `slow_links` trains, of one seed on two workers:

    PowerSGD   by its rank, of gradients of 256 and more directions
    ZeRO++     by the bits of gradients, and with feedback
    DiLoCo     by its outer optimizer, by the bits of displacements, and by the steps between two averages
    one worker alone   with half of the rows, which is what local training begins from
    rows of a step     PowerSGD, DiLoCo and one worker alone, of half as many steps of as many rows and of twice as
                       many, each beside whole gradients of those rows

No clock is read, so it may run beside other work, and it is resumed.
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from benchmarks.result import Measured
from benchmarks.run import Benchmark, Options, main
from benchmarks.slow_links import ALONE, MEASURES, ROUND, ZERO3, Form, Runs, Study, alone, learned, mean_curve, study_of
from core.config import run_command
from core.parallel.compress import CommConfig
from core.parallel.local import LocalTrainingConfig

STEPS, EVERY, WORKERS = 600, 200, 2
RANKS = (4, 16, 64)
SHORT, MORE_ROWS = 300, 2
"""Steps of those that are compared by the rows of a step, and how many times as many these are."""
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


def of_rows(study: Study) -> Iterator[tuple[Study, Form]]:
    """By the rows of a step, which are in the names of forms."""
    for more in (1, MORE_ROWS):
        rows = more * study.config.data.global_batch
        config = replace(study.config, data=replace(study.config.data, global_batch=rows))
        local = LocalTrainingConfig(every=ROUND, outer_lr=1.0, outer_momentum=0.5)
        for form in (
            Form(ZERO3, WORKERS, zero=3),
            Form("PowerSGD, rank 4", WORKERS, comm=CommConfig("powersgd", rank=4)),
            Form("DiLoCo, rate 1, momentum 0.5", WORKERS, local=local),
            *(replace(form, seeds=None) for form in alone([WORKERS])),
        ):
            yield replace(study, config=config), replace(form, name=f"{form.name}, {rows} rows")


def measure(options: Options) -> Measured:
    study = short = study_of(options)
    if not options.quick:
        study, short = replace(study, steps=STEPS, every=EVERY), replace(study, steps=SHORT, every=SHORT)
    tried = [(replace(study, seeds=(0,)), form) for form in forms(RANKS[:1] if options.quick else RANKS)]
    by_rows = [(one, form) for one, form in of_rows(replace(short, seeds=(0,)))]
    runs = Runs(study, options)
    rows = runs.of([learned(one, form, 0) for one, form in [*tried, *by_rows]])
    curves = {form.name: mean_curve([row]) for (_, form), row in zip([*tried, *by_rows], rows, strict=True)}
    last = {name: curve[max(curve)] for name, curve in curves.items()}
    above = _above(last, [form.name for _, form in tried], ZERO3)
    by_rows_said = [
        _above(last, [form.name for one, form in by_rows if one is of], f"{ZERO3}, {of.config.data.global_batch} rows")
        for of in dict.fromkeys(one for one, _ in by_rows)
    ]
    return Measured(
        tuple(runs.rows),
        notes=(
            f"Of one seed, {study.steps} steps of {study.config.data.global_batch} rows of all workers together, of "
            f"which {ALONE} has half. The last bits per byte beside those of {ZERO3}: {above}.",
            f"By the rows of a step, behind {short.steps} steps: {'; '.join(by_rows_said)}.",
            f"Rounds of DiLoCo are of {ROUND} steps, displacements whole, where nothing else is said. ZeRO++ has int8 "
            "weights and a second copy on each worker.",
        ),
    )


def _above(last: Mapping[str, float], names: Sequence[str], plain: str) -> str:
    return "; ".join(f"{name} {last[name] / last[plain] - 1:+.1%}" for name in names if name != plain)


BENCHMARK = Benchmark(
    "link_losses", "Why messages in few numbers learn less", measure, (*MEASURES, "benchmarks/link_losses.py"),
    resumes=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="link_losses"), sys.argv[1:]))
