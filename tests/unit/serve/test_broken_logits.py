"""Logits that are no numbers end their own sequence, by a reason that says so; the others and the engine go on."""

import json
from collections.abc import Iterator

import openai
import pytest
import torch

from apps.serve.pages import Pages
from apps.serve.request import Request, Sampling, Sequence
from apps.serve.scheduler import Limits
from tests.support.http_server import HANGS_S, Running, get, post, served, small_model
from tests.support.serving import Letters, greedy, real_engine, run, sample
from tests.unit.models.test_pretrained import example, random_decoder

BROKEN = 5
"""A token whose embedding is NaN: a text that holds it has logits that are no numbers from there on."""
WAYS = {
    "greedy": {"temperature": 0},
    "drawn": {},
    "top_p": {"top_p": 0.9},
    "top_k": {"top_k": 3},
    "min_p": {"min_p": 0.1},
    "top_k and top_p": {"top_k": 3, "top_p": 0.5},
    "penalties": {"temperature": 0, "repetition_penalty": 1.3},
}


def poison(decoder: torch.nn.Module) -> None:
    with torch.no_grad():
        decoder.get_parameter("embedding.tokens.weight")[BROKEN] = torch.nan


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("way", WAYS)
def test_a_row_names_no_token(way: str, value: float) -> None:
    """-inf alone: nothing is possible.  The row beside it draws what it draws alone."""
    request = Request("a", (1,), 4, Sampling(**WAYS[way], seed=3))
    rows = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    stream = real_stream()
    made = [Sequence(request, 0, number, stream, [1]) for number in range(2)]
    alone = sample(rows[1:], made[1:], [False])
    rows[0] = value if value == -torch.inf else rows[0]
    rows[0, 7] = value
    assert sample(rows, made, [False, False]) == [None, *alone]


def real_stream():
    from apps.serve.detokenize import TextStream

    return TextStream(Letters().detokenizer(()))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("prompt", [(1, 2, BROKEN), (1, 2, 3)], ids=["in the prompt", "written"])
@pytest.mark.parametrize("graphs", [False, True], ids=["", "captured"])
def test_only_that_sequence_fails(way: str, prompt: tuple[int, ...], graphs: bool) -> None:
    decoder = random_decoder(example("llama", max_length=32, tied_head=False)).float()
    limits = Limits(4, 64, 16, 8)
    others = [greedy(str(n), (n, 2, 9), 8, stop_ids=frozenset(), logprobs=1) for n in (1, 3)]
    for other in others:
        object.__setattr__(other.sampling, "logit_bias", {BROKEN: -100.0})
    alone = [run(real_engine(decoder, limits, 100), [other]).ids(other.id) for other in others]
    poison(decoder)
    engine = real_engine(decoder, limits, 100, graphs=graphs)
    forced = {} if BROKEN in prompt else {"logit_bias": {BROKEN: 100.0}}
    broken = Request("broken", prompt, 8, Sampling(**WAYS[way], **forced), logprobs=0)
    written = run(engine, [others[0], broken, others[1]])
    assert written.finish == {("broken", 0): "error", ("1", 0): "length", ("3", 0): "length"}
    assert written.ids("broken") == ([] if BROKEN in prompt else [BROKEN])
    assert [written.ids(other.id) for other in others] == alone
    assert engine.pages.num_free == engine.pages.num_pages


def test_a_prompt_that_is_scored() -> None:
    """The place whose logits are no numbers has no logprob, and neither have those behind it."""
    decoder = random_decoder(example("llama", max_length=32, tied_head=False)).float()
    poison(decoder)
    for max_tokens in (0, 4):
        written = run(real_engine(decoder, Limits(4, 64, 16, 8), 100), [
            greedy("a", (1, 2, BROKEN, 3, 4), max_tokens, prompt_logprobs=1)
        ])  # fmt: skip
        assert written.finish["a", 0] == "error"
        tokens = written.prompts["a"].tokens
        assert [token.id for token in tokens] == [1, 2, BROKEN, 3, 4]
        assert [token.logprob is None for token in tokens] == [True, False, False, True, True]


