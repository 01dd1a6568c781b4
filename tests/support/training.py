"""A short training run of a tiny decoder on any mesh, by the real training step, and its comparison with one rank."""

import inspect
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from core.compose import ParallelConfig, parallelize
from core.gemini.config import GeminiConfig
from core.gemini.replicas import GeminiReplicas
from core.layout import layout_of, local
from core.mesh import MeshConfig, build_mesh, data_axis
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import decoder_plan
from core.nn.attention import StepContext
from core.optim.average import WeightAverage, ramp
from core.optim.build import OptimConfig, build_optimizer
from core.optim.prediction import Prediction
from core.optim.schedule import ScheduleConfig
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.run import Pipeline
from core.precision import LossScale
from core.trace.segments import Segments
from core.train import TrainConfig, TrainState, train_step
from core.train.curvature import curvature_of
from core.train.loop import nothing_between
from tests.support.covering import FEW, few_steps

LR = 1e-2
CLIP = 0.7  # below the norms of the first steps and above those of the last: some steps are clipped, some are not


@dataclass(frozen=True)
class Case:
    """One run: a model, a mesh, and how it is parallelised."""

    model: DecoderConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(precision="fp64"))
    steps: int = FEW
    batch: int = 12
    length: int = 7
    microbatch: int | None = None
    documents: bool = False
    masked: bool = False
    seed: int = 0
    optim: Any = "adamw"
    options: tuple[tuple[str, Any], ...] = ()
    budget: str | None = None
    policy: Any = "auto"
    order: Any = "auto"
    planned: bool = False
    host: str | None = None
    disk: Path | None = None
    clip: float | None = CLIP
    segments: Segments | None = None
    average: float | None = None


