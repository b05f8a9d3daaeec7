"""Every method on every target, as speedups over the target alone in the same run."""

import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import product
from pathlib import Path

import torch

from ..checkpoint import load_model, placement
from ..checkpoint.config import read_config, read_drafting
from ..checkpoint.names import (
    draft_path,
    find_family_draft,
    find_target,
    is_same_folder,
    refuse_whole_target,
)
from ..checkpoint.tokenizer import Tokenizer
from ..files import refuse_existing, refuse_other_than_file
from ..model import Llama, LlamaConfig
from ..ngram.datastore import find_datastore
from ..options import Options, resolve
from .check import check
from .measure import Question, Record, Run, answer, measure, run_ours
from .methods import Method, default_methods, parse_method
from .peers import ASSISTED, peers_of
from .plot import write_plot
from .specbench import corpus_questions, model_id, read_questions, write_answers
from .tables import (
    DETAILS,
    Result,
    acceptance_table,
    compare_with_best,
    keep_best,
    render,
    summarise,
    table,
)


@dataclass
class Plan:
    """What is measured on one target, the ``methods`` by the names of their rows."""

    name: str
    folder: Path
    config: LlamaConfig
    tokenizer: Tokenizer
    methods: dict[str, Method]


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
    methods = choose_methods(args, folders[0])
    choose = partial(read_questions, args.questions) if args.questions else corpus_questions
    questions = choose(args.limit)
    temperatures = list(dict.fromkeys(args.temperature))
    plans = [read_plan(name, folder, methods) for folder, name in short_names(folders)]
    for plan in plans:
        refuse_unfit(plan, questions, args)
    if args.out:
        refuse_shared_files(plans, temperatures)
    print(f"torch {torch.__version__}, {len(questions)} questions, {args.rounds} rounds\n")
    result: Result = {}
    results: dict[str, Result] = {}
    code = 0
    for plan in plans:
        load = cache(partial(load_model, device=args.device, dtype=args.dtype))
        target = load(plan.folder, graphs=False)
        runs = runs_of(plan, load)
        if args.hf:
            drafts = [method.draft for method in methods.values() if method.draft is not None]
            others = [draft for draft in drafts if not is_same_folder(draft, plan.folder)]
            plain = partial(load, quick=False)  # theirs take the weights as they are stored
            draft = load_draft(plan, others[0], plain, graphs=False) if others else None
            runs |= peers_of(plain(plan.folder), draft)
        prompt_format = plan.tokenizer.prompt_format.name
        print(f"{plan.name} on {placement(target)}\nprompt format: {prompt_format}\n")
        for column, records in measure_plan(plan, runs, questions, temperatures, args):
            by_group = summarise(records)
            results[column] = by_group
            result[column] = by_group["overall"]
            # Columns that are named after measures show these.
            details = by_group | dict.fromkeys(DETAILS, by_group["overall"])
            lines = render(table(details, ("speedup", "mat")), args.markdown)
            print(f"{column}: speedup / mean accepted tokens\n\n{lines}\n", flush=True)
            drafted = acceptance_table(records)
            if len(drafted) > 1:
                title = "accepted by position; by exit asked / sure / drafted / accepted"
                print(f"{column}: {title}\n\n{render(drafted, args.markdown)}\n", flush=True)
            if args.out:
                write_answers(args.out, column, records)
            if args.check:
                precise = load(plan.folder, dtype="float64")  # once for all temperatures
                code = max(code, check(column, target, precise, methods, records))
    result, chosen = keep_best(result, ASSISTED)
    print(render(table(result, ("speedup", "mat"), means=True), args.markdown))
    for title, setting in chosen.items():
        print(f"{title}: the best setting is {setting}")
    single_exits = find_single_exits(methods)
    for name, method in methods.items():
        if single_exits and is_plain(method) and method.options["method"] == "s2d":
            lines = render(compare_with_best(results, single_exits, name), args.markdown)
            print(f"\nthe best single exit, {name}, and {name} / best: speedups\n\n{lines}")
    if args.plot:
        write_plot(args.plot, result, across=len(temperatures))
    return code


def choose_methods(args: Namespace, folder: Path) -> dict[str, Method]:
    """The methods by their names; by default with --draft, or the draft next to a ``folder``."""
    draft = args.draft
    if draft is None:
        draft = find_family_draft(folder, read_config(folder))
    else:
        draft = find_target(str(draft))
    names = ["ar", *(args.methods or default_methods(draft))]
    names += [f"{name}:graphs" for name in names if args.graphs]
    names += [f"{name}:batch={batch}" for batch in args.batch or () for name in names]
    # If a method needs a draft where there is none, it is missed in the place where it would be.
    return {name: parse_method(name, draft or draft_path(folder)) for name in names}


