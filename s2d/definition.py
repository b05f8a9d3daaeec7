"""S2D by definition: whole models over the whole text, for exits with layers.

The definition that the fast code is compared with. It has no KV cache, no mask and no batch, and a
tree is a dictionary of its paths. ``chance`` is the ``Noise`` that draft and target share, and each
step must equal the fast code's, token for token. Or it is the ``Draws`` of rejection sampling, and
tests go through all outcomes, whose probabilities must be the target's. The temperature is above 0;
greedy decoding is temperature 1 with noise that is 1 everywhere, as then the token with the largest
p / e is the one with the largest p. ``python -m s2d.definition`` shows an example.

What the fast code does besides: it drafts nothing in its first step if the prompt has more than 256
tokens (``mask.MAX_UNREAD``), and nothing beyond the positions of the draft model.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Llama
from .options import Options
from .sampling import Draws, Noise, draft_scores
from .tree import GrowingShape

TokenPath = tuple[int, ...]  # from the first level down; () is the end of the context


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
    sure about one of them is enough. Returns the exit, its logits (R, V) and its confidence.
    """
    for exit_layer, threshold in zip(options.exits, options.thresholds):
        logits = torch.stack([logits_after(draft, context, exit_layer) for context in contexts])
        confidence = logits.softmax(dim=-1).max().item()
        if confidence > threshold or exit_layer == options.exits[-1]:
            return exit_layer, logits, confidence


class Proposed(NamedTuple):
    """What the draft proposes after a path."""

    children: list[int]  # tokens
    q: Tensor | None  # (V,) the distribution they come from; None if there are none


def propose_after(
    q: Tensor, width: int, position: int, options: Options, chance: Noise | Draws
) -> tuple[list[int], Tensor]:
    """Up to ``width`` tokens for a ``position``, and estimates (V,) that a token is accepted.

    ``q`` (V,) is the draft's distribution there.
    """
    if isinstance(chance, Noise):
        estimates = draft_scores(q, chance.at([position])[0])
        estimates = estimates / estimates.sum()
        tokens = estimates.topk(width).indices
    elif isinstance(options.shape, GrowingShape):
        estimates = q
        tokens = q.topk(width).indices
    else:
        estimates = q
        tokens = chance.candidates(q[None], width)[0]
    return [token for token in tokens.tolist() if q[token] > 0], estimates


def most_probable(paths: dict[TokenPath, float], count: int) -> dict[TokenPath, float]:
    """The ``count`` most probable paths, in their order; of equal ones the first."""
    best = sorted(paths, key=lambda path: paths[path], reverse=True)[:count]
    return {path: prob for path, prob in paths.items() if path in best}


def propose(
    draft: Llama, context: list[int], levels: int, options: Options, chance: Noise | Draws
) -> dict[TokenPath, Proposed]:
    """What is proposed after each path of tokens, in at most so many ``levels``."""
    shape = options.shape
    proposed: dict[TokenPath, Proposed] = {}
    every_path: dict[TokenPath, float] = {}  # with the estimated probability of its acceptance
    frontier: dict[TokenPath, float] = {(): 1.0}  # the paths that get children
    for level in range(levels):
        if not frontier:
            break
        contexts = [[*context, *path] for path in frontier]
        _, logits, _ = choose_exit(draft, contexts, options)
        longer: dict[TokenPath, float] = {}
        for (path, path_prob), row in zip(frontier.items(), logits):
            q = options.distribution(row)
            position = len(context) + len(path)
            children, estimates = propose_after(q, shape.width(level), position, options, chance)
            proposed[path] = Proposed(children, q)
            for token in children:
                longer[*path, token] = path_prob * estimates[token].item()
        every_path |= longer
        frontier = {path: prob for path, prob in longer.items() if prob >= options.stop}
        if isinstance(shape, GrowingShape):
            frontier = most_probable(frontier, shape.top_k)
    if isinstance(shape, GrowingShape):  # the least probable nodes are left out
        sent = most_probable(every_path, shape.size)
        for path, (children, q) in proposed.items():
            proposed[path] = Proposed([token for token in children if (*path, token) in sent], q)
    return proposed


def verify(
    p: Tensor, proposed: Proposed, position: int, options: Options, chance: Noise | Draws
) -> tuple[int, bool]:
    """The next token, a draw from p (V,), and whether it is an accepted child."""
    children, q = proposed
    if isinstance(chance, Noise):  # the draft met the same noise
        token = (p / chance.at([position])[0]).argmax().item()
        return token, token in children
    if isinstance(options.shape, GrowingShape):  # its children were not drawn, so p decides alone
        token = chance.draw(p[None]).item()
        return token, token in children
    for token in children:  # rejection sampling
        if chance.flip((p[token] / q[token]).item()):  # with probability min(1, p / q)
            return token, True
        p = (p - q).clamp(min=0.0)  # the residual distribution
        p = p / p.sum()  # not 0: p <= q everywhere means p = q, and then nothing is rejected
        q = q.index_fill(0, torch.tensor(token), 0.0)  # the next child was drawn without this one
        if q.sum() > 0:  # else there is no next child
            q = q / q.sum()
    return chance.draw(p[None]).item(), False


def generate(
    target: Llama,
    draft: Llama,
    context: list[int],
    limit: int,
    options: Options,
    chance: Noise | Draws,
) -> Iterator[tuple[dict[TokenPath, Proposed], list[int]]]:
    """Yield what each step proposes and the tokens that it emits.

    Ends when the context, prompt included, has ``limit`` tokens, or ends with EOS.
    """
    ended = False
    while len(context) < limit and not ended:
        # A step ends with a token of the target's own (the bonus token), which needs a position.
        levels = min(options.shape.depth, limit - len(context) - 1)
        proposed = propose(draft, context, levels, options, chance)
        path: list[int] = []
        accepted = True  # whether the path's last token was accepted; it may then go on
        while accepted and not ended:
            logits = logits_after(target, [*context, *path])
            p = options.distribution(logits)
            drafted = proposed.get(tuple(path), Proposed([], None))
            token, accepted = verify(p, drafted, len(context) + len(path), options, chance)
            path = [*path, token]
            ended = token in target.config.eos_token_ids
        yield proposed, path
        context = [*context, *path]


@torch.inference_mode()
def show() -> None:
    """Print the steps of an answer of a miniature: what each exit proposed, what was emitted."""
    from .checkpoint.pair import load_pair

    question = "What is the capital of Tadastan?"
    asked = Options(method="s2d", temperature=1.0, seed=0)
    pair = load_pair("13b", options=asked, dtype="float64")
    options = pair.options
    noise = Noise(options.seed, pair.target.config.vocab_size, "cpu", torch.float64)
    context = pair.tokenizer.encode_chat([question])
    print(f"{question} (temperature {options.temperature}, seed {options.seed})")
    limit = len(context) + options.max_new_tokens
    for proposed, emitted in generate(pair.target, pair.draft, context, limit, options, noise):
        for path, (children, _) in proposed.items():
            exit_layer, _, sure = choose_exit(pair.draft, [[*context, *path]], options)
            words = pair.tokenizer.decode([*path, *children])
            print(f"  exit {exit_layer} is {sure:.0%} sure, and proposes {words!r}")
        print(f"emitted {pair.tokenizer.decode(emitted)!r}")
        context = [*context, *emitted]


if __name__ == "__main__":
    show()
