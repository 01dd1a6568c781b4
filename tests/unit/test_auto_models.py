"""Forty models as they are: each step is planned on meshes of one and two axes, and little of it runs whole."""

from collections import Counter
from collections.abc import Collection
from typing import Any

import pytest
import torch

from core.auto.costs import Link
from core.auto.formulate import Formulation, formulate
from core.auto.simulate import simulate
from core.auto.solve import solve
from core.config import UserError
from core.trace.graph import Graph
from core.trace.machine import Speed
from core.trace.record import trace_graph
from tests.support import foreign
from tests.support.auto_models import CAUSAL, MODELS, made
from tests.support.zoo import in_fp64

LINKS, SPEED = (Link(1e-6, 1e9), Link(1e-7, 1e10)), Speed(1e11, 1e10)
"""A slow axis outside and a fast one inside, as machines are joined."""
WHOLE = 0.02
"""Of the bytes of a step, what operators without a strategy that cuts them may read and write."""


def broad(few: Collection[str]) -> list[Any]:
    """Those beyond the few are for `make soak`."""
    return [pytest.param(name, id=name, marks=() if name in few else pytest.mark.soak) for name in MODELS]


def test_there_are_forty() -> None:
    assert len(MODELS) >= 40
    assert len(CAUSAL) >= 20


def planned(graph: Graph, *mesh: int) -> Formulation:
    """The step on a mesh, and a plan of it that is counted again."""
    problem = formulate(graph, mesh, LINKS[: len(mesh)], SPEED, state=2.0)
    plan = solve(problem.problem, gap=5e-3)
    assert plan.gap <= 5e-3, plan
    account = simulate(problem.whole, problem.folded.unfold(plan.choice))
    assert account.seconds == pytest.approx(plan.seconds)
    assert account.peak_bytes == plan.peak_bytes
    return problem


def whole_of(problem: Formulation, graph: Graph) -> Counter[str]:
    """Bytes by operator of those that no strategy cuts. A batch norm that writes counts as its functional twin."""
    strategies = {node.name: node.strategies for node in problem.whole.nodes}
    found = Counter[str]()
    for node in graph.nodes:
        if not any("S" in text for text in strategies[node.name]) and not (node.writes and "norm" in node.name):
            found[str(node.op)] += node.bytes_read + node.bytes_written
            assert not node.flops, node
    return found


@pytest.mark.parametrize("name", broad(("gpt_neo", "mixtral", "resnet", "clip")))
def test_a_step_is_planned(name: str) -> None:
    """On 2, 3 and 2 x 2 ranks; sizes are small and odd, so that some tensors have dims that no axis cuts."""
    with in_fp64():
        graph = trace_graph(*made(name))
    problem = planned(graph, 2)
    whole, touched = whole_of(problem, graph), graph.bytes_read + graph.bytes_written
    assert whole.total() <= WHOLE * touched, {op: n / touched for op, n in whole.most_common(5)}
    planned(graph, 3)


@pytest.mark.parametrize("name", broad(("bert",)))
def test_a_step_is_planned_on_two_axes(name: str) -> None:
    with in_fp64():
        planned(trace_graph(*made(name)), 2, 2)


def test_experts_that_look_at_values_are_refused_with_their_line() -> None:
    """Transformers' loop over the experts that are hit, by which another implementation has no need to look."""
    model = foreign.EXPERTS["6 of mixtral, eager"].make()
    with pytest.raises(UserError, match=r"cannot be traced: .*\.py:\d+ \(.*looks at a tensor's values") as refused:
        trace_graph(model, {"input_ids": torch.zeros(2, 3, dtype=torch.int64), "use_cache": False})
    assert "\n" not in str(refused.value)
