"""The parts of gpu.py, each a function that yields the rows of its table.

The models that are timed have the shape of Vicuna 7B in bfloat16, and the random weights of
full_size.py: layers above the 12th change little, so that a draft of the first 12 is accepted about
as often as a trained one. Tokens per step are what these weights were made for; times are those of
any model of this shape.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from full_size import DRAFTING, config_of, draft_config, fill
from other_device import Counted
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d import generate  # noqa: E402
from s2d.bench.peers import as_transformers, run_peer  # noqa: E402
from s2d.checkpoint import empty_model  # noqa: E402
from s2d.generation import start  # noqa: E402
from s2d.mask import positions_and_mask  # noqa: E402
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
ROWS = (1, 2, 4, 8, 16, 64)  # of a pass
WARM_UP = 3  # calls before those that are timed: kernels are loaded
GENERATIONS = 2  # that are timed, after another one
# What the profiler calls the functions of CUDA that launch something, and those that wait.
LAUNCHES = {"cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel", "cuLaunchKernelEx"}
WAITS = {"cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy"}


@dataclass(frozen=True)
class Setup:
    """Where to run, and how much."""

    device: torch.device
    shape: str = "7b"  # of full_size.py
    dtype: torch.dtype = torch.bfloat16
    context: int = 512  # positions before a pass that is timed
    calls: int = 20  # of what is timed; their median counts
    new_tokens: int = 128
    steps: int = 2  # that are profiled
    copied: int = 2**30  # bytes
    processes: int = min(8, os.cpu_count() or 1)  # of pytest, if pytest-xdist is here
    tests: tuple[str, ...] = (  # each is one run of pytest, and a row
        "test_devices.py test_roots.py test_rules.py test_draft.py test_tree.py",
        "test_exact.py",
        "test_batch.py",
    )

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    @property
    def prompt(self) -> list[int]:
        generator = torch.Generator().manual_seed(0)
        return torch.randint(1000, (64,), generator=generator).tolist()


def small_setup(device: torch.device) -> Setup:
    return Setup(
        device,
        shape="tiny",
        dtype=torch.float32,
        context=32,
        calls=3,
        new_tokens=16,
        steps=1,
        copied=2**24,
        processes=1,
        tests=("test_roots.py",),
    )


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


def seconds_of(call: Callable[[], Any], setup: Setup) -> float:
    """The median of some calls. On a GPU, launching is included, as a step waits for its pass."""
    for _ in range(WARM_UP):
        call()
    seconds = []
    for _ in range(setup.calls):
        if setup.on_gpu:
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            began.record()
            call()
            ended.record()
            ended.synchronize()
            seconds.append(began.elapsed_time(ended) / 1000)  # from milliseconds
        else:
            began_at = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - began_at)
    return median(seconds)


def peak_gigabytes(setup: Setup) -> float:
    """Of tensors since the peak was last reset; on a CPU of the process, since its start."""
    if setup.on_gpu:
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"VmHWM:\s+(\d+)", status)[1]) / 1e9


def reset_peak(setup: Setup) -> None:
    if setup.on_gpu:
        torch.cuda.reset_peak_memory_stats()


def run_and_show(command: list[str]) -> tuple[int, list[str]]:
    """Run a program, whose output goes to stderr as it comes; its exit code and lines."""
    lines = []
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        for line in process.stdout:
            print(line, end="", file=sys.stderr, flush=True)
            lines.append(line.rstrip())
    return process.returncode, lines


def describe_machine(setup: Setup) -> Iterator[Row]:
    """The device, and the bytes that a large copy reads and writes per second."""
    yield {"what": "device", "is": torch.cuda.get_device_name() if setup.on_gpu else "CPU"}
    yield {"what": "torch", "is": torch.__version__}
    yield {"what": "shape", "is": f"{setup.shape} of full_size.py, {setup.dtype}"}
    yield {"what": "GB/s of a copy", "is": copy_speed(setup) / 1e9}


def copy_speed(setup: Setup) -> float:
    source = torch.ones(setup.copied, dtype=torch.uint8, device=setup.device)
    copy = torch.empty_like(source)
    return 2 * source.nbytes / seconds_of(lambda: copy.copy_(source), setup)


def run_exactness_tests(setup: Setup) -> Iterator[Row]:
    """The tests that every method writes the target's text, in float64, on the device."""
    codes = []
    for files in setup.tests:
        command = [sys.executable, "-m", "pytest", "-v", "--tb=short"]
        if setup.processes > 1 and find_spec("xdist"):
            command.append(f"-n{setup.processes}")
        command += ["--device", str(setup.device), *(f"tests/{file}" for file in files.split())]
        began = time.perf_counter()
        code, lines = run_and_show(command)
        codes.append(code)
        seconds = time.perf_counter() - began
        yield {"tests": files, "found": lines[-1].strip("= "), "seconds": seconds}
    if any(codes):
        raise RuntimeError(f"exit codes of pytest: {codes}")


