"""What curvlinops 3.0.1 makes of small problems, beside which K-FAC's factors and Hessian-free's products are held.

    python -m tests.support.curvlinops_numbers     # where curvlinops-for-pytorch is installed: writes NUMBERS

The package is no dependency: its numbers are in tests/unit/curvlinops.json, products of its operators with fixed
vectors, in fp64. It knows linear layers and Conv2d; an embedding is a linear layer of ones, and transformers' Conv1D is
one of the transposed weight, so of these a `twin` of such layers goes to it. Of a weight that a Linear and an embedding
share it has no factors, but products.
"""

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

NUMBERS = Path(__file__).parents[1] / "unit" / "curvlinops.json"
PACKAGE, VERSION = "curvlinops-for-pytorch", "3.0.1"
Operator = Literal["ggn", "exact", "empirical", "exact reduce", "ekfac exact", "ekfac empirical"]


def numbers(*shape: int, phase: float = 0.0) -> Tensor:
    """The same everywhere, without a generator: they must not depend on a version."""
    index = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.sin(1.7 * index + 0.3 * index.square() + phase).view(shape)


@dataclass(frozen=True)
class Problem:
    """model      that is given `inputs`, and whose outputs [rows, .., C] predict `targets`, of C classes or C numbers
    twin       the same function of layers that curvlinops knows, `twin_inputs` its inputs
    transposed parameters, by name, that the twin has transposed
    averaged_once  its empirical Fisher information is of a loss that is summed over the outputs of an item, and their
               number divides it once: that many times ours, which is of the mean
    """

    make: Callable[[], nn.Module]
    inputs: Tensor
    targets: Tensor
    operators: tuple[Operator, ...]
    make_twin: Callable[[], nn.Module] | None = None
    twin_inputs: Tensor | None = None
    transposed: tuple[str, ...] = ()
    averaged_once: bool = False

    def model(self) -> nn.Module:
        return filled(self.make())

    def twin(self) -> nn.Module:
        """With the values of the model."""
        if self.make_twin is None:
            return self.model()
        made, values = self.make_twin().double(), self.model().state_dict()
        made.load_state_dict({n: v.T if n in self.transposed else v for n, v in values.items()})
        return made

    @property
    def classes(self) -> bool:
        return not self.targets.is_floating_point()

    def loss(self, outputs: Tensor) -> Tensor:
        """The mean over items."""
        if self.classes:
            return F.cross_entropy(outputs.flatten(0, -2), self.targets.flatten())
        return F.mse_loss(outputs, self.targets)

    def vectors(self, model: nn.Module) -> list[list[Tensor]]:
        """Each like the parameters."""
        return [[numbers(*p.shape, phase=7.1 * k + i) for i, p in enumerate(model.parameters())] for k in range(2)]


def filled(model: nn.Module) -> nn.Module:
    model = model.double()
    with torch.no_grad():
        for index, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, phase=float(index)))
    return model


class OneHot(nn.Module):
    """A Linear in the place of an embedding: its weight is the table, transposed."""

    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.table = nn.Linear(rows, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.table(x)


class Table(nn.Module):
    def __init__(self, rows: int, dim: int):
        super().__init__()
        self.table = nn.Embedding(rows, dim)

    def forward(self, ids: Tensor) -> Tensor:
        return self.table(ids)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.hidden, self.head = nn.Embedding(5, 3), nn.Linear(3, 3), nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.hidden(self.embedding(ids)).tanh())


