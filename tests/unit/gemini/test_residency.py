"""Plans of residency against an independent replay, an exhaustive search, LRU and figures worked out by hand."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import Phase, given, seed, settings
from hypothesis import strategies as st

from core.config import UserError
from core.gemini.lifetimes import Lifetimes, keep
from core.gemini.residency import HostTooSmall, plan_residency, smallest_budget
from core.gemini.schedule import Schedule
from core.gemini.timeline import Move, run
from core.gemini.trace import ChunkInfo, Moment, Trace
from core.trace.machine import Bandwidth
from tests.support.residency import least, lru, replay, subsets, traces, transformer

EVEN = Bandwidth(to_device=2.0, to_host=2.0, host_update=1.0, device_update=100.0)
LINK_ONLY = Bandwidth(to_device=1.0, to_host=1.0, host_update=math.inf, device_update=math.inf)
NO_TIME = Bandwidth(math.inf, math.inf, math.inf, math.inf)


def budgets(trace: Trace):
    """From what one moment needs to more than everything."""
    least_bytes = smallest_budget(trace)
    return st.integers(least_bytes, least_bytes + trace.model_bytes + 5)


@given(traces(), st.data(), st.sampled_from(["auto", "auto", "static", "cpu"]))
@settings(max_examples=150, deadline=None)
def test_every_plan_runs_within_its_budget_and_does_what_it_says(trace, data, policy):
    bandwidth = data.draw(st.sampled_from([EVEN, LINK_ONLY, replace(EVEN, to_device=0.1), replace(EVEN, to_host=0.1)]))
    budget = data.draw(budgets(trace))
    plan = plan_residency(trace, budget, bandwidth, policy)
    found = replay(trace, plan)
    assert found.device_bytes == plan.device_bytes
    assert plan.device_peak_bytes <= budget
    assert (found.to_device_bytes, found.to_host_bytes) == (plan.to_device_bytes, plan.to_host_bytes)
    assert plan.device_updated == {c for c in plan.resident if trace.chunks[c].trainable}
    assert plan.step_s >= max(plan.busy_s.values()) - 1e-9


def fewest_by_keeping(trace: Trace, budget: int) -> int:
    """Bytes that a step moves with nothing resident, when `keep` says what stays."""
    lifetimes = Lifetimes(trace)
    kept = keep(lifetimes, frozenset(), budget, 0)
    size = [chunk.param_bytes for chunk in trace.chunks]
    fetched = sum(size[chunk] for _, chunk in lifetimes.fresh)
    reduced = sum(size[moment.chunks[0]] for moment in trace.moments if moment.kind == "reduce")
    return fetched + reduced + sum(gap.cost_bytes for gap in lifetimes.gaps if gap not in kept)


@given(traces(most_chunks=4, uniform=True), st.data())
@settings(max_examples=80, deadline=None)
def test_of_chunks_of_one_size_the_best_ones_stay(trace, data):
    budget = data.draw(budgets(trace))
    assert fewest_by_keeping(trace, budget) == least(trace, budget, frozenset()) <= lru(trace, budget)


@given(traces(), st.data(), st.integers(0, 2))
@settings(max_examples=80, deadline=None)
def test_what_could_stay_stays(trace, data, slack):
    """Of any sizes: there is no buffer that leaves although there is room for it until it is needed again."""
    budget, lifetimes = data.draw(budgets(trace)), Lifetimes(trace)
    room = np.maximum(budget - lifetimes.occupied(frozenset()) - slack, 0)
    kept = keep(lifetimes, frozenset(), budget, slack)
    for gap in kept:
        for begin, end in lifetimes.stretches(gap):
            room[begin:end] -= gap.size_bytes
    assert room.min(initial=0) >= 0
    for gap in (gap for gap in lifetimes.gaps if gap not in kept):
        assert any((room[begin:end] < gap.size_bytes).any() for begin, end in lifetimes.stretches(gap))


def drawn(examples: int, number: int):
    """The same cases every time, whatever the test's text."""
    plan = settings(max_examples=examples, deadline=None, database=None, phases=[Phase.generate])
    return lambda test: seed(number)(plan(test))


def test_plans_move_few_bytes_more_than_the_fewest_possible_and_far_fewer_than_lru():
    """Chunks of any size, anything resident; nothing takes time, so only bytes count. The sum over all drawn cases."""
    moved = fewest = by_lru = 0

    @drawn(300, 0)
    @given(traces(most_chunks=4), st.data())
    def each(trace, data):
        nonlocal moved, fewest, by_lru
        trace = replace(trace, moments=tuple(replace(moment, seconds=0.0) for moment in trace.moments))
        budget = data.draw(budgets(trace))
        best = min(least(trace, budget, resident) for resident in subsets(range(len(trace.chunks))))
        mine = plan_residency(trace, budget, NO_TIME).moved_bytes
        assert mine >= best
        moved, fewest, by_lru = moved + mine, fewest + best, by_lru + lru(trace, budget)

    each()
    assert fewest > 2000
    assert moved <= 1.01 * fewest
    assert moved <= 0.75 * by_lru


