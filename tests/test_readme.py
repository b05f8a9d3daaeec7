"""What READMEs show works: the Python example, the commands, the figures on a small scale."""

import argparse
import re
import shlex
import subprocess
from functools import partial

import pytest
from browser import Browser
from helpers import ROOT, WEIGHTS, need_compiler

import run
from s2d import generate
from s2d.bench import __main__ as bench
from s2d.bench.tables import total
from s2d.train import __main__ as train
from s2d.train import corpus
from s2d.weights import __main__ as weights

READMES = [ROOT / "README.md", *sorted((ROOT / "s2d").glob("*/README.md"))]
PROGRAMS = {"run.py": run, "s2d.bench": bench, "s2d.train": train, "s2d.weights": weights}


def test_the_python_example(monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", READMES[0].read_text(), re.DOTALL)[1]
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    answer, accepted = capsys.readouterr().out.rsplit(maxsplit=1)
    assert answer == f"The capital of Tadastan is {corpus.WORLD['Tadastan']['capital']}."
    assert float(accepted) > 1.0


@pytest.fixture(scope="module")
def commands_of_ci():
    """What .ci/run runs, cut out of the READMEs by itself."""
    script = (ROOT / ".ci/run").read_text()
    function = re.search(r"^commands\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)[0]
    labels = re.search(r"^for label in (.*); do", script, re.MULTILINE)[1]
    loop = f"{function}\nfor label in {labels}; do commands $label; done"
    command = ["bash", "-euo", "pipefail", "-c", loop]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_ci_runs_every_command_that_a_readme_shows(commands_of_ci):
    """The texts are cut here by other means than CI's own, which have to find the same."""
    block, shown = r"(?:<!-- ci: (\w+)[^\n]* -->\n)?```sh\n(.*?)```", []
    for readme in READMES:
        text = readme.read_text()
        assert set(re.findall(r"^```(\w+)", text, re.MULTILINE)) <= {"sh", "python"}, readme
        for label, lines in re.findall(block, text, re.DOTALL):
            assert label in ("run", "more", "small", "test"), f"{readme}: CI does not run\n{lines}"
            shown += re.sub(r" +#.*", "", lines.replace("\\\n", "")).splitlines()
        outside = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        assert not re.findall(r"`(?:python|torchrun) [^`]*`", outside), "CI runs blocks only"
    assert len(commands_of_ci) == len(shown) > 20
    for command in shown:
        assert any(each.startswith(command) for each in commands_of_ci), command


def test_every_command_of_ci_is_understood(monkeypatch, commands_of_ci):
    """With the options that make it small, which a reader does not see."""

    def parse(self, arguments=None, namespace=None):
        assert not self.parse_known_args(arguments, namespace)[1]
        raise SystemExit("understood")

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.chdir(ROOT)
    understood = set()
    for command in commands_of_ci:
        words = shlex.split(re.sub(r"^OMP_NUM_THREADS=\d+ |[|<].*| +#.*", "", command))
        if name := next((word for word in words[1:] if word in PROGRAMS), None):
            with pytest.raises(SystemExit, match="understood"):
                PROGRAMS[name].main(words[words.index(name) + 1 :])
            understood.add(name)
    assert understood == set(PROGRAMS)


def test_every_pattern_of_a_download_has_its_own_option():
    """The hub's client takes one pattern an option, and any further word for a file's name."""
    commands = re.findall(r"hf download .*", (ROOT / "weights/README.md").read_text())
    for command in commands:
        *options, last = shlex.split(command)[3:]
        assert set(options[::2]) <= {"--include", "--exclude", "--local-dir"}, command
        assert len(options) % 2 == 1 and last.startswith("weights/")
    assert len(commands) >= 6


@pytest.mark.parametrize("tool", [Browser, need_compiler])
def test_a_missing_tool_skips_its_tests_and_is_an_error_in_ci(tool, monkeypatch):
    """README and CI name what is to be installed, as the line does that a skipped test says."""
    for name in ("PATH", "CXX"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.delenv("TEST_TOOLS", raising=False)
    script, readme = ((ROOT / name).read_text() for name in (".ci/run", "README.md"))
    with pytest.raises(pytest.skip.Exception, match="^there is no .* here: apt-get ") as skipped:
        tool()
    packages = str(skipped.value).partition("install ")[2]
    assert f"`apt-get install {packages}`" in readme and packages in script
    switch, value = re.search(r"^export (\w+)=(\w+)$", script, re.MULTILINE).groups()
    monkeypatch.setenv(switch, value)
    with pytest.raises(pytest.fail.Exception, match=re.escape(packages)):
        tool()


def test_mean_accepted_tokens_of_the_exits_differ(mini, held_out_prompts):
    """Accepted lengths of the miniature are like the paper's, and deeper exits do better."""
    ask = partial(generate, mini("mini-7b"), draft=mini("mini-draft"), method="sd", stop=0)
    accepted = {}
    for exit_layer in (2, 4):
        how = dict(exits=[exit_layer], draft_length=6, max_new_tokens=64)
        outputs = [ask(prompt, **how) for prompt in held_out_prompts(6)]
        accepted[exit_layer] = total([{"generations": outputs}]).mean_accepted_tokens
    assert 2.3 < accepted[4] < 5.0 and accepted[2] < 0.9 * accepted[4]


@pytest.mark.parametrize("name", ["mini-7b", "mini-13b", "mini-70b", "mini-draft"])
def test_shipped_folders_are_small_and_complete(name):
    files = {"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"}
    if name == "mini-draft":
        files |= {f"decision-{size}.safetensors" for size in ("7b", "13b", "70b")}
    assert {path.name for path in (WEIGHTS / name).iterdir()} == files
    shipped = [*WEIGHTS.glob("mini-*/*"), *WEIGHTS.glob("*.safetensors")]
    assert sum(path.stat().st_size for path in shipped) < 59 * 2**20


def test_the_pictures_are_there_and_small():
    shown, page, speed = [], ROOT / "s2d/trace/page.png", ROOT / "s2d/bench/speed.svg"
    for readme in READMES:
        paths = re.findall(r"!\[[^]]+\]\(([^)]+)\)", readme.read_text())
        shown += [(readme.parent / path).resolve() for path in paths]
    assert sorted(shown) == [speed, page, page]
    assert all(picture.stat().st_size < 150_000 for picture in shown)
