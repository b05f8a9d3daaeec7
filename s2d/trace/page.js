"use strict";
// One recorded answer, shown. Data flows one way: `data` (record.py) -> show(step) and showToken(token) -> elements.
// Whatever came from a model is put in as text, never as markup.

const data = JSON.parse(document.getElementById("data").textContent);
const { about, steps, pieces } = data;
const at = (id) => document.getElementById(id);

function make(name, attributes = {}, ...children) {
  const element = name.startsWith("svg:") ? document.createElementNS("http://www.w3.org/2000/svg", name.slice(4)) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const number = (value) => (value === null || value === undefined ? "?" : value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(3));
const ms = (value) => value.toFixed(value < 10 ? 2 : 1) + " ms";

/** A token's text where it stands alone: spaces and ends of lines can be seen, what has no text is shown by its number. */
function label(token) {
  const text = pieces[token];
  return text === "" || text === undefined ? `#${token}` : text.replaceAll("\n", "↵").replace(/^ | $/g, "␣");
}
const piece = (token) => make("bdi", { class: "piece", title: `token ${token}` }, label(token));

const TARGET = -1; // stands for an exit where the target itself gave the token

/** The class, and the name, of where a token came from. */
const sourceClass = (exit) => `source${exit === TARGET ? 0 : (about.exits.indexOf(exit) % 6) + 1}`;
const sourceName = (exit) => (exit === TARGET ? "the target" : exit ? `the draft, after layer ${exit}` : "the table");

/** One stop for the Tab key among many items: arrow keys move between them, and focus or the mouse shows one. */
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
      const to = { ArrowRight: i + 1, ArrowDown: i + 1, ArrowLeft: i - 1, ArrowUp: i - 1, Home: 0, End: items.length - 1 }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      items[Math.max(0, Math.min(items.length - 1, to))].focus();
    });
  });
}

// The answer ---------------------------------------------------------------------------------------------------------------

/** Of each token of the answer: its step, and its place in it. */
const origins = steps.flatMap((step, s) => step.tokens.map((token, place) => ({ s, place, token, exit: step.sources[place] })));
let tokenElements = [];

function drawAnswer() {
  tokenElements = origins.map(({ exit, token }, i) => make("span", { class: sourceClass(exit), role: "button", "aria-label": `${label(token)}, ${sourceName(exit)}` }, data.answer[i]));
  at("answer").append(...tokenElements);
  rove(tokenElements, showToken);
  tokenElements.forEach((element, i) => {
    element.addEventListener("click", () => show(origins[i].s, origins[i].place));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      show(origins[i].s, origins[i].place);
    });
  });
  const exits = [...new Set(origins.map(({ exit }) => exit))].sort((a, b) => a - b);
  const of = (exit) => origins.filter((origin) => origin.exit === exit).length;
  at("legend").append(...exits.flatMap((exit) => [make("span", { class: sourceClass(exit) }, `${sourceName(exit)}: ${of(exit)}`), "   "]));
}

