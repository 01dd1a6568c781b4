"""The choice that the solver makes, as data: nodes with strategies, the price of every change of layout, bytes alive.

A node takes one of its strategies and pays its seconds, computation and what it sends inside. An edge pays for the pair
of strategies at its ends, what changing one's output into the other's input costs. A `Held` is memory: bytes by
strategy of a node, or by the pair of an edge (the changed copy), alive from one point of the liveness order to another;
parameters, gradients and optimizer state are alive from the first to the last. `inf` seconds forbid a strategy or pair.

`fold` makes a problem smaller: a node that follows another, a view or a cast its producer or a block the block that it
equals, has no strategy of its own. Costs of k equal blocks are then k times those of one, and so is the memory of what
they keep; the plan of the folded problem, unfolded, costs the same. What is lost are plans in which followers differ.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from core.config import UserError

NOTHING_ALLOWED = "no plan is allowed: every one takes a strategy or a change of layout that is forbidden"


@dataclass(frozen=True, eq=False)
class Node:
    """seconds[strategy]; `strategies` names them, for who reads a plan."""

    name: str
    seconds: np.ndarray
    strategies: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", _prices(self.seconds, 1, f"node {self.name}"))
        if not np.isfinite(self.seconds).any():
            raise UserError(f"node {self.name} has no strategy that is allowed")
        if self.strategies and len(self.strategies) != len(self.seconds):
            raise UserError(f"node {self.name} names {len(self.strategies)} strategies and prices {len(self.seconds)}")

    def strategy(self, index: int) -> str:
        return self.strategies[index] if self.strategies else str(index)


@dataclass(frozen=True, eq=False)
class Edge:
    """seconds[strategy of source, strategy of target]; both are indices of nodes."""

    source: int
    target: int
    seconds: np.ndarray

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", _prices(self.seconds, 2, f"edge {self.source} -> {self.target}"))

    @property
    def ends(self) -> tuple[int, int]:
        return self.source, self.target


@dataclass(frozen=True, eq=False)
class Held:
    """Memory that is alive at the points first..last, both included.

    of      (node,), or (source, target) of an edge
    bytes_  [strategy], or [strategy of source, strategy of target]; whole numbers
    """

    of: tuple[int, ...]
    bytes_: np.ndarray
    first: int
    last: int

    def __post_init__(self) -> None:
        if self.bytes_.dtype == np.int64 and not self.bytes_.flags.writeable and self.bytes_.ndim == len(self.of):
            return  # another's, already looked at
        given = _prices(self.bytes_, len(self.of), f"memory of {self.of}")
        if not np.isfinite(given).all() or (given != np.floor(given)).any():
            raise UserError(f"memory of {self.of}: give whole numbers of bytes")
        object.__setattr__(self, "bytes_", _frozen(given.astype(np.int64)))


@dataclass(frozen=True, eq=False)
class Problem:
    """points: names of the points of the liveness order, first to last.

    Raises UserError where sizes do not agree, where a pair of nodes has two edges and where memory is of nothing.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    held: tuple[Held, ...] = ()
    points: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        sizes = [len(node.seconds) for node in self.nodes]
        shapes: dict[tuple[int, ...], tuple[int, ...]] = {(n,): (size,) for n, size in enumerate(sizes)}
        for edge in self.edges:
            self._check_ends(edge)
            expected = (sizes[edge.source], sizes[edge.target])
            if edge.seconds.shape != expected:
                raise UserError(f"{self.called(edge.ends)} prices {edge.seconds.shape} pairs of {expected}")
            if edge.ends in shapes:
                raise UserError(f"{self.called(edge.ends)} stands twice: add up its seconds")
            shapes[edge.ends] = expected
        for held in self.held:
            if shapes.get(held.of) != held.bytes_.shape:
                raise UserError(f"memory of {held.of} has shape {held.bytes_.shape}, not {shapes.get(held.of)}")
            if not 0 <= held.first <= held.last < len(self.points):
                raise UserError(f"memory of {held.of} is alive at {held.first}..{held.last} of {len(self.points)}")

    def _check_ends(self, edge: Edge) -> None:
        for end in edge.ends:
            if not 0 <= end < len(self.nodes):
                raise UserError(f"edge {edge.source} -> {edge.target}: there are {len(self.nodes)} nodes")
        if edge.source == edge.target:
            raise UserError(f"node {self.nodes[edge.source].name} has an edge to itself: add it to the node's seconds")

    def called(self, of: tuple[int, ...]) -> str:
        """The name of a node, (node,), or of an edge, (source, target)."""
        return " -> ".join(self.nodes[node].name for node in of)


