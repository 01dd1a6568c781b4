"""The demo page in a real browser: streaming, stopping, following, keeping, scenarios, errors, phones, listening."""

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.browser import browser_with, require_browser
from tests.support.http_server import ENGINE, HANGS_S, Running, served, small_model
from tests.unit.serve.test_http import open_stream

sync_api = require_browser()

TEMPLATE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"
FLAGS = [
    "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--process-per-site",
]  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Models without a position table, so that a few-shot prompt in bytes fits; they write bytes at random.

    The third has a chat template.
    """
    root = tmp_path_factory.mktemp("models")
    shape = {"family": "bloom", "positions": "alibi", "embedding_norm": True, "ffn_dim": 128, "max_length": 2048}
    folders = [small_model(root / name, seed, **shape) for seed, name in enumerate(("one", "two", "taught"))]
    config = folders[2] / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": TEMPLATE}))
    with served(*folders, engine=replace(ENGINE, cache="10MB")) as server:
        yield server


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with browser_with(*FLAGS) as found:
        yield found


def opened(context: Any, running: Running) -> Any:
    """The page in a context, with its model loaded; requests elsewhere and faults of its scripts are noted."""
    context.set_default_timeout(1000 * HANGS_S)
    page = context.new_page()
    page.elsewhere, page.faults = [], []
    page.on("request", lambda r: r.url.startswith(running.url) or page.elsewhere.append(r.url))
    page.on("pageerror", lambda error: page.faults.append(str(error)))
    page.goto(running.url)
    page.wait_for_selector("#model option", state="attached")
    return page


@pytest.fixture(scope="module")
def context(browser: Any, running: Running) -> Iterator[Any]:
    """With one page that has no script: while it is open, those of the tests need no process of their own."""
    context = browser.new_context(viewport={"width": 1000, "height": 800})
    context.new_page().goto(f"{running.url}/health")
    yield context
    context.close()


@pytest.fixture
def page(context: Any, running: Running) -> Iterator[Any]:
    """The page in a store that holds nothing."""
    context.pages[0].evaluate("localStorage.clear()")
    page = opened(context, running)
    yield page
    for one in context.pages[1:]:
        assert one.elsewhere == []
        assert one.faults == []
        one.close()


def by_hand(page: Any) -> None:
    """From now on the page's requests get a stream that the test feeds: `feed`, and None ends it."""
    page.evaluate(
        """() => {
          const real = window.fetch;
          window.asked = [];
          window.fetch = (path, options) => {
            if (options?.method !== "POST") return real(path, options);
            window.asked.push({ path, body: JSON.parse(options.body) });
            const stream = new ReadableStream({ start: (sink) => (window.sink = sink) });
            options.signal.addEventListener("abort", () => {
              window.sink.error(new DOMException("stopped", "AbortError"));
            });
            return Promise.resolve(new Response(stream));
          };
        }"""
    )


def feed(page: Any, text: str | None) -> None:
    page.evaluate(
        """async (text) => {
          const send = (line) => window.sink.enqueue(new TextEncoder().encode(`data: ${line}\n\n`));
          if (text !== null) {
            const chat = window.asked.at(-1).path.includes("chat");
            send(JSON.stringify({ choices: [chat ? { index: 0, delta: { content: text } } : { index: 0, text }] }));
          } else {
            send("[DONE]");
            window.sink.close();
          }
          await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
        }""",
        text,
    )


def brief(page: Any) -> None:
    """Answers of a few tokens, where it does not matter what they say."""
    page.evaluate(
        """() => {
          for (const one of SCENARIOS) one.settings.max_tokens = 8;
          document.querySelector("#max_tokens").value = 8;
        }"""
    )


def hot(page: Any) -> None:
    """Two dozen tokens, which differ from draw to draw."""
    page.evaluate("document.querySelector('#temperature').value = 1.5")
    page.evaluate("document.querySelector('#max_tokens').value = 24")


def texts(page: Any) -> list[str]:
    return page.locator("#turns .text").all_inner_texts()


def tab(page: Any, name: str) -> None:
    page.click(f"#scenarios >> text={name}")


def ask(page: Any, text: str, wait: bool = True) -> None:
    page.fill("#input", text)
    page.press("#input", "Enter")
    if wait:
        done(page)


def done(page: Any) -> None:
    """The text is written, or has failed."""
    sync_api.expect(page.locator("#send")).to_be_enabled(timeout=1000 * HANGS_S)


