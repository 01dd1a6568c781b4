"""Pipelines that run ahead follow their recurrence, as one rank does that keeps the history of the weights, in fp64."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from core.checkpoint import CheckpointConfig, Checkpointer
from core.compose import ParallelConfig
from core.config import UserError
from core.mesh import MeshConfig
from core.parallel.correction import CorrectionName
from core.parallel.pipeline.schedule import PipelineConfig, ScheduleName
from core.parallel.recompute import RecomputeConfig
from core.precision import Precision
from tests.parity.test_experts import TOPK
from tests.parity.test_resume import STEPS, STOP, outcome
from tests.parity.test_train import BLOOM, GPT2, LLAMA, OPT, TOLERANCE
from tests.support import ahead, delayed
from tests.support.small import config_of, train
from tests.support.training import Case, build, largest_difference, of_one_rank, run


def deep(model: Any, num_layers: int = 5) -> Any:
    return replace(model, num_layers=num_layers)


def late(
    num_ranks: int = 2, zero: int = 0, microbatches: int | None = 4, name: ScheduleName = "2bw", **options: Any
) -> dict[str, Any]:
    keys = ("split", "clip", "correction", "correction_steps", "replicas")
    given = {key: options.pop(key) for key in keys if key in options}
    pipeline = PipelineConfig(name, microbatches=microbatches, **given)
    parallel = ParallelConfig(zero=zero, precision="fp64", pipeline=pipeline, **options)
    return {"mesh": MeshConfig(pp=num_ranks), "parallel": parallel}


FULL, SELECTIVE = RecomputeConfig("full"), RecomputeConfig("selective", every=2)
OFFLOAD, COMPRESSED = RecomputeConfig("offload"), RecomputeConfig("compressed")
TWO, HYBRID = MeshConfig(pp=2), MeshConfig(pp=2, dp_replicate=2, dp_shard=2)
CASES = {
    "2": (2, Case(deep(GPT2), **late(), batch=11, steps=7)),
    "2-few-microbatches-sgd": (2, Case(deep(OPT, 3), **late(microbatches=2), batch=11, steps=7, optim="sgd")),
    "2-muon-recomputed": (2, Case(deep(LLAMA), **late(recompute=FULL), batch=11, steps=7, optim="muon")),
    "2-rows-selective": (2, Case(deep(BLOOM), **late(microbatches=None, recompute=SELECTIVE), microbatch=5, steps=7)),
    "3": (3, Case(deep(GPT2), **late(3, microbatches=3), batch=11, steps=9)),
    "3-sgd": (3, Case(deep(LLAMA), **late(3, microbatches=5, split=(1, 3, 1)), batch=11, steps=9, optim="sgd")),
    "4": (4, Case(deep(GPT2), **late(4, microbatches=6), steps=12)),
    "4-muon": (4, Case(deep(LLAMA), **late(4, microbatches=4), steps=12, optim="muon")),
    "2x2": (4, Case(deep(GPT2), **late(microbatches=3), steps=7)),
    "2x2-zero1": (4, Case(deep(GPT2), **late(zero=1, microbatches=2), steps=7)),
    "2x2-zero1-muon": (4, Case(deep(LLAMA, 3), **late(zero=1), steps=7, optim="muon")),
    "2-topk": (2, Case(deep(TOPK), **late(), batch=11, steps=7)),
    "2xtp2": (4, Case(deep(GPT2), **late() | {"mesh": MeshConfig(pp=2, tp=2)}, steps=7)),
    "2xcp2": (4, Case(deep(GPT2, 3), **late() | {"mesh": MeshConfig(pp=2, cp=2)}, steps=7)),
    "hybrid": (8, Case(deep(GPT2), **late(zero=1, microbatches=2) | {"mesh": HYBRID}, batch=16, steps=7)),
}
STASH: Any = {"name": "pipedream", "microbatches": None}
SYNC: Any = {"name": "pipedream_sync", "microbatches": None}
CASES |= {
    "pipedream-2": (2, Case(deep(GPT2), **late(**STASH), batch=11, steps=7)),
    "pipedream-3-uneven-recomputed": (
        3,
        Case(deep(LLAMA), **late(3, split=(1, 3, 1), recompute=FULL, **STASH), batch=11, steps=9, optim="muon"),
    ),
    "pipedream-3-accumulated-last": (
        3,
        Case(deep(GPT2), **late(3, name="pipedream", microbatches=2, clip="last"), batch=11, steps=10),
    ),
    "sync-2-sgd": (2, Case(deep(OPT, 3), **late(**SYNC), batch=11, steps=7, optim="sgd")),
    "sync-3-uneven-tied": (
        3,
        Case(deep(GPT2), **late(3, split=(2, 1, 2), recompute=FULL, **SYNC), batch=11, steps=10),
    ),
    "sync-3-accumulated": (
        3,
        Case(deep(LLAMA), **late(3, name="pipedream_sync", microbatches=3), batch=11, steps=9, optim="muon"),
    ),
    "pipedream-2x2": (4, Case(deep(GPT2), **late(**STASH), steps=7)),
    "sync-2x2-zero1": (4, Case(deep(GPT2), **late(zero=1, **SYNC), steps=7)),
}
TURNS: Any = {"replicas": (2, 1), "microbatches": 2}
CASES |= {
    "pipedream-replicas-2-1": (3, Case(deep(LLAMA), **late(3, name="pipedream", **TURNS), batch=11, steps=10)),
    "sync-replicas-1-2-sgd": (
        3,
        Case(
            deep(OPT),
            **late(3, 0, 4, "pipedream_sync", replicas=(1, 2), recompute=FULL, split=(1, 4)),
            batch=11,
            steps=9,
            optim="sgd",
        ),
    ),
    "2bw-replicas-2-1-muon": (
        3,
        Case(deep(LLAMA), **late(3, microbatches=6, replicas=(2, 1)), batch=11, steps=7, optim="muon"),
    ),
    "pipedream-replicas-1-2-1": (
        4,
        Case(deep(LLAMA), **late(4, 0, 2, "pipedream", replicas=(1, 2, 1), clip="last"), batch=11, steps=12),
    ),
}
LONG = {
    f"{options['name']}-{name}": (size, Case(model, **made, steps=steps, **more))
    for options in (STASH, SYNC)
    for name, size, model, made, steps, more in (
        ("4", 4, deep(GPT2), late(4, **options), 12, {}),
        ("4-sgd-rows", 4, deep(LLAMA), late(4, **options), 13, {"microbatch": 4, "optim": "sgd", "batch": 11}),
        ("3-sgd", 3, deep(GPT2), late(3, **options), 10, {"optim": "sgd", "batch": 11}),
        ("2-selective", 2, deep(BLOOM), late(recompute=SELECTIVE, **options), 7, {"microbatch": 5}),
        ("2-offload", 2, deep(LLAMA), late(recompute=OFFLOAD, **options), 7, {"batch": 11}),
        ("2-compressed", 2, deep(OPT), late(recompute=COMPRESSED, **options), 7, {"microbatch": 5}),
        ("2-topk", 2, deep(TOPK), late(**options), 7, {"batch": 11}),
        ("3-topk-accumulated", 3, deep(TOPK), late(3, **options | {"microbatches": 2}), 9, {"batch": 11}),
        ("2x2-zero1-muon", 4, deep(LLAMA, 3), late(zero=1, **options), 7, {"optim": "muon"}),
        ("2xtp2", 4, deep(GPT2), late(**options) | {"mesh": MeshConfig(pp=2, tp=2)}, 7, {}),
        ("2xcp2", 4, deep(GPT2, 3), late(**options) | {"mesh": MeshConfig(pp=2, cp=2)}, 7, {}),
        ("hybrid", 8, deep(GPT2), late(zero=1, **options) | {"mesh": HYBRID}, 7, {"batch": 16}),
        ("8", 8, deep(GPT2, 9), late(8, **options), 25, {}),
        ("4x2-zero1", 8, deep(GPT2), late(4, zero=1, **options | {"microbatches": 2}), 13, {}),
    )
}
LONG |= {
    "2-offload": (2, Case(deep(LLAMA), **late(recompute=OFFLOAD), batch=11, steps=7)),
    "2-compressed": (2, Case(deep(OPT), **late(microbatches=None, recompute=COMPRESSED), microbatch=5, steps=7)),
}
LONG |= {
    f"{name}-replicas-{case}": (size, Case(model, **made | {"mesh": mesh}, steps=steps, **more))
    for name, number in (("2bw", 12), ("pipedream", None), ("pipedream_sync", None))
    for case, size, model, made, mesh, steps, more in (
        ("3-1", 4, deep(LLAMA), late(4, 0, number, name, replicas=(3, 1)), MeshConfig(pp=4), 13, {"batch": 14}),
        ("1-3", 4, deep(OPT), late(4, 0, number, name, replicas=(1, 3)), MeshConfig(pp=4), 10, {"batch": 13}),
        ("2-1-1", 4, deep(LLAMA), late(4, 0, number, name, replicas=(2, 1, 1)), MeshConfig(pp=4), 13, {}),
        ("2-2-muon", 4, deep(LLAMA), late(4, 0, number, name, replicas=(2, 2)), MeshConfig(pp=4), 9, {"optim": "muon"}),
        ("2-1-topk", 3, deep(TOPK), late(3, 0, number, name, replicas=(2, 1)), MeshConfig(pp=3), 9, {"batch": 13}),
        (
            "3-1-2x2-zero1",
            8,
            deep(LLAMA),
            late(4, 1, number, name, replicas=(3, 1)),
            MeshConfig(pp=4, dp_shard=2),
            9,
            {"batch": 26},
        ),
        ("1-3-tp2", 8, deep(OPT), late(4, 0, number, name, replicas=(1, 3)), MeshConfig(pp=4, tp=2), 9, {}),
        (
            "3-2-1-1-1",
            8,
            deep(LLAMA, 7),
            late(8, 0, 12, name, replicas=(3, 2, 1, 1, 1)),
            MeshConfig(pp=8),
            16,
            {"batch": 13},
        ),
    )
}
LONG["pipedream-4-last"] = (4, Case(deep(LLAMA), **late(4, clip="last", **STASH), batch=11, steps=13))
EVERY = CASES | LONG


NO_MOMENTUM, NO_BETA = (("momentum", 0.0),), (("betas", (0.0, 0.95)),)
CORRECTED = {
    "prediction": (2, Case(deep(GPT2), **late(correction="prediction"), batch=11, steps=7)),
    "prediction-zero1-muon": (4, Case(deep(LLAMA, 3), **late(zero=1, correction="prediction"), steps=7, optim="muon")),
    "prediction-stash": (3, Case(deep(LLAMA), **late(3, correction="prediction", **STASH), batch=11, steps=10)),
    "prediction-sync-tied": (3, Case(deep(GPT2), **late(3, correction="prediction", **SYNC), batch=11, steps=10)),
    "nesterov": (2, Case(deep(GPT2, 3), **late(correction="nesterov"), batch=11, steps=7, options=NO_BETA)),
    "nesterov-stash-sgd": (
        3,
        Case(
            deep(LLAMA, 3),
            **late(3, correction="nesterov", **STASH),
            batch=11,
            steps=10,
            optim="sgd",
            options=NO_MOMENTUM,
        ),
    ),
    "dc_asgd-zero1": (4, Case(deep(GPT2, 3), **late(zero=1, correction="dc_asgd"), steps=7)),
    "dc_asgd-stash-tied": (3, Case(deep(GPT2, 3), **late(3, correction="dc_asgd", **STASH), batch=11, steps=10)),
    "error_feedback": (
        3,
        Case(deep(GPT2, 3), **late(3, microbatches=3, correction="error_feedback"), batch=11, steps=9),
    ),
    "error_feedback-muon": (
        2,
        Case(deep(LLAMA, 3), **late(correction="error_feedback", recompute=FULL), batch=11, steps=7, optim="muon"),
    ),
    "error_feedback-stash": (3, Case(deep(GPT2), **late(3, correction="error_feedback", **STASH), batch=11, steps=10)),
    "lr_by_delay-stash": (
        3,
        Case(deep(LLAMA), **late(3, correction="lr_by_delay", correction_steps=6, **STASH), batch=11, steps=10),
    ),
}


def without_correction(case: Case) -> Case:
    pipeline = replace(case.parallel.pipeline, correction="none")
    return replace(case, parallel=replace(case.parallel, pipeline=pipeline))


@pytest.mark.parametrize("name", CORRECTED)
def test_a_correction_follows_its_equations(ranks, name: str) -> None:
    """And they say something else than the recurrence without it."""
    num_ranks, case = CORRECTED[name]
    expected = of_simulator(ranks, case)
    difference, where = largest_difference(ranks(num_ranks).run(run, case), expected, case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from the equations"
    plain = of_simulator(ranks, without_correction(case))
    assert largest_difference([plain], expected, case.steps)[0] > 1e4 * TOLERANCE


@pytest.mark.parametrize("name", ["prediction", "dc_asgd"])
def test_a_correction_of_steps_that_are_skipped(ranks, name: CorrectionName) -> None:
    case = Case(deep(LLAMA), **late(correction=name), microbatch=None, batch=12, steps=8)
    case = replace(case, parallel=replace(case.parallel, precision="fp16"))
    found, expected = ranks(2).run(ahead.run_scaled, case), ranks(1).run(delayed.of_schedule, case, 3)[0]
    assert largest_difference(found, expected, case.steps)[0] <= 1e-3
    assert found[0]["skipped"] == expected["skipped"] > 0


def of_simulator(ranks, case: Case) -> dict[str, Any]:
    return ranks(1).run(delayed.of_schedule, case)[0]


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.soak) for name in LONG)])
def test_follows_its_recurrence(ranks, name: str) -> None:
    num_ranks, case = EVERY[name]
    difference, where = largest_difference(ranks(num_ranks).run(run, case), of_simulator(ranks, case), case.steps)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from the recurrence"


@pytest.mark.parametrize("fault", ahead.OF_REPLICAS)
def test_a_fault_of_replicas_is_seen(ranks, fault: str) -> None:
    case = Case(deep(LLAMA), **late(3, name="pipedream", recompute=FULL, **TURNS), batch=11, steps=5)
    found = ranks(3).run(ahead.broken_run, case, fault)
    assert largest_difference(found, of_simulator(ranks, case), case.steps)[0] > 1e4 * TOLERANCE


def test_replicas_hold_the_same_to_the_bit(ranks) -> None:
    case = Case(deep(LLAMA), **late(4, name="pipedream_sync", microbatches=3, replicas=(3, 1)), steps=7)
    first, *others, _ = ranks(4).run(run, case)
    for other in others:
        assert other["displacement"].keys() == first["displacement"].keys()
        for name, (_, value) in other["displacement"].items():
            assert torch.equal(value, first["displacement"][name].value), name


def test_stages_that_share_a_parameter_have_no_replicas(ranks) -> None:
    case = Case(deep(GPT2), **late(3, name="pipedream", **TURNS))
    for said in ranks(3).run(ahead.refused, case):
        assert "pipeline.replicas=2 1: stages share 'embedding.tokens.weight'" in said
        assert "\n" not in said


def test_the_simulator_without_delay_is_synchronous_training(ranks) -> None:
    case = Case(deep(GPT2, 2))
    found, expected = ranks(1).run(delayed.none_late, case)[0], of_one_rank(ranks, case)
    assert largest_difference([found], expected, case.steps)[0] <= TOLERANCE
    late_by_one = of_simulator(ranks, replace(case, **late()))
    assert largest_difference([late_by_one], expected, case.steps)[0] > 1e4 * TOLERANCE


@pytest.mark.parametrize(
    ("fault", "options"),
    [
        *((fault, {}) for fault in ahead.FAULTS),
        ("newest weights in the backward", STASH),
        ("newest weights in the backward", SYNC),
        *(
            pytest.param(fault, options, marks=pytest.mark.soak)
            for fault in ahead.FAULTS
            for options in (STASH, SYNC)
            if fault != "newest weights in the backward"
        ),
    ],
)
def test_a_fault_is_seen(ranks, fault: str, options: dict[str, Any]) -> None:
    """Each makes some rank compute with other weights, or sum up other gradients, than the recurrence says."""
    case = Case(deep(GPT2), **late(recompute=FULL, **options), batch=11, steps=5)
    found = ranks(2).run(ahead.broken_run, case, fault)
    assert largest_difference(found, of_simulator(ranks, case), case.steps)[0] > 1e4 * TOLERANCE


@pytest.mark.parametrize(
    ("size", "options", "pauses"),
    [
        *((2, {}, pauses) for pauses in [(), (2,), (1, 2, 4, 5), range(9)]),
        (3, STASH | {"clip": "last"}, (0, 4)),
        (3, SYNC, (1, 5)),
        (3, TURNS | {"name": "pipedream_sync"}, (0, 3)),
        *(
            pytest.param(3, TURNS | more, pauses, marks=pytest.mark.soak)
            for more in ({"name": "pipedream"}, {"microbatches": 6}, {"name": "pipedream_sync", "replicas": (1, 2)})
            for pauses in ((0, 2), (3,), range(9))
        ),
        *(
            pytest.param(size, options | {"microbatches": microbatches}, pauses, marks=pytest.mark.soak)
            for size in (2, 4)
            for options in (STASH, SYNC)
            for microbatches in (None, 2)
            for pauses in ((0, 2), (3,), range(9))
        ),
    ],
)
def test_a_pause_changes_nothing(ranks, size: int, options: dict[str, Any], pauses: Sequence[int]) -> None:
    """To the bit: a step after which nothing is under way, as before a checkpoint, learns what it had learned."""
    case = Case(deep(LLAMA if "replicas" in options else GPT2), **late(size, **options), batch=11, steps=8)
    expected, found = (ranks(size).run(ahead.run_with_pauses, case, steps) for steps in ((), pauses))
    for of_rank, straight in zip(found, expected, strict=True):
        assert of_rank["losses"] == straight["losses"]
        for name, (_, value) in of_rank["displacement"].items():
            assert torch.equal(value, straight["displacement"][name].value), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_narrow_formats(ranks, precision: Precision) -> None:
    """As the simulator with the same microbatches in the same format; steps that overflow are skipped in both."""
    case = Case(deep(LLAMA), **late(), microbatch=None, batch=12, steps=8)
    case = replace(case, parallel=replace(case.parallel, precision=precision))
    found = ranks(2).run(ahead.run_scaled, case)
    expected = ranks(1).run(delayed.of_schedule, case, 3)[0]
    difference, where = largest_difference(found, expected, case.steps)
    assert difference <= 1e-3, where
    assert all(of_rank["skipped"] == expected["skipped"] for of_rank in found)
    assert (expected["skipped"] > 0) == (precision == "fp16")


@pytest.mark.parametrize(
    ("name", "zero", "size", "precision", "correction"),
    [
        ("2bw", 0, 2, "fp64", "none"),
        ("2bw", 1, 4, "fp64", "prediction"),
        ("2bw", 1, 4, "bf16", "error_feedback"),
        ("2bw", 0, 2, "fp16", "dc_asgd"),
        ("pipedream", 1, 4, "bf16", "prediction"),
        ("pipedream_sync", 0, 2, "fp16", "none"),
        pytest.param("2bw", 1, 4, "bf16", "none", marks=pytest.mark.soak),
        pytest.param("2bw", 0, 2, "bf16", "prediction", marks=pytest.mark.soak),
        pytest.param("pipedream", 0, 2, "fp64", "error_feedback", marks=pytest.mark.soak),
        pytest.param("pipedream", 0, 2, "fp64", "none", marks=pytest.mark.soak),
        pytest.param("pipedream_sync", 1, 4, "bf16", "dc_asgd", marks=pytest.mark.soak),
    ],
)
def test_resumes_to_the_bit(
    ranks, tmp_path: Path, name: Any, zero: Any, size: int, precision: Precision, correction: CorrectionName
) -> None:
    """With all versions of the weights, a correction's state, dropout, and a buffer that training updates."""
    clip = "last" if name == "pipedream" else "stage"
    late_options = {
        "mesh": TWO,
        "zero": zero,
        "pipeline": PipelineConfig(name, microbatches=2, clip=clip, correction=correction),
        "precision": precision,
    }
    config = config_of(tmp_path, checkpoint=CheckpointConfig(every=3), steps=STEPS, **late_options)
    config = replace(config, recompute=FULL)
    stopped = replace(config, out=tmp_path / "stopped")
    ranks(size).run(train, replace(stopped, stop_after=STOP), 0.3)
    found = ranks(size).run(outcome, replace(stopped, resume="auto"), 0.3)
    expected = ranks(size).run(outcome, replace(config, out=tmp_path / "straight"), 0.3)
    for (masters, rows), (straight_masters, straight_rows) in zip(found, expected, strict=True):
        assert rows == straight_rows
        for name, value in straight_masters.items():
            assert torch.equal(masters[name], value), name


