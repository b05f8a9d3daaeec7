"""The experiments of S2D (arXiv 2407.01955, on Spec-Bench): what was published, what is measured.

A finding is a sentence of what was found here, and whether it is what the paper says.
"""

from functools import partial

from ..train.ablations import ALIGNED
from ..train.family import DRAFT_EXITS
from ..tree import Dynamic
from .lab import COUNTED, FASTER, SHIPPED, TIMED, Experiment, gain_by_seed, helps, holds, means

CHAIN = dict(method="s2d", thresholds=(0.5, 0.5, 0.0), draft_length=6, stop=0.0)  # as published
THRESHOLDS = ((0.25, 0.25, 0.0), (0.5, 0.5, 0.0), (0.75, 0.7, 0.0), (0.9, 0.9, 0.0))


def targets(lab):
    """One draft for three targets, beside each of its exits."""
    single = {f"sd, exit {e}": (SHIPPED, dict(method="sd", exits=(e,))) for e in DRAFT_EXITS}
    return lab.timed(lambda size: {"s2d": (SHIPPED, {"method": "s2d"}), **single})


def found_targets(result):
    speed = means(result)
    single = max((row for row in speed if row.startswith("sd")), key=speed.get)
    slowest = min(column["s2d"]["speedup"] for column in result.values())
    sentence = f"with one draft the targets are {speed['s2d']:.2f} times as fast on the mean, the "
    sentence += f"slowest {slowest:.2f}; with its best single exit ({single}) {speed[single]:.2f}"
    return holds(slowest > FASTER), sentence


def ordinary(lab):
    """A sorted draft, an ordinary one's early exits, a draft for each target."""
    early = {
        f"fine-tuned at exit 4, exit {e}": ("alone-4", dict(method="sd", exits=(e,)))
        for e in DRAFT_EXITS
    }
    own = {"7b": "sorted", "13b": "of-13b", "70b": "of-70b"}
    chosen = {"method": "s2d"}

    def ways(size):
        each = {"a draft for each target, s2d": (own[size], chosen)}
        return {"one sorted draft, s2d": ("sorted", chosen)} | early | each

    return lab.timed(ways)


def found_ordinary(result):
    speed = means(result)
    ours, own = speed["one sorted draft, s2d"], speed["a draft for each target, s2d"]
    early = [speed[f"fine-tuned at exit 4, exit {e}"] for e in DRAFT_EXITS]
    others = " and ".join(f"{each:.2f}" for each in early[:-1])
    sentence = f"a sorted draft is {ours:.2f} times as fast as the target, early exits of a draft "
    sentence += f"fine-tuned at its last layer {others}, that layer {early[-1]:.2f}; a draft for "
    return holds(ours > FASTER * max(early)), f"{sentence}each target {own:.2f}"


def exits_alone(lab):
    """Exits trained together, and each alone."""

    def ways(kind, named):
        how = dict(method="sd", draft_length=6, stop=0.0)
        return {f"exit {e}, {kind}": (named(e), how | {"exits": (e,)}) for e in DRAFT_EXITS}

    drafts = ways("sorted", lambda e: "sorted") | ways("alone", lambda e: f"alone-{e}")
    return lab.counted(drafts | ways("untrained", lambda e: "untrained"))


def found_exits_alone(result):
    both = means(result, "mat")
    kinds = [[both[f"exit {e}, {kind}"] for e in DRAFT_EXITS] for kind in ("sorted", "alone")]
    gains = [gain_by_seed(result, f"exit {e}, sorted", f"exit {e}, alone") for e in DRAFT_EXITS]
    together, alone = (", ".join(f"{value:.2f}" for value in kind) for kind in kinds)
    differ = ", ".join(f"{gain:+.2f} (seeds differ by {noise:.2f})" for gain, noise in gains)
    sentence = (
        f"exits trained together accept {together} tokens a step, three drafts trained alone "
    )
    return holds(all(gain > -noise for gain, noise in gains)), f"{sentence}{alone}: {differ}"


def thresholds(lab):
    """Thresholds."""
    given = [(SHIPPED, {"method": "s2d", "thresholds": each}) for each in THRESHOLDS]
    return lab.timed(lambda size: dict(zip(map(str, THRESHOLDS), given)))


def found_thresholds(result):
    speed, mat = means(result), means(result, "mat")
    low, high = str(THRESHOLDS[0]), str(THRESHOLDS[-1])
    best = max(speed, key=speed.get)
    sentence = (
        "what higher thresholds buy: from the lowest to the highest, accepted tokens a step go "
    )
    sentence += f"from {mat[low]:.2f} to {mat[high]:.2f}, speed from {speed[low]:.2f} to "
    sentence += f"{speed[high]:.2f}; the fastest of these is {best}"
    return holds(mat[high] > FASTER * mat[low]), sentence


