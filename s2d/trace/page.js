"use strict";
// One recorded answer: show(step, position) draws all that is below the answer, from `data` (record.py).
// Whatever came from a model is put in as text, never as markup.

const at = (id) => document.getElementById(id);
const data = JSON.parse(at("data").textContent);
const { about, steps, pieces } = data;
const { exits, thresholds } = about.options;

// Nodes are numbered in the order in which they are sent: node 0 is the root, the last token of the context.
const NO_PARENT = -1; // the parent of the root
const TARGET = -1; // in the place of an exit's number: the target chose this token
const ROW = 30, CELL = 14; // pixels from row to row of the tree and of the mask

/** A number with the digits that were recorded, 1.2e-5 if it is small; -inf is a text, as JSON has no such number. */
const number = (value) => (value !== 0 && Math.abs(value) < 0.001 ? value.toExponential() : String(value));

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
const shortLabel = (token) => (label(token).length > 8 ? `${label(token).slice(0, 7)}…` : label(token));
const piece = (token) => make("bdi", { class: "piece", title: `token ${token}` }, label(token));

/** The class and the name of an exit, or of the target. */
const sourceClass = (exit) => (exit === TARGET ? "target" : `exit ${about.colors[exit]}`);
const sourceName = (exit) => (exit === TARGET ? "the target" : exit ? `the draft, exit ${exit}` : "exit 0, the table");

/** The nodes of a path from the root down to `node`: what this attends to besides the rest of the context. */
function pathTo(parents, node) {
  const found = [];
  for (let up = node; up !== NO_PARENT; up = parents[up]) found.unshift(up);
  return found;
}

/** Give a class to those of some elements whose numbers are `chosen`, and take it from the others. */
const mark = (name, selector, chosen) =>
  document.querySelectorAll(selector).forEach((each, i) => each.classList.toggle(name, chosen.includes(i)));

/** A line of a key: a sample, and what it means. */
const sample = (kind, words) => make("span", {}, make("span", { class: `sample ${kind}` }), words);

/** For each token of the answer its step, and its position among those of the step. */
const tokens = steps.flatMap((step, s) => step.tokens.map((token, position) => ({ s, position, exit: step.sources[position] })));

/** An option's value in words; a shape has several with names. */
function inWords(value) {
  if (Array.isArray(value)) return value.map(inWords).join(", ") || "none";
  if (typeof value !== "object") return String(value);
  return Object.entries(value).map(([name, each]) => `${name} ${inWords(each)}`).join(", ");
}

function drawAnswer() {
  at("about").textContent = [
    `target ${about.target}`, about.draft ? `draft ${about.draft}` : "no draft",
    `${tokens.length} tokens in ${steps.length} steps, ${(tokens.length / steps.length).toFixed(2)} per step`,
    about.exact ? "lossless" : "not lossless",
  ].join(" · ");
  const given = Object.entries(about.options).filter(([, value]) => value !== null);
  at("options").textContent = given.map(([name, value]) => `${name}: ${inWords(value)}`).join(" · ");
  at("prompt").textContent = data.prompt;
  at("answer").append(...data.answer.map((text, i) => {
    if (i === tokens.length) return text; // what is left of a character at the end
    const { s, position, exit } = tokens[i];
    return make("span", { class: sourceClass(exit), title: sourceName(exit), onclick: () => show(s, position) }, text);
  }));
  for (const exit of [TARGET, ...exits]) {
    const count = tokens.filter((token) => token.exit === exit).length;
    if (count) at("legend").append(make("span", { class: sourceClass(exit) }, `${sourceName(exit)}: ${count}`));
  }
}

/** What colours and lines mean, next to the tree and to the mask. */
function drawKeys() {
  const sources = exits.map((exit) => make("span", { class: sourceClass(exit) }, `from exit ${exit}`));
  at("tree-key").append(
    "the first box: node 0, the context's last token", ...sources, sample("accepted", "green frame: accepted"),
    sample("lit", "yellow: the node that you look at, and what it attends to"));
  at("mask-key").append(
    "ctx: the context before node 0", sample("attends", "blue: what a node attends to"), sample("seen", "orange: the row of the node that you look at"));
}

let current, chosen; // step and position

