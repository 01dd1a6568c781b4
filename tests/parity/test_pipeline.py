"""Stages on n ranks train as one rank does, by every schedule and with every other form of parallelism, in fp64.

Blocks that the stages do not divide, microbatches of unequal rows and lengths, tied and untied heads, on purpose.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.checkpoint import CheckpointConfig
from core.compose import ParallelConfig
from core.mesh import MeshConfig
from core.models.decoder import DecoderConfig
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeConfig
from core.trace.segments import Lean, Segments
from tests.parity.test_experts import CHOICE, GSHARD, SWITCH, TOPK
from tests.parity.test_resume import STEPS, STOP, outcome
from tests.parity.test_train import BLOOM, GPT2, LLAMA, OPT, OPT_350M, TOLERANCE
from tests.support import pipeline
from tests.support.grid_resume import resumed_elsewhere
from tests.support.small import config_of, train
from tests.support.training import Case, difference_from_single, few_cases, largest_difference, of_one_rank, run

TWO, FOUR = MeshConfig(pp=2), MeshConfig(pp=4)
TENSOR, HYBRID, EXPERTS = MeshConfig(pp=2, tp=2), MeshConfig(pp=2, dp_replicate=2, dp_shard=2), MeshConfig(pp=2, ep=2)
DEEP = MeshConfig(pp=2, cp=2, tp=2, tp_mode="2.5d", tp_depth=2)


def deep(model: DecoderConfig, num_layers: int = 5) -> DecoderConfig:
    return replace(model, num_layers=num_layers)


def staged(schedule: ScheduleName, zero: int = 0, microbatches: int | None = 4, **options: Any) -> ParallelConfig:
    """In fp64; `chunks` and `split` are the pipeline's."""
    own = {name: options.pop(name) for name in ("chunks", "split") if name in options}
    return ParallelConfig(
        zero=zero, precision="fp64", pipeline=PipelineConfig(schedule, microbatches=microbatches, **own), **options
    )


FULL, SELECTIVE = RecomputeConfig("full"), RecomputeConfig("selective", every=2)
BUDGET = RecomputeConfig("budget", budget="1GiB")
SEGMENTS: Segments = ((Lean(1, "linear"), 1), Lean(1, "products"), (1,), 1)

