"""The house: who imports whom, and doctests."""

import ast
import doctest
import importlib
import multiprocessing
import re
import subprocess
import sys

import pytest
from helpers import ROOT

PACKAGE = ROOT / "s2d"
# A file imports only files before it.
FRONT = "devices cache model mask tree sampling rules own options draft stats decoder".split()
FRONT += "generation soft definition".split()
# A room imports the front, and only rooms before it.
ROOMS = "checkpoint ngram mcsd speed pair cli train trace lesson bench".split()


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path):
    """The modules of this project that a file imports."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            inside = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name for name in [base, *inside] if name in MODULES)


def parts(path):
    return {name.split(".")[1] for name in imported(path) if "." in name}


def test_a_file_of_the_front_imports_only_files_above_it():
    for number, name in enumerate(FRONT):
        path, above = PACKAGE / f"{name}.py", {*FRONT[:number]}
        above |= {"generation": {"ngram", "mcsd"}, "definition": {"pair"}}.get(name, set())
        assert parts(path) <= above, name


def test_a_room_imports_the_front_and_only_rooms_below_it():
    """And no library the command line: programs alone do, run.py and the __main__ of a room."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*FRONT, "__init__", "__main__"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(ROOMS)
    for number, room in enumerate(ROOMS):
        for path in (PACKAGE / room).glob("*.py"):
            used = parts(path)
            assert used & set(ROOMS) <= set(ROOMS[: number + 1]), path
            library = room not in ("bench", "trace", "lesson", "cli") and path.stem != "__main__"
            assert not library or "cli" not in used, path


# What a program does with the front, and the rooms that each part of it uses.
USES = {
    "from s2d import definition, generate, soft": set(),
    """for method in ("ar", "sd", "mcsd", "s2d", "s2d-tree"):
    for options in (dict(), dict(temperature=1.0, rule="rejection")):
        generate(target, [3, 1], draft, method, max_new_tokens=4, **options)""": set(),
    'generate(target, [3, 1], draft, init="target", max_new_tokens=4)': {"mcsd", "checkpoint"},
    "generate(target, [3, 1], max_new_tokens=4)": {"ngram"},
    "from s2d import load_model; load_model(WEIGHTS / 'mini-7b')": {"checkpoint"},
    "list(s2d.generate_many(target, [[3, 1]], draft, max_new_tokens=4))": {"speed"},
    "import s2d.trace.record": {"trace", "checkpoint", "mcsd", "cli"},
    "import s2d.bench.speed": {"bench", "checkpoint", "cli", "speed", "train", "pair"},
    "import s2d.train.nested": {"train", "checkpoint", "cli", "speed", "pair"},
    "import s2d.lesson.checks": {"lesson"},
}


def run_without(room, lines):
    """Run a program that cannot import a room, in a process that has imported the project."""
    for name in [each for each in sys.modules if each.split(".")[0] in ("s2d", "helpers")]:
        del sys.modules[name]
    sys.modules[f"s2d.{room}"] = None
    exec("\n".join(lines), {})


def test_whatever_does_not_use_a_room_works_without_it(tmp_path, monkeypatch):
    """Importing sets no hook; nothing goes into a user's home."""
    for name in MODULES:  # so that the libraries of others are imported once for all processes
        importlib.import_module(name)
    monkeypatch.setenv("HOME", str(tmp_path))  # theirs write there
    context, processes = multiprocessing.get_context("fork"), {}
    for room in ROOMS:
        lines = ["import sys, s2d", "from helpers import WEIGHTS, random_llama"]
        lines += ["target, draft = (random_llama(seed, eos_token_ids=()) for seed in (1, 2))"]
        lines += [line for line, used in USES.items() if room not in used]
        lines += ["assert sys.excepthook is sys.__excepthook__"]
        processes[room] = context.Process(target=run_without, args=(room, lines))
        processes[room].start()
    for process in processes.values():
        process.join()
    assert [room for room, process in processes.items() if process.exitcode != 0] == []
    assert not list(tmp_path.iterdir())


# What a room is called in code, and what only its options are about.
OF_ROOMS = "roots|decision|ngram|datastore|TableExit|torchrun|is_initialized|mcsd|StopStrings"
CORE = {*FRONT} - {"devices", "options", "generation"}


def test_the_core_names_no_room():
    for name in CORE:
        assert re.findall(rf"\b({OF_ROOMS})\b", (PACKAGE / f"{name}.py").read_text()) == [], name


# Packages that take long to import, and that a miniature does not need.
SLOW = {"torch._dynamo", "transformers", "tokenizers", "jinja2"}


@pytest.mark.parametrize("words", ["--target 7b", "--help", "--target /nowhere"])
def test_a_program_is_quick_to_start(words):
    """PyTorch's compiler takes most of a second to import: random numbers on meta would need it."""
    lines = ["import sys, runpy", f"sys.argv = ['run.py', *{words.split()}]"]
    lines += ["try:", "    runpy.run_path('run.py', run_name='__main__')", "except SystemExit:"]
    lines += [f"    print({SLOW} & sys.modules.keys(), file=sys.stderr)"]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "set()"


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if ">>>" in path.read_text()])
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted and not result.failed