@pytest.mark.parametrize(
    ("name", "replicas"),
    [
        ("pipedream", (2, 1)),
        *(pytest.param(*each, marks=pytest.mark.soak) for each in (("2bw", (1, 2)), ("pipedream_sync", (2, 1)))),
    ],
)
def test_replicas_resume_to_the_bit(ranks, tmp_path: Path, name: Any, replicas: tuple[int, ...]) -> None:
    """With versions in flight, and dropout; and as many stages of one rank each go on with what replicas have saved."""
    pipeline = PipelineConfig(name, microbatches=6 if name == "2bw" else 4, replicas=replicas)
    config = config_of(tmp_path, checkpoint=CheckpointConfig(every=3), steps=STEPS, precision="fp64", recompute=FULL)
    config = replace(config, mesh=MeshConfig(pp=3), pipeline=pipeline)
    stopped = replace(config, out=tmp_path / "stopped")
    ranks(3).run(train, replace(stopped, stop_after=STOP), 0.3)
    shutil.copytree(tmp_path / "stopped", tmp_path / "elsewhere")
    found = ranks(3).run(outcome, replace(stopped, resume="auto"), 0.3)
    expected = ranks(3).run(outcome, replace(config, out=tmp_path / "straight"), 0.3)
    alone = replace(config, mesh=TWO, pipeline=replace(pipeline, replicas=()), out=tmp_path / "elsewhere")
    first, last = ranks(2).run(outcome, replace(alone, resume="auto"), 0.3)
    for (masters, rows), (straight_masters, straight_rows) in zip(found, expected, strict=True):
        assert rows == straight_rows
        for name, value in straight_masters.items():
            if name != "seen":  # by a replica, of its own microbatches
                assert torch.equal(masters[name], value), name
                other = first[0] if name in first[0] else last[0]
                assert (other[name] - value).abs().max() <= TOLERANCE, name


