"use strict";
// One recorded answer. Data flows one way: `data` (record.py) -> show(step) and showToken(token) -> elements.
// Whatever came from a model is put in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const { about, steps, pieces } = data;
const TARGET = -1; // stands for an exit where the target itself gave the token

// Helpers -----------------------------------------------------------------------------------------------------------

const at = (id) => document.getElementById(id);
const all = (selector) => document.querySelectorAll(selector);
const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const ms = (value) => value.toFixed(value < 10 ? 2 : 1) + " ms";
const percent = (part, whole) => `width:${((100 * part) / whole).toFixed(2)}%`;

function number(value) {
  if (value === null || value === undefined) return "?";
  return value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(3);
}

function make(name, attributes = {}, ...children) {
  const [tag, svg] = name.split(":").reverse();
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const paragraph = (...children) => make("p", {}, ...children);
const faint = (text) => make("p", { class: "faint" }, text);

/** A bar of `whole`, of parts that are [class, length]. */
function strip(parts, whole) {
  const elements = parts.map(([name, part]) => make("i", { class: name, style: percent(part, whole) }));
  return make("div", { class: "strip" }, ...elements);
}

/** A token's text where it stands alone: spaces and ends of lines are visible; without a text it is its number. */
function label(token) {
  const text = pieces[token];
  return text === "" || text === undefined ? `#${token}` : text.replaceAll("\n", "↵").replace(/^ | $/g, "␣");
}

const piece = (token) => make("bdi", { class: "piece", title: `token ${token}` }, label(token));

/** The class, and the name, of where a token came from. */
const sourceClass = (exit) => `source${exit === TARGET ? 0 : (about.exits.indexOf(exit) % 6) + 1}`;
const sourceName = (exit) => (exit === TARGET ? "the target" : exit ? `the draft, after layer ${exit}` : "the table");

/** The Tab key stops once at many items; arrow keys move between them, and focus or the mouse shows one. */
function rove(items, show) {
  items.forEach((item, i) => {
    item.setAttribute("tabindex", i ? -1 : 0);
    item.addEventListener("mouseenter", () => show(i));
    item.addEventListener("click", () => item.focus());
    item.addEventListener("focus", () => {
      items.forEach((other) => other.setAttribute("tabindex", other === item ? 0 : -1));
      show(i);
    });
    item.addEventListener("keydown", (event) => {
      const last = items.length - 1;
      const moves = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: last };
      const to = moves[event.key];
      if (to === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      items[Math.max(0, Math.min(last, to))].focus();
    });
  });
}

// The answer --------------------------------------------------------------------------------------------------------

/** Of each token of the answer: its step, its index there, and the exit that drafted it. */
const origins = steps.flatMap((step, s) =>
  step.tokens.map((token, index) => ({ s, index, token, exit: step.sources[index] })));
let tokenElements = [];

function drawAnswer() {
  tokenElements = origins.map(({ exit, token }, i) => {
    const name = `${label(token)}, ${sourceName(exit)}`;
    return make("span", { class: sourceClass(exit), role: "button", "aria-label": name }, data.answer[i]);
  });
  at("answer").append(...tokenElements);
  rove(tokenElements, showToken);
  tokenElements.forEach((element, i) => {
    const open = () => show(origins[i].s, origins[i].index);
    element.addEventListener("click", open);
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      open();
    });
  });
  const exits = [...new Set(origins.map(({ exit }) => exit))].sort((a, b) => a - b);
  for (const exit of exits) {
    const count = origins.filter((origin) => origin.exit === exit).length;
    at("legend").append(make("span", { class: sourceClass(exit) }, `${sourceName(exit)}: ${count}`), "   ");
  }
}

/** Why a token is what it is, in sentences. */
function showToken(i) {
  const { s, index, token, exit } = origins[i];
  const step = steps[s], position = step.positions[index];
  const alike = depths(step.nodes.parents).filter((depth) => depth === index).length; // nodes of its level
  const { tests, ids, stages } = position;
  tokenElements.forEach((element, j) => element.classList.toggle("lit", j === i));
  const lines = [paragraph(piece(token), ` token ${i + 1} of ${origins.length}, step ${s + 1}: ${sourceName(exit)}`)];
  if (exit !== TARGET) {
    const { rounds, parents } = step.nodes, round = rounds[step.path[index]];
    const asked = new Set(parents.filter((_, node) => rounds[node] === round)).size; // nodes in its round
    lines.push(paragraph((asked > 1 ? "most confident node of its round: " : "") + exitsText(step.rounds[round], exit)));
    if (exit === 0) lines.push(paragraph(suffixText(step, step.path[index])));
  }
  if (exit === TARGET && index === 0 && step.nodes.exits[0] === TARGET)
    lines.push(paragraph("A root that the target gave. The longest path below a root wins."));
  lines.push(...tests.map((test) => testLine(step, test)));
  if (position.bonus === token) {
    const rest = stages.length > 1 ? " in the residual distribution" : "";
    lines.push(paragraph(`The bonus token: p = ${number(stages.at(-1).p[ids.indexOf(token)])}${rest}.`));
    if (!tests.length && !alike) lines.push(paragraph(`Nothing was drafted here. ${stopText(step)}`));
    else if (!tests.length) lines.push(paragraph("The node before it has no child in the tree."));
  }
  at("token").replaceChildren(...lines);
}

