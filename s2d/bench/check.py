"""Is it lossless here? Answers against the target's own, and the checked logits against plain ones.

A pass over many tokens and one over a single token run different kernels, so below float64 two
nearly equal logits can swap their order. Such a tie is told from a bug by what is true, the same
model in float64, and by how far the target's plain passes are from that: a step's pass over a tree
may be as far from it, and no farther. Above T = 0 the race is part of the logits, and all else is
the same. Knows nothing about timing.
"""

from collections import namedtuple
from itertools import zip_longest

import torch

from ..generate import start
from ..program import tell
from ..sampling import Sampler
from ..tree import ancestor_mask

PASSES = 8  # of each method that are compared, each from another question
NEW_TOKENS = 24  # after a prompt, among whose steps one is chosen
# Times the plain passes' error: up to the first all is well, from the second on something is wrong.
AS_GOOD, WORSE = 1.25, 1.4
# What a step's target pass over a tree says, ``checked``, and what plain passes: logits (N+1, V).
Pass = namedtuple("Pass", "context tree checked plain")
# Where an answer first differs: ``tokens`` lead there, the target wrote a and the method b, -1 for
# one that had ended; ``plain`` (2,) are the target's own logits of these, and ``race`` (2,) what is
# added to logits to decide.
Difference = namedtuple("Difference", "tokens a b plain race")


def observe_methods(models, records, methods):
    """{method: (passes, differences, whether it claims to be lossless)} for all but "ar".

    ``models`` {whether compiled: (target, draft)} made the ``records`` with ``methods`` {name:
    (whether compiled, options of ``generate``)}. Of those above T = 0 the coupled ones count.
    """
    alone = {key(record): record for record in records if record["method"] == "ar"}
    prompts = list({r["question_id"]: r["prompts"][0] for r in alone.values()}.values())[:PASSES]
    plain, found = models[False][0], {}
    for method, (compiled, options) in methods.items():
        own = [r for r in records if r["method"] == method and comparable(r)]
        if method != "ar" and not own:
            tell(f"{method}: not compared, above T = 0 its text is another one (see coupled)")
        elif method != "ar":
            differences = [first_difference(plain, alone[key(r)], r) for r in own]
            given = plain, *models[compiled], options
            passes = [observe_pass(*given, *each) for each in enumerate(prompts)]
            exact = all(each.exact for record in own for each in record["generations"])
            found[method] = passes, [each for each in differences if each], exact
    return found


def key(record):
    """What a method's record and the target's own have in common."""
    options = record["generations"][0].plan.options
    return record["question_id"], options.temperature, options.seed


def comparable(record):
    """Whether its text should be the target's own."""
    plan = record["generations"][0].plan
    return plan.coupled or plan.options.temperature == 0


def plain_logits(model, context, tree):
    """Logits (N+1, V) by a plain pass over each root-to-leaf path: no tree mask, no KV cache."""
    ancestors, rows = ancestor_mask(tree.parents).cpu(), {}  # (N, N) of each node, with it
    leaves = (ancestors.sum(dim=0) == 1).nonzero()[:, 0].tolist()
    for path in [ancestors[leaf].nonzero()[:, 0].tolist() for leaf in leaves] or [[]]:
        tokens = torch.tensor([context + tree.tokens[path].tolist()], device=model.device)
        hidden = model.run_layers(model.embed(tokens))[0, len(context) - 1 :]
        rows |= zip([-1, *path], model.logits(hidden).cpu())
    return torch.stack([rows[node] for node in range(-1, len(tree))])


@torch.inference_mode()
def observe_pass(plain, target, draft, options, number, prompt):
    """One Pass of a greedy generation: that of its step ``number``, counted round and round.

    ``plain`` takes the plain passes: the target or, where it is compiled, the same not compiled.
    """
    generation = start(target, prompt, draft, max_new_tokens=NEW_TOKENS, **options)
    steps = list(generation)
    step = steps[number % len(steps)]
    context, tree = (prompt + generation.tokens)[: step.n], step.proposal.tree
    return Pass(context, tree, step.logits.cpu(), plain_logits(plain, context, tree))


@torch.inference_mode()
def first_difference(target, alone, other):
    """The first Difference of two records, or None: afterwards turns have another context."""
    turns = zip(alone["prompts"], alone["tokens"], other["tokens"], alone["generations"])
    for prompt, own, theirs, generation in turns:
        for position, (a, b) in enumerate(zip_longest(own, theirs, fillvalue=-1)):
            if a != b:
                tokens, options = prompt + own[:position], generation.plan.options
                race = race_of(options, len(tokens), target.config.vocab_size)[[a, b]]
                return Difference(tokens, a, b, last_logits(target, tokens, [a, b]), race)


def race_of(options, position, vocab_size):
    """What decides beside the logits (V,): logits - T log e is largest where p / e is, if T > 0."""
    numbers = Sampler(options.seed, "cpu").numbers_at(position, vocab_size)
    return -options.temperature * numbers.log()


def last_logits(model, tokens, pair):
    """The logits (2,) of a pair of tokens after ``tokens``."""
    return model(torch.tensor([tokens], device=model.device))[0, -1, pair].cpu()


@torch.inference_mode()
def verdict(precise, passes, differences):
    """One line on a method, and whether it is lossless: True, False, or None for cannot tell.

    ``precise`` is the target in float64. A tie is two tokens no farther apart than two passes can
    move them, each by as much as the target's own pass is wrong about one of the two there. Farther
    apart, but by no more than its passes are ever wrong about a likely token, they are in doubt.
    """
    checked, plain, worst = pass_errors(precise, passes)
    ratio, gaps, doubts, bugs = checked / plain, [], 0, 0
    for each in differences:
        if min(each.a, each.b) < 0:
            return "BUG: an answer ends where the target's own goes on, or goes on there", False
        exact = last_logits(precise, each.tokens, [each.a, each.b])
        gap = (exact + each.race).diff().abs().item()
        noise = (each.plain - exact).abs().max().item()
        gaps.append(gap)
        doubts += 2 * noise < gap <= 2 * worst
        bugs += gap > 2 * max(noise, worst)
    error = f"logits {ratio:.2f} times as far from the truth as a plain pass's"
    several = "s"[: len(gaps) != 1]
    differ = f"{error}; {len(gaps)} different answer{several}"
    if bugs or ratio > WORSE:
        return f"BUG: {differ}, {bugs} by more than rounding explains", False
    if doubts or ratio > AS_GOOD:
        return f"CANNOT TELL: {differ}, {doubts} in doubt; try a wider dtype", None
    if not gaps:
        return f"identical; {error}", True
    return f"{len(gaps)} tie{several} by rounding, largest gap {max(gaps):.1e}; {error}", True


def pass_errors(precise, passes):
    """RMS error of checked and of plain logits, and the plain ones' largest at a likely token."""
    squares, largest, count = torch.zeros(2, dtype=torch.float64), 0.0, 0
    for each in passes:
        exact = plain_logits(precise, each.context, each.tree)
        errors = torch.stack((each.checked - exact, each.plain - exact))  # (2, N+1, V)
        squares, count = squares + errors.square().sum(dim=(1, 2)), count + exact.numel()
        likely = exact.topk(2, dim=-1).indices
        largest = max(largest, errors[1].gather(1, likely).abs().max().item())
    smallest = 1e-12  # the target may be in float64 itself
    checked, plain = ((squares / count).sqrt() + smallest).tolist()
    return checked, plain, largest + smallest
