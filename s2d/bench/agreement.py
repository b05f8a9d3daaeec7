"""How often each exit of a draft says what the target says next, on the target's greedy answers.

A draft's own vocabulary counts: what is outside is wrong. Knows nothing about decoding with drafts.
"""

import torch

from ..chat import chat_template
from ..generate import generate
from ..soft import exit_hidden
from ..tokenizer import Tokenizer
from ..weights import load_model
from ..weights.config import read_config
from ..weights.get import draft_beside
from .specbench import choose_questions
from .tables import render


@torch.inference_mode()
def exits_right(draft, exits, tokens, expected):
    """Whether each of ``exits`` finds ``expected`` (T,) likeliest after ``tokens`` (T,): (E, T)."""
    right = []
    for hidden in exit_hidden(draft, tokens[None], exits):
        likeliest = draft.draft_logits(hidden[0]).argmax(dim=-1)  # (T,)
        if draft.draft_vocabulary is not None:
            likeliest = draft.draft_vocabulary[likeliest]
        right.append(likeliest == expected)
    return torch.stack(right)


def accuracy(draft, exits, texts):
    """Per cent of the answer tokens of ``texts``, pairs (ids, which are an answer's): E texts."""
    right = []
    for ids, is_answer in texts:
        tokens = torch.tensor(ids, device=draft.device)
        right.append(exits_right(draft, exits, tokens[:-1], tokens[1:])[:, is_answer[1:]])
    return [f"{each:.1%}" for each in torch.cat(right, dim=1).float().mean(dim=1).tolist()]


def report(args):
    """A table: the target's own first layers, as no training has seen them, then the draft."""
    path = args.draft or draft_beside(args.target)
    exits = read_config(path).exit_layers
    if not exits:
        raise ValueError(f"{path} has no exits, so it is no sorted draft; name another by --draft")
    target, template = load_model(args.target, args.device, args.dtype), chat_template(args.target)
    tokenizer, texts = Tokenizer(args.target), []
    for question in choose_questions(args.questions, "held-out", args.limit):
        prompt = tokenizer.encode_chat(question["turns"][:1], template)
        tokens = generate(target, prompt, method="ar", max_new_tokens=args.max_new_tokens).tokens
        texts.append((prompt + tokens, [False] * len(prompt) + [True] * len(tokens)))
    untrained = load_model(args.target, args.device, args.dtype, num_layers=exits[-1])
    draft = load_model(path, args.device, args.dtype)
    lines = [["", *(f"exit {each}" for each in exits)]]
    lines.append(["untrained", *accuracy(untrained, exits, texts)])
    lines.append([path.name, *accuracy(draft, exits, texts)])
    count = sum(sum(is_answer) for _, is_answer in texts)
    print(f"{count} tokens of {len(texts)} greedy answers\n\n{render(lines)}")
