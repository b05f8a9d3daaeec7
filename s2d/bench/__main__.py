"""The benchmark's command line: speed, or a subcommand, ``hf`` or ``exit0``.

python -m s2d.bench --methods ar s2d mcsd:tree=4,2,2,1 s2d:draft_length=12:stop=0.4
"""

import sys
from pathlib import Path

from ..checkpoint import DTYPES
from ..cli.program import Parser, comma_separated, count, run_program
from . import exit0, hf, speed


def main(arguments=None):
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    modules = {"hf": hf, "exit0": exit0}
    name = arguments.pop(0) if arguments[:1] and arguments[0] in modules else ""
    module = modules.get(name, speed)
    parser = Parser(f"bench {name}".strip(), description=module.__doc__)
    add = parser.add_argument
    if name == "hf":
        add("--target", required=True, metavar="7b|PATH", help="the folder to check")
        add("--draft", type=Path, help="default: the one next to the target, or exit 0")
        parser.set_defaults(max_new_tokens=48)
    elif name == "exit0":
        add("--target", required=True, metavar="7b|PATH", help="the model")
        parser.set_defaults(max_new_tokens=128)
    else:
        names = comma_separated(str)
        add("--targets", type=names, default="7b,13b,70b", metavar="7b|PATH,...", help="models")
        add("--draft", type=Path, help="default: the one next to the first target")
        add("--methods", nargs="+", help="such as s2d:draft_length=8:stop=0.4; default: all")
        add("--temperature", type=comma_separated(float), default="0,1", help="0 is greedy")
        add("--questions", type=Path, help="in Spec-Bench's format; default: held-out ones")
        add("--hf", action="store_true", help="transformers as well")
        add("--compile", action="store_true", help="every method compiled as well; on CUDA untried")
        add("--batch", type=comma_separated(count), metavar="N,...", help="also N prompts at once")
        add("--check", action="store_true", help="answers against ar's; exit code 1 for a bug")
        add("--out", type=Path, help="folder for answer files, as Spec-Bench's scripts read them")
        add("--plot", type=Path, metavar="FILE.svg", help="the last table as a picture")
        add("--rounds", type=count, default=3, help="in each all methods take turns (%(default)s)")
        parser.set_defaults(max_new_tokens=128)
    add("--limit", type=count, default=2, help="questions of each of the six groups (%(default)s)")
    add("--max-new-tokens", type=count, help="an answer ends there (%(default)s)")
    add("--device", default="auto", help="cpu, cuda, cuda:1, mps ...; auto: CUDA if there is")
    add("--dtype", default="auto", choices=("auto", *DTYPES), help="auto: the model's own")
    add("--markdown", action="store_true", help="tables as markdown")
    return run_program(parser.prog, module.report, parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
