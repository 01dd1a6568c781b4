"""Every option of the serve commands is read by a run, or refused where a run would not read it."""

import threading

import pytest

from apps.serve import bench, chat, serve
from apps.serve.__main__ import APP
from core.quant import integers
from tests.support.http_server import get, post, small_model
from tests.support.options import Probe

TEXT = "def read_lines(path):\n    return open(path).read().splitlines()\n" * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return small_model(tmp_path_factory.mktemp("served") / "model")


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def asked_once(monkeypatch):
    """The server answers one request, and ends; no form of products is measured for its speed."""

    def ask(server, listener):
        port = listener.servers[0].sockets[0].getsockname()[1]
        name = next(iter(server.loops))

        def request():
            body = {"model": name, "prompt": "def", "max_tokens": 2, "n": 2}
            try:
                answers.append(
                    (post(port, "/v1/completions", body, Authorization="Bearer secret")[0], get(port, "/health")[0])
                )
            finally:
                listener.should_exit = True

        threading.Thread(target=request, daemon=True).start()

    answers = []
    monkeypatch.setattr(serve, "_announce", ask)
    monkeypatch.setattr(integers, "fastest", lambda *_: next(k for k in integers.exact_kernels() if k != "form"))
    yield
    assert set(answers) <= {(200, 200)}, answers


@pytest.fixture
def answered(monkeypatch):
    """A server's place: what chat and bench send is answered, and what the user says to chat is one line."""
    lines = iter(["hello"])

    async def request(url, model, asked):
        return bench.Served(200, len(asked.prompt), [0.1, 0.2], 2)

    monkeypatch.setattr(bench, "request", request)
    monkeypatch.setattr(chat, "post", lambda *_: [{"choices": [{"delta": {"content": "hello"}}]}])
    monkeypatch.setattr(chat, "_read", lambda: next(lines, None))


COMMANDS = {
    "serve": ["", "--quantize int8", "--quantize int4", "--api-key-file KEY"],
    "quantize": ["", "--scheme w8a8", "--scheme llm.int8", "--scheme int4", "--scheme int4 --calibration TEXT"],
    "plan": ["--model DIR", "--model QUANTIZED", "--shape gpt2_124m"],
    "chat": [""],
    "bench": ["", "--rate 9"],
}
"""command -> words of each of its modes"""
VALUES = {"allow_host": ("other",), "clients": 2, "group_size": 32, "symmetric": True, "threshold": 5.0}
# Read, as part of what is handed on, by runs that have no use for them.
ALSO = {
    "serve --quantize int8": ["group_size"],
    "serve --api-key-file KEY": ["allow_host"],
    "bench --rate 9": ["clients"],
    "plan --model QUANTIZED": ["group_size"],
    "quantize": ["group_size", "symmetric", "threshold"],
    "quantize --scheme llm.int8": ["group_size", "symmetric"],
    "quantize --scheme int4": ["threshold"],
}


@pytest.mark.parametrize(("command", "mode"), [(c, mode) for c, modes in COMMANDS.items() for mode in modes])
def test_an_option_is_obeyed_or_refused(command, mode, folder, text, tmp_path, asked_once, answered, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "key").write_text("secret")
    if "QUANTIZED" in mode:
        assert APP.dispatch(["quantize", str(folder), str(tmp_path / "quantized")]) == 0
    names = {"DIR": folder, "TEXT": text, "KEY": tmp_path / "key", "QUANTIZED": tmp_path / "quantized"}
    words = [str(names.get(word, word)) for word in mode.split()]
    before = {
        "serve": ["--model", str(folder), "--port", "0", "--device", "cpu", "--engine.cache", "1MB"],
        "quantize": ["quantize", str(folder), str(tmp_path / "out")],
    }.get(command, [command])
    Probe(APP.dispatch, [*before, *words], VALUES, ALSO.get(f"{command} {mode}".strip(), ())).check()
