"""Rules: which tokens a draft proposes, and which of them are accepted.

Both halves decide together whether the text is the target's own, so a rule has both: ``propose``
chooses children for nodes of a tree, and ``verify`` finds the path of the tree that is accepted,
and one more token from the target, the bonus token. In this file, p is a distribution of the target
and q one of the draft, both after temperature, top-k and top-p.

- ``Greedy``, at temperature 0: the draft proposes its most probable tokens. A token is accepted if
  the target would have written it.
- ``SharedNoise``: draft and target meet the same noise at a position. So one seed gives one text,
  whatever drafts.
- ``Rejection``: the draft draws from q. Each token is accepted or rejected in such a way that the
  text follows p, as in the papers.
- ``TargetDraws``: plain sampling, for trees that leave nodes out after they were proposed. The
  target draws from p, and the token is accepted if the tree has it.

Any object with the members of ``Rule`` can be given to ``generate``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from .sampling import Draws, Noise, draft_scores
from .tree import Tree


class Prediction(NamedTuple):
    """What an exit of the draft says about the tokens that follow R nodes."""

    probs: Tensor  # (R, V) at temperature 1, without top-k and top-p
    confidence: float  # the largest probability of a token that the exit knows; 0: it knows none
    hidden: Tensor | None = None  # (R, hidden): what the LM head made ``probs`` of, if it did


class Proposal(NamedTuple):
    """Children for each of R nodes: the best first, or in the order in which they were drawn.

    ``probs`` are estimates of the probability that a child is accepted after its parent. A tree
    grows and is pruned by their product along a path. The verification never looks at them.
    """

    tokens: list[list[int]]  # R lists; some are shorter where few tokens are possible
    probs: list[list[float]]  # likewise
    q: Sequence[Tensor] = ()  # R times (V,): what they were drawn from, if ``verify`` needs it


@runtime_checkable
class Rule(Protocol):
    """What a draft proposes, and what of it is accepted: one below, or an object of your own."""

    exact: bool  # whether the text is the target's own, or follows its distribution

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        """Up to ``count`` different children for each of R nodes.

        ``positions`` (R,) are the children's positions in the text.
        """

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """The accepted nodes of ``tree``, from the top down and without the root; the bonus token.

        Row i of ``logits`` (N+1, V) is what the target says after node i. A tree of the root alone
        is plain decoding.
        """


def follow(tree: Tree, choose: Callable[[int], int]) -> tuple[list[int], int]:
    """Walk from the root to the child that is the target's choice, and on from there.

    ``choose(node)`` is the token that the target takes after a node. It depends on the text, and on
    the seed or on what is drawn, but not on the draft. So the text is the target's own, whatever
    the tree is made of. An example: below the root are node 1, with token 5, and node 2, with token
    6; below node 2 is node 3, with token 7. If the target chooses 6, then 7, then 8, the nodes 2
    and 3 are accepted, and 8 is the bonus token.
    """
    child_of = {}  # (parent, token) -> node
    for node, parent in enumerate(tree.parents):
        child_of[parent, tree.tokens[node]] = node
    accepted: list[int] = []
    node = 0
    token = choose(node)
    while (node, token) in child_of:
        node = child_of[node, token]
        accepted.append(node)
        token = choose(node)
    return accepted, token


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


def best_children(scores: Tensor, count: int) -> Proposal:
    """The ``count`` tokens with the largest ``scores`` (R, V), which are their estimates too."""
    probs, tokens = scores.topk(min(count, scores.shape[1]))
    return Proposal(*as_lists(tokens, probs))


class Greedy:
    """Temperature 0: the most probable tokens."""

    exact = True

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        return best_children(prediction.probs, count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        choices = logits.argmax(dim=-1).tolist()  # (N+1,)
        return follow(tree, choices.__getitem__)


class Sampled:
    """What the rules above temperature 0 have in common: how logits become a ``distribution``."""

    exact = True

    def __init__(self, distribution: Callable[[Tensor], Tensor]) -> None:
        self.distribution = distribution

    def q(self, prediction: Prediction) -> Tensor:
        """The draft's distributions (R, V): its logits are log(probs), up to a constant."""
        return self.distribution(prediction.probs.log())


