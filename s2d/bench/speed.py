"""Every method on every target, as speedups over the target alone in the same run."""

import json
from argparse import Namespace
from contextlib import ExitStack, nullcontext, suppress
from importlib import import_module

import torch

from ..checkpoint.files import staged, taken
from ..checkpoint.load import placement
from ..cli.terminal import ROUNDING, gap_in_steps
from .figures import Column, Question, mean_column
from .measure import compare_methods
from .methods import choose_methods, default_methods, load_methods
from .peers import peers_of
from .specbench import corpus_questions, read_questions, write_answers
from .tables import LEGEND, MEASURES, describe_machine, table, write_plot


def main(args: Namespace) -> int:
    """The exit code. What cannot be measured or written is refused before anything is loaded."""
    if args.plot:
        import_module("matplotlib")  # a missing one shows now
        if args.plot.suffix not in (".svg", ".png", ".pdf"):
            raise ValueError(f"--plot writes .svg, .png or .pdf, and not {args.plot}")
    if args.hf:
        import_module("transformers")
    names = args.methods or default_methods(args.target[0], args.draft, exits=None)
    questions = corpus_questions(args.limit)
    if args.questions:
        questions = read_questions(args.questions, args.limit)
    chosen = {name: choose_methods(name, dict(zip(names, names)), args) for name in args.target}
    with ExitStack() as outputs:
        for output in filter(None, (args.out, args.plot)):
            outputs.enter_context(taken(output))
        return measure_all(chosen, questions, args)


def measure_all(chosen: dict[str, dict], questions: list[Question], args: Namespace) -> int:
    """Print a table for each target and temperature, and of all. Returns the exit code.

    What is measured is written before it is printed. A target that fails costs no other figure.
    """
    results = describe_machine() | {"command": args.command, "arguments": vars(args)}
    results |= {"models": {}, "comparisons": []}
    overall: dict[str, Column] = {}
    code = 0
    say(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n", args)
    try:
        for name, choices in chosen.items():
            pairs = load_methods(choices, args)
            alone = pairs["ar"]
            say(f"{name} on {placement(alone.target)}\n", args)
            read = {"target": alone.folder.path.absolute(), "dtype": str(alone.target.dtype)}
            drafts = {method: pair.drafting for method, pair in pairs.items()}
            results["models"][name] = read | {"drafts": drafts}
            peers = peers_of(pairs) if args.hf else {}
            for comparison in compare_methods(name, pairs, questions, args, peers):
                overall[comparison.title] = comparison.by_group["overall"]
                results["comparisons"].append(comparison.as_json())
                if args.out:
                    write_answers(args.out, comparison, alone.tokenizer)
                    with staged(args.out / "results.json") as stage:
                        stage.write_text(json.dumps(results, default=str), encoding="utf-8")
                say(str(comparison), args)
                different = comparison.different_from("ar") if args.check else {}
                for method, places in different.items():
                    options = comparison.options[method]
                    gaps = [gap_in_steps(alone.target, options, *place) for place in places]
                    words = "answers differ from those of the target alone"
                    say(f"{comparison.title} {method}: {len(gaps)} {words}{verdict(gaps)}", args)
                    code = 1 if max(gaps, default=0) > ROUNDING else code
    finally:
        if overall and args.plot:
            write_plot(args.plot, overall, across=len(set(args.temperature)))
        if overall:
            means = {"mean": mean_column(list(overall.values()))}
            print(table(f"overall: {LEGEND}", overall | means, MEASURES))
    return code


def verdict(gaps: list[float]) -> str:
    """What is said of answers that differ, by the ``gaps`` of the two tokens where each begins."""
    if not gaps:
        return ""
    cause = "rounding" if max(gaps) <= ROUNDING else "a fault"
    return f", at tokens up to {max(gaps):.1f} steps of the dtype apart: {cause}"


def say(text: str, args: Namespace) -> None:
    """Print ``text``. If nobody can read it, what is measured is for --out or --plot."""
    with suppress(OSError) if args.out or args.plot else nullcontext():
        print(text, flush=True)
