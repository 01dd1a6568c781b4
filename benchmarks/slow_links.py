"""Slow links: step time, and time to a loss, of what sends everything, less, or seldom, over links of three speeds.

The demo's model, text and optimizer (Muon), on two workers and on four. What a form learns does not depend on the link,
only when; so curves and step times are measured apart, or slow links would make the study take days:

1. Step times: a few steps of each form, number of workers and link. A link is `core.comm.volume.slow_link`, through
   which all messages pass: a rank sleeps for its bytes / bandwidth, and computes nothing meanwhile. Of local training
   the step that ends a round is timed apart, and its surplus counts an H-th. They say how long the rest will take.
2. Curves: each form is trained once a seed without a link, and its held-out bits per byte are taken on the way. Those
   of ZeRO and PowerSGD are alike on any number of workers, to 1e-10 in fp64 (tests/parity), and taken of one; local
   training's are not, and ZeRO++'s, which rounds each worker's rows by themselves, is taken of the fewest. Beside them
   stands what a worker learns of its own rows alone, of one seed: local training lies between that and all rows.
3. Time to a loss: the mean curve's step at which the held-out loss that all forms reach is passed, times the step time.

4. PowerSGD beside torch's hook for DDP, of the same first basis (`benchmarks.slow_links_peers`).

It prints how long it will take once it has timed the steps, and is resumed. `--part losses` trains and compares, and
reads no clock, so it may run beside other work; `--part times` does the rest; each keeps its figures for the run that
writes the result.
"""

import json
import math
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field, replace
from io import StringIO
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from torch import Tensor

from apps.llm.batches import evaluation_batches, training_batches
from apps.llm.config import PretrainConfig
from apps.llm.corpus import Corpus, prepare
from apps.llm.demo import fastest_precision
from apps.llm.loss import num_targets, token_loss
from apps.llm.pretrain import heldout_evaluation
from apps.llm.recipes import RECIPES
from benchmarks.ranks import on_ranks
from benchmarks.result import ROOT, Measured, Number, Result, Row, Target
from benchmarks.run import Benchmark, Options, main
from benchmarks.slow_links_peers import beside_torchs_hook
from core.comm.volume import slow_link, wire_share
from core.compose import parallelize
from core.config import UserError, run_command
from core.files import save_figure
from core.mesh import MeshConfig, Zero, data_axis
from core.models.decoder import Decoder, initialise
from core.models.plan import decoder_plan
from core.optim.build import build_optimizer
from core.parallel.compress import CommConfig, takes
from core.parallel.local import LocalTrainingConfig
from core.parallel.pipeline.schedule import PipelineConfig
from core.runtime import start
from core.train import fit

ROUND = 50
"""Steps of a round, H."""
TIMED_ROUND, TIMED_STEPS = 4, 8
"""Of a run that is timed; its first two steps make state, and count what they do."""
UNTIMED = 2
LINKS = {"none": math.inf, "10 Gbit/s": 1e10, "1 Gbit/s": 1e9, "100 Mbit/s": 1e8}
ALL_REDUCE, ZERO3, ZERO_PP, POWERSGD, DILOCO, TWO_BW = "all-reduce", "ZeRO-3", "ZeRO++", "PowerSGD", "DiLoCo", "2bw"
WITH_FEEDBACK = "ZeRO++ with feedback"
ALONE = "one worker alone"
OUTER_LR, OUTER_MOMENTUM = 1.0, 0.5
"""Of DiLoCo's 30 rounds: with its usual 0.7 and 0.9 they go seven times the mean way, and too far (docs/log.md)."""
POWERSGD_COMM = CommConfig("powersgd", rank=4)
BESIDE = "beside torch's hook"


