"""The distributions that are drawn from, against their definitions and transformers' own processors."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apps.serve.machine import OnHost
from apps.serve.request import Request, Sampling, Sequence
from apps.serve.sampler import BARRED, LANE, Ask, Sampler, U, Way, numbers_of, pick, uniform
from apps.serve.sampler import draw as draw_rows
from core.config import UserError
from tests.support import row_sampler
from tests.support.serving import Letters, sample

HOST = OnHost(torch.device("cpu"))

many = settings(max_examples=25, deadline=None, derandomize=True, database=None)


def logits_of(seed, size=40):
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 3


def sequence(request, written=()):
    from apps.serve.detokenize import TextStream

    made = Sequence(request, 0, 0, TextStream(Letters().detokenizer(())), list(request.prompt))
    for token in written:
        made.tokens.append(token)
        made.written[token] += 1
    return made


def drawn(logits, s, quantiles):
    """Tokens at these quantiles, all at once: as on a GPU, and as on a CPU, which are the same."""
    numbers = numbers_of([Ask(s)] * len(quantiles))
    numbers[U] = torch.tensor(quantiles, dtype=torch.float64)
    rows, sorts = logits.expand(len(quantiles), -1), s.top_k is not None or s.top_p < 1
    found = draw_rows(rows, numbers, sorts)
    assert torch.equal(found, draw_rows(rows, numbers, sorts, looks=sorts))
    return found


def adjusted(logits, made):
    sampler = Sampler(len(logits), HOST)
    numbers = numbers_of([sampler.ask(made, None)])
    return sampler.histories.adjusted(logits[None], numbers[LANE], numbers[BARRED], *numbers[BARRED - 4 : LANE])[0]


def theirs(logits, s):
    """The distribution of transformers' warpers, in their order."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    scores = TemperatureLogitsWarper(s.temperature)(None, logits[None].double())
    if s.top_k:
        scores = TopKLogitsWarper(s.top_k)(None, scores)
    if s.top_p < 1:
        scores = TopPLogitsWarper(s.top_p)(None, scores)
    if s.min_p:
        scores = MinPLogitsWarper(s.min_p)(None, scores)
    return scores.softmax(-1)[0]


@many
@given(
    st.integers(0, 99),
    st.sampled_from([0.3, 1.0, 1.7]),
    st.sampled_from([None, 1, 5, 100]),
    st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    st.sampled_from([0.0, 0.05, 0.4]),
)
def test_distribution_is_that_of_transformers(seed, temperature, top_k, top_p, min_p):
    """At 150 evenly spread quantiles each token comes as often as its probability says, to one."""
    s, logits = Sampling(temperature, top_k, top_p, min_p), logits_of(seed)
    shares = torch.bincount(drawn(logits, s, [(i + 0.5) / 150 for i in range(150)]), minlength=40).double() / 150
    assert (shares - theirs(logits, s)).abs().max() < 1.01 / 150


def test_more_tokens_than_are_looked_at_first():
    """A flat distribution over 600 tokens: top-p needs more than the likely ones."""
    s, logits = Sampling(top_p=0.9), torch.linspace(0, 0.1, 600)
    found = set(drawn(logits, s, [(i + 0.5) / 1200 for i in range(1200)]).tolist())
    assert found == set(theirs(logits, s).nonzero()[:, 0].tolist())


def test_ends_of_the_interval():
    logits = torch.tensor([-math.inf, 0.0, 1.0, -math.inf])
    for s in (Sampling(), Sampling(top_k=3), Sampling(top_p=0.99), Sampling(temperature=5e-324), Sampling(min_p=1.0)):
        assert set(drawn(logits, s, [0.0, 1 - 2**-53]).tolist()) <= {1, 2}
    assert drawn(logits, Sampling(temperature=1e-300), [0.99]).tolist() == [2]


def test_penalties_are_those_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    logits, prompt, written = logits_of(1), (3, 4, 5), (5, 6, 6, 6)
    made = sequence(Request("a", prompt, 9, Sampling(repetition_penalty=1.7)), written)
    wanted = RepetitionPenaltyLogitsProcessor(1.7)(torch.tensor([[*prompt, *written]]), logits[None].clone())[0]
    assert torch.equal(adjusted(logits, made), wanted)
    made = sequence(Request("a", prompt, 9, Sampling(presence_penalty=0.5, frequency_penalty=0.25)), written)
    difference = logits - adjusted(logits, made)
    assert difference[[5, 6]].tolist() == pytest.approx([0.75, 1.25], abs=1e-6)
    assert difference.count_nonzero() == 2
    made = sequence(Request("a", prompt, 9, Sampling(logit_bias={7: -100.0, 8: 3.0})), written)
    assert (adjusted(logits, made) - logits)[[7, 8]].tolist() == pytest.approx([-100, 3], abs=1e-5)


def test_bias_decides_and_early_ends_are_barred():
    logits_RV = logits_of(0)[None]
    best = int(logits_RV.argmax())
    other = Request("a", (1,), 9, Sampling(temperature=0, logit_bias={(best + 1) % 40: 100.0}))
    assert sample(logits_RV, [sequence(other)], [False])[0].id == (best + 1) % 40
    barred = Request("a", (1,), 9, Sampling(temperature=0), min_tokens=1, stop_ids=frozenset({best}))
    assert sample(logits_RV, [sequence(barred)], [False])[0].id == int(logits_RV[0].argsort()[-2])
    assert sample(logits_RV, [sequence(barred, [2])], [False])[0].id == best


