"""Exact output distributions: every tree a draft can draw, every way a verifier's chances can fall, no Monte Carlo."""

import itertools

import torch

from s2d.tree import KConfig, TokenTree


class EveryOutcome:
    """Stands in for Sampler: replays one sequence of choices, and tells how likely it is and what comes next."""

    def __init__(self, choices):
        self.choices, self.taken, self.chance = list(choices), 0, 1.0
        self.untried = []

    def _choose(self, chances):
        """Take the next choice among outcomes with these chances; at a fork not met before, the first possible one."""
        if self.taken == len(self.choices):
            first, *others = [i for i, chance in enumerate(chances) if chance > 0]
            self.untried += [[*self.choices, other] for other in others]
            self.choices.append(first)
        choice = self.choices[self.taken]
        self.taken += 1
        self.chance *= chances[choice]
        return choice

    def flip(self, chance):
        heads = min(1.0, chance.item())
        return self._choose([1 - heads, heads]) == 1, None

    def draw(self, probs):
        return torch.tensor([self._choose(row.tolist()) for row in probs])


def enumerate_outcomes(function):
    """Yield (result, chance) of function(sampler) for every way chance can fall."""
    waiting = [[]]
    while waiting:
        sampler = EveryOutcome(waiting.pop())
        result = function(sampler)
        waiting += sampler.untried
        yield result, sampler.chance


def draws(probs, count, replacement):
    """Yield (tokens, chance) for every ordered draw of ``count`` tokens; the end is filled up where ``probs`` runs out."""
    if count == 0:
        yield (), 1.0
        return
    for token, chance in enumerate(probs.tolist()):
        if chance > 0:
            rest = probs
            if not replacement:
                rest = probs.index_fill(0, torch.tensor(token), 0.0)
                rest = rest / rest.sum() if rest.sum() > 0 else rest
            for others, likely in draws(rest, count - 1, replacement):
                yield (token, *others), chance * likely
    if not replacement and probs.sum() == 0:
        yield tuple(range(count)), 1.0  # any tokens will do: q gives them no chance


def drawn_trees(q, widths, replacement):
    """Yield (tree, prefixes, chance) for every tree of this shape with children drawn from ``q(prefix)``.

    ``prefixes`` are the tokens that lead to the context, (), and to each node.
    """
    shape = KConfig(widths)

    def extend(tokens, prefixes, frontier, level, chance):
        if level == len(widths):
            yield TokenTree(torch.tensor(tokens), shape.parents()), prefixes, chance
            return
        choices = [list(draws(q(prefix), widths[level], replacement)) for prefix in frontier]
        for combination in itertools.product(*choices):
            new = [
                (*prefix, token)
                for prefix, (drawn, _) in zip(frontier, combination)
                for token in drawn
            ]
            likely = chance
            for _, each in combination:
                likely *= each
            yield from extend(tokens + [p[-1] for p in new], prefixes + new, new, level + 1, likely)

    yield from extend([], [()], [()], 0, 1.0)


def emitted_distribution(p, q, widths, length, decide, replacement=False):
    """The exact joint distribution of the first ``length`` emitted tokens, (V,) * length.

    ``p`` and ``q`` map a tuple of tokens to the distribution (V,) after it; ``decide(tree, p_rows, q_rows, sampler)`` is
    a verifier. Where a step emits fewer tokens, the target's own distribution, as of the next step, follows.
    """
    vocab = len(p(()))
    joint = torch.zeros((vocab,) * length, dtype=torch.float64)
    for tree, prefixes, chance in drawn_trees(q, widths, replacement):
        p_rows, q_rows = (
            torch.stack([p(prefix) for prefix in prefixes]),
            torch.stack([q(prefix) for prefix in prefixes]),
        )
        for (path, extra, *_), likely in enumerate_outcomes(
            lambda sampler: decide(tree, p_rows, q_rows, sampler)
        ):
            emitted = (*tree.tokens[path].tolist(), int(extra))[:length]
            joint[emitted] += (
                chance * likely * joint_distribution(p, length - len(emitted), emitted)
            )
    return joint


def joint_distribution(p, length, prefix=()):
    """p's own distribution of the next ``length`` tokens after ``prefix``, (V,) * length."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    first = p(prefix)
    rest = [joint_distribution(p, length - 1, (*prefix, token)) for token in range(len(first))]
    return torch.stack([chance * then for chance, then in zip(first, rest)])


def random_distribution(generator, size, zeros=0.0):
    weights = torch.rand(size, dtype=torch.float64, generator=generator) ** 3
    weights[torch.rand(size, generator=generator) < zeros] = 0
    weights[0] += 1e-3 * (weights.sum() == 0)
    return weights / weights.sum()


def random_model(seed, vocab, zeros=0.0):
    """A language model at its smallest: a random distribution after every prefix."""
    generator, known = torch.Generator().manual_seed(seed), {}

    def model(prefix):
        if prefix not in known:
            known[prefix] = random_distribution(generator, vocab, zeros)
        return known[prefix]

    return model