def test_its_pages_are_not_shared() -> None:
    """A passing fault does not stay in the cache: who begins alike computes it anew."""
    decoder = random_decoder(example("llama", max_length=64, tied_head=False)).float()
    engine, prompt = real_engine(decoder, Limits(4, 64, 16, 8), 100), tuple(range(10, 30))
    sound = run(real_engine(decoder, Limits(4, 64, 16, 8), 100), [greedy("a", prompt, 6)]).ids("a")
    weight = decoder.get_parameter("embedding.tokens.weight")
    kept = weight[12].clone()
    with torch.no_grad():
        weight[12] = torch.nan
    assert run(engine, [greedy("a", prompt, 6)]).finish["a", 0] == "error"
    with torch.no_grad():
        weight[12] = kept
    assert run(engine, [greedy("b", prompt, 6)]).ids("b") == sound
    assert engine.counts.cached_tokens == 0


def test_forgotten_pages() -> None:
    """Those of others stay; idle ones behind a forgotten page go with it."""
    pages = Pages(8, 2)
    one = pages.claim(pages.match((1, 2, 3, 4, 5)))
    pages.grow(one, 4)
    pages.commit(one, (1, 2, 3, 4), 4)
    other = pages.claim(pages.match((1, 2, 9, 9)))
    pages.give_back(one)  # (3, 4) is idle behind (1, 2), which `other` holds
    pages.forget(other)
    assert pages.match((1, 2, 3, 4, 5)).path == ()
    pages.give_back(other)
    assert pages.num_free == 8
    one = pages.claim(pages.match((1, 2, 3)))
    pages.grow(one, 2)
    pages.commit(one, (1, 2), 2)
    other = pages.claim(pages.match((1, 2, 9)))
    pages.forget(other)  # `one` holds it too
    assert len(pages.match((1, 2, 3)).path) == 1


def test_a_long_text_is_forgotten_with_all_behind_it() -> None:
    """Of a text with more pages than Python nests calls, the first is forgotten while the rest are idle."""
    text = tuple(n % 7 for n in range(6001))
    pages = Pages(6000, 2)
    long = pages.claim(pages.match(text))
    pages.grow(long, 6000)
    pages.commit(long, text, 6000)
    other = pages.claim(pages.match((*text[:2], 8, 9)))
    pages.give_back(long)
    pages.forget(other)
    assert pages.match(text).path == ()
    pages.give_back(other)
    assert pages.num_free == 6000
    held = pages.claim(pages.match(text))
    pages.grow(held, 12000)
    assert sorted(held.pages) == list(range(6000))


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = small_model(tmp_path_factory.mktemp("models") / "first", tied_head=False)
    with served(folder, timeout_s=3600) as server:
        poison(server.loop.engine.runner.model)
        yield server


@pytest.mark.parametrize("way", WAYS)
def test_what_a_client_is_told(running: Running, way: str) -> None:
    asked = {"prompt": [65, BROKEN, 66], "max_tokens": 8, **WAYS[way]}
    status, _, answer = post(running.port, "/v1/completions", asked | {"n": 2, "logprobs": 2, "echo": True})
    assert status == 200
    json.dumps(answer, allow_nan=False)
    assert [choice["finish_reason"] for choice in answer["choices"]] == ["error", "error"]
    fine = post(running.port, "/v1/completions", {"prompt": [65, 66], "max_tokens": 8, "logit_bias": {"5": -100}})
    assert fine[2]["choices"][0]["finish_reason"] in ("length", "stop")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=HANGS_S) as client:
        chunks = list(client.completions.create(model="first", prompt=[65, BROKEN], max_tokens=4, stream=True))
    assert chunks[-1].choices[0].finish_reason == "error"
    assert get(running.port, "/health")[0] == 200
    assert b'reason="error"' in get(running.port, "/metrics")[2]
