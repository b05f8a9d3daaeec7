"""The papers' experiments: what was published, what is compared on the miniatures, findings.

A row is a label and the name of a method, as ``--methods`` takes it. As in the papers, chains and
fixed trees are verified by rejection sampling.
"""

from functools import partial

from ..train.decision import FEATURES
from ..train.family import DRAFT_EXITS
from .drafts import ALIGNED
from .lab import ALONE, Experiment, Finding, count_tokens, judge_answers, measure_speed, time_masks

# On Spec-Bench, in the order of our columns: speedup / accepted tokens with Vicuna 7B and 13B and
# Llama-2-chat 70B, at T = 0, then at T = 1; last the mean speedup.
MODELS = "published: Vicuna 7B, 13B, Llama-2-chat 70B"
SORTED = "1.34 / 2.86|1.38 / 2.76|1.95 / 2.36|1.27 / 3.01|1.38 / 2.89|1.98 / 2.44|1.55"
EARLY_EXITS = {
    6: "0.98 / 1.51|1.00 / 1.51|1.32 / 1.46|0.96 / 1.52|1.03 / 1.51|1.37 / 1.53|1.11",
    9: "1.08 / 1.99|1.05 / 1.98|1.54 / 1.80|0.99 / 2.04|1.12 / 2.04|1.57 / 1.86|1.22",
}

# {seed}, {own} and {size} in the names of files: see ``Lab.plan``.
THREE_EXITS = "exits=2,3,4:thresholds=0.6,0.4,0"  # as in the papers; the draft uses two by itself
S2D = f"s2d:{THREE_EXITS}:rejection"
SINGLE = {f"sd, exit {e}": f"sd:exits={e}:rejection" for e in DRAFT_EXITS}
SORTED_DRAFT = "one sorted draft, s2d"
EARLY = {
    f"trained at 4, exit {e}": f"sd:exits={e}:rejection:draft=alone-4-{{seed}}" for e in DRAFT_EXITS
}
*EARLIER, LAST = EARLY  # exits 2 and 3 in the place of 6 and 9 of 12 layers
SAME_LENGTH = {e: f"sd:exits={e}:draft_length=6:stop=0:rejection:batch=8" for e in DRAFT_EXITS}
EXITS = {f"exit {e}, sorted": row + ":draft=sorted-{seed}" for e, row in SAME_LENGTH.items()}
EXITS |= {f"exit {e}, alone": f"{row}:draft=alone-{e}-{{seed}}" for e, row in SAME_LENGTH.items()}
CHAIN = (
    "s2d:exits=2,3,4:thresholds=0.5,0.5,0:draft_length=6:stop=0:rejection:batch=8"  # as published
)
THRESHOLDS = {
    f"({each})": f"s2d:exits=2,3,4:thresholds={each}:rejection"
    for each in ("0.25, 0.25, 0.0", "0.5, 0.5, 0.0", "0.75, 0.7, 0.0", "0.9, 0.9, 0.0")
}
TREE = "s2d-tree"
LARGE_TREE = "s2d-tree, 10 x 4, 60 nodes"
FIRST_LAYERS = "the target's first layers"
PRETRAINED = "first layers, pre-trained"
SHAPES = {
    f"({each})": f"mcsd:exits=4:tree={each}:rejection"
    for each in ("1, 1, 1, 1, 1", "4, 1, 1, 1, 1", "4, 2, 2, 1", "2, 4, 3, 1, 1")
}
SHORT_FORK = "mcsd:exits=4:tree=6,1,1,1,1,1"
DRAFTED = "roots from the draft"
PUBLISHED = "roots from the target, as published"
SLICED = "a slice of one mask"
ANEW = "made anew"
# From exit 3: decision models learn from chains that leave there, or at exit 2.
FORK = "mcsd:exits=3:tree=6,1,1,1,1,1,1,1,1,1:rejection"
DECISIONS = {"fork": FORK, "fork, stop 0.6": f"{FORK}:stop=0.6"}
DECISIONS |= {"s2d, fixed length": f"{S2D}:stop=0", "s2d": S2D}
for features in FEATURES:
    stop = f":stop=decision-{features}-{{size}}.safetensors"
    DECISIONS[f"fork, decision model ({features})"] = FORK + stop
    DECISIONS[f"s2d, decision model ({features})"] = S2D + stop