@dataclass(frozen=True)
class Form:
    """How workers meet.

    learns_as  the form whose curve is this one's
    seeds      the most that its curve is of; None: the study's
    alone      one of the workers, with its share of the rows, that hears of no other
    """

    name: str
    workers: int
    learns_as: "Form | None" = None
    zero: Zero = 0
    seeds: int | None = None
    pipeline: bool = False
    alone: bool = False
    comm: CommConfig = field(default_factory=CommConfig)
    local: LocalTrainingConfig = field(default_factory=LocalTrainingConfig)

    @property
    def curve(self) -> "Form":
        return self.learns_as or self

    @property
    def learners(self) -> int:
        """Workers of its curve: one learns what all do where messages are whole, or linear in what is sent."""
        return self.workers if self.pipeline or self.local.every or self.comm.codes_shards else 1

    def config(self, study: "Study", steps: int, seed: int) -> PretrainConfig:
        config = replace(study.config, steps=steps, seed=seed, zero=self.zero, comm=self.comm, local=self.local)
        if self.pipeline:
            config = replace(config, mesh=MeshConfig(pp=self.workers), pipeline=PipelineConfig("2bw"))
        if self.alone:
            data = replace(config.data, global_batch=config.data.global_batch // self.workers)
            config = replace(config, data=data)
        return config


def forms(numbers: Sequence[int]) -> list[Form]:
    found, (least, *_) = list[Form](), numbers
    diloco = LocalTrainingConfig(every=ROUND, bits=2, outer_lr=OUTER_LR, outer_momentum=OUTER_MOMENTUM)
    synchronous, powersgd = Form(ZERO3, least, zero=3), Form(POWERSGD, least, comm=POWERSGD_COMM)
    comm = CommConfig(weights="int8", gradients="int4", secondary=True)
    zero_pp = Form(ZERO_PP, least, zero=3, comm=comm)
    with_feedback = replace(zero_pp, name=WITH_FEEDBACK, comm=replace(comm, feedback=True))
    for workers in numbers:
        found += [
            Form(ALL_REDUCE, workers, synchronous),
            replace(synchronous, workers=workers, learns_as=None if workers == least else synchronous),
            replace(zero_pp, workers=workers, learns_as=None if workers == least else zero_pp),
            replace(with_feedback, workers=workers, learns_as=None if workers == least else with_feedback),
            replace(powersgd, workers=workers, learns_as=None if workers == least else powersgd),
            Form(DILOCO, workers, local=diloco),
        ]
    return [*found, Form(TWO_BW, least, pipeline=True, seeds=1)]  # which no target asks for


def alone(numbers: Sequence[int]) -> list[Form]:
    """Of which only curves are asked."""
    return [Form(ALONE, workers, zero=3, seeds=1, alone=True) for workers in numbers]


@dataclass(frozen=True)
class Study:
    """The sizes.  config: what all runs have in common; every: steps between evaluations"""

    config: PretrainConfig
    workers: tuple[int, ...] = (2, 4)
    links: tuple[str, ...] = tuple(LINKS)
    seeds: tuple[int, ...] = (0, 1, 2)
    steps: int = 1500
    every: int = 150

    @property
    def gradient_bytes(self) -> int:
        """In fp32."""
        return 4 * sum(p.numel() for p in _on_meta(self.config).parameters())


def study_of(options: Options) -> Study:
    demo = RECIPES["demo"]()
    common = replace(demo, device="cpu", precision=fastest_precision(), hf=False)
    if not options.quick:
        data = replace(demo.data, global_batch=8, sequence_length=128, heldout_fraction=0.02)
        return Study(replace(common, data=data))
    small = RECIPES["debug"]()
    model = replace(small.model, num_layers=2)
    data = replace(small.data, global_batch=8)
    optim = replace(demo.optim, schedule=replace(demo.optim.schedule, warmup_steps=1))
    config = replace(common, model=model, data=data, optim=optim, precision="fp32")
    return Study(config, workers=(2,), links=("none",), seeds=(0,), steps=4, every=2)


# --- a run, on every rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ran:
    """What became of a run; bytes are wire bytes of one rank.

    bits     step -> held-out, of a byte
    seconds  of each step
    sent     bytes of a step; reduced: of them those of sums
    a_round  bytes to other workers of a round of local training
    """

    bits: dict[int, float]
    seconds: list[float]
    sent: float
    reduced: float
    a_round: float


def trained(config: PretrainConfig, corpus: Corpus, bits_per_s: float | None) -> Ran:
    """A run over links of that rate, from begin to end; None: nothing is counted, which would take a fifth of it."""
    with start("cpu", config.seed) as runtime, ExitStack() as stack:
        stack.enter_context(redirect_stdout(StringIO()))  # a line a step, of dozens of runs
        torch.set_num_threads(1)
        mesh = runtime.mesh(config.mesh, config.zero)
        plan = decoder_plan(config.model, config.mesh)
        parallel = parallelize(
            _on_meta(config), mesh, config, plan, materialise=lambda made: initialise(made, config.seed)
        )
        optimizer = build_optimizer(config.optim, parallel.masters)
        volume = stack.enter_context(slow_link(parallel.whole_mesh, bits_per_s)) if bits_per_s is not None else None
        passed = list[tuple[float, float]]()

        def weight(batch: dict[str, Tensor]) -> Tensor:
            if volume is None:
                return num_targets(batch)
            sums = {key: count for key, count in volume.bytes.items() if key[0] in ("all_reduce", "reduce_scatter")}
            passed.append((volume.wire_bytes, replace(volume, bytes=Counter(sums)).wire_bytes))
            return num_targets(batch)

        evaluate = heldout_evaluation(config, corpus, data_axis(mesh), runtime.device)
        evaluate = evaluate if config.evaluate_every else None
        summary = fit(
            parallel, optimizer, training_batches(config, corpus), token_loss, config, runtime, weight=weight,
            evaluate=evaluate,
        )  # fmt: skip
        rows = []
        if runtime.leads:
            rows = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    name = "heldout_bits_per_byte"
    bits = {row["step"]: row[name] for row in [*rows, summary] if name in row}
    sent = reduced = 0.0
    if passed:
        calls = len(passed) // config.steps  # of `weight` in a step
        sent, reduced = (
            (end - begin) / (config.steps - 1) for begin, end in zip(passed[0], passed[-calls], strict=True)
        )
    rounds = [row["sent_bytes_dp_replicate"] for row in rows if "sent_bytes_dp_replicate" in row]
    return Ran(bits, [row["step_s"] for row in rows], sent, reduced, rounds[0] if rounds else 0.0)


def _on_meta(config: PretrainConfig) -> Decoder:
    with torch.device("meta"):
        return Decoder(config.model)


def trained_in_turn(jobs: Sequence[tuple[PretrainConfig, float | None]], corpus: Corpus) -> list[Ran]:
    found = []
    for config, bits_per_s in jobs:
        folders = [tempfile.mkdtemp(prefix="slow-links-") if dist.get_rank() == 0 else ""]
        dist.broadcast_object_list(folders, src=0)
        found.append(trained(replace(config, out=Path(folders[0])), corpus, bits_per_s))
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folders[0])
    return found


