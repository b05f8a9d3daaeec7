"""Every method on every target, as speedups over the target alone in the same run."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import load_model, placement
from ..checkpoint.config import read_config, read_drafting
from ..checkpoint.names import draft_path, find_family_draft, find_target
from ..checkpoint.tokenizer import Tokenizer
from ..files import refuse_existing, refuse_other_than_file
from ..model import Llama
from ..options import Options
from .check import check
from .measure import answer, measure, run_ours
from .methods import default_methods, parse_method, peers_of, prepare
from .plot import write_plot
from .specbench import corpus_questions, model_id, read_questions, write_answers
from .tables import DETAILS, render, summarise, table


def report(args: Namespace) -> int:
    """Measure; print a table for each target and temperature, and one of all. The exit code.

    What cannot be measured is refused before anything is.
    """
    if args.plot:
        import_module("matplotlib")  # a missing one shows before anything is measured
        refuse_other_than_file(args.plot)
    if args.out:
        refuse_existing(args.out)
    found = [find_target(name) for name in args.targets]
    folders = list({os.path.abspath(folder): folder for folder in found}.values())  # each once
    temperatures = list(dict.fromkeys(args.temperature))
    draft = args.draft
    if draft is None:
        draft = find_family_draft(folders[0], read_config(folders[0]))
        args.draft = draft or draft_path(folders[0])  # if a method needs one, it is missed there
    else:
        read_config(draft)  # a name that is mistyped shows
    names = ["ar", *(args.methods or default_methods(draft))]
    names += [f"{name}:compile" for name in names if args.compile]
    names += [f"{name}:batch={batch}" for batch in args.batch or () for name in names]
    methods = {name: parse_method(name) for name in names}
    choose = partial(read_questions, args.questions) if args.questions else corpus_questions
    questions = choose(args.limit)
    plans = [plan(args, folder, name, methods, questions) for folder, name in short_names(folders)]
    columns = [
        column_of(each.name, temperature) for each, temperature in product(plans, temperatures)
    ]
    if args.out:
        refuse_shared_files(columns, methods)
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    result, code = {}, 0
    for each in plans:
        target, runs = prepared(args, each, methods)
        print(f"{each.name} on {placement(target)}\nprompt format: {each.prompt_format}\n")
        at_once = max(method["batch"] for method in methods.values())
        for temperature in temperatures:
            column = column_of(each.name, temperature)
            options = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
            records = measure(runs, questions, args.rounds, column, each.ask, at_once, **options)
            by_group = summarise(records)
            result[column] = by_group["overall"]
            columns = by_group | dict.fromkeys(DETAILS, by_group["overall"])
            lines = render(table(columns, ("speedup", "mat")), args.markdown)
            print(f"{column}: speedup / mean accepted tokens\n\n{lines}\n", flush=True)
            if args.out:
                write_answers(args.out, column, records)
            if args.check:
                precise = load_model(each.folder, args.device, "float64")
                code = max(code, check(column, target, precise, methods, records))
    print(render(table(result, ("speedup", "mat"), means=True), args.markdown))
    if args.plot:
        write_plot(args.plot, result, across=len(temperatures))
    return code


def short_names(folders: list[Path]) -> list[tuple[Path, str]]:
    """Each folder and its name, after as many parent folders as tell it from the others."""
    places = [Path(os.path.abspath(folder)) for folder in folders]  # of a link, its own
    named = []
    for folder, place in zip(folders, places):
        others = [other for other in places if other != place]
        count = 1
        while any(other.parts[-count:] == place.parts[-count:] for other in others):
            count += 1
        named.append((folder, Path(*place.parts[-count:]).as_posix()))
    return named


def column_of(name: str, temperature: float) -> str:
    return f"{name} T={str(temperature).removesuffix('.0')}"


def refuse_shared_files(columns: list[str], methods: Iterable[str]) -> None:
    """Raise ValueError if two answer files would have one name."""
    seen = set()
    for column, method in product(columns, methods):
        name = model_id(column, method)
        if name in seen:
            raise ValueError(f"--out: two answer files would be called {name}; rename a folder")
        seen.add(name)


@dataclass
class Plan:
    """What is measured on one target."""

    folder: Path
    name: str
    prompt_format: str  # described
    ask: Callable[..., list[dict]]  # see ``measure``
    options: dict[str, dict[str, Any]]  # of ``generate``, by the names of the methods


def plan(
    args: Namespace, folder: Path, name: str, methods: dict[str, dict], questions: list[dict]
) -> Plan:
    """Read what is small in the ``folder`` of a target; ValueError for what cannot be measured."""
    config = read_config(folder)
    tokenizer = Tokenizer(folder)
    prompts = [tokenizer.encode_prompt(question["turns"][:1]) for question in questions]
    if all(len(prompt) >= config.max_position_embeddings for prompt in prompts):
        raise ValueError(f"no question fits the context of {folder}")
    ask = partial(answer, tokenizer, config.max_position_embeddings)
    options = {key: prepare(method, config, folder) for key, method in methods.items()}
    draft = ()
    if needs_draft(methods):
        draft = read_config(args.draft), read_drafting(args.draft)
    for key, temperature in product(options, args.temperature):
        chosen = options[key] | {"temperature": temperature, "max_new_tokens": args.max_new_tokens}
        try:
            Options(**chosen).resolved(config, *draft)
        except ValueError as error:
            raise ValueError(f"{folder}, {key}: {error}") from None
    return Plan(folder, name, tokenizer.prompt_format.name, ask, options)


def needs_draft(methods: dict[str, dict]) -> bool:
    drafting = [method for method in methods.values() if method["method"] != "ar"]
    return any(method.get("exits") != (0,) for method in drafting)


def prepared(
    args: Namespace, plan: Plan, methods: dict[str, dict]
) -> tuple[Llama, dict[str, Callable]]:
    """The target of a ``plan``, and {name: run} of ``methods``, and of transformers with --hf."""

    @cache
    def load(compiled: bool) -> tuple[Llama, Llama | None]:
        options = dict(device=args.device, dtype=args.dtype, compile=compiled)
        draft = load_model(args.draft, **options) if needs_draft(methods) else None
        return load_model(plan.folder, **options), draft

    runs = {}
    for name, method in methods.items():
        target, draft = load(method["compile"])
        runs[name] = partial(run_ours, target, draft, method["batch"], **plan.options[name])
    target, draft = load(False)
    if args.hf:
        runs |= peers_of(target, draft)
    return target, runs
