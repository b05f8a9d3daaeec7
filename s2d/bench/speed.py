"""Every method on every target, as speedups over the target alone in the same run."""

from argparse import Namespace
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load_model, placement
from ..checkpoint.files import refuse_existing
from ..checkpoint.names import find_draft, find_target
from ..checkpoint.pair import Pair, choose_pair, load_chosen, load_pair
from ..model import Llama
from ..options import Options
from .check import check
from .measure import Question, Record, Run, answer, measure, run_ours
from .methods import Method, default_methods, parse_method
from .peers import ASSISTED, peers_of
from .specbench import corpus_questions, read_questions, write_answers
from .tables import (
    DETAILS,
    Result,
    acceptance_table,
    add_best,
    render,
    summarise,
    table,
    write_plot,
)

BEST_EXIT = "sd, best exit"
BEST_ASSISTED = f"{ASSISTED}, best setting"


def report(args: Namespace) -> int:
    """Measure; print a table for each target and temperature, and one of all. The exit code."""
    if args.out:
        refuse_existing(args.out)
    if min(args.temperature) < 0:
        raise ValueError(f"temperature: expected a number from 0, got {min(args.temperature)}")
    folders = list(dict.fromkeys(map(find_target, args.targets)))
    names = args.methods or default_methods(find_draft(folders[0], args.draft).draft)
    methods = {name: parse_method(name, args.draft) for name in ["ar", *names]}
    questions = corpus_questions(args.limit)
    if args.questions:
        questions = read_questions(args.questions, args.limit)
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    overall: Result = {}
    code = 0
    for folder in folders:
        pairs = load_pairs(folder, methods, args)
        runs = {name: partial(run_ours, pair=pair) for name, pair in pairs.items()}
        exits = [name for name, pair in pairs.items() if pair.options.method == "sd" and pair.draft]
        alone = pairs["ar"]
        theirs: dict[str, Run] = {}
        if args.hf:  # it takes the weights as they are stored
            plain = partial(load_model, quick=False)
            pair = load_pair(folder, args.draft, Options(), args.device, args.dtype, plain)
            theirs = peers_of(pair.target, None if pair.draft is pair.target else pair.draft)
        assisted = [name for name in theirs if name.startswith(ASSISTED)]
        print(f"{folder.name} on {placement(alone.target)}")
        print(f"prompt format: {alone.tokenizer.prompt_format.name}\n")
        for temperature in dict.fromkeys(args.temperature):
            column = f"{folder.name} T={temperature:g}"
            options = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
            records = measure_runs(alone, runs | theirs, questions, args.rounds, column, options)
            by_group = summarise(records)
            overall[column] = by_group["overall"]
            for rows, name in ((exits, BEST_EXIT), (assisted, BEST_ASSISTED)):
                if len(rows) > 1:
                    chosen = add_best(by_group, rows, name)
                    print(f"{column}: {name} is {chosen['overall']}")
            show(column, by_group, records, args.markdown)
            for row in assisted[1:]:
                del overall[column][row]  # its many settings
            if args.out:
                write_answers(args.out, column, records)
            if args.check:
                precise = load_model(folder, args.device, "float64")
                code = max(code, check(column, alone.target, precise, records))
    print(render(table(overall, ("speedup", "mat"), means=True), args.markdown))
    if args.plot:
        write_plot(args.plot, overall, across=len(set(args.temperature)))
    return code


def load_pairs(folder: Path, methods: dict[str, Method], args: Namespace) -> dict[str, Pair]:
    """{name: what it needs} of ``methods`` for the target in a ``folder``; each model once."""
    choices = {}
    layers_of: Counter[Path] = Counter()  # {folder of a draft: its layers up to the last exit}
    for name, method in methods.items():
        choices[name] = choose_pair(folder, method.draft, Options(**method.options))
        draft = choices[name].found.draft
        if draft is not None:
            layers_of[draft] = max(layers_of[draft], choices[name].options.exits[-1])
    load_once = cache(load_model)

    def load(path: Path, device: str, dtype: Any, layers: int | None = None) -> Llama:
        return load_once(path, device, dtype, layers=layers and layers_of[path])

    return {
        name: load_chosen(choice, args.device, args.dtype, load) for name, choice in choices.items()
    }


def measure_runs(
    pair: Pair,
    runs: dict[str, Callable[..., Any]],
    questions: list[Question],
    rounds: int,
    column: str,
    options: dict[str, Any],
) -> list[Record]:
    """The records of ``runs``, with these ``options``, on questions for the target of ``pair``."""
    ready = {name: partial(run, **options) for name, run in runs.items()}
    ask = partial(answer, pair.tokenizer, pair.target.config.max_position_embeddings)
    return measure(ready, questions, rounds, column, ask)


def show(column: str, by_group: Result, records: list[Record], markdown: bool) -> None:
    """Print two tables: speedups by group, and what was accepted."""
    # Columns that are named after measures show these.
    details = by_group | dict.fromkeys(DETAILS, by_group["overall"])
    lines = render(table(details, ("speedup", "mat")), markdown)
    print(f"{column}: speedup / mean accepted tokens\n\n{lines}\n", flush=True)
    drafted = acceptance_table(records)
    if len(drafted) > 1:
        title = "accepted by position; by exit asked / sure / drafted / accepted"
        print(f"{column}: {title}\n\n{render(drafted, markdown)}\n", flush=True)
