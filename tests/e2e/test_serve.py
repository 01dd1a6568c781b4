"""The real commands: serve, on two ranks in 8 bits too, chat and bench against it, and SIGTERM amid a text."""

import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.command import Forked, ended, run
from tests.support.http_server import HANGS_S, get, post, small_model
from tests.unit.serve.test_http import CHAT


@contextmanager
def command(*options: str) -> Iterator[tuple[Forked, int]]:
    """`serve OPTIONS`: the process and its port. Ended afterwards."""
    with Forked("-m", "apps.serve", *options, "--port", "0", "--engine.cache", "10MB", "--device", "cpu") as process:
        line = process.first_line(HANGS_S)
        assert line.startswith("serving tiny at http://127.0.0.1:"), line
        yield process, int(line.split("/")[2].split(":")[1])
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)  # a launcher that is killed leaves its ranks behind
        ended(process, HANGS_S)


@pytest.fixture(
    scope="module",
    params=[(), ("--tp", "2"), pytest.param(("--tp", "2", "--quantize", "int8"), marks=pytest.mark.soak)],
    ids=lambda options: " ".join(options) or "one rank",
)
def running(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Forked, int]]:
    """Of a folder in bfloat16, which is what it computes in."""
    folder = small_model(tmp_path_factory.mktemp("models") / "tiny", dtype=torch.bfloat16)
    with command("--model", str(folder), *request.param) as found:
        yield found
        ended(found[0], HANGS_S)
        assert "computed in bfloat16" in found[0].communicate()[1]


def test_served_benched_chatted_and_stopped(running: tuple[Forked, int], tmp_path: Path) -> None:
    process, port = running
    url = f"http://127.0.0.1:{port}"
    assert get(port, "/ready")[0] == 200
    asked = {"prompt": "abc", "max_tokens": 20, "temperature": 0}
    answer = post(port, "/v1/completions", asked)[2]
    assert answer["usage"]["completion_tokens"] > 0
    assert post(port, "/v1/completions", asked)[2]["choices"] == answer["choices"]
    assert post(port, "/v1/chat/completions", CHAT | {"max_tokens": 4})[0] == 200

    out = tmp_path / "bench.json"
    done = run("-m", "apps.serve", "bench", "--url", url, "--requests", 6, "--clients", 3, "--out", out)
    assert done.returncode == 0, done.stderr
    figures = json.loads(out.read_text())
    assert figures["refused"] == 0
    assert figures["tokens_per_s"] > 0

    chat = ("-m", "apps.serve", "chat", "--url", url, "--max-tokens", 8, "--temperature", 0)
    talked = run(*chat, timeout_s=HANGS_S, typed="Hello\nAgain\n")
    assert talked.returncode == 0, talked.stderr
    assert len(talked.stdout.splitlines()) >= 2

    # A text that is being written when the signal comes is written to its end.
    body = json.dumps({"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        received = connection.recv(4096)
        process.send_signal(signal.SIGTERM)
        while more := connection.recv(65536):
            received += more
    assert b'"finish_reason": "length"' in received
    assert b"data: [DONE]" in received
    code = ended(process, HANGS_S)
    assert code in (0, 128 + signal.SIGTERM)


FAILING = """
import sys
from apps.serve import runner
from apps.serve.__main__ import main

whole = runner.Runner._compute

def failing(self, step, *rest):
    if 70 in step.ids:
        raise RuntimeError("out of everything")
    return whole(self, step, *rest)

runner.Runner._compute = failing
sys.argv[0] = "serve"
sys.exit(main())
"""


def test_a_dead_engine_ends_the_process(tmp_path: Path) -> None:
    """Who waits is told, and the exit code lets a supervisor start it again."""
    script = tmp_path / "failing.py"
    script.write_text(FAILING)
    folder = small_model(tmp_path / "tiny")
    options = ("--model", folder, "--port", 0, "--engine.cache", "10MB", "--device", "cpu")
    with Forked(script, *options) as process:
        port = int(process.first_line(HANGS_S).split("/")[2].split(":")[1])
        assert post(port, "/v1/completions", {"prompt": "abc", "max_tokens": 2})[0] == 200
        status, _, answer = post(port, "/v1/completions", {"prompt": [70], "max_tokens": 2})
        assert status == 500
        assert "out of everything" in answer["error"]["message"]
        assert ended(process, HANGS_S) == 1
