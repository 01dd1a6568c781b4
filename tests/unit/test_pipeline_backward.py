"""The backward in two parts gives what one backward gives, and runs the hooks of parameters."""

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from core.kernels import matmul
from core.parallel.pipeline.backward import SplitBackward
from core.parallel.recompute import RecomputeConfig, RecomputeMode, apply_recompute
from core.trace.account import MemoryAccount


class _Once(torch.autograd.Function):
    """x w, whose backward spoils what it has saved."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(w.expand_as(x).clone(), x.clone())
        return x * w

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        dx, dw = ctx.saved_tensors
        return dx.mul_(grads[0]), dw.mul_(grads[0]).sum(0)


class Twice(nn.Module):
    """One weight used twice on the way, one beside it, one in a function that runs once, and one that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.own = nn.Linear(5, 5), nn.Linear(5, 5)
        self.norm, self.scale = nn.LayerNorm(5), nn.Parameter(torch.ones(5))
        self.once, self.unused = nn.Parameter(torch.randn(5)), nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.shared(self.norm(x)).tanh()
        x = x * self.scale.exp() + self.own(x).sin()
        return _once(x, self.once) + self.shared(x).tanh()


def _once(x: Tensor, w: Tensor) -> Tensor:
    return _Once.apply(x, w)  # pyright: ignore[reportReturnType]


class Rows(nn.Module):
    """An embedding in front, whose rows no input has a gradient for."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.body = nn.Embedding(7, 5), Twice()
        self.entrance: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        self.entrance = self.rows(ids)
        return self.body(self.entrance)


def whole(model: nn.Module, x: Tensor, gradient: Tensor | None) -> dict[str, Tensor | None]:
    out = model(x)
    (out.sum() if gradient is None else out).backward(gradient)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    return found | {"input": x.grad}


@pytest.mark.parametrize("of_loss", [False, True])
def test_two_parts_are_the_whole(of_loss: bool) -> None:
    torch.manual_seed(0)
    model = Twice().double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    gradient = None if of_loss else torch.randn(3, 5, dtype=torch.float64)
    expected = whole(model, x, gradient)
    assert expected["shared.weight"] is not None

    again = x.detach().requires_grad_()
    hooked: list[str] = []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: hooked.append(name))
    out = model(again).sum() if of_loss else model(again)
    split = SplitBackward(out, gradient, again)
    assert expected["input"] is not None
    torch.testing.assert_close(split.input(), expected["input"], rtol=1e-12, atol=1e-14)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert again.grad is None
    assert split.computed
    split.accumulate_computed()
    assert hooked == ["once"]
    assert not split.computed
    split.weights()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-14, msg=name)
    assert sorted(hooked) == sorted({name for name, value in expected.items() if value is not None} - {"input"})


def test_what_lies_before_the_entrance_is_of_the_second_part() -> None:
    torch.manual_seed(0)
    model, ids = Rows().double(), torch.tensor([1, 4, 4])
    model(ids).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    out = model(ids).sum()
    assert model.entrance is not None
    split = SplitBackward(out, None, model.entrance)
    split.input()
    assert all(parameter.grad is None for parameter in model.parameters())
    split.accumulate_computed()
    split.weights()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-12, atol=1e-14, msg=name)


def test_the_second_part_lets_go_of_the_activations() -> None:
    model = nn.Linear(4, 4)
    x = torch.randn(2, 4, requires_grad=True)
    hidden = x * 2.0
    kept = weakref.ref(hidden)
    split = SplitBackward(model(hidden).sum(), None, x)
    del hidden
    split.input()
    assert kept() is not None
    split.weights()
    assert kept() is None


class Deep(nn.Module):
    """Blocks of all that `Twice` has, a dropout, and what is large and only on the way."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Twice() for _ in range(3))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def deep(mode: RecomputeMode, x: Tensor) -> Deep:
    torch.manual_seed(0)
    model = Deep().double()
    for block in model.blocks:
        inner = block.forward

        def forward(x: Tensor, inner: Any = inner) -> Tensor:
            model.calls += 1
            large = x.repeat(40, 1).sin().exp().mean(0)
            return nn.functional.dropout(inner(x) + large, 0.3)

        block.forward = forward
    apply_recompute(model, RecomputeConfig(mode), in_parts=True)
    return model


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_blocks_are_computed_again_once(mode: RecomputeMode) -> None:
    """With the same draws; what is left between the parts is what weights need, the least where it is not kept."""
    x = torch.randn(30, 5, dtype=torch.float64)
    gradient = torch.randn(30, 5, dtype=torch.float64)
    found, held = {}, {}
    for name in ("none", mode):
        model, entrance = deep(name, x), x.clone().requires_grad_()
        with MemoryAccount() as account:
            account.add(model.parameters())
            begin = account.current_bytes
            out = model(entrance)
            forward = account.current_bytes - begin
            split = SplitBackward(out, gradient, entrance)
            input_gradient = split.input()
            split.accumulate_computed()
            between = account.current_bytes - begin
            split.weights()
        found[name] = [input_gradient, *(p.grad for p in model.parameters() if p.grad is not None)]
        held[name] = forward, between
        assert model.calls == (3 if name == "none" else 6)
    for ours, expected in zip(found[mode], found["none"], strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)
    assert held[mode][0] < held["none"][0] / 10
    assert held[mode][1] < held["none"][1] / 3


class Products(nn.Module):
    """Products by oneDNN, one weight in two of them; of others between them."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.shared, self.norm = nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        x = self.by(self.own, x).tanh()
        x = self.norm(x + self.by(self.shared, x))
        return x + self.by(self.shared, x).tanh()

    @staticmethod
    def by(layer: nn.Linear, x: Tensor) -> Tensor:
        return matmul.linear(x, layer.weight, layer.bias)


def test_products_of_our_own_are_in_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, ...]] = []
    product = matmul.product
    monkeypatch.setattr(matmul, "uses_onednn", lambda *_: True)
    monkeypatch.setattr(matmul, "_onednn", lambda x, weight, bias=None: torch.nn.functional.linear(x, weight, bias))
    monkeypatch.setattr(matmul, "product", lambda a, b: made.append((*a.shape, b.shape[1])) or product(a, b))
    torch.manual_seed(0)
    model, x = Products(), torch.randn(8, 64, requires_grad=True)
    expected = whole(model, x, None)

    made.clear()
    entrance = x.detach().requires_grad_()
    split = SplitBackward(model(entrance).sum(), None, entrance)
    torch.testing.assert_close(split.input(), expected["input"])
    assert made == [(8, 64, 64)] * 3, "of the first part are the inputs' gradients alone"
    assert not split.computed
    made.clear()
    split.weights()
    assert made.count((64, 8, 64)) == 3
    # Between the two uses of a weight what flows down is computed once more, for the one that is not needed.
    assert made.count((8, 64, 64)) <= 2
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])
