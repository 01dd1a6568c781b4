"use strict";
// The report of a prediction: the structure by 3Dmol.js, and pictures of the numbers that stand in #data.

const read = (id) => JSON.parse(document.getElementById(id).textContent);
const at = (id) => document.getElementById(id);
const data = read("data");
const structures = { predicted: read("predicted"), relaxed: read("relaxed") };
const BANDS = data.bands; // [from, to, colour]
const CHAIN_COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#bbbbbb", "#994f00"];

const bandColour = (value) => (BANDS.find(([, to]) => value < to) || BANDS[BANDS.length - 1])[2];
const chainColour = (id) => CHAIN_COLOURS[Math.max(0, data.chains.findIndex((chain) => chain.id === id)) % CHAIN_COLOURS.length];
const chainOf = (row) => data.chains.find((chain) => row < chain.start + chain.length);
const named = (row) => {
  const chain = chainOf(row);
  return `${chain.id} ${data.sequence[row]}${row - chain.start + 1}`;
};

function element(name, attributes = {}, text = "", svg = false) {
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text) made.textContent = text;
  return made;
}

function head() {
  at("name").textContent = data.name;
  at("origin").textContent = data.origin;
  at("note").hidden = !data.note;
  at("note").textContent = data.note;
  for (const [label, value] of data.scores) {
    const tile = element("div");
    tile.append(element("b", {}, value), element("span", {}, label));
    at("scores").append(tile);
  }
}

function legend(kind) {
  const entries = kind === "chain"
    ? data.chains.map((chain) => [`chain ${chain.id}`, chainColour(chain.id)])
    : BANDS.map(([from, to, colour]) => [`${from} to ${to}`, colour]);
  at("legend").replaceChildren(...entries.slice(0, 12).map(([label, colour]) => {
    const made = element("span", {}, label);
    made.prepend(element("i", { style: `background:${colour}` }));
    return made;
  }));
}

let viewer = null;

function dress() {
  const colours = at("colour").value;
  const colorfunc = (atom) => (colours === "chain" ? chainColour(atom.chain) : bandColour(atom.b));
  const style = {};
  if (at("style").value !== "stick") style.cartoon = { colorfunc };
  if (at("style").value !== "cartoon") style.stick = { colorfunc, radius: 0.15 };
  viewer.setStyle({}, style);
  viewer.render();
  legend(colours);
}

function show() {
  viewer.removeAllModels();
  viewer.removeAllLabels();
  viewer.addModel(structures[at("which").value], "cif");
  viewer.setHoverable({}, true, (atom) => {
    at("pointed").textContent = `${atom.chain} ${atom.resn} ${atom.resi}, pLDDT ${atom.b.toFixed(1)}`;
  }, () => {});
  dress();
}

function view() {
  if (structures.relaxed) at("which").append(element("option", { value: "relaxed" }, "relaxed"));
  try {
    viewer = $3Dmol.createViewer(at("view"), { backgroundColor: "white" });
    show();
    viewer.zoomTo();
    viewer.render();
    document.body.dataset.atoms = viewer.selectedAtoms({}).length;
  } catch (error) {
    at("view").textContent = `This browser shows no 3D graphics (${error}); the mmCIF file beside this report has the structure.`;
    viewer = null;
    return;
  }
  at("which").onchange = () => { show(); document.body.dataset.atoms = viewer.selectedAtoms({}).length; };
  at("colour").onchange = dress;
  at("style").onchange = dress;
  at("reset").onclick = () => { viewer.removeAllLabels(); viewer.zoomTo(); viewer.render(); };
}

function point(rows) {
  if (!viewer) return;
  viewer.removeAllLabels();
  for (const row of rows) {
    const chain = chainOf(row);
    viewer.addResLabels({ chain: chain.id, resi: row - chain.start + 1 }, { fontSize: 12, backgroundOpacity: 0.7 });
  }
  viewer.render();
}

