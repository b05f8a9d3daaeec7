"""Counting, on training prompts, what a target accepts of a draft: what drafting that tunes itself starts from (tune/).

Half of all places go through every exit, all of which are graded by the same row of the target's: so each exit's chances are
counted, and what a deeper exit says where a shallower one is so sure, without any choice having been made.
"""

import json
import sys
from pathlib import Path

from ..chat import chat_template
from ..decision import fingerprint
from ..decode import generate
from ..files import staged_file, whole_lines
from ..tokenizer import Tokenizer
from ..tune.chances import Chances
from ..tune.costs import WIDEST, flat_costs
from ..tune.tuner import Tuner
from ..weights import CHANCES, load_model, placement
from ..weights.config import read_json_if_there
from .dialogues import first_prompts

LENGTH = 8  # of the chains that are drafted, each token with its further candidates


class Scout(Tuner):
    """A Tuner to which drafting costs nothing: it goes through every exit up to its ``last``, drafts long chains and sends all it has."""

    def __init__(self, exits, vocabulary, chances, last, drawn):
        super().__init__(flat_costs(1.0, 0.0, len(exits)), exits, None, vocabulary)
        self.chances = {
            "greedy": chances,
            "sampled": chances,
        }  # one table, for all scouts of a temperature
        self.last, self.always_drawn = last, drawn

    def start(self, n, sampling):
        super().start(n, sampling)
        return True

    def enough(self, exit, *said):
        super().enough(exit, *said)
        return exit == self.last

    def width(self, sure):
        return 1 if self.drawn else WIDEST

    def prefers_drawn(self, drawn, likeliest):
        return self.always_drawn

    def expand(self):
        return super().expand(1 if len(self.levels) < LENGTH else 0)


def count_chances(target, draft, prompts, max_new_tokens):
    """{"greedy" and "sampled": [weights, chances]}, (rows, BINS) each as in tune/chances.py, of answers to ``prompts``."""
    exits = draft.config.exit_layers
    counted = {}
    for kind, temperature, modes in (("greedy", 0.0, (False,)), ("sampled", 1.0, (False, True))):
        deepest, chances = len(exits) - 1, Chances(len(exits))
        chances.memory = float("inf")  # every place counts alike
        scouts = [Scout(exits, draft.draft_vocabulary, chances, last, drawn)
                  for drawn in modes for other in range(max(1, deepest)) for last in (other, deepest)]  # fmt: skip
        for seed, prompt in enumerate(prompts):
            generate(target, prompt, draft=draft, method="auto", tuner=scouts[seed % len(scouts)], temperature=temperature,
                     seed=seed, max_new_tokens=max_new_tokens)  # fmt: skip
        counted[kind] = [[[round(each, digits) for each in row] for row in table]
                         for table, digits in ((chances.weighs, None), (chances.table, 4))]  # fmt: skip
    return counted


def read_prompts(args, tokenizer, template):
    """The prompts to answer: of the built-in corpus, of a ShareGPT file, or of text that the target wrote itself."""
    if args.data.endswith(".jsonl"):
        lines = whole_lines(Path(args.data)).split("\n")[1 : 1 + args.prompts]
        try:
            prompts = [json.loads(line)["p"] for line in lines if line]
            assert all(type(token) is int for prompt in prompts for token in prompt)
            return prompts
        except (ValueError, TypeError, KeyError, AssertionError):
            raise ValueError(f"{args.data} is no text that a model wrote for --data self") from None
    return first_prompts(args.data, args.seed + 3, args.prompts, tokenizer, template)


def train_chances(args):
    """The program: answer prompts, count, and put the counts beside the draft, with those for other targets."""
    if min(args.prompts, args.max_new_tokens) < 1:
        raise ValueError(
            f"prompts and new tokens must be at least 1, got {args.prompts} and {args.max_new_tokens}"
        )
    target, draft = load_model(args.target, args.device), load_model(args.draft, args.device)
    if not draft.config.exit_layers:
        raise ValueError(f"{args.draft} names no exits, so there are none to count for")
    file = args.out or args.draft / CHANCES
    read_json_if_there(file)  # no use in counting for a file that cannot be added to
    prompts = read_prompts(args, Tokenizer(args.target), chat_template(args.target))
    if not prompts:
        raise ValueError(f"{args.data} holds no prompts")
    print(f"on {placement(target, draft)}, {len(prompts)} prompts", file=sys.stderr)
    counted = {fingerprint(target): count_chances(target, draft, prompts, args.max_new_tokens)}
    everything = (
        read_json_if_there(file) | counted
    )  # read again: other targets may have been counted meanwhile
    with staged_file(file) as stage:
        stage.write_text(json.dumps(everything, separators=(",", ":")) + "\n", encoding="utf-8")
    grades = sum(
        weight - 1 for row in everything[fingerprint(target)]["greedy"][0] for weight in row
    )
    print(f"{file}: {grades} grades at T = 0 for {args.target}")
