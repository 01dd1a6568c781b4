"""Problems of the solver drawn at random, and their best plan by trying all."""

from dataclasses import dataclass

import numpy as np

from core.auto.problem import Edge, Held, Node, Problem

FORBIDDEN = 0.05
"""Of strategies and pairs, beside the first, which are not allowed."""


def drawn_problem(seed: int, num_nodes: int, most: int = 3) -> Problem:
    """A loopy graph with up to `most` strategies a node; memory of nodes and edges that begins and ends anywhere."""
    random = np.random.default_rng(seed)
    sizes = random.integers(1, most + 1, num_nodes)
    nodes = tuple(Node(f"n{n}", _drawn(random, (size,)), ()) for n, size in enumerate(sizes))
    pairs = {(n - 1, n) for n in range(1, num_nodes)}
    pairs |= {tuple(sorted(random.choice(num_nodes, 2, replace=False).tolist())) for _ in range(num_nodes)}
    edges = tuple(Edge(a, b, _drawn(random, (sizes[a], sizes[b]))) for a, b in sorted(pairs))
    held = []
    for of in [*((n,) for n in range(num_nodes)), *(edge.ends for edge in edges)]:
        first = int(random.integers(num_nodes))
        last = int(random.integers(first, num_nodes))
        shape = tuple(sizes[node] for node in of)
        held.append(Held(of, random.integers(0, 100, shape) * (len(of) == 1 or random.random() < 0.3), first, last))
    resident = [Held((n,), random.integers(0, 60, sizes[n]), 0, num_nodes - 1) for n in range(0, num_nodes, 3)]
    return Problem(nodes, edges, (*held, *resident), tuple(f"p{n}" for n in range(num_nodes)))


def _drawn(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    prices = random.random(shape) * 10.0 ** random.integers(-2, 2)
    prices[random.random(shape) < 0.2] = 0.0
    forbidden = random.random(shape) < FORBIDDEN
    forbidden.flat[0] = False
    return np.where(forbidden, np.inf, prices)


@dataclass(frozen=True)
class Tried:
    """[strategy of node 0, strategy of node 1, …] seconds and peak of every plan."""

    seconds: np.ndarray
    peak: np.ndarray

    def best(self, budget: float = np.inf) -> float:
        return float(np.where(self.peak <= budget, self.seconds, np.inf).min())

    def least_peak(self) -> int:
        return int(self.peak[np.isfinite(self.seconds)].min())


def try_all(problem: Problem) -> Tried:
    shape = tuple(len(node.seconds) for node in problem.nodes)

    def spread(of: tuple[int, ...], values: np.ndarray) -> np.ndarray:
        if len(of) == 2 and of[0] > of[1]:
            of, values = of[::-1], values.T
        places = [1] * len(shape)
        for node in of:
            places[node] = shape[node]
        return values.reshape(places)

    seconds = np.zeros(shape)
    for n, node in enumerate(problem.nodes):
        seconds = seconds + spread((n,), node.seconds)
    for edge in problem.edges:
        seconds = seconds + spread(edge.ends, edge.seconds)
    peak = np.zeros(shape, dtype=np.int64)
    for point in range(len(problem.points)):
        alive = np.zeros(shape, dtype=np.int64)
        for held in problem.held:
            if held.first <= point <= held.last:
                alive = alive + spread(held.of, held.bytes_)
        peak = np.maximum(peak, alive)
    return Tried(seconds, peak)
