"""What the page of an answer shows, as plain data.

A ``Recorder`` reads it from the Steps of a Decoder. What the Steps do not tell, wrappers around the
exits and around the rule's draws write down. Recording changes no answer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ..checked import CheckedRule
from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.colors import Color
from ..cli.terminal import describe
from ..decoder import Decoder
from ..draft import Exit
from ..mcsd.decision import DecisionRule
from ..mcsd.roots import LongestPath, RootsDecoder
from ..rules import Greedy, Prediction, Rejection, SharedNoise, residual, without
from ..sampling import Draws, warp
from ..stats import Step
from ..tree import Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree
RULES = {Greedy: "greedy", Rejection: "rejection", SharedNoise: "noise"}  # as page.js calls them


class RecordedExit:
    """An exit that tells a recorder what it predicts."""

    def __init__(self, exit_: Exit, recorder: "Recorder") -> None:
        self.exit = exit_
        self.recorder = recorder
        self.exit_layer = exit_.exit_layer
        self.max_positions = exit_.max_positions
        self.keep = exit_.keep
        if hasattr(exit_, "end"):
            self.end = exit_.end

    def predict(self, tree: Tree, nodes: Sequence[int]) -> Prediction:
        prediction = self.exit.predict(tree, nodes)
        confidence = short(prediction.confidence)
        self.recorder.asked[tree.depth + 1].append((self.exit_layer, confidence))
        if prediction.confidence > 0:  # else it knows nothing
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
        self.asked = defaultdict(list)  # level -> exits in turn, and how sure they were
        self.said = defaultdict(list)  # path to a node -> exits, and what follows it (V,)
        self.tests: dict[int, dict[str, float]] = {}  # tested node -> the numbers that decided
        self.left: dict[int, Tensor] = {}  # rejected node -> what is then left of p (V,)

        decoder.drafter.exits = [RecordedExit(each, self) for each in decoder.drafter.exits]
        self.rule = decoder.rule
        while isinstance(self.rule, CheckedRule | DecisionRule | LongestPath):
            self.rule = self.rule.rule
        rule_name = RULES.get(type(self.rule))
        if rule_name == "rejection":
            self.rule.draws = RecordedDraws(self.rule.draws)
        used = {"exits": decoder.stats.exits, "rule": rule_name or type(self.rule).__name__}
        self.about = names | {
            "options": describe(decoder.options) | used,
            "rule": rule_name,
            "exact": decoder.rule.exact,
            "colors": {each: color.name for each, color in colors.items()},
        }

    def record(self) -> Iterator[Step]:
        """Yield the Steps of the decoder, recorded."""
        for step in self.decoder:
            with torch.inference_mode():
                self.add(step)
            yield step

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        options = self.decoder.options
        if isinstance(self.rule, Rejection | SharedNoise):
            p = self.rule.distribution(step.logits)
        else:
            p = warp(step.logits, options.temperature or 1.0, options.top_p, options.top_k)
        p = p.cpu()  # (N+1, V)
        if self.about["rule"] == "rejection":
            self.replay_tests(tree, p)
        n = len(tree.context)
        # As in ``Decoder.draft``: how deep the length of the answer and the exits let a tree be.
        room = self.decoder.limit - n - (0 if isinstance(self.decoder, RootsDecoder) else 1)
        room = min(room, self.decoder.drafter.max_positions - n + 1)
        recorded = {
            "n": n,
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
            "depths": [tree.depth, options.shape.depth, room],
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
        nodes = tree.children(0)[::-1] if isinstance(self.decoder.rule, LongestPath) else [0]
        while nodes:
            node = nodes.pop()
            left = p[node]
            q = tree.q.get(node)
            for child in tree.children(node):
                token = tree.tokens[child]
                chance, number = next(flips)
                test = {"p": left[token].item(), "chance": min(1.0, chance), "draw": number}
                if q is not None:
                    test["q"] = q[token].item()
                self.tests[child] = {name: short(value) for name, value in test.items()}
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
            g = self.rule.draws.noise(tree.next_positions([node]), like=p)[0]  # (V,)
            columns += [("g", None, g), ("log p + g", None, p.log() + g)]
        said = [(exit_layer, row.cpu()) for exit_layer, row in self.said[tuple(tree.path(node))]]
        likeliest = p.topk(min(LIKELIEST, int(p.count_nonzero()))).indices.tolist()
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
