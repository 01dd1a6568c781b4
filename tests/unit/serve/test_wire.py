"""The server at the level of bytes: who is called, how bodies are framed, who is slow, and who closes a side."""

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from apps.serve import api
from core.web import wire
from tests.support.http_server import HANGS_S, Running, get, post, raw, served, small_model

ASKED = {"prompt": "The quick", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return small_model(tmp_path_factory.mktemp("models") / "first")


@pytest.fixture(scope="module")
def running(folder: Any) -> Iterator[Running]:
    with served(folder, timeout_s=3600, max_queue=8, max_choices=8, allow_host=("Box.lan", "10.1.2.3")) as server:
        yield server


def request(path: str, body: Any = None, host: str = "localhost", **headers: str) -> bytes:
    data = b"" if body is None else json.dumps(body).encode()
    given = {"Host": host, "Connection": "close"} | {name.replace("_", "-"): value for name, value in headers.items()}
    if body is not None:
        given |= {"Content-Type": "application/json", "Content-Length": str(len(data))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    return f"{'GET' if body is None else 'POST'} {path} HTTP/1.1\r\n{lines}\r\n".encode() + data


# --- Host -------------------------------------------------------------------------------------------------------------

OURS = (
    "localhost", "LOCALHOST:8000", "localhost.", "a.localhost:1", "127.0.0.1", "127.8.9.1:80", "[::1]", "[::1]:8000",
    "box.lan", "BOX.LAN:8000", "box.lan.", "10.1.2.3:8000",
)  # fmt: skip
FOREIGN = (
    "evil.example", "evil.example:8000", "localhost.evil.example", "127.0.0.1.evil.example", "evillocalhost",
    "10.1.2.4", "[::2]", "0.0.0.0", "[::]", "127.0.0.1@evil.example",
    "box.lan.evil.example", "a:b:80", "localhost:80:80", "\xe9",
)  # fmt: skip


@pytest.mark.parametrize("host", OURS)
def test_its_own_names_are_answered(running: Running, host: str) -> None:
    assert raw(running.port, request("/v1/models", host=host))[0] == 200


@pytest.mark.parametrize("host", FOREIGN)
def test_no_other_name_is(running: Running, host: str) -> None:
    """Not even with a matching Origin, as a page has whose name was pointed to this machine."""
    origin = f"http://{host}"
    for path, body in (("/v1/models", None), ("/v1/completions", ASKED), ("/", None), ("/metrics", None)):
        data = request(path, body, host, Origin=origin).decode().encode("latin-1")
        status, _, answer = raw(running.port, data)
        assert status == 403
        assert json.loads(answer)["error"]["code"] == "host_not_allowed"
        assert "--allow-host" in json.loads(answer)["error"]["message"]


def test_with_a_key_or_on_all_addresses(folder: Any, tmp_path: Any) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    with served(folder, api_key_file=key) as running:
        allowed = {"Authorization": "Bearer sesame"}
        assert raw(running.port, request("/v1/models", host="my.proxy.example", **allowed))[0] == 200
    with served(folder, host="0.0.0.0") as running:
        assert raw(running.port, request("/v1/models", host="192.168.7.7:8000"))[0] == 200
        assert raw(running.port, request("/v1/models", host="evil.example"))[0] == 403


# --- framing ----------------------------------------------------------------------------------------------------------


def test_a_body_of_two_lengths_is_refused(running: Running) -> None:
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    both = f"{head}Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/models HTTP/1.1\r\n\r\n"
    status, headers, answer = raw(running.port, both.encode())  # one answer, and the connection is closed
    assert status == 400
    assert headers["connection"] == "close"
    assert "Content-Length or Transfer-Encoding" in json.loads(answer)["error"]["message"]
    old = head.replace("1.1", "1.0") + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    assert raw(running.port, old.encode())[0] == 400


def test_prompts_are_counted_before_they_are_tokenized(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def tokenized(*_: Any) -> Any:
        raise AssertionError("tokenized")

    monkeypatch.setattr(api, "_prompts", tokenized)
    for body in ({"prompt": ["x"] * 9}, {"prompt": ["x"] * 5, "n": 2}, {"prompt": [[1]] * 5, "best_of": 2}):
        status, _, answer = post(running.port, "/v1/completions", body)
        assert status == 400
        assert "this server" in answer["error"]["message"]


# --- who is slow ------------------------------------------------------------------------------------------------------


def ends(connection: socket.socket) -> bytes:
    """What comes until the server ends the connection."""
    received = b""
    try:
        while more := connection.recv(65536):
            received += more
    except ConnectionResetError:
        pass
    return received


@pytest.mark.parametrize("count", [30, pytest.param(800, marks=pytest.mark.soak)])
def test_half_sent_headers_do_not_stay(running: Running, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Nothing sent, a part, a part after an answer, and one that goes on, byte by byte; others are answered."""
    monkeypatch.setattr(wire, "HEADERS_S", 1.0)
    connections = [socket.create_connection(("127.0.0.1", running.port), timeout=HANGS_S) for _ in range(count)]
    for number, connection in enumerate(connections):
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: loc"
        kept = request("/health").replace(b"Connection: close\r\n", b"") if number % 3 == 2 else b""
        connection.sendall(kept + begun if number % 3 else b"")
    stop = threading.Event()

    def trickle() -> None:
        while not stop.wait(0.05):
            try:
                connections[1].sendall(b"a")
            except OSError:
                return

    trickling = threading.Thread(target=trickle)
    trickling.start()
    assert get(running.port, "/health")[0] == 200
    for number, connection in enumerate(connections):
        assert ends(connection).startswith(b"HTTP/1.1 200") == (number % 3 == 2)
        connection.close()
    stop.set()
    trickling.join()


def test_a_long_answer_is_not_cut(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEADERS_S", 0.2)
    undo = running.slow_down(0.05)
    try:
        status, _, answer = post(running.port, "/v1/completions", ASKED)
        assert (status, answer["usage"]["completion_tokens"]) == (200, 12)
    finally:
        undo()


# --- who closes a side ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("step_s", [0.0, 0.05], ids=["at once", "after a while"])
def test_a_half_closed_client_gets_its_answer(
    running: Running, monkeypatch: pytest.MonkeyPatch, stream: bool, step_s: float
) -> None:
    wanted = post(running.port, "/v1/completions", ASKED)[2]["choices"][0]["text"]
    monkeypatch.setattr(wire, "PATIENCE_S", 0.1 if step_s else 60.0)
    undo = running.slow_down(step_s)
    try:
        with socket.create_connection(("127.0.0.1", running.port), timeout=HANGS_S) as connection:
            data = request("/v1/completions", ASKED | {"stream": stream}).replace(b"Connection: close\r\n", b"")
            connection.sendall(data)
            connection.shutdown(socket.SHUT_WR)
            if not step_s and not stream:
                answer = ends(connection)  # nothing but the answer
                assert answer.startswith(b"HTTP/1.1 200 ")
                assert json.loads(answer.partition(b"\r\n\r\n")[2])["choices"][0]["text"] == wanted
                return
            response = http.client.HTTPResponse(connection, method="POST")
            response.begin()
            assert response.status == 200
            body = response.read().decode()
            assert connection.recv(1) == b""
    finally:
        undo()
    if stream:
        events = [json.loads(line[6:]) for line in body.splitlines() if line.startswith("data: {")]
        assert "".join(event["choices"][0]["text"] for event in events) == wanted
        assert body.endswith("data: [DONE]\n\n")
    else:
        assert json.loads(body)["choices"][0]["text"] == wanted


def test_who_left_is_told_from_who_closed_a_side(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are waiting for whole answers; one of them is gone."""
    monkeypatch.setattr(wire, "PATIENCE_S", 0.1)
    undo, before = running.slow_down(0.05), running.loop.engine.counts.aborted
    try:
        long = request("/v1/completions", ASKED | {"max_tokens": 60})
        gone, half = (socket.create_connection(("127.0.0.1", running.port), timeout=HANGS_S) for _ in range(2))
        gone.sendall(long)
        half.sendall(long)
        running.wait(lambda: len(running.loop.engine.running) == 2)
        half.shutdown(socket.SHUT_WR)
        gone.close()
        running.wait(lambda: running.loop.engine.counts.aborted == before + 1)
        assert b'"finish_reason": "length"' in ends(half)
        half.close()
    finally:
        undo()
    assert running.loop.engine.counts.aborted == before + 1


def test_half_a_request_is_no_request(running: Running) -> None:
    with socket.create_connection(("127.0.0.1", running.port), timeout=HANGS_S) as connection:
        connection.sendall(request("/v1/completions", ASKED)[:-3])
        connection.shutdown(socket.SHUT_WR)
        began = time.monotonic()
        assert b" 200 " not in ends(connection)
        assert time.monotonic() - began < wire.HEADERS_S
    running.wait(running.is_idle)
