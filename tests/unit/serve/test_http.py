"""The API over real connections: the official client, raw sockets, and a fuzzer on the server's own schema."""

import asyncio
import json
import logging
import socket
import subprocess
import time
from collections import Counter

import openai
import pytest
import torch

from core.models import generate, load_pretrained
from tests.support.http_load import storm
from tests.support.http_server import HANGS_S, get, post, raw, served, small_model

PROMPT = "The quick brown fox"
PATIENCE_S = 3600.0
"""Of a server and its clients, where patience is not what is tested: no machine is too slow."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return small_model(root / "first"), small_model(root / "second", seed=1)


@pytest.fixture(scope="module")
def running(folders):
    with served(*folders, max_queue=64, timeout_s=PATIENCE_S, max_body="200KB", max_choices=16) as server:
        yield server


@pytest.fixture(autouse=True)
def nothing_is_left(running):
    yield
    running.wait(running.is_idle)


@pytest.fixture(scope="module")
def client(running):
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=HANGS_S)


def complete(running, **body):
    status, _, answer = post(running.port, "/v1/completions", {"prompt": PROMPT, "temperature": 0} | body)
    assert status == 200, answer
    return answer


# --- what is written --------------------------------------------------------------------------------------------------


def test_models(client):
    listed = client.models.list().data
    assert [model.id for model in listed] == ["first", "second"]
    assert {model.object for model in listed} == {"model"}
    assert client.models.retrieve("second").max_model_len == 512
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("third")
    assert error.value.body["code"] == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="first, second"):
        client.completions.create(model="third", prompt="a")


@pytest.mark.parametrize("place", [0, 1])
def test_completion_is_what_the_model_writes(client, folders, place):
    model = load_pretrained(folders[place])
    ids = torch.tensor([list(PROMPT.encode())])
    wanted = generate(model, ids, 30, eos_id=256)[0, ids.shape[1] :].tolist()
    began = int(time.time())
    answer = client.completions.create(model=folders[place].name, prompt=PROMPT, max_tokens=30, temperature=0)
    text = bytes(i for i in wanted if i < 256).decode(errors="replace")
    assert answer.choices[0].text == text
    assert answer.choices[0].finish_reason == ("stop" if 256 in wanted else "length")
    assert answer.object == "text_completion"
    assert answer.model == folders[place].name
    assert answer.id.startswith("cmpl-")
    assert began <= answer.created <= time.time()
    assert answer.usage.prompt_tokens == len(PROMPT)
    assert answer.usage.completion_tokens == len(wanted)
    assert answer.usage.total_tokens == len(PROMPT) + len(wanted)
    assert answer.choices[0].logprobs is None


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_adds_up_to_the_whole(client, seed):
    """Text, logprobs, reasons and usage; random bytes, so that characters are cut everywhere."""
    asked = {
        "model": "first", "prompt": [PROMPT, "é" * seed + "x"], "max_tokens": 40, "temperature": 1.5, "seed": seed,
        "n": 2, "logprobs": 2, "stop": ["e", "zz"], "echo": seed % 2 == 0,
    }  # fmt: skip
    whole = client.completions.create(**asked)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    for choice in whole.choices:
        mine = [c for chunk in chunks for c in chunk.choices if c.index == choice.index]
        assert "".join(c.text for c in mine) == choice.text
        assert [c.finish_reason for c in mine][-1] == choice.finish_reason
        assert all(c.finish_reason is None for c in mine[:-1])
        for name in ("tokens", "text_offset"):
            assert [x for c in mine for x in getattr(c.logprobs, name)] == getattr(choice.logprobs, name)
        streamed, complete = [p for c in mine for p in c.logprobs.token_logprobs], choice.logprobs.token_logprobs
        assert [p is None for p in streamed] == [p is None for p in complete]
        assert [p or 0 for p in streamed] == pytest.approx(
            [p or 0 for p in complete], abs=1e-4
        )  # other chunks, other sums
        tops = [top for c in mine for top in c.logprobs.top_logprobs]
        assert [top and top.keys() for top in tops] == [top and top.keys() for top in choice.logprobs.top_logprobs]
        assert not any(c.text.endswith("\ufffd") and not choice.text.count("\ufffd") for c in mine)


def test_offsets_behind_what_is_no_character(client):
    """A prompt's tokens, and written ones, which come with their text: random bytes are no UTF-8."""
    answer = client.completions.create(
        model="first", prompt=[240, 10, 11], max_tokens=60, temperature=1.5, seed=3, logprobs=0, echo=True
    )
    (choice,) = answer.choices
    assert choice.logprobs.text_offset[:3] == [0, 1, 2]
    read = client.completions.create(
        model="first", prompt=[240, 10, 11], max_tokens=0, logprobs=0, echo=True
    ).choices[0]  # fmt: skip
    assert read.text == "\ufffd\n\x0b"
    assert read.logprobs.text_offset == [0, 1, 2]
    offsets = choice.logprobs.text_offset
    assert offsets == sorted(offsets)
    for token, offset in zip(choice.logprobs.tokens, offsets):
        assert token.startswith("bytes:") or choice.text[offset:].startswith(token)


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b'{"prompt": "\xff"}', "the body is not UTF-8: its byte 12 is of no character; send JSON in UTF-8"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "the body has a whole number of more than 4300 digits; give a smaller one"),
        (b"[" * 90_000, "the body's lists and objects are nested too deeply; no field of this server's is so deep"),
        (b"", "the body is empty; send a JSON object, with the fields of this call"),
        (b"null", "the body is no JSON object; send one, with the fields of this call"),
        (b"[1]", "the body is no JSON object; send one, with the fields of this call"),
        (b"7", "the body is no JSON object; send one, with the fields of this call"),
        (b"{}", "prompt: Field required"),
        (b"{", "the body is not valid JSON"),
    ],
)
def test_what_is_wrong_with_a_body_as_a_whole(running, body, says):
    for path in ("/v1/completions", "/v1/chat/completions"):
        status, _, answer = post(running.port, path, body)
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["message"].startswith(says.replace("prompt", "messages") if "chat" in path else says)