class SharedNoise(Sampled):
    """The target takes the token with the largest p / e. The draft knows e as well (``Noise``)."""

    def __init__(self, distribution: Callable[[Tensor], Tensor], noise: Noise) -> None:
        super().__init__(distribution)
        self.noise = noise

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        """The children are the tokens with the largest ``draft_scores``.

        A child's estimate is its share of the sum of all scores. This is rough, and not derived.
        """
        scores = draft_scores(self.q(prediction), self.noise.at(positions))  # (R, V)
        return best_children(scores / scores.sum(dim=-1, keepdim=True), count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        noise = self.noise.at(tree.next_positions(range(len(tree.tokens))))  # (N+1, V)
        choices = (self.distribution(logits) / noise).argmax(dim=-1).tolist()
        accepted, bonus = follow(tree, choices.__getitem__)
        # With init="target", the next step asks for the bonus token's row again.
        self.noise.forget(before=len(tree.context) + len(accepted))
        return accepted, bonus


class TargetDraws(Sampled):
    """The next token is drawn from p alone, and accepted while the tree has it.

    ``Rejection`` does not apply to trees that leave improbable nodes out, as their children are
    chosen and not drawn. So the target draws from p, and child x is accepted with probability p(x),
    as in EAGLE-2 (Li et al. 2024, arXiv 2406.16858).
    """

    def __init__(self, distribution: Callable[[Tensor], Tensor], draws: Draws) -> None:
        super().__init__(distribution)
        self.draws = draws

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        return best_children(self.q(prediction), count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits).cpu()  # (N+1, V)
        return follow(tree, lambda node: self.draws.draw(p[node][None]).item())


class Rejection(Sampled):
    """Rejection sampling: a token x from q is accepted with probability min(1, p(x) / q(x)).

    The text follows p under three conditions:

    1. Each tested token was drawn from q. It is not the argmax of q, for example.
    2. The exit is chosen before a token is drawn from its q.
    3. Every token that was drawn is sent. A chain may end because its last token was improbable,
       but that token is sent as well.

    Everything is computed on the CPU, where ``draws`` come from.
    """

    def __init__(self, distribution: Callable[[Tensor], Tensor], draws: Draws) -> None:
        super().__init__(distribution)
        self.draws = draws

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        q = self.q(prediction).cpu()  # (R, V)
        tokens = self.draws.candidates(q, min(count, q.shape[1]))
        return Proposal(*as_lists(tokens, q.gather(1, tokens)), q.unbind())

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits).cpu()  # (N+1, V)
        accepted: list[int] = []
        node = 0
        while children := tree.children(node):
            child, rest = self.test_children(children, tree.tokens, p[node], tree.q[node])
            if child is None:
                return accepted, self.draws.draw(rest[None]).item()
            accepted.append(child)
            node = child
        return accepted, self.draws.draw(p[node][None]).item()

    def test_children(
        self, children: list[int], tokens: list[int], p: Tensor, q: Tensor
    ) -> tuple[int | None, Tensor]:
        """Which of a node's children is accepted, or None, and what is left of p (V,).

        ``children`` are nodes in the order in which their tokens were drawn from q (V,). Token x is
        accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes
        norm(relu(p - q)) for the next child, and q loses x, as the next child was drawn without
        replacement. If all are rejected, the bonus token is drawn from what is left of p. The token
        that comes out of this follows p (Chen et al. 2023, arXiv 2302.01318, theorem 1; for several
        children Jeon et al. 2024, arXiv 2402.14160).
        """
        for child in children:
            token = tokens[child]
            if self.draws.flip((p[token] / q[token]).item()):
                return child, p
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
