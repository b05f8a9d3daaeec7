"""Does drafting pay here? What passes cost on this machine, and what they have to bring in.

A step with a draft takes longer than one of the target alone, so it *needs* more tokens. What it
*has* is measured on a few questions. From costs and acceptance a model (chains.py) also finds the
best exits, thresholds, length and stop of a chain, which is then measured next to the others.
"""

import time
from argparse import Namespace
from collections.abc import Callable
from functools import cache, partial
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from ..checkpoint import load_model, placement
from ..checkpoint.config import read_config, read_drafting
from ..checkpoint.names import draft_path, find_family_draft, find_target, refuse_whole_target
from ..decoder import check_finite, inference
from ..draft import Exit, SortedDraft
from ..generation import generate, settings_for, start
from ..model import Llama
from ..ngram.datastore import find_datastore
from ..notices import progress
from ..options import Options
from ..rules import Rule
from ..tree import FixedShape, Tree
from .chains import ALONE, Chain, Costs, Curve, Guess, Outcome, Segment, Text, find_best, simulate
from .methods import Method, parse_method
from .specbench import corpus_questions
from .speed import measure_plan, read_plan, refuse_unfit, runs_of
from .tables import Cell, render, summarise

ROWS = 1, 2, 4, 8, 16, 64  # of the passes that are timed
LEVELS = 8  # of the chains that are timed
TURNS = 9  # of timing; the fastest call counts


def report(args: Namespace) -> None:
    """Print what passes cost, what exits know, and what methods need and have."""
    folder = find_target(args.target)
    draft_folder = args.draft
    if draft_folder is None:
        draft_folder = find_family_draft(folder, read_config(folder))
    else:
        draft_folder = find_target(str(draft_folder))
        refuse_whole_target(folder, draft_folder, args.exits)
    exits = choose_exits(args.exits, draft_folder)
    draft_folder = draft_folder or draft_path(folder)  # if it is needed, it is missed there
    graphs = ":graphs" if args.graphs else ""
    methods = {name: parse_method(name + graphs, draft_folder) for name in name_methods(exits)}
    plan = read_plan(folder.name, folder, methods)
    questions = corpus_questions(args.limit)
    questions = [question | {"turns": question["turns"][:1]} for question in questions]
    refuse_unfit(plan, questions, args)

    load = cache(partial(load_model, device=args.device, dtype=args.dtype))
    runs = runs_of(plan, load)
    target = load(folder, graphs=args.graphs)
    drafts = [run.keywords["draft"] for run in runs.values()]
    draft = next((each for each in drafts if each is not None), None)
    print(f"{folder.name}{', by CUDA graphs,' if args.graphs else ''} on {placement(target)}")
    print(f"draft: {'the n-grams of the text' if draft is None else draft_folder}")

    prompts = [plan.tokenizer.encode_prompt(question["turns"]) for question in questions]
    datastore = find_datastore(folder, target.config) if 0 in exits else None
    for temperature in args.temperature:
        options = dict(
            temperature=temperature, max_new_tokens=args.max_new_tokens, datastore=datastore
        )
        texts, costs = examine(target, draft, exits, prompts, options)
        print(f"\nT={temperature:g}, {len(texts)} questions\n")
        print(render(table_of_costs(costs), args.markdown))
        print(f"\n{render(table_of_exits(texts, costs), args.markdown)}\n", flush=True)

        best = name_chain(find_best(exits, texts, costs))
        methods = plan.methods | {best: parse_method(best + graphs, draft_folder)}
        measured = read_plan(folder.name, folder, methods)
        runs = runs_of(measured, load)
        [(_, records)] = measure_plan(measured, runs, questions, (temperature,), args)
        cells = summarise(records)["overall"]
        chains = {name: chain_of(each, target, draft) for name, each in measured.methods.items()}
        outcomes = {
            name: simulate(chain, texts, costs)
            for name, chain in chains.items()
            if chain is not None
        }
        print(render(table_of_methods(cells, outcomes), args.markdown))
        print(f"\n{verdict(cells, best)}", flush=True)


def choose_exits(asked: tuple[int, ...] | None, draft: Path | None) -> tuple[int, ...]:
    """The exits that may draft: those ``asked`` for, the draft's own, or exit 0 if it is alone."""
    if asked is not None:
        return asked
    return (0,) if draft is None else read_drafting(draft).exits


def name_methods(exits: tuple[int, ...]) -> list[str]:
    """The methods to measure: each exit alone, and all of them together."""
    together = ",".join(map(str, exits))
    names = ["ar", *(f"sd:exits={each}" for each in exits)]
    if exits != (0,):
        names.append(f"mcsd:exits={exits[-1]}")
    if len(exits) > 1:
        names.append(f"s2d:exits={together}")
    return [*names, f"s2d-tree:exits={together}"]


def name_chain(chain: Chain) -> str:
    """The method that drafts a ``chain``."""
    exits = ",".join(map(str, chain.exits))
    thresholds = ",".join(f"{each:g}" for each in chain.thresholds)
    shape = f"draft_length={chain.length}:stop={chain.stop:g}"
    return f"s2d:exits={exits}:thresholds={thresholds}:{shape}"


