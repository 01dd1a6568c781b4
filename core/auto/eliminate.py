"""The cheapest plan without a budget, exactly: nodes are decided one by one (Bertelè and Brioschi 1972).

Taking a node away leaves a table over its neighbours: whatever these take, the least that it and its edges can cost,
and by which of its strategies. The next node is always the one whose table is the smallest. A graph of a model is long
and thin, so that tables stay small; where they do not, nothing is made, and the caller has its linear programme, for
which nodes of at most two neighbours, whose tables are edges, can be taken away all the same (`reduce`).

Nothing is proven about memory: a cheapest plan that fits a budget is the cheapest that does, and one that does not is
none.
"""

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random

import numpy as np

from core.auto.problem import NOTHING_ALLOWED, Edge, Node, Problem
from core.auto.prune import Pruned, prune
from core.config import UserError

MOST_ENTRIES = 1 << 29
"""Sums that are looked at, of all nodes together: some seconds."""
_LARGEST = 1 << 26
"""Of one node; its table has as many numbers, divided by its strategies."""
_NEAR = 1 << 16
"""Of one node, where a plan is improved: more nodes stay, in less time."""
_AT_ONCE = 1 << 18
"""Sums that are held together."""


@dataclass(frozen=True, eq=False)
class _Decided:
    """which[strategies of `around`]: the strategy that the node then takes."""

    node: int
    around: tuple[int, ...]
    which: np.ndarray


@dataclass(frozen=True, eq=False)
class _Rest:
    """What is left of a problem, without its memory, and its nodes in the whole."""

    problem: Problem
    kept: tuple[int, ...]
    decided: tuple[_Decided, ...]

    def restored(self, choice: Sequence[int]) -> tuple[int, ...]:
        taken = dict(zip(self.kept, choice, strict=True))
        for one in reversed(self.decided):
            taken[one.node] = int(one.which[tuple(taken[node] for node in one.around)])
        return tuple(taken[node] for node in range(len(taken)))


