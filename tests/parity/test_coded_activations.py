"""8-bit activations: ranks are one rank whose blocks' and experts' rows are rounded where messages would be."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from core.comm.coded_rows import rows_in_8_bits
from core.compose import ParallelConfig
from core.mesh import MeshConfig
from core.nn.routing import MoEConfig
from core.parallel.compress import CommConfig
from core.parallel.pipeline.schedule import PipelineConfig
from tests.parity.test_train import GPT2, TOLERANCE
from tests.support import training
from tests.support.training import Case, build, largest_difference, run

INT8 = CommConfig(activations="int8")
MOE = replace(GPT2, moe=MoEConfig(3, experts_per_token=2))


class Rounded(torch.autograd.Function):
    """Rows as they arrive, and their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return arrived(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return arrived(grad)


def arrived(x: Tensor) -> Tensor:
    rows, flat = rows_in_8_bits(x.shape[-1]), x.reshape(-1, x.shape[-1])
    found = torch.empty_like(flat)
    rows.decode(rows.encode(flat), found)
    return found.view_as(x)


def simulated(case: Case, behind: int | None) -> dict[str, Any]:
    """One rank.  behind: the block behind which a stage ends; None: it has experts"""

    def rounding(case: Case) -> Any:
        state, config = build(case)
        blocks: Any = state.parallel.model.get_submodule("blocks")
        if behind is not None:
            blocks[behind].register_forward_hook(lambda module, args, output: Rounded.apply(output))
        else:
            for block in blocks:
                through_rounded(block.mlp.experts)
        return state, config

    with patch.object(training, "build", rounding):
        return run(case)


def through_rounded(experts: nn.Module) -> None:
    inner = experts.forward

    def forward(x_AD: Tensor, rows_E: Tensor) -> Tensor:
        return Rounded.apply(inner(Rounded.apply(x_AD), rows_E))

    experts.forward = forward


FP64 = ParallelConfig(precision="fp64", comm=INT8)
CASES = {
    "stages": (2, Case(GPT2, mesh=MeshConfig(pp=2), parallel=FP64, microbatch=4), 0),
    "stages, zero 1": (
        4,
        Case(
            GPT2, mesh=MeshConfig(pp=2), parallel=replace(FP64, zero=1, pipeline=PipelineConfig("1f1b")), microbatch=3
        ),
        0,
    ),
    "experts": (2, Case(MOE, mesh=MeshConfig(ep=2), parallel=FP64), None),
    "experts, zero 3": (3, Case(MOE, mesh=MeshConfig(ep=3), parallel=replace(FP64, zero=3), microbatch=2), None),
}


@pytest.mark.parametrize("name", CASES)
def test_ranks_are_one_rank_that_rounds(ranks, name: str) -> None:
    size, case, behind = CASES[name]
    alone = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"), microbatch=None)
    expected = ranks(1).run(simulated, alone, behind)[0]
    found, where = largest_difference(ranks(size).run(run, case), expected, case.steps)
    assert found <= TOLERANCE, f"{where} differs by {found:.3g}"


def test_without_rounding_the_difference_is_seen(ranks) -> None:
    size, case, _ = CASES["stages"]
    alone = replace(case, mesh=MeshConfig(), parallel=ParallelConfig(precision="fp64"), microbatch=None)
    found, _ = largest_difference(ranks(size).run(run, case), ranks(1).run(run, alone)[0], case.steps)
    assert found > 1e-4
