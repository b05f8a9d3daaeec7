"use strict";
// One recorded answer. Data flows one way: `data` (record.py) -> show(step) and showToken(token) -> elements.
// Whatever came from a model is put in as text, never as markup.

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const { about, steps, pieces } = data;
const TARGET = -1; // stands for an exit where the target itself gave the token

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0);
const ms = (value) => value.toFixed(value < 10 ? 2 : 1) + " ms";
const percent = (part, whole) => `${((100 * part) / whole).toFixed(2)}%`;
const number = (value) => (value === 0 ? "0" : value < 0.001 ? value.toExponential(1) : value.toFixed(3));

/** An element of HTML, or "svg:..."; an attribute that is a function listens to its event. */
function make(name, attributes = {}, ...children) {
  const [tag, svg] = name.split(":").reverse();
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    if (typeof value === "function") element[key] = value;
    else element.setAttribute(key, value);
  element.append(...children);
  return element;
}

const paragraph = (...children) => make("p", {}, ...children);

/** A line of words, and below it a bar of `whole`, of parts that are [class, length]. */
function strip(words, parts, whole) {
  const elements = parts.map(([name, part]) => make("i", { class: name, style: `width:${percent(part, whole)}` }));
  return make("div", {}, ...words, make("div", { class: "strip" }, ...elements));
}

/** A token's text where it stands alone: spaces and ends of lines are visible; without a text it is its number. */
const label = (token) => pieces[token].replaceAll("\n", "↵").replace(/^ | $/g, "␣") || `#${token}`;
const piece = (token) => make("bdi", { class: "piece", title: `token ${token}` }, label(token));

/** The class, and the name, of where a token came from. */
const sourceClass = (exit) => `source${exit === TARGET ? 0 : (about.exits.indexOf(exit) % 6) + 1}`;
const sourceName = (exit) => (exit === TARGET ? "the target" : exit ? `the draft, after layer ${exit}` : "the table");

/** A node and all above it: what it attends to besides the context. */
function ancestors(parents, node) {
  const found = [];
  for (let up = node; up >= 0; up = parents[up]) found.unshift(up);
  return found;
}

/** Light up those of some elements whose numbers are `chosen`. */
const light = (selector, ...chosen) =>
  document.querySelectorAll(selector).forEach((each, i) => each.classList.toggle("lit", chosen.includes(i)));

const MOVES = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Home: -Infinity, End: Infinity, Enter: 0, " ": 0 };

/** The Tab key stops once at some items, MOVES go on between them; focus or the mouse shows one, Enter is a click. */
function rove(items, show) {
  items.forEach((item, i) => {
    item.tabIndex = i ? -1 : 0;
    item.addEventListener("mouseenter", () => show(i));
    item.addEventListener("click", () => item.focus());
    item.addEventListener("focus", () => {
      items.forEach((other) => (other.tabIndex = other === item ? 0 : -1));
      show(i);
    });
    item.addEventListener("keydown", (event) => {
      const move = MOVES[event.key];
      if (move === undefined) return;
      event.preventDefault();
      event.stopPropagation();
      if (move) items[Math.max(0, Math.min(items.length - 1, i + move))].focus();
      else item.click();
    });
  });
}

/** Of each token of the answer: its step, its index there, and the exit that drafted it. */
const origins = steps.flatMap((step, s) =>
  step.tokens.map((token, index) => ({ s, index, token, exit: step.sources[index] })));

function drawAnswer() {
  const elements = origins.map(({ s, index, token, exit }, i) => {
    const name = `${label(token)}, ${sourceName(exit)}`, onclick = () => show(s, index);
    return make("span", { class: sourceClass(exit), role: "button", "aria-label": name, onclick }, data.answer[i]);
  });
  at("answer").append(...elements);
  rove(elements, showToken);
  for (const exit of [TARGET, ...about.exits]) {
    const count = origins.filter((origin) => origin.exit === exit).length;
    if (count) at("legend").append(make("span", { class: sourceClass(exit) }, `${sourceName(exit)}: ${count}`), "   ");
  }
}

/** Why a token is what it is, in sentences. */
function showToken(i) {
  const { s, index, token, exit } = origins[i], step = steps[s], node = step.path[index];
  light("#answer span", i);
  at("token").replaceChildren(
    paragraph(piece(token), ` token ${i + 1} of ${origins.length}, step ${s + 1}: ${sourceName(exit)}`),
    ...(node === undefined ? [] : [paragraph(draftText(step, node))]), ...verdictLines(step, index));
}

