"""Every method on every target, beside transformers, as speedups over the target alone measured in the same run.

python -m s2d.bench                       # three miniature targets, T = 0 and 1
python -m s2d.bench --hf --markdown       # with transformers' own decoders beside it, as README shows it
python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=decision     # see methods.py
python -m s2d.bench sweep --targets 13b   # thresholds, lengths and tree sizes, on training prompts
python -m s2d.bench shapes                # full-size shapes with random weights: see shapes.py
python -m s2d.bench quality               # what the miniatures know: see quality.py
python -m s2d.bench agreement --target weights/mini-13b     # exits beside the target: see agreement.py
python -m s2d.bench simulate --target weights/mini-13b      # drafting that tunes itself elsewhere: see simulate.py
"""

import re
import sys
from functools import partial
from itertools import product
from pathlib import Path

import torch

from ..chat import chat_template
from ..program import Parser, run_program
from ..tokenizer import Tokenizer
from ..weights import check_device, checksum, choose_dtype, load_model, placement
from ..weights.get import draft_beside, real_folder
from . import agreement, quality, shapes, simulate
from .check import check_methods
from .measure import measure, progress_line
from .methods import default_methods, parse_method, sweep_methods, transformers_methods
from .simulate import temperatures
from .specbench import corpus_questions, read_questions, write_answers
from .store import Store
from .tables import final_table, render, summarise, target_table

OTHERS = {
    "shapes": shapes,
    "quality": quality,
    "agreement": agreement,
    "simulate": simulate,
}  # programs with options of their own
WEIGHTS = Path(__file__).parent.parent.parent / "weights"


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    name = arguments[0] if arguments else None
    if name in OTHERS:
        return run_program(f"bench {name}", OTHERS[name].report, OTHERS[name].parse(arguments[1:]))
    return run_program("bench", run, parse(arguments))


def run(args):
    """Measure, then print a table for each target and temperature and one of them all. Returns the exit code."""
    if args.resume and not args.out:
        raise ValueError("--resume needs the --out folder to go on from")
    args.device = str(check_device(args.device))
    paths, sweep = [find_target(name) for name in args.targets], args.program == "sweep"
    beside = draft_beside(paths[0])
    args.draft = args.draft or (beside if beside.is_dir() else WEIGHTS / "mini-draft")
    needed = args.methods is None or any(name.split(":")[0] != "ar" for name in args.methods)
    draft = load_model(args.draft, args.device, args.dtype) if needed else None
    names = args.methods or (sweep_methods(draft) if sweep else default_methods(draft))
    names = ["ar", *(name for name in names if name != "ar")]  # what all others are compared to
    if args.compile:
        names = list(
            dict.fromkeys(
                text for name in names for text in (name, name.replace(":compile", "") + ":compile")
            )
        )
    questions = (read_questions(args.questions, args.limit) if args.questions
                 else corpus_questions("train" if sweep else "held-out", args.limit))  # fmt: skip
    dtype = choose_dtype(args.dtype, check_device(args.device))
    if args.costs and len(paths) > 1:
        raise ValueError("--costs is one table, for one target; name one with --targets")
    settings = {"methods": names, "questions": questions, "max_new_tokens": args.max_new_tokens, "hf": args.hf,
                "draft": draft and checksum(draft), "device": args.device, "dtype": str(dtype),
                "threads": torch.get_num_threads(), "torch": torch.__version__}  # fmt: skip
    methods = {
        path: {text: parse_method(text, draft, args.draft, path) for text in names}
        for path in paths
    }
    drafts = {False: draft}
    if any(compiled for compiled, _ in methods[paths[0]].values()):
        drafts[True] = draft and load_model(args.draft, args.device, args.dtype, compile=True)
    targets, store, code = (
        dict(zip(names_of(paths), paths)),
        Store(args.out, settings, args.resume),
        0,
    )
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {dtype}, {len(questions)} questions, at "
          f"most {args.max_new_tokens} new tokens a turn, median of {args.rounds} rounds\n")  # fmt: skip
    try:
        for name, path in targets.items():
            measure_target(args, name, path, drafts, methods[path], questions, store)
            if (
                args.check and 0.0 in args.temperature
            ):  # now that the measured target is out of memory
                load = partial(load_model, path, args.device)
                for method, line, good in check_methods(
                    load, args.dtype, drafts, store.of(name, 0.0), methods[path]
                ):
                    print(f"{name} {method}: {line}", flush=True)
                    code = max(code, int(good is False))
                print()
    except KeyboardInterrupt:
        print("interrupted: what follows is of the rounds that were finished", file=sys.stderr)
        code = 130
    show(store, list(targets), args)
    return code


