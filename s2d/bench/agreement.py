"""How often each exit of a draft says what the target says next, on the target's own greedy answers, draft vocabulary included.

python -m s2d.bench agreement --target weights/mini-13b     # of the draft beside it, on held-out questions
"""

from pathlib import Path

import torch

from ..chat import chat_template
from ..decode import generate
from ..program import Parser
from ..tokenizer import Tokenizer
from ..train.soft import exit_hidden
from ..weights import DTYPES, load_model
from ..weights.config import read_config
from ..weights.get import draft_beside
from .specbench import corpus_questions, read_questions
from .tables import render


@torch.inference_mode()
def exits_right(draft, exits, prompt, answer):
    """For every token of ``answer``, lists of ids, whether each of the ``exits`` has it as its likeliest: (E, T) bool."""
    tokens, wanted = (
        torch.tensor([prompt + answer[:-1]], device=draft.device),
        torch.tensor(answer, device=draft.device),
    )
    said = []
    for hidden in exit_hidden(draft, tokens, exits):
        likeliest = draft.draft_logits(hidden[0, len(prompt) - 1 :]).argmax(dim=-1)  # (T,)
        said.append(
            likeliest if draft.draft_vocabulary is None else draft.draft_vocabulary[likeliest]
        )
    return torch.stack(said) == wanted


def report(args):
    """Print a table: a row for the target's own first layers, as no training has seen them, and one for each draft."""
    paths = args.drafts or [draft_beside(args.target)]
    target, template = load_model(args.target, args.device, args.dtype), chat_template(args.target)
    tokenizer, exits = Tokenizer(args.target), read_config(paths[0]).exit_layers
    if different := [path for path in paths if not exits or read_config(path).exit_layers != exits]:
        raise ValueError(
            f"{different[0]} has other exits than {paths[0]}, or none; compare drafts of the same exits"
        )
    if min(args.limit, args.max_new_tokens) < 1:
        raise ValueError("--limit and --max-new-tokens must be at least 1")
    questions = (
        read_questions(args.questions, args.limit)
        if args.questions
        else corpus_questions("held-out", args.limit)
    )
    prompts = [tokenizer.encode_chat(question["turns"][:1], template) for question in questions]
    untrained = load_model(args.target, args.device, args.dtype, num_layers=exits[-1])
    drafts = [
        ("untrained", untrained),
        *((path.name, load_model(path, args.device, args.dtype)) for path in paths),
    ]
    pairs = [
        (prompt, generate(target, prompt, method="ar", max_new_tokens=args.max_new_tokens).tokens)
        for prompt in prompts
    ]
    lines = [["", *(f"exit {exit_layer}" for exit_layer in exits)]]
    for name, draft in drafts:
        right = torch.cat(
            [exits_right(draft, exits, *pair) for pair in pairs], dim=1
        )  # (E, all tokens)
        lines.append([name, *(f"{share:.1%}" for share in right.float().mean(dim=1).tolist())])
    print(
        f"{sum(len(answer) for _, answer in pairs)} tokens of {len(pairs)} greedy answers\n\n{render(lines, args.markdown)}"
    )


def parse(arguments):
    parser = Parser(prog="bench agreement", description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--drafts", type=Path, nargs="+", help="default: the one beside the target")
    parser.add_argument(
        "--questions",
        type=Path,
        help="a file in Spec-Bench's format; default: held-out ones of the corpus",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=2,
        help="questions of each of the six groups, their first turns",
    )
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto", choices=("auto", *DTYPES))
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args(arguments)