def test_the_head_of_a_request_is_bounded(running):
    """However it comes: at once, and in pieces."""
    both = "too long; this server takes 65536 bytes of both together"
    assert get(running.port, "/health", x="a" * 60_000)[0] == 200
    for size in (100_000, 3_000_000):
        status, _, answer = get(running.port, "/health", x="a" * size)
        assert (status, answer.decode()) == (431, f"the headers are {both}")
        status, _, answer = get(running.port, "/" + "a" * size)
        assert (status, answer.decode()) == (414, f"the URL is {both}")
    assert raw(running.port, b"nonsense\r\n\r\n")[0] == 400
    assert get(running.port, "/health")[0] == 200


def test_logprobs(client):
    answer = client.completions.create(
        model="first", prompt=PROMPT, max_tokens=12, temperature=0, logprobs=3, echo=True
    )
    choice, logprobs = answer.choices[0], answer.choices[0].logprobs
    assert choice.text.startswith(PROMPT)
    assert len(logprobs.tokens) == len(PROMPT) + answer.usage.completion_tokens
    assert logprobs.tokens[: len(PROMPT)] == list(PROMPT)
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(p <= 0 for p in logprobs.token_logprobs[1:])
    assert logprobs.text_offset[: len(PROMPT)] == list(range(len(PROMPT)))
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    rows = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs)
    for token, logprob, top in list(rows)[len(PROMPT) :]:
        assert top[token] == logprob == max(top.values())
        assert len(top) == 3
    scored = client.completions.create(model="first", prompt=PROMPT, max_tokens=0, logprobs=0, echo=True)
    assert scored.choices[0].text == PROMPT
    assert scored.choices[0].logprobs.token_logprobs[1:] == pytest.approx(
        logprobs.token_logprobs[1 : len(PROMPT)], abs=1e-4
    )
    assert scored.usage.completion_tokens == 0


def test_forms_of_prompts(client):
    ids = list(PROMPT.encode())
    ask = lambda prompt: client.completions.create(model="first", prompt=prompt, max_tokens=9, temperature=0)  # noqa: E731
    text = ask(PROMPT).choices[0].text
    assert ask(ids).choices[0].text == text
    assert ask([PROMPT, "other"]).choices[0].text == text
    assert ask([[1, 2], ids]).choices[1].text == text
    assert ask("").usage.prompt_tokens == 1  # the token that begins a text
    echoed = client.completions.create(model="first", prompt=ids, max_tokens=1, echo=True)
    assert echoed.choices[0].text.startswith(PROMPT)