def shortest_step_s(trace: Trace, budget: int, bandwidth: Bandwidth) -> float:
    """Of all sets of resident chunks and of gaps to keep that fit, each walked through."""
    lifetimes, shortest = Lifetimes(trace), math.inf
    for resident in subsets(range(len(trace.chunks))):
        gaps = [gap for gap in lifetimes.gaps if gap.chunk not in resident]
        for kept in subsets(range(len(gaps))):
            load = lifetimes.occupied(resident)
            for gap in (gaps[index] for index in kept):
                for begin, end in lifetimes.stretches(gap):
                    load[begin:end] += gap.size_bytes
            if (load <= budget).all():
                walked = run(lifetimes, resident, frozenset(gaps[index] for index in kept), budget, bandwidth)
                shortest = min(shortest, walked.step_s)
    return shortest


def test_steps_take_little_longer_than_the_shortest_possible():
    planned_s = shortest_s = 0.0
    num_cases = 0

    @drawn(150, 0)
    @given(traces(most_chunks=3), st.data(), st.sampled_from([EVEN, replace(EVEN, host_update=100.0), LINK_ONLY]))
    def each(trace, data, bandwidth):
        nonlocal planned_s, shortest_s, num_cases
        budget = data.draw(budgets(trace))
        if len(Lifetimes(trace).gaps) > 6:  # all subsets of those
            return
        mine, best = plan_residency(trace, budget, bandwidth).step_s, shortest_step_s(trace, budget, bandwidth)
        assert best - 1e-9 <= mine <= 1.1 * best + 1e-9
        planned_s, shortest_s, num_cases = planned_s + mine, shortest_s + best, num_cases + 1

    each()
    assert num_cases > 50
    assert planned_s <= 1.02 * shortest_s


def tied(num_blocks: int) -> Trace:
    """Encoder blocks 1, 2, … between an embedding (chunk 0) and the head that shares its weight."""
    trace = transformer(num_blocks, activation_bytes=30, frozen=num_blocks)
    head = [Moment(kind, "head", (0,), 30 * num_blocks, 1.0) for kind in ("forward", "backward")]
    return replace(trace, moments=(*trace.moments[:num_blocks], *head, *trace.moments[num_blocks:]))


@pytest.mark.parametrize("room", [2, 3, 5, 8])
@pytest.mark.parametrize("trace", [transformer(12, 30, frozen=12), tied(12)], ids=["activations", "tied"])
def test_moves_fewer_bytes_than_lru_on_transformers(room, trace):
    """Activations take room and give it back, or the embedding is used at both ends: the past misleads."""
    budget = smallest_budget(trace) + (room - 1) * 100
    assert plan_residency(trace, budget, LINK_ONLY).moved_bytes < lru(trace, budget)


@pytest.mark.parametrize("room", [2, 5, 11])
def test_as_few_bytes_as_lru_where_nothing_can_beat_it(room):
    """Blocks forwards, then in reverse, and room that does not change: longest ago is farthest ahead."""
    trace = transformer(12, frozen=12)
    plan = plan_residency(trace, 100 * room, LINK_ONLY)
    assert plan.moved_bytes == lru(trace, 100 * room) == 200 * (12 - room)


def test_a_cyclic_order_is_where_lru_is_worst():
    """Evaluation, block after block, with one buffer too few: LRU fetches every block, the plan one in each step."""
    chunks = tuple(ChunkInfo(i, 100, 0, 0, False) for i in range(6))
    trace = Trace(tuple(Moment("forward", f"{i}", (i,), 0, 1.0) for i in range(6)), chunks)
    assert lru(trace, 500) == 600
    plan = plan_residency(trace, 500, LINK_ONLY)
    assert plan.moved_bytes <= 200
    assert replay(trace, plan).to_device_bytes == plan.moved_bytes


def test_by_hand_one_buffer():
    """Two blocks, room for one: each comes for the forward, and for the backward the one that is not there."""
    trace = transformer(2)
    plan = plan_residency(trace, 100, EVEN, "auto")
    assert plan.resident == frozenset()
    # 0 and 1 for the forward, 1 stays for its backward, 0 comes back: 3 fetches; two gradients to the host.
    assert (plan.to_device_bytes, plan.to_host_bytes) == (300, 200)
    assert plan.moves[1] == (Move("evict", 0), Move("fetch", 1))
    assert plan.moves[2] == ()
    assert plan.moves[4] == (Move("release", 1), Move("fetch", 0))
    assert plan.host_bytes == 2 * (2 * 100 + 600)
    assert smallest_budget(trace) == 100


