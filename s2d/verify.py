"""The verifiers: which path of a drafted tree is accepted, and the token the target adds to it.

Functions of a tree of N nodes (lists of ``tokens`` and ``parents``) and the target's N+1 rows:
row 0 is about the token after the context, row i + 1 about the one after node i. Each returns the
accepted path of nodes and the bonus token, the target's own after it. N = 0 is plain decoding.

A draft that adapts stays exact under rejection sampling on two conditions. What is decided about a
position (its exit, whether to draft it at all) may depend on all that is known before its token is
drawn, but not on that token; and a token that was drawn is always sent. Given what was known, the
token is then a draw from q, for which the theorem of ``verify_sampled`` holds. So a chain may end
because its last token was surprising, but must not drop that token.
"""

import torch
from torch import Tensor

from .sampling import Sampling
from .tree import CONTEXT, is_chain


def verify(n: int, tokens, parents, q: Tensor | None, logits: Tensor, sampling: Sampling):
    """Choose the verifier, for a tree behind n positions and the target's ``logits`` (N+1, V).

    ``q`` (R, V): what tokens were drawn from; None, without tokens too: noise or argmax decides.
    """
    if q is not None:
        p = sampling.warp(logits)
        if is_chain(parents):
            return verify_chain(tokens, p, q, sampling)
        return verify_sampled(tokens, parents, p, q, sampling)
    positions = [n]
    for parent in parents:
        positions.append(positions[parent + 1] + 1)
    return follow(tokens, parents, sampling.choices(logits, positions))


def follow(tokens: list[int], parents: list[int], choices: Tensor) -> tuple[list[int], int]:
    """Walk to the child that is the target's choice, and on from there.

    ``choices`` (N+1,) are the tokens that the target takes after the context and after each node.
    What it takes after some text depends on that text and the seed (at T = 0 on the text), not on
    the draft. So the output is that of the target alone, whatever the tree is made of.

    >>> follow([5, 6, 7], [-1, -1, 1], torch.tensor([6, 0, 7, 8]))  # 5, or 6 and then 7
    ([1, 2], 8)
    """
    choices = choices.tolist()
    child_of = {key: node for node, key in enumerate(zip(parents, tokens))}
    path, node = [], CONTEXT
    while (node, choices[node + 1]) in child_of:
        node = child_of[node, choices[node + 1]]
        path.append(node)
    return path, choices[node + 1]


def verify_sampled(tokens: list[int], parents: list[int], p: Tensor, q: Tensor, sampling: Sampling):
    """Recursive rejection sampling: the output follows p.

    ``p`` (N+1, V) are the target's distributions. Row 0 of ``q`` is the one from which the
    context's children were drawn, row i + 1 that of node i's; leaves need none. The children of a
    node are tested in the order of their draws: x is accepted with probability min(1, p(x) / q(x)).
    Otherwise the next one is tested with norm(relu(p - q)) as p and, since it was drawn without
    replacement, with q without x as q. Each test keeps the output's law p (Chen et al. 2023, arXiv
    2302.01318, theorem 1; for several children Jeon et al. 2024, arXiv 2402.14160). That breaks if
    candidates are sorted or dropped after the draw, or were not drawn from q (such as its argmax).
    """
    path, node = [], CONTEXT
    while True:
        children = [child for child, parent in enumerate(parents) if parent == node]
        rest_p = p[node + 1]  # (V,)
        rest_q = q[node + 1] if children else None
        for child in children:
            token = tokens[child]
            if rest_q[token] == 0:
                continue  # never drawn: q had fewer tokens than the node has children
            if sampling.accept((rest_p[token] / rest_q[token])[None]):
                break  # the walk continues below this child
            rest_p = residual(rest_p, rest_q)
            rest_q = without(rest_q, token)
        else:  # no child is accepted: the bonus token comes from what is left of p
            return path, sampling.draw(rest_p[None]).item()
        path.append(child)
        node = child


def verify_chain(tokens: list[int], p: Tensor, q: Tensor, sampling: Sampling):
    """As ``verify_sampled`` for a chain, with all tests at once."""
    index = torch.tensor(tokens, dtype=torch.long, device=p.device)
    nodes = torch.arange(len(tokens), device=p.device)  # row i of p and q tests node i
    accepted = sampling.accept(p[nodes, index] / q[nodes, index])
    count = int(accepted.cumprod(dim=0).sum())  # those after a rejection do not count
    rest = p[count] if count == len(tokens) else residual(p[count], q[count])
    return list(range(count)), sampling.draw(rest[None]).item()


def residual(p: Tensor, q: Tensor) -> Tensor:
    """The residual distribution norm(relu(p - q)) (V,)."""
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    # p <= q everywhere means p = q, where nothing is ever rejected; only rounding leads here.
    return left / total if total > 0 else p


def without(q: Tensor, token: int) -> Tensor:
    """q (V,) given that ``token`` is not drawn; all zero where there is no other."""
    rest = q.clone()
    rest[token] = 0.0
    total = rest.sum()
    return rest / total if total > 0 else rest
