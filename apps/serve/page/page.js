"use strict";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["max_tokens", "temperature", "top_p", "top_k", "repetition_penalty"];
// Control characters, which a model may have written and not every server takes back.
const CONTROL = /[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]/g;
const SAVE_EVERY_MS = 400; // while a text is written
const NEAR_PX = 48; // from the end of the page: whoever is nearer follows the answer
// A finger, and a keyboard that covers half of the page when the field has the focus.
const byTouch = () => matchMedia("(pointer: coarse)").matches;

const page = { scenario: "", model: "", theme: "", ...store.page() };
const texts = {}; // scenario -> { cleared, turns }
const settingsOf = {}; // scenario -> its settings
let models = []; // as the server describes them
let underway = null; // { abort: AbortController, turn, id: of its scenario } of the text that is being written
let following = true; // whether the page stays at its end while it grows

const model = () => models.find(({ id }) => id === $("model").value);
// A model that was never taught to answer goes on with texts: that comes first there.
const order = () => {
  const rest = SCENARIOS.filter((one) => !one.continues);
  const goesOn = SCENARIOS.filter((one) => one.continues);
  return model()?.chat_template ? [...rest, ...goesOn] : [...goesOn, ...rest];
};
const scenario = () => order().find((one) => one.id === page.scenario) ?? order()[0];
const record = () => (texts[scenario().id] ??= store.join(scenario().id));
const turns = () => record().turns.filter(({ gone }) => !gone);
const usesTemplate = () => Boolean(model()?.chat_template) && !scenario().continues;

function settings() {
  const { id, settings: defaults } = scenario();
  if (!settingsOf[id]) {
    const kept = Object.entries(store.settings(id)).filter(
      ([name, value]) => (name in defaults || name === "seed") && ["string", "number"].includes(typeof value),
    );
    settingsOf[id] = { ...defaults, seed: "", ...Object.fromEntries(kept) };
  }
  return settingsOf[id];
}

function savePage() {
  store.savePage(page);
}

// The texts of a scenario, joined with what other tabs have written.
function saveTexts(id) {
  texts[id] = store.saveTexts(id, texts[id]);
  showKept();
}

// --- what is shown --------------------------------------------------------------------------------------------------

function show() {
  document.documentElement.dataset.theme = ["light", "dark"].includes(page.theme) ? page.theme : "";
  const chosen = scenario();
  const tabs = $("scenarios");
  for (const { id } of order()) {
    const tab = $(`tab-${id}`);
    tab.setAttribute("aria-selected", id === chosen.id);
    tab.tabIndex = id === chosen.id ? 0 : -1;
    tab.disabled = underway !== null;
  }
  const wanted = order().map(({ id }) => $(`tab-${id}`));
  if (wanted.some((tab, place) => tabs.children[place] !== tab)) tabs.replaceChildren(...wanted);
  $("panel").setAttribute("aria-labelledby", `tab-${chosen.id}`);
  const untaught = models.length && !model().chat_template && !chosen.continues;
  $("about").textContent =
    chosen.about + (untaught ? " This model has no chat template, so it is shown examples and goes on in their manner." : "");
  $("asked").textContent = chosen.asked;
  $("input").placeholder = chosen.example;
  showTurns();
  showSettings();
  showButtons();
}

function showTurns() {
  const before = new Map([...$("turns").children].map((element) => [element.dataset.id, element]));
  const wanted = turns().flatMap((turn) => elementsOf(turn, before));
  for (const [place, element] of wanted.entries()) {
    if ($("turns").children[place] !== element) $("turns").insertBefore(element, $("turns").children[place] ?? null);
  }
  while ($("turns").children.length > wanted.length) $("turns").lastElementChild.remove();
  follow();
}

