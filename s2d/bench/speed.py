"""Every method on every target, as speedups over the target alone in the same run."""

import json
import sys
from argparse import Namespace
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from platform import platform
from subprocess import run

import torch

from ..checkpoint import placement
from ..checkpoint.files import refuse_existing, staged
from ..cli.program import name_processor
from ..cli.terminal import ROUNDING, gap_in_steps
from .figures import mean_column
from .measure import compare_methods
from .methods import choose_methods, default_methods, load_methods
from .peers import peers_of
from .specbench import corpus_questions, read_questions, write_answers
from .tables import LEGEND, MEASURES, Comparison, table, write_plot

PACKAGES = "torch", "transformers", "numpy", "safetensors", "sentencepiece"


def main(args: Namespace) -> int:
    """Measure; print a table for each target and temperature, and of all. Returns the exit code.

    What cannot be measured is refused before anything is loaded. If a target fails, the tables of
    those before it are there.
    """
    if args.plot:
        import_module("matplotlib")  # a missing one shows now
        if args.plot.suffix not in (".svg", ".png", ".pdf"):
            raise ValueError(f"--plot writes .svg, .png or .pdf, and not {args.plot}")
    if args.hf:
        import_module("transformers")
    for output in filter(None, (args.out, args.plot)):
        refuse_existing(output)
    names = args.methods or default_methods(args.target[0], args.draft, exits=None)
    methods = {name: name for name in names}
    questions = corpus_questions(args.limit)
    if args.questions:
        questions = read_questions(args.questions, args.limit)
    chosen = {name: choose_methods(name, methods, args) for name in args.target}
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    found: list[Comparison] = []
    code = 0
    try:
        for name, choices in chosen.items():
            pairs = load_methods(choices, args)
            alone = pairs["ar"]
            print(f"{name} on {placement(alone.target)}\n")
            peers = peers_of(pairs) if args.hf else {}
            for comparison in compare_methods(name, pairs, questions, args, peers):
                found.append(comparison)
                print(comparison, flush=True)
                if args.out:
                    write_answers(args.out, comparison, alone.tokenizer)
                different = comparison.different_from("ar") if args.check else {}
                for method, places in different.items():
                    options = comparison.options[method]
                    gaps = [gap_in_steps(alone.target, options, *place) for place in places]
                    words = "answers differ from those of the target alone"
                    print(f"{comparison.title} {method}: {len(gaps)} {words}{verdict(gaps)}")
                    code = 1 if max(gaps, default=0) > ROUNDING else code
    finally:
        if found:
            show_all(found, args)
    return code


def verdict(gaps: list[float]) -> str:
    """What is said of answers that differ, by the ``gaps`` of the two tokens where each begins."""
    if not gaps:
        return ""
    cause = "rounding" if max(gaps) <= ROUNDING else "a fault"
    return f", at tokens up to {max(gaps):.1f} steps of the dtype apart: {cause}"


def show_all(found: list[Comparison], args: Namespace) -> None:
    """Print tables of all targets and temperatures, and write what is asked for."""
    overall = {comparison.title: comparison.by_group["overall"] for comparison in found}
    means = {"mean": mean_column(list(overall.values()))}
    print(table(f"overall: {LEGEND}", overall | means, MEASURES))
    if args.out:
        versions = {name: version(name) for name in PACKAGES if name in sys.modules}
        machine = {"processor": name_processor(), "system": platform(), "versions": versions}
        machine["threads"] = torch.get_num_threads()
        describe = "git describe --always --dirty --abbrev=40 --exclude='*'"  # no text without git
        commit = run(describe, shell=True, cwd=Path(__file__).parent, capture_output=True).stdout
        data = {"command": args.command, "commit": commit.decode().strip(), "machine": machine}
        data["arguments"] = vars(args)
        data["comparisons"] = [comparison.as_json() for comparison in found]
        with staged(args.out / "results.json") as stage:
            stage.write_text(json.dumps(data, default=str), encoding="utf-8")
    if args.plot:
        write_plot(args.plot, overall, across=len(set(args.temperature)))
