"""The papers' experiments: ``train`` makes the drafts that they compare; without it they run.

python -m s2d.papers train --out drafts
python -m s2d.papers --drafts drafts --out results
"""

import sys
from pathlib import Path

from ..checkpoint import DTYPES, check_device
from ..cli.program import Parser, count, positive, run_program
from ..files import claimed
from ..train.fit import Run
from .drafts import MILLIONS, train_drafts
from .experiments import EXPERIMENTS
from .report import report


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["train"]:
        return run_program("papers train", train, arguments[1:])
    return run_program("papers", measure, arguments)


def train(arguments):
    parser = Parser("python -m s2d.papers train", description="Train the drafts to compare.")
    add = parser.add_argument
    add("--out", type=Path, default=Path("drafts"), help="folder for all of them")
    add("--resume", action="store_true", help="go on where it was cut short")
    add("--millions", type=positive, default=MILLIONS, help="million training tokens of each")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...")
    add("--seed", type=int, default=0, help="of all random numbers")
    args = parser.parse_args(arguments)
    run = Run(args.out, str(check_device(args.device)), args.seed, args.resume)
    with claimed(run.out):
        train_drafts(run, args.millions)


def measure(arguments):
    parser = Parser("python -m s2d.papers", description="Run the papers' experiments.")
    add = parser.add_argument
    add("--drafts", type=Path, metavar="DIR", help="what python -m s2d.papers train made")
    add("--only", nargs="+", choices=EXPERIMENTS, metavar="NAME", help="of these")
    add("--out", type=Path, metavar="DIR", help="keeps what was measured; used again")
    add("--rounds", type=count, default=1, help="in each all rows take turns (%(default)s)")
    add("--limit", type=count, default=2, help="questions of each of the six groups (%(default)s)")
    add("--max-new-tokens", type=count, default=48, help="an answer ends there (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...; auto: CUDA if there is")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own")
    add("--markdown", action="store_true", help="tables as markdown")
    report(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
