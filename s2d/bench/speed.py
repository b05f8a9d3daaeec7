"""Every method on every target, as speedups over the target alone in the same run."""

from functools import partial

import torch

from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import load_model, placement
from ..weights.names import draft_beside, find_target
from .check import check
from .measure import answer, measure, run_ours
from .methods import default_methods, parse_method, peers_of, prepare
from .plot import check_plot, write_plot
from .specbench import corpus_questions, read_questions, write_answers
from .tables import render, summarise, table


def report(args):
    """Measure; print a table for each target and temperature, and one of all. The exit code."""
    if args.plot:
        check_plot()
    if args.out and args.out.exists():
        raise ValueError(f"{args.out} is there already; remove it or name another")
    folders = [find_target(name) for name in args.targets]
    args.draft = args.draft or draft_beside(folders[0])
    names = ["ar", *(args.methods or default_methods(args.draft))]
    names += [f"{name}:compile" for name in names if args.compile]
    names += [f"{name}:batch={batch}" for batch in args.batch for name in names]
    methods = {name: parse_method(name) for name in names}
    choose = partial(read_questions, args.questions) if args.questions else corpus_questions
    questions = choose(args.limit)
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    records, code = {}, 0  # {(target, temperature): records}
    for folder in folders:
        code = max(code, measure_target(args, folder, methods, questions, records))
    result = {}
    for (target, temperature), own in records.items():
        full, column = summarise(own), f"{target} T={temperature:g}"
        result[column] = full["overall"]
        lines = render(table(full, ("speedup", "mat", "text")), args.markdown)
        print(f"{column}: speedup / mean accepted tokens\n\n{lines}\n")
        if args.out:
            write_answers(args.out, f"{target}-T{temperature:g}", own)
    print(render(table(result, ("speedup", "mat"), means=True), args.markdown))
    if args.plot:
        label = "speedup over the target alone (ar)"
        write_plot(args.plot, result, "speedup", label, across=len(args.temperature))
    return code


def measure_target(args, folder, methods, questions, records):
    """All rounds of a target, added to ``records``. The exit code: 1 where --check finds a bug."""
    load = partial(load_model, device=args.device, dtype=args.dtype)
    layers = [m for m in methods.values() if m["method"] != "ar" and m.get("exits") != (0,)]
    drafts = [args.draft] if layers else []
    models, runs = {}, {}  # {whether compiled: models}, {method: (target, draft, options)}
    for name, method in methods.items():
        compiled = method["compile"]
        if compiled not in models:
            loaded = [load(each, compile=compiled) for each in (folder, *drafts)]
            models[compiled] = (*loaded, None)[:2]
        target, draft = models[compiled]
        runs[name] = target, draft, prepare(method, target, draft, folder, args.draft)
    target, draft = models[False]
    print(f"{folder.name} on {placement(target)}\n")
    peers = peers_of(target, draft) if args.hf else {}
    context_size = target.config.max_position_embeddings
    ask = partial(answer, Tokenizer(folder), chat_template(folder), context_size)
    at_once, everything = max(method["batch"] for method in methods.values()), []
    for temperature in args.temperature:
        common = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
        asked = {}
        for name, (target, draft, options) in runs.items():
            asked[name] = partial(run_ours, target, draft, common | options, methods[name]["batch"])
        asked |= {name: partial(peer, **common) for name, peer in peers.items()}
        label = f"{folder.name}, T = {temperature:g}"
        own = measure(asked, questions, args.rounds, label, ask, at_once)
        if not own:
            raise ValueError(f"no question fits the context of {folder}")
        records[folder.name, temperature] = own
        everything += own
    if not args.check:
        return 0
    precise = load_model(folder, args.device, "float64")
    return check(folder.name, models[False][0], precise, methods, everything)
