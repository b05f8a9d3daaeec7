"""What the papers' experiments share: models and questions, measuring by the clock or by counts.

A result is {column: {row: {measure: value}}}. Knows nothing about tables.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import product
from statistics import mean

from ..extras.decision import read_stop
from ..extras.many import generate_many
from ..program import tell
from ..text.tokenizer import Tokenizer
from ..train.ablations import SEEDS, decision_of, folder_of
from ..weights import load_model
from ..weights.names import WEIGHTS
from .measure import answer, measure, run_ours
from .specbench import choose_questions
from .tables import summarise, total

SIZES, TEMPERATURES = ("7b", "13b", "70b"), (0.0, 1.0)
SHIPPED = "mini-draft"
TIMED, ALL = ("speedup", "mat"), ("speedup", "mat", "accepted")
COUNTED = ("mat", "layers")
FASTER = 1.05  # times as fast: means of six columns, whose rounds vary by 10 %, differ by chance


@dataclass(frozen=True)
class Experiment:
    source: str  # whose question it is
    measures: tuple[str, ...]  # what a cell of its table shows
    measure: Callable  # Lab -> result
    finding: Callable  # result -> (verdict, a sentence of what was found)
    said: str = ""  # published in words
    published: dict = field(default_factory=dict)  # row: a text a column, the mean last
    trained: bool = False  # whether it needs what "train ablations" makes

    @property
    def title(self):  # what is asked
        return self.measure.__doc__.rstrip(".")


class Lab:
    """Models and questions, each loaded once."""

    def __init__(self, args):
        self.args, self.drafts = args, args.drafts
        self.load = cache(partial(load_model, device=args.device, dtype=args.dtype))
        self.tokenizer = Tokenizer(WEIGHTS / "mini-7b")  # of the whole family
        questions = choose_questions(None, "held-out", args.limit)
        self.questions = [each | {"turns": each["turns"][:1]} for each in questions]

    def target(self, size):
        return self.load(WEIGHTS / f"mini-{size}")

    def draft(self, name, seed=SEEDS[0]):
        shipped = name == SHIPPED
        return self.load(WEIGHTS / name if shipped else folder_of(self.drafts, name, seed))

    def decision(self, features, size):
        return read_stop(str(decision_of(self.drafts, features, size)), self.draft(SHIPPED))

    def timed(self, ways):
        """``ways(size)`` {row: (name of a draft, options)}, in turns with the target alone.

        A column is a target at a temperature.
        """
        result = {}
        for temperature, size in product(TEMPERATURES, SIZES):
            target, column = self.target(size), f"{size} T={temperature:g}"
            always = dict(temperature=temperature, max_new_tokens=self.args.max_new_tokens)
            runs = {"ar": partial(run_ours, target, None, always | {"method": "ar"})}
            for row, (name, options) in ways(size).items():
                runs[row] = partial(run_ours, target, self.draft(name), always | options)
            room = target.config.max_position_embeddings
            ask = partial(answer, self.tokenizer, "vicuna", room)
            rounds = measure(runs, self.questions, self.args.rounds, column, ask)
            records = [record for finished in rounds for record in finished]
            result[column] = found = {}
            for row, cell in summarise(records).items():
                own = [each["generations"] for each in records if each["method"] == row]
                accepted = total(sum(own, [])).published_acceptance_rate
                found[row] = {"speedup": cell["speedup"], "mat": cell["mat"], "accepted": accepted}
            del found["ar"]  # 1 by definition
        return result

    def counted(self, ways):
        """``ways`` {row: (name of a draft, options)}: accepted tokens over all targets, no clock.

        And how many layers a drafted token took. A column is a seed that drafts were trained with,
        at a temperature.
        """
        result, count = {}, self.args.max_new_tokens
        prompts = [self.tokenizer.encode_chat(each["turns"]) for each in self.questions]
        for seed, temperature in product(SEEDS, TEMPERATURES):
            how, column = dict(temperature=temperature, max_new_tokens=count), {}
            for row, (name, options) in ways.items():
                draft = self.draft(name, SEEDS[0] if name == "untrained" else seed)
                found = []
                for size in SIZES:
                    found += generate_many(self.target(size), prompts, draft, **how, **options)
                stats = total(found)
                layers = sum(layer * count for layer, count in stats.exit_counts.items())
                drafted = max(1, stats.exit_counts.total())
                column[row] = {"mat": stats.mean_accepted_tokens, "layers": layers / drafted}
                tell(f"seed {seed}, T={temperature:g}: {len(column)} of {len(ways)} drafts")
            result[f"seed {seed} T={temperature:g}"] = column
        return result


def means(result, measured="speedup"):
    """{row: the mean over all columns}."""
    rows = dict.fromkeys(row for column in result.values() for row in column)
    return {row: mean(column[row][measured] for column in result.values()) for row in rows}


def gain_by_seed(result, row, other):
    """(how many more tokens ``row`` accepts than ``other``, how far the seeds' gains differ)."""
    gains = {}
    for column, cells in result.items():
        seed = column.partition(" T=")[0]
        gains.setdefault(seed, []).append(cells[row]["mat"] - cells[other]["mat"])
    gains = [mean(each) for each in gains.values()]
    return mean(gains), max(gains) - min(gains)


def holds(true):
    return "holds here" if true else "does not hold here"


def helps(gain, noise):
    """The verdict on a gain: more than noise where the seeds agree far better than that."""
    if abs(gain) <= noise:
        return "no difference beyond noise here"
    return "helps here" if gain > 0 else "harms here"
