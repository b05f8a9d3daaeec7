"""Rules: which tokens a draft proposes, and which of them are accepted.

In this file, p is a distribution of the target and q one of the draft, both after temperature,
top-k and top-p. The text has to be the target's own, or a draw from its distribution.

- ``Greedy``, at temperature 0: the draft proposes its most probable tokens. A token is accepted if
  it is the target's most probable one.
- ``Rejection``, as in the papers: the draft draws a token x from q. The token is accepted with
  probability min(1, p(x) / q(x)), and otherwise another one is drawn from what is left of p. The
  text is a draw from the target's distribution.
- ``SharedNoise``, ours: at each position, the target takes the token with the largest log p + g,
  where g is Gumbel noise from the seed and the position. This draws from p. The draft knows the
  noise as well, and trusts half of it: it proposes the tokens with the largest log q + g / 2. One
  seed gives one text, whatever drafts.

A rule of your own is given to ``generate`` as a function that makes it, such as its class.
"""

from collections.abc import Callable, Sequence
from math import isnan
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .sampling import NOT_FINITE, Draws, warp
from .tree import Proposal, Tree

NO_TOKEN = -1  # where the logits allow none
Distribution = Callable[[Tensor], Tensor]  # logits (..., V) -> probabilities (..., V)


class Prediction(NamedTuple):
    """What an exit of the draft says about the tokens that follow R nodes."""

    logits: Tensor  # (R, V)
    # How sure the exit is; usually its largest probability at temperature 1. At 0 it knows nothing.
    confidence: float
    hidden: Tensor | None = None  # (R, hidden): before the norm and the LM head, if there are any


class Rule(Protocol):
    """What a draft proposes, and what of it is accepted."""

    exact: bool  # whether the text, or its distribution, is the same as without a draft

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        """Different children for R ``nodes`` of ``tree``, up to widths[i] of them for nodes[i].

        Row i of ``prediction.logits`` (R, V) is what the draft says after nodes[i].
        """

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """(accepted nodes, bonus token): a path from the root down, and what comes after it.

        Row i of ``logits`` (N+1, V) is what the target says after node i. A tree of the root alone
        is plain decoding.
        """


# Makes the rule of an answer: the distribution has the answer's temperature, top-k and top-p, and
# the draws have its seed. At temperature 0 the distribution has one token.
RuleMaker = Callable[[Distribution, Draws], Rule]


def follow(tree: Tree, scores: Tensor) -> tuple[list[int], int]:
    """Walk from the root to the child that is the target's choice, and on from there.

    The target's choice after node i is the token with the largest of the ``scores`` (N+1, V) in row
    i. It depends on the text and on the seed, but not on the draft. So the text is the target's
    own, whatever the tree is made of. An example: below the root are node 1, with token 5, and node
    2, with token 6; below node 2 is node 3, with token 7. If the choices are [6, 9, 7, 8], the
    nodes 2 and 3 are accepted, and 8 is the bonus token.
    """
    best, tokens = scores.max(dim=-1)  # (N+1,)
    choices = torch.where(best.isfinite(), tokens, NO_TOKEN).tolist()
    node_of = {pair: node for node, pair in enumerate(zip(tree.parents, tree.tokens))}
    accepted: list[int] = []
    node = 0
    while (node, choices[node]) in node_of:
        node = node_of[node, choices[node]]
        accepted.append(node)
    if choices[node] == NO_TOKEN:
        raise ValueError(NOT_FINITE)
    return accepted, choices[node]


class Greedy:
    """Temperature 0: the most probable tokens. Nothing is drawn."""

    exact = True

    def __init__(self, distribution: Distribution, draws: Draws) -> None:
        pass

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        return best_children(warp(prediction.logits, temperature=1.0), widths)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        return follow(tree, logits)


class Rejection:
    """Rejection sampling: a token x from q is accepted with probability min(1, p(x) / q(x)).

    The text follows p under four conditions:

    1. Each tested token was drawn from q. It is not the argmax of q, for example.
    2. The exit is chosen before a token is drawn from its q.
    3. Every token that was drawn is sent. To leave out a drawn token because it is improbable would
       change the law of the others.
    4. The random numbers that test a token are independent of those that drew it.

    A growing tree leaves nodes out, which breaks the third condition. So its children are
    ``chosen`` and not drawn: they are the tokens with the largest q. A chosen token x counts as
    drawn from a distribution that has only x: it is accepted with probability p(x), and what is
    left of p is p without x. So q plays no part in the test.

    Tokens are drawn and tested on the CPU, where ``draws`` come from.
    """

    exact = True

    def __init__(self, distribution: Distribution, draws: Draws, chosen: bool = False) -> None:
        self.distribution = distribution
        self.draws = draws
        self.chosen = chosen

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        q = self.distribution(prediction.logits)  # (R, V)
        if self.chosen:
            return best_children(q, widths)
        q = q.cpu()
        tokens = self.draws.candidates(q, min(max(widths), q.shape[1]))  # (R, C)
        return as_proposal(tokens, q.gather(1, tokens), widths)._replace(q=q.unbind())

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits).cpu()  # (N+1, V)
        accepted: list[int] = []
        node = 0
        while True:
            children = tree.children(node)
            q = tree.q[children[0]] if children else None  # siblings were drawn from the same q
            child, left = self.test_children(children, tree.tokens, p[node], q)
            if child is None:  # all are rejected, or there are none
                return accepted, self.draws.draw(left[None]).item()
            accepted.append(child)
            node = child

    def test_children(
        self, children: list[int], tokens: Sequence[int], p: Tensor, q: Tensor | None
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
    """The target takes the token with the largest log p + g. The draft trusts half of g.

    q is only near p. By log q + g / 2 more tokens are accepted than by log q or by log q + g: that
    was measured (end of bench/README.md). Its softmax estimates how probable it is that the target,
    which sees all of g, takes a token.
    """

    exact = True

    def __init__(self, distribution: Distribution, draws: Draws) -> None:
        self.distribution = distribution
        self.draws = draws

    def propose(
        self, tree: Tree, nodes: Sequence[int], prediction: Prediction, widths: Sequence[int]
    ) -> Proposal:
        q = self.distribution(prediction.logits)  # (R, V)
        noise = self.draws.noise(tree.next_positions(nodes), like=q)  # (R, V)
        return best_children((q.log() + noise / 2).softmax(dim=-1), widths)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits)  # (N+1, V)
        noise = self.draws.noise(tree.next_positions(range(len(p))), like=p)  # (N+1, V)
        return follow(tree, p.log() + noise)


def best_children(probs: Tensor, widths: Sequence[int]) -> Proposal:
    """The widths[i] tokens with the largest ``probs`` (R, V) in row i, and these as estimates."""
    best, tokens = probs.topk(min(max(widths), probs.shape[1]))
    return as_proposal(tokens, best, widths)


def as_proposal(tokens: Tensor, probs: Tensor, widths: Sequence[int]) -> Proposal:
    """``tokens`` and their ``probs`` (R, C), up to widths[i] in row i; none of probability 0."""
    # One tensor, so that a GPU is waited for once. Numbers up to 2^24 are exact in float32.
    both = torch.stack((tokens.to(probs.dtype), probs))
    proposal = Proposal([], [])
    for token_row, prob_row, width in zip(*both.tolist(), widths):
        if isnan(prob_row[0]):
            raise ValueError(NOT_FINITE)
        possible = [(int(token), prob) for token, prob in zip(token_row, prob_row) if prob > 0]
        proposal.tokens.append([token for token, _ in possible[:width]])
        proposal.probs.append([prob for _, prob in possible[:width]])
    return proposal
