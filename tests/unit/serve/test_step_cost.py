"""What a step costs beside the model, counted: it grows with what runs, not with its square or with what is cached."""

import random
from dataclasses import dataclass

import pytest

from apps.serve import pages as bookkeeping
from apps.serve.pages import Pages
from apps.serve.scheduler import Limits, SequenceCounts, schedule
from tests.support.serving import greedy, stand_in_engine


@dataclass(frozen=True)
class Counted(SequenceCounts):
    """Says how often the scheduler looked at it."""

    looks = 0

    @property
    def remaining(self) -> int:
        type(self).looks += 1
        return super().remaining


@pytest.mark.parametrize("num_running", [100, 1000])
def test_the_scheduler_looks_at_each_sequence_a_few_times(num_running, monkeypatch):
    limits = Limits(max_batch_tokens=4096, max_running=num_running)
    monkeypatch.setattr(Counted, "looks", 0)
    running = [Counted(number, num_tokens=100, num_computed=99, num_pages=7) for number in range(num_running)]
    assert len(schedule([], running, 5000, limits).parts) == num_running
    assert Counted.looks <= 8 * num_running


@pytest.mark.parametrize("num_cached", [50, 1000])
def test_what_is_cached_is_found_without_going_through_it(num_cached, monkeypatch):
    """A thousand texts that begin with the same token, as all of a family do: a match compares with a few of them."""
    dice, pages, size = random.Random(0), Pages(4 * num_cached, 8), 8
    texts = [[1, *(dice.randrange(50) for _ in range(3 * size))] for _ in range(num_cached)]
    for text in texts:
        held = pages.claim(pages.match(text))
        pages.grow(held, len(text))
        pages.commit(held, text, len(text))
        pages.give_back(held)
    compared = []
    common = bookkeeping._common
    monkeypatch.setattr(bookkeeping, "_common", lambda a, b: compared.append(1) or common(a, b))
    for text in texts[:10]:
        assert pages.num_tokens(pages.match(text)) == 3 * size
        changed = [*text[:size], *text[size : size + 3], 99, *text[size + 4 :]]
        longest = max(common(tuple(t[size : 2 * size]), tuple(changed[size : 2 * size])) for t in [text])
        assert pages.num_tokens(pages.match(changed)) == size + longest == size + 3
        other = [*text[:5], 99, *text[6:]]
        assert pages.num_tokens(pages.match(other)) >= 5
    assert len(compared) <= 60


def test_the_most_alike_page_is_found():
    """Against going through all of them, on pages of few different tokens."""
    dice, size = random.Random(1), 4
    for _ in range(200):
        pages = Pages(100, size)
        texts = [[dice.randrange(3) for _ in range(size + 1)] for _ in range(12)]
        for text in texts:
            held = pages.claim(pages.match(text))
            pages.grow(held, len(text))
            pages.commit(held, text, len(text))
            pages.give_back(held)
        wanted = [dice.randrange(3) for _ in range(dice.randint(1, size + 2))]
        rest = tuple(wanted[: min(size, len(wanted) - 1)])
        best = max(bookkeeping._common(tuple(text[:size]), rest) for text in texts)
        assert pages.num_tokens(pages.match(wanted)) == best


def test_held_pages_are_not_counted_while_there_are_enough(monkeypatch):
    """How many pages a preemption would bring is asked for where somebody may be preempted."""
    limits, asked = Limits(page_size=2, max_batch_tokens=40, prefill_chunk=40, max_running=8), []
    engine = stand_in_engine(200, limits)
    count = engine.pages.num_returned
    monkeypatch.setattr(engine.pages, "num_returned", lambda held: asked.append(held) or count(held))
    for number in range(8):
        engine.submit(greedy(str(number), [number, 1, 2], 20))
    while engine.has_work:
        engine.step()
    assert not asked
