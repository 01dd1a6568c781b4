"""`llm plan` of a pipeline: schedules by the clock, and what old weights are expected to cost."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from apps.llm.config import run_shape
from apps.llm.plan_config import LLMPlanConfig
from apps.llm.recipes import RECIPES
from apps.llm.schedules import compared, penalty, ranked
from core.auto.machines import cluster_of, gpu_named
from core.auto.step_time import StepClock
from core.estimate import BlockShape, Kept, Machine, ModelShape, RunShape, Weight, decoder_shape
from core.estimate.pipeline import simulated_step_s
from core.mesh import MeshConfig
from core.optim.build import OptimConfig
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from tests.support import async_results

BLOCKS = ModelShape(
    tuple(Weight((10, 10), block=index) for index in range(8)),
    num_blocks=8,
    block=BlockShape(Kept(10), Kept(90), Kept()),
    dim=0,
    num_matmul_parameters=800,
)
MACHINE = Machine(1e12, bandwidth=float("inf"), utilisation=0.5)


def planned(**options: Any) -> tuple[LLMPlanConfig, ModelShape, RunShape]:
    """Of the debug recipe on four stages."""
    given = vars(RECIPES["debug"]()) | {"nproc": 4, "mesh": MeshConfig(pp=4)} | options
    config = LLMPlanConfig(**given)
    return config, decoder_shape(config.model), run_shape(config)


@pytest.mark.parametrize("microbatches", [4, 6, 16])
def test_a_step_among_many_has_no_bubble(microbatches: int) -> None:
    """With stages of equal cost and messages that take no time."""

    def step(name: ScheduleName) -> float:
        run = RunShape(pp=4, num_microbatches=microbatches, sequence_length=1, pipeline=PipelineConfig(name))
        return simulated_step_s(BLOCKS, run, MACHINE)

    assert step("2bw") / step("1f1b") == pytest.approx(microbatches / (microbatches + 3))
    if microbatches >= 8:  # zbv's bubble is the published one from twice as many as ranks on
        assert step("zbv") / step("2bw") == pytest.approx(1 + 3 / (6 * microbatches))


def test_the_cluster_s_clock_of_steps_that_overlap() -> None:
    """Less than 1f1b's by its bubble, and no less than what it is known to take."""
    model = decoder_shape(RECIPES["debug"]().model)
    run = RunShape(pp=4, num_microbatches=4, sequence_length=64, pipeline=PipelineConfig("2bw"), precision="bf16")
    cluster = cluster_of(gpu_named("a100-40gb"), 4)
    ahead, plain = (StepClock(model, replace(run, pipeline=PipelineConfig(name)), cluster) for name in ("2bw", "1f1b"))
    assert ahead.least_s() <= ahead.time().step_s < plain.time().step_s
    assert ahead.time().bubble_s < plain.time().bubble_s / 2


def test_few_microbatches_are_2bw_s_and_many_are_zbv_s() -> None:
    few = compared(*planned(pipeline=PipelineConfig(microbatches=4)), MACHINE)
    assert few[0].index("2bw") < few[0].index("zbv") < few[0].index("1f1b")
    assert len(few) == 2
    assert "one update old" in few[1]
    data = replace(RECIPES["debug"]().data, global_batch=64)
    many = compared(*planned(pipeline=PipelineConfig(microbatches=64), data=data), MACHINE)
    assert "zbv is as good here" in many[-1]


def test_what_does_not_go_is_not_ranked() -> None:
    names = [name for name, _ in ranked(*planned(nproc=8, zero=3, mesh=MeshConfig(pp=4)), MACHINE)]
    assert names == ["1f1b"]
    lines = compared(*planned(nproc=8, zero=3, mesh=MeshConfig(pp=4)), None)
    assert len(lines) == 1
    assert "multiples" in lines[0]


def test_the_penalty_is_that_of_the_optimizer() -> None:
    config, *_ = planned(optim=OptimConfig("muon"))
    assert "0.012 nats published" in penalty(config)
    judged = penalty(replace(config, pipeline=PipelineConfig("2bw", correction="prediction")))
    assert "muon and prediction" in judged
    assert "async_gap.json" in judged
    assert "not known" in penalty(replace(config, optim=OptimConfig("lamb")))


@pytest.mark.parametrize("path", async_results.MARKS, ids=lambda path: path.name)
def test_what_is_told_is_the_committed_result_s(path: Path) -> None:
    assert async_results.between(path) == async_results.made()[path]
