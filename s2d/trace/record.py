"""What a page shows of an answer, as plain numbers: of rows (V,) only the tokens that matter.

Knows nothing about files or pages. A Recorder keeps the numbers of an answer; the functions below
it turn one Step into numbers.
"""

import statistics
from dataclasses import replace

import torch

from ..ngram import ORDER, NGrams
from ..proposal import TARGET, path_to
from ..sampling import warp
from ..text.tokenizer import TextStream
from ..tree import CONTEXT
from ..verify import residual, without

LIKELIEST = 6  # tokens of p that are shown besides those drafted or emitted,
LIKELIEST_OF_DRAFT = 3  # and those of q


class Recorder:
    """Keeps each Step of an answer that follows a Plan; ``names`` are the models'."""

    def __init__(self, tokenizer, prompt, names, plan):
        self.tokenizer, self.prompt, self.steps = tokenizer, prompt, []
        self.alone = None  # milliseconds that the target alone takes for a token
        options, shown = plan.in_force(), "method temperature top_p top_k seed init replacement"
        shown += " exits thresholds stop"
        self.about = names | {name: options[name] for name in shown.split()}
        self.ngrams, self.text = NGrams(plan.options.datastore), []  # what exit 0 knows
        self.read(prompt)

    def read(self, tokens):
        self.ngrams.grow(tokens)
        self.text += tokens

    def add(self, step):
        kept = recorded(step, self.about["exits"], self.about["replacement"])
        nodes = kept["nodes"]
        numbers = range(len(nodes["tokens"]))
        nodes["suffixes"] = [self.suffix(node, **nodes) for node in numbers]
        self.steps.append(kept)
        self.read(step.tokens)

    def suffix(self, node, tokens, parents, exits, **_):
        """The last tokens before a node of exit 0, as many as it followed before; else none."""
        if exits[node] != 0:
            return []
        before = self.text[-ORDER:] + path_to(parents[node], tokens, parents)
        return before[len(before) - self.ngrams.matched(before, tokens[node]) :]

    def time_alone(self, begin, options):
        """See how long the target alone takes for a token, on the first few of its own answer.

        ``begin``: Options -> a Generation; ``options`` are the target's alone.
        """
        emitted = sum(len(step["tokens"]) for step in self.steps)
        options = replace(options, max_new_tokens=max(2, min(16, emitted)))
        seconds = [step.seconds for step in begin(options=options)]
        if len(seconds) > 1:  # the first one is the prefill
            self.alone = short(1000 * statistics.median(seconds[1:]))

    def data(self):
        """All of it, to be written as JSON, with the text of every token and of the answer."""
        stream = TextStream(self.tokenizer)
        answer = [stream.push([token]) for step in self.steps for token in step["tokens"]]
        answer[-1:] = [answer[-1] + stream.finish()] if answer else []
        known = {token for step in self.steps for token in step["nodes"]["tokens"] + step["tokens"]}
        known.update(*(each["ids"] for step in self.steps for each in step["positions"]))
        known.update(*(each for step in self.steps for each in step["nodes"]["suffixes"]))
        before = self.tokenizer.encode("a")  # a token at the beginning may lose its space
        start_of_piece = len(self.tokenizer.decode(before))
        pieces = {t: self.tokenizer.decode([*before, t])[start_of_piece:] for t in sorted(known)}
        return {
            "about": self.about,
            "prompt": self.tokenizer.decode(self.prompt),
            "answer": answer,
            "pieces": pieces,
            "alone_ms": self.alone,
            "steps": self.steps,
        }