/** Show a step, at its last position unless another is chosen: there the draft was wrong, or had ended. */
function show(s, position = Infinity) {
  current = Math.max(0, Math.min(steps.length - 1, s));
  chosen = Math.max(0, Math.min(steps[current].positions.length - 1, position));
  const step = steps[current], { n, nodes, path, cached } = step, which = `${current + 1} of ${steps.length}`;
  const lit = tokens.flatMap((token, i) => (token.s === current ? [i] : []));
  mark("lit", "#answer span", lit);
  mark("chosen", "#answer span", lit.slice(chosen, chosen + 1));
  at("slider").value = current;
  at("slider").setAttribute("aria-valuetext", `step ${which}`);
  at("step-number").textContent = which;
  const count = nodes.tokens.length - 1;
  at("step-words").replaceChildren(
    `${n} tokens of context. A step of ${step.ms} ms: ${count} tokens drafted, ${path.length} accepted by the target. `,
    `The KV cache keeps ${cached} of ${n + count} positions and is rolled back by ${n + count - cached}. `,
    "Emitted: ", ...step.tokens.flatMap((token) => [piece(token), " "]));
  drawTree(step);
  drawLevels(step);
  drawPosition(step);
  drawMask(step);
}

/** Light up a node, its row of the mask and its ancestors, and say what it is. */
function showNode({ nodes }, node) {
  const attended = pathTo(nodes.parents, node), drafted = attended.slice(1), token = piece(nodes.tokens[node]);
  mark("lit", "#tree g", attended);
  mark("lit", "#mask g", [node]);
  if (node === 0) return at("node").replaceChildren("Node 0 ", token, " is the last token of the context. It attends to the context.");
  at("node").replaceChildren(`Node ${node} `, token, ` is from ${sourceName(nodes.exits[node])}, `,
    `level ${nodes.depths[node]}. The draft estimates that its path is accepted with probability ${number(nodes.probs[node])}. `,
    `The target gives it p = ${number(nodes.p[node])} after its parent. `,
    `It attends to the context and ${drafted.length > 1 ? `nodes ${drafted.join(", ")}` : "itself"}.`);
}

/** Attributes of an element that stands for a node. */
const ofNode = (step, node, text) => {
  const see = () => showNode(step, node);
  return { tabindex: 0, role: "img", "aria-label": text, onpointerenter: see, onclick: see, onfocus: see };
};

/** The drafted tree, the accepted path in it, and why it has no more levels. */
function drawTree(step) {
  const { tokens, parents, depths, exits } = step.nodes, rows = {};
  let leaves = 0;
  const setRow = (node) => { // a node is in the row of its first child, a leaf in a row of its own
    const children = parents.flatMap((parent, child) => (parent === node ? [child] : []));
    rows[node] = children.length ? leaves : leaves++;
    children.forEach(setRow);
  };
  setRow(0);
  const x = (node) => 80 * depths[node] + 2, y = (node) => ROW / 2 + 1 + ROW * rows[node];
  const groups = tokens.map((token, node) => {
    const to = x(node), down = y(node), height = ROW - 6;
    const kind = node === 0 ? "root" : step.path.includes(node) ? "accepted" : "drafted";
    const box = make("svg:rect", { x: to, y: down - height / 2, width: 68, height, rx: 4 });
    const text = make("svg:text", { x: to + 5, y: down, class: node === 0 ? "" : sourceClass(exits[node]) }, shortLabel(token));
    const group = make("svg:g", { class: kind, ...ofNode(step, node, `node ${node}: ${label(token)}, ${kind}`) }, box, text);
    if (node > 0) {
      const from = x(parents[node]) + 68, up = y(parents[node]);
      group.prepend(make("svg:path", { d: `M${from} ${up} C${from + 6} ${up} ${to - 6} ${down} ${to} ${down}` }));
    }
    return group;
  });
  const size = { width: x(tokens.length - 1) + 70, height: 2 + ROW * leaves }; // the last node is among the deepest
  at("tree").replaceChildren(make("svg:svg", size, ...groups));
  at("ended").textContent = whyEnded(step);
  at("node").textContent = "Point at a node, touch it, or go to it with the Tab key.";
}

