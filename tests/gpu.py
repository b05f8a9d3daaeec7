"""What this project does on a GPU, in one command of six minutes at most.

    python tests/gpu.py --out DIR                        # a GPU with 32 GB of memory, or more
    python tests/gpu.py --out DIR --device cpu --small   # the same with a tiny model: CI

It prints tables, and writes them to DIR/gpu.md, row by row. If a part fails, what it has found is
kept, the other part runs all the same, and the exit code is 1.

The model that is timed has the shape of Vicuna 7B in bfloat16, and the random weights of
full_size.py.
"""

import os
import subprocess
import sys
import traceback
import warnings
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import torch
from full_size import ROOT, make_model

from s2d import generate
from s2d.checkpoint import check_device
from s2d.checkpoint.files import refuse_existing
from s2d.cli.ending import run_program
from s2d.cli.program import Parser
from s2d.generation import start
from s2d.model import Llama

METHODS = {
    "ar": dict(method="ar"),
    "sd": dict(method="sd"),
    "s2d": dict(method="s2d"),
    "s2d-tree": dict(method="s2d-tree"),
    "ar, T = 1": dict(method="ar", temperature=1.0),
    "s2d, T = 1": dict(method="s2d", temperature=1.0),
}
COLUMNS = ["method", "tokens/s", "tokens per step", "ms per step", "tokens as ar's"]
COLUMNS += ["waits per step", "waits expected", "peak GB"]
PROMPT = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()


def run_checks(device: torch.device, small: bool) -> Iterator[list[str]]:
    """The tests that every method writes the target's text, in float64; and ``bench hf``."""
    yield ["check", "result"]
    names = ["roots"] if small else ["roots", "rules", "draft", "tree", "exact", "batch"]
    command = ["pytest", "-q", "--tb=short", *(f"tests/test_{name}.py" for name in names)]
    if find_spec("xdist") and not small:
        command.append("-n8")
    run_module(*command, "--device", str(device))
    yield ["tests", "ok"]
    if find_spec("transformers"):
        command = ["s2d.bench", "hf", "--target", "weights/mini-7b", "--max-new-tokens", "16"]
        run_module(*command, "--device", str(device))
        yield ["bench hf", "ok"]


def run_module(*command: str) -> None:
    """Raises an exception if the module fails, or takes too long."""
    subprocess.run([sys.executable, "-m", *command], cwd=ROOT, check=True, timeout=240)


def measure(device: torch.device, small: bool) -> Iterator[list[str]]:
    """Whole answers; in half precision, nearly equal logits may make texts differ."""
    yield COLUMNS
    if small:
        model = make_model("tiny", device, torch.float32)
    else:
        model = make_model("7b", device, torch.bfloat16)
    alone: dict[float, list[int]] = {}  # by temperature, the text of ``ar``
    for name, options in METHODS.items():
        used = options | {"max_new_tokens": 16 if small else 128}
        found = [generate(model, PROMPT, model, **used) for _ in range(3)]
        seconds = median(each.stats.seconds for each in found[1:])  # the first warms up
        tokens = found[0].tokens
        expected = alone.setdefault(options.get("temperature", 0.0), tokens)
        row = [len(tokens) / seconds]
        row.append(found[0].stats.mean_accepted_tokens)
        row.append(1000 * seconds / found[0].stats.steps)
        row.append(len(os.path.commonprefix([tokens, expected])))
        row += count_waits(model, used)
        row.append(torch.cuda.max_memory_allocated() / 1e9)  # since the start
        yield [name, *(f"{cell:.1f}" for cell in row)]


def count_waits(model: Llama, options: dict[str, Any]) -> tuple[float, float]:
    """How often a step waits for the GPU, and how often it should; a CPU is not waited for.

    A step waits once for each exit that it tries, once for each level, and twice more.
    """
    decoder = start(model, PROMPT, model, **options)
    steps = iter(decoder)
    next(steps)  # reads the prompt
    for each in decoder.drafter.exits:
        each.predict = Mock(wraps=each.predict)
    levels, count = 0, 2
    on_gpu = model.device.type == "cuda"
    if on_gpu:
        torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as noted:
        warnings.simplefilter("always")
        for _ in range(count):
            levels += next(steps).tree.depth
    if on_gpu:
        torch.cuda.set_sync_debug_mode("default")
    waits = sum("synchronizing" in str(each.message) for each in noted)
    tried = sum(each.predict.call_count for each in decoder.drafter.exits)
    return waits / count, 2 + (levels + tried) / count


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
    code = 0
    with file.open("w") as opened:

        def say(line: str) -> None:
            print(line, flush=True)
            print(line, file=opened, flush=True)

        say(f"{name}, torch {torch.__version__}")
        for part in (run_checks, measure):
            say("")
            try:
                for number, row in enumerate(part(device, args.small)):
                    say(f"| {' | '.join(row)} |")
                    if number == 0:
                        say("|---" * len(row) + "|")
            except Exception:
                traceback.print_exc()
                say(f"\n{part.__name__} has failed")
                code = 1
    return code


if __name__ == "__main__":
    sys.exit(main())