def compare_with_transformers(setup: Setup) -> Iterator[Row]:
    """``python -m s2d.bench hf`` on a miniature."""
    command = [sys.executable, "-m", "s2d.bench", "hf", "--target", "weights/mini-7b"]
    command += ["--device", str(setup.device), "--max-new-tokens", str(min(48, setup.new_tokens))]
    code, lines = run_and_show(command)
    for line in lines:
        if line.endswith((": ok", ": FAULT")):
            yield {"compared": line[:24].strip(), "found": line[24:]}
    if code != 0:
        raise RuntimeError(f"exit code of bench hf: {code}")


def time_passes(setup: Setup) -> Iterator[Row]:
    """Passes after a context, with the LM head: the target's, and a draft's from exit to exit.

    The share is that of the memory's speed: the bytes of the weights, which a pass reads, per
    second, divided by ``copy_speed``.
    """
    fastest = copy_speed(setup)
    target, draft = make_models(setup)
    segments = [("target", target, 0, target.config.num_hidden_layers, ROWS)]
    for first, end in zip((0, *DRAFTING.exits), DRAFTING.exits):
        segments.append((f"draft, layers {first + 1} to {end}", draft, first, end, (1, 8)))
    for name, model, first, end, all_rows in segments:
        weights = [*model.model.layers[first:end].parameters(), model.lm_head.weight]
        size = sum(weight.nbytes for weight in weights)
        for rows in all_rows:
            seconds = time_pass(setup, model, first, end, rows)
            share = size / seconds / fastest
            times = {"ms": 1000 * seconds, "GB of weights": size / 1e9, "share": share}
            yield {"pass": name, "rows": rows} | times


def time_pass(setup: Setup, model: Llama, first: int, end: int, rows: int) -> float:
    """Seconds of a chain of ``rows`` rows through layers first..end-1 and the LM head."""
    S = setup.context
    place = dict(device=setup.device, dtype=setup.dtype)
    with torch.inference_mode():
        cache = model.new_cache(S + rows, first, end)
        context = torch.randn(1, S, model.config.hidden_size, **place)
        model.run_layers(context, first, end, cache=cache)
        hidden = torch.randn(1, rows, model.config.hidden_size, **place)
        chain = np.tri(rows, dtype=bool)  # of ancestors; node 0 is the first row
        positions, mask = positions_and_mask(S, S + 1, chain, **place)

        def run() -> None:
            cache.keep(S, [])  # roll back
            model.logits(model.run_layers(hidden, first, end, positions, mask, cache))

        return seconds_of(run, setup)


def time_answers(setup: Setup) -> Iterator[Row]:
    """Whole answers; in half precision, nearly equal logits may make them differ."""
    target, draft = make_models(setup)
    alone: dict[float, list[int]] = {}  # by temperature, the text of ``ar``
    for name, options in METHODS.items():
        used = options | {"max_new_tokens": setup.new_tokens}
        reset_peak(setup)
        generate(target, setup.prompt, draft, **used)  # warms up: passes of all shapes
        found = [generate(target, setup.prompt, draft, **used) for _ in range(GENERATIONS)]
        seconds = median(each.stats.seconds for each in found)
        tokens = found[0].tokens
        expected = alone.setdefault(options.get("temperature", 0.0), tokens)
        yield {
            "method": name,
            "tokens/s": len(tokens) / seconds,
            "tokens per step": found[0].stats.mean_accepted_tokens,
            "ms per step": 1000 * seconds / found[0].stats.steps,
            "tokens as ar's": len(os.path.commonprefix([tokens, expected])),
            "peak GB": peak_gigabytes(setup),
        }


