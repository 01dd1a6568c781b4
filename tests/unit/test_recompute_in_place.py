"""Operators that write in place, inside blocks and between them: gradients to the bit in every mode, or an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from apps.fold.model.layers import Transition
from core.parallel.pipeline.recompute import checkpoint_once
from core.parallel.recompute import RecomputeConfig, apply_recompute
from core.parallel.results import KeptResults
from core.trace.segments import Lean, Segments

WIDTH, ROWS = 32, 48
BUDGET = RecomputeConfig("budget", budget="1GiB")
MODES: dict[str, tuple[RecomputeConfig, Segments | None]] = {
    **{mode: (RecomputeConfig(mode), None) for mode in ("full", "selective", "sqrt", "recursive")},  # pyright: ignore
    **{mode: (RecomputeConfig(mode), None) for mode in ("offload", "compressed")},  # pyright: ignore
    "products": (BUDGET, (Lean(2, "products"), (Lean(1, "linear"),), (1,))),
    "one segment": (BUDGET, ((4,),)),
}


def _sum_of_views(x: Tensor) -> Tensor:
    x[:, ::2].mul_(0.5)
    return x.view(-1).add_(1.0).view_as(x)


IN_PLACE: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": torch.relu_,
    "sigmoid": torch.sigmoid_,
    "tanh": torch.tanh_,
    "silu": lambda x: F.silu(x, inplace=True),
    "leaky": lambda x: F.leaky_relu_(x, 0.1),
    "dropout": lambda x: F.dropout(x, 0.3, inplace=True),
    "fill": lambda x: x.masked_fill_(x < 0, 0.1),
    "views": _sum_of_views,
    "product and sum": lambda x: x.clone().mul_(0.5).add_(x),
}


class Block(nn.Module):
    """A product that is written into, a dropout, and the sum that is written into the second product."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.change = change

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(self.change(self.up(self.norm(x))), 0.2)).add_(x)


class Net(nn.Module):
    """between: what happens in place to what a block hands on"""

    def __init__(
        self, make: Callable[[], nn.Module], between: Callable[[Tensor], Any] = lambda x: x, num_blocks: int = 4
    ) -> None:
        super().__init__()
        self.blocks, self.between = nn.ModuleList(make() for _ in range(num_blocks)), between

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
            self.between(x)
        return x


def gradients(net: Callable[[], nn.Module], mode: str | None) -> list[Tensor]:
    torch.manual_seed(0)
    model = net().double()
    if mode is not None:
        config, segments = MODES[mode]
        apply_recompute(model, config, segments=segments)
    x = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    loss = model(x).square().mean()
    loss.backward()
    assert x.grad is not None
    return [loss.detach(), x.grad, *(p.grad for p in model.parameters() if p.grad is not None)]


def is_exact(net: Callable[[], nn.Module], mode: str) -> bool:
    return all(torch.equal(a, b) for a, b in zip(gradients(net, mode), gradients(net, None), strict=True))


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("mode", MODES)
def test_a_block_may_write_in_place(mode: str, name: str) -> None:
    assert is_exact(lambda: Net(lambda: Block(IN_PLACE[name])), mode)


@pytest.mark.parametrize("mode", MODES)
def test_fold_s_transition(mode: str) -> None:
    """Whose ReLU and sum are in place; `fold train --recompute.mode selective` failed on it."""
    assert is_exact(lambda: Net(lambda: nn.Sequential(Transition(WIDTH, 4), nn.Dropout(0.2))), mode)


@pytest.mark.parametrize("mode", MODES)
def test_what_is_handed_on_may_be_written_into(mode: str) -> None:
    assert is_exact(lambda: Net(lambda: Block(torch.relu_), between=lambda x: x.mul_(0.5)), mode)


@pytest.mark.parametrize("mode", ["full", "selective", "sqrt", "recursive", "products", "one segment"])
def test_what_a_block_was_given_may_not(mode: str) -> None:
    """It would run again on something else: the error says so, and what does not run again is exact."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x + 1.0)
            x.detach().mul_(0.5)
            return y

    def net() -> nn.Module:
        return Net(Writes)

    with pytest.raises(RuntimeError, match=r"input has been written into since|modified by an inplace operation"):
        gradients(net, mode)
    assert gradients(net, None)
    assert is_exact(net, "offload")


def test_nor_in_a_backward_of_two_parts() -> None:
    linear, x = nn.Linear(WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    y = checkpoint_once(lambda x: linear(x + 1.0).sin(), x)
    x.mul_(0.5)
    with pytest.raises(RuntimeError, match="input has been written into since"):
        y.sum().backward()


def test_a_product_that_was_written_into_is_let_go() -> None:
    up = nn.Linear(WIDTH, WIDTH)
    results = KeptResults(frozenset({"aten::addmm"}))
    x = torch.randn(ROWS, WIDTH)
    with results.keep_all():
        torch.relu_(up(x))
        up(x)
    assert [result.value is None for result in results._kept] == [True, False]
