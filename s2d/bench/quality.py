"""What the miniatures know: exact answers of the targets, next-token accuracy of the draft's exits.

A third table shows what the one method that is not lossless, target-initialised roots, does to the
targets' answers. Prompts are held-out ones. Knows nothing about speed.
"""

from itertools import islice
from statistics import mean

import torch

from ..generate import generate
from ..program import one_line
from ..text.tokenizer import Tokenizer
from ..train.corpus import EXACT_GROUPS, conversations
from ..train.dialogues import encode_dialogue
from ..weights import load_model
from ..weights.get import WEIGHTS, find_target
from .agreement import exits_right

DRAFT = WEIGHTS / "mini-draft"
LOSSY = dict(method="mcsd", tree=(6, 1, 1, 1, 1, 1), init="target")


@torch.inference_mode()
def answers(model, tokenizer, group, count, **options):
    """Greedy answers to ``count`` prompts of ``group``: (exact match, log-probability).

    The former is the part that is right to the letter, the latter the model's mean over all tokens
    of these answers. ``options`` are those of ``generate``.
    """
    right, log_probs = 0, []
    for conversation in islice(conversations(0, "held-out", [group]), count):
        question, answer = conversation.turns[0]
        prompt = tokenizer.encode_chat([question])
        tokens = generate(model, prompt, max_new_tokens=128, **options).tokens
        right += tokenizer.decode(tokens) == answer
        whole = torch.tensor([prompt + tokens], device=model.device)
        rows = model(whole[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
        log_probs.append(rows.gather(1, whole[0, len(prompt) :, None]).cpu())
    return right / count, torch.cat(log_probs).mean().item()


def row(*cells):
    print("".join(f"{cell:>16}" for cell in cells), flush=True)


def results_of(folder, count, device, **options):
    """What ``answers`` says of the target in ``folder``, by group, with the means as the last."""
    model, tokenizer = load_model(folder, device), Tokenizer(folder)
    results = [answers(model, tokenizer, group, count, **options) for group in EXACT_GROUPS]
    return [*results, [mean(values) for values in zip(*results)]]


def accuracy(draft, exits, texts):
    """Per cent of the answer tokens of ``texts``, pairs (ids, which are an answer's): E texts."""
    right = []
    for ids, is_answer in texts:
        tokens = torch.tensor(ids, device=draft.device)
        right.append(exits_right(draft, exits, tokens[:-1], tokens[1:])[:, is_answer[1:]])
    return [f"{each:.1%}" for each in torch.cat(right, dim=1).float().mean(dim=1).tolist()]


def report(args):
    """Three tables; the draft's exits stand beside the same layers of a target."""
    count, device, alone = args.count, args.device, {}
    print(f"exact match at T=0, {count} held-out prompts per group")
    row("target", *EXACT_GROUPS, "mean")
    for folder in [find_target(name) for name in args.targets]:
        alone[folder] = results_of(folder, count, device, method="ar")
        row(one_line(folder.name), *(f"{score:.1%}" for score, _ in alone[folder]))
    draft, tokenizer = load_model(DRAFT, device), Tokenizer(DRAFT)
    exits, held_out = draft.config.exit_layers, islice(conversations(1, "held-out"), count)
    texts = [encode_dialogue(tokenizer, sum(each.turns, ())) for each in held_out]
    print(f"\nnext-token accuracy on held-out answers, {count} conversations")
    row("", *(f"exit {e}" for e in exits))
    first = load_model(WEIGHTS / "mini-7b", device, num_layers=exits[-1])
    row("before SoFT", *accuracy(first, exits, texts))
    row(DRAFT.name, *accuracy(draft, exits, texts))
    what = "exact match, mean log-probability of a token"
    print(f"\nroots from the target (mcsd, tree 6,1,1,1,1,1): {what}")
    row("target", "ar", "lossy", "ar", "lossy")
    for folder, (*_, (score, log_prob)) in alone.items():
        lossy, lossy_log_prob = results_of(folder, count, device, draft=draft, **LOSSY)[-1]
        changes = f"{score:.1%}", f"{lossy:.1%}", f"{log_prob:.3f}", f"{lossy_log_prob:.3f}"
        row(one_line(folder.name), *changes)
