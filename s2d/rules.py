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

A rule of your own is given to ``generate`` as a function (distribution, draws) -> ``Rule``, such as
its class.
"""

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .devices import to_device
from .sampling import NO_TOKEN, NOT_FINITE, Distribution, Draws
from .tree import Node, Tree


class Prediction(NamedTuple):
    """What an exit of the draft says about the tokens that follow R nodes."""

    logits: Tensor  # (R, V)
    # How sure the exit is: a tensor of one number, or a number; usually the largest probability at
    # temperature 1. At 0 the exit knows nothing: the next exit is asked, and after the last
    # one drafting ends.
    confidence: Tensor | float
    hidden: Tensor | None = None  # (R, hidden): before the norm and the LM head, if there are any


class Proposal(NamedTuple):
    """C children for each of R nodes: the best first, or in the order in which they were drawn."""

    tokens: Tensor  # (R, C)
    # (R, C): how probable is it that a child is accepted after its parent? 0: there is no child.
    # For a drawn child, q is taken. Drafting stops and trees grow by these estimates. The
    # verification never uses them.
    estimates: Tensor
    # (R, V): what the children were drawn from. None: they are chosen. A rule never mixes both.
    q: Tensor | None = None


class Rule(Protocol):
    """What a draft proposes, and what of it is accepted."""

    exact: bool  # whether the text, or its distribution, is the same as without a draft

    def propose(
        self, tree: Tree, nodes: list[Node], prediction: Prediction, width: int
    ) -> Proposal:
        """Up to ``width`` different children for each of R ``nodes``, by an exit's ``prediction``.

        If the exit is not confident enough, the children are thrown away, and the next exit is
        asked about the same nodes.
        """

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[Node], int]:
        """(accepted nodes, bonus token): a path from the root down, and what comes after it.

        Row i of ``logits`` (N+1, V) is what the target says after ``tree.nodes[i]``. A tree of the
        root alone is plain decoding.
        """


def best_children(probs: Tensor, width: int) -> Proposal:
    """The tokens with the largest ``probs`` (R, V), and these as estimates."""
    estimates, tokens = probs.topk(min(width, probs.shape[1]))
    return Proposal(tokens, estimates)


def follow(tree: Tree, scores: Tensor) -> tuple[list[Node], int]:
    """Walk from the root to the child that is the target's choice, and on from there.

    The target's choice after a node is the token with the largest of the ``scores`` (N+1, V) in its
    row. It depends on the text and on the seed, but not on the draft. So the text is the target's
    own, whatever the tree is made of. An example: below the root are the tokens 5 and 6, and below
    6 is 7. The target's choice is 6 after the root, 7 after 6, and 8 after 7. Then the nodes of 6
    and 7 are accepted, and 8 is the bonus token.
    """
    best, tokens = scores.max(dim=-1)  # (N+1,)
    choices = torch.where(best.isfinite(), tokens, NO_TOKEN).tolist()
    choice = dict(zip(tree.nodes, choices))
    child = {(node.parent, node.token): node for node in tree.nodes}
    accepted: list[Node] = []
    node = tree.root
    while (node, choice[node]) in child:
        node = child[node, choice[node]]
        accepted.append(node)
    if choice[node] == NO_TOKEN:
        raise ValueError(NOT_FINITE)
    return accepted, choice[node]


class Greedy:
    """Temperature 0: the most probable tokens. Nothing is drawn."""

    exact = True

    def __init__(self, distribution: Distribution, draws: Draws) -> None:
        pass

    def propose(
        self, tree: Tree, nodes: list[Node], prediction: Prediction, width: int
    ) -> Proposal:
        return best_children(Distribution(temperature=1.0)(prediction.logits), width)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[Node], int]:
        return follow(tree, logits)


class Rejection:
    """Rejection sampling, as in the papers.

    The text follows p under four conditions:

    1. Each tested token was drawn from q. It is not the argmax of q, for example.
    2. The exit is chosen without a look at the tokens that were drawn there.
    3. Every token that was drawn at the chosen exit is sent. To leave out a drawn token because it
       is improbable would change the distribution of the others.
    4. The random numbers that test a token are independent of those that drew it.

    A growing tree leaves nodes out, which breaks the third condition. So its children are chosen
    and not drawn: they are the tokens with the largest q. A chosen token x counts as drawn from a
    distribution that has only x: it is accepted with probability p(x), and what is left of p is p
    without x.
    """

    exact = True

    def __init__(self, distribution: Distribution, draws: Draws) -> None:
        self.distribution = distribution
        self.draws = draws

    def propose(
        self, tree: Tree, nodes: list[Node], prediction: Prediction, width: int
    ) -> Proposal:
        q = self.distribution(prediction.logits)  # (R, V)
        if tree.shape.prunes:
            return best_children(q, width)
        tokens = self.draws.candidates(q, min(width, q.shape[1]))  # (R, C)
        return Proposal(tokens, q.gather(1, tokens), q)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[Node], int]:
        """A GPU is waited for twice: for the chances of all nodes, and for the bonus token."""
        chances, left = test_children(tree.nodes, self.distribution(logits))
        accepted: list[Node] = []
        node = tree.root
        while True:
            tests = (child for child in tree.children(node) if self.draws.flip(chances[child]))
            child = next(tests, None)  # the first one that is accepted
            if child is None:
                return accepted, self.draws.draw(left[node][None]).item()
            accepted.append(child)
            node = child


def test_children(nodes: list[Node], p: Tensor) -> tuple[dict[Node, float], dict[Node, Tensor]]:
    """With which chance a node is accepted, if its parent was and its older siblings were not.

    Row i of p (N+1, V) is about the token that follows nodes[i]. Also returns, by node, what is
    left of p (V,) when all of its children are rejected: the bonus token is drawn from that.

    Siblings are in the order in which they were drawn from one q. A token x is accepted with
    probability min(1, p(x) / q(x)). If it is rejected, p becomes norm(relu(p - q)) for the next
    child, and q loses x, as the next child was drawn without replacement. The token that comes out
    of this follows p (Chen et al. 2023, arXiv 2302.01318, theorem 1; for several children Jeon et
    al. 2024, arXiv 2402.14160). All first children are computed together, then all second ones.
    """
    left = dict(zip(nodes, p))
    families: dict[Node, list[Node]] = {}  # parent -> its children
    for child in nodes[1:]:
        families.setdefault(child.parent, []).append(child)
    drawn_from = {parent: children[0].q for parent, children in families.items()}
    tested: list[Node] = []
    chances: list[Tensor] = []
    rank = 0
    while children := [family[rank] for family in families.values() if rank < len(family)]:
        tokens = to_device([[child.token] for child in children], p.device)  # (R, 1)
        p = torch.stack([left[child.parent] for child in children])  # (R, V)
        if children[0].q is None:  # chosen: as if from a distribution that has only this token
            q = torch.zeros_like(p).scatter(1, tokens, 1.0)
        else:
            q = torch.stack([drawn_from[child.parent] for child in children])
        tested += children
        chances.append(p.gather(1, tokens) / q.gather(1, tokens))
        for child, p_left, q_left in zip(children, residual(p, q), without(q, tokens)):
            left[child.parent] = p_left
            drawn_from[child.parent] = q_left
        rank += 1
    numbers = torch.cat(chances)[:, 0].tolist() if chances else []
    return dict(zip(tested, numbers)), left


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The residual distributions norm(relu(p - q)) (R, V)."""
    left = (p - q).clamp(min=0.0)
    total = left.sum(dim=-1, keepdim=True)
    # p <= q everywhere means p = q, and then nothing is ever rejected; only rounding leads here.
    return torch.where(total > 0, left / total, p)


