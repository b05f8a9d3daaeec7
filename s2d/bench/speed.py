"""Every method on every target, as speedups over the target alone in the same run."""

import json
import sys
from argparse import Namespace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from platform import platform

import torch

from ..checkpoint import load_model, placement
from ..checkpoint.files import refuse_existing, staged
from ..checkpoint.names import find_draft, find_target
from ..checkpoint.pair import Choice, load_chosen
from ..cli.program import name_processor
from ..options import Options
from .check import find_bugs
from .comparison import choose_methods, compare_methods, load_methods
from .measure import Run
from .methods import default_methods, parse_method
from .peers import choose_assistant, peers_of
from .specbench import corpus_questions, read_questions, write_answers
from .tables import Comparison, best_table, render, table, with_means, write_plot

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
    folders = {name: find_target(name) for name in args.targets}
    first = folders[args.targets[0]]
    names = args.methods or default_methods(find_draft(first, args.draft).draft)
    methods = {name: parse_method(name, args.draft) for name in ["ar", *names]}
    questions = corpus_questions(args.limit)
    if args.questions:
        questions = read_questions(args.questions, args.limit)
    chosen = {name: choose_methods(folder, methods) for name, folder in folders.items()}
    assistants = {}
    if args.hf:
        assistants = {name: choose_assistant(choices) for name, choices in chosen.items()}
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    found: list[Comparison] = []
    code = 0
    try:
        for name, choices in chosen.items():
            pairs = load_methods(choices, args.device, args.dtype)
            alone = pairs["ar"]
            print(f"{name} on {placement(alone.target)}\n")
            peers = load_peers(assistants[name], args) if args.hf else {}
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


def show_all(found: list[Comparison], choices: dict[str, Choice], args: Namespace) -> None:
    """Print a table of all, and ``s2d`` next to the best single exit; write what is asked for."""
    results = {comparison.title: comparison.by_group for comparison in found}
    overall = {title: by_group["overall"] for title, by_group in results.items()}
    print(render(table(with_means(overall), ("speedup", "mat"))))
    single = [name for name, choice in choices.items() if choice.options.method == "sd"]
    for name, choice in choices.items():
        if single and choice.options.method == "s2d":
            print(f"\nspeedups of the best single exit / {name} / their ratio\n")
            print(render(best_table(results, single, name)))
    if args.plot:
        write_plot(args.plot, overall, across=len(set(args.temperature)))
    if args.out:
        versions = {name: version(name) for name in PACKAGES if name in sys.modules}
        machine = {"processor": name_processor(), "system": platform(), "versions": versions}
        machine["threads"] = torch.get_num_threads()
        data = {"arguments": vars(args), "machine": machine}
        data["comparisons"] = [comparison.as_json() for comparison in found]
        with staged(args.out / "results.json") as stage:
            stage.write_text(json.dumps(data, default=str), encoding="utf-8")