/** How a node was drafted: the exits that were tried, their confidences, and what exit 0 went by. */
function draftText({ nodes, rounds }, node) {
  const exit = nodes.exits[node], round = nodes.rounds[node];
  if (exit === TARGET) return `A root that the target gave.${about.coupled ? "" : " The longest path below a root wins."}`;
  const asked = new Set(nodes.parents.filter((_, other) => nodes.rounds[other] === round)).size; // nodes in its round
  const said = rounds[round].map(([layer, confidence]) => {
    const threshold = about.thresholds[about.exits.indexOf(layer)], name = layer ? `layer ${layer}` : "the table";
    const compared = layer === about.exits.at(-1) ? "(the last exit)" : `${layer === exit ? ">" : "≤"} ${threshold}`;
    return `${name}: confidence ${number(confidence)} ${compared}`;
  });
  const suffix = nodes.suffixes[node].map(label).join(""); // the last tokens before it that were seen before
  const seen = suffix ? ` It followed “${suffix}” before.` : " It was not seen here before, it fills the tree.";
  return `${asked > 1 ? "most confident node of its round: " : ""}${said.join("; ")}.${exit ? "" : seen}`;
}

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

/** The tests at a position, and the bonus token if it is the last, in sentences. */
function verdictLines(step, index) {
  const { tokens, parents } = step.nodes, { ids, stages, tests, bonus, numbers } = step.positions[index];
  const choice = numbers ? "the winner of the race" : "the token that the target finds likeliest";
  const race = (token, i = ids.indexOf(token)) => // its number e, and p / e, which is the largest where it wins
    numbers ? `, e = ${number(numbers[i])}, p/e = ${number(stages[0].p[i] / numbers[i])}` : "";
  const lines = tests.map((test) => {
    const token = piece(tokens[test.node]), [not, result] = test.accepted ? ["", "accepted"] : ["not ", "rejected"];
    if (test.acceptance === undefined) {
      const p = ` p = ${number(test.p)}${race(tokens[test.node])}`;
      return paragraph(token, `${p}, ${not}${choice}: ${result}`);
    }
    const ratio = `min(1, p/q) = min(1, ${number(test.p)} / ${number(test.q)}) = ${number(test.acceptance)}`;
    return paragraph(token, ` acceptance probability ${ratio}, draw ${number(test.draw)}: ${result}`);
  });
  if (bonus === null) return lines;
  const rest = stages.length > 1 ? " in the residual distribution" : "";
  const level = parents.some((_, node) => ancestors(parents, node).length === index + 1); // nodes at this depth
  const none = level ? "The node before it has no child in the tree." : `Nothing was drafted here. ${stopText(step)}`;
  const p = ` p = ${number(stages.at(-1).p[ids.indexOf(bonus)])}${rest}${race(bonus)}. ${tests.length ? "" : none}`;
  return [...lines, paragraph("The bonus token: ", piece(bonus), p)];
}

let current = 0;

function show(s, index = 0) {
  current = Math.max(0, Math.min(steps.length - 1, s));
  const step = steps[current], { n, nodes, path, tokens } = step, which = `${current + 1} of ${steps.length}`;
  at("slider").value = current;
  at("slider").setAttribute("aria-valuetext", `step ${which}`);
  at("step-number").textContent = which;
  const counts = `${nodes.tokens.length} drafted, ${path.length} accepted, ${tokens.length} emitted: `;
  const emitted = tokens.flatMap((token) => [piece(token), " "]);
  at("step-words").replaceChildren(`${n} tokens of context: ${counts}`, ...emitted);
  at("node").textContent = stopText(step);
  drawTree(step);
  drawMask(step);
  drawPositions(step, index);
  drawCaches(step);
  drawStepTime(step);
  at("why-verify").textContent = whyVerify(step);
}

/** Light up a node, its row of the mask and its ancestors, and say what it is. */
function showNode(step, node) {
  const { tokens, parents, exits, p, q } = step.nodes, attended = ancestors(parents, node);
  light("#tree g", ...attended);
  light("#mask .column", ...attended);
  light("#mask .row", node);
  const drawn = q && exits[node] !== TARGET ? `, q = ${number(q[node])}` : "";
  const others = attended.length > 1 ? `nodes ${attended.join(", ")}` : "itself";
  at("node").replaceChildren(`Node ${node} `, piece(tokens[node]), ` from ${sourceName(exits[node])}. `,
    `${draftText(step, node)} After its parent, p = ${number(p[node])}${drawn}. `,
    `It attends to the context and ${others}.`);
}

