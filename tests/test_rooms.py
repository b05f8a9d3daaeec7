"""The house: who imports whom, and doctests."""

import ast
import doctest
import importlib
import os
import subprocess
import sys

import pytest
from helpers import ROOT

PACKAGE = ROOT / "s2d"
# A file imports only files before it.
FRONT = "devices model onepage tree mask sampling rules options stats draft decoder".split()
FRONT += "generation soft".split()
# A room imports the front, and only rooms before it.
ROOMS = "checkpoint ngram mcsd passes pair cli proof train trace lesson bench".split()


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
    """And one room, for exit 0."""
    for number, name in enumerate(FRONT):
        above = {*FRONT[:number], "ngram"} if name == "options" else {*FRONT[:number]}
        assert parts(PACKAGE / f"{name}.py") <= above, name
    assert parts(PACKAGE / "onepage.py") == {"model"}


def test_a_room_imports_the_front_and_only_rooms_below_it():
    """And no library the command line: programs alone do, run.py and the __main__ of a room."""
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*FRONT, "__init__"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(ROOMS)
    for number, room in enumerate(ROOMS):
        for path in (PACKAGE / room).glob("*.py"):
            used = parts(path)
            assert used & set(ROOMS) <= set(ROOMS[: number + 1]), path
            library = room not in ("bench", "trace", "lesson", "cli") and path.stem != "__main__"
            assert not library or "cli" not in used, path


# What a program does, and the rooms that are imported for it.
USES = {
    "from s2d import generate, onepage, soft": [],
    """for method in ("ar", "sd", "mcsd", "s2d", "s2d-tree"):
    for options in (dict(), dict(temperature=1.0, rule="rejection")):
        generate(target, [3, 1], draft, method=method, max_new_tokens=4, **options)""": [],
    "from s2d.mcsd import roots": ["mcsd"],
    "generate(target, [3, 1], max_new_tokens=4)": ["ngram"],
    "list(s2d.generate_many(target, [[3, 1]], draft, max_new_tokens=4))": ["passes"],
    "s2d.load_model('weights/mini-7b', 'cpu')": ["checkpoint"],
    """import run
with contextlib.redirect_stdout(sys.stderr):
    run.main("--target 7b --prompt Hi --max-new-tokens 1 --device cpu".split())""": ["pair", "cli"],
}
# Packages that take long to import, and that a miniature does not need.
SLOW = {"torch._dynamo", "transformers", "tokenizers", "jinja2"}


def test_a_room_that_is_not_used_is_not_imported(tmp_path):
    """Importing sets no hook; nothing goes into a user's home."""
    lines = ["import contextlib, sys, s2d", "from s2d.model import Llama, LlamaConfig"]
    lines += ["config = LlamaConfig(9, 16, 24, 2, 2, 1, 8, eos_token_ids=())"]
    lines += ["target, draft = Llama(config), Llama(config)"]
    for line in USES:
        lines += ["before = {*sys.modules}", line, "print(*({*sys.modules} - before))"]
    lines += ["assert sys.excepthook is sys.__excepthook__"]
    lines += [f"assert not {SLOW} & sys.modules.keys()"]
    command = [sys.executable, "-c", "\n".join(lines)]
    environment = os.environ | {"HOME": str(tmp_path)}
    out = subprocess.check_output(command, cwd=ROOT, env=environment, text=True)
    for (line, rooms), names in zip(USES.items(), out.splitlines(), strict=True):
        assert [room for room in ROOMS if f"s2d.{room}" in names.split()] == rooms, line
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("words", ["--help", "--target 7b --exits x"])
def test_a_program_that_does_not_run_needs_no_torch(words):
    lines = ["import sys, runpy", f"sys.argv = ['run.py', *{words.split()}]"]
    lines += ["try:", "    runpy.run_path('run.py', run_name='__main__')", "except SystemExit:"]
    lines += ["    print('torch' in sys.modules, file=sys.stderr)"]
    command = [sys.executable, "-c", "\n".join(lines)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "False"


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if ">>>" in path.read_text()])
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted and not result.failed
