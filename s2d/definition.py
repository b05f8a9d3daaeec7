"""S2D by definition: whole models over the whole text, for fixed trees and exits with layers.

The definition that the fast code is compared with, for resolved ``Options``. It has no KV cache, no
mask and no batch, and a tree is a dictionary of its paths. ``chance`` is one of two things. With
``Noise``, which draft and target share, each step must equal the fast code's, token for token. With
``Draws``, for rejection sampling, enumeration.py goes through all outcomes, and their probabilities
must be the target's. The temperature is above 0; greedy decoding is temperature 1 with noise that
is 1 everywhere.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Llama
from .options import Options
from .sampling import Draws, Noise, warp


def logits_after(model: Llama, context: list[int], layers: int | None = None) -> Tensor:
    """Logits (V,) for the token after the ids in ``context``, by all layers or the first ones.

    After any layer, the final norm and the head follow.
    """
    hidden = model.run_layers(model.embed(torch.tensor([context])), 0, layers)
    return model.logits(hidden)[0, -1]


def choose_exit(draft: Llama, contexts: list[list[int]], options: Options) -> tuple[Tensor, float]:
    """The first exit that is confident enough, or the last one.

    Its confidence is the largest probability after any of the R ``contexts`` (lists of ids): to be
    sure about one of them is enough. Returns its logits (R, V) and its confidence.
    """
    for exit_layer, threshold in zip(options.exits, options.thresholds):
        logits = torch.stack([logits_after(draft, context, exit_layer) for context in contexts])
        confidence = logits.softmax(dim=-1).max().item()
        if confidence > threshold or exit_layer == options.exits[-1]:
            return logits, confidence


class Proposed(NamedTuple):
    """What the draft proposes after a path."""

    children: list[int]  # tokens
    q: Tensor | None  # (V,) the distribution they come from; None if there are none


NOTHING = Proposed([], None)


def propose(
    draft: Llama,
    context: list[int],
    widths: tuple[int, ...],
    options: Options,
    chance: Noise | Draws,
) -> dict[tuple[int, ...], Proposed]:
    """What is proposed after each path of tokens, level by level; () is the end of the context."""
    proposed = {}
    level = [()]
    likelihood = 1.0  # the product of the levels' confidences
    for width in widths:  # children per path; (1, 1, 1) is a chain
        logits, confidence = choose_exit(draft, [[*context, *path] for path in level], options)
        for path, row in zip(level, logits):
            q = warp(row, options.temperature, options.top_p, options.top_k)
            if isinstance(chance, Noise):
                e = chance.at([len(context) + len(path)])[0]
                # √e, not e: of children chosen so, more are accepted, as measured.
                children = (q / e.sqrt()).topk(width).indices
            else:
                children = chance.candidates(q[None], width)[0]
            proposed[path] = Proposed(children.tolist(), q)
        level = [(*path, token) for path in level for token in proposed[path].children]
        likelihood *= confidence
        if likelihood < options.stop:
            break
    return proposed


def verify(p: Tensor, proposed: Proposed, position: int, chance: Noise | Draws) -> tuple[int, bool]:
    """The next token, a draw from p (V,), and whether it is an accepted child."""
    children, q = proposed
    if isinstance(chance, Noise):  # the draft met the same noise
        token = (p / chance.at([position])[0]).argmax().item()
        return token, token in children
    for token in children:  # rejection sampling
        if q[token] == 0:
            continue  # q has fewer tokens than there are children, so this one could not be drawn
        accepted, _ = chance.flip((p[token] / q[token])[None])  # with probability min(1, p / q)
        if accepted:
            return token, True
        p = (p - q).clamp(min=0.0)  # the residual distribution
        p = p / p.sum()  # not 0, since where p = q nothing is rejected
        q = q.index_fill(0, torch.tensor(token), 0.0)  # the next child was drawn without this one
        if q.sum() > 0:
            q = q / q.sum()
    return chance.draw(p[None]).item(), False


def generate(
    target: Llama,
    draft: Llama,
    context: list[int],
    limit: int,
    options: Options,
    chance: Noise | Draws,
) -> Iterator[tuple[dict, list[int]]]:
    """Yield what each step proposes and the tokens that it emits.

    Ends when the context, prompt included, has ``limit`` tokens, or ends with EOS.
    """
    ended = False
    while len(context) < limit and not ended:
        # A step ends with a token of the target's own (the bonus token), which needs a position.
        widths = options.tree.widths[: limit - len(context) - 1]
        proposed = propose(draft, context, widths, options, chance)
        path = []
        accepted = True  # whether the path's last token was accepted; it may then go on
        while accepted and not ended:
            logits = logits_after(target, [*context, *path])
            p = warp(logits, options.temperature, options.top_p, options.top_k)
            children = proposed.get(tuple(path), NOTHING)
            token, accepted = verify(p, children, len(context) + len(path), chance)
            path = [*path, token]
            ended = token in target.config.eos_token_ids
        yield proposed, path
        context = [*context, *path]