def trees(lab):
    """The draft tree."""
    published = dict(method="s2d-tree", tree=Dynamic(10, 4, 60), thresholds=(0.5, 0.5, 0.0))
    ways = {"s2d": (SHIPPED, {"method": "s2d"}), "s2d-tree": (SHIPPED, {"method": "s2d-tree"})}
    return lab.timed(lambda size: ways | {"s2d-tree, 10 x 4, 60 nodes": (SHIPPED, published)})


def found_trees(result):
    speed, mat = means(result), means(result, "mat")
    best = max((row for row in speed if "tree" in row), key=speed.get)
    ratio = speed[best] / speed["s2d"]
    sentence = (
        f"the faster tree accepts {mat[best]:.2f} tokens a step, the chain {mat['s2d']:.2f}; it "
    )
    return holds(ratio > FASTER), f"{sentence}is {ratio:.2f} times as fast as the chain"


def alignment(lab):
    """Aligning the draft's features with the target's."""
    drafts = {"SoFT": "sorted", **{f"aligned, weight {w:g}": f"aligned-{w:g}" for w in ALIGNED}}
    drafts["distilled (arXiv 2310.08461)"] = "distilled"
    return lab.counted({row: (name, CHAIN) for row, name in drafts.items()})


def found_alignment(result):
    """By the weight in the middle, which was chosen before anything was measured."""
    rows = [row for row in means(result, "mat") if row != "SoFT"]
    gains = {row: gain_by_seed(result, row, "SoFT") for row in rows}
    texts = [f"{row} {gain:+.2f} ({noise:.2f})" for row, (gain, noise) in gains.items()]
    sentence = "accepted tokens a step change by, and in brackets how far seeds differ: "
    return helps(*gains[f"aligned, weight {ALIGNED[1]:g}"]), sentence + ", ".join(texts)


def pretraining(lab):
    """Pre-training the draft before SoFT."""
    drafts = {"random layers": "random", "the target's first layers": "sorted"}
    drafts |= {"these, pre-trained": "pretrained", "these, without SoFT": "untrained"}
    return lab.counted({row: (name, CHAIN) for row, name in drafts.items()})


def found_pretraining(result):
    gain, noise = gain_by_seed(result, "these, pre-trained", "the target's first layers")
    start, start_noise = gain_by_seed(result, "the target's first layers", "random layers")
    sentence = "pre-training before SoFT, on as much text again, changes accepted tokens a step by "
    sentence += f"{gain:+.2f} (seeds differ by {noise:.2f}); the target's layers instead of random "
    return helps(gain, noise), f"{sentence}ones by {start:+.2f} ({start_noise:.2f})"


NO_FIGURE = "an ablation of the paper; its figures are not at hand"
of_s2d = partial(Experiment, "S2D, arXiv 2407.01955")
ablation = partial(of_s2d, COUNTED, said=NO_FIGURE, trained=True)
MODELS = "published: Vicuna 7B, 13B, Llama-2-chat 70B"
# On Spec-Bench, in the order of our columns: speedup / accepted tokens with Vicuna 7B and 13B and
# Llama-2-chat 70B, at T = 0, then at T = 1; last the mean speedup.
SORTED = "1.34 / 2.86|1.38 / 2.76|1.95 / 2.36|1.27 / 3.01|1.38 / 2.89|1.98 / 2.44|1.55"
EARLY_6 = "0.98 / 1.51|1.00 / 1.51|1.32 / 1.46|0.96 / 1.52|1.03 / 1.51|1.37 / 1.53|1.11"
EARLY_9 = "1.08 / 1.99|1.05 / 1.98|1.54 / 1.80|0.99 / 2.04|1.12 / 2.04|1.57 / 1.86|1.22"
EARLY = {f"early exit at 6 ({MODELS})": EARLY_6, f"early exit at 9 ({MODELS})": EARLY_9}
TREE = "1.75 with Vicuna 7B and 1.69 with 13B by its later version, SD2; the chain 1.34 and 1.38"
SETTINGS = "0.5, 0.5, 0 in its evaluation, 0.75 and 0.7 in its picture"
EXPERIMENTS = {
    "targets": of_s2d(TIMED, targets, found_targets, published={f"SoFT + S2D ({MODELS})": SORTED}),
    "ordinary": of_s2d(TIMED, ordinary, found_ordinary, published=EARLY, trained=True),
    "sorted": of_s2d(COUNTED, exits_alone, found_exits_alone, trained=True),
    "thresholds": of_s2d(TIMED, thresholds, found_thresholds, said=SETTINGS),
    "tree": of_s2d(TIMED, trees, found_trees, said=TREE),
    "alignment": ablation(alignment, found_alignment),
    "pretraining": ablation(pretraining, found_pretraining),
}
