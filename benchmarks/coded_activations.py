"""What activations in 8 bits cost in loss: stages of a pipeline, and experts that exchange rows, beside whole ones.

Two ranks train the debug recipes on their text in fp32: two stages of `debug`, with four of its blocks, and
`debug_moe` with its experts dealt out, each with activations as they are and with `--comm.activations int8`, from the
same weights, on the same rows; of one seed, with --full of three. What is told is the held-out bits of a byte on the
way, and the share of steps that 8 bits take more to the loss that both reach.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from apps.llm.config import PretrainConfig
from apps.llm.corpus import prepare
from apps.llm.recipes import RECIPES
from benchmarks.ranks import on_ranks
from benchmarks.result import ROOT, Measured, Number, Row, Target
from benchmarks.run import Benchmark, Options, main
from benchmarks.slow_links import Ran, mean_curve, steps_to, trained_in_turn
from core.config import run_command
from core.mesh import MeshConfig
from core.parallel.compress import CommConfig

RANKS, BLOCKS = 2, 4
FORMS = {"stages": ("debug", MeshConfig(pp=RANKS)), "experts": ("debug_moe", MeshConfig(ep=RANKS))}
CODES = {"whole": CommConfig(), "8 bits": CommConfig(activations="int8")}
WITHIN = 1.01
"""Times the bits of a byte of whole activations that 8 bits may end at."""


@dataclass(frozen=True)
class Study:
    """every: steps between evaluations"""

    steps: int = 200
    every: int = 40
    seeds: tuple[int, ...] = (0,)


def config_of(study: Study, form: str, code: str, seed: int) -> PretrainConfig:
    recipe, mesh = FORMS[form]
    made = RECIPES[recipe]()
    optim = replace(made.optim, schedule=replace(made.optim.schedule, warmup_steps=min(20, study.steps // 2)))
    run = replace(made, mesh=mesh, comm=CODES[code], seed=seed, steps=study.steps, evaluate_every=study.every)
    model = replace(made.model, num_layers=BLOCKS)
    return replace(run, model=model, optim=optim, precision="fp32", device="cpu", hf=False)


def case(form: str, code: str, seed: int | str) -> dict[str, str | int]:
    return {"from": "curves", "form": form, "activations": code, "seed": seed}


def curve(form: str, code: str, seed: int, ran: Ran) -> Row:
    return Row(case(form, code, seed), {f"after {step}": Number(of, "bits/byte") for step, of in ran.bits.items()})


def measure(options: Options) -> Measured:
    study = Study(steps=4, every=2) if options.quick else Study(seeds=(0, 1, 2) if options.full else (0,))
    corpus = prepare(RECIPES["debug"]().data, ROOT / "runs" / "corpora")
    known = {tuple(row.case.items()): row for row in options.earlier}
    rows = list[Row]()
    for form in FORMS:
        keys = [(code, seed) for seed in study.seeds for code in CODES]
        missing = [key for key in keys if tuple(case(form, *key).items()) not in known]
        for few in [missing] if options.quick else [missing[at : at + 2] for at in range(0, len(missing), 2)]:
            jobs = [(config_of(study, form, *key), math.inf) for key in few]
            ran = on_ranks(RANKS, trained_in_turn, jobs, corpus, preload=[__name__], limit_s=7200)[0] if jobs else []
            for (code, seed), one in zip(few, ran, strict=True):
                row = known[tuple(case(form, code, seed).items())] = curve(form, code, seed, one)
                options.kept(row)
        rows += [known[tuple(case(form, *key).items())] for key in keys]
    compared = [of_form(form, rows) for form in FORMS]
    targets = [
        Target(f"{WITHIN} of whole activations' bits per byte / those in 8 bits, {row.case['form']}", 1.0,
               WITHIN / (1 + row.numbers["loss"].value))
        for row in compared
    ]  # fmt: skip
    return Measured((*rows, *compared), tuple(targets), (NOTE,))


def of_form(form: str, rows: Sequence[Row]) -> Row:
    """What 8 bits cost, of the mean curves, and how far seeds are apart in it."""
    whole, coded = ([r for r in rows if (r.case["form"], r.case["activations"]) == (form, code)] for code in CODES)
    curves = mean_curve(whole), mean_curve(coded)
    last = max(curves[0])
    each = [b.numbers[f"after {last}"].value / a.numbers[f"after {last}"].value - 1 for a, b in zip(whole, coded)]
    reached = max(min(one.values()) for one in curves)
    steps = [steps_to(one, reached) for one in curves]
    numbers = {"loss": Number(mean(each), ""), "least": Number(min(each), ""), "most": Number(max(each), "")}
    return Row(
        {"from": "8 bits beside whole", "form": form, "activations": "", "seed": ""},
        numbers | {"steps": Number(steps[1] / steps[0] - 1, "")},
    )


NOTE = (
    "loss: the mean over seeds of held-out bits per byte in 8 bits over those of whole activations behind the last "
    "step, less 1; least and most: of one seed; steps: those of the mean curve to the loss that both reach, less 1. "
    "Evaluations send activations as training does."
)
BENCHMARK = Benchmark(
    "coded_activations",
    "Activations in 8 bits: what they cost in loss",
    measure,
    (
        "benchmarks/ranks.py", "benchmarks/slow_links.py", "core/comm", "core/parallel/pipeline",
        "core/parallel/expert.py", "core/models/decoder.py", "core/nn/moe.py", "benchmarks/coded_activations.py",
    ),
    resumes=True,
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="coded_activations"), sys.argv[1:]))