def without(q: Tensor, tokens: Tensor) -> Tensor:
    """q (R, V) given that the ``tokens`` (R, 1) are not drawn; all zero if there is no other."""
    rest = q.scatter(1, tokens, 0.0)
    total = rest.sum(dim=-1, keepdim=True)
    return torch.where(total > 0, rest / total, rest)


class SharedNoise:
    """Gumbel noise that target and draft share.

    This is exact, as the target's choice never looks at the draft. q is only near p. By log q + g/2
    more tokens are accepted than by log q or by log q + g: that was measured (end of
    bench/README.md). Its softmax estimates how probable it is that the target takes a token.
    """

    exact = True

    def __init__(self, distribution: Distribution, draws: Draws) -> None:
        self.distribution = distribution
        self.draws = draws

    def propose(
        self, tree: Tree, nodes: list[Node], prediction: Prediction, width: int
    ) -> Proposal:
        q = self.distribution(prediction.logits)  # (R, V)
        noise = self.draws.noise(tree.next_positions(nodes), like=q)  # (R, V)
        return best_children((q.log() + noise / 2).softmax(dim=-1), width)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[Node], int]:
        p = self.distribution(logits)  # (N+1, V)
        noise = self.draws.noise(tree.next_positions(tree.nodes), like=p)  # (N+1, V)
        return follow(tree, p.log() + noise)
