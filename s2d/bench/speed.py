"""Every method on every target, as speedups over the target alone in the same run."""

import json
import platform
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load_model, placement
from ..checkpoint.files import refuse_existing, staged
from ..checkpoint.names import find_draft, find_target
from ..checkpoint.pair import Choice, load_chosen
from ..options import Options
from .check import find_bugs
from .comparison import choose_methods, compare_methods, load_methods
from .measure import Run
from .methods import default_methods, parse_method
from .peers import ASSISTED, choose_assistant, peers_of
from .specbench import corpus_questions, read_questions, write_answers
from .tables import Cell, Comparison, best_table, fastest, render, table, with_means, write_plot

PACKAGES = "torch", "transformers", "numpy", "safetensors", "sentencepiece", "tokenizers"


def measure_speed(args: Namespace) -> int:
    """Measure; print a table for each target and temperature, and of all. Returns the exit code.

    What cannot be measured is refused before anything is loaded. If a target fails, the tables of
    those before it are there.
    """
    if args.plot:
        import_module("matplotlib")  # a missing one shows now
    if args.hf:
        import_module("transformers")
    for output in filter(None, (args.out, args.plot)):
        refuse_existing(output)
    Options(temperature=min(args.temperature))  # refuses a negative one
    folders = [find_target(name) for name in args.targets]
    names = args.methods or default_methods(find_draft(folders[0], args.draft).draft)
    methods = {name: parse_method(name, args.draft) for name in ["ar", *names]}
    questions = corpus_questions(args.limit)
    if args.questions:
        questions = read_questions(args.questions, args.limit)
    chosen = {}
    for name, folder in name_folders(folders).items():
        choices = choose_methods(folder, methods)
        chosen[name] = choices, choose_assistant(choices) if args.hf else None
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    found: list[Comparison] = []
    code = 0
    try:
        for name, (choices, assistant) in chosen.items():
            pairs = load_methods(choices, args.device, args.dtype)
            alone = pairs["ar"]
            print(f"{name} on {placement(alone.target)}")
            print(f"prompt format: {alone.tokenizer.prompt_format.name}\n")
            peers = {} if assistant is None else load_peers(assistant, args)
            if args.check:
                precise = load_model(alone.folder, args.device, "float64")
            for comparison in compare_methods(name, pairs, questions, args, peers):
                found.append(comparison)
                print(comparison, flush=True)
                if args.out:
                    write_answers(args.out, comparison, alone.tokenizer)
                if args.check and find_bugs(comparison, alone.target, precise):
                    code = 1
    finally:
        if found:
            show_all(found, choices, args)
    return code


def load_peers(assistant: Choice, args: Namespace) -> dict[str, Run]:
    """transformers' decoders, which take weights as they are stored."""
    plain = partial(load_model, quick=False)
    pair = load_chosen(assistant, args.device, args.dtype, plain)
    return peers_of(pair.target, pair.draft)


def name_folders(folders: list[Path]) -> dict[str, Path]:
    """Each of ``folders`` once, by its name, or by its path where others have the same name."""
    places = list(dict.fromkeys(folder.absolute() for folder in folders))
    names = [place.name for place in places]
    named = {}
    for place in places:
        is_unique = names.count(place.name) == 1
        named[place.name if is_unique else str(place)] = place
    return named


def show_all(found: list[Comparison], choices: dict[str, Choice], args: Namespace) -> None:
    """Print a table of all, and ``s2d`` next to the best single exit; write what is asked for."""
    overall = {comparison.title: keep_best_setting(comparison) for comparison in found}
    print(render(table(with_means(overall), ("speedup", "mat"))))
    kinds = {}
    for name, choice in choices.items():
        if choice.found.draft is not None:
            kinds[name] = choice.options.method
    single = [name for name, kind in kinds.items() if kind == "sd"]
    results = {comparison.title: comparison.by_group for comparison in found}
    for name, kind in kinds.items():
        if single and kind == "s2d":
            print(f"\nspeedups of the best single exit / {name} / their ratio\n")
            print(render(best_table(results, single, name)))
    if args.plot:
        write_plot(args.plot, overall, across=len(set(args.temperature)))
    if args.out:
        data = {"arguments": vars(args), "machine": describe_machine()}
        data["comparisons"] = [comparison.as_json() for comparison in found]
        with staged(args.out / "results.json") as stage:
            stage.write_text(json.dumps(data, default=str), encoding="utf-8")


def keep_best_setting(comparison: Comparison) -> dict[str, Cell]:
    """The column of all groups, with two rows for assisted transformers: its default, its best."""
    column = dict(comparison.by_group["overall"])
    assisted = [row for row in column if row.startswith(ASSISTED)]
    if assisted:
        best = fastest(column, assisted)
        print(f"{comparison.title}: the best setting of {ASSISTED} is {best}")
        column[f"{ASSISTED}, best setting"] = column[best]
    for row in assisted[1:]:
        del column[row]
    return column


def describe_machine() -> dict[str, Any]:
    """The processor, and the versions of what has been imported."""
    versions = {name: version(name) for name in PACKAGES if name in sys.modules}
    return {
        "system": platform.platform(),
        "processor": name_processor(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "versions": {"python": platform.python_version(), **versions},
    }


def name_processor() -> str:
    """As Linux calls it; elsewhere, as Python does."""
    file = Path("/proc/cpuinfo")
    lines = file.read_text().splitlines() if file.is_file() else []
    for line in lines:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()
