"""The house: who imports whom, and doctests."""

import ast
import doctest
import importlib
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from helpers import ROOT, WEIGHTS

PACKAGE = ROOT / "s2d"
# A file imports only files before it.
FRONT = (
    "devices cache model mask tree sampling rules draft options stats decoder generation".split()
)
FRONT += "soft definition".split()
ROOMS = {  # room -> the rooms it may import
    "checkpoint": {"speed", "ngram", "mcsd"},
    "ngram": {"checkpoint"},
    "mcsd": {"checkpoint"},
    "speed": {"checkpoint"},
    "cli": {"checkpoint", "speed"},
    "train": {"checkpoint", "speed", "cli", "ngram", "mcsd"},
    "bench": {"checkpoint", "speed", "train", "cli", "ngram"},
    "trace": {"checkpoint", "cli", "mcsd"},
    "lesson": {"cli"},
}


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path, top_only=False):
    """The modules of this project that a file imports, at its top or anywhere in it."""
    package = list(path.relative_to(ROOT).parts[:-1])
    tree = ast.parse(path.read_text())
    for node in tree.body if top_only else ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            inside = [f"{base}.{alias.name}" for alias in node.names]
            yield from (name for name in [base, *inside] if name in MODULES)


def parts(path, top_only=False):
    return {name.split(".")[1] for name in imported(path, top_only) if "." in name}


def test_a_file_of_the_front_imports_only_files_above_it():
    for number, name in enumerate(FRONT):
        path, above = PACKAGE / f"{name}.py", {*FRONT[:number]}
        above |= {"generation": {"ngram", "mcsd"}, "definition": {"checkpoint"}}.get(name, set())
        assert parts(path) <= above, name


def test_a_room_imports_the_front_and_the_rooms_it_is_built_on():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*FRONT, "__init__"}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(ROOMS)
    for room, allowed in ROOMS.items():
        used = {part for path in (PACKAGE / room).glob("*.py") for part in parts(path)}
        assert used & ROOMS.keys() - {room} <= allowed, room


def test_libraries_do_not_import_the_command_line():
    """Programs alone do: run.py, and the __main__ of a room."""
    for room in ("checkpoint", "ngram", "mcsd", "speed", "train"):
        for path in (PACKAGE / room).glob("*.py"):
            assert path.stem == "__main__" or "cli" not in parts(path), path


def test_the_front_needs_no_room_but_those_that_load_models_and_batches(tmp_path):
    """And importing it sets no hook."""
    shutil.copytree(PACKAGE, tmp_path / "s2d", ignore=shutil.ignore_patterns("__pycache__"))
    for room in ROOMS.keys() - {"checkpoint", "speed"}:
        shutil.rmtree(tmp_path / "s2d" / room)
    code = f"""
import sys
from s2d import Tokenizer, generate, generate_many, load_model
assert sys.excepthook is sys.__excepthook__
folder = {str(WEIGHTS)!r}
target = load_model(folder + "/mini-7b", quick=False)
draft = load_model(folder + "/mini-draft", quick=False)
prompt = Tokenizer(folder + "/mini-7b").encode_chat(["Hi"])
for method in ("ar", "sd", "mcsd", "s2d", "s2d-tree"):
    for options in (dict(), dict(temperature=1.0, rule="rejection")):
        generate(target, prompt, draft, method, max_new_tokens=4, **options)
list(generate_many(target, [prompt] * 2, draft, max_new_tokens=4))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_data_flows_one_way():
    graph = {name: set(imported(path, top_only=True)) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("name", [n for n, path in MODULES.items() if ">>>" in path.read_text()])
def test_doctests(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted and not result.failed
