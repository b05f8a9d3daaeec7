"""S2D by definition: whole models over the whole text. The fast code is compared with it.

There is no KV cache, no mask and no batch, and a tree is a dictionary of its paths: a path is a
tuple of tokens, from the first level down, and () is the end of the context.

The target takes the token with the largest log p + g. Here p is its distribution, and g is Gumbel
noise: ``noise`` gives a number for each token at a position of the text (see
``sampling.Draws.noise``). The draft, with the distribution q, knows g as well, and trusts half of
it: it proposes the tokens with the largest log q + g / 2. For greedy decoding, the caller gives a
noise of zeros, and a temperature of 1. Exit 0, rejection sampling, improved MCSD, stop strings,
shapes of your own and models with too few positions are not defined here.
"""

import torch

from s2d.tree import GrowingShape


def logits_after(model, text, layers=None):
    """Logits (V,) for the token after the ids in ``text``, by all layers or the first ones."""
    hidden = model.embed(torch.tensor([text], device=model.device))
    return model.logits(model.run_layers(hidden, 0, layers))[0, -1]


def choose_exit(draft, texts, options):
    """The first exit that is confident enough, or the last one; and its logits (R, V).

    Its confidence is the largest probability after any of the R ``texts``: to be sure about one of
    them is enough, as in the authors' code.
    """
    for exit_layer, threshold in zip(options.exits, [*options.thresholds, 0.0]):
        logits = torch.stack([logits_after(draft, text, exit_layer) for text in texts])
        if logits.softmax(dim=-1).max() > threshold:
            break
    return exit_layer, logits


def most_probable(probs, count):
    """The ``count`` most probable paths, in their order; of equal ones the first."""
    best = sorted(probs, key=probs.get, reverse=True)[:count]
    return {path: prob for path, prob in probs.items() if path in best}


def draft_tree(draft, context, levels, eos, options, noise):
    """{path: the exit that drafted its last token} of a tree of at most so many ``levels``."""
    shape = options.tree
    grows = isinstance(shape, GrowingShape)
    drafted_by = {}
    probs = {}  # path -> the estimated probability that it is accepted
    frontier = {(): 1.0}  # the paths that get children
    for level in range(levels):
        if not frontier:
            break
        exit_layer, logits = choose_exit(draft, [[*context, *path] for path in frontier], options)
        longer = {}
        for (path, prob), row in zip(frontier.items(), logits):
            q = options.distribution(row)  # (V,)
            g = noise(len(context) + len(path))  # (V,)
            estimates = (q.log() + g / 2).softmax(dim=-1)  # of what the target takes
            width = shape.top_k if grows else shape.widths[level]
            for token in estimates.topk(min(width, len(q))).indices.tolist():
                if estimates[token] > 0:
                    longer[*path, token] = prob * estimates[token].item()
        probs |= longer
        drafted_by |= dict.fromkeys(longer, exit_layer)
        frontier = {path: prob for path, prob in longer.items() if prob >= options.stop}
        frontier = {path: prob for path, prob in frontier.items() if path[-1] not in eos}
        if grows:
            frontier = most_probable(frontier, shape.top_k)
    sent = most_probable(probs, shape.size) if grows else probs
    return {path: drafted_by[path] for path in sent}


@torch.inference_mode()
def generate(target, draft, context, options, noise):
    """Yield the tree and the tokens that are emitted, step by step, up to EOS or the limit."""
    limit = len(context) + options.max_new_tokens
    eos = target.config.eos_token_ids
    path = ()
    while len(context) < limit and not (path and path[-1] in eos):
        # A step ends with a token of the target's own (the bonus token), which needs a position.
        levels = min(options.tree.depth, limit - len(context) - 1)
        tree = draft_tree(draft, context, levels, eos, options, noise)
        path = ()
        while not path or (path in tree and path[-1] not in eos):
            p = options.distribution(logits_after(target, [*context, *path]))  # (V,)
            token = (p.log() + noise(len(context) + len(path))).argmax().item()
            path = (*path, token)
        yield tree, list(path)
        context = [*context, *path]
