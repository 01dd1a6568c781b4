"""The cheapest plan of a `Problem`, by linear programming, with the gap to what is proven impossible.

One-hot s_v says which strategy node v takes, and a table e_uv >= 0 which pair an edge does. With U_v seconds of
strategies, R_uv of pairs and M bytes,

    min  sum_v U_v . s_v + sum_uv R_uv . e_uv
         sum_i s_v[i] = 1,   sum_j e_uv[i, j] = s_u[i],   sum_i e_uv[i, j] = s_v[j]
         sum of the M . s and M . e that are alive at a point <= budget, for every point

The marginals are the tight form: the relaxation (s and e any numbers from 0 to 1) is integral on trees and, in
practice, on models; with e >= s_u[i] + s_v[j] - 1 it is worth nothing. Strategies with the same row of R share a row
of e.

0. Strategies that no cheapest plan needs are left out (`core.auto.prune`). Without memory the rest is solved exactly by
   taking away node by node (`core.auto.eliminate`), where tables stay small: a plan that fits is optimal. Where they do
   not, what has two neighbours at most is taken away so.
1. The relaxation is solved (HiGHS), at first with the bytes that are alive from first to last alone; the points at
   which the answer needs more than the budget are added, and it is solved again, until there are none.
2. An integral answer is a plan. A fractional one is rounded and improved node by node, then in large neighbourhoods
   (`core.auto.eliminate`) or, where there is a budget, by branch and bound over the nodes that it leaves open; what
   fits and is within `gap` of the bound is taken.
3. Else all of s becomes integer, again with points added as they are violated.
4. The plan is counted again by `core.auto.simulate`. One over the budget, by less than HiGHS's tolerance, is forbidden
   as it is, and step 3 goes on.

The bound is the relaxation's dual value, evaluated here and not taken from HiGHS: any prices of the rows give one.
Where nothing fits, the same programme with the peak as its objective says what would. In both the answer is optimal
where the gap is 0; where time runs out it is the best that was found, and the gap says how far from optimal it can be.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NoReturn

import numpy as np

from core.auto.eliminate import MOST_ENTRIES, Reduced, cheapest_plan, improved, reduce
from core.auto.problem import NOTHING_ALLOWED, Edge, Problem
from core.auto.prune import Pruned, prune, restrict
from core.auto.simulate import Account, simulate
from core.config import UserError

GAP = 1e-4
"""Of a plan's seconds, what a cheaper one may save that is no longer looked for."""
TIME_LIMIT_S = 60.0

_SCALE = 1000.0
"""About what the objective is: HiGHS's tolerances are absolute, 1e-7 and 1e-6."""
_INTEGRAL, _EQUAL = 1e-5, 1e-8
_POINTS_A_ROUND = 16
_IDLE = 20
"""Neighbourhoods in succession in which no better plan is found."""
_SHARES = (1.0, 0.5, 0.25, 0.12, 0.06, 0.03, 0.01, 0.0)
"""Of the way from the bound to the plan, limits that are tried until few enough strategies are left."""
_FEWER = 0.9
"""Of the strategies, what is left at the most where it is worth to ask for prices again."""


