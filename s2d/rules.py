"""Three rules: which tokens a draft proposes, and which of them are accepted.

Whether the output is the target's own depends on how tokens are proposed and on how they are
accepted, so a rule has both halves: ``propose`` chooses children for the nodes of a tree, and
``verify`` finds the path of the tree that is accepted, and one more token from the target, the
bonus token. In what follows, p is a distribution of the target and q one of the draft, both after
temperature, top-k and top-p.

- ``Greedy``, at temperature 0: the draft proposes its most probable tokens, and what is accepted is
  what the target would have written.
- ``SharedNoise``: draft and target meet the same noise at a position. So one seed gives one text,
  whatever drafts.
- ``Rejection``: the draft draws from q, and each token is accepted or rejected such that the text
  follows p, as in the papers.

``Greedy`` and ``SharedNoise`` are exact for any tree, however it was made. ``Rejection`` is exact
only if each token was really drawn from q, and is not dropped afterwards: see
``Rejection.test_children``. So it does not go with growing trees, which drop improbable nodes.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .mask import CONTEXT, is_chain
from .sampling import Draws, Noise, warp
from .tree import Tree


class Prediction(NamedTuple):
    """What an exit of the draft says about the tokens that follow R nodes.

    A column stands for a token. The K columns of an exit with layers are the vocabulary; exit 0
    has columns only for the tokens that it knows, and for a few others.
    """

    probs: Tensor  # (R, K) at temperature 1, without top-k and top-p; of exit 0, the sum is below 1
    confidence: float  # the largest of them
    ids: Tensor | None = None  # (K,) the tokens of the columns; None: column i is token i
    hidden: Tensor | None = None  # (R, hidden) hidden states at the exit, if it has layers

    def tokens(self, columns: Tensor) -> Tensor:
        """The tokens of ``columns``."""
        return columns if self.ids is None else self.ids.to(columns.device)[columns]

    def columns_of(self, rows: Tensor) -> Tensor:
        """Rows over the vocabulary (R, V) -> the same for the columns (R, K)."""
        return rows if self.ids is None else rows[:, self.ids]

    def over_vocabulary(self, rows: Tensor, vocab_size: int) -> Tensor:
        """Rows for the columns (R, K) -> the same over the vocabulary (R, V), 0 elsewhere."""
        if self.ids is None:
            return rows
        return rows.new_zeros(len(rows), vocab_size).index_copy(1, self.ids.to(rows.device), rows)


class Proposal(NamedTuple):
    """Children for each of R nodes: the best first, or in the order in which they were drawn.

    ``probs`` are estimates of how likely each child is to be accepted. By their product along a
    path a growing tree chooses its nodes; the verification never looks at them.
    """

    columns: Tensor  # (R, children) of the Prediction
    probs: Tensor  # (R, children)
    q: Sequence[Tensor] = ()  # R times (V,), what they were drawn from, if they are tested by it


class Rule(Protocol):
    """What a draft proposes, and what of it is accepted: one of the three rules below."""

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from.

        At temperature 0 nothing is drawn. The probabilities of temperature 1 are returned.
        """

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        """``count`` different children for each of R nodes.

        ``positions`` (R,) are those of the children in the text.
        """

    def verify(self, tree: Tree, logits: Tensor, start: int = CONTEXT) -> tuple[list[int], int]:
        """The accepted places of ``tree.sent``, from the top down, and the bonus token.

        ``logits`` (N+1, V) are the target's; the top of tree.py explains rows and places. The path
        starts after the place ``start``, by default the context (another: roots.py).
        An empty tree is plain decoding.
        """


