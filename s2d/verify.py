"""Verifiers: which path of a drafted tree stays, and the token the target adds to it. Pure functions of tensors.

Each takes a TokenTree of N nodes and the target's rows for the context and for every node, N+1 in all: row 0 is about
what follows the context, row i + 1 about what follows node i. It returns ``(path, extra, draws)``: the accepted nodes from
the root (or ``start``) down, a list, the token after them, and the numbers that were drawn for each test on the way. A chain is
a tree with one child a node; with N = 0 all of this is autoregressive decoding.
"""

import torch


def follow(tree, choices, start=-1):
    """Walk from ``start``, the context or a node, to the child that carries the target's choice, as far as there is one.

    ``choices`` (N+1,) are the tokens the target would take after the context and after each node. Its argmax there
    gives greedy decoding, token by token. One token sampled there from p gives p, whatever deterministic candidates the
    tree is made of: it is rejection sampling with a one-hot q (Leviathan et al. 2023, arXiv 2211.17192, theorem 1). That
    breaks if the tree was built with a look at the choices, or if the walk prefers one of several equal siblings for
    what comes after it; here it always takes the first.
    """
    chosen = (tree.tokens == choices[tree.parents + 1]).nonzero().flatten()
    path, node = [start][start < 0 :], start
    for child, parent in zip(chosen.tolist(), tree.parents[chosen].tolist()):  # level by level
        if parent == node:
            path.append(child)
            node = child
    return path, choices[node + 1], []


def verify_sampled(tree, p, q, replacement, sampler, start=-1):
    """Recursive rejection sampling from ``start``, the context or a node, on: the output is distributed exactly as p.

    ``p`` (N+1, V) are the target's warped distributions. Row 0 of ``q`` is the distribution from which the context's
    children were drawn, row i + 1 that of node i's; a leaf needs none. The children of a node face, in the order in
    which they were drawn, Leviathan's test one after the other: x stays with probability min(1, p(x) / q(x)), else the
    next one faces norm(relu(p - q)) and, when drawn without ``replacement``, q without x. Each test leaves p behind
    (Leviathan et al. 2023, arXiv 2211.17192, theorem 1), so all of them do: "recursive rejection sampling" (Jeon et al.
    2024, arXiv 2402.14160); with replacement, "multi-step speculative sampling" (Miao et al. 2023, arXiv 2305.09781).
    That breaks if candidates are sorted or dropped after they were drawn, or if q is not what they were drawn from, such
    as a softmax beside its argmax.
    """
    path, node, draws = [start][start < 0 :], start, []
    while True:
        children = (tree.parents == node).nonzero().flatten().tolist()
        rest_p, rest_q = p[node + 1], q[node + 1] if children else None
        for child in children:
            token = tree.tokens[child]
            if rest_q[token] == 0:
                continue  # never drawn: q had fewer tokens to give than the node has children
            stays, number = sampler.flip(rest_p[token] / rest_q[token])
            draws.append(number)
            if stays:
                break
            rest_p = residual(rest_p, rest_q)
            rest_q = rest_q if replacement else without(rest_q, token)
        else:
            return path, sampler.draw(rest_p[None])[0], draws
        path.append(child)
        node = child


def residual(p, q):
    """norm(relu(p - q)) (V,): what is left of p once q has had its share."""
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    # p <= q everywhere means p = q, where nothing is ever rejected; only rounding leads here.
    return left / total if total > 0 else p


def without(q, token):
    """q (V,) given that ``token`` is not drawn; all zero when there is no other."""
    rest = q.index_fill(0, token, 0.0)
    return rest / rest.sum().clamp(min=torch.finfo(q.dtype).tiny)