// Lines over residues: [{values, colour, label}], with the ends of chains and, where given, bands behind.
function lines(place, series, top, { bands = [], hover } = {}) {
  const [W, H, left, right, above, below] = [1000, 220, 44, 8, 10, 24];
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" }, "", true);
  const count = series[0].values.length;
  const x = (n) => left + ((n + 0.5) / count) * (W - left - right);
  const y = (value) => H - below - (value / top) * (H - above - below);
  const put = (name, attributes, text) => svg.append(element(name, attributes, text, true));
  for (const [from, to, colour] of bands) {
    put("rect", { x: left, width: W - left - right, y: y(to), height: y(from) - y(to), fill: colour, opacity: 0.2 });
  }
  for (let n = 0; n <= 4; n += 1) {
    const value = (top * n) / 4;
    put("line", { x1: left, x2: W - right, y1: y(value), y2: y(value), stroke: "currentColor", opacity: 0.12 });
    put("text", { x: left - 6, y: y(value) + 4, "text-anchor": "end" }, String(Math.round(value)));
  }
  for (const chain of data.chains) {
    if (chain.start) put("line", { x1: x(chain.start - 0.5), x2: x(chain.start - 0.5), y1: above, y2: H - below, stroke: "currentColor", opacity: 0.5 });
    if (data.chains.length > 1) put("text", { x: x(chain.start + chain.length / 2 - 0.5), y: H - 8, "text-anchor": "middle" }, chain.id);
  }
  if (data.chains.length === 1) {
    put("text", { x: left, y: H - 8 }, "1");
    put("text", { x: W - right, y: H - 8, "text-anchor": "end" }, String(count));
  }
  for (const one of series) {
    const points = one.values.map((value, n) => `${x(n).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    put("polyline", { points, fill: "none", stroke: one.colour, "stroke-width": 1.6 });
  }
  if (series.length > 1) series.forEach((one, n) => put("text", { x: W - right - 8, y: above + 14 + 14 * n, "text-anchor": "end", style: `fill:${one.colour}` }, one.label));
  if (hover) {
    svg.onmousemove = (event) => {
      const inside = (event.offsetX / svg.clientWidth) * W;
      const row = Math.floor(((inside - left) / (W - left - right)) * count);
      if (row >= 0 && row < count) hover(row);
    };
  }
  place.append(svg);
}

function bars(place, entries) {
  const [W, H, left, below] = [1000, 240, 44, 62];
  const svg = element("svg", { viewBox: `0 0 ${W} ${H}`, role: "img" }, "", true);
  const most = Math.max(...entries.map(([, count]) => count));
  const step = (W - left) / entries.length;
  entries.forEach(([species, count], n) => {
    const height = ((H - below - 18) * count) / most;
    const bar = element("rect", { x: left + n * step + 2, width: Math.max(1, Math.min(40, step - 4)), y: H - below - height, height, fill: "#65cbf3" }, "", true);
    bar.append(element("title", {}, `${species}: ${count}`, true));
    const centre = left + n * step + 2 + Math.max(1, Math.min(40, step - 4)) / 2;
    svg.append(bar, element("text", { x: centre, y: H - below - height - 4, "text-anchor": "middle" }, String(count), true));
    svg.append(element("text", { transform: `translate(${centre + 4},${H - below + 8}) rotate(90)` }, species, true));
  });
  place.append(svg);
}

function errors() {
  if (!data.pae) return;
  at("errors").hidden = false;
  const bytes = Uint8Array.from(atob(data.pae.values), (letter) => letter.charCodeAt(0));
  const { size, step } = data.pae;
  const small = element("canvas", { width: size, height: size });
  const image = small.getContext("2d").createImageData(size, size);
  for (let n = 0; n < bytes.length; n += 1) { // dark green is certain, as in the AlphaFold database
    const share = Math.min(1, bytes[n] / 254);
    image.data.set([Math.round(247 * share), Math.round(68 + 184 * share), Math.round(27 + 218 * share), 255], 4 * n);
  }
  small.getContext("2d").putImageData(image, 0, 0);
  const canvas = at("pae");
  const [edge, margin] = [560, 26];
  canvas.width = canvas.height = edge + margin;
  const draw = canvas.getContext("2d");
  const total = data.sequence.length;
  draw.imageSmoothingEnabled = false;
  draw.drawImage(small, margin, 0, edge, edge);
  draw.fillStyle = "#777777";
  draw.font = "13px system-ui, sans-serif";
  draw.textAlign = "center";
  for (const chain of data.chains) {
    const begin = (edge * chain.start) / total;
    if (chain.start) {
      draw.fillRect(margin + begin - 0.75, 0, 1.5, edge);
      draw.fillRect(margin, begin - 0.75, edge, 1.5);
    }
    const middle = begin + (edge * chain.length) / total / 2;
    if (data.chains.length > 1 && chain.length > total / 40) {
      draw.fillText(chain.id, margin + middle, edge + 18);
      draw.fillText(chain.id, 12, middle + 4);
    }
  }
  const place = (event) => {
    const scale = (edge + margin) / canvas.clientWidth;
    const column = Math.floor(((event.offsetX * scale - margin) / edge) * total);
    const row = Math.floor(((event.offsetY * scale) / edge) * total);
    return column >= 0 && row >= 0 && column < total && row < total ? [row, column] : null;
  };
  canvas.onmousemove = (event) => {
    const found = place(event);
    if (!found) return;
    const value = bytes[Math.floor(found[0] / step) * size + Math.floor(found[1] / step)] / 8;
    at("pair").textContent = `aligned on ${named(found[0])}, scored ${named(found[1])}: ${value.toFixed(1)} Å${step > 1 ? ` (mean of ${step} x ${step})` : ""}`;
  };
  canvas.onclick = (event) => { const found = place(event); if (found) point(found); };
}

function interfaces() {
  if (!data.matrices.length) return;
  at("interfaces").hidden = false;
  const ids = data.chains.map((chain) => chain.id);
  for (const [caption, matrix] of data.matrices) {
    const table = element("table");
    table.append(element("caption", {}, caption));
    const first = element("tr");
    first.append(element("th"), ...ids.map((id) => element("th", {}, id)));
    table.append(first);
    matrix.forEach((row, n) => {
      const made = element("tr");
      made.append(element("th", {}, ids[n]), ...row.map((value) => element("td", {}, Number.isInteger(value) ? String(value) : value.toFixed(3))));
      table.append(made);
    });
    at("tables").append(table);
  }
}

function alignment() {
  if (data.coverage) {
    at("alignment").hidden = false;
    const series = [{ values: data.coverage.all, colour: "#8a94a0", label: `all ${data.coverage.rows} rows` }];
    if (data.coverage.several) series.push({ values: data.coverage.several, colour: "#0053d6", label: "rows of several chains" });
    lines(at("coverage"), series, Math.max(1, ...data.coverage.all));
  }
  if (data.pairing.length) {
    at("species").hidden = false;
    bars(at("pairing"), data.pairing);
  }
}

head();
lines(at("plddt"), [{ values: data.plddt, colour: "#5a6472" }], 100, {
  bands: BANDS,
  hover: (row) => { at("pointed").textContent = `${named(row)}, pLDDT ${data.plddt[row].toFixed(1)}`; },
});
errors();
interfaces();
alignment();
view();
document.body.dataset.ready = "yes";
