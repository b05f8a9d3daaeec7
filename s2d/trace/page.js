"use strict";
// One recorded answer: show(step, position) draws all that is below the answer, from `data` (record.py).
// Whatever came from a model is put in as text, never as markup.

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const { about, steps, pieces } = data;

const number = (value) => (value === 0 ? "0" : value < 0.001 || value >= 1e6 ? value.toExponential(1) : value.toFixed(3));

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

/** A token's text where it stands alone: spaces and ends of lines are visible; without a text it is its number. */
const label = (token) => pieces[token].replaceAll("\n", "↵").replace(/^ | $/g, "␣") || `#${token}`;
const piece = (token) => make("bdi", { class: "piece", title: `token ${token}` }, label(token));

/** The class and the name of an exit, null for the target. */
const sourceClass = (exit) => `source${exit === null ? 0 : (about.exits.indexOf(exit) % 6) + 1}`;
const sourceName = (exit) => (exit === null ? "the target" : exit ? `the draft, exit ${exit}` : "exit 0, the table");

/** A node and all above it: what it attends to besides the context. */
function ancestors(parents, node) {
  const found = [];
  for (let up = node; up >= 0; up = parents[up]) found.unshift(up);
  return found;
}

/** Light up those of some elements whose numbers are `chosen`. */
const light = (selector, ...chosen) =>
  document.querySelectorAll(selector).forEach((each, i) => each.classList.toggle("lit", chosen.includes(i)));

/** Of each token of the answer its step, and its position among those of the step. */
const tokens = steps.flatMap((step, s) => step.tokens.map((token, position) => ({ s, position, exit: step.sources[position] })));

function drawAnswer() {
  const { target, draft, method, temperature, top_p, top_k, seed, exits, thresholds } = about;
  const cut = (top_k ? `, top-k ${top_k}` : "") + (top_p < 1 ? `, top-p ${top_p}` : "");
  at("about").textContent = [
    `target ${target}`, draft ? `draft ${draft}` : "no draft", `method ${method}`, `temperature ${temperature}${cut}`,
    `seed ${seed}`, ...(exits.length ? [`exits ${exits.join(", ")}`, `thresholds ${thresholds.join(", ")}`] : []),
    `${tokens.length} tokens in ${steps.length} steps, ${(tokens.length / steps.length).toFixed(2)} per step`,
    about.exact ? "exact" : "not exact",
  ].join(" · ");
  at("prompt").textContent = data.prompt;
  at("answer").append(...data.answer.map((text, i) => {
    if (i === tokens.length) return text; // what is left of a character at the end
    const { s, position, exit } = tokens[i];
    return make("span", { class: sourceClass(exit), title: sourceName(exit), onclick: () => show(s, position) }, text);
  }));
  for (const exit of [null, ...exits]) {
    const count = tokens.filter((token) => token.exit === exit).length;
    if (count) at("legend").append(make("span", { class: sourceClass(exit) }, `${sourceName(exit)}: ${count}`), "   ");
  }
}

let current, chosen; // step and position

function show(s, position = 0) {
  current = Math.max(0, Math.min(steps.length - 1, s));
  chosen = Math.max(0, Math.min(steps[current].positions.length - 1, position));
  const step = steps[current], { n, nodes, path } = step, which = `${current + 1} of ${steps.length}`;
  light("#answer span", tokens.findIndex((token) => token.s === current && token.position === chosen));
  at("slider").value = current;
  at("slider").setAttribute("aria-valuetext", `step ${which}`);
  at("step-number").textContent = which;
  const [draft, target] = step.ms.map((ms) => `${ms.toFixed(1)} ms`), count = nodes.tokens.length;
  at("step-words").replaceChildren(
    `${n} tokens of context. ${count} drafted in ${draft}, checked by the target in ${target}: ${path.length} accepted. `,
    `The KV cache keeps ${n + path.length} of ${n + count} positions and is rolled back by ${count - path.length}. `,
    "Emitted: ", ...step.tokens.flatMap((token) => [piece(token), " "]));
  drawTree(step);
  drawMask(step);
  drawLevels(step);
  drawPosition(step);
}

