"""Does drafting pay here? What passes cost on this machine, and what they have to bring in.

A step with a draft takes k times as long as one of the target alone, so it *needs* k tokens. What
it *has* is its MAT, and has / needs is the speedup.
"""

from argparse import Namespace

import torch
from torch.utils.benchmark import Timer

from ..checkpoint import placement
from ..checkpoint.names import find_target
from ..checkpoint.pair import choose_pair
from ..model import Llama
from ..options import Options
from .comparison import choose_methods, compare_methods, load_methods
from .methods import default_methods, parse_method
from .specbench import corpus_questions
from .tables import render, table

ROWS = 1, 2, 4, 8, 16, 64  # of the passes that are timed
CONTEXT = 200  # cached positions that they attend to
SECONDS = 0.2  # that one of them is timed


def measure_costs(args: Namespace) -> None:
    """Print what passes cost, and what methods need and have."""
    folder = find_target(args.target)
    choice = choose_pair(folder, args.draft, Options(exits=args.exits))
    names = ["ar", *default_methods(choice.found.draft, choice.options.exits)]
    methods = {name: parse_method(name, args.draft) for name in names}
    pairs = load_methods(choose_methods(folder, methods), args.device, args.dtype)
    target = pairs["ar"].target
    print(f"{folder.name} on {placement(target)}\n")
    costs = {"target": time_passes(target, target.config.num_hidden_layers)}
    for each in filter(None, choice.options.exits):  # exit 0 has no layers
        costs[f"exit {each}"] = time_passes(pairs[names[-1]].draft, each)
    print(render(table_of_costs(costs)), flush=True)
    questions = corpus_questions(args.limit, turns=1)
    for comparison in compare_methods(folder.name, pairs, questions, args, peers={}):
        cells = comparison.by_group["overall"]
        lines = table({"needs / has / speedup": cells}, ("needs", "mat", "speedup"))
        print(f"\n{comparison.title}: tokens per step\n\n{render(lines)}", flush=True)


@torch.inference_mode()
def time_passes(model: Llama, layers: int) -> dict[int, float]:
    """Median seconds of a pass over each of ROWS rows through so many ``layers``, and the head."""
    context = min(CONTEXT, model.config.max_position_embeddings - ROWS[-1])
    cache = model.new_cache(context + ROWS[-1], end=layers)
    cache.advance(context)

    def run(rows: int) -> None:
        tokens = torch.zeros(1, rows, dtype=torch.long, device=model.device)
        hidden = model.embed(tokens)  # (1, rows, hidden)
        mask = hidden.new_full((rows, context + rows), -torch.inf).triu(context + 1)
        hidden = model.run_layers(hidden, end=layers, mask=mask, cache=cache)
        model.logits(hidden[0])
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
