"""S2D by definition: whole models over the whole text.

The fast code is compared with this definition, step by step. There is no KV cache, no mask and no
batch, and a tree is a dictionary of its paths.

The target takes the token with the largest log p + g. Here p is its distribution, and g is Gumbel
noise: a number for each token and position, from a seed alone. This is a draw from p (see
``sampling.Draws.noise``). The draft, with the distribution q, knows g as well, and trusts half of
it: it proposes the tokens with the largest log q + g / 2. For greedy decoding, the caller gives a
noise of zeros, and a temperature of 1. Exit 0, rejection sampling, improved MCSD, stop strings,
shapes of your own and models with too few positions are not defined here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from s2d.model import Llama
from s2d.options import Options
from s2d.tree import GrowingShape

TokenPath = tuple[int, ...]  # from the first level down; () is the end of the context
Noise = Callable[[int], Tensor]  # a position in the text -> g (V,)


class Proposed(NamedTuple):
    """The children that are proposed after a path, and which exit proposed them."""

    children: list[int]  # tokens
    exit_layer: int
    confidence: float


def logits_after(model: Llama, context: list[int], layers: int | None = None) -> Tensor:
    """Logits (V,) for the token after the ids in ``context``, by all layers or the first ones.

    After any layer, the final norm and the head follow.
    """
    hidden = model.run_layers(model.embed(torch.tensor([context])), 0, layers)
    return model.logits(hidden)[0, -1]


def choose_exit(
    draft: Llama, contexts: list[list[int]], options: Options
) -> tuple[int, Tensor, float]:
    """The first exit that is confident enough, or the last one.

    Its confidence is the largest probability after any of the R ``contexts`` (lists of ids): to be
    sure about one of them is enough, as in the authors' code. Returns the exit, its logits (R, V)
    and its confidence.
    """
    for exit_layer, threshold in zip(options.exits, [*options.thresholds, 0.0]):
        logits = torch.stack([logits_after(draft, context, exit_layer) for context in contexts])
        confidence = logits.softmax(dim=-1).max().item()
        if confidence > threshold:
            break
    return exit_layer, logits, confidence


def most_probable(paths: dict[TokenPath, float], count: int) -> dict[TokenPath, float]:
    """The ``count`` most probable paths, in their order; of equal ones the first."""
    best = sorted(paths, key=lambda path: paths[path], reverse=True)[:count]
    return {path: prob for path, prob in paths.items() if path in best}


def propose(
    draft: Llama,
    context: list[int],
    levels: int,
    eos: Sequence[int],
    options: Options,
    noise: Noise,
) -> dict[TokenPath, Proposed]:
    """The children that are proposed after each path, in a tree of at most ``levels`` levels."""
    shape = options.shape
    proposed: dict[TokenPath, Proposed] = {}
    nodes: dict[TokenPath, float] = {}  # path -> the estimated probability that it is accepted
    frontier: dict[TokenPath, float] = {(): 1.0}  # the paths that get children
    for level in range(levels):
        if not frontier:
            break
        contexts = [[*context, *path] for path in frontier]
        exit_layer, logits, confidence = choose_exit(draft, contexts, options)
        width = shape.top_k if isinstance(shape, GrowingShape) else shape.widths[level]
        longer: dict[TokenPath, float] = {}
        for (path, path_prob), row in zip(frontier.items(), logits):
            q = options.distribution(row)  # (V,)
            g = noise(len(context) + len(path))  # (V,)
            estimates = (q.log() + g / 2).softmax(dim=-1)  # of what the target takes
            best = estimates.topk(min(width, len(q))).indices.tolist()
            children = [token for token in best if estimates[token] > 0]
            proposed[path] = Proposed(children, exit_layer, confidence)
            for token in children:
                longer[*path, token] = path_prob * estimates[token].item()
        nodes |= longer
        frontier = {path: prob for path, prob in longer.items() if prob >= options.stop}
        frontier = {path: prob for path, prob in frontier.items() if path[-1] not in eos}
        if isinstance(shape, GrowingShape):
            frontier = most_probable(frontier, shape.top_k)
    if isinstance(shape, GrowingShape):  # the least probable nodes are left out
        sent = most_probable(nodes, shape.size)
        for path, old in proposed.items():
            children = [token for token in old.children if (*path, token) in sent]
            proposed[path] = old._replace(children=children)
    return proposed


@torch.inference_mode()
def generate(
    target: Llama, draft: Llama, context: list[int], options: Options, noise: Noise
) -> Iterator[tuple[dict[TokenPath, Proposed], list[int]]]:
    """Yield what each step proposes and the tokens that it emits.

    Ends at EOS, or after ``options.max_new_tokens``.
    """
    limit = len(context) + options.max_new_tokens
    eos = target.config.eos_token_ids
    ended = False
    while len(context) < limit and not ended:
        # A step ends with a token of the target's own (the bonus token), which needs a position.
        levels = min(options.shape.depth, limit - len(context) - 1)
        proposed = propose(draft, context, levels, eos, options, noise)
        path: TokenPath = ()
        while True:
            p = options.distribution(logits_after(target, [*context, *path]))  # (V,)
            token = (p.log() + noise(len(context) + len(path))).argmax().item()
            accepted = path in proposed and token in proposed[path].children
            path = (*path, token)
            ended = token in eos
            if ended or not accepted:
                break
        yield proposed, list(path)
        context = [*context, *path]
