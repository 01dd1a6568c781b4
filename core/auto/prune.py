"""Strategies that no cheapest plan needs, removed before the programme is written (dead-end elimination).

At node v strategy s is left out if another, s', is never dearer whatever its neighbours take (Goldstein 1994):

    U(s) - U(s') + sum over edges of min_j (R[s, j] - R[s', j])  >=  0

and, where memory counts, if s' never holds more. Exact: putting s' in the place of s makes a plan no dearer and no
larger. What a node no longer takes its neighbours need no answer to, so they are looked at again. A product that every
rank repeats, or an activation that is gathered and cut again, goes; what is left is what the programme has to weigh.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from core.auto.problem import NOTHING_ALLOWED, Edge, Held, Node, Problem
from core.config import UserError

_AT_ONCE = 1 << 22
"""Differences that are worked out in one piece."""


@dataclass(frozen=True, eq=False)
class Pruned:
    """A problem with fewer strategies, and which of the whole they are."""

    problem: Problem
    kept: tuple[np.ndarray, ...]

    def restored(self, choice: Sequence[int]) -> tuple[int, ...]:
        """The strategies of the whole problem, of a plan of the pruned one."""
        return tuple(int(kept[taken]) for kept, taken in zip(self.kept, choice, strict=True))


def prune(problem: Problem, with_memory: bool) -> Pruned:
    """The problem without strategies that are dominated.  with_memory: memory counts, too."""
    work = _Work(problem, with_memory)
    waiting = deque(range(len(problem.nodes)))
    is_waiting = [True] * len(problem.nodes)
    while waiting:
        node = waiting.popleft()
        is_waiting[node] = False
        left = work.undominated(node)
        if len(left) == len(work.kept[node]):
            continue
        work.kept[node] = left
        for other in work.neighbours(node):
            if not is_waiting[other]:
                waiting.append(other)
                is_waiting[other] = True
    return Pruned(work.rest(), tuple(work.kept))


def restrict(problem: Problem, kept: Sequence[np.ndarray]) -> Pruned:
    """The problem with these strategies of each node alone."""
    work = _Work(problem, with_memory=False)
    work.kept = list(kept)
    return Pruned(work.rest(), tuple(kept))


class _Work:
    def __init__(self, problem: Problem, with_memory: bool) -> None:
        self.problem = problem
        self.kept = [np.flatnonzero(np.isfinite(node.seconds)) for node in problem.nodes]
        self.around: list[list[tuple[int, np.ndarray]]] = [[] for _ in problem.nodes]
        """of each node its neighbours, and seconds by strategies of the node and of the neighbour"""
        self.held: list[list[tuple[int | None, np.ndarray]]] = [[] for _ in problem.nodes]
        for edge in problem.edges:
            self.around[edge.source].append((edge.target, edge.seconds))
            self.around[edge.target].append((edge.source, edge.seconds.T))
        for one in problem.held if with_memory else ():
            if len(one.of) == 1:
                self.held[one.of[0]].append((None, one.bytes_))
            else:
                self.held[one.of[0]].append((one.of[1], one.bytes_))
                self.held[one.of[1]].append((one.of[0], one.bytes_.T))

    def neighbours(self, node: int) -> list[int]:
        return [other for other, _ in self.around[node]]

    def undominated(self, node: int) -> np.ndarray:
        """Of the strategies that a node has left, those that none of the others makes needless."""
        mine = self.kept[node]
        if len(mine) == 1:
            return mine
        seconds = self.problem.nodes[node].seconds[mine]
        dearer = seconds[:, None] - seconds[None, :]  # [s, s']: by how much at least
        least = seconds.copy()
        for other, table in self.around[node]:
            table = table[np.ix_(mine, self.kept[other])]
            with np.errstate(invalid="ignore"):  # forbidden here and needed there: no reason to leave it out
                dearer += _least_difference(table)
            least += table.min(axis=1)
        is_needless = dearer >= 0
        for other, num_bytes in self.held[node]:
            of = num_bytes[mine][:, None] if other is None else num_bytes[np.ix_(mine, self.kept[other])]
            is_needless &= _least_difference(of.astype(np.float64)) >= 0
        np.fill_diagonal(is_needless, False)
        is_left = np.isfinite(least)
        if not is_left.any():
            raise UserError(NOTHING_ALLOWED)
        for place in np.argsort(-least, kind="stable"):
            if is_left[place] and (is_needless[place] & is_left).any():
                is_left[place] = False
        return mine[is_left]

    def rest(self) -> Problem:
        nodes = tuple(
            Node(node.name, node.seconds[kept], tuple(node.strategies[n] for n in kept) if node.strategies else ())
            for node, kept in zip(self.problem.nodes, self.kept, strict=True)
        )
        edges = tuple(
            Edge(edge.source, edge.target, edge.seconds[np.ix_(self.kept[edge.source], self.kept[edge.target])])
            for edge in self.problem.edges
        )
        held = tuple(
            Held(one.of, one.bytes_[np.ix_(*(self.kept[node] for node in one.of))], one.first, one.last)
            for one in self.problem.held
        )
        return Problem(nodes, edges, held, self.problem.points)


def _least_difference(table: np.ndarray) -> np.ndarray:
    """[s, s'] the least of table[s, j] - table[s', j] over j; pairs that neither may take do not count."""
    num, width = table.shape
    found = np.empty((num, num))
    step = max(1, _AT_ONCE // max(1, num * width))
    is_finite = np.isfinite(table).all()
    for start in range(0, num, step):
        part = table[start : start + step]
        with np.errstate(invalid="ignore"):
            difference = part[:, None, :] - table[None, :, :]
        if not is_finite:
            difference = np.where(np.isnan(difference), np.inf, difference)
        found[start : start + step] = difference.min(axis=2)
    return found
