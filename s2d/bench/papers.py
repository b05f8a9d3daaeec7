"""The experiments of two papers on the miniatures, as rows of the benchmark: does it hold here?

S2D (arXiv 2407.01955) and improved MCSD (arXiv 2409.10644). As there, chains and fixed trees are
verified by rejection sampling.
"""

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from timeit import repeat

import numpy as np
import torch

from ..checkpoint.names import WEIGHTS
from ..mask import add_nodes, positions_and_mask
from .measure import run_ours
from .methods import parse_method
from .specbench import corpus_questions
from .speed import load_pairs, measure_runs
from .tables import FORMATS, Result, render, summarise, table

MARGIN = 1.1  # times as large: the speed of one method differs by up to 10 % from run to run
SIZES = "7b", "13b", "70b"
TEMPERATURES = 0.0, 1.0


@dataclass(frozen=True)
class Experiment:
    """A claim such as "mat: row | row > other": the best row has more than the best other one."""

    title: str
    claims: list[str]
    rows: dict[str, str]  # label: method. {size} is the target's; drafts are in --drafts
    note: str = ""  # what was published, and what to know


THREE = "exits=2,3,4:thresholds=0.6,0.4,0"  # as in the papers; the draft uses two by itself
S2D = f"s2d:{THREE}:rejection"
SINGLE = {f"exit {e}": f"sd:exits={e}:rejection" for e in (2, 3, 4)}
# From exit 3, since decision models learn from chains that leave there, or at exit 2.
FORK = "mcsd:exits=3:tree=6,1,1,1,1,1,1,1,1,1:rejection"
SHORT_FORK = "mcsd:exits=4:tree=6,1,1,1,1,1"
CONFIGS = "1,1,1,1,1", "4,1,1,1,1", "4,2,2,1", "2,4,3,1,1"
THRESHOLDS = "0.25,0.25,0", "0.5,0.5,0", "0.75,0.7,0", "0.9,0.9,0"