/** The exits that were tried, and their confidences. */
function exitsText(confidences, exit) {
  const said = confidences.map(([layer, confidence]) => {
    const threshold = about.thresholds[about.exits.indexOf(layer)];
    const compared = layer === about.exits.at(-1) ? "(the last exit)" : `${layer === exit ? ">" : "≤"} ${threshold}`;
    return `${layer ? `layer ${layer}` : "the table"}: confidence ${number(confidence)} ${compared}`;
  });
  return said.join("; ");
}

/** What exit 0 went by: the last tokens before a node that were seen before. */
const suffixText = (step, node) => {
  const suffix = step.nodes.suffixes[node].map(label).join("");
  return suffix ? `It followed “${suffix}” before.` : "It was not seen here before, it fills the tree.";
};

/** Why there are no more levels. */
function stopText(step) {
  return {
    "": about.method === "ar" ? "There is no draft." : "The first step only finds roots.",
    length: "Drafting ended at the full depth of the tree.",
    context: "Drafting ended where the answer or the context must end.",
    confidence: `Drafting ended: nothing was known, or the path was less probable than ${about.stop}.`,
    policy: "Drafting ended: the stopping policy found no path likely enough.",
  }[step.stopped];
}

// A step ------------------------------------------------------------------------------------------------------------

let current = 0;

function show(s, index = 0) {
  current = Math.max(0, Math.min(steps.length - 1, s));
  const step = steps[current];
  at("slider").value = current;
  at("slider").setAttribute("aria-valuetext", `step ${current + 1} of ${steps.length}`);
  at("step-number").textContent = `${current + 1} of ${steps.length}`;
  const counts = `${step.nodes.tokens.length} drafted, ${step.path.length} accepted, ${step.tokens.length} emitted: `;
  const emitted = step.tokens.flatMap((token) => [piece(token), " "]);
  at("step-words").replaceChildren(`${step.n} tokens of context: ${counts}`, ...emitted);
  at("node").textContent = stopText(step);
  drawTree(step);
  drawMask(step);
  drawPositions(step, index);
  drawCaches(step);
  drawStepTime(step);
  at("why-verify").textContent = whyVerify(step);
  timeElements.forEach((element, i) => {
    element.classList.toggle("lit", i === current);
    element.setAttribute("tabindex", i === current ? 0 : -1); // the Tab key comes to the step that is shown
  });
}

function depths(parents) {
  const depth = [];
  parents.forEach((parent, node) => (depth[node] = parent < 0 ? 0 : depth[parent] + 1));
  return depth;
}

/** A node and all above it: what it attends to besides the context. */
function ancestors(parents, node) {
  const found = [];
  for (let up = node; up >= 0; up = parents[up]) found.unshift(up);
  return found;
}

/** Light up a node, its row of the mask and its ancestors, and say what it is. */
function light(step, node) {
  const { tokens, parents, p, q } = step.nodes;
  const attended = ancestors(parents, node), exit = step.nodes.exits[node];
  const seen = exit === 0 ? `. ${suffixText(step, node).slice(0, -1)}` : "";
  const tried = exit === TARGET ? "" : exitsText(step.rounds[step.nodes.rounds[node]], exit) + seen;
  const toggle = (element, on) => element.classList.toggle("lit", on);
  all("#tree g[data-node]").forEach((each) => toggle(each, attended.includes(+each.dataset.node)));
  all("#mask g[data-row]").forEach((each) => toggle(each, +each.dataset.row === node));
  all("#mask .column").forEach((each) => toggle(each, attended.includes(+each.dataset.column)));
  const drawn = q && exit !== TARGET ? `, q = ${number(q[node])}` : "";
  const others = attended.length > 1 ? `nodes ${attended.join(", ")}` : "itself";
  at("node").replaceChildren(`Node ${node} `, piece(tokens[node]), ` from ${sourceName(exit)}. `, tried && `${tried}. `,
    `After its parent, p = ${number(p[node])}${drawn}. It attends to the context and ${others}.`);
}

