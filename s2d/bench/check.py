"""Is it lossless here? Greedy answers against the target alone's, and the passes that checked drafts against plain ones.

A pass over many tokens and a pass over one run different kernels, so in less than double precision two nearly equal
logits can change places. Such a tie is told from a bug by what is true, the same model in float64, and by how far the
target's own plain passes are from that: a step's pass over a tree may be as far from it, and no farther. The target and
its float64 are not in memory together. Knows nothing about timing.
"""

from dataclasses import dataclass
from itertools import islice

import torch

from ..decode import generate

PASSES = 8  # of each method that are compared, each from another question
NEW_TOKENS = 24  # after a prompt, among whose steps one is chosen
AS_GOOD, WORSE = (
    1.15,
    1.4,
)  # times the plain passes' error: up to the first nothing is wrong, from the second on something is


def check_methods(load, dtype, drafts, records, methods):
    """Yield (method, a line on it, whether it is right) for all ``methods`` but "ar", whose answers they should give.

    ``load(dtype)``, with ``compile`` where a method is compiled, is the target that made the greedy ``records``; ``drafts``
    {whether compiled: draft} and ``methods`` are those it made them with. Right is True, False or None for cannot tell; a method
    that does not claim to be lossless is never wrong.
    """
    alone = {record["question_id"]: record for record in records if record["method"] == "ar"}
    prompts = [record["prompts"][0] for record in alone.values()][:PASSES]
    target, found = load(dtype), {}
    targets = {compiled: load(dtype, compile=True) if compiled else target for compiled in drafts}
    for method, (compiled, options) in methods.items():
        if method == "ar":
            continue
        own, differences = [record for record in records if record["method"] == method], []
        for record in own:
            expected = alone[record["question_id"]]
            turns = zip(expected["prompts"], expected["tokens"], record["tokens"])
            different = filter(None, (first_difference(target, *turn) for turn in turns))
            differences += islice(
                different, 1
            )  # from the first different answer on, later turns have another context
        passes = [observe_pass(targets[compiled], target, drafts[compiled], options, prompt, number)
                  for number, prompt in enumerate(prompts)]  # fmt: skip
        found[method] = passes, differences, all(all(record["exact"]) for record in own)
    del target, targets  # not in memory together with what follows
    precise = load("float64")
    for method, (passes, differences, exact) in found.items():
        line, right = verdict(precise, passes, differences)
        yield (method, line, right) if exact else (method, f"not a lossless method; {line}", None)


@dataclass
class Pass:
    """What a step's target pass said about N+1 places, and what plain passes over the paths of its tree say.

    ``paths`` (P, T) are the context followed by each root-to-leaf path, filled up with zeros; ``where`` (N+1, 2) the path
    and the place in it of the context's end and of every node; ``checked`` and ``plain`` (N+1, V) the logits there.
    """

    paths: torch.Tensor
    where: torch.Tensor
    checked: torch.Tensor
    plain: torch.Tensor


@dataclass
class Difference:
    """Where an answer first differs from the target's own: ``tokens`` lead there, then one wrote a and the other b."""

    tokens: list[int]
    a: int
    b: int
    plain: torch.Tensor  # (2,) the target's own logits of a and b


def paths_of(context, tree):
    """(paths, where) as in Pass, for a ``context``, a list, and a TokenTree."""
    parents, tokens = tree.parents.tolist(), tree.tokens.tolist()
    leaves = [node for node in range(len(tree)) if node not in parents] or [-1]
    paths, where = [], {-1: (0, len(context) - 1)}
    for number, node in enumerate(leaves):
        path = []
        while node >= 0:
            path.insert(0, node)
            node = parents[node]
        paths.append(context + [tokens[node] for node in path])
        where |= {node: (number, len(context) + depth) for depth, node in enumerate(path)}
    longest = max(map(len, paths))
    filled = [path + [0] * (longest - len(path)) for path in paths]
    return torch.tensor(filled), torch.tensor([where[node] for node in range(-1, len(tree))])


