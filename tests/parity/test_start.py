"""Replicas of a model that was built with other values on each rank start from those of the first."""

import pytest
import torch
import torch.distributed as dist

from core.compose import ParallelConfig, parallelize
from core.layout import full_tensor
from core.mesh import MeshConfig, build_mesh


def start(zero: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(dist.get_rank())
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5))
    model[1].running_mean.normal_()
    mesh = build_mesh(MeshConfig().resolve(2, zero), "cpu")
    parallel = parallelize(model, mesh, ParallelConfig(zero=zero))
    return full_tensor(parallel.masters["0.weight"]).detach(), parallel.model[1].running_mean.clone()


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_replicas_agree(ranks, zero: int) -> None:
    first, second = ranks(2).run(start, zero)
    torch.manual_seed(0)
    assert torch.equal(first[0], torch.nn.Linear(3, 5).weight)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
