"""How good answers are: whether they are right, and how likely the target finds them.

Knows nothing about speed.
"""

from itertools import islice

import torch

from ..extras.many import generate_many
from ..train.corpus import conversations


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
