"""Rules: which tokens a draft proposes, and which of them are accepted.

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
- ``TargetDraws``: rejection sampling for trees that drop nodes after they were proposed. The target
  draws from p, and the token is accepted if the tree has it.

Any object with the members of ``Rule`` can be given to ``generate``.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from .mask import CONTEXT, is_chain
from .sampling import Draws, Noise, draft_scores, warp
from .tree import Tree


class Prediction(NamedTuple):
    """What an exit of the draft says about the tokens that follow R nodes.

    An exit with layers has a column for each token of the vocabulary; but none for the last ones,
    if the draft model's vocabulary is smaller than the target's. Exit 0 knows few tokens, and names
    those that its columns stand for. ``gather``, ``scatter`` and ``to_lists`` hide the difference.
    """

    probs: Tensor  # (R, K) at temperature 1, without top-k and top-p; the sum may be below 1
    confidence: float  # the largest probability in any row; 0 if nothing is known
    tokens: Tensor | None = None  # (K,) those of the columns; None: column i is token i

    def gather(self, rows: Tensor) -> Tensor:
        """Of rows over the vocabulary (R, V), the columns of this prediction (R, K)."""
        if self.tokens is None:
            return rows[:, : self.probs.shape[1]]
        return rows[:, self.tokens]

    def scatter(self, rows: Tensor, vocab_size: int) -> Tensor:
        """Rows for the columns (R, K) -> rows over the vocabulary (R, V), 0 elsewhere."""
        if self.tokens is None:
            return F.pad(rows, (0, vocab_size - rows.shape[1]))
        wide = rows.new_zeros(len(rows), vocab_size)
        return wide.index_copy(1, self.tokens.to(rows.device), rows)

    def to_lists(self, columns: Tensor, probs: Tensor) -> tuple[list[list[int]], list[list[float]]]:
        """The tokens of ``columns`` (R, C), and their ``probs`` (R, C), as lists.

        Those with probability 0 are left out. A GPU is waited for once.
        """
        tokens = columns if self.tokens is None else self.tokens.to(columns.device)[columns]
        both = torch.stack((tokens.to(probs.dtype), probs))  # float32 or better: exact to id 2^24
        token_rows = []
        prob_rows = []
        for all_tokens, all_probs in zip(*both.tolist()):
            token_rows.append([int(token) for token, prob in zip(all_tokens, all_probs) if prob])
            prob_rows.append([prob for prob in all_probs if prob])
        return token_rows, prob_rows


class Proposal(NamedTuple):
    """Children for each of R nodes: the best first, or in the order in which they were drawn.

    ``probs`` are estimates of how likely each child is to be accepted after its parent. By their
    product along a path a tree grows and is pruned; the verification never looks at them.
    """

    tokens: list[list[int]]  # R lists, of different lengths where few tokens are known
    probs: list[list[float]]  # likewise
    q: Sequence[Tensor] = ()  # R times (V,), what they were drawn from, if they are tested by it


class Rule(Protocol):
    """What a draft proposes, and what of it is accepted."""

    exact: bool  # whether the text is the target's own, or follows its distribution

    def distribution(self, logits: Tensor) -> Tensor:
        """Logits (..., V) -> the probabilities (..., V) that tokens are drawn from.

        At temperature 0 nothing is drawn, and it returns those of temperature 1, for roots and for
        the pages that show them.
        """

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        """Up to ``count`` different children for each of R nodes.

        ``positions`` (R,) are those of the children in the text.
        """

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        """The accepted nodes of ``tree``, from the top down, and the bonus token.

        ``logits`` (N+1, V) are the target's; the top of tree.py explains nodes and rows. An empty
        tree is plain decoding.
        """


def follow(
    tokens: list[int], parents: list[int], choose: Callable[[int], int]
) -> tuple[list[int], int]:
    """Walk to the child that is the target's choice, and on from there.

    ``choose`` gives the token that the target takes after a node, or after CONTEXT. It depends on
    the text, and on the seed or on what is drawn, but not on the draft. So the output is that of
    the target alone, whatever the tree is made of.

    >>> choices = {CONTEXT: 6, 1: 7, 2: 8}
    >>> follow([5, 6, 7], [CONTEXT, CONTEXT, 1], choices.get)  # 5, or 6 and then 7
    ([1, 2], 8)
    """
    child_of = {(parent, token): node for node, (parent, token) in enumerate(zip(parents, tokens))}
    accepted: list[int] = []
    node = CONTEXT
    token = choose(node)
    while (node, token) in child_of:
        node = child_of[node, token]
        accepted.append(node)
        token = choose(node)
    return accepted, token


class Greedy:
    """Temperature 0: the most probable tokens."""

    exact = True

    def distribution(self, logits: Tensor) -> Tensor:
        return warp(logits, temperature=1.0)

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        return best_children(prediction, prediction.probs, count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        choices = logits.argmax(dim=-1).tolist()  # (N+1,)
        return follow(tree.tokens, tree.parents, lambda node: choices[node + 1])


def best_children(prediction: Prediction, scores: Tensor, count: int) -> Proposal:
    """The ``count`` children with the largest ``scores`` (R, K), which are their estimates too."""
    probs, columns = scores.topk(min(count, scores.shape[1]))
    return Proposal(*prediction.to_lists(columns, probs))


class Sampled:
    """What the rules above temperature 0 have in common.

    They do not know how logits become a ``distribution``, by temperature and top-k for example.
    """

    exact = True

    def __init__(self, distribution: Callable[[Tensor], Tensor]) -> None:
        self.distribution = distribution

    def draft_distribution(self, prediction: Prediction) -> Tensor:
        """q (R, K): the tokens that the draft knows, after temperature, top-k and top-p.

        A row sums to 1, however little the draft knows; if it knows nothing after a node, to 0.
        """
        # The logarithms of probabilities are logits. Those of a row of zeros would give NaN.
        knows_any = prediction.probs.sum(dim=-1, keepdim=True) > 0  # (R, 1)
        log_probs = torch.where(knows_any, prediction.probs, 1.0).log()
        return self.distribution(log_probs) * knows_any


class SharedNoise(Sampled):
    """The target takes the token with the largest p / e, and the draft knows e (``Noise``)."""

    def __init__(self, distribution: Callable[[Tensor], Tensor], noise: Noise) -> None:
        super().__init__(distribution)
        self.noise = noise

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        """The children are the tokens with the largest ``draft_scores``.

        The estimate of a child is its share of the sum of all scores. It is rough, and not derived.
        Tokens that exit 0 does not know have no score; instead, the probability that it leaves to
        them is added to the sum.
        """
        noise = prediction.gather(self.noise.at(positions))  # (R, K)
        known = prediction.probs.sum(dim=-1, keepdim=True)  # (R, 1); 1 for exits with layers
        scores = draft_scores(self.draft_distribution(prediction) * known, noise)
        total = scores.sum(dim=-1, keepdim=True) + (1.0 - known).clamp(min=0.0)
        return best_children(prediction, scores / total, count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        nodes = [CONTEXT, *range(len(tree.tokens))]
        noise = self.noise.at(tree.next_positions(nodes))  # (N+1, V)
        choices = (self.distribution(logits) / noise).argmax(dim=-1).tolist()
        accepted, bonus = follow(tree.tokens, tree.parents, lambda node: choices[node + 1])
        # A RootsDecoder asks for the noise of the bonus token once more.
        self.noise.forget(before=len(tree.context) + len(accepted))
        return accepted, bonus


class TargetDraws(Sampled):
    """The next token is drawn from p alone, and accepted while the tree has it.

    For trees that drop improbable nodes, to which ``Rejection`` does not apply. This is EAGLE-2's
    verification (Li et al. 2024, arXiv 2406.16858), put briefly. There the children, which were
    chosen and not drawn, are tried one after another, each with its share of what is left of p. To
    see which of them is accepted, if any, is to draw one token from p: child i is accepted with
    probability p_i.
    """

    def __init__(self, distribution: Callable[[Tensor], Tensor], draws: Draws) -> None:
        super().__init__(distribution)
        self.draws = draws

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        known = prediction.probs.sum(dim=-1, keepdim=True)  # (R, 1); 1 for exits with layers
        return best_children(prediction, self.draft_distribution(prediction) * known, count)

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits).cpu()  # (N+1, V)

        def draw(node: int) -> int:
            return self.draws.draw(p[node + 1][None]).item()

        return follow(tree.tokens, tree.parents, draw)


class Rejection(Sampled):
    """Rejection sampling: a token x from q is accepted with probability min(1, p(x) / q(x)).

    The text follows p under two conditions. Each tested token was drawn from q: it breaks if tokens
    are the argmax of q, or are sorted or dropped once they are known. And no decision about a
    token, such as its exit or whether to draft it at all, depended on the token itself: a chain may
    end because its last token was surprising, but must send that token.

    Everything is computed on the CPU, where ``draws`` come from, so that this waits for a GPU once
    per level and once per pass.
    """

    def __init__(
        self, distribution: Callable[[Tensor], Tensor], vocab_size: int, draws: Draws
    ) -> None:
        super().__init__(distribution)
        self.vocab_size = vocab_size
        self.draws = draws

    def propose(self, prediction: Prediction, count: int, positions: list[int]) -> Proposal:
        q = self.draft_distribution(prediction).cpu()  # (R, K)
        # Of a row of zeros, after which nothing is known, ``to_lists`` leaves out what is drawn.
        columns = self.draws.candidates(q, min(count, q.shape[1]))
        tokens, probs = prediction.to_lists(columns, q.gather(1, columns))
        return Proposal(tokens, probs, prediction.scatter(q, self.vocab_size).unbind())

    def verify(self, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
        p = self.distribution(logits).cpu()  # (N+1, V)
        if is_chain(tree.parents):
            return self.verify_chain(tree, p)
        accepted: list[int] = []
        node = CONTEXT
        while children := tree.children(node):
            child, rest = self.test_children(children, tree.tokens, p[node + 1], tree.q[node])
            if child is None:
                return accepted, self.draws.draw(rest[None]).item()
            accepted.append(child)
            node = child
        return accepted, self.draws.draw(p[node + 1][None]).item()

    def test_children(
        self, children: list[int], tokens: list[int], p: Tensor, q: Tensor
    ) -> tuple[int | None, Tensor]:
        """Which of a node's children is accepted, or None, and what is left of p (V,).

        ``children`` are nodes in the order in which their ``tokens`` were drawn from q (V,). Token
        x is accepted with probability min(1, p(x) / q(x)). If it is rejected, p becomes
        norm(relu(p - q)) for the next child; q loses x, since the next child was drawn without
        replacement. If all are rejected, the bonus token is drawn from what is left of p. The
        token that comes out of this follows p (Chen et al. 2023, arXiv 2302.01318, theorem 1; for
        several children Jeon et al. 2024, arXiv 2402.14160).
        """
        for child in children:
            token = tokens[child]
            if self.draws.flip((p[token] / q[token])[None]):
                return child, p
            p = residual(p, q)
            q = without(q, token)
        return None, p

    def verify_chain(self, tree: Tree, p: Tensor) -> tuple[list[int], int]:
        """As ``test_children`` for each node of a chain, but all at once, which is faster.

        It always draws N numbers, also for the tokens after one that is rejected.
        """
        count = len(tree.tokens)
        if count == 0:
            return [], self.draws.draw(p).item()
        q = torch.stack([tree.q[parent] for parent in tree.parents])  # (N, V)
        index = torch.tensor(tree.tokens, device="cpu")[:, None]
        ratios = (p[:-1].gather(1, index) / q.gather(1, index))[:, 0]  # (N,)
        passed = self.draws.flip(ratios)
        # The first that is rejected ends the chain: with [True, True, False, True], two are kept.
        kept = int(passed.cumprod(dim=0).sum())
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
