"""Writes in place: what has a twin, what is whole because of them, and what inputs have at the end."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from core.auto.functional import Writes, reads_form_alone, twin_of
from core.config import UserError
from core.trace.graph import Graph
from core.trace.record import trace_call


class Shifts(nn.Module):
    """A view is written to, and its base read."""

    def forward(self, x: Tensor) -> Tensor:
        shifted = torch.zeros_like(x)
        shifted[:, 1:] = x[:, :-1]
        return shifted * 2


class Adds(nn.Module):
    """The sum is read as what the write returns, and as a view made of that."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 3
        y += x
        return F.relu(y.view(-1), inplace=True)


class Looks(nn.Module):
    """A view from before the write is read behind it."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 3
        row = y[0]
        y += x
        return row * 2


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.norm(x))


class Fills(nn.Module):
    """Random numbers are drawn into memory that there is."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.empty_like(x).bernoulli_(0.5)


class Halves(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return x * self.weight


def graph_of(module: nn.Module) -> Graph:
    return trace_call(module, {"x": torch.zeros(4, 5)}, backward=False)


def literal(graph: Graph) -> list[str]:
    writes = Writes.of(graph)
    return [str(node.op).removeprefix("aten.") for node in graph.nodes if writes.is_literal(node)]


def test_a_write_through_a_view_makes_its_memory_whole() -> None:
    assert literal(graph_of(Shifts())) == ["zeros_like.default", "slice.Tensor", "copy_.default"]
    assert literal(graph_of(Looks())) == ["mul.Tensor", "select.int", "add_.Tensor"]


def test_a_write_that_its_readers_follow_has_a_twin() -> None:
    graph = graph_of(Adds())
    assert literal(graph) == []
    assert [str(twin_of(node).op) for node in graph.nodes if node.writes] == ["aten.add.Tensor", "aten.relu.default"]


def test_a_write_without_a_twin_makes_its_memory_whole() -> None:
    graph = graph_of(Fills())
    assert literal(graph) == ["empty_like.default", "bernoulli_.float"]
    assert reads_form_alone(graph.nodes[0])


def test_running_statistics_get_their_last_value() -> None:
    """Of a norm that runs twice: the second call reads what the first one wrote."""
    graph = graph_of(Norm())
    writes = Writes.of(graph)
    norms = [node.index for node in graph.nodes if "batch_norm" in node.name]
    assert [node for node, _ in writes.inputs["norm.running_mean"]] == norms
    assert [place for _, place in writes.inputs["norm.running_var"]] == [4, 4]
    assert len(writes.inputs["norm.num_batches_tracked"]) == 2
    assert set(writes.made.values()) >= {(norms[0], 3), (norms[0], 4)}
    assert not writes.shared


def test_a_write_to_a_parameter_is_refused() -> None:
    with pytest.raises(UserError, match=r"aten.mul_.Tensor in the module writes to the parameter weight"):
        Writes.of(graph_of(Halves()))