def perceptron(first: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(first(), nn.Tanh(), nn.Linear(4, 3))


def convolution() -> nn.Module:
    kernel = nn.Conv2d(2, 3, (2, 3), stride=(2, 1), padding=(1, 0), dilation=(1, 1))
    return nn.Sequential(kernel, nn.Tanh(), nn.Flatten(), nn.Linear(3 * 3 * 2, 3))


IDS = torch.tensor([0, 3, 3, 4, 1, 0])
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2])
EVERY: tuple[Operator, ...] = ("ggn", "exact", "empirical", "ekfac exact", "ekfac empirical")
PROBLEMS = {
    "linear": Problem(perceptron(lambda: nn.Linear(3, 4)), numbers(6, 3), CLASSES, EVERY),
    "squares": Problem(
        perceptron(lambda: nn.Linear(3, 4)), numbers(6, 3), numbers(6, 3, phase=2.0), EVERY, averaged_once=True
    ),
    "tokens": Problem(
        perceptron(lambda: nn.Linear(3, 4)),
        numbers(6, 2, 3),
        torch.stack([CLASSES, CLASSES.flip(0)], 1),
        ("ggn", "exact", "empirical", "exact reduce"),
    ),
    "convolution": Problem(convolution, numbers(6, 2, 5, 4), CLASSES, (*EVERY, "exact reduce")),
    "embedding": Problem(
        perceptron(lambda: Table(5, 4)), IDS, CLASSES, ("ggn", "exact", "empirical"),
        perceptron(lambda: OneHot(5, 4)), F.one_hot(IDS, 5).double(), ("0.table.weight",),
    ),
    "transformers' Conv1D": Problem(
        perceptron(lambda: Conv1D(4, 3)), numbers(6, 3), CLASSES, EVERY,
        perceptron(lambda: nn.Linear(3, 4)), numbers(6, 3), ("0.weight",),
    ),
    "tied": Problem(Tied, IDS.view(3, 2), CLASSES.view(3, 2) + 1, ("ggn",)),
}  # fmt: skip


def products(problem: Problem, operator: Operator) -> list[list[Tensor]]:
    """curvlinops' operator times the vectors, in the shapes of the model's parameters."""
    import curvlinops  # pyright: ignore[reportMissingImports]

    model = problem.twin()
    inputs = problem.inputs if problem.twin_inputs is None else problem.twin_inputs
    shown, targets = _with_classes_second(model, problem), problem.targets
    loss = nn.CrossEntropyLoss() if problem.classes else nn.MSELoss()
    arguments: list[Any] = [shown, loss, list(model.parameters()), [(inputs, targets)]]
    if operator == "ggn":
        made = curvlinops.GGNLinearOperator(*arguments)
    else:
        *_, fisher = operator.removesuffix(" reduce").split(" ")
        kind = {"exact": "type-2", "empirical": "empirical"}[fisher]
        make = curvlinops.EKFACLinearOperator if operator.startswith("ekfac") else curvlinops.KFACLinearOperator
        sharing = "reduce" if operator.endswith("reduce") else "expand"
        made = make(*arguments, fisher_type=kind, kfac_approx=sharing, separate_weight_and_bias=False)
    names = [name for name, _ in model.named_parameters()]

    def turned(tensors: Sequence[Tensor]) -> list[Tensor]:
        return [t.T.contiguous() if n in problem.transposed else t for n, t in zip(names, tensors, strict=True)]

    return [turned(made @ turned(vector)) for vector in problem.vectors(problem.model())]


def _with_classes_second(model: nn.Module, problem: Problem) -> nn.Module:
    """curvlinops' and torch's losses have classes in the second dim."""
    if not problem.classes or problem.targets.ndim == 1:
        return model

    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x).movedim(-1, 1)

    return Turned()


def every_product() -> dict[str, dict[str, list[list[list[float]]]]]:
    """problem -> operator -> vector -> parameter -> numbers"""
    return {
        name: {
            operator: [[t.flatten().tolist() for t in made] for made in products(problem, operator)]
            for operator in problem.operators
        }
        for name, problem in PROBLEMS.items()
    }


def main() -> None:
    from importlib.metadata import version

    found = {name: version(name) for name in (PACKAGE, "torch")}
    assert found[PACKAGE] == VERSION, found
    NUMBERS.write_text(json.dumps({"versions": found, "products": every_product()}, indent=0) + "\n")


if __name__ == "__main__":
    main()
