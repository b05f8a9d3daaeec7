"""What the page of an answer shows, as plain data.

A ``Recorder`` reads it from the Steps of a Decoder. What the Steps do not tell, wrappers around the
exits and around the rule's draws write down. Recording changes no answer.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.terminal import describe
from ..decoder import Decoder
from ..draft import Exit
from ..rules import Prediction, Rejection, SharedNoise, residual, without
from ..sampling import Draws, warp
from ..stats import Step
from ..tree import Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree


class RecordedExit:
    """An exit that tells a recorder what it predicts; all else is the exit's own."""

    def __init__(self, exit_: Exit, recorder: "Recorder") -> None:
        self.exit = exit_
        self.recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exit, name)

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        prediction = self.exit.predict(tree, nodes)
        confidence = short(prediction.confidence)
        self.recorder.asked[tree.depth + 1].append((self.exit_layer, confidence))
        for node, row in zip(nodes, warp(prediction.logits, temperature=1.0)):
            self.recorder.said[tuple(tree.path(node))].append((self.exit_layer, row))
        return prediction


class RecordedDraws(Draws):
    """Draws that keep their flips."""

    def __init__(self, draws: Draws) -> None:
        super().__init__(draws.seed)
        self.generator = draws.generator
        self.flips: list[tuple[float, float]] = []  # (probability, random number)

    def flip(self, probability: float) -> bool:
        number = self.generator.random()
        self.flips.append((probability, number))
        return number < probability


class Recorder:
    """Keeps what a Decoder does, which has done nothing yet. The page shows ``about``, too."""

    def __init__(self, tokenizer: Tokenizer, decoder: Decoder, about: dict[str, Any]) -> None:
        self.tokenizer = tokenizer
        self.decoder = decoder
        self.steps: list[dict[str, Any]] = []
        # What was noted in this step:
        self.asked = defaultdict(list)  # level -> exits in turn, and how sure they were
        self.said = defaultdict(list)  # path to a node -> exits, and what follows it (V,)
        self.tests: dict[int, dict[str, float]] = {}  # tested node -> the numbers that decided
        self.left: dict[int, Tensor] = {}  # rejected node -> what is then left of p (V,)

        decoder.drafter.exits = [RecordedExit(each, self) for each in decoder.drafter.exits]
        self.rule = decoder.rule
        while hasattr(self.rule, "rule"):  # it wraps another one, as a decision model does
            self.rule = self.rule.rule
        if type(self.rule) is Rejection:
            self.rule.draws = RecordedDraws(self.rule.draws)
        used = {"exits": decoder.stats.exits, "rule": type(self.rule).__name__}
        options = describe(decoder.options) | used
        self.about = about | {"options": options, "exact": decoder.rule.exact}

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        options = self.decoder.options
        temperature = options.temperature or 1.0
        p = warp(step.logits, temperature, options.top_p, options.top_k).cpu()  # (N+1, V)
        if type(self.rule) is Rejection:
            self.replay_tests(tree, p)
        recorded = {
            "n": len(tree.context),
            "tokens": step.tokens,
            "sources": step.sources,
            "path": step.accepted,
            "nodes": {
                "tokens": tree.tokens,
                "parents": tree.parents,
                "depths": tree.depths,
                "exits": tree.exit_layers,
                "probs": short(tree.probs),
                "p": [None, *short(p[tree.parents[1:], tree.tokens[1:]])],
            },
            "asked": dict(self.asked),
            "depths": [tree.depth, options.shape.depth],
            "cached": self.decoder.cache.length,
            "positions": [self.position(step, node, p[node]) for node in [0, *step.accepted]],
            "ms": short(1000 * step.seconds),
        }
        self.steps.append(recorded)
        for noted in (self.asked, self.said, self.tests, self.left):
            noted.clear()

    def replay_tests(self, tree: Tree, p: Tensor) -> None:
        """Note what ``Rejection.verify`` did, by its flips; p (N+1, V) is the target's."""
        flips = iter(self.rule.draws.flips)
        # The nodes whose children are tested, the next one last. Roots are tested one by one.
        nodes = tree.children(0)[::-1] if self.decoder.options.init == "target" else [0]
        while nodes:
            node = nodes.pop()
            left = p[node]
            children = tree.children(node)
            q = tree.q[children[0]] if children else None
            for child in children:
                token = tree.tokens[child]
                chance, number = next(flips)
                numbers = {"p": left[token].item(), "chance": min(1.0, chance), "draw": number}
                if q is not None:
                    numbers["q"] = q[token].item()
                self.tests[child] = {name: short(value) for name, value in numbers.items()}
                if number < chance:
                    nodes.append(child)
                    break
                left = without(left, token) if q is None else residual(left, q)
                q = None if q is None else without(q, token)
                self.left[child] = left
        self.rule.draws.flips.clear()

    def position(self, step: Step, node: int, p: Tensor) -> dict[str, Any]:
        """A position that the rule reached, the one after a ``node``: p (V,) is the target's."""
        tree = step.tree
        children = tree.children(node)
        is_last = node == [0, *step.accepted][-1]
        bonus = step.tokens[len(step.accepted) :] if is_last else []
        if is_last and not bonus and self.decoder.ended:
            children = []  # the answer has ended before this position
        tested = [child for child in children if child in self.tests] or children
        tests = [
            {"node": child, "accepted": child in step.accepted} | self.tests.get(child, {})
            for child in tested
        ]
        columns = [("p", None, p)]
        if tests and tree.q[children[0]] is not None:
            columns.append(("q", None, tree.q[children[0]]))
        for child in tested:
            if child in self.left:
                columns.append(("residual after", tree.tokens[child], self.left[child]))
        if type(self.rule) is SharedNoise:
            g = self.rule.draws.noise(tree.next_positions([node]), like=p)[0]  # (V,)
            columns += [("g", None, g), ("log p + g", None, p.log() + g)]
        said = self.said[tuple(tree.path(node))]
        likeliest = p.topk(min(LIKELIEST, int(p.count_nonzero()))).indices.tolist()
        drafted = [tree.tokens[child] for child in children]
        ids = list(dict.fromkeys([*drafted, *bonus, *likeliest]))
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
        # Each is decoded after another text, as a tokenizer may drop the space of the first token.
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


def short(numbers: Any) -> Any:
    """Three digits of a number, or of each in a list or tensor: the page shows them as they are."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list | tuple):
        return [short(number) for number in numbers]
    return float(f"{numbers:.3g}") if math.isfinite(numbers) else str(numbers)  # JSON has no -inf
