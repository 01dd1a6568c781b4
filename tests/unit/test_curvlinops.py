"""K-FAC's factors, EKFAC and Hessian-free's products beside curvlinops 3.0.1, to 1e-10: its numbers, or itself."""

import json
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor, nn

from core.layout import layout_of
from core.optim import KFAC
from core.optim.hessian_free import _Held, _Problem
from core.optim.kfac import FACTORS
from core.optim.kfac_layers import unpacked_factor
from core.optim.kfac_solve import into_basis
from core.optim.prediction import Prediction, exact_fisher
from tests.support.curvlinops_numbers import NUMBERS, PACKAGE, PROBLEMS, VERSION, Operator, Problem, every_product

KEPT = json.loads(NUMBERS.read_text())


def gauss_newton(problem: Problem) -> list[list[Tensor]]:
    model = problem.model()

    def closure() -> tuple[Tensor, Tensor]:
        outputs = model(problem.inputs)
        return problem.loss(outputs), outputs

    held = _Problem([_Held(p, layout_of(p)) for p in model.parameters()], [closure], None)
    with torch.no_grad():
        held.begin({"probes": 0, "exponent": 0.0}, 1, 0)
        made = [held.product(torch.cat([v.flatten() for v in vector])) for vector in problem.vectors(model)]
    return [held.parted(product) for product in made]


def factored(problem: Problem, operator: Operator) -> list[list[Tensor]]:
    """R V C of each layer's part V of a vector; of EKFAC with the squares of a second look in the first one's basis."""
    model, rows = problem.model(), len(problem.inputs)
    sharing, is_ekfac = "reduce" if operator.endswith("reduce") else "expand", operator.startswith("ekfac")
    optimizer = KFAC(
        model, lr=0.0, fisher="empirical" if "empirical" in operator else "exact", sharing=sharing, damping=0.1,
        method="ekfac" if is_ekfac else "inverse", factor_decay=0.0, exclude=(),
    )  # fmt: skip
    items = float(problem.targets.numel() if problem.classes else rows)

    def shown() -> Tensor | list[Tensor]:
        outputs = model(problem.inputs)
        if "empirical" in operator:
            return problem.loss(outputs)
        kind = "categorical" if problem.classes else "normal"
        made = Prediction(outputs, "y", kind, outputs.shape[-1] / 2)
        return exact_fisher(made, problem.targets)

    for _ in range(2 if is_ekfac else 1):
        optimizer.observe(shown, items=items, rows=rows)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return [multiplied(optimizer, model, vector) for vector in problem.vectors(model)]


def multiplied(optimizer: KFAC, model: nn.Module, vector: list[Tensor]) -> list[Tensor]:
    of = dict(zip((name for name, _ in model.named_parameters()), vector, strict=True))
    for layer in optimizer._layers:
        weight = optimizer._named[layer.weight]
        v, state = layer.joined(of[layer.weight], of.get(layer.bias or "")), optimizer.state[weight]
        if "scales" in state:
            bases = state["row_basis"], state["column_basis"]
            made = into_basis(into_basis(v, *bases) * state["scales"], *bases, back=True)
        else:
            shapes = layer.factor_shapes()
            r, c = (unpacked_factor(state[key], shape) for key, shape in zip(FACTORS, shapes))
            made = (r.diag() if r.ndim == 1 else r) @ v @ (c.diag() if c.ndim == 1 else c)
        of[layer.weight], bias = layer.parted(made, tuple(weight.shape))
        if layer.bias is not None and bias is not None:
            of[layer.bias] = bias
    return list(of.values())


CASES = [(name, operator) for name, problem in PROBLEMS.items() for operator in problem.operators]


@pytest.mark.parametrize(("name", "operator"), CASES)
def test_products_are_those_of_curvlinops(name: str, operator: Operator) -> None:
    problem = PROBLEMS[name]
    made = gauss_newton(problem) if operator == "ggn" else factored(problem, operator)
    scale = problem.targets.shape[-1] if problem.averaged_once and "empirical" in operator else 1
    for ours, theirs in zip(made, KEPT["products"][name][operator], strict=True):
        for one, other in zip(ours, theirs, strict=True):
            expected = torch.tensor(other, dtype=torch.float64).view(one.shape)
            torch.testing.assert_close(one * scale, expected, rtol=1e-10, atol=1e-12)


def test_its_numbers_are_of_the_version_that_is_named() -> None:
    """And, where the package is installed, the same again."""
    assert KEPT["versions"][PACKAGE] == VERSION
    assert {name: list(made) for name, made in KEPT["products"].items()} == {
        name: list(problem.operators) for name, problem in PROBLEMS.items()
    }
    if find_spec("curvlinops") is None:
        return
    made = every_product()
    for name, operator in CASES:
        for one, other in zip(made[name][operator], KEPT["products"][name][operator], strict=True):
            for x, y in zip(one, other, strict=True):
                assert x == pytest.approx(y, rel=1e-10, abs=1e-13)
