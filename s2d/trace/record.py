"""What the page of an answer shows, as plain numbers.

A ``Recorder`` watches a Decoder from outside: what each exit predicts, and the random numbers of
rejection sampling. Everything else it computes from the Steps, with the verifiers' own functions.
"""

from functools import partial

import torch

from ..sampling import warp
from ..text.tokenizer import TextStream
from ..tree import CONTEXT
from ..verify import residual, without
from .terminal import sources

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree
OPTIONS = "method temperature top_p top_k seed exits thresholds coupled init".split()


class Recorder:
    """Keeps the Steps of ``generation``, which has not begun; ``names``: those of the models."""

    def __init__(self, tokenizer, prompt, names, generation):
        self.tokenizer, self.prompt, self.steps = tokenizer, prompt, []
        options = vars(generation.options)
        self.about = names | {name: options[name] for name in OPTIONS}
        self.about["exact"] = generation.exact
        self.sampling = generation.sampling
        # Of the step in the making:
        self.levels = {}  # level -> its frontier, and (exit, confidence) of the exits tried
        self.draws = []  # the random numbers of its tests
        watch(self.sampling, "accept", self.note_draws)
        if generation.drafter is not None:
            for exit in generation.drafter.exits:
                watch(exit, "predict", partial(self.note_confidence, exit))

    def note_draws(self, accept, probabilities):
        generator = self.sampling.generator.clone_state()
        self.draws += torch.empty_like(probabilities).uniform_(generator=generator).tolist()
        return accept(probabilities)

    def note_confidence(self, exit, predict, tree):
        prediction = predict(tree)
        _, tried = self.levels.setdefault(tree.level, (tree.frontier, []))
        tried.append((exit.layer, short(prediction.confidence)))
        return prediction

    def add(self, step):
        """Record a Step. Its nodes are those that were sent, numbered in that order."""
        tree, sent = step.tree, step.tree.sent
        tokens, parents = tree.part(sent)
        p = warp(step.logits, 1.0) if self.sampling.greedy else self.sampling.warp(step.logits)
        below = {node: level for level, (frontier, _) in self.levels.items() for node in frontier}
        nodes = {
            "tokens": tokens,
            "parents": parents,
            "exits": [tree.exits[node] for node in sent],
            "levels": [below.get(tree.parents[node]) for node in sent],
            "probs": short([tree.probs[node] for node in sent]),
            "p": short(p[[parent + 1 for parent in parents], tokens]),
        }
        self.steps.append(
            {
                "n": len(step.tree.context),
                "tokens": step.tokens,
                "sources": sources(step),
                "path": step.path,
                "nodes": nodes,
                "levels": {level: tried for level, (_, tried) in self.levels.items()},
                "ended": why_ended(tree, predictions=len(self.levels)),
                "positions": self.positions(step, p, tokens, parents),
                "ms": short([1000 * step.draft_seconds, 1000 * step.target_seconds]),
            }
        )
        self.levels, self.draws = {}, []

    def positions(self, step, p, tokens, parents):
        """The positions that the verifier reached: after the context and each accepted node."""
        path, draws, found = step.path, iter(self.draws), []
        # Then the longest of several walks is the path: their tests are not shown.
        every_root_counts = self.about["init"] == "target" and not self.about["coupled"]
        q = torch.cat(step.tree.q) if step.tree.q and not every_root_counts else None  # (R, V)
        for node, accepted in zip([CONTEXT, *path], [*path, None]):
            children = [child for child, parent in enumerate(parents) if parent == node]
            bonus = step.tokens[len(path) :] if accepted is None else []  # none behind an EOS
            row = p[node + 1]  # (V,)
            likeliest = row.topk(min(LIKELIEST, len(row))).indices.tolist()
            ids = list(dict.fromkeys([*(tokens[child] for child in children), *bonus, *likeliest]))
            if q is not None and children:
                tests, columns = tested(row, q[node + 1], children, accepted, tokens, draws)
            else:
                tests = [{"node": child, "accepted": child == accepted} for child in children]
                if every_root_counts:
                    tests = []
                columns = [("p", None, row)]
                if not self.sampling.greedy and self.about["coupled"]:
                    e = self.sampling.noise([len(step.tree.context) + len(found)])[0]
                    columns += [("e", None, e), ("p / e", None, row / e)]
            found.append(
                {
                    "accepted": accepted,
                    "bonus": bonus[0] if bonus else None,
                    "ids": ids,
                    "tests": tests,
                    "columns": [(name, after, short(row[ids])) for name, after, row in columns],
                }
            )
        return found

    def data(self):
        """All of it, to be written as JSON, with the text of every token."""
        stream = TextStream(self.tokenizer)
        answer = [stream.push([token]) for step in self.steps for token in step["tokens"]]
        answer.append(stream.push([], last=True))
        known = {token for step in self.steps for token in step["nodes"]["tokens"]}
        for step in self.steps:
            known.update(token for position in step["positions"] for token in position["ids"])
        before = self.tokenizer.encode("a")  # a token at the beginning may lose its space
        start = len(self.tokenizer.decode(before))
        return {
            "about": self.about,
            "prompt": self.tokenizer.decode(self.prompt),
            "answer": answer,
            "pieces": {token: self.tokenizer.decode([*before, token])[start:] for token in known},
            "steps": self.steps,
        }


def watch(thing, name, note):
    """Have ``note(method, argument)`` called in the place of one object's method."""
    method = getattr(thing, name)
    setattr(thing, name, lambda argument: note(method, argument))


def tested(p, q, children, accepted, tokens, draws):
    """The tests of ``verify_sampled`` at one position, and what is left of p and q (V,) by each.

    Returns the tests, and columns (name, rejected token, row): of the token the residual is after.
    """
    tests, columns = [], [("p", None, p), ("q", None, q)]
    for child in children:
        token = tokens[child]
        if q[token] == 0:  # never drawn
            continue
        test = {"node": child, "accepted": child == accepted, "draw": short(next(draws))}
        tests.append(test | {"p": short(p[token]), "q": short(q[token])})
        if child == accepted:
            break
        p, q = residual(p, q), without(q, token)
        columns += [("residual after", token, p), ("q without", token, q)]
    return tests, columns


def why_ended(tree, predictions):
    """Why a tree has no more levels, after so many ``predictions`` of its next level."""
    if not tree.shape.widths:
        return "Nothing is drafted in this step."
    if tree.level == len(tree.shape.widths):
        return "Drafting ended with the last level of the tree."
    if tree.level >= tree.max_levels:
        return "Drafting ended where the answer or the context must end."
    if predictions > tree.level:
        return "Drafting ended because nothing was known about the next token."
    return "Drafting ended because no path was likely enough to be followed."


def short(numbers):
    """Four digits of a number, or of each in a list or tensor, are enough to look at."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [short(number) for number in numbers]
    return float(f"{numbers:.4g}")