def test_logprobs_are_the_models_own():
    """Whatever the temperature and the penalties are."""
    logits_RV = logits_of(2)[None]
    request = Request("a", (1,), 9, Sampling(temperature=0.1, repetition_penalty=2.0), logprobs=2)
    found = sample(logits_RV, [sequence(request)], [False])[0]
    logprobs = logits_RV[0].double().log_softmax(-1)
    assert found.logprob == float(logprobs[found.id])
    assert dict(found.top) == {int(i): float(logprobs[i]) for i in logprobs.argsort(descending=True)[:2]}
    assert sample(logits_RV, [sequence(replace(request, logprobs=None))], [False])[0].logprob is None


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.4, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 3, 400]),
    top_p=st.sampled_from([0.2, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.1]),
    repetition_penalty=st.sampled_from([1.0, 0.7, 1.4]),
    presence_penalty=st.sampled_from([0.0, 0.6]),
    frequency_penalty=st.sampled_from([0.0, -0.3]),
    logit_bias=st.sampled_from([{}, {0: 3.0, 7: -100.0}]),
    seed=st.integers(0, 9),
)
rows = st.tuples(samplings, st.lists(st.integers(0, 299), max_size=6), st.sampled_from([None, 0, 5]), st.integers(0, 9))


def case(rows):
    """(logits, sequences) of rows: some are flat, so that 256 tokens are not the mass; some are no numbers."""
    made, logits = [], torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(len(rows)))
    for row, (sampling, written, num_logprobs, kind) in enumerate(rows):
        barred = {"min_tokens": 4, "stop_ids": frozenset(range(0, 300, 2))} if kind % 3 == 0 else {}
        made.append(sequence(Request(str(row), (1, 2, 7, 7), 9, sampling, logprobs=num_logprobs, **barred), written))
        made[-1].number = row
        logits[row] *= 0.01 if kind == 1 else 3
        if kind == 2:
            logits[row, 5] = math.nan
        if kind == 3:
            logits[row] = -math.inf
    return logits, made


@many
@given(st.lists(rows, min_size=1, max_size=7))
def test_all_rows_at_once_are_each_row_alone(rows):
    """Draw for draw, and bit for bit of the logprobs; as on a CPU, and in the one way that a captured step goes."""
    logits, made = case(rows)
    wanted = row_sampler.sample(logits.clone(), made, [False] * len(made))
    assert sample(logits, made, [False] * len(made)) == wanted
    sampler = Sampler(300, HOST)
    asks = [sampler.ask(one, one.request.logprobs) for one in made]
    way = Way(draws=True, sorts=True, adjusts=True, num_logprobs=5)
    results = pick(logits, numbers_of(asks), way, sampler.histories)
    assert results.shape == (len(made), way.width)
    assert results[:, 0].tolist() == [-1 if token is None else token.id for token in wanted]


def test_histories_follow_what_is_drawn():
    """The device adds its tokens by itself; a sequence that comes again is told by the host."""
    sampler, logits = Sampler(300, HOST), torch.randn(1, 300, generator=torch.Generator().manual_seed(3))
    s = Sampling(temperature=1.0, frequency_penalty=0.9, repetition_penalty=1.2, seed=4)
    one, alone = sequence(Request("a", (1, 2), 9, s)), sequence(Request("a", (1, 2), 9, s))
    unread = []
    for place in range(8):
        (found,) = sampler.sample(logits, [sampler.ask(one, None, num_unread=place % 2)])()
        unread.append(found.id)
        if place % 2:  # both are read now
            one.tokens.extend(unread)
            one.written.update(unread)
            unread.clear()
        (wanted,) = row_sampler.sample(logits, [alone], [False])
        assert found == wanted
        alone.tokens.append(wanted.id)
        alone.written[wanted.id] += 1
    counts = sampler.histories.counts[sampler.histories.lane(one)].clone()
    sampler.histories.release(one)
    other = sequence(Request("b", (9,), 9, s), [9, 9])
    other.number = 1
    sampler.histories.lane(other)
    assert torch.equal(sampler.histories.counts[sampler.histories.lane(one)], counts)
    assert sampler.histories.counts[sampler.histories.lane(other)].nonzero().tolist() == [[9]]


def test_uniform():
    numbers = [uniform(seed, index, place) for seed in range(10) for index in range(10) for place in range(100)]
    assert len(set(numbers)) == len(numbers)
    assert 0 <= min(numbers) < 1e-3 < 0.999 < max(numbers) < 1
    assert abs(sum(numbers) / len(numbers) - 0.5) < 0.01


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1}, "temperature is -1"),
        ({"top_p": 0}, "use temperature 0"),
        ({"top_p": 1.5}, "between 0 and 1"),
        ({"top_k": 0}, "top_k is 0"),
        ({"min_p": -0.1}, "min_p"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
    ],
)
def test_impossible_sampling(options, message):
    with pytest.raises(UserError, match=message):
        Sampling(**options)
