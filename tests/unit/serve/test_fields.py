"""Nothing is accepted and then ignored: each field of the API changes the answer, or is refused."""

import json
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import openai
import pytest
from openai.types import chat, completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from apps.serve.fields import (
    Body,
    ChatBody,
    CompletionBody,
    Message,
    Options,
    RefusalPart,
    StreamOptions,
    TextPart,
)
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
# Without an effect on an answer, by definition: values that clients send.
HARMLESS: dict[str, Any] = {
    "user": "me",
    "metadata": {"a": "b"},
    "store": True,
    "service_tier": "auto",
    "safety_identifier": "me",
    "prompt_cache_key": "k",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
}
WITHOUT: dict[tuple[str, str], Any] = {
    **{(path, name): value for path in (TEXT, CHAT) for name, value in HARMLESS.items()},
    (CHAT, "parallel_tool_calls"): True,
}
# What asks for nothing is accepted, everything else refused by name.
ONLY: dict[tuple[str, str], tuple[list[Any], Any]] = {
    (TEXT, "suffix"): ([], "x"),
    (CHAT, "tools"): ([[]], [{"type": "function", "function": {"name": "f"}}]),
    (CHAT, "tool_choice"): (["none", "auto"], "required"),
    (CHAT, "functions"): ([[]], [{"name": "f"}]),
    (CHAT, "function_call"): (["none", "auto"], {"name": "f"}),
    (CHAT, "response_format"): ([{"type": "text"}], {"type": "json_object"}),
    (CHAT, "modalities"): ([["text"]], ["text", "audio"]),
    (CHAT, "audio"): ([], {"voice": "ash", "format": "mp3"}),
    (CHAT, "prediction"): ([], {"type": "content", "content": "x"}),
    (CHAT, "reasoning_effort"): (["none"], "high"),
    (CHAT, "verbosity"): (["medium"], "low"),
    (CHAT, "web_search_options"): ([], {}),
    (CHAT, "moderation"): ([], {"type": "auto"}),
}
# What only some of OpenAI's fields are a part of: tools, which are refused as a whole.
OTHER_ROLES = {"tool_call_id"}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    root = tmp_path_factory.mktemp("models")
    with served(small_model(root / "first"), small_model(root / "second", seed=1), timeout_s=3600) as server:
        yield server


def test_every_field_is_in_the_table() -> None:
    fields = {(path, name) for path, body in ((TEXT, CompletionBody), (CHAT, ChatBody)) for name in body.model_fields}
    assert fields == {*EFFECTS, *WITHOUT, *ONLY}
    assert set(StreamOptions.model_fields) == {"include_usage", "continuous_usage_stats", "include_obfuscation"}
    for body in (Options, CompletionBody, ChatBody, StreamOptions, Message, TextPart, RefusalPart):
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


def test_every_field_of_the_official_client_is_known() -> None:
    """What OpenAI's own package lets its users send, by the server's own rules: no field of it is "no such field"."""

    def missing(theirs: Any, ours: type[Body]) -> set[str]:
        return {*get_type_hints(theirs)} - {*ours.model_fields} - {"stream"}

    assert not missing(completion_create_params.CompletionCreateParamsBase, CompletionBody)
    assert not missing(chat_create_params.CompletionCreateParamsBase, ChatBody)
    assert not missing(chat.ChatCompletionStreamOptionsParam, StreamOptions)
    assert not missing(chat.ChatCompletionContentPartTextParam, TextPart)
    assert not missing(chat.ChatCompletionContentPartRefusalParam, RefusalPart)
    for role in ("Assistant", "Developer", "System", "User", "Function", "Tool"):
        assert missing(getattr(chat, f"ChatCompletion{role}MessageParam"), Message) <= OTHER_ROLES
    assert {*chat.ChatCompletionMessage.model_fields} <= {*Message.model_fields}


def content(running: Running, path: str, **more: Any) -> Any:
    answer = by_socket(running, path, BASE[path] | GREEDY | {"max_tokens": 10} | more)
    assert answer.status == 200, answer.error
    return text(answer)


def test_what_changes_nothing_is_accepted(running: Running) -> None:
    plain = {path: content(running, path) for path in (TEXT, CHAT)}
    for (path, field), value in WITHOUT.items():
        assert content(running, path, **{field: value}) == plain[path], field
        assert content(running, path, **{field: None}) == plain[path], field
    for (path, field), (harmless, _) in ONLY.items():
        for value in (None, *harmless):
            assert content(running, path, **{field: value}) == plain[path], field


