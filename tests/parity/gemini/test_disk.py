"""Chunks on a disk, a folder for each rank: the ranks learn what they learn without it, and go on from one step."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from core.checkpoint import Checkpointer
from core.config import UserError
from core.mesh import MeshConfig
from core.parallel.pipeline.schedule import PipelineConfig
from core.train.loop import train_step
from core.train.state import resume
from tests.parity.test_train import GPT2
from tests.support.disk import CASE, learned
from tests.support.training import Case, batch_of, build, data_axis, gemini_of, loss, run, weight

STAGES = replace(
    CASE, model=replace(GPT2, num_layers=4, tied_head=False), mesh=MeshConfig(pp=2), host="180KB", budget="140KB",
    batch=6,
)  # fmt: skip
TWO = replace(
    CASE, host="140KB", parallel=replace(CASE.parallel, precision="fp32"), budget="140KB", average=0.5,
)  # fmt: skip


def interrupted(given: Case, folder: Path) -> dict[str, Any]:
    """Two steps, and two more by those who come after; the second rank has not made the third durable."""
    losses, moved = [], {}
    for first, last in ((0, 3), (2, 4)):
        state, config = build(replace(given, disk=folder))
        replicas, axis = gemini_of(state.parallel), data_axis(state.parallel.mesh)
        assert replicas.disk is not None
        assert replicas.disk.away
        durable = state.parallel.durable
        assert durable is not None
        found = durable.latest()
        assert (found[0] if found else 0) == first
        if found is not None:
            state.load_durable(first)
            losses = losses[:first]
        rows = given.batch // axis.size()
        for step in range(first, last):
            mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(given, step).items()}
            losses.append(train_step(state, mine, loss, weight, config, step)["loss"])
            if step == 2 and first == 0 and dist.get_rank() == 1:
                dist.barrier()  # it is killed before its record is there
            else:
                state.commit(step + 1, config)
                durable.confirm()
        moved = {name: value.clone() for name, value in learned(state).items()}
        state.parallel.close()
    return {"losses": losses, "masters": moved}


def test_two_ranks_go_on_from_the_step_that_both_have(ranks, tmp_path: Path) -> None:
    expected = ranks(2).run(run, replace(TWO, host=None))
    for found, whole in zip(ranks(2).run(interrupted, TWO, tmp_path / "disk"), expected, strict=True):
        assert found["losses"] == whole["losses"][:4]
        for name, average in whole["averages"].items():
            assert torch.equal(found["masters"].pop(f"average/{name}"), average), name
        for name, master in found["masters"].items():
            assert torch.equal(master - whole["start"][name].value, whole["displacement"][name].value), name


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_stages_of_a_pipeline_go_on_from_the_step_that_both_have(ranks, tmp_path: Path, schedule: Any) -> None:
    pipeline = PipelineConfig(schedule, microbatches=3)
    given = replace(STAGES, parallel=replace(CASE.parallel, pipeline=pipeline))
    expected = ranks(2).run(run, replace(given, host=None))
    for found, whole in zip(ranks(2).run(interrupted, given, tmp_path / "disk"), expected, strict=True):
        assert found["losses"] == whole["losses"][:4]
        for name, master in found["masters"].items():
            assert torch.equal(master - whole["start"][name].value, whole["displacement"][name].value), name


def in_the_least(given: Case, folder: Path) -> dict[str, Any]:
    """What is learned in the least of the host that the refusal tells of, where gradients wait on the disk."""
    with pytest.raises(UserError) as told:
        build(replace(given, disk=folder, host="1KB"))
    least = re.search(r"([\d.]+ [KMG]iB) of model data", str(told.value))
    assert least is not None
    state, config = build(replace(given, disk=folder, host=least[1]))
    replicas, axis = gemini_of(state.parallel), data_axis(state.parallel.mesh)
    assert replicas.disk is not None
    rows, losses = given.batch // axis.size(), []
    for step in range(given.steps):
        mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(given, step).items()}
        losses.append(train_step(state, mine, loss, weight, config, step)["loss"])
        state.commit(step + 1, config)
    replicas.disk.confirm()
    masters = {name: master.clone() for name, master in state.parallel.masters.items()}
    found = {"losses": losses, "masters": masters, "waiting": len(replicas.disk.waiting.of)}
    state.parallel.close()
    return found


@pytest.mark.parametrize(
    ("optim", "zero", "microbatch"),
    [
        ("adafactor", 3, 1),
        pytest.param("adamw", 3, None, marks=pytest.mark.soak),
        pytest.param("adamw", 0, 1, marks=pytest.mark.soak),
    ],
)
def test_ranks_whose_gradients_wait_learn_the_same(ranks, tmp_path: Path, optim: str, zero: Any, microbatch) -> None:
    parallel = replace(TWO.parallel, zero=zero)
    given = replace(TWO, optim=optim, parallel=parallel, microbatch=microbatch, host=None, budget="200KB")
    given = replace(given, policy="cpu")  # nothing lives on the device
    expected = ranks(2).run(run, given)
    for found, whole in zip(ranks(2).run(in_the_least, given, tmp_path / "disk"), expected, strict=True):
        assert found["waiting"] > 0
        assert found["losses"] == whole["losses"][:-1]  # behind them an evaluation's
        for name, master in found["masters"].items():
            assert torch.equal(master - whole["start"][name].value, whole["displacement"][name].value), name


def refused(folder: Path) -> str:
    with pytest.raises(UserError) as told:
        build(replace(STAGES, model=GPT2, disk=folder))
    return str(told.value)


def test_stages_that_share_a_parameter_are_refused(ranks, tmp_path: Path) -> None:
    for told in ranks(2).run(refused, tmp_path / "disk"):
        assert "stages share 'embedding.tokens.weight'" in told


def gone_on(given: Case, folder: Path, out: Path, steps: int = 0, saves: bool = False) -> int | str | None:
    """The step that a run of these ranks goes on from, or why it does not; then it takes some, each durable."""
    state, config = build(replace(given, disk=folder))
    config, axis = replace(config, out=out, resume="auto"), data_axis(state.parallel.mesh)
    checkpoints = replace(config.checkpoint, asynchronous=False)
    checkpointer = Checkpointer(out / "checkpoints", checkpoints, state.parallel.mesh)
    rows = given.batch // axis.size()
    try:
        found = resume(state, checkpointer, config)
        for step in range(found or 0, (found or 0) + steps):
            mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(given, step).items()}
            train_step(state, mine, loss, weight, config, step)
            state.commit(step + 1, config)
        if saves:
            state.save(checkpointer, (found or 0) + steps)
    except UserError as refused:
        return str(refused)
    else:
        return found
    finally:
        state.parallel.close()
        checkpointer.close()


def test_more_ranks_do_not_begin_anew_beside_steps_of_fewer(ranks, tmp_path: Path) -> None:
    """The first of them has all steps, the others none, as where a run was killed before its first one was durable."""
    given = replace(CASE, host=None, budget="400KB"), tmp_path / "disk", tmp_path / "run"
    assert ranks(1).run(gone_on, *given, 2) == [None]
    for told in ranks(2).run(gone_on, *given):
        assert isinstance(told, str)
        assert re.search(
            r"disk holds step 2 of this run on 1 rank, and the last checkpoint is of step 0; continue", told
        )
    for told in ranks(2).run(gone_on, *given[:2], tmp_path / "another"):
        assert isinstance(told, str)
        assert re.search(r"disk holds step 2 of .*/run; continue that run", told)
    assert ranks(1).run(gone_on, *given, 1, True) == [2]
    assert ranks(2).run(gone_on, *given, 1) == [3, 3]  # from the checkpoint
    assert ranks(2).run(gone_on, *given) == [4, 4]
