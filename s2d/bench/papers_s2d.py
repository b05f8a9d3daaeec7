"""The experiments of S2D (arXiv 2407.01955, on Spec-Bench): what was published, our rows."""

from functools import partial

from ..train.ablations import ALIGNED
from ..train.family import DRAFT_EXITS
from ..tree import Dynamic
from .lab import Experiment, Finding, Lab

of_s2d = partial(Experiment, source="S2D, arXiv 2407.01955")
timed = partial(of_s2d, measure=Lab.timed, measures=("speedup", "mat"))
counted = partial(of_s2d, measure=Lab.counted, measures=("mat", "layers"), trained=True)
gain = partial(Finding, measure="mat", factor=1.0, by_seed=True)  # by more than seeds differ
no_harm = partial(gain, factor=-1.0)

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
TREE = dict(method="s2d-tree", coupled=True)  # its children are not drawn
LARGE_TREE = TREE | dict(tree=Dynamic(10, 4, 60), thresholds=(0.5, 0.5, 0.0))
CHAIN = dict(method="s2d", thresholds=(0.5, 0.5, 0.0), draft_length=6, stop=0.0)  # as published
SINGLE = {e: dict(method="sd", exits=(e,)) for e in DRAFT_EXITS}
LONG = dict(draft_length=6, stop=0.0)
KINDS = {"sorted": "sorted", "alone": "alone-{}", "untrained": "untrained"}
EARLY = {f"fine-tuned at exit 4, exit {e}": SINGLE[e] | {"draft": "alone-4"} for e in DRAFT_EXITS}
THRESHOLDS = ((0.25, 0.25, 0.0), (0.5, 0.5, 0.0), (0.75, 0.7, 0.0), (0.9, 0.9, 0.0))
DRAFTS = {"SoFT": "sorted"} | {f"aligned, weight {w:g}": f"aligned-{w:g}" for w in ALIGNED}
DRAFTS["distilled (arXiv 2310.08461)"] = "distilled"
STARTS = {"random layers": "random", "the target's first layers": "sorted"}
STARTS |= {"these, pre-trained": "pretrained", "these, without SoFT": "untrained"}

EXPERIMENTS = {
    "targets": timed(
        "One draft for three targets, and each of its exits",
        rows={"s2d": S2D, **{f"sd, exit {e}": SINGLE[e] for e in DRAFT_EXITS}},
        findings=[Finding(["s2d"])],
        published={f"SoFT + S2D ({MODELS})": SORTED},
    ),
    "ordinary": timed(
        "A sorted draft, an ordinary one's early exits, a draft for each target",
        rows={
            "one sorted draft, s2d": S2D | {"draft": "sorted"},
            **EARLY,
            "a draft for each target, s2d": S2D | {"draft": OWN_DRAFTS},
        },
        findings=[Finding(["one sorted draft, s2d"], EARLY)],
        published={f"early exit at {e} ({MODELS})": row for e, row in EARLY_EXITS.items()},
        trained=True,
    ),
    "sorted": counted(
        "Exits trained together, and each alone",
        rows={
            f"exit {e}, {kind}": SINGLE[e] | LONG | {"draft": draft.format(e)}
            for kind, draft in KINDS.items()
            for e in DRAFT_EXITS
        },
        findings=[no_harm([f"exit {e}, sorted"], [f"exit {e}, alone"]) for e in DRAFT_EXITS],
    ),
    "thresholds": timed(
        "Thresholds",
        rows={str(each): S2D | {"thresholds": each} for each in THRESHOLDS},
        findings=[Finding([str(THRESHOLDS[-1])], [str(THRESHOLDS[0])], "mat")],
        note="0.5, 0.5, 0 in its evaluation, 0.75 and 0.7 in its picture",
    ),
    "tree": timed(
        "The draft tree",
        rows={"s2d": S2D, "s2d-tree": TREE, "s2d-tree, 10 x 4, 60 nodes": LARGE_TREE},
        findings=[Finding(["s2d-tree", "s2d-tree, 10 x 4, 60 nodes"], ["s2d"])],
        note="1.75 with Vicuna 7B and 1.69 with 13B by its later version, SD2; the chain 1.34 "
        "and 1.38",
    ),
    "alignment": counted(
        "Aligning the draft's features with the target's",
        rows={name: CHAIN | {"draft": draft} for name, draft in DRAFTS.items()},
        findings=[gain([f"aligned, weight {ALIGNED[1]:g}"], ["SoFT"])],
        note="an ablation of the paper; its figures are not at hand",
    ),
    "pretraining": counted(
        "Pre-training the draft before SoFT",
        rows={name: CHAIN | {"draft": draft} for name, draft in STARTS.items()},
        findings=[gain(["these, pre-trained"], ["the target's first layers"])],
        note="an ablation of the paper; its figures are not at hand",
    ),
}
