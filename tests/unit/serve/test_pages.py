"""The books of the cache of a model whose every layer has a window: pages are dropped, and texts are shared without."""

import random

import pytest

from apps.serve.pages import DROPPED, Match, Pages
from apps.serve.scheduler import Limits
from tests.support.serving import greedy, real_engine, run
from tests.unit.models.test_pretrained import example, random_decoder

SIZE, WINDOW = 2, 5


def begun(pages: Pages, text: list[int], num_tokens: int):
    """A sequence that has computed so many tokens of a text, in steps of one."""
    match = pages.match(text)
    held, first = pages.claim(match), pages.num_tokens(match)
    if match.source is not None:
        pages.copy(held, match)
    for computed in range(first + 1, num_tokens + 1):
        pages.grow(held, computed)
        pages.commit(held, text, computed)
        pages.drop(held, computed)
    return held, first


def test_only_what_the_next_token_sees_is_held():
    for sharing in (False, True):
        pages = Pages(20, SIZE, sharing, WINDOW)
        held, _ = begun(pages, list(range(17)), 16)
        assert held.pages[:6] == [DROPPED] * 6  # the 17th token sees places 12 … 16
        assert len(held.pages) == 8
        assert DROPPED not in held.pages[6:]
        assert pages.num_free == 18
        pages.give_back(held)
        assert pages.num_free == 20


def test_a_text_is_shared_though_its_beginning_is_dropped():
    pages, text = Pages(20, SIZE, window=WINDOW), list(range(20))
    first, _ = begun(pages, text, 16)
    second, shared = begun(pages, [*text[:14], 77, 78], 14)
    assert shared == 14
    assert second.pages == [DROPPED] * 5 + [first.path[5].page, first.pages[6]]
    assert pages.num_free == 20 - 3  # of the second's two pages the first holds one


def test_a_page_that_is_given_up_takes_those_behind_it_out_of_the_tree():
    pages, text = Pages(6, SIZE, window=WINDOW), list(range(40))
    held, _ = begun(pages, text, 12)
    assert pages.match(text[:9]).path
    held_pages = held.pages[held.num_dropped :]
    other, _ = begun(pages, [77] * 6, 6)  # takes the idle pages of the text's beginning
    assert pages.match(text[:9]) == Match()
    assert not set(other.pages) & set(held_pages)
    pages.give_back(other)
    for computed in range(13, 30):
        pages.grow(held, computed)
        pages.commit(held, text, computed)
        pages.drop(held, computed)
    assert pages.match(text[:9]) == Match()
    pages.give_back(held)
    assert pages.num_free == 6


def test_a_broken_text_is_forgotten_with_what_it_dropped():
    pages, text = Pages(20, SIZE, window=WINDOW), list(range(20))
    held, _ = begun(pages, text, 16)
    pages.forget(held)
    assert pages.match(text) == Match()
    pages.give_back(held)
    assert pages.num_free == 20
    first, _ = begun(pages, text, 6)
    second, _ = begun(pages, text, 16)
    pages.forget(second)  # what the first one holds stays
    assert pages.num_tokens(pages.match(text)) == 6
    pages.give_back(second)
    pages.give_back(first)
    assert pages.num_free == 20


@pytest.mark.parametrize("seed", range(20))
def test_no_page_is_lost_or_held_twice(seed):
    """Texts that begin alike come, go on, break and go in any order, with hardly more pages than they need."""
    dice, pages = random.Random(seed), Pages(14, SIZE, window=WINDOW)
    running: list = []
    for _ in range(300):
        if len(running) < 2 and dice.random() < 0.4:
            text = [dice.randrange(2) for _ in range(40)]
            match = pages.match(text)
            held = pages.claim(match)
            if match.source is not None:
                pages.copy(held, match)
            running.append([held, text, pages.num_tokens(match)])
        elif running and dice.random() < 0.1:
            held, *_ = running.pop(dice.randrange(len(running)))
            if dice.random() < 0.3:
                pages.forget(held)
            pages.give_back(held)
        elif running:
            one = dice.choice(running)
            held, text, computed = one
            one[2] = computed = min(computed + dice.randrange(1, 4), 39)
            pages.grow(held, computed)
            pages.commit(held, text, computed)
            pages.drop(held, computed)
        mine = [{page for page in held.pages if page != DROPPED} for held, *_ in running]
        assert pages.num_free == 14 - len(set().union(*mine))
        for held, _, computed in running:
            assert all(page != DROPPED for page in held.pages[max(0, computed + 1 - WINDOW) // SIZE :])
    for held, *_ in running:
        pages.give_back(held)
    assert pages.num_free == 14


@pytest.mark.parametrize("graphs", [False, True])
def test_an_engine_holds_no_more_than_windows_and_a_step(graphs):
    """Texts many times longer than the window, and than all pages together, with the tokens of plenty of pages."""
    config = example("mistral", max_length=400)
    decoder, dice = random_decoder(config).float(), random.Random(0)
    asked = [greedy(str(n), [dice.randrange(61) for _ in range(length)], 90) for n, length in enumerate((150, 3, 61))]
    plenty = run(real_engine(decoder, Limits(SIZE, 64, 16, 3), 800), asked)
    limits, num_pages = Limits(SIZE, 12, 8, 3), 24
    engine = real_engine(decoder, limits, num_pages, graphs=graphs)
    assert engine.max_length == 400 > num_pages * SIZE
    used, step = [], engine.step

    def noting():
        events = step()
        used.append([sum(page != DROPPED for page in s.held.pages) for s in engine.running])
        return events

    engine.step = noting
    written = run(engine, asked)
    assert [written.ids(request.id) for request in asked] == [plenty.ids(request.id) for request in asked]
    steps = 2 if graphs else 1  # those whose tokens are not read yet hold what they see
    most = -(-config.window // SIZE) + 1 + steps * -(-limits.max_batch_tokens // SIZE)
    longest = sorted(map(max, filter(None, used)))
    assert longest[-1] <= most
    assert longest[len(longest) // 2] <= -(-config.window // SIZE) + 1 + steps  # most steps are of one token each
    assert engine.pages.num_free == num_pages


def test_layers_that_see_all_keep_all_pages():
    """Mixed layers have one table of pages, so none is dropped."""
    decoder = random_decoder(example("gemma3_text", max_length=60)).float()
    engine = real_engine(decoder, Limits(SIZE, 64, 16, 3), 40)
    assert engine.pages.window is None
    engine.submit(greedy("a", range(30), 20))
    for _ in range(15):
        engine.step()
    (sequence,) = engine.running
    assert len(sequence.held.pages) >= 20
    assert DROPPED not in sequence.held.pages