# --- the study --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Job:
    """A run, and the numbers that are made of it."""

    case: dict[str, str | int]
    workers: int
    config: PretrainConfig
    bits_per_s: float | None
    numbers: Callable[[Ran], dict[str, Number]]


def timed(study: Study, form: Form, link: str) -> Job:
    """Seconds of a step, and the bytes that a rank sends in one."""
    local = replace(form.local, every=TIMED_ROUND) if form.local.every else form.local
    config = replace(form, local=local).config(study, TIMED_STEPS, 0)
    ends = range(TIMED_ROUND - 1, TIMED_STEPS, TIMED_ROUND) if form.local.every else range(0)

    def numbers(ran: Ran) -> dict[str, Number]:
        usual = median(s for step, s in enumerate(ran.seconds) if step >= UNTIMED and step not in ends)
        surplus = median(ran.seconds[end] for end in ends) - usual if ends else 0.0
        sent, reduced = [ran.a_round / ROUND] * 2 if ends else (ran.sent, ran.reduced)
        bytes_sent = {"sent": Number(sent / 1e6, "MB/step"), "reduced": Number(reduced / 1e6, "MB/step")}
        return {"step": Number(usual + max(0.0, surplus) / ROUND, "s")} | bytes_sent

    return Job(_case("step times", form, link), form.workers, config, LINKS[link], numbers)