def is_plain(method: Method) -> bool:
    """Whether it answers one prompt at a time, and not by CUDA graphs."""
    return method.batch == 1 and not method.graphs


def find_single_exits(methods: dict[str, Method]) -> dict[str, int]:
    """{name: exit} of the ``methods`` in which one exit of a draft model drafts chains alone."""
    found = {}
    for name, method in methods.items():
        alone = method.options["method"] == "sd" and method.draft is not None
        if alone and is_plain(method):
            exits = method.options.get("exits") or read_drafting(method.draft).exits
            found[name] = exits[-1]
    return found


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


def refuse_shared_files(plans: list[Plan], temperatures: list[float]) -> None:
    """Raise ValueError if two answer files would have one name."""
    seen = set()
    for plan in plans:
        for temperature, method in product(temperatures, plan.methods):
            name = model_id(column_of(plan.name, temperature), method)
            if name in seen:
                raise ValueError(f"--out: two answer files would be called {name}; rename a folder")
            seen.add(name)


def read_plan(name: str, folder: Path, methods: dict[str, Method]) -> Plan:
    """Read what is small in the ``folder`` of a target, and its datastore if a method needs it."""
    config = read_config(folder)
    ready = dict(methods)
    for key, method in methods.items():
        if 0 in method.options.get("exits", ()):
            datastore = {"datastore": find_datastore(folder, config)}
            ready[key] = replace(method, options=method.options | datastore)
    return Plan(name, folder, config, Tokenizer(folder, config.vocab_size), ready)


def refuse_unfit(plan: Plan, questions: list[Question], args: Namespace) -> None:
    """Raise ValueError for what cannot be measured."""
    prompts = [plan.tokenizer.encode_prompt(question["turns"][:1]) for question in questions]
    if all(len(prompt) >= plan.config.max_position_embeddings for prompt in prompts):
        raise ValueError(f"no question fits the context of {plan.folder}")
    for (name, method), temperature in product(plan.methods.items(), args.temperature):
        draft = ()
        if method.draft is not None:
            draft = read_config(method.draft), read_drafting(method.draft)
        options = method.options | {"temperature": temperature}
        try:
            if method.draft is not None:
                refuse_whole_target(plan.folder, method.draft, options.get("exits"))
            resolve(Options(**options, max_new_tokens=args.max_new_tokens), plan.config, *draft)
        except ValueError as error:
            raise ValueError(f"{plan.folder}, {name}: {error}") from None


def runs_of(plan: Plan, load: Callable[..., Llama]) -> dict[str, Run]:
    """{name: run} of the methods of a ``plan``; ``load`` loads each model once."""
    runs = {}
    for name, method in plan.methods.items():
        models = {"target": load(plan.folder, graphs=method.graphs), "draft": None}
        if method.draft is not None:
            models["draft"] = load_draft(plan, method.draft, load, method.graphs)
        runs[name] = partial(run_ours, batch=method.batch, **models, **method.options)
    return runs


def load_draft(plan: Plan, draft: Path, load: Callable[..., Llama], graphs: bool) -> Llama:
    """The model in the folder ``draft``, up to the last exit that any method of a ``plan`` uses.

    A target that drafts for itself is loaded once.
    """
    if is_same_folder(draft, plan.folder):
        return load(plan.folder, graphs=graphs)
    last_exits = []
    for method in plan.methods.values():
        if method.draft == draft:
            exits = method.options.get("exits") or read_drafting(draft).exits
            last_exits.append(exits[-1])
    return load(draft, graphs=graphs, layers=max(last_exits))


def measure_plan(
    plan: Plan,
    runs: dict[str, Run],
    questions: list[Question],
    temperatures: Iterable[float],
    args: Namespace,
) -> Iterator[tuple[str, list[Record]]]:
    """Yield (column, records) for each of ``temperatures``, over ``args.rounds``."""
    at_once = max(method.batch for method in plan.methods.values())
    ask = partial(answer, plan.tokenizer, plan.config.max_position_embeddings)
    for temperature in temperatures:
        column = column_of(plan.name, temperature)
        options = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
        ready = {name: partial(run, **options) for name, run in runs.items()}
        yield column, measure(ready, questions, args.rounds, column, ask, at_once)
