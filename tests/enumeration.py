"""Exact distributions: every outcome of what a draft draws and a verifier tests."""

import functools

import torch

from s2d.lesson.lossless import every_outcome


def joint_of(emit, p, length):
    """The exact joint distribution of the first ``length`` tokens, (V,) * length.

    ``emit(draws)`` returns emitted tokens. Where they are fewer, p follows, as in later steps.
    """
    joint = torch.zeros((len(p(())),) * length, dtype=torch.float64)
    rest = functools.cache(lambda tokens: joint_distribution(p, length - len(tokens), tokens))
    for tokens, draws in every_outcome(emit):
        tokens = tuple(tokens[:length])
        joint[tokens] += draws.probability * rest(tokens)
    return joint


def joint_distribution(p, length, prefix=()):
    """p's own distribution of the next ``length`` tokens after ``prefix``, (V,) * length."""
    if length == 0:
        return torch.ones((), dtype=torch.float64)
    rest = [joint_distribution(p, length - 1, (*prefix, x)) for x in range(len(p(prefix)))]
    return torch.stack([prob * then for prob, then in zip(p(prefix), rest)])


def next_token_model(model, prompt, temperature=1.0, top_p=1.0, top_k=0):
    """A prefix -> the distribution after prompt and prefix, warped by a plain loop."""

    @functools.cache
    def distribution(prefix):
        tokens = torch.tensor([[*prompt, *prefix]], device=model.device)
        logits = model(tokens)[0, -1].cpu()
        probs, mass = torch.softmax(logits / temperature, dim=-1), 0.0
        kept = torch.zeros_like(probs)
        likeliest = probs.argsort(descending=True).tolist()[: top_k or None]
        for token in likeliest:
            if mass < top_p * probs[likeliest].sum():
                kept[token] = probs[token]
                mass += probs[token].item()
        return kept / mass

    return distribution
