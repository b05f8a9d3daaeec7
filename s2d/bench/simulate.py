"""Drafting that tunes itself on machines that are not here: real answers, timed by a table of costs instead of a clock.

    python -m s2d.bench simulate --target weights/mini-13b                 # on made-up machines, beside fixed settings
    python -m s2d.bench simulate --target weights/mini-13b --costs FILE    # by a table of your own, as --costs keeps it
    python -m s2d.bench simulate --target weights/mini-13b --ablations     # what each of its decisions is good for

What is drafted and accepted is real; only milliseconds are looked up. So nothing is noise, and a table may be any machine's.
"""

from collections import Counter
from itertools import product
from pathlib import Path

from ..chat import chat_template
from ..decode import generate
from ..program import Parser
from ..tokenizer import Tokenizer
from ..tune import read_priors
from ..tune.chances import Chances
from ..tune.costs import LARGEST, ROWS, Costs, read_costs
from ..tune.tuner import Tuner
from ..weights import load_model
from ..weights.get import draft_beside
from .methods import parse_method
from .specbench import corpus_questions, read_questions
from .tables import render


def machine(first, row, segment, segment_row, look, free, step):
    """Costs of a machine on which ``free`` rows cost what one does and each further one ``row`` ms; a draft's segments alike."""

    def line(one, more):
        return [[one + more * max(0, rows - free) for rows in ROWS]] * 2

    return lambda exits: Costs("", [0, 1024], line(first, row), [[each] * exits for each in line(segment, segment_row)],
                               line(look, segment_row / 4), 0.0, 0.0, [step, step])  # fmt: skip


MACHINES = {
    "two cores": machine(5.0, 0.25, 0.3, 0.03, 0.2, 1, 0.2),
    "two cores, compiled": machine(1.5, 0.3, 0.1, 0.04, 0.05, 1, 0.2),
    "GPU, 7B": machine(12.0, 0.02, 0.8, 0.01, 0.2, 64, 0.5),
    "GPU, 70B": machine(60.0, 0.1, 0.8, 0.01, 0.2, 64, 0.5),
    "slow draft": machine(5.0, 0.25, 1.8, 0.2, 0.2, 1, 0.2),
}


class Metered:
    """A model that notes each pass it makes, a look at an exit as one from 0 to 0, and is otherwise the model."""

    def __init__(self, model):
        self.model, self.passes = model, []

    def __getattr__(self, name):
        return getattr(self.model, name)

    def run_layers(self, hidden, start=0, stop=None, *rest, **more):
        self.passes.append((start, stop, hidden.shape[1]))
        return self.model.run_layers(hidden, start, stop, *rest, **more)

    def draft_logits(self, hidden):
        self.passes.append((0, 0, len(hidden)))
        return self.model.draft_logits(hidden)


def run_through(target, draft, prompts, temperature, max_new_tokens, options):
    """One record a step.

    Each is (tokens emitted, context, rows the target saw, the draft's passes as (start, stop, rows), levels, exits, plan).
    """
    records = []
    for seed, prompt in enumerate(prompts):
        metered = Metered(draft)
        steps = []

        def note(step):
            proposal = step.proposal
            steps.append((len(step.tokens), step.n, 1 + len(proposal.tree), metered.passes, proposal.level_sizes,  # noqa: B023
                          proposal.exits, proposal.plan))  # fmt: skip
            metered.passes = []  # noqa: B023 - used at once

        generate(target, prompt, draft=metered, temperature=temperature, seed=seed, max_new_tokens=max_new_tokens,
                 on_step=note, **options)  # fmt: skip
        records += steps
    return records


