"""What the papers' experiments are made of, and how they are measured: by the clock or by counts.

A result is {column: {row: {measure: value}}}.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product

from ..extras.decision import FEATURES, read_stop
from ..extras.many import generate_many
from ..generate import start
from ..program import tell
from ..text.tokenizer import Tokenizer
from ..train.ablations import SEEDS, decision_of, folder_of
from ..weights import load_model
from ..weights.get import WEIGHTS
from .measure import answer, measure, run_ours
from .specbench import corpus_questions
from .tables import generations_of, summarise, total

SIZES, TEMPERATURES = ("7b", "13b", "70b"), (0.0, 1.0)
SHIPPED = "mini-draft"
FASTER = 1.05  # times as fast: means of six columns, whose rounds vary by 10 %, differ by chance


@dataclass(frozen=True)
class Finding:
    """What a paper says: the best of ``rows`` is ``factor`` times the best of ``others``.

    Without others: of the target alone, 1. With ``by_seed`` more than ``factor`` times what two
    seeds differ by is between them.
    """

    rows: tuple[str, ...]
    others: tuple[str, ...] = ("the target alone",)
    measure: str = "speedup"
    factor: float = FASTER
    by_seed: bool = False


@dataclass(frozen=True)
class Experiment:
    title: str  # what is asked
    source: str  # by whom
    measure: Callable  # (Lab, Experiment) -> result
    measures: tuple[str, ...]  # what a cell of its table shows
    rows: dict[str, dict]  # options of ``generate``, and the ``draft``, see Lab.ready
    findings: tuple[Finding, ...]
    note: str = ""  # what was published in words
    published: dict = field(default_factory=dict)  # row: a text for each column, the mean last
    trained: bool = False  # whether it needs what "train ablations" makes


def run_observed(levels, target, draft, options, prompts, seed):
    """As ``run_ours`` with one prompt; ``levels`` gets how many were accepted, and drafted."""
    generation = start(target, prompts[0], draft, seed=seed, **options)
    levels[generation] = [0, 0]
    for step in generation:
        levels[generation][0] += len(step.verdict.path)
        levels[generation][1] += step.proposal.depth
    return [(generation.tokens, generation.stats.seconds, generation)]


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
        """(draft, options) of a row for a target: with rejection sampling, if it says nothing else.

        A draft has a name, or one for each target. A ``stop`` among FEATURES is a decision model.
        """
        options = {"coupled": False, "draft": SHIPPED, **row}
        name = options.pop("draft")
        if isinstance(name, dict):
            name = name[size]
        seed = SEEDS[0] if name == "untrained" else seed
        folder = WEIGHTS / name if name == SHIPPED else folder_of(self.args.drafts, name, seed)
        if options.get("stop") in FEATURES:
            file = decision_of(self.args.drafts, options["stop"], size)
            options["stop"] = read_stop(str(file), self.load(folder))
        return self.load(folder), options

    def timed(self, about):
        """A column is a target at a temperature; rows in turns with the target alone.

        "accepted" is the rate published by arXiv 2409.10644: a root of the target's counts.
        """
        result = {}
        for temperature, size in product(TEMPERATURES, SIZES):
            target, column, levels = self.target(size), f"{size} T={temperature:g}", {}
            common = dict(temperature=temperature, max_new_tokens=self.args.max_new_tokens)
            runs = {"ar": partial(run_ours, target, None, common | {"method": "ar"}, 1)}
            for name, row in about.rows.items():
                draft, options = self.ready(row, size)
                runs[name] = partial(run_observed, levels, target, draft, common | options)
            ask = partial(answer, self.tokenizer, "vicuna", target.config.max_position_embeddings)
            records = measure(runs, self.questions, self.args.rounds, column, ask)
            result[column] = {}
            for name, cell in summarise(records)["overall"].items():
                if name != "ar":  # 1 by definition
                    own = generations_of(each for each in records if each["method"] == name)
                    accepted, drafted = zip(*(levels[generation] for generation in own))
                    cell["accepted"] = sum(accepted) / sum(drafted)
                    result[column][name] = {key: cell[key] for key in about.measures}
        return result

    def counted(self, about):
        """A column is a seed drafts were trained with, at a temperature; over all targets.

        "layers" are those that a drafted token took.
        """
        prompts = [self.tokenizer.encode_chat(each["turns"]) for each in self.questions]
        common, result = {"max_new_tokens": self.args.max_new_tokens}, {}
        for seed, temperature in product(SEEDS, TEMPERATURES):
            column = result[f"seed {seed} T={temperature:g}"] = {}
            common["temperature"] = temperature
            for name, row in about.rows.items():
                found = []
                for size in SIZES:
                    draft, options = self.ready(row, size, seed)
                    found += generate_many(self.target(size), prompts, draft, **common, **options)
                stats = total(found)
                layers = sum(layer * count for layer, count in stats.exit_counts.items())
                layers /= max(1, stats.exit_counts.total())
                column[name] = {"mat": stats.mean_accepted_tokens, "layers": layers}
                tell(f"seed {seed}, T={temperature:g}: {len(column)} of {len(about.rows)} drafts")
        return result