@dataclass(frozen=True, eq=False)
class Reduced:
    """A problem of fewer nodes and strategies, without memory."""

    problem: Problem
    steps: tuple[Pruned | _Rest, ...]

    def restored(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Of a plan that is the cheapest of the reduced problem, the cheapest of the whole one."""
        for step in reversed(self.steps):
            choice = step.restored(choice)
        return tuple(choice)


def cheapest_plan(problem: Problem, most_entries: int = MOST_ENTRIES) -> tuple[int, ...] | None:
    """A plan of least seconds; None where tables would have more entries, or no plan is allowed."""
    order = _order(problem, len(problem.nodes), most_entries)
    if len(order) < len(problem.nodes):
        return None
    work = _Tables(problem)
    for node in order:
        work.step(node)
    return work.rest().restored(()) if math.isfinite(work.seconds) else None


def improved(problem: Problem, choice: Sequence[int], random: Random) -> tuple[int, ...]:
    """A plan that costs no more: the cheapest in which some nodes, drawn where tables would get large, stay."""
    steps = _order(problem, len(problem.nodes), MOST_ENTRIES, _NEAR, random)
    work = _Tables(problem)
    for node in steps:
        if node >= 0:
            work.take_away(node)
        else:
            work.keep(~node, choice[~node])
    return work.rest().restored(())


def reduce(problem: Problem, most_entries: int = MOST_ENTRIES) -> Reduced:
    """The problem without the strategies that no cheapest plan needs, and the nodes that have two neighbours at most.

    One makes room for the other: the edges of what goes are added up, and tell more together than apart.
    """
    steps: list[Pruned | _Rest] = [prune(problem, with_memory=False)]
    while True:
        before = steps[-1].problem
        work = _Tables(before)
        for node in _order(before, 2, most_entries):
            if len(work.factors_of) > 1:  # the last one stays: a problem has nodes
                work.step(node)
        if len(work.factors_of) == len(before.nodes):
            return Reduced(before, tuple(steps))
        steps.append(work.rest())
        steps.append(prune(steps[-1].problem, with_memory=False))


def _order(
    problem: Problem, most_neighbours: int, most_entries: int, largest: int = _LARGEST, random: Random | None = None
) -> list[int]:
    """Nodes in the order in which they go, each time the one with the smallest table; up to where it gets too large.

    Those of one strategy have no choice, and go first: ~node in the order, as for all that is decided without a table.

    random  one of many neighbours stays as it is then, and it goes on
    """
    sizes = [len(node.seconds) for node in problem.nodes]
    around: list[set[int]] = [set() for _ in sizes]
    for edge in problem.edges:
        around[edge.source].add(edge.target)
        around[edge.target].add(edge.source)

    def entries(node: int) -> int:
        return sizes[node] * math.prod(sizes[other] for other in around[node])

    order, total = [], 0
    for node in (node for node, size in enumerate(sizes) if size == 1):
        total += 1 + sum(sizes[other] for other in around[node])
        if total > most_entries and random is None:
            return order
        order.append(~node)
        for other in around[node]:
            around[other].discard(node)
    left = dict.fromkeys(node for node, size in enumerate(sizes) if size > 1)
    waiting = [(entries(node), node) for node in left]
    heapq.heapify(waiting)
    while waiting:
        num, node = heapq.heappop(waiting)
        if node not in left or num != entries(node) or len(around[node]) > most_neighbours:
            continue
        if num > largest or total + num > most_entries:
            if random is None:
                break
            heapq.heappush(waiting, (num, node))
            node = max(left, key=lambda n: len(around[n]) * (0.5 + random.random()))
            order.append(~node)
        else:
            total += num
            order.append(node)
            for other in around[node]:
                around[other] |= around[node]
                around[other].discard(other)
        del left[node]
        for other in around[node]:
            around[other].discard(node)
            heapq.heappush(waiting, (entries(other), other))
    return order


class _Tables:
    """Tables over some nodes each, whose sum is the cost of a plan.

    factors_of  node that is left -> the tables over it, by the nodes that they are over, in ascending order
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.sizes = [len(node.seconds) for node in problem.nodes]
        self.factors_of: dict[int, dict[tuple[int, ...], np.ndarray]] = {n: {} for n in range(len(self.sizes))}
        self.decided: list[_Decided] = []
        self.seconds = 0.0
        for n, node in enumerate(problem.nodes):
            self._add((n,), node.seconds)
        for edge in problem.edges:
            ends = edge.ends
            self._add(*((ends, edge.seconds) if ends[0] < ends[1] else (ends[::-1], edge.seconds.T)))

    def _add(self, of: tuple[int, ...], table: np.ndarray) -> None:
        if not of:
            self.seconds += float(table)
            return
        known = self.factors_of[of[0]].get(of)
        table = table if known is None else known + table
        for node in of:
            self.factors_of[node][of] = table

    def step(self, node: int) -> None:
        """Of an order: a node goes; ~node has one strategy."""
        if node >= 0:
            self.take_away(node)
        else:
            self.keep(~node, 0)

    def take_away(self, node: int) -> None:
        factors = self.factors_of.pop(node)
        around = tuple(sorted({other for of in factors for other in of if other != node}))
        laid = [self._laid(of, table, node, around) for of, table in factors.items()]
        laid.sort(key=np.size)
        shape = [self.sizes[other] for other in around]
        format_ = np.uint8 if self.sizes[node] <= 256 else np.uint16
        if self.sizes[node] * math.prod(shape) <= _AT_ONCE:
            cost = np.broadcast_to(_sum(laid), (self.sizes[node], *shape))
            which = cost.argmin(axis=0).astype(format_)
            least = cost.min(axis=0)
        else:
            least, which = np.full(shape, np.inf), np.zeros(shape, format_)
            for strategy in range(self.sizes[node]):
                cost = _sum([table[strategy] for table in laid])
                is_less = np.broadcast_to(cost < least, least.shape)
                np.copyto(least, cost, where=is_less)
                np.copyto(which, format_(strategy), where=is_less)
        self._drop(node, factors)
        self.decided.append(_Decided(node, around, which))
        self._add(around, least)

    def keep(self, node: int, strategy: int) -> None:
        """Decide it now."""
        factors = self.factors_of.pop(node)
        self._drop(node, factors)
        self.decided.append(_Decided(node, (), np.array(strategy)))
        for of, table in factors.items():
            rest = tuple(other for other in of if other != node)
            self._add(rest, np.take(table, strategy, axis=of.index(node)))

    def _drop(self, node: int, factors: Mapping[tuple[int, ...], np.ndarray]) -> None:
        for of in factors:
            for other in of:
                if other != node:
                    del self.factors_of[other][of]

    def _laid(self, of: tuple[int, ...], table: np.ndarray, node: int, around: tuple[int, ...]) -> np.ndarray:
        """The table with the node's strategies first, and a dim for each of those around it."""
        moved = np.moveaxis(table, of.index(node), 0)
        return moved.reshape(self.sizes[node], *(self.sizes[other] if other in of else 1 for other in around))

    def rest(self) -> _Rest:
        kept = tuple(self.factors_of)
        place = {node: n for n, node in enumerate(kept)}
        own = [self.factors_of[n][n,] for n in kept]
        if own and self.seconds:  # of parts that stand alone
            own[0] = own[0] + self.seconds
        if not all(np.isfinite(seconds).any() for seconds in own):
            raise UserError(NOTHING_ALLOWED)
        nodes = [Node(self.problem.nodes[n].name, seconds) for n, seconds in zip(kept, own, strict=True)]
        pairs = {of: table for n in kept for of, table in self.factors_of[n].items() if len(of) == 2}
        edges = [Edge(place[of[0]], place[of[1]], table) for of, table in pairs.items()]
        return _Rest(Problem(tuple(nodes), tuple(edges)), kept, tuple(self.decided))


def _sum(tables: Sequence[np.ndarray]) -> np.ndarray:
    total = tables[0]
    for table in tables[1:]:
        total = total + table
    return total
