"""What README shows works: its Python example, and the commands that made its figures on a small scale."""

import re

import pytest
from helpers import ROOT

from s2d import bench, corpus, quality


def test_the_python_example(monkeypatch, capsys):
    example = re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1]
    monkeypatch.chdir(ROOT)
    exec(compile(example, "README.md", "exec"), {})
    answer, accepted = capsys.readouterr().out.rsplit(maxsplit=1)
    assert answer == f"The capital of Tadastan is {corpus.WORLD['Tadastan']['capital']}."
    assert float(accepted) > 1.0


def test_the_quality_report(capsys):
    quality.main(["--targets", "mini-7b", "--count", "2"])
    report = capsys.readouterr().out
    assert re.search(r"mini-7b( +[\d.]+%){5}\n", report)
    assert re.search(r"before SoFT( +[\d.]+%){3}\n +mini-draft( +[\d.]+%){3}\n", report)


def test_the_benchmark(capsys):
    bench.main(["--targets", "mini-7b", "--limit", "1", "--rounds", "1", "--max-new-tokens", "8", "--hf"])
    report = capsys.readouterr().out
    for row in (*bench.ROWS, "transformers"):
        assert re.search(rf"^  {row} +[\d.]+    \([\d.]+, [\d.]+\)", report, re.MULTILINE), row
    assert re.search(r"^  ar +1.00    \(1.00, 1.00\) +1.00", report, re.MULTILINE)


def test_mean_accepted_tokens_of_the_exits_differ(mini, tokenizer):
    """The miniature says something about the method: accepted runs as long as the paper's, and deeper exits better."""
    prompts = bench.held_out_prompts(tokenizer, 6)
    rows = {name: options | {"draft_length": 6} for name, options in bench.ROWS.items() if name != "ar"}
    rows = {"ar": bench.ROWS["ar"]} | rows
    results = bench.measure(mini("mini-7b"), mini("mini-draft"), prompts, rows, 1, 0.0, 64, None)
    accepted = {name: result[3] for name, result in results.items()}
    assert 2.3 < accepted["sd, exit 4"] < 5.0
    assert accepted["sd, exit 2"] < accepted["sd, exit 3"] < accepted["sd, exit 4"]


@pytest.mark.parametrize("name", ["mini-7b", "mini-13b", "mini-70b", "mini-draft"])
def test_shipped_folders_are_small_and_complete(name):
    files = {path.name for path in (ROOT / "weights" / name).iterdir()}
    assert files == {"config.json", "model.safetensors", "tokenizer.model", "tokenizer_config.json"}
    assert sum(path.stat().st_size for path in (ROOT / "weights").rglob("*") if path.is_file()) < 56 * 2**20


@pytest.mark.parametrize("program", [bench, quality])
def test_reports_refuse_a_missing_target_in_one_line(program, capsys):
    assert program.main(["--targets", "nowhere"]) == 2
    error = capsys.readouterr().err
    assert "no model folder at" in error and error.count("\n") == 1
