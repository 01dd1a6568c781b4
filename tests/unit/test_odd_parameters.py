"""Parameters and modules that few models have: every mode trains them as torch does on one rank, or refuses by name."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from core.compose import parallelize
from core.config import UserError
from core.gemini.config import GeminiConfig
from core.layout import full_tensor
from core.mesh import MeshConfig, build_mesh, data_axis
from core.optim.build import OPTIMIZERS, OptimConfig, build_optimizer
from core.parallel.parallel_model import ParallelModel
from core.parallel.recompute import RecomputeConfig
from core.parallel.tensor1d import colwise
from core.placement.stages import PipelinePlan
from core.placement.table import ModelPlan
from core.train import TrainConfig

MODES: dict[str, dict[str, Any]] = {f"zero {zero}": {"zero": zero} for zero in (0, 1, 2, 3)} | {
    "copies of Gemini": {"gemini": GeminiConfig("1MB")},
    "Gemini": {"gemini": GeminiConfig("1MB"), "zero": 3},
    "pipeline": {"mesh": MeshConfig(pp=2)},
    "pipeline, Gemini": {"mesh": MeshConfig(pp=2), "gemini": GeminiConfig("1MB")},
    "recomputed": {"zero": 3, "recompute": RecomputeConfig("full")},
}


TOGETHER = ("zero 3", "recomputed", "copies of Gemini", "Gemini", "pipeline, Gemini")
"""What needs every rank to use the same parameters."""


class Block(nn.Module):
    def __init__(self, bias: nn.Parameter | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        if bias is not None:
            self.linear.bias = bias
        self.of_nothing = nn.Parameter(torch.empty(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh() + self.of_nothing.sum()


class Odd(nn.Module):
    """A block that is listed twice, blocks that share a bias, parameters without elements, frozen ones of no floats,
    one that nothing uses, and one that only the first row does."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.everywhere = everywhere
        self.embed = nn.Linear(3, 4)
        twice = Block()
        self.blocks = nn.ModuleList([twice, Block(self.embed.bias), twice, Block()])
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.order = nn.Parameter(torch.tensor([2, 0, 3, 1]), requires_grad=False)
        self.mask = nn.Parameter(torch.tensor([True, False, True, True]), requires_grad=False)
        self.phase = nn.Parameter(torch.tensor([1 + 1j, 2 - 1j]), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 2))
        self.first = nn.Parameter(torch.ones(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        is_first = bool(x[0, 0] == 0)
        y = self.embed(x)
        for block in self.blocks:
            y = block(y)
        y = y[:, self.order] * self.mask + self.phase.real.sum() + self.empty.sum()
        return y * self.first.sum(0) if is_first or self.everywhere else y


def rows(step: int) -> Tensor:
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    x[0, 0] = 0
    return x


def optimizer_config() -> OptimConfig:
    return OptimConfig(lr=0.1, weight_decay=0.3)


def trained(mode: str, everywhere: bool) -> dict[str, Tensor]:
    options = MODES[mode]
    config = TrainConfig(precision="fp64", optim=optimizer_config(), **options)
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    plan = PipelinePlan("blocks", before=("embed",))
    parallel = parallelize(Odd(everywhere), mesh, config, ModelPlan(pipeline=plan))
    optimizer = build_optimizer(config.optim, parallel.masters)
    parallel.prepare(optimizer, None)
    axis = data_axis(mesh)
    for step in range(3):
        run_step(parallel, [row[None] for row in rows(step).chunk(axis.size())[axis.get_local_rank()]])
        optimizer.step()
        parallel.release()
        parallel.publish()
    found = {name: full_tensor(master).clone() for name, master in parallel.masters.items()}
    parts: list[Any] = [None] * mesh["pp"].size()
    dist.all_gather_object(parts, found, group=mesh["pp"].get_group())
    return {name: value for part in parts for name, value in part.items()}


def run_step(parallel: ParallelModel, microbatches: list[Tensor]) -> None:
    parallel.run(microbatches, lambda x: parallel.model(x).square().sum())
    parallel.reduce()


def plainly(everywhere: bool) -> dict[str, Tensor]:
    """The same by torch alone."""
    model = Odd(everywhere).double()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in trained.values() if p.ndim > 1], "weight_decay": 0.3},
        {"params": [p for p in trained.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.1, betas=(0.9, 0.95), foreach=False)
    for step in range(3):
        for row in rows(step):
            model(row[None]).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.equal(model.unused, torch.ones_like(model.unused))
    return {name: parameter.detach() for name, parameter in trained.items()}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("mode", MODES)
def test_odd_parameters_train_as_in_torch(ranks, mode: str, num_ranks: int) -> None:
    if num_ranks == 1 and "pipeline" in mode:
        num_ranks = 4  # two stages of two replicas
    everywhere = num_ranks > 1 and mode in TOGETHER
    expected = plainly(everywhere)
    for found in ranks(num_ranks).run(trained, mode, everywhere):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-11, atol=1e-12, msg=f"{name}: {found[name]} {value}")


def apart(mode: str) -> str:
    try:
        trained(mode, everywhere=False)
    except UserError as error:
        return str(error)
    return "trained"


@pytest.mark.parametrize("mode", ["copies of Gemini", "Gemini"])
def test_what_some_ranks_use_and_others_do_not_is_named_where_all_must(ranks, mode: str) -> None:
    for said in ranks(2).run(apart, mode):
        assert said.startswith("parameter first took part in the loss of some ranks")


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.phase = nn.Parameter(torch.ones(4, dtype=torch.complex64))


def refusal(options: dict[str, Any], mode: str) -> str:
    plan = {"blocks.*": colwise} if mode == "tp" else None
    config = TrainConfig(**options)
    mesh = build_mesh(config.mesh.resolve(dist.get_world_size(), config.zero), "cpu")
    try:
        parallelize(Complex(), mesh, config, ModelPlan(tensor=plan, pipeline=PipelinePlan("blocks")))
    except UserError as error:
        return str(error)
    return "accepted"


@pytest.mark.parametrize("mode", [*MODES, "tp"])
def test_complex_parameters_are_refused_by_name(ranks, mode: str) -> None:
    tp: dict[str, Any] = {"mesh": MeshConfig(tp=2)}
    for said in ranks(2).run(refusal, MODES.get(mode, tp), mode):
        assert said.startswith("parameter phase is of complex64")


@pytest.mark.parametrize("name", [name for name, spec in OPTIMIZERS.items() if not spec.looks])
def test_no_optimizer_moves_what_has_no_gradient(name: str) -> None:
    masters = {f"blocks.{n}.weight": torch.ones(4, 6, requires_grad=True) for n in range(2)}
    optimizer = build_optimizer(OptimConfig(name=name, lr=0.1), masters)
    used, unused = masters.values()
    for _ in range(2):
        used.grad = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
        optimizer.step()
    assert not torch.equal(used, torch.ones(4, 6))
    assert torch.equal(unused, torch.ones(4, 6))
