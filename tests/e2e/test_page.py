"""The demo page in a real browser: typing, streaming, stopping, scenarios, settings, errors, phone, keyboard, dark."""

import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_server import ENGINE, HANGS_S, Running, served, small_model
from tests.unit.serve.test_http import open_stream

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
if CHROMIUM is None:
    pytest.skip("no Chromium on this machine; apt-get install chromium, as .ci/run does", allow_module_level=True)
sync_api = pytest.importorskip("playwright.sync_api")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Two models without a position table, so that a few-shot prompt in bytes fits; they write bytes at random."""
    root = tmp_path_factory.mktemp("models")
    shape = {"family": "bloom", "positions": "alibi", "embedding_norm": True, "ffn_dim": 128, "max_length": 2048}
    folders = [small_model(root / name, seed, **shape) for seed, name in enumerate(("one", "two"))]
    with served(*folders, engine=replace(ENGINE, kv_gb=0.01)) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        yield playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)


@pytest.fixture
def page(browser: Any, running: Running, tmp_path: Path) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    context.set_default_timeout(1000 * HANGS_S)
    page = context.new_page()
    page.elsewhere, page.faults = [], []
    page.on("request", lambda r: r.url.startswith(running.url) or page.elsewhere.append(r.url))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.goto(running.url)
    page.wait_for_selector("#model option", state="attached")
    yield page
    assert page.elsewhere == []
    assert page.faults == []
    page.screenshot(path=str(tmp_path / "page.png"), full_page=True)
    context.close()


def ask(page: Any, text: str, wait: bool = True) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
    if wait:
        done(page)


def done(page: Any) -> None:
    """The text is written, or has failed."""
    sync_api.expect(page.locator("#send")).to_be_enabled(timeout=1000 * HANGS_S)


def test_generate_and_keep(page: Any) -> None:
    assert page.locator("#scenarios button").all_inner_texts() == ["FAQ", "Conversation", "Translation", "Essay"]
    assert page.locator("#model option").all_inner_texts() == ["one", "two"]
    page.click("text=Settings")
    page.evaluate("document.querySelector('#temperature').value = 1.5")
    page.fill("#seed", "7")
    ask(page, "Why <b>bold</b>?")
    turns = page.locator("#turns li")
    assert turns.count() == 2
    assert turns.nth(0).inner_text() == "Why <b>bold</b>?"
    assert page.locator("#turns b").count() == 0
    first = turns.nth(1).inner_text()
    assert first
    assert "tokens" in page.locator("#status").inner_text()
    page.reload()
    assert page.locator("#turns li").nth(1).inner_text() == first
    ask(page, "Why <b>bold</b>?")  # the seed was kept too
    assert page.locator("#turns li").nth(1).inner_text() == first
    page.click("#clear")
    assert page.locator("#turns li").count() == 0


def test_output_is_escaped(page: Any, running: Running) -> None:
    """A model that writes markup writes text."""
    letters = "<img src=x onerror=alert(1)>"
    page.route(
        "**/v1/completions",
        lambda route: route.fulfill(
            content_type="text/event-stream",
            body=f'data: {{"choices": [{{"index": 0, "text": "{letters}"}}]}}\n\ndata: [DONE]\n\n',
        ),
    )
    ask(page, "x")
    assert page.locator("#turns li").nth(1).inner_text() == letters
    assert page.locator("#turns img").count() == 0


def test_stop(page: Any, running: Running) -> None:
    undo, before = running.slow_down(0.2), running.loop.engine.counts.aborted
    try:
        page.click("text=Essay")
        ask(page, "On slowness", wait=False)
        sync_api.expect(page.locator("#turns li").nth(1)).to_have_text(
            re.compile(r"\S[\s\S]{2}"), timeout=1000 * HANGS_S
        )
        assert page.is_disabled("#send")
        page.click("#stop")
        done(page)
        assert page.locator("#status").inner_text() == "stopped"
        assert page.locator("#turns li").nth(1).inner_text()
        running.wait(running.is_idle)
        assert running.loop.engine.counts.aborted - before == 1  # it was not written to its end
    finally:
        undo()


def test_queue_position(page: Any, running: Running) -> None:
    undo = running.slow_down(0.05)
    try:
        others = [open_stream(running, prompt=f"{n}", max_tokens=1900) for n in range(5)]
        running.wait(lambda: len(running.loop.engine.waiting) == 1)
        ask(page, "Am I next?", wait=False)
        sync_api.expect(page.locator("#status")).to_have_text("waiting, 1 before you", timeout=1000 * HANGS_S)
        page.press("body", "Escape")
        done(page)
        for connection in others:
            connection.close()
        running.wait(running.is_idle)
    finally:
        undo()


def test_scenarios_and_models(page: Any, running: Running) -> None:
    """Each has its own texts and prompt; the conversation remembers, the others begin anew; the second model serves."""
    sent: list[dict] = []
    page.on("request", lambda r: r.url.endswith("/completions") and sent.append(r.post_data_json))
    page.select_option("#model", "two")
    page.click("text=Conversation")
    ask(page, "Hello")
    ask(page, "And again")
    assert page.locator("#turns li").count() == 4
    assert "Human: Hello" in sent[1]["prompt"]
    page.click("text=Translation")
    assert page.locator("#turns li").count() == 0
    ask(page, "One")
    ask(page, "Two")
    assert page.locator("#turns li").count() == 2
    assert sent[3]["prompt"].endswith("English: Two\nFrench:")
    assert sent[3]["temperature"] == 0
    assert {body["model"] for body in sent} == {"two"}
    page.click("text=Conversation")
    assert page.locator("#turns li").count() == 4


def test_keyboard_phone_and_dark(page: Any) -> None:
    page.set_viewport_size({"width": 360, "height": 640})
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.focus("#scenarios button[aria-selected=true]")
    page.keyboard.press("ArrowRight")
    assert page.locator("#scenarios [aria-selected=true]").inner_text() == "Conversation"
    page.keyboard.press("Tab")
    page.keyboard.type("By keys alone")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#turns li")).to_have_count(2)
    done(page)
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_errors_are_shown(page: Any) -> None:
    page.click("text=Settings")
    page.fill("#top_k", "5000000000000000000000")
    ask(page, "Too much")
    assert "top_k" in page.locator("#error").inner_text()
    assert page.input_value("#input") == "Too much"
    page.click("#reset")
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Anyone there?")
    assert "cannot be reached" in page.locator("#error").inner_text()
    assert page.input_value("#input") == "Anyone there?"
    page.unroute("**/v1/**")
    ask(page, "Again")
    assert page.is_hidden("#error")
