"""Chat templates: rendered as transformers does, and whatever they do, the server goes on."""

import json
import threading
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from transformers import AutoTokenizer

from apps.serve import template
from apps.serve.template import ChatTemplate, TooLarge
from core.config import UserError
from tests.support.http_server import HANGS_S, Running, get, post, served, small_model

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "instruct": (
        "{{ bos_token if bos_token is defined else '' }}{%- set ns = namespace(system='') -%}\n"
        "{%- for message in messages %}\n    {%- if message.role == 'system' %}{% set ns.system = message.content %}\n"
        "    {%- elif message.role == 'user' %}[INST] {{ ns.system }}{{ message.content | trim }} [/INST]\n"
        "    {%- else %}{{ message.content }}{{ eos_token }}{% endif %}\n{%- endfor %}"
    ),
    "filters": (
        "{{ messages | tojson(indent=2) }}{% for m in messages %}{% if loop.index > 2 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content | upper }}{% endgeneration %}{{ m.name | default('nobody') }}{% endfor %}"
        "{{ tools is none }} {{ dict(a=1) }}"
    ),
}
# What only a process with limits gets out of.
ENDLESS = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
HUGE = "{% set x = namespace(t='x' * 1000000) %}{% for a in range(13) %}{% set x.t = x.t + x.t %}{% endfor %}{{ x.t }}"
NESTED = "".join(f"{{% for a{n} in messages %}}" for n in range(45)) + "x" + "{% endfor %}" * 45
SAID = [
    {"role": "system", "content": "Be <brief> & \"kind\"."},
    {"role": "user", "content": " Grüße, 世界\x00\x1b ", "name": "Ann"},
    {"role": "assistant", "content": ""},
]  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "x"}] * 3, "max_tokens": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_model(tmp_path_factory.mktemp("models") / "first")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What never ends need not be waited for as long as a user's template may, nor fill as much memory."""
    monkeypatch.setattr(template, "CPU_S", 1)
    monkeypatch.setattr(template, "MEMORY_BYTES", 64 << 20)


