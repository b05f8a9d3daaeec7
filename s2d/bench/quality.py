"""What roots from the target cost: exact answers of targets, and how likely they find their own.

That is the one method that is not lossless, beside the target alone, on held-out prompts. Knows
nothing about speed.
"""

from itertools import islice
from statistics import mean

import torch

from ..extras.many import generate_many
from ..program import one_line
from ..text.tokenizer import Tokenizer
from ..train.corpus import EXACT_GROUPS, conversations
from ..weights import load_model
from ..weights.get import WEIGHTS, find_target
from .tables import render

ROOTS = dict(method="mcsd", tree=(6, 1, 1, 1, 1, 1), init="target")
WAYS = {"": {"method": "ar"}, " --init target": ROOTS}
WAYS[" --init target --coupled"] = ROOTS | {"coupled": True}  # which is lossless


@torch.inference_mode()
def answers(model, tokenizer, group, count, **options):
    """Greedy answers to ``count`` prompts of ``group``: (exact match, log-probability).

    The former is the part that is right to the letter, the latter the model's mean over all tokens
    of these answers. ``options`` are those of ``generate_many``.
    """
    held_out = islice(conversations(0, "held-out", [group]), count)
    questions, expected = zip(*(conversation.turns[0] for conversation in held_out))
    prompts = [tokenizer.encode_chat([question]) for question in questions]
    right, log_probs = 0, []
    found = generate_many(model, prompts, max_new_tokens=128, **options)
    for prompt, text, answer in zip(prompts, expected, found):
        right += tokenizer.decode(answer.tokens) == text
        whole = torch.tensor([prompt + answer.tokens], device=model.device)
        rows = model(whole[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
        log_probs.append(rows.gather(1, whole[0, len(prompt) :, None]).cpu())
    return right / count, torch.cat(log_probs).mean().item()


def report(args):
    """A table with three rows a target: alone, and with roots from itself in two ways."""
    draft = load_model(WEIGHTS / "mini-draft", args.device)
    lines = [["", *EXACT_GROUPS, "mean", "log-probability"]]
    for folder in [find_target(name) for name in args.targets]:
        model, tokenizer = load_model(folder, args.device), Tokenizer(folder)
        for what, way in WAYS.items():
            how = way if way["method"] == "ar" else way | {"draft": draft}
            found = [answers(model, tokenizer, each, args.count, **how) for each in EXACT_GROUPS]
            exact, log_probs = zip(*found)
            rates = [f"{score:.1%}" for score in (*exact, mean(exact))]
            lines.append([one_line(folder.name) + what, *rates, f"{mean(log_probs):.3f}"])
    print(f"exact match at T=0, {args.count} held-out prompts per group, and the target's mean")
    print(f"log-probability of a token; --init target: mcsd, six roots\n\n{render(lines)}")
