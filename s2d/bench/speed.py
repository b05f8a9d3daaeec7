"""Every method on every target, beside transformers, as speedups over the target in the same run.

With ``sweep``: on training prompts, to choose settings by, and the best first.
"""

from functools import partial

import torch

from ..program import one_line, tell
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import check_device, choose_dtype, load_model, placement
from ..weights.names import find_target
from .check import observe_methods, verdict
from .measure import answer, measure, runners
from .methods import choose_methods, datastore_of, draft_of, parse_method, peers_of
from .plot import check_plot, write_plot
from .specbench import choose_questions, write_answers
from .tables import final_table, render, summarise, target_table


def report(args):
    """Measure; print a table for each target and temperature, and one of all. The exit code."""
    if args.plot:
        check_plot(args.plot)
    device, folders = check_device(args.device), [find_target(name) for name in args.targets]
    alike = len({folder.name for folder in folders}) < len(folders)
    targets = {one_line(folder if alike else folder.name): folder for folder in folders}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
    args.draft = draft_of(args, folders[0])
    names, drafts = choose_methods(args)
    methods = {  # {target: {name: (whether it is compiled, options)}}
        target: {name: parse_method(name, drafts[False], args.draft, path) for name in names}
        for target, path in targets.items()
    }
    questions = choose_questions(args.questions, "train" if args.sweep else "held-out", args.limit)
    machine = f"{torch.get_num_threads()} threads, {choose_dtype(args.dtype, device, folders[0])}"
    most = f"at most {args.max_new_tokens} new tokens a turn, median of {args.rounds} rounds"
    print(f"torch {torch.__version__}, {machine}, {len(questions)} questions, {most}\n")
    records, code = {}, 0  # {(target, temperature): records}
    try:
        for name, path in targets.items():
            observed = measure_target(args, name, path, drafts, methods[name], questions, records)
            if observed:  # the measured target is out of memory
                code = max(code, tell_losses(name, load_model(path, device, "float64"), observed))
    except KeyboardInterrupt:
        tell("interrupted: what follows is of the rounds that were finished")
        code = 130
    if not code and not any(records.values()):
        raise ValueError("no question fits the context of a target")
    show(records, args)
    return code


def measure_target(args, name, path, drafts, methods, questions, records):
    """All rounds of a target, added to ``records``. With --check what ``observe_methods`` saw."""
    load = partial(load_model, path, args.device, args.dtype)
    models = {compiled: (load(compile=compiled), draft) for compiled, draft in drafts.items()}
    where, target = placement(*filter(None, models[False])), models[False][0]
    using = [options for _, options in methods.values() if 0 in options.get("exits", ())]
    found = datastore_of(path, target.config) if using else None
    for options in using:
        options["datastore"] = found
    peers = peers_of(*models[False]) if args.hf else {}
    size = target.config.max_position_embeddings
    ask = partial(answer, Tokenizer(path), chat_template(path), size)
    for temperature in args.temperature:
        runs = runners(models, methods, peers, temperature, args.max_new_tokens)
        label = f"{name} T={temperature:g} on {where}"
        records[name, temperature] = own = []
        for finished in measure(runs, questions, args.rounds, label, ask):
            own += finished
    everything = sum((records[name, temperature] for temperature in args.temperature), [])
    return observe_methods(models, everything, methods) if args.check else {}


def tell_losses(name, precise, observed):
    """A line on each of the methods of a target, ``precise`` in float64: 1 for a bug, or 0."""
    code = 0
    for method, (passes, differences, exact) in observed.items():
        line, right = verdict(precise, passes, differences)
        claim = "" if exact else "not a lossless method; "
        print(f"{name} {method}: {claim}{line}", flush=True)
        code |= exact and right is False
    print()
    return code


def show(records, args):
    """All tables, and the records in files for Spec-Bench's scripts."""
    summaries = {key: summarise(own) for key, own in records.items() if own}
    for (target, temperature), summary in summaries.items():
        if args.sweep:
            summary = dict(sorted(summary.items(), key=lambda item: -item[1]["speedup"]))
        table = render(target_table(summary), args.markdown)
        print(f"{target}, T = {temperature:g}: speedup over ar\n\n{table}\n")
        if args.out:
            write_answers(args.out, f"{target}-T{temperature:g}", records[target, temperature])
    if summaries:
        table = render(final_table(summaries), args.markdown)
        print(f"speedup over ar / mean accepted tokens\n\n{table}")
    if summaries and args.plot:
        write_plot(args.plot, summaries)