def test_seeds_repeat(client):
    ask = lambda seed: client.completions.create(model="first", prompt=PROMPT, max_tokens=20, seed=seed).choices[0].text  # noqa: E731
    assert ask(1) == ask(1)
    assert ask(1) != ask(2)
    assert ask(None) != ask(None)


def test_a_prompt_that_ends_inside_a_character(client):
    """Nothing of it comes back in the first delta, and what completes it is told as what it is by itself."""
    asked = {"model": "first", "prompt": [*b"5 ", 0xE2, 0x82], "max_tokens": 3, "temperature": 0}
    asked["logit_bias"] = {"172": 100}  # 0xAC, the last byte of a euro sign
    whole = client.completions.create(**asked).choices[0].text
    deltas = [chunk.choices[0].text for chunk in client.completions.create(**asked, stream=True)]
    assert "".join(deltas) == whole == "\ufffd\ufffd\ufffd"
    assert "5" not in deltas[0]


def test_curl(running):
    """What a shell script does: whole, as a stream, wrongly, and gone after a moment."""
    url = f"{running.url}/v1/completions"

    def command(body, *options):
        return ["curl", "-sS", "-N", *options, "-H", "Content-Type: application/json", "-d", body, url]

    def curl(body, *options):
        return subprocess.run(command(body, *options), capture_output=True, text=True, timeout=HANGS_S, check=False)

    asked = {"prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    whole = json.loads(curl(json.dumps(asked)).stdout)["choices"][0]
    lines = [line for line in curl(json.dumps(asked | {"stream": True})).stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1] if line.startswith("data: ")]
    assert "".join(event["choices"][0]["text"] for event in events) == whole["text"]
    assert events[-1]["choices"][0]["finish_reason"] == whole["finish_reason"]
    refused = curl("{", "-w", "%{http_code}")
    assert refused.stdout.endswith("400")
    assert json.loads(refused.stdout[:-3])["error"]["type"] == "invalid_request_error"
    undo, before = running.slow_down(0.05), running.loop.engine.counts.aborted
    try:
        long = json.dumps(asked | {"max_tokens": 400, "ignore_eos": True, "stream": True})
        with subprocess.Popen(command(long), stdout=subprocess.PIPE) as leaving:
            assert leaving.stdout is not None
            assert leaving.stdout.readline().startswith(b"data: ")
            leaving.terminate()
        running.wait(running.is_idle)
        assert running.loop.engine.counts.aborted - before == 1  # it was not written to its end
    finally:
        undo()


def test_a_crowd_that_comes_and_goes(running):
    """tests/soak does it for two minutes with 64 clients."""
    known = {f"{n} {PROMPT}": complete(running, prompt=f"{n} {PROMPT}", max_tokens=12)["choices"] for n in range(4)}
    enough = lambda tally: (tally.right >= 20 and tally.left >= 5) or tally.wrong  # noqa: E731
    assert asyncio.run(storm(running.port, known, max_tokens=12, clients=12, until=enough)).wrong == []


def test_best_of(client):
    """The likeliest per token of those that the same seed writes."""
    asked = {"model": "first", "prompt": PROMPT, "max_tokens": 8, "seed": 5, "logprobs": 0}
    every = client.completions.create(**asked, n=5)
    means = {c.text: sum(c.logprobs.token_logprobs) / len(c.logprobs.tokens) for c in every.choices}
    best = client.completions.create(**asked, n=2, best_of=5)
    assert [c.text for c in best.choices] == sorted(means, key=lambda t: -means[t])[:2]
    assert [c.index for c in best.choices] == [0, 1]
    assert best.usage.completion_tokens == every.usage.completion_tokens
    assert best.usage.prompt_tokens == len(PROMPT)


