"""Is a method lossless here? Where its answers differ from the target's own: rounding, or a bug?

A pass over many tokens and one over a single token run different kernels, so below float64 two
nearly equal logits can swap their order. Such a tie is told from a bug by the same model in
float64, and by how far the target's plain passes are from that: a pass over a tree may be as far
from it, and no farther. Above T = 0 the noise is part of the logits.
"""

from itertools import zip_longest
from math import inf

import torch

from ..generate import start
from ..sampling import Sampler

PASSES = 8  # of each method, each from another question
NEW_TOKENS = 24  # after a prompt, among whose steps one is chosen
# Times the plain passes' error: up to the first all is well, from the second on something is wrong.
AS_GOOD, WORSE = 1.25, 1.4
LEAST = 1e-12  # error, as the target may be in float64 itself


@torch.inference_mode()
def check(name, precise, runs, records):
    """Print a line for each of ``runs`` {method: (target, draft, options)}; 1 for a bug, or 0.

    The first of them is "ar", not compiled; ``precise`` is the same target in float64.
    """
    plain, code = runs["ar"][0], 0
    alone = {key(record): record for record in records if record["method"] == "ar"}
    prompts = list({r["question_id"]: r["prompts"][0] for r in alone.values()}.values())[:PASSES]
    for method, run in list(runs.items())[1:]:
        own = [r for r in records if r["method"] == method and comparable(r)]
        if not own:
            print(f"{name} {method}: not compared, with rejection sampling its text is another")
            continue
        passes = [observe_pass(precise, plain, *run, *each) for each in enumerate(prompts)]
        pairs = ((alone[key(record)], record) for record in own)
        differences = [first_difference(precise, plain, *pair) for pair in pairs]
        line, right = verdict(passes, [each for each in differences if each])
        exact = all(each.exact for record in own for each in record["generations"])
        claim = "" if exact else "not a lossless method; "
        print(f"{name} {method}: {claim}{line}", flush=True)
        if exact and right is False:
            code = 1
    print()
    return code


def key(record):
    """What a method's record and the target's own have in common."""
    temperature = record["generations"][0].plan.options.temperature
    return record["round"], record["question_id"], temperature


def comparable(record):
    """Whether its text should be the target's own."""
    plan = record["generations"][0].plan
    return plan.coupled or plan.options.temperature == 0


def plain_logits(model, context, paths):
    """Logits (N+1, V) after each path of tokens behind ``context``: no tree mask, no KV cache."""
    tokens = (torch.tensor([context + path], device=model.device) for path in paths)
    return torch.stack([model(each)[0, -1].cpu() for each in tokens])


def observe_pass(precise, plain, target, draft, options, number, prompt):
    """Logits (3, N+1, V) of one step: by its pass over the tree, by plain passes, in float64.

    It is the step ``number``, counted round and round, of a greedy generation.
    """
    generation = start(target, prompt, draft, max_new_tokens=NEW_TOKENS, **options)
    steps = list(generation)
    step = steps[number % len(steps)]
    context, paths = (prompt + generation.tokens)[: step.n], [[]]
    tree = step.proposal.tree
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append([*paths[parent + 1], token])
    others = (plain_logits(model, context, paths) for model in (plain, precise))
    return torch.stack([step.logits.cpu().double(), *(each.double() for each in others)])


def first_difference(precise, plain, alone, other):
    """(gap, error) where two records first differ: later turns have another context. Or None.

    The gap is between the two tokens, in float64 and with the noise; the error the plain pass's.
    """
    turns = zip(alone["prompts"], alone["tokens"], other["tokens"], alone["generations"])
    for prompt, own, theirs, generation in turns:
        for position, pair in enumerate(zip_longest(own, theirs)):
            if None in pair:
                return inf, 0.0  # one answer has ended
            if pair[0] != pair[1]:
                tokens = prompt + own[:position]
                noise = noise_of(generation.plan.options, len(tokens), plain.config.vocab_size)
                exact, here = (
                    plain_logits(m, tokens, [[]])[0, list(pair)] for m in (precise, plain)
                )
                gap = (exact + noise[list(pair)]).diff().abs().item()
                return gap, (here - exact).abs().max().item()
    return None


def noise_of(options, position, vocab_size):
    """What is added to logits (V,) above T = 0: logits - T log e is largest where p / e is."""
    noise = Sampler(options.seed, "cpu").numbers_at(position, vocab_size)
    return -options.temperature * noise.log()


def verdict(passes, differences):
    """(one line on a method, whether it is lossless: True, False, or None for cannot tell).

    A tie is two tokens no farther apart than two passes can move them, each by as much as plain
    passes are wrong there, or anywhere about a likely token.
    """
    checked, plain, exact = torch.cat(passes, dim=1)  # (N+1 of all passes, V) each
    largest = (plain - exact).gather(1, exact.topk(2).indices).abs().max().item() + LEAST
    ratio = (rms(checked - exact) + LEAST) / (rms(plain - exact) + LEAST)
    bugs = sum(gap > 2 * max(largest, error) for gap, error in differences)
    line = f"logits {ratio:.2f} times as far from the truth as a plain pass's"
    if bugs or ratio > WORSE:
        differ = f"{len(differences)} different answers, {bugs} by more than rounding explains"
        return f"BUG: {line}; {differ}", False
    if ratio > AS_GOOD:
        return f"CANNOT TELL: {line}; try a wider dtype", None
    if not differences:
        return f"identical; {line}", True
    return (
        f"{len(differences)} tie(s) by rounding, largest gap {max(differences)[0]:.1e}; {line}",
        True,
    )


def rms(errors):
    return errors.square().mean().sqrt().item()
