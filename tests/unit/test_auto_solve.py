"""The solver: its plans are those of trying all, with and without a budget, and it says how sure it is."""

import sys
from collections.abc import Callable
from random import Random

import numpy as np
import pytest

from core.auto.eliminate import MOST_ENTRIES, cheapest_plan, improved, reduce
from core.auto.problem import Edge, Follower, Held, Node, Problem, alike, fold, join
from core.auto.prune import prune
from core.auto.simulate import simulate
from core.auto.solve import DoesNotFit, Plan, _Program, least_peak, solve
from core.config import UserError
from tests.support.graphs import drawn_problem, try_all


def check(problem: Problem) -> None:
    """Without a budget, with budgets from loose to the tightest that is possible, and with one byte less than that."""
    tried = try_all(problem)
    peaks = np.unique(tried.peak[np.isfinite(tried.seconds)])
    budgets = [None, *(int(peaks[len(peaks) * n // 4]) for n in range(4))]
    # With no entries by the programme alone; with few, it is given what is left of the nodes.
    for budget, entries in [
        *((budget, MOST_ENTRIES) for budget in budgets),
        *((budget, 0) for budget in budgets),
        (None, 30),
    ]:
        plan = solve(problem, budget, gap=0.0, most_entries=entries)
        assert plan.exact <= bool(entries)
        assert plan.seconds == pytest.approx(tried.best(np.inf if budget is None else budget), rel=1e-9, abs=1e-9)
        assert plan.bound_s <= plan.seconds * (1 + 1e-12)
        assert plan.gap <= 1e-6
        account = simulate(problem, plan.choice)
        assert (account.seconds, account.peak_bytes) == (plan.seconds, plan.peak_bytes)
        assert plan.seconds == pytest.approx(float(tried.seconds[plan.choice]))
        assert plan.peak_bytes == tried.peak[plan.choice]
        assert budget is None or plan.peak_bytes <= budget
    with pytest.raises(DoesNotFit) as refused:
        solve(problem, int(peaks[0]) - 1)
    assert refused.value.least_bytes == peaks[0]
    assert refused.value.exact
    least, choice, reached = least_peak(problem)
    assert least == reached == peaks[0]
    assert choice is not None
    assert tried.peak[choice] == peaks[0]


@pytest.mark.parametrize("seed", range(6))
def test_plans_are_those_of_trying_all(seed: int) -> None:
    check(drawn_problem(seed, num_nodes=4 + seed))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(200))
def test_plans_of_many_graphs_are_those_of_trying_all(seed: int) -> None:
    check(drawn_problem(1000 + seed, num_nodes=6 + seed % 7))


def chain(costs: list[list[float]], change: float, held: list[list[int]] | None = None) -> Problem:
    """Nodes one after the other; another strategy than the one before costs `change`. Memory from first to last."""
    nodes = [Node(f"n{n}", np.array(prices)) for n, prices in enumerate(costs)]
    edges = []
    for n in range(1, len(nodes)):
        table = np.full((len(costs[n - 1]), len(costs[n])), change)
        np.fill_diagonal(table, 0.0)
        edges.append(Edge(n - 1, n, table))
    points = tuple(f"p{n}" for n in range(len(nodes)))
    return Problem(
        tuple(nodes),
        tuple(edges),
        tuple(Held((n,), np.array(num_bytes), n, len(nodes) - 1) for n, num_bytes in enumerate(held or [])),
        points,
    )


def test_a_chain_pays_for_changes() -> None:
    for entries, how in ((MOST_ENTRIES, "node by node"), (0, "the relaxation is integral; 1 programmes")):
        plan = solve(chain([[0, 3], [3, 0], [0, 3]], change=2), most_entries=entries)
        assert plan.choice == (0, 0, 0)
        assert plan.seconds == 3
        assert plan.integral
        assert plan.gap == 0
        assert how in str(plan)
    assert solve(chain([[0, 3], [3, 0], [0, 3]], change=1)).choice == (0, 1, 0)


def test_axes_that_are_solved_one_by_one_all_take_the_batch() -> None:
    """The trap of deciding mesh axes apart: each finds cutting the batch cheapest, and the batch is 2.

    Together they are a problem of pairs of strategies, in which (batch, batch) does not exist.
    """
    # Two products; by axis: 0 cuts the batch, 1 columns then rows. A batch of 2 has no 4 parts.
    one_axis = chain([[1.0, 1.5], [1.0, 1.5]], change=2)
    apart = [solve(one_axis).choice for _ in range(2)]
    assert apart == [(0, 0), (0, 0)]
    names = ("batch, batch", "batch, rows", "rows, batch", "rows, rows")
    prices = np.array([np.inf, 2.5, 2.5, 3.0])
    table = np.array([[0, 2, 2, 4], [2, 0, 4, 2], [2, 4, 0, 2], [4, 2, 2, 0]], dtype=float)
    together = Problem((Node("first", prices, names), Node("second", prices, names)), (Edge(0, 1, table),))
    taken = solve(together).choice
    assert {names[n] for n in taken} in ({"batch, rows"}, {"rows, batch"})
    as_one = names.index("batch, batch")
    assert not np.isfinite(simulate(together, (as_one, as_one)).seconds)


def test_what_is_alive_at_one_point_counts_there() -> None:
    """Cheap strategies hold 10 bytes each, dear ones 1; what is held by one half is gone in the other."""
    nodes = tuple(Node(f"n{n}", np.array([1.0, 2.0])) for n in range(4))
    held = tuple(Held((n,), np.array([10, 1]), *((0, 1) if n < 2 else (2, 3))) for n in range(4))
    problem = Problem(nodes, (), held, ("a", "b", "c", "d"))
    assert solve(problem, 20).seconds == 4  # 40 bytes in all, 20 at a time
    assert solve(problem, 11).seconds == 6
    with pytest.raises(DoesNotFit, match="no plan fits 1 bytes: the least that any plan reaches is 2 bytes") as refused:
        solve(problem, 1)
    assert refused.value.least_bytes == 2


def test_points_are_added_when_they_are_violated() -> None:
    """None of 20 points is a row before an answer needs more there."""
    costs = [[1.0, 2.0]] * 20
    loose = chain(costs, change=0.1, held=[[10, 1]] * 20)
    assert solve(loose, 200).points == 0
    tight = solve(loose, 120)
    assert 1 <= tight.points <= 16
    assert tight.peak_bytes <= 120


def test_a_fractional_relaxation_is_said_and_solved() -> None:
    """A triangle in which all want to differ: halves of everything cost nothing, and are no plan."""
    differ = np.array([[1.0, 0.0], [0.0, 1.0]])
    nodes = tuple(Node(f"n{n}", np.zeros(2)) for n in range(3))
    plan = solve(Problem(nodes, (Edge(0, 1, differ), Edge(1, 2, differ), Edge(0, 2, differ))), gap=0.0, most_entries=0)
    assert plan.seconds == 1
    assert plan.gap <= 1e-9
    assert not plan.integral
    assert "the relaxation is fractional" in str(plan)
    assert "optimality gap 0.0000 %" in str(plan)


def test_gap_is_what_is_not_proven() -> None:
    assert Plan((0,), 2.0, 1.5, 0, False, 1, 0).gap == 0.25
    assert Plan((0,), 0.0, 0.0, 0, True, 1, 0).gap == 0


def test_equal_blocks_are_one() -> None:
    """Five blocks of two nodes: folded there are two, and the plan, unfolded, is counted alike."""
    block = chain([[2.0, 1.0], [1.0, 2.5]], change=0.7, held=[[5, 9], [1, 1]])
    joined = join([block] * 5)
    table = np.array([[0.0, 0.4], [0.4, 0.0]])
    whole = Problem(
        joined.nodes,
        (*joined.edges, *(Edge(2 * n + 1, 2 * n + 2, table) for n in range(4))),
        joined.held,
        joined.points,
    )
    folded = fold(whole, alike(whole, [(2 * n, 2 * n + 1) for n in range(5)]))
    assert len(folded.problem.nodes) == 2
    assert len(folded.problem.edges) == 1
    plan = solve(folded.problem, gap=0.0)
    account = simulate(whole, folded.unfold(plan.choice))
    assert account.seconds == pytest.approx(plan.seconds)
    assert account.peak_bytes == plan.peak_bytes
    tried = try_all(folded.problem)
    assert plan.seconds == pytest.approx(tried.best())
    assert plan.seconds >= solve(whole, gap=0.0).seconds - 1e-9  # blocks that may differ can only be cheaper


def test_followers_are_their_producers() -> None:
    """A view takes the cut of what it views; a view of the view does, too."""
    problem = chain([[1.0, 3.0], [0.0, 0.0], [0.0, 0.0], [4.0, 1.0]], change=10, held=[[1, 2], [0, 0], [4, 8], [0, 0]])
    folded = fold(problem, {1: Follower(0, (0, 1)), 2: Follower(1, (0, 1))})
    assert [node.name for node in folded.problem.nodes] == ["n0", "n3"]
    for choice in ((0, 0), (0, 1), (1, 0), (1, 1)):
        whole, less = simulate(problem, folded.unfold(choice)), simulate(folded.problem, choice)
        assert (whole.seconds, whole.bytes_at) == (less.seconds, less.bytes_at)
    assert folded.unfold(solve(folded.problem).choice) == (1, 1, 1, 1)


@pytest.mark.parametrize("seed", range(3))
def test_folding_keeps_every_cost(seed: int) -> None:
    """Followers of any kind: an edge between two that have one leader, edges that become one, and either direction."""
    problem = drawn_problem(50 + seed, num_nodes=8)
    sizes = [len(node.seconds) for node in problem.nodes]
    random = np.random.default_rng(seed)

    def follower(node: int, leader: int) -> Follower:
        return Follower(leader, tuple(random.integers(sizes[node], size=sizes[leader]).tolist()))

    folded = fold(problem, {1: follower(1, 4), 4: follower(4, 0), 6: follower(6, 7)})
    for _ in range(20):
        choice = tuple(int(random.integers(len(node.seconds))) for node in folded.problem.nodes)
        whole, less = simulate(problem, folded.unfold(choice)), simulate(folded.problem, choice)
        assert whole.seconds == pytest.approx(less.seconds)
        assert whole.bytes_at == less.bytes_at


def test_a_plan_that_is_over_by_less_than_a_tolerance_is_not_taken() -> None:
    """One byte in 10^12: HiGHS takes it for nothing, and the budget is what it is."""
    num_bytes = 10**12
    nodes = (Node("a", np.array([1.0, 2.0])), Node("b", np.array([1.0, 2.0])))
    held = tuple(Held((n,), np.array([num_bytes // 2, 1]), 0, 0) for n in range(2))
    problem = Problem(nodes, (), held, ("p",))
    assert solve(problem, num_bytes, gap=0.0).seconds == 2
    plan = solve(problem, num_bytes - 1, gap=0.0)
    assert plan.seconds == 3
    assert plan.peak_bytes <= num_bytes - 1


def test_forbidden_everywhere() -> None:
    table = np.full((1, 1), np.inf)
    problem = Problem((Node("a", np.zeros(1)), Node("b", np.zeros(1))), (Edge(0, 1, table),))
    with pytest.raises(UserError, match="no plan is allowed"):
        solve(problem)


NODE = Node("a", np.zeros(2))


@pytest.mark.parametrize(
    ("build", "said"),
    [
        (lambda: Node("a", np.array([1.0, np.nan])), "node a: nan is no price"),
        (lambda: Node("a", np.array([1.0, -2.0])), "node a: -2.0 is no price"),
        (lambda: Node("a", np.full(2, np.inf)), "node a has no strategy that is allowed"),
        (lambda: Node("a", np.zeros(2), ("x",)), "names 1 strategies and prices 2"),
        (lambda: Node("a", np.zeros((2, 2))), "1 dims"),
        (lambda: Problem((NODE, NODE), (Edge(0, 1, np.zeros((2, 3))),)), "pairs"),
        (lambda: Problem((NODE,), (Edge(0, 0, np.zeros((2, 2))),)), "an edge to itself"),
        (lambda: Problem((NODE,), (Edge(0, 1, np.zeros((2, 2))),)), "there are 1 nodes"),
        (lambda: Problem((NODE, NODE), (Edge(0, 1, np.zeros((2, 2))),) * 2), "stands twice"),
        (lambda: Held((0,), np.array([1.5, 2.0]), 0, 0), "whole numbers of bytes"),
        (lambda: Problem((NODE,), (), (Held((0,), np.zeros(2), 0, 1),), ("p",)), "alive at 0..1 of 1"),
        (lambda: Problem((NODE,), (), (Held((1,), np.zeros(2), 0, 0),), ("p",)), "memory of"),
        (lambda: solve(Problem((NODE,)), -1), "a budget of -1 bytes"),
        (lambda: simulate(Problem((NODE,)), (2,)), "has strategies 0..1, not 2"),
        (lambda: simulate(Problem((NODE,)), ()), "a plan of 0 strategies for 1 nodes"),
        (lambda: fold(Problem((NODE, NODE)), {0: Follower(1, (0, 1)), 1: Follower(0, (0, 1))}), "in a circle"),
        (lambda: alike(Problem((NODE, Node("b", np.zeros(3)))), [(0,), (1,)]), "not alike"),
    ],
)
def test_bad_input_is_one_line(build: Callable[[], object], said: str) -> None:
    with pytest.raises(UserError) as refused:
        build()
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_cannot_be_changed() -> None:
    node = Node("a", np.zeros(2))
    with pytest.raises(ValueError, match="read-only"):
        node.seconds[0] = 1.0


def test_without_scipy_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(UserError, match="pip install 'megalith\\[auto\\]'"):
        solve(Problem((NODE,)), most_entries=0)


def test_what_is_left_out_no_cheapest_plan_needs() -> None:
    """Strategies go, and the best plan of the rest is that of all, with a budget and without."""
    left = 0
    for seed in range(20):
        problem = drawn_problem(300 + seed, num_nodes=7)
        tried = try_all(problem)
        median = int(np.median(tried.peak[np.isfinite(tried.seconds)]))
        for with_memory, budget in ((False, np.inf), (True, median)):
            pruned = prune(problem, with_memory)
            rest = try_all(pruned.problem)
            assert rest.best(budget) == pytest.approx(tried.best(budget), rel=1e-12)
            best = np.unravel_index(int(rest.seconds.argmin()), rest.seconds.shape)
            restored = simulate(problem, pruned.restored([int(n) for n in best]))
            assert restored.seconds == pytest.approx(float(rest.seconds[best]))
            left += not with_memory and sum(map(len, pruned.kept)) < sum(len(node.seconds) for node in problem.nodes)
    assert left > 15


def test_a_strategy_that_is_only_just_needed_stays() -> None:
    """The dearer of two strategies is left out unless a neighbour's change is worth more than it costs."""
    nodes = (Node("a", np.array([0.0, 1.0])), Node("b", np.array([0.0, 0.0])))
    for change, kept in ((0.9, [0]), (1.1, [0, 1])):
        table = np.array([[0.0, change], [change, 0.0]])
        forced = (*nodes, Node("c", np.array([5.0, 0.0])))
        problem = Problem(forced, (Edge(0, 1, table), Edge(1, 2, table * 9)))
        assert prune(problem, with_memory=False).kept[0].tolist() == kept


# --- node by node -----------------------------------------------------------------------------------------------------


def test_nodes_are_taken_away_where_tables_stay_small() -> None:
    """A ring of rings is solved without a programme; not so where fewer entries are allowed than it takes."""
    for seed in range(20):
        problem = drawn_problem(400 + seed, num_nodes=9)
        choice = cheapest_plan(problem)
        assert choice is not None
        assert simulate(problem, choice).seconds == pytest.approx(try_all(problem).best())
        assert cheapest_plan(problem, 20) is None


def test_what_has_two_neighbours_is_taken_away_and_comes_back() -> None:
    """The best plan of what is left is the best of all; few nodes are left of sparse graphs."""
    left = 0
    for seed in range(20):
        problem = drawn_problem(500 + seed, num_nodes=8)
        tried = try_all(problem)
        rest = reduce(problem)
        left += len(rest.problem.nodes)
        seconds = try_all(rest.problem).seconds
        best = np.unravel_index(int(seconds.argmin()), seconds.shape)
        whole = rest.restored([int(n) for n in best])
        assert seconds[best] == pytest.approx(tried.best())
        assert float(tried.seconds[whole]) == pytest.approx(tried.best())
    assert left < 20 * 5


def test_a_budget_that_the_cheapest_plan_keeps_to_needs_no_programme() -> None:
    problem = chain([[1.0, 2.0]] * 3, change=0.1, held=[[10, 1]] * 3)
    assert solve(problem, 30).exact
    assert solve(problem, 30).rounds == 0
    tight = solve(problem, 29)
    assert not tight.exact
    assert tight.peak_bytes <= 29


def grid(seed: int, rows: int = 4, columns: int = 6) -> Problem:
    """Neighbours that want to be alike, and a quarter that wants to differ: the relaxation is often fractional."""
    random, same = np.random.default_rng(seed), np.eye(4)
    nodes = tuple(Node(f"n{n}", random.random(4)) for n in range(rows * columns))
    edges = []
    for n in range(rows * columns):
        for other in ([n + columns] if n + columns < len(nodes) else []) + ([n + 1] if (n + 1) % columns else []):
            wanted = 1 - same if random.random() >= 0.25 else same
            edges.append(Edge(n, other, 0.7 * random.random() * wanted))
    return Problem(nodes, tuple(edges))


def test_prices_leave_out_what_no_cheapest_plan_takes() -> None:
    """Graphs that are too wide to be solved node by node before the relaxation's prices are known, and not after."""
    by_prices = 0
    for seed in range(10):
        exact = solve(grid(seed), gap=0.0)
        assert exact.exact
        plan = solve(grid(seed), gap=0.0, most_entries=6000)
        assert plan.seconds == pytest.approx(exact.seconds, rel=1e-9)
        assert plan.bound_s <= exact.seconds * (1 + 1e-9)
        assert plan.gap <= 1e-6
        by_prices += not plan.exact and not plan.integral and plan.rounds == 1
    assert by_prices > 2


def test_prices_say_what_a_strategy_costs_at_least() -> None:
    """Of every strategy the cheapest plan that takes it, by trying all, is no cheaper; and often it is that."""
    tight = 0
    for seed in range(20):
        problem = drawn_problem(700 + seed, num_nodes=7)
        tried, floors = try_all(problem).seconds, _Program(problem, None).solve(False, 0.0, 10.0).floors
        assert floors is not None
        for node, of in enumerate(floors):
            least = np.moveaxis(tried, node, 0).reshape(len(of), -1).min(axis=1)
            assert (of <= least * (1 + 1e-9) + 1e-12).all()
            tight += int((np.isfinite(least) & (of > 0.9999 * least)).sum())
    assert tight > 100


def test_neighbourhoods_never_make_a_plan_dearer() -> None:
    for seed in range(5):
        problem, random = grid(seed), Random(seed)
        choice: tuple[int, ...] = (0,) * len(problem.nodes)
        seconds = [simulate(problem, choice).seconds]
        for _ in range(4):
            choice = improved(problem, choice, random)
            seconds.append(simulate(problem, choice).seconds)
        assert seconds[1:] == sorted(seconds[1:], reverse=True)
        assert seconds[-1] < seconds[0]


def test_many_neighbours_without_a_choice() -> None:
    """More of them than an array has dims: they are decided without a table."""
    draw = np.random.default_rng(0)
    middle = Node("middle", draw.random(3))
    around = [Node(f"around {n}", np.array([1.0])) for n in range(80)]
    edges = [Edge(0, n, draw.random((3, 1))) for n in range(1, 81)]
    problem = Problem((middle, *around), tuple(edges))
    costs = middle.seconds + sum(edge.seconds[:, 0] for edge in edges)
    plan = solve(problem)
    assert plan.choice == (int(costs.argmin()), *([0] * 80))
    assert plan.seconds == pytest.approx(80 + costs.min())
    assert cheapest_plan(problem) == plan.choice