/** Light up a node, its row of the mask and its ancestors, and say what it is. */
function showNode({ nodes }, node) {
  const attended = ancestors(nodes.parents, node), level = nodes.levels[node];
  light("#tree g", ...attended);
  light("#mask g", node);
  at("node").replaceChildren(`Node ${node} `, piece(nodes.tokens[node]), ` is from ${sourceName(nodes.exits[node])}`,
    level === null ? ". " : `, level ${level + 1}. `,
    `Its path has probability ${number(nodes.probs[node])} in the draft. The target gives it p = ${number(nodes.p[node])} after `,
    `its parent. It attends to the context and ${attended.length > 1 ? `nodes ${attended.join(", ")}` : "itself"}.`);
}

/** Attributes of an element that stands for a node. */
const ofNode = (step, node, text) => {
  const see = () => showNode(step, node);
  return { tabindex: 0, role: "img", "aria-label": text, onmouseenter: see, onfocus: see };
};

function drawTree(step) {
  const { tokens, parents, exits } = step.nodes, rows = {};
  let leaves = 0;
  const setRow = (node) => { // a node is in the row of its first child, a leaf in a row of its own
    const children = parents.flatMap((parent, child) => (parent === node ? [child] : []));
    rows[node] = children.length ? leaves : leaves++;
    children.forEach(setRow);
  };
  setRow(-1);
  const x = (node) => 80 * ancestors(parents, node).length - 14, y = (node) => 14 + 26 * rows[node];
  const groups = tokens.map((token, node) => {
    const from = x(parents[node]) + 68, up = y(parents[node]), to = x(node), down = y(node);
    const kind = step.path.includes(node) ? "accepted" : "drafted";
    return make("svg:g", { class: kind, ...ofNode(step, node, `node ${node}: ${label(token)}, ${kind}`) },
      make("svg:path", { d: `M${from} ${up} C${from + 10} ${up} ${to - 12} ${down} ${to} ${down}` }),
      make("svg:rect", { x: to, y: down - 10, width: 68, height: 20, rx: 4 }),
      make("svg:text", { x: to + 5, y: down, class: sourceClass(exits[node]) }, label(token).slice(0, 8)));
  });
  const size = { width: x(tokens.length - 1) + 70, height: 2 + 26 * leaves }; // the last node is among the deepest
  at("tree").replaceChildren(make("svg:svg", size, make("svg:text", { x: 2, y: 14 }, "context"), ...groups));
}

/** A row for each node; a cell where it attends, besides that of the context, which is in every row. */
function drawMask(step) {
  const { tokens, parents } = step.nodes, count = tokens.length, x = (column) => 118 + 14 * column;
  const heads = tokens.map((_, node) => (count > 10 && node % 4 ? "" : make("svg:text", { x: x(node), y: 6 }, node)));
  const rows = tokens.map((token, node) => {
    const attended = ancestors(parents, node), text = `node ${node} attends to the context and ${attended.join(", ")}`;
    const place = { y: 14 * node + 14, height: 13 };
    return make("svg:g", ofNode(step, node, text),
      make("svg:text", { x: 0, y: 14 * node + 21 }, `${node} ${label(token).slice(0, 8)}`),
      make("svg:rect", { x: x(0), width: 14 * count, ...place }),
      make("svg:rect", { class: "context", x: x(0) - 30, width: 26, ...place }),
      ...attended.map((column) => make("svg:rect", { class: "cell", "data-column": column, x: x(column), width: 13, ...place })));
  });
  const context = make("svg:text", { x: x(0) - 30, y: 6 }, count ? "ctx" : "");
  at("mask").replaceChildren(make("svg:svg", { width: x(count), height: 14 * count + 20 }, context, ...heads, ...rows));
}

/** For each level of the tree the exits that were tried, and why there are no more levels. */
function drawLevels(step) {
  const lines = Object.entries(step.levels).map(([level, tried]) => {
    const words = tried.map(([exit, confidence]) => {
      const last = exit === about.exits.at(-1), threshold = about.thresholds[about.exits.indexOf(exit)];
      const compared = last ? "the last exit" : `${confidence > threshold ? ">" : "≤"} ${threshold}`;
      return `exit ${exit}: ${number(confidence)} (${compared})`;
    });
    return paragraph(`level ${+level + 1}: ${words.join(", ")}`);
  });
  at("levels").replaceChildren(...lines);
  at("node").textContent = step.ended;
}

