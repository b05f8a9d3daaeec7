"""How often each exit of a draft says what the target says next, on the target's greedy answers.

A draft's own vocabulary counts: what is outside is wrong. Knows nothing about decoding with drafts.

python -m s2d.bench agreement --target weights/mini-13b     # the draft beside it
"""

from pathlib import Path

import torch

from ..chat import chat_template
from ..generate import generate
from ..program import Parser
from ..soft import exit_hidden
from ..tokenizer import Tokenizer
from ..weights import DTYPES, load_model
from ..weights.config import read_config
from ..weights.get import draft_beside
from .specbench import choose_questions
from .tables import render


@torch.inference_mode()
def exits_right(draft, exits, ids, is_answer):
    """Whether each of ``exits`` finds each answer token of a text likeliest: (E, T) bool."""
    tokens = torch.tensor(ids, device=draft.device)
    wanted = torch.tensor(is_answer[1:], device=draft.device)
    right = []
    for hidden in exit_hidden(draft, tokens[None, :-1], exits):
        likeliest = draft.draft_logits(hidden[0, wanted]).argmax(dim=-1)  # (T,)
        if draft.draft_vocabulary is not None:
            likeliest = draft.draft_vocabulary[likeliest]
        right.append(likeliest == tokens[1:][wanted])
    return torch.stack(right)


def accuracy(draft, exits, texts):
    """Per cent of all answer tokens of ``texts`` that each exit has right: a list of E texts."""
    right = torch.cat([exits_right(draft, exits, *text) for text in texts], dim=1)
    return [f"{each:.1%}" for each in right.float().mean(dim=1).tolist()]


def report(args):
    """A table: the target's own first layers, as no training has seen them, then the draft."""
    path = args.draft or draft_beside(args.target)
    exits = read_config(path).exit_layers
    if not exits:
        raise ValueError(f"{path} has no exits, so it is no sorted draft; name another by --draft")
    if min(args.limit, args.max_new_tokens) < 1:
        raise ValueError("--limit and --max-new-tokens must be at least 1")
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


def parse(arguments):
    parser = Parser(prog="bench agreement", description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--target", type=Path, required=True)
    add("--draft", type=Path, help="default: the one beside the target")
    add("--questions", type=Path, help="in Spec-Bench's format; default: held-out ones")
    add("--limit", type=int, default=2, help="questions of each of the six groups, first turns")
    add("--max-new-tokens", type=int, default=128)
    add("--device", default="auto")
    add("--dtype", default="auto", choices=("auto", *DTYPES))
    return parser.parse_args(arguments)
