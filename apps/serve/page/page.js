"use strict";

const $ = (id) => document.getElementById(id);
const SETTINGS = ["max_tokens", "temperature", "top_p", "top_k", "repetition_penalty"];
const STORE = "megalith";
// Control characters, which a model may have written and the server does not take back.
const CONTROL = /[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]/g;

// What is kept in this browser: the scenario, the model, the texts and the settings of each scenario.
const state = { scenario: SCENARIOS[0].id, model: "", theme: "", turns: {}, settings: {} };
let underway = null; // AbortController of the text that is being written

const scenario = () => SCENARIOS.find((one) => one.id === state.scenario);
const turns = () => (state.turns[state.scenario] ??= []);
const settings = () => (state.settings[state.scenario] ??= { ...scenario().settings, seed: "" });

function load() {
  try {
    const kept = JSON.parse(localStorage.getItem(STORE) ?? "{}");
    for (const name of Object.keys(state)) if (typeof kept[name] === typeof state[name]) state[name] = kept[name];
  } catch {
    // nothing kept, or something else: begin anew
  }
  if (!SCENARIOS.some((one) => one.id === state.scenario)) state.scenario = SCENARIOS[0].id;
}

function save() {
  try {
    localStorage.setItem(STORE, JSON.stringify(state));
  } catch {
    // a browser that keeps nothing: the page works all the same
  }
}

// --- what is shown --------------------------------------------------------------------------------------------------

function show() {
  document.documentElement.dataset.theme = state.theme;
  for (const tab of $("scenarios").children) {
    const chosen = tab.dataset.id === state.scenario;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
  }
  $("about").textContent = scenario().about;
  $("asked").textContent = scenario().asked;
  $("input").placeholder = scenario().example;
  $("turns").replaceChildren(...turns().flatMap((turn) => [item("mine", turn.mine), item("theirs", turn.theirs)]));
  showSettings();
}

function item(kind, text) {
  const element = document.createElement("li");
  element.className = kind;
  element.textContent = text; // never as HTML: what a model writes is only text
  return element;
}

function showSettings() {
  const values = settings();
  for (const name of [...SETTINGS, "seed"]) $(name).value = values[name];
  for (const output of $("settings").querySelectorAll("output")) output.value = $(output.htmlFor.value).value;
}

function showError(message) {
  $("error").textContent = message;
  $("error").hidden = !message;
}

function setBusy(busy) {
  $("send").disabled = busy;
  $("stop").disabled = !busy;
  $("clear").disabled = busy;
  for (const tab of $("scenarios").children) tab.disabled = busy;
}

// --- the server -----------------------------------------------------------------------------------------------------