function drawTree(step) {
  const { tokens, parents, exits } = step.nodes, rows = {};
  if (!tokens.length) return at("tree").replaceChildren("Nothing was drafted.");
  let leaves = 0;
  const setRow = (node) => { // a node is in the row of its first child, a leaf in a row of its own
    const children = parents.flatMap((parent, child) => (parent === node ? [child] : []));
    rows[node] = children.length ? leaves : leaves++;
    children.forEach(setRow);
  };
  setRow(-1);
  const x = (node) => 96 * ancestors(parents, node).length - 26, y = (node) => 14 + 26 * rows[node];
  const groups = tokens.map((token, node) => {
    const from = x(parents[node]) + 80, up = y(parents[node]), to = x(node), down = y(node);
    const kind = step.path.includes(node) ? "accepted" : "drafted";
    return make("svg:g", { class: kind, role: "img", "aria-label": `node ${node}: ${label(token)}, ${kind}` },
      make("svg:path", { d: `M${from} ${up} C${from + 10} ${up} ${to - 12} ${down} ${to} ${down}` }),
      make("svg:rect", { x: to, y: down - 10, width: 80, height: 20, rx: 4 }),
      make("svg:text", { x: to + 5, y: down, class: sourceClass(exits[node]) }, label(token).slice(0, 10)));
  });
  const size = { width: x(tokens.length - 1) + 96, height: 2 + 26 * leaves }; // the last node is among the deepest
  at("tree").replaceChildren(make("svg:svg", size, make("svg:text", { x: 2, y: 14 }, "context"), ...groups));
  rove(groups, (node) => showNode(step, node));
}

/** A row for each node; a cell where it attends, beside that of the context, which is in every row. */
function drawMask(step) {
  const { tokens, parents } = step.nodes, count = tokens.length;
  if (!count) return at("mask").replaceChildren("There is no tree to mask.");
  const cell = (kind, column, text) => make("i", { class: kind, style: `--column:${column}` }, text);
  const heads = tokens.map((_, column) => cell("column", column, count > 32 && column % 4 ? "" : column));
  const rows = tokens.map((token, node) => {
    const attended = ancestors(parents, node), name = `node ${node} attends to the context and ${attended.join(", ")}`;
    return make("div", { class: "row", role: "img", "aria-label": name },
      make("span", {}, `${node} ${label(token).slice(0, 7)}`), ...attended.map((column) => cell("cell", column, "")));
  });
  at("mask").style.setProperty("--count", count);
  at("mask").replaceChildren(make("div", {}, make("span", {}, "ctx"), ...heads), ...rows);
  rove(rows, (node) => showNode(step, node));
}

/** One button for each position that the verifier came to, and the tests of the chosen one. */
function drawPositions(step, chosen) {
  const before = (i) => (i ? piece(step.nodes.tokens[step.path[i - 1]]) : "the context");
  const buttons = step.positions.map((_, i) => make("button", { type: "button" }, "after ", before(i)));
  const choose = (i) => {
    buttons.forEach((button, j) => button.setAttribute("aria-pressed", i === j));
    drawTests(step, i);
  };
  at("positions").replaceChildren(...buttons);
  rove(buttons, choose);
  choose(chosen);
}

function drawTests(step, index) {
  const { ids, stages, tests, numbers } = step.positions[index], race = numbers?.map((e, i) => stages[0].p[i] / e);
  const heads = stages.flatMap(({ q }, i) => {
    const rejected = () => piece(step.nodes.tokens[tests[i - 1].node]);
    const name = i ? ["residual after ", rejected()] : ["p"];
    return q ? [name, i && !about.replacement ? ["q without ", rejected()] : ["q"]] : [name];
  });
  if (numbers) heads.push(["e"], ["p/e"]);
  const bar = (kind, value, whole = 1) => {
    const filled = make("i", { style: `width:${percent(Math.min(whole, value), whole)}` });
    return make("td", { class: kind }, make("span", { class: "bar" }, filled), number(value));
  };
  const rows = ids.map((token, i) => {
    const cells = stages.flatMap(({ p, q }) => [bar("p", p[i]), ...(q ? [bar("q", q[i])] : [])]);
    if (numbers) cells.push(make("td", {}, number(numbers[i])), bar("p", race[i], Math.max(...race)));
    return make("tr", {}, make("td", {}, piece(token)), ...cells);
  });
  const head = make("tr", {}, ...[["token"], ...heads].map((each) => make("th", {}, ...each)));
  at("tests").replaceChildren(...verdictLines(step, index), make("table", {}, head, ...rows));
}

function drawCaches(step) {
  const most = Math.max(...step.caches.map((cache) => cache.filled), 1);
  at("caches").replaceChildren(...step.caches.map(({ name, filled, kept }) => {
    const context = Math.min(step.n, kept);
    const parts = [["context", context], ["kept", kept - context], ["gone", filled - kept]];
    return strip([`${name}: filled ${filled}, kept ${kept}, rolled back ${filled - kept}`], parts, most);
  }));
}

