"""What `serve chat` makes of an answer, and the one line that it says where there is none."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from apps.serve.chat import ChatConfig, stream
from core.config import UserError
from tests.support.listening import CERTIFICATE, Quiet, listening

SAID = [{"role": "user", "content": "hello"}]
EVENTS = "text/event-stream; charset=utf-8"


def event(found: Any) -> bytes:
    return f"data: {json.dumps(found)}\n\n".encode()


def piece(content: str | None) -> bytes:
    return event({"choices": [{"delta": {"content": content}}]})


@contextmanager
def answering(
    status: int, body: bytes, kind: str = EVENTS, certificate: Path | None = None, **headers: str
) -> Iterator[tuple[str, list[Any]]]:
    """The address of a server with that answer, and what it is asked.  It ends the connection when that is sent."""
    asked: list[Any] = []

    class Handler(Quiet):
        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            asked.append((self.path, self.headers.get("Authorization"), json.loads(self.rfile.read(length))))
            self.send_response(status)
            for name, value in {"Content-Type": kind, **headers}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(body)

    with listening(Handler, certificate) as url:
        yield url, asked


def test_pieces_come_one_by_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Comments, an empty first piece and the end are none; no proxy stands between this machine and itself."""
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    (tmp_path / "key").write_text("secret\n")
    body = b": a comment\n\n" + piece(None) + piece("Gr") + piece("üße\u2028") + b"data: [DONE]\n\n"
    with answering(200, body) as (url, asked):
        config = ChatConfig(url=f"{url}/", model="small", max_tokens=3, seed=5, api_key_file=tmp_path / "key")
        assert list(stream(config, SAID)) == ["", "Gr", "üße\u2028"]
    ((path, key, sent),) = asked
    assert (path, key) == ("/v1/chat/completions", "Bearer secret")
    assert sent == {"messages": SAID, "max_tokens": 3, "temperature": 0.8, "top_p": 0.95, "stream": True,
                    "model": "small", "seed": 5}  # fmt: skip


JSON = "application/json"
BROKEN = {
    "a server's own reason": (401, b'{"error": {"message": "give a key"}}', JSON, "give a key"),
    "another server": (404, b"<html>no such page</html>", "text/html", r"answers 404; is it the address of megalith"),
    "a page": (200, b"<html></html>", "text/html", "no text of a model; is it the address of megalith serve"),
    "no JSON": (200, b"data: hello\n\n", EVENTS, "no text of a model"),
    "other JSON": (200, event([1]), EVENTS, "no text of a model"),
    "other events": (200, event({"choices": 1}), EVENTS, "no text of a model"),
    "an error amid a text": (200, piece("a") + event({"error": {"message": "out of luck"}}), EVENTS, "out of luck"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_an_answer_that_is_none(name: str) -> None:
    status, body, kind, line = BROKEN[name]
    with answering(status, body, kind) as (url, _), pytest.raises(UserError, match=line) as raised:
        list(stream(ChatConfig(url=url), SAID))
    assert "\n" not in str(raised.value)


def test_an_answer_that_breaks_off() -> None:
    with answering(200, piece("a"), Content_Length="1000") as (url, _):
        found = stream(ChatConfig(url=url), SAID)
        assert next(found) == "a"
        with pytest.raises(UserError, match=r"the answer of http://127\.0\.0\.1:\d+ breaks off \(.+\); see what"):
            next(found)


def test_a_key_goes_to_no_other_address(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("secret")
    with answering(200, piece("a")) as (other, asked), answering(307, b"", Location=other) as (url, _):
        with pytest.raises(UserError, match="answers 307"):
            list(stream(ChatConfig(url=url, api_key_file=tmp_path / "key"), SAID))
        assert not asked


def test_a_certificate_that_nobody_vouches_for() -> None:
    with answering(200, piece("a"), certificate=CERTIFICATE) as (url, asked):
        with pytest.raises(
            UserError, match=rf"the server {url}: its certificate is not trusted \(.+\), nor by SSL_CERT"
        ):
            list(stream(ChatConfig(url=url), SAID))
        assert not asked


def test_nobody_there() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=rf"no answer from {url} \(.+\); start one with megalith serve --model DIR"):
            list(stream(ChatConfig(url=url), SAID))


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", "http://", "http://host:port"])
def test_no_address(url: str) -> None:
    with pytest.raises(UserError, match=rf"{url} is no address of a server; give one such as http://127\.0\.0\.1:8000"):
        list(stream(ChatConfig(url=url), SAID))


def test_a_key_that_no_header_may_hold(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("schlüssel")
    with pytest.raises(UserError, match=r"key holds no key; put one, of printable ASCII"):
        list(stream(ChatConfig(api_key_file=tmp_path / "key"), SAID))
