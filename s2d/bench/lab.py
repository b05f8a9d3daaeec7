"""What an experiment of the papers is, and how the miniatures are measured for it."""

from argparse import Namespace
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import islice, product
from pathlib import Path
from statistics import mean, median
from timeit import repeat

import torch

from ..checkpoint import load_model
from ..checkpoint.names import WEIGHTS
from ..decoder import Generation
from ..mask import ancestor_mask, positions_and_mask
from ..notices import progress
from ..train.corpus import EXACT_GROUPS, conversations
from ..tree import FixedShape
from .drafts import SEEDS
from .methods import parse_method
from .specbench import corpus_questions
from .speed import Plan, column_of, measure_plan, read_plan, runs_of
from .tables import Result, count, summarise

OWN_DRAFTS = {"7b": "sorted", "13b": "of-13b", "70b": "of-70b"}  # see drafts.py
SIZES = tuple(OWN_DRAFTS)
TEMPERATURES = (0.0, 1.0)
TREES = {"fork of 6, 10 deep": (6, *(1,) * 9), "4,2,2,1": (4, 2, 2, 1), "10,4,2": (10, 4, 2)}
ALONE = "the target alone"


@dataclass(frozen=True)
class Finding:
    """What a paper says: the best of ``rows`` is larger than the best of ``others``.

    Or that it is no worse, where ``no_worse`` is set. ``papers.judge`` says when that holds.
    """

    claim: str
    rows: Sequence[str]
    others: Sequence[str] = (ALONE,)  # whose speedup is 1
    measure: str = ""  # by default the experiment's first
    no_worse: bool = False


@dataclass(frozen=True)
class Experiment:
    title: str  # what is asked
    source: str  # by whom
    measure: Callable[["Lab", "Experiment"], Result]  # one of the functions below
    measures: tuple[str, ...]  # what a cell of its table shows
    rows: dict[str, str]  # the names of methods, see ``Lab.plan``; of masks, how they are made
    findings: list[Finding]
    about: str = ""  # what one has to know of the rows
    note: str = ""  # what was published, in words
    published: dict[str, str] = field(default_factory=dict)  # row: cells, divided by |; last a mean

    @property
    def needs_drafts(self) -> bool:
        """Whether it compares what ``drafts.py`` makes: its rows have names to be filled in."""
        return any("{" in row for row in self.rows.values())


class Lab:
    """The miniatures and questions for them, each loaded once."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.load = cache(partial(load_model, device=args.device, dtype=args.dtype))
        questions = corpus_questions(args.limit)
        self.questions = [each | {"turns": each["turns"][:1]} for each in questions]

    def plan(self, rows: dict[str, str], size: str, seed: int = SEEDS[0]) -> Plan:
        """The ``rows`` of an experiment on a target, with mini-draft unless they name a draft.

        Files are in the folder of trained drafts. In their names {size} is the target's, {seed}
        the one that drafts were trained with, and {own} the draft that was cut from the target.
        """
        methods = {}
        for name, row in rows.items():
            text = row.format(size=size, seed=seed, own=OWN_DRAFTS[size])
            methods[name] = parse_method(text, WEIGHTS / "mini-draft", self.args.drafts or Path())
        return read_plan(size, WEIGHTS / f"mini-{size}", methods)


def measure_speed(lab: Lab, experiment: Experiment) -> Result:
    """A column is a target at a temperature; rows in turns with the target alone.

    "accepted" is per level of a tree, the target's own roots included, as in arXiv 2409.10644.
    """
    result: Result = {}
    for size in SIZES:
        plan = lab.plan({"ar": "ar"} | experiment.rows, size)
        runs = runs_of(plan, lab.load)
        measured = measure_plan(plan, runs, lab.questions, TEMPERATURES, lab.args)
        for column, records in measured:
            result[column] = summarise(records)["overall"]
            del result[column]["ar"]
    columns = [column_of(size, temperature) for temperature, size in product(TEMPERATURES, SIZES)]
    return {column: result[column] for column in columns}


def count_tokens(lab: Lab, experiment: Experiment) -> Result:
    """A column is a seed drafts were trained with, at a temperature; over all targets."""
    found: defaultdict[tuple[str, str], list[Generation]] = defaultdict(list)
    cells = [*product(SEEDS, TEMPERATURES, SIZES)]
    for seed, temperature, size in progress(cells, experiment.title, len(cells)):
        plan = lab.plan(experiment.rows, size, seed)
        prompts = [plan.tokenizer.encode_chat(each["turns"]) for each in lab.questions]
        options = dict(temperature=temperature, max_new_tokens=lab.args.max_new_tokens)
        for name, run in runs_of(plan, lab.load).items():
            answers = [
                generation for _, _, generation in run(prompts, range(len(prompts)), **options)
            ]
            found[column_of(f"seed {seed}", temperature), name] += answers
    result: Result = {}
    for (column, name), generations in found.items():
        result.setdefault(column, {})[name] = count(generations)
    return result


@torch.inference_mode()
def judge_answers(lab: Lab, experiment: Experiment) -> Result:
    """A column is a target: how many greedy answers are right to the letter.

    The log-probability is what the target gives their tokens, the mean over all.
    """
    result: Result = {}
    per_group = 8 * lab.args.limit
    held_out = [islice(conversations(0, "held-out", [g]), per_group) for g in EXACT_GROUPS]
    turns = [each.turns[0] for group in held_out for each in group]
    for size in progress(SIZES, experiment.title, len(SIZES)):
        plan = lab.plan(experiment.rows, size)
        target = lab.load(plan.folder, graphs=False)
        prompts = [plan.tokenizer.encode_chat([question]) for question, _ in turns]
        result[size] = {}
        for name, run in runs_of(plan, lab.load).items():
            right = []
            log_probs = []
            answers = run(prompts, range(len(prompts)), max_new_tokens=128)
            for prompt, (_, expected), (own, _, _) in zip(prompts, turns, answers):
                right.append(plan.tokenizer.decode(own) == expected)
                tokens = torch.tensor([prompt + own], device=target.device)
                rows = target(tokens[:, :-1])[0, len(prompt) - 1 :].log_softmax(dim=-1)
                log_probs.append(rows.gather(1, tokens[0, len(prompt) :, None]).cpu())
            likely = torch.cat(log_probs).mean().item()
            result[size][name] = {"right": mean(right), "log-probability": likely}
    return result


def time_masks(lab: Lab, experiment: Experiment) -> Result:
    """A column is a tree: microseconds for its mask after 100 tokens."""
    result: Result = {}
    target = lab.load(WEIGHTS / "mini-7b", graphs=False)
    for column, widths in TREES.items():
        shape = FixedShape(widths)
        parents = shape.parents
        result[column] = {}
        for name, kind in experiment.rows.items():
            ancestors = shape.ancestors if kind == "sliced" else ancestor_mask
            make = partial(
                positions_and_mask, 100, 100, parents, target.device, target.dtype, ancestors
            )
            seconds = median(repeat(make, number=1, repeat=50))
            result[column][name] = {"µs": 1e6 * seconds}
    return result