def find_target(name):
    """7b, 13b and 70b are the miniatures, smollm2-... what ``python -m s2d.weights get`` brings; anything else is a folder."""
    if folder := real_folder(name, WEIGHTS):
        return folder
    return WEIGHTS / f"mini-{name}" if name in ("7b", "13b", "70b") else Path(name)


def names_of(paths):
    """What the folders are called in tables: their last part, or all of it where two would be called alike."""
    return [
        path.name if [p.name for p in paths].count(path.name) == 1 else str(path) for path in paths
    ]


def measure_target(args, name, path, drafts, methods, questions, store):
    """All rounds of one target that ``store`` lacks, at every temperature. ``drafts`` {whether compiled: draft}."""
    load = partial(load_model, path, args.device, args.dtype)
    models = {compiled: (load(compile=compiled), draft) for compiled, draft in drafts.items()}
    (target, draft), tokenizer = models[False], Tokenizer(path)
    peers = transformers_methods(path, target, args.draft, draft) if args.hf else {}
    weights, where = checksum(target), placement(*filter(None, (target, draft)))
    for temperature in args.temperature:
        done = {record["round"] for record in store.of(name, temperature, weights)}
        rounds = [number for number in range(1, args.rounds + 1) if number not in done]
        progress = progress_line(f"{name} T={temperature:g} on {where}")
        for records in measure(models, questions, tokenizer, chat_template(path), methods, peers,
                               temperature, rounds, args.max_new_tokens, progress, args.costs):  # fmt: skip
            store.add(
                [
                    {"target": name, "weights": weights, "temperature": temperature, **r}
                    for r in records
                ]
            )


def show(store, targets, args):
    """All tables, and Spec-Bench's answer files."""
    summaries = {}
    for target, temperature in product(targets, args.temperature):
        if records := store.of(target, temperature):
            summaries[target, temperature] = summary = summarise(records)
            if args.program == "sweep":
                summary = dict(sorted(summary.items(), key=lambda item: -item[1]["speedup"]))
            print(
                f"{target}, T = {temperature:g}: speedup over ar\n\n{render(target_table(summary), args.markdown)}\n"
            )
            for method in summary if args.out else ():
                last = max(record["round"] for record in records)
                own = [
                    record
                    for record in records
                    if record["method"] == method and record["round"] == last
                ]
                name = re.sub(r"[^\w.,]+", "-", f"{target}-T{temperature:g}-{method}")
                write_answers(args.out / f"{name}.jsonl", name, own)
    if summaries:
        print(
            f"speedup over ar / mean accepted tokens\n\n{render(final_table(summaries), args.markdown)}"
        )


def parse(arguments):
    parser = Parser(prog="bench", description=__doc__.splitlines()[0])
    parser.add_argument("program", nargs="?", choices=["sweep", *OTHERS], help="sweep: try many settings on training prompts "
                        "instead; shapes, quality, agreement, simulate: other programs, each with a --help of its own")  # fmt: skip
    parser.add_argument("--targets", type=lambda text: text.split(","), default=["7b", "13b", "70b"],
                        metavar="7b,13b,70b|PATH,...")  # fmt: skip
    parser.add_argument(
        "--draft", type=Path, help="default: the one beside the first target, else mini-draft"
    )
    parser.add_argument(
        "--methods", nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all"
    )
    parser.add_argument("--temperature", type=temperatures, default=[0.0, 1.0], metavar="T,T,...")
    parser.add_argument(
        "--questions",
        type=Path,
        help="a file in Spec-Bench's format; default: held-out ones of the corpus",
    )
    parser.add_argument("--limit", type=int, default=2, help="questions of each of the six groups")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument(
        "--costs",
        type=Path,
        help="the table of costs for auto, written if there is none yet; default: the user's",
    )
    parser.add_argument("--hf", action="store_true", help="transformers beside ours")
    parser.add_argument(
        "--compile",
        action="store_true",
        help="every method compiled too, beside the same one that is not",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="compare greedy answers with ar's; exit code 1 for a bug",
    )
    parser.add_argument("--markdown", action="store_true", help="tables as markdown")
    parser.add_argument(
        "--out", type=Path, help="folder for all records and for Spec-Bench's answer files"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the rounds that are in --out"
    )
    args = parser.parse_args(arguments)
    if args.program in OTHERS:
        parser.error(
            f"{args.program!r} comes first, before any option: python -m s2d.bench {args.program}"
        )
    return args


if __name__ == "__main__":
    sys.exit(main())