def test_extensions(running):
    """Each of them does something."""
    free = complete(running, max_tokens=24)["choices"][0]["text"]
    assert complete(running, max_tokens=24, repetition_penalty=5.0)["choices"][0]["text"] != free
    assert complete(running, max_tokens=24, frequency_penalty=2.0, presence_penalty=2.0)["choices"][0]["text"] != free
    assert complete(running, max_tokens=5, logit_bias={"65": 100})["choices"][0]["text"] == "AAAAA"
    assert (
        complete(running, max_tokens=5, temperature=1.5, top_k=1)["choices"][0]["text"] == free[:5]
        or not free.isascii()
    )
    assert complete(running, max_tokens=5, logit_bias={"256": 100})["choices"][0]["text"] == ""
    ignoring = complete(running, max_tokens=5, logit_bias={"256": 100}, ignore_eos=True)
    assert ignoring["usage"]["completion_tokens"] == 5
    assert ignoring["choices"][0]["finish_reason"] == "length"
    stopped = complete(running, max_tokens=5, logit_bias={"65": 100}, stop_token_ids=[65], min_tokens=0)
    assert stopped["choices"][0] | {"index": 0} == {"index": 0, "text": "", "logprobs": None, "finish_reason": "stop"}
    late = complete(running, max_tokens=5, logit_bias={"65": 100}, stop_token_ids=[65], min_tokens=2)
    assert late["usage"]["completion_tokens"] == 3
    kept = complete(running, max_tokens=9, logit_bias={"65": 100}, stop="AAA", include_stop_str_in_output=True)
    assert kept["choices"][0]["text"] == "AAA"
    assert complete(running, max_tokens=9, logit_bias={"65": 100}, stop=["AAA"])["choices"][0]["text"] == ""
    assert complete(running, max_tokens=3, suffix=None, user="me", seed=None)["usage"]["completion_tokens"] <= 3