def chain_of(method: Method, target: Llama, draft: Llama | None) -> Chain | None:
    """What a ``method`` drafts, if that is chains."""
    settings = settings_for(target, draft, Options(**method.options))
    if settings.method == "ar":
        return ALONE
    shape = settings.shape
    if isinstance(shape, FixedShape) and max(shape.widths) == 1:
        return Chain(settings.exits, settings.thresholds, shape.depth, settings.stop)
    return None


def examine(
    target: Llama,
    draft: Llama | None,
    exits: tuple[int, ...],
    prompts: list[list[int]],
    options: dict[str, Any],
) -> tuple[list[Text], Costs]:
    """What each of ``exits`` says about the target's own answers, and what passes cost.

    ``options`` are options of ``generate``, the same for the target alone and with a draft.
    """
    drafting = options | dict(method="s2d", exits=exits, draft_length=LEVELS)
    room = target.config.max_position_embeddings
    if draft is not None:
        room = min(room, draft.config.max_position_embeddings)
    texts = []
    rests = []
    context: list[int] = []
    for prompt in progress(prompts, "what exits know: questions", len(prompts)):
        if len(prompt) >= room:
            continue
        answer = generate(target, prompt, method="ar", **options)
        stats = answer.stats
        rests.append((stats.seconds - stats.target_seconds) / stats.steps)
        context = (prompt + answer.tokens)[:room]
        decoder = start(target, prompt, draft, **drafting)
        guesses = judge(decoder.drafter.exits, decoder.rule, context, len(prompt))
        texts.append(Text(len(prompt), guesses))
    if not texts:
        raise ValueError(f"no question fits the draft's context of {room} tokens")
    context = context[: max(2, room - LEVELS)]  # the draft has positions for what is timed
    segments = time_segments(target, draft, exits, context, drafting)
    decoder = start(target, context[:-1], draft, **drafting | dict(exits=exits[:1], stop=0.0))
    level = time_level(decoder.drafter, decoder.rule, context, target.device)
    costs = Costs(
        target=time_target(target, context),
        exits=segments,
        level=max(0.0, level - segments[0, exits[0]][1]),
        rest=min(rests),
    )
    return texts, costs


@torch.inference_mode()
def judge(
    exits: list[Exit], rule: Rule, context: list[int], prompt_length: int
) -> list[dict[int, Guess]]:
    """What each of ``exits`` says about every token of ``context`` after the prompt."""
    guesses = []
    for place in range(prompt_length, len(context)):
        tree = empty_tree(context[:place], depth=1)
        found = {}
        for each in exits:
            confidence, token, prob = guess(each, rule, tree)
            found[each.exit_layer] = Guess(confidence, prob, right=token == context[place])
        guesses.append(found)
    return guesses


def guess(used: Exit, rule: Rule, tree: Tree) -> tuple[float, int | None, float]:
    """(confidence, token, the estimate that it is accepted) after the context of ``tree``.

    The token is None, and the others are 0, if the exit knows nothing.
    """
    prediction = used.predict(tree)
    proposal = rule.propose(prediction, 1, tree.next_positions(tree.frontier))
    if not proposal.tokens or not proposal.tokens[0]:
        return 0.0, None, 0.0
    return prediction.confidence, proposal.tokens[0][0], proposal.probs[0][0]


def empty_tree(context: list[int], depth: int) -> Tree:
    return Tree(context, FixedShape((1,) * depth), max_levels=depth)


