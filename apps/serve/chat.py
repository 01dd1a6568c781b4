"""`serve chat`: talk to a served model in the terminal."""

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from core.config import UserError, parse


@dataclass(frozen=True)
class ChatConfig:
    """Talk to a served model. An empty line or Ctrl-D ends it; /clear forgets what was said."""

    url: str = "http://127.0.0.1:8000"
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
    headers = {"Content-Type": "application/json"}
    if config.api_key_file is not None:
        headers["Authorization"] = f"Bearer {_key(config.api_key_file)}"
    for event in post(config.url, "/v1/chat/completions", body, headers):
        if "error" in event:
            raise UserError(event["error"]["message"])
        for choice in event["choices"]:
            yield choice["delta"].get("content", "")


def post(url: str, path: str, body: dict[str, Any], headers: dict[str, str]) -> Iterator[dict[str, Any]]:
    """The events of a streamed answer.  Raises UserError where there is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UserError(f"{url} is no address of a server; give one such as http://127.0.0.1:8000")
    connect = HTTPSConnection if parts.scheme == "https" else HTTPConnection
    connection = connect(parts.hostname, parts.port)
    try:
        connection.request("POST", parts.path.rstrip("/") + path, json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != 200:
            raise UserError(_complaint(response.status, response.read()))
        for line in response:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    except (OSError, HTTPException) as error:
        raise UserError(f"no answer from {url} ({error}); start one with megalith serve --model DIR") from None
    finally:
        connection.close()


def _complaint(status: int, body: bytes) -> str:
    try:
        return json.loads(body)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        return f"the server answered {status}"


def _key(path: Path) -> str:
    try:
        return path.read_text().splitlines()[0].strip()
    except (OSError, ValueError, IndexError) as error:
        raise UserError(f"cannot read the key from {path} ({error})") from None