def test_shared_prefix_is_reported(running):
    prompt = "a prefix of more than a page that nobody else uses, " * 2
    first = complete(running, prompt=prompt + "one", max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
    again = complete(running, prompt=prompt + "two", max_tokens=2)["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert first < 16
    assert again >= len(prompt)


def test_chat(client):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    asked = {
        "model": "first",
        "messages": messages,
        "max_completion_tokens": 30,
        "seed": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**asked)
    choice = whole.choices[0]
    assert whole.object == "chat.completion"
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) >= 1
    first = choice.logprobs.content[0]
    assert len(first.top_logprobs) == 2
    assert (
        bytes(b for token in choice.logprobs.content for b in token.bytes).decode(errors="replace")
        == choice.message.content
    )
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    deltas = [c.delta.content or "" for chunk in chunks for c in chunk.choices]
    assert "".join(deltas) == choice.message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    logprobs = [token for chunk in chunks for c in chunk.choices if c.logprobs for token in c.logprobs.content]
    assert [token.bytes for token in logprobs] == [token.bytes for token in choice.logprobs.content]
    probabilities = [token.logprob for token in choice.logprobs.content]
    assert [token.logprob for token in logprobs] == pytest.approx(probabilities, abs=1e-4)
    assert [c.finish_reason for chunk in chunks for c in chunk.choices][-1] == choice.finish_reason
    parts = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    plain = [{"role": "user", "content": "Hello"}]
    ask = lambda m: client.chat.completions.create(model="first", messages=m, max_tokens=9, temperature=0)  # noqa: E731
    assert ask(parts).choices[0].message.content == ask(plain).choices[0].message.content
    assert len(client.chat.completions.create(model="first", messages=plain, max_tokens=4, n=3).choices) == 3
    long = [{"role": "user", "content": "Hello " * 78}]
    unbounded = client.chat.completions.create(model="first", messages=long, logit_bias={"256": -100}, temperature=0)
    assert unbounded.usage.total_tokens == 512 or unbounded.choices[0].finish_reason == "stop"


def test_async_clients_at_once(running):
    """Ten at a time: each gets what it gets alone."""

    async def ask(client, number, stream):
        asked = {"model": "first", "prompt": f"{PROMPT} {number}", "max_tokens": 10 + number, "seed": number}
        if not stream:
            return (await client.completions.create(**asked)).choices[0].text
        return "".join([chunk.choices[0].text async for chunk in await client.completions.create(**asked, stream=True)])

    async def together():
        async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
            at_once = await asyncio.gather(*(ask(client, n, stream=n % 2 == 0) for n in range(10)))
            return at_once, [await ask(client, n, stream=False) for n in range(10)]

    at_once, alone = asyncio.run(together())
    assert at_once == alone


# --- what is refused --------------------------------------------------------------------------------------------------

CHAT = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "prompt", "required"),
        ({"prompt": []}, "prompt", "empty list"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": [257]}, "prompt", "0 … 256"),
        ({"prompt": [-1]}, "prompt[0]", "greater than or equal to 0"),
        ({"prompt": ["a", 1]}, "prompt[1]", "string"),
        ({"prompt": "a\ud800b"}, "prompt", "U+D800"),
        ({"prompt": "x" * 600}, "prompt", "maximum context length is 512 tokens. However, your prompt has 600"),
        ({"prompt": "x" * 512}, "prompt", "your prompt has 512 tokens, which leaves none for the text"),
        ({"prompt": "x" * 512, "max_tokens": 1}, "prompt", "513 tokens (512 in the prompt, 1 in the text)"),
        ({"prompt": "x" * 513, "max_tokens": 0, "echo": True}, "prompt", "you requested 513 tokens"),
        ({"prompt": "x" * 100_000}, "prompt", "maximum context length is 512 tokens. However, the prompt of 100000"),
        ({"prompt": "x", "max_tokens": 600}, "max_tokens", "maximum context length is 512 tokens. However, you req"),
        ({"prompt": "x", "max_tokens": -1}, "max_tokens", ""),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt": "x", "max_tokens": "5"}, "max_tokens", "integer"),
        ({"prompt": "x", "max_tokens": 1.5}, "max_tokens", "integer"),
        ({"prompt": "x", "max_tokens": 10**30}, "max_tokens", ""),
        ({"prompt": "x", "temperature": -0.1}, "temperature", ""),
        ({"prompt": "x", "temperature": "hot"}, "temperature", ""),
        ({"prompt": "x", "top_p": 0}, "top_p", ""),
        ({"prompt": "x", "top_p": 1.1}, "top_p", ""),
        ({"prompt": "x", "top_k": -2}, "top_k", ""),
        ({"prompt": "x", "min_p": 2}, "min_p", ""),
        ({"prompt": "x", "n": 0}, "n", ""),
        ({"prompt": "x", "n": 17}, "n", "at most 16"),
        ({"prompt": ["x"] * 9, "n": 2}, "n", "18 texts"),
        ({"prompt": ["x"] * 17}, "prompt", "17 texts"),
        ({"prompt": ["x"] * 65}, "prompt", "65 prompts"),
        ({"prompt": "x", "n": 3, "best_of": 2}, "best_of", "at least n"),
        ({"prompt": "x", "best_of": 2, "stream": True}, "best_of", "stream"),
        ({"prompt": "x", "stream": "yes"}, "stream", ""),
        ({"prompt": "x", "stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"prompt": "x", "stream": True, "stream_options": {"other": True}}, "stream_options.other", "no such field"),
        ({"prompt": "x", "logprobs": 21}, "logprobs", ""),
        ({"prompt": "x", "logprobs": True}, "logprobs", ""),
        ({"prompt": "x", "stop": ["a"] * 17}, "stop", ""),
        ({"prompt": "x", "stop": [str(i) for i in range(10_000)]}, "stop", ""),
        ({"prompt": "x", "stop": ""}, "stop", ""),
        ({"prompt": "x", "stop": "a" * 300}, "stop", ""),
        ({"prompt": "x", "stop": ["a", ""]}, "stop[1]", "at least 1 character"),
        ({"prompt": "x", "suffix": "end"}, "suffix", "leave it out"),
        ({"prompt": "x", "max_tokens": 3, "min_tokens": 4}, "min_tokens", "more than the 3"),
        ({"prompt": "x", "logit_bias": {"a": 1}}, "logit_bias", "digits"),
        ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias", "token 300"),
        ({"prompt": "x", "logit_bias": {"3": 101}}, "logit_bias.3", "less than or equal to 100"),
        ({"prompt": "x", "stop_token_ids": [300]}, "stop_token_ids", "token 300"),
        ({"prompt": "x", "seed": 2**70}, "seed", ""),
        ({"prompt": "x", "repetition_penalty": 0}, "repetition_penalty", ""),
        ({"prompt": "x", "guided_json": {}}, "guided_json", "no such field"),
        ({"prompt": "x", "tools": []}, "tools", "no such field"),
        ({"prompt": "x", "max_completion_tokens": 3}, "max_completion_tokens", "no such field"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_completions(running, body, param, says):
    status, _, answer = post(running.port, "/v1/completions", body)
    assert status == 400
    error = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert says in error["message"]
    assert "\n" not in error["message"]
    assert ("maximum context length" in error["message"]) == (error["code"] == "context_length_exceeded")


def test_a_prompt_of_all_that_the_model_takes_is_scored(running):
    answer = complete(running, prompt="x" * 512, max_tokens=0, echo=True, logprobs=0)
    assert answer["usage"]["prompt_tokens"] == len(answer["choices"][0]["logprobs"]["tokens"]) == 512


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({}, "messages", "required"),
        ({"messages": []}, "messages", ""),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "'assistant'"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "user", "content": 1}]}, "messages[0].content", "string"),
        ({"messages": [{"role": "user", "content": "x", "nmae": "y"}]}, "messages[0].nmae", "no such field"),
        ({"messages": [{"role": "user", "content": "x", "refusal": "y"}]}, "messages[0].refusal", "assistant"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
        (
            {"messages": [{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}]},
            "messages[0].content",
            "assistant",
        ),
        (
            {"messages": [{"role": "assistant", "content": None, "tool_calls": [{}]}]},
            "messages[0].tool_calls",
            "calls no tools",
        ),
        (CHAT | {"top_logprobs": 2}, "top_logprobs", "logprobs"),
        (CHAT | {"max_tokens": 3, "min_tokens": 4}, "min_tokens", "more than the 3"),
        (CHAT | {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens", "differ"),
        (CHAT | {"response_format": {"type": "json_object"}}, "response_format", ""),
        (CHAT | {"tools": [{"type": "function"}]}, "tools", "calls no tools"),
        (CHAT | {"tool_choice": "required"}, "tool_choice", "calls no tools"),
        (CHAT | {"prompt": "x"}, "prompt", "no such field"),
        (CHAT | {"max_tokens": 1000}, "max_tokens", "maximum context length is 512 tokens"),
        (CHAT | {"max_completion_tokens": 1000}, "max_completion_tokens", "maximum context length is 512 tokens"),
        ({"messages": [{"role": "user", "content": "x" * 600}]}, "messages", "maximum context length is 512 tokens"),
        ({"messages": [CHAT["messages"][0] | {"content": "x" * 100}] * 9}, "messages", "maximum context length is 512"),
        ({"messages": [{"role": "user", "content": "a\ud83d"}]}, "messages", "U+D83D"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_refused_chats(running, body, param, says):
    status, _, answer = post(running.port, "/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["param"] == param
    assert says in answer["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"prompt": "\xff"}', b'{"prompt": "a\x01"}',
        b'{"prompt": "\\ud800"}', b'{"\\ud800": 1, "prompt": "x"}', b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": 1e999}', b"[" * 100_000,
    ],
)  # fmt: skip
def test_broken_bodies(running, body):
    status, headers, answer = post(running.port, "/v1/completions", body)
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert answer["error"]["message"]


def test_other_refusals(running):
    large = b'{"prompt": "' + b"x" * 200_000 + b'"}'
    status, _, answer = post(running.port, "/v1/completions", large)
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    chunked += b"Transfer-Encoding: chunked\r\n\r\n"
    pieces = b"".join(b"%x\r\n%s\r\n" % (50_000, b"x" * 50_000) for _ in range(5)) + b"0\r\n\r\n"
    assert raw(running.port, chunked + pieces)[0] == 413
    assert (
        post(running.port, "/v1/completions", b"prompt=x", Content_Type="application/x-www-form-urlencoded")[0] == 415
    )
    assert post(running.port, "/v1/completions", {"prompt": "x"}, Content_Type="text/plain")[0] == 415
    assert get(running.port, "/v1/completions")[0] == 405
    status, _, answer = post(running.port, "/v1/embeddings", {"input": "x"})
    assert status == 404
    said = answer["error"]["message"]
    assert said.startswith("this server has no POST /v1/embeddings; it answers ")
    assert "GET /v1/models, " in said
    assert "POST /v1/chat/completions" in said
    assert get(running.port, "/page/../server.py")[0] == 404
    status, headers, _ = get(running.port, "/health", Origin="http://elsewhere")
    assert status == 200
    assert "access-control-allow-origin" not in headers


def test_health_metrics_and_page(running):
    complete(running, max_tokens=3)
    assert get(running.port, "/ready")[0] == 200
    assert "version" in json.loads(get(running.port, "/version")[2])
    deadline = time.monotonic() + 10
    while True:  # an answer has left before its request is counted as ended
        status, headers, body = get(running.port, "/metrics")
        values = dict(line.rsplit(" ", 1) for line in body.decode().splitlines() if not line.startswith("#"))
        if float(values['serve_requests_running{model="first"}']) == 0 or time.monotonic() > deadline:
            break
        time.sleep(0.05)
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    assert float(values['serve_written_tokens_total{model="first"}']) > 0
    assert float(values['serve_requests_running{model="first"}']) == 0
    assert float(values['serve_time_to_first_token_seconds_count{model="first"}']) > 0
    assert any("serve_cache_usage_ratio" in name for name in values)
    status, headers, body = get(running.port, "/")
    assert status == 200
    assert b"Megalith" in body
    assert "default-src 'self'" in headers["content-security-policy"]
    assert b"http" not in body  # nothing from elsewhere
    for name in ("page.js", "page.css", "scenarios.js", "icon.svg"):
        assert get(running.port, f"/page/{name}")[0] == 200


# --- who leaves, waits, comes too often -------------------------------------------------------------------------------


def open_stream(running, stream=True, **body):
    """A connection on which a long text is being written."""
    asked = {"prompt": PROMPT, "max_tokens": 450, "ignore_eos": True, "stream": stream} | body
    data = json.dumps(asked).encode()
    connection = socket.create_connection(("127.0.0.1", running.port), timeout=HANGS_S)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    connection.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    return connection


@pytest.mark.parametrize("stream", [True, False])
def test_who_leaves_frees_the_pages(running, stream):
    """While writing, and while waiting: four run, the rest wait; all leave."""
    engine, undo = running.loop.engine, running.slow_down(0.05)
    try:
        connections = [open_stream(running, stream, prompt=f"{n} {PROMPT}") for n in range(7)]
        running.wait(lambda: len(engine.running) == 4 and len(engine.waiting) == 3)
        assert engine.pages.num_free < engine.pages.num_pages
        before = engine.counts.aborted
        for connection in connections:
            connection.close()
        running.wait(running.is_idle)
        assert engine.counts.aborted - before == 7  # nobody wrote to the end
    finally:
        undo()


def test_place_in_the_queue_is_told(running):
    undo = running.slow_down(0.05)
    try:
        connections = [open_stream(running, prompt=f"{n} {PROMPT}") for n in range(6)]
        running.wait(lambda: len(running.loop.engine.running) == 4 and running.loop.num_queued == 2)
        last = open_stream(running)
        received = b""
        while b": queued behind " not in received:
            more = last.recv(1000)
            assert more, received
            received += more
        assert b": queued behind 2\n" in received
        for connection in (*connections, last):
            connection.close()
        running.wait(running.is_idle)
    finally:
        undo()


def test_a_full_queue(running):
    """429 with Retry-After; the official client comes again and gets its text."""
    undo, running.loop.max_queue = running.slow_down(0.05), 2
    try:
        connections = []
        for n in range(4):
            connections.append(open_stream(running, prompt=f"{n} {PROMPT}"))
            running.wait(lambda n=n: len(running.loop.engine.running) == n + 1 and running.loop.num_queued == 0)
        connections += [open_stream(running, prompt=f"{n} {PROMPT}") for n in range(2)]
        running.wait(lambda: running.loop.num_queued == 2)
        status, headers, answer = post(running.port, "/v1/completions", {"prompt": "x"})
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert answer["error"]["type"] == "rate_limit_error"
        assert "queue" in answer["error"]["message"]
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.RateLimitError),
        ):
            client.completions.create(model="first", prompt="x")
        assert b'serve_requests_rejected_total{model="first"} 2.0' in get(running.port, "/metrics")[2]
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=3) as client:
            for connection in connections:
                connection.close()
            assert client.completions.create(model="first", prompt="x", max_tokens=2).choices
    finally:
        undo()
        running.loop.max_queue = 64


def test_time_limit(running, monkeypatch):
    undo = running.slow_down(0.02)
    config = running.server.config
    object.__setattr__(config, "timeout_s", 0.3)
    try:
        status, headers, answer = post(
            running.port, "/v1/completions", {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
        )
        assert status == 504
        assert headers["x-should-retry"] == "false"
        assert answer["error"]["code"] == "timeout"
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
            pytest.raises(openai.APIError, match="longer than"),
        ):
            list(
                client.completions.create(
                    model="first", prompt="x", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
                )
            )
    finally:
        undo()
        object.__setattr__(config, "timeout_s", PATIENCE_S)


def test_nothing_of_prompts_or_texts_is_logged(running, caplog):
    with caplog.at_level(logging.DEBUG):
        text = complete(running, prompt="my deepest secret", max_tokens=8, logit_bias={"90": 100})["choices"][0]["text"]
        post(running.port, "/v1/completions", {"prompt": "my deepest secret", "n": 0})
        running.wait(running.is_idle)
    assert text == "ZZZZZZZZ"
    assert "prompt tokens" in caplog.text
    assert "secret" not in caplog.text
    assert "ZZZ" not in caplog.text


def test_keys_origins_drain_and_failure(folders, tmp_path):
    """What changes a server for good, on one of its own."""
    key = tmp_path / "key"
    key.write_text("open sesame\n")
    with served(folders[0], api_key_file=key, cors_origins=("http://page.example",), drain_s=20) as running:
        assert post(running.port, "/v1/completions", {"prompt": "x"})[0] == 401
        assert post(running.port, "/v1/completions", {"prompt": "x"}, Authorization="Bearer open")[0] == 401
        assert post(running.port, "/v1/completions", {"prompt": "x"}, Authorization="Basic open sesame")[0] == 401
        assert get(running.port, "/v1/models")[0] == 401
        assert get(running.port, "/health")[0] == 200
        allowed = {"Authorization": "Bearer open sesame"}
        status, headers, _ = post(
            running.port, "/v1/completions", {"prompt": "x"}, Origin="http://page.example", **allowed
        )
        assert status == 200
        assert headers["access-control-allow-origin"] == "http://page.example"
        with (
            openai.OpenAI(base_url=f"{running.url}/v1", api_key="wrong") as client,
            pytest.raises(openai.AuthenticationError),
        ):
            client.models.list()

        # Draining: what is under way is finished, nothing new is taken.
        undo = running.slow_down(0.01)
        with openai.OpenAI(base_url=f"{running.url}/v1", api_key="open sesame", max_retries=0) as client:
            stream = client.completions.create(
                model="first", prompt="x", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
            )  # fmt: skip
            next(stream)
            draining = asyncio.new_event_loop()
            running.server.draining = True
            assert get(running.port, "/ready")[0] == 503
            assert get(running.port, "/health")[0] == 200
            assert post(running.port, "/v1/completions", {"prompt": "x"}, **allowed)[0] == 503
            assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
            draining.close()
        undo()
        running.server.draining = False

        # A model that fails: those under way are told, health says so, nothing hangs.
        def fail(step):
            raise RuntimeError("out of everything")

        running.loop.engine.runner.run = fail
        status, _, answer = post(running.port, "/v1/completions", {"prompt": "x"}, **allowed)
        assert status == 500
        assert "out of everything" in answer["error"]["message"]
        assert get(running.port, "/health")[0] == 503
        assert get(running.port, "/ready")[0] == 503
        assert post(running.port, "/v1/completions", {"prompt": "x"}, **allowed)[0] == 503


@pytest.mark.parametrize("examples", [3, pytest.param(100, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_fuzzed_by_its_own_schema(running, examples):
    """No answer of the server's is a fault of its own, whatever fits or misses the schema.

    An example has a limit of time, all of them together have none but their number.
    """
    schemathesis = pytest.importorskip("schemathesis")
    from hypothesis import HealthCheck, given, settings

    schema = schemathesis.openapi.from_url(f"{running.url}/openapi.json")
    tried: Counter[str] = Counter()
    for operation in (found.ok() for found in schema.get_all_operations()):

        @settings(
            max_examples=examples,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy())
        def fuzz(case):
            tried[case.operation.label] += 1
            response = case.call(timeout=HANGS_S)
            assert response.status_code < 500, response.text

        fuzz()
    # The others have nothing that could vary, so one example is all there is.
    varied = {"POST /v1/completions", "POST /v1/chat/completions", "GET /v1/models/{name}"}
    assert {name for name, count in tried.items() if count >= examples} == varied
    assert {*tried} > varied | {"GET /v1/models", "GET /health", "GET /ready", "GET /metrics"}