def learned(study: Study, form: Form, seed: int) -> Job:
    """Held-out bits of a byte, on the way."""
    config = replace(form.config(study, study.steps, seed), evaluate_every=study.every)

    def numbers(ran: Ran) -> dict[str, Number]:
        return {f"after {step}": Number(found, "bits/byte") for step, found in ran.bits.items()}

    return Job(_case("curves", form, "none", seed), form.learners, config, None, numbers)


class Runs:
    """Each once: those that an interrupted study has finished are taken over."""

    def __init__(self, study: Study, options: Options):
        self.study, self.options, self.rows = study, options, list[Row]()
        self.corpus = prepare(study.config.data, ROOT / "runs" / "corpora")
        self._known = {tuple(row.case.items()): row for row in options.earlier}

    def of(self, jobs: Sequence[Job]) -> list[Row]:
        missing = [job for job in jobs if tuple(job.case.items()) not in self._known]
        together = [[job for job in missing if job.workers == n] for n in dict.fromkeys(job.workers for job in missing)]
        for batch in together if self.options.quick else [[job] for job in missing]:
            given = [(job.config, job.bits_per_s) for job in batch]
            ranks = on_ranks(
                batch[0].workers, trained_in_turn, given, self.corpus, preload=[__name__], limit_s=7200
            )  # fmt: skip
            for job, ran in zip(batch, ranks[0], strict=True):
                row = self._known[tuple(job.case.items())] = Row(job.case, job.numbers(ran))
                self.options.kept(row)
        found = [self._known[tuple(job.case.items())] for job in jobs]
        self.rows += found
        return found

    def beside_torch(self) -> list[Row]:
        """PowerSGD's sums and bytes beside those of torch's hook, of gradients of the model's shapes."""
        shapes = {tuple(p.shape) for p in _on_meta(self.study.config).parameters()}
        taken = sorted(shape for shape in shapes if takes(shape, POWERSGD_COMM))
        cases = [_case(BESIDE, Form(f"{POWERSGD} {m} x {n}", self.study.workers[0]), "none") for m, n in taken]
        if any(tuple(case.items()) not in self._known for case in cases):
            asked = taken, POWERSGD_COMM.rank, 3 if self.options.quick else 20
            preload = [beside_torchs_hook.__module__]
            of_worker = on_ranks(self.study.workers[0], beside_torchs_hook, *asked, preload=preload)[0]
            for case, of in zip(cases, of_worker, strict=True):
                sent = {"ours": Number(of.ours / 1e6, "MB/step"), "theirs": Number(of.theirs / 1e6, "MB/step")}
                numbers = {"difference": Number(of.difference, ""), "lost": Number(of.lost, "")} | sent
                row = self._known[tuple(case.items())] = Row(case, numbers)
                self.options.kept(row)
        found = [self._known[tuple(case.items())] for case in cases]
        self.rows += found
        return found


def _case(source: str, form: Form, link: str, seed: int | str = "") -> dict[str, str | int]:
    return {"from": source, "form": form.name, "workers": form.workers, "link": link, "seed": seed}


def step_of(name: str) -> int:
    return int(name.removeprefix("after "))


def mean_curve(rows: Sequence[Row]) -> dict[int, float]:
    """step -> held-out bits of a byte, over the seeds."""
    return {step_of(name): mean(row.numbers[name].value for row in rows) for name in rows[0].numbers}


def steps_to(curve: dict[int, float], bits: float) -> float:
    """Where a curve first passes that loss: on the straight line between two evaluations.

    Raises ValueError for a curve that does not.
    """
    before: tuple[int, float] | None = None
    for step, found in sorted(curve.items()):
        if found <= bits:
            if before is None:
                return step
            share = (before[1] - bits) / (before[1] - found)
            return before[0] + share * (step - before[0])
        before = step, found
    raise ValueError(f"the curve ends above {bits} bits")


PARTS = "losses", "times"


