"""A short training run of a tiny decoder on any mesh, by the real training step, and its comparison with one rank."""

import inspect
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from core.gemini.config import GeminiConfig
from core.gemini.replicas import GeminiReplicas
from core.layout import full_tensor, layout_of
from core.mesh import MeshConfig, build_mesh, data_axis
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import context_parallel_plan, expert_parallel_plan, pipeline_plan, tensor_parallel_plan
from core.nn.attention import StepContext
from core.optim.build import OptimConfig, build_optimizer
from core.optim.schedule import ScheduleConfig
from core.parallel.compose import ParallelConfig, parallelize
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.run import Pipeline
from core.precision import LossScale
from core.train import TrainConfig, TrainState, train_step

LR = 1e-2
CLIP = 0.7  # below the norms of the first steps and above those of the last: some steps are clipped, some are not


@dataclass(frozen=True)
class Case:
    """One run: a model, a mesh, and how it is parallelised."""

    model: DecoderConfig
    mesh: MeshConfig = field(default_factory=MeshConfig)
    parallel: ParallelConfig = field(default_factory=lambda: ParallelConfig(precision="fp64"))
    steps: int = 10
    batch: int = 12
    length: int = 7
    microbatch: int | None = None
    documents: bool = False
    seed: int = 0
    optim: Any = "adamw"
    budget: str | None = None
    planned: bool = False


def batch_of(case: Case, step: int) -> dict[str, torch.Tensor]:
    """The whole batch of a step; some targets are not counted, more in some rows than in others."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, case.model.vocab_size, (case.batch, case.length + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : 1 + step % 3] = -100
    batch = {"input_ids": tokens[:, :-1], "targets": targets}
    if case.documents:
        starts = torch.rand(case.batch, case.length, generator=generator) < 0.3
        batch["documents"] = starts.cumsum(1)
    return batch


def loss(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    context = StepContext(batch.get("documents"))
    return model(batch["input_ids"], context=context, targets=batch["targets"]) / weight(batch)


def weight(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return (batch["targets"] != -100).sum().double()


def build(case: Case) -> tuple[TrainState, TrainConfig]:
    """The model of a case on this rank's mesh, with its optimizer."""
    config = TrainConfig(
        **vars(case.parallel),
        gemini=GeminiConfig(case.budget),
        mesh=case.mesh,
        steps=case.steps,
        microbatch=case.microbatch,
        optim=OptimConfig(name=case.optim, lr=LR, clip_norm=CLIP, schedule=ScheduleConfig(warmup_steps=2)),
    )
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    with torch.device("meta"):
        model = Decoder(case.model)
    data = parallelize(
        model,
        mesh,
        config,
        plan=tensor_parallel_plan(case.model, case.mesh.tp_mode),
        context_plan=context_parallel_plan(config.mesh, case.model),
        expert_plan=expert_parallel_plan(case.model),
        pipeline_plan=pipeline_plan(),
        materialise=lambda m: initialise(m, case.seed),
    )
    optimizer = build_optimizer(config.optim, data.masters)
    sizes = config.microbatch_rows(case.batch // data_axis(mesh).size())
    parts = [{k: v[:rows] for k, v in batch_of(case, 0).items()} for rows in sizes]
    data.prepare(optimizer, (lambda: [lambda m, part=part: loss(m, part) for part in parts]) if case.planned else None)
    return TrainState(data, optimizer, LossScale(config.precision), {}), config


def run(case: Case, without: tuple[str, ...] = ()) -> dict[str, Any]:
    """Losses, the last of them an evaluation's, and per parameter its start and displacement, whole, on every rank.

    without  collectives that are left out, to show that their absence is seen: `removed` explains the names
    """
    state, config = build(case)
    axis = data_axis(state.data.mesh)
    rows = case.batch // axis.size()
    start = {n: full_tensor(m).clone() for n, m in state.data.masters.items()}
    losses = []
    with removed(*without) if without else nullcontext():
        for step in range(case.steps):
            mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, step).items()}
            losses.append(train_step(state, mine, loss, weight, config, step)["loss"])
    losses.append(evaluated(state, mine))
    displacement = {n: full_tensor(m) - start[n] for n, m in state.data.masters.items()}
    held = {n: layout_of(m).local_shape() for n, m in state.data.masters.items()}
    found = {"start": start, "displacement": displacement, "held": held}
    whole = {"losses": losses} | {what: of_all_stages(own, state.data.mesh) for what, own in found.items()}
    return whole if case.budget is None else whole | moved(state.data)


def meshes_of_a_step(case: Case) -> int:
    """How many meshes the third step makes; torch takes milliseconds for each slice of one."""
    state, config = build(case)
    axis = data_axis(state.data.mesh)
    rows = case.batch // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, 0).items()}
    made, make = [], DeviceMesh.__init__
    for step in range(3):
        made.clear()
        with patch.object(DeviceMesh, "__init__", lambda mesh, *a, **k: made.append(mesh) or make(mesh, *a, **k)):
            train_step(state, mine, loss, weight, config, step)
    return len(made)


def gemini_of(data: ParallelModel) -> GeminiReplicas:
    inner = data.inner if isinstance(data, Pipeline) else data
    assert isinstance(inner, GeminiReplicas)
    return inner


def moved(data: ParallelModel) -> dict[str, int]:
    """What Gemini had to do: the most bytes on the device, its budget, bytes moved, evictions."""
    tier = gemini_of(data).tier
    return {
        "peak": tier.peak_bytes,
        "budget": tier.budget_bytes,
        "moved": tier.moved_bytes,
        "evictions": tier.num_evictions,
    }


def evaluated(state: TrainState, mine: dict[str, torch.Tensor]) -> float:
    """The loss of the last batch without gradients, by a call of the model as it is, which every rank makes."""
    axis = data_axis(state.data.mesh)
    with torch.no_grad():
        both = torch.stack((loss(state.data.model, mine).double() * weight(mine), weight(mine)))
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


def largest_difference(found: dict[str, Any], expected: dict[str, Any], steps: int) -> tuple[float, str]:
    """The largest relative difference of a loss or of a parameter's displacement, and which.

    A displacement is compared with the larger of its own norm and 1e-3 lr steps sqrt(n): a parameter whose true
    gradient is zero (a key bias) moves by rounding noise that Adam blows up.
    """
    pairs = zip(found["losses"], expected["losses"], strict=True)
    differences = [(max(abs(a - b) / abs(b) for a, b in pairs), "loss")]
    for name, want in expected["displacement"].items():
        assert torch.equal(found["start"][name], expected["start"][name]), f"{name} does not start alike"
        floor = 1e-3 * LR * steps * want.numel() ** 0.5
        difference = (found["displacement"][name] - want).norm() / max(float(want.norm()), floor)
        differences.append((float(difference), name))
    return max(differences)


def difference_from_single(ranks, num_ranks: int, case: Case, without: tuple[str, ...] = ()) -> tuple[float, str]:
    """Run the case on one rank, plainly, and on `num_ranks`; the largest difference that any rank sees."""
    plain = replace(
        case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"), microbatch=None, budget=None, planned=False
    )
    if plain not in _REFERENCES:
        _REFERENCES[plain] = ranks(1).run(run, plain)[0]
    results = ranks(num_ranks).run(run, case, without)
    return max(largest_difference(result, _REFERENCES[plain], case.steps) for result in results)


_REFERENCES: dict[Case, dict[str, Any]] = {}
