"""Verifiers: which draft tokens stay, and the one more that the target gives. Pure functions of tensors.

Each takes the target's rows for the N draft tokens and for the position after the last of them, N+1 in all, and
returns ``(accepted, extra)``: how many leading draft tokens stay, and the token that follows them. With N = 0 they are
autoregressive decoding.
"""


def leading_true(passed):
    """Bools (N,) -> how many are true before the first false."""
    return int(passed.long().cumprod(dim=0).sum())


def verify_greedy(logits, tokens):
    """Keep draft tokens (N,) while each is the argmax of the target's logits (N+1, V); the next argmax follows.

    The output is the target's own greedy decoding, token by token.
    """
    best = logits.argmax(dim=-1)  # (N+1,)
    accepted = leading_true(best[:-1] == tokens)
    return accepted, best[accepted]


def verify_sampled(p, q, tokens, sampler):
    """Rejection sampling: the output is distributed exactly as p. Leviathan et al. 2023 (2211.17192), theorem 1.

    ``p`` (N+1, V) and ``q`` (N, V), None if N = 0, are the warped distributions of target and draft; ``tokens`` (N,)
    must have been drawn from ``q``, row by row: any other token, such as q's argmax, or one picked after looking at it,
    breaks it.
    """
    if len(tokens) == 0:
        return 0, sampler.draw(p[0])
    chosen = tokens.unsqueeze(-1)  # (N, 1)
    chances = (p[:-1].gather(-1, chosen) / q.gather(-1, chosen)).squeeze(-1).clamp(max=1.0)  # (N,)
    accepted = leading_true(sampler.flip(chances))
    if accepted == len(tokens):
        return accepted, sampler.draw(p[accepted])
    return accepted, sampler.draw(residual(p[accepted], q[accepted]))


def residual(p, q):
    """norm(relu(p - q)) (V,): what is left of p once q has had its share."""
    left = (p - q).clamp(min=0.0)
    total = left.sum()
    # p <= q everywhere means p = q, where nothing is ever rejected; only rounding leads here.
    return left / total if total > 0 else p