def test_generate_and_keep(page: Any) -> None:
    assert page.locator("#model option").all_inner_texts() == ["one", "two", "taught"]
    tab(page, "FAQ")
    page.click("summary")
    hot(page)
    page.fill("#seed", "7")
    ask(page, "Why <b>bold</b>?")
    question, first = texts(page)
    assert question == "Why <b>bold</b>?"
    assert page.locator("#turns b").count() == 0
    assert first
    assert "tokens" in page.locator("#status").inner_text()
    page.reload()
    sync_api.expect(page.locator("#turns .text").nth(1)).to_have_text(first, use_inner_text=True)
    page.wait_for_selector("#model option", state="attached")
    page.click("summary")
    hot(page)
    ask(page, "Why <b>bold</b>?")  # the seed was kept too
    assert texts(page)[3] == first
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
    tab(page, "FAQ")
    ask(page, "x")
    assert texts(page)[1] == letters
    assert page.locator("#turns img").count() == 0


def test_stop(page: Any, running: Running) -> None:
    undo, before = running.slow_down(0.2), running.loop.engine.counts.aborted
    try:
        tab(page, "Essay")
        ask(page, "On slowness", wait=False)
        sync_api.expect(page.locator("#turns .text").nth(1)).to_have_text(
            re.compile(r"\S[\s\S]{2}"), timeout=1000 * HANGS_S
        )
        assert page.is_disabled("#send")
        page.click("#stop")
        done(page)
        assert page.locator("#status").inner_text() == "stopped"
        assert texts(page)[1]
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
    brief(page)
    page.select_option("#model", "two")
    tab(page, "Conversation")
    ask(page, "Hello")
    ask(page, "And again")
    assert page.locator("#turns li").count() == 4
    assert "Human: Hello" in sent[1]["prompt"]
    tab(page, "Translation")
    assert page.locator("#turns li").count() == 0
    ask(page, "One")
    ask(page, "Two")
    assert texts(page)[::2] == ["One", "Two"]
    assert sent[3]["prompt"].endswith("English: Two\nFrench:")
    assert "One" not in sent[3]["prompt"]
    assert sent[3]["temperature"] == 0
    assert {body["model"] for body in sent} == {"two"}
    tab(page, "Conversation")
    assert page.locator("#turns li").count() == 4


def test_without_a_chat_template_the_page_begins_with_continuing_a_text(page: Any) -> None:
    names = ["Continue text", "FAQ", "Conversation", "Translation", "Essay"]
    assert page.locator("#scenarios button").all_inner_texts() == names
    assert page.locator("#scenarios [aria-selected=true]").inner_text() == "Continue text"
    assert "Python" in page.locator("#about").inner_text()
    by_hand(page)
    page.fill("#input", "  def f(x):\n")
    page.press("#input", "Enter")
    feed(page, "    return")
    feed(page, None)
    done(page)
    assert texts(page) == ["  def f(x):\n    return"]  # one text, with every space of both
    assert page.locator("#send").inner_text() == "Go on"
    page.click("#send")
    feed(page, " x")
    feed(page, None)
    done(page)
    assert texts(page) == ["  def f(x):\n    return x"]
    asked = page.evaluate("window.asked")
    assert [one["path"] for one in asked] == ["/v1/completions"] * 2
    assert [one["body"]["prompt"] for one in asked] == ["  def f(x):\n", "  def f(x):\n    return"]
    assert not any("stop" in one["body"] for one in asked)
    tab(page, "FAQ")
    assert "no chat template" in page.locator("#about").inner_text()


def test_with_a_chat_template_the_page_talks_by_it(page: Any) -> None:
    sent: list[tuple[str, dict]] = []
    page.on("request", lambda r: r.method == "POST" and sent.append((r.url.split("/v1/")[1], r.post_data_json)))
    brief(page)
    page.select_option("#model", "taught")
    names = ["FAQ", "Conversation", "Translation", "Essay", "Continue text"]
    assert page.locator("#scenarios button").all_inner_texts() == names
    assert page.locator("#scenarios [aria-selected=true]").inner_text() == "FAQ"
    assert "template" not in page.locator("#about").inner_text()
    for name in names[:4]:
        tab(page, name)
        ask(page, f"{name} it")
        assert page.is_hidden("#error")
        assert texts(page)[0] == f"{name} it"
        path, body = sent[-1]
        assert path == "chat/completions"
        assert [message["role"] for message in body["messages"]] == ["user"]
        assert f"{name} it" in body["messages"][0]["content"]
    tab(page, "Conversation")
    answer = texts(page)[1]
    ask(page, "And again")
    said = [(message["role"], message["content"]) for message in sent[-1][1]["messages"]]
    kept = re.sub("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]", "", answer)
    assert said[0] == ("user", "Conversation it")
    assert said[1][0] == "assistant"
    assert said[1][1].split() == kept.split()
    assert said[2] == ("user", "And again")
    tab(page, "Continue text")
    ask(page, "Once")
    assert sent[-1][0] == "completions"
    assert sent[-1][1]["prompt"] == "Once"


