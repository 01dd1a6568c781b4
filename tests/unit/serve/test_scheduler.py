"""The scheduler as a function of counts; and with real bookkeeping of pages, over random loads."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.serve.loop import EngineLoop, Failed
from apps.serve.metrics import Metrics
from apps.serve.request import State
from apps.serve.scheduler import Limits, SequenceCounts, schedule
from core.config import UserError
from tests.support.serving import Written, expected, greedy, random_aborts, run, stand_in_engine

LIMITS = Limits(page_size=4, max_batch_tokens=16, prefill_chunk=6, max_running=4)


def test_limits():
    with pytest.raises(UserError, match="give at least 65"):
        Limits(max_batch_tokens=64, max_running=64)
    with pytest.raises(UserError, match="page_size is 0"):
        Limits(page_size=0)


def test_a_writer_keeps_prompts_to_a_chunk():
    """Alone a prompt may fill the step; beside a decoding sequence it gets prefill_chunk tokens."""
    prompt = SequenceCounts(1, num_tokens=40)
    assert schedule([prompt], [], 100, LIMITS).parts == ((1, 16),)
    decoding = SequenceCounts(0, num_tokens=9, num_computed=8, num_pages=2)
    batch = schedule([prompt], [decoding], 100, LIMITS)
    assert batch.parts == ((0, 1), (1, 6))
    assert batch.admitted == (1,)


def test_the_youngest_is_preempted():
    sequences = [SequenceCounts(n, num_tokens=9, num_computed=8, num_pages=2, returns=2) for n in range(3)]
    batch = schedule([SequenceCounts(3, num_tokens=1)], sequences, 1, LIMITS)
    assert batch.preempted == (2,)
    assert batch.parts == ((0, 1), (1, 1))
    assert batch.admitted == ()


def test_nobody_overtakes():
    """A large one at the head of the queue is waited for, though a small one would fit."""
    large, small = SequenceCounts(1, num_tokens=30), SequenceCounts(2, num_tokens=2)
    running = [SequenceCounts(0, num_tokens=9, num_computed=8, num_pages=2)]
    assert schedule([large, small], running, 5, LIMITS).admitted == ()
    assert schedule([small, large], running, 5, LIMITS).admitted == (2,)


def test_shared_pages_that_nobody_holds_are_no_room():
    """Ten tokens of which eight are found in two idle pages: the pages are taken out of the free ones."""
    sequence = SequenceCounts(0, num_tokens=10, num_computed=8, num_pages=2, claims=2)
    assert schedule([sequence], [], 2, LIMITS).admitted == ()
    assert schedule([sequence], [], 3, LIMITS).parts == ((0, 2),)
    assert schedule([replace(sequence, claims=0)], [], 1, LIMITS).parts == ((0, 2),)


def test_what_runs_is_promised_its_pages():
    """A prompt that is half computed needs two more pages; a newcomer gets what is left."""
    half = SequenceCounts(0, num_tokens=14, num_computed=6, num_pages=2)
    assert schedule([SequenceCounts(1, num_tokens=3)], [half], 2, LIMITS).admitted == ()
    assert schedule([SequenceCounts(1, num_tokens=3)], [half], 3, LIMITS).admitted == (1,)


@st.composite
def loads(draw):
    page_size = draw(st.sampled_from([1, 2, 4]))
    max_running = draw(st.integers(1, 5))
    limits = Limits(
        page_size, max_running + draw(st.integers(1, 12)), draw(st.integers(1, 8)), max_running
    )  # fmt: skip
    # Few different tokens, so that prompts begin alike and leave each other within pages.
    prompts = draw(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=14), min_size=1, max_size=8))
    lengths = draw(st.lists(st.integers(1, 8), min_size=len(prompts), max_size=len(prompts)))
    largest = max(len(p) + n for p, n in zip(prompts, lengths))
    num_pages = limits.pages(largest) + 1 + draw(st.integers(0, 8))
    arrivals = draw(st.lists(st.integers(0, 6), min_size=len(prompts), max_size=len(prompts)))
    aborts = draw(st.dictionaries(st.integers(0, len(prompts) - 1), st.integers(0, 20), max_size=2))
    return limits, num_pages, list(zip(prompts, lengths, arrivals)), aborts, draw(st.booleans())


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(loads())
def test_random_loads(load):
    """Everybody gets the right tokens, whatever is shared, preempted and aborted; no page leaks; budgets hold."""
    limits, num_pages, asked, aborts, sharing = load
    engine = stand_in_engine(num_pages, limits, sharing)
    written, aborted, idle_steps = Written(), set(), 0
    for time in range(2000):
        for number, (prompt, length, arrival) in enumerate(asked):
            if arrival == time:
                engine.submit(greedy(str(number), prompt, length))
        for number, when in aborts.items():
            if when == time and engine.abort(str(number)):
                aborted.add(number)
        if not engine.has_work:
            if time > 20:
                break
            continue
        before = engine.counts.steps
        decoding = any(len(s.tokens) - s.num_computed == 1 for s in engine.running)
        written.take(engine.step())
        idle_steps = idle_steps + 1 if engine.counts.steps == before else 0
        assert idle_steps < 2, "nobody advances"
        assert len(engine.running) <= limits.max_running
        if engine.counts.steps > before:
            step = engine.runner.steps[-1]
            assert len(step.ids) <= limits.max_batch_tokens
            prompt_tokens = sum(b - a for a, b in zip(step.starts, step.starts[1:]) if b - a > 1)
            assert not decoding or prompt_tokens <= limits.prefill_chunk
    else:
        raise AssertionError("somebody starves")
    assert engine.pages.num_free == num_pages
    for number, (prompt, length, _) in enumerate(asked):
        if number not in aborted:
            assert written.ids(str(number)) == expected(prompt, length)
            assert written.finish[str(number), 0] == "length"


def test_scarce_pages_preempt_and_shared_ones_are_found():
    """What the random loads are about does happen."""
    limits = Limits(page_size=2, max_batch_tokens=32, prefill_chunk=8, max_running=4)
    engine = stand_in_engine(9, limits)
    written = run(engine, [greedy(str(n), [n, n, n], 10) for n in range(4)])
    assert engine.counts.preemptions > 0
    assert all(written.ids(str(n)) == expected([n, n, n], 10) for n in range(4))
    engine = stand_in_engine(50, limits)
    written = run(engine, [greedy("a", [1, 2, 3, 4, 5, 6, 7], 3)])
    before = engine.counts.computed_tokens
    written = run(engine, [greedy("b", [1, 2, 3, 4, 5, 9], 3)])
    assert engine.counts.cached_tokens == 5  # two pages, and the first half of the third
    assert engine.counts.page_copies == 1
    assert engine.counts.computed_tokens - before == 1 + 2
    assert written.ids("b") == expected([1, 2, 3, 4, 5, 9], 3)
    assert written.prompts["b"].cached_tokens == 5


def test_sequences_of_one_request_share_its_prompt():
    limits = Limits(page_size=2, max_batch_tokens=32, prefill_chunk=8, max_running=8)
    engine = stand_in_engine(60, limits)
    prompt = [1, 2, 3, 4, 5, 6, 7]
    written = run(engine, [greedy("a", prompt, 4, num_sequences=3)])
    assert [written.ids("a", i) for i in range(3)] == [expected(prompt, 4)] * 3
    assert engine.counts.cached_tokens == 2 * 6


def test_requests_that_leave_at_any_time_leak_nothing():
    """tests/soak does it ten thousand times, and with a real model."""
    engine = stand_in_engine(120, Limits(page_size=4, max_batch_tokens=64, prefill_chunk=32, max_running=16))
    written = random_aborts(engine, 800)
    assert engine.counts.aborted > 150
    assert engine.pages.num_free == 120
    assert len(written.finish) + engine.counts.aborted == 800


@pytest.mark.parametrize("state", ["sent", "queued", "prefilling", "decoding"])
def test_who_leaves_is_gone_within_one_tick(state):
    """Whatever the request was doing: the next step is without it, and its pages are free."""
    limits = Limits(page_size=4, max_batch_tokens=9, prefill_chunk=8, max_running=1 if state == "queued" else 4)
    engine, events = stand_in_engine(40, limits, sharing=False), []
    loop = EngineLoop("stand-in", engine, 10, Metrics())
    if state == "queued":
        loop.submit(greedy("other", [1], 5), lambda event: None)
        loop._tick()
    loop.submit(greedy("mine", range(30) if state == "prefilling" else [1, 2, 3], 9), events.append)
    if state != "sent":
        loop._tick()
    found = {s.request.id: s.state for s in (*engine.waiting, *engine.running)}.get("mine")
    assert found is {"sent": None, "queued": State.WAITING}.get(state, State.RUNNING)
    assert (engine.running[-1].num_written > 0 if engine.running else False) == (state in ("decoding", "queued"))
    loop.abort("mine")
    loop._tick()
    assert [s.request.id for s in (*engine.waiting, *engine.running)] == (["other"] if state == "queued" else [])
    assert engine.pages.num_free == 40 - (state == "queued")
    assert loop.num_open == (state == "queued")
    assert events[-1] == Failed("aborted")
