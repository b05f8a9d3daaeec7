"""The command line of training: drafts, the miniatures, decision models, datastores."""

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch

from ..extras.decision import FEATURES
from ..extras.parallel import joined
from ..program import REPLACE, Parser, comma_separated, path, run_program, seed
from ..weights import check_device, load_model, own_device
from ..weights.adapter import folders_read
from ..weights.config import read_config
from .ablations import ABLATION_TOKENS, train_ablations
from .decision import train_decision
from .distil import DIVERGENCES, Distillation
from .family import DRAFT_TOKENS, train_mini
from .fit import Run, check_out
from .nested import ADAPTER_LR, MINI, PAPER, SELF, corpus_rows, cut, rows_of, train_and_save
from .self_text import make_datastore


def main(arguments=None):
    return run_program("train", start, parse(arguments))


def start(args):
    """The program; where torchrun started several processes, the part of this one in it."""
    launched = torch.distributed.is_torchelastic_launched()
    device = own_device(args.device) if launched else check_device(args.device)
    with joined(device) if launched else nullcontext() as mesh:
        args.device = str(device)
        together = args.program == "soft" and not args.lora and not args.draft_vocabulary
        if mesh and (not together or args.data == "self"):
            alone = "all but soft, and soft with --lora, --draft-vocabulary or --data self"
            raise ValueError(f"{alone}, trains in a single process; start it without torchrun")
        run = Run(args.out, args.device, args.seed, args.resume, mesh, args.replace)
        if args.program == "soft":
            soft(args, run)
        elif args.program == "mini":
            train_mini(run, args.millions)
        elif args.program == "ablations":
            train_ablations(run, args.millions)
        elif args.program == "text":
            make_datastore(args.target, run, args.millions, args.files)
        else:
            train_decision(args)


def soft(args, run):
    """Refuse what cannot be trained, before anything is loaded that takes long; then train."""
    file = None if args.data in ("mini", "self") else args.data
    models = [args.init, args.teacher] if args.teacher else [args.init]
    check_out(run, [*sum(map(folders_read, models), []), args.text, file])
    exits, recipe, configs = args.exits, recipe_of(args), [read_config(each) for each in models]
    if list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != args.layers:
        within = f"the draft's {args.layers} layers and end with the last"
        raise ValueError(f"exits must increase within {within}, got {list(exits)}")
    if args.lora is not None and not 1 <= args.lora <= 4096:
        raise ValueError(f"the rank of an adapter is from 1 to 4096, got {args.lora}")
    for model, config in zip(models, configs):
        if recipe.length > config.max_position_embeddings:
            longer = f"longer than the context of {model}, {config.max_position_embeddings}"
            raise ValueError(f"rows of {recipe.length} tokens are {longer}; give --length")
        if config.vocab_size != configs[0].vocab_size:
            ours = f"{args.init} {configs[0].vocab_size}"
            raise ValueError(f"{model} has {config.vocab_size} tokens, {ours}")
    if file is None:
        corpus_rows(args.millions, recipe)  # at least a batch, and no more than there will ever be
    teacher = Distillation(load_model(args.teacher, args.device), args.kd) if args.teacher else None
    text = args.text or args.out.with_name(args.out.name + ".self.jsonl")
    rows = rows_of(args.init, args.data, run, recipe, args.millions, text)
    how = dict(distillation=teacher, rank=args.lora, keep=args.draft_vocabulary)
    train_and_save(cut(args.init, exits, args.device), exits, rows, recipe, run, args.init, **how)