def test_by_hand_seconds_of_one_buffer():
    """Nothing overlaps but the two directions: fetches wait for the buffer, updates for the end of the step."""
    trace = transformer(2, block_seconds=7.0)
    plan = plan_residency(trace, 100, EVEN, "auto")
    # host: 2 x 600 bytes at 1; block 0 is fetched for the next step beside the host's update of block 1.
    forward = 7 + 50 + 7
    backward = 14 + 50 + 50 + 14 + 50  # 1, its gradient leaves, 0 comes, 0, its gradient leaves
    assert plan.step_s == pytest.approx(1200 + forward + backward)
    assert plan.bound == "host_update"
    assert plan.busy_s == pytest.approx({"compute": 42.0, "to_device": 150.0, "to_host": 100.0, "host_update": 1200.0})


def test_what_fits_is_not_offloaded_at_all():
    trace = transformer(6, activation_bytes=10)
    everything = 6 * 700 + 60
    plan = plan_residency(trace, everything, EVEN)
    assert plan.resident == plan.device_updated == plan.start == frozenset(range(6))
    assert (plan.moved_bytes, plan.host_bytes, plan.device_peak_bytes) == (0, 0, everything)
    assert not any(plan.moves)
    assert plan.step_s == pytest.approx(18 + 6 * 600 / 100)
    assert plan_residency(trace, everything - 1, EVEN).moved_bytes > 0


def test_fetching_ahead_hides_the_link_where_there_is_room():
    """Computing takes longer than the link: with a second buffer the link costs nothing but the end of the step."""
    fast = Bandwidth(to_device=1000.0, to_host=1000.0, host_update=math.inf, device_update=math.inf)
    trace = transformer(8)
    one, two = (plan_residency(trace, 100 * n, fast, "cpu").step_s for n in (1, 2))
    assert one > 24 + 8 * 0.1 + 7 * 0.1
    assert two == pytest.approx(24.0, abs=0.35)
    single = plan_residency(trace, 100, fast, "cpu").moves
    ahead = {moment.kind for moment, moves in zip(trace.moments, single) if "prefetch" in dict(moves)}
    assert ahead == {"update"}  # the next step's first chunk, when nothing else wants the buffer


def test_slack_for_fetching_ahead_is_left_where_it_pays():
    """Keeping buffers until the backward saves bytes that a fast link moves for nothing, and would leave no room."""
    fast = Bandwidth(to_device=150.0, to_host=1e6, host_update=math.inf, device_update=math.inf)
    trace = transformer(12)
    plan = plan_residency(trace, 300, fast)
    assert plan.step_s == pytest.approx(36.0, rel=0.03)
    assert replay(trace, plan).to_device_bytes == plan.to_device_bytes


def test_the_slower_the_host_updates_the_more_is_updated_on_the_device():
    trace = transformer(12, activation_bytes=5)
    found = [
        len(plan_residency(trace, 3000, replace(EVEN, to_device=50.0, to_host=50.0, host_update=speed)).device_updated)
        for speed in (1e6, 1000.0, 10.0, 0.1)
    ]
    assert found == sorted(found)
    assert found[-1] == (3000 - 60 - 100) // 700 > 0


def test_policies_differ_where_they_should():
    trace = transformer(10)
    auto, static, cpu = (plan_residency(trace, 2500, EVEN, policy) for policy in ("auto", "static", "cpu"))
    assert cpu.resident == frozenset()
    # Every block twice, but for the last one, whose backward follows on its forward.
    assert (cpu.to_device_bytes, cpu.to_host_bytes) == (1900, 1000)
    assert len(static.resident) == 3
    assert auto.step_s <= static.step_s <= cpu.step_s
    assert auto.moved_bytes < static.moved_bytes < cpu.moved_bytes


def test_gradients_in_a_buffer_are_written_before_it_leaves():
    chunks = (ChunkInfo(0, 10, 10, 0, True), ChunkInfo(1, 10, 0, 0, False))
    moments = (
        Moment("forward", "a", (0,), 0, 1.0),
        Moment("backward", "a", (0,), 0, 1.0, (0,)),
        Moment("backward", "b", (1,), 0, 1.0),
        Moment("backward", "a", (0,), 0, 1.0, (0,)),
        Moment("reduce", "0", (0,), 0, 0.0),
        Moment("update", "0", (0,), 0, 0.0),
    )
    trace = Trace(moments, chunks)
    plan = plan_residency(trace, 10, EVEN)
    assert plan.moves[2] == (Move("evict", 0), Move("fetch", 1))
    assert plan.to_host_bytes == 20  # once half full, once whole
    assert plan_residency(trace, 20, EVEN).to_host_bytes == 10