function drawTree(step) {
  const { tokens, parents } = step.nodes, depth = depths(parents);
  if (!tokens.length) return at("tree").replaceChildren(faint("Nothing was drafted."));
  const rows = [];
  let leaves = 0;
  const setRow = (node) => { // a node is in the row of its first child, a leaf in a row of its own
    const children = parents.flatMap((parent, child) => (parent === node ? [child] : [])).map(setRow);
    return (rows[node] = children.length ? children[0] : leaves++);
  };
  setRow(-1);
  const wide = 96, high = 26, box = wide - 16;
  const x = (node) => (node < 0 ? 56 - box : 70 + depth[node] * wide), y = (node) => 14 + rows[node] * high;
  const width = x(-1) + box + 14 + wide * (Math.max(...depth) + 1), height = 28 + high * (leaves - 1);
  const svg = make("svg:svg", { width, height, role: "group", "aria-label": "drafted tree" });
  svg.append(make("svg:text", { x: 2, y: 14 }, "context"));
  const kind = (node) => (step.path.includes(node) ? "accepted" : "");
  parents.forEach((parent, node) => {
    const from = x(parent) + box, up = y(parent), to = x(node), down = y(node);
    const d = `M${from} ${up} C${from + 10} ${up} ${to - 12} ${down} ${to} ${down}`;
    svg.append(make("svg:path", { class: `edge ${kind(node)}`, d }));
  });
  const groups = tokens.map((token, node) => {
    const name = `node ${node}: ${label(token)}${kind(node) && ", accepted"}`;
    const attributes = { class: `node ${kind(node)}`, "data-node": node, role: "img", "aria-label": name };
    const text = { x: x(node) + 5, y: y(node), class: sourceClass(step.nodes.exits[node]) };
    return make("svg:g", attributes,
      make("svg:rect", { class: "box", x: x(node), y: y(node) - 10, width: box, height: 20, rx: 4 }),
      make("svg:text", text, label(token).slice(0, 10)));
  });
  svg.append(...groups);
  at("tree").replaceChildren(svg);
  rove(groups, (node) => light(step, node));
}

function drawMask(step) {
  const { tokens, parents } = step.nodes, count = tokens.length;
  if (!count) return at("mask").replaceChildren(faint("There is no tree to mask."));
  const size = 16, left = 84, first = left + 30;
  const width = left + size * (count + 1) + 62, height = 22 + size * count;
  const svg = make("svg:svg", { width, height, role: "group", "aria-label": "attention mask, a row for each node" });
  svg.append(make("svg:text", { x: left, y: 9 }, "ctx"));
  for (let column = 0; column < count; column++) {
    const x = first + size * column;
    svg.append(make("svg:rect", { class: "column", "data-column": column, x, y: 0, width: size, height: 18 }));
    if (count <= 32 || column % 4 === 0) svg.append(make("svg:text", { x: x + 2, y: 9 }, String(column)));
  }
  const groups = tokens.map((token, row) => {
    const attended = ancestors(parents, row), y = 20 + size * row;
    const cell = (kind, x, width) => make("svg:rect", { class: `cell ${kind}`, x, y, width, height: size - 1 });
    const cells = tokens.flatMap((_, column) => {
      const attends = attended.includes(column);
      if (!attends && count > 64) return []; // a large mask has no empty cells
      return [cell(attends ? "attended" : "", first + size * column, size - 1)];
    });
    const name = `node ${row} attends to the context and ${attended.join(", ")}`;
    return make("svg:g", { "data-row": row, role: "img", "aria-label": name },
      make("svg:text", { x: 2, y: y + 8 }, `${row} ${label(token).slice(0, 7)}`), cell("attended", left, 26), ...cells);
  });
  svg.append(...groups);
  at("mask").replaceChildren(svg);
  rove(groups, (row) => light(step, row));
}

/** One button for each position that the verifier came to, and the tests of the chosen one. */
function drawPositions(step, chosen) {
  const buttons = step.positions.map((_, i) => {
    const before = i ? piece(step.nodes.tokens[step.path[i - 1]]) : "the context";
    return make("button", { type: "button" }, "after ", before);
  });
  at("positions").replaceChildren(...buttons);
  rove(buttons, (i) => {
    buttons.forEach((button, j) => {
      button.classList.toggle("lit", i === j);
      button.setAttribute("aria-pressed", i === j);
    });
    drawTests(step, step.positions[i]);
  });
  buttons[Math.min(chosen, buttons.length - 1)].dispatchEvent(new Event("mouseenter"));
}

