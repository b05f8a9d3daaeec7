"""What this project does on a GPU, in one command of six minutes at most.

    python tests/gpu.py --out DIR                        # a GPU with 32 GB of memory, or more
    python tests/gpu.py --out DIR --device cpu --small   # the same with tiny models: CI

It writes tables in DIR/gpu.md, and what the parts say in DIR/gpu.log. Each part is a process of its
own with a limit of time; what it has found is kept if it fails or is cut off, and the others run
all the same. Exit code 1: that happened to one.

The models that are timed have the shape of Vicuna 7B in bfloat16, and the random weights of
full_size.py.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from full_size import config_of, draft_config, fill
from other_device import note_asked
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d import generate  # noqa: E402
from s2d.checkpoint import check_device, empty_model  # noqa: E402
from s2d.checkpoint.files import refuse_existing  # noqa: E402
from s2d.cli.program import Parser, run_program  # noqa: E402
from s2d.generation import start  # noqa: E402
from s2d.model import Llama, LlamaConfig  # noqa: E402

Row = dict[str, str | float]  # a cell for each column

METHODS = {
    "ar": dict(method="ar"),
    "sd": dict(method="sd"),
    "s2d": dict(method="s2d"),
    "s2d-tree": dict(method="s2d-tree"),
    "ar, T = 1": dict(method="ar", temperature=1.0),
    "s2d, T = 1": dict(method="s2d", temperature=1.0),
}
PROMPT = torch.randint(1000, (64,), generator=torch.Generator().manual_seed(0)).tolist()
# What the profiler calls the functions of CUDA that launch something, and those that wait.
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


@dataclass(frozen=True)
class Setup:
    """Where to run, and how much."""

    device: torch.device
    shape: str = "7b"  # of full_size.py
    dtype: torch.dtype = torch.bfloat16
    new_tokens: int = 128
    steps: int = 2  # that are profiled
    tests: tuple[str, ...] = ("roots", "rules", "draft", "tree", "exact", "batch")

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"


def small_setup(device: torch.device) -> Setup:
    sizes = dict(shape="tiny", new_tokens=16, steps=1)
    return Setup(device, dtype=torch.float32, tests=("roots",), **sizes)


def make_models(setup: Setup) -> tuple[Llama, Llama]:
    """A target and the draft of its first layers, in the same memory."""
    target_config = config_of(setup.shape)
    generator = torch.Generator(setup.device).manual_seed(0)
    weights = {}
    for name, parameter in empty_model(target_config).named_parameters():
        weights[name] = torch.empty(parameter.shape, dtype=setup.dtype, device=setup.device)
        fill(name, weights[name], generator)

    def make(config: LlamaConfig) -> Llama:
        model = empty_model(config)
        model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
        model = model.to(setup.device, setup.dtype)  # moves what is left: the rotary table
        return model.eval().requires_grad_(False)

    return make(target_config), make(draft_config(target_config))


def run_checks(setup: Setup) -> Iterator[Row]:
    """The tests that every method writes the target's text, in float64; and ``bench hf``."""
    device = ["--device", str(setup.device)]
    pytest = ["pytest", "-v", "--tb=short", *device]
    if setup.on_gpu and find_spec("xdist"):
        pytest.append(f"-n{min(8, os.cpu_count() or 1)}")
    commands = {"tests": [*pytest, *(f"tests/test_{name}.py" for name in setup.tests)]}
    if find_spec("transformers"):
        hf = ["s2d.bench", "hf", "--target", "weights/mini-7b", "--max-new-tokens", "16"]
        commands["bench hf"] = [*hf, *device]
    codes = []
    for name, command in commands.items():
        line = [sys.executable, "-m", *command]
        codes.append(subprocess.run(line, cwd=ROOT, stdout=sys.stderr).returncode)
        yield {"check": name, "exit code": codes[-1]}
    if any(codes):
        raise RuntimeError("a check has failed")


def time_answers(setup: Setup) -> Iterator[Row]:
    """Whole answers; in half precision, nearly equal logits may make them differ."""
    target, draft = make_models(setup)
    alone: dict[float, list[int]] = {}  # by temperature, the text of ``ar``
    for name, options in METHODS.items():
        used = options | {"max_new_tokens": setup.new_tokens}
        found = [generate(target, PROMPT, draft, **used) for _ in range(3)]
        seconds = median(each.stats.seconds for each in found[1:])  # the first warms up
        tokens = found[0].tokens
        expected = alone.setdefault(options.get("temperature", 0.0), tokens)
        row = {"method": name, "tokens/s": len(tokens) / seconds}
        row["tokens per step"] = found[0].stats.mean_accepted_tokens
        row["ms per step"] = 1000 * seconds / found[0].stats.steps
        row["tokens as ar's"] = len(os.path.commonprefix([tokens, expected]))
        if setup.on_gpu:
            row["peak GB"] = torch.cuda.max_memory_allocated() / 1e9  # since the start
        yield row


