"""Every method on every target, beside transformers, as speedups over the target in the same run.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision
python -m s2d.bench sweep                 # thresholds, lengths and tree sizes, on training prompts
"""

import sys
from functools import partial
from pathlib import Path

import torch

from ..chat import chat_template
from ..program import Parser, run_program
from ..tokenizer import Tokenizer
from ..weights import check_device, choose_dtype, load_model, placement
from ..weights.datastore import find_datastore, open_datastore
from ..weights.get import draft_beside, real_folder
from . import agreement, quality, shapes
from .check import check_methods
from .measure import measure, runners
from .methods import default_methods, parse_method, sweep_methods, transformers_methods
from .specbench import choose_questions, write_answers
from .tables import final_table, render, summarise, target_table

OTHERS = {"shapes": shapes, "quality": quality, "agreement": agreement}  # with their own options
WEIGHTS = Path(__file__).parent.parent.parent / "weights"


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = arguments[0] if arguments else None
    if name in OTHERS:
        return run_program(f"bench {name}", OTHERS[name].report, OTHERS[name].parse(arguments[1:]))
    return run_program("bench", run, parse(arguments))


def run(args):
    """Measure; print a table for each target and temperature, and one of all. The exit code."""
    sweep, device = args.program == "sweep", check_device(args.device)
    folders = [find_target(name) for name in args.targets]
    alike = len({folder.name for folder in folders}) < len(folders)
    targets = {str(folder) if alike else folder.name: folder for folder in folders}
    beside = draft_beside(folders[0])
    args.draft = args.draft or (beside if beside.is_dir() else WEIGHTS / "mini-draft")
    needed = args.methods is None or any(name.split(":")[0] != "ar" for name in args.methods)
    load_draft = partial(load_model, args.draft, args.device, args.dtype)
    drafts = {False: load_draft() if needed else None}
    names = args.methods or (sweep_methods if sweep else default_methods)(drafts[False])
    if args.compile:
        names = [name.replace(":compile", "") for name in ("ar", *names)]
        names = [each for name in names for each in (name, f"{name}:compile")]
    names = list(dict.fromkeys(["ar", *names]))  # all others are compared to "ar"
    if any("compile" in name for name in names):
        drafts[True] = load_draft(compile=True) if needed else None
    parse = partial(parse_method, draft=drafts[False], draft_path=args.draft)
    methods = {  # {target: {name: (whether it is compiled, options)}}
        target: {name: parse(name, target_path=path) for name in names}
        for target, path in targets.items()
    }
    questions = choose_questions(args.questions, "train" if sweep else "held-out", args.limit)
    first = next(iter(targets.values()))
    machine = f"{torch.get_num_threads()} threads, {choose_dtype(args.dtype, device, first)}"
    most = f"at most {args.max_new_tokens} new tokens a turn, median of {args.rounds} rounds"
    print(f"torch {torch.__version__}, {machine}, {len(questions)} questions, {most}\n")
    records, code = {}, 0  # {(target, temperature): records}
    try:
        for name, path in targets.items():
            measure_target(args, name, path, drafts, methods[name], questions, records)
            if args.check and 0.0 in args.temperature:  # the measured target is out of memory
                load = partial(load_model, path, args.device)
                asked = load, args.dtype, drafts, records[name, 0.0], methods[name]
                for method, line, good in check_methods(*asked):
                    print(f"{name} {method}: {line}", flush=True)
                    code = max(code, int(good is False))
                print()
    except KeyboardInterrupt:
        print("interrupted: what follows is of the rounds that were finished", file=sys.stderr)
        code = 130
    show(records, args)
    return code


def find_target(name):
    """7b, 13b and 70b: the miniatures; smollm2-...: what s2d.weights gets; all others: folders."""
    if folder := real_folder(name, WEIGHTS):
        return folder
    folder = WEIGHTS / f"mini-{name}" if name in ("7b", "13b", "70b") else Path(name)
    if not folder.is_dir():
        raise FileNotFoundError(f"no model folder at {folder}")
    return folder


def measure_target(args, name, path, drafts, methods, questions, records):
    """All rounds of a target, added to ``records``; ``drafts`` {whether compiled: draft}."""
    load = partial(load_model, path, args.device, args.dtype)
    models = {compiled: (load(compile=compiled), draft) for compiled, draft in drafts.items()}
    target, where = models[False][0], placement(*filter(None, models[False]))
    store = find_datastore(args.draft, path)
    datastore = open_datastore(store, path, target.config) if store else None
    peers = transformers_methods(*models[False]) if args.hf else {}
    chat = Tokenizer(path), chat_template(path), target.config.max_position_embeddings
    for temperature in args.temperature:
        runs = runners(models, datastore, methods, peers, temperature, args.max_new_tokens)
        label = f"{name} T={temperature:g} on {where}"
        records[name, temperature] = own = []
        for finished in measure(runs, questions, args.rounds, label, *chat):
            own += finished


def show(records, args):
    """All tables, and the records in files for Spec-Bench's scripts."""
    summaries = {key: summarise(own) for key, own in records.items() if own}
    for (target, temperature), summary in summaries.items():
        if args.program == "sweep":
            summary = dict(sorted(summary.items(), key=lambda item: -item[1]["speedup"]))
        table = render(target_table(summary), args.markdown)
        print(f"{target}, T = {temperature:g}: speedup over ar\n\n{table}\n")
        if args.out:
            write_answers(args.out, f"{target}-T{temperature:g}", records[target, temperature])
    if summaries:
        table = render(final_table(summaries), args.markdown)
        print(f"speedup over ar / mean accepted tokens\n\n{table}")


def words(text):
    return text.split(",")


def temperatures(text):
    return [float(temperature) for temperature in text.split(",")]


def parse(arguments):
    parser = Parser(prog="bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    what = "sweep: try many settings on training prompts; the others have a --help of their own"
    add("program", nargs="?", choices=["sweep", *OTHERS], help=what)
    add("--targets", type=words, default="7b,13b,70b", metavar="7b,13b,70b|PATH,...")
    add("--draft", type=Path, help="default: the one beside the first target, else mini-draft")
    add("--methods", nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all")
    add("--temperature", type=temperatures, default=[0.0, 1.0], metavar="T,T,...")
    add("--questions", type=Path, help="in Spec-Bench's format; default: held-out ones")
    add("--limit", type=int, default=2, help="questions of each of the six groups")
    add("--rounds", type=int, default=3)
    add("--max-new-tokens", type=int, default=128)
    add("--device", default="auto")
    add("--dtype", default="auto")
    add("--hf", action="store_true", help="transformers beside ours")
    add("--compile", action="store_true", help="every method compiled as well")
    add("--check", action="store_true", help="greedy answers against ar's; exit code 1 for a bug")
    add("--markdown", action="store_true", help="tables as markdown")
    add("--out", type=Path, help="folder for answer files, as Spec-Bench's scripts read them")
    args = parser.parse_args(arguments)
    if args.program in OTHERS:
        parser.error(f"{args.program!r} comes first: python -m s2d.bench {args.program}")
    return args


if __name__ == "__main__":
    sys.exit(main())
