"""The SoFT loss: every exit of a draft learns the next token at once. Knows nothing about decoding."""

import torch
import torch.nn.functional as F


def exit_logits(model, tokens, exits):
    """Tokens (B, T) -> next-token logits (B, T, V) at each of the increasing ``exits`` in turn, in one forward pass."""
    hidden, start = model.embed(tokens), 0
    for exit_layer in exits:
        hidden = model.run_layers(hidden, start, exit_layer)
        yield model.logits(hidden)
        start = exit_layer


def soft_losses(model, tokens, labels, exits):
    """Next-token cross entropy at every exit, from one forward pass through all layers.

    ``tokens`` (B, T); ``labels`` (B, T) holds the token that follows each position, -100 where nothing is to be
    learnt; ``exits`` are increasing layer numbers. Returns (E,) losses in nats per labelled token; their mean is the
    loss of Sorted LLaMA (Kavehzadeh et al. 2023, arXiv 2309.08968, section 3), with one final norm and one LM head for
    all exits.
    """
    return torch.stack(
        [
            F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
            for logits in exit_logits(model, tokens, exits)
        ]
    )