/** Why a token is what it is, in sentences. */
function showToken(i) {
  const { s, place, token, exit } = origins[i], step = steps[s], { tests, row, ids, stages } = step.places[place];
  tokenElements.forEach((element, j) => element.classList.toggle("lit", j === i));
  const lines = [make("p", {}, piece(token), ` token ${i + 1} of ${origins.length}, step ${s + 1}: ${sourceName(exit)}`)];
  const passed = tests.find((test) => test.stays), failed = tests.filter((test) => !test.stays);
  if (step.levels[place] && exit !== TARGET) lines.push(make("p", {}, (step.levels[place].size > 1 ? "the surest place of its level: " : "") + looksText(step.levels[place].looks, exit)));
  if (passed && passed.chance !== undefined)
    lines.push(make("p", {}, `p = ${number(passed.p)}, q = ${number(passed.q)}, min(1, p/q) = ${number(passed.chance)}, draw = ${number(passed.draw)}: it stays`));
  else if (passed) lines.push(make("p", {}, `p = ${number(passed.p)}: it is the token that the target ${about.temperature ? "drew" : "finds likeliest"}`));
  else if (exit === TARGET && row === 0 && step.levels.length && step.levels[0].exit === TARGET) lines.push(make("p", {}, "a root that the target gave; the longest path below one wins"));
  for (const test of failed)
    lines.push(make("p", {}, "instead of ", piece(step.nodes.tokens[test.node]), test.chance === undefined ? `, p = ${number(test.p)}` : `, min(1, ${number(test.p)}/${number(test.q)}) = ${number(test.chance)}, draw = ${number(test.draw)}: rejected`));
  if (step.places[place].own === token) {
    const left = stages.length > 1, chance = stages.at(-1).p[ids.indexOf(token)];
    lines.push(make("p", {}, `The target's own: p = ${number(chance)}${left ? " of what is left" : ""}.`));
    if (!tests.length) lines.push(make("p", {}, place < step.levels.length ? "The node before it has no child: none was drafted, or none was sent." : `Nothing was drafted here. ${stopText(step)}`));
  }
  at("token").replaceChildren(...lines);
}

function looksText(looks, exit) {
  const said = looks.map(([layer, confidence]) => {
    const threshold = about.thresholds[about.exits.indexOf(layer)];
    return `layer ${layer}: confidence ${number(confidence)}` + (threshold === undefined ? "" : layer === about.exits.at(-1) ? " (the last exit)" : layer === exit ? ` > ${threshold}` : ` ≤ ${threshold}`);
  });
  const passedBy = about.exits.filter((layer) => exit && layer < exit && !looks.some(([seen]) => seen === layer));
  if (passedBy.length) said.push(`passed by without a look: layer ${passedBy.join(", ")}`);
  return said.join("; ");
}

/** Why there are no more levels. */
function stopText(step) {
  const last = step.gave_up ? ` (${looksText(step.gave_up)})` : "";
  return {
    "": about.method === "ar" ? "There is no draft." : "The target is asked for roots first.", length: "Drafting ended at the full length of its shape.", room: "Drafting ended where there was no room left.",
    confidence: `Drafting ended where the last exit's confidence was below ${about.stop}${last}.`, decision: "Drafting ended where a decision model found no node likely enough.",
    rate: `Drafting ended where another level was not worth its time, at ${step.plan ? number(step.plan.rate) : "?"} tokens a millisecond${last}.`,
  }[step.stopped];
}

// A step -------------------------------------------------------------------------------------------------------------------

let current = 0;

function show(s, place = 0) {
  current = Math.max(0, Math.min(steps.length - 1, s));
  const step = steps[current];
  at("slider").value = current;
  at("slider").setAttribute("aria-valuetext", `step ${current + 1} of ${steps.length}`);
  at("step-number").textContent = `${current + 1} of ${steps.length}`;
  at("step-words").replaceChildren(`After ${step.n} tokens: ${step.nodes.tokens.length} drafted, ${step.path.length} accepted, ${step.tokens.length} emitted: `, ...step.tokens.flatMap((token) => [piece(token), " "]));
  at("node").textContent = stopText(step);
  drawTree(step);
  drawMask(step);
  drawPlaces(step, place);
  drawCaches(step);
  drawTook(step);
  at("why-verify").textContent = whyVerify(step);
  timeElements.forEach((element, i) => {
    element.classList.toggle("lit", i === current);
    element.setAttribute("tabindex", i === current ? 0 : -1); // so that the Tab key comes to the step that is shown
  });
}

function depths(parents) {
  const depth = [];
  parents.forEach((parent, node) => (depth[node] = parent < 0 ? 0 : depth[parent] + 1));
  return depth;
}