def follow(
    tokens: list[int], parents: list[int], choices: Tensor, start: int = CONTEXT
) -> tuple[list[int], int]:
    """Walk to the child that is the target's choice, and on from there.

    ``choices`` (N+1,) are the tokens that the target takes after the context and after each place.
    What it takes after some text depends on that text and the seed (at temperature 0 on the text),
    not on the draft. So the output is that of the target alone, whatever the tree is made of.

    >>> follow([5, 6, 7], [-1, -1, 1], torch.tensor([6, 0, 7, 8]))  # 5, or 6 and then 7
    ([1, 2], 8)
    """
    choices = choices.tolist()
    child_of = {
        (parent, token): place for place, (parent, token) in enumerate(zip(parents, tokens))
    }
    accepted = []
    place = start
    while (place, choices[place + 1]) in child_of:
        place = child_of[place, choices[place + 1]]
        accepted.append(place)
    return accepted, choices[place + 1]


class Greedy:
    """Temperature 0: the most probable tokens."""

    def distribution(self, logits: Tensor) -> Tensor:
        return warp(logits, temperature=1.0)

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        probs, columns = prediction.probs.topk(count)
        return Proposal(columns, probs)

    def verify(self, tree: Tree, logits: Tensor, start: int = CONTEXT) -> tuple[list[int], int]:
        tokens, parents = tree.part(tree.sent)
        return follow(tokens, parents, logits.argmax(dim=-1), start)


class Sampled:
    """What ``SharedNoise`` and ``Rejection``, the rules above temperature 0, have in common."""

    def __init__(self, temperature: float, top_p: float, top_k: int) -> None:
        self.temperature = temperature
        self.top_p = top_p
        self.top_k = top_k

    def distribution(self, logits: Tensor) -> Tensor:
        return warp(logits, self.temperature, self.top_p, self.top_k)

    def draft_distribution(self, prediction: Prediction) -> Tensor:
        """q (R, K): the tokens that the draft knows, after temperature, top-k and top-p.

        If it knows none after a node, q is uniform over its columns there: any children will do.
        """
        knows_any = prediction.probs.sum(dim=-1, keepdim=True) > 0  # (R, 1)
        log_probs = torch.where(knows_any, prediction.probs, 1.0).log()
        return self.distribution(log_probs)


class SharedNoise(Sampled):
    """The target takes the token with the largest p / e, and the draft knows e (``Noise``)."""

    def __init__(self, temperature: float, top_p: float, top_k: int, noise: Noise) -> None:
        super().__init__(temperature, top_p, top_k)
        self.noise = noise

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        """The children are the tokens with the largest q / √e.

        q is only near p. As measured, more of these tokens are accepted than of those with the
        largest q, or the largest q / e. The estimate ``Proposal.probs``, a rough one, is a child's
        share of the sum of all scores. Tokens that exit 0 does not know have no score; instead, the
        probability that it leaves to them is added to the sum.
        """
        noise = prediction.columns_of(self.noise.at(positions))  # (R, K)
        known = prediction.probs.sum(dim=-1, keepdim=True)  # (R, 1); 1 for exits with layers
        scores = self.draft_distribution(prediction) * known / noise.sqrt()
        total = scores.sum(dim=-1, keepdim=True) + (1.0 - known).clamp(min=0.0)
        probs, columns = (scores / total).topk(count)
        return Proposal(columns, probs)

    def verify(self, tree: Tree, logits: Tensor, start: int = CONTEXT) -> tuple[list[int], int]:
        tokens, parents = tree.part(tree.sent)
        noise = self.noise.at(tree.next_positions([CONTEXT, *tree.sent]))  # (N+1, V)
        choices = (self.distribution(logits) / noise).argmax(dim=-1)
        accepted, bonus = follow(tokens, parents, choices, start)
        self.noise.forget(before=len(tree.context) + len(accepted) + 1)  # 1: the bonus token
        return accepted, bonus


class Tested(NamedTuple):
    """A test of rejection sampling."""

    place: int  # of the token that was tested
    p: Tensor  # (V,) what is left of p, after the tests of this node's earlier children
    q: Tensor  # (V,) what is left of q
    number: float  # drawn: accepted if below p / q of the token
    accepted: bool


