"""What README shows works: its Python example, and the commands that made its figures on a small scale."""

import argparse
import re
import shlex
import subprocess

import pytest
from helpers import ROOT

import run
from s2d import generate
from s2d.bench import __main__ as bench
from s2d.bench.specbench import held_out_prompts
from s2d.train import __main__ as train
from s2d.train import corpus
from s2d.weights import __main__ as weights
from s2d.weights.get import how_to_get


def test_the_python_example(monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    answer, accepted = capsys.readouterr().out.rsplit(maxsplit=1)
    assert answer == f"The capital of Tadastan is {corpus.WORLD['Tadastan']['capital']}."
    assert float(accepted) > 1.0


READMES = [ROOT / "README.md", *sorted((ROOT / "s2d").glob("*/README.md"))]


def commands_of_ci():
    """What .ci/run runs, in its own words."""
    script = (ROOT / ".ci" / "run").read_text()
    extraction = re.search(r"^commands\(\) \{.*?^\}", script, re.DOTALL | re.MULTILINE)[0]
    labels = re.search(r"^for label in (.*); do", script, re.MULTILINE)[1]
    return subprocess.run(["bash", "-euo", "pipefail", "-c", f"{extraction}\nfor label in {labels}; do commands $label; done"],
                          cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()  # fmt: skip


def test_ci_runs_every_command_that_a_readme_shows():
    """The texts are cut here by other means than CI's own, whose extraction must come to the same commands."""
    shown, texts = [], ""
    for readme in READMES:
        for label, block in re.findall(
            r"(?:<!-- ci: (\w+)[^\n]* -->\n)?```sh\n(.*?)```", readme.read_text(), re.DOTALL
        ):
            assert label in ("run", "more", "small", "test"), f"{readme}: CI does not run\n{block}"
            shown += re.sub(r" +#.*", "", block.replace("\\\n", "")).splitlines()
        assert set(re.findall(r"^```(\w+)", readme.read_text(), re.MULTILINE)) <= {
            "sh",
            "python",
        }, "CI reads no other block"
        texts += re.sub(r"```.*?```", "", readme.read_text(), flags=re.DOTALL)
    assert not re.findall(r"`(?:python|torchrun) [^`]*`", texts), (
        "a command outside the blocks that CI runs"
    )
    commands = commands_of_ci()
    assert len(commands) == len(shown) > 20
    for command in shown:
        assert any(each.startswith(command) for each in commands), command


def test_every_command_of_ci_is_understood(monkeypatch):
    """With the options that make it small, which a reader does not see and some other program would refuse."""

    class Understood(Exception):
        pass

    def parse(self, arguments=None, namespace=None):
        parsed, unknown = self.parse_known_args(arguments, namespace)
        assert not unknown
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.chdir(ROOT)
    programs = {"run.py": run, "s2d.bench": bench, "s2d.train": train, "s2d.weights": weights}
    understood = set()
    for command in commands_of_ci():
        words = shlex.split(re.sub(r"^OMP_NUM_THREADS=\d+ |[|<].*| +#.*", "", command))
        name = next((word for word in words[1:] if word in programs), None)
        if name:
            with pytest.raises(Understood):
                programs[name].main(words[words.index(name) + 1 :])
            understood.add(name)
    assert understood == set(programs)


def test_every_pattern_of_a_download_has_its_own_option():
    """The hub's client takes one pattern an option, and any further word for the name of a file."""
    commands = re.findall(r"hf download .*", (ROOT / "weights/README.md").read_text()) + [
        how_to_get("smollm2-1.7b")
    ]
    for command in commands:
        words = shlex.split(command)[2:]
        assert all(option in ("--include", "--exclude", "--local-dir") for option in words[1::2]), (
            command
        )
        assert len(words) % 2 == 1 and words[-1].startswith("weights/")
    assert len(commands) >= 7


def test_the_quality_report(capsys):
    bench.main(["quality", "--targets", "mini-7b", "--count", "2"])
    report = capsys.readouterr().out
    assert re.search(r"mini-7b( +[\d.]+%){5}\n", report)
    assert re.search(r"before SoFT( +[\d.]+%){3}\n +mini-draft( +[\d.]+%){3}\n", report)
    assert re.search(r"lossy\n +mini-7b( +[\d.]+%){2}( +-[\d.]+){2}\n", report)


def test_mean_accepted_tokens_of_the_exits_differ(mini, tokenizer):
    """The miniature says something about the method: accepted runs as long as the paper's, and deeper exits better."""
    accepted = {}
    for exit_layer in (2, 3, 4):
        tokens = steps = 0
        for prompt in held_out_prompts(tokenizer, 24):
            output = generate(mini("mini-7b"), prompt, draft=mini("mini-draft"), method="sd", exits=[exit_layer],
                              draft_length=6, stop=0, max_new_tokens=64)  # fmt: skip
            tokens, steps = tokens + len(output.tokens), steps + output.stats.steps
        accepted[exit_layer] = tokens / steps
    assert 2.3 < accepted[4] < 5.0
    assert accepted[2] < 0.9 * accepted[4]


@pytest.mark.parametrize("name", ["mini-7b", "mini-13b", "mini-70b", "mini-draft"])
def test_shipped_folders_are_small_and_complete(name):
    files = {path.name for path in (ROOT / "weights" / name).iterdir()}
    drafting = (
        {"chances.json", *(f"decision-{size}.safetensors" for size in ("7b", "13b", "70b"))}
        if name == "mini-draft"
        else set()
    )
    assert (
        files
        == {"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"}
        | drafting
    )
    shipped = [
        path
        for folder in ("mini-*", "smollm2-draft")
        for path in (ROOT / "weights").glob(f"{folder}/*")
    ]
    assert sum(path.stat().st_size for path in shipped) < 58 * 2**20


def test_the_picture_of_a_page_is_there_and_small():
    """Both READMEs show the one file."""
    shown = [
        (readme.parent / path).resolve()
        for readme in READMES
        for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", readme.read_text())
    ]
    assert len(shown) == 2 and set(shown) == {ROOT / "s2d" / "trace" / "page.png"}
    assert shown[0].read_bytes()[:4] == b"\x89PNG" and shown[0].stat().st_size < 150_000


def test_the_quality_report_refuses_a_missing_target_in_one_line(capsys):
    assert bench.main(["quality", "--targets", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "no model folder at" in error and error.count("\n") == 1