function headers() {
  const key = $("key").value.trim();
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function loadModels() {
  const response = await fetch("/v1/models", { headers: headers() });
  if (!response.ok) throw new Error(await complaint(response));
  const { data } = await response.json();
  $("model").replaceChildren(...data.map(({ id }) => new Option(id, id)));
  $("model").disabled = data.length < 2;
  if (data.some(({ id }) => id === state.model)) $("model").value = state.model;
  const longest = Math.max(...data.map(({ max_model_len }) => max_model_len));
  $("max_tokens").max = Math.max(8, Math.min(2048, Math.floor(longest / 16) * 8));
}

async function complaint(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answered ${response.status}`;
  }
}

// A model may have room for less than was said and is wanted: then without the oldest turns, then for a shorter text.
async function ask() {
  let said = scenario().keeps ? turns() : turns().slice(-1);
  let length = Number($("max_tokens").value);
  for (;;) {
    const response = await fetch("/v1/completions", {
      method: "POST", headers: headers(), body: body(said, length), signal: underway.signal,
    });
    if (response.ok) return response;
    const { error } = await response.json().catch(() => ({ error: { message: `the server answered ${response.status}` } }));
    if (error.code !== "context_length_exceeded" || (said.length < 2 && length < 16)) throw new Error(error.message);
    if (said.length > 1) said = said.slice(1);
    else length = Math.floor(length / 2);
  }
}

function body(said, length) {
  const values = settings();
  const asked = {
    model: $("model").value || undefined,
    prompt: scenario().prompt(said).replace(CONTROL, ""),
    stop: scenario().stop,
    stream: true,
    stream_options: { include_usage: true },
    max_tokens: length,
    temperature: Number(values.temperature),
    top_p: Number(values.top_p),
    top_k: Number(values.top_k),
    repetition_penalty: Number(values.repetition_penalty),
  };
  if (String(values.seed).trim() !== "") asked.seed = Number(values.seed);
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

async function write(turn, element) {
  const began = performance.now();
  const response = await ask();
  let first = 0, tokens = 0;
  for await (const event of events(response)) {
    if (event.startsWith(": queued behind ")) $("status").value = `waiting, ${event.slice(16)} before you`;
    if (!event.startsWith("data: ") || event === "data: [DONE]") continue;
    const piece = JSON.parse(event.slice(6));
    if (piece.error) throw new Error(piece.error.message);
    if (piece.usage) tokens = piece.usage.completion_tokens;
    const text = piece.choices[0]?.text ?? "";
    if (text) {
      first ||= performance.now();
      turn.theirs = (turn.theirs + text).trimStart();
      element.textContent = turn.theirs;
      const seconds = (performance.now() - first) / 1000;
      $("status").value = seconds > 0.5 ? "writing" : "";
    }
  }
  const seconds = (performance.now() - (first || began)) / 1000;
  const rate = tokens > 1 && seconds > 0 ? `, ${((tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
  $("status").value = `${tokens} tokens${rate}`;
}

async function generate() {
  const mine = $("input").value.trim();
  if (!mine || underway) return;
  underway = new AbortController();
  showError("");
  setBusy(true);
  $("status").value = "…";
  const turn = { mine, theirs: "" };
  if (!scenario().keeps) turns().length = 0;
  turns().push(turn);
  show();
  $("input").value = "";
  const element = $("turns").lastElementChild;
  element.classList.add("busy");
  try {
    await write(turn, element);
  } catch (error) {
    if (error.name === "AbortError") $("status").value = "stopped";
    else failed(error, turn, mine);
  } finally {
    element.classList.remove("busy");
    underway = null;
    setBusy(false);
    save();
    $("input").focus();
  }
}

// What was asked goes back into the field, so that it can be sent again.
function failed(error, turn, mine) {
  const unreachable = error instanceof TypeError;
  showError(unreachable ? "The server cannot be reached. Is it still running?" : error.message);
  $("status").value = "";
  if (!turn.theirs) {
    turns().pop();
    show();
    $("input").value = mine;
  }
}

// --- what is done ---------------------------------------------------------------------------------------------------

function choose(id) {
  state.scenario = id;
  showError("");
  $("status").value = "";
  show();
  save();
}

function begin() {
  load();
  for (const { id, name } of SCENARIOS) {
    const tab = document.createElement("button");
    tab.type = "button";
    tab.textContent = name;
    tab.dataset.id = id;
    tab.setAttribute("role", "tab");
    tab.addEventListener("click", () => choose(id));
    $("scenarios").append(tab);
  }
  $("scenarios").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step || underway) return;
    const place = SCENARIOS.findIndex((one) => one.id === state.scenario);
    choose(SCENARIOS[(place + step + SCENARIOS.length) % SCENARIOS.length].id);
    $("scenarios").querySelector("[aria-selected=true]").focus();
  });
  $("form").addEventListener("submit", (event) => {
    event.preventDefault();
    generate();
  });
  $("input").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      generate();
    }
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") underway?.abort();
  });
  $("stop").addEventListener("click", () => underway?.abort());
  $("clear").addEventListener("click", () => {
    turns().length = 0;
    choose(state.scenario);
    $("input").focus();
  });
  $("reset").addEventListener("click", () => {
    delete state.settings[state.scenario];
    showSettings();
    save();
  });
  $("theme").addEventListener("click", () => {
    const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    state.theme = dark ? "light" : "dark";
    show();
    save();
  });
  $("settings").addEventListener("input", (event) => {
    if (event.target.id in settings()) settings()[event.target.id] = event.target.value;
    showSettings();
    save();
  });
  $("key").addEventListener("change", models);
  $("model").addEventListener("change", () => {
    state.model = $("model").value;
    save();
  });
  show();
  models();
}

function models() {
  showError("");
  loadModels().catch((error) => {
    showError(error instanceof TypeError ? "The server cannot be reached. Is it still running?" : error.message);
  });
}

begin();