/** Light up a node, its row of the mask and its ancestors, and say what it is. */
function light(step, node) {
  const { tokens, parents, p, q } = step.nodes, seen = new Set();
  for (let up = node; up >= 0; up = parents[up]) seen.add(up);
  document.querySelectorAll("#tree g[data-node]").forEach((each) => each.classList.toggle("lit", seen.has(+each.dataset.node)));
  document.querySelectorAll("#mask g[data-row]").forEach((each) => each.classList.toggle("lit", +each.dataset.row === node));
  document.querySelectorAll("#mask .column").forEach((each) => each.classList.toggle("lit", seen.has(+each.dataset.column)));
  const level = step.levels[depths(parents)[node]], drawn = q && level.exit !== TARGET;
  at("node").replaceChildren(`node ${node} `, piece(tokens[node]), ` ${sourceName(level.exit)}. ${looksText(level.looks, level.exit)}. `,
    `After its parent p = ${number(p[node])}${drawn ? `, q = ${number(q[node])}` : ""}. It sees the context${seen.size > 1 ? " and nodes " + [...seen].sort((a, b) => a - b).join(", ") : " and itself"}.`);
}

function drawTree(step) {
  const { tokens, parents } = step.nodes, depth = depths(parents), rows = [], accepted = new Set(step.path);
  if (!tokens.length) return at("tree").replaceChildren(make("p", { class: "faint" }, "Nothing was drafted."));
  let leaves = 0;
  const children = tokens.map((_, node) => parents.flatMap((parent, child) => (parent === node ? [child] : [])));
  for (let node = tokens.length - 1; node >= 0; node--) rows[node] = null;
  const place = (node) => {
    const below = children[node].map(place);
    return (rows[node] = below.length ? below[0] : leaves++);
  };
  parents.forEach((parent, node) => parent < 0 && place(node));
  const wide = 96, high = 26, x = (node) => 70 + depth[node] * wide, y = (node) => 14 + rows[node] * high;
  const svg = make("svg:svg", { width: 70 + wide * (Math.max(...depth) + 1), height: 28 + high * (leaves - 1), role: "group", "aria-label": "drafted tree" });
  svg.append(make("svg:text", { x: 2, y: 14 }, "context"));
  tokens.forEach((_, node) => {
    const parent = parents[node], fromX = parent < 0 ? 56 : x(parent) + wide - 16, fromY = parent < 0 ? 14 : y(parent);
    svg.append(make("svg:path", { class: `edge ${accepted.has(node) ? "accepted" : ""}`, d: `M${fromX} ${fromY} C${fromX + 10} ${fromY} ${x(node) - 12} ${y(node)} ${x(node)} ${y(node)}` }));
  });
  const groups = tokens.map((token, node) => make("svg:g", { class: `node ${accepted.has(node) ? "accepted" : ""}`, "data-node": node, role: "img", "aria-label": `node ${node}: ${label(token)}${accepted.has(node) ? ", accepted" : ""}` },
    make("svg:rect", { class: "box", x: x(node), y: y(node) - 10, width: wide - 16, height: 20, rx: 4 }),
    make("svg:text", { x: x(node) + 5, y: y(node), class: sourceClass(step.levels[depth[node]].exit) }, label(token).slice(0, 10))));
  svg.append(...groups);
  at("tree").replaceChildren(svg);
  rove(groups, (node) => light(step, node));
}

