"""Does drafting pay here? What passes cost on this machine, and what they have to bring in.

A step with a draft takes k times as long as one of the target alone, so it *needs* k tokens. What
it *has* is its MAT, and has / needs is the speedup.
"""

from argparse import Namespace
from collections.abc import Iterable
from functools import partial

import torch
from torch.utils.benchmark import Timer

from ..checkpoint import placement
from ..checkpoint.names import find_target
from ..checkpoint.pair import load_pair
from ..model import Llama
from ..options import Options
from .measure import run_ours
from .methods import parse_method
from .specbench import corpus_questions
from .speed import load_pairs, measure_runs
from .tables import Cell, render, summarise

ROWS = 1, 2, 4, 8, 16, 64  # of the passes that are timed
CONTEXT = 200  # cached positions that they attend to
SECONDS = 0.2  # that one of them is timed


def report(args: Namespace) -> None:
    """Print what passes cost, and what methods need and have."""
    folder = find_target(args.target)
    asked = Options(exits=args.exits)
    pair = load_pair(folder, args.draft, asked, args.device, args.dtype)
    exits = pair.options.exits
    print(f"{folder.name} on {placement(pair.target)}\ndraft: {pair.found.words}\n")
    costs = {"target": time_passes(pair.target, pair.target.config.num_hidden_layers)}
    for each in filter(None, exits):  # exit 0 has no layers
        costs[f"exit {each}"] = time_passes(pair.draft, each)
    print(render(table_of_costs(costs), args.markdown), flush=True)

    names = name_methods(exits)
    pairs = load_pairs(folder, {name: parse_method(name, args.draft) for name in names}, args)
    runs = {name: partial(run_ours, pair=each) for name, each in pairs.items()}
    questions = [each | {"turns": each["turns"][:1]} for each in corpus_questions(args.limit)]
    for temperature in args.temperature:
        options = dict(temperature=temperature, max_new_tokens=args.max_new_tokens)
        column = f"T={temperature:g}"
        records = measure_runs(pair, runs, questions, args.rounds, column, options)
        cells = summarise(records)["overall"]
        print(f"\n{column}\n\n{render(table_of_methods(cells), args.markdown)}\n")
        print(verdict(cells), flush=True)


def name_methods(exits: Iterable[int]) -> list[str]:
    """The target alone, each exit alone, and all of them together."""
    together = ",".join(map(str, exits))
    chains = [f"sd:exits={each}" for each in exits]
    if len(chains) > 1:
        chains.append(f"s2d:exits={together}")
    return ["ar", *chains, f"s2d-tree:exits={together}"]


@torch.inference_mode()
def time_passes(model: Llama, layers: int) -> dict[int, float]:
    """Median seconds of a pass over each of ROWS rows through so many ``layers``, and the head."""
    context = min(CONTEXT, model.config.max_position_embeddings - ROWS[-1])
    cache = model.new_cache(context + ROWS[-1], end=layers)
    cache.advance(context)

    def run(rows: int) -> None:
        hidden = model.embed(torch.zeros(1, rows, dtype=torch.long, device=model.device))
        mask = hidden.new_full((rows, context + rows), -torch.inf).triu(context + 1)
        model.logits(model.run_layers(hidden, end=layers, mask=mask, cache=cache)[0])
        cache.keep(context, [])

    seconds = {}
    for rows in ROWS:
        timer = Timer("run(rows)", globals=locals(), num_threads=torch.get_num_threads())
        seconds[rows] = timer.blocked_autorange(min_run_time=SECONDS).median
    return seconds


def table_of_costs(costs: dict[str, dict[int, float]]) -> list[list[str]]:
    """Milliseconds of passes, and how many times as long as one row of the target they take."""
    one = costs["target"][1]
    lines = [["rows of a pass", *map(str, ROWS)]]
    for name, curve in costs.items():
        cells = [f"{1000 * seconds:.2f} / {seconds / one:.2f}" for seconds in curve.values()]
        lines.append([f"{name}: ms / of one row", *cells])
    return lines


def table_of_methods(cells: dict[str, Cell]) -> list[list[str]]:
    """Tokens per step that each method needs, those that it has, and their ratio, the speedup."""
    lines = [["tokens per step", "needs", "has", "speedup", "the draft's share of the time"]]
    for name, cell in cells.items():
        shown = cell["mat"] / cell["speedup"], cell["mat"], cell["speedup"]
        lines.append([name, *(f"{each:.2f}" for each in shown), f"{cell['draft time']:.0%}"])
    return lines


def verdict(cells: dict[str, Cell]) -> str:
    """One line: which method is fastest, and whether it pays."""
    name = max((each for each in cells if each != "ar"), key=lambda each: cells[each]["speedup"])
    speedup = cells[name]["speedup"]
    pays = "it pays" if speedup > 1 else "it does not pay"
    return f"{pays}: the fastest is {name}, {speedup:.2f} times as fast as the target alone"
