"""The way from a client's body (`fields`) to requests to the engine; and errors in OpenAI's form."""

import logging
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from apps.serve.config import HttpConfig
from apps.serve.engine import Engine
from apps.serve.fields import ChatBody, CompletionBody, Options, StreamOptions
from apps.serve.request import FieldError, Request, Sampling, too_long
from apps.serve.template import RendererFailed, TooLarge
from apps.serve.text import Text
from core.config import UserError

log = logging.getLogger("serve")
# Halves of surrogate pairs are no characters, so no tokenizer takes them.
_HALF_PAIR = re.compile("[\ud800-\udfff]")


class ApiError(Exception):
    """An answer that is an error, in OpenAI's form."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        super().__init__(message)
        self.status, self.headers = status, headers or {}
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    error: ErrorDetail


@dataclass(frozen=True)
class Call:
    """One HTTP request: a request to the engine for each prompt, and how the answer is to look.

    echoes         text of each prompt, where it is to stand in front
    num_choices    of each prompt
    tells_usage    whether each piece of a stream tells the usage until then
    obfuscated     whether pieces of a stream are padded to sizes that do not tell what they say
    """

    id: str
    created: int
    model: str
    text: Text
    requests: tuple[Request, ...]
    num_choices: int
    is_chat: bool
    stream: bool
    include_usage: bool
    tells_usage: bool
    obfuscated: bool
    logprobs: int | None
    echoes: tuple[str, ...] | None = None


def completion_call(body: CompletionBody, model: str, engine: Engine, config: HttpConfig, timeout_s: float) -> Call:
    """Raises ApiError for what cannot be done. The prompts' number is checked before they cost anything."""
    given = _listed(body.prompt)
    best_of, n = body.best_of or body.n or 1, body.n or 1
    if len(given) > config.max_queue:
        raise ApiError(400, f"{len(given)} prompts; this server takes {config.max_queue}", param="prompt")
    _check_choices(len(given) * best_of, config.max_choices, "prompt" if best_of == 1 else "n")
    texts, prompts = _prompts(given, engine)
    if best_of < n:
        raise ApiError(400, f"best_of is {best_of} and n is {n}; best_of is at least n", param="best_of")
    if best_of > n and body.stream:
        raise ApiError(
            400, "the best of several texts is known only at the end; leave out stream or best_of", param="best_of"
        )
    if body.max_tokens == 0 and not body.echo:
        raise ApiError(400, "max_tokens is 0, which is of use only with echo; give at least 1", param="max_tokens")
    call_id = f"cmpl-{secrets.token_hex(12)}"
    requests = []
    for index, prompt in enumerate(prompts):
        max_tokens = _max_tokens(body.max_tokens, 16, len(prompt), engine, "prompt", "max_tokens")
        request = Request(
            id=f"{call_id}-{index}",
            prompt=tuple(prompt),
            max_tokens=max_tokens,
            sampling=_sampling(body),
            num_sequences=best_of,
            logprobs=body.logprobs,
            prompt_logprobs=body.logprobs if body.echo else None,
            **_endings(body, engine.text, max_tokens),
        )
        requests.append(_checked(request, engine))
    echoes = tuple(t if t is not None else engine.text.decode(p) for t, p in zip(texts, prompts)) if body.echo else None
    return _call(body, call_id, model, engine, tuple(requests), n, False, body.logprobs, echoes)


