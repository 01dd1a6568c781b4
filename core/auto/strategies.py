"""Plans of a decoder's training on a cluster: all ways to run it that are known here, and those that none beats.

1. `meshes`: pp, dp, cp, ep and tp (1d in a machine, the grids where they divide) whose product is the ranks, as far as
   blocks, rows, experts and the model's own plan allow; each in the formats that the GPU computes in (`precisions`).
2. `runs` of a mesh: ZeRO, the schedule of the stages, rows of a microbatch, checkpointing, when gradients are reduced.
   What does not fit is dropped by `core.estimate.estimate_memory`. Where all that a microbatch can keep is too much,
   larger ones are not tried. gpipe is not: 1f1b takes as long and keeps less. 2bw, which learns from old weights, is
   where a job names it, and so are messages in few bits and workers that meet seldom: with those what they go with.
3. Gemini's budgets, where a run of ZeRO-3 does not fit them. Where there is a drive below the host, closed forms say
   which of these are looked at, and Gemini's own planner, on a trace of the step, what they take (`Drive`).
4. Of the rest a time that the step cannot be under (`StepClock.least_s`) is known by sums alone. In its order a plan is
   run on the clock unless one is there that is no slower than that and takes no more memory. Those that none beats in
   both time and memory are the front.

Nothing is drawn or sampled: the front is that of every plan in the space, but for those with a drive.
"""

import math
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from core.auto.machines import GIB, USABLE_SHARE, Cluster
from core.auto.step_time import StepClock, StepTime
from core.config import UserError, in_words
from core.estimate.memory import estimate_memory
from core.estimate.residency import GeminiEstimate
from core.estimate.shape import ModelShape, RunShape, decoder_shape
from core.mesh import TpMode, mesh_shape
from core.models.decoder import DecoderConfig
from core.optim.build import OptimConfig
from core.parallel.coded_shards import check_nodes, check_shards
from core.parallel.compress import IN_SIGNS, UNCOMPRESSED, CommConfig
from core.parallel.context import check_length
from core.parallel.correction import CorrectionName
from core.parallel.pipeline.schedule import SCHEDULES, PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeMode
from core.precision import Precision, compute_dtype

MOST_GRID_RANKS, MOST_CONTEXT_RANKS, MOST_ROWS = 64, 8, 64
"""Of tensor parallelism on a grid, of context parallelism, and of a microbatch: beyond, nothing is tried."""
SIXTEEN: tuple[Precision, ...] = ("bf16", "fp16")
LEAST_TOKENS = 1024
"""Of a rank of context parallelism: of fewer, nothing is tried."""
RECOMPUTED: tuple[tuple[RecomputeMode, int], ...] = (
    *(("full", 1), ("full", 2), ("full", 4), ("selective", 1), ("none", 1)),
)
"""Mode and one block of how many, the one that keeps least first."""
SCHEDULED: tuple[tuple[ScheduleName, int], ...] = (
    *(("1f1b", 2), ("interleaved", 2), ("interleaved", 4), ("zb-h1", 2), ("zbv", 2)),
)
"""Schedules and stages of a rank under `interleaved`."""
ALLOWED: tuple[ScheduleName, ...] = ("2bw",)
"""Schedules that learn from old weights, and are tried where a job names them: what those of 2bw, one update old, cost
is known."""
BUDGETS = (1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25)
"""Gemini's, as shares of what a run may take of a device."""
BUDGETS_WITH_A_DRIVE = (1.0, 0.5, 0.25)
PRICED = 2
"""Of each of those budgets so many runs are planned as they run, the first by closed forms."""


