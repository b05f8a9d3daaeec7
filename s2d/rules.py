"""Rules: which tokens a draft proposes, and which of them are accepted.

In this file, p is a distribution of the target and q one of the draft, both after temperature,
top-k and top-p. The text has to be the target's own, or a draw from its distribution.

- ``Greedy``, at temperature 0: the draft proposes its most probable tokens. A token is accepted if
  it is the target's most probable one.
- ``Rejection``, as in the papers: the draft draws a token x from q. The token is accepted with
  probability min(1, p(x) / q(x)), and otherwise another one is drawn from what is left of p. The
  text is a draw from the target's distribution.
- ``SharedNoise``, ours: at each position, the target takes the token with the largest p / e, where
  e is random noise from the seed and the position. This draws from p. The draft knows the noise as
  well, and proposes the tokens that will probably win. One seed gives one text, whatever drafts.

Any object with the members of ``Rule`` can be given to ``generate``.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .sampling import Draws, Noise, draft_scores, warp
from .tree import Proposal, Tree


class Prediction(NamedTuple):
    """What an exit of the draft says about the tokens that follow R nodes."""

    logits: Tensor  # (R, V)
    confidence: float  # how sure the exit is; usually its largest probability at temperature 1
    hidden: Tensor | None = None  # (R, hidden): before the norm and the LM head, if there are any


@runtime_checkable
class Exit(Protocol):
    """A place where the draft may predict: ``LayerExit``, or an object of your own."""

    exit_layer: int  # the number of layers before it: the exit's name in statistics
    max_positions: float  # the length of the longest text that it can read

    def start(self, capacity: int) -> None:
        """An answer begins. Its context and the expanded nodes have up to ``capacity`` entries."""

    def predict(self, tree: Tree, nodes: list[int]) -> Prediction | None:
        """What follows each of R ``nodes`` of the last level; None: the exit knows nothing."""

    def keep(self, tree: Tree, accepted: list[int]) -> None:
        """Forget all nodes of ``tree`` but the ``accepted`` path: now it is a part of the text."""


@runtime_checkable
class Rule(Protocol):
    """What a draft proposes, and what of it is accepted: one below, or an object of your own."""

    exact: bool  # whether the text is the target's own, or follows its distribution

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        """Up to ``count`` different children for each of R ``nodes`` of ``tree``.

        Row i of ``logits`` (R, V) is what the draft says after nodes[i].
        """

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """(accepted nodes, bonus token): a path from the root down, and what comes after it.

        Row i of ``logits`` (N+1, V) is what the target says after node i. A tree of the root alone
        is plain decoding.
        """


def follow(tree: Tree, choices: list[int], start: int = 0) -> tuple[list[int], int]:
    """Walk from the node ``start`` to the child that is the target's choice, and on from there.

    choices[i] is the token that the target takes after node i. It depends on the text and on the
    seed, but not on the draft. So the text is the target's own, whatever the tree is made of. An
    example: below the root are node 1, with token 5, and node 2, with token 6; below node 2 is node
    3, with token 7. If the choices are [6, 9, 7, 8], the nodes 2 and 3 are accepted, and 8 is the
    bonus token.
    """
    node_of = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens))}
    accepted: list[int] = []
    node = start
    while (node, choices[node]) in node_of:
        node = node_of[node, choices[node]]
        accepted.append(node)
    return accepted, choices[node]


class Greedy:
    """Temperature 0: the most probable tokens."""

    exact = True

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        return best_children(warp(logits, temperature=1.0), count)

    def verify(self, tree: Tree, logits: Tensor, start: int = 0) -> tuple[list[int], int]:
        choices = logits.argmax(dim=-1).tolist()  # (N+1,)
        return follow(tree, choices, start)


class Rejection:
    """Rejection sampling: a token x from q is accepted with probability min(1, p(x) / q(x)).

    The text follows p under four conditions:

    1. Each tested token was drawn from q. It is not the argmax of q, for example.
    2. The exit is chosen before a token is drawn from its q.
    3. Every token that was drawn is sent. A chain may end because its last token was improbable,
       but that token is sent as well.
    4. The random numbers that test a token are independent of those that drew it.

    A growing tree leaves nodes out, which breaks the third condition. So its children are
    ``chosen`` and not drawn: they are the tokens with the largest q. A chosen token x counts as
    drawn from a distribution that has only x: it is accepted with probability p(x), and what is
    left of p is p without x. So q plays no part in the test.

    ``distribution`` turns logits (R, V) into probabilities, such as ``Options.distribution``.
    Tokens are drawn and tested on the CPU, where ``draws`` come from.
    """

    exact = True

    def __init__(
        self, distribution: Callable[[Tensor], Tensor], draws: Draws, chosen: bool = False
    ) -> None:
        self.distribution = distribution
        self.draws = draws
        self.chosen = chosen

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        q = self.distribution(logits)  # (R, V)
        if self.chosen:
            return best_children(q, count)
        q = q.cpu()
        tokens = self.draws.candidates(q, min(count, q.shape[1]))
        return Proposal(*as_lists(tokens, q.gather(1, tokens)), q=q.unbind())

    def verify(self, tree: Tree, logits: Tensor, start: int = 0) -> tuple[list[int], int]:
        p = self.distribution(logits).cpu()  # (N+1, V)
        accepted: list[int] = []
        node = start
        while True:
            children = tree.children(node)
            child, left = self.test_children(children, tree.tokens, p[node], tree.q.get(node))
            if child is None:  # all are rejected, or there are none
                return accepted, self.draws.draw(left[None]).item()
            accepted.append(child)
            node = child

    def test_children(
        self, children: list[int], tokens: list[int], p: Tensor, q: Tensor | None
    ) -> tuple[int | None, Tensor]:
        """Which of a node's children is accepted, or None, and what is left of p (V,).

        ``children`` are nodes in the order in which their tokens were drawn from q (V,); without q,
        they were chosen. A drawn token x is accepted with probability min(1, p(x) / q(x)). If it is
        rejected, p becomes norm(relu(p - q)) for the next child, and q loses x, as the next child
        was drawn without replacement. If all are rejected, the bonus token is drawn from what is
        left of p. The token that comes out of this follows p (Chen et al. 2023, arXiv 2302.01318,
        theorem 1; for several children Jeon et al. 2024, arXiv 2402.14160).
        """
        for child in children:
            token = tokens[child]
            chance = p[token] if q is None else p[token] / q[token]
            if self.draws.flip(chance.item()):
                return child, p
            if q is None:
                p = without(p, token)
            else:
                p = residual(p, q)
                q = without(q, token)
        return None, p


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The residual distribution norm(relu(p - q)) (V,)."""
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    # p <= q everywhere means p = q, and then nothing is ever rejected; only rounding leads here.
    return left / total if total > 0 else p


