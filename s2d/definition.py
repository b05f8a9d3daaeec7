"""S2D by definition: whole models over the whole text.

The fast code is compared with this definition, step by step. There is no KV cache, no mask and no
batch, and a tree is a dictionary of its paths. ``python -m s2d.definition`` shows an example.

The target takes the token with the largest log p + g. Here p is its distribution, and g is Gumbel
noise: a number for each token and position, from a seed alone. This is a draw from p (see
``sampling.Draws.noise``). The draft, with the distribution q, knows g as well, and trusts half of
it: it proposes the tokens with the largest log q + g / 2. For greedy decoding, the caller gives a
noise of zeros, and p is at temperature 1. Exit 0, rejection sampling, improved MCSD, stop strings
and a draft model with too few positions are not defined here.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Llama
from .sampling import Draws
from .tree import FixedShape, GrowingShape

TokenPath = tuple[int, ...]  # from the first level down; () is the end of the context


class Settings(NamedTuple):
    """How the draft drafts, and from which distributions tokens are drawn."""

    exits: Sequence[int]
    thresholds: Sequence[float]  # of all exits but the last
    shape: FixedShape | GrowingShape
    stop: float  # a path with a lower estimate is not continued
    distribution: Callable[[Tensor], Tensor]  # logits (V,) -> p or q (V,)
    noise: Callable[[int], Tensor]  # a position in the text -> g (V,)


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
    draft: Llama, contexts: list[list[int]], settings: Settings
) -> tuple[int, Tensor, float]:
    """The first exit that is confident enough, or the last one.

    Its confidence is the largest probability after any of the R ``contexts`` (lists of ids): to be
    sure about one of them is enough, as in the authors' code. Returns the exit, its logits (R, V)
    and its confidence.
    """
    for exit_layer, threshold in zip(settings.exits, [*settings.thresholds, 0.0]):
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
    draft: Llama, context: list[int], levels: int, eos: Sequence[int], settings: Settings
) -> dict[TokenPath, Proposed]:
    """The children that are proposed after each path, in a tree of at most ``levels`` levels."""
    shape = settings.shape
    proposed: dict[TokenPath, Proposed] = {}
    nodes: dict[TokenPath, float] = {}  # path -> the estimated probability that it is accepted
    frontier: dict[TokenPath, float] = {(): 1.0}  # the paths that get children
    for level in range(levels):
        if not frontier:
            break
        contexts = [[*context, *path] for path in frontier]
        exit_layer, logits, confidence = choose_exit(draft, contexts, settings)
        width = shape.top_k if isinstance(shape, GrowingShape) else shape.widths[level]
        longer: dict[TokenPath, float] = {}
        for (path, path_prob), row in zip(frontier.items(), logits):
            q = settings.distribution(row)  # (V,)
            g = settings.noise(len(context) + len(path))  # (V,)
            estimates = (q.log() + g / 2).softmax(dim=-1)  # of what the target takes
            best = estimates.topk(min(width, len(q))).indices.tolist()
            children = [token for token in best if q[token] > 0]
            proposed[path] = Proposed(children, exit_layer, confidence)
            for token in children:
                longer[*path, token] = path_prob * estimates[token].item()
        nodes |= longer
        frontier = {path: prob for path, prob in longer.items() if prob >= settings.stop}
        frontier = {path: prob for path, prob in frontier.items() if path[-1] not in eos}
        if isinstance(shape, GrowingShape):
            frontier = most_probable(frontier, shape.top_k)
    if isinstance(shape, GrowingShape):  # the least probable nodes are left out
        sent = most_probable(nodes, shape.size)
        for path, old in proposed.items():
            children = [token for token in old.children if (*path, token) in sent]
            proposed[path] = old._replace(children=children)
    return proposed


def generate(
    target: Llama, draft: Llama, context: list[int], limit: int, settings: Settings
) -> Iterator[tuple[dict[TokenPath, Proposed], list[int]]]:
    """Yield what each step proposes and the tokens that it emits.

    Ends when the context, prompt included, has ``limit`` tokens, or ends with EOS.
    """
    eos = target.config.eos_token_ids
    ended = False
    while len(context) < limit and not ended:
        # A step ends with a token of the target's own (the bonus token), which needs a position.
        levels = min(settings.shape.depth, limit - len(context) - 1)
        proposed = propose(draft, context, levels, eos, settings)
        path: TokenPath = ()
        while True:
            p = settings.distribution(logits_after(target, [*context, *path]))  # (V,)
            token = (p.log() + settings.noise(len(context) + len(path))).argmax().item()
            accepted = path in proposed and token in proposed[path].children
            path = (*path, token)
            ended = token in eos
            if ended or not accepted:
                break
        yield proposed, list(path)
        context = [*context, *path]


@torch.inference_mode()
def show() -> None:
    """Print the steps of an answer of a miniature: what each exit proposed, what was emitted."""
    from .pair.loading import load_pair

    question = "What is the capital of Tadastan?"
    pair = load_pair("13b", device="cpu", dtype="float64", temperature=1.0, seed=0)
    options = pair.options
    like = torch.empty((1, pair.target.config.vocab_size), dtype=torch.float64)
    draws = Draws(options.seed)
    settings = Settings(
        exits=options.exits,
        thresholds=options.thresholds,
        shape=options.shape,
        stop=options.stop,
        distribution=options.distribution,
        noise=lambda position: draws.noise([position], like)[0],
    )
    context = pair.tokenizer.encode_chat([question])
    limit = len(context) + options.max_new_tokens
    print(f"{question} (temperature {options.temperature}, seed {options.seed})")
    for proposed, emitted in generate(pair.target, pair.draft, context, limit, settings):
        for children, exit_layer, confidence in proposed.values():
            words = pair.tokenizer.decode(children) or "EOS"
            print(f"  exit {exit_layer} is {confidence:.0%} sure, and drafts {words!r}", flush=True)
        print(f"emitted {pair.tokenizer.decode(emitted) or 'EOS'!r}", flush=True)


if __name__ == "__main__":
    from .cli.ending import run_program

    raise SystemExit(run_program("s2d.definition", show))
