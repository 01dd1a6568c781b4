"""Pipelines beside one rank: microbatches of several lengths, and steps that have one thing broken."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from core.compose import ParallelConfig, parallelize
from core.layout import full_tensor, layout_of
from core.mesh import MeshConfig, build_mesh, data_axis
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan
from core.parallel.pipeline.backward import SplitBackward
from core.parallel.pipeline.run import Pipeline, PipelineStep
from core.parallel.pipeline.schedule import Action, Kind, PipelineConfig
from core.placement.table import ModelPlan
from core.train import train_step
from tests.support.training import Case, batch_of, build, loss, of_all_stages, run, weight

LENGTHS = (7, 3, 9, 7, 1, 3)


def gradients_of_lengths(model: DecoderConfig, pipeline: PipelineConfig, mesh: MeshConfig) -> dict[str, Any]:
    """Losses and gradients, whole, of two steps, whose microbatches' rows have the lengths LENGTHS."""
    built = build_mesh(mesh.resolve(dist.get_world_size()), "cpu")
    config = ParallelConfig(precision="fp64", pipeline=pipeline)
    with torch.device("meta"):
        decoder = Decoder(model)
    parallel = parallelize(
        decoder, built, config, ModelPlan(pipeline=pipeline_plan()), materialise=lambda m: initialise(m, 0)
    )  # fmt: skip
    losses, found = [], {}
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        batches = [torch.randint(0, model.vocab_size, (2, length), generator=generator) for length in LENGTHS]
        losses.append(float(parallel.run(batches[step:], lambda ids: parallel.model(ids, targets=ids) / 100)))
        parallel.reduce()
        found |= {f"{name} of step {step}": full_tensor(_gradient(m)).clone() for name, m in parallel.masters.items()}
        parallel.release()
    return {"losses": losses, **of_all_stages(found, built)}


def bytes_reduced(case: Case) -> tuple[int, int]:
    """Bytes that the second step reduce-scatters on this rank, and those of the gradients of its stages, once each."""
    with patch("core.parallel.data.BUCKET_BYTES", 2000):
        state, config = build(case)
    axis, inner = data_axis(state.parallel.mesh), state.parallel.inner
    rows = case.batch // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, 0).items()}
    train_step(state, mine, loss, weight, config, 0)
    sent, send = 0, dist.reduce_scatter_tensor

    def counted(out: Tensor, whole: Tensor, **options: Any) -> Any:
        nonlocal sent
        sent += whole.nbytes
        return send(out, whole, **options)

    with patch.object(dist, "reduce_scatter_tensor", counted):
        train_step(state, mine, loss, weight, config, 1)
    if case.budget is not None:
        return sent, sum(8 * chunk.own_elements * chunk.ranks for chunk in inner.chunks)
    return sent, sum(8 * math.prod(layout_of(master).shape) for master in inner.masters.values())


def expert_load(case: Case) -> dict[str, Any]:
    """Figures of the experts' load in the first step."""
    state, config = build(case)
    axis = data_axis(state.parallel.mesh)
    rows = case.batch // axis.size()
    mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, 0).items()}
    figures = train_step(state, mine, loss, weight, config, 0)
    return {name: value for name, value in figures.items() if name.startswith("moe_")}


def seconds_of_forwards(case: Case, slow_s: float) -> list[float]:
    """Of this rank's, with a first stage that takes `slow_s` for each of its own."""
    state, _ = build(case)
    parallel, seconds = state.parallel, []
    assert isinstance(parallel, Pipeline)

    def slow_loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if parallel.rank == 0:
            time.sleep(slow_s)
        return loss(model, batch)

    def observe(action: Action, begin: float, end: float) -> None:
        if action.kind is Kind.FORWARD:
            seconds.append(end - begin)

    parallel.observe = observe
    parallel.run([batch_of(case, step) for step in range(3)], partial(slow_loss, parallel.model))
    return seconds


def _gradient(master: Tensor) -> Tensor:
    assert master.grad is not None
    return master.grad


def broken_run(case: Case, fault: str) -> dict[str, Any]:
    """The case with a fault of that name: see `_FAULTS`."""
    with _FAULTS[fault](case):
        return run(case)


@contextmanager
def _shared_gradient_is_not_summed(_: Case) -> Iterator[None]:
    with patch.object(Pipeline, "_sum_on_owner", lambda *_: None):
        yield


@contextmanager
def _shared_value_is_not_sent(_: Case) -> Iterator[None]:
    with patch.object(Pipeline, "_publish_shared", lambda _: None):
        yield


@contextmanager
def _last_message_is_empty(case: Case) -> Iterator[None]:
    """What arrives of the last microbatch, activations or gradients, is zeros."""
    take = PipelineStep._take

    def without_the_last(step: PipelineStep, key: tuple[bool, int, int]) -> tuple[Tensor, ...]:
        found = take(step, key)
        return tuple(map(torch.zeros_like, found)) if key[2] == len(step.microbatches) - 1 else found

    with patch.object(PipelineStep, "_take", without_the_last):
        yield


@contextmanager
def _one_weights_part_is_missing(_: Case) -> Iterator[None]:
    compute = PipelineStep.compute

    def without_one(step: PipelineStep, action: Action) -> None:
        with patch.object(SplitBackward, "weights", lambda _: None) if action.microbatch == 1 else patch("os.sep"):
            compute(step, action)

    with patch.object(PipelineStep, "compute", without_one):
        yield


@contextmanager
def _norm_of_stages_as_of_copies(_: Case) -> Iterator[None]:
    with patch("core.layout.pipeline_ranks", lambda _: 1):
        yield


@contextmanager
def _what_routers_add_stays_behind(_: Case) -> Iterator[None]:
    with patch(
        "core.parallel.pipeline.run._number", lambda _, device: torch.zeros(1, dtype=torch.float64, device=device)
    ):
        yield


_FAULTS = {
    "shared gradient": _shared_gradient_is_not_summed,
    "shared value": _shared_value_is_not_sent,
    "last message": _last_message_is_empty,
    "weights": _one_weights_part_is_missing,
    "norm": _norm_of_stages_as_of_copies,
    "what routers add": _what_routers_add_stays_behind,
}
