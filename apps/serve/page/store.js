"use strict";

// What this browser keeps: a record for the page, one for each scenario's settings, and one for each scenario's texts,
// { cleared, turns: [{ id, began, changed, mine, theirs, model, gone? }, …] }. Several tabs write the same texts, so what is stored is
// merged, never overwritten: turns by id, the later change of each, none that began before the last "Clear".
// A store that is missing, full or holds something else is no error: then the page keeps less, or nothing.
// eslint-disable-next-line no-unused-vars
const store = (() => {
  const PREFIX = "megalith";
  const MOST_TURNS = 100;
  let works = true;

  function get(name) {
    try {
      const found = JSON.parse(localStorage.getItem(`${PREFIX}.${name}`) ?? "{}");
      return found !== null && typeof found === "object" && !Array.isArray(found) ? found : {};
    } catch {
      return {};
    }
  }

  function put(name, value) {
    try {
      localStorage.setItem(`${PREFIX}.${name}`, JSON.stringify(value));
      works = true;
    } catch {
      works = false;
    }
    return works;
  }

  const isTurn = (turn) =>
    turn !== null && typeof turn === "object" && [turn.id, turn.mine, turn.theirs].every((t) => typeof t === "string") &&
    [turn.began, turn.changed].every(Number.isFinite);

  const texts = (found) => ({
    cleared: Number.isFinite(found.cleared) ? found.cleared : 0,
    turns: Array.isArray(found.turns) ? found.turns.filter(isTurn) : [],
  });

  // Both together; the objects of `ours` stay the ones in use.
  function merged(ours, stored) {
    const cleared = Math.max(ours.cleared, stored.cleared);
    const byId = new Map(ours.turns.map((turn) => [turn.id, turn]));
    for (const turn of stored.turns) {
      const own = byId.get(turn.id);
      if (!own) byId.set(turn.id, turn);
      else if (turn.changed > own.changed) Object.assign(own, turn);
    }
    const turns = [...byId.values()].filter((turn) => turn.began > cleared);
    turns.sort((a, b) => a.began - b.began || (a.id < b.id ? -1 : 1));
    return { cleared, turns: turns.slice(-MOST_TURNS) };
  }

  return {
    get works() {
      return works;
    },
    page: () => get("page"),
    savePage: (page) => put("page", page),
    settings: (id) => get(`settings.${id}`),
    saveSettings: (id, settings) => put(`settings.${id}`, settings),
    // What is kept of a scenario's texts, joined with `ours`.
    join: (id, ours = { cleared: 0, turns: [] }) => merged(ours, texts(get(`texts.${id}`))),
    // The same, written back. A full store keeps the newer half.
    saveTexts(id, ours) {
      const all = this.join(id, ours);
      if (!put(`texts.${id}`, all)) put(`texts.${id}`, { ...all, turns: all.turns.slice(-all.turns.length / 2) });
      return all;
    },
    // Calls back with a scenario's id when another tab has changed its texts.
    onTexts(callback) {
      addEventListener("storage", ({ key }) => {
        if (key === null) return;
        const [prefix, kind, id] = key.split(".");
        if (prefix === PREFIX && kind === "texts") callback(id);
      });
    },
  };
})();
