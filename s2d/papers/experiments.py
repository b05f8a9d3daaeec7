"""The papers' experiments: what was published, what is compared on the miniatures, findings."""

from functools import partial

from ..train.family import DRAFT_EXITS
from ..tree import GrowingShape
from .drafts import ALIGNED, FEATURES
from .lab import Experiment, Finding, Lab

of_s2d = partial(Experiment, source="S2D, arXiv 2407.01955")
timed = partial(of_s2d, measure=Lab.timed, measures=("speedup", "mat"))
counted = partial(of_s2d, measure=Lab.counted, measures=("mat", "layers"), trained=True)

# On Spec-Bench, in the order of our columns: speedup / accepted tokens with Vicuna 7B and 13B and
# Llama-2-chat 70B, at T = 0, then at T = 1; last the mean speedup.
MODELS = "published: Vicuna 7B, 13B, Llama-2-chat 70B"
SORTED = "1.34 / 2.86|1.38 / 2.76|1.95 / 2.36|1.27 / 3.01|1.38 / 2.89|1.98 / 2.44|1.55"
EARLY_EXITS = {
    6: "0.98 / 1.51|1.00 / 1.51|1.32 / 1.46|0.96 / 1.52|1.03 / 1.51|1.37 / 1.53|1.11",
    9: "1.08 / 1.99|1.05 / 1.98|1.54 / 1.80|0.99 / 2.04|1.12 / 2.04|1.57 / 1.86|1.22",
}

OWN_DRAFTS = {"7b": "sorted", "13b": "of-13b", "70b": "of-70b"}
S2D = dict(method="s2d")
TREE = dict(method="s2d-tree", rule="noise")  # its children are not drawn
LARGE_TREE = TREE | dict(tree=GrowingShape(10, 4, 60), thresholds=(0.5, 0.5, 0.0))
CHAIN = dict(method="s2d", thresholds=(0.5, 0.5, 0.0), draft_length=6, stop=0.0)  # as published
SINGLE = {e: dict(method="sd", exits=(e,)) for e in DRAFT_EXITS}
KINDS = {"sorted": "sorted", "alone": "alone-{}"}
EXITS = {
    f"exit {e}, {kind}": SINGLE[e] | dict(draft=draft.format(e), draft_length=6, stop=0.0)
    for kind, draft in KINDS.items()
    for e in DRAFT_EXITS
}
EARLY = {f"trained at 4, exit {e}": SINGLE[e] | {"draft": "alone-4"} for e in DRAFT_EXITS}
EARLIER = ["trained at 4, exit 2", "trained at 4, exit 3"]  # in the place of 6 and 9 of 12 layers
THRESHOLDS = ((0.25, 0.25, 0.0), (0.5, 0.5, 0.0), (0.75, 0.7, 0.0), (0.9, 0.9, 0.0))
DRAFTS = {"SoFT": "sorted"} | {f"aligned, weight {w:g}": f"aligned-{w:g}" for w in ALIGNED}
DRAFTS["distilled (arXiv 2310.08461)"] = "distilled"
STARTS = {"random layers": "random", "the target's first layers": "sorted"}
STARTS |= {"first layers, pre-trained": "pretrained", "first layers, without SoFT": "untrained"}
CONFIGS = ((1, 1, 1, 1, 1), (4, 1, 1, 1, 1), (4, 2, 2, 1), (2, 4, 3, 1, 1))
# From exit 3: decision models learn from chains that leave there, or at exit 2.
FORK = dict(method="mcsd", tree=(6, *(1,) * 9), exits=(3,))
SHORT_FORK = dict(method="mcsd", tree=(6, 1, 1, 1, 1, 1))
LOSSY = SHORT_FORK | {"init": "target"}
COUPLED = LOSSY | {"rule": "noise"}
DRAFTED, PUBLISHED = "roots from the draft", "roots from the target, as published"
DECISIONS = {"fork": FORK, "fork, stop 0.6": FORK | {"stop": 0.6}}
DECISIONS |= {"s2d, fixed length": S2D | {"stop": 0.0}, "s2d": S2D}
for features in FEATURES:
    DECISIONS[f"fork, decision model ({features})"] = FORK | {"stop": features}
    DECISIONS[f"s2d, decision model ({features})"] = S2D | {"stop": features}

