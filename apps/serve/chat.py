"""`serve chat`: talk to a served model in the terminal."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from core.config import UserError, parse
from core.web.client import address, client_of, said_of, untrusted
from core.web.key import read_key

_TIMEOUT = httpx2.Timeout(None, connect=10.0)  # a server that is busy may take its time; Ctrl-C ends it
_OWN = {f"all://{host}": None for host in ("127.0.0.1", "localhost", "[::1]")}
"""Hosts that are asked without a proxy."""
_END = "[DONE]"
_EXAMPLE = "http://127.0.0.1:8000"


@dataclass(frozen=True)
class ChatConfig:
    """Talk to a served model. An empty line or Ctrl-D ends it; /clear forgets what was said."""

    url: str = _EXAMPLE
    """the server"""
    model: str | None = None
    """one of those served; by default the first"""
    system: str = ""
    """what the model is told before the conversation"""
    max_tokens: int = 256
    temperature: float = 0.8
    top_p: float = 0.95
    seed: int | None = None
    api_key_file: Path | None = None
    """file whose first line is the server's key"""


def main(argv: list[str]) -> int:
    config = parse({"default": ChatConfig}, argv, "megalith serve chat", default="default")
    opening = [{"role": "system", "content": config.system}] if config.system else []
    messages = list(opening)
    while (line := _read()) is not None:
        if line == "/clear":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        answer = ""
        try:
            for piece in stream(config, messages):
                print(piece, end="", flush=True)
                answer += piece
        except KeyboardInterrupt:
            pass  # ends this answer, not the conversation
        print()
        messages.append({"role": "assistant", "content": answer})
    return 0


def _read() -> str | None:
    """The user's next line; None at the end."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip() or None
    except EOFError:
        return None


def stream(config: ChatConfig, messages: list[dict[str, str]]) -> Iterator[str]:
    """The answer in pieces.  Raises UserError with what the server says is wrong."""
    body: dict[str, Any] = {
        "messages": messages,
        "max_tokens": config.max_tokens,
        "temperature": config.temperature,
        "top_p": config.top_p,
        "stream": True,
    }
    body |= {name: value for name, value in (("model", config.model), ("seed", config.seed)) if value is not None}
    key = read_key(config.api_key_file)
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    for event in post(config.url, "/v1/chat/completions", body, headers):
        try:
            if "error" in event:
                raise UserError(event["error"]["message"])
            found = [choice["delta"].get("content") or "" for choice in event["choices"]]
        except (AttributeError, KeyError, TypeError):
            raise _no_text(address(config.url, _EXAMPLE)[0]) from None
        yield from found


def _no_text(server: str) -> UserError:
    return UserError(f"{server} answers what is no text of a model; is it the address of megalith serve?")


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[Any]:
    """The events of a streamed answer.  Raises UserError with one line where there is none, or where it breaks off."""
    server, login = address(url, _EXAMPLE)
    given: dict[str, Any] = {"auth": None if "Authorization" in headers else login, "mounts": _OWN}
    asked: dict[str, Any] = {"method": "POST", "json": body, "headers": headers}
    begun = False
    try:
        with client_of(server, timeout=_TIMEOUT, **given) as client, client.sse(server + path, **asked) as events:
            if events.response.status_code != 200:
                raise UserError(_complaint(server, events.response))
            for event in events:
                begun = True
                if event.data != _END:
                    yield _parsed(server, event.data)
    except httpx2.SSEError:
        raise _no_text(server) from None
    except httpx2.RequestError as error:
        if found := untrusted(error):
            raise UserError(f"the server {server}: {found}") from None
        if begun:
            raise UserError(f"the answer of {server} breaks off ({said_of(error)}); see what the server says") from None
        raise UserError(
            f"no answer from {server} ({said_of(error)}); start one with megalith serve --model DIR"
        ) from None


def _parsed(server: str, data: str) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise _no_text(server) from None


def _complaint(server: str, response: httpx2.Response) -> str:
    try:
        return json.loads(response.read())["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"{server} answers {response.status_code}; is it the address of megalith serve?"
