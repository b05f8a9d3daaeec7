"""The house: the front in its order, doors behind it, and its size. Imports are read from files."""

import ast
import doctest
import importlib
import re
from graphlib import TopologicalSorter

import pytest
from helpers import ROOT

PACKAGE = ROOT / "s2d"
# Each imports only files before it. generate.py alone knows the extras, and imports them lazily.
FRONT = "cache model sampling tree verify ngram proposal exits draft decode soft generate".split()
BESIDE = "__init__ fields files program user_cache".split()  # and the doors' own helpers
DOORS = {  # door -> the doors that it is built on, all of them above it
    "text": set(),
    "extras": set(),
    "weights": {"extras", "text"},  # load_model makes compiled twins
    "train": {"weights", "extras", "text"},
    "bench": {"weights", "extras", "text", "train"},  # its prompts are the corpus'
    "trace": {"text"},
}
EXPLAINED = {  # file -> what has a doctest there
    "tree": {"ancestor_mask", "KConfig"},
    "verify": {"follow", "residual"},
    "decode": {"up_to_eos"},
    "ngram": {"NGrams"},
    "soft": {"soft_losses"},
}
# What a file's first lines say it knows nothing about -> modules that it must not import, and words
# that must not be in its names, arguments and attributes.
UNKNOWN = {
    "models": ({"model", "draft"}, "model llama target"),
    "caches": ({"cache"}, "cache"),
    "trees": ({"tree"}, "tree"),
    "drafts": ({"draft", "proposal"}, "draft drafter"),
    "drafting": ({"draft", "proposal"}, "draft drafter exit"),
    "targets": ({"decode"}, "target"),
    "the target": ({"decode"}, "target"),
    "exits": ({"draft"}, "exit"),
    "files": ({"files"}, "file folder"),
    "text": ({"text", "ngram"}, "text"),
    "tokens": ({"text"}, "token"),
    "ids": (set(), "id"),
    "tensors": (set(), "tensor torch"),
    "n-grams": ({"ngram"}, "gram"),
    "decoding": ({"decode", "generate"}, "decode generate generation"),
    "the names of methods": ({"generate"}, "method"),
    "training loops": ({"train"}, "epoch optimizer"),
    "data": ({"train"}, "corpus dialogue"),
    "losses": ({"soft"}, "loss"),
    "the SoFT loss": ({"soft"}, "loss"),
    "questions": (set(), "question"),
    "timing": (set(), "clock second perf"),
    "speed": (set(), "clock second perf"),
    "measuring": (set(), "clock perf measure"),
    "pages": (set(), "page"),
}
OF_PATHS = {"read_text", "write_text"}  # pathlib's names


def module_name(path):
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imported(path, top_only=False):
    """The modules of this project that a file imports, at its top or anywhere in it."""
    package = list(path.relative_to(ROOT).parts[:-1])
    tree = ast.parse(path.read_text())
    for node in tree.body if top_only else ast.walk(tree):
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
        elif isinstance(node, ast.Constant) and node.value in MODULES.keys() - {"s2d"}:
            yield node.value  # imported by its name as a text


def rooms(path, **how):
    """The second parts of the modules that a file imports: files of the front, doors."""
    return {name.split(".")[1] for name in imported(path, **how) if "." in name}


def test_imports_are_read_as_python_reads_them():
    expected = "decode generate extras.many text.tokenizer weights".split()
    assert {f"s2d.{name}" for name in expected} == set(imported(MODULES["s2d"]))
    assert {"s2d.weights", "s2d.bench.speed"} <= set(imported(MODULES["s2d.bench.__main__"]))
    assert {"extras", "generate", "trace"} <= rooms(ROOT / "run.py")
    assert rooms(PACKAGE / "generate.py") > {"extras"}


def test_every_file_is_in_the_front_beside_it_or_behind_a_door():
    assert {path.stem for path in PACKAGE.glob("*.py")} == {*FRONT, *BESIDE}
    assert {path.parent.name for path in PACKAGE.glob("*/*.py")} == set(DOORS)


@pytest.mark.parametrize("name", FRONT)
def test_a_file_of_the_front_imports_only_files_above_it(name):
    path = PACKAGE / f"{name}.py"
    allowed = set(FRONT[: FRONT.index(name)])
    assert rooms(path, top_only=True) <= allowed
    assert rooms(path) <= allowed | ({"extras"} if name == "generate" else set())


@pytest.mark.parametrize("door", DOORS)
def test_a_door_imports_the_front_and_the_doors_it_is_built_on(door):
    above = set(list(DOORS)[: list(DOORS).index(door)])
    others = {room for path in (PACKAGE / door).glob("*.py") for room in rooms(path)}
    assert others & DOORS.keys() - {door} == DOORS[door] <= above