def test_the_first_scenario_stays_when_the_model_changes(page: Any) -> None:
    """Without a tab chosen, too: the text is written to its end by the model that was asked, and stays in sight."""
    by_hand(page)
    ask(page, "Once", wait=False)
    feed(page, " upon")
    assert page.is_disabled("#model")
    page.evaluate(  # as when the list of models is read anew, with another one in front
        """() => {
          document.querySelector("#model").value = "taught";
          document.querySelector("#model").dispatchEvent(new Event("change"));
        }"""
    )
    page.wait_for_timeout(500)  # so long that the texts are saved with the next piece
    feed(page, " a time")
    feed(page, None)
    done(page)
    assert texts(page) == ["Once upon a time"]
    assert page.locator("#status").inner_text() != "stopped"
    assert page.locator("#scenarios [aria-selected=true]").inner_text() == "Continue text"
    assert page.is_enabled("#model")


def at_end(page: Any) -> bool:
    return page.evaluate("innerHeight + scrollY >= document.documentElement.scrollHeight - 2")


def test_the_page_follows_the_answer_until_someone_scrolls_up(page: Any) -> None:
    by_hand(page)
    tab(page, "Essay")
    ask(page, "On length", wait=False)
    for _ in range(30):
        feed(page, "a line\n\n")
        assert at_end(page)
    box = page.locator("#input").bounding_box()
    assert box["y"] + box["height"] <= 800  # the field stays in sight
    assert page.evaluate("scrollY") > 500
    page.mouse.move(500, 200)
    page.mouse.wheel(0, -400)
    sync_api.expect(page.locator("#newest")).to_be_visible()
    before = page.evaluate("scrollY")
    for _ in range(5):
        feed(page, "a line\n\n")
    assert page.evaluate("scrollY") == before  # whoever reads above is left there
    box = page.locator("#input").bounding_box()
    assert box["y"] + box["height"] <= 800
    page.click("#newest")
    sync_api.expect(page.locator("#newest")).to_be_hidden()
    feed(page, "the last line\n\n")
    assert at_end(page)
    feed(page, None)
    done(page)
    assert at_end(page)


def test_a_text_is_kept_from_its_beginning_on(page: Any, running: Running) -> None:
    """A page that is loaded again in the middle loses nothing that was to be seen."""
    by_hand(page)
    tab(page, "Conversation")
    ask(page, "Remember me", wait=False)
    other = opened(page.context, running)
    assert texts(other) == ["Remember me"]  # before the first token
    feed(page, "I shall")
    sync_api.expect(other.locator("#turns .text")).to_have_text(["Remember me", "I shall"])
    feed(page, " remember")
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    assert texts(page) == ["Remember me", "I shall remember"]
    tab(page, "Essay")
    assert texts(page) == []


def test_two_tabs_keep_each_others_texts(page: Any, running: Running) -> None:
    other = opened(page.context, running)
    for one in (page, other):
        by_hand(one)
        tab(one, "Conversation")
    ask(page, "From the one", wait=False)
    ask(other, "From the other", wait=False)
    for one, answer in ((page, "first"), (other, "second")):
        feed(one, answer)
        feed(one, None)
        done(one)
    said = ["From the one", "first", "From the other", "second"]
    for one in (page, other):
        sync_api.expect(one.locator("#turns .text")).to_have_text(said)
    other.reload()
    assert texts(other) == said
    other.wait_for_selector("#model option", state="attached")
    other.click("#clear")
    sync_api.expect(page.locator("#turns li")).to_have_count(0)
    ask(page, "Anew", wait=False)
    feed(page, None)
    done(page)
    sync_api.expect(other.locator("#turns .text")).to_have_text(["Anew"])


