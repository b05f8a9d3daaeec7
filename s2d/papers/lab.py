"""What an experiment of the papers is, and how the miniatures are measured for it."""

import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, product
from statistics import mean, median
from timeit import repeat

import torch

from ..batch import generate_many
from ..bench.measure import answer, measure, run_ours
from ..bench.specbench import corpus_questions
from ..bench.tables import counts, summarise
from ..checkpoint import load_model
from ..checkpoint.names import WEIGHTS
from ..checkpoint.tokenizer import Tokenizer
from ..decision import load_decision
from ..mask import positions_and_mask
from ..notices import progress
from ..train.corpus import EXACT_GROUPS, conversations
from ..tree import FixedShape
from .drafts import FEATURES, SEEDS, decision_of, folder_of

SIZES, TEMPERATURES = ("7b", "13b", "70b"), (0.0, 1.0)
TREES = {"fork of 6, 10 deep": (6, *(1,) * 9), "4,2,2,1": (4, 2, 2, 1), "10,4,2": (10, 4, 2)}
MARGIN = 1.1  # times as large: the speed of one method differs by up to 10 % from run to run


@dataclass(frozen=True)
class Finding:
    """What a paper says: the best of ``rows`` is larger than the best of ``others``.

    Or that it is no worse, where ``no_worse`` is set. ``report.judge`` says when that holds.
    """

    claim: str
    rows: list[str]
    others: list[str] = ("the target alone",)  # whose speedup is 1
    measure: str = "speedup"
    no_worse: bool = False


@dataclass(frozen=True)
class Experiment:
    title: str  # what is asked
    source: str  # by whom
    measure: Callable  # one of Lab's methods
    measures: tuple[str, ...]  # what a cell of its table shows
    rows: dict[str, dict]  # see Lab.ready
    findings: list[Finding]
    about: str = ""  # what one has to know of the rows
    note: str = ""  # what was published, in words
    published: dict = field(default_factory=dict)  # row: a text for each column, the mean last
    trained: bool = False  # whether it needs what ``drafts.py`` makes


class Lab:
    """Models and questions, each loaded once."""

    def __init__(self, args):
        self.args = args
        self.drafts = 0  # a checksum of those that were trained for this
        for file in sorted(args.drafts.rglob("*.safetensors")) if args.drafts else ():
            self.drafts = zlib.crc32(file.read_bytes(), self.drafts)
        self.load = cache(partial(load_model, device=args.device, dtype=args.dtype))
        self.targets = {size: self.load(WEIGHTS / f"mini-{size}") for size in SIZES}
        self.tokenizer = Tokenizer(WEIGHTS / "mini-7b")  # of the whole family
        questions = corpus_questions(args.limit)
        self.questions = [each | {"turns": each["turns"][:1]} for each in questions]

    def ready(self, row, size, seed=SEEDS[0]):
        """(draft, options of ``generate``) of a row: with rejection sampling unless it says more.

        Its ``draft`` is a name or one per target; a ``stop`` among FEATURES is a decision model.
        """
        options, drafts = {"rule": "rejection", **row}, self.args.drafts
        name, folder = options.pop("draft", None), WEIGHTS / "mini-draft"
        if isinstance(name, dict):
            name = name[size]
        if name:
            folder = folder_of(drafts, name, SEEDS[0] if name == "untrained" else seed)
        if options.get("stop") in FEATURES:
            file = decision_of(drafts, options["stop"], size)
            options["decision"] = load_decision(file)
            del options["stop"]
        return self.load(folder), options

    def timed(self, about):
        """A column is a target at a temperature; rows in turns with the target alone.

        "accepted" is per level of a tree, the target's own roots included, as in arXiv 2409.10644.
        """
        result = {}
        for temperature, size in product(TEMPERATURES, SIZES):
            target, column, runs = self.targets[size], f"{size} T={temperature:g}", {}
            for name, row in [("ar", {"method": "ar"}), *about.rows.items()]:
                draft, options = self.ready(row, size)
                runs[name] = partial(run_ours, target, draft, 1, **options)
            ask = partial(answer, self.tokenizer, target.config.max_position_embeddings)
            options = dict(temperature=temperature, max_new_tokens=self.args.max_new_tokens)
            records = measure(runs, self.questions, self.args.rounds, column, ask, **options)
            cells = summarise(records)["overall"]
            result[column] = {name: cells[name] for name in about.rows}
        return result

    def counted(self, about):
        """A column is a seed drafts were trained with, at a temperature; over all targets."""
        prompts = [self.tokenizer.encode_chat(each["turns"]) for each in self.questions]
        found, cells = defaultdict(list), [*product(SEEDS, TEMPERATURES, about.rows, SIZES)]
        for seed, temperature, name, size in progress(cells, about.title, len(cells)):
            draft, options = self.ready(about.rows[name], size, seed)
            options |= dict(temperature=temperature, max_new_tokens=self.args.max_new_tokens)
            answers = generate_many(self.targets[size], prompts, draft, **options)
            found[f"seed {seed} T={temperature:g}", name] += answers
        result = defaultdict(dict)
        for (column, name), generations in found.items():
            result[column][name] = counts(generations)
        return dict(result)

    @torch.inference_mode()
    def quality(self, about):
        """A column is a target: how many greedy answers are right to the letter.

        The log-probability is what the target gives their tokens, the mean over all.
        """
        result, count = {size: {} for size in SIZES}, 8 * self.args.limit
        held_out = [islice(conversations(0, "held-out", [g]), count) for g in EXACT_GROUPS]
        turns = [each.turns[0] for group in held_out for each in group]
        prompts = [self.tokenizer.encode_chat([question]) for question, _ in turns]
        cells = [*product(SIZES, about.rows.items())]
        for size, (name, row) in progress(cells, about.title, len(cells)):
            target, (draft, options) = self.targets[size], self.ready(row, size)
            right, log_probs = [], []
            answers = generate_many(target, prompts, draft, max_new_tokens=128, **options)
            for prompt, (_, expected), own in zip(prompts, turns, answers):
                right.append(self.tokenizer.decode(own.tokens) == expected)
                tokens = torch.tensor([prompt + own.tokens], device=target.device)
                rows = target(tokens[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
                log_probs.append(rows.gather(1, tokens[0, len(prompt) :, None]).cpu())
            likely = torch.cat(log_probs).mean().item()
            result[size][name] = {"right": mean(right), "log-probability": likely}
        return result

    def masks(self, about):
        """A column is a tree: microseconds for its mask after 100 tokens."""
        result, target = {}, self.targets["7b"]
        for column, widths in TREES.items():
            whole, result[column] = FixedShape(widths).whole_mask, {}
            parents = [max(row.nonzero()[0][:-1], default=-1) for row in whole]
            for name, row in about.rows.items():
                known = whole if row["sliced"] else None
                make = partial(
                    positions_and_mask, 100, 100, parents, target.device, target.dtype, known
                )
                seconds = median(repeat(make, number=1, repeat=50))
                result[column][name] = {"µs": 1e6 * seconds}
        return result
