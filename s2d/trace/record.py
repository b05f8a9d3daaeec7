"""What the page of an answer shows, as plain numbers.

A ``Recorder`` reads it from the Steps of a Decoder. It wraps the exits and random draws of these by
objects that note what passes through them, and it asks exits of its own, with caches of their own,
what those would have said that nobody asked. Recording changes no answer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.colors import Color
from ..decoder import Decoder, Step, inference
from ..draft import Exit, LayerExit
from ..mask import CONTEXT
from ..roots import LongestPath
from ..rules import Prediction, Rejection, Rule, SharedNoise, residual, without
from ..sampling import Draws
from ..tree import FixedShape, Tree

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


class NotedDraws:
    """Random draws, and in ``numbers`` those that decided tests."""

    def __init__(self, inner: Draws, numbers: list[float]) -> None:
        self.inner = inner
        self.numbers = numbers

    def flip(self, probabilities: Tensor) -> Tensor:
        numbers = self.inner.uniform(probabilities)
        self.numbers += numbers.tolist()
        return numbers < probabilities

    def draw(self, probs: Tensor) -> Tensor:
        return self.inner.draw(probs)

    def candidates(self, probs: Tensor, count: int) -> Tensor:
        return self.inner.candidates(probs, count)


class Recorder:
    """Keeps what a Decoder does.

    Args:
        decoder: it has done nothing yet.
        names: of the models.
        colors: of the decoder's exits.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: Decoder,
        names: dict[str, Any],
        colors: dict[int, Color],
    ) -> None:
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.prompt = decoder.context
        exits = [] if decoder.drafter is None else decoder.drafter.exits
        self.own_exits = copy_exits(exits, decoder.limit)
        self.asked: list[Asked] = []
        if decoder.drafter is not None:
            decoder.drafter.exits = [NotedExit(each, self.asked) for each in exits]
        self.rule = rule_that_tests(decoder.rule)
        self.numbers: list[float] = []
        if isinstance(self.rule, Rejection):
            self.rule.draws = NotedDraws(self.rule.draws, self.numbers)
        self.about = names | {name: getattr(decoder.settings, name) for name in OPTIONS}
        self.about["exits"] = [each.exit_layer for each in exits]
        self.about["colors"] = {each: color.name for each, color in colors.items()}
        self.about["rule"] = type(self.rule).__name__
        self.about["exact"] = decoder.rule.exact
        self.steps: list[dict[str, Any]] = []

    def record(self) -> Iterator[Step]:
        """Yield the Steps of the decoder, recorded."""
        for step in self.decoder:
            with inference(self.decoder.target.device):
                self.add(step)
            self.asked.clear()
            self.numbers.clear()
            yield step

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        p = self.rule.distribution(step.logits).cpu()  # (N+1, V)
        nodes = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "levels": tree.depths,
            "exits": tree.exit_layers,
            "probs": short(tree.probs),
            "p": short(p[[parent + 1 for parent in tree.parents], tree.tokens]),
        }
        asked = defaultdict(list)  # level -> (exit layer, confidence) of each
        for each in self.asked:
            asked[each.level].append((each.exit_layer, short(each.confidence)))
        numbers = iter(self.numbers)
        ends = [*step.accepted, None]
        self.steps.append(
            {
                "n": len(tree.context),
                "tokens": step.tokens,
                "sources": step.sources,
                "path": step.accepted,
                "nodes": nodes,
                "asked": asked,
                "ended": why_ended(tree, self.asked),
                "positions": [
                    self.position(
                        step, node=node, accepted=accepted, p=p[node + 1], numbers=numbers
                    )
                    for node, accepted in zip([CONTEXT, *step.accepted], ends)
                ],
                "ms": short([1000 * step.draft_seconds, 1000 * step.target_seconds]),
            }
        )

    def position(
        self, step: Step, node: int, accepted: int | None, p: Tensor, numbers: Iterator[float]
    ) -> dict[str, Any]:
        """A position that the rule reached, after the context or an accepted ``node``.

        Args:
            accepted: the node that was accepted here, if any.
            p: the target's distribution (V,) here.
            numbers: the random ones of this and the next positions, if tests were decided by them.
        """
        tree = step.tree
        children = tree.children(node)
        own = [] if accepted is not None else step.tokens[len(step.accepted) :]
        note = ""
        if accepted is None and not own and self.decoder.ended in ("eos", "stop_at"):
            note = "The answer has ended before this position."
            children = []
        elif accepted is None and not own:  # a RootsDecoder's
            note = "What the target chooses here is not emitted yet: it is a root of the next tree."
        tests = [{"node": child, "accepted": child == accepted} for child in children]
        columns = [("p", None, p)]
        if isinstance(self.rule, LongestPath):  # the tests below all roots, on other paths too
            tests = []
        elif isinstance(self.rule, Rejection) and children and node in tree.q:
            tests, columns = shown_tests(tree, parent=node, accepted=accepted, p=p, numbers=numbers)
        elif isinstance(self.rule, SharedNoise):
            e = self.rule.noise.at(tree.next_positions([node]))[0].cpu()  # (V,)
            columns += [("e", None, e), ("p / e", None, p / e)]
        said = self.ask_all(tree.context + tree.path(node))
        likeliest = p.topk(min(LIKELIEST, len(p))).indices.tolist()
        favourites = [row.argmax().item() for _, row in said]
        drafted = [tree.tokens[child] for child in children]
        ids = list(dict.fromkeys([*drafted, *own, *likeliest, *favourites]))
        return {
            "accepted": accepted,
            "bonus": own[0] if own else None,
            "note": note,
            "ids": ids,
            "tests": tests,
            "columns": [(name, after, short(row[ids])) for name, after, row in columns],
            "said": [(exit_layer, short(row[ids])) for exit_layer, row in said],
        }

    def ask_all(self, text: list[int]) -> list[tuple[int, Tensor]]:
        """What each exit with layers says after ``text``: its number and probabilities (V,)."""
        tree = Tree(text, FixedShape((1,)), max_levels=1)
        said = []
        for each in self.own_exits:
            if len(text) <= each.max_positions:
                prediction = each.predict(tree)
                probs = prediction.scatter(prediction.probs, each.vocab_size)
                said.append((each.exit_layer, probs[0].cpu()))
        for each in self.own_exits:  # the same text may be asked about again
            each.keep(len(text) - 1, [])
        return said

    def data(self) -> dict[str, Any]:
        """All of it, to be written as JSON, with the text of every token."""
        stream = TextStream(self.tokenizer)
        answer = [stream.push([token]) for step in self.steps for token in step["tokens"]]
        answer.append(stream.push([], last=True))
        known = {token for step in self.steps for token in step["nodes"]["tokens"]}
        for step in self.steps:
            known.update(token for position in step["positions"] for token in position["ids"])
        # A tokenizer may drop the space of the first token. So each is decoded after another text,
        # whichever that is, which is then cut off.
        first = self.tokenizer.encode("a")
        cut = len(self.tokenizer.decode(first))
        return {
            "about": self.about,
            "prompt": self.tokenizer.decode(self.prompt),
            "answer": answer,
            "pieces": {token: self.tokenizer.decode([*first, token])[cut:] for token in known},
            "steps": self.steps,
        }


def copy_exits(exits: list[Exit], capacity: int) -> list[LayerExit]:
    """Those of ``exits`` that have layers, with caches of their own for ``capacity`` positions."""
    copies: list[LayerExit] = []
    for each in exits:
        if isinstance(each, LayerExit):
            previous = copies[-1] if copies else None
            copies.append(
                LayerExit(
                    each.model,
                    previous,
                    exit_layer=each.exit_layer,
                    capacity=capacity,
                    vocab_size=each.vocab_size,
                )
            )
    return copies


def rule_that_tests(rule: Rule) -> Rule:
    """The rule that tests nodes: with one root, ``LongestPath`` leaves that to the one inside."""
    return rule.rule if isinstance(rule, LongestPath) and rule.exact else rule


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
                "p": short(p[token].item()),
                "q": short(q[token].item()),
                "chance": short(min(1.0, (p[token] / q[token]).item())),
                "draw": short(next(numbers)),
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
    """Three digits of a number, or of each in a list or tensor: the page shows them as they are."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [short(number) for number in numbers]
    return 0.0 if math.isnan(numbers) else float(f"{numbers:.3g}")  # JSON has no NaN
