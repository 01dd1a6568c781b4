"""Adafactor on one rank: torch.optim's and transformers' are the independent truths."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from core.config import UserError
from core.optim import Adafactor, adafactor_cpu
from core.optim.factored import factored_dims

SHAPES = [(5, 7), (3,), (2, 3, 4), (), (8, 4, 3, 3), (1, 6), (6, 1)]
STEPS = 6


def draw(seed: int, dtype: torch.dtype, shapes: list[tuple[int, ...]] = SHAPES) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype) for shape in shapes]


def moved(optimizer: Any, dtype=torch.float64, shapes=SHAPES, small: float = 1.0, **options: Any) -> list[Tensor]:
    """How far the parameters have come after some steps.  small: factor of the gradients of the first two rows."""
    params = [p.requires_grad_() for p in draw(0, dtype, shapes)]
    made = optimizer(params, **options)
    for step in range(1, STEPS + 1):
        for p, g in zip(params, draw(step, dtype, shapes)):
            p.grad = g
            if small != 1.0:
                g[..., :2, :] *= small
        made.step()
    return [p.detach() - start for p, start in zip(params, draw(0, dtype, shapes))]


def agree(found: list[Tensor], expected: list[Tensor], limit: float) -> None:
    for got, want in zip(found, expected, strict=True):
        assert float(want.norm()) > 0
        assert float((got - want).norm()) <= limit * float(want.norm()), (got, want)


OPTIONS = [
    {},
    {"lr": 0.3, "weight_decay": 0.1, "d": 2.0, "eps": (1e-4, 0.5)},
    {"lr": 0.3, "beta2_decay": -0.5, "maximize": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_is_that_of_torch(options: dict[str, Any], dtype: torch.dtype, limit: float) -> None:
    agree(moved(Adafactor, dtype, **options), moved(torch.optim.Adafactor, dtype, **options), limit)


@pytest.mark.parametrize("small", [1.0, 1e-9, 0.0])
def test_cache_blocks_are_that_of_torch(monkeypatch: pytest.MonkeyPatch, small: float) -> None:
    """Several blocks a matrix; gradients so small that V is clamped, in all of a matrix or in some of it."""
    monkeypatch.setattr(adafactor_cpu, "BLOCK_ELEMENTS", 64)
    shapes, eps = [(37, 20), (3, 40), (2, 17, 9)], (1e-8, 1e-3)
    assert all(adafactor_cpu._blocks_well(torch.zeros(shape)) for shape in shapes)

    options: dict[str, Any] = {"shapes": shapes, "eps": eps, "weight_decay": 0.1, "small": small}
    agree(moved(Adafactor, **options), moved(torch.optim.Adafactor, **options), 1e-11)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("small", [1.0, 0.0])
def test_cache_blocks_of_16_bits_are_rounded_once(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, small: float):
    """A step from values of 16 bits is the step in fp64, rounded to 16 bits: but for ties of the fp32 in between."""
    monkeypatch.setattr(adafactor_cpu, "BLOCK_ELEMENTS", 64)
    shapes = [(37, 20), (2, 17, 40)]
    assert all(adafactor_cpu._blocks_well(torch.zeros(shape, dtype=dtype)) for shape in shapes)
    after = []
    for wide in (dtype, torch.float64):
        params = [p.to(dtype).to(wide).requires_grad_() for p in draw(0, torch.float64, shapes)]
        for p, g in zip(params, draw(1, torch.float64, shapes)):
            g[..., :2, :] *= small
            p.grad = g.to(dtype).to(wide)
        Adafactor(params, lr=0.3, weight_decay=0.1, eps=(1e-8, 1e-3)).step()
        after.append([p.detach().to(dtype).double() for p in params])
    for got, want in zip(*after, strict=True):
        assert int((got != want).sum()) <= got.numel() // 100
        torch.testing.assert_close(got, want, rtol=torch.finfo(dtype).eps, atol=1e-6)


PAPER: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"lr": None}),
    ({"warmup_init": True, "weight_decay": 0.1}, {"lr": None, "warmup_init": True, "weight_decay": 0.1}),
    (
        {"lr": 0.03, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1},
        {"lr": 0.03, "relative_step": False, "scale_parameter": False, "beta1": 0.9, "weight_decay": 0.1},
    ),
    (
        {"lr": 0.3, "relative_step": False, "eps": (1e-3, 0.7), "d": 2.0, "beta2_decay": -0.5},
        {"lr": 0.3, "relative_step": False, "eps": (1e-3, 0.7), "clip_threshold": 2.0, "decay_rate": -0.5},
    ),
]


def test_norms_of_a_large_matrix_are_summed_in_wide() -> None:
    """One fp32 sum over its elements is 6e-5 off, and the step with it by half of that."""
    value, grad = draw(0, torch.float32, [(8192, 2048)] * 2)
    moves = []
    for dtype in (torch.float32, torch.float64):
        p = value.to(dtype, copy=True).requires_grad_()
        p.grad = grad.to(dtype)
        Adafactor([p]).step()
        moves.append(p.detach().double() - value)
    narrow, wide = (x.flatten() for x in moves)
    assert abs(float(torch.dot(narrow, wide) / torch.dot(wide, wide)) - 1) < 2e-6


@pytest.mark.parametrize(("ours", "theirs"), PAPER)
def test_the_papers_convention_is_that_of_transformers(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    from transformers.optimization import Adafactor as Theirs

    agree(moved(Adafactor, convention="paper", **ours), moved(Theirs, **theirs), 1e-10)


@pytest.mark.parametrize("ours_first", [True, False])
def test_state_dicts_load_both_ways(ours_first: bool) -> None:
    """Three steps by one, three by the other, are six by torch's."""
    options: dict[str, Any] = {"lr": 0.3, "weight_decay": 0.1}
    params = [p.requires_grad_() for p in draw(0, torch.float64)]
    kinds = [Adafactor, torch.optim.Adafactor] if ours_first else [torch.optim.Adafactor, Adafactor]
    first = kinds[0](params, **options)
    second = kinds[1](params, lr=9.0)
    for step in range(1, STEPS + 1):
        if step == 4:
            second.load_state_dict(copy.deepcopy(first.state_dict()))
        for p, g in zip(params, draw(step, torch.float64)):
            p.grad = g
        (first if step < 4 else second).step()
    found = [p.detach() - start for p, start in zip(params, draw(0, torch.float64))]
    agree(found, moved(torch.optim.Adafactor, **options), 1e-12)