def without(q: Tensor, token: int) -> Tensor:
    """q (V,) given that ``token`` is not drawn; all zero if there is no other."""
    rest = q.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest


class SharedNoise:
    """The target takes the token with the largest p / e. The draft knows e as well (``Noise``)."""

    exact = True

    def __init__(self, distribution: Callable[[Tensor], Tensor], noise: Noise) -> None:
        self.distribution = distribution
        self.noise = noise

    def propose(self, tree: Tree, nodes: list[int], logits: Tensor, count: int) -> Proposal:
        """The children are the tokens with the largest ``draft_scores``."""
        q = self.distribution(logits)  # (R, V)
        scores = draft_scores(q, self.noise.at(tree.next_positions(nodes)))  # (R, V)
        return best_children(scores / scores.sum(dim=-1, keepdim=True), count)

    def verify(self, tree: Tree, logits: Tensor, start: int = 0) -> tuple[list[int], int]:
        p = self.distribution(logits)  # (N+1, V)
        noise = self.noise.at(tree.next_positions(range(len(tree.tokens))))  # (N+1, V)
        choices = (p / noise).argmax(dim=-1).tolist()
        return follow(tree, choices, start)


def best_children(scores: Tensor, count: int) -> Proposal:
    """The ``count`` tokens with the largest ``scores`` (R, V), and these as estimates."""
    probs, tokens = scores.topk(min(count, scores.shape[1]))
    return Proposal(*as_lists(tokens, probs))


def as_lists(tokens: Tensor, probs: Tensor) -> tuple[list[list[int]], list[list[float]]]:
    """``tokens`` and their ``probs`` (R, C) as lists, without tokens of probability 0."""
    both = torch.stack((tokens.to(probs.dtype), probs))  # so that a GPU is waited for once
    token_rows = []
    prob_rows = []
    for row in zip(*both.tolist()):
        possible = [(int(token), prob) for token, prob in zip(*row) if prob > 0]
        token_rows.append([token for token, _ in possible])
        prob_rows.append([prob for _, prob in possible])
    return token_rows, prob_rows
