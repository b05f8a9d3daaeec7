"""Does drafting pay here? What passes cost on this machine, and what they have to bring in.

A step with a draft takes k times as long as one of the target alone, so it *needs* k tokens. What
it *has* is its MAT, and has / needs is the speedup.
"""

from argparse import Namespace

import torch
from torch.utils.benchmark import Timer

from ..checkpoint import placement
from ..model import Llama
from ..pair.loading import Pair
from .measure import compare_methods
from .methods import choose_default, load_methods
from .specbench import corpus_questions
from .tables import table

ROWS = 1, 2, 4, 8, 16, 64  # of the passes that are timed
CONTEXT = 200  # cached positions that they attend to
SECONDS = 0.2  # that one of them is timed
Costs = dict[str, dict[str, float]]  # {number of rows: {"ms": ..., "ratio": ...}}


def main(args: Namespace) -> None:
    """Print what passes cost, and what methods need and have."""
    chosen = {name: choose_default(name, args) for name in args.target}
    questions = corpus_questions(args.limit, turns=1)
    for name, choices in chosen.items():
        pairs = load_methods(choices, args)
        print(f"{name} on {placement(pairs['ar'].target)}\n")
        legend = "passes by number of rows: ms / times one row of the target"
        print(table(legend, pass_costs(pairs), ("ms", "ratio")), flush=True)
        for comparison in compare_methods(name, pairs, questions, args, peers={}):
            columns = {"needs / has / speedup": comparison.by_group["overall"]}
            legend = f"{comparison.title}: tokens per step"
            print(table(legend, columns, ("needs", "mat", "speedup")), flush=True)


def pass_costs(pairs: dict[str, Pair]) -> dict[str, Costs]:
    """What passes of the target and of the draft up to each exit cost."""
    target = pairs["ar"].target
    costs = {"target": time_passes(target, target.config.num_hidden_layers)}
    together = list(pairs.values())[-1]  # all exits
    for each in filter(None, together.options.exits):  # exit 0 has no layers
        costs[f"exit {each}"] = time_passes(together.draft, each)
    one = costs["target"]["1"]["ms"]
    for column in costs.values():
        for cell in column.values():
            cell["ratio"] = cell["ms"] / one
    return costs


@torch.inference_mode()
def time_passes(model: Llama, layers: int) -> Costs:
    """Median "ms" of a pass over each of ROWS rows through so many ``layers``, and the head."""
    context = min(CONTEXT, model.config.max_position_embeddings - ROWS[-1])
    cache = model.new_cache(end=layers)
    cache.extend(context)

    def run(rows: int) -> None:
        tokens = torch.zeros(1, rows, dtype=torch.long, device=model.device)
        hidden = model.embed(tokens)  # (1, rows, hidden)
        mask = hidden.new_full((rows, context + rows), -torch.inf).triu(context + 1)
        hidden = model.run_layers(hidden, end=layers, mask=mask, cache=cache)
        model.logits(hidden[0])
        cache.length = context

    column: Costs = {}
    for rows in ROWS:
        timer = Timer("run(rows)", globals=locals(), num_threads=torch.get_num_threads())
        seconds = timer.blocked_autorange(min_run_time=SECONDS).median
        column[str(rows)] = {"ms": 1000 * seconds}
    return column