/** Why a tree has no more levels. */
function whyEnded({ asked, depths: [depth, ofShape] }) {
  if (depth === 0 && !Object.keys(asked).length) return "Nothing is drafted in this step.";
  if (depth === ofShape) return "Drafting ended with the last level of the tree.";
  if (depth + 1 in asked) return "Drafting ended because nothing was known about the next token.";
  return "Drafting ended because every path had ended or was too unlikely to be followed, or the answer may not be longer.";
}

/** A row for each exit, a column for each level: how sure the exit was, if it was asked. The last one
 * that was asked drafted the level, unless it knew nothing. */
function drawLevels(step) {
  const levels = Object.entries(step.asked);
  const heads = levels.map(([level]) => make("th", {}, level));
  const rows = exits.map((exit, i) => {
    const threshold = i === exits.length - 1 ? "" : ` > ${thresholds[i]}`;
    return make("tr", {}, make("th", {}, `exit ${exit}${threshold}`), ...levels.map(([, asked]) => {
      const confidence = new Map(asked).get(exit), drafted = asked.at(-1)[0] === exit && confidence > 0;
      const text = confidence === undefined ? "·" : number(confidence);
      return make("td", {}, make("span", { class: drafted ? `drafted ${sourceClass(exit)}` : "" }, text));
    }));
  });
  const table = make("table", {}, make("tr", {}, make("th", {}, "level"), ...heads), ...rows);
  at("levels").replaceChildren(...(levels.length ? [table] : []));
}

/** By rule: what decides at a position, and why that leaves the target's text or distribution as it is. */
const RULES = {
  Greedy: {
    choice: "the target's likeliest token",
    why: "p is the target's distribution. A node is accepted only if it is the likeliest token, so the text is the target's own.",
  },
  SharedNoise: {
    choice: "the largest log p + g",
    why: "The target takes the token with the largest log p + g, which is a draw from its distribution p. The Gumbel noise g "
      + "depends on the seed and the position alone, so the text is the same whatever is drafted (Daliri et al. 2024, arXiv "
      + "2408.07978).",
  },
  Rejection: {
    why: "p is the target's distribution and q the draft's. A token that was drawn from q is tested by p / q, and a token of a "
      + "growing tree, which was chosen, by p. After a rejection p is the residual distribution, and q is without the token. "
      + "Each test leaves p as the distribution of the output (Leviathan et al. 2023, appendix A.1), and so do several at one "
      + "position (recursive rejection sampling, Jeon et al. 2024).",
  },
};
const OWN_RULE = { why: `A rule of the caller's own decides. It says that it is ${about.exact ? "" : "not "}lossless.` };
const ROOTS = "Every root of the target counts as accepted. The tokens below each root are tested, and the root with the longest "
  + "accepted path wins, which is not lossless (arXiv 2409.10644).";

/** The chosen position: a button for each, the tests there in sentences, and the distributions. */
function drawPosition(step) {
  const { ids, tests, bonus, columns, said } = step.positions[chosen], { nodes, path } = step;
  const { choice, why } = RULES[about.options.rule] ?? OWN_RULE;
  at("positions").replaceChildren(...step.positions.map((_, i) => {
    const before = i ? piece(nodes.tokens[path[i - 1]]) : "the context", press = { "aria-pressed": i === chosen };
    return make("button", { type: "button", onclick: () => show(current, i), ...press }, "after ", before);
  }));
  const value = (name, token) => number(columns.findLast((column) => column[0] === name)[2][ids.indexOf(token)]);
  const withNoise = columns.some(([name]) => name === "log p + g");
  const compared = (token) => `p = ${value("p", token)}` + (withNoise ? `, log p + g = ${value("log p + g", token)}` : "");
  const lines = tests.map(({ node, accepted, p, q, chance, draw }) => {
    const token = nodes.tokens[node], result = accepted ? "accepted" : "rejected";
    if (nodes.exits[node] === TARGET) return paragraph(piece(token), ` ${compared(token)}, a root, which the target chose: ${result}`);
    if (chance !== undefined) { // without q, the token was chosen and not drawn
      const ratio = q === undefined ? `p = ${number(p)}` : `min(1, p/q) = min(1, ${number(p)} / ${number(q)}) = ${number(chance)}`;
      return paragraph(piece(token), ` acceptance probability ${ratio}, random number ${number(draw)}: ${result}`);
    }
    const decided = choice ? `, ${accepted ? "" : "not "}${choice}` : "";
    return paragraph(piece(token), ` ${compared(token)}${decided}: ${result}`);
  });
  if (bonus !== null) {
    const rejected = columns.some(([name]) => name === "residual after");
    const from = rejected ? `p = ${value("residual after", bonus)} in the residual distribution` : compared(bonus);
    const none = tests.length ? "" : " Nothing was drafted here.";
    lines.push(paragraph("The bonus token: ", piece(bonus), ` ${from}.${none}`));
  } else if (chosen === path.length) {
    const ended = current === steps.length - 1, root = "What the target chooses here is not emitted yet: it is a root of the next tree.";
    lines.push(paragraph(ended ? "The answer has ended before this position." : root));
  }
  at("lines").replaceChildren(...lines);
  drawTable(ids, columns, said);
  at("why").textContent = about.options.rule in RULES && !about.exact ? ROOTS : why;
}

