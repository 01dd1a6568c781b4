"""Every process group is made with the mesh, alike on all ranks: a step, an evaluation, a checkpoint make none."""

import inspect
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from core.checkpoint import CheckpointConfig, Checkpointer
from core.comm.volume import count_volume
from core.compose import ParallelConfig
from core.layout import full_tensor
from core.mesh import MeshConfig, build_mesh, data_axis
from core.parallel.data import data_parallel
from core.parallel.pipeline.schedule import PipelineConfig
from core.train import train_step
from tests.parity.test_experts import SWITCH, TOPK
from tests.parity.test_train import GPT2, LLAMA, TOLERANCE
from tests.support import command, training
from tests.support.small import Small
from tests.support.training import Case, batch_of, difference_from_single, evaluated, loss, weight

EVERY_FOURTH = replace(SWITCH, num_layers=4, moe=replace(SWITCH.moe, every=4))
"""Of two stages of two blocks the first has no expert."""


def refused(*_: Any, **__: Any) -> Any:
    raise AssertionError("a process group is made after the mesh")


def train_without_new_groups(case: Case, folder: Path | None) -> None:
    """Two steps, their volume counted, an evaluation, whole parameters, a checkpoint; on a mesh that is made anew."""
    with ExitStack() as stack:

        def make(config: MeshConfig, device_type: str) -> DeviceMesh:
            mesh = inspect.unwrap(build_mesh)(config, device_type)
            stack.enter_context(patch.object(c10d, "_new_process_group_helper", refused))
            return mesh

        stack.enter_context(patch.object(training, "build_mesh", make))
        state, config = training.build(case)
        axis = data_axis(state.parallel.mesh)
        rows = case.batch // axis.size()
        for step in range(2):
            mine = {k: v[axis.get_local_rank() * rows :][:rows] for k, v in batch_of(case, step).items()}
            with count_volume(state.parallel.mesh):
                train_step(state, mine, loss, weight, config, step)
        evaluated(state, mine)
        for master in state.parallel.masters.values():
            full_tensor(master)
        if folder is not None:
            checkpointer = Checkpointer(folder, CheckpointConfig(), state.parallel.mesh)
            state.save(checkpointer, 2)
            checkpointer.close()


@pytest.mark.parametrize(
    ("num_ranks", "case"),
    [
        (1, Case(TOPK)),
        (4, Case(GPT2, mesh=MeshConfig(cp=4, cp_mode="mixed", cp_ulysses=2))),
        (4, Case(LLAMA, mesh=MeshConfig(cp=2, dp_replicate=2), parallel=ParallelConfig(zero=3, precision="fp64"))),
        (4, Case(LLAMA, mesh=MeshConfig(tp=2, cp=2), parallel=ParallelConfig(zero=2, precision="fp64"))),
        (4, Case(GPT2, mesh=MeshConfig(tp=4, tp_mode="2d"))),
        (4, Case(TOPK, mesh=MeshConfig(ep=2, cp=2), parallel=ParallelConfig(zero=3, precision="fp64"))),
        (4, Case(SWITCH, mesh=MeshConfig(pp=2, ep=2), parallel=ParallelConfig(zero=1, precision="fp64"))),
        (4, Case(GPT2, mesh=MeshConfig(pp=2, tp=2))),
        (
            4,
            Case(
                GPT2,
                mesh=MeshConfig(pp=2),
                parallel=ParallelConfig(zero=3, precision="fp64", pipeline=PipelineConfig(microbatches=3)),
                budget="200000",
                planned=True,
            ),
        ),
    ],
    ids=lambda given: given if isinstance(given, int) else f"{given.mesh.describe()} zero={given.parallel.zero}",
)
def test_no_process_group_is_made_after_the_mesh(ranks, tmp_path: Path, num_ranks: int, case: Case) -> None:
    ranks(num_ranks).run(train_without_new_groups, case, None if case.budget else tmp_path)


def test_stages_without_experts(ranks) -> None:
    """The groups over which experts' gradients go are made by the ranks that have none, too."""
    case = Case(EVERY_FOURTH, mesh=MeshConfig(pp=2, ep=2), steps=3)
    ranks(4).run(train_without_new_groups, case, None)
    difference, where = difference_from_single(ranks, 4, case)
    assert difference <= TOLERANCE, f"{where} differs by {difference:.3g} from one rank"


def of_a_foreign_mesh() -> list[int]:
    """A mesh that names two axes of ours: what is derived of them is made when a model is spread over it."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    parallel = data_parallel(Small(), mesh, 3, "fp32")
    with patch.object(c10d, "_new_process_group_helper", refused):
        parallel.run([0], lambda _: parallel.model(torch.ones(2, 5)).sum())
        parallel.reduce()
        return data_axis(mesh).mesh.tolist()


def test_a_mesh_of_somebody_elses(ranks) -> None:
    assert ranks(2).run(of_a_foreign_mesh) == [[0, 1], [0, 1]]


FAKE = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from core.mesh import MeshConfig, build_mesh, gradient_axis
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4096)
print(gradient_axis(build_mesh(MeshConfig(pp=4, ep=8, cp=2, tp=8).resolve(4096, 3), "cpu")).size())
"""


def test_a_mesh_of_thousands_of_ranks_that_are_not_there(tmp_path: Path) -> None:
    """What is only counted on many ranks (benchmarks) connects to none of them."""
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    done = command.run(script)
    assert done.stdout == "128\n", done.stderr
