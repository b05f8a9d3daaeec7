"""The experiments of S2D (arXiv 2407.01955, on Spec-Bench): what was published, what is measured.

A finding is a sentence of what was found here, and whether it is what the paper says.
"""

from functools import partial

from ..train.ablations import ALIGNED
from ..train.family import DRAFT_EXITS
from ..tree import Dynamic
from .lab import SHIPPED, TIMED, Experiment, beyond_noise, means

CHAIN = dict(method="s2d", thresholds=(0.5, 0.5, 0.0), draft_length=6, stop=0.0)  # as published
THRESHOLDS = ((0.25, 0.25, 0.0), (0.5, 0.5, 0.0), (0.75, 0.7, 0.0), (0.9, 0.9, 0.0))


def targets(lab):
    """One draft for three targets, beside each of its exits."""
    single = {f"sd, exit {e}": (SHIPPED, dict(method="sd", exits=(e,))) for e in DRAFT_EXITS}
    return lab.timed(lambda size: {"s2d": (SHIPPED, {"method": "s2d"}), **single})


def found_targets(result):
    speed = means(result)
    best = max((row for row in speed if row.startswith("sd")), key=speed.get)
    slowest = min(column["s2d"]["speedup"] for column in result.values())
    sentence = (
        f"with one draft the three are {speed['s2d']:.2f} times as fast on the mean, at least "
    )
    sentence += f"{slowest:.2f}; with the best single exit ({best}) {speed[best]:.2f}"
    return slowest > 1, sentence


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
    sentence = f"a sorted draft is {ours:.2f} times as fast as the target, early exits of a draft "
    sentence += f"that learnt at its last layer alone {early[0]:.2f} and {early[1]:.2f}, its last "
    return ours > max(early[:-1]), sentence + f"{early[-1]:.2f}; a draft for each target {own:.2f}"


def exits_alone(lab):
    """Exits trained together, and each alone."""

    def ways(kind, named):
        how = dict(method="sd", draft_length=6, stop=0.0)
        return {f"exit {e}, {kind}": (named(e), how | {"exits": (e,)}) for e in DRAFT_EXITS}

    drafts = ways("sorted", lambda e: "sorted") | ways("alone", lambda e: f"alone-{e}")
    return lab.counted(drafts | ways("untrained", lambda e: "untrained"))


def found_exits_alone(result):
    both = means(result, "mat")
    parts = {kind: [both[f"exit {e}, {kind}"] for e in DRAFT_EXITS] for kind in ("sorted", "alone")}
    lost = max(1 - one / other for one, other in zip(*parts.values()))
    texts = [", ".join(f"{value:.2f}" for value in part) for part in parts.values()]
    sentence = (
        f"exits trained together accept {texts[0]} tokens a step, three drafts trained alone "
    )
    return (
        lost < 0.05,
        sentence + f"{texts[1]}: one draft instead of three costs at most {lost:.0%}",
    )


def thresholds(lab):
    """Thresholds."""
    given = [(SHIPPED, {"method": "s2d", "thresholds": each}) for each in THRESHOLDS]
    return lab.timed(lambda size: dict(zip(map(str, THRESHOLDS), given)))


def found_thresholds(result):
    speed, mat = means(result), means(result, "mat")
    low, high = str(THRESHOLDS[0]), str(THRESHOLDS[-1])
    best = max(speed, key=speed.get)
    sentence = "from the lowest to the highest thresholds accepted tokens a step go from "
    sentence += f"{mat[low]:.2f} to {mat[high]:.2f}; the fastest is {best}, {speed[best]:.2f}, the "
    return mat[high] > mat[low], sentence + f"slowest {min(speed.values()):.2f}"


def trees(lab):
    """The draft tree."""
    published = dict(method="s2d-tree", tree=Dynamic(10, 4, 60), thresholds=(0.5, 0.5, 0.0))
    ways = {"s2d": (SHIPPED, {"method": "s2d"}), "s2d-tree": (SHIPPED, {"method": "s2d-tree"})}
    return lab.timed(lambda size: ways | {"s2d-tree, 10 x 4, 60 nodes": (SHIPPED, published)})