class Rejection(Sampled):
    """Rejection sampling: a token x from q is accepted with probability min(1, p(x) / q(x)).

    Everything is computed on the CPU, where ``draws`` come from, so that this waits for a GPU once
    per level and once per pass. ``tests`` are those of the last tree.
    """

    def __init__(
        self, temperature: float, top_p: float, top_k: int, vocab_size: int, draws: Draws
    ) -> None:
        super().__init__(temperature, top_p, top_k)
        self.vocab_size = vocab_size
        self.draws = draws
        self.tests: list[Tested] = []

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        q = self.draft_distribution(prediction).cpu()  # (R, K)
        columns = self.draws.candidates(q, count)
        probs = q.gather(1, columns)
        return Proposal(columns, probs, prediction.over_vocabulary(q, self.vocab_size).unbind())

    def verify(self, tree: Tree, logits: Tensor, start: int = CONTEXT) -> tuple[list[int], int]:
        self.tests = []
        tokens, parents = tree.part(tree.sent)
        p = self.distribution(logits).cpu()  # (N+1, V)
        if start == CONTEXT and is_chain(parents):
            return self.verify_chain(tree, tokens, p)
        accepted = []
        place = start
        while children := [child for child, parent in enumerate(parents) if parent == place]:
            node = CONTEXT if place == CONTEXT else tree.sent[place]
            child, rest = self.test_children(children, tokens, p[place + 1], tree.q[node])
            if child is None:
                return accepted, self.draws.draw(rest[None]).item()
            accepted.append(child)
            place = child
        return accepted, self.draws.draw(p[place + 1][None]).item()

    def test_children(
        self, children: list[int], tokens: list[int], p: Tensor, q: Tensor
    ) -> tuple[int | None, Tensor]:
        """Which of a node's children is accepted, or None, and what is left of p (V,).

        ``children`` are places in the order in which their ``tokens`` were drawn from q (V,). Token
        x is accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes
        norm(relu(p - q)) for the next child; q loses x, since the next child was drawn without
        replacement. If all are rejected, the bonus token is drawn from what is left of p. The
        token that comes out of this follows p (Chen et al. 2023, arXiv 2302.01318, theorem 1; for
        several children Jeon et al. 2024, arXiv 2402.14160).

        That holds under two conditions. Each tested token was drawn from q: it breaks if tokens are
        the argmax of q, or are sorted or dropped once they are known. And no decision about a
        token, such as its exit or whether to draft it at all, depended on the token itself: a chain
        may end because its last token was surprising, but must send that token.
        """
        for child in children:
            token = tokens[child]
            if q[token] == 0:
                continue  # it was never drawn: q has fewer tokens than the node has children
            passed, numbers = self.draws.flip((p[token] / q[token])[None])
            self.tests.append(Tested(child, p, q, numbers.item(), passed.item()))
            if passed:
                return child, p
            p = residual(p, q)
            q = without(q, token)
        return None, p

    def verify_chain(self, tree: Tree, tokens: list[int], p: Tensor) -> tuple[list[int], int]:
        """As ``test_children`` for each node of a chain, but all at once, which is faster.

        It always draws N numbers, also for the tokens after one that is rejected.
        """
        count = len(tokens)
        if count == 0:
            return [], self.draws.draw(p).item()
        q = torch.stack([tree.q[node] for node in [CONTEXT, *tree.sent[:-1]]])  # (N, V)
        index = torch.tensor(tokens, device="cpu")[:, None]
        ratios = (p[:-1].gather(1, index) / q.gather(1, index))[:, 0]  # (N,)
        passed, numbers = self.draws.flip(ratios)
        # The first that is rejected ends the chain: with [True, True, False, True], two are kept.
        kept = int(passed.cumprod(dim=0).sum())
        for place, number in enumerate(numbers[: kept + 1].tolist()):
            self.tests.append(Tested(place, p[place], q[place], number, place < kept))
        rest = p[kept] if kept == count else residual(p[kept], q[kept])
        return list(range(kept)), self.draws.draw(rest[None]).item()


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