@dataclass(frozen=True)
class Job:
    """A training run whose way to run is sought.

    batches    rows of the global batch: of a batch that grows all that it has, the last one being planned
    precision  the one of 16 bits that is tried, where it is one and the GPU has it
    held       options by their dotted names that are given: `mesh.tp`, `zero`, …
    schedules  of stages that are tried; empty: the one that is held, or those whose gradients are of the newest weights
    correction  of old weights, where a schedule has them
    comm        messages of data parallelism, of every plan
    rounds      of workers that train locally, the ranks of dp_replicate: fields of `RunShape`
    """

    model: DecoderConfig
    batches: tuple[int, ...]
    sequence_length: int
    precision: Precision = "bf16"
    optimizer: OptimConfig = field(default_factory=OptimConfig)
    held: Mapping[str, Any] = field(default_factory=dict)
    schedules: tuple[ScheduleName, ...] = ()
    correction: CorrectionName = "none"
    comm: CommConfig = UNCOMPRESSED
    rounds: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = tuple(dict.fromkeys((*(name for name, _ in SCHEDULED), *ALLOWED)))
        held = self.held.get("pipeline.schedule")
        for option, names in (("schedules", self.schedules), ("pipeline.schedule", (held,) if held else ())):
            for name in names:
                if name not in known:
                    raise UserError(f"{option}={name}: {_why_not_searched(name)}; use {', '.join(known)}")

    @property
    def scheduled(self) -> list[tuple[ScheduleName, int]]:
        """Schedules that are tried, and stages of a rank under `interleaved`."""
        held = self.held.get("pipeline.schedule")
        names = self.schedules or ((held,) if held else tuple(name for name, _ in SCHEDULED))
        others: list[tuple[ScheduleName, int]] = [(name, 2) for name in ALLOWED]
        return [(name, chunks) for name, chunks in (*SCHEDULED, *others) if name in names]

    @property
    def batch(self) -> int:
        return self.batches[-1]

    def allows(self, name: str, value: Any) -> bool:
        """Whether an option may have this value."""
        return name not in self.held or self.held[name] in (None, value)


@dataclass(frozen=True)
class Drive:
    """A drive below the host, for what that does not hold under Gemini.

    read, write  bytes a second of a rank's part of it
    options      of a run with it, by their dotted names
    price        (run, budget) -> what Gemini makes of it; raises UserError where no step fits
    """

    read: float
    write: float
    options: Mapping[str, Any]
    price: Callable[[RunShape, int], GeminiEstimate]


@dataclass(frozen=True)
class Plan:
    """A way to run a job: memory_bytes of the fullest rank's device, and the step's time.

    budget_bytes  of Gemini; None: without it
    residency     where a drive is below its host
    beside        options that are not sought, and that it has and others do not
    """

    run: RunShape
    memory_bytes: int
    time: StepTime
    budget_bytes: int | None = None
    residency: GeminiEstimate | None = None
    beside: Mapping[str, Any] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        return self.time.step_s

    def beats(self, step_s: float, memory_bytes: int) -> bool:
        """Whether what takes so long and so much need not be looked at."""
        return self.step_s <= step_s and self.memory_bytes <= memory_bytes

    def options(self) -> dict[str, Any]:
        """The training options that say all of it, by their dotted names."""
        return {**options_of(self.run, self.budget_bytes), **self.beside}


def options_of(run: RunShape, budget_bytes: int | None = None) -> dict[str, Any]:
    """See `Plan.options`."""
    hybrid = run.zero > 0 and run.dp_replicate > 1
    return {
        "precision": run.precision,
        "mesh.pp": run.pp,
        "mesh.dp_replicate": run.dp_replicate if hybrid else None,
        "mesh.cp": run.cp,
        "mesh.cp_mode": run.mesh.cp_mode,
        "mesh.tp": run.tp,
        "mesh.tp_mode": run.tp_mode,
        "mesh.tp_depth": run.tp_depth,
        "mesh.ep": run.ep,
        "zero": run.zero,
        "reduce_each": run.reduce_each,
        "microbatch": run.microbatch_size,
        "recompute.mode": run.recompute,
        "recompute.every": run.recompute_every,
        "pipeline.schedule": run.pipeline.schedule,
        "pipeline.chunks": run.pipeline.chunks,
        "gemini.budget": None if budget_bytes is None else f"{budget_bytes // 2**20}MiB",
    }