def recipe_of(args):
    """The recipe that fits the data, with the options that were given in their stead."""
    recipe = {"mini": MINI, "self": SELF}.get(args.data, PAPER)
    given = {"lr": ADAPTER_LR} if args.lora else {}
    names = "batch", "micro_batch", "length", "lr", "epochs"
    given |= {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    recipe = replace(recipe, **given)
    counts = recipe.batch, recipe.micro_batch, recipe.length, recipe.epochs
    if min(counts) < 1 or not 0 < recipe.lr < float("inf"):
        raise ValueError(f"batch, micro-batch, length, epochs, lr must be positive, got {recipe}")
    return recipe


def parse(arguments):
    parser = Parser(prog="python -m s2d.train", description=__doc__)
    parser.set_defaults(resume=False)  # of the programs that have nothing to resume
    programs = parser.add_subparsers(dest="program", required=True)

    def program(name, what):
        each = programs.add_parser(name, help=what)
        each.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ...")
        each.add_argument("--seed", type=seed, default=0, help="of all random numbers")
        each.add_argument("--replace", action="store_true", help=REPLACE)
        return each

    # What --data mini has by default is the recipe of mini-draft, what a file has the paper's.
    add = program("soft", "a sorted draft from the first layers of a Llama").add_argument
    add("--init", type=path, required=True, help="folder of the Llama to cut from")
    add("--layers", type=int, required=True, help="how many of its layers the draft keeps")
    after = "layers it predicts after, e.g. 6,9,12"
    add("--exits", type=comma_separated(int), required=True, help=after)
    add("--data", default="mini", help="ShareGPT JSON, mini (the corpus) or self (the Llama's own)")
    add("--text", type=path, help="where the Llama's own text is kept; default: beside --out")
    add("--lora", type=int, metavar="RANK", help="learn and save only low-rank adapters")
    add("--draft-vocabulary", type=int, metavar="K", help="draft only the K likeliest tokens")
    add("--out", type=path, required=True, help="folder to write the draft to")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--batch", type=int, help="rows of a step, over all processes")
    add("--micro-batch", type=int, help="rows that go through the model at once; gradients add up")
    add("--length", type=int, help="tokens of a row")
    add("--lr", type=float, help="peak learning rate")
    add("--epochs", type=int, help="times that all rows are learnt from")
    add("--millions", type=float, default=DRAFT_TOKENS, help="million tokens of mini or of answers")
    add("--teacher", type=path, help="a model's folder: its distributions are learnt as well")
    add("--kd", choices=DIVERGENCES, default="forward", help="how far from the teacher's")

    add = program("mini", "the miniature family, from nothing").add_argument
    add("--out", type=path, default=Path("family"), help="folder for all of them")
    add("--resume", action="store_true", help="go on from the last checkpoint")
    add("--millions", type=float, help="million training tokens of each; default: its own")

    add = program("ablations", "drafts to compare: what bench papers measures").add_argument
    add("--out", type=path, default=Path("ablations"), help="folder for all of them")
    add("--resume", action="store_true", help="go on where it was cut short")
    add("--millions", type=float, default=ABLATION_TOKENS, help="million training tokens of each")

    add = program("decision", "when a draft should stop").add_argument
    add("--target", type=path, required=True, help="folder of the model that accepts or not")
    add("--draft", type=path, required=True, help="folder of the draft that is to stop")
    add("--out", type=path, required=True, help="the safetensors file to write")
    add("--features", choices=FEATURES, default="stats", help="hidden states, or figures of q")
    add("--data", default="mini", help="ShareGPT JSON file, or mini for the built-in corpus")
    add("--prompts", type=int, default=400, help="answered twice each; a fifth is kept out")
    add("--epochs", type=int, default=6, help="times that all of them are learnt from")
    add("--threshold", type=float, default=0.4, help="stop where no path is as likely as this")

    text = program("text", "a datastore to draft from")
    add = text.add_argument
    add("--target", type=path, required=True, help="whose tokens, and who writes")
    add("--out", type=path, help="the safetensors file; default: in the target's folder")
    source = text.add_mutually_exclusive_group(required=True)
    source.add_argument("--millions", type=float, help="million tokens of answers to sample")
    given = dict(nargs="+", dest="files", metavar="FILE", help="text in UTF-8, instead of answers")
    source.add_argument("--from", type=path, **given)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
