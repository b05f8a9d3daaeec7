"""The experiments of two papers on the miniatures, as rows of the benchmark: does it hold here?

S2D (arXiv 2407.01955) and improved MCSD (arXiv 2409.10644). As there, chains and fixed trees are
verified by rejection sampling. papers.md says how drafts are trained, and what was measured.
"""

from argparse import Namespace
from dataclasses import dataclass

from .comparison import compare_methods
from .methods import choose_methods, load_methods
from .specbench import corpus_questions
from .tables import Column, mean_column, table

# Two figures differ if one is so many times as large: speeds differ by up to 10 % from run to run.
MARGIN = 1.1
SIZES = "7b", "13b", "70b"


@dataclass(frozen=True)
class Experiment:
    """What a paper found, as claims about a measure, and the rows that are compared.

    "mat: row | row > other" claims that the best row has more than the best other one, and with >=
    that it does not have less.
    """

    title: str
    claims: list[str]
    rows: dict[str, str]  # label: method. {size} is the target's; what was trained is in drafts/


THREE = "exits=2,3,4:thresholds=0.6,0.4,0"  # as in the papers; the draft uses two by itself
S2D = f"s2d:{THREE}:rejection"
SINGLE = {f"exit {e}": f"sd:exits={e}:rejection" for e in (2, 3, 4)}
# From exit 3, since decision models learn from chains that leave there, or at exit 2.
FORK = "mcsd:exits=3:tree=6,1,1,1,1,1,1,1,1,1:rejection"
SHORT_FORK = "mcsd:exits=4:tree=6,1,1,1,1,1"
CONFIGS = "1,1,1,1,1", "4,1,1,1,1", "4,2,2,1", "2,4,3,1,1"
THRESHOLDS = "0.25,0.25,0", "0.5,0.5,0", "0.75,0.7,0", "0.9,0.85,0"
STATS = "decision=drafts/decision-stats-{size}.safetensors"
HIDDEN = "decision=drafts/decision-hidden-{size}.safetensors"

SHIPPED = {
    "targets": Experiment(
        "One draft for three targets, and each of its exits (S2D)",
        ["speedup: s2d > ar", "speedup: s2d > exit 2 | exit 3 | exit 4"],
        {"s2d": S2D, **SINGLE},
    ),
    "thresholds": Experiment(
        "Thresholds (S2D)",
        ["mat: 0.9,0.85,0 > 0.25,0.25,0"],
        {each: f"s2d:exits=2,3,4:thresholds={each}:rejection" for each in THRESHOLDS},
    ),
    "tree": Experiment(
        "The draft tree (S2D)",
        ["speedup: tree | large tree > s2d"],
        # The children of growing trees are not drawn: no rejection sampling.
        {"s2d": S2D, "tree": f"s2d-tree:{THREE}", "large tree": f"s2d-tree:tree=10x4x60:{THREE}"},
    ),
    "configs": Experiment(
        "Trees of fixed shape (MCSD)",
        ["speedup: 2,4,3,1,1 > 1,1,1,1,1 | 4,1,1,1,1 | 4,2,2,1"],
        {each: f"mcsd:exits=4:tree={each}:rejection" for each in CONFIGS},
    ),
    "roots": Experiment(
        "Roots from the target (MCSD)",
        ["accepted: as published > drafted", "speedup: as published > drafted"],
        {
            "drafted": f"{SHORT_FORK}:rejection",
            "as published": f"{SHORT_FORK}:init=target:rejection",
            "coupled": f"{SHORT_FORK}:init=target",
        },
    ),
}
NEED_TRAINING = {
    "ordinary": Experiment(
        "A sorted draft, an ordinary one's early exits, a draft for each target (S2D)",
        ["speedup: sorted > exit 2 | exit 3", "speedup: sorted > exit 4"],
        {
            "sorted": f"{S2D}:draft=drafts/sorted",
            "exit 2": f"{SINGLE['exit 2']}:draft=drafts/alone-4",
            "exit 3": f"{SINGLE['exit 3']}:draft=drafts/alone-4",
            "exit 4": f"{SINGLE['exit 4']}:draft=drafts/alone-4",
            "one for each target": f"{S2D}:draft=drafts/of-{{size}}",
        },
    ),
    "sorted": Experiment(
        "Exits trained together, and each alone (S2D)",
        [f"mat: {name} >= {name}, alone" for name in SINGLE],
        {
            "exit 2": f"{SINGLE['exit 2']}:draft=drafts/sorted",
            "exit 3": f"{SINGLE['exit 3']}:draft=drafts/sorted",
            "exit 4": f"{SINGLE['exit 4']}:draft=drafts/sorted",
            "exit 2, alone": f"{SINGLE['exit 2']}:draft=drafts/alone-2",
            "exit 3, alone": f"{SINGLE['exit 3']}:draft=drafts/alone-3",
            "exit 4, alone": f"{SINGLE['exit 4']}:draft=drafts/alone-4",
        },
    ),
    "alignment": Experiment(
        "Aligning the draft's features with the target's (S2D), and distillation (2310.08461)",
        ["mat: aligned > SoFT"],
        {
            "SoFT": f"{S2D}:draft=drafts/sorted",
            "aligned": f"{S2D}:draft=drafts/aligned",
            "distilled": f"{S2D}:draft=drafts/distilled",
        },
    ),
    "pretraining": Experiment(
        "Pre-training the draft before SoFT (S2D)",
        ["mat: pre-trained > first layers"],
        {
            "first layers": f"{S2D}:draft=drafts/sorted",
            "pre-trained": f"{S2D}:draft=drafts/pretrained",
            "without SoFT": f"{S2D}:draft=mini-7b",
        },
    ),
    "decisions": Experiment(
        "Decision models, by both sets of features (MCSD)",
        ["speedup: fork, stats | fork, hidden > fork", "speedup: s2d, stats | s2d, hidden > s2d"],
        {
            "fork": FORK,
            "fork, stats": f"{FORK}:{STATS}",
            "fork, hidden": f"{FORK}:{HIDDEN}",
            "s2d": S2D,
            "s2d, stats": f"{S2D}:{STATS}",
            "s2d, hidden": f"{S2D}:{HIDDEN}",
        },
    ),
}
EXPERIMENTS = SHIPPED | NEED_TRAINING