// One item a speaker, or one for both where the answer goes on in the text.
function elementsOf(turn, before) {
  const who = model()?.id ?? "Model";
  const busy = underway?.turn.id === turn.id;
  if (scenario().continues) return [item(before, turn, "continued", `You, continued by ${turn.model || who}`, [["given", turn.mine], ["written", turn.theirs]], busy)];
  const said = [item(before, turn, "mine", "You", [["given", turn.mine]], false)];
  if (turn.theirs || busy) said.push(item(before, turn, "theirs", turn.model || who, [["written", turn.theirs]], busy));
  return said;
}

function item(before, turn, kind, who, parts, busy) {
  const id = `${turn.id} ${kind}`;
  const element = before.get(id) ?? document.createElement("li");
  if (!before.has(id)) {
    element.dataset.id = id;
    element.className = kind;
    const name = document.createElement("span");
    name.className = "who";
    const text = document.createElement("div");
    text.className = "text";
    text.append(...parts.map(([part]) => Object.assign(document.createElement("span"), { className: part })));
    element.append(name, text);
  }
  element.firstElementChild.textContent = who;
  for (const [place, [, text]] of parts.entries()) {
    const span = element.lastElementChild.children[place];
    // Never as HTML: what a model writes is only text. What is there stays, so that it can be selected while more comes.
    if (text.startsWith(span.textContent) && span.firstChild) span.firstChild.appendData(text.slice(span.textContent.length));
    else if (span.textContent !== text) span.textContent = text;
  }
  element.classList.toggle("busy", busy);
  element.setAttribute("aria-busy", busy);
  return element;
}

function showSettings() {
  const values = settings();
  for (const name of [...SETTINGS, "seed"]) if ($(name) !== document.activeElement) $(name).value = values[name];
  for (const output of $("settings").querySelectorAll("output")) output.value = $(output.htmlFor.value).value;
}

function showButtons() {
  const goesOn = scenario().continues && turns().length > 0 && $("input").value.trim() === "";
  $("send").textContent = goesOn ? "Go on" : "Generate";
  $("send").disabled = underway !== null;
  $("stop").disabled = underway === null;
  $("clear").disabled = underway !== null || turns().length === 0;
  $("model").disabled = underway !== null || models.length < 2;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function showStatus(text) {
  if ($("status").textContent !== text) $("status").textContent = text;
}

// For whoever listens instead of looking: what happens, and an answer when it is whole; not each token of it.
function say(text) {
  if ($("said").textContent !== text) $("said").textContent = text;
}

function showKept() {
  $("clear").title = store.works ? "" : "This browser keeps nothing: the texts are gone when the page is closed.";
  if (!store.works && !underway) showStatus("this browser keeps no texts");
}

// --- following the answer -------------------------------------------------------------------------------------------

const atEnd = () => innerHeight + scrollY >= document.documentElement.scrollHeight - NEAR_PX;

function follow() {
  if (following) scrollTo(0, document.documentElement.scrollHeight);
  $("newest").hidden = atEnd();
}

function scrolled() {
  following = atEnd();
  $("newest").hidden = following;
}

function fitInput() {
  $("input").style.height = "auto";
  $("input").style.height = `${$("input").scrollHeight + 2}px`;
  follow();
}

// The focus goes back to the field if it was lost to a button that is disabled now, and no keyboard comes up by that.
function focusInput() {
  const idle = [document.body, null, $("send"), $("stop"), $("clear")].includes(document.activeElement);
  if (idle && !byTouch()) $("input").focus({ preventScroll: true });
}

// --- the server -----------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function loadModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw await Refused.from(response);
  models = (await response.json()).data;
  $("model").replaceChildren(...models.map(({ id }) => new Option(id, id)));
  if (models.some(({ id }) => id === page.model)) $("model").value = page.model;
  modelChosen();
}

function modelChosen() {
  $("max_tokens").max = Math.max(8, Math.min(2048, Math.floor(model().max_model_len / 16) * 8));
  show();
}