function drawMask(step) {
  const { tokens, parents } = step.nodes, size = 16, left = 84, count = tokens.length;
  if (!count) return at("mask").replaceChildren(make("p", { class: "faint" }, "There is no tree to mask."));
  const svg = make("svg:svg", { width: left + size * (count + 1) + 62, height: 22 + size * count, role: "group", "aria-label": "attention mask, a row for each node" });
  svg.append(make("svg:text", { x: left, y: 9 }, "ctx"));
  const context = left + 30;
  for (let column = 0; column < count; column++) {
    svg.append(make("svg:rect", { class: "column", "data-column": column, x: context + size * column, y: 0, width: size, height: 18 }));
    if (count <= 32 || column % 4 === 0) svg.append(make("svg:text", { x: context + size * column + 2, y: 9 }, String(column)));
  }
  const groups = tokens.map((token, row) => {
    const sees = new Set(), y = 20 + size * row;
    for (let up = row; up >= 0; up = parents[up]) sees.add(up);
    const shown = tokens.map((_, column) => column).filter((column) => count <= 64 || sees.has(column)); // of a large grid no empty cells
    const cells = shown.map((column) => make("svg:rect", { class: `cell ${sees.has(column) ? "seen" : ""}`, x: context + size * column, y, width: size - 1, height: size - 1 }));
    return make("svg:g", { "data-row": row, role: "img", "aria-label": `node ${row} sees the context and ${[...sees].sort((a, b) => a - b).join(", ")}` },
      make("svg:text", { x: 2, y: y + 8 }, `${row} ${label(token).slice(0, 7)}`), make("svg:rect", { class: "cell seen", x: left, y, width: 26, height: size - 1 }), ...cells);
  });
  svg.append(...groups);
  at("mask").replaceChildren(svg);
  rove(groups, (row) => light(step, row));
}

/** One button for each place that the walk came to, and the tests of the chosen one. */
function drawPlaces(step, chosen) {
  const buttons = step.places.map((place, i) => {
    const before = i ? step.places[i - 1].taken : null;
    return make("button", { type: "button" }, before === null ? "after the context" : "after ", ...(before === null ? [] : [piece(step.nodes.tokens[before])]));
  });
  at("places").replaceChildren(...buttons);
  rove(buttons, (i) => {
    buttons.forEach((button, j) => { button.classList.toggle("lit", i === j); button.setAttribute("aria-pressed", i === j); });
    drawTests(step, step.places[i]);
  });
  buttons[Math.min(chosen, buttons.length - 1)].dispatchEvent(new Event("mouseenter"));
}

function drawTests(step, place) {
  const { ids, stages, tests } = place, heads = [make("th", {}, "token")];
  stages.forEach((stage, i) => {
    const rejected = i ? [" without ", piece(step.nodes.tokens[tests[i - 1].node])] : [];
    heads.push(make("th", {}, i ? "residual" : "p", ...rejected));
    if (stage.q) heads.push(make("th", {}, "q", ...(i && !about.replacement ? [" without ", piece(step.nodes.tokens[tests[i - 1].node])] : [])));
  });
  const bar = (kind, value) => make("td", { class: kind }, make("span", { class: "bar" }, make("i", { style: `width:${(100 * Math.min(1, value)).toFixed(1)}%` })), number(value));
  const rows = ids.map((token, i) => make("tr", {}, make("td", {}, piece(token)), ...stages.flatMap((stage) => [bar("p", stage.p[i]), ...(stage.q ? [bar("q", stage.q[i])] : [])])));
  const words = tests.map((test) => make("p", {}, piece(step.nodes.tokens[test.node]), test.chance === undefined
    ? ` ${test.stays ? "is" : "is not"} the target's choice: ${test.stays ? "it stays" : "rejected"}`
    : ` min(1, ${number(test.p)} / ${number(test.q)}) = ${number(test.chance)}, draw ${number(test.draw)}: ${test.stays ? "it stays" : "rejected"}`));
  if (place.own !== null) words.push(make("p", {}, tests.length ? "None stays: the target takes " : "No child here: the target takes ", piece(place.own), stages[0].q ? " by what is left of p" : ""));
  at("tests").replaceChildren(...words, make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)));
}

function drawCaches(step) {
  const most = Math.max(...step.caches.map((cache) => cache.held), 1), width = (count) => `width:${(100 * count / most).toFixed(2)}%`;
  at("caches").replaceChildren(...step.caches.flatMap(({ name, held, kept }) => {
    const context = Math.min(step.n, kept);
    return [make("div", {}, `${name}: held ${held}, keeps ${kept}, forgets ${held - kept}`),
      make("div", { class: "strip" }, make("i", { class: "context", style: width(context) }), make("i", { class: "kept", style: width(kept - context) }), make("i", { class: "gone", style: width(held - kept) }))];
  }));
}