of_mcsd = partial(Experiment, source="improved MCSD, arXiv 2409.10644")
accepted = partial(of_mcsd, measure=Lab.timed, measures=("speedup", "mat", "accepted"))
EXPERIMENTS = {
    "targets": timed(
        "One draft for three targets, and each of its exits",
        rows={"s2d": S2D, **{f"sd, exit {e}": SINGLE[e] for e in DRAFT_EXITS}},
        findings=[
            Finding("s2d is faster than the target alone", ["s2d"]),
            Finding(
                "s2d is faster than the best single exit",
                ["s2d"],
                [f"sd, exit {e}" for e in DRAFT_EXITS],
            ),
        ],
        published={f"SoFT + S2D ({MODELS})": SORTED},
    ),
    "ordinary": timed(
        "A sorted draft, an ordinary one's early exits, a draft for each target",
        rows={
            "one sorted draft, s2d": S2D | {"draft": "sorted"},
            **EARLY,
            "a draft for each target, s2d": S2D | {"draft": OWN_DRAFTS},
        },
        findings=[
            Finding(
                "a sorted draft is faster than an ordinary one's early exits",
                ["one sorted draft, s2d"],
                EARLIER,
            ),
            Finding(
                "a sorted draft is faster than an ordinary one",
                ["one sorted draft, s2d"],
                ["trained at 4, exit 4"],
            ),
        ],
        about="A draft trained at exit 4 alone is an ordinary one; its exits 2 and 3 stand for the "
        "paper's 6 and 9 of 12",
        published={f"early exit at {e} ({MODELS})": row for e, row in EARLY_EXITS.items()},
        trained=True,
    ),
    "sorted": counted(
        "Exits trained together, and each alone",
        rows=EXITS,
        findings=[
            Finding(
                f"exit {e} is no worse for being trained with others",
                [f"exit {e}, sorted"],
                [f"exit {e}, alone"],
                "mat",
                no_worse=True,
            )
            for e in DRAFT_EXITS
        ],
    ),
    "thresholds": timed(
        "Thresholds",
        rows={str(each): S2D | {"thresholds": each} for each in THRESHOLDS},
        findings=[
            Finding(
                "higher thresholds give more tokens per pass",
                [str(THRESHOLDS[-1])],
                [str(THRESHOLDS[0])],
                "mat",
            )
        ],
        note="0.5, 0.5, 0 in the paper's evaluation, 0.75 and 0.7 in its first picture",
    ),
    "tree": timed(
        "The draft tree",
        rows={"s2d": S2D, "s2d-tree": TREE, "s2d-tree, 10 x 4, 60 nodes": LARGE_TREE},
        findings=[
            Finding(
                "a tree is faster than a chain", ["s2d-tree", "s2d-tree, 10 x 4, 60 nodes"], ["s2d"]
            )
        ],
        note="speedups 1.75 (Vicuna 7B) and 1.69 (13B) by a tree, in a later version (SD2); 1.34 "
        "and 1.38 by a chain",
    ),
    "alignment": counted(
        "Aligning the draft's features with the target's",
        rows={name: CHAIN | {"draft": draft} for name, draft in DRAFTS.items()},
        findings=[
            Finding(
                "alignment (weight 1) makes a draft better",
                [f"aligned, weight {ALIGNED[1]:g}"],
                ["SoFT"],
                "mat",
            )
        ],
        about="A second loss makes the draft's features, which its head reads, more like the "
        "target's",
        note="figures not at hand",
    ),
    "pretraining": counted(
        "Pre-training the draft before SoFT",
        rows={name: CHAIN | {"draft": draft} for name, draft in STARTS.items()},
        findings=[
            Finding(
                "pre-training makes a draft better",
                ["first layers, pre-trained"],
                ["the target's first layers"],
                "mat",
            )
        ],
        about="Pre-training is on 0.5 million other tokens, and learns what users say as well",
        note="figures not at hand",
    ),
    "configs": of_mcsd(
        "Trees of fixed shape",
        measure=Lab.timed,
        measures=("speedup", "mat"),
        rows={str(each): {"method": "mcsd", "tree": each} for each in CONFIGS},
        findings=[
            Finding(
                "2,4,3,1,1 is the fastest", [str(CONFIGS[-1])], [str(each) for each in CONFIGS[:-1]]
            )
        ],
        about="From the last exit, 4",
        note="2,4,3,1,1 is the best for a draft of 68M and Llama-2-7B",
    ),
    "roots": accepted(
        "Roots from the target",
        rows={DRAFTED: SHORT_FORK, PUBLISHED: LOSSY, "roots from the target, coupled": COUPLED},
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
        measure=Lab.quality,
        measures=("right", "log-probability"),
        rows={"the target alone": {"method": "ar"}, "as published": LOSSY, "coupled": COUPLED},
        findings=[
            Finding(
                "roots as published cost right answers",
                ["the target alone"],
                ["as published"],
                "right",
            )
        ],
        about="Greedy answers to questions with one right answer; log-probability: the target's",
        note="they are not lossless",
    ),
    "masks": of_mcsd(
        "The dynamic sliced mask",
        measure=Lab.masks,
        measures=("µs",),
        rows={"a slice of one mask": {"sliced": True}, "made anew": {"sliced": False}},
        findings=[
            Finding("making a mask anew takes longer", ["made anew"], ["a slice of one mask"], "µs")
        ],
        about="How long a mask takes to make",
        note="one mask for the deepest tree, of which others are slices",
    ),
    "decisions": accepted(
        "Decision models, by both sets of features",
        rows=DECISIONS,
        findings=[
            Finding(
                "a decision model makes a fork faster",
                [f"fork, decision model ({each})" for each in FEATURES],
                ["fork"],
            ),
            Finding(
                "a decision model makes s2d faster",
                [f"s2d, decision model ({each})" for each in FEATURES],
                ["s2d"],
            ),
        ],
        about="A fork has 6 branches of up to 10 tokens. Stop 0.6: it ends when the product of its "
        "levels' confidences is below 0.6. A decision model ends it by the draft's hidden state, "
        "or by statistics: entropy and ten largest probabilities of its distribution",
        note="drafting ends if no node is accepted with probability 0.4 to 0.5",
        trained=True,
    ),
}
