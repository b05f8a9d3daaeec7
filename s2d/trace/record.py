"""What the page of an answer shows, as plain numbers.

A ``Recorder`` reads it from the Steps of a Decoder. It wraps the exits and random draws of these by
objects that note what passes through them. Recording changes no answer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..decoder import Decoder, Step
from ..draft import Exit
from ..mask import CONTEXT
from ..rules import Prediction, Rejection, SharedNoise, residual, without
from ..sampling import Draws
from ..tree import Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree
OPTIONS = "method temperature top_p top_k seed thresholds init".split()


@dataclass
class Asked:
    """An exit that was asked to draft a level. The last one drafted it, unless it knew nothing."""

    level: int
    exit_layer: int
    confidence: float


class NotedExit:
    """An exit, and in ``asked`` what it was asked."""

    def __init__(self, inner: Exit, asked: list[Asked]) -> None:
        self.inner = inner
        self.asked = asked
        self.exit_layer = inner.exit_layer
        self.max_positions = inner.max_positions

    def predict(self, tree: Tree) -> Prediction:
        prediction = self.inner.predict(tree)
        self.asked.append(Asked(tree.level_count, self.exit_layer, prediction.confidence))
        return prediction

    def keep(self, n: int, slots: list[int]) -> None:
        self.inner.keep(n, slots)

    def frontier_hidden(self, tree: Tree) -> Tensor:
        return self.inner.frontier_hidden(tree)


class NotedDraws(Draws):
    """The same draws, and in ``numbers`` those that decided tests."""

    def __init__(self, inner: Draws) -> None:
        self.generator = inner.generator
        self.numbers: list[float] = []

    def flip(self, probabilities: Tensor) -> tuple[Tensor, Tensor]:
        shown, numbers = super().flip(probabilities)
        self.numbers += numbers.tolist()
        return shown, numbers


class Recorder:
    """Keeps what ``decoder`` does; ``names``: those of the models."""

    def __init__(
        self, tokenizer: Tokenizer, prompt: list[int], names: dict[str, Any], decoder: Decoder
    ) -> None:
        self.tokenizer = tokenizer
        self.prompt = prompt
        self.rule = decoder.rule
        settings = decoder.settings
        self.about = names | {name: getattr(settings, name) for name in OPTIONS}
        exits = [] if decoder.drafter is None else decoder.drafter.exits
        self.about["exits"] = [each.exit_layer for each in exits]
        self.about["rule"] = type(self.rule).__name__
        self.about["exact"] = self.rule.exact
        self.asked: list[Asked] = []
        if decoder.drafter is not None:
            decoder.drafter.exits = [NotedExit(each, self.asked) for each in exits]
        self.draws = NotedDraws(Draws(0))
        if isinstance(self.rule, Rejection):
            self.draws = NotedDraws(self.rule.draws)
            self.rule.draws = self.draws
        self.steps: list[dict[str, Any]] = []

    def record(self, decoder: Decoder) -> Iterator[Step]:
        """Yield the Steps of ``decoder``, recorded."""
        for step in decoder:
            self.add(step)
            self.asked.clear()
            self.draws.numbers.clear()
            yield step

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        p = self.rule.distribution(step.logits)  # (N+1, V)
        exits_asked = defaultdict(list)  # level -> (exit layer, confidence) of each
        for asked in self.asked:
            exits_asked[asked.level].append((asked.exit_layer, short(asked.confidence)))
        from_target = [exit_layer is None for exit_layer in tree.exit_layers]
        levels = [None if own else depth for own, depth in zip(from_target, tree.depths)]
        nodes = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "exits": tree.exit_layers,
            "levels": levels,
            "probs": short(tree.probs),
            "p": short(p[[parent + 1 for parent in tree.parents], tree.tokens]),
        }
        self.steps.append(
            {
                "n": len(tree.context),
                "tokens": step.tokens,
                "sources": step.sources,
                "path": step.accepted,
                "nodes": nodes,
                "levels": exits_asked,
                "ended": why_ended(tree, self.asked),
                "positions": self.positions(step, p),
                "ms": short([1000 * step.draft_seconds, 1000 * step.target_seconds]),
            }
        )

    def positions(self, step: Step, p: Tensor) -> list[dict[str, Any]]:
        """The positions that the rule reached: after the context and each accepted node."""
        tree = step.tree
        numbers = iter(self.draws.numbers)
        found = []
        for node, accepted in zip([CONTEXT, *step.accepted], [*step.accepted, None]):
            children = tree.children(node)
            bonus = step.tokens[len(step.accepted) :] if accepted is None else []  # none after EOS
            row = p[node + 1]  # (V,)
            likeliest = row.topk(min(LIKELIEST, len(row))).indices.tolist()
            drafted = [tree.tokens[child] for child in children]
            ids = list(dict.fromkeys([*drafted, *bonus, *likeliest]))
            tests = [{"node": child, "accepted": child == accepted} for child in children]
            columns = [("p", None, row)]
            after_eos = accepted is None and not bonus
            if after_eos or not self.rule.exact:  # the path may go on, or is the longest of several
                tests = []
            elif isinstance(self.rule, Rejection) and children:
                tests, columns = shown_tests(tree, node, accepted, row.cpu(), numbers)
            elif isinstance(self.rule, SharedNoise):
                e = self.rule.noise.at([len(tree.context) + len(found)])[0]
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

    def data(self) -> dict[str, Any]:
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


def shown_tests(
    tree: Tree, parent: int, accepted: int | None, p: Tensor, numbers: Iterator[float]
) -> tuple[list[dict], list[tuple]]:
    """The tests of a node's children, and columns (name, rejected token, row).

    The token is the one after whose rejection the row is what is left of p (V,) or q. ``numbers``
    are those that decided the tests, in their order.
    """
    q = tree.q[parent]
    shown = []
    columns: list[tuple[str, int | None, Tensor]] = [("p", None, p), ("q", None, q)]
    for child in tree.children(parent):
        token = tree.tokens[child]
        shown.append(
            {
                "node": child,
                "accepted": child == accepted,
                "draw": short(next(numbers)),
                "p": short(p[token].item()),
                "q": short(q[token].item()),
            }
        )
        if child == accepted:
            return shown, columns
        p = residual(p, q)
        q = without(q, token)
        columns += [("residual after", token, p), ("q without", token, q)]
    columns.pop()  # of the last rejection: the bonus token is drawn from what is left of p
    return shown, columns


def why_ended(tree: Tree, asked: list[Asked]) -> str:
    """Why a tree has no more levels."""
    if tree.shape.depth == 0:
        return "Nothing is drafted in this step."
    if tree.level_count == tree.shape.depth:
        return "Drafting ended with the last level of the tree."
    if tree.level_count >= tree.max_levels:
        return "Drafting ended where the answer or the context must end."
    if any(each.level == tree.level_count for each in asked):
        return "Drafting ended because nothing was known about the next token."
    return "Drafting ended because no path was likely enough to be followed."


def short(numbers: Any) -> Any:
    """Four digits of a number, or of each in a list or tensor, are enough to look at."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [short(number) for number in numbers]
    return 0.0 if math.isnan(numbers) else float(f"{numbers:.4g}")  # JSON has no NaN
