"""What this project does on a GPU: one command for whoever has one, eight minutes at most.

    python tests/gpu.py --out DIR                        # needs about 20 GB of a GPU's memory
    python tests/gpu.py --out DIR --device cpu --small   # the same with a tiny model: a minute

It writes DIR/gpu.json, the same as tables in DIR/gpu.md, and in DIR/gpu.log what the parts say.
Each part is a process of its own with a limit of time. What a part has found is kept if it fails or
is cut off, and the others run all the same. The exit code is 1 if a part did not come to its end.

Models have the shape of Vicuna 7B in bfloat16, and the random weights of full_size.py: layers above
the 12th change little, so that a draft of the first 12 is accepted about as often as a trained one.
Tokens per step are what these weights were made for; times are those of any model of this shape.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import IO, Any

import torch
from full_size import DRAFTING, config_of, draft_config, fill
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d import generate  # noqa: E402
from s2d.bench.peers import as_transformers, run_peer  # noqa: E402
from s2d.checkpoint import check_device, empty_model  # noqa: E402
from s2d.decoder import inference  # noqa: E402
from s2d.files import staged_file  # noqa: E402
from s2d.generation import start  # noqa: E402
from s2d.mask import positions_and_mask  # noqa: E402
from s2d.model import Llama  # noqa: E402
from s2d.options import Drafting  # noqa: E402
from s2d.trace.record import Asked, NotedExit  # noqa: E402

Row = dict[str, str | float]  # of a table: a cell for each column

TESTS = (  # of exactness; each line is one run of pytest and a row
    "test_devices.py test_roots.py test_rules.py test_draft.py test_tree.py",
    "test_exact.py",
    "test_batch.py",
)
METHODS = {
    "ar": dict(method="ar"),
    "sd": dict(method="sd"),
    "s2d": dict(method="s2d"),
    "s2d-tree": dict(method="s2d-tree"),
    "s2d, T = 1": dict(method="s2d", temperature=1.0),
}
ROWS = (1, 2, 4, 8, 16, 64)  # of a pass
WARM_UP = 3  # calls before those that are timed: kernels are loaded, graphs captured
CALLS = 20  # the median of which counts
GENERATIONS = 2  # likewise
STEPS = 4  # that are profiled
# Calls of the CUDA runtime, by the profiler's names.
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
LAUNCHES |= {"cudaGraphLaunch"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


@dataclass(frozen=True)
class Setup:
    """Where to run, and how much of it."""

    device: torch.device
    small: bool

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.small else torch.bfloat16

    @property
    def context(self) -> int:
        """The positions before a pass that is timed."""
        return 32 if self.small else 512

    @property
    def new_tokens(self) -> int:
        return 32 if self.small else 128

    @property
    def prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1000, (64,), generator=generator).tolist()


# Models and clocks


def random_weights(setup: Setup) -> dict[str, torch.Tensor]:
    """The parameters of a target, made on the device."""
    weights = {}
    generator = torch.Generator(setup.device).manual_seed(0)
    for name, parameter in empty_model(
        config_of("tiny" if setup.small else "7b")
    ).named_parameters():
        weights[name] = torch.empty(parameter.shape, dtype=setup.dtype, device=setup.device)
        fill(name, weights[name], generator)
    return weights


def make_models(setup: Setup, way: str) -> tuple[Llama, Llama] | None:
    """A target and the draft of its first layers, in the same memory; None: no such ``way`` here.

    The way is "eager", or "graphs": static passes, which a GPU replays as CUDA graphs.
    """
    kind = Llama if way == "eager" else static_class(setup.device)
    if kind is None:
        return None
    weights = random_weights(setup)
    config = config_of("tiny" if setup.small else "7b")

    def make(config: Any, drafting: Drafting | None) -> Llama:
        model = empty_model(config, kind)
        model.drafting = drafting
        model.load_state_dict({name: weights[name] for name in model.state_dict()}, assign=True)
        model.to(setup.device, setup.dtype)  # what is left: the rotary table
        return model.eval().requires_grad_(False)

    return make(config, None), make(draft_config(config), DRAFTING)


def static_class(device: torch.device) -> type[Llama] | None:
    """On a CPU its passes are static, but not replayed. None: this project does not have it."""
    try:
        if device.type == "cuda":
            from s2d.speed.graphs import GraphedLlama

            return GraphedLlama
        from s2d.speed.static import StaticLlama

        return StaticLlama
    except ImportError:
        return None


def seconds_of(call: Callable[[], Any], device: torch.device) -> float:
    """The median of CALLS calls. On a GPU, launching is included, as a step waits for its pass."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(CALLS):
        if device.type == "cuda":
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize(device)
            began.record()
            call()
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1000)  # it is in milliseconds
        else:
            began = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began)
    return median(seconds)