@dataclass(frozen=True)
class Plan:
    """choice[node], a strategy each, its cost, and what is proven about it.

    bound_s    no plan that fits takes less
    exact      it is the cheapest without a budget, found node by node; no programme was solved
    integral   the relaxation's answer was this plan; else it was rounded, or found by branch and bound
    rounds     linear and integer programmes that were solved
    points     of the liveness order that had to be among the rows
    """

    choice: tuple[int, ...]
    seconds: float
    bound_s: float
    peak_bytes: int
    integral: bool
    rounds: int
    points: int
    exact: bool = False

    @property
    def gap(self) -> float:
        """Of the plan's seconds, what a better one could save at most."""
        return max(0.0, 1 - self.bound_s / self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        how = f"the relaxation is {'integral' if self.integral else 'fractional'}; {self.rounds} programmes"
        how = "node by node" if self.exact else f"{how}, memory at {self.points} points"
        peak = f"peak {self.peak_bytes / 2**30:.3f} GiB"
        return f"{self.seconds:.6g} s, {peak}; optimality gap {100 * self.gap:.4f} % ({how})"


class DoesNotFit(UserError):
    """No plan keeps to the budget. least_bytes: the least peak that is proven (`exact`: and reached by a plan)."""

    def __init__(self, budget_bytes: int, least_bytes: int, exact: bool, point: str) -> None:
        self.least_bytes, self.exact = least_bytes, exact
        least = "the least that any plan reaches is" if exact else "every plan needs at least"
        super().__init__(
            f"no plan fits {_gib(budget_bytes)}: {least} {_gib(least_bytes)} (at {point}), "
            f"{_gib(least_bytes - budget_bytes)} more"
        )


def solve(
    problem: Problem,
    budget_bytes: int | None = None,
    gap: float = GAP,
    time_limit_s: float = TIME_LIMIT_S,
    most_entries: int = MOST_ENTRIES,
) -> Plan:
    """The plan of least seconds whose bytes at every point are at most `budget_bytes`.

    gap           relative to its seconds, within which a plan counts as optimal
    time_limit_s  after which the best plan so far is taken
    most_entries  that may be looked at to solve it node by node; 0: by the programme alone

    Raises DoesNotFit where no plan does, and UserError where none was found in time or SciPy is missing.
    """
    if budget_bytes is not None and not 0 <= budget_bytes < math.inf:
        raise UserError(f"a budget of {budget_bytes} bytes: give a number that is 0 or more")
    loose = reduce(problem, most_entries)
    if (taken := cheapest_plan(loose.problem, most_entries)) is not None:
        choice = loose.restored(taken)
        account = simulate(problem, choice)
        if _fits(account, budget_bytes):
            return Plan(choice, account.seconds, account.seconds, account.peak_bytes, True, 0, 0, exact=True)
    if budget_bytes is None and most_entries:
        plan = _narrowed(loose.problem, gap, time_limit_s, most_entries)
        choice = loose.restored(plan.choice)
    else:
        pruned = prune(problem, with_memory=budget_bytes is not None)
        plan = _solved(pruned.problem, budget_bytes, gap, time_limit_s)
        choice = pruned.restored(plan.choice)
    account = simulate(problem, choice)
    assert _fits(account, budget_bytes)
    return replace(plan, choice=choice, seconds=account.seconds, peak_bytes=account.peak_bytes)


def _solved(problem: Problem, budget_bytes: int | None, gap: float, time_limit_s: float) -> Plan:
    search = _Search(_Program(problem, budget_bytes), gap, time.monotonic() + time_limit_s)
    relaxed = search.settle(integers=False)
    if not search.is_done and relaxed.x is not None and not search.program.is_integral(relaxed.x):
        search.settle(integers=True, near=relaxed.x)
    while not search.is_done:
        found = search.settle(integers=True)
        if found.x is None or search.is_late or _fits(simulate(problem, search.program.rounded(found.x)), budget_bytes):
            break
        search.program.forbid(search.program.rounded(found.x))
    if search.best is None and search.is_impossible:
        _refuse(problem, budget_bytes, time_limit_s)
    account, choice = search.best or _least(problem, budget_bytes, time_limit_s)
    bound_s, points = min(search.bound_s, account.seconds), len(search.program.points)
    return Plan(choice, account.seconds, bound_s, account.peak_bytes, search.integral, search.rounds, points)


def _narrowed(problem: Problem, gap: float, time_limit_s: float, most_entries: int) -> Plan:
    """Without a budget: what the relaxation's prices prove to be dearer than a plan that is known goes, and so again.

    Few strategies can be solved node by node: those of all plans that may cost less than a limit between the bound and
    the plan. What comes out is the cheapest of all if it costs less than the limit, and else nothing does.
    """
    deadline, steps, here = time.monotonic() + time_limit_s, list[Pruned | Reduced](), problem
    best, bound_s, rounds = _Best(problem), 0.0, 0
    gap = max(gap, _EQUAL)

    def less(limit_s: float, floors: list[np.ndarray]) -> list[Pruned | Reduced] | None:
        kept = [np.flatnonzero(of <= limit_s * (1 + _EQUAL)) for of in floors]
        if not all(map(len, kept)):
            return None
        pruned = restrict(here, kept)
        return [pruned, reduce(pruned.problem, most_entries)]

    while True:
        search = _Search(_Program(here, None), gap, deadline)
        relaxed = search.settle(integers=False)
        search.wander()
        rounds += search.rounds
        if search.best is None and not steps:
            raise UserError(NOTHING_ALLOWED)
        if search.best is not None:
            best.offer(search.best[1], steps, search.integral)
        bound_s = max(bound_s, min(search.bound_s, best.seconds))  # of what is gone nothing is cheaper
        if relaxed.floors is None or best.is_within(gap, bound_s):
            break
        for share in _SHARES:
            limit_s = search.bound_s + share * (best.seconds - search.bound_s)
            rest = less(limit_s, relaxed.floors)
            taken = None if rest is None else cheapest_plan(rest[-1].problem, most_entries)
            if rest is None or taken is not None:
                found_s = best.offer(taken, [*steps, *rest], False) if rest and taken else math.inf
                bound_s = max(bound_s, min(limit_s, found_s, best.seconds))
                break
        rest = less(best.seconds, relaxed.floors)
        if best.is_within(gap, bound_s) or rest is None:
            bound_s = best.seconds if rest is None else bound_s
            break
        steps += rest
        before, here = _num_strategies(here), steps[-1].problem
        if search.is_late or _num_strategies(here) > _FEWER * before:
            last = _Search(_Program(here, None), gap, deadline)
            last.settle(integers=True)
            rounds += 1
            if last.best is not None:
                best.offer(last.best[1], steps, False)
            bound_s = max(bound_s, min(last.bound_s, best.seconds))
            break
    return Plan(best.choice, best.seconds, bound_s, 0, best.integral, rounds, 0)


class _Best:
    """The cheapest plan of a problem that was offered."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.choice, self.seconds, self.integral = problem, (), math.inf, False

    def is_within(self, gap: float, bound_s: float) -> bool:
        return self.seconds - bound_s <= gap * self.seconds

    def offer(self, choice: Sequence[int], steps: Sequence[Pruned | Reduced], integral: bool) -> float:
        """Its seconds.  choice: of what the steps leave."""
        for step in reversed(steps):
            choice = step.restored(choice)
        seconds = simulate(self.problem, choice).seconds
        if seconds < self.seconds:
            self.choice, self.seconds, self.integral = tuple(choice), seconds, integral and not steps
        return seconds


def _num_strategies(problem: Problem) -> int:
    return sum(len(node.seconds) for node in problem.nodes)


class _Search:
    """The best plan so far, and what is proven of it.

    integral       the relaxation's answer was that plan
    is_impossible  no plan fits, says a programme that leaves none out
    """

    def __init__(self, program: "_Program", gap: float, deadline: float) -> None:
        self.program, self.gap, self.deadline = program, max(gap, _EQUAL), deadline
        self.best: tuple[Account, tuple[int, ...]] | None = None
        self.bound_s, self.rounds, self.integral, self.is_impossible = 0.0, 0, False, False

    @property
    def is_done(self) -> bool:
        if self.best is None:
            return self.is_impossible
        return self.best[0].seconds - self.bound_s <= self.gap * self.best[0].seconds

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self.deadline

    def settle(self, integers: bool, near: np.ndarray | None = None) -> "_Found":
        """Solve until no point is violated that is not among the rows.

        near  an answer: nodes that take one strategy in it keep that one
        """
        while True:
            found = self.program.solve(integers, self.gap / 2, max(self.deadline - time.monotonic(), 1.0), near)
            self.rounds += 1
            if near is None:
                self.bound_s = max(self.bound_s, found.bound)
                self.is_impossible = found.infeasible and self.best is None
            for choice in self.program.candidates(found.x):
                account = simulate(self.program.problem, choice)
                is_better = self.best is None or account.seconds < self.best[0].seconds
                if is_better and _fits(account, self.program.budget):
                    self.best, self.integral = (account, choice), not integers and self.program.is_integral(found.x)
            is_over = found.x is None or self.is_done or (integers and self.is_late)
            if is_over or not self.program.add_points(found.x):
                return found

    def wander(self) -> None:
        """Better the plan in large neighbourhoods, until so many in succession are not better."""
        random, idle = Random(0), 0
        while self.best is not None and idle < _IDLE and not self.is_done and not self.is_late:
            choice = improved(self.program.problem, self.best[1], random)
            account = simulate(self.program.problem, choice)
            idle = 0 if account.seconds < self.best[0].seconds * (1 - _EQUAL) else idle + 1
            if account.seconds < self.best[0].seconds:
                self.best = account, choice


def least_peak(problem: Problem, time_limit_s: float = TIME_LIMIT_S) -> tuple[int, tuple[int, ...] | None, int]:
    """The least peak in bytes that is proven, a plan that reaches it or comes nearest, and that plan's peak.

    Raises UserError where SciPy is missing.
    """
    program = _Program(problem, None, of_peak=True)
    deadline = time.monotonic() + time_limit_s
    integers, bound = False, 0.0
    best: tuple[int, tuple[int, ...]] | None = None
    while True:
        found = program.solve(integers, 0.0, max(deadline - time.monotonic(), 1.0))
        if found.infeasible:
            raise UserError(NOTHING_ALLOWED)
        bound = max(bound, found.bound)
        for choice in program.candidates(found.x):
            account = simulate(problem, choice)
            if math.isfinite(account.seconds) and (best is None or account.peak_bytes < best[0]):
                best = account.peak_bytes, choice
        # Bytes are whole: above a bound of 7.2 there is 8.
        proven = math.ceil(bound * (1 - 1e-9) - 1e-6)
        if best and best[0] <= proven:
            break
        if integers and (found.x is None or time.monotonic() > deadline):
            break
        if program.add_points(found.x):
            continue
        if integers:
            break
        integers = True
    if best is None:
        return proven, None, proven
    return min(proven, best[0]), best[1], best[0]


def _refuse(problem: Problem, budget_bytes: int | None, time_limit_s: float) -> NoReturn:
    if budget_bytes is None:
        raise UserError(NOTHING_ALLOWED)
    least, choice, reached = least_peak(problem, time_limit_s)
    point = problem.points[simulate(problem, choice).peak_point] if choice else "an unknown point"
    # What the relaxation allows and integers do not is impossible all the same.
    raise DoesNotFit(budget_bytes, max(least, budget_bytes + 1), reached - least <= 1e-6 * reached, point)


def _least(problem: Problem, budget_bytes: int | None, time_limit_s: float) -> tuple[Account, tuple[int, ...]]:
    """The plan with the least peak, where time ran out before any was found that fits; or says that there is none."""
    if budget_bytes is None:
        _refuse(problem, None, time_limit_s)
    least, choice, reached = least_peak(problem, time_limit_s)
    if least > budget_bytes:
        _refuse(problem, budget_bytes, time_limit_s)
    if choice is None or reached > budget_bytes:
        raise UserError(
            f"no plan within {_gib(budget_bytes)} was found in {time_limit_s:g} s, nor proven impossible; "
            "give more time or more memory"
        )
    return simulate(problem, choice), choice


def _fits(account: Account, budget_bytes: int | None) -> bool:
    return math.isfinite(account.seconds) and (budget_bytes is None or account.peak_bytes <= budget_bytes)


@dataclass(frozen=True)
class _Found:
    """x is None where there is none: the programme is infeasible, or time ran out before one was found.

    floors  of each node, by its strategies, what a plan that takes it costs at least
    """

    x: np.ndarray | None
    bound: float
    infeasible: bool
    floors: list[np.ndarray] | None = None


class _Program:
    """The linear programme of a problem, its rows of memory as they are needed.

    Variables stand in groups that add up to 1, one after the other: the strategies of every node, then the pairs of
    every edge that has more than one row and column that differ; the last is the peak where that is minimised.
    """

    def __init__(self, problem: Problem, budget_bytes: int | None, of_peak: bool = False) -> None:
        self.optimize, self.sparse = _scipy()
        self.problem, self.budget, self.of_peak = problem, budget_bytes, of_peak
        self.sizes = [len(node.seconds) for node in problem.nodes]
        *self.starts, self.num_choices = [0, *np.cumsum(self.sizes).tolist()]
        self.groups, self.used = list(self.starts), self.num_choices
        self.equal, self.limits = _Rows(), _Rows()
        for start, size in zip(self.starts, self.sizes, strict=True):
            self.equal.add(range(start, start + size), [1.0] * size, 1.0)
        self.held_rows = [
            (n, self.starts[held.of[0]], held.bytes_) for n, held in enumerate(problem.held) if len(held.of) == 1
        ]
        self.seconds = [node.seconds.copy() for node in problem.nodes]
        self.pairs: list[tuple[Edge, int, np.ndarray, np.ndarray]] = []
        """edges of which there are pairs, the first of these, and classes of strategies at both ends"""
        cost = np.concatenate([np.zeros(self.num_choices), *self._add_edges()])
        cost[: self.num_choices] = np.concatenate(self.seconds)
        self.allowed = np.isfinite(cost)
        self.width = self.used + of_peak
        self.first = np.array([held.first for held in problem.held], dtype=np.int64)
        self.last = np.array([held.last for held in problem.held], dtype=np.int64)
        self.alive = self._alive()
        start = simulate(problem, self._improved([int(seconds.argmin()) for seconds in self.seconds]))
        self.unit = max(float(start.peak_bytes if of_peak else budget_bytes or 0), 1.0)
        if of_peak:
            self.scale, self.cost = self.unit / _SCALE, np.zeros(self.width)
            self.cost[-1] = _SCALE
        else:
            known = start.seconds if 0 < start.seconds < math.inf else float(cost[self.allowed].max())
            self.scale = max(known, 1e-30) / _SCALE
            self.cost = np.where(self.allowed, cost, 0.0) / self.scale
        self.equal_rows, self.equal_to = self.equal.matrix(self.sparse, self.width)
        self.points: set[int] = set()
        self._add_resident()

    def _add_edges(self) -> list[np.ndarray]:
        """Rows of the marginals of every edge, and the costs of their pairs."""
        held_by_edge: dict[tuple[int, ...], list[int]] = {}
        for n, held in enumerate(self.problem.held):
            if len(held.of) == 2:
                held_by_edge.setdefault(held.of, []).append(n)
        costs: list[np.ndarray] = []
        for edge in self.problem.edges:
            of_held = held_by_edge.get(edge.ends, [])
            tables = [edge.seconds, *(self.problem.held[n].bytes_ for n in of_held)]
            rows, columns = _classes(tables), _classes([table.T for table in tables])
            small = [table[np.ix_(_firsts(rows), _firsts(columns))] for table in tables]
            num_rows, num_columns = small[0].shape
            if num_rows == 1 or num_columns == 1:  # the other end decides, or nobody: its node pays
                end, classes = (edge.target, columns) if num_rows == 1 else (edge.source, rows)
                self.seconds[end] += small[0].ravel()[classes]
                self.held_rows += [
                    (n, self.starts[end], table.ravel()[classes]) for n, table in zip(of_held, small[1:], strict=True)
                ]
                continue
            pairs = np.arange(self.used, self.used + small[0].size).reshape(small[0].shape)
            for end, classes, places in ((edge.source, rows, pairs), (edge.target, columns, pairs.T)):
                for number, members in enumerate(places):
                    ours = self.starts[end] + np.flatnonzero(classes == number)
                    self.equal.add([*members, *ours], [1.0] * len(members) + [-1.0] * len(ours), 0.0)
            self.pairs.append((edge, self.used, rows, columns))
            costs.append(small[0].ravel())
            self.held_rows += [(n, self.used, table.ravel()) for n, table in zip(of_held, small[1:], strict=True)]
            self.groups.append(self.used)
            self.used += small[0].size
        return costs

    def _alive(self) -> Any:
        """[held, variable] bytes."""
        rows, columns, values = [], [], []
        for n, start, table in self.held_rows:
            rows.append(np.full(table.size, n))
            columns.append(np.arange(start, start + table.size))
            values.append(table)
        shape = (len(self.problem.held), self.width)
        if not rows:
            return self.sparse.csr_matrix(shape)
        where = (np.concatenate(rows), np.concatenate(columns))
        return self.sparse.csr_matrix((np.concatenate(values).astype(np.float64), where), shape)

    def _add_resident(self) -> None:
        """The bytes that are alive at all points."""
        last = len(self.problem.points) - 1
        resident = (self.first == 0) & (self.last == last)
        if resident.any() and (self.of_peak or self.budget is not None):
            self._add_limit(resident)

    def _add_limit(self, alive: np.ndarray) -> None:
        row = np.asarray(self.alive[np.flatnonzero(alive)].sum(axis=0)).ravel() / self.unit
        if self.of_peak:
            row[-1] = -1.0
        places = np.flatnonzero(row)
        self.limits.add(places, row[places], 0.0 if self.of_peak else (self.budget or 0) / self.unit)

    def add_points(self, x: np.ndarray | None) -> bool:
        """Rows for the points at which x needs more than is allowed; False where there are none that are new."""
        if x is None or not len(self.problem.points) or (self.budget is None and not self.of_peak):
            return False
        num_bytes = self.alive @ x
        change = np.zeros(len(self.problem.points) + 1)
        np.add.at(change, self.first, num_bytes)
        np.add.at(change, self.last + 1, -num_bytes)
        at = np.cumsum(change[:-1])
        limit = x[-1] * self.unit if self.of_peak else float(self.budget or 0)
        over = [int(point) for point in np.flatnonzero(at > limit + 1e-9 * self.unit) if int(point) not in self.points]
        highest = [p for p in over if at[p] >= at[max(p - 1, 0)] and at[p] >= at[min(p + 1, len(at) - 1)]]
        for point in sorted(highest or over, key=lambda p: -at[p])[:_POINTS_A_ROUND]:
            self.points.add(point)
            self._add_limit((self.first <= point) & (point <= self.last))
        return bool(over)

    def forbid(self, choice: Sequence[int]) -> None:
        """No plan takes all of these strategies: over the budget by less than a tolerance of HiGHS."""
        places = [start + taken for start, taken in zip(self.starts, choice, strict=True)]
        self.limits.add(places, [1.0] * len(places), len(places) - 1.0)

    def solve(self, integers: bool, gap: float, time_limit_s: float, near: np.ndarray | None = None) -> _Found:
        """near: an answer; nodes that take one strategy in it keep that one."""
        limits, at_most = self.limits.matrix(self.sparse, self.width)
        upper = np.where(self.allowed, 1.0, 0.0)
        upper = np.append(upper, np.inf) if self.of_peak else upper
        if near is not None:
            chosen = near[: self.num_choices]
            decided = np.repeat(np.maximum.reduceat(chosen, self.starts) > 1 - _INTEGRAL, self.sizes)
            upper[: self.num_choices][decided & (chosen < 0.5)] = 0.0
        if integers:
            return self._branch_and_bound(limits, at_most, upper, gap, time_limit_s)
        answer = self.optimize.linprog(
            self.cost,
            A_ub=limits if at_most.size else None,
            b_ub=at_most if at_most.size else None,
            A_eq=self.equal_rows,
            b_eq=self.equal_to,
            bounds=np.stack([np.zeros_like(upper), np.where(upper > 0, np.inf, 0.0)], axis=1),
            method="highs-ds",
        )
        if _is_infeasible(answer):
            return _Found(None, math.inf, True)
        if answer.status != 0:
            raise RuntimeError(f"HiGHS: {answer.message}")
        prices = np.minimum(answer.ineqlin.marginals, 0.0) if at_most.size else np.zeros(0)
        bound, floors = self._dual(np.asarray(answer.eqlin.marginals), prices, limits, at_most)
        return _Found(answer.x, bound, False, floors)

    def _dual(
        self, equal: np.ndarray, limit: np.ndarray, limits: Any, at_most: np.ndarray
    ) -> tuple[float, list[np.ndarray]]:
        """The bound that these prices of the rows prove: each group takes its least reduced cost, with weight 1.

        A node that takes another strategy pays the difference, and so do its edges, whose pairs then are of that one.
        """
        reduced = self.cost - self.equal_rows.T @ equal
        value = float(self.equal_to @ equal)
        if at_most.size:
            reduced = reduced - limits.T @ limit
            value += float(at_most @ limit)
        if self.of_peak:  # at most 1, what is known to be reached
            value += min(float(reduced[-1]), 0.0)
            reduced = reduced[:-1]
        reduced = np.where(self.allowed, reduced, np.inf)
        least = np.minimum.reduceat(reduced, self.groups)
        value += float(least.sum())
        floors = [
            value + reduced[start : start + size] - least[n]
            for n, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True))
        ]
        for edge, start, rows, columns in self.pairs:
            pairs = reduced[start : start + (rows.max() + 1) * (columns.max() + 1)].reshape(rows.max() + 1, -1)
            floors[edge.source] += (pairs.min(axis=1) - pairs.min())[rows]
            floors[edge.target] += (pairs.min(axis=0) - pairs.min())[columns]
        return value * self.scale, [floor * self.scale for floor in floors]

    def _branch_and_bound(
        self, limits: Any, at_most: np.ndarray, upper: np.ndarray, gap: float, time_limit_s: float
    ) -> _Found:
        integer = np.zeros(self.width)
        integer[: self.num_choices] = 1
        constraints = [self.optimize.LinearConstraint(self.equal_rows, self.equal_to, self.equal_to)]
        if at_most.size:
            constraints.append(self.optimize.LinearConstraint(limits, -np.inf, at_most))
        answer = self.optimize.milp(
            self.cost,
            integrality=integer,
            bounds=self.optimize.Bounds(np.zeros_like(upper), upper),
            constraints=constraints,
            options={"mip_rel_gap": gap, "time_limit": time_limit_s},
        )
        if _is_infeasible(answer):
            return _Found(None, math.inf, True)
        bound = answer.mip_dual_bound if answer.mip_dual_bound is not None else -math.inf
        return _Found(answer.x, bound * self.scale, False)

    def is_integral(self, x: np.ndarray | None) -> bool:
        if x is None:
            return False
        choices = x[: self.num_choices]
        return bool(np.abs(choices - np.round(choices)).max(initial=0.0) <= _INTEGRAL)

    def rounded(self, x: np.ndarray) -> tuple[int, ...]:
        """The strategy with the largest share of each node."""
        return tuple(int(x[start : start + size].argmax()) for start, size in zip(self.starts, self.sizes, strict=True))

    def candidates(self, x: np.ndarray | None) -> list[tuple[int, ...]]:
        """Plans near an answer: rounded, and improved node by node where it is fractional."""
        if x is None:
            return []
        near = self.rounded(x)
        return [near] if self.is_integral(x) else [near, tuple(self._improved(list(near)))]

    def _improved(self, choice: list[int]) -> list[int]:
        """Each node in turn takes what is cheapest beside its neighbours, until none changes, whatever the memory."""
        around: list[list[tuple[int, np.ndarray]]] = [[] for _ in self.sizes]
        for edge in self.problem.edges:
            around[edge.source].append((edge.target, edge.seconds))
            around[edge.target].append((edge.source, edge.seconds.T))
        changed = True
        for _ in range(50):
            if not changed:
                break
            changed = False
            for n, node in enumerate(self.problem.nodes):
                total = node.seconds.copy()
                for other, seconds in around[n]:
                    total += seconds[:, choice[other]]
                least = int(total.argmin())
                if total[least] < total[choice[n]]:
                    choice[n], changed = least, True
        return choice


class _Rows:
    """Rows of a sparse matrix, and what each is compared with."""

    def __init__(self) -> None:
        self.columns: list[np.ndarray] = []
        self.values: list[np.ndarray] = []
        self.sides: list[float] = []

    def add(self, columns: Any, values: Any, side: float) -> None:
        self.columns.append(np.asarray(columns, dtype=np.int64))
        self.values.append(np.asarray(values, dtype=np.float64))
        self.sides.append(side)

    def matrix(self, sparse: Any, width: int) -> tuple[Any, np.ndarray]:
        starts = np.cumsum([0, *(len(columns) for columns in self.columns)])
        columns = np.concatenate([*self.columns, np.zeros(0, dtype=np.int64)])
        values = np.concatenate([*self.values, np.zeros(0)])
        return sparse.csr_matrix((values, columns, starts), (len(self.sides), width)), np.array(self.sides)


def _classes(tables: Sequence[np.ndarray]) -> np.ndarray:
    """[row] the number of the class to which it belongs: rows that are equal in all tables."""
    seen: dict[tuple[bytes, ...], int] = {}
    keys = [tuple(table[n].tobytes() for table in tables) for n in range(len(tables[0]))]
    return np.array([seen.setdefault(key, len(seen)) for key in keys])


def _firsts(classes: np.ndarray) -> list[int]:
    return [int(np.flatnonzero(classes == number)[0]) for number in range(classes.max() + 1)]


def _is_infeasible(answer: Any) -> bool:
    """Also where HiGHS cannot tell that from unbounded: no cost is negative."""
    return answer.status == 2 or (answer.status == 4 and "infeasible" in answer.message.lower())


def _scipy() -> tuple[Any, Any]:
    try:
        from scipy import optimize, sparse
    except ImportError:
        raise UserError(
            "the solver takes HiGHS from SciPy, which is not installed; pip install 'megalith[auto]'"
        ) from None
    return optimize, sparse


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.3f} GiB" if num_bytes >= 2**20 else f"{num_bytes:.0f} bytes"
