"""What ends a start of the server: one line, before minutes are spent on weights."""

import asyncio
import json
import shutil
import socket
from pathlib import Path

import pytest
import transformers  # noqa: F401 (its log keeps the stderr of the moment in which it is imported: not a test's)

from apps.serve import serve
from apps.serve.__main__ import APP
from apps.serve.config import EngineConfig, HttpConfig
from apps.serve.metrics import Metrics
from apps.serve.model import build_engine, check_vocabulary, find_model
from apps.serve.server import Server
from apps.serve.text import load_text
from core.config import UserError, run_command
from tests.support.http_server import HANGS_S, small_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    small_model(path)
    return path


def test_a_port_in_use_is_told_before_a_model_is_loaded(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "build_engines", lambda *options: pytest.fail("weights were loaded"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run_command(APP.dispatch, ["--model", str(folder), "--port", str(port)]) == 2
    said = capsys.readouterr().err
    assert said == f"error: port {port} of 127.0.0.1 is in use; give another --port, or 0 for any that is free\n"


@pytest.mark.parametrize(
    ("host", "port", "said"),
    [
        ("203.0.113.7", 0, "cannot listen at port 0 of 203.0.113.7"),
        ("127.0.0.1", 70_000, "port=70000; give one from 0"),
        ("a name that is none", 0, "cannot listen at port 0 of a name that is none"),
    ],
)
def test_addresses_that_are_none_of_ours(host: str, port: int, said: str) -> None:
    with pytest.raises(UserError, match=said) as caught:
        serve.bind(host, port)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0"])
def test_a_free_port_is_bound(host: str) -> None:
    with serve.bind(host, 0) as listening:
        assert listening.getsockname()[1] > 0


def test_a_port_is_taken_while_models_are_loaded() -> None:
    """By the first of two servers that are started; and a connection that has ended keeps nobody from a restart."""
    with serve.bind("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        with pytest.raises(UserError, match=f"port {port} of 127.0.0.1 is in use"):
            serve.bind("127.0.0.1", port).close()
        with socket.create_connection(("127.0.0.1", port), timeout=10):
            listening.accept()[0].close()  # who closes first waits in TIME_WAIT
    with serve.bind("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_a_port_that_is_lost_after_all_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.socket() as mine:
        port = taken.getsockname()[1]
        taken.close()
        mine.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        mine.bind(("127.0.0.1", port))
        with serve.bind("127.0.0.1", port):
            server = Server({}, HttpConfig(port=port), Metrics())
            with pytest.raises(UserError, match=f"^port {port} of 127.0.0.1 is in use; give another --port"):
                asyncio.run(serve.listen(server, mine))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("{", "cannot read .*generation_config.json"),
        ("[]", "generation_config.json is not a JSON object"),
        ("\xff\xfe", "cannot read .*generation_config.json"),
        ('{"eos_token_id": "2"}', "generation_config.json: eos_token_id is '2'; give a token's number"),
        ('{"eos_token_id": [1, [2]]}', r"generation_config.json: eos_token_id is \[1, \[2\]\]"),
        ('{"eos_token_id": true}', "generation_config.json: eos_token_id is True"),
        ('{"eos_token_id": 100000}', "eos_token_id is 100000, and the model's vocabulary has"),
        ('{"eos_token_id": [1, -1]}', "eos_token_id is -1, and the model's vocabulary has"),
    ],
)
def test_ends_of_text_that_are_none(folder: Path, content: str, said: str) -> None:
    path = folder / "generation_config.json"
    before = path.read_bytes()
    path.write_bytes(content.encode("latin-1"))
    try:
        with pytest.raises(UserError, match=said) as caught:
            check_vocabulary(find_model(folder), load_text(folder))
        assert "\n" not in str(caught.value)
    finally:
        path.write_bytes(before)
    check_vocabulary(find_model(folder), load_text(folder))


def test_a_template_to_choose_is_asked_for_before_a_model_is_loaded(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of several chat templates one is called default, or the way out is told."""
    served = Path(shutil.copytree(folder, tmp_path / "several"))
    path = served / "tokenizer_config.json"
    config = json.loads(path.read_text())

    def bring(*names: str) -> None:
        templates = [{"name": name, "template": f"{{{{ '{name}' }}}}"} for name in names]
        path.write_text(json.dumps(config | {"chat_template": templates}))

    bring("plain", "default")
    found = build_engine(find_model(served), EngineConfig(cache="1MB"), "cpu")
    assert found.text.encode_chat([], 100, HANGS_S)[0] == list(b"default")
    bring("plain", "tool_use")
    monkeypatch.setattr("apps.serve.model._load", lambda *options: pytest.fail("weights were loaded"))
    said = "templates are plain, tool_use, and none is called default; rename one to default in tokenizer_config.json$"
    with pytest.raises(UserError, match=said):
        build_engine(find_model(served), EngineConfig(), "cpu")


def test_a_run_without_a_folder_to_serve_names_the_command_that_makes_one(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "config.json").write_text(json.dumps({"model": {}}))
    with pytest.raises(UserError, match=rf"is a run without .*llm export --model {tmp_path / 'run'}"):
        find_model(tmp_path / "run")
