"""How often each exit of a draft says what the target says next, on the target's greedy answers.

A draft's own vocabulary counts: what is outside is wrong. Knows nothing about decoding with drafts.
"""

from collections import defaultdict

import torch

from ..extras.draft_head import draft_head
from ..extras.many import generate_many
from ..ngram import ORDER, NGrams, top
from ..soft import exit_hidden
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model
from ..weights.config import read_config
from ..weights.names import draft_beside, find_target
from .methods import datastore_of
from .specbench import choose_questions, group_of
from .tables import render

BINS = 5  # of exit 0's confidence


@torch.inference_mode()
def exits_right(draft, exits, tokens, expected):
    """Whether each of ``exits`` finds ``expected`` (T,) likeliest after ``tokens`` (T,): (E, T)."""
    right = []
    for hidden in exit_hidden(draft, tokens[None], exits):
        head = draft_head(draft)
        likeliest = draft.logits(hidden[0], head).argmax(dim=-1)  # (T,)
        if head:
            likeliest = head.tokens[likeliest]
        right.append(likeliest == expected)
    return torch.stack(right)


def table_right(datastore, prompt, answer):
    """For each token of ``answer``: (exit 0's confidence, whether its likeliest token is right)."""
    ngrams, text, found = NGrams(datastore), list(prompt), []
    ngrams.text.grow(prompt)
    for token in answer:
        [(likeliest, confidence)] = top(ngrams.distribution(text[-ORDER:]), 1) or [(None, 0.0)]
        found.append((confidence, likeliest == token))
        ngrams.text.grow([token])
        text.append(token)
    return found


def report(args):
    """A table by group: exit 0, the draft's exits, and the target's own first layers, untrained.

    And how often exit 0 is right by its confidence.
    """
    source = find_target(args.target)
    path = args.draft or draft_beside(source)
    exits = read_config(path).exit_layers
    if not exits:
        raise ValueError(f"{path} has no exits, so it is no sorted draft; name another by --draft")
    target, template = load_model(source, args.device, args.dtype), chat_template(source)
    draft = load_model(path, args.device, args.dtype)
    untrained = load_model(source, args.device, args.dtype, num_layers=exits[-1])
    datastore, tokenizer = datastore_of(source, target.config), Tokenizer(source)
    right, sure = defaultdict(list), []
    questions = choose_questions(args.questions, "held-out", args.limit)
    prompts = [tokenizer.encode_chat(each["turns"][:1], template) for each in questions]
    answers = generate_many(target, prompts, method="ar", max_new_tokens=args.max_new_tokens)
    for question, prompt, generation in zip(questions, prompts, answers):
        answer = generation.tokens
        tokens = torch.tensor(prompt + answer, device=target.device)
        table = table_right(datastore, prompt, answer)
        rows = [torch.tensor([correct for _, correct in table], device=target.device)[None]]
        for model in (draft, untrained):
            rows.append(exits_right(model, exits, tokens[:-1], tokens[1:])[:, len(prompt) - 1 :])
        right[group_of(question)].append(torch.cat(rows))  # (1 + 2 E, tokens of the answer)
        sure += table
    right["all"] = sum(right.values(), [])
    trained, before = ([f"{kind} {each}" for each in exits] for kind in ("exit", "untrained"))
    lines = [["", "tokens", "exit 0", *trained, *before]]
    for group, parts in right.items():
        found = torch.cat(parts, dim=1).float()
        rates = [f"{each:.1%}" for each in found.mean(dim=1).tolist()]
        lines.append([group, str(found.shape[1]), *rates])
    print(f"{len(right['all'])} greedy answers: the likeliest token is right\n\n{render(lines)}\n")
    print(render(calibration(sure)))


def calibration(found):
    """How often exit 0 is right by its confidence, of pairs as in ``table_right``: rows of text."""
    lines, bins = [["exit 0 says", "positions", "mean", "right"]], defaultdict(list)
    for pair in found:
        bins[min(int(pair[0] * BINS), BINS - 1)].append(pair)
    for low, inside in sorted(bins.items()):
        shares = [len(inside) / len(found), *(sum(column) / len(inside) for column in zip(*inside))]
        lines.append(
            [f"{low / BINS:.1f}-{(low + 1) / BINS:.1f}", *(f"{each:.0%}" for each in shares)]
        )
    return lines