def time_target(target: Llama, context: list[int]) -> Curve:
    """Seconds of target passes over each of ROWS rows, as in a step of the decoder.

    They read the last token of ``context`` and drafted tokens; no more than fit.
    """
    size = target.config.max_position_embeddings
    all_rows = [rows for rows in ROWS if rows <= size // 2]
    context = context[: size - all_rows[-1]]
    decoder = start(target, context, method="ar", max_new_tokens=all_rows[-1])

    def prepare(rows: int) -> Tree:
        tree = empty_tree(context, depth=rows - 1)
        while tree.frontier:
            tree.add_level([[context[0]]], [[1.0]], exit_layer=None)
        decoder.cache.keep(len(context) - 1, [])
        return tree

    with inference(target.device):
        decoder.run_target(empty_tree(context, depth=0))
        return time_each(
            all_rows, prepare, lambda tree: check_finite(decoder.run_target(tree)), target.device
        )


def time_each(
    cases: list[int],
    prepare: Callable[[int], Tree],
    run: Callable[[Tree], Any],
    device: torch.device,
) -> Curve:
    """{case: the fewest seconds of ``run(prepare(case))``}; what ``prepare`` takes is not timed."""
    seconds: dict[int, list[float]] = {case: [] for case in cases}
    for turn in range(1 + TURNS):
        for case in cases:  # in turns: a slow moment hits all alike
            tree = prepare(case)
            wait_for(device)
            began = time.perf_counter()
            run(tree)
            wait_for(device)
            if turn > 0:  # the first one warms up
                seconds[case].append(time.perf_counter() - began)
    return {case: min(each) for case, each in seconds.items()}


def time_segments(
    target: Llama,
    draft: Llama | None,
    exits: tuple[int, ...],
    context: list[int],
    options: dict[str, Any],
) -> dict[Segment, Curve]:
    """By segment between any two of ``exits``, seconds of reading ROWS rows and proposing a token.

    They are the last rows of ``context``; those that do not fit are left out.
    """
    curves = {}
    between = [pair for pair in combinations(exits, 2) if pair[0] > 0]
    for first, last in [(0, each) for each in exits] + between:
        asked = (last,) if first == 0 else (first, last)
        decoder = start(target, context[:-1], draft, **options | {"exits": asked})
        curves[first, last] = time_exit(decoder.drafter.exits, decoder.rule, context, target.device)
    return curves


def time_exit(exits: list[Exit], rule: Rule, context: list[int], device: torch.device) -> Curve:
    """Seconds of the last of ``exits``, see ``time_segments``."""
    all_rows = [rows for rows in ROWS if rows <= len(context)]
    last = exits[-1]

    def prepare(rows: int) -> Tree:
        last.keep(len(context) - rows, [])
        return empty_tree(context, depth=1)

    with inference(device):
        for each in exits:
            guess(each, rule, empty_tree(context, depth=1))
        return time_each(all_rows, prepare, lambda tree: guess(last, rule, tree), device)


def time_level(drafter: SortedDraft, rule: Rule, context: list[int], device: torch.device) -> float:
    """Seconds of a drafted token in chains of LEVELS after ``context``."""

    def prepare(levels: int) -> Tree:
        for each in drafter.exits:
            each.keep(len(context) - 1, [])
        return empty_tree(context, levels)

    with inference(device):
        tree = prepare(LEVELS)
        drafter.grow(tree, rule)
        seconds = time_each([LEVELS], prepare, lambda each: drafter.grow(each, rule), device)
        return seconds[LEVELS] / max(1, tree.level_count)


def wait_for(device: torch.device) -> None:
    """Return when a GPU has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def table_of_costs(costs: Costs) -> list[list[str]]:
    """Milliseconds of passes, and how many times as long as one row of the target they take."""
    one = costs.target[1]
    lines = [["rows of a pass", *map(str, costs.target)]]
    curves = {"target": costs.target}
    for (first, last), curve in costs.exits.items():
        curves[f"exit {last}" if first == 0 else f"exit {last} from exit {first}"] = curve
    for name, curve in curves.items():
        cells = [f"{1000 * seconds:.2f} / {seconds / one:.2f}" for seconds in curve.values()]
        lines.append([f"{name}: ms / of one row", *cells])
    empty = [""] * (len(costs.target) - 1)
    for name, seconds in (("a drafted token besides", costs.level), ("a step besides", costs.rest)):
        cell = f"{1000 * seconds:.2f} / {seconds / one:.2f}"
        lines.append([f"{name}: ms / of one row", cell, *empty])
    return lines


def table_of_exits(texts: list[Text], costs: Costs) -> list[list[str]]:
    """How often an exit is right, and how sure it is, over all tokens of the target's answers."""
    lines = [["alone", "right", "mean confidence", "a token costs, of a target pass"]]
    for first, last in costs.exits:
        if first == 0:
            guesses = [by_exit[last] for text in texts for by_exit in text.guesses]
            right = fmean(each.right for each in guesses)
            confidence = fmean(each.confidence for each in guesses)
            share = costs.exits[first, last][1] / costs.target[1]
            lines.append([f"exit {last}", f"{right:.0%}", f"{confidence:.0%}", f"{share:.2f}"])
    return lines


def table_of_methods(cells: dict[str, Cell], outcomes: dict[str, Outcome]) -> list[list[str]]:
    """Tokens per step that each method needs, those that it has, and their ratio, the speedup."""
    lines = [
        ["tokens per step", "needs", "has", "speedup", "by the model: needs", "has", "speedup"]
    ]
    alone = outcomes["ar"]
    for name, cell in cells.items():
        measured = [cell["mat"] / cell["speedup"], cell["mat"], cell["speedup"]]
        line = [name, *(f"{each:.2f}" for each in measured)]
        if name in outcomes:
            own = outcomes[name]
            speedup = own.tokens_per_second / alone.tokens_per_second
            modelled = [own.tokens_per_step / speedup, own.tokens_per_step, speedup]
            line += [f"{each:.2f}" for each in modelled]
        else:
            line += [""] * 3  # the model knows chains
        lines.append(line)
    return lines


def verdict(cells: dict[str, Cell], best: str) -> str:
    """One line: which method is fastest, whether it pays, and the best chain by the model."""
    drafting = [name for name in cells if name != "ar"]
    name = max(drafting, key=lambda each: cells[each]["speedup"])
    speedup = cells[name]["speedup"]
    pays = "it pays" if speedup > 1 else "it does not pay"
    return (
        f"{pays}: the fastest is {name}, {speedup:.2f} times as fast as the target alone; "
        f"best by the model is {best}, measured {cells[best]['speedup']:.2f}"
    )
