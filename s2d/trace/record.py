"""What the page of an answer shows, as plain numbers.

A ``Recorder`` reads it from the Steps of a Decoder, and from what trees and rules note by
themselves: which exits were asked, and the tests of rejection sampling.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.terminal import sources
from ..decoder import Decoder, Step
from ..mask import CONTEXT
from ..rules import Rejection, SharedNoise, Tested, residual
from ..tree import Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree
OPTIONS = "method temperature top_p top_k seed exits thresholds coupled init".split()


class Recorder:
    """Keeps what ``decoder`` does; ``names``: those of the models."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], names: dict[str, Any], decoder: Decoder
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.rule = decoder.rule
        self.about = names | {name: getattr(decoder.options, name) for name in OPTIONS}
        self.about["exact"] = decoder.exact
        # Then the longest of several walks is the path: their tests are not shown.
        self.every_root_counts = decoder.options.init == "target" and not decoder.options.coupled
        self.steps: list[dict[str, Any]] = []

    def record(self, decoder: Decoder) -> Iterator[Step]:
        """Yield the Steps of ``decoder``, recorded."""
        for step in decoder:
            self.add(step)
            yield step

    def add(self, step: Step) -> None:
        """Record a Step that was just made. Its nodes are those that were sent, by place."""
        tree = step.tree
        tokens, parents = tree.part(tree.sent)
        p = self.rule.distribution(step.logits)  # (N+1, V)
        exits_asked = defaultdict(list)  # level -> (exit layer, confidence) of each
        level_below = {}  # node -> the level of its children
        for tried in tree.tried:
            exits_asked[tried.level].append((tried.exit_layer, short(tried.confidence)))
            level_below |= dict.fromkeys(tried.frontier, tried.level)
        nodes = {
            "tokens": tokens,
            "parents": parents,
            "exits": [tree.exit_layers[node] for node in tree.sent],
            "levels": [level_below.get(tree.parents[node]) for node in tree.sent],
            "probs": short([tree.probs[node] for node in tree.sent]),
            "p": short(p[[parent + 1 for parent in parents], tokens]),
        }
        self.steps.append(
            {
                "n": len(tree.context),
                "tokens": step.tokens,
                "sources": sources(step),
                "path": step.accepted,
                "nodes": nodes,
                "levels": exits_asked,
                "ended": why_ended(tree),
                "positions": self.positions(step, p, tokens, parents),
                "ms": short([1000 * step.draft_seconds, 1000 * step.target_seconds]),
            }
        )

    def positions(
        self, step: Step, p: Tensor, tokens: list[int], parents: list[int]
    ) -> list[dict[str, Any]]:
        """The positions that the rule reached: after the context and each accepted place."""
        tests_below = defaultdict(list)  # place -> the tests of its children
        if isinstance(self.rule, Rejection) and not self.every_root_counts:
            for test in self.rule.tests:
                tests_below[parents[test.place]].append(test)
        found = []
        for place, accepted in zip([CONTEXT, *step.accepted], [*step.accepted, None]):
            children = [child for child, parent in enumerate(parents) if parent == place]
            bonus = step.tokens[len(step.accepted) :] if accepted is None else []  # none after EOS
            row = p[place + 1]  # (V,)
            likeliest = row.topk(min(LIKELIEST, len(row))).indices.tolist()
            ids = list(dict.fromkeys([*(tokens[child] for child in children), *bonus, *likeliest]))
            if tests_below[place]:
                tests, columns = shown_tests(tests_below[place], tokens)
            else:
                tests, columns = [], [("p", None, row)]
                if not self.every_root_counts:
                    tests = [{"node": child, "accepted": child == accepted} for child in children]
                if isinstance(self.rule, SharedNoise):
                    e = self.rule.noise.at([len(step.tree.context) + len(found)])[0]
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


def shown_tests(tests: list[Tested], tokens: list[int]) -> tuple[list[dict], list[tuple]]:
    """The tests of a node's children, and columns (name, rejected token, row).

    The token is the one after whose rejection the row is what is left of p or q.
    """
    shown, columns, rejected = [], [], None
    for test in tests:
        token = tokens[test.place]
        if rejected is None:
            columns += [("p", None, test.p), ("q", None, test.q)]
        else:
            columns += [("residual after", rejected, test.p), ("q without", rejected, test.q)]
        shown.append(
            {
                "node": test.place,
                "accepted": test.accepted,
                "draw": short(test.number),
                "p": short(test.p[token].item()),
                "q": short(test.q[token].item()),
            }
        )
        rejected = token
    last = tests[-1]
    if not last.accepted:  # the bonus token is drawn from what this test left of p
        columns.append(("residual after", rejected, residual(last.p, last.q)))
    return shown, columns


def why_ended(tree: Tree) -> str:
    """Why a tree has no more levels."""
    if not tree.shape.widths:
        return "Nothing is drafted in this step."
    if tree.level_count == len(tree.shape.widths):
        return "Drafting ended with the last level of the tree."
    if tree.level_count >= tree.max_levels:
        return "Drafting ended where the answer or the context must end."
    if any(tried.level == tree.level_count for tried in tree.tried):
        return "Drafting ended because nothing was known about the next token."
    return "Drafting ended because no path was likely enough to be followed."


def short(numbers):
    """Four digits of a number, or of each in a list or tensor, are enough to look at."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [short(number) for number in numbers]
    return float(f"{numbers:.4g}")
