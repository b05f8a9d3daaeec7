"""What the page of an answer shows, as plain data.

A ``Recorder`` reads it from the Steps of a Decoder. What the Steps do not tell, wrappers around the
exits and around the rule's draws write down. Recording changes no answer.
"""

import math
from collections import defaultdict
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..decoder import Decoder
from ..draft import Exit
from ..pair.settings import describe
from ..rules import Prediction, Rejection, SharedNoise, test_children
from ..sampling import Distribution, Draws
from ..stats import Step
from ..tree import TARGET, Node, Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree


class RecordedExit:
    """An exit that tells a recorder what it predicts; all else is the exit's own."""

    def __init__(self, exit_: Exit, recorder: "Recorder") -> None:
        self.exit = exit_
        self.recorder = recorder

    def __getattr__(self, name: str) -> Any:
        return getattr(self.exit, name)

    def predict(self, tree: Tree, nodes: list[Node]) -> Prediction:
        prediction = self.exit.predict(tree, nodes)
        self.recorder.asked[tree.depth + 1].append((self.exit_layer, short(prediction.confidence)))
        probs = Distribution(temperature=1.0)(prediction.logits)
        for node, row in zip(nodes, probs):
            self.recorder.said[node].append((self.exit_layer, row))
        return prediction


class RecordedDraws(Draws):
    """Draws that keep their flips."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
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
        self.said = defaultdict(list)  # node -> exits, and what follows it (V,)
        self.tests = defaultdict(dict)  # tested node -> the numbers that decided
        decoder.drafter.exits = [RecordedExit(each, self) for each in decoder.drafter.exits]
        self.rule = getattr(decoder.rule, "rule", decoder.rule)  # it may wrap another one
        if type(self.rule) is Rejection:
            self.rule.draws = RecordedDraws(self.rule.draws.seed)
        used = {"exits": decoder.stats.exits, "rule": type(self.rule).__name__}
        options = describe(decoder.options) | used
        self.about = about | {"options": options, "exact": decoder.rule.exact}

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        options = self.decoder.options
        shown = Distribution(options.temperature or 1.0, options.top_p, options.top_k)
        rows = shown(step.logits)
        p = dict(zip(tree.nodes, rows))  # (V,) by node: the target's
        path = [tree.root, *step.accepted]
        number = {node: i for i, node in enumerate(tree.nodes)}
        if type(self.rule) is Rejection:
            self.replay_tests(tree, p)
        recorded = {
            "n": len(tree.context),
            "tokens": step.tokens,
            "sources": step.sources,
            "path": [number[node] for node in step.accepted],
            "nodes": {
                "tokens": [node.token for node in tree.nodes],
                "parents": [number.get(node.parent, -1) for node in tree.nodes],
                "depths": [node.depth for node in tree.nodes],
                "exits": [node.exit_layer for node in tree.nodes],
                "probs": short([node.prob for node in tree.nodes]),
                "p": [None, *(short(p[node.parent][node.token]) for node in tree.nodes[1:])],
            },
            "asked": dict(self.asked),
            "depths": [tree.depth, options.tree.depth],
            "cached": self.decoder.cache.length,
            "positions": [self.position(step, node, p[node]) for node in path],
            "ms": short(1000 * step.seconds),
        }
        self.steps.append(recorded)
        for noted in (self.asked, self.said, self.tests):
            noted.clear()

    def replay_tests(self, tree: Tree, p: dict[Node, Tensor]) -> None:
        """Note what ``Rejection.verify`` did, by its flips; p (V,) by node is the target's."""
        # The nodes whose children are tested, the next one last. The target's own roots are not.
        roots = [node for node in tree.children(tree.root) if node.exit_layer == TARGET]
        nodes = roots[::-1] or [tree.root]
        while nodes:
            node = nodes.pop()
            children = tree.children(node)
            for rank, child in enumerate(children):
                chance, draw = self.rule.draws.flips.pop(0)
                _, left = test_children([node, *children[:rank]], p[node][None])
                numbers = {"p": left[node][child.token], "chance": min(1.0, chance), "draw": draw}
                if child.q is not None:
                    q = child.q.clone()
                    q[[each.token for each in children[:rank]]] = 0.0
                    numbers["q"] = q[child.token] / q.sum()
                self.tests[child] = {name: short(value) for name, value in numbers.items()}
                if draw < chance:
                    nodes.append(child)
                    break

    def position(self, step: Step, node: Node, p: Tensor) -> dict[str, Any]:
        """A position that the rule reached, the one after a ``node``: p (V,) is the target's."""
        children = step.tree.children(node)
        is_last = node.depth == len(step.accepted)
        bonus = step.tokens[len(step.accepted) :] if is_last else []
        if is_last and not bonus and self.decoder.ended:
            children = []  # the answer has ended before this position
        tested = [child for child in children if child in self.tests] or children
        columns = [("p", None, p)]
        if children and children[0].q is not None:
            columns.append(("q", None, children[0].q))
        for count, child in enumerate(tested, start=1):
            if child in self.tests and child not in step.accepted:
                _, left = test_children([node, *tested[:count]], p[None])
                columns.append(("residual after", child.token, left[node]))
        if type(self.rule) is SharedNoise:
            g = self.rule.draws.noise(step.tree.next_positions([node]), like=p)[0]  # (V,)
            columns += [("g", None, g), ("log p + g", None, p.log() + g)]
        likeliest = p.topk(min(LIKELIEST, int(p.count_nonzero()))).indices.tolist()
        drafted = [child.token for child in children]
        ids = list(dict.fromkeys([*drafted, *bonus, *likeliest]))
        return {
            "bonus": bonus[0] if bonus else None,
            "ids": ids,
            "tests": [
                {"node": step.tree.nodes.index(child), "accepted": child in step.accepted}
                | self.tests[child]
                for child in tested
            ],
            "columns": [(name, after, short(row[ids])) for name, after, row in columns],
            "said": [(exit_layer, short(row[ids])) for exit_layer, row in self.said[node]],
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
        return {
            "about": self.about,
            "prompt": self.tokenizer.decode(self.decoder.context[: self.decoder.prompt_length]),
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