@pytest.mark.parametrize(
    ("name", "updates"),
    [("2bw", {"": 1}), ("pipedream", {"blocks.0": 1, "": 0}), ("pipedream_sync", {"": 1})],
)
def test_dropout_is_that_of_one_rank(ranks, tmp_path: Path, name: Any, updates: dict[str, int]) -> None:
    """With what is computed again drawing again what it drew, when the next step has begun."""
    config = config_of(tmp_path, steps=STEPS, checkpoint=CheckpointConfig(every=0), recompute=FULL)
    config = replace(config, optim=replace(config.optim, clip_norm=None))
    expected = ranks(1).run(ahead.train_late, config, 0.3, updates)[0]
    pipelined = replace(config, mesh=TWO, pipeline=PipelineConfig(name, microbatches=3))
    for found in ranks(2).run(ahead.masters_after, pipelined, 0.3):
        for name, value in found.items():
            assert (value - expected[name]).abs().max() <= TOLERANCE, name


def test_a_checkpoint_of_another_correction_is_refused(ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=STEPS, mesh=TWO, pipeline=PipelineConfig("2bw", microbatches=2))
    ranks(2).run(train, replace(config, stop_after=STOP))
    other = replace(config, resume="auto", pipeline=replace(config.pipeline, correction="error_feedback"))
    for said in ranks(2).run(ahead.refusal, other):
        assert "pipeline.correction=none" in said
        assert "--pipeline.correction none" in said