JUNK = {
    "megalith.page": ["{", "null", "[]", '{"scenario": 5, "theme": {}, "model": []}'],
    "megalith.texts.continue": ["7", '{"turns": 7}', '{"turns": [null, 5, {"id": 1}], "cleared": "now"}', '"text"'],
    "megalith.settings.continue": ["x", "[1]", '{"temperature": {}, "top_k": null, "seed": []}', "null"],
}


@pytest.mark.parametrize("number", range(4))
def test_a_store_that_holds_something_else_is_no_error(page: Any, number: int) -> None:
    page.evaluate("junk => Object.entries(junk).forEach(([name, text]) => localStorage.setItem(name, text))",
                  {name: found[number] for name, found in JUNK.items()})  # fmt: skip
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    brief(page)
    ask(page, "Still here")
    assert page.is_hidden("#error")
    assert texts(page)[0].startswith("Still here")
    page.reload()
    assert texts(page)[0].startswith("Still here")


@pytest.mark.parametrize("fault", ["forbidden", "full"])
def test_without_a_store_the_page_works_and_says_so(page: Any, fault: str) -> None:
    broken = {
        "forbidden": "Object.defineProperty(window, 'localStorage', { get() { throw new DOMException('no') } })",
        "full": "Storage.prototype.setItem = () => { throw new DOMException('full', 'QuotaExceededError') }",
    }
    page.add_init_script(broken[fault])
    page.reload()
    page.wait_for_selector("#model option", state="attached")
    brief(page)
    ask(page, "Forget me")
    assert page.is_hidden("#error")
    assert texts(page)[0].startswith("Forget me")
    assert "keeps no texts" in page.locator("#status").inner_text()


def test_keyboard_and_dark(page: Any) -> None:
    brief(page)
    page.focus("#scenarios button[aria-selected=true]")
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert page.locator("#scenarios [aria-selected=true]").inner_text() == "Conversation"
    assert page.evaluate("document.activeElement.textContent") == "Conversation"
    page.keyboard.press("Tab")
    page.keyboard.type("By keys alone")
    page.keyboard.press("Enter")
    sync_api.expect(page.locator("#turns li")).to_have_count(2)
    done(page)
    assert page.evaluate("document.activeElement.id") == "input"  # the next can be typed at once
    light = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.click("#theme")
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light
    page.reload()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != light


def test_the_focus_is_not_taken_from_who_has_it(page: Any) -> None:
    by_hand(page)
    ask(page, "Write", wait=False)
    page.click("summary")
    page.focus("#seed")
    feed(page, "a word")
    feed(page, None)
    done(page)
    assert page.evaluate("document.activeElement.id") == "seed"


def test_on_a_phone_no_keyboard_comes_up_by_itself(browser: Any, running: Running) -> None:
    context = browser.new_context(viewport={"width": 390, "height": 800}, has_touch=True, is_mobile=True)
    page = opened(context, running)
    brief(page)
    assert page.evaluate("document.activeElement === document.body")
    page.locator("#input").tap()
    page.keyboard.type("First line")
    page.keyboard.press("Enter")  # there is no Shift to hold
    page.keyboard.type("second line")
    assert page.input_value("#input") == "First line\nsecond line"
    page.locator("#send").tap()
    sync_api.expect(page.locator("#turns li")).to_have_count(1)
    done(page)
    assert page.evaluate("document.activeElement.id") != "input"
    page.locator("#clear").tap()
    assert page.evaluate("document.activeElement.id") != "input"
    assert page.faults == []
    context.close()


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_is_wider_than_a_phone(page: Any, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 568})
    by_hand(page)
    page.evaluate("document.querySelector('#model option').textContent = 'a-model-with-a-rather-long-name'.repeat(3)")
    for name in page.locator("#scenarios button").all_inner_texts():
        tab(page, name)
        ask(page, "unbroken" * 40, wait=False)
        feed(page, "longer" * 80)
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        feed(page, None)
        done(page)
    page.click("summary")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    for element in page.locator("button, select, input, textarea, #turns li").all():
        box = element.bounding_box()
        assert box is None or (box["x"] >= 0 and box["x"] + box["width"] <= width)


