"""What this project does on a GPU, in one command of eight minutes at most.

    python tests/gpu.py --out DIR                        # a GPU with 32 GB of memory, or more
    python tests/gpu.py --out DIR --device cpu --small   # the same with tiny models: CI

It writes tables in DIR/gpu.md, the same in DIR/gpu.json, and what the parts say in DIR/gpu.log. The
parts are in gpu_parts.py. Each is a process of its own with a limit of time; what it has found is
kept if it fails or is cut off, and the others run all the same. Exit code 1: that happened to one.
"""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d.checkpoint import check_device  # noqa: E402
from s2d.checkpoint.files import staged  # noqa: E402
from s2d.cli.program import Parser  # noqa: E402

LIMITS = {  # seconds of each part on a GPU, eight minutes in all
    "machine": 20,
    "exactness": 185,
    "passes": 55,
    "answers": 80,
    "transformers": 50,
    "launches": 45,
}
ON_CPU = 10  # times as long, since CI's machines may be busy


def run_parts(commands: dict[str, tuple[list[str], float]], out: Path) -> int:
    """Run {part: (command, limit in seconds)}; 0 if all came to their end, else 1.

    A command prints JSON, a row of a table on each line. The files are written after each part.
    """
    report = {}
    with (out / "gpu.log").open("w") as log:
        for name, (command, limit) in commands.items():
            print(f"\n== {name}", file=log, flush=True)
            report[name] = run_part(command, limit, log)
            with staged(out / "gpu.json") as stage:
                stage.write_text(json.dumps(report, indent=1) + "\n")
            with staged(out / "gpu.md") as stage:
                stage.write_text("\n".join(as_table(*each) for each in report.items()))
            print(as_table(name, report[name]), flush=True)
    return int(any(part["ended"] != "ok" for part in report.values()))


def run_part(command: list[str], limit: float, log: IO[str]) -> dict[str, Any]:
    """How a part ended, its seconds, and its rows."""
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
    finally:  # also if this program is ended
        kill_with_children(process)
    whole_lines = output.split("\n")[:-1]  # the last one may have been cut
    rows = [json.loads(line) for line in whole_lines]
    return {"ended": ended, "seconds": time.perf_counter() - began, "rows": rows}


def kill_with_children(process: subprocess.Popen) -> None:
    """Kill the session of ``process``; nothing happens if it has ended."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def as_table(name: str, part: dict[str, Any]) -> str:
    """A part as a table in Markdown; the heading says how it ended."""
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
    parser = Parser("python tests/gpu.py", description="What this project does on a GPU.")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="for three files")
    parser.add_argument("--device", default="cuda", help="default: cuda")
    parser.add_argument("--small", action="store_true", help="tiny models, and few of the tests")
    args = parser.parse_args(arguments)
    try:
        device = check_device(args.device)
        for name in ("gpu.json", "gpu.md", "gpu.log"):
            if (args.out / name).exists():
                raise ValueError(f"{args.out} has a {name}, which is not replaced")
        args.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    commands = {}
    for name, limit in LIMITS.items():
        command = [sys.executable, "tests/gpu_parts.py", name, "--device", str(device)]
        if args.small:
            command.append("--small")
        commands[name] = (command, limit if device.type == "cuda" else ON_CPU * limit)
    return run_parts(commands, args.out)


if __name__ == "__main__":
    sys.exit(main())