def test_data_flows_one_way():
    graph = {name: set(imported(path)) - {name} for name, path in MODULES.items()}
    TopologicalSorter(graph).prepare()  # raises CycleError


def words_in(path):
    """The words, in the singular, of a file's names, arguments and attributes; not of constants."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        found = (getattr(node, field, None) for field in ("id", "arg", "attr", "name", "asname"))
        names |= {name for name in found if isinstance(name, str) and not name.isupper()}
    words = re.findall("[A-Z]?[a-z]+|[A-Z]+(?![a-z])", " ".join(names - OF_PATHS))
    return {re.sub("(?<=[^s])s$", "", word.lower()) for word in words}


def untrue(path, imports=None):
    """Yield what is not true of the "Knows nothing about X" in the first lines of a file."""
    imports = rooms(path) if imports is None else imports
    opening = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    said = re.search(r"(?i)knows nothing about ([^.:;(]+)", opening)
    for what in re.split(r", | or | and ", said[1].strip()) if said else ():
        if path.stem in FRONT and what not in UNKNOWN:
            yield f"what is {what!r}?"
        modules, words = UNKNOWN.get(what, (set(), ""))
        known = (imports & modules) | (words_in(path) & {*words.split()})
        if known:
            yield f"it knows about {what}: {', '.join(sorted(known))}"


def test_what_opening_lines_say_is_true(tmp_path):
    """Of imports, and of names, arguments and attributes."""
    found = {name: list(untrue(path)) for name, path in MODULES.items()}
    assert not any(found.values()), found
    for line in ("def f(*, draft_length): 0", "x.drafts = 1", "f(draft=1)", "class NoDraft: 0"):
        file = tmp_path / "model.py"
        file.write_text(f'"""A file. Knows nothing about trees or drafts."""\n{line}\n')
        assert list(untrue(file, set())) == ["it knows about drafts: draft"], line


@pytest.mark.parametrize("name", MODULES)
def test_doctests(name):
    if ">>>" not in MODULES[name].read_text():
        return
    module = importlib.import_module(name)
    result = doctest.testmod(module, extraglobs={"torch": importlib.import_module("torch")})
    assert result.attempted and not result.failed


@pytest.mark.parametrize("name", EXPLAINED)
def test_toys_explain_the_ideas(name):
    tests = doctest.DocTestFinder().find(importlib.import_module(f"s2d.{name}"))
    assert EXPLAINED[name] <= {test.name.split(".")[-1] for test in tests if test.examples}


OPENED = {".py", ".js", ".css", ".html", ".txt"}  # READMEs and pictures are no program


def lines_of(*paths):
    return sum(len(path.read_text().splitlines()) for path in paths)


def counted():
    """{room: lines}, as README states them: everything that somebody could open."""
    front = {name: PACKAGE / f"{name}.py" for name in FRONT}
    rooms = {"front": lines_of(*front.values())}
    for door in DOORS:
        files = (PACKAGE / door).iterdir()
        rooms[door] = lines_of(*(each for each in files if each.suffix in OPENED))
    rooms["beside"] = lines_of(*(PACKAGE / f"{name}.py" for name in BESIDE), ROOT / "run.py")
    rooms["program"] = sum(rooms.values())
    rooms["tests"] = lines_of(*(ROOT / "tests").glob("*.py"))
    return rooms


def test_minimal_is_a_promise():
    rooms, opened = counted(), [each for each in PACKAGE.rglob("*") if each.suffix in OPENED]
    assert rooms["program"] == lines_of(*opened, ROOT / "run.py") < 11000  # the aim is 8,900,
    assert rooms["front"] < 2050  # of this 1,650,
    assert rooms["tests"] < 9400  # and 8,000
    assert not [path.name for path in PACKAGE.rglob("*.py") if lines_of(path) > 350]


def test_lines_are_not_packed():
    for path in [*PACKAGE.rglob("*.py"), ROOT / "run.py", *(ROOT / "tests").glob("*.py")]:
        text = path.read_text()
        long = [number for number, line in enumerate(text.splitlines(), 1) if len(line) > 100]
        assert not long, f"{path}: lines {long} are over 100 characters"
        assert "fmt: " + "skip" not in text and "fmt: " + "off" not in text, path


def test_readme_states_these_numbers():
    """One row a room, such as ``| front | 1,512 |``, between two ``<!-- lines -->``."""
    table = (ROOT / "README.md").read_text().split("<!-- lines -->")[1]
    stated = re.findall(r"^\| \[?`?([a-z]+)[^|]*\| ([\d,]+) \|", table, flags=re.M)
    assert {room: int(lines.replace(",", "")) for room, lines in stated} == counted()