of_s2d = partial(Experiment, source="S2D, arXiv 2407.01955")
of_mcsd = partial(Experiment, source="improved MCSD, arXiv 2409.10644")
timed = dict(measure=measure_speed, measures=("speedup", "mat"))
counted = dict(measure=count_tokens, measures=("mat", "layers"))
with_accepted = dict(measure=measure_speed, measures=("speedup", "mat", "accepted"))

EXPERIMENTS = {
    "targets": of_s2d(
        "One draft for three targets, and each of its exits",
        **timed,
        rows={"s2d": S2D, **SINGLE},
        findings=[
            Finding("s2d is faster than the target alone", ["s2d"]),
            Finding("s2d is faster than the best single exit", ["s2d"], [*SINGLE]),
        ],
        published={f"SoFT + S2D ({MODELS})": SORTED},
    ),
    "ordinary": of_s2d(
        "A sorted draft, an ordinary one's early exits, a draft for each target",
        **timed,
        rows={
            SORTED_DRAFT: S2D + ":draft=sorted-{seed}",
            **EARLY,
            "a draft for each target, s2d": S2D + ":draft={own}-{seed}",
        },
        findings=[
            Finding(f"a sorted draft is faster than {what}", [SORTED_DRAFT], others)
            for what, others in (
                ("an ordinary one's early exits", EARLIER),
                ("an ordinary one", [LAST]),
            )
        ],
        about="A draft trained at exit 4 alone is an ordinary one; its exits 2 and 3 stand for the "
        "paper's 6 and 9 of 12",
        published={f"early exit at {e} ({MODELS})": row for e, row in EARLY_EXITS.items()},
    ),
    "sorted": of_s2d(
        "Exits trained together, and each alone",
        **counted,
        rows=EXITS,
        findings=[
            Finding(
                f"exit {e} is no worse for being trained with others",
                [f"exit {e}, sorted"],
                [f"exit {e}, alone"],
                no_worse=True,
            )
            for e in DRAFT_EXITS
        ],
    ),
    "thresholds": of_s2d(
        "Thresholds",
        **timed,
        rows=THRESHOLDS,
        findings=[
            Finding(
                "higher thresholds give more tokens per pass",
                [*THRESHOLDS][-1:],
                [*THRESHOLDS][:1],
                "mat",
            )
        ],
        note="0.5, 0.5, 0 in the paper's evaluation, 0.75 and 0.7 in its first picture",
    ),
    "tree": of_s2d(
        "The draft tree",
        **timed,
        rows={  # the children of growing trees are not drawn: no rejection sampling
            "s2d": S2D,
            TREE: f"s2d-tree:{THREE_EXITS}",
            LARGE_TREE: "s2d-tree:tree=10x4x60:exits=2,3,4:thresholds=0.5,0.5,0",
        },
        findings=[Finding("a tree is faster than a chain", [TREE, LARGE_TREE], ["s2d"])],
        note="speedups 1.75 (Vicuna 7B) and 1.69 (13B) by a tree, in a later version (SD2); 1.34 "
        "and 1.38 by a chain",
    ),
    "alignment": of_s2d(
        "Aligning the draft's features with the target's",
        **counted,
        rows={
            "SoFT": CHAIN + ":draft=sorted-{seed}",
            **{f"aligned, weight {w:g}": f"{CHAIN}:draft=aligned-{w:g}-{{seed}}" for w in ALIGNED},
            "distilled (arXiv 2310.08461)": CHAIN + ":draft=distilled-{seed}",
        },
        findings=[
            Finding("alignment (weight 1) makes a draft better", ["aligned, weight 1"], ["SoFT"])
        ],
        about="A second loss makes the draft's features, which its head reads, more like the "
        "target's",
        note="figures not at hand",
    ),
    "pretraining": of_s2d(
        "Pre-training the draft before SoFT",
        **counted,
        rows={
            "random layers": CHAIN + ":draft=random-{seed}",
            FIRST_LAYERS: CHAIN + ":draft=sorted-{seed}",
            PRETRAINED: CHAIN + ":draft=pretrained-{seed}",
            "first layers, without SoFT": CHAIN + ":draft=untrained-1",  # the same for any seed
        },
        findings=[Finding("pre-training makes a draft better", [PRETRAINED], [FIRST_LAYERS])],
        about="Pre-training is on 0.5 million other tokens, and learns what users say as well",
        note="figures not at hand",
    ),
    "configs": of_mcsd(
        "Trees of fixed shape",
        **timed,
        rows=SHAPES,
        findings=[Finding("2,4,3,1,1 is the fastest", [*SHAPES][-1:], [*SHAPES][:-1])],
        about="From the last exit, 4",
        note="2,4,3,1,1 is the best for a draft of 68M and Llama-2-7B",
    ),
    "roots": of_mcsd(
        "Roots from the target",
        **with_accepted,
        rows={
            DRAFTED: f"{SHORT_FORK}:rejection",
            PUBLISHED: f"{SHORT_FORK}:init=target:rejection",
            "roots from the target, coupled": f"{SHORT_FORK}:init=target",
        },
        findings=[
            Finding(
                "roots from the target are accepted more often", [PUBLISHED], [DRAFTED], "accepted"
            ),
            Finding("roots from the target are faster", [PUBLISHED], [DRAFTED]),
        ],
        about="Roots are the first level of a tree, here of 6,1,1,1,1,1. If the target proposes "
        "them, a step emits no bonus token, and one root counts as an accepted level. As published "
        "it is the one whose branch goes furthest: not lossless. Coupled, it is the one that the "
        "target chooses: lossless",
        note="up to 27.5 % faster than MCSD (arXiv 2401.06706); with a decision model, in the "
        "paper's first version, up to 164 % more acceptance and 75 % more speed",
    ),
    "quality": of_mcsd(
        "What roots from the target cost",
        measure=judge_answers,
        measures=("right", "log-probability"),
        rows={
            ALONE: "ar:batch=8",
            "as published": f"{SHORT_FORK}:init=target:rejection:batch=8",
            "coupled": f"{SHORT_FORK}:init=target:batch=8",
        },
        findings=[Finding("roots as published cost right answers", [ALONE], ["as published"])],
        about="Greedy answers to questions with one right answer; log-probability: the target's",
        note="they are not lossless",
    ),
    "masks": of_mcsd(
        "The dynamic sliced mask",
        measure=time_masks,
        measures=("µs",),
        rows={SLICED: "sliced", ANEW: "anew"},
        findings=[Finding("making a mask anew takes longer", [ANEW], [SLICED])],
        about="How long a mask takes to make",
        note="one mask for the deepest tree, of which others are slices",
    ),
    "decisions": of_mcsd(
        "Decision models, by both sets of features",
        **with_accepted,
        rows=DECISIONS,
        findings=[
            Finding(
                f"a decision model makes {what} faster",
                [f"{name}, decision model ({each})" for each in FEATURES],
                [name],
            )
            for name, what in (("fork", "a fork"), ("s2d", "s2d"))
        ],
        about="A fork has 6 branches of up to 10 tokens. Stop 0.6: it ends when the product of its "
        "levels' confidences is below 0.6. A decision model ends it by the draft's hidden state, "
        "or by statistics: entropy and ten largest probabilities of its distribution",
        note="drafting ends if no node is accepted with probability 0.4 to 0.5",
    ),
}
