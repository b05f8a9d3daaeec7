"""The house: the method at the front, programs behind doors. All imports are read from the files themselves."""

import ast
from graphlib import TopologicalSorter

from helpers import ROOT

PACKAGE = ROOT / "s2d"
FRONT_FOLDERS = {
    "weights",
    "tune",
}  # front rooms all the same: from a folder of weights to a model; the rate rule


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
FRONT = [
    name for name in MODULES if len(name.split(".")) <= 2 and MODULES[name].parent == PACKAGE
] + [name for name in MODULES if name.split(".")[1:2] and name.split(".")[1] in FRONT_FOLDERS]
BACK = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))} - FRONT_FOLDERS
DECODING = {
    "tree",
    "draft",
    "proposal",
    "verify",
    "decode",
    "options",
    "sampling",
    "decision",
    "parallel",
    "tune",
}


def imported(path):
    """The modules of this project that a file imports, at its top or anywhere in it."""
    package = list(path.relative_to(ROOT).parts[:-1])
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *(node.module or "").split(".")]).strip(".")
            inside = [f"{base}.{alias.name}" for alias in node.names]
            modules = [name for name in inside if name in MODULES]
            yield from modules
            if base in MODULES and len(modules) < len(inside):
                yield base
        elif isinstance(node, ast.Constant) and node.value in MODULES.keys() - {
            "s2d"
        }:  # imported by its name as a text
            yield node.value


def test_imports_are_read_as_python_reads_them():
    assert {"s2d.decode", "s2d.tokenizer", "s2d.weights"} == set(imported(MODULES["s2d"]))
    assert {"s2d.weights", "s2d.bench.shapes", "s2d.bench.check"} <= set(
        imported(MODULES["s2d.bench.__main__"])
    )
    assert {"s2d", "s2d.decision", "s2d.parallel"} <= set(imported(ROOT / "run.py"))


def test_no_front_room_imports_from_a_back_room():
    assert {"s2d.model", "s2d.decode", "s2d.weights.config"} <= set(FRONT) and {
        "train",
        "bench",
        "trace",
    } <= BACK
    for path in [*map(MODULES.get, FRONT), *ROOT.glob("*.py")]:
        allowed = {
            "run.py": {"trace"},
            "__init__.py": {"extras"},
        }  # load_model makes compiled twins
        rooms = {name.split(".")[1] for name in imported(path) if "." in name}
        rooms -= allowed.get(path.name, set())
        assert not rooms & BACK, f"{path} imports from {rooms & BACK}"
        assert path.parent.name != "weights" or not rooms & DECODING, (
            f"{path} imports from {rooms & DECODING}"
        )


def test_data_flows_one_way():
    """No module imports itself by way of others, and training knows nothing about the benchmark."""
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError
    assert not [
        name
        for name in MODULES
        if name.startswith("s2d.train")
        for other in graph[name]
        if ".bench" in other
    ]
    assert not [
        name
        for name in MODULES
        if name.startswith("s2d.trace")
        for other in graph[name]
        if ".bench" in other or ".train" in other
    ]


def test_the_front_can_be_read_in_an_evening():
    names = [
        "model",
        "cache",
        "sampling",
        "tree",
        "draft",
        "proposal",
        "verify",
        "decode",
        "tokenizer",
        "__init__",
    ]
    assert sum(len((PACKAGE / f"{name}.py").read_text().splitlines()) for name in names) < 1550
    front = [path.name for path in PACKAGE.glob("*.py")]
    assert len(front) <= 17
    reading = (ROOT / "README.md").read_text().partition("## Read")[2]
    assert not [name for name in [*front, *FRONT_FOLDERS] if name not in reading], (
        "README's reading order leaves some out"
    )
