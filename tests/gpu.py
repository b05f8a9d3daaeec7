"""What this project does on a GPU, in one command of six minutes at most.

    python tests/gpu.py --out DIR                        # a GPU with 32 GB of memory, or more
    python tests/gpu.py --out DIR --device cpu --small   # the same with a tiny model: CI

It prints a table, and writes it to DIR/gpu.md, row by row. If a check fails, the methods are timed
all the same, and the exit code is 1.

The model that is timed has the shape of Vicuna 7B in bfloat16, and the random weights of
full_size.py. In half precision, nearly equal logits may make texts differ.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median

import torch
from full_size import ROOT, make_model

from s2d import generate
from s2d.checkpoint import check_device
from s2d.checkpoint.files import refuse_existing
from s2d.cli.ending import run_program
from s2d.cli.program import Parser

METHODS = [("ar", 0.0), ("sd", 0.0), ("s2d", 0.0), ("s2d-tree", 0.0), ("ar", 1.0), ("s2d", 1.0)]
COLUMNS = "method", "tokens/s", "tokens per step", "ms per step", "tokens as ar's", "peak GB"
PROMPT = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()


def check(device: torch.device, small: bool) -> Iterator[tuple[str, bool]]:
    """The tests that every method writes the target's text, in float64; and ``bench hf``."""
    names = ["roots"] if small else ["roots", "own", "draft", "tree", "exact", "batch"]
    tests = ["pytest", "-q", "--tb=short", *(f"tests/test_{name}.py" for name in names)]
    if find_spec("xdist") and not small:
        tests.append("-n8")
    checks = {"tests": tests}
    if find_spec("transformers") and not small:
        checks["hf"] = "s2d.bench hf --target weights/mini-7b --max-new-tokens 16".split()
    for name, words in checks.items():
        command = [sys.executable, "-m", *words, "--device", str(device)]
        yield name, subprocess.run(command, cwd=ROOT).returncode == 0


def measure(device: torch.device, small: bool) -> Iterator[list[str]]:
    """Whole answers of every method."""
    shape, dtype = ("tiny", torch.float32) if small else ("7b", torch.bfloat16)
    model = make_model(shape, device, dtype)
    alone: dict[float, list[int]] = {}  # by temperature, the text of ``ar``
    for method, temperature in METHODS:
        options = dict(method=method, temperature=temperature, max_new_tokens=8 if small else 128)
        found = [generate(model, PROMPT, model, **options) for _ in range(3)]
        seconds = median(each.stats.seconds for each in found[1:])  # the first warms up
        tokens, stats = found[0].tokens, found[0].stats
        expected = alone.setdefault(temperature, tokens)
        row = [len(tokens) / seconds, stats.mean_accepted_tokens, 1000 * seconds / stats.steps]
        row.append(len(os.path.commonprefix([tokens, expected])))
        row.append(torch.cuda.max_memory_allocated() / 1e9)  # since the start
        yield [f"{method}, T = {temperature:g}", *(f"{cell:.1f}" for cell in row)]


def main(arguments: list[str] | None = None) -> int:
    return run_program("gpu.py", run, arguments)


def run(arguments: list[str] | None) -> int:
    parser = Parser("python tests/gpu.py", description="What this project does on a GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for gpu.md")
    parser.add_argument("--device", default="cuda", help="(cuda)")
    parser.add_argument("--small", action="store_true", help="a tiny model, and few of the tests")
    args = parser.parse_args(arguments)
    device = check_device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    file = refuse_existing(args.out / "gpu.md")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w") as opened:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=opened, flush=True)

        say(f"{name}, torch {torch.__version__}")
        checks = dict(check(device, args.small))
        for each, is_right in checks.items():
            say(f"{each}: {'ok' if is_right else 'failed'}")
        say(f"\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        for row in measure(device, args.small):
            say(f"| {' | '.join(row)} |")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
