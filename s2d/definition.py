"""S2D by definition: whole models over the whole text.

The fast code is compared with this definition, step by step. There is no KV cache, no mask and no
batch, and a tree is a dictionary of its paths. ``python -m s2d.definition`` shows an example.

The target takes the token with the largest p / e. Here p is its distribution, and e is random
noise: a number for each token and position, from a seed alone. This is a draw from p (see
``sampling.Noise``). The draft, with the distribution q, knows e as well, and proposes the tokens
with the largest q / √e (see ``sampling.draft_scores``). For greedy decoding, the caller gives a
noise that is 1 everywhere, and p is at temperature 1.

The fast code differs from this definition in two ways: it drafts nothing in its first step if the
prompt has more than 256 tokens (``mask.MAX_UNREAD``), and nothing beyond the positions of the draft
model. Exit 0, rejection sampling, improved MCSD and stop strings are not defined here.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .model import Llama
from .options import Options, Plan
from .sampling import Noise, draft_scores
from .tree import GrowingShape

TokenPath = tuple[int, ...]  # from the first level down; () is the end of the context


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


def choose_exit(draft: Llama, contexts: list[list[int]], plan: Plan) -> tuple[int, Tensor, float]:
    """The first exit that is confident enough, or the last one.

    Its confidence is the largest probability after any of the R ``contexts`` (lists of ids): to be
    sure about one of them is enough. Returns the exit, its logits (R, V) and its confidence.
    """
    for exit_layer, threshold in zip(plan.exits, plan.thresholds):
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
    draft: Llama, context: list[int], levels: int, plan: Plan, noise: Noise
) -> dict[TokenPath, Proposed]:
    """The children that are proposed after each path, in a tree of at most ``levels`` levels."""
    shape = plan.shape
    proposed: dict[TokenPath, Proposed] = {}
    nodes: dict[TokenPath, float] = {}  # path -> the estimated probability that it is accepted
    frontier: dict[TokenPath, float] = {(): 1.0}  # the paths that get children
    for level in range(levels):
        if not frontier:
            break
        contexts = [[*context, *path] for path in frontier]
        exit_layer, logits, confidence = choose_exit(draft, contexts, plan)
        longer: dict[TokenPath, float] = {}
        for (path, path_prob), row in zip(frontier.items(), logits):
            q = plan.options.distribution(row)  # (V,)
            scores = draft_scores(q, noise.at([len(context) + len(path)])[0])
            count = min(shape.width(level), len(scores))
            children = [token for token in scores.topk(count).indices.tolist() if q[token] > 0]
            proposed[path] = Proposed(children, exit_layer, confidence)
            for token in children:
                estimate = (scores[token] / scores.sum()).item()  # rough, and not derived
                longer[*path, token] = path_prob * estimate
        nodes |= longer
        frontier = {path: prob for path, prob in longer.items() if prob >= plan.stop}
        if isinstance(shape, GrowingShape):
            frontier = most_probable(frontier, shape.top_k)
    if isinstance(shape, GrowingShape):  # the least probable nodes are left out
        sent = most_probable(nodes, shape.size)
        for path, old in proposed.items():
            children = [token for token in old.children if (*path, token) in sent]
            proposed[path] = old._replace(children=children)
    return proposed


def generate(
    target: Llama, draft: Llama, context: list[int], limit: int, plan: Plan, noise: Noise
) -> Iterator[tuple[dict[TokenPath, Proposed], list[int]]]:
    """Yield what each step proposes and the tokens that it emits.

    Ends when the context, prompt included, has ``limit`` tokens, or ends with EOS.
    """
    ended = False
    while len(context) < limit and not ended:
        # A step ends with a token of the target's own (the bonus token), which needs a position.
        levels = min(plan.shape.depth, limit - len(context) - 1)
        proposed = propose(draft, context, levels, plan, noise)
        path: TokenPath = ()
        while True:
            p = plan.options.distribution(logits_after(target, [*context, *path]))  # (V,)
            e = noise.at([len(context) + len(path)])[0]
            token = (p / e).argmax().item()
            accepted = path in proposed and token in proposed[path].children
            path = (*path, token)
            ended = token in target.config.eos_token_ids
            if ended or not accepted:
                break
        yield proposed, list(path)
        context = [*context, *path]


@torch.inference_mode()
def show() -> None:
    """Print the steps of an answer of a miniature: what each exit proposed, what was emitted."""
    from .pair.loading import load_pair

    question = "What is the capital of Tadastan?"
    options = Options(method="s2d", temperature=1.0, seed=0)
    pair = load_pair("13b", options=options, device="cpu", dtype="float64")
    noise = Noise(options.seed, pair.target.config.vocab_size, "cpu", torch.float64)
    context = pair.tokenizer.encode_chat([question])
    limit = len(context) + options.max_new_tokens
    lines = [f"{question} (temperature {options.temperature}, seed {options.seed})"]
    for proposed, emitted in generate(pair.target, pair.draft, context, limit, pair.plan, noise):
        for path, (children, exit_layer, confidence) in proposed.items():
            words = pair.tokenizer.decode([*path, *children]) or "EOS"
            lines.append(f"  exit {exit_layer} is {confidence:.0%} sure, and drafts {words!r}")
        lines.append(f"emitted {pair.tokenizer.decode(emitted) or 'EOS'!r}")
    print("\n".join(lines))  # at once, so that ``| head`` does not break it


if __name__ == "__main__":
    show()
