"""What READMEs show works: commands, output, Python, pictures."""

import re
import subprocess

from helpers import ROOT, WEIGHTS, blocks, program

import run

READMES = [ROOT / "README.md", ROOT / "s2d/README.md", *sorted((ROOT / "s2d").glob("*/*.md"))]


def test_ci_runs_every_command_that_a_readme_shows():
    block, shown = r"(?:<!-- ci: (\w+)[^\n]* -->\n)?```sh\n(.*?)```", []
    for readme in READMES:
        text = readme.read_text()
        for label, lines in re.findall(block, text, re.DOTALL):
            assert label in ("run", "more", "small", "test"), f"{readme}: CI does not run\n{lines}"
            shown += re.sub(r" +#.*", "", lines.replace("\\\n", "")).splitlines()
    script = (ROOT / ".ci/run").read_text()
    function = re.search(r"^commands\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)[0]
    labels = re.search(r"^for label in (.*); do", script, re.MULTILINE)[1]
    loop = f"{function}\nfor label in {labels}; do commands $label; done"
    command = ["bash", "-euo", "pipefail", "-c", loop]
    commands = subprocess.check_output(command, cwd=ROOT, text=True).splitlines()
    assert len(commands) == len(shown) > 20
    for command in shown:
        assert any(each.startswith(command) for each in commands), command


def test_the_output_shown_is_what_is_printed(tmp_path, monkeypatch, capsys):
    """But for times and speeds. From any directory, after four lines of notices."""
    shown = re.search(r"^```\n(weights/vicuna.*?)```", READMES[0].read_text(), re.DOTALL | re.M)[1]
    monkeypatch.chdir(tmp_path)
    assert program(run.main, "--target", "13b") == 0
    out, error = capsys.readouterr()
    notices, _, report = error.partition("\n\n")
    notice, *others = notices.splitlines()
    begins = "loading target ", "prompt format: Vicuna", "target on "
    assert all(map(str.startswith, others, begins)) and len(others) == 3
    lines = [line for line in report.splitlines() if not line.startswith("timing ")]
    printed = "\n".join([notice, out, *lines, ""])
    measured = r"[\d.]+ (s,|tokens/s|times)"
    assert re.sub(measured, r"_ \1", printed) == re.sub(measured, r"_ \1", shown)


def test_the_python_that_is_shown_runs(capsys, monkeypatch):
    """That of README, and of the page of the options: it finds the draft, and stops."""
    monkeypatch.chdir(ROOT)
    names = {}
    for block in blocks("README.md") + blocks("s2d/cli/README.md"):
        exec(block, names)
    answer, per_step, *begun = capsys.readouterr().out.splitlines()
    assert answer == "The capital of Tadastan is Vorbiburg." and float(per_step) > 1
    assert begun == ["The capital of Tadastan is ", "stop_at The capital of Tadastan is "]
    assert names["pair"].draft_folder.path.samefile(WEIGHTS / "mini-draft")


def test_the_house_lists_all_flat_files_and_rooms():
    text = (ROOT / "s2d/README.md").read_text()
    files = {path.name for path in (ROOT / "s2d").glob("*.py")} - {"__init__.py"}
    rooms = {f"{path.parent.name}/" for path in (ROOT / "s2d").glob("*/__init__.py")}
    assert files | rooms <= set(re.findall(r"`([^`]+)`", text))


def test_the_pictures_are_there_and_what_is_shipped_is_small():
    shipped = [*WEIGHTS.glob("mini-*/*"), *WEIGHTS.glob("*.safetensors")]
    for readme in READMES:
        paths = re.findall(r"!\[[^]]+\]\(([^)]+)\)", readme.read_text())
        shipped += [readme.parent / path for path in paths]
    assert sum(path.stat().st_size for path in shipped) < 59 * 2**20
