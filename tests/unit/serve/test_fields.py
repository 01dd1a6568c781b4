"""Nothing is accepted and then ignored: each field of the API changes the answer, or is refused."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from apps.serve.api import Body, ChatBody, CompletionBody, Message, Options, ResponseFormat, StreamOptions, TextPart
from tests.support.http_server import Running, served, small_model
from tests.unit.serve.test_clients import CHAT, TEXT, Answer, by_socket

BASE = {
    TEXT: {"prompt": "The quick", "max_tokens": 40},
    CHAT: {"messages": [{"role": "user", "content": "The quick"}], "max_tokens": 40},
}
SAMPLED, GREEDY = {"seed": 1, "temperature": 1.0}, {"temperature": 0}
ALL_A, ENDS = GREEDY | {"logit_bias": {"65": 100}}, GREEDY | {"logit_bias": {"256": 100}}

Look = Callable[[Answer], Any]


def text(answer: Answer) -> Any:
    assert answer.whole is not None
    choices = answer.whole["choices"]
    said = [choice["text"] if "text" in choice else choice["message"]["content"] for choice in choices]
    return said, [choice["finish_reason"] for choice in choices]


def count(answer: Answer) -> Any:
    assert answer.whole is not None
    return answer.whole["usage"]["completion_tokens"]


def logprobs(answer: Answer) -> Any:
    assert answer.whole is not None
    return [choice["logprobs"] for choice in answer.whole["choices"]]


def model(answer: Answer) -> Any:
    assert answer.whole is not None
    return answer.whole["model"]


def is_stream(answer: Answer) -> Any:
    return answer.chunks is not None


def tells_usage(answer: Answer) -> Any:
    assert answer.chunks is not None
    return answer.chunks[-1].get("usage") is not None


# field -> what else is asked, its value, and where the answer must differ from the one without it.
SHARED: dict[str, tuple[dict[str, Any], Any, Look]] = {
    "model": (GREEDY, "second", model),
    "n": (SAMPLED, 2, text),
    "stop": (ALL_A, "AAA", text),
    "stream": (GREEDY, True, is_stream),
    "stream_options": (GREEDY | {"stream": True}, {"include_usage": True}, tells_usage),
    "temperature": ({"seed": 1}, 0, text),
    "top_p": (SAMPLED, 0.05, text),
    "presence_penalty": (SAMPLED, 2.0, text),
    "frequency_penalty": (SAMPLED, 2.0, text),
    "seed": (SAMPLED, 2, text),
    "logit_bias": (GREEDY, {"65": 100}, text),
    "top_k": (SAMPLED, 1, text),
    "min_p": (SAMPLED, 1.0, text),
    "repetition_penalty": (SAMPLED, 3.0, text),
    "min_tokens": (ENDS, 3, count),
    "ignore_eos": (ENDS, True, count),
    "stop_token_ids": (ALL_A, [65], text),
    "include_stop_str_in_output": (ALL_A | {"stop": "AAA"}, True, text),
}
EFFECTS: dict[tuple[str, str], tuple[dict[str, Any], Any, Look]] = {
    **{(path, name): effect for path in (TEXT, CHAT) for name, effect in SHARED.items()},
    (TEXT, "prompt"): (GREEDY, "Another", text),
    (TEXT, "max_tokens"): (ALL_A, 3, text),
    (TEXT, "best_of"): (SAMPLED, 3, count),
    (TEXT, "echo"): (GREEDY, True, text),
    (TEXT, "logprobs"): (GREEDY, 2, logprobs),
    (CHAT, "messages"): (GREEDY, [{"role": "system", "content": "The quick"}], text),
    (CHAT, "max_tokens"): (ALL_A, 3, text),
    (CHAT, "max_completion_tokens"): (ALL_A | {"max_tokens": None, "stop": 20 * "A"}, 3, text),
    (CHAT, "logprobs"): (GREEDY, True, logprobs),
    (CHAT, "top_logprobs"): (GREEDY | {"logprobs": True}, 2, logprobs),
}
# Without an effect: what says who asks, and what takes only the value that changes nothing.
WITHOUT = {(TEXT, "user"), (CHAT, "user"), (TEXT, "suffix"), (CHAT, "response_format")}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("models")
    with served(small_model(root / "first"), small_model(root / "second", seed=1), timeout_s=3600) as server:
        yield server


def test_every_field_is_in_the_table() -> None:
    fields = {(path, name) for path, body in ((TEXT, CompletionBody), (CHAT, ChatBody)) for name in body.model_fields}
    assert fields == {*EFFECTS, *WITHOUT}
    assert set(StreamOptions.model_fields) == {"include_usage"}
    assert set(Message.model_fields) == {"role", "content"}
    assert set(TextPart.model_fields) == {"type", "text"}
    for body in (Options, CompletionBody, ChatBody, StreamOptions, Message, TextPart, ResponseFormat):
        assert issubclass(body, Body)
        assert body.model_config.get("extra") == "forbid"


@pytest.mark.parametrize(("path", "field"), EFFECTS, ids=str)
def test_a_field_changes_the_answer(running: Running, path: str, field: str) -> None:
    others, value, look = EFFECTS[path, field]

    def ask(**more: Any) -> Any:
        answer = by_socket(running, path, BASE[path] | others | more)
        assert answer.status == 200, answer.error
        return look(answer)

    without = ask()
    assert ask() == without, "not by chance"
    assert ask(**{field: value}) != without


def test_what_would_be_ignored_is_refused(running: Running) -> None:
    for path, field, value in ((TEXT, "suffix", "x"), (CHAT, "response_format", {"type": "json_object"})):
        answer = by_socket(running, path, BASE[path] | {field: value})
        assert answer.status == 400
        assert answer.error is not None
        assert answer.error["param"] == field
