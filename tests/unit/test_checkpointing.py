"""The solver's segments are the best there are, within every budget, and what the named ones take is as published."""

import math
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from core.auto.checkpointing import fastest, frontier
from core.trace.chain import Chain, ChainBlock, Kept, Line, simulate, stage_of, textbook_chain
from core.trace.segments import (
    NAMED,
    Away,
    Form,
    Lean,
    Segments,
    check_segments,
    first_blocks,
    is_kept,
    num_blocks_of,
    of_blocks,
    recursive_segments,
    runs_of,
    size_of,
    sqrt_segments,
)
from tests.support.chains import RESULTS, best_seconds, random_chain, random_segments


def unit_chain(num_blocks: int) -> Chain:
    """Blocks that hand on one byte and keep two."""
    chain = textbook_chain([1] * (num_blocks + 1), [2] * num_blocks, [1.0] * num_blocks, [2.0] * num_blocks)
    lean = {results: replace(chain.blocks[0].whole, again_s=1.0) for results in RESULTS} if num_blocks else {}
    return replace(chain, blocks=tuple(replace(of, lean=lean) for of in chain.blocks))


@pytest.mark.parametrize("num_blocks", [*range(1, 18), 24, 25, 26, 96, 100])
def test_segments_of_sqrt(num_blocks: int) -> None:
    """As published: about sqrt(l) segments of sqrt(l) blocks, every block but those of the last run twice."""
    segments, root = sqrt_segments(num_blocks), math.isqrt(num_blocks - 1) + 1
    sizes = [item if isinstance(item, int) else num_blocks_of(item) for item in segments]
    assert len(sizes) == root
    assert sum(sizes) == num_blocks
    assert max(sizes) - min(sizes) <= 1
    assert runs_of(segments) == [2] * (num_blocks - sizes[-1]) + [1] * sizes[-1]
    step = simulate(unit_chain(num_blocks), segments)
    assert step.runs == tuple(runs_of(segments))
    assert step.peak_bytes <= 3 * root + 2  # inputs of root - 1 segments, all of root blocks, what is on its way
    assert step.again_s == num_blocks - sizes[-1]


@pytest.mark.parametrize("power", range(9))
def test_segments_of_recursion(power: int) -> None:
    """As published: log2(l) inputs at once, and l log2(l) / 2 blocks run again."""
    num_blocks = 2**power
    segments = recursive_segments(num_blocks)
    assert sum(runs_of(segments)) == num_blocks + num_blocks * power // 2
    assert max(runs_of(segments)) == power + 1
    step = simulate(unit_chain(num_blocks), segments)
    assert step.runs == tuple(runs_of(segments))
    assert step.peak_bytes == power + 4
    assert step.forward_bytes == power + 2


@pytest.mark.parametrize("num_blocks", [*range(20), 31, 33])
@pytest.mark.parametrize("name", NAMED)
def test_named_segments_are_of_so_many_blocks(name: str, num_blocks: int) -> None:
    segments = NAMED[name](num_blocks)
    assert check_segments(segments, num_blocks) == segments
    assert num_blocks == 0 or is_kept(segments)[-1]


def test_blocks_that_keep_results_run_again_once() -> None:
    assert runs_of((Lean(2, "products"), ((1,), 1), 1)) == [2, 2, 3, 2, 1]
    assert runs_of(((1, Lean(2, "linear")), 1)) == [2, 3, 2, 1]  # the last one's backward comes at once
    assert is_kept((Lean(1, "linear"), 2)) == [False, True, True]
    assert check_segments([Lean(2, "attention"), [1]], 3) == (Lean(2, "attention"), (1,))
    with pytest.raises(ValueError, match="blocks keep attention or linear or products"):
        check_segments((2, (Lean(1, "norms"),)), 3)  # pyright: ignore[reportArgumentType]


def test_segments_are_counted_and_cut() -> None:
    assert first_blocks((Lean(3, "linear"), 1), 2) == (Lean(2, "linear"),)
    assert of_blocks((Lean(3, "linear"), 2, ((1,), 1)), range(2, 6)) == (Lean(1, "linear"), 2, ((1,),))
    segments: Segments = (2, (((1,), 1), 3), ((1,),))
    assert num_blocks_of(segments) == 8
    assert runs_of(segments) == [1, 1, 4, 3, 2, 2, 2, 2]
    assert is_kept(segments) == [True, True, *[False] * 6]
    assert first_blocks(segments, 4) == (2, (((1,), 1),))
    assert first_blocks(segments, 10) == (*segments, 2)
    assert first_blocks((), 3) == (3,)


@pytest.mark.parametrize("segments", [(3,), (), ((),), (0, 2), (True, 1), ("2",), (-1, 3), 2, ((1,), [1, 0])])
def test_what_are_no_segments_of_two_blocks(segments) -> None:
    with pytest.raises(ValueError, match="segments"):
        check_segments(segments, 2)


TELLING = [(0, 3), (21, 3), (24, 3), (2, 4), (5, 4), (9, 4), (17, 4), (20, 4), (22, 4)]
"""Where blocks that run again keep results alone, or where no segment may be of several."""


@pytest.mark.parametrize(("seed", "num_blocks"), [*((seed, 1 + seed % 4) for seed in range(8)), *TELLING])
def test_the_frontier_is_the_best_of_all_schedules(seed: int, num_blocks: int) -> None:
    agrees(random.Random(seed), num_blocks)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(300))
