"""Every method on every target, as speedups over the target alone in the same run."""

from functools import cache, partial
from importlib import import_module

import torch

from ..files import refuse_existing, refuse_other_than_file
from ..text.tokenizer import Tokenizer
from ..weights import load_model, placement
from ..weights.config import read_config
from ..weights.names import draft_beside, find_draft, find_target
from .check import check
from .measure import answer, measure, run_ours
from .methods import default_methods, parse_method, peers_of, prepare
from .plot import write_plot
from .specbench import corpus_questions, read_questions, write_answers
from .tables import DETAILS, render, summarise, table


def report(args):
    """Measure; print a table for each target and temperature, and one of all. The exit code."""
    if args.plot:
        import_module("matplotlib")  # a missing one shows before anything is measured
        refuse_other_than_file(args.plot)
    if args.out:
        refuse_existing(args.out)
    folders = [find_target(name) for name in args.targets]
    draft = args.draft
    if draft is None:
        draft = find_draft(folders[0], read_config(folders[0]))
        args.draft = draft or draft_beside(folders[0])  # if a method needs one, it is missed there
    else:
        read_config(draft)  # a name that is mistyped shows
    names = ["ar", *(args.methods or default_methods(draft))]
    names += [f"{name}:compile" for name in names if args.compile]
    names += [f"{name}:batch={batch}" for batch in args.batch or () for name in names]
    methods = {name: parse_method(name) for name in names}
    choose = partial(read_questions, args.questions) if args.questions else corpus_questions
    questions = choose(args.limit)
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    result, code = {}, 0
    for folder in folders:
        target, runs = prepared(args, folder, methods)
        print(f"{folder.name} on {placement(target)}\n")
        context_size = target.config.max_position_embeddings
        ask = partial(answer, Tokenizer(folder), context_size)
        at_once = max(method["batch"] for method in methods.values())
        for temperature in args.temperature:
            column = f"{folder.name} T={temperature:g}"
            options = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
            records = measure(runs, questions, args.rounds, column, ask, at_once, **options)
            if not records:
                raise ValueError(f"no question fits the context of {folder}")
            by_group = summarise(records)
            result[column] = by_group["overall"]
            columns = by_group | dict.fromkeys(DETAILS, by_group["overall"])
            lines = render(table(columns, ("speedup", "mat")), args.markdown)
            print(f"{column}: speedup / mean accepted tokens\n\n{lines}\n", flush=True)
            if args.out:
                write_answers(args.out, column.replace(" T=", "-T"), records)
            if args.check:
                precise = load_model(folder, args.device, "float64")
                code = max(code, check(column, target, precise, methods, records))
    print(render(table(result, ("speedup", "mat"), means=True), args.markdown))
    if args.plot:
        write_plot(args.plot, result, across=len(args.temperature))
    return code


def prepared(args, folder, methods):
    """The target in ``folder``, and {name: run} of ``methods``, and of transformers with --hf."""
    drafting = [method for method in methods.values() if method["method"] != "ar"]
    drafted = any(method.get("exits") != (0,) for method in drafting)

    @cache
    def load(compiled):
        options = dict(device=args.device, dtype=args.dtype, compile=compiled)
        draft = load_model(args.draft, **options) if drafted else None
        return load_model(folder, **options), draft

    runs = {}
    for name, method in methods.items():
        target, draft = load(method["compile"])
        options = prepare(method, target, folder)
        runs[name] = partial(run_ours, target, draft, method["batch"], **options)
    target, draft = load(False)
    if args.hf:
        runs |= peers_of(target, draft)
    return target, runs