CASES = {
    "gpipe": (2, Case(deep(GPT2), TWO, staged("gpipe"), batch=11)),
    "1f1b": (2, Case(deep(GPT2), TWO, staged("1f1b"), batch=11)),
    "interleaved": (2, Case(deep(GPT2), TWO, staged("interleaved"), batch=11)),
    "zb-h1": (2, Case(deep(GPT2), TWO, staged("zb-h1"), batch=11)),
    "zbv": (2, Case(deep(GPT2), TWO, staged("zbv"), batch=11)),
    "gpipe-untied": (2, Case(deep(OPT, 3), TWO, staged("gpipe"))),
    "1f1b-narrow-embeddings": (2, Case(deep(OPT_350M, 3), TWO, staged("1f1b"))),
    "interleaved-of-3": (2, Case(deep(LLAMA, 7), TWO, staged("interleaved", microbatches=5, chunks=3), batch=11)),
    "zb-h1-rotary": (2, Case(deep(LLAMA, 3), TWO, staged("zb-h1"))),
    "zbv-alibi-documents": (2, Case(deep(BLOOM), TWO, staged("zbv"), documents=True)),
    "zb-h1-narrow-embeddings": (2, Case(deep(OPT_350M, 3), TWO, staged("zb-h1"))),
    "1f1b-one-microbatch": (2, Case(deep(GPT2), TWO, staged("1f1b", microbatches=1))),
    "zbv-one-microbatch": (2, Case(deep(GPT2), TWO, staged("zbv", microbatches=1))),
    "1f1b-rows": (2, Case(deep(GPT2), TWO, staged("1f1b", microbatches=None), microbatch=5)),
    "1f1b-given-split": (2, Case(deep(GPT2), TWO, staged("1f1b", split=(4, 1)))),
    "1f1b-recomputed": (2, Case(deep(GPT2), TWO, staged("1f1b", recompute=FULL))),
    "interleaved-recomputed": (2, Case(deep(BLOOM), TWO, staged("interleaved", recompute=SELECTIVE))),
    "1f1b-recursive": (2, Case(deep(LLAMA), TWO, staged("1f1b", recompute=RecomputeConfig("recursive")))),
    "1f1b-budget": (2, Case(deep(LLAMA), TWO, staged("1f1b", recompute=BUDGET), segments=SEGMENTS)),
    "1f1b-offloaded": (2, Case(deep(LLAMA), TWO, staged("1f1b", recompute=RecomputeConfig("offload")))),
    "interleaved-zero2-compressed": (
        4,
        Case(deep(GPT2), TWO, staged("interleaved", 2, microbatches=3, recompute=RecomputeConfig("compressed", 2))),
    ),
    "zbv-sqrt": (2, Case(deep(GPT2), TWO, staged("zbv", recompute=RecomputeConfig("sqrt")))),
    "zb-h1-recomputed": (2, Case(deep(GPT2), TWO, staged("zb-h1", recompute=FULL))),
    "zbv-recomputed": (2, Case(deep(LLAMA), TWO, staged("zbv", recompute=SELECTIVE))),
    "zbv-gshard-ep-recomputed": (4, Case(deep(GSHARD), EXPERTS, staged("zbv", 1, microbatches=3, recompute=FULL))),
    "zb-h1-tp-recomputed": (4, Case(deep(LLAMA, 3), TENSOR, staged("zb-h1", microbatches=3, recompute=SELECTIVE))),
    "zbv-ring-recomputed": (4, Case(deep(GPT2), MeshConfig(pp=2, cp=2), staged("zbv", microbatches=3, recompute=FULL))),
    "gpipe-4": (4, Case(deep(GPT2), FOUR, staged("gpipe", microbatches=3))),
    "1f1b-4": (4, Case(deep(GPT2), FOUR, staged("1f1b", microbatches=None), batch=11)),
    "interleaved-4": (4, Case(deep(OPT_350M, 9), FOUR, staged("interleaved", microbatches=6))),
    "zb-h1-4": (4, Case(deep(GPT2), FOUR, staged("zb-h1", microbatches=6))),
    "zbv-4": (4, Case(deep(LLAMA, 9), FOUR, staged("zbv", microbatches=9))),
    "3-stages": (3, Case(deep(GPT2), MeshConfig(pp=3), staged("1f1b"))),
    "1f1b-zero1": (4, Case(deep(GPT2), TWO, staged("1f1b", 1))),
    "zbv-zero1": (4, Case(deep(GPT2), TWO, staged("zbv", 1))),
    "interleaved-zero2": (4, Case(deep(GPT2), TWO, staged("interleaved", 2, microbatches=3))),
    "zb-h1-zero2-reduced-each": (4, Case(deep(GPT2), TWO, staged("zb-h1", 2, microbatches=3, reduce_each=True))),
    "1f1b-zero3": (4, Case(deep(GPT2), TWO, staged("1f1b", 3, microbatches=3))),
    "gpipe-zero3-reduced-each": (4, Case(deep(OPT, 3), TWO, staged("gpipe", 3, microbatches=3, reduce_each=True))),
    "interleaved-zero3": (4, Case(deep(GPT2), TWO, staged("interleaved", 3, microbatches=3, recompute=FULL))),
    "zb-h1-tp": (4, Case(deep(GPT2), MeshConfig(pp=2, tp=2), staged("zb-h1"))),
    "zbv-tp": (4, Case(deep(LLAMA), MeshConfig(pp=2, tp=2), staged("zbv", microbatches=3))),
    "1f1b-ring": (4, Case(deep(GPT2, 3), MeshConfig(pp=2, cp=2), staged("1f1b", microbatches=3), documents=True)),
    "zbv-ulysses": (4, Case(deep(BLOOM), MeshConfig(pp=2, cp=2, cp_mode="ulysses"), staged("zbv"))),
    "1f1b-tp-zero2": (8, Case(deep(GPT2, 3), MeshConfig(pp=2, tp=2), staged("1f1b", 2, microbatches=3))),
    "zb-h1-tp-dp": (8, Case(deep(LLAMA, 3), MeshConfig(pp=2, tp=2), staged("zb-h1", microbatches=3))),
    "interleaved-tp-zero3": (8, Case(deep(GPT2, 4), MeshConfig(pp=2, tp=2), staged("interleaved", 3, microbatches=3))),
    "1f1b-2d": (8, Case(deep(GPT2, 3), MeshConfig(pp=2, tp=4, tp_mode="2d"), staged("1f1b", microbatches=2))),
    "zbv-2.5d": (8, Case(deep(LLAMA, 4), MeshConfig(pp=2, tp=4, tp_mode="2.5d"), staged("zbv", 1, microbatches=2))),
    "zbv-hybrid": (8, Case(deep(GPT2, 4), HYBRID, staged("zbv", 2, microbatches=2))),
    "1f1b-topk": (2, Case(deep(TOPK), TWO, staged("1f1b"), batch=11)),
    "gpipe-gshard-recomputed": (2, Case(deep(GSHARD), TWO, staged("gpipe", recompute=FULL))),
    "zb-h1-expert-choice": (2, Case(deep(CHOICE), TWO, staged("zb-h1"))),
    "zbv-switch": (2, Case(deep(SWITCH), TWO, staged("zbv"))),
    "interleaved-topk-ep-zero3": (4, Case(deep(TOPK, 4), EXPERTS, staged("interleaved", 3, microbatches=3))),
    "zb-h1-switch-ep": (4, Case(deep(SWITCH, 3), EXPERTS, staged("zb-h1", microbatches=3))),
    "zbv-topk-ep-zero1": (4, Case(deep(TOPK, 4), EXPERTS, staged("zbv", 1, microbatches=3))),
    "1f1b-gshard-ep-tp": (8, Case(deep(GSHARD, 3), replace(EXPERTS, tp=2), staged("1f1b", microbatches=2))),
    "zbv-topk-ep-ring-zero2": (8, Case(deep(TOPK, 4), replace(EXPERTS, cp=2), staged("zbv", 2, microbatches=2))),
    "1f1b-cp-tp": (8, Case(deep(GPT2, 3), MeshConfig(pp=2, cp=2, tp=2), staged("1f1b", microbatches=2))),
    "1f1b-2.5d-ring": (8, Case(deep(GPT2, 3), DEEP, staged("1f1b", microbatches=2))),
}  # fmt: skip