def batch_of(case: Case, step: int) -> dict[str, torch.Tensor]:
    """The whole batch of a step; some targets are not counted, more in some rows than in others.

    masked  a third of the tokens are targets, each where it stands
    """
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, case.model.vocab_size, (case.batch, case.length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    if case.masked:
        hidden = torch.rand(case.batch, case.length, generator=generator) < 0.3
        targets = tokens[:, :-1].masked_fill(~hidden, -100)
    targets[0, : 1 + step % 3] = -100
    batch = {"input_ids": tokens[:, :-1], "targets": targets}
    if case.documents:
        starts = torch.rand(case.batch, case.length, generator=generator) < 0.3
        batch["documents"] = starts.cumsum(1)
    return batch


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    context = StepContext(batch.get("documents"))
    return model(batch["input_ids"], context=context, targets=batch["targets"]) / weight(batch).clamp(min=1)


def weight(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["targets"] != -100).sum().double()


class _Config(TrainConfig):
    CHOOSES_SEGMENTS = True  # a case says them


def build(case: Case) -> tuple[TrainState, TrainConfig]:
    """The model of a case on this rank's mesh, with its optimizer."""
    config = _Config(
        **vars(case.parallel)
        | {"gemini": GeminiConfig(case.budget, case.policy, case.order, host=case.host, disk=case.disk)},
        mesh=case.mesh,
        steps=case.steps,
        microbatch=case.microbatch,
        optim=OptimConfig(
            case.optim,
            lr=LR,
            clip_norm=None if case.optim == "hessian_free" else case.clip,  # which clips nothing
            schedule=ScheduleConfig(warmup_steps=2),
            **dict(case.options),
        ),
    )
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    with torch.device("meta"):
        model = Decoder(case.model)
    parallel = parallelize(
        model,
        mesh,
        config,
        replace(decoder_plan(case.model, config.mesh), recompute=case.segments),
        materialise=lambda m: initialise(m, case.seed),
    )
    optimizer = build_optimizer(config.optim, parallel.masters)
    sizes = config.microbatch_rows(case.batch // data_axis(mesh).size())
    parts = [{k: v[:rows] for k, v in batch_of(case, 0).items()} for rows in sizes]
    average = None
    if case.average is not None:
        average = WeightAverage(parallel.masters, ramp(case.average), empty_like=parallel.empty_like)
        parallel.keep_average(average)
    state = TrainState(parallel, optimizer, LossScale(config.precision), {}, average)
    state.curvature = curvature_of(parallel, optimizer, predicted, config)
    parallel.updates_as_final = nothing_between(state, config)
    parallel.prepare(
        optimizer, (lambda: [lambda m, part=part: loss(m, part) for part in parts]) if case.planned else None
    )
    return state, config


def predicted(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> Prediction:
    return Prediction(model(batch["input_ids"], context=StepContext(batch.get("documents"))), "targets", "categorical")


class Piece(NamedTuple):
    """What a rank holds of a tensor, and which box of the whole that is."""

    box: tuple[slice, ...]
    value: torch.Tensor


def held(tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
    """Copies of what this rank holds; no message is sent for it."""
    return {n: Piece(layout_of(t).box(), local(t).detach().clone()) for n, t in tensors.items()}


def moved_since(start: Mapping[str, Piece], tensors: Mapping[str, torch.Tensor]) -> dict[str, Piece]:
    return {n: Piece(box, value - start[n].value) for n, (box, value) in held(tensors).items()}


def run(case: Case, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Losses, the last of them an evaluation's, and this rank's pieces of parameters: their start and displacement.

    without  collectives that are left out, to show that their absence is seen: `removed` explains the names
    """
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    rows = case.batch // axis.size()
    start = held(state.parallel.masters)
    losses = []
    with removed(*without) if without else nullcontext():
        own = slice(axis.get_local_rank() * rows, (axis.get_local_rank() + 1) * rows)
        batches = [{k: v[own] for k, v in batch_of(case, step).items()} for step in range(case.steps)]
        for step, mine in enumerate(batches):
            depth = 0 if state.parallel.ahead is None else state.parallel.ahead.depth
            following = batches[step + 1 : step + 1 + depth]
            losses.append(train_step(state, mine, loss, weight, config, step, following=following)["loss"])
    losses.append(evaluated(state, batches[-1]))
    found = {"losses": losses, "start": start, "displacement": moved_since(start, state.parallel.masters)}
    if state.average is not None:
        found["averages"] = {name: average.clone() for name, average in state.average.tensors.items()}
    return found if case.budget is None else found | moved(state.parallel)


def meshes_of_a_step(case: Case) -> int:
    """How many meshes the third step makes; torch takes milliseconds for each slice of one."""
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    rows = case.batch // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, 0).items()}
    made, make = [], DeviceMesh.__init__
    for step in range(3):
        made.clear()
        with patch.object(DeviceMesh, "__init__", lambda mesh, *a, **k: made.append(mesh) or make(mesh, *a, **k)):
            train_step(state, mine, loss, weight, config, step)
    return len(made)


def gemini_of(parallel: ParallelModel) -> GeminiReplicas:
    inner = parallel.inner if isinstance(parallel, Pipeline) else parallel
    assert isinstance(inner, GeminiReplicas)
    return inner


def moved(parallel: ParallelModel) -> dict[str, int]:
    """What Gemini had to do: the most bytes on the device, its budget, bytes moved, evictions."""
    tier = gemini_of(parallel).tier
    return {
        "peak": tier.peak_bytes,
        "budget": tier.budget_bytes,
        "moved": tier.moved_bytes,
        "evictions": tier.num_evictions,
    }


def evaluated(state: TrainState, mine: dict[str, torch.Tensor]) -> float:
    """The loss of the last batch without gradients, by a call of the model as it is, which every rank makes."""
    axis = data_axis(state.parallel.mesh)
    with torch.no_grad():
        both = torch.stack((loss(state.parallel.model, mine).double() * weight(mine), weight(mine)))
    dist.all_reduce(both, group=axis.get_group())
    return float(both[0] / both[1])


def of_all_stages(own: dict[str, Any], mesh: DeviceMesh) -> dict[str, Any]:
    """What the masters of all pipeline stages come to; each is on one."""
    if mesh["pp"].size() == 1:
        return own
    parts: list[Any] = [None] * mesh["pp"].size()
    dist.all_gather_object(parts, own, group=mesh["pp"].get_group())
    whole = {name: value for part in parts for name, value in part.items()}
    assert len(whole) == sum(map(len, parts)), "a parameter has a master on two stages"
    return whole


@contextmanager
def removed(module: str, collective: str) -> Iterator[None]:
    """Calls of `torch.distributed.<collective>` from `module` send nothing: each rank goes on with what it has."""
    if collective == "fsdp":  # its calls have other names in other versions of torch
        sync = FSDPModule.set_requires_gradient_sync
        with patch.object(FSDPModule, "set_requires_gradient_sync", lambda model, _: sync(model, False)):
            yield
        return
    real = getattr(dist, collective)
    quiet = _WITHOUT_SENDING[collective]

    def stand_in(*args, **kwargs):
        caller = inspect.currentframe()
        assert caller is not None
        assert caller.f_back is not None
        if caller.f_back.f_globals["__name__"] != module:
            return real(*args, **kwargs)
        quiet(*args)
        return [] if collective == "batch_isend_irecv" else _Done()

    with patch.object(dist, collective, stand_in):
        yield


class _Done:
    def wait(self) -> None:
        pass


def _quiet_all_gather(out: torch.Tensor, x: torch.Tensor) -> None:
    out.copy_(x.repeat(out.numel() // x.numel()))


def _quiet_exchange(messages: list[dist.P2POp]) -> None:
    sent, received = messages
    received.tensor.copy_(sent.tensor)


def _quiet_all_to_all(out: torch.Tensor, x: torch.Tensor, *splits: list[int]) -> None:
    if x.numel():
        out.copy_(x.reshape(-1).repeat(-(-out.numel() // x.numel()))[: out.numel()].view(out.shape))
    else:
        out.zero_()


_WITHOUT_SENDING = {
    "batch_isend_irecv": _quiet_exchange,
    "all_to_all_single": _quiet_all_to_all,
    "all_reduce": lambda x: None,
    "broadcast": lambda x: None,
    "reduce": lambda x: None,
    "reduce_scatter_tensor": lambda out, x: out.copy_(x[: out.numel()]),
    "all_gather_into_tensor": _quiet_all_gather,
}


def largest_difference(
    results: Sequence[dict[str, Any]], expected: dict[str, Any], steps: int
) -> tuple[float, str]:  # fmt: skip
    """The largest relative difference of a loss or of a parameter's displacement, and which; infinite where it is none.

    A displacement is compared with the larger of its own norm and 1e-3 lr steps sqrt(n): a parameter whose true
    gradient is zero (a key bias) moves by rounding noise that Adam blows up. A copy counts as often as it is held.

    results   what each of the ranks found
    expected  what one rank found that holds everything
    """
    pairs = [pair for found in results for pair in zip(found["losses"], expected["losses"], strict=True)]
    differences = [(_finite(abs(a - b) / abs(b)), "loss") for a, b in pairs]
    _require_own_parameters([found["displacement"].keys() for found in results])
    for name, (everything, want) in expected["displacement"].items():
        squares, seen = 0.0, torch.zeros(want.shape, dtype=torch.bool)
        for found in results:
            if name not in found["displacement"]:
                continue  # another stage has it
            box, value = found["displacement"][name]
            begin = expected["start"][name].value
            assert torch.equal(found["start"][name].value, begin[box]), f"{name} does not start alike"
            squares += float((value - want[box]).square().sum())
            seen[box] = True
        assert everything == tuple(slice(0, n) for n in want.shape), f"{name} is not whole where it is to be"
        assert seen.all(), f"{name} is held by no rank in part"
        floor = 1e-3 * LR * steps * want.numel() ** 0.5
        differences.append((_finite(squares**0.5 / max(float(want.norm()), floor)), name))
    return max(differences)


def whole(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What `run` found on all ranks, put together as one rank would have found it."""
    together: dict[str, Any] = {"losses": results[0]["losses"]}
    for what in ("start", "displacement"):
        shapes = {
            name: tuple(max(found[what][name].box[dim].stop for found in results) for dim in range(len(piece.box)))
            for name, piece in results[0][what].items()
        }
        together[what] = {}
        for name, shape in shapes.items():
            value = results[0][what][name].value.new_full(shape, math.nan)
            for found in results:
                value[found[what][name].box] = found[what][name].value
            together[what][name] = Piece(tuple(slice(0, n) for n in shape), value)
    return together


def _finite(difference: float) -> float:
    """`max` passes over what is not a number."""
    return difference if math.isfinite(difference) else math.inf


def _require_own_parameters(names: Sequence[Any]) -> None:
    """Ranks have the same parameters, or, of different stages, none in common."""
    stages = {frozenset(each) for each in names}
    assert sum(map(len, stages)) == len(frozenset[str]().union(*stages)), "a parameter has a master on two stages"


Table = Mapping[str, tuple[int, Case]]
"""Name -> number of ranks and case."""


def table(cases: Iterable[tuple[int, Case]]) -> Table:
    """Each under a name that tells it from the others."""
    named = {}
    for num_ranks, case in cases:
        model, mesh, words = case.model, case.mesh, []
        words.append(f"{model.moe.router} of {model.moe.num_experts}" if model.moe.num_experts else model.family)
        words += ["narrow"] if model.embed_dim is not None else []
        words += [f"on {num_ranks}"]
        words += [mesh.describe()] if mesh != MeshConfig() else []
        words += [mesh.cp_mode] if mesh.cp > 1 else []
        words += [mesh.tp_mode] if mesh.tp > 1 and mesh.tp_mode != "1d" else []
        words += [f"zero {case.parallel.zero}"]
        words += [f"{case.microbatch} rows"] if case.microbatch is not None else []
        name = " ".join(words)
        assert name not in named, name
        named[name] = (num_ranks, case)
    return named


def few_cases(cases: Table, *factors: str, many: Collection[str] = (), strength: int = 2) -> list[Any]:
    """Parameters (name, steps) of a test; see `few_steps`."""
    rows = {name: _factors(num_ranks, case, factors) for name, (num_ranks, case) in cases.items()}
    return few_steps(rows, many, strength, {name: num_ranks for name, (num_ranks, _) in cases.items()})


def _factors(num_ranks: int, case: Case, names: Iterable[str]) -> dict[str, Any]:
    """What tells a case from others in a table of combinations."""
    mesh, parallel = case.mesh, case.parallel
    beside = [
        mesh.tp > 1 and mesh.tp_mode,
        mesh.cp > 1 and mesh.cp_mode,
        mesh.ep > 1 and "ep",
        mesh.dp_replicate is not None and "hybrid",
    ]
    every = {
        "ranks": num_ranks,
        "schedule": parallel.pipeline.schedule if mesh.pp > 1 else None,
        "stages": mesh.pp,
        "tp": mesh.tp > 1 and mesh.tp_mode,
        "cp": mesh.cp > 1 and mesh.cp_mode,
        "ep": mesh.ep > 1,
        "hybrid": mesh.dp_replicate is not None,
        "beside": tuple(filter(None, beside)),
        "zero": parallel.zero,
        "recompute": parallel.recompute.mode,
        "accumulation": case.microbatch is not None,
        "router": case.model.moe.router if case.model.moe.num_experts else None,
        "family": (case.model.family, case.model.embed_dim is None),
        "documents": case.documents,
    }
    return {name: every[name] for name in names}


def difference_from_single(ranks, num_ranks: int, case: Case, without: tuple[str, ...] = ()) -> tuple[float, str]:
    """Run the case on one rank, plainly, and on `num_ranks`; the largest difference that any rank sees."""
    return largest_difference(ranks(num_ranks).run(run, case, without), of_one_rank(ranks, case), case.steps)


def of_one_rank(ranks, case: Case) -> dict[str, Any]:
    """What `run` finds on one rank without anything that should not matter; computed once."""
    plain = replace(
        case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"), microbatch=None, budget=None, planned=False,
        policy="auto",
    )  # fmt: skip
    if plain not in _REFERENCES:
        _REFERENCES[plain] = ranks(1).run(run, plain)[0]
    return _REFERENCES[plain]


_REFERENCES: dict[Case, dict[str, Any]] = {}