/** The chosen position: a button for each, the tests there in sentences, and the distributions. */
function drawPosition(step) {
  const { ids, tests, bonus, columns } = step.positions[chosen], { nodes, path } = step;
  at("positions").replaceChildren(...step.positions.map((_, i) => {
    const before = i ? piece(nodes.tokens[path[i - 1]]) : "the context", press = { "aria-pressed": i === chosen };
    return make("button", { type: "button", onclick: () => show(current, i), ...press }, "after ", before);
  }));
  const value = (name, token) => number(columns.findLast((column) => column[0] === name)[2][ids.indexOf(token)]);
  const coupled = columns.at(-1)[0] === "p / e";
  const compared = (token) => `p = ${value("p", token)}` + (coupled ? `, p / e = ${value("p / e", token)}` : "");
  const lines = tests.map(({ node, accepted, p, q, draw }) => {
    const token = nodes.tokens[node], result = accepted ? "accepted" : "rejected";
    if (q === undefined) {
      const choice = coupled ? "the largest p / e" : "the target's likeliest token";
      return paragraph(piece(token), ` ${compared(token)}, ${accepted ? "" : "not "}${choice}: ${result}`);
    }
    const ratio = `min(1, p/q) = min(1, ${number(p)} / ${number(q)}) = ${number(Math.min(1, p / q))}`;
    return paragraph(piece(token), ` acceptance probability ${ratio}, random number ${number(draw)}: ${result}`);
  });
  if (bonus !== null) {
    const rejected = columns.some(([name]) => name === "residual after");
    const from = rejected ? `p = ${value("residual after", bonus)} in the residual distribution` : compared(bonus);
    const none = tests.length ? "" : " Nothing was drafted here.";
    lines.push(paragraph("The bonus token: ", piece(bonus), ` ${from}.${none}`));
  }
  const heads = columns.map(([name, after]) => make("th", {}, name, " ", after === null ? "" : piece(after)));
  const rows = ids.map((token, i) => make("tr", {}, make("td", {}, piece(token)), ...columns.map(([name, , row]) => {
    const width = `width:${((100 * row[i]) / (name === "p / e" ? Math.max(...row) : 1)).toFixed(2)}%`;
    const bar = make("span", { class: name.startsWith("q") ? "bar q" : "bar" }, make("i", { style: width }));
    return make("td", {}, ...(name === "e" ? [] : [bar]), number(row[i]));
  })));
  at("tests").replaceChildren(...lines, make("table", {}, make("tr", {}, make("th", {}, "token"), ...heads), ...rows));
  at("why").textContent = why(coupled);
}

/** Why verification leaves the target's distribution as it is. */
function why(coupled) {
  if (!about.exact) return "Every root of the target counts as accepted, which is not lossless (arXiv 2409.10644).";
  if (coupled)
    return "The target takes the token with the largest p / e, which is a draw from its distribution p: the noise e depends on "
      + "the seed and the position alone, so the text is the same whatever is drafted (Daliri et al. 2024, arXiv 2408.07978).";
  if (about.temperature)
    return "p is the target's distribution and q the draft's. Each test leaves p as the distribution of the output (Leviathan et "
      + "al. 2023, appendix A.1), and so do several at one position (recursive rejection sampling, Jeon et al. 2024).";
  return "p is the target's distribution. A node is accepted only if it is the likeliest token, so the text is the target's own.";
}

/** An address may name a step: #step-6. */
const goToAddress = () => show((/^#step-(\d+)$/.exec(location.hash)?.[1] ?? 1) - 1);

at("slider").max = steps.length - 1;
at("slider").oninput = () => show(+at("slider").value);
at("previous").onclick = () => show(current - 1);
at("next").onclick = () => show(current + 1);
document.onkeydown = (event) => {
  const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
  if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
  event.preventDefault();
  if (!event.shiftKey) return show(current + move);
  const token = tokens[tokens.findIndex(({ s, position }) => s === current && position === chosen) + move];
  if (token) show(token.s, token.position);
};
window.onhashchange = goToAddress;
drawAnswer();
goToAddress();
