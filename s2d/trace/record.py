"""What the page of an answer shows, as plain numbers.

A ``Recorder`` reads it from the Steps of a Decoder. It puts objects in the place of the exits and
the random draws that note what passes through them. Recording changes no answer.
"""

import math
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tokenizer import TextStream, Tokenizer
from ..cli.colors import Color
from ..decoder import Decoder
from ..draft import LayerExit
from ..mcsd.roots import LongestPath, RootsDecoder
from ..rules import Exit, Prediction, Rejection, SharedNoise, residual, without
from ..sampling import Draws, warp
from ..stats import Step
from ..tree import Tree

LIKELIEST = 6  # of the vocabulary, the target's likeliest tokens are shown, and those in the tree
OPTIONS = "temperature top_p top_k seed init".split()
Asked = dict[int, list[tuple[int, float]]]  # level -> exits in turn, and how sure they were
Said = dict[tuple[int, ...], list[tuple[int, Tensor]]]  # path -> exits, and what they said (V,)


class NotedExit:
    """An exit; ``asked`` gets how sure it was, and ``said`` what it said.

    The last exit that is asked drafts the level, unless it knows nothing.
    """

    def __init__(self, inner: Exit, asked: Asked, said: Said) -> None:
        self.inner = inner
        self.asked = asked
        self.said = said
        self.exit_layer = inner.exit_layer
        self.max_positions = inner.max_positions

    def start(self, capacity: int) -> None:
        self.inner.start(capacity)

    def predict(self, tree: Tree, nodes: list[int]) -> Prediction | None:
        prediction = self.inner.predict(tree, nodes)
        confidence = 0.0 if prediction is None else prediction.confidence
        self.asked[tree.depth + 1].append((self.exit_layer, short(confidence)))
        if isinstance(self.inner, LayerExit) and prediction is not None:
            probs = warp(prediction.logits, temperature=1.0).cpu()
            for node, row in zip(nodes, probs):
                self.said[tuple(tree.path(node))].append((self.exit_layer, row))
        return prediction

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        self.inner.keep(tree, accepted)