def chat_call(body: ChatBody, model: str, engine: Engine, config: HttpConfig, timeout_s: float) -> Call:
    """Raises ApiError for what cannot be done; TimeoutError where the template takes longer than that."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    messages = [message.as_text() for message in body.messages]
    _check_texts([text for message in messages for text in message.values()], "messages", engine)
    _check_choices(body.n or 1, config.max_choices, "n")
    try:
        prompt, stop = engine.text.encode_chat(messages, _max_characters(engine), timeout_s)
    except TooLarge:
        raise _too_long(engine, "your messages make a text that cannot be held by so many", "messages") from None
    except RendererFailed as error:
        log.error("%s", error)
        raise ApiError(500, str(error), kind="server_error") from None
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    call_id = f"chatcmpl-{secrets.token_hex(12)}"
    field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = _max_tokens(getattr(body, field), None, len(prompt), engine, "messages", field)
    endings = _endings(body, engine.text, max_tokens)
    endings["stop"] += stop
    request = Request(
        id=f"{call_id}-0",
        prompt=tuple(prompt),
        max_tokens=max_tokens,
        sampling=_sampling(body),
        num_sequences=body.n or 1,
        logprobs=logprobs,
        **endings,
    )
    return _call(body, call_id, model, engine, (_checked(request, engine),), body.n or 1, True, logprobs, None)


def _call(
    body: Options, call_id: str, model: str, engine: Engine, requests: tuple[Request, ...], n: int, is_chat: bool,
    logprobs: int | None, echoes: tuple[str, ...] | None,
) -> Call:  # fmt: skip
    if body.stream_options is not None and not body.stream:
        raise ApiError(400, "stream_options is of use only with stream", param="stream_options")
    options = body.stream_options or StreamOptions()
    if options.continuous_usage_stats and not options.include_usage:
        message = "continuous_usage_stats tells usage in each piece, and include_usage is not set; set it too"
        raise ApiError(400, message, param="stream_options")
    return Call(
        id=call_id,
        created=int(time.time()),
        model=model,
        text=engine.text,
        requests=requests,
        num_choices=n,
        is_chat=is_chat,
        stream=bool(body.stream),
        include_usage=bool(options.include_usage),
        tells_usage=bool(options.continuous_usage_stats),
        obfuscated=bool(options.include_obfuscation),
        logprobs=logprobs,
        echoes=echoes,
    )


def _listed(prompt: Any) -> list[str | list[int]]:
    if not isinstance(prompt, list):
        return [prompt]
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give at least one prompt", param="prompt")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _prompts(given: list[str | list[int]], engine: Engine) -> tuple[list[str | None], list[list[int]]]:
    """Text (None where tokens were given) and tokens of each prompt."""
    texts, prompts = [], []
    for one in given:
        if isinstance(one, str):
            _check_texts([one], "prompt", engine)
            try:
                prompts.append(engine.text.encode(one))
            except UserError as error:
                raise ApiError(400, str(error), param="prompt") from None
            texts.append(one)
        else:
            prompts.append(one)
            texts.append(None)
    return texts, prompts


def _max_characters(engine: Engine) -> int:
    """The characters beyond which a text has more tokens than the model takes."""
    return engine.max_length * engine.text.longest_token


def _check_texts(texts: Sequence[str], param: str, engine: Engine) -> None:
    """Before they cost time."""
    for text in texts:
        found = _HALF_PAIR.search(text)
        if found is not None:
            raise ApiError(
                400, f"{param} holds half a surrogate pair, U+{ord(found[0]):04X}; leave it out", param=param
            )
    length = sum(map(len, texts))
    if length > _max_characters(engine):
        raise _too_long(engine, f"the {param} of {length} characters cannot be held by so many", param)


def _check_choices(num_choices: int, most: int, param: str) -> None:
    if num_choices > most:
        message = f"{num_choices} texts are asked for at once; this server writes at most {most}"
        raise ApiError(400, message, param=param)


def _max_tokens(
    given: int | None, default: int | None, prompt_tokens: int, engine: Engine, prompt: str, field: str
) -> int:
    """prompt, field  those that the prompt and `given` came in"""
    left, least = engine.max_length - prompt_tokens, 0 if given == 0 else 1
    wanted = given if given is not None else left if default is None else min(default, left)
    if left < least or wanted > left:
        what = f"your prompt has {prompt_tokens} tokens" + (", which leaves none for the text" if left == 0 else "")
        if given is not None:
            what = f"you requested {prompt_tokens + given} tokens ({prompt_tokens} in the prompt, {given} in the text)"
        raise _too_long(engine, what, prompt if left < least else field)
    return wanted


def _too_long(engine: Engine, what: str, param: str) -> ApiError:
    return ApiError(400, too_long(engine.max_length, what), param=param, code="context_length_exceeded")


def _sampling(body: Options) -> Sampling:
    top_k = body.top_k if body.top_k and body.top_k > 0 else None  # 0 and -1: all, as elsewhere
    return Sampling(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_k=top_k,
        top_p=1.0 if body.top_p is None else body.top_p,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        logit_bias=_logit_bias(body.logit_bias or {}),
        seed=secrets.randbits(62) if body.seed is None else body.seed,
    )


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and len(key) < 10):
            raise ApiError(400, "logit_bias maps token ids, written as digits, to numbers", param="logit_bias")
        bias[int(key)] = value
    return bias


def _endings(body: Options, text: Text, max_tokens: int) -> dict[str, Any]:
    if (body.min_tokens or 0) > max_tokens:
        raise ApiError(
            400, f"min_tokens is {body.min_tokens}, more than the {max_tokens} that may be written", param="min_tokens"
        )
    stop = () if body.stop is None else (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    stop_ids = frozenset(body.stop_token_ids or ()) | (frozenset() if body.ignore_eos else text.end_ids)
    return {
        "stop": stop,
        "stop_ids": stop_ids,
        "include_stop": bool(body.include_stop_str_in_output),
        "min_tokens": body.min_tokens or 0,
    }


def _checked(request: Request, engine: Engine) -> Request:
    try:
        engine.check(request)
    except FieldError as error:
        raise ApiError(400, str(error), param=error.field) from None
    return request