def plain_logits(model, paths, where):
    """Logits (N+1, V) at the places ``where`` of a cache-free causal pass over ``paths``, on the CPU."""
    hidden = model.run_layers(model.embed(paths.to(model.device)))
    return model.logits(hidden[where[:, 0], where[:, 1]]).cpu()


@torch.inference_mode()
def observe_pass(target, plain, draft, options, prompt, number):
    """One Pass of a greedy generation by ``options``: that of its step ``number``, counted round and round.

    ``plain`` is the ``target`` that takes the plain passes: itself, or where it is compiled the same model that is not.
    """
    steps, context = [], list(prompt)
    generate(target, prompt, draft=draft, max_new_tokens=NEW_TOKENS, **options, on_tokens=context.extend,
             on_step=lambda step: steps.append((list(context), step.proposal.tree, step.logits.cpu())))  # fmt: skip
    context, tree, checked = steps[number % len(steps)]
    paths, where = paths_of(context, tree)
    return Pass(paths, where, checked, plain_logits(plain, paths, where))


@torch.inference_mode()
def first_difference(target, prompt, alone, other):
    """None where ``other`` is the target's own answer ``alone``, else the first Difference; tokens -1 where one ended."""
    if alone == other:
        return None
    position = next(
        (i for i, (a, b) in enumerate(zip(alone, other)) if a != b), min(len(alone), len(other))
    )
    a, b = (answer[position] if position < len(answer) else -1 for answer in (alone, other))
    tokens = prompt + alone[:position]
    return Difference(
        tokens, a, b, target(torch.tensor([tokens], device=target.device))[0, -1, [a, b]].cpu()
    )


@torch.inference_mode()
def verdict(precise, passes, differences):
    """One line on a method's passes and differences, and whether it is good: True, False, or None for cannot tell.

    ``precise`` is the target in float64. A tie is two tokens no farther apart than two passes can move them, each by as
    much as the target's own pass is wrong about one of the two there. Farther apart, but by no more than its passes are
    ever wrong about a likely token, they are in doubt.
    """
    checked, plain, worst = pass_errors(precise, passes)
    ratio, gaps, doubts, bugs = checked / plain, [], 0, 0
    for each in differences:
        if min(each.a, each.b) < 0:
            return (
                "BUG: an answer ended where the target's own goes on, or went on where that ended",
                False,
            )
        exact = precise(torch.tensor([each.tokens], device=precise.device))[
            0, -1, [each.a, each.b]
        ].cpu()
        gaps.append((exact[0] - exact[1]).abs().item())
        noise = (each.plain - exact).abs().max().item()
        doubts += 2 * noise < gaps[-1] <= 2 * worst
        bugs += gaps[-1] > 2 * max(noise, worst)
    error = f"logits {ratio:.2f} times as far from the truth as a plain pass's"
    differ = f"{len(gaps)} different answer{'s'[: len(gaps) != 1]}"
    if bugs or ratio > WORSE:
        return f"BUG: {error}; {differ}, {bugs} by more than rounding explains", False
    if doubts or ratio > AS_GOOD:
        return f"CANNOT TELL: {error}; {differ}, {doubts} in doubt; try a wider dtype", None
    ties = (
        f"{len(gaps)} tie{'s'[: len(gaps) != 1]} by rounding, largest gap {max(gaps):.1e}"
        if gaps
        else "identical"
    )
    return f"{ties}; {error}", True


def pass_errors(precise, passes):
    """Root mean square error of the checked and of the plain logits, and the plain ones' largest at a likely token."""
    squares, largest, count = torch.zeros(2, dtype=torch.float64), 0.0, 0
    for each in passes:
        exact = plain_logits(precise, each.paths, each.where)
        errors = torch.stack((each.checked - exact, each.plain - exact))  # (2, N+1, V)
        squares, count = squares + errors.square().sum(dim=(1, 2)), count + exact.numel()
        likely = exact.topk(2, dim=-1).indices
        largest = max(largest, errors[1].gather(1, likely).abs().max().item())
    smallest = 1e-12  # the target may be in float64 itself
    checked, plain = ((squares / count).sqrt() + smallest).tolist()
    return checked, plain, largest + smallest