/** One test of a drafted token, in a sentence. */
function testLine(step, test) {
  const token = piece(step.nodes.tokens[test.node]), result = test.accepted ? "accepted" : "rejected";
  if (test.acceptance === undefined) {
    const choice = `the token that the target ${about.temperature ? "drew" : "finds likeliest"}`;
    return paragraph(token, ` p = ${number(test.p)}, ${test.accepted ? "" : "not "}${choice}: ${result}`);
  }
  const ratio = `min(1, p/q) = min(1, ${number(test.p)} / ${number(test.q)}) = ${number(test.acceptance)}`;
  return paragraph(token, ` acceptance probability ${ratio}, draw ${number(test.draw)}: ${result}`);
}

function drawTests(step, { ids, stages, tests, bonus }) {
  const heads = [make("th", {}, "token")];
  stages.forEach((stage, i) => {
    const rejected = () => piece(step.nodes.tokens[tests[i - 1].node]);
    heads.push(i ? make("th", {}, "residual after ", rejected()) : make("th", {}, "p"));
    if (stage.q) heads.push(i && !about.replacement ? make("th", {}, "q without ", rejected()) : make("th", {}, "q"));
  });
  const bar = (kind, value) => {
    const filled = make("i", { style: percent(Math.min(1, value), 1) });
    return make("td", { class: kind }, make("span", { class: "bar" }, filled), number(value));
  };
  const rows = ids.map((token, i) => {
    const cells = stages.flatMap(({ p, q }) => [bar("p", p[i]), ...(q ? [bar("q", q[i])] : [])]);
    return make("tr", {}, make("td", {}, piece(token)), ...cells);
  });
  const lines = tests.map((test) => testLine(step, test));
  if (bonus !== null) {
    const why = tests.length ? "All were rejected" : "No child to test";
    const how = stages.length > 1 ? ", from the residual distribution" : "";
    lines.push(paragraph(`${why}. The bonus token is `, piece(bonus), how));
  }
  const table = make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows));
  at("tests").replaceChildren(...lines, table);
}

function drawCaches(step) {
  const most = Math.max(...step.caches.map((cache) => cache.filled), 1);
  const elements = step.caches.flatMap(({ name, filled, kept }) => {
    const context = Math.min(step.n, kept);
    const parts = [["context", context], ["kept", kept - context], ["gone", filled - kept]];
    const text = `${name}: filled ${filled}, kept ${kept}, rolled back ${filled - kept}`;
    return [make("div", {}, text), strip(parts, most)];
  });
  at("caches").replaceChildren(...elements);
}

// Time --------------------------------------------------------------------------------------------------------------

const PARTS = ["draft", "target", "rest"];
const total = (step) => sum(step.ms);
const alone = (step) => (data.alone_ms || 0) * step.tokens.length; // what the target alone would take
let timeElements = [];

function drawStepTime(step) {
  const most = Math.max(total(step), alone(step)) || 1;
  const words = PARTS.map((name, part) => `${name} ${ms(step.ms[part])}`).join(", ");
  const parts = PARTS.map((name, part) => [name, step.ms[part]]);
  at("step-time").replaceChildren(make("div", {}, words), strip(parts, most));
  if (data.alone_ms === null) return;
  const text = `the target alone, ${step.tokens.length} tokens: ${ms(alone(step))}`;
  at("step-time").append(make("div", {}, text), strip([["alone", alone(step)]], most));
}

function drawTime() {
  const decoding = steps.slice(1); // the first step is the prefill
  const times = (decoding.length ? decoding : steps).map((step) => Math.max(total(step), alone(step)));
  const most = Math.max(...times) || 1, high = 120, scale = (value) => Math.min(high, (high * value) / most);
  const wide = Math.max(8, Math.min(28, 1000 / steps.length)), width = wide * steps.length + 4, height = high + 4;
  const svg = make("svg:svg", { width, height, role: "group", "aria-label": "time of each step" });
  timeElements = steps.map((step, i) => {
    const x = wide * i, name = `step ${i + 1}: ${ms(total(step))}`;
    const group = make("svg:g", { role: "img", "aria-label": name });
    const bar = (name, x, y, width, height) => group.append(make("svg:rect", { class: name, x, y, width, height }));
    bar("back", x, 0, wide, height);
    let top = high + 2;
    PARTS.forEach((name, part) => {
      const tall = Math.min(scale(step.ms[part]), top - 2);
      top -= tall;
      bar(name, x + 1, top, wide * 0.55 - 1, tall);
    });
    if (data.alone_ms !== null)
      bar("alone", x + wide * 0.6, high + 2 - scale(alone(step)), wide * 0.3, scale(alone(step)));
    return group;
  });
  svg.append(...timeElements);
  at("time").append(svg);
  rove(timeElements, () => {});
  timeElements.forEach((element, i) => element.addEventListener("focus", () => show(i)));
  const key = (name, text) => at("time-words").append(make("span", { class: `key ${name}` }), text + "   ");
  PARTS.forEach((name) => key(name, name));
  if (data.alone_ms !== null) key("alone", `the target alone, ${ms(data.alone_ms)} a token`);
  if (!decoding.length) return;
  const time = sum(decoding.map(total)), tokens = sum(decoding.map((step) => step.tokens.length));
  const ratio = (sum(decoding.map(alone)) / time).toFixed(2);
  const faster = data.alone_ms === null ? "" : `, ${ratio} times as fast as the target alone`;
  at("time-words").append(` After the prefill (the first step): ${tokens} tokens in ${ms(time)}${faster}.`);
}