def run_experiments(args: Namespace) -> None:
    """Measure and print each experiment; by default those whose drafts are shipped."""
    names = args.only or list(SHIPPED)
    questions = corpus_questions(args.limit, turns=1)
    chosen = {}
    for name in names:
        for size in SIZES:
            rows = EXPERIMENTS[name].rows.items()
            methods = {label: row.format(size=size) for label, row in rows}
            chosen[name, size] = choose_methods(f"mini-{size}", methods, draft=None)
    for name in names:
        columns: dict[str, Column] = {}
        for size in SIZES:
            pairs = load_methods(chosen[name, size], args.device, args.dtype)
            for comparison in compare_methods(size, pairs, questions, args, peers={}):
                columns[comparison.title] = comparison.by_group["overall"]
        print(describe(name, columns), flush=True)


def describe(name: str, columns: dict[str, Column]) -> str:
    """An experiment: its title, whether its claims hold, and the table."""
    experiment = EXPERIMENTS[name]
    means = mean_column(list(columns.values()))
    lines = [f"### {experiment.title} (`{name}`)"]
    lines += [f"- {decide(claim, means)}" for claim in experiment.claims]
    measures = "speedup", "mat", "accepted"
    lines += ["", table(" / ".join(measures), columns | {"mean": means}, measures)]
    return "\n".join(lines)


def decide(claim: str, means: Column) -> str:
    """Whether a claim holds.

    It does if the figures differ as it says, and does not if they differ the other way round;
    otherwise it is undecided, or holds if it is one of >=.
    """
    measure, _, compared = claim.partition(": ")
    sign = ">=" if ">=" in compared else ">"
    best = []
    for side in compared.split(f" {sign} "):
        best.append(max(side.split(" | "), key=lambda row: means[row][measure]))
    one, other = (means[row][measure] for row in best)
    word = "Holds" if sign == ">=" else "Undecided"
    if one > MARGIN * other:
        word = "Holds"
    elif other > MARGIN * one:
        word = "Does not hold"
    return f"{word} here: {claim} ({best[0]} {one:.2f}, {best[1]} {other:.2f})"
