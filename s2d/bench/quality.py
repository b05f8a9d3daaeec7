"""What the miniature models know: exact answers of the targets, next-token accuracy of the draft's exits.

A third table shows what the one method that is not lossless, target-initialised roots, does to the targets' answers.

    python -m s2d.bench quality      # held-out prompts only; a few minutes on two cores
"""

from itertools import islice
from pathlib import Path
from statistics import mean

import torch

from ..decode import generate
from ..program import Parser
from ..tokenizer import Tokenizer
from ..train.corpus import EXACT_GROUPS, conversations
from ..train.dialogues import encode_dialogue
from ..train.soft import exit_hidden
from ..weights import load_model


@torch.inference_mode()
def answers(model, tokenizer, group, count, **options):
    """Greedy answers to ``count`` held-out prompts of ``group``: (share that is right letter by letter, log-probability).

    The latter is the model's own, the mean over all tokens of these answers. ``options`` are those of ``generate``.
    """
    right, likelihoods = 0, []
    for conversation in islice(conversations(0, "held-out", [group]), count):
        question, answer = conversation.turns[0]
        prompt = tokenizer.encode_chat([question])
        tokens = generate(model, prompt, max_new_tokens=128, **options).tokens
        right += tokenizer.decode(tokens) == answer
        whole = torch.tensor([prompt + tokens], device=model.device)
        log_probs = model(whole[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
        likelihoods.append(log_probs.gather(1, whole[0, len(prompt) :, None]).cpu())
    return right / count, torch.cat(likelihoods).mean().item()


@torch.inference_mode()
def exit_accuracy(model, tokenizer, exits, count):
    """Next-token accuracy (E,) at each exit over the answers of ``count`` held-out conversations."""
    right, total = torch.zeros(len(exits)), 0
    for conversation in islice(conversations(1, "held-out"), count):
        ids, is_answer = encode_dialogue(
            tokenizer, [message for turn in conversation.turns for message in turn]
        )
        tokens, wanted = (
            torch.tensor([ids], device=model.device),
            torch.tensor(is_answer[1:], device=model.device),
        )
        for number, hidden in enumerate(exit_hidden(model, tokens, exits)):
            right[number] += (
                (model.logits(hidden[0, :-1]).argmax(dim=-1) == tokens[0, 1:])[wanted].sum().item()
            )
        total += sum(is_answer[1:])
    return right / total


def load_models(folder, device):
    return load_model(folder, device), Tokenizer(folder)


def row(*cells):
    print("".join(f"{cell:>16}" for cell in cells), flush=True)


def report_targets(folders, count, device):
    """Exact match of each target alone; returns {folder: (exact match, log-probability), means over the groups}."""
    print(f"exact match at T=0, {count} held-out prompts per group")
    row("target", *EXACT_GROUPS, "mean")
    means = {}
    for folder in folders:
        model, tokenizer = load_models(folder, device)
        results = [answers(model, tokenizer, group, count, method="ar") for group in EXACT_GROUPS]
        means[folder] = [mean(values) for values in zip(*results)]
        row(folder.name, *(f"{score:.1%}" for score, _ in results), f"{means[folder][0]:.1%}")
    return means


def report_exits(target, draft, count, device):
    """Next-token accuracy of the exits, beside the same layers before SoFT."""
    model, tokenizer = load_models(draft, device)
    exits, depth = model.config.exit_layers, model.config.num_hidden_layers
    print(f"\nnext-token accuracy on held-out answers, {count} conversations")
    row("", *(f"exit {e}" for e in exits))
    for title, each in (
        ("before SoFT", load_model(target, device, num_layers=depth)),
        (draft.name, model),
    ):
        row(
            title,
            *(f"{value:.1%}" for value in exit_accuracy(each, tokenizer, exits, count).tolist()),
        )


def report_lossy(alone, draft, count, device):
    """What the target's answers lose with several roots from the target; ``alone`` is report_targets' result."""
    print(
        "\nroots from the target (mcsd, tree 6,1,1,1,1,1): exact match, mean log-probability of a token"
    )
    row("target", "ar", "lossy", "ar", "lossy")
    options = dict(
        draft=load_model(draft, device), method="mcsd", tree=(6, 1, 1, 1, 1, 1), init="target"
    )
    for folder, (score, likelihood) in alone.items():
        model, tokenizer = load_models(folder, device)
        results = [answers(model, tokenizer, group, count, **options) for group in EXACT_GROUPS]
        lossy_score, lossy_likelihood = (mean(values) for values in zip(*results))
        row(
            folder.name,
            f"{score:.1%}",
            f"{lossy_score:.1%}",
            f"{likelihood:.3f}",
            f"{lossy_likelihood:.3f}",
        )


def report(args):
    if args.count < 1:
        raise ValueError(f"--count must be at least 1, got {args.count}")
    alone = report_targets([args.weights / name for name in args.targets], args.count, args.device)
    report_exits(args.weights / "mini-7b", args.weights / "mini-draft", args.count, args.device)
    report_lossy(alone, args.weights / "mini-draft", args.count, args.device)


def parse(arguments):
    parser = Parser(prog="bench quality", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--weights", type=Path, default=Path(__file__).parent.parent.parent / "weights"
    )
    parser.add_argument("--targets", nargs="+", default=["mini-7b", "mini-13b", "mini-70b"])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--count", type=int, default=100, help="held-out prompts per group")
    return parser.parse_args(arguments)