// Time ---------------------------------------------------------------------------------------------------------------------

const total = (step) => step.ms.reduce((a, b) => a + b, 0);
let timeElements = [];

function drawTook(step) {
  const alone = data.alone_ms === null ? null : data.alone_ms * step.tokens.length, most = Math.max(total(step), alone || 0) || 1;
  const strip = (parts) => make("div", { class: "strip" }, ...parts.map(([name, value]) => make("i", { class: name, style: `width:${(100 * value / most).toFixed(2)}%` })));
  at("took").replaceChildren(make("div", {}, `draft ${ms(step.ms[0])}, target ${ms(step.ms[1])}, rest ${ms(step.ms[2])}`), strip([["draft", step.ms[0]], ["target", step.ms[1]], ["rest", step.ms[2]]]),
    ...(alone === null ? [] : [make("div", {}, `the target alone, ${step.tokens.length} tokens: ${ms(alone)}`), strip([["alone", alone]])]));
  at("plan").textContent = step.plan ? `Expected ${step.plan.expected_tokens.toFixed(2)} tokens in ${ms(step.plan.expected_ms)}, ${number(step.plan.expected_tokens / step.plan.expected_ms)} a millisecond; measured ${step.tokens.length} in ${ms(total(step))}, ${number(step.tokens.length / total(step))} a millisecond.` : "";
}

function drawTime() {
  const later = steps.slice(1), shown = Math.max(...(later.length ? later : steps).map((step) => Math.max(total(step), (data.alone_ms || 0) * step.tokens.length)));
  const wide = Math.max(8, Math.min(28, 1000 / steps.length)), high = 120, scale = (value) => Math.min(high, (high * value) / (shown || 1));
  const svg = make("svg:svg", { width: wide * steps.length + 4, height: high + 4, role: "group", "aria-label": "time of each step" });
  timeElements = steps.map((step, i) => {
    const group = make("svg:g", { role: "img", "aria-label": `step ${i + 1}: ${ms(total(step))}` }, make("svg:rect", { class: "back", x: wide * i, y: 0, width: wide, height: high + 4 }));
    let top = high + 2;
    ["draft", "target", "rest"].forEach((name, part) => {
      const tall = Math.min(scale(step.ms[part]), top - 2);
      group.append(make("svg:rect", { class: name, x: wide * i + 1, y: (top -= tall), width: wide * 0.55 - 1, height: tall }));
    });
    if (data.alone_ms !== null) group.append(make("svg:rect", { class: "alone", x: wide * i + wide * 0.6, y: high + 2 - scale(data.alone_ms * step.tokens.length), width: wide * 0.3, height: scale(data.alone_ms * step.tokens.length) }));
    return group;
  });
  svg.append(...timeElements);
  at("time").append(svg);
  rove(timeElements, () => {});
  timeElements.forEach((element, i) => {
    element.addEventListener("focus", () => show(i));
  });
  const sum = (list, of) => list.reduce((a, step) => a + of(step), 0), key = (name, text) => [make("span", { class: `key ${name}` }), text + "   "];
  at("time-words").append(...key("draft", "draft"), ...key("target", "target"), ...key("rest", "rest"), ...(data.alone_ms === null ? [] : key("alone", `what the target alone would have taken (${ms(data.alone_ms)} a token)`)));
  if (later.length) {
    const tokens = sum(later, (step) => step.tokens.length), time = sum(later, total);
    let words = ` After the first step, which reads the prompt: ${tokens} tokens in ${ms(time)}`;
    if (data.alone_ms !== null) words += `, ${((data.alone_ms * tokens) / time).toFixed(2)} times as fast as the target alone`;
    const planned = later.filter((step) => step.plan);
    if (planned.length) words += `; expected ${number(sum(planned, (s) => s.plan.expected_tokens) / sum(planned, (s) => s.plan.expected_ms))} tokens a millisecond, measured ${number(sum(planned, (s) => s.tokens.length) / sum(planned, total))}`;
    at("time-words").append(words + ".");
  }
}