def forget_peak(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_gigabytes(device: torch.device) -> float:
    """Of tensors, since ``forget_peak``; on a CPU of the whole process, since its start."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 1e9
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e9


# Parts: each yields rows, and raises if it found a fault


def test_exactness(setup: Setup) -> Iterator[Row]:
    """Every method writes the target's text in float64: the tests that say so, on the device."""
    for files in ("test_roots.py",) if setup.small else TESTS:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-v",
            "--tb=short",
            "--device",
            str(setup.device),
        ]
        command += [f"tests/{file}" for file in files.split()]
        if find_spec("xdist") and not setup.small:
            command += ["-n", str(min(8, os.cpu_count() or 1))]
        began = time.perf_counter()
        code, lines = run_and_show(command)
        found = {what: number for number, what in re.findall(r"(\d+) (\w+)", lines[-1])}
        yield {
            "tests": files,
            "passed": int(found.get("passed", 0)),
            "failed": int(found.get("failed", 0)) + int(found.get("errors", found.get("error", 0))),
            "skipped": int(found.get("skipped", 0)),
            "seconds": time.perf_counter() - began,
            "exit code": code,
        }


def compare_with_transformers(setup: Setup) -> Iterator[Row]:
    """``python -m s2d.bench hf`` on a miniature."""
    if not find_spec("transformers"):
        yield {"compared": "nothing", "found": "skipped: transformers is not here"}
        return
    command = [sys.executable, "-m", "s2d.bench", "hf", "--target", "weights/mini-7b"]
    command += ["--device", str(setup.device), "--max-new-tokens", "8" if setup.small else "48"]
    code, lines = run_and_show(command)
    for line in lines:
        if line.endswith((": ok", ": FAULT")):
            yield {"compared": line[:24].strip(), "found": line[24:]}
    if code != 0:
        raise RuntimeError(f"bench hf: exit code {code}")


