"""The experiments of improved MCSD (arXiv 2409.10644): what was published, what is measured."""

import time
from functools import partial
from itertools import islice
from statistics import mean, median

import torch

from ..extras.decision import FEATURES
from ..extras.many import generate_many
from ..program import tell
from ..train.corpus import EXACT_GROUPS, conversations
from ..tree import KConfig, TreeAttention
from .lab import SIZES, Experiment, Finding, Lab


def quality(lab, about):
    """A column is a target: are greedy answers right to the letter, how likely does it find them.

    The log-probability is the target's own, the mean over all tokens.
    """
    result, count = {}, 8 * lab.args.limit
    for size in SIZES:
        target, column = lab.target(size), result.setdefault(size, {})
        for name, row in about.rows.items():
            draft, options = lab.ready(row, size)
            ask = partial(answers, target, draft, options, lab.tokenizer, count)
            right, log_probs = zip(*map(ask, EXACT_GROUPS))
            column[name] = {"right": mean(right), "log-probability": mean(log_probs)}
            tell(f"{size}: {name}")
    return result


@torch.inference_mode()
def answers(target, draft, options, tokenizer, count, group):
    """(the part that is right, the mean log-probability) of answers to prompts of one group."""
    held_out = islice(conversations(0, "held-out", [group]), count)
    questions, expected = zip(*(conversation.turns[0] for conversation in held_out))
    prompts = [tokenizer.encode_chat([question]) for question in questions]
    right, log_probs = 0, []
    found = generate_many(target, prompts, draft, max_new_tokens=128, **options)
    for prompt, text, answer in zip(prompts, expected, found):
        right += tokenizer.decode(answer.tokens) == text
        whole = torch.tensor([prompt + answer.tokens], device=target.device)
        rows = target(whole[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
        log_probs.append(rows.gather(1, whole[0, len(prompt) :, None]).cpu())
    return right / count, torch.cat(log_probs).mean().item()


def masks(lab, about):
    """A column is a tree: microseconds for the masks of all its levels."""
    return {column: time_masks(widths) for column, widths in MASKED.items()}


def time_masks(widths):
    parents = KConfig(widths).parents()
    whole = TreeAttention(parents, torch.float32)
    ends = [0, *(len(KConfig(widths[:depth]).parents()) for depth in range(1, len(widths) + 1))]
    times = {"a slice of one mask": [], "made anew": []}
    for _ in range(50):
        began = time.perf_counter()
        for start, end in zip(ends, ends[1:]):
            whole.span(200, 200 + start, 200 + end)
        sliced = time.perf_counter()
        for start, end in zip(ends, ends[1:]):
            TreeAttention(parents[:end], torch.float32).span(200, 200 + start, 200 + end)
        times["made anew"].append(1e6 * (time.perf_counter() - sliced))
        times["a slice of one mask"].append(1e6 * (sliced - began))
    return {name: {"µs": median(each)} for name, each in times.items()}


MASKED = {"fork of 6, 10 deep": (6, *(1,) * 9), "4,2,2,1": (4, 2, 2, 1), "10,4,2": (10, 4, 2)}
CONFIGS = ((1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (4, 2, 2, 1), (2, 4, 3, 1, 1))
# From exit 3: decision models learn from chains that leave there, or at exit 2.
FORK = dict(method="mcsd", tree=(6, *(1,) * 9), exits=(3,))
SHORT_FORK = dict(method="mcsd", tree=(6, 1, 1, 1, 1, 1))
LOSSY, COUPLED = {"init": "target"}, {"init": "target", "coupled": True}
CHAIN = {"method": "s2d"}
DRAFTED, PUBLISHED = "roots from the draft", "roots from the target, as published"
DECISIONS = {"fork": FORK, "fork, path under 0.6": FORK | {"stop": 0.6}}
DECISIONS |= {"s2d, fixed length": CHAIN | {"stop": 0.0}, "s2d": CHAIN}
for features in FEATURES:
    DECISIONS[f"fork, decision model ({features})"] = FORK | {"stop": features}
    DECISIONS[f"s2d, decision model ({features})"] = CHAIN | {"stop": features}

of_mcsd = partial(Experiment, source="improved MCSD, arXiv 2409.10644")
timed = partial(of_mcsd, measure=Lab.timed, measures=("speedup", "mat", "accepted"))
EXPERIMENTS = {
    "configs": of_mcsd(
        "Trees of fixed shape",
        measure=Lab.timed,
        measures=("speedup", "mat"),
        rows={str(each): {"method": "mcsd", "tree": each} for each in CONFIGS},
        findings=[Finding([str(CONFIGS[-1])], [str(each) for each in CONFIGS[:-1]], factor=1.0)],
        note="2,4,3,1,1 is the best for a draft of 68M and Llama-2-7B",
    ),
    "roots": timed(
        "Roots from the target",
        rows={
            DRAFTED: SHORT_FORK,
            PUBLISHED: SHORT_FORK | LOSSY,
            "roots from the target, coupled": SHORT_FORK | COUPLED,
        },
        findings=[
            Finding([PUBLISHED], [DRAFTED], "accepted", factor=1.0),
            Finding([PUBLISHED], [DRAFTED]),
        ],
        note="up to 164 % more acceptance and 75 % more speed than MCSD by all of it (first "
        "version), 27.5 % by static trees with such roots (last version)",
    ),
    "quality": of_mcsd(
        "What roots from the target cost",
        measure=quality,
        measures=("right", "log-probability"),
        rows={
            "the target alone": {"method": "ar", "coupled": True},
            "as published": SHORT_FORK | LOSSY,
            "coupled": SHORT_FORK | COUPLED,
        },
        findings=[Finding(["the target alone"], ["as published"], "right", factor=1.0)],
        note="not lossless (last version)",
    ),
    "masks": of_mcsd(
        "The dynamic sliced mask",
        measure=masks,
        measures=("µs",),
        rows={},
        findings=[Finding(["made anew"], ["a slice of one mask"], "µs")],
        note="made once for the deepest tree",
    ),
    "decisions": timed(
        "Decision models, by both sets of features",
        rows=DECISIONS,
        findings=[Finding([f"fork, decision model ({each})" for each in FEATURES], ["fork"])],
        note="a threshold from 0.4 to 0.5; figures of its ablation are not at hand",
        trained=True,
    ),
}
