"""Speed of every method on the miniature targets, as ratios to the target alone measured in the same run.

    python -m s2d.bench              # 24 held-out prompts, three targets, T = 0 and 1
    python -m s2d.bench --hf         # with transformers' own greedy generate beside it (needs transformers)
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import torch

from .corpus import GROUPS, conversations
from .decode import generate
from .tokenizer import Tokenizer
from .weights import load_model

ROWS = {
    "ar": dict(method="ar"),
    "sd, exit 2": dict(method="sd", exits=[2]),
    "sd, exit 3": dict(method="sd", exits=[3]),
    "sd, exit 4": dict(method="sd", exits=[4]),
    "s2d": dict(method="s2d"),
}


def held_out_prompts(tokenizer, per_group):
    """Chat prompts of the six groups, ``per_group`` of each, that no training run has seen."""
    return [
        tokenizer.encode_chat([conversation.turns[0][0]])
        for group in GROUPS
        for conversation in islice(conversations(2, "held-out", [group]), per_group)
    ]


def transformers_generate(folder):
    """A stand-in for ``generate``: prompt, new tokens -> (number of tokens, seconds), by transformers' greedy generate."""
    from transformers import LlamaForCausalLM  # a measured peer, not a dependency

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def run(prompt, max_new_tokens):
        tokens = torch.tensor([prompt])
        start = time.perf_counter()
        output = model.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                                max_new_tokens=max_new_tokens, pad_token_id=0)  # fmt: skip
        return output.shape[1] - len(prompt), time.perf_counter() - start

    return run


def measure(target, draft, prompts, rows, rounds, temperature, max_new_tokens, peer):
    """Every row answers every prompt, the rows in turn for each prompt so that drift of the machine hits all alike.

    Returns {row: (median ratio to "ar" over the rounds, lowest, highest, mean accepted tokens, exit counts)}.
    """
    ratios, emitted, steps, exits = {name: [] for name in rows}, Counter(), Counter(), {name: Counter() for name in rows}
    if peer:
        ratios["transformers"] = []
    for round_number in range(rounds + 1):  # the first round only warms up
        tokens, seconds = Counter(), Counter()
        for number, prompt in enumerate(prompts if round_number else prompts[:2]):
            for name, options in rows.items():
                output = generate(
                    target, prompt, draft=draft, temperature=temperature, seed=1000 * round_number + number,
                    max_new_tokens=max_new_tokens, **options,
                )  # fmt: skip
                tokens[name] += len(output.tokens)
                seconds[name] += output.stats.seconds
                if round_number:
                    emitted[name] += len(output.tokens)
                    steps[name] += output.stats.steps
                    exits[name] += output.stats.exit_counts
            if peer:
                count, duration = peer(prompt, max_new_tokens)
                tokens["transformers"] += count
                seconds["transformers"] += duration
        if round_number:
            for name in ratios:
                ratios[name].append(tokens[name] / seconds[name] * seconds["ar"] / tokens["ar"])
    return {
        name: (statistics.median(values), min(values), max(values), emitted[name] / max(1, steps[name]), exits.get(name))
        for name, values in ratios.items()
    }


def report(args):
    """Measure and print one block for each target and temperature."""
    draft = load_model(args.weights / "mini-draft")
    rows = {name: options | {"draft_length": args.draft_length} for name, options in ROWS.items()}
    overall = {name: [] for name in rows}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, float32, {6 * args.limit} held-out prompts, "
          f"{args.max_new_tokens} new tokens at most, median of {args.rounds} rounds")  # fmt: skip
    for name in args.targets:
        target = load_model(args.weights / name)
        prompts = held_out_prompts(Tokenizer(args.weights / name / "tokenizer.model"), args.limit)
        for temperature in (0.0, 1.0):
            peer = transformers_generate(args.weights / name) if args.hf and temperature == 0 else None
            results = measure(target, draft, prompts, rows, args.rounds, temperature, args.max_new_tokens, peer)
            print(f"\n{name}, T = {temperature:g}" + " " * 8 + "speedup (lowest, highest)    MAT   exits")
            for row, (median, low, high, accepted, exits) in results.items():
                total = sum(exits.values()) if exits else 0
                shares = " ".join(f"{layer}:{count / total:.0%}" for layer, count in sorted((exits or {}).items()))
                mean_accepted = f"{accepted:.2f}" if row in rows else ""
                print(f"  {row:<22}{median:5.2f}    ({low:.2f}, {high:.2f}) {mean_accepted:>11}   {shares}", flush=True)
                if row in overall:
                    overall[row].append(median)
    print("\nmean speedup over targets and temperatures")
    for row, values in overall.items():
        print(f"  {row:<22}{statistics.mean(values):5.2f}")


def main(arguments=None):
    parser = argparse.ArgumentParser(prog="python -m s2d.bench", description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=Path(__file__).parent.parent / "weights")
    parser.add_argument("--targets", nargs="+", default=["mini-7b", "mini-13b", "mini-70b"])
    parser.add_argument("--limit", type=int, default=4, help="held-out prompts of each of the six groups")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--draft-length", type=int, help="draft tokens a step; default: the draft's own")
    parser.add_argument("--hf", action="store_true", help="transformers' greedy generate beside ours")
    args = parser.parse_args(arguments)
    try:
        report(args)
    except (ValueError, OSError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
