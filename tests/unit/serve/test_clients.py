"""One table of questions, asked through the official client, the same asynchronously, curl and a raw socket.

Each of the four is told the same, whole and as a stream, and refused alike.
"""

import asyncio
import json
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import openai
import pytest

from tests.support.http_server import HANGS_S, Running, raw, served, small_model

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SAID = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Grüße, 世界"}]
# What the official client takes only as extra_body.
EXTENSIONS = ("top_k", "min_p", "repetition_penalty", "min_tokens", "ignore_eos", "stop_token_ids")


@dataclass
class Answer:
    """Whole, or the chunks of a stream; or a refusal."""

    status: int
    whole: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] | None = None
    error: dict[str, Any] | None = None


def _arguments(body: dict[str, Any]) -> dict[str, Any]:
    extra = {name: value for name, value in body.items() if name in EXTENSIONS}
    return {name: value for name, value in body.items() if name not in EXTENSIONS} | {"extra_body": extra}


def _refused(error: openai.APIStatusError) -> Answer:
    return Answer(error.status_code, error=error.body if isinstance(error.body, dict) else None)


def by_client(client: openai.OpenAI, path: str, body: dict[str, Any]) -> Answer:
    made: Any = client.chat.completions if path == CHAT else client.completions
    try:
        found = made.create(**_arguments(body))
        if body.get("stream"):
            return Answer(200, chunks=[chunk.model_dump(mode="json", exclude_unset=True) for chunk in found])
        return Answer(200, whole=found.model_dump(mode="json", exclude_unset=True))
    except openai.APIStatusError as error:
        return _refused(error)


async def by_async_client(client: openai.AsyncOpenAI, path: str, body: dict[str, Any]) -> Answer:
    made: Any = client.chat.completions if path == CHAT else client.completions
    try:
        found = await made.create(**_arguments(body))
        if body.get("stream"):
            return Answer(200, chunks=[chunk.model_dump(mode="json", exclude_unset=True) async for chunk in found])
        return Answer(200, whole=found.model_dump(mode="json", exclude_unset=True))
    except openai.APIStatusError as error:
        return _refused(error)


def _parsed(status: int, text: str, stream: bool) -> Answer:
    if status != 200:
        return Answer(status, error=json.loads(text)["error"])
    if not stream:
        return Answer(status, whole=json.loads(text))
    events = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    return Answer(status, chunks=[json.loads(event) for event in events[:-1]])


def by_curl(running: Running, path: str, body: dict[str, Any]) -> Answer:
    command = ["curl", "-sSN", "-w", "\n%{http_code}", "-H", "Content-Type: application/json", "-d", "@-"]
    done = subprocess.run(
        [*command, f"{running.url}{path}"],
        input=json.dumps(body),
        capture_output=True,
        text=True,
        timeout=HANGS_S,
        check=True,
    )
    text, _, status = done.stdout.rpartition("\n")
    return _parsed(int(status), text, bool(body.get("stream")))


def by_socket(running: Running, path: str, body: dict[str, Any]) -> Answer:
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    status, headers, found = raw(running.port, f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    if headers.get("transfer-encoding") == "chunked":
        found = b"".join(_pieces(found))
    return _parsed(status, found.decode(), bool(body.get("stream")))


def _pieces(body: bytes) -> Iterator[bytes]:
    while body:
        size, _, body = body.partition(b"\r\n")
        yield body[: int(size, 16)]
        body = body[int(size, 16) + 2 :]


CLIENTS = ("client", "async client", "curl", "socket")
Ask = Callable[[str, dict[str, Any]], Answer]

QUESTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (TEXT, {"prompt": "The quick", "temperature": 0}),
    "sampled": (TEXT, {"prompt": "The quick", "temperature": 1.3, "top_p": 0.9, "seed": 11}),
    "characters": (TEXT, {"prompt": "Grüße, 世界", "temperature": 2.0, "seed": 5}),
    "ids": (TEXT, {"prompt": [84, 104, 101], "temperature": 0, "echo": True}),
    "several": (TEXT, {"prompt": ["a", "b"], "n": 2, "temperature": 1.0, "seed": 2}),
    "logprobs": (TEXT, {"prompt": "The quick", "temperature": 0, "logprobs": 2}),
    "echo": (TEXT, {"prompt": "The quick", "temperature": 0, "logprobs": 1, "echo": True}),
    "stop": (TEXT, {"prompt": "x", "logit_bias": {"65": 100}, "stop": ["AAA"]}),
    "extensions": (TEXT, {"prompt": "x", "top_k": 3, "min_p": 0.1, "repetition_penalty": 1.5, "seed": 4}),
    "penalties": (TEXT, {"prompt": "x", "presence_penalty": 1.0, "frequency_penalty": 1.0, "temperature": 0}),
    "minimum": (TEXT, {"prompt": "x", "logit_bias": {"256": 100}, "min_tokens": 3, "temperature": 0}),
    "control characters": (TEXT, {"prompt": "a\x00\x1b[0m\x7f\u0085b", "temperature": 0}),
    "chat": (CHAT, {"messages": SAID, "temperature": 0}),
    "chat, sampled": (CHAT, {"messages": SAID, "temperature": 1.2, "seed": 9, "n": 2}),
    "chat, logprobs": (CHAT, {"messages": SAID, "temperature": 0, "logprobs": True, "top_logprobs": 2}),
}

