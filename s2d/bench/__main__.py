"""Every method on every target, beside transformers, as speedups over the target in the same run.

python -m s2d.bench                       # three miniature targets, T = 0 and 1
python -m s2d.bench --hf --markdown       # transformers' own decoders beside it, as README shows it
python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision
python -m s2d.bench sweep --targets 13b   # thresholds, lengths and tree sizes, on training prompts
python -m s2d.bench shapes                # full-size shapes with random weights: see shapes.py
python -m s2d.bench quality               # what the miniatures know: see quality.py
python -m s2d.bench agreement --target weights/mini-13b     # exits beside the target
"""

import re
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch

from ..program import Parser, run_program
from ..tokenizer import Tokenizer, chat_template
from ..weights import check_device, checksum, choose_dtype, load_model, placement
from ..weights.get import draft_beside, real_folder
from . import agreement, quality, shapes
from .check import check_methods
from .measure import measure, progress_line, runners
from .methods import default_methods, parse_method, sweep_methods, transformers_methods
from .specbench import choose_questions, write_answers
from .store import Store
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
    if args.resume and not args.out:
        raise ValueError("--resume needs the --out folder to go on from")
    args.device = str(check_device(args.device))
    paths, sweep = [find_target(name) for name in args.targets], args.program == "sweep"
    beside = draft_beside(paths[0])
    args.draft = args.draft or (beside if beside.is_dir() else WEIGHTS / "mini-draft")
    needed = args.methods is None or any(name.split(":")[0] != "ar" for name in args.methods)
    load_draft = partial(load_model, args.draft, args.device, args.dtype)
    draft = load_draft() if needed else None
    names = method_names(args, draft, sweep)
    questions = choose_questions(args.questions, "train" if sweep else "held-out", args.limit)
    dtype, threads = choose_dtype(args.dtype, check_device(args.device)), torch.get_num_threads()
    settings = {"methods": names, "questions": questions, "max_new_tokens": args.max_new_tokens}
    settings |= {"hf": args.hf, "draft": draft and checksum(draft), "device": args.device}
    settings |= {"dtype": str(dtype), "threads": threads, "torch": torch.__version__}
    methods = {}
    for path in paths:
        methods[path] = {name: parse_method(name, draft, args.draft, path) for name in names}
    drafts = {False: draft}
    if any(compiled for compiled, _ in methods[paths[0]].values()):
        drafts[True] = draft and load_draft(compile=True)
    targets, store, code = (
        dict(zip(names_of(paths), paths)),
        Store(args.out, settings, args.resume),
        0,
    )
    most = f"at most {args.max_new_tokens} new tokens a turn, median of {args.rounds} rounds"
    print(
        f"torch {torch.__version__}, {threads} threads, {dtype}, {len(questions)} questions, {most}\n"
    )
    try:
        for name, path in targets.items():
            measure_target(args, name, path, drafts, methods[path], questions, store)
            if args.check and 0.0 in args.temperature:  # the measured target is out of memory
                records = store.of(name, 0.0)
                code = max(code, check_target(args, name, path, drafts, records, methods[path]))
    except KeyboardInterrupt:
        print("interrupted: what follows is of the rounds that were finished", file=sys.stderr)
        code = 130
    show(store, list(targets), args)
    return code


def method_names(args, draft, sweep):
    """ "ar", what all others are compared to, then the others; each compiled too if that is asked."""
    names = args.methods or (sweep_methods(draft) if sweep else default_methods(draft))
    names = ["ar", *names]
    if args.compile:
        names = [
            each for name in names for each in (name, name.replace(":compile", "") + ":compile")
        ]
    return list(dict.fromkeys(names))


def find_target(name):
    """7b, 13b and 70b: the miniatures; smollm2-...: what s2d.weights gets; all others: folders."""
    if folder := real_folder(name, WEIGHTS):
        return folder
    return WEIGHTS / f"mini-{name}" if name in ("7b", "13b", "70b") else Path(name)