def test_a_checkpoint_of_another_schedule_is_refused(ranks, tmp_path: Path) -> None:
    config = config_of(tmp_path, steps=STEPS, mesh=TWO, pipeline=PipelineConfig("2bw", microbatches=2))
    plain = replace(config, pipeline=PipelineConfig(microbatches=2))
    for saved, resumed in ((config, plain), (plain, config)):
        out = tmp_path / saved.pipeline.schedule
        ranks(2).run(train, replace(saved, out=out, stop_after=STOP))
        for said in ranks(2).run(ahead.refusal, replace(resumed, out=out, resume="auto")):
            assert f"is a checkpoint of pipeline.schedule={saved.pipeline.schedule}" in said
            assert f"--pipeline.schedule {saved.pipeline.schedule}" in said
            assert "\n" not in said


def resumed_elsewhere(case: Case, folder: Path, saved: PipelineConfig) -> str:
    """What is said of a checkpoint of other stages."""
    stopped = replace(case, parallel=replace(case.parallel, pipeline=saved))
    state, _ = build(stopped)
    checkpointer = Checkpointer(folder, CheckpointConfig(), state.parallel.mesh)
    state.save(checkpointer, 1)
    checkpointer.wait()
    other, _ = build(case)
    try:
        other.load(checkpointer, None)
    except UserError as refused:
        return str(refused)
    finally:
        checkpointer.close()
    return "was not refused"


