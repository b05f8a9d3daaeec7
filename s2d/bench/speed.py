"""Every method on every target, beside transformers, as speedups over the target in the same run.

With ``sweep``: many settings on training prompts, the best first.
"""

from functools import partial

import torch

from ..program import one_line, tell
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import check_device, choose_dtype, load_model, placement
from ..weights.config import read_config
from ..weights.datastore import find_datastore, open_datastore
from ..weights.get import WEIGHTS, draft_beside, find_target
from .check import check_methods
from .measure import measure, runners
from .methods import default_methods, parse_method, sweep_methods, transformers_methods
from .plot import check_plot, write_plot
from .specbench import check_answers, choose_questions, write_answers
from .tables import final_table, render, summarise, target_table


def report(args):
    """Measure; print a table for each target and temperature, and one of all. The exit code."""
    if args.plot:
        check_plot(args.plot)
    device, folders = check_device(args.device), [find_target(name) for name in args.targets]
    alike = len({folder.name for folder in folders}) < len(folders)
    targets = {one_line(folder if alike else folder.name): folder for folder in folders}
    if args.out:
        names = [f"{name}-T{temperature:g}" for name in targets for temperature in args.temperature]
        check_answers(args.out, names)
    beside = draft_beside(folders[0])
    args.draft = args.draft or (beside if beside.is_dir() else WEIGHTS / "mini-draft")
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
            give_datastore(methods[name], path, args.draft)
            measure_target(args, name, path, drafts, methods[name], questions, records)
            if args.check and records.get((name, 0.0)):  # the measured target is out of memory
                load = partial(load_model, path, args.device)
                asked = load, args.dtype, drafts, records[name, 0.0], methods[name]
                for method, line, good in check_methods(*asked):
                    print(f"{name} {method}: {line}", flush=True)
                    code = max(code, int(good is False))
                print()
    except KeyboardInterrupt:
        tell("interrupted: what follows is of the rounds that were finished")
        code = 130
    if not code and not any(records.values()):
        raise ValueError("no question fits the context of a target")
    show(records, args)
    return code


def choose_methods(args):
    """(names of methods, {whether compiled: draft}), the draft None where only "ar" is asked."""
    needed = args.methods is None or any(name.split(":")[0] != "ar" for name in args.methods)
    load = partial(load_model, args.draft, args.device, args.dtype)
    drafts = {False: load() if needed else None}
    defaults = sweep_methods if args.sweep else default_methods
    names = ["ar", *(args.methods or defaults(drafts[False]))]  # all are compared to "ar"
    if args.compile:
        names = [name.replace(":compile", "") for name in names]
        names = [each for name in names for each in (name, f"{name}:compile")]
    if any("compile" in name for name in names):
        drafts[True] = load(compile=True) if needed else None
    return list(dict.fromkeys(names)), drafts


def give_datastore(methods, target_path, draft_path):
    """Add the target's or the draft's datastore, if there is one, to methods that use exit 0."""
    using = [options for _, options in methods.values() if 0 in options.get("exits", ())]
    config = read_config(target_path)
    if using and (store := find_datastore(target_path, draft_path, config)):
        found = open_datastore(store, target_path, config)
        for options in using:
            options["datastore"] = found


def measure_target(args, name, path, drafts, methods, questions, records):
    """All rounds of a target, added to ``records``."""
    load = partial(load_model, path, args.device, args.dtype)
    models = {compiled: (load(compile=compiled), draft) for compiled, draft in drafts.items()}
    where = placement(*filter(None, models[False]))
    peers = transformers_methods(*models[False]) if args.hf else {}
    chat = Tokenizer(path), chat_template(path), models[False][0].config.max_position_embeddings
    for temperature in args.temperature:
        runs = runners(models, methods, peers, temperature, args.max_new_tokens)
        label = f"{name} T={temperature:g} on {where}"
        records[name, temperature] = own = []
        for finished in measure(runs, questions, args.rounds, label, *chat):
            own += finished


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
