"""What a page shows of an answer, as plain numbers: of rows (V,) only the tokens that matter.

Knows nothing about files or pages. A Recorder keeps the numbers of an answer; the functions below
it turn one Step into numbers.
"""

import statistics
from dataclasses import replace

import torch

from ..generate import Options
from ..ngram import ORDER, NGrams
from ..proposal import TARGET, path_to
from ..sampling import Sampler, warp
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
        shown += " coupled exits thresholds stop"
        self.about = names | {name: options[name] for name in shown.split()}
        self.ngrams = NGrams(plan.options.datastore)  # what exit 0 knows
        self.ngrams.text.grow(prompt)
        self.sampler = Sampler(int(plan.options.seed), "cpu")  # gives the numbers of races again

    def add(self, step):
        kept = recorded(step, self.about)
        if step.verdict.p is not None and step.proposal.q is None:
            for number, position in enumerate(kept["positions"], step.n):
                numbers = self.sampler.numbers_at(number, step.logits.shape[-1])  # (V,)
                position["numbers"] = cut(numbers, position["ids"])
        nodes = kept["nodes"]
        nodes["suffixes"] = [self.suffix(node, **nodes) for node in range(len(nodes["tokens"]))]
        self.steps.append(kept)
        self.ngrams.text.grow(step.tokens)

    def suffix(self, node, tokens, parents, exits, **_):
        """The last tokens before a node of exit 0, as many as it followed before; else none."""
        if exits[node] != 0:
            return []
        before = [*self.ngrams.text.newest, *path_to(parents[node], tokens, parents)]
        return before[len(before) - matched(self.ngrams, before, tokens[node]) :]

    def time_alone(self, begin, options):
        """See how long the target alone, by ``options``, takes for a token of its own answer."""
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
        known = set()
        for step in self.steps:
            ids = [position["ids"] for position in step["positions"]]
            known.update(step["nodes"]["tokens"], *step["nodes"]["suffixes"], *ids)
        before = self.tokenizer.encode("a")  # a token at the beginning may lose its space
        start_of_piece = len(self.tokenizer.decode(before))
        pieces = {t: self.tokenizer.decode([*before, t])[start_of_piece:] for t in sorted(known)}
        shown = {"about": self.about, "answer": answer, "pieces": pieces, "steps": self.steps}
        return shown | {"prompt": self.tokenizer.decode(self.prompt), "alone_ms": self.alone}


def target_alone(options):
    """The Options of the same answer by the target alone."""
    kept = "max_new_tokens temperature top_p top_k seed".split()
    return Options("ar", **{name: getattr(options, name) for name in kept})


def matched(ngrams, context, token):
    """The length of the longest suffix of ``context`` that ``token`` followed before, or 0."""
    for length in range(min(ORDER, len(context)), 0, -1):
        if any(token in table.followers(context[-length:])[0] for table in ngrams.tables):
            return length
    return 0


def recorded(step, about):
    """One Step as numbers; ``about``: the options in force."""
    proposal, verdict = step.proposal, step.verdict
    tokens, parents = proposal.tree.tokens.tolist(), proposal.tree.parents.tolist()
    p = warp(step.logits, 1.0) if verdict.p is None else verdict.p  # (N+1, V)
    q = None if verdict.p is None else proposal.q  # (R, V)
    rounds = [[(layer, short(sure)) for layer, sure in tried] for tried in proposal.confidences]
    of_nodes = [parent + 1 for parent in parents], tokens  # each node's token in its parent's row
    nodes = {"tokens": tokens, "parents": parents, "p": cut(p, of_nodes), "q": cut(q, of_nodes)}
    rest = step.seconds - step.draft_seconds - step.target_seconds
    return {
        "n": step.n,
        "tokens": step.tokens,
        "sources": step.sources,
        "path": verdict.path,
        "nodes": nodes | {"exits": proposal.exits, "rounds": proposal.rounds},
        "rounds": rounds,
        "stopped": proposal.stopped,
        "positions": positions(step, p, q, tokens, parents, about),
        "caches": caches(step, about["exits"]),
        "ms": [short(1000 * each) for each in (step.draft_seconds, step.target_seconds, rest)],
    }


def positions(step, p, q, tokens, parents, about):
    """The positions that the verifier came to: after the context, and after each accepted node."""
    path, draws, found = step.verdict.path, iter(step.verdict.draws), []
    for node, accepted in zip([CONTEXT, *path], [*path, None]):
        children = [child for child, parent in enumerate(parents) if parent == node]
        if node == CONTEXT and step.proposal.exits[:1] == [TARGET] and not about["coupled"]:
            children = []  # roots of the target face no test
        bonus = step.tokens[len(path) :] if accepted is None else []  # none behind an EOS
        row_p, row_q = p[node + 1], q[node + 1] if q is not None and children else None
        ids = [*(tokens[child] for child in children), *bonus, *likeliest(row_p, LIKELIEST)]
        ids = list(dict.fromkeys(ids + likeliest(row_q, LIKELIEST_OF_DRAFT)))
        how = tokens, draws, about["replacement"]
        left, tests = tested(row_p, row_q, children, accepted, *how)
        stages = [{"p": cut(rest_p, ids), "q": cut(rest_q, ids)} for rest_p, rest_q in left]
        shown = {"accepted": accepted, "bonus": bonus[0] if bonus else None}
        found.append(shown | {"ids": ids, "stages": stages, "tests": tests})
    return found


def likeliest(row, count):
    return [] if row is None else row.topk(min(count, len(row))).indices.tolist()


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
    n, path, proposal = step.n, step.verdict.path, step.proposal
    found = [{"name": "target", "filled": n + len(proposal.tree), "kept": n + len(path)}]
    # For each exit how many positions its segment had seen; exit 0 has no layers.
    segments = [pair for pair in zip(exits, proposal.filled) if pair[0]]
    for above, (last, filled) in zip([0, *exits[-len(segments) :]], segments):
        kept = min(filled, n + sum(n + proposal.slots[node] < filled for node in path))
        name = f"draft, layers {above + 1} to {last}"
        found.append({"name": name, "filled": filled, "kept": kept})
    return found


def cut(rows, where):
    """The part of rows that is shown, if there are any."""
    return None if rows is None else [short(each) for each in rows[where].tolist()]


def short(number):
    """Four digits of a number are enough to look at."""
    return float(f"{float(number):.4g}")