class NotedDraws(Draws):
    """The random numbers of ``inner``, and in ``numbers`` those that decided tests."""

    def __init__(self, inner: Draws, numbers: list[float]) -> None:
        self.generator = inner.generator
        self.numbers = numbers

    def flip(self, probability: float) -> bool:
        number = self.uniform(1).item()
        self.numbers.append(number)
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
        self.prompt = decoder.context
        self.steps: list[dict[str, Any]] = []
        self.asked: Asked = defaultdict(list)
        self.said: Said = defaultdict(list)
        self.numbers: list[float] = []
        exits = decoder.drafter.exits
        decoder.drafter.exits = [NotedExit(each, self.asked, self.said) for each in exits]
        self.rule = decoder.rule
        if isinstance(self.rule, LongestPath) and self.rule.exact:  # one root: the inner rule tests
            self.rule = self.rule.rule
        if isinstance(self.rule, Rejection):
            self.rule.draws = NotedDraws(self.rule.draws, self.numbers)
        self.about = names | {name: getattr(decoder.plan.asked, name) for name in OPTIONS}
        self.about |= {"method": decoder.plan.method, "thresholds": decoder.plan.thresholds}
        self.about["exits"] = [each.exit_layer for each in exits]
        self.about["colors"] = {each: color.name for each, color in colors.items()}
        self.about["rule"] = type(self.rule).__name__
        self.about["exact"] = decoder.rule.exact

    def record(self) -> Iterator[Step]:
        """Yield the Steps of the decoder, recorded."""
        for step in self.decoder:
            with torch.inference_mode():
                self.add(step)
            self.asked.clear()
            self.said.clear()
            self.numbers.clear()
            yield step

    def add(self, step: Step) -> None:
        """Record a Step that was just made."""
        tree = step.tree
        if isinstance(self.rule, (Rejection, SharedNoise)):
            p = self.rule.distribution(step.logits)
        else:
            p = self.decoder.plan.asked.distribution(step.logits)
        p = p.cpu()  # (N+1, V)
        nodes = {
            "tokens": tree.tokens,
            "parents": tree.parents,
            "depths": tree.depths,
            "exits": tree.exit_layers,
            "probs": short(tree.probs),
            "p": [None, *short(p[tree.parents[1:], tree.tokens[1:]])],
        }
        numbers = iter(self.numbers)
        positions = []
        for node, accepted in zip([0, *step.accepted], [*step.accepted, None]):
            positions.append(self.position(step, node, accepted, p[node], numbers))
        self.steps.append(
            {
                "n": len(tree.context),
                "tokens": step.tokens,
                "sources": step.sources,
                "path": step.accepted,
                "nodes": nodes,
                "asked": dict(self.asked),
                "ended": self.why_ended(tree),
                "positions": positions,
                "ms": short([1000 * step.draft_seconds, 1000 * step.target_seconds]),
            }
        )

    def position(
        self, step: Step, node: int, accepted: int | None, p: Tensor, numbers: Iterator[float]
    ) -> dict[str, Any]:
        """A position that the rule reached: the one after a ``node``.

        ``accepted`` is the child that was accepted here, if any, and p (V,) the target's
        distribution here. ``numbers`` decided the tests here and at the next positions, if any did.
        """
        tree = step.tree
        children = tree.children(node)
        bonus = [] if accepted is not None else step.tokens[len(step.accepted) :]
        note = ""
        if accepted is None and not bonus and self.decoder.ended:
            note = "The answer has ended before this position."
            children = []
        elif accepted is None and not bonus:  # a RootsDecoder's
            note = "What the target chooses here is not emitted yet: it is a root of the next tree."
        tests = [{"node": child, "accepted": child == accepted} for child in children]
        are_drafted = bool(children) and tree.exit_layers[children[0]] is not None
        columns = [("p", None, p)]
        if isinstance(self.rule, LongestPath):  # the tests below all roots, on other paths too
            tests = []
        elif isinstance(self.rule, Rejection) and are_drafted:
            tests, columns = shown_tests(tree, node, accepted, p, numbers)
        elif isinstance(self.rule, SharedNoise):
            e = self.rule.noise.at(tree.next_positions([node]))[0].cpu()  # (V,)
            columns += [("e", None, e), ("p / e", None, p / e)]
        said = self.said.get(tuple(tree.path(node)), [])
        likeliest = p.topk(min(LIKELIEST, len(p))).indices.tolist()
        favourites = [row.argmax().item() for _, row in said]
        drafted = [tree.tokens[child] for child in children]
        ids = list(dict.fromkeys([*drafted, *bonus, *likeliest, *favourites]))
        return {
            "accepted": accepted,
            "bonus": bonus[0] if bonus else None,
            "note": note,
            "ids": ids,
            "tests": tests,
            "columns": [(name, after, short(row[ids])) for name, after, row in columns],
            "said": [(exit_layer, short(row[ids])) for exit_layer, row in said],
        }

    def why_ended(self, tree: Tree) -> str:
        """Why a tree has no more levels."""
        decoder = self.decoder
        n = len(tree.context)
        left = decoder.limit - n - (not isinstance(decoder, RootsDecoder))  # for the bonus token
        if tree.depth == 0 and not self.asked:
            return "Nothing is drafted in this step."
        if tree.depth == decoder.plan.shape.depth:
            return "Drafting ended with the last level of the tree."
        if tree.depth >= min(left, decoder.drafter.max_positions - n + 1):
            return "Drafting ended where the answer or the context must end."
        if tree.depth + 1 in self.asked:
            return "Drafting ended because nothing was known about the next token."
        return "Drafting ended because no path was likely enough to be followed."

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


def shown_tests(
    tree: Tree, parent: int, accepted: int | None, p: Tensor, numbers: Iterator[float]
) -> tuple[list[dict], list[tuple]]:
    """The tests of a node's children, and columns (name, rejected token, row).

    The token is the one after whose rejection the row is what is left of p (V,) or q. ``numbers``
    are those that decided the tests, in their order.
    """
    q = tree.q.get(parent)
    tests = []
    columns: list[tuple[str, int | None, Tensor]] = [("p", None, p)]
    if q is not None:  # the children were drawn from q, and not chosen
        columns.append(("q", None, q))
    for child in tree.children(parent):
        token = tree.tokens[child]
        chance = p[token] if q is None else p[token] / q[token]
        test = {
            "node": child,
            "accepted": child == accepted,
            "p": short(p[token].item()),
            "chance": short(min(1.0, chance.item())),
            "draw": short(next(numbers)),
        }
        if q is not None:
            test["q"] = short(q[token].item())
        tests.append(test)
        if child == accepted:
            return tests, columns
        p = without(p, token) if q is None else residual(p, q)
        columns.append(("residual after", token, p))
        if q is not None:
            q = without(q, token)
            columns.append(("q without", token, q))
    if q is not None:
        columns.pop()  # of the last rejection: the bonus token is drawn from what is left of p
    return tests, columns


def short(numbers: Any) -> Any:
    """Three digits of a number, or of each in a list or tensor: the page shows them as they are."""
    if isinstance(numbers, torch.Tensor):
        numbers = numbers.tolist()
    if isinstance(numbers, list):
        return [short(number) for number in numbers]
    return 0.0 if math.isnan(numbers) else float(f"{numbers:.3g}")  # JSON has no NaN
