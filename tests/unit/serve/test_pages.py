"""The books of the cache of layers with a window: pages are dropped, and texts are shared without."""

import random
from collections.abc import Iterator

import pytest

from apps.serve.pages import DROPPED, Local, Match, Pages, most_local_pages
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
    assert second.pages == [DROPPED] * 5 + [first.path[5].pages[0], first.pages[6]]
    assert pages.num_free == 20 - 3  # of the second's two pages the first holds one


def test_a_page_that_is_given_up_takes_those_behind_it_out_of_the_tree():
    pages, text = Pages(6, SIZE, window=WINDOW), list(range(40))
    held, _ = begun(pages, text, 12)
    assert pages.match(text[:9]).path
    held_pages = held.pages[held.kinds[0].num_dropped :]
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


def lives(pages: Pages, dice: random.Random, num_turns: int) -> Iterator[list]:
    """At most two texts, which begin alike, come, go on, break and go: after each turn, those that are there.

    Each as [its pages, its tokens, how many of them are computed].
    """
    running: list = []
    for _ in range(num_turns):
        if len(running) < 2 and dice.random() < 0.4:
            text = [dice.randrange(2) for _ in range(40)]
            match = pages.match(text)
            held = pages.claim(match)
            if match.source is not None:
                copied = pages.copy(held, match)
                assert [source for source, _ in copied] == match.source.pages
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
        yield running
    for held, *_ in running:
        pages.give_back(held)


@pytest.mark.parametrize("seed", range(20))
def test_no_page_is_lost_or_held_twice(seed):
    """Texts that begin alike come, go on, break and go in any order, with hardly more pages than they need."""
    dice, pages = random.Random(seed), Pages(14, SIZE, window=WINDOW)
    for running in lives(pages, dice, 300):
        mine = [{page for page in held.pages if page != DROPPED} for held, *_ in running]
        assert pages.num_free == 14 - len(set().union(*mine))
        for held, _, computed in running:
            assert all(page != DROPPED for page in held.pages[max(0, computed + 1 - WINDOW) // SIZE :])
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


class Kinds(Pages):
    """Layers that see all, and layers with a window that have as few pages as may be."""

    def __init__(self, num_pages: int, local: int | None = None):
        most = most_local_pages(WINDOW, SIZE, 2, 3)
        super().__init__(num_pages, SIZE, local=Local(min(num_pages, local or most), WINDOW))


def test_layers_with_a_window_drop_pages_beside_those_that_see_all():
    pages = Kinds(20)
    held, _ = begun(pages, list(range(17)), 16)
    assert DROPPED not in held.pages
    assert held.kinds[1].pages[:6] == [DROPPED] * 6
    assert DROPPED not in held.kinds[1].pages[6:]
    pages.give_back(held)
    assert pages.num_free_of_kinds == [20, 16]


def test_a_text_is_shared_as_far_as_the_pages_of_its_last_window_are_there():
    pages, text = Kinds(40, local=12), list(range(40))
    first, _ = begun(pages, text, 20)
    pages.give_back(first)
    second, shared = begun(pages, text[:20], 20)  # two new pages of each kind, which are free
    assert shared == 19
    pages.give_back(second)
    other, _ = begun(pages, [77] * 17, 17)  # takes idle pages of the window, those at the text's beginning first
    pages.give_back(other)
    assert pages.match(text[:9]) == Match()  # what its next token sees is gone
    assert pages.num_tokens(there := pages.match(text[:20])) == 19  # here it is there
    third, shared = begun(pages, text[:9], 9)
    assert shared == 0
    assert third.path == list(there.path[:4])  # and the nodes have what they lacked
    assert pages.num_tokens(pages.match(text[:9])) == 8
    pages.give_back(third)
    assert pages.num_free_of_kinds == [40, 12]


@pytest.mark.parametrize("seed", range(20))
def test_no_page_of_two_kinds_is_lost_or_held_twice(seed):
    """As above; two texts at once, which never lack a page of the window."""
    dice, pages = random.Random(seed), Kinds(46)
    of_window = pages.num_free_of_kinds[1]
    assert of_window < 46
    for running in lives(pages, dice, 400):
        for kind, all_pages in enumerate((46, of_window)):
            mine = [{page for page in held.kinds[kind].pages if page != DROPPED} for held, *_ in running]
            assert pages.num_free_of_kinds[kind] == all_pages - len(set().union(*mine))
        for held, _, computed in running:
            assert DROPPED not in held.pages
            assert all(p != DROPPED for p in held.kinds[1].pages[max(0, computed + 1 - WINDOW) // SIZE :])
    assert pages.num_free_of_kinds == [46, of_window]


def distinct_prompts(vocab_size: int) -> list[list[int]]:
    """30 of 1 to 60 tokens, of which most begin as another one does."""
    dice = random.Random(0)
    shared = [dice.randrange(vocab_size) for _ in range(40)]
    own = [shared[: dice.randrange(40)] for _ in range(30)]
    return [[*begin, *(dice.randrange(vocab_size) for _ in range(dice.randrange(1, 21)))] for begin in own]


@pytest.fixture(scope="module")
def mixed():
    """A decoder with windows in some layers, requests, and what is written where all layers have one table of pages."""
    decoder = random_decoder(example("gemma3_text", max_length=100)).float()
    asked = [greedy(str(n), prompt, 24) for n, prompt in enumerate(distinct_prompts(61))]
    engine = real_engine(decoder, Limits(SIZE, 256, 64, 8), 800, kinds=False)
    written = run(engine, asked)
    return decoder, asked, [written.ids(request.id) for request in asked]


@pytest.mark.parametrize(
    ("limits", "num_pages", "graphs"),
    [(Limits(2, 40, 16, 5), 300, False), (Limits(2, 24, 9, 6), 60, False), (Limits(1, 17, 5, 3), 160, True)],
)
def test_layers_with_a_window_hold_what_it_needs_and_write_the_same(mixed, limits, num_pages, graphs):
    """Plenty of pages; few, so that texts are preempted; steps launched ahead."""
    decoder, asked, wanted = mixed
    engine, window = real_engine(decoder, limits, num_pages, graphs=graphs), decoder.config.window
    of_window = engine.pages.num_free_of_kinds[1]
    assert of_window < num_pages
    assert {len(pages.k) for pages in engine.runner.pages} == {num_pages, of_window}
    most, size, step = 0, limits.page_size, engine.step

    def noting():
        nonlocal most
        events = step()
        for held in (sequence.held for sequence in engine.running):
            first, local = (sum(page != DROPPED for page in kind.pages) for kind in held.kinds)
            assert local <= first
            most = max(most, local)
        return events

    engine.step = noting
    written = run(engine, asked)
    assert [written.ids(request.id) for request in asked] == wanted
    assert most <= -(-window // size) + 1 + (2 if graphs else 1) * -(-limits.max_batch_tokens // size)
    assert engine.counts.cached_tokens > 0
    assert (engine.counts.preemptions > 0) == (num_pages == 60)
    assert engine.pages.num_free_of_kinds == [num_pages, of_window]
