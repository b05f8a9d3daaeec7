"""What may be asked of a generation: the methods, their shapes and exits, and the limits of every number.

A method is a choice of options: ``ar`` drafts nothing, ``sd`` and ``s2d`` a chain from one exit or from sorted exits,
``mcsd`` and ``s2d-tree`` the same with several candidates for a place. Knows nothing about how they run.
"""

from .tree import Dynamic, KConfig
from .tune.costs import DEEPEST, LARGEST, WIDEST

METHODS = ("ar", "sd", "mcsd", "s2d", "s2d-tree", "auto")
TREE_METHODS = ("mcsd", "s2d-tree")
K_CONFIG = (4, 2, 2, 1)
LARGEST_TREE = 2048  # nodes drafted for one pass: who looks at whom takes this number squared
SMALLEST_TEMPERATURE = 1e-6  # below it logits divided by it might not be finite; 0 is greedy


def choose_shape(target_config, draft_config, method, draft_length=None, tree=None):
    """The shape of tree a method drafts; raises ValueError where the options do not fit the method or the target."""
    if method == "auto":
        return Dynamic(WIDEST, DEEPEST, LARGEST)
    if tree is not None and method not in TREE_METHODS:
        raise ValueError(
            f"method {method!r} drafts no tree; use {' or '.join(map(repr, TREE_METHODS))} for one"
        )
    if method == "ar":
        return KConfig(())
    context_size = target_config.max_position_embeddings
    if method in TREE_METHODS:
        if draft_length is not None:
            raise ValueError(f"method {method!r} drafts a tree; give its shape, not a draft length")
        if tree is None:
            tree = K_CONFIG if method == "mcsd" else Dynamic(*draft_config.draft_tree)
        shape = tree if isinstance(tree, Dynamic) else KConfig(tuple(tree))
    else:
        length = draft_config.draft_length if draft_length is None else draft_length
        _check_size(length, length, context_size)  # before a shape of any length is built
        shape = KConfig((1,) * length)
    static = isinstance(shape, KConfig)
    if min(shape.widths if static else (shape.top_k, shape.depth, shape.size), default=0) < 1:
        raise ValueError(f"a draft needs whole numbers of at least 1, got {draft_length=}, {tree=}")
    widest = max(shape.widths) if static else shape.top_k
    if widest > target_config.vocab_size:
        raise ValueError(
            f"a node cannot have {widest} different children: there are {target_config.vocab_size} tokens"
        )
    _check_size(shape.size, shape.depth, context_size)
    if not static and shape.top_k * shape.depth > LARGEST_TREE:
        raise ValueError(
            f"a tree {shape.top_k} wide and {shape.depth} deep grows beyond {LARGEST_TREE} nodes"
        )
    return shape


def _check_size(size, depth, context_size):
    for largest, what in (
        (context_size, "the target's context of"),
        (LARGEST_TREE, "a draft may have,"),
    ):
        if max(size, depth) > largest:
            raise ValueError(f"a tree of {size} nodes, {depth} deep, is more than {what} {largest}")


def choose_exits(config, method, exits=None, thresholds=None):
    """The exits and thresholds a method uses with a draft; raises ValueError where they do not fit it."""
    depth = config.num_hidden_layers
    chosen = tuple(exits) if exits is not None else config.exit_layers or (depth,)
    if method in ("sd", "mcsd") and exits is None:
        chosen = chosen[-1:]
    if method in ("sd", "mcsd") and len(chosen) != 1:
        raise ValueError(
            f"method {method!r} drafts from one exit, got {list(chosen)}; 's2d' takes several"
        )
    if not chosen or list(chosen) != sorted(set(chosen)) or chosen[0] < 1 or chosen[-1] > depth:
        raise ValueError(
            f"exits must increase and lie within the draft's {depth} layers, got {list(chosen)}"
        )
    if thresholds is None:
        known = dict(zip(config.exit_layers, config.thresholds))
        thresholds = [known.get(exit_layer, 0.5) for exit_layer in chosen[:-1]] + [0.0]
    if len(thresholds) != len(chosen):
        raise ValueError(
            f"{len(chosen)} exits {list(chosen)} need as many thresholds, got {len(thresholds)}"
        )
    if not all(0.0 <= threshold <= 1.0 for threshold in thresholds):
        raise ValueError(f"thresholds are probabilities within 0..1, got {list(thresholds)}")
    return chosen, tuple(thresholds)