EXPERIMENTS = {
    "targets": Experiment(
        "One draft for three targets, and each of its exits (S2D)",
        ["speedup: s2d > ar", "speedup: s2d > exit 2 | exit 3 | exit 4"],
        {"s2d": S2D, **SINGLE},
    ),
    "ordinary": Experiment(
        "A sorted draft, an ordinary one's early exits, a draft for each target (S2D)",
        ["speedup: sorted > exit 2 | exit 3", "speedup: sorted > exit 4"],
        {
            "sorted": f"{S2D}:draft=sorted",
            **{name: f"{row}:draft=alone-4" for name, row in SINGLE.items()},
            "one for each target": f"{S2D}:draft=of-{{size}}",
        },
        "An ordinary draft is trained at exit 4 alone; exits 2 and 3 stand for 6 and 9 of 12",
    ),
    "sorted": Experiment(
        "Exits trained together, and each alone (S2D: each is no worse for it)",
        [f"mat: exit {e}, alone > exit {e}" for e in (2, 3, 4)],
        {
            **{name: f"{row}:draft=sorted" for name, row in SINGLE.items()},
            **{f"{name}, alone": f"{row}:draft=alone-{name[-1]}" for name, row in SINGLE.items()},
        },
    ),
    "thresholds": Experiment(
        "Thresholds (S2D)",
        ["mat: 0.9,0.9,0 > 0.25,0.25,0"],
        {each: f"s2d:exits=2,3,4:thresholds={each}:rejection" for each in THRESHOLDS},
        "0.5, 0.5, 0 in the paper's evaluation, 0.75 and 0.7 in its first picture",
    ),
    "tree": Experiment(
        "The draft tree (S2D)",
        ["speedup: tree | large tree > s2d"],
        # The children of growing trees are not drawn: no rejection sampling.
        {"s2d": S2D, "tree": f"s2d-tree:{THREE}", "large tree": f"s2d-tree:tree=10x4x60:{THREE}"},
        "1.75 (Vicuna 7B) and 1.69 (13B) by a tree, in a later version; 1.34, 1.38 by a chain",
    ),
    "alignment": Experiment(
        "Aligning the draft's features with the target's (S2D), and distillation (2310.08461)",
        ["mat: weight 1 > SoFT"],
        {
            "SoFT": f"{S2D}:draft=sorted",
            **{f"weight {each}": f"{S2D}:draft=aligned-{each}" for each in ("0.1", "1", "10")},
            "distilled": f"{S2D}:draft=distilled",
        },
    ),
    "pretraining": Experiment(
        "Pre-training the draft before SoFT (S2D)",
        ["mat: pre-trained > first layers"],
        {
            "first layers": f"{S2D}:draft=sorted",
            "pre-trained": f"{S2D}:draft=pretrained",
            "without SoFT": f"{S2D}:draft={WEIGHTS / 'mini-7b'}",
        },
    ),
    "configs": Experiment(
        "Trees of fixed shape (MCSD)",
        ["speedup: 2,4,3,1,1 > 1,1,1,1,1 | 4,1,1,1,1 | 4,2,2,1"],
        {each: f"mcsd:exits=4:tree={each}:rejection" for each in CONFIGS},
        "2,4,3,1,1 is the best for a draft of 68M and Llama-2-7B",
    ),
    "roots": Experiment(
        "Roots from the target (MCSD)",
        [
            "accepted: as published > drafted",
            "speedup: as published > drafted",
            "same text: coupled > as published",
        ],
        {
            "drafted": f"{SHORT_FORK}:rejection",
            "as published": f"{SHORT_FORK}:init=target:rejection",
            "coupled": f"{SHORT_FORK}:init=target",
        },
        "As published the root whose branch goes furthest wins: not lossless. Coupled, it is the "
        "one that the target chooses. Up to 27.5 % faster than MCSD (arXiv 2401.06706)",
    ),
    "decisions": Experiment(
        "Decision models, by both sets of features (MCSD)",
        ["speedup: fork, stats | fork, hidden > fork", "speedup: s2d, stats | s2d, hidden > s2d"],
        {"fork": FORK, "fork, stop 0.6": f"{FORK}:stop=0.6", "s2d": f"{S2D}:stop=0"}
        | {
            f"{name}, {each}": f"{row}:decision=decision-{each}-{{size}}.safetensors"
            for each in ("stats", "hidden")
            for name, row in (("fork", FORK), ("s2d", S2D))
        },
    ),
}
MASKS = {"fork of 6, 10 deep": (6, *(1,) * 9), "4,2,2,1": (4, 2, 2, 1), "10,4,2": (10, 4, 2)}


def report(args: Namespace) -> None:
    """Measure and print each experiment; by default those for which the drafts are there."""
    trained = {name for name, each in EXPERIMENTS.items() if needs_drafts(each)}
    names = args.only or [*(name for name in EXPERIMENTS if args.drafts or name not in trained)]
    for name in names:
        if name in trained and not args.drafts:
            raise ValueError(f"{name}: give --drafts, see s2d/bench/papers.md")
    for name in names:
        print(as_text(name, measure(EXPERIMENTS[name], args), args.markdown), flush=True)
    if not args.only:
        print(f"### The dynamic sliced mask (MCSD)\n\n{render(time_masks(), args.markdown)}")


def needs_drafts(experiment: Experiment) -> bool:
    """Whether it compares drafts, or decision models, that have to be trained."""
    rows = experiment.rows.values()
    return any(":draft=" in row or ".safetensors" in row for row in rows)


