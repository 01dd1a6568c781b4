"""Hessian-free optimization on one rank: products, conjugate gradients, a quadratic in one step, refusals."""

from collections.abc import Iterator
from itertools import pairwise
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.config import UserError
from core.layout import layout_of
from core.optim import HessianFree, OptimConfig, build_optimizer
from core.optim.conjugate import solve
from core.optim.hessian_free import _Held, _Problem


@pytest.fixture(autouse=True)
def in_fp64() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def test_conjugate_gradients_end_after_as_many_steps_as_there_are_dims() -> None:
    root, right = torch.randn(9, 9), torch.randn(9)
    matrix = root @ root.T + 0.1 * torch.eye(9)
    for diagonal in (torch.ones(9), matrix.diagonal()):
        found = solve(lambda v: matrix @ v, right, torch.zeros(9), diagonal, 9, 0.0)
        x, phi = found.iterates[-1]
        assert found.iterations == 9
        torch.testing.assert_close(x, torch.linalg.solve(matrix, right), rtol=1e-6, atol=1e-8)
        assert phi == pytest.approx(float(-0.5 * right @ torch.linalg.solve(matrix, right)), rel=1e-8)


def test_conjugate_gradients_stop_where_little_is_gained_and_keep_few_iterates() -> None:
    values = torch.logspace(0, 2, 400)
    right = torch.ones(400)
    found = solve(lambda v: values * v, right, torch.zeros(400), torch.ones(400), 1000, 5e-4)
    assert 10 < found.iterations < 400
    assert len(found.iterates) < 25
    phis = [phi for _, phi in found.iterates]
    assert phis == sorted(phis, reverse=True)
    for x, phi in found.iterates:
        assert phi == pytest.approx(float(0.5 * (values * x) @ x - right @ x), rel=1e-9)


def held(model: nn.Module) -> list[_Held]:
    return [_Held(p, layout_of(p)) for p in model.parameters()]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.up = nn.Embedding(6, 4), nn.Linear(4, 5)
        self.conv, self.down = nn.Conv1d(5, 3, 2), nn.Linear(3, 4)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.up(self.embedding(ids)).tanh()
        return self.down(self.conv(hidden.mT).mT.sigmoid())


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.flatten(0, -2), targets.flatten())


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - F.one_hot(targets, 4)).square().sum() / targets.numel()