def refuse_knobs(thresholds=None, draft_length=None, tree=None, init="draft", stop=None):
    """Method "auto" leaves nothing to choose but which exits it may use; ValueError names what was chosen all the same."""
    knobs = {
        "thresholds": thresholds,
        "draft_length": draft_length,
        "tree": tree,
        "stop": stop,
        "init": init if init != "draft" else None,
    }
    if given := [name for name, value in knobs.items() if value is not None]:
        raise ValueError(
            f"method 'auto' decides for itself; leave out {' and '.join(given)}, or use another method"
        )


def check(target, tokens, draft, method, max_new_tokens, temperature, top_p, seed, init, stop):
    """Refuse what cannot be run, in one clear line; returns the length at which generation must end."""
    context_size, vocab_size = target.config.max_position_embeddings, target.config.vocab_size
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; expected one of {', '.join(METHODS)}")
    if not tokens:
        raise ValueError("the prompt is empty; give at least one token")
    if not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise ValueError(
            f"the prompt has token ids outside the target's vocabulary of {vocab_size}"
        )
    if len(tokens) >= context_size:
        raise ValueError(
            f"the prompt has {len(tokens)} tokens; the target's context of {context_size} has no room left"
        )
    if max_new_tokens < 1:
        raise ValueError(f"lengths must be at least 1, got max_new_tokens={max_new_tokens}")
    if not (temperature == 0.0 or SMALLEST_TEMPERATURE <= temperature < float("inf")):
        raise ValueError(
            f"temperature must be 0 or more, and no less than {SMALLEST_TEMPERATURE}, got {temperature}"
        )
    if not 0.0 < top_p <= 1.0:
        raise ValueError(f"top_p must be above 0 and at most 1, got {top_p}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed must be a whole number from 0 to 2^63 - 1, got {seed}")
    if init not in ("draft", "target"):
        raise ValueError(f"init is 'draft' or 'target', got {init!r}")
    if stop is not None and not callable(stop) and not 0.0 <= stop <= 1.0:
        raise ValueError(f"stop is a confidence within 0..1, got {stop}")
    if method != "ar":
        if draft is None:
            raise ValueError(f"method {method!r} needs a draft model")
        if draft.config.vocab_size != vocab_size:
            raise ValueError(
                f"draft and target must share one vocabulary: the draft has {draft.config.vocab_size} tokens, "
                f"the target {vocab_size}"
            )
    return min(len(tokens) + max_new_tokens, context_size)


ALL_DRAFTS = ("draft", "exits", "init", "stop")
CHAINS = (*ALL_DRAFTS, "draft_length")
TREES = (*ALL_DRAFTS, "tree", "tree_top_k", "tree_depth", "tree_size", "with_replacement")
TAKEN = {  # method -> the options of drafting that it takes
    "ar": (),
    "sd": CHAINS,
    "mcsd": TREES,
    "s2d": (*CHAINS, "thresholds"),
    "s2d-tree": (*TREES, "thresholds"),
}
DRAFTING = tuple(dict.fromkeys(name for taken in TAKEN.values() for name in taken))


def refuse_unused(method, given):
    """Raise ValueError where ``given``, names in DRAFTING, has an option ``method`` does not take."""
    for name in given:
        if name not in TAKEN.get(method, given):  # "auto" refuses by itself
            others = " or ".join(other for other in TAKEN if name in TAKEN[other])
            option = "--" + name.replace("_", "-")
            raise ValueError(
                f"--method {method} does not use {option}; leave it out, or use {others}"
            )
