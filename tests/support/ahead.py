"""Runs of pipelines that run ahead: with pauses, with one thing broken, by `fit`."""

import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from core.compose import ParallelConfig, parallelize
from core.config import UserError
from core.mesh import MeshConfig, build_mesh
from core.models.decoder import Decoder, DecoderConfig, initialise
from core.models.plan import pipeline_plan
from core.optim.build import OptimConfig, build_optimizer
from core.parallel.parallel_model import Work
from core.parallel.pipeline.ahead import AheadPipeline, Flight
from core.parallel.pipeline.replicas import StageReplicas
from core.parallel.pipeline.schedule import Action, Kind
from core.placement.table import ModelPlan
from core.precision import LossScale
from core.runtime import start
from core.trace.account import MemoryAccount
from core.train import TrainConfig, num_rows, train_step
from core.train.state import StepTally
from tests.support import small
from tests.support.accounted import decoder_loss
from tests.support.delayed import SCALE, History
from tests.support.training import Case, build, run


class NoTally:
    """A tally of one number, of no ranks beside this one's stage."""

    size = 1

    def forwarded(self) -> None:
        pass

    def of_stage(self, loss: Tensor, replicas: int) -> Tensor:
        return loss.view(1)


def peak_of_steps(
    model: DecoderConfig,
    parallel: ParallelConfig,
    rows: int,
    num_microbatches: int,
    num_stages: int = 2,
    steps: int = 4,
) -> int:
    """The most bytes of tensors alive at once on this rank in a decoder's steps that overlap."""
    mesh = build_mesh(MeshConfig(pp=num_stages).resolve(dist.get_world_size(), parallel.zero), "cpu")
    with torch.device("meta"):
        decoder = Decoder(model)
    plan = ModelPlan(pipeline=pipeline_plan())
    spread = parallelize(decoder, mesh, parallel, plan, materialise=lambda m: initialise(m, 0))
    assert isinstance(spread, AheadPipeline)
    optimizer = build_optimizer(OptimConfig(), spread.masters)

    def update(sums: Tensor | None = None) -> bool:
        spread.update(optimizer)
        spread.release()
        return True

    def loss(_: int) -> Tensor:
        return decoder_loss(rows, model.max_length, spread.model)

    works = [Work(range(num_microbatches), loss, 1.0, NoTally(), update) for _ in range(steps)]
    with MemoryAccount() as account:
        account.add(spread.newest.values())
        account.add(spread.masters.values())
        for index, work in enumerate(works):
            spread.run_ahead(work, works[index + 1 :])
            if not spread.updates_at_once:
                update()
                spread.publish()
            time.sleep(0.05)  # gloo's thread lets go of a message some time after it was waited for
    return account.peak_bytes


def run_with_pauses(case: Case, pauses: Collection[int]) -> dict[str, Any]:
    """`run`, with nothing under way behind these steps."""

    def paused(*args: Any, following: Sequence[Any]) -> dict[str, Any]:
        step = args[-1]
        number = min((pause - step for pause in pauses if pause >= step), default=len(following))
        return train_step(*args, following=following[:number])

    with patch("tests.support.training.train_step", paused):
        return run(case)


def run_scaled(case: Case) -> dict[str, Any]:
    """`run`, and how many steps it has skipped."""
    scale = LossScale(case.parallel.precision, SCALE)
    with patch("tests.support.training.LossScale", lambda _: scale):
        return run(case) | {"skipped": scale.skipped_steps}


def train_late(config: TrainConfig, dropout: float, late: Mapping[str, int]) -> dict[str, Tensor]:
    """The small model's masters as weights that are some updates old train them, on one rank.

    late  beginning of names -> how old
    """
    with start("cpu", config.seed):
        state = small.build(config, small.Small(dropout))
        history = History(state.parallel, lambda name: next(n for start, n in late.items() if name.startswith(start)))
        for step in range(config.steps):
            history.before(step)
            train_step(state, small.Rows().batch(step, 0, 1), small.loss, num_rows, config, step)
            history.behind(was_skipped=False)
        return history.made[-1]


