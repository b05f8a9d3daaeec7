"""S2D by definition (T > 0, fixed trees, exits with layers): whole models over the whole text."""

import torch


def logits_after(model, tokens, layers=None):  # (V,), of all layers or at an exit
    hidden = model.run_layers(model.embed(torch.tensor([tokens])), 0, layers)
    return model.logits(hidden)[0, -1]


def propose(draft, tokens, widths, sampling):
    """{path of tokens: those proposed after it, and the q (V,) they come from}, level by level."""
    options, proposed, level, likelihood = sampling.options, {}, [()], 1.0
    for width in widths:  # children per path; (1, 1, 1) is a chain
        for layers, threshold in zip(options.exits, options.thresholds):
            logits = [logits_after(draft, [*tokens, *path], layers) for path in level]
            confidence = max(row.softmax(dim=-1).max().item() for row in logits)
            if confidence > threshold:
                break  # the first exit that is confident enough drafts this level, or the last
        for path, row in zip(level, logits):
            q = sampling.warp(row)  # temperature, top-k and top-p
            if sampling.coupled:
                noise = sampling.noise([len(tokens) + len(path)])[0]
                children = (q / noise.sqrt()).topk(width).indices
            else:
                children = sampling.candidates(q[None], width)[0]
            proposed[path] = children.tolist(), q
        level = [(*path, token) for path in level for token in proposed[path][0]]
        likelihood *= confidence
        if likelihood < options.stop:
            break
    return proposed


def verify(p, children, q, position, sampling):
    """The next token, a draw from p (V,), and one of the children where that can be."""
    if sampling.coupled:  # the draft met the same noise
        return (p / sampling.noise([position])[0]).argmax().item()
    for token in [each for each in children if q[each] > 0]:  # rejection sampling
        if sampling.accept((p[token] / q[token])[None]):
            return token
        p, q = (p - q).clamp(min=0.0), q.index_fill(0, torch.tensor(token), 0.0)
        p, q = p / p.sum(), q / q.sum()
    return sampling.draw(p[None]).item()


def generate(target, draft, tokens, limit, sampling):
    """Yields what each step proposes and the tokens it emits, up to ``limit`` tokens or EOS."""
    token, eos = None, target.config.eos_token_ids
    while len(tokens) < limit and token not in eos:
        widths = sampling.options.tree[: limit - len(tokens) - 1]  # the last token needs no draft
        proposed, path, accepted = propose(draft, tokens, widths, sampling), [], True
        while accepted:
            children, q = proposed.get(tuple(path), ([], None))
            p = sampling.warp(logits_after(target, [*tokens, *path]))
            token = verify(p, children, q, len(tokens) + len(path), sampling)
            path = [*path, token]
            accepted = token in children and token not in eos
        yield proposed, path
        tokens = tokens + path
