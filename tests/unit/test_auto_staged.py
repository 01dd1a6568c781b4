"""Stages, layouts and recomputation together, held against the solver alone and against trying all."""

import itertools
import random
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from core.auto.formulate import formulate
from core.auto.machines import Cluster, cluster_of, gpu_named
from core.auto.solve import solve
from core.auto.staged import StagedPlan, _dealt, _links, plan_stages
from core.config import UserError
from core.trace.graph import Graph
from core.trace.machine import Speed
from core.trace.record import trace_graph

SPEED = Speed(1e10, 1e9)
"""So slow that ranks share the work."""
STATE = 2.0


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(dim), nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x_BLD: Tensor) -> Tensor:
        return x_BLD + self.down(torch.tanh(self.up(self.norm(x_BLD))))


class Chain(nn.Module):
    """skip: the last block also gets what the first one made."""

    def __init__(self, num_blocks: int, dim: int = 32, skip: bool = False):
        super().__init__()
        self.embed, self.head, self.skip = nn.Embedding(64, dim), nn.Linear(dim, 64, bias=False), skip
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))

    def forward(self, ids_BL: Tensor) -> Tensor:
        made = [self.embed(ids_BL)]
        for block in self.blocks:
            made.append(block(made[-1] + made[1] if self.skip and len(made) == len(self.blocks) else made[-1]))
        return self.head(made[-1]).square().mean()


@cache
def graph_of(num_blocks: int, skip: bool = False) -> Graph:
    return trace_graph(Chain(num_blocks, skip=skip), {"ids_BL": torch.zeros(16, 24, dtype=torch.int64)}, train=True)


def cluster(ranks: int, memory_bytes: int = 2**40) -> Cluster:
    return cluster_of(gpu_named("a100-40gb"), ranks, memory_bytes=memory_bytes)


def plans(ranks: int, memory_bytes: int = 2**40, microbatches: int = 4, **more) -> list[StagedPlan]:
    of = graph_of(6)
    return plan_stages(of, cluster(ranks, memory_bytes), microbatches, speed=SPEED, state=STATE, **more)


def test_one_stage_and_microbatch_is_the_solvers_plan() -> None:
    for plan in plans(2, microbatches=1, stages=[1]):
        assert plan.step_s == pytest.approx(plan.layouts.seconds, rel=1e-12)
        assert plan.memory_bytes == plan.layouts.peak_bytes
    alone = solve(formulate(graph_of(6), (2,), _links(cluster(2), (2,)), SPEED, state=STATE).problem)
    assert plans(2, microbatches=1, stages=[1])[0].step_s == pytest.approx(alone.seconds, rel=1e-12)


def test_microbatches_take_turns_and_gradients_are_reduced_once() -> None:
    one, four = (plans(2, microbatches=m, stages=[1])[0] for m in (1, 4))
    once = one.stages[0].once_s
    assert once > 0
    assert four.step_s == pytest.approx(4 * (one.step_s - once) + once, rel=1e-12)


def test_stages_hold_what_is_in_flight() -> None:
    plan = plans(2, stages=[2], microbatches=8)[0]
    first, last = plan.stages
    assert [len(stage.blocks) for stage in plan.stages] == [3, 3]
    assert first.segments == last.segments == (3,)
    more = plans(2, stages=[2], microbatches=8, schedule="gpipe")[0]
    assert more.stages[0].memory_bytes > first.memory_bytes  # eight in flight, not two
    span = sum(stage.forward_s + stage.backward_s for stage in plan.stages)
    slowest = max(stage.forward_s + stage.backward_s for stage in plan.stages)
    assert plan.step_s >= 7 * slowest + span / 2


def test_what_does_not_fit_is_computed_again() -> None:
    free = plans(2, stages=[2], schedule="gpipe")[0]
    budget = free.memory_bytes
    steps = [free.step_s]
    for share in (0.9, 0.8, 0.7):
        tight = plans(2, int(share * budget), stages=[2], schedule="gpipe")[0]
        assert tight.memory_bytes <= int(share * budget)
        assert any(stage.again_s > 0 for stage in tight.stages)
        steps.append(tight.step_s)
    assert steps == sorted(steps)
    assert steps[0] < steps[-1]


def test_none_of_the_front_beats_another() -> None:
    found = plans(4, microbatches=4)
    assert not any(one.beats(other) for one in found for other in found)
    slower = replace(found[0], step_s=2 * found[0].step_s)
    assert found[0].beats(slower)
    assert not slower.beats(found[0])
    assert [plan.step_s for plan in found] == sorted(plan.step_s for plan in found)
    assert "of" in str(found[0])
    assert "within" in str(found[0])


def test_deals_are_the_best_of_all() -> None:
    draw = random.Random(0)
    for _ in range(20):
        count, stages = draw.randint(3, 7), draw.randint(1, 3)
        cost = {
            (n, i, j): float("inf") if draw.random() < 0.2 else (j - i) * draw.random()
            for n in range(stages)
            for i, j in itertools.combinations(range(count + 1), 2)
        }
        found = _dealt(count, stages, lambda n, i, j, cost=cost: cost[n, i, j])
        every = [
            max(cost[n, i, j] for n, (i, j) in enumerate(itertools.pairwise((0, *cuts, count))))
            for cuts in itertools.combinations(range(1, count), stages - 1)
        ]
        if min(every) == float("inf"):
            assert found is None
        else:
            assert found is not None
            assert max(cost[n, r.start, r.stop] for n, r in enumerate(found)) == min(every)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schedule": "zbv"}, "1f1b and gpipe"),
        ({"stages": [3]}, "divisors of the ranks"),
        ({"microbatches": 0}, "positive"),
        (
            {"memory_bytes": 1000},
            r"no plan fits 1000 bytes on 2 ranks with 4 microbatches; [1-9].* of a device is the least",
        ),
    ],
)
def test_refusals(change: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        plans(2, **change)


def test_a_module_that_is_no_chain_has_one_stage() -> None:
    skipping = graph_of(4, skip=True)
    (plan, *_) = plan_stages(skipping, cluster(2), 2, speed=SPEED)
    assert len(plan.stages) == 1
    with pytest.raises(UserError, match="blocks ahead"):
        plan_stages(skipping, cluster(2), 2, speed=SPEED, stages=[1, 2])
    with pytest.raises(UserError, match="no plan fits"):  # rather than segments that would not keep what is skipped
        plan_stages(skipping, cluster(2, plan.memory_bytes * 3 // 4), 2, speed=SPEED, stages=[1])
    one = trace_graph(nn.Linear(4, 4), {"input": torch.zeros(2, 4)}, train=True)
    with pytest.raises(UserError, match="no list of blocks"):
        plan_stages(one, cluster(2), 2, speed=SPEED)


def test_a_smaller_device_is_never_faster() -> None:
    whole = plans(4, stages=[2])
    smaller = replace(cluster(4), memory_bytes=whole[0].memory_bytes * 3 // 4)
    half = plan_stages(graph_of(6), smaller, 4, speed=SPEED, state=STATE, stages=[2])
    assert half[0].step_s >= whole[0].step_s