// Words and code ----------------------------------------------------------------------------------------------------

const rootCount = (step) => step.nodes.parents.filter((parent) => parent < 0).length;
const exact = about.init === "draft" || steps.every((step) => rootCount(step) <= 1);

/** The theorem that makes a step exact. */
function whyVerify(step) {
  if (!exact) return "Every root counts as accepted: this alone is not lossless (arXiv 2409.10644).";
  if (!about.temperature)
    return "A node is accepted only where it is the target's likeliest token, so the text is the target's own.";
  if (step.nodes.q)
    return "Each test leaves the target's distribution p as it is (Leviathan et al. 2023, theorem 1), so all tests of "
      + "a position do (recursive rejection sampling, Jeon et al. 2024).";
  return "The target draws its token from p, and the path follows it: rejection sampling with a one-hot q "
    + "(Leviathan et al. 2023, theorem 1).";
}

function drawWords() {
  const { target, draft, method, temperature, top_p, top_k, seed, exits, thresholds } = about;
  const said = [`target ${target}`, draft ? `draft ${draft}` : "no draft", `method ${method}`];
  const cut = (top_k ? `, top-k ${top_k}` : "") + (top_p < 1 ? `, top-p ${top_p}` : "");
  said.push(`temperature ${temperature}${cut}`, `seed ${seed}`);
  if (exits.length) said.push(`exits ${exits.join(", ")} with thresholds ${thresholds.join(", ")}`);
  said.push(`${origins.length} tokens in ${steps.length} steps, ${(origins.length / steps.length).toFixed(2)} each`);
  said.push(exact ? "exact" : "not exact: the roots come from the target");
  at("about").textContent = said.join(" · ");
  at("prompt").textContent = data.prompt;
  if (method !== "ar")
    at("why-draft").textContent = "A confidence is known before a token is drawn, so no token has a say in its own "
      + "exit (S2D, arXiv 2407.01955, section 3).";
  const drawn = steps.some((step) => step.nodes.q);
  at("verify-code").dataset.code = drawn ? "verify_chain verify_sampled residual warp" : temperature ? "follow warp" : "follow";
}

function drawCode() {
  for (const [name, { file, text }] of Object.entries(data.code)) {
    const summary = make("summary", {}, `${file}: ${name}`);
    at("code").append(make("details", { id: `code-${name}` }, summary, make("pre", {}, text)));
  }
  for (const element of all("[data-code]")) {
    element.append("The code: ");
    for (const name of element.dataset.code.split(" ")) {
      const link = make("a", { href: `#code-${name}` }, `${data.code[name].file}: ${name}`);
      link.addEventListener("click", () => (at(`code-${name}`).open = true));
      element.append(link, "  ");
    }
  }
}

/** An address may name a step: #step-6. */
function goToAddress() {
  const asked = /^#step-(\d+)$/.exec(location.hash);
  if (asked) show(asked[1] - 1);
  const first = origins.findIndex(({ s }) => s === current);
  if (first >= 0) showToken(first);
}

function start() {
  drawWords();
  drawCode();
  drawAnswer();
  drawTime();
  at("slider").max = steps.length - 1;
  at("slider").addEventListener("input", () => show(+at("slider").value));
  at("previous").addEventListener("click", () => show(current - 1));
  at("next").addEventListener("click", () => show(current + 1));
  document.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    const modified = event.altKey || event.ctrlKey || event.metaKey;
    if (move && !modified && event.target.id !== "slider") show(current + move);
  });
  show(0);
  goToAddress();
  window.addEventListener("hashchange", () => location.hash.startsWith("#step-") && goToAddress());
}

start();