// Words and code -----------------------------------------------------------------------------------------------------------

const exact = !(about.init === "target" && steps.some((step) => step.nodes.parents.filter((parent) => parent < 0).length > 1));

/** The theorem that makes a step exact. */
function whyVerify(step) {
  return !exact ? "Every root counts as accepted: this alone is not lossless (arXiv 2409.10644)."
    : !about.temperature ? "A node stays only where it is the target's own likeliest token, so the text is the target's, token by token."
    : step.nodes.q ? "A test leaves the target's distribution as it is (Leviathan et al. 2023, theorem 1), so all of them, one after the other, do (recursive rejection sampling, Jeon et al. 2024)."
    : "The target draws its token from p and the walk follows it: rejection sampling with a one-hot q (Leviathan et al. 2023, theorem 1).";
}

function drawWords() {
  const { target, draft, method, temperature, top_p, seed, exits, thresholds } = about;
  at("about").textContent = [`target ${target}`, draft ? `draft ${draft}` : "no draft", `method ${method}`, `temperature ${temperature}` + (top_p < 1 ? `, top-p ${top_p}` : ""), `seed ${seed}`,
    exits.length ? `exits ${exits.join(", ")}` + (thresholds.length ? ` with thresholds ${thresholds.join(", ")}` : "") : "", `${origins.length} tokens in ${steps.length} steps, ${(origins.length / steps.length).toFixed(2)} each`,
    exact ? "exact" : "not exact: the roots come from the target"].filter(Boolean).join(" · ");
  at("prompt").textContent = data.prompt;
  const drawn = steps.some((step) => step.nodes.q);
  at("why-draft").textContent = method === "ar" ? "" : method === "auto" ? "Exact, as whatever is decided about a place is decided before its token is drawn, and what is drawn is always sent (the lemma in s2d/tune)."
    : "A confidence is known before a token is drawn, so no token has a say in its own exit (S2D, arXiv 2407.01955, section 3).";
  at("verify-code").dataset.code = temperature && drawn ? `verify_sampled residual warp${method === "auto" ? " follow" : ""}` : "follow warp";
  if (method === "auto") document.querySelector('[data-code^="SortedDraft.predict"]').dataset.code += " Tuner.passes_by Tuner.skips Tuner.enough Tuner.worth Tuner.expand Tuner.send";
  for (const [name, { file, text }] of Object.entries(data.code))
    at("code").append(make("details", { id: `code-${name}` }, make("summary", {}, `${file}: ${name}`), make("pre", {}, text)));
  for (const place of document.querySelectorAll("[data-code]")) {
    place.append("The code: ");
    for (const name of place.dataset.code.split(" ")) {
      const link = make("a", { href: `#code-${name}` }, `${data.code[name].file}: ${name}`);
      link.addEventListener("click", () => (at(`code-${name}`).open = true));
      place.append(link, "  ");
    }
  }
}

function start() {
  drawWords();
  drawAnswer();
  drawTime();
  at("slider").max = steps.length - 1;
  at("slider").addEventListener("input", () => show(+at("slider").value));
  at("previous").addEventListener("click", () => show(current - 1));
  at("next").addEventListener("click", () => show(current + 1));
  document.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move && !event.altKey && !event.ctrlKey && !event.metaKey && event.target.id !== "slider") show(current + move);
  });
  const goTo = () => {
    const asked = /^#step-(\d+)$/.exec(location.hash); // an address may name a step
    if (asked) show(asked[1] - 1);
    const first = origins.findIndex(({ s }) => s === current);
    if (first >= 0) showToken(first);
  };
  show(0);
  goTo();
  window.addEventListener("hashchange", () => location.hash.startsWith("#step-") && goTo());
}

start();