def names_of(paths):
    """Folders as tables call them: by their last part, or in full where two would be alike."""
    names = [path.name for path in paths]
    return [name if names.count(name) == 1 else str(path) for name, path in zip(names, paths)]


def measure_target(args, name, path, drafts, methods, questions, store):
    """What ``store`` lacks of a target, at every temperature. ``drafts`` {whether compiled: draft}."""
    load = partial(load_model, path, args.device, args.dtype)
    models = {compiled: (load(compile=compiled), draft) for compiled, draft in drafts.items()}
    target, draft = models[False]
    peers = transformers_methods(target, draft) if args.hf else {}
    weights, where = checksum(target), placement(*filter(None, (target, draft)))
    chat = Tokenizer(path), chat_template(path), target.config.max_position_embeddings
    for temperature in args.temperature:
        about = {"target": name, "weights": weights, "temperature": temperature}
        done = {record["round"] for record in store.of(name, temperature, weights)}
        rounds = [number for number in range(1, args.rounds + 1) if number not in done]
        runs = runners(models, methods, peers, temperature, args.max_new_tokens)
        progress = progress_line(f"{name} T={temperature:g} on {where}")
        for records in measure(runs, questions, rounds, progress, *chat):
            store.add([about | record for record in records])


def check_target(args, name, path, drafts, records, methods):
    """Print a line for each method that should give the target's own answers; 1 for a bug, or 0."""
    code, load = 0, partial(load_model, path, args.device)
    for method, line, good in check_methods(load, args.dtype, drafts, records, methods):
        print(f"{name} {method}: {line}", flush=True)
        code = max(code, int(good is False))
    print()
    return code


def show(store, targets, args):
    """All tables, and Spec-Bench's answer files."""
    summaries = {}
    for target, temperature in product(targets, args.temperature):
        if records := store.of(target, temperature):
            summaries[target, temperature] = summary = summarise(records)
            if args.program == "sweep":
                summary = dict(sorted(summary.items(), key=lambda item: -item[1]["speedup"]))
            table = render(target_table(summary), args.markdown)
            print(f"{target}, T = {temperature:g}: speedup over ar\n\n{table}\n")
            if args.out:
                save_answers(args.out, f"{target}-T{temperature:g}", records)
    if summaries:
        table = render(final_table(summaries), args.markdown)
        print(f"speedup over ar / mean accepted tokens\n\n{table}")


def save_answers(folder, name, records):
    """Spec-Bench's answer files, one for each method, of the last round."""
    last = max(record["round"] for record in records)
    for method in dict.fromkeys(record["method"] for record in records):
        own = [r for r in records if r["method"] == method and r["round"] == last]
        file = re.sub(r"[^\w.,]+", "-", f"{name}-{method}")
        write_answers(folder / f"{file}.jsonl", file, own)


def temperatures(text):
    return [float(temperature) for temperature in text.split(",")]


def parse(arguments):
    parser = Parser(prog="bench", description=__doc__.splitlines()[0])
    add = parser.add_argument
    other = f"{', '.join(OTHERS)}: other programs, each with a --help of its own"
    what = f"sweep: try many settings on training prompts instead; {other}"
    add("program", nargs="?", choices=["sweep", *OTHERS], help=what)
    add(
        "--targets",
        type=lambda text: text.split(","),
        default=["7b", "13b", "70b"],
        metavar="7b,13b,70b|PATH,...",
    )
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
    add("--out", type=Path, help="folder for all records and for Spec-Bench's answer files")
    add("--resume", action="store_true", help="go on from the rounds that are in --out")
    args = parser.parse_args(arguments)
    if args.program in OTHERS:
        first = f"{args.program!r} comes first, before any option"
        parser.error(f"{first}: python -m s2d.bench {args.program}")
    return args


if __name__ == "__main__":
    sys.exit(main())