def measure(experiment: Experiment, args: Namespace) -> Result:
    """A column is a target at a temperature; rows in turns with the target alone."""
    questions = [each | {"turns": each["turns"][:1]} for each in corpus_questions(args.limit)]
    result: Result = {}
    for size in SIZES:
        named = {name: row.format(size=size) for name, row in experiment.rows.items()}
        methods = {"ar": parse_method("ar", None)}
        for name, row in named.items():
            methods[name] = parse_method(row, WEIGHTS / "mini-draft", args.drafts or Path())
        pairs = load_pairs(WEIGHTS / f"mini-{size}", methods, args)
        runs = {name: partial(run_ours, pair=pair) for name, pair in pairs.items()}
        for temperature in TEMPERATURES:
            options = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
            column = column_of(size, temperature)
            records = measure_runs(pairs["ar"], runs, questions, args.rounds, column, options)
            result[column] = summarise(records)["overall"]
    columns = [column_of(size, temperature) for temperature in TEMPERATURES for size in SIZES]
    return {column: result[column] for column in columns}


def column_of(size: str, temperature: float) -> str:
    return f"{size} T={temperature:g}"


def as_text(name: str, result: Result, markdown: bool) -> str:
    """An experiment: its title, whether its claims hold, and the table."""
    experiment = EXPERIMENTS[name]
    text = [f"### {experiment.title} (`{name}`)", *filter(None, [experiment.note])]
    text += [f"- {judge(claim, result)}" for claim in experiment.claims]
    named = [claim.partition(":")[0] for claim in experiment.claims]
    measures = list(dict.fromkeys(["speedup", "mat", *named]))
    lines = table(result, measures, means=True)
    lines[0][0] = " / ".join(measures)
    return "\n".join([*text, "", render(lines, markdown), ""])


def judge(claim: str, result: Result) -> str:
    """Whether a claim holds, by the means over all columns.

    It does if they differ by more than MARGIN as it says, and does not if they differ so the other
    way round; otherwise it is undecided.
    """
    measure, _, compared = claim.partition(": ")
    rows, others = (side.split(" | ") for side in compared.split(" > "))
    means = {row: mean(each[row][measure] for each in result.values()) for row in (*rows, *others)}
    best, other = (max(side, key=means.get) for side in (rows, others))
    word = "Undecided"
    if means[best] > MARGIN * means[other]:
        word = "Holds"
    elif means[other] > MARGIN * means[best]:
        word = "Does not hold"
    shown = [format(means[each], FORMATS[measure]) for each in (best, other)]
    return f"{word} here: {claim} ({best} {shown[0]}, {other} {shown[1]})"


def time_masks() -> list[list[str]]:
    """Microseconds for the masks of all passes of a tree after 100 tokens.

    Each level of the tree is a pass. The ancestor matrix grows from pass to pass, or it is made
    anew.
    """
    lines = [["µs", *MASKS], ["grown with the tree"], ["made anew"]]
    for widths in MASKS.values():
        levels = parents_by_level(widths)
        for line, make in zip(lines[1:], (grow_masks, remake_masks)):
            seconds = repeat(partial(make, levels), number=1, repeat=50)
            line.append(f"{1e6 * median(seconds):.0f}")
    return lines


def parents_by_level(widths: Sequence[int]) -> list[list[int]]:
    """The parents of the nodes of each level of a tree of fixed shape."""
    levels = []
    above = [0]
    size = 1
    for width in widths:
        levels.append([node for node in above for _ in range(width)])
        above = list(range(size, size + len(levels[-1])))
        size += len(levels[-1])
    return levels


def grow_masks(levels: list[list[int]]) -> None:
    ancestors = np.ones((1, 1), dtype=bool)
    for parents in levels:
        ancestors = add_nodes(ancestors, parents)
        positions_and_mask(100, 100, ancestors, torch.device("cpu"), torch.float32)


def remake_masks(levels: list[list[int]]) -> None:
    parents: list[int] = []
    for level in levels:
        parents += level
        ancestors = np.eye(1 + len(parents), dtype=bool)
        for node, parent in enumerate(parents, start=1):
            ancestors[node] |= ancestors[parent]
        positions_and_mask(100, 100, ancestors, torch.device("cpu"), torch.float32)