@pytest.mark.parametrize(("path", "field"), ONLY, ids=str)
def test_what_would_be_ignored_is_refused(running: Running, path: str, field: str) -> None:
    answer = by_socket(running, path, BASE[path] | {field: ONLY[path, field][1]})
    assert answer.status == 400
    assert answer.error is not None
    assert answer.error["param"] == field
    assert answer.error["message"].startswith(f"{field}: ")
    assert "leave it out" in answer.error["message"]


def test_the_servers_own_message_is_accepted(running: Running) -> None:
    """As a dialogue goes on: what the official client was given, in each of the forms in which clients keep it."""
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        asked: dict[str, Any] = {"model": "first", "max_tokens": 8, "temperature": 0}
        said: list[Any] = [{"role": "user", "content": "Hello", "name": "Ann"}]
        message = client.chat.completions.create(messages=said, **asked).choices[0].message
        sent_back = (
            message,
            message.model_dump(),
            message.to_dict(),
            {"role": "assistant", "content": message.content},
            {"role": "assistant", "content": [{"type": "text", "text": message.content}]},
            message.model_dump() | {"tool_calls": [], "annotations": [], "name": "Bot", "reasoning_content": None},
            message.model_dump() | {"provider_specific_fields": {"refusal": None}},  # as litellm keeps it
        )
        again: Any = {"role": "user", "content": "And?"}
        answers = {
            client.chat.completions.create(messages=[*said, form, again], **asked).choices[0].message.content
            for form in sent_back
        }
        assert len(answers) == 1
        silent = [
            {"role": "assistant", "content": None},
            {"role": "assistant"},
            {"role": "assistant", "content": ""},
            {"role": "assistant", "content": []},
        ]
        answers = [client.chat.completions.create(messages=[*said, form, again], **asked) for form in silent]
        assert len({answer.choices[0].message.content for answer in answers}) == 1
        refused = [
            {"role": "assistant", "content": None, "refusal": "No."},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "assistant", "content": "No."},
        ]
        answers = [client.chat.completions.create(messages=[*said, form, again], **asked) for form in refused]
        assert len({answer.choices[0].message.content for answer in answers}) == 1


def test_fields_of_providers_that_say_something_are_refused(running: Running) -> None:
    said = {"role": "assistant", "content": "x", "provider_specific_fields": {"thinking": "y"}}
    answer = by_socket(running, CHAT, BASE[CHAT] | {"messages": [said]})
    assert answer.error is not None
    assert (answer.status, answer.error["param"]) == (400, "messages[0].provider_specific_fields")


def test_usage_in_each_piece(running: Running) -> None:
    """It grows by the tokens that a piece brings, up to what the stream tells at its end."""
    for path in BASE:
        asked = BASE[path] | GREEDY | {"stream": True, "stream_options": {"include_usage": True}}
        plain = by_socket(running, path, asked)
        asked["stream_options"]["continuous_usage_stats"] = True
        answer = by_socket(running, path, asked)
        assert plain.chunks is not None
        assert answer.chunks is not None
        assert [chunk["usage"] for chunk in plain.chunks[:-1]] == [None] * (len(plain.chunks) - 1)
        counts = [chunk["usage"]["completion_tokens"] for chunk in answer.chunks]
        assert counts == sorted(counts)
        assert counts[-1] == counts[-2] == plain.chunks[-1]["usage"]["completion_tokens"] > 2
        alone = by_socket(running, path, asked | {"stream_options": {"continuous_usage_stats": True}})
        assert (alone.status, (alone.error or {}).get("param")) == (400, "stream_options")


def test_obfuscation(running: Running) -> None:
    """Sizes of a stream's pieces do not follow what they say."""
    asked = BASE[CHAT] | GREEDY | {"stream": True}
    plain = by_socket(running, CHAT, asked | {"stream_options": {"include_obfuscation": False}})
    padded = by_socket(running, CHAT, asked | {"stream_options": {"include_obfuscation": True}})
    assert plain.chunks is not None
    assert padded.chunks is not None
    assert not any("obfuscation" in chunk for chunk in plain.chunks)
    said = [{**chunk, "obfuscation": "", "id": "", "created": 0} for chunk in padded.chunks]
    assert said == [{**chunk, "obfuscation": "", "id": "", "created": 0} for chunk in plain.chunks]
    assert len({len(json.dumps(chunk)) for chunk in plain.chunks}) > 2
    assert len({len(json.dumps(chunk)) for chunk in padded.chunks}) <= 2
