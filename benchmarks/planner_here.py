"""Predicted beside measured: training steps of small decoders on 1 to 8 ranks of this machine.

The machine is measured first (`core.auto.measure`); what is predicted is what `llm plan --gpu FILE.json` says. Seconds
are the median over rounds of all configurations in turn, so that a slower minute is everybody's; a round is a warm step
and some that count. Bytes are counted, tensor by tensor, on the fullest rank.

There are more ranks than cores: the prediction shares the cores out (`Cluster.crowd`), and links are measured in the
same crowd.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import device_of_rank, on_ranks
from core.auto.measure import measure
from core.auto.measured import MeasuredMachine
from core.auto.step_time import step_time
from core.compose import ParallelConfig, parallelize
from core.estimate import RunShape, decoder_shape, estimate_memory
from core.estimate.pipeline import stages_of
from core.estimate.residency import estimate_budget
from core.gemini.config import GeminiConfig
from core.mesh import build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import decoder_plan
from core.nn.routing import MoEConfig
from core.optim.build import OptimConfig, build_optimizer
from core.optim.clip import gradient_norm, scale_gradients
from core.parallel.parallel_model import ParallelModel
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeConfig
from core.runtime import Runtime
from core.trace.account import MemoryAccount
from core.trace.machine import Speed

PRELOAD = ["core.models", "core.auto.measure", "core.compose", "core.gemini", "core.train"]
MOST_RANKS = 8
LENGTH, ROWS = 128, 8


def _gpt(layers: int, dim: int, **more: Any) -> DecoderConfig:
    shape = {"vocab_size": 512, "dim": dim, "num_layers": layers, "num_heads": 8, "ffn_dim": 4 * dim}
    return DecoderConfig(**shape, max_length=LENGTH, **more)


MODELS = {
    "small": _gpt(4, 128),
    "middle": _gpt(8, 256),
    "large": _gpt(8, 512),
    "experts": _gpt(4, 128, moe=MoEConfig(num_experts=8, experts_per_token=8)),
}
"""Of the experts every token goes to all, so that loads are balanced, as the plan takes them to be."""


@dataclass(frozen=True)
class Trial:
    """A configuration: rows of the global batch are ROWS, whatever the ranks; budget: Gemini's, of the run's bytes."""

    name: str
    model: str
    run: RunShape
    budget: float | None = None

    @property
    def ranks(self) -> int:
        return self.run.num_data_ranks * self.run.cp * self.run.tp * self.run.pp

    @property
    def config(self) -> DecoderConfig:
        return MODELS[self.model]

    @property
    def budget_bytes(self) -> int | None:
        if self.budget is None:
            return None
        return int(self.budget * estimate_memory(self.shape, self.run).peak_bytes)

    @property
    def shape(self) -> Any:
        return decoder_shape(self.config, device_type="cpu")

    @property
    def parallel(self) -> ParallelConfig:
        run, budget = self.run, self.budget_bytes
        split = tuple(map(len, stages_of(self.shape, run).ranges)) if run.pp > 1 else ()
        return ParallelConfig(
            precision=run.precision,
            zero=run.zero,
            reduce_each=run.reduce_each,
            recompute=RecomputeConfig(run.recompute, run.recompute_every),
            pipeline=replace(run.pipeline, split=split),
            gemini=GeminiConfig(None if budget is None else str(budget)),
        )

    def loss(self, model: Any) -> Tensor:
        ids = torch.zeros(self.run.microbatch_size, LENGTH, dtype=torch.int64, device=device_of_rank())
        return model(ids, targets=ids)


def _trial(name: str, model: str, microbatches: int = 1, budget: float | None = None, **sizes: Any) -> Trial:
    data = sizes.get("dp_replicate", 1) * sizes.get("dp_shard", 1)
    each = {"microbatch_size": ROWS // data // microbatches, "num_microbatches": microbatches}
    return Trial(name, model, RunShape(precision="fp32", sequence_length=LENGTH, **each, **sizes), budget)


def trials() -> list[Trial]:
    full: dict[str, Any] = {"recompute": "full"}
    stages: list[tuple[ScheduleName, int]] = [("1f1b", 2), ("interleaved", 2), ("zb-h1", 2), ("zbv", 2), ("1f1b", 4)]
    return [
        *(_trial("one rank", model) for model in ("small", "middle", "large", "experts")),
        _trial("recomputed", "middle", **full),
        _trial("recomputed", "large", **full),
        _trial("recomputed in part", "middle", recompute="selective"),
        _trial("microbatches", "middle", 4),
        *(_trial("copies", model, dp_replicate=ranks) for model, ranks in (("small", 2), ("middle", 4), ("large", 8))),
        *(_trial(f"ZeRO {zero}", "middle", zero=zero, dp_shard=4) for zero in (1, 2, 3)),
        _trial("ZeRO 3, recomputed", "large", zero=3, dp_shard=8, **full),
        _trial("ZeRO 3 between copies", "small", zero=3, dp_shard=2, dp_replicate=2),
        *(_trial("tensor parallel", model, tp=tp) for model, tp in (("small", 2), ("middle", 4), ("large", 8))),
        _trial("tensor parallel, a square", "middle", tp=4, tp_mode="2d"),
        *(_trial(f"stages, {name}", "middle", 4, pp=pp, pipeline=PipelineConfig(name)) for name, pp in stages),
        _trial("ring", "middle", cp=4),
        _trial("heads for sequence", "middle", cp=4, cp_exchange=4),
        _trial("experts dealt out", "experts", dp_replicate=4, ep=4),
        _trial("stages x tensor x copies", "large", 2, pp=2, tp=2, dp_replicate=2),
        *(_trial("Gemini", model, budget=share, zero=3) for model, share in (("middle", 0.75), ("large", 0.6))),
        _trial("Gemini on ranks", "large", budget=0.75, zero=3, dp_shard=2),
    ]


FEW = ("one rank", "copies", "tensor parallel", "ZeRO 3 between copies")
"""Of the quick form: those of the small model."""


def quick_trials() -> list[Trial]:
    return [trial for trial in trials() if trial.model == "small" and trial.name in FEW]


# --- measured ---------------------------------------------------------------------------------------------------------


@dataclass
class Found:
    """Of a configuration: seconds of its steps, of all rounds, and the most bytes alive on a rank."""

    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0


def machine_on_ranks(quick: bool) -> MeasuredMachine:
    rank = dist.get_rank()
    return measure(Runtime(rank, rank, dist.get_world_size(), device_of_rank()), quick=quick)


def machine_here(ranks: int, *, quick: bool = False) -> MeasuredMachine:
    return on_ranks(ranks, machine_on_ranks, quick, preload=PRELOAD)[0]


def measured(trials: Sequence[Trial], rounds: int, steps: int) -> dict[Trial, Found]:
    """rounds: of all configurations, one after the other; steps: of each in a round."""
    found = {trial: Found() for trial in trials}
    for number in range(rounds):
        for trial in trials:
            of_ranks = on_ranks(trial.ranks, step_of_rank, trial, steps, number == 0, preload=PRELOAD)
            found[trial].seconds += [max(each) for each in zip(*(seconds for seconds, _ in of_ranks), strict=True)]
            found[trial].peak_bytes = max(found[trial].peak_bytes, *(num_bytes for _, num_bytes in of_ranks))
    return found


def step_of_rank(trial: Trial, steps: int, counts: bool) -> tuple[list[float], int]:
    """Seconds of each step, and the most bytes alive in one more, where they are counted."""
    mesh = build_mesh(trial.run.mesh, device_of_rank().type)
    with torch.device("meta"):
        model = Decoder(trial.config)
    plan = decoder_plan(trial.config, trial.run.mesh)
    spread = parallelize(model, mesh, trial.parallel, plan, materialise=lambda m: initialise(m, 0))
    optimizer = build_optimizer(OptimConfig(), spread.masters)
    spread.prepare(optimizer, lambda: [trial.loss] * trial.run.num_microbatches)
    step = partial(_step, trial, spread, optimizer)
    step()
    seconds = [_timed(step) for _ in range(steps)]
    return seconds, _peak_bytes(spread, optimizer, step) if counts else 0


def _step(trial: Trial, spread: ParallelModel, optimizer: torch.optim.Optimizer) -> None:
    """As the training loop takes one."""
    spread.run(range(trial.run.num_microbatches), lambda _: trial.loss(spread.model))
    spread.reduce()
    gradient_norm(spread.masters.values(), spread.mesh)
    scale_gradients(spread.masters.values(), 0.5)
    spread.update(optimizer)
    spread.release()
    spread.publish()


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def _peak_bytes(spread: ParallelModel, optimizer: torch.optim.Optimizer, step: Callable[[], None]) -> int:
    if spread.device_peak_bytes is not None:  # Gemini's own account, of the device that is a part of this memory
        return spread.device_peak_bytes
    with MemoryAccount() as account:
        account.add(spread.model.parameters())
        account.add(spread.masters.values())
        account.add(value for state in optimizer.state.values() for value in state.values())
        step()
    return account.peak_bytes


# --- predicted --------------------------------------------------------------------------------------------------------


def predicted(trial: Trial, machine: MeasuredMachine) -> tuple[float, int]:
    """Seconds of a step, and bytes of the fullest rank."""
    cluster, budget = machine.cluster(trial.ranks), trial.budget_bytes
    seconds = step_time(trial.shape, trial.run, cluster, budget).step_s
    if budget is None:
        return seconds, estimate_memory(trial.shape, trial.run).peak_bytes
    with torch.device("meta"):
        model = Decoder(trial.config)
    gpu = cluster.gpu.flops_per_s(torch.float32, 1e9)
    assert gpu is not None
    speed = Speed(gpu, cluster.bytes_per_s)
    plan, link = decoder_plan(trial.config, trial.run.mesh), cluster.to_host.bytes_per_s
    loss = partial(_loss_on_cpu, trial.run.microbatch_size)
    found = estimate_budget(model, loss, trial.run.mesh, trial.parallel, speed, link, plan, OptimConfig())
    return seconds, found.device_bytes


def _loss_on_cpu(rows: int, model: Any) -> Tensor:
    ids = torch.zeros(rows, LENGTH, dtype=torch.int64)
    return model(ids, targets=ids)


def rank_correlation(pairs: Mapping[Any, tuple[float, float]]) -> float:
    """Spearman's, of predicted and measured."""
    from scipy.stats import spearmanr

    predicted, measured = zip(*pairs.values(), strict=True)
    found: Any = spearmanr(predicted, measured)
    return float(found.statistic)
