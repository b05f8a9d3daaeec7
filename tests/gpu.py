"""What this project does on a GPU, in one command of eight minutes at most.

    python tests/gpu.py --out DIR                        # a GPU with 32 GB of memory, or more
    python tests/gpu.py --out DIR --device cpu --small   # the same with tiny models: CI

It writes a table for each model to DIR/gpu.md, row by row. The exit code is 1 if a check failed.
The models have the shapes of Vicuna 7B and, with grouped heads, Llama 3 8B. They are in bfloat16,
and have the random weights of full_size.py. Nearly equal logits may make texts differ.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from full_size import ROOT, make_model
from helpers import random_tokens
from torch.autograd import DeviceType
from torch.profiler import profile
from transformers import LlamaConfig, LlamaForCausalLM

from s2d import generate, start
from s2d.bench.peers import run_peer
from s2d.checkpoint.config import config_to_dict
from s2d.checkpoint.files import taken
from s2d.checkpoint.load import check_device
from s2d.cli.ending import run_program
from s2d.cli.program import Parser
from s2d.model import Llama
from s2d.options import Options
from s2d.passes.bitwise import BitwiseDecoder

# A row, what ``generate`` is given, and the row that has the same text up to rounding.
ROWS: list[tuple[str, dict[str, Any], str]] = [
    ("ar", dict(method="ar"), "ar"),
    ("transformers", dict(), "ar"),
    ("s2d", dict(method="s2d"), "ar"),
    ("s2d-tree", dict(method="s2d-tree"), "ar"),
    ("ar sampled", dict(method="ar", temperature=1.0), "ar sampled"),
    ("s2d sampled", dict(method="s2d", temperature=1.0), "ar sampled"),
    ("s2d by rejection", dict(method="s2d", temperature=1.0, rule="rejection"), "s2d by rejection"),
    ("ar bitwise", dict(method="ar", decoder=BitwiseDecoder), "ar bitwise"),
    ("s2d bitwise", dict(method="s2d", decoder=BitwiseDecoder), "ar bitwise"),
    ("ar with cuDNN's attention", dict(method="ar", max_new_tokens=16), "ar"),
]
COLUMNS = "row", "tokens/s", "tokens per step", "ms per step", "tokens as ar's", "peak GB"
COLUMNS += "kernels per step", "waits per step"


def check(device: torch.device, small: bool) -> Iterator[tuple[str, bool]]:
    """The tests that every method writes the target's text, in float64; and ``bench hf``."""
    names = ["roots"] if small else ["roots", "own", "draft", "tree", "exact", "batch"]
    commands = [["pytest", "-q", "--tb=short", *(f"tests/test_{name}.py" for name in names)]]
    if not small:
        commands[0].append("-n8")
        commands.append("s2d.bench hf --target weights/mini-7b --max-new-tokens 16".split())
    for words in commands:
        command = [sys.executable, "-m", *words, "--device", str(device)]
        yield words[0], subprocess.run(command, cwd=ROOT).returncode == 0


def as_transformers(model: Llama) -> LlamaForCausalLM:
    """transformers' Llama with the same weights, which are not copied."""
    config = LlamaConfig(**config_to_dict(model.config, model.dtype, drafting={}))
    with torch.device("meta"):
        peer = LlamaForCausalLM(config)
    peer.load_state_dict(model.state_dict(), assign=True)
    with model.device:
        peer.model.rotary_emb = type(peer.model.rotary_emb)(config)  # has no weights
    return peer.eval()


def count(model: Llama, prompt: list[int], options: dict[str, Any]) -> tuple[int, int]:
    """The kernels and the waits of the second step. A CPU has none."""
    steps = iter(start(model, prompt, model, **options))
    next(steps)
    with profile() as found:
        next(steps, None)
    kernels = [each for each in found.events() if each.device_type == DeviceType.CUDA]
    waits = [each for each in found.events() if each.name == "cudaStreamSynchronize"]
    return len(kernels), len(waits)


def measure(model: Llama, length: int, say: Callable[[str], None]) -> bool:
    """Say the rows of a table; returns whether s2d is ar bit for bit, where it has to be.

    Answers have ``length`` tokens. The prompts are so much longer each time that every pass has new
    lengths, for which cuDNN has no plans yet (see load_model).
    """
    peer = as_transformers(model)
    texts: dict[str, list[list[int]]] = {}
    for name, given, alike in ROWS:
        by_cudnn = "cuDNN" in name
        if by_cudnn and model.device.type != "cuda":
            continue
        torch.backends.cuda.enable_cudnn_sdp(by_cudnn)
        options = dict(max_new_tokens=length) | given
        texts[name], runs = [], []
        for number in range(3):
            prompt = random_tokens(seed=number, count=20 + number * length, vocab=1000)
            began = time.perf_counter()
            if name == "transformers":
                tokens, _ = run_peer(prompt, 0, peer, Options(**options))
                steps = len(tokens)
            else:
                answer = generate(model, prompt, model, **options)
                tokens, steps = answer.tokens, answer.stats.steps
            runs.append((len(tokens), steps, time.perf_counter() - began))
            texts[name].append(tokens)
        written, steps, seconds = map(sum, zip(*runs[1:]))  # the first run warms up
        same = mean(len(os.path.commonprefix(pair)) for pair in zip(texts[name], texts[alike]))
        peak = torch.cuda.max_memory_allocated() / 1e9  # since the start
        row = [written / seconds, written / steps, 1000 * seconds / steps, same, peak]
        if name != "transformers":
            row += count(model, prompt, options)
        say(f"| {name} | {' | '.join(f'{cell:.1f}' for cell in row)} |")
    return texts["s2d bitwise"] == texts["ar bitwise"]


def run(arguments: list[str] | None) -> int:
    parser = Parser("python tests/gpu.py", description="What this project does on a GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for gpu.md")
    parser.add_argument("--device", default="cuda", help="(cuda)")
    parser.add_argument("--small", action="store_true", help="tiny models, and few of the tests")
    args = parser.parse_args(arguments)
    device = check_device(args.device)
    with taken(args.out / "gpu.md") as file:
        return check_all(device, args.small, file)


def check_all(device: torch.device, small: bool, file: Path) -> int:
    """The exit code; what is found goes to ``file`` as it is found."""

    def say(line: str) -> None:
        print(line, flush=True)
        with file.open("a") as opened:
            print(line, file=opened)

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}")
    checks = dict(check(device, small))
    for shape in ("tiny-7b", "tiny-8b") if small else ("7b", "8b"):
        say(f"\n{shape}\n\n| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
        length = 8 if small else 128
        same = measure(make_model(shape, device, torch.bfloat16), length, say)
        checks[f"{shape}, bitwise"] = same
    for each, is_right in checks.items():
        say(f"{each}: {'ok' if is_right else 'failed'}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(run_program("gpu.py", run, None))