FACTORS = ("schedule", "zero", "beside", "router")
LONG = ["1f1b", "zbv"]


@pytest.mark.parametrize(("name", "steps"), few_cases(CASES, *FACTORS, many=LONG))
def test_trains_as_one_rank_does(ranks, name: str, steps: int) -> None:
    """Losses, and every parameter's displacement, some of them clipped by the norm over all stages."""
    num_ranks, case = CASES[name]
    difference, where = difference_from_single(ranks, num_ranks, replace(case, steps=steps))
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved", "zbv"])
def test_microbatches_of_any_length(ranks, schedule: ScheduleName) -> None:
    """Six microbatches of four lengths, then five: no stage was told."""
    model, config = deep(GPT2, 4), PipelineConfig(schedule)
    expected = ranks(1).run(pipeline.gradients_of_lengths, model, PipelineConfig(), MeshConfig())[0]
    for found in ranks(2).run(pipeline.gradients_of_lengths, model, config, TWO):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-12)
        for name, value in expected.items():
            if name != "losses":
                assert (found[name] - value).norm() <= TOLERANCE * max(float(value.norm()), 1e-6), name


@pytest.mark.parametrize("budget", [None, "1GB"])
def test_the_backward_of_a_stage_reduces_its_own_gradients(ranks, budget: str | None) -> None:
    """And no other stage's: each is sent once a microbatch, of three stages that a rank has."""
    zero, each = (2, True) if budget is None else (3, False)
    parallel = staged("interleaved", zero, microbatches=4, reduce_each=each, chunks=3)
    case = Case(deep(GPT2, 6), TWO, parallel, batch=8, budget=budget)
    most = 1.15 if budget is None else 1.45  # padding of ragged rows; chunks that two stages share
    for sent, own in ranks(4).run(pipeline.bytes_reduced, case):
        assert 4 * own <= sent <= 4 * most * own


def test_waiting_is_no_computing(ranks) -> None:
    """What an action is said to take is without the messages that it waits for: a bubble is seen as one."""
    first, last = ranks(2).run(pipeline.seconds_of_forwards, Case(GPT2, TWO, staged("gpipe")), 1.0)
    assert min(first) >= 1.0
    assert sorted(last)[1] < 0.7  # only two of the three wait for a message: the first is told its shape before


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_formats(ranks, precision: Any) -> None:
    """As one rank with the same microbatches in the same format; fp16 with its loss scale, skipped steps too."""
    plain = Case(deep(LLAMA), parallel=ParallelConfig(precision=precision), microbatch=3, steps=6)
    expected = ranks(1).run(run, plain)[0]
    for schedule in ("1f1b", "zbv"):
        parallel = ParallelConfig(precision=precision, pipeline=PipelineConfig(schedule))
        results = ranks(2).run(run, replace(plain, mesh=TWO, parallel=parallel))
        difference, where = largest_difference(results, expected, plain.steps)
        assert difference <= 1e-3, where