def test_who_listens_hears_the_answer_once(page: Any) -> None:
    """Not each token of it; and who speaks, and which panel belongs to which tab, is told."""
    by_hand(page)
    tab(page, "Conversation")
    page.evaluate(
        """() => {
          window.heard = [];
          const live = [...document.querySelectorAll("[role=status], [role=alert], [role=log], [aria-live], output")];
          for (const region of live.filter((one) => one.getAttribute("aria-live") !== "off")) {
            new MutationObserver(() => window.heard.push(region.textContent)).observe(
              region, { childList: true, characterData: true, subtree: true });
          }
        }"""
    )
    ask(page, "Speak", wait=False)
    for number in range(40):
        feed(page, f"word{number} ")
    feed(page, None)
    done(page)
    heard = page.evaluate("window.heard")
    assert len(heard) == 2
    assert heard[1].startswith("one: word0 word1 ")
    assert heard[1].rstrip().endswith("word39")
    assert page.locator("#turns .who").all_inner_texts() == ["You", "one"]
    panel = page.locator("[role=tabpanel]")
    chosen = page.locator("[role=tab][aria-selected=true]")
    assert chosen.count() == 1
    assert panel.get_attribute("aria-labelledby") == chosen.get_attribute("id")
    assert chosen.get_attribute("aria-controls") == panel.get_attribute("id")
    assert panel.locator("#turns").count() == 1


def refusing(page: Any, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
    page.unroute("**/v1/**")
    body = {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": code}}
    answer = {"status": status, "headers": {"Retry-After": "7"}, "content_type": "application/json"}
    page.route("**/v1/**", lambda route: route.fulfill(body=json.dumps(body), **answer))


ERRORS = (
    (400, "the prompt has 52 tokens, which leaves 12 of 64, and max_tokens is 12; shorten one of them",
     "context_length_exceeded", "max_tokens", "it holds 2048 tokens"),
    (400, "temperature: Input should be less than or equal to 2", None, "temperature", "Temperature: Input"),
    (400, "min_tokens is 3, more than the 2 that max_tokens allows", None, "min_tokens", "Length allows"),
    (401, "the key is missing or wrong", None, None, "Put the key in under Settings"),
    (404, "no model of this name is served; the models are a", "model_not_found", "model", "no longer served"),
    (413, "the body is too large", None, None, "larger than the server takes"),
    (429, "the queue is full", "queue_full", None, "Try again in 7 seconds"),
    (503, "the server is stopping", None, None, "may be stopping"),
    (504, "the request took longer", "timeout", None, "longer than the server allows"),
    (500, "an error of the server's", None, None, "The server failed (500)"),
)  # fmt: skip


def test_errors_are_in_the_pages_words(page: Any) -> None:
    """Whoever chose a Length of 96 knows no max_tokens, and no 12."""
    tab(page, "FAQ")
    for status, message, code, param, shown in ERRORS:
        refusing(page, status, message, code, param)
        ask(page, "Anything")
        found = page.locator("#error").inner_text()
        assert shown in found
        assert not re.search(r"[a-z]+_[a-z]+|\b12\b", found.replace("min_tokens", ""))
        assert page.input_value("#input") == "Anything"  # it can be sent again
        assert texts(page) == []


def test_wrong_settings_and_a_lost_server_are_told(page: Any) -> None:
    sent: list[str] = []
    page.on("request", lambda r: r.method == "POST" and sent.append(r.url))
    brief(page)
    page.click("summary")
    page.fill("#top_k", "5000000000000000000000")
    ask(page, "Too much")
    assert "Top k is 5000000000000000000000; give a whole number from 0 to 1000" in page.locator("#error").inner_text()
    assert sent == []
    assert page.input_value("#input") == "Too much"
    page.click("#reset")
    page.route("**/v1/**", lambda route: route.abort())
    ask(page, "Anyone there?")
    assert "cannot be reached" in page.locator("#error").inner_text()
    assert page.input_value("#input") == "Anyone there?"
    page.unroute("**/v1/**")
    ask(page, "Again")
    assert page.is_hidden("#error")


def test_a_stream_that_breaks_is_told_and_what_came_is_kept(page: Any) -> None:
    by_hand(page)
    tab(page, "FAQ")
    ask(page, "Half?", wait=False)
    feed(page, "Half an ans")
    page.evaluate("window.sink.close()")
    done(page)
    assert "connection broke" in page.locator("#error").inner_text()
    page.reload()
    assert texts(page) == ["Half?", "Half an ans"]
