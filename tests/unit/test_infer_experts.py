"""Expert parallelism that is inferred: which modules are found, what is refused and why, and that the trial sees."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import UserError
from core.mesh import MeshConfig
from core.parallel.infer import infer_experts, sample_of
from core.parallel.infer.experts import Stacks
from core.placement.table import ModelPlan, placement
from tests.support.foreign import EXPERTS, llama

DIM, HIDDEN, NUM_EXPERTS = 8, 12, 6


class Experts(nn.Module):
    """With what a test changes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = NUM_EXPERTS
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, HIDDEN, DIM))
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, DIM, HIDDEN))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for expert in range(self.num_experts):
            token, choice = (chosen == expert).nonzero(as_tuple=True)
            y = y.index_add(0, token, self.one(x, token, expert) * self.gate(weights)[token, choice, None])
        return y

    def one(self, x: Tensor, token: Tensor, expert: int) -> Tensor:
        return F.relu(x[token] @ self.up[expert].T) @ self.down[expert].T

    def gate(self, weights: Tensor) -> Tensor:
        return weights


class Model(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.embed, self.router, self.experts = nn.Embedding(3, DIM), nn.Linear(DIM, NUM_EXPERTS), experts

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed(input_ids).flatten(0, 1)
        weights, chosen = self.router(x).softmax(-1).topk(2)
        return self.experts(x, chosen, weights)


class Squares(Experts):
    def gate(self, weights: Tensor) -> Tensor:
        return weights.square()


class OverTokens(Experts):
    def one(self, x: Tensor, token: Tensor, expert: int) -> Tensor:
        return super().one(x - x.mean(0), token, expert)


class Draws(Experts):
    def one(self, x: Tensor, token: Tensor, expert: int) -> Tensor:
        return F.dropout(super().one(x, token, expert), 0.5, self.training)


class LearnsNoWeights(Experts):
    def gate(self, weights: Tensor) -> Tensor:
        return weights.detach()


class Neighbours(Experts):
    def one(self, x: Tensor, token: Tensor, expert: int) -> Tensor:
        return super().one(x, token, expert) + super().one(x, token, (expert + 1) % self.num_experts)


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.each = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(NUM_EXPERTS))

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        every = torch.stack([expert(x) for expert in self.each], 1)
        return (every.gather(1, chosen[..., None].expand(-1, -1, DIM)) * weights[..., None]).sum(1)


class Loops(nn.Module):
    """A block that routes and calls the experts that somebody chose, as Switch's does."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, NUM_EXPERTS)
        self.each = nn.ModuleDict({f"expert_{n}": nn.Linear(DIM, DIM) for n in range(NUM_EXPERTS)})

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        y = torch.zeros_like(x)
        for number in chosen.unique():
            token = (chosen == number).nonzero()[:, 0]
            y = y.index_add(0, token, self.each[f"expert_{number}"](x[token]) * weights[token, None])
        return y


class OfBlocks(Model):
    def forward(self, input_ids: Tensor) -> Tensor:
        return self.experts(self.embed(input_ids).flatten(0, 1))


class Shared(Experts):
    """A parameter that no expert has for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM))


def test_experts_are_dealt_out_by_their_stacks() -> None:
    model = Model(Experts())
    plan = infer_experts(model, 4, sample_of_ids(model))
    assert list(plan) == ["experts"]
    table = placement(model, ModelPlan(experts=plan), MeshConfig(ep=4).resolve(4, 0))
    assert {name: row.layout.local_shape()[0] for name, row in table.items()} == {
        "embed.weight": 3, "router.weight": NUM_EXPERTS, "router.bias": NUM_EXPERTS, "experts.up": 2, "experts.down": 2
    }  # fmt: skip


def sample_of_ids(model: nn.Module) -> dict[str, Tensor]:
    return {"input_ids": torch.zeros(2, 7, dtype=torch.int64)}


@pytest.mark.parametrize("make", [Squares, OverTokens, Draws, LearnsNoWeights, Neighbours])
def test_what_is_no_weighted_sum_over_choices_is_refused(make: Callable[[], nn.Module]) -> None:
    model = Model(make())
    with pytest.raises(UserError, match=rf"the experts of experts \({make.__name__}\) are not sure .* use mesh.ep=1"):
        infer_experts(model, 2, sample_of_ids(model))


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Lists, "experts with parameters of their own each are not dealt out"),
        (Shared, "its parameters are no stacks .* differ in their dim 0"),
        (lambda: nn.Identity(), "no module of this model is called with tokens"),
    ],
)
def test_a_model_without_stacks_is_refused(make: Callable[[], nn.Module], why: str) -> None:
    model = Model(make())
    if isinstance(model.experts, nn.Identity):
        model.forward = lambda input_ids: model.router(model.embed(input_ids))
    with pytest.raises(UserError, match=why):
        infer_experts(model, 2, sample_of_ids(model))


def test_a_block_that_calls_the_experts_that_somebody_chose_is_refused_by_their_name() -> None:
    model = OfBlocks(Loops())
    with pytest.raises(
        UserError, match=r"the 6 modules of experts\.each look like experts, and experts with parameters"
    ):
        infer_experts(model, 2, sample_of_ids(model))


def test_more_ranks_than_experts_are_refused() -> None:
    model = Model(Experts())
    with pytest.raises(UserError, match=r"6 experts leave a rank of mesh.ep=8 without any; use a mesh.ep of at most 6"):
        infer_experts(model, 8, sample_of_ids(model))


def test_a_dense_model_and_experts_that_are_called_in_another_way_are_refused() -> None:
    with pytest.raises(UserError, match="no module of this model is called with tokens"):
        infer_experts(llama(), 2, sample_of(llama()))


def test_the_trial_sees_a_share_that_is_shifted_by_one() -> None:
    model, rows = Model(Experts()), Stacks.rows
    shifted = patch.object(Stacks, "rows", lambda self, inner, x, rows_E: rows(self, inner, x, rows_E.roll(1)))
    with shifted, pytest.raises(UserError, match="the weighted sum of each choice by itself is not what it returns"):
        infer_experts(model, 2, sample_of_ids(model))


@pytest.mark.soak
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize("ranks", [2, 4])
def test_models_of_transformers(name: str, ranks: int) -> None:
    model = EXPERTS[name].make()
    before = {key: dict(vars(module)) for key, module in model.named_modules()}
    assert infer_experts(model, ranks, sample_of(model))
    assert {key: dict(vars(module)) for key, module in model.named_modules()} == before


@pytest.mark.soak
def test_large_experts_without_values_are_tried_small() -> None:
    from transformers import AutoModelForCausalLM, MixtralConfig

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(MixtralConfig(num_hidden_layers=2))
    assert list(infer_experts(model, 8, sample_of(model))) == [f"model.layers.{n}.mlp.experts" for n in range(2)]