/** The bars of log p + g: how large e to the power of it is, next to the largest. Where p is 0, it is "-inf". */
function compare(row) {
  const largest = Math.max(...row.filter(Number.isFinite));
  return row.map((value) => (Number.isFinite(value) ? Math.exp(value - largest) : 0));
}

/** A row for each token: what decides, then p, what every exit says, and what else the rule made of p. */
function drawTable(ids, columns, said) {
  const bar = (kind, share) => make("span", { class: `bar ${kind}` }, make("i", { style: `width:${(100 * share).toFixed(2)}%` }));
  const exits = said.map(([exit, row]) => ({ head: [`exit ${exit}`], kind: sourceClass(exit), row, shares: row }));
  const first = columns.findLastIndex(([name]) => ["p", "log p + g", "residual after"].includes(name));
  const shown = columns.map(([name, after, row], i) => ({
    head: after === null ? [name] : [`${name} `, piece(after)],
    kind: name.startsWith("q") ? "q" : name === "g" ? null : "p", // g is no probability
    row, shares: name === "log p + g" ? compare(row) : row, decides: i >= first && about.options.rule in RULES,
  }));
  const deciding = shown.slice(first), others = shown.slice(0, first); // on a phone, these are out of sight
  const all = [...deciding, ...others.slice(0, 1), ...exits, ...others.slice(1)];
  const heads = all.map(({ head, kind, decides }) =>
    make("th", {}, make("span", { class: kind ?? "" }, ...head), ...(decides ? [" decides"] : [])));
  const rows = ids.map((token, i) => make("tr", {}, make("td", {}, piece(token)), ...all.map(({ kind, row, shares, decides }) =>
    make("td", { class: decides ? "decides" : "" }, ...(kind === null ? [] : [bar(kind, shares[i])]), number(row[i])))));
  at("tests").replaceChildren(make("table", {}, make("tr", {}, make("th", {}, "token"), ...heads), ...rows));
}

/** A row for each node; a cell where it attends, besides that of the context before node 0, which is in every row. */
function drawMask(step) {
  const { tokens, parents } = step.nodes, count = tokens.length;
  const x = (column) => 118 + CELL * column, y = (row) => CELL * row + 14;
  const heads = tokens.map((_, node) => (count > 10 && node % 4 ? "" : make("svg:text", { x: x(node), y: 6 }, node)));
  const rows = tokens.map((token, node) => {
    const attended = pathTo(parents, node), text = `node ${node} attends to the context and ${attended.slice(1).join(", ")}`;
    const place = { y: y(node), height: CELL - 1 };
    return make("svg:g", ofNode(step, node, text),
      make("svg:text", { x: 0, y: y(node) + CELL / 2 }, `${node} ${shortLabel(token)}`),
      make("svg:rect", { x: x(0), width: CELL * count, ...place }),
      make("svg:rect", { class: "context", x: x(0) - 30, width: 26, ...place }),
      ...attended.map((column) => make("svg:rect", { class: "cell", "data-column": column, x: x(column), width: CELL - 1, ...place })));
  });
  const context = make("svg:text", { x: x(0) - 30, y: 6 }, "ctx");
  at("mask").replaceChildren(make("svg:svg", { width: x(count), height: y(count) + 6 }, context, ...heads, ...rows));
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
drawKeys();
goToAddress();
