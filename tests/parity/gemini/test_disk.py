"""Chunks on a disk, a folder for each rank: the ranks learn what they learn without it, and go on from one step."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from core.train.loop import train_step
from tests.support.disk import CASE
from tests.support.training import batch_of, build, data_axis, gemini_of, loss, run, weight

TWO = replace(CASE, host="84KB", parallel=replace(CASE.parallel, precision="fp32"), budget="140KB")


def interrupted(folder: Path) -> dict[str, Any]:
    """Two steps, and two more by those who come after; the second rank has not made the third durable."""
    losses, moved = [], {}
    for first, last in ((0, 3), (2, 4)):
        state, config = build(replace(TWO, disk=folder))
        replicas, axis = gemini_of(state.parallel), data_axis(state.parallel.mesh)
        assert replicas.disk is not None
        assert replicas.disk.away
        durable = replicas.durable
        assert durable is not None
        found = durable.latest()
        assert (found[0] if found else 0) == first
        if found is not None:
            state.load_durable(first)
            losses = losses[:first]
        rows = TWO.batch // axis.size()
        for step in range(first, last):
            mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(TWO, step).items()}
            losses.append(train_step(state, mine, loss, weight, config, step)["loss"])
            if step == 2 and first == 0 and dist.get_rank() == 1:
                dist.barrier()  # it is killed before its record is there
            else:
                state.commit(step + 1, config)
        moved = {name: master.clone() for name, master in state.parallel.masters.items()}
        replicas.close()
    return {"losses": losses, "masters": moved}


def test_two_ranks_go_on_from_the_step_that_both_have(ranks, tmp_path: Path) -> None:
    expected = ranks(2).run(run, replace(TWO, host=None))
    for found, whole in zip(ranks(2).run(interrupted, tmp_path / "disk"), expected, strict=True):
        assert found["losses"] == whole["losses"][:4]
        for name, master in found["masters"].items():
            assert torch.equal(master - whole["start"][name].value, whole["displacement"][name].value), name