def time_transformers(setup: Setup) -> Iterator[Row]:
    """``generate`` of transformers with the same weights, and with its own defaults."""
    target, draft = make_models(setup)
    peer = as_transformers(target)
    for name, options in (
        ("transformers", {}),
        ("transformers, assisted by the same draft", {"assistant_model": as_transformers(draft)}),
    ):
        reset_peak(setup)
        seconds = []
        for _ in range(1 + GENERATIONS):  # the first warms up
            began = time.perf_counter()
            tokens, _ = run_peer(setup.prompt, 0, peer, setup.new_tokens, **options)
            seconds.append(time.perf_counter() - began)
        speed = len(tokens) / median(seconds[1:])
        yield {"method": name, "tokens/s": speed, "peak GB": peak_gigabytes(setup)}


def count_launches(setup: Setup) -> Iterator[Row]:
    """What a step launches, copies and waits for, as the profiler sees it.

    It should wait once for each exit that it tries, once for each level, and twice more. On a CPU
    operations take the place of launches, and nothing waits.
    """
    target, draft = make_models(setup)
    for name, options in METHODS.items():
        used = options | {"max_new_tokens": 64}
        yield {"method": name} | profile_steps(setup, target, draft, used)


def profile_steps(setup: Setup, target: Llama, draft: Llama, options: dict[str, Any]) -> Row:
    """The means of a few steps after the first one, which reads the prompt."""
    if setup.on_gpu:
        generate(target, setup.prompt, draft, **options)  # warms up: passes of all shapes
    decoder = start(target, setup.prompt, draft, **options)
    tried: list[int] = []
    decoder.drafter.exits = [Counted(each, tried) for each in decoder.drafter.exits]
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
    on_gpu = [each.name for each in profiled.events() if each.device_type == DeviceType.CUDA]
    # Only within steps: outside, the profiler itself waits for the GPU.
    spans = [each.time_range for each in on_cpu if each.name == "step"]
    calls = [
        each.name
        for each in on_cpu
        if any(span.start <= each.time_range.start <= span.end for span in spans)
    ]
    launches = [
        name for name in calls if (name in LAUNCHES if setup.on_gpu else name.startswith("aten::"))
    ]
    kernels = [name for name in on_gpu if not name.startswith(("Memcpy", "Memset", "step"))]
    return {
        "launches": len(launches) / setup.steps,
        "kernels": len(kernels) / setup.steps,
        "copies to the GPU": sum("HtoD" in name for name in on_gpu) / setup.steps,
        "copies to the CPU": sum("DtoH" in name for name in on_gpu) / setup.steps,
        "waits": sum(name in WAITS for name in calls) / setup.steps,
        "waits expected": 2 + (levels + len(tried)) / setup.steps,
    }


PARTS = {
    "machine": describe_machine,
    "exactness": run_exactness_tests,
    "hf": compare_with_transformers,
    "passes": time_passes,
    "answers": time_answers,
    "transformers": time_transformers,
    "launches": count_launches,
}
NEEDS = {"hf": "transformers", "transformers": "transformers"}


def main() -> None:
    """Print the rows of one part, a line of JSON each; what else is said goes to stderr."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--device", type=torch.device, required=True)
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    setup = small_setup(args.device) if args.small else Setup(args.device)
    if setup.on_gpu:
        torch.cuda.set_device(setup.device)
    needed = NEEDS.get(args.part, "torch")
    if find_spec(needed) is None:
        print(json.dumps({"skipped": f"{needed} is not here"}))
        return
    to_gpu_py = sys.stdout
    with redirect_stdout(sys.stderr):  # libraries print as well
        for row in PARTS[args.part](setup):
            print(json.dumps(row), file=to_gpu_py, flush=True)


if __name__ == "__main__":
    main()
