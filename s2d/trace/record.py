"""What the page of an answer shows, as plain data.

A ``Recorder`` reads it from the Steps of a Decoder. It also listens to the exits, the draft and the
rule: it puts methods of its own in the place of some of theirs, and these call them. Recording
changes no answer.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.colors import Color
from ..decoder import Decoder
from ..mcsd.roots import LongestPath
from ..rules import Greedy, Prediction, Rejection, Rule, SharedNoise, without
from ..sampling import warp
from ..stats import Step
from ..tree import Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree
NOT_SHOWN = ("draft_length",)  # of the options: the tree has it
RULES = {Greedy: "greedy", Rejection: "rejection", SharedNoise: "noise"}  # as page.js calls them


class Recorder:
    """Keeps what a Decoder does that has done nothing yet. ``colors`` are those of its exits."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        decoder: Decoder,
        names: dict[str, Any],
        colors: dict[int, Color],
    ) -> None:
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.steps: list[dict[str, Any]] = []
        # What was noted in this step:
        self.depth = 0  # the level down to which the draft may draft
        self.asked = defaultdict(list)  # level -> exits in turn, and how sure they were
        self.said = defaultdict(list)  # path -> exits, and what they said (V,)
        self.flips: list[tuple[float, float]] = []  # coins: (probability, random number)
        self.tests: dict[int, dict[str, float]] = {}  # tested node -> the numbers that decided
        self.left: dict[int, Tensor] = {}  # rejected node -> what is then left of p (V,)

        exits = decoder.drafter.exits
        for each in exits:
            each.predict = partial(self.note_prediction, each.exit_layer, each.predict)
        decoder.drafter.grow = partial(self.note_depth, decoder.drafter.grow)
        self.rule = decoder.rule
        if isinstance(self.rule, LongestPath):  # the inner rule tests, below each root
            self.rule = self.rule.rule
        if isinstance(self.rule, Rejection):
            self.rejecting = copy(self.rule)  # this one's coin never shows heads
            self.rejecting.draws = SimpleNamespace(flip=lambda probability: False)
            draws = self.rule.draws
            draws.uniform = partial(self.note_numbers, draws.uniform)
            draws.flip = partial(self.note_flip, draws.flip)
            self.rule.test_children = partial(self.note_tests, self.rule.test_children)
        rule_name = RULES.get(type(self.rule))
        options = decoder.plan.as_dict()
        options["exits"] = tuple(each.exit_layer for each in exits)
        options["rule"] = rule_name or self.rule
        self.about = names | {
            "options": {each: plain(options[each]) for each in options if each not in NOT_SHOWN},
            "rule": rule_name,
            "exact": decoder.rule.exact,
            "colors": {each: color.name for each, color in colors.items()},
        }

    def note_prediction(
        self, exit_layer: int, predict: Callable, tree: Tree, nodes: list[int]
    ) -> Prediction | None:
        """In the place of ``Exit.predict``."""
        prediction = predict(tree, nodes)
        confidence = 0.0 if prediction is None else prediction.confidence
        self.asked[tree.depth + 1].append((exit_layer, short(confidence)))
        if prediction is not None:
            probs = warp(prediction.logits, temperature=1.0).cpu()
            for node, row in zip(nodes, probs):
                self.said[tuple(tree.path(node))].append((exit_layer, row))
        return prediction

    def note_depth(self, grow: Callable, tree: Tree, depth: int, rule: Rule) -> Tree:
        """In the place of ``SortedDraft.grow``."""
        self.depth = depth
        return grow(tree, depth, rule)

    def note_numbers(self, uniform: Callable, count: int) -> Tensor:
        """In the place of ``Draws.uniform``, for ``note_flip``."""
        self.numbers = uniform(count)
        return self.numbers

    def note_flip(self, flip: Callable, probability: float) -> bool:
        """In the place of ``Draws.flip``."""
        heads = flip(probability)
        self.flips.append((probability, self.numbers.item()))
        return heads

    def note_tests(
        self,
        test_children: Callable,
        children: list[int],
        tokens: list[int],
        p: Tensor,
        q: Tensor | None,
    ) -> tuple[int | None, Tensor]:
        """In the place of ``Rejection.test_children``."""
        self.flips.clear()
        found = test_children(children, tokens, p, q)
        for child, (chance, number) in zip(children, self.flips):
            token = tokens[child]
            test = {"p": p[token].item(), "chance": min(1.0, chance), "draw": number}
            if q is not None:
                test["q"] = q[token].item()
            self.tests[child] = {name: short(value) for name, value in test.items()}
            if child != found[0]:  # the rule itself says what a rejection leaves of p
                _, p = self.rejecting.test_children([child], tokens, p, q)
                self.left[child] = p
                q = None if q is None else without(q, token)
        return found

    def record(self) -> Iterator[Step]:
        """Yield the Steps of the decoder, recorded."""
        for step in self.decoder:
            with torch.inference_mode():
                self.add(step)
            for noted in (self.asked, self.said, self.tests, self.left):
                noted.clear()
            yield step

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        if isinstance(self.rule, (Rejection, SharedNoise)):
            p = self.rule.distribution(step.logits)
        else:
            p = self.decoder.plan.options.distribution(step.logits)
        p = p.cpu()  # (N+1, V)
        nodes = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "depths": tree.depths,
            "exits": tree.exit_layers,
            "probs": short(tree.probs),
            "p": [None, *short(p[tree.parents[1:], tree.tokens[1:]])],
        }
        self.steps.append(
            {
                "n": len(tree.context),
                "tokens": step.tokens,
                "sources": step.sources,
                "path": step.accepted,
                "nodes": nodes,
                "asked": dict(self.asked),
                "depths": [tree.depth, self.decoder.plan.shape.depth, self.depth],
                "cached": self.decoder.cache.length,
                "positions": [self.position(step, node, p[node]) for node in [0, *step.accepted]],
                "ms": short([1000 * step.draft_seconds, 1000 * step.target_seconds]),
            }
        )

    def position(self, step: Step, node: int, p: Tensor) -> dict[str, Any]:
        """A position that the rule reached, the one after a ``node``: p (V,) is the target's."""
        tree = step.tree
        children = tree.children(node)
        is_last = node == [0, *step.accepted][-1]
        bonus = step.tokens[len(step.accepted) :] if is_last else []
        if is_last and not bonus and self.decoder.ended:
            children = []  # the answer has ended before this position
        tested = [child for child in children if child in self.tests] or children
        tests = []
        for child in tested:
            numbers = self.tests.get(child, {})
            tests.append({"node": child, "accepted": child in step.accepted} | numbers)
        columns = [("p", None, p)]
        if tests and node in tree.q:
            columns.append(("q", None, tree.q[node]))
        for child in tested:
            if child in self.left:
                columns.append(("residual after", tree.tokens[child], self.left[child]))
        if isinstance(self.rule, SharedNoise):
            e = self.rule.noise.at(tree.next_positions([node]))[0].cpu()  # (V,)
            columns += [("e", None, e), ("p / e", None, p / e)]
        said = self.said.get(tuple(tree.path(node)), [])
        likeliest = p.topk(min(LIKELIEST, len(p))).indices.tolist()
        favourites = [row.argmax().item() for _, row in said]
        drafted = [tree.tokens[child] for child in children]
        ids = list(dict.fromkeys([*drafted, *bonus, *likeliest, *favourites]))
        return {
            "bonus": bonus[0] if bonus else None,
            "ids": ids,
            "tests": tests,
            "columns": [(name, after, short(row[ids])) for name, after, row in columns],
            "said": [(exit_layer, short(row[ids])) for exit_layer, row in said],
        }

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
        prompt = self.decoder.context[: self.decoder.prompt_length]
        return {
            "about": self.about,
            "prompt": self.tokenizer.decode(prompt),
            "answer": answer,
            "pieces": {token: self.tokenizer.decode([*first, token])[cut:] for token in known},
            "steps": self.steps,
        }


def plain(value: Any) -> Any:
    """An option's value for JSON. An object, such as a decision model, is called by its class."""
    if value is None or isinstance(value, (str, int, float, tuple)):
        return value
    return str(value) if is_dataclass(value) else type(value).__name__


def short(numbers: Any) -> Any:
    """Three digits of a number, or of each in a list or tensor: the page shows them as they are."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [short(number) for number in numbers]
    return 0.0 if math.isnan(numbers) else float(f"{numbers:.3g}")  # JSON has no NaN
