"""The experiments of two papers on the miniatures, as rows of the benchmark: does it hold here?

S2D (arXiv 2407.01955) and improved MCSD (arXiv 2409.10644). As there, chains and fixed trees are
verified by rejection sampling. papers.md says how drafts are trained, and what was measured.
"""

from argparse import Namespace
from typing import NamedTuple

from .figures import Column, mean_column
from .measure import compare_methods
from .methods import choose_methods, load_methods
from .specbench import corpus_questions
from .tables import table

SIZES = "7b", "13b", "70b"


class Experiment(NamedTuple):
    title: str
    claims: list[str]  # papers.md says how they are judged
    rows: dict[str, str]  # label: method. {size} is the target's; what was trained is in drafts/


THREE = "exits=2,3,4:thresholds=0.6,0.4,0"  # as in the papers; the draft uses two by itself
S2D = f"s2d:{THREE}:rejection"
SINGLE = {f"exit {e}": f"sd:exits={e}:rejection" for e in (2, 3, 4)}
# From exit 3, since decision models learn from chains that leave there, or at exit 2.
FORK = "mcsd:exits=3:tree=6,1,1,1,1,1,1,1,1,1:rejection"
SHORT_FORK = "mcsd:exits=4:tree=6,1,1,1,1,1"
CONFIGS = "1,1,1,1,1", "4,1,1,1,1", "4,2,2,1", "2,4,3,1,1"
THRESHOLDS = "0.25,0.25,0", "0.5,0.5,0", "0.75,0.7,0", "0.9,0.85,0"
DECISION = "decision=drafts/decision-{}-{{size}}.safetensors"
KINDS = "stats", "hidden"
SORTED = f"{S2D}:draft=drafts/sorted"

SHIPPED = {
    "targets": Experiment(
        "One draft for three targets, and each of its exits (S2D)",
        ["s2d is faster than the target alone", "s2d is faster than the best single exit"],
        {"s2d": S2D, **SINGLE},
    ),
    "thresholds": Experiment(
        "Thresholds (S2D)",
        ["higher thresholds give more tokens per pass"],
        {each: f"s2d:exits=2,3,4:thresholds={each}:rejection" for each in THRESHOLDS},
    ),
    "tree": Experiment(
        "The draft tree (S2D)",
        ["a tree is faster than a chain"],
        # The children of growing trees are not drawn: no rejection sampling.
        {"s2d": S2D, "tree": f"s2d-tree:{THREE}", "large tree": f"s2d-tree:tree=10x4x60:{THREE}"},
    ),
    "configs": Experiment(
        "Trees of fixed shape (MCSD)",
        ["2,4,3,1,1 is the fastest"],
        {each: f"mcsd:exits=4:tree={each}:rejection" for each in CONFIGS},
    ),
    "roots": Experiment(
        "Roots from the target (MCSD)",
        ["roots from the target are accepted more often", "roots from the target are faster"],
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
        [f"a sorted draft is faster than an ordinary one{it}" for it in ("'s early exits", "")],
        {
            "sorted": SORTED,
            **{label: f"{row}:draft=drafts/alone-4" for label, row in SINGLE.items()},
            "one for each target": f"{S2D}:draft=drafts/of-{{size}}",
        },
    ),
    "sorted": Experiment(
        "Exits trained together, and each alone (S2D)",
        [f"{name} is no worse for being trained with others" for name in SINGLE],
        {label: f"{row}:draft=drafts/sorted" for label, row in SINGLE.items()}
        | {f"exit {e}, alone": f"sd:exits={e}:rejection:draft=drafts/alone-{e}" for e in (2, 3, 4)},
    ),
    "alignment": Experiment(
        "Aligning the draft's features with the target's (S2D), and distillation (2310.08461)",
        ["alignment makes a draft better"],
        {"SoFT": SORTED}
        | {name: f"{S2D}:draft=drafts/{name}" for name in ("aligned", "distilled")},
    ),
    "pretraining": Experiment(
        "Pre-training the draft before SoFT (S2D)",
        ["pre-training makes a draft better"],
        {
            "first layers": SORTED,
            "pre-trained": f"{S2D}:draft=drafts/pretrained",
            "without SoFT": f"{S2D}:draft=mini-7b",
        },
    ),
    "decisions": Experiment(
        "Decision models, by both sets of features (MCSD)",
        ["a decision model makes a fork faster", "a decision model makes s2d faster"],
        {"fork": FORK, **{f"fork, {kind}": f"{FORK}:{DECISION.format(kind)}" for kind in KINDS}}
        | {"s2d": S2D, **{f"s2d, {kind}": f"{S2D}:{DECISION.format(kind)}" for kind in KINDS}},
    ),
}
EXPERIMENTS = SHIPPED | NEED_TRAINING


def main(args: Namespace) -> None:
    """Measure and print each experiment; by default those whose drafts are shipped."""
    names = args.only or list(SHIPPED)
    questions = corpus_questions(args.limit, turns=1)
    chosen = {}
    for name in names:
        for size in SIZES:
            rows = EXPERIMENTS[name].rows.items()
            methods = {label: row.format(size=size) for label, row in rows}
            chosen[name, size] = choose_methods(f"mini-{size}", methods, args)
    for name in names:
        columns: dict[str, Column] = {}
        for size in SIZES:
            pairs = load_methods(chosen[name, size], args)
            for comparison in compare_methods(size, pairs, questions, args, peers={}):
                columns[comparison.title] = comparison.by_group["overall"]
        columns["mean"] = mean_column(list(columns.values()))
        title, claims, _ = EXPERIMENTS[name]
        print(f"### {title} (`{name}`)", *claims, sep="\n- ")
        measures = "speedup", "mat", "accepted"
        print(table(f"\n{' / '.join(measures)}", columns, measures), flush=True)