def masters_after(config: TrainConfig, dropout: float) -> dict[str, Tensor]:
    found = small.train(config, dropout)[1]
    return {name: value for name, value in found.items() if name != "seen"}


def refusal(config: TrainConfig) -> str:
    try:
        small.train(config)
    except UserError as refused:
        return str(refused)
    return "was not refused"


def refused(case: Case) -> str:
    try:
        build(case)
    except UserError as error:
        return str(error)
    return "was not refused"


# --- faults -----------------------------------------------------------------------------------------------------------


def broken_run(case: Case, fault: str) -> dict[str, Any]:
    """The case with a fault of that name: see `FAULTS`."""
    with (FAULTS | OF_REPLICAS)[fault]():
        return run(case)


@contextmanager
def _newest_in_the_backward() -> Iterator[None]:
    """Blocks that are computed again take the newest weights: a gradient of nothing."""
    compute, install = Flight.compute, AheadPipeline.install

    def with_newest(flight: Flight, action: Action) -> None:
        if action.kind is Kind.FORWARD:
            compute(flight, action)
            return
        with patch.object(AheadPipeline, "install", lambda pipeline, step: install(pipeline, None)):
            compute(flight, action)

    with patch.object(Flight, "compute", with_newest):
        yield


@contextmanager
def _newest_in_the_forward() -> Iterator[None]:
    """Whatever is computed takes the weights that are newest then: what a pipeline without versions does."""
    install = AheadPipeline.install
    with patch.object(AheadPipeline, "install", lambda pipeline, step: install(pipeline, None)):
        yield


@contextmanager
def _sums_of_one_stage() -> Iterator[None]:
    """The norm is that of the stages behind alone."""
    of_stage = StepTally.of_stage

    def without_others(tally: StepTally, loss: Tensor, replicas: int) -> Tensor:
        sums, pipeline = of_stage(tally, loss, replicas), tally.parallel
        assert isinstance(pipeline, AheadPipeline)
        sums[2] *= pipeline.rank > 0
        return sums

    with patch.object(StepTally, "of_stage", without_others):
        yield


@contextmanager
def _shared_gradient_is_not_summed() -> Iterator[None]:
    with patch.object(AheadPipeline, "_reduce_shared", lambda _: None):
        yield


@contextmanager
def _shared_value_is_not_sent() -> Iterator[None]:
    with (
        patch.object(AheadPipeline, "_give_shared", lambda _: None),
        patch.object(AheadPipeline, "_take_shared", lambda _: None),
    ):
        yield


@contextmanager
def _masters_in_a_version() -> Iterator[None]:
    """The optimizer writes into the memory of a version that is in use."""
    with patch.object(AheadPipeline, "_own_memory", lambda _: None):
        yield


@contextmanager
def _gradients_of_one_replica() -> Iterator[None]:
    with patch.object(StageReplicas, "add_up_gradients", lambda *_: None):
        yield


@contextmanager
def _norm_of_one_replica_more() -> Iterator[None]:
    """Each replica says that all gradients are its own."""
    of_stage = StepTally.of_stage
    with patch.object(StepTally, "of_stage", lambda tally, loss, _: of_stage(tally, loss, 1)):
        yield


OF_REPLICAS = {
    "gradients of one replica": _gradients_of_one_replica,
    "norm of one replica more": _norm_of_one_replica_more,
    "newest weights in the backward of a replica": _newest_in_the_backward,
}
FAULTS = {
    "newest weights in the backward": _newest_in_the_backward,
    "newest weights in the forward": _newest_in_the_forward,
    "norm of some stages": _sums_of_one_stage,
    "shared gradient": _shared_gradient_is_not_summed,
    "shared value": _shared_value_is_not_sent,
    "version that is written": _masters_in_a_version,
}
