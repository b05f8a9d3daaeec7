"""What the miniature models know: exact answers of the targets, next-token accuracy of the draft's exits.

    python -m s2d.quality            # held-out prompts only; a few minutes on two cores
"""

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch

from .corpus import EXACT_GROUPS, conversations
from .decode import generate
from .dialogues import encode_dialogue
from .soft import exit_logits
from .tokenizer import Tokenizer
from .weights import load_model


def exact_match(model, tokenizer, group, count):
    """Share of ``count`` held-out prompts of ``group`` whose greedy answer is the right one, letter by letter."""
    right = 0
    for conversation in islice(conversations(0, "held-out", [group]), count):
        question, answer = conversation.turns[0]
        output = generate(model, tokenizer.encode_chat([question]), method="ar", max_new_tokens=128)
        right += tokenizer.decode(output.tokens) == answer
    return right / count


@torch.inference_mode()
def exit_accuracy(model, tokenizer, exits, count):
    """Next-token accuracy (E,) at each exit over the answers of ``count`` held-out conversations."""
    right, total = torch.zeros(len(exits)), 0
    for conversation in islice(conversations(1, "held-out"), count):
        ids, is_answer = encode_dialogue(tokenizer, [message for turn in conversation.turns for message in turn])
        tokens, wanted = torch.tensor([ids]), torch.tensor(is_answer[1:])
        for number, logits in enumerate(exit_logits(model, tokens, exits)):
            right[number] += (logits[0, :-1].argmax(dim=-1) == tokens[0, 1:])[wanted].sum()
        total += wanted.sum()
    return right / total


def report(args):
    """Print both tables."""
    print(f"exact match at T=0, {args.count} held-out prompts per group")
    print("".join(f"{title:>16}" for title in ("target", *EXACT_GROUPS, "mean")))
    for name in args.targets:
        model = load_model(args.weights / name)
        tokenizer = Tokenizer(args.weights / name / "tokenizer.model")
        scores = [exact_match(model, tokenizer, group, args.count) for group in EXACT_GROUPS]
        print(f"{name:>16}" + "".join(f"{score:>16.1%}" for score in (*scores, sum(scores) / len(scores))), flush=True)

    draft = load_model(args.weights / "mini-draft")
    exits, depth = draft.config.exit_layers, draft.config.num_hidden_layers
    untrained = load_model(args.weights / "mini-7b", num_layers=depth)
    tokenizer = Tokenizer(args.weights / "mini-draft" / "tokenizer.model")
    print(f"\nnext-token accuracy on held-out answers, {args.count} conversations")
    print("".join(f"{title:>16}" for title in ("", *(f"exit {e}" for e in exits))))
    for title, model in (("before SoFT", untrained), ("mini-draft", draft)):
        accuracy = exit_accuracy(model, tokenizer, exits, args.count).tolist()
        print(f"{title:>16}" + "".join(f"{value:>16.1%}" for value in accuracy), flush=True)


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m s2d.quality", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=Path(__file__).parent.parent / "weights")
    parser.add_argument("--targets", nargs="+", default=["mini-7b", "mini-13b", "mini-70b"])
    parser.add_argument("--count", type=int, default=100, help="held-out prompts per group")
    args = parser.parse_args(arguments)
    try:
        report(args)
    except (ValueError, OSError) as error:
        print(f"quality: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