@dataclass(frozen=True)
class Found:
    """plans: that none beats, the fastest first; tried: how many fit; least_bytes: of all that were tried."""

    plans: tuple[Plan, ...]
    tried: int
    least_bytes: int


# --- the space --------------------------------------------------------------------------------------------------------


def divisors(number: int) -> list[int]:
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]


def tensor_forms(ranks: int, per_machine: int) -> Iterator[tuple[TpMode, int]]:
    """(mode, depth) of tensor parallelism over so many ranks."""
    if ranks <= max(per_machine, 1):
        yield "1d", 1
    if 1 < ranks <= MOST_GRID_RANKS:
        for depth in divisors(ranks):
            side = math.isqrt(ranks // depth)
            if side > 1 and side * side * depth == ranks and depth <= side:
                yield ("2d" if depth == 1 else "2.5d"), depth
        if (side := round(ranks ** (1 / 3))) > 1 and side**3 == ranks:
            yield "3d", 1


def precisions(job: Job, cluster: Cluster) -> list[Precision]:
    """The formats that are tried: fp32, and one of 16 bits, since fp16 takes the time and the bytes of bf16.

    Raises UserError for a format that is given and that the GPU has no units for.
    """
    names: tuple[Precision, ...] = get_args(Precision)
    has = [name for name in names if cluster.gpu.peak_flops(compute_dtype(name)) is not None]
    if (given := job.held.get("precision")) is not None:
        if given not in has:
            raise UserError(
                f"precision={given} and a {cluster.gpu.name} does not compute in it; give --precision "
                f"{' or '.join(name for name in has)}, or another --gpu"
            )
        return [given]
    tried: tuple[Precision, ...] = (job.precision, *SIXTEEN)
    sixteen: list[Precision] = [name for name in tried if name in has and name in SIXTEEN]
    wide: list[Precision] = ["fp32"] if "fp32" in has else []
    return [*sixteen[:1], *wide]


def meshes(job: Job, cluster: Cluster) -> Iterator[RunShape]:
    """Runs of every mesh of the cluster's ranks in every format, with nothing else said."""
    shape, ranks, formats = decoder_shape(job.model), cluster.ranks, precisions(job, cluster)
    plain = RunShape(precision=formats[0], optimizer=job.optimizer, sequence_length=job.sequence_length)
    plain = replace(plain, comm=job.comm, **job.rounds)
    # Pipelines outside, because runs of as many stages share their schedules.
    for pp in divisors(ranks):
        for tp in divisors(ranks // pp):
            for mode, depth in tensor_forms(tp, cluster.ranks_per_machine):
                for cp, exchange in _contexts(ranks // tp // pp, mode, job.sequence_length):
                    data = ranks // tp // pp // cp
                    if pp > shape.num_blocks or any(batch % data for batch in job.batches):
                        continue
                    for ep in divisors(data) if shape.num_experts and mode == "1d" else (1,):
                        sizes = {"pp": pp, "tp": tp, "tp_mode": mode, "tp_depth": depth, "ep": ep}
                        run = replace(plain, **sizes, cp=cp, cp_exchange=exchange, dp_replicate=data)
                        if ep <= max(1, shape.num_experts) and _may_be(job, run) and _is_possible(shape, run):
                            yield from (replace(run, precision=precision) for precision in formats)


def _contexts(ranks: int, mode: TpMode, length: int) -> Iterator[tuple[int, int]]:
    """(cp, ranks that exchange heads): alone, rings, Ulysses."""
    yield 1, 1
    for cp in divisors(ranks)[1:] if mode == "1d" else ():
        if cp <= MOST_CONTEXT_RANKS and cp * LEAST_TOKENS <= length:
            yield cp, 1
            yield cp, cp


def _may_be(job: Job, run: RunShape) -> bool:
    """Whether the mesh is none that is ruled out by what is held."""
    found = options_of(run)
    names = ("pp", "cp", "cp_mode", "tp", "tp_mode", "tp_depth", "ep")
    return all(job.allows(f"mesh.{name}", found[f"mesh.{name}"]) for name in names)


def _is_possible(shape: ModelShape, run: RunShape) -> bool:
    """Whether the model can be cut so: what a run refuses before it starts."""
    try:
        check_length(run.sequence_length, run.cp)
        shape.parts(run)
    except UserError:
        return False
    return True


def _data_forms(job: Job, mesh: RunShape, cluster: Cluster) -> Iterator[RunShape]:
    """A mesh with each level of ZeRO; of 3 also with shards in a machine and copies between machines."""
    data = mesh.num_data_ranks
    for zero in (0, 1, 2, 3) if data * mesh.cp > 1 else (0,):
        if not job.allows("zero", zero):
            continue
        in_machine = cluster.ranks_per_machine // (mesh.tp * mesh.cp)
        copies = {data} if zero == 0 else {1}
        if zero == 3 and 1 < in_machine < data and data % in_machine == 0:
            copies.add(data // in_machine)
        held = job.held.get("mesh.dp_replicate")
        if zero and held is not None and data % held == 0:
            copies.add(held)
        for replicate in sorted(copies):
            run = replace(mesh, zero=zero, dp_replicate=replicate, dp_shard=data // replicate)
            sizes = {"mesh.dp_replicate": run.dp_replicate, "mesh.dp_shard": run.dp_shard}
            divided = run.dp_replicate if zero == 0 else run.dp_shard
            allowed = divided % run.ep == 0 and all(job.allows(name, size) for name, size in sizes.items())
            if allowed and _can_send(run):
                yield run


def _can_send(run: RunShape) -> bool:
    """Whether a run on this mesh and level of ZeRO would start with its messages."""
    comm = run.comm
    try:
        comm.check_mesh(run.pp, run.ep, run.cp)
        comm.check_activations(run.mesh)
        check_shards(comm, run.zero)
        check_nodes(comm, mesh_shape(run.mesh))
    except UserError:
        return False
    return not (comm.compress in IN_SIGNS and run.zero == 3)


def _why_not_searched(name: str) -> str:
    if name == "gpipe":
        return "it is not searched, since 1f1b takes as long and keeps less"
    return "it is not searched, since its weights are older with every stage, and what that costs is not known"


def _pipelines(job: Job, run: RunShape) -> Iterator[PipelineConfig]:
    for name, chunks in job.scheduled if run.pp > 1 else SCHEDULED[:1]:
        spec = SCHEDULES[name]
        if run.pp > 1 and spec.runs_ahead and run.local_every:
            continue
        pipeline = PipelineConfig(name, chunks=chunks, correction=job.correction if spec.runs_ahead else "none")
        fits = run.pp == 1 or run.pp * pipeline.stages_per_rank <= job.model.num_layers
        given = {"zero=2": run.zero == 2, "zero=3": run.zero == 3, "precision=fp16": run.precision == "fp16"}
        refused = run.pp > 1 and any(given.get(option) for option in spec.refuses)
        allowed = job.allows("pipeline.schedule", name)
        allowed = allowed and (name != "interleaved" or job.allows("pipeline.chunks", chunks))
        if fits and allowed and not refused:
            yield pipeline


def runs(job: Job, mesh: RunShape, cluster: Cluster) -> Iterator[list[RunShape]]:
    """The runs of a mesh, in lists that differ in checkpointing alone, the one that keeps least first."""
    rows = job.batch // mesh.num_data_ranks
    for of_data in _data_forms(job, mesh, cluster):
        for pipeline in _pipelines(job, of_data):
            whole = job.comm.compress is None and job.comm.gradients is None  # else a step's are coded once
            for each in (False, True) if of_data.zero >= 2 and whole else (False,):
                for size in divisors(rows):
                    number = rows // size
                    if size > MOST_ROWS or not job.allows("microbatch", size) or (each and number == 1):
                        continue
                    fewest = SCHEDULES[pipeline.schedule].fewest(pipeline.replicas_of(of_data.pp))
                    if not job.allows("reduce_each", each) or number < fewest:
                        continue
                    run = replace(
                        of_data,
                        pipeline=pipeline,
                        reduce_each=each,
                        microbatch_size=size,
                        num_microbatches=number,
                    )
                    yield [
                        replace(run, recompute=mode, recompute_every=every)
                        for mode, every in RECOMPUTED
                        if job.allows("recompute.mode", mode) and job.allows("recompute.every", every)
                    ]


# --- the search -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class _Candidate:
    """least_s: no more than its step takes; unusual: how many options differ from the plainest run's."""

    least_s: float
    memory_bytes: int
    unusual: int
    number: int
    run: RunShape = field(compare=False)
    budget_bytes: int | None = field(default=None, compare=False)


def search(job: Job, cluster: Cluster, drive: Drive | None = None) -> Found:
    """The plans that no other beats in both time and memory.

    drive  below the hosts; then Gemini's plans are those that have it

    Raises UserError where no mesh divides the ranks, or nothing fits, with what would.
    """
    shape = decoder_shape(job.model)
    candidates: list[_Candidate] = []
    least = math.inf
    for run, memory_bytes, budget in _fitting(job, shape, cluster, closed=drive is None):
        least = min(least, memory_bytes)
        if memory_bytes <= cluster.memory_bytes:
            least_s = StepClock(shape, run, cluster, budget).least_s()
            candidates.append(_Candidate(least_s, memory_bytes, _unusual(run), len(candidates), run, budget))
    refused: list[UserError] = []
    with_drive = [] if drive is None else list(_with_drive(job, shape, cluster, drive, refused))
    if not candidates and not with_drive:
        said = f"; with the drive: {refused[0]}" if refused else ""
        raise UserError(_why_none(job, cluster, least) + said)
    front: list[Plan] = []
    for one in sorted(candidates):
        if any(plan.beats(one.least_s, one.memory_bytes) for plan in front):
            continue
        time = StepClock(shape, one.run, cluster, one.budget_bytes).time()
        front = _with(front, Plan(one.run, one.memory_bytes, time, one.budget_bytes))
    for plan in with_drive:
        front = _with(front, plan)
    tried = len(candidates) + len(with_drive)
    return Found(tuple(front), tried, front[-1].memory_bytes if math.isinf(least) else int(least))


def _with(front: list[Plan], plan: Plan) -> list[Plan]:
    """The front of these plans and one more."""
    if any(other.beats(plan.step_s, plan.memory_bytes) for other in front):
        return front
    front = [other for other in front if not plan.beats(other.step_s, other.memory_bytes)]
    insort(front, plan, key=lambda p: p.step_s)
    return front


def _way(run: RunShape) -> Any:
    """What runs have in common of which larger microbatches take more memory.

    Of one microbatch gradients need not wait whole, so that it may fit where smaller ones do not.
    """
    return run.zero, run.dp_replicate, run.pipeline, run.reduce_each, run.num_microbatches == 1


def _fitting(
    job: Job, shape: ModelShape, cluster: Cluster, closed: bool = True
) -> Iterator[tuple[RunShape, int, int | None]]:
    """(run, bytes, budget) of all that fits, and of what is tried first of the rest; closed: Gemini's, too."""
    budgets = _budgets(job, cluster) if closed else []
    for mesh in meshes(job, cluster):
        too_much: dict[Any, bool] = {}
        for alike in runs(job, mesh, cluster) if job.held.get("gemini.budget") is None else ():
            if not alike or too_much.get(way := _way(alike[0])):
                continue
            least = math.inf
            for run in alike:
                found = estimate_memory(shape, run)
                yield run, found.peak_bytes, None
                least = min(least, found.peak_bytes)
                if found.phases["update"] > cluster.memory_bytes:  # whatever activations are kept
                    break
            too_much[way] = least > cluster.memory_bytes
        if budgets and _takes_gemini(job, mesh):
            yield from _with_gemini(job, shape, mesh, cluster, budgets)


def _takes_gemini(job: Job, mesh: RunShape) -> bool:
    plain = not job.comm.is_given and not job.rounds
    return plain and mesh.pp == mesh.cp == 1 and mesh.tp_mode == "1d" and job.allows("zero", 3)


def _budgets(job: Job, cluster: Cluster, shares: Sequence[float] = BUDGETS) -> list[int]:
    """Gemini's budgets, in whole MiB."""
    if isinstance(given := job.held.get("gemini.budget"), int):
        return [given]
    if "gemini.budget" in job.held:
        return []
    return [int(share * cluster.memory_bytes) // 2**20 * 2**20 for share in shares]


def _with_drive(
    job: Job, shape: ModelShape, cluster: Cluster, drive: Drive, refused: list[UserError]
) -> Iterator[Plan]:
    """Gemini's plans with a drive below the host: of each budget those few that closed forms find the fastest.

    refused  gets what is said of runs that do not fit
    """
    budgets = _budgets(job, cluster, BUDGETS_WITH_A_DRIVE)
    whole = replace(cluster, host_bytes=math.inf)  # what the host does not hold may be on the drive
    found: dict[int, list[tuple[float, int, RunShape]]] = {budget: [] for budget in budgets}
    for mesh in meshes(job, cluster):
        for run, _, budget in _with_gemini(job, shape, mesh, whole, budgets) if _takes_gemini(job, mesh) else ():
            clock = StepClock(shape, run, cluster, budget)
            seconds = max(clock.least_s(), clock.drive_s(drive.read, drive.write))
            found[budget].append((seconds, len(found[budget]), run))
    for budget, runs_of_budget in found.items():
        priced = 0
        for _, _, run in sorted(runs_of_budget)[: 2 * PRICED]:
            if priced == PRICED:
                break
            try:
                made = drive.price(run, budget)
            except UserError as why:
                refused.append(why)
                continue
            priced += 1
            time = _time_with_drive(StepClock(shape, run, cluster, budget).time(), run, made)
            yield Plan(run, budget, time, budget, made, drive.options)


def _time_with_drive(closed: StepTime, run: RunShape, made: GeminiEstimate) -> StepTime:
    """What Gemini's planner has of the step, and of the closed forms the messages between ranks, which it has not.

    A step is no shorter than with a host that holds all, of which the closed forms know how long kernels take to begin.
    """
    beside = closed.messages_s + closed.reduced_s + closed.shared_s
    inside = max(made.seconds_of(run.num_microbatches), closed.step_s - beside)
    host = inside - closed.compute_s
    parts = {"compute_s": closed.compute_s, "messages_s": closed.messages_s, "reduced_s": closed.reduced_s}
    parts |= {"bubble_s": 0.0, "update_s": 0.0, "host_s": host, "shared_s": closed.shared_s}
    return StepTime(step_s=sum(parts.values()), **parts)


def _with_gemini(
    job: Job, shape: ModelShape, mesh: RunShape, cluster: Cluster, budgets: Sequence[int]
) -> Iterator[tuple[RunShape, int, int]]:
    """Runs in a budget that they exceed without Gemini."""
    data = mesh.num_data_ranks
    rows = job.batch // data
    for size in divisors(rows):
        if size > MOST_ROWS or not job.allows("microbatch", size):
            continue
        for mode, every in RECOMPUTED:
            if not (job.allows("recompute.mode", mode) and job.allows("recompute.every", every)):
                continue
            run = replace(mesh, zero=3, dp_replicate=1, dp_shard=data, recompute=mode, recompute_every=every)
            run = replace(run, microbatch_size=size, num_microbatches=rows // size)
            if data % run.ep:
                continue
            whole = estimate_memory(shape, run).peak_bytes
            for budget in budgets:
                if whole <= budget and "gemini.budget" not in job.held:
                    continue
                clock = StepClock(shape, run, cluster, budget)
                try:
                    fits = clock.host_bytes <= cluster.host_bytes
                except UserError:
                    continue
                if fits:
                    yield run, budget, budget


def _unusual(run: RunShape) -> int:
    """How many options say something else than the plainest run: of plans that are alike the plainer one is shown."""
    plain = options_of(RunShape())
    return sum(value != plain[name] for name, value in options_of(run).items())


# --- where nothing fits -----------------------------------------------------------------------------------------------


def _why_none(job: Job, cluster: Cluster, least_bytes: float) -> str:
    held = "".join(f" {name}={value}" for name, value in job.held.items() if value is not None)
    held += f" {job.comm.given}" if job.comm.is_given else ""
    given = f"with{held} " if held else ""
    if math.isinf(least_bytes) and next(meshes(job, cluster), None) is not None:
        return (
            f"no run on {cluster.ranks} ranks is searched {given}and a batch of {job.batch} rows; leave something out"
        )
    if math.isinf(least_bytes):
        near = sorted(range(1, 2 * cluster.ranks + 1), key=lambda n: (abs(n - cluster.ranks), -n))
        works = next((n for n in near if next(meshes(job, replace(cluster, ranks=n)), None) is not None), None)
        instead = "leave some of them out" if works is None else f"use --gpus {works}"
        return (
            f"no mesh of {cluster.ranks} ranks {given}divides a batch of {job.batch} rows, {job.model.num_layers} "
            f"blocks and {job.model.num_heads} heads; {instead}, or a batch that is a multiple of {cluster.ranks}"
        )
    needs, has = in_words(least_bytes), in_words(cluster.memory_bytes)
    ranks = next((n for n in _more(job, cluster) if _fits(job, replace(cluster, ranks=n))), None)
    advice = [f"--gpus {ranks} of them"] if ranks is not None else []
    advice.append(f"devices of {math.ceil(least_bytes / USABLE_SHARE / GIB)} GiB")
    return (
        f"no plan {given}fits {cluster.ranks} x {cluster.gpu.name}: the least needs {needs} of a device, "
        f"{in_words(least_bytes - cluster.memory_bytes)} more than the {has} that it may take; what would fit: "
        f"{' or '.join(advice)}"
    )


def _more(job: Job, cluster: Cluster) -> Iterator[int]:
    """Larger numbers of ranks: twice as many, and so on."""
    for doubled in range(1, 7):
        yield cluster.ranks * 2**doubled


def _fits(job: Job, cluster: Cluster) -> bool:
    """Whether something fits of what usually takes least."""
    least = {"microbatch": 1, "recompute.mode": "full", "recompute.every": 1, "pipeline.schedule": "1f1b"}
    job, shape = replace(job, held={**least, **job.held}), decoder_shape(job.model)
    return any(num_bytes <= cluster.memory_bytes for _, num_bytes, _ in _fitting(job, shape, cluster))


def nearest(job: Job, cluster: Cluster, run: RunShape) -> Mapping[str, Any] | None:
    """Of what fits on the ranks, the options of the run that differs from `run` in fewest; None where nothing fits."""
    given, shape = options_of(run), decoder_shape(job.model)
    best: tuple[int, int, dict[str, Any]] | None = None
    for found, memory_bytes, budget in _fitting(job, shape, cluster):
        if memory_bytes <= cluster.memory_bytes:
            options = options_of(found, budget)
            changed = {name: value for name, value in options.items() if value != given[name]}
            one = len(changed), memory_bytes, changed
            best = one if best is None or one[:2] < best[:2] else best
    return None if best is None else best[2]