// A model may have room for less than was said and is wanted: then without the oldest turns, then for a shorter text.
async function ask(signal) {
  const before = turns().slice(0, -1).filter(({ theirs }) => theirs);
  let said = [...(scenario().keeps ? before : []), turns().at(-1)];
  let length = Number($("max_tokens").value);
  for (;;) {
    const path = usesTemplate() ? "/v1/chat/completions" : "/v1/completions";
    const response = await fetch(path, { method: "POST", headers: headers(), body: body(said, length), signal });
    if (response.ok) return { response, length };
    const refused = await Refused.from(response);
    if (refused.code !== "context_length_exceeded" || (said.length < 2 && length < 16)) throw refused;
    if (said.length > 1) said = said.slice(1);
    else length = Math.floor(length / 2);
  }
}

function body(said, length) {
  const clean = said.map(({ mine, theirs }) => ({ mine: mine.replace(CONTROL, ""), theirs: theirs.replace(CONTROL, "") }));
  const input = usesTemplate()
    ? { messages: scenario().messages(clean) }
    : { prompt: scenario().prompt(clean), stop: scenario().stop };
  const asked = {
    model: $("model").value || undefined,
    ...input,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: length,
    ...Object.fromEntries(SETTINGS.slice(1).map((name) => [name, Number($(name).value)])),
  };
  if ($("seed").value) asked.seed = Number($("seed").value);
  return JSON.stringify(asked);
}

// The events of a stream, also its comments, which tell the place in the queue.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    const parts = rest.split("\n\n");
    rest = parts.pop();
    yield* parts;
  }
}

async function write({ turn, abort, id }) {
  const began = performance.now();
  const { response, length } = await ask(abort.signal);
  let first = 0, tokens = 0, finish = "", saved = 0, complete = false;
  for await (const event of events(response)) {
    if (event.startsWith(": queued behind ")) {
      showStatus(`waiting, ${event.slice(16)} before you`);
      say($("status").textContent);
    }
    if (!event.startsWith("data: ")) continue;
    if (event === "data: [DONE]") {
      complete = true;
      continue;
    }
    const piece = JSON.parse(event.slice(6));
    if (piece.error) throw new Refused(piece.error.code === "timeout" ? 504 : 500, piece.error);
    if (piece.usage) tokens = piece.usage.completion_tokens;
    const choice = piece.choices[0];
    finish = choice?.finish_reason ?? finish;
    const text = choice?.text ?? choice?.delta?.content ?? "";
    if (!text) continue;
    first ||= performance.now();
    turn.theirs = scenario().continues || turn.theirs ? turn.theirs + text : text.trimStart();
    turn.changed = Date.now();
    showTurns();
    showStatus("writing");
    if (turn.changed - saved > SAVE_EVERY_MS) {
      saved = turn.changed;
      saveTexts(id);
      // Another tab may have cleared the texts, this one with them.
      if (!turns().includes(turn)) abort.abort();
    }
  }
  if (!complete) throw new TypeError("the stream broke");
  const seconds = (performance.now() - (first || began)) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  const wanted = Number($("max_tokens").value);
  const room = finish === "length" && length < wanted ? `, no room for ${wanted}` : finish === "length" ? ", the Length chosen" : "";
  showStatus(`${tokens} tokens${rate}${room}`);
}

async function generate() {
  if (underway) return;
  const { continues, id } = scenario();
  const goesOn = continues && $("input").value.trim() === "" && turns().length > 0;
  const mine = continues ? $("input").value : $("input").value.trim();
  if (!mine.trim() && !goesOn) return;
  const wrong = wrongSetting([$("top_k"), $("seed")]);
  showError(wrong);
  if (wrong) {
    $("form").querySelector("details").open = true;
    return;
  }
  const now = Math.max(Date.now(), record().cleared + 1);
  const turn = goesOn ? turns().at(-1) : { id: newId(), began: now, changed: now, mine, theirs: "", model: $("model").value };
  const length = turn.theirs.length;
  if (!goesOn) record().turns.push(turn);
  underway = { abort: new AbortController(), turn, id };
  page.scenario = id; // no longer that which comes first with the model
  savePage();
  following = true;
  $("input").value = "";
  if (byTouch()) $("input").blur(); // the keyboard covers the answer
  fitInput();
  showStatus("…");
  say("The model is writing.");
  saveTexts(id);
  show();
  try {
    await write(underway);
    say(`${$("model").value}: ${turn.theirs.slice(length)}`);
  } catch (error) {
    if (error.name === "AbortError") showStatus("stopped");
    else failed(error, turn, turn.theirs.length > length, mine);
    say(error.name === "AbortError" ? `Stopped. ${turn.theirs.slice(length)}` : "");
  } finally {
    underway = null;
    saveTexts(id);
    show();
    focusInput();
  }
}

