"""Exact output distributions: every tree a draft can draw, every outcome of a verifier's tests."""

import functools
import sys
from unittest import mock

import torch

from s2d.generate import start
from s2d.tree import KConfig, TokenTree


class EveryOutcome:
    """Stands in for Sampler: replays a list of choices, and tells how likely they are."""

    def __init__(self, choices):
        self.choices, self.taken, self.probability = list(choices), 0, 1.0
        self.untried = []

    def _choose(self, probs):
        """The next choice among outcomes with these probabilities; at a new fork the first one."""
        if self.taken == len(self.choices):
            first, *others = [i for i, prob in enumerate(probs) if prob > 0]
            self.untried += [[*self.choices, other] for other in others]
            self.choices.append(first)
        choice = self.choices[self.taken]
        self.taken += 1
        self.probability *= probs[choice]
        return choice

    def flip(self, probabilities):
        heads = [min(1.0, probability) for probability in probabilities.tolist()]
        return torch.tensor([self._choose([1 - p, p]) == 1 for p in heads]), probabilities

    def race(self, probs, positions):
        return torch.nn.functional.one_hot(self.draw(probs), probs.shape[-1]).to(probs)

    def numbers_at(self, position, vocab_size):
        return torch.ones(vocab_size)

    def draw(self, probs):
        return torch.tensor([self._choose(row) for row in probs.tolist()])

    def candidates(self, probs, count, replacement):
        return torch.tensor([self._draw_several(row, count, replacement) for row in probs.tolist()])

    def _draw_several(self, probs, count, replacement):
        drawn = []
        for _ in range(count):
            if total := sum(probs):
                drawn.append(self._choose([prob / total for prob in probs]))
            else:  # q has no more tokens: any other fills the end
                drawn.append(next(i for i in range(len(probs)) if i not in drawn))
            if not replacement:
                probs = [0.0 if i in drawn else prob for i, prob in enumerate(probs)]
        return drawn


def enumerate_outcomes(function):
    """Yield (result, probability) of function(sampler) for every outcome of what it draws."""
    waiting = [[]]
    while waiting:
        sampler = EveryOutcome(waiting.pop())
        result = function(sampler)
        waiting += sampler.untried
        yield result, sampler.probability


def joint_of(emit, p, length):
    """The exact joint distribution of the first ``length`` tokens, (V,) * length.

    ``emit(sampler)`` returns emitted tokens. Where they are fewer, p follows, as in later steps.
    """
    joint = torch.zeros((len(p(())),) * length, dtype=torch.float64)
    rest = functools.cache(lambda tokens: joint_distribution(p, length - len(tokens), tokens))
    for tokens, probability in enumerate_outcomes(emit):
        tokens = tuple(tokens[:length])
        joint[tokens] += probability * rest(tokens)
    return joint


def joint_distribution(p, length, prefix=()):
    """p's own distribution of the next ``length`` tokens after ``prefix``, (V,) * length."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    rest = [joint_distribution(p, length - 1, (*prefix, x)) for x in range(len(p(prefix)))]
    return torch.stack([prob * then for prob, then in zip(p(prefix), rest)])


def emitted_distribution(p, q, widths, length, decide, replacement=False):
    """The exact joint distribution of the first ``length`` tokens that a step leads to.

    ``p`` and ``q`` map a tuple of tokens to the distribution (V,) after it. Children are drawn from
    q; ``decide(tree, p_rows, q_rows, sampler)`` is a verifier.
    """
    parents = KConfig(widths).parents()

    def emit(sampler):
        prefixes = level = [()]
        for width in widths:
            rows = torch.stack([q(prefix) for prefix in level])
            drawn = sampler.candidates(rows, width, replacement).tolist()
            level = [(*prefix, x) for prefix, row in zip(level, drawn) for x in row]
            prefixes = prefixes + level
        tree = TokenTree(torch.tensor([prefix[-1] for prefix in prefixes[1:]]), parents)
        p_rows, q_rows = (torch.stack([model(prefix) for prefix in prefixes]) for model in (p, q))
        path, bonus, *_ = decide(tree, p_rows, q_rows, sampler)
        return *tree.tokens[path].tolist(), int(bonus)

    return joint_of(emit, p, length)


def assert_lossless(target, prompt, length, steps=None, **options):
    """What ``start`` emits has the target's joint distribution, (V,) * length, which is returned.

    And the Steps of all outcomes; the first ``steps`` of each are taken, all of them by default.
    """
    seen = []

    def emit(sampler):
        # The package's attribute of this name is the function.
        with mock.patch.object(sys.modules["s2d.generate"], "Sampler", lambda *_: sampler):
            generation = start(target, prompt, max_new_tokens=length, **options)
        for number, step in enumerate(generation, 1):
            seen.append(step)
            if number == steps:
                break
        return generation.tokens

    kept = options.get("top_p", 1.0), options.get("top_k", 0)
    p = next_token_model(target, prompt, options["temperature"], *kept)
    expected = joint_distribution(p, length)
    assert (joint_of(emit, p, length) - expected).abs().max() < 1e-9
    return expected, seen


def next_token_model(model, prompt, temperature=1.0, top_p=1.0, top_k=0):
    """A prefix -> the warped distribution after prompt and prefix, worked out here."""
    known = {}

    def distribution(prefix):
        if prefix not in known:
            logits = model(torch.tensor([[*prompt, *prefix]]))[0, -1]
            probs, mass = torch.softmax(logits / temperature, dim=-1), 0.0
            known[prefix] = torch.zeros_like(probs)
            likeliest = probs.argsort(descending=True).tolist()[: top_k or None]
            for token in likeliest:
                if mass < top_p * probs[likeliest].sum():
                    known[prefix][token] = probs[token]
                    mass += probs[token].item()
            known[prefix] /= mass
        return known[prefix]

    return distribution