REFUSALS: dict[str, tuple[str, dict[str, Any], int, str | None]] = {
    "model": (TEXT, {"prompt": "x", "model": "other"}, 404, "model"),
    "temperature": (TEXT, {"prompt": "x", "temperature": -1.0}, 400, "temperature"),
    "too long": (TEXT, {"prompt": "x", "max_tokens": 600}, 400, "max_tokens"),
    "suffix": (TEXT, {"prompt": "x", "suffix": "y"}, 400, "suffix"),
    "stops": (TEXT, {"prompt": "x", "stop": [str(n) for n in range(10_000)]}, 400, "stop"),
    "role": (CHAT, {"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role"),
    "tools": (CHAT, {"messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}, 400, "tools"),
    "no messages": (CHAT, {"messages": []}, 400, "messages"),
}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with served(small_model(tmp_path_factory.mktemp("models") / "first"), timeout_s=3600) as server:
        yield server


@pytest.fixture(scope="module")
def clients(running: Running) -> Iterator[dict[str, Ask]]:
    """The four, by name."""
    options: dict[str, Any] = {
        "base_url": f"{running.url}/v1",
        "api_key": "none",
        "max_retries": 2,
    }  # a kept connection may be stale
    with asyncio.Runner() as runner, openai.OpenAI(**options) as client:
        other = openai.AsyncOpenAI(**options)
        yield {
            "client": partial(by_client, client),
            "async client": lambda path, body: runner.run(by_async_client(other, path, body)),
            "curl": partial(by_curl, running),
            "socket": partial(by_socket, running),
        }
        runner.run(other.close())


@pytest.fixture(scope="module")
def answers(running: Running) -> dict[str, dict[str, Any]]:
    """The whole answer to each question, over the plainest of connections."""
    found = {}
    for name, (path, body) in QUESTIONS.items():
        answer = by_socket(running, path, {"model": "first", "max_tokens": 12} | body)
        assert answer.status == 200, (name, answer.error)
        found[name] = answer.whole
    return found


def texts(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("message") or choice.get("delta") or {}).get("content") or ""


def tokens(choice: dict[str, Any]) -> list[Any]:
    logprobs = choice.get("logprobs") or {}
    return logprobs.get("tokens") or [token["bytes"] for token in logprobs.get("content") or ()]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_whole_answers(clients: dict[str, Ask], answers: dict[str, dict[str, Any]], client: str, question: str) -> None:
    path, body = QUESTIONS[question]
    answer = clients[client](path, {"model": "first", "max_tokens": 12} | body)
    assert answer.status == 200, answer.error
    assert answer.whole is not None
    wanted = answers[question]
    assert answer.whole["model"] == "first"
    assert answer.whole["object"] == wanted["object"]
    assert answer.whole["id"] != wanted["id"]
    assert [texts(c) for c in answer.whole["choices"]] == [texts(c) for c in wanted["choices"]]
    assert [tokens(c) for c in answer.whole["choices"]] == [tokens(c) for c in wanted["choices"]]
    for name in ("finish_reason", "index"):
        assert [c[name] for c in answer.whole["choices"]] == [c[name] for c in wanted["choices"]]
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert answer.whole["usage"][name] == wanted["usage"][name]


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("question", QUESTIONS)
def test_streams_add_up_to_them(
    clients: dict[str, Ask], answers: dict[str, dict[str, Any]], client: str, question: str
) -> None:
    path, body = QUESTIONS[question]
    asked = {"model": "first", "max_tokens": 12, "stream": True, "stream_options": {"include_usage": True}}
    answer = clients[client](path, asked | body)
    assert answer.status == 200, answer.error
    assert answer.chunks is not None
    *chunks, last = answer.chunks
    wanted = answers[question]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == wanted["usage"]["completion_tokens"]
    assert {chunk["id"] for chunk in answer.chunks} == {last["id"]}
    for choice in wanted["choices"]:
        mine = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        assert "".join(map(texts, mine)) == texts(choice)
        assert [token for c in mine for token in tokens(c)] == tokens(choice)
        assert mine[-1]["finish_reason"] == choice["finish_reason"]
        assert all(c.get("finish_reason") is None for c in mine[:-1])


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("refusal", REFUSALS)
@pytest.mark.parametrize("stream", [False, True])
def test_refusals(clients: dict[str, Ask], client: str, refusal: str, stream: bool) -> None:
    path, body, status, param = REFUSALS[refusal]
    answer = clients[client](path, {"model": "first"} | body | ({"stream": True} if stream else {}))
    assert answer.status == status
    assert answer.error is not None
    assert answer.error["param"] == param
    assert answer.error["type"] == "invalid_request_error"
    assert "\n" not in answer.error["message"]
    assert set(answer.error) == {"message", "type", "param", "code"}
