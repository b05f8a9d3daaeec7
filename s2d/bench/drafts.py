"""The drafts that the experiments compare: same tokens, same schedule, two seeds each."""

from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

from ..checkpoint import check_device, load_model, save_model
from ..checkpoint.names import WEIGHTS
from ..checkpoint.tokenizer import Tokenizer
from ..files import claimed, refuse_existing
from ..model import Llama
from ..notices import tell
from ..options import Drafting
from ..train.decision import FEATURES, train_decision
from ..train.distil import Alignment, Distillation
from ..train.family import DRAFT_EXITS, DRAFTING, TARGETS, initialise
from ..train.fit import Run, keep_settings
from ..train.nested import MINI, count_rows, cut, make_rows, train_and_save

MILLIONS = 0.5  # tokens that each draft learns from
SEEDS = (1, 2)  # of text and of random layers: what differs less than these do is noise
ALIGNED = (0.1, 1.0, 10.0)  # weights of feature alignment
PROMPTS = 200  # that a decision model learns from, for each million of tokens of a draft


@dataclass(frozen=True)
class Ablation:
    """How a draft is made. By default: sorted fine-tuning of a target's first layers."""

    init: str = "mini-7b"  # what it is cut from: a miniature, or one of these of the same seed
    exits: tuple[int, ...] = DRAFT_EXITS
    learning: tuple[int, ...] | None = None  # exits that the loss is taken at; None: all
    random: bool = False  # its layers start from random numbers
    answers_only: bool = True  # or it learns what users say as well
    aim: Callable[[Llama], Distillation] | None = None  # teacher -> a second aim of the loss


DRAFTS = {
    "untrained": Ablation(learning=()),
    "sorted": Ablation(),
    "alone-2": Ablation(exits=(2,)),
    "alone-3": Ablation(exits=(3,)),
    "alone-4": Ablation(learning=(4,)),  # its exits 2 and 3 are an ordinary draft's early exits
    "random": Ablation(random=True),
    "pretraining": Ablation(learning=(4,), answers_only=False),
    "pretrained": Ablation(init="pretraining"),
    **{f"aligned-{w:g}": Ablation(aim=partial(Alignment, weight=w)) for w in ALIGNED},
    "distilled": Ablation(aim=Distillation),
    "of-13b": Ablation(init="mini-13b"),  # a draft for each target; of mini-7b it is "sorted"
    "of-70b": Ablation(init="mini-70b"),
}


def train(args: Namespace) -> None:
    """Train the drafts to compare."""
    run = Run(args.out, str(check_device(args.device)), args.seed, args.resume)
    with claimed(run.out):
        train_drafts(run, args.millions)


def train_drafts(run: Run, millions: float) -> None:
    """Train all DRAFTS for each of SEEDS, then decision models. --resume keeps what is there."""
    if not run.resume:
        refuse_existing(run.out)
    count_rows(millions, MINI)  # too few are refused before anything is written
    keep_settings(run.out / "settings.json", {"millions": millions, "seed": run.seed})
    every = list(product(SEEDS, DRAFTS))
    for number, (seed, name) in enumerate(every, start=1):
        own = replace(run, out=run.out / f"{name}-{seed}", seed=run.seed + seed)
        same_again = name == "untrained" and seed != SEEDS[0]
        if not (own.out.exists() or same_again):
            tell(f"draft {number} of {len(every)}: {name}, seed {seed}")
            train_draft(name, seed, own, millions)
    prompts = max(5, round(PROMPTS * millions))
    for target, features in product(TARGETS, FEATURES):
        size = target.removeprefix("mini-")
        own = replace(run, out=run.out / f"decision-{features}-{size}.safetensors")
        if not own.out.exists():
            train_decision(own, WEIGHTS / target, WEIGHTS / "mini-draft", features, prompts=prompts)


def train_draft(name: str, seed: int, run: Run, millions: float) -> None:
    """Train one of DRAFTS to the folder ``run.out``; ``seed``: of what it may be cut from."""
    ablation = DRAFTS[name]
    init = WEIGHTS / ablation.init
    if ablation.init in DRAFTS:
        init = run.out.with_name(f"{ablation.init}-{seed}")
    drafting = DRAFTING if ablation.exits == DRAFT_EXITS else Drafting(ablation.exits, (0.0,))
    model = cut(init, ablation.exits, run.device, drafting)
    if ablation.learning == ():
        save_model(model, run.out, init)
        return
    if ablation.random:
        fresh = initialise(model.config, run.seed, copying=False)
        model.model.layers.load_state_dict(fresh.model.layers.state_dict())
    # Pre-training has text of its own: else what follows would read the same twice.
    other = replace(run, seed=run.seed + (0 if ablation.answers_only else 10))
    # The family has one tokenizer and one chat format, which is known by the folder's name.
    tokenizer = Tokenizer(WEIGHTS / "mini-7b")
    rows, _ = make_rows(tokenizer, "mini", other, MINI, millions, ablation.answers_only)
    aim = ablation.aim and ablation.aim(load_model(init, run.device, quick=False))
    train_and_save(model, ablation.learning or ablation.exits, rows, MINI, run, init, aim)
