"""The verifiers: which path of a drafted tree is accepted, and the token the target adds to it.

Knows nothing about models or caches: pure functions of tensors. Each verifier takes a TokenTree of
N nodes and the target's N+1 rows: row 0 is about what follows the context, row i + 1 about what
follows node i. It starts at CONTEXT, or at a root that is accepted already, and returns ``(path,
bonus, draws)``: the accepted nodes; the bonus token, the target's own after them; and the numbers
drawn for the tests on the way. With N = 0 all of this is autoregressive decoding.

Lemma (exactness of drafts that adapt). Where tokens face tests: suppose that every decision about a
position (its exit, whether to stop, whether to go on) depends only on the draft's distributions, on
tokens drawn before it and on earlier steps, and that a drawn token is always sent. All of that is
given when the token is drawn. Conditioned on it, the token is drawn from q, or it is not drawn at
all; the verifier's theorem holds in both cases, and averaging over what was given keeps p. So a
chain may end because its last token was surprising; it may not lose that token.
"""

from typing import NamedTuple

import torch

from .tree import CONTEXT, is_chain


class Verdict(NamedTuple):
    """What a step accepts and emits, and how that was decided."""

    path: list[int]  # accepted nodes
    tokens: list[int]  # that are emitted: theirs and, unless it is the next root, the bonus token
    draws: list[torch.Tensor]
    p: torch.Tensor | None  # (N+1, V): the target's warped distributions; None at T = 0


def verify(n, tree, q, logits, sampling, roots=(CONTEXT,)) -> Verdict:
    """By the verifier that fits: ``verify_sampled`` for tokens drawn from q, else ``follow``.

    ``logits`` (N+1, V) are the target's behind n positions of context; ``q`` (R, V) or None, see
    proposal.py. Where the target gave ``roots`` each is accepted (extras/roots.py), and the longest
    path below one wins.
    """
    p = None if sampling.greedy else sampling.warp(logits)
    if p is None or q is None:
        if p is not None:  # the race at the position that each row is about
            positions = [n]
            for parent in tree.parents.tolist():
                positions.append(positions[parent + 1] + 1)
            logits = sampling.sampler.race(p, positions)
        choices = logits.argmax(dim=-1)  # (N+1,)
        found = [follow(tree, choices, root) for root in roots]
    elif is_chain(tree.parents) and roots == (CONTEXT,):
        found = [verify_chain(tree, p, q, sampling.sampler)]
    else:
        how = p, q, sampling.replacement, sampling.sampler
        found = [verify_sampled(tree, *how, root) for root in roots]
    path, bonus, draws = max(found, key=lambda walk: len(walk[0]))
    tokens = tree.tokens.tolist()
    return Verdict(path, [*(tokens[node] for node in path), bonus], draws, p)


def follow(tree, choices, root=CONTEXT):
    """Walk from ``root`` to the child with the target's choice, and on.

    ``choices`` (N+1,) are the tokens the target takes after the context and after each node: its
    argmax, or the winner of its race there. Either is fixed before anything is drafted, so the text
    is that of the target alone, whatever the tree is made of and whoever made it.

    >>> from s2d.tree import TokenTree
    >>> tree = TokenTree(torch.tensor([5, 6, 7]), torch.tensor([-1, -1, 1]))  # 5, or 6 and then 7
    >>> follow(tree, torch.tensor([6, 0, 7, 8]))[:2]
    ([1, 2], 8)
    """
    choices, tokens, parents = choices.tolist(), tree.tokens.tolist(), tree.parents.tolist()
    child_of = {key: node for node, key in reversed([*enumerate(zip(parents, tokens))])}
    path, node = [] if root == CONTEXT else [root], root
    while (node, choices[node + 1]) in child_of:
        node = child_of[node, choices[node + 1]]
        path.append(node)
    return path, choices[node + 1], []


def verify_sampled(tree, p, q, replacement, sampler, root=CONTEXT):
    """Recursive rejection sampling from ``root`` on: the output follows p.

    ``p`` (N+1, V) are the target's warped distributions. Row 0 of ``q`` is the distribution from
    which the context's children were drawn, row i + 1 that of node i's; a leaf needs none. The
    children of a node face Leviathan's test one after the other, in the order of their draws: x is
    accepted with probability min(1, p(x) / q(x)); otherwise the next one faces norm(relu(p - q))
    and, when drawn without ``replacement``, q without x. Each test leaves p behind (Chen et al.
    2023, arXiv 2302.01318, theorem 1), so all of them do: "recursive rejection sampling" (Jeon et
    al. 2024, arXiv 2402.14160); with replacement, "multi-step speculative sampling" (Miao et al.
    2023, arXiv 2305.09781). That breaks if candidates are sorted or dropped after they were drawn,
    or if q is not what they were drawn from, such as a softmax beside its argmax.
    """
    path, node, draws = [] if root == CONTEXT else [root], root, []
    while True:
        children = (tree.parents == node).nonzero().flatten().tolist()
        rest_p, rest_q = p[node + 1], q[node + 1] if children else None  # (V,) each
        for child in children:
            token = tree.tokens[child]
            if rest_q[token] == 0:
                continue  # never drawn: q had fewer tokens than the node has children
            accepted, number = sampler.flip((rest_p[token] / rest_q[token])[None])
            draws.append(number)
            if accepted:
                break  # the walk goes on below this child
            rest_p = residual(rest_p, rest_q)  # what this child's draw did not cover of p
            rest_q = rest_q if replacement else without(rest_q, token)
        else:  # no child is left: the bonus token comes from what is left of p
            return path, sampler.draw(rest_p[None]).item(), draws
        path.append(child)
        node = child


def verify_chain(tree, p, q, sampler):
    """As ``verify_sampled`` behind the context, for a chain: all tests at once.

    Each test is as good as if it were the only one; those after the first rejection do not count.
    """
    nodes = torch.arange(len(tree), device=p.device)  # in a chain, row i is about node i
    accepted, draws = sampler.flip(p[nodes, tree.tokens] / q[nodes, tree.tokens])
    count = [*accepted.tolist(), False].index(False)
    rest = residual(p[count], q[count]) if count < len(tree) else p[count]
    return list(range(count)), sampler.draw(rest[None]).item(), list(draws[: count + 1])


def residual(p, q):
    """The residual distribution norm(relu(p - q)) (V,).

    >>> residual(torch.tensor([0.5, 0.25, 0.25]), torch.tensor([0.25, 0.75, 0.0]))
    tensor([0.5000, 0.0000, 0.5000])
    """
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    # p <= q everywhere means p = q, where nothing is ever rejected; only rounding leads here.
    return left / total if total > 0 else p


def without(q, token):
    """q (V,) given that ``token`` is not drawn; all zero when there is no other."""
    rest = q.index_fill(0, token, 0.0)
    return rest / total if (total := rest.sum()) > 0 else rest