def measure(options: Options) -> Measured | None:
    if options.part not in ("", *PARTS):
        raise UserError(f"--part {options.part}: slow_links has the parts {' and '.join(PARTS)}")
    study = study_of(options)
    runs, tried = Runs(study, options), forms(study.workers)
    learnt = list(dict.fromkeys(form.curve for form in tried))
    asked = [*learnt, *alone(study.workers)]
    learners = [(form, seed) for seed in study.seeds for form in asked if seed in study.seeds[: form.seeds]]
    pairs = [(form, link) for link in study.links for form in tried]
    times, said = dict[tuple[Form, str], Row](), ""
    if options.part != "losses":
        times |= zip(pairs, runs.of([timed(study, form, link) for form, link in pairs]), strict=True)
        steps = {form: times[form, "none"].numbers["step"].value for form in tried}
        said = estimate(study, runs.corpus, [form for form, _ in learners if not form.alone], steps)
        print(said, flush=True)
    if options.part == "times":
        return None
    besides = runs.beside_torch()
    curves = runs.of([learned(study, form, seed) for form, seed in learners])
    if options.part == "losses":
        return None
    means = {form: mean_curve([row for (one, _), row in zip(learners, curves) if one == form]) for form in learnt}
    reached = max(min(curve.values()) for curve in means.values())
    totals = []
    for (form, link), row in times.items():
        steps = steps_to(means[form.curve], reached)
        numbers = {"steps": Number(steps, ""), "time": Number(steps * row.numbers["step"].value, "s")}
        totals.append(Row(_case("time to the loss", form, link), numbers))
        options.kept(totals[-1])
    last = {form: curve[max(curve)] for form, curve in means.items()}
    reduced = {form: times[form, "none"].numbers["reduced"].value for form in tried}
    differs = max(row.numbers["difference"].value for row in besides)
    found = [
        *targets(study, reduced, last),
        Target("1e-6 / the largest difference of PowerSGD's sums from those of torch's hook", 1.0, 1e-6 / differs),
    ]
    return Measured((*runs.rows, *totals), tuple(found), notes(study, reached, said))


def estimate(study: Study, corpus: Corpus, learners: Sequence[Form], step_s: dict[Form, float]) -> str:
    """How long the curves will take here, where a forward is a third of a step.  learners: one a curve"""
    assert corpus.heldout is not None
    batches = evaluation_batches(study.config.model, study.config.data, corpus.heldout, corpus.tokenizer)
    steps = study.steps + study.steps // study.every * batches.num_batches / 3
    minutes = steps * sum(step_s[form] for form in learners) / 60
    return f"{len(learners)} curves of {study.steps} steps: about {minutes:.0f} minutes"


def targets(study: Study, reduced: dict[Form, float], last: dict[Form, float]) -> Iterator[Target]:
    """reduced: MB a step; last: held-out bits of a byte behind the last step."""
    of = {(form.name, form.workers): form for form in reduced}
    synchronous = last[of[ZERO3, study.workers[0]]]
    for workers in study.workers:
        powersgd, diloco = of[POWERSGD, workers], of[DILOCO, workers]
        whole = wire_share("all_reduce", workers) * study.gradient_bytes / 1e6
        where = f"{workers} workers"
        yield Target(
            f"{ALL_REDUCE} / {POWERSGD}, bytes of reductions, {where}",
            20.0,
            reduced[of[ALL_REDUCE, workers]] / reduced[powersgd],
        )
        yield Target(f"fp32 {ALL_REDUCE} / {DILOCO}, bytes, {where}", 750.0, whole / reduced[diloco])
        for form, within in ((of[WITH_FEEDBACK, workers], 1.005), (powersgd, 1.01), (diloco, 1.01)):
            if form.learns_as is None:
                what = f"{within} of synchronous bits per byte / those of {form.name}, {where}"
                yield Target(what, 1.0, within * synchronous / last[form])