def test_the_frontier_is_the_best_of_all_schedules_of_longer_chains(seed: int) -> None:
    agrees(random.Random(seed), num_blocks=(2, 3, 4, 5, 6)[seed % 5])


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("num_blocks", [7, 8, 9, 10])
def test_and_of_ten_blocks_at_some_budgets(num_blocks: int) -> None:
    agrees(random.Random(num_blocks), num_blocks, num_budgets=5)


def agrees(draw: random.Random, num_blocks: int, num_budgets: int | None = None) -> None:
    chain = random_chain(draw, num_blocks)
    choices = frontier(chain, slots=1000)  # a byte each
    peaks = [choice.peak_bytes for choice in choices]
    budgets = range(peaks[0] - 1, peaks[-1] + 2)
    if num_budgets is not None:
        budgets = sorted(draw.sample(budgets, min(num_budgets, len(budgets))))
    for budget in budgets:
        found = fastest(choices, budget)
        assert best_seconds(chain, budget) == (math.inf if found is None else pytest.approx(found.step.seconds))


@pytest.mark.parametrize("seed", range(3))
def test_no_budget_is_exceeded_and_more_is_never_slower(seed: int) -> None:
    """Nor does more of it take less memory; coarse slots change none of that."""
    draw = random.Random(seed)
    chain = random_chain(draw, 14, most=10**7)
    choices = frontier(chain, slots=60)
    for smaller, larger in pairwise(choices):
        assert smaller.peak_bytes < larger.peak_bytes
        assert smaller.step.seconds > larger.step.seconds
    for choice in choices:
        assert simulate(chain, choice.segments) == choice.step
        assert check_segments(choice.segments, 14) == choice.segments
        begins = [k for k, of in enumerate(chain.blocks) if of.begins]
        assert all(k in begins_of(choice.segments) for k in begins)
    least, most = choices[0].peak_bytes, choices[-1].peak_bytes
    for step in range(40):
        budget = least + (most - least) * step // 39
        found = fastest(choices, budget)
        assert found is not None
        assert found.peak_bytes <= budget
    assert fastest(choices, least - 1) is None
    assert choices[-1].segments == (14,)


def begins_of(segments: Segments) -> set[int]:
    """Blocks that no segment goes on over."""
    found, index = set[int](), 0
    for item in segments:
        size = size_of(item)
        found |= {index} if isinstance(item, tuple) else set(range(index, index + size))
        index += size
    return found


@pytest.mark.parametrize("seed", range(10))
def test_what_is_counted_of_segments_is_what_the_simulator_runs(seed: int) -> None:
    draw = random.Random(seed)
    segments = random_segments(draw, 7)
    step = simulate(unit_chain(7), segments)
    assert step.runs == tuple(runs_of(segments))
    assert step.again_s == sum(step.runs) - 7


@pytest.mark.parametrize("segments", [(5,), ((1,), (1,), (1,), (1,), (1,)), ((2,), Lean(1, "linear"), 2)])
def test_each_microbatch_in_flight_holds_what_a_forward_leaves(segments: Segments) -> None:
    chain = unit_chain(7)
    stage = stage_of(chain, range(1, 6), flying=3)
    assert [of.input for of in stage.blocks] == [0, 1, 1, 1, 1]
    alone, three = simulate(replace(stage, flying=1), segments), simulate(stage, segments)
    handed_on = 0 if is_kept(segments)[-1] else stage.output
    assert three.peak_bytes == alone.peak_bytes + 2 * (alone.forward_bytes + handed_on)
    assert (three.runs, three.seconds) == (alone.runs, alone.seconds)
    peaks = [choice.peak_bytes for choice in frontier(stage)]
    assert peaks[0] < peaks[-1] == simulate(stage, (5,)).peak_bytes


def test_of_a_microbatch_in_flight_what_waits_elsewhere_is_gone_but_for_the_last_block_that_ran() -> None:
    """By hand: of three blocks that send 3 of their 4 bytes each, 1 of each stays of the first and the third microbatch
    of three in flight; of the one that ran last the last block is there, and of the one that runs back all that is."""
    whole = Kept(peak=4, num_bytes=4, back=1, backward_peak=0)
    away: dict[Form, Kept] = {"host": replace(whole, away=3, send_s=1.0, fetch_s=1.0)}
    block = ChainBlock(0, 0, 1, 1, whole, 4, 4, 0, 1.0, 1.0, 2.0, away=away)
    chain = Chain((block,) * 3, output=1, head=1, lines={"host": Line(1.0, 1.0, overlaps=True)})
    alone, three = (simulate(replace(chain, flying=flying), (Away(3, "host"),)) for flying in (1, 3))
    assert alone.forward_bytes == 1 + 1 + 4
    assert three.peak_bytes == alone.peak_bytes + 3 + 3 + 3
    assert three.standing_bytes == 3 * 3 + 3
    assert three.seconds == alone.seconds + 1.0  # the last block's values come back, which nothing runs beside
    few = {flying: frontier(replace(chain, flying=flying)) for flying in (2, 5)}
    kept = {flying: simulate(replace(chain, flying=flying), (3,)).peak_bytes for flying in few}
    assert few[5][0].peak_bytes < kept[5] - 3 * 3 * 2
    for choices in few.values():
        assert all(a.peak_bytes < b.peak_bytes and a.step.seconds > b.step.seconds for a, b in pairwise(choices))


def test_a_chain_of_one_block_and_of_none() -> None:
    assert [choice.segments for choice in frontier(textbook_chain([1, 1], [5], [1.0], [1.0]))] == [(1,)]
    assert [choice.segments for choice in frontier(textbook_chain([1], [], [], []))] == [()]