def test_of_two_buffers_the_one_without_gradients_leaves():
    """Its next use is nearer, but it need not be written."""
    chunks = (ChunkInfo(0, 10, 10, 0, True), *(ChunkInfo(i, 10, 0, 0, False) for i in (1, 2)))
    moments = (
        Moment("backward", "ab", (0, 1), 0, 1.0, (0,)),
        Moment("backward", "c", (2,), 0, 1.0),
        Moment("backward", "b", (1,), 0, 1.0),
        Moment("backward", "a", (0,), 0, 1.0, (0,)),
        Moment("reduce", "0", (0,), 0, 0.0),
        Moment("update", "0", (0,), 0, 0.0),
    )
    plan = plan_residency(Trace(moments, chunks), 20, EVEN)
    assert plan.moves[1] == (Move("evict", 1), Move("fetch", 2))
    assert plan.to_host_bytes == 10


def test_a_budget_that_cannot_work_names_the_smallest_that_does():
    trace = transformer(4, activation_bytes=2**20)
    enough = smallest_budget(trace)
    with pytest.raises(UserError, match=r"0\.005 GiB|5\.001 MiB|4\.001 MiB") as refused:
        plan_residency(trace, enough - 1, EVEN)
    assert "\n" not in str(refused.value)
    given_back = float(str(refused.value).split("at least ")[1].split(" MiB")[0]) * 2**20
    assert given_back >= enough
    assert plan_residency(trace, math.floor(given_back), EVEN).device_peak_bytes <= given_back


def test_a_host_that_is_too_small_is_refused_and_a_small_one_gets_less():
    trace = transformer(4)
    assert plan_residency(trace, 1500, EVEN, host_budget_bytes=1600).host_bytes <= 1600
    with pytest.raises(HostTooSmall, match="the host has") as refused:
        plan_residency(trace, 200, EVEN, host_budget_bytes=1600)
    least = refused.value.least_bytes
    assert plan_residency(trace, 200, EVEN, host_budget_bytes=least).host_bytes == least
    with pytest.raises(HostTooSmall):
        plan_residency(trace, 200, EVEN, host_budget_bytes=least - 1)
    with pytest.raises(UserError, match="auto, static, cpu"):
        plan_residency(trace, 200, EVEN, "gpu")


def test_the_plan_in_one_line():
    line = plan_residency(transformer(4), 1500, EVEN).describe()
    assert "\n" not in line
    assert "2 chunks live on the device, 2 on the host" in line


@pytest.mark.parametrize(
    ("moments", "complaint"),
    [
        ((Moment("forward", "m", (2,), 0, 0.0),), "there is no chunk 2"),
        ((Moment("backward", "m", (1,), 0, 0.0, (1,)),), "chunk 1 does not learn"),
        ((Moment("reduce", "m", (0,), 0, 0.0),), "reduced and then not updated"),
        ((Moment("update", "m", (0,), 0, 0.0),), "has not been reduced"),
        ((Moment("reduce", "m", (), 0, 0.0),), "about one chunk"),
        (
            (
                Moment("reduce", "m", (0,), 0, 0.0),
                Moment("update", "m", (0,), 0, 0.0),
                Moment("forward", "m", (0,), 0, 0.0),
            ),
            "chunk 0 has been updated before",
        ),
    ],
)
def test_what_is_no_trace(moments, complaint):
    with pytest.raises(ValueError, match=complaint):
        Trace(moments, (ChunkInfo(0, 1, 1, 1, True), ChunkInfo(1, 1, 0, 0, False)))
    with pytest.raises(ValueError, match="numbered"):
        Trace((), (ChunkInfo(1, 1, 1, 1, True),))


def test_a_large_trace_is_planned_in_seconds():
    trace = transformer(200, activation_bytes=5)
    plan = plan_residency(trace, 30_000, EVEN)
    assert replay(trace, plan).device_bytes == plan.device_bytes
    assert plan.resident


def test_gradients_that_come_in_another_order_are_no_new_step() -> None:
    """Else the moves of a whole step would be made once more."""
    chunks = tuple(ChunkInfo(k, 8, 8, 16, True) for k in range(2))
    moments = (
        Moment("forward", "layer", (0, 1), 0, 1.0),
        Moment("backward", "layer", (0, 1), 0, 1.0, (0, 1)),
        *(Moment("reduce", name, (k,), 0, 0.0) for k, name in enumerate(("weight", "bias"))),
        *(Moment("update", name, (k,), 0, 0.0) for k, name in enumerate(("weight", "bias"))),
    )
    schedule = Schedule(Trace(moments, chunks))
    step = [("forward", "layer"), ("backward", "layer"), ("reduce", "bias"), ("reduce", "weight")]
    for _ in range(2):
        found = [schedule.advance(kind, name) for kind, name in step]
        assert found == [range(1), range(1, 2), range(2, 4), range(0)]
        assert [schedule.advance("update", name) for name in ("weight", "bias")] == [range(4, 5), range(5, 6)]