def notes(study: Study, reached: float, said: str) -> tuple[str, ...]:
    rows, steps = study.config.data.global_batch, study.steps
    return (
        f"The loss that all are timed to is {reached:.4f} held-out bits per byte, the best that the mean curve of "
        f"every form reaches in {steps} steps of {rows} rows, which it has from all workers together.",
        "A rank sleeps while its message is on the link: nothing is computed meanwhile, so what a form could hide "
        "behind its computation is not seen. Links have no latency. Bytes are those of ring algorithms, of one rank.",
        f"Curves of {ZERO3} and {POWERSGD} are of one worker that has all rows, whose rounding of sums is another. "
        f"That of {TWO_BW} is of one seed.",
        f"{BESIDE}: of two workers whose gradients have as much noise of their own as they have in common, of twenty "
        "steps in fp64. difference: of the sums, relative; lost: of the sum, what the step with the least did not "
        "send.",
        f"{ALL_REDUCE} is ZeRO 0, and learns as {ZERO3} does. {DILOCO}: Muon inside, rounds of {ROUND} steps, 2 bits "
        "in both directions, error feedback. PowerSGD: rank 4 at ZeRO 0.",
        f"{DILOCO}'s outer rate is {OUTER_LR:g} and its momentum {OUTER_MOMENTUM:g}, Nesterov's. "
        f"{ALONE}: its share of the rows, ZeRO-3's optimizer, nothing sent; of one seed.",
        f"{ZERO_PP}: int8 weights, int4 gradients, a second copy on each worker, a node of its own. On more workers it "
        f"rounds in other places, and is taken to learn as on the fewest. {WITH_FEEDBACK}: what codes of gradients "
        "leave out goes along in the next step.",
        "sent: all of a step's messages; reduced: sums alone. The rest is of Muon, where each rank updates some "
        "matrices and sends them to the others, of ZeRO-3's gathers and of activations.",
        "Workers share this machine's cores: where there are more of them than cores, steps compute for longer.",
        f"Estimated before the curves were measured: {said}.",
    )


def plot(result: Result, folder: Path) -> Path:
    """Curves; step times and times to the loss by link, of the least number of workers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, (curves, steps, times) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    of = {name: [row for row in result.figures if row.case["from"] == name] for name in SOURCES}
    keys = dict.fromkeys((row.case["form"], row.case["workers"]) for row in of["step times"])
    links = list(dict.fromkeys(str(row.case["link"]) for row in of["step times"]))
    for index, (form, workers) in enumerate(keys):
        color, label = f"C{index}", f"{form}, {workers} workers"
        own = {
            name: [r for r in rows if (r.case["form"], r.case["workers"]) == (form, workers)]
            for name, rows in of.items()
        }
        if own["curves"]:
            curve = mean_curve(own["curves"])
            curves.plot(list(curve), list(curve.values()), color=color, label=label)
        for axes, source, number in ((steps, "step times", "step"), (times, "time to the loss", "time")):
            values = [row.numbers[number].value for row in own[source]]
            axes.plot(links, values, marker="o", color=color, label=label)
    for row in (row for row in of["curves"] if row.case["form"] == ALONE):
        curve = mean_curve([row])
        curves.plot(list(curve), list(curve.values()), ":", label=f"{ALONE} of {row.case['workers']}")
    curves.set(title="held-out bits per byte", xlabel="steps")
    steps.set(title="seconds of a step", yscale="log", xlabel="link")
    times.set(title="seconds to the loss that all reach", yscale="log", xlabel="link")
    for axes in (curves, steps):
        axes.legend(fontsize=7)
    png = folder / "slow_links.png"
    save_figure(figure, png, 120)
    plt.close(figure)
    return png


SOURCES = ("step times", "curves", "time to the loss")
MEASURES = (
    "core/parallel",
    "core/comm",
    "core/optim",
    "core/models/decoder.py",
    "core/train",
    "apps/llm/corpus.py",
    "apps/llm/batches.py",
    "apps/llm/recipes.py",
    "benchmarks/ranks.py",
    "benchmarks/slow_links.py",
    "benchmarks/slow_links_peers.py",
)
BENCHMARK = Benchmark("slow_links", "Training over slow links", measure, MEASURES, plot, ("--part",), resumes=True)

if __name__ == "__main__":
    sys.exit(run_command(lambda argv: main(argv, only="slow_links"), sys.argv[1:]))