def count_launches(setup: Setup) -> Iterator[Row]:
    """What a step launches and waits for, as the profiler sees it.

    It should wait once for each exit that it tries, once for each level, and twice more. On a CPU
    operations take the place of launches, and nothing waits.
    """
    target, draft = make_models(setup)
    for name, options in METHODS.items():
        used = options | {"max_new_tokens": 64}
        generate(target, PROMPT, draft, **used)  # warms up
        decoder = start(target, PROMPT, draft, **used)
        yield {"method": name} | profile_steps(setup, decoder)


def profile_steps(setup: Setup, decoder: Any) -> Row:
    """The means of a few steps after the first one, which reads the prompt."""
    tried: list[int] = []
    note_asked(decoder.drafter.exits, tried)
    steps = iter(decoder)
    next(steps)
    tried.clear()
    activities = [ProfilerActivity.CPU]
    if setup.on_gpu:
        activities.append(ProfilerActivity.CUDA)
    levels = 0
    with profile(activities=activities) as profiled:
        for _ in range(setup.steps):
            with record_function("step"):
                levels += next(steps).tree.depth
    on_cpu = [each for each in profiled.events() if each.device_type == DeviceType.CPU]
    # Only within steps: outside, the profiler itself waits for the GPU.
    spans = [each.time_range for each in on_cpu if each.name == "step"]
    launches, waits = 0, 0
    for each in on_cpu:
        if any(span.start <= each.time_range.start <= span.end for span in spans):
            launches += each.name in LAUNCHES if setup.on_gpu else each.name.startswith("aten::")
            waits += each.name in WAITS
    return {
        "launches": launches / setup.steps,
        "waits": waits / setup.steps,
        "waits expected": 2 + (levels + len(tried)) / setup.steps,
    }


PARTS = {  # and the seconds that each may take on a GPU
    "exactness": (run_checks, 185),
    "answers": (time_answers, 80),
    "launches": (count_launches, 45),
}
ON_CPU = 10  # times as long, since CI's machines may be busy


def print_table(rows: Iterator[Row], file: IO[str]) -> None:
    """Print rows as they come, as a table in Markdown; the first one has all columns."""
    columns: list[str] = []
    for row in rows:
        if not columns:
            columns = list(row)
            print("| " + " | ".join(columns) + " |", file=file)
            print("|---" * len(columns) + "|", file=file)
        cells = [f"{cell:.1f}" if isinstance(cell, float) else str(cell) for cell in row.values()]
        print("| " + " | ".join(cells) + " |", file=file, flush=True)


def run_parts(commands: dict[str, tuple[list[str], float]], out: Path) -> int:
    """Run {part: (command, limit in seconds)}; 0 if all came to their end, else 1."""
    code = 0
    with (out / "gpu.md").open("a") as tables, (out / "gpu.log").open("a") as log:
        for name, (command, limit) in commands.items():
            print(f"### {name}\n", file=tables, flush=True)
            ended = run_part(command, limit, tables, log)
            print(f"\n{name}: {ended}\n", file=tables, flush=True)
            print(f"{name}: {ended}", flush=True)
            code |= ended != "ok"
    return code


def run_part(command: list[str], limit: float, tables: IO[str], log: IO[str]) -> str:
    """How a part ended, and its children with it."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=tables, stderr=log, start_new_session=True)
    try:
        code = process.wait(limit)
        return "ok" if code == 0 else f"failed with exit code {code}, see gpu.log"
    except subprocess.TimeoutExpired:
        return f"cut off after {limit:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def main(arguments: list[str] | None = None) -> int:
    return run_program("gpu.py", run, arguments)


def run(arguments: list[str] | None) -> int:
    parser = Parser("python tests/gpu.py", description="What this project does on a GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for two files")
    parser.add_argument("--device", default="cuda", help="(cuda)")
    parser.add_argument("--small", action="store_true", help="tiny models, and few of the tests")
    parser.add_argument("--part", choices=PARTS, help="this one alone, its table on stdout")
    args = parser.parse_args(arguments)
    device = check_device(args.device)
    if args.part:
        setup = small_setup(device) if args.small else Setup(device)
        if setup.on_gpu:
            torch.cuda.set_device(device)
        tables = sys.stdout
        with redirect_stdout(sys.stderr):  # libraries print as well
            print_table(PARTS[args.part][0](setup), tables)
        return 0
    refuse_existing(args.out / "gpu.md")
    args.out.mkdir(parents=True, exist_ok=True)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    (args.out / "gpu.md").write_text(f"{name}, torch {torch.__version__}\n\n")
    again = [sys.executable, "tests/gpu.py", "--out", str(args.out), "--device", str(device)]
    again += ["--small"] if args.small else []
    commands = {}
    for name, (_, limit) in PARTS.items():
        limit = limit if device.type == "cuda" else ON_CPU * limit
        commands[name] = ([*again, "--part", name], limit)
    return run_parts(commands, args.out)


if __name__ == "__main__":
    sys.exit(main())