def found_trees(result):
    speed, mat = means(result), means(result, "mat")
    best = max((row for row in speed if "tree" in row), key=speed.get)
    sentence = (
        f"the faster tree accepts {mat[best]:.2f} tokens a step, the chain {mat['s2d']:.2f}; it "
    )
    sentence += f"is {speed[best] / speed['s2d']:.2f} times as fast as the chain"
    return speed[best] > speed["s2d"], sentence


def alignment(lab):
    """Aligning the draft's features with the target's."""
    drafts = {"SoFT": "sorted", **{f"aligned, weight {w:g}": f"aligned-{w:g}" for w in ALIGNED}}
    drafts["distilled (arXiv 2310.08461)"] = "distilled"
    return lab.counted({row: (name, CHAIN) for row, name in drafts.items()})


def found_alignment(result):
    both = means(result, "mat")
    best = max((row for row in both if row.startswith("aligned")), key=both.get)
    gain, noise = beyond_noise(result, best, "SoFT")
    kd, kd_noise = beyond_noise(result, "distilled (arXiv 2310.08461)", "SoFT")
    sentence = f"{best} changes accepted tokens a step by {gain:+.2f}, where two seeds differ by "
    sentence += f"{noise:.2f}; distillation by {kd:+.2f} (seeds {kd_noise:.2f})"
    return gain > noise, sentence


def pretraining(lab):
    """Pre-training the draft before SoFT."""
    drafts = {"random layers": "random", "the target's first layers": "sorted"}
    drafts |= {"these, pre-trained": "pretrained", "these, without SoFT": "untrained"}
    return lab.counted({row: (name, CHAIN) for row, name in drafts.items()})


def found_pretraining(result):
    gain, noise = beyond_noise(result, "these, pre-trained", "the target's first layers")
    start, start_noise = beyond_noise(result, "the target's first layers", "random layers")
    sentence = f"pre-training before SoFT changes accepted tokens a step by {gain:+.2f} (seeds "
    sentence += f"differ by {noise:.2f}); the target's layers against random ones {start:+.2f} "
    return gain > noise, sentence + f"({start_noise:.2f})"


HELPS = "does not help here", "helps here"
NO_FIGURE = "an ablation of the paper; its figures are not at hand"
of_s2d = partial(Experiment, "S2D, arXiv 2407.01955")
ablation = partial(of_s2d, ("mat",), said=NO_FIGURE, trained=True, verdicts=HELPS)
# On Spec-Bench, in the order of our columns: speedup / accepted tokens with Vicuna 7B and 13B and
# Llama-2-chat 70B, at T = 0, then at T = 1; last the mean speedup.
SORTED = "1.34 / 2.86|1.38 / 2.76|1.95 / 2.36|1.27 / 3.01|1.38 / 2.89|1.98 / 2.44|1.55"
EARLY_6 = "0.98 / 1.51|1.00 / 1.51|1.32 / 1.46|0.96 / 1.52|1.03 / 1.51|1.37 / 1.53|1.11"
EARLY_9 = "1.08 / 1.99|1.05 / 1.98|1.54 / 1.80|0.99 / 2.04|1.12 / 2.04|1.57 / 1.86|1.22"
EARLY = {"published: early exit at 6": EARLY_6, "published: early exit at 9": EARLY_9}
# The tree is of its later version, SD2.
TREE = {"published: S2D": "1.34 / 2.86|1.38 / 2.76|||||", "published: tree": "1.75|1.69|||||"}
SETTINGS = "0.5, 0.5, 0 in its evaluation, 0.75 and 0.7 in its picture"
EXPERIMENTS = {
    "targets": of_s2d(TIMED, targets, found_targets, published={"published: SoFT + S2D": SORTED}),
    "ordinary": of_s2d(TIMED, ordinary, found_ordinary, published=EARLY, trained=True),
    "sorted": of_s2d(("mat",), exits_alone, found_exits_alone, trained=True),
    "thresholds": of_s2d(TIMED, thresholds, found_thresholds, said=SETTINGS),
    "tree": of_s2d(TIMED, trees, found_trees, published=TREE),
    "alignment": ablation(alignment, found_alignment),
    "pretraining": ablation(pretraining, found_pretraining),
}