def run_and_show(command: list[str]) -> tuple[int, list[str]]:
    """Run a program, whose output goes to stderr as it comes; its exit code and lines."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.rstrip())
    return process.returncode, lines or [""]


def time_passes(setup: Setup) -> Iterator[Row]:
    """Passes after a context, with the LM head: of the target, and of each exit that is tried.

    The share is that of the memory's speed: the bytes of the weights that a pass reads, per second,
    of the bytes that a large copy reads and writes.
    """
    source = torch.ones(2**24 if setup.small else 2**30, dtype=torch.uint8, device=setup.device)
    copy = torch.empty_like(source)
    copied = seconds_of(lambda: copy.copy_(source), setup.device)
    bandwidth = 2 * source.nbytes / copied
    yield row_of_pass("copy", "", 0, copied, 2 * source.nbytes, bandwidth)
    for way in ("eager", "graphs"):
        models = make_models(setup, way)
        if models is None:
            yield {"pass": "skipped", "way": way}
            continue
        target, draft = models
        parts = [("target", target, 0, target.config.num_hidden_layers, ROWS)]
        for first, end in zip((0, *DRAFTING.exits), DRAFTING.exits):
            parts.append((f"draft, layers {first + 1} to {end}", draft, first, end, (1, 8)))
        for name, model, first, end, all_rows in parts:
            read = [*model.model.layers[first:end].parameters(), model.lm_head.weight]
            size = sum(weight.nbytes for weight in read)
            for rows in all_rows:
                seconds = time_pass(setup, model, first, end, rows)
                yield row_of_pass(name, way, rows, seconds, size, bandwidth)


def time_pass(setup: Setup, model: Llama, first: int, end: int, rows: int) -> float:
    """Seconds of ``rows`` rows, a chain, through layers first..end-1 and the LM head."""
    new = dict(device=setup.device, dtype=setup.dtype)
    S = setup.context
    with inference(setup.device):
        cache = model.new_cache(S + rows, first, end)
        context = torch.randn(1, S, model.config.hidden_size, **new)
        model.run_layers(context, first, end, cache=cache)
        hidden = torch.randn(1, rows, model.config.hidden_size, **new)
        chain = list(range(-1, rows - 2))
        positions, mask = positions_and_mask(S, S + 1, chain, **new)

        def run() -> None:
            cache.keep(S, [])  # roll back
            model.logits(model.run_layers(hidden, first, end, positions, mask, cache))

        return seconds_of(run, setup.device)


def row_of_pass(name: str, way: str, rows: int, seconds: float, size: int, bandwidth: float) -> Row:
    gigabytes = {"GB": size / 1e9, "GB/s": size / seconds / 1e9}
    share = size / seconds / bandwidth
    return (
        {"pass": name, "way": way, "rows": rows, "ms": 1000 * seconds}
        | gigabytes
        | {"share": share}
    )


def time_eager(setup: Setup) -> Iterator[Row]:
    """Whole answers, eager."""
    yield from time_answers(setup, "eager")


def time_graphs(setup: Setup) -> Iterator[Row]:
    """Whole answers by static passes, on a GPU as CUDA graphs."""
    yield from time_answers(setup, "graphs")


def time_answers(setup: Setup, way: str) -> Iterator[Row]:
    models = make_models(setup, way)
    if models is None:
        yield {"method": "skipped: this project has no static passes yet", "way": way}
        return
    target, draft = models
    alone: list[int] = []
    for name, options in METHODS.items():
        used = options | {"max_new_tokens": setup.new_tokens}
        forget_peak(setup.device)
        generate(target, setup.prompt, draft, **used)  # all shapes of passes are seen
        found = [generate(target, setup.prompt, draft, **used) for _ in range(GENERATIONS)]
        seconds = median(each.stats.seconds for each in found)
        tokens = found[0].tokens
        alone = alone or tokens
        same = next((i for i, pair in enumerate(zip(alone, tokens)) if pair[0] != pair[1]), None)
        yield {
            "method": name,
            "way": way,
            "tokens/s": len(tokens) / seconds,
            "tokens per step": found[0].stats.mean_accepted_tokens,
            "ms per step": 1000 * seconds / found[0].stats.steps,
            # In half precision, nearly equal logits may swap their order.
            "as ar up to token": len(tokens) if same is None else same,
            "peak GB": peak_gigabytes(setup.device),
        }


def time_transformers(setup: Setup) -> Iterator[Row]:
    """``generate`` of transformers, with the same weights and its own defaults."""
    if not find_spec("transformers"):
        yield {"method": "skipped: transformers is not here"}
        return
    target, draft = make_models(setup, "eager")
    peer = as_transformers(target)
    ways = {"greedy": {}, "assisted by the same draft": {"assistant_model": as_transformers(draft)}}
    for name, options in ways.items():
        forget_peak(setup.device)
        runs = []
        for _ in range(1 + GENERATIONS):  # the first one warms up
            runs += run_peer([setup.prompt], 0, peer, setup.new_tokens, **options)
        seconds = median(each for _, each, _ in runs[1:])
        yield {
            "method": f"transformers, {name}",
            "tokens/s": len(runs[0][0]) / seconds,
            "peak GB": peak_gigabytes(setup.device),
        }


def count_launches(setup: Setup) -> Iterator[Row]:
    """What steps launch, copy and wait for, as the profiler sees it.

    A step should wait once for each exit that it tries, once for each level, and twice more. On a
    CPU operations take the place of launches, and nothing waits.
    """
    for way in ("eager", "graphs"):
        models = make_models(setup, way)
        if models is None:
            yield {"method": "skipped: this project has no static passes yet", "way": way}
            continue
        for name, options in METHODS.items():
            yield {"method": name, "way": way} | profile_steps(setup, *models, options)


def profile_steps(setup: Setup, target: Llama, draft: Llama, options: dict[str, Any]) -> Row:
    """The means of STEPS steps after the first one, which reads the prompt."""
    used = options | {"max_new_tokens": 64}
    generate(target, setup.prompt, draft, **used)  # all shapes of passes are seen
    decoder = start(target, setup.prompt, draft, **used)
    asked: list[Asked] = []
    if decoder.drafter is not None:
        decoder.drafter.exits = [NotedExit(each, asked) for each in decoder.drafter.exits]
    steps = iter(decoder)
    next(steps)
    asked.clear()
    on_gpu = setup.device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    levels = 0
    with profile(activities=activities) as profiled:
        for _ in range(STEPS):
            with record_function("step"):
                levels += next(steps).tree.level_count
    events = profiled.events()
    # The profiler waits for the GPU as well, but not within a step.
    on_cpu = [each for each in events if each.device_type == DeviceType.CPU]
    spans = [each.time_range for each in on_cpu if each.name == "step"]
    calls = [
        each.name
        for each in on_cpu
        if any(span.start <= each.time_range.start <= span.end for span in spans)
    ]
    work = [each.name for each in events if each.device_type == DeviceType.CUDA]
    copies = [name for name in work if name.startswith(("Memcpy", "Memset"))]
    return {
        "launches": sum(is_launch(name, on_gpu) for name in calls) / STEPS,
        "kernels": (len(work) - len(copies) - work.count("step")) / STEPS,
        "copies to the GPU": sum("HtoD" in name for name in copies) / STEPS,
        "copies to the CPU": sum("DtoH" in name for name in copies) / STEPS,
        "waits": sum(name in WAITS for name in calls) / STEPS,
        "waits expected": 2 + (levels + len(asked)) / STEPS,
    }


def is_launch(name: str, on_gpu: bool) -> bool:
    return name in LAUNCHES if on_gpu else name.startswith("aten::")


PARTS: dict[str, tuple[Callable[[Setup], Iterator[Row]], int]] = {  # and the limit in seconds
    "exactness": (test_exactness, 145),
    "hf": (compare_with_transformers, 50),
    "passes": (time_passes, 60),
    "eager": (time_eager, 80),
    "graphs": (time_graphs, 50),
    "transformers": (time_transformers, 50),
    "launches": (count_launches, 45),
}


# The program


def run_parts(
    commands: dict[str, tuple[list[str], float]], out: Path, about: dict[str, str]
) -> int:
    """Run {part: (command, limit in seconds)}, and write what there is after each; 1 if one failed.

    A command prints a row per line, in JSON.
    """
    report: dict[str, Any] = {"about": about, "parts": {}}
    with (out / "gpu.log").open("w") as log:
        for name, (command, limit) in commands.items():
            print(f"\n== {name}", file=log, flush=True)
            report["parts"][name] = run_part(command, limit, log)
            with staged_file(out / "gpu.json") as stage:
                stage.write_text(json.dumps(report, indent=1) + "\n")
            with staged_file(out / "gpu.md") as stage:
                stage.write_text(as_markdown(report))
            print(as_table(name, report["parts"][name]), flush=True)
    return int(any(part["ended"] != "ok" for part in report["parts"].values()))


def run_part(command: list[str], limit: float, log: IO[str]) -> dict[str, Any]:
    """How a part ended, its seconds and its rows."""
    began = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=limit)
        code = process.returncode
        ended = "ok" if code == 0 else f"failed with exit code {code}, see gpu.log"
    except subprocess.TimeoutExpired:
        kill_with_children(process)
        output, _ = process.communicate()
        ended = f"cut off after {limit:g} s"
    finally:
        kill_with_children(process)
    whole_lines = output.split("\n")[:-1]
    rows = [json.loads(line) for line in whole_lines]
    return {"ended": ended, "seconds": time.perf_counter() - began, "rows": rows}


def kill_with_children(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def as_markdown(report: dict[str, Any]) -> str:
    tables = [as_table(name, part) for name, part in report["parts"].items()]
    return "\n".join([", ".join(report["about"].values()) + "\n", *tables])


def as_table(name: str, part: dict[str, Any]) -> str:
    """A part as a table in Markdown, its heading says how it ended."""
    columns = list(dict.fromkeys(column for row in part["rows"] for column in row))
    lines = [f"### {name}: {part['ended']}, {part['seconds']:.0f} s", ""]
    if columns:
        lines.append("| " + " | ".join(columns) + " |")
        lines.append("|---" * len(columns) + "|")
    for row in part["rows"]:
        lines.append("| " + " | ".join(as_cell(row.get(column, "")) for column in columns) + " |")
    return "\n".join(lines) + "\n"


def as_cell(value: str | float) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:.2f}" if value < 100 else f"{value:.0f}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python tests/gpu.py", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder for what is found")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, in float32, few tests")
    parser.add_argument("--part", choices=PARTS, help="this part alone, its rows to stdout")
    args = parser.parse_args(arguments)
    try:
        device = check_device(args.device)
    except ValueError as error:
        parser.error(str(error))
    if args.part:
        run, _ = PARTS[args.part]
        show = sys.stdout
        with redirect_stdout(sys.stderr):  # what libraries print is no row
            for row in run(Setup(device, args.small)):
                print(json.dumps(row), file=show, flush=True)
        return 0
    if args.out is None:
        parser.error("--out is a folder for what is found")
    if (args.out / "gpu.json").exists():
        parser.error(f"{args.out} has a gpu.json; nothing is replaced")
    args.out.mkdir(parents=True, exist_ok=True)
    commands = {}
    for name, (_, limit) in PARTS.items():
        command = [sys.executable, __file__, "--part", name, "--device", str(device)]
        commands[name] = (command + ["--small"] * args.small, limit)
    on_gpu = device.type == "cuda"
    about = {
        "device": torch.cuda.get_device_name(device) if on_gpu else str(device),
        "torch": f"torch {torch.__version__}",
        "shape": "a tiny shape in float32" if args.small else "Vicuna 7B's shape in bfloat16",
    }
    return run_parts(commands, args.out, about)


if __name__ == "__main__":
    sys.exit(main())