@dataclass(frozen=True)
class Follower:
    """A node whose strategy is a function of another's: strategy[i] where `leader` takes i."""

    leader: int
    strategy: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Folded:
    """A smaller problem, and where the nodes of the whole are in it: each a follower of one of its nodes."""

    problem: Problem
    places: tuple[Follower, ...]

    def unfold(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The strategy of every node of the whole, of a plan of the folded problem."""
        return tuple(place.strategy[choice[place.leader]] for place in self.places)


def alike(problem: Problem, blocks: Sequence[Sequence[int]]) -> dict[int, Follower]:
    """Followers that let every block take the strategies of the first: node i of each is node i of the others.

    Raises UserError where blocks have unlike numbers of nodes or of strategies.
    """
    found: dict[int, Follower] = {}
    for block in blocks[1:]:
        if len(block) != len(blocks[0]):
            raise UserError(f"blocks of {len(blocks[0])} and {len(block)} nodes are not alike")
        for leader, node in zip(blocks[0], block, strict=True):
            size = len(problem.nodes[leader].seconds)
            if len(problem.nodes[node].seconds) != size:
                names = f"{problem.nodes[leader].name} and {problem.nodes[node].name}"
                raise UserError(f"nodes {names} are not alike: their numbers of strategies differ")
            found[node] = Follower(leader, tuple(range(size)))
    return found


def fold(problem: Problem, followers: Mapping[int, Follower]) -> Folded:
    """The problem without followers: their seconds, edges and memory are their leader's.

    A follower may follow a follower. Raises UserError where they follow each other in a circle.
    """
    ends = [_last_leader(problem, node, followers) for node in range(len(problem.nodes))]
    place = {node: n for n, node in enumerate(dict.fromkeys(end.leader for end in ends))}
    takes = [np.array(end.strategy) for end in ends]
    at = [place[end.leader] for end in ends]
    seconds = [np.zeros(len(problem.nodes[node].seconds)) for node in place]
    for node, where, taken in zip(problem.nodes, at, takes, strict=True):
        seconds[where] += node.seconds[taken]
    pairs: dict[tuple[int, ...], np.ndarray] = {}
    for edge in problem.edges:
        of, price = _moved(edge.ends, edge.seconds, at, takes)
        if len(of) == 1:
            seconds[of[0]] += price
        else:
            pairs[of] = pairs.get(of, 0) + price
    alive: dict[tuple[tuple[int, ...], int, int], np.ndarray] = {}
    for one in problem.held:
        of, num_bytes = _moved(one.of, one.bytes_, at, takes)
        key = (of, one.first, one.last)
        alive[key] = alive.get(key, 0) + num_bytes
    held = [Held(of, num_bytes, first, last) for (of, first, last), num_bytes in alive.items() if num_bytes.any()]
    nodes = [Node(problem.nodes[node].name, seconds[n], problem.nodes[node].strategies) for n, node in enumerate(place)]
    edges = [Edge(of[0], of[1], price) for of, price in pairs.items()]
    places = tuple(Follower(where, tuple(taken.tolist())) for where, taken in zip(at, takes, strict=True))
    return Folded(Problem(tuple(nodes), tuple(edges), tuple(held), problem.points), places)


def _last_leader(problem: Problem, node: int, followers: Mapping[int, Follower]) -> Follower:
    """The node that leads it in the end, and its strategy by that node's."""
    seen = [node]
    strategy = tuple(range(len(problem.nodes[node].seconds)))
    while seen[-1] in followers:
        step = followers[seen[-1]]
        if step.leader in seen:
            raise UserError(f"followers in a circle: {' -> '.join(problem.nodes[n].name for n in seen)}")
        seen.append(step.leader)
        strategy = tuple(strategy[taken] for taken in step.strategy)
    return Follower(seen[-1], strategy)


def _moved(
    of: tuple[int, ...], values: np.ndarray, at: Sequence[int], takes: Sequence[np.ndarray]
) -> tuple[tuple[int, ...], np.ndarray]:
    """A node's or an edge's values by the strategies of the leaders; of one leader where both ends have the same."""
    values = values[np.ix_(*(takes[node] for node in of))]
    places = tuple(at[node] for node in of)
    if len(places) == 1:
        return places, values
    if places[0] == places[1]:
        return places[:1], values.diagonal()
    return (places, values) if places[0] < places[1] else (places[::-1], values.T)


def join(parts: Iterable[Problem]) -> Problem:
    """Problems side by side, one liveness order after the other; who joins them adds the edges between."""
    nodes: list[Node] = []
    edges: list[Edge] = []
    held: list[Held] = []
    points: list[str] = []
    for part in parts:
        ahead, before = len(nodes), len(points)
        nodes += part.nodes
        edges += [Edge(edge.source + ahead, edge.target + ahead, edge.seconds) for edge in part.edges]
        held += [
            Held(tuple(node + ahead for node in one.of), one.bytes_, one.first + before, one.last + before)
            for one in part.held
        ]
        points += part.points
    return Problem(tuple(nodes), tuple(edges), tuple(held), tuple(points))


def _prices(given: np.ndarray, dims: int, what: str) -> np.ndarray:
    """As an array that nobody writes to; what is one already is not copied, since equal blocks share theirs."""
    given = np.asarray(given, dtype=np.float64)
    prices = given.copy() if given.flags.writeable else given
    if prices.ndim != dims or not prices.size:
        raise UserError(f"{what}: give prices of {dims} dims, one or more of each")
    if np.isnan(prices).any() or (prices < 0).any():
        worst = math.nan if np.isnan(prices).any() else prices.min()
        raise UserError(f"{what}: {worst} is no price; give numbers that are 0 or more")
    return _frozen(prices)


def _frozen(array: np.ndarray) -> np.ndarray:
    array.setflags(write=False)
    return array