def test_a_checkpoint_of_replicas_of_other_stages_is_refused(ranks, tmp_path: Path) -> None:
    case = Case(deep(LLAMA), **late(3, name="pipedream", split=(2, 3), **TURNS), batch=8)
    (said,) = set(ranks(3).run(resumed_elsewhere, case, tmp_path, replace(case.parallel.pipeline, split=(3, 2))))
    assert "with stages of 3 2 blocks, and this run has stages of 2 3" in said


def test_a_checkpoint_of_other_stages_is_refused(ranks, tmp_path: Path) -> None:
    """Where it has other versions: under vertical sync all stages' are as late."""
    said = {}
    for name in ("pipedream", "pipedream_sync", "2bw"):
        case = Case(deep(GPT2), **late(name=name, split=(2, 3)), batch=8)
        saved = replace(case.parallel.pipeline, split=(3, 2))
        (said[name],) = set(ranks(2).run(resumed_elsewhere, case, tmp_path / name, saved))
    assert "checkpoint of pipeline.schedule=pipedream with stages of 3 2 blocks" in said["pipedream"]
    assert "this run has stages of 2 3" in said["pipedream"]
    assert "--mesh.pp 2 --pipeline.split 3 2" in said["pipedream"]
    assert said["pipedream_sync"] == said["2bw"] == "was not refused"
