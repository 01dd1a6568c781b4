"""What a client may send, and how it becomes requests to the engine.

The fields are those of OpenAI's completions and chat completions, and the usual extensions of open servers (top_k,
min_p, repetition_penalty, min_tokens, ignore_eos, stop_token_ids, include_stop_str_in_output). A field that is not
listed here is refused: nothing is accepted and then ignored (`user` is the one field without an effect, by definition).
"""

import re
import secrets
import time
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from apps.serve.engine import Engine
from apps.serve.request import Request, Sampling
from apps.serve.text import Text
from core.config import UserError

MAX_STOP = 16
MAX_STOP_CHARACTERS = 256
MAX_LOGPROBS = 20
# Control characters that no text has (tabs and line ends it has), and halves of pairs, which are no characters.
_NO_TEXT = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f\ud800-\udfff]")

Int = Annotated[int, Field(strict=True, ge=-(2**63), lt=2**63)]
Float = Annotated[float, Field(strict=True, allow_inf_nan=False)]
Bool = Annotated[bool, Field(strict=True)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]
Bias = Annotated[float, Field(strict=True, ge=-100, le=100)]


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


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    include_usage: Bool = False


class ResponseFormat(Body):
    type: Literal["text"]


class TextPart(Body):
    type: Literal["text"]
    text: str


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class Options(Body):
    """What both endpoints take."""

    model: str | None = None
    n: Annotated[Int, Field(ge=1, le=128)] | None = None
    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOP)] | None = None
    stream: Bool | None = None
    stream_options: StreamOptions | None = None
    temperature: Annotated[Float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[Float, Field(ge=-2, le=2)] | None = None
    seed: Int | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] | None = None
    user: str | None = None
    top_k: Annotated[Int, Field(ge=-1)] | None = None
    min_p: Annotated[Float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[Float, Field(ge=0.01, le=100)] | None = None
    min_tokens: Annotated[Int, Field(ge=0)] | None = None
    ignore_eos: Bool | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=64)] | None = None
    include_stop_str_in_output: Bool | None = None


class CompletionBody(Options):
    """POST /v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    best_of: Annotated[Int, Field(ge=1, le=128)] | None = None
    echo: Bool | None = None
    logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    suffix: None = None


class ChatBody(Options):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1)]
    max_tokens: Annotated[Int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: Bool | None = None
    top_logprobs: Annotated[Int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None


@dataclass(frozen=True)
class Call:
    """One HTTP request: a request to the engine for each prompt, and how the answer is to look.

    echoes         text of each prompt, where it is to stand in front
    num_choices    of each prompt
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
    logprobs: int | None
    echoes: tuple[str, ...] | None = None


def completion_call(body: CompletionBody, model: str, engine: Engine, max_choices: int) -> Call:
    """Raises ApiError for what cannot be done."""
    texts, prompts = _prompts(body.prompt, engine)
    best_of, n = body.best_of or body.n or 1, body.n or 1
    _check_choices(len(prompts) * best_of, max_choices)
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
        max_tokens = _max_tokens(body.max_tokens, 16, len(prompt), engine)
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


def chat_call(body: ChatBody, model: str, engine: Engine, max_choices: int) -> Call:
    """Raises ApiError for what cannot be done."""
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
    if body.max_tokens is not None and body.max_completion_tokens not in (None, body.max_tokens):
        raise ApiError(400, "max_tokens and max_completion_tokens differ; give one of them", param="max_tokens")
    messages = [{"role": message.role, "content": _content(message)} for message in body.messages]
    for message in messages:
        _check_text(message["content"], "messages", engine)
    _check_choices(body.n or 1, max_choices)
    try:
        prompt, stop = engine.text.encode_chat(messages)
    except UserError as error:
        raise ApiError(400, str(error), param="messages") from None
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    call_id = f"chatcmpl-{secrets.token_hex(12)}"
    max_tokens = _max_tokens(body.max_completion_tokens or body.max_tokens, None, len(prompt), engine)
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
    return Call(
        id=call_id,
        created=int(time.time()),
        model=model,
        text=engine.text,
        requests=requests,
        num_choices=n,
        is_chat=is_chat,
        stream=bool(body.stream),
        include_usage=body.stream_options is not None and body.stream_options.include_usage,
        logprobs=logprobs,
        echoes=echoes,
    )


def _prompts(prompt: Any, engine: Engine) -> tuple[list[str | None], list[list[int]]]:
    """Text (None where tokens were given) and tokens of each prompt."""
    if not isinstance(prompt, list):
        prompt = [prompt]
    if not prompt:
        raise ApiError(400, "prompt is an empty list; give at least one prompt", param="prompt")
    if isinstance(prompt[0], int):
        prompt = [prompt]
    texts, prompts = [], []
    for one in prompt:
        if isinstance(one, str):
            _check_text(one, "prompt", engine)
            try:
                prompts.append(engine.text.encode(one))
            except UserError as error:
                raise ApiError(400, str(error), param="prompt") from None
            texts.append(one)
        else:
            prompts.append(one)
            texts.append(None)
    return texts, prompts


def _content(message: Message) -> str:
    if isinstance(message.content, str):
        return message.content
    return "".join(part.text for part in message.content)


def _check_text(text: str, param: str, engine: Engine) -> None:
    found = _NO_TEXT.search(text)
    if found is not None:
        what = "half a surrogate pair" if found[0] >= "\ud800" else "the control character"
        raise ApiError(400, f"{param} holds {what} U+{ord(found[0]):04X}; leave it out", param=param)
    if len(text) > engine.max_length * engine.text.longest_token:
        raise ApiError(
            400,
            f"{param} has {len(text)} characters, more than {engine.max_length} tokens can hold; shorten it",
            param=param,
            code="context_length_exceeded",
        )


def _check_choices(num_choices: int, most: int) -> None:
    if num_choices > most:
        raise ApiError(400, f"{num_choices} texts are asked for at once; this server writes at most {most}", param="n")


def _max_tokens(given: int | None, default: int | None, prompt_tokens: int, engine: Engine) -> int:
    left = engine.max_length - prompt_tokens
    wanted = given if given is not None else left if default is None else min(default, left)
    if wanted > left or left < 1:
        raise ApiError(
            400,
            f"the prompt has {prompt_tokens} tokens, which leaves {max(0, left)} of {engine.max_length}, and "
            f"max_tokens is {given if given is not None else 'left open'}; shorten one of them",
            param="max_tokens" if left >= 1 else "prompt",
            code="context_length_exceeded",
        )
    return wanted


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
    except UserError as error:
        raise ApiError(400, str(error)) from None
    return request