@pytest.mark.parametrize("loss", [cross_entropy, squares])
@pytest.mark.parametrize("parts", [1, 2])
def test_products_are_those_of_the_gauss_newton_matrix(loss, parts: int) -> None:
    """Of an embedding, a convolution and linear layers, by the Jacobian and the Hessian written out."""
    net, ids, targets = Net(), torch.randint(0, 6, (6, 5)), torch.randint(0, 4, (6, 4))
    parameters = list(net.parameters())

    def outputs(flat: Tensor) -> Tensor:
        parts = zip(net.named_parameters(), flat.split([p.numel() for p in parameters]))
        values = {name: part.view(parameter.shape) for (name, parameter), part in parts}
        return torch.func.functional_call(net, values, (ids,)).flatten()

    point = torch.cat([p.detach().flatten() for p in parameters])
    jacobian = torch.autograd.functional.jacobian(outputs, point)
    hessian = torch.autograd.functional.hessian(lambda z: loss(z.view(6, 4, 4), targets), outputs(point))
    matrix = jacobian.T @ hessian @ jacobian  # pyright: ignore

    def part(x: Tensor, y: Tensor):
        def closure() -> tuple[Tensor, Tensor]:
            made = net(x)
            return loss(made, y) * len(x) / 6, made

        return closure

    closures = [part(x, y) for x, y in zip(ids.split(6 // parts), targets.split(6 // parts))]
    problem = _Problem(held(net), closures, None)
    with torch.no_grad():
        value, gradient, _ = problem.begin({"probes": 1, "exponent": 0.75, "seed": 0}, 1, 0)
        for _ in range(2):
            vector = torch.randn(len(point))
            found = problem.product(vector)
            torch.testing.assert_close(found, matrix @ vector, rtol=1e-10, atol=1e-12)
    assert value == pytest.approx(float(loss(net(ids), targets)), rel=1e-12)
    grads = torch.autograd.grad(loss(net(ids), targets), parameters)
    torch.testing.assert_close(gradient, torch.cat([g.flatten() for g in grads]), rtol=1e-10, atol=1e-12)


def test_the_preconditioner_is_the_mean_square_of_the_rows_gradients() -> None:
    layer, x, y = nn.Linear(3, 2), torch.randn(5, 3), torch.randn(5, 2)
    problem = _Problem(held(layer), [lambda: ((layer(x) - y).square().sum() / 10, layer(x))], None)

    def closure() -> tuple[Tensor, Tensor]:
        made = layer(x)
        return (made - y).square().sum() / 10, made

    problem.closures = [closure]
    with torch.no_grad():
        _, _, diagonal = problem.begin({"probes": 20000, "exponent": 0.75, "seed": 0}, 1, 0)
    errors = (layer(x) - y).detach()
    rows = torch.cat([torch.einsum("no,ni->noi", errors, x).flatten(1), errors], 1)
    torch.testing.assert_close(diagonal, rows.square().mean(0), rtol=0.05, atol=1e-3)


def quadratic(**options) -> tuple[float, float, HessianFree]:
    """The loss after one step, and the least."""
    layer, x, y = nn.Linear(6, 4), torch.randn(30, 6), torch.randn(30, 4)
    a = torch.cat([x, torch.ones(30, 1)], 1)
    least = float((a @ torch.linalg.lstsq(a, y).solution - y).square().sum() / 60)
    optimizer = HessianFree(layer, **options)

    def closure() -> tuple[Tensor, Tensor]:
        made = layer(x)
        return (made - y).square().sum() / 60, made

    optimizer.step(closure)
    return float(closure()[0].detach()), least, optimizer


def test_a_quadratic_is_over_after_one_step() -> None:
    """Undamped, with conjugate gradients to convergence."""
    loss, least, optimizer = quadratic(damping=0.0, cg_tolerance=0.0, cg_steps=200)
    assert abs(loss - least) <= 1e-12
    assert optimizer.found is not None
    assert optimizer.found.ratio == pytest.approx(1.0, abs=1e-9)
    assert optimizer.found.length == 1.0


def test_damping_follows_the_ratio() -> None:
    """The quadratic falls by more than its damped model says: damping goes down."""
    loss, least, optimizer = quadratic(damping=0.3)
    assert optimizer.found is not None
    assert loss > least + 1e-6
    assert optimizer.found.ratio > 0.75
    assert optimizer.found.damping == pytest.approx(0.2)


def test_a_deep_net_is_trained_and_a_step_never_makes_the_loss_worse() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))
    x = torch.randn(40, 4)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2].sin()], 1)
    optimizer = HessianFree(net)

    def closure() -> tuple[Tensor, Tensor]:
        made = net(x)
        return (made - y).square().sum() / 80, made

    losses = [float(optimizer.step(closure)) for _ in range(25)]
    assert all(b <= a for a, b in pairwise(losses))
    assert losses[-1] < 0.01 * losses[0]


def test_curvature_that_is_not_finite_moves_nothing_and_is_counted() -> None:
    layer, x = nn.Linear(3, 2), torch.randn(5, 3)
    optimizer = HessianFree(layer, damping=1.0)
    before = layer.weight.detach().clone()

    def closure() -> tuple[Tensor, Tensor]:
        made = layer(x)
        return made.square().sum() * float("nan"), made

    optimizer.step(closure)
    assert optimizer.fallbacks == 1
    assert torch.equal(before, layer.weight)
    assert float(optimizer.state[layer.weight]["damping"]) == 2.0
    with patch.object(_Problem, "product", lambda self, v: v * float("inf")):
        optimizer.step(lambda: (layer(x).square().sum(), layer(x)))
    assert optimizer.fallbacks == 2


def test_what_cannot_be_is_refused_in_a_line() -> None:
    layer = nn.Linear(2, 2)
    cases = [
        (lambda: HessianFree(layer).step(), "hessian_free: the closure is missing"),
        (lambda: OptimConfig("hessian_free", cg_steps=0), "hessian_free: cg_steps=0; give "),
        (lambda: OptimConfig("hessian_free", clip_norm=1.0), r"hessian_free: clip_norm=1\.0; give None"),
    ]
    unwatched = build_optimizer(OptimConfig("hessian_free"), dict(layer.named_parameters()))
    cases.append((lambda: unwatched.step(lambda: 0.0), "hessian_free: a step is of all parameters of a model"))
    for call, text in cases:
        with pytest.raises(UserError, match=text) as refusal:
            call()
        assert "\n" not in str(refusal.value)