@pytest.mark.parametrize("optim", ["adamw", pytest.param("adafactor", marks=pytest.mark.soak)])
def test_half_of_the_steps_on_each_of_two_meshes(ranks, tmp_path: Path, optim: str) -> None:
    """A checkpoint of some stages goes on on others, or on none; the tied head's weight has one entry."""
    one, tensor = MeshConfig(), MeshConfig(pp=2, tp=2)
    legs = [(2, TWO, 0), (1, one, 0), (4, FOUR, 0), (4, tensor, 0), (4, TWO, 3), (2, one, 1)]
    tied = replace(LLAMA, num_layers=5, tied_head=True)
    assert resumed_elsewhere(ranks, tmp_path, tied, optim, legs) <= TOLERANCE


@pytest.mark.parametrize(
    ("zero", "recompute"),
    [(0, "full"), (2, "none"), *(pytest.param(*row, marks=pytest.mark.soak) for row in ((0, "none"), (2, "full")))],
)
def test_dropout_goes_on_where_it_was(ranks, tmp_path: Path, zero: int, recompute: Any) -> None:
    """To the bit after a stop, on every rank, also where blocks are computed again."""
    options = {"mesh": TWO, "zero": zero, "recompute": RecomputeConfig(recompute), "steps": STEPS}
    config = config_of(tmp_path, checkpoint=CheckpointConfig(every=3), **options)
    stopped = replace(config, out=tmp_path / "stopped")
    ranks(4).run(train, replace(stopped, stop_after=STOP), 0.3)
    found = ranks(4).run(outcome, replace(stopped, resume="auto"), 0.3)
    expected = ranks(4).run(outcome, replace(config, out=tmp_path / "straight"), 0.3)
    for (masters, rows), (straight_masters, straight_rows) in zip(found, expected, strict=True):
        assert rows == straight_rows
        for name, value in straight_masters.items():
            assert torch.equal(masters[name], value), name


def test_dropout_does_not_depend_on_recomputation_or_schedule(ranks, tmp_path: Path) -> None:
    """And differs from stage to stage, and from no dropout."""
    config = config_of(tmp_path, mesh=TWO, steps=3)
    found = {}
    for name, changes in {
        "plain": {},
        "recomputed": {"recompute": RecomputeConfig("full")},
        "gpipe": {"pipeline": PipelineConfig("gpipe")},
    }.items():
        found[name] = ranks(2).run(outcome, replace(config, out=tmp_path / name, **changes), 0.3)
    found["none"] = ranks(2).run(outcome, replace(config, out=tmp_path / "none"), 0.0)
    for rank in range(2):
        for name in ("recomputed", "gpipe"):
            for parameter, value in found["plain"][rank][0].items():
                assert torch.equal(found[name][rank][0][parameter], value), (name, parameter)
    assert not torch.equal(found["plain"][1][0]["head.weight"], found["none"][1][0]["head.weight"])


def test_the_load_of_experts_is_that_of_all_stages(ranks) -> None:
    case = Case(deep(SWITCH), EXPERTS, staged("zbv"), steps=2)
    plain = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"))
    expected = ranks(1).run(pipeline.expert_load, plain)[0]
    assert len(expected["moe_load"]) == 2
    for found in ranks(4).run(pipeline.expert_load, case):
        assert found.pop("moe_load") == expected["moe_load"]
        assert found == pytest.approx({k: v for k, v in expected.items() if k != "moe_load"}, rel=1e-10)


@pytest.mark.parametrize(
    ("fault", "schedule"),
    [
        ("shared gradient", "1f1b"),
        ("shared value", "1f1b"),
        ("last message", "gpipe"),
        ("last message", "interleaved"),
        ("weights", "zb-h1"),
        ("weights", "zbv"),
        ("norm", "1f1b"),
        ("what routers add", "gpipe"),
        ("what routers add", "zbv"),
    ],
)
def test_a_fault_is_seen(ranks, fault: str, schedule: ScheduleName) -> None:
    """The tests above can fail: with any one thing broken that a pipeline needs, they would."""
    case = Case(deep(TOPK if "routers" in fault else GPT2), TWO, staged(schedule), steps=3)
    found = ranks(2).run(pipeline.broken_run, case, fault)
    difference, _ = largest_difference(found, of_one_rank(ranks, case), case.steps)
    assert difference > 1e4 * TOLERANCE