def recorded(step, exits, replacement):
    """One Step as numbers; ``exits`` are those of the draft."""
    proposal, verdict = step.proposal, step.verdict
    tokens, parents = proposal.tree.tokens.tolist(), proposal.tree.parents.tolist()
    p = warp(step.logits, 1.0) if verdict.p is None else verdict.p  # (N+1, V)
    q = None if verdict.p is None else proposal.q  # (R, V)
    rounds = [[(layer, short(sure)) for layer, sure in tried] for tried in proposal.confidences]
    of_nodes = [parent + 1 for parent in parents], tokens  # each node's token in its parent's row
    seconds = [step.draft_seconds, step.target_seconds]
    seconds.append(step.seconds - sum(seconds))
    return {
        "n": step.n,
        "tokens": step.tokens,
        "sources": step.sources,
        "path": verdict.path,
        "nodes": {
            "tokens": tokens,
            "parents": parents,
            "exits": proposal.exits,
            "rounds": proposal.rounds,
            "p": cut(p, of_nodes),
            "q": cut(q, of_nodes),
        },
        "rounds": rounds,
        "stopped": proposal.stopped,
        "positions": positions(step, p, q, tokens, parents, replacement),
        "caches": caches(step, exits),
        "ms": [short(1000 * each) for each in seconds],
    }


def positions(step, p, q, tokens, parents, replacement):
    """The positions that the verifier came to: after the context, and after each accepted node."""
    path, found = step.verdict.path, []
    bonus = step.tokens[len(path) :]  # empty where the answer ends before it
    draws = iter(step.verdict.draws)
    for node, accepted in zip([CONTEXT, *path], [*path, None]):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if node == CONTEXT and step.proposal.exits[:1] == [TARGET]:
            children = []  # roots of the target face no test
        own = bonus if accepted is None else []
        row_p, row_q = p[node + 1], q[node + 1] if q is not None and children else None
        ids = [*(tokens[child] for child in children), *own]
        ids += row_p.topk(min(LIKELIEST, len(row_p))).indices.tolist()
        if row_q is not None:
            ids += row_q.topk(min(LIKELIEST_OF_DRAFT, len(row_q))).indices.tolist()
        ids = list(dict.fromkeys(ids))
        left, tests = tested(row_p, row_q, children, accepted, tokens, draws, replacement)
        stages = [{"p": cut(rest_p, ids), "q": cut(rest_q, ids)} for rest_p, rest_q in left]
        shown = {"accepted": accepted, "bonus": own[0] if own else None}
        found.append(shown | {"ids": ids, "stages": stages, "tests": tests})
    return found


def tested(p, q, children, accepted, tokens, draws, replacement):
    """What is left of p (V,) and q (V,), before each test and after a last rejection; the tests.

    Without q the target's own choice decides: the child that carries it is accepted. Else these are
    the tests of ``verify_sampled`` once more, with the numbers it drew.
    """
    left, tests = [(p, q)], []
    for child in children:
        token = tokens[child]
        test = {"node": child, "p": short(p[token]), "accepted": child == accepted}
        if q is None:
            tests.append(test)
        elif q[token] > 0:  # else it was never drawn
            test |= {"q": short(q[token]), "draw": short(next(draws))}
            tests.append(test | {"acceptance": short((p[token] / q[token]).clamp(max=1.0))})
            if child == accepted:
                break
            p = residual(p, q)
            q = q if replacement else without(q, torch.tensor(token, device=q.device))
            left.append((p, q))
    return left, tests


def caches(step, exits):
    """Of each KV cache its name, how many slots the target's pass leaves filled, and are kept."""
    n, path = step.n, step.verdict.path
    found = [{"name": "target", "filled": n + len(step.proposal.tree), "kept": n + len(path)}]
    first, slots = 1, [step.proposal.slots[node] for node in path]
    for last, filled in zip(exits, step.proposal.filled):
        if last == 0:  # it has no layers
            continue
        kept = min(filled, n + sum(n + slot < filled for slot in slots))
        found.append({"name": f"draft, layers {first} to {last}", "filled": filled, "kept": kept})
        first = last + 1
    return found


def cut(rows, where):
    """The part of rows that is shown, if there are any."""
    return None if rows is None else [short(each) for each in rows[where].tolist()]


def short(number):
    """Four digits of a number are enough to look at."""
    return float(f"{float(number):.4g}")