def with_template(folder: Path, root: Path, source: str) -> Path:
    """The same model with that template."""
    for file in folder.iterdir():
        (root / file.name).symlink_to(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (root / "tokenizer_config.json").unlink()
    (root / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": source}))
    return root


def test_no_template_leaves_out_what_developers_say() -> None:
    """They are the system to one that does not know them; one that does is told who they are."""
    said = [{"role": "developer", "content": "Be kind."}, {"role": "user", "content": "x"}]
    kept = "messages if m.role in ('system', 'user', 'assistant')"
    known = f"{{% for m in {kept} %}}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endfor %}}"
    assert ChatTemplate(known, {}).render(said, 100, HANGS_S) == "system: Be kind.\nuser: x\n"
    more = known.replace("'system', ", "'system', 'developer', ")
    assert ChatTemplate(more, {}).render(said, 100, HANGS_S) == "developer: Be kind.\nuser: x\n"
    assert said[0]["role"] == "developer"


@pytest.mark.parametrize("name", TEMPLATES)
def test_rendered_as_transformers_does(folder: Path, name: str) -> None:
    hf = AutoTokenizer.from_pretrained(folder)
    hf.chat_template = TEMPLATES[name]
    ours = ChatTemplate(TEMPLATES[name], hf.special_tokens_map)
    for said in (SAID, SAID[:2], SAID[1:2]):  # by one process
        wanted = hf.apply_chat_template(said, tokenize=False, add_generation_prompt=True)
        assert ours.render(said, 10_000, HANGS_S) == wanted


def test_a_limit_of_time(quick: None) -> None:
    with pytest.raises(UserError, match="takes more than 1 s"):
        ChatTemplate(ENDLESS, {}).render(SAID, 100, HANGS_S)


def test_limits() -> None:
    """Of one process, but for the last."""
    first = "{% set said = messages[0].content %}"
    source = f"{first}{{% if said == 'endless' %}}{ENDLESS}{{% elif said == 'huge' %}}{HUGE}{{% elif said == 'long' %}}"
    source += "{{ 'x' * 101 }}{% elif messages | length > 2 %}{{ raise_exception('Too many.') }}{% endif %}{{ bos }}"
    ours = ChatTemplate(source, {"bos": "B"})

    def render(said: str, max_characters: int = 100, timeout_s: float = HANGS_S, messages: int = 1) -> str:
        return ours.render([{"role": "user", "content": said}] * messages, max_characters, timeout_s)

    for _ in range(2):
        with pytest.raises(UserError, match=r"refuses these messages: Too many\."):
            render("x", messages=3)
        assert render("x") == "B"
        with pytest.raises(TooLarge):
            render("long")
    with pytest.raises(UserError, match="needs more than 512 MiB"):
        render("huge", 10**10)
    with pytest.raises(TimeoutError):
        render("endless", timeout_s=0.05)


def renderers(before: Container[int] = ()) -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.pid not in before]


def test_no_process_is_left() -> None:
    before = {child.pid for child in renderers()}
    ours = ChatTemplate(CHATML, {})
    ours.render(SAID, 1000, HANGS_S)
    mine = renderers(before)
    assert len(mine) == 1
    del ours
    assert psutil.wait_procs(mine, timeout=HANGS_S)[1] == []


def test_a_kept_process_that_was_ended_is_replaced() -> None:
    """Whoever ended it, the next dialogue is rendered; one that needs too much is refused for that all the same."""
    before = {child.pid for child in renderers()}
    ours = ChatTemplate("{% for a in messages %}{{ 'x' * (70000000 if a.content == 'much' else 1) }}{% endfor %}", {})
    assert ours.render(SAID, 100, HANGS_S) == "xxx"
    (kept,) = renderers(before)
    kept.kill()
    kept.wait(HANGS_S)
    assert ours.render(SAID, 100, HANGS_S) == "xxx"
    with pytest.raises(UserError, match="needs more than 512 MiB"):  # in telling the text, not in rendering it
        ours.render([{"role": "user", "content": "much"}] * 3, 10**10, HANGS_S)


@pytest.mark.parametrize("command", ["/bin/false", "/no/such/python"])
def test_where_no_process_renders_the_server_is_at_fault(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    with served(with_template(folder, tmp_path, CHATML)) as running:
        with monkeypatch.context() as patch:
            patch.setattr(template.sys, "executable", command)
            status, _, answer = post(running.port, "/v1/chat/completions", CHAT)
        assert (status, answer["error"]["type"]) == (500, "server_error")
        assert "process that renders the model's chat template" in answer["error"]["message"]
        assert post(running.port, "/v1/chat/completions", CHAT)[0] == 200


@pytest.fixture(scope="module", params=["endless", "huge", "nested"])
def running(request: Any, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    source = {"endless": ENDLESS, "huge": HUGE, "nested": NESTED}[request.param]
    with served(with_template(folder, tmp_path_factory.mktemp(request.param), source), timeout_s=3600) as server:
        yield server


def test_the_server_goes_on(running: Running, quick: None) -> None:
    """While dialogues are being rendered, health and texts are answered; and they are refused in the end."""
    answers: list[Any] = []
    asking = [
        threading.Thread(target=lambda: answers.append(post(running.port, "/v1/chat/completions", CHAT)))
        for _ in range(2)
    ]
    before = peak = psutil.Process().memory_info().rss
    for thread in asking:
        thread.start()
    for _ in range(10):
        assert get(running.port, "/health")[0] == 200
        peak = max(peak, psutil.Process().memory_info().rss)
    assert post(running.port, "/v1/completions", {"prompt": "x", "max_tokens": 2})[0] == 200
    for thread in asking:
        thread.join(HANGS_S)
    assert len(answers) == 2
    for status, _, answer in answers:
        assert status == 400
        assert answer["error"]["param"] == "messages"
        assert "chat template" in answer["error"]["message"]
    assert peak - before < 100e6


def test_the_time_of_a_request_covers_it(folder: Path, tmp_path: Path) -> None:
    with served(with_template(folder, tmp_path, ENDLESS), timeout_s=0.5) as running:
        status, _, answer = post(running.port, "/v1/chat/completions", CHAT)
        assert (status, answer["error"]["code"]) == (504, "timeout")
