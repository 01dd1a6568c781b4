"""A plan's cost, counted again: walks the nodes, adds up, and follows memory from point to point.

Shares no code with the solver, which minimises the same sums as a linear programme: what both say must agree.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from core.auto.problem import Problem
from core.config import UserError


@dataclass(frozen=True)
class Account:
    """A plan's cost.

    node_s, edge_s  seconds of each node and each edge
    bytes_at        bytes alive at each point
    """

    node_s: tuple[float, ...]
    edge_s: tuple[float, ...]
    bytes_at: tuple[int, ...]

    @property
    def seconds(self) -> float:
        return sum(self.node_s) + sum(self.edge_s)

    @property
    def peak_bytes(self) -> int:
        return max(self.bytes_at, default=0)

    @property
    def peak_point(self) -> int:
        """The first point with the most bytes."""
        return self.bytes_at.index(self.peak_bytes)


def simulate(problem: Problem, choice: Sequence[int]) -> Account:
    """The cost of giving node n the strategy choice[n]; raises UserError unless there is one for each node."""
    if len(choice) != len(problem.nodes):
        raise UserError(f"a plan of {len(choice)} strategies for {len(problem.nodes)} nodes")
    for node, taken in zip(problem.nodes, choice, strict=True):
        if not 0 <= taken < len(node.seconds):
            raise UserError(f"node {node.name} has strategies 0..{len(node.seconds) - 1}, not {taken}")
    node_s = tuple(float(node.seconds[taken]) for node, taken in zip(problem.nodes, choice, strict=True))
    edge_s = tuple(float(edge.seconds[choice[edge.source], choice[edge.target]]) for edge in problem.edges)
    begins: dict[int, int] = defaultdict(int)
    ends: dict[int, int] = defaultdict(int)
    for held in problem.held:
        num_bytes = int(held.bytes_[tuple(choice[node] for node in held.of)])
        begins[held.first] += num_bytes
        ends[held.last] += num_bytes
    alive, bytes_at = 0, []
    for point in range(len(problem.points)):
        alive += begins[point]
        bytes_at.append(alive)
        alive -= ends[point]
    assert alive == 0
    return Account(node_s, edge_s, tuple(bytes_at))