def speed(records, costs, exits):
    """Tokens a millisecond, by the table, but for the target's reading of prompts. A pass is charged for each of its segments."""
    tables, tokens, milliseconds = {}, 0, 0.0
    for emitted, n, rows, passes, *_ in records:
        if n // 64 not in tables:
            tables[n // 64] = [table.tolist() for table in costs.at(n)]
        target, segments, look = tables[n // 64]
        draft = sum(segment[min(seen, LARGEST)] * max(1.0, seen / LARGEST) for start, stop, seen in passes
                    for segment, layer in zip(segments, exits) if start < layer <= stop)  # fmt: skip
        draft += sum(look[seen] for start, stop, seen in passes if stop == 0) + costs.start * bool(
            passes
        )
        tokens, milliseconds = tokens + emitted, milliseconds + target[rows] + draft + costs.step[0]
    return tokens / milliseconds


def fixed_settings(exits):
    """Some twenty settings that do not tune themselves: chains from each exit and from sorted ones, and trees."""
    chains = [
        f"sd:exits={e}:draft_length={n}:stop={s}"
        for e, (n, s) in product(exits, ((3, 0), (6, 0), (12, 0.5), (15, 0)))
    ]
    thresholds = [",".join([str(t)] * (len(exits) - 1) + ["0"]) for t in (0.5, 0.8, 0.95)]
    chains += [
        f"s2d:thresholds={t}:draft_length={n}:stop=0.5" for t, n in product(thresholds, (8, 15))
    ]
    return [
        *chains,
        *(f"s2d-tree:tree={shape}" for shape in ("2x4x6", "3x6x12", "4x8x24", "8x10x60")),
    ]


class OneExit(Tuner):
    """Without the choice of exits."""

    def __init__(self, last, *given):
        super().__init__(*given)
        self.last = last

    def skips(self, exit, *where):
        return exit < self.last

    def enough(self, exit, *said):
        super().enough(exit, *said)
        return exit == self.last


class EveryLook(Tuner):
    """Without passing by: it looks at every exit on its way."""

    def skips(self, exit, *where):
        return False


class OneWide(Tuner):
    """Without the choice of width: chains only."""

    def width(self, sure):
        return 1


class Trusting(Tuner):
    """Without counting: the draft's probabilities are taken at face value for ever."""

    def __init__(self, costs, exits, priors, vocabulary):
        super().__init__(costs, exits, None, vocabulary)

    def learn(self, slots, tokens, p=None):
        before, self.now = self.now, Chances(len(self.exits))
        super().learn(slots, tokens, p)
        self.now = before


def ablations(costs, machines, exits, *known):
    """{what is missing: a Tuner without it}."""
    without = {
        f"always exit {layer}": OneExit(last, costs, exits, *known)
        for last, layer in enumerate(exits)
    }
    without |= {"every look": EveryLook(costs, exits, *known), "chains only": OneWide(costs, exits, *known),
                "no counted chances": Trusting(costs, exits, *known), "chances counted from nothing": Tuner(costs, exits, None, known[1])}  # fmt: skip
    return without | {
        f"costs of: {name}": Tuner(other, exits, *known)
        for name, other in machines.items()
        if other is not costs
    }


class Simulation:
    """Real answers to the same prompts, drafted in many ways, and timed by tables."""

    def __init__(self, args):
        self.path, self.draft_path = args.target, args.draft or draft_beside(args.target)
        self.target, self.draft = (
            load_model(self.path, args.device),
            load_model(self.draft_path, args.device),
        )
        self.exits = self.draft.config.exit_layers or (self.draft.config.num_hidden_layers,)
        self.known = read_priors(self.draft, self.target, self.exits), self.draft.draft_vocabulary
        questions = (
            read_questions(args.questions, args.limit)
            if args.questions
            else corpus_questions("held-out", args.limit)
        )
        tokenizer, template = Tokenizer(self.path), chat_template(self.path)
        self.max_new_tokens, room = (
            args.max_new_tokens,
            self.target.config.max_position_embeddings - args.max_new_tokens,
        )
        self.prompts = [
            tokenizer.encode_chat(question["turns"][:1], template)[-room:] for question in questions
        ]

    def run(self, temperature, **options):
        return run_through(
            self.target, self.draft, self.prompts, temperature, self.max_new_tokens, options
        )

    def machines_table(self, temperature, machines):
        """Of each machine the best fixed setting beside ``auto``, what that chose, and what it expected."""
        fixed = {text: self.run(temperature, **parse_method(text, self.draft, self.draft_path, self.path)[1])
                 for text in fixed_settings(self.exits)}  # fmt: skip
        lines = [
            [
                "machine",
                "auto",
                "best fixed",
                "",
                "auto over it",
                "expected",
                "levels",
                "nodes",
                "exits",
            ]
        ]
        for name, costs in machines.items():
            alone = 1.0 / (costs.at(64)[0][1] + costs.step[0])
            speeds = {text: speed(records, costs, self.exits) for text, records in fixed.items()}
            best = max(speeds, key=speeds.get)
            records = self.run(
                temperature, method="auto", tuner=Tuner(costs, self.exits, *self.known)
            )
            own, chosen = (
                speed(records, costs, self.exits),
                Counter(layer for record in records for layer in record[5]),
            )
            plans = [record[6] for record in records]
            expected = sum(plan["expected_tokens"] for plan in plans) / sum(
                plan["expected_ms"] for plan in plans
            )
            lines.append([name, f"{own / alone:.2f}", best, f"{speeds[best] / alone:.2f}", f"{own / speeds[best]:.3f}",
                          f"{expected / own:.2f}", f"{sum(len(record[4]) for record in records) / len(records):.1f}",
                          f"{sum(record[2] - 1 for record in records) / len(records):.1f}",
                          " ".join(f"{layer}:{count / chosen.total():.0%}" for layer, count in sorted(chosen.items()))])  # fmt: skip
        return lines

    def ablations_table(self, temperature, machines):
        """How fast each machine is when something is missing, as a share of its speed with everything."""
        columns = []
        for costs in machines.values():
            tuners = ablations(costs, machines, self.exits, *self.known)
            full = Tuner(costs, self.exits, *self.known)
            speeds = {name: speed(self.run(temperature, method="auto", tuner=tuner), costs, self.exits)
                      for name, tuner in {"": full, **tuners}.items()}  # fmt: skip
            columns.append(
                {name: f"{own / speeds['']:.2f}" for name, own in speeds.items() if name}
            )
        names = dict.fromkeys(name for column in columns for name in column)
        return [
            ["", *machines],
            *([name, *(column.get(name, "") for column in columns)] for name in names),
        ]


def report(args):
    """Print a table for each temperature."""
    if min(args.limit, args.max_new_tokens) < 1:
        raise ValueError("--limit and --max-new-tokens must be at least 1")
    if args.costs and not args.costs.is_file():
        raise FileNotFoundError(
            f"no table of costs at {args.costs}; run.py --method auto --costs {args.costs} measures one"
        )
    simulation = Simulation(args)
    machines = {name: make(len(simulation.exits)) for name, make in MACHINES.items()}
    if args.costs:
        machines = {
            args.costs.name: read_costs(args.costs, len(simulation.exits)),
            **(machines if args.ablations else {}),
        }
    for temperature in args.temperature:
        make_table = simulation.ablations_table if args.ablations else simulation.machines_table
        what = (
            "speeds as shares of those with nothing missing"
            if args.ablations
            else "speedups over the target alone"
        )
        table = render(make_table(temperature, machines), args.markdown)
        print(
            f"T = {temperature:g}, {len(simulation.prompts)} answers: {what}\n\n{table}\n",
            flush=True,
        )


def temperatures(text):
    return [float(temperature) for temperature in text.split(",")]


def parse(arguments):
    parser = Parser(prog="bench simulate", description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--draft", type=Path, help="default: the one beside the target")
    parser.add_argument(
        "--costs", type=Path, help="a table of costs; default: some made-up machines"
    )
    parser.add_argument(
        "--ablations", action="store_true", help="without one of its decisions at a time"
    )
    parser.add_argument(
        "--questions",
        type=Path,
        help="a file in Spec-Bench's format; default: held-out ones of the corpus",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=2,
        help="questions of each of the six groups, their first turns",
    )
    parser.add_argument("--temperature", type=temperatures, default=[0.0, 1.0], metavar="T,T,...")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--markdown", action="store_true")
    return parser.parse_args(arguments)