const total = (step) => sum(step.ms);
const alone = (step) => data.alone_ms * step.tokens.length; // what the target alone would take; 0 where it is not known

function drawStepTime(step) {
  const most = Math.max(total(step), alone(step)) || 1;
  const parts = ["draft", "target", "rest"].map((name, part) => [name, step.ms[part]]);
  const words = parts.flatMap(([name, time]) => [make("i", { class: `key ${name}` }), `${name} ${ms(time)} `]);
  const text = `the target alone, ${step.tokens.length} tokens: ${ms(alone(step))}`;
  const strips = data.alone_ms === null ? [] : [strip([text], [["alone", alone(step)]], most)];
  at("step-time").replaceChildren(strip(words, parts, most), ...strips);
}

/** The time of all steps after the first, which is the prefill. */
function drawTime() {
  const decoding = steps.slice(1), time = sum(decoding.map(total));
  const tokens = sum(decoding.map((step) => step.tokens.length)), ratio = sum(decoding.map(alone)) / time;
  const faster = data.alone_ms === null ? "" : `, ${ratio.toFixed(2)} times as fast as the target alone`;
  if (tokens) at("time").textContent = `After the prefill (the first step): ${tokens} tokens in ${ms(time)}${faster}.`;
}

const severalRoots = ({ nodes }) => nodes.parents.filter((parent) => parent < 0).length > 1;
const exact = about.init === "draft" || about.coupled || !steps.some(severalRoots);

/** The theorem that makes a step exact. */
function whyVerify(step) {
  if (!exact) return "Every root counts as accepted: this alone is not lossless (arXiv 2409.10644).";
  if (!about.temperature)
    return "A node is accepted only where it is the target's likeliest token, so the text is the target's own.";
  if (step.nodes.q)
    return "Each test leaves the target's distribution p as it is (Leviathan et al. 2023, appendix A.1), so all tests "
      + "of a position do (recursive rejection sampling, Jeon et al. 2024).";
  return "The target's choice is the token with the largest p/e: a draw from p, whose numbers e belong to the seed and the "
    + "position. They are the same whatever is drafted, so the text is too (Daliri et al. 2024, arXiv 2408.07978).";
}

function drawWords() {
  const { target, draft, method, temperature, top_p, top_k, seed, exits, thresholds } = about;
  const cut = (top_k ? `, top-k ${top_k}` : "") + (top_p < 1 ? `, top-p ${top_p}` : "");
  at("about").textContent = [
    `target ${target}`, draft ? `draft ${draft}` : "no draft", `method ${method}`, `temperature ${temperature}${cut}`,
    `seed ${seed}`, ...(exits.length ? [`exits ${exits.join(", ")} with thresholds ${thresholds.join(", ")}`] : []),
    `${origins.length} tokens in ${steps.length} steps, ${(origins.length / steps.length).toFixed(2)} each`,
    exact ? "exact" : "not exact: the roots come from the target",
  ].join(" · ");
  at("prompt").textContent = data.prompt;
  at("why-draft").hidden = method === "ar";
  const functions = steps.some((step) => step.nodes.q) ? "verify_chain verify_sampled residual warp" : "follow Sampler.race warp";
  at("verify-code").dataset.code = temperature ? functions : "follow";
}

function drawCode() {
  for (const [name, { file, text }] of Object.entries(data.code)) {
    const summary = make("summary", {}, `${file}: ${name}`);
    at("code").append(make("details", { id: `code-${name}` }, summary, make("pre", {}, text)));
  }
  for (const element of document.querySelectorAll("[data-code]")) {
    const links = element.dataset.code.split(" ").flatMap((name) => {
      const onclick = () => (at(`code-${name}`).open = true);
      return [make("a", { href: `#code-${name}`, onclick }, `${data.code[name].file}: ${name}`), "  "];
    });
    element.append("The code: ", ...links);
  }
}

/** An address may name a step: #step-6. */
function goToAddress() {
  const asked = /^#step-(\d+)$/.exec(location.hash);
  if (asked) show(asked[1] - 1);
  const first = origins.findIndex(({ s }) => s === current);
  if (first >= 0) showToken(first);
}

at("slider").max = steps.length - 1;
at("slider").oninput = () => show(+at("slider").value);
at("previous").onclick = () => show(current - 1);
at("next").onclick = () => show(current + 1);
document.onkeydown = (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (move && !event.altKey && !event.ctrlKey && !event.metaKey && event.target.id !== "slider") show(current + move);
};
window.onhashchange = () => location.hash.startsWith("#step-") && goToAddress();
drawWords();
drawCode();
drawAnswer();
drawTime();
show(0);
goToAddress();