def test_its_own_state_dict_keeps_formats() -> None:
    params = [torch.randn(64, 256).bfloat16().requires_grad_()]
    optimizer = Adafactor(params, beta1=0.9, momentum_format="8bit")
    params[0].grad = torch.randn(64, 256).bfloat16()
    optimizer.step()
    other = Adafactor(params)
    other.load_state_dict(optimizer.state_dict())
    for key, value in optimizer.state[params[0]].items():
        loaded = other.state[params[0]][key]
        assert loaded.dtype == value.dtype, key
        assert torch.equal(loaded, value), key
    assert optimizer.state[params[0]]["row_var"].dtype == torch.float32
    optimizer.step()
    before = params[0].detach().clone()
    other.step()
    assert not torch.equal(before, params[0])


def test_the_largest_dims() -> None:
    assert factored_dims((8, 4, 3, 3), "last") == (2, 3)
    assert factored_dims((8, 4, 3, 3), "largest") == (0, 1)
    assert factored_dims((3, 8, 3, 9), "largest") == (1, 3)
    assert factored_dims((5, 5, 5), "largest") == (1, 2)
    assert factored_dims((5,), "largest") is None
    weight = torch.randn(8, 3, 9, dtype=torch.float64)
    swapped, plain = (w.clone().requires_grad_() for w in (weight, weight.movedim(1, 0)))
    by_largest, by_last = Adafactor([swapped], factored="largest"), Adafactor([plain])
    for step in range(3):
        grad = draw(step, torch.float64, [(8, 3, 9)])[0]
        swapped.grad, plain.grad = grad, grad.movedim(1, 0).contiguous()
        by_largest.step()
        by_last.step()
    assert by_largest.state[swapped]["row_var"].shape == (8, 3, 1)
    torch.testing.assert_close(swapped.detach(), plain.detach().movedim(0, 1), rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("form", "limit"), [("bf16", 0.02), ("8bit", 0.05)])
def test_a_narrow_first_moment_is_near_the_wide_one(form: str, limit: float) -> None:
    shapes, options = [(64, 300)], {"beta1": 0.9, "lr": 0.1, "relative_step": False}
    wide = moved(Adafactor, torch.float32, shapes, **options)
    narrow = moved(Adafactor, torch.float32, shapes, momentum_format=form, **options)
    assert not torch.equal(wide[0], narrow[0])
    agree(narrow, wide, limit)


def test_transposed_parameters_and_frozen_ones() -> None:
    weight = torch.randn(12, 30, dtype=torch.float64)
    turned, plain = weight.clone().mT.requires_grad_(), weight.mT.contiguous().requires_grad_()
    frozen = torch.ones(3, 3, requires_grad=True)
    turned.grad = torch.randn(30, 12, dtype=torch.float64)
    plain.grad = turned.grad.clone()
    Adafactor([turned, frozen]).step()
    Adafactor([plain]).step()
    torch.testing.assert_close(turned, plain, rtol=1e-12, atol=1e-14)
    assert torch.equal(frozen, torch.ones(3, 3))


def test_under_compile() -> None:
    """A compiled training step takes the same steps, and is compiled once."""
    shapes = [(5, 7), (3,)]
    compiled = []

    def backend(module: torch.fx.GraphModule, example: Any) -> Any:
        compiled.append(module)
        return module.forward

    class Compiled(Adafactor):
        def step(self, closure: Any = None) -> Any:
            torch.compile(self.square_first, backend=backend)()

        def square_first(self) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.square_()
            super().step()

    class Squared(torch.optim.Adafactor):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for p in group["params"]:
                    p.grad.square_()
            super().step()

    torch._dynamo.reset()
    agree(moved(Compiled, shapes=shapes), moved(Squared, shapes=shapes), 1e-12)
    assert 1 <= len(compiled) <= 2


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"beta2_decay": 0.5},
        {"eps": (-1.0, 1.0)},
        {"d": 0.5},
        {"weight_decay": -0.5},
        {"beta1": 1.0},
        {"momentum_format": "fp8"},
        {"factored": "first"},
        {"convention": "theirs"},
    ],
)
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(UserError, match=f"adafactor: {name}=") as refusal:
        Adafactor([torch.zeros(1)], **options)
    assert str(value) in str(refusal.value)


def test_sparse_and_complex_are_refused() -> None:
    embedding = torch.nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UserError, match="sparse"):
        Adafactor(embedding.parameters()).step()
    parameter = torch.zeros(2, dtype=torch.complex64, requires_grad=True)
    parameter.grad = torch.zeros_like(parameter)
    with pytest.raises(UserError, match="complex"):
        Adafactor([parameter]).step()