function newId() {
  return `${Date.now().toString(36)}-${Math.random().toString(36).slice(2, 10)}`;
}

// What was asked goes back into the field, so that it can be sent again.
function failed(error, turn, wrote, mine) {
  showError(wrote && error instanceof TypeError ? "The connection broke before the end; what came is kept." : inWords(error, model()?.max_model_len));
  showStatus("");
  if (turn.theirs) return;
  Object.assign(turn, { mine: "", gone: true, changed: Date.now() }); // and stays so, in every tab
  $("input").value = mine;
  fitInput();
}

// --- what is done ---------------------------------------------------------------------------------------------------

function choose(id) {
  page.scenario = id;
  showError("");
  showStatus("");
  following = true;
  show();
  savePage();
}

function clear() {
  const { id } = scenario();
  texts[id] = { cleared: Date.now(), turns: [] };
  saveTexts(id);
  showError("");
  showStatus("");
  show();
  focusInput();
}

function begin() {
  for (const { id, name } of SCENARIOS) {
    const tab = document.createElement("button");
    Object.assign(tab, { type: "button", textContent: name, id: `tab-${id}` });
    tab.dataset.id = id;
    tab.setAttribute("role", "tab");
    tab.setAttribute("aria-controls", "panel");
    tab.addEventListener("click", () => choose(id));
    $("scenarios").append(tab);
  }
  $("scenarios").addEventListener("keydown", (event) => {
    if (underway) return;
    const all = order(), place = all.indexOf(scenario());
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: all.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    choose(all[(next + all.length) % all.length].id);
    $(`tab-${page.scenario}`).focus();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("input").addEventListener("keydown", (event) => {
    // Where there is no Shift to hold, Enter begins a line, and the button sends.
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !byTouch()) {
      event.preventDefault();
      generate();
    }
  });
  $("input").addEventListener("input", () => {
    fitInput();
    showButtons();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") underway?.abort.abort();
  });
  $("stop").addEventListener("click", () => underway?.abort.abort());
  $("clear").addEventListener("click", clear);
  $("newest").addEventListener("click", () => {
    following = true;
    follow();
  });
  $("reset").addEventListener("click", () => {
    settingsOf[scenario().id] = { ...scenario().settings, seed: "" };
    store.saveSettings(scenario().id, {});
    showError("");
    showSettings();
  });
  $("theme").addEventListener("click", () => {
    const dark = page.theme ? page.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    page.theme = dark ? "light" : "dark";
    show();
    savePage();
  });
  $("settings").addEventListener("input", (event) => {
    if (!(event.target.id in settings())) return;
    settings()[event.target.id] = event.target.value;
    showSettings();
    store.saveSettings(scenario().id, settings());
  });
  $("key").addEventListener("change", refresh);
  $("model").addEventListener("change", () => {
    page.model = $("model").value;
    modelChosen();
    savePage();
  });
  store.onTexts((id) => {
    texts[id] = store.join(id, texts[id]);
    if (id === scenario().id) show();
  });
  addEventListener("scroll", scrolled, { passive: true });
  addEventListener("resize", follow);
  addEventListener("pagehide", () => underway && saveTexts(underway.id));
  $("form").querySelector("details").addEventListener("toggle", follow);
  show();
  refresh();
}

function refresh() {
  showError("");
  loadModels().catch((error) => showError(inWords(error)));
}

begin();
