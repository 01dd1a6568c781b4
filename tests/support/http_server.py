"""A real server on a free port, in a thread of the test's process; and a folder with a small model to serve."""

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from apps.llm.tokenizer import byte_tokenizer
from apps.serve.config import EngineConfig, HttpConfig
from apps.serve.loop import EngineLoop
from apps.serve.metrics import Metrics
from apps.serve.model import build_engine, find_model
from apps.serve.serve import Listener, uvicorn_config
from apps.serve.server import Server
from core.models import DecoderConfig, save_pretrained
from tests.unit.models.test_pretrained import random_decoder

HANGS_S = 240.0
"""What takes longer hangs, on however slow a machine; less than a test may take, so that the test says what hangs."""
ENGINE = EngineConfig(page_size=8, cache="2MB", max_running=4, max_batch_tokens=256, prefill_chunk=64)


def small_model(folder: Path, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    """A decoder over bytes that writes all sorts of them, whole characters and halves."""
    shape = {"vocab_size": 257, "dim": 32, "num_layers": 2, "num_heads": 4, "ffn_dim": 64, "max_length": 512}
    config = DecoderConfig(**shape | changes)
    save_pretrained(random_decoder(config, seed).to(dtype), config, folder, special_ids={"eos_token_id": 256})
    byte_tokenizer().save(folder)
    return folder


@dataclass
class Running:
    """A server under test."""

    url: str
    port: int
    server: Server

    @property
    def loop(self) -> EngineLoop:
        return next(iter(self.server.loops.values()))

    def slow_down(self, seconds: float) -> Callable[[], None]:
        """Let each step take so long.  Returns what undoes it."""
        runner = self.loop.engine.runner
        runner.run = lambda step: (time.sleep(seconds), type(runner).run(runner, step))[1]
        return lambda: runner.__dict__.pop("run", None)

    def wait(self, condition: Callable[[], bool]) -> None:
        """Until it comes to that. The limit only ends what hangs: what a test is about, it counts."""
        deadline = time.monotonic() + HANGS_S
        while not condition():
            assert time.monotonic() < deadline, "it does not come to that"
            time.sleep(0.005)

    def is_idle(self) -> bool:
        """Nobody is served, and all pages are free or idle."""
        engine = self.loop.engine
        return not engine.has_work and self.loop.num_open == 0 and engine.pages.num_free == engine.pages.num_pages


@contextmanager
def served(*folders: Path, engine: EngineConfig = ENGINE, **http: Any) -> Iterator[Running]:
    config, metrics = HttpConfig(port=0, **http), Metrics()
    sources = [find_model(folder) for folder in folders]
    loops = {s.name: EngineLoop(s.name, build_engine(s, engine, "cpu"), config.max_queue, metrics) for s in sources}
    server = Server(loops, config, metrics)
    listener = Listener(uvicorn_config(server))
    thread = threading.Thread(target=lambda: asyncio.run(listener.serve()), daemon=True)
    thread.start()
    while not listener.started:
        assert thread.is_alive()
        time.sleep(0.01)
    port = listener.servers[0].sockets[0].getsockname()[1]
    try:
        yield Running(f"http://127.0.0.1:{port}", port, server)
    finally:
        listener.should_exit = True
        thread.join(20)


def raw(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes, read until the server closes: status, headers (names in lower case), body."""
    with socket.create_connection(("127.0.0.1", port), timeout=HANGS_S) as connection:
        connection.sendall(data)
        answer = b""
        while more := connection.recv(65536):
            answer += more
    head, _, body = answer.partition(b"\r\n\r\n")
    status, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
    return int(status.split()[1]), headers, body


def post(port: int, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    """POST JSON (or raw bytes): status, headers, the answer's JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    given = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    lines = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n{lines}\r\n"
    status, found, answer = raw(port, head.encode() + data)
    return status, found, json.loads(answer) if answer and not answer.startswith(b"data:") else answer


def get(port: int, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in headers.items())
    return raw(port, f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n{lines}\r\n".encode())
