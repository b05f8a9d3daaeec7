"""What an experiment of the papers is, and how the miniatures are measured for it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, product
from statistics import mean, median
from timeit import timeit

import torch

from ..extras.many import generate_many
from ..program import read_stop, tell
from ..text.tokenizer import Tokenizer
from ..train.ablations import FEATURES, SEEDS, decision_of, folder_of
from ..train.corpus import EXACT_GROUPS, conversations
from ..tree import KConfig, positions_and_mask
from ..weights import load_model
from ..weights.names import WEIGHTS
from .measure import answer, measure, run_ours
from .specbench import corpus_questions
from .tables import summarise, total

SIZES, TEMPERATURES = ("7b", "13b", "70b"), (0.0, 1.0)
FASTER = 1.05  # times as fast: means of six columns, whose rounds vary by 10 %, differ by chance


@dataclass(frozen=True)
class Finding:
    """What a paper says: the best of ``rows`` is more than ``factor`` times the best of ``others``.

    ``by_seed``: it is more by ``factor`` times what the gains of two seeds differ by.
    """

    rows: list[str]
    others: list[str] = ("the target alone",)  # whose speedup is 1
    measure: str = "speedup"
    factor: float = FASTER
    by_seed: bool = False


@dataclass(frozen=True)
class Experiment:
    title: str  # what is asked
    source: str  # by whom
    measure: Callable  # one of Lab's methods
    measures: tuple[str, ...]  # what a cell of its table shows
    rows: dict[str, dict]  # see Lab.ready
    findings: list[Finding]
    note: str = ""  # what was published in words
    published: dict = field(default_factory=dict)  # row: a text for each column, the mean last
    trained: bool = False  # whether it needs what "train ablations" makes


class Lab:
    """Models and questions, each loaded once."""

    def __init__(self, args):
        self.args = args
        self.load = cache(partial(load_model, device=args.device, dtype=args.dtype))
        self.tokenizer = Tokenizer(WEIGHTS / "mini-7b")  # of the whole family
        questions = corpus_questions(args.limit)
        self.questions = [each | {"turns": each["turns"][:1]} for each in questions]

    def target(self, size):
        return self.load(WEIGHTS / f"mini-{size}")

    def ready(self, row, size, seed=SEEDS[0]):
        """(draft, options of ``generate``) of a row: with rejection sampling unless it says more.

        Its ``draft`` is a name or one per target; a ``stop`` among FEATURES is a decision model.
        """
        options, drafts = {"coupled": False, **row}, self.args.drafts
        name, folder = options.pop("draft", None), WEIGHTS / "mini-draft"
        if isinstance(name, dict):
            name = name[size]
        if name:
            folder = folder_of(drafts, name, SEEDS[0] if name == "untrained" else seed)
        if options.get("stop") in FEATURES:
            file = decision_of(drafts, options["stop"], size)
            options["stop"] = read_stop(str(file), self.load(folder))
        return self.load(folder), options

    def timed(self, about):
        """A column is a target at a temperature; rows in turns with the target alone.

        "accepted" is per level of a tree, the target's own roots included, as in arXiv 2409.10644.
        """
        result = {}
        for temperature, size in product(TEMPERATURES, SIZES):
            target, column = self.target(size), f"{size} T={temperature:g}"
            common = dict(temperature=temperature, max_new_tokens=self.args.max_new_tokens)
            runs = {"ar": partial(run_ours, target, None, common | {"method": "ar"}, 1)}
            for name, row in about.rows.items():
                draft, options = self.ready(row, size)
                runs[name] = partial(run_ours, target, draft, common | options, 1)
            ask = partial(answer, self.tokenizer, "vicuna", target.config.max_position_embeddings)
            records = measure(runs, self.questions, self.args.rounds, column, ask)
            cells = summarise(records)["overall"]
            result[column] = {name: cells[name] for name in about.rows}
        return result

    def counted(self, about):
        """A column is a seed drafts were trained with, at a temperature; over all targets.

        "layers" are those that a drafted token took.
        """
        prompts = [self.tokenizer.encode_chat(each["turns"]) for each in self.questions]
        result = {}
        for seed, temperature in product(SEEDS, TEMPERATURES):
            common = dict(temperature=temperature, max_new_tokens=self.args.max_new_tokens)
            column = result[f"seed {seed} T={temperature:g}"] = {}
            for name, row in about.rows.items():
                found = []
                for size in SIZES:
                    draft, options = self.ready(row, size, seed)
                    found += generate_many(self.target(size), prompts, draft, **common, **options)
                stats = total([{"generations": found}])
                layers = sum(layer * count for layer, count in stats.exit_counts.items())
                layers /= max(1, stats.exit_counts.total())
                column[name] = {"mat": stats.mean_accepted_tokens, "layers": layers}
                tell(f"seed {seed}, T={temperature:g}: {len(column)} of {len(about.rows)} drafts")
        return result

    @torch.inference_mode()
    def quality(self, about):
        """A column is a target: how many greedy answers are right to the letter.

        The log-probability is what the target gives their tokens, the mean over all.
        """
        result, count = {size: {} for size in SIZES}, 8 * self.args.limit
        held_out = [islice(conversations(0, "held-out", [g]), count) for g in EXACT_GROUPS]
        turns = [each.turns[0] for group in held_out for each in group]
        prompts = [self.tokenizer.encode_chat([question]) for question, _ in turns]
        for size, (name, row) in product(SIZES, about.rows.items()):
            target, (draft, options) = self.target(size), self.ready(row, size)
            right, log_probs = [], []
            answers = generate_many(target, prompts, draft, max_new_tokens=128, **options)
            for prompt, (_, expected), own in zip(prompts, turns, answers):
                right.append(self.tokenizer.decode(own.tokens) == expected)
                tokens = torch.tensor([prompt + own.tokens], device=target.device)
                rows = target(tokens[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
                log_probs.append(rows.gather(1, tokens[0, len(prompt) :, None]).cpu())
            likely = torch.cat(log_probs).mean().item()
            result[size][name] = {"right": mean(right), "log-probability": likely}
            tell(f"{size}: {name}")
        return result

    def masks(self, about):
        """A column is a tree: microseconds for its mask behind 100 tokens."""
        result, model = {}, self.target("7b")
        for column, widths in about.rows.items():
            whole, make = KConfig(widths).ancestors, partial(positions_and_mask, 100, 100)
            parents = [max(row.nonzero()[0][:-1], default=-1) for row in whole]
            rows = {"a slice of one mask": whole, "made anew": None}
            made = [partial(make, parents, model, known) for known in rows.values()]
            seconds = [[timeit(each, number=1) for each in made] for _ in range(50)]  # in turns
            cells = zip(rows, map(median, zip(*seconds)))
            result[column] = {name: {"µs": 1e6 * middle} for name, middle in cells}
        return result
