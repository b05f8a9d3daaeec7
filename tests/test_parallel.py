"""Several processes give what one gives, and end together."""

import io
import json
import os
import re
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from helpers import WEIGHTS, claim_devices, fork, raises_line, random_llama, random_tokens

import run
from s2d import load_model, start
from s2d.checkpoint import save_model
from s2d.checkpoint.config import read_folder
from s2d.cli import terminal
from s2d.speed import tensor_parallel
from s2d.speed.batch import decode_many

SIZES = dict(head_dim=4, num_hidden_layers=3, max_position_embeddings=400)
SIZES |= dict(intermediate_size=52)
NORMS = 3 * 2 * 32  # parameters of the layers that all ranks hold
HEADS = {"tied": (6, 2), "untied": (8, 4)}  # query heads and key/value heads of a target
SHORT, LONG = random_tokens(0, 7), random_tokens(1, 300)  # the latter is read in a pass of its own
CASES = [  # a prompt, and options
    (LONG, dict(method="ar")),
    (LONG, dict(method="s2d", exits=(1, 2))),
    (SHORT, dict(method="s2d", exits=(0, 1, 2), temperature=1.0)),
    (SHORT, dict(method="s2d", temperature=1.0, rule="rejection")),
    (SHORT, dict(method="s2d", exits=(0,))),
    (SHORT, dict(method="s2d-tree", temperature=1.0)),
    (SHORT, dict(method="s2d-tree", temperature=1.0, rule="rejection")),
    (SHORT, dict(method="mcsd", tree=(3, 2), temperature=1.0, rule="rejection")),
    (SHORT, dict(method="mcsd", tree=(3, 2), init="target", temperature=1.0, rule="rejection")),
]
QUESTION = "What is the capital of Tadastan?"


# What is computed


def decode(target, folder):
    """The logits of every step, and all that decoders say of each case; the first layers draft."""
    draft = load_model(folder, dtype="float64", layers=2)
    logits = []
    said = []
    for prompt, options in CASES:
        decoder = start(target, prompt, draft, max_new_tokens=6, seed=3, **options)
        logits += [step.logits for step in decoder]
        said.append(what_was_said(decoder.result()))
    prompts = [SHORT, LONG, SHORT[:3]]
    said += map(what_was_said, decode_many(target, prompts, draft, decoder.plan, 2))
    return {"logits": logits, "said": said}


def what_was_said(result):
    stats = result.stats
    counts = (stats.accept_lengths, dict(stats.exit_counts), stats.draft_levels)
    return (result.tokens, result.ended, result.exact, *counts)


def decode_on_each_rank(family, names, out):
    tensor_parallel.join_processes()
    found = {}
    for name in names:
        target = tensor_parallel.load_part(read_folder(family / name), "cpu", "float64")
        found[name] = decode(target, family / name)
        found[name]["held"] = sum(p.numel() for p in target.model.layers.parameters())
        found[name]["heads"] = target.new_cache(8).keys.shape[2]
    torch.save(found, out / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A tied and an untied target of grouped queries."""
    folder = tmp_path_factory.mktemp("family")
    for name, (heads, kv_heads) in HEADS.items():
        sizes = SIZES | dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
        target = random_llama(0, scale=0.25, tie_word_embeddings=name == "tied", **sizes)
        save_model(target, folder / name, dtype=torch.float64)
    return folder


@pytest.fixture(scope="module")
def whole(family):
    """What one process finds."""
    found = {}
    for name in ("tied", "untied"):
        target = load_model(family / name, dtype="float64")
        found[name] = decode(target, family / name)
        found[name]["size"] = sum(p.numel() for p in target.model.layers.parameters())
    return found


@pytest.mark.parametrize(("ranks", "names"), [(2, ["tied", "untied"]), (4, ["untied"])])
def test_a_divided_target_has_the_logits_and_texts_of_a_whole_one(
    ranks, names, family, whole, tmp_path
):
    """On every rank, in float64, for every method; and no weight of a matmul is held twice."""
    decode = decode_on_each_rank, family, names, tmp_path
    assert fork(tmp_path, ranks, *decode) == [0] * ranks, (tmp_path / "err").read_text()
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in range(ranks)]
    for name in names:
        one = whole[name]
        for part in [each[name] for each in parts]:
            assert one["said"] == part["said"] and len(one["logits"]) == len(part["logits"])
            assert all((a - b).abs().max() < 1e-9 for a, b in zip(one["logits"], part["logits"]))
        assert {each[name]["heads"] for each in parts} == {HEADS[name][1] // ranks}
        held = sum(each[name]["held"] for each in parts)
        assert held == one["size"] + (ranks - 1) * NORMS


# What run.py prints

# What depends on them, or on the number of processes.
CLOCKS = re.compile(r"\d+(\.\d+|e-\d+)+|^speed  .*|^target on .*\n", re.MULTILINE)
COMMON = "--target 13b --dtype float64 --max-new-tokens 8"
LINES = {  # what is run, and what is typed
    "--prompt - --json": QUESTION,
    "--prompt - --trace TMP/page.html": QUESTION,
    "--prompt - --method s2d-tree --temperature 1 --compare": QUESTION,
    "--prompts TMP/lines --json --batch 2": "",
    "--interactive": f"{QUESTION}\nAnd its main export?\n",
}


def run_lines(folder):
    """Run the LINES, and note on rank 0 what is printed."""
    tensor_parallel.join_processes()
    found = []
    first = not dist.is_initialized() or dist.get_rank() == 0
    for line, typed in LINES.items():
        sys.stdin = io.StringIO(typed) if first else None
        out, error = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(error):
            run.run(f"{COMMON} {line}".replace("TMP", str(folder)).split())
        found += [re.sub(CLOCKS, "", each.getvalue()) for each in (out, error)]
    if first:
        (folder / "found").write_text(json.dumps(found))


def test_run_py_prints_on_rank_0_what_one_process_prints(tmp_path, monkeypatch):
    """It alone reads what is typed."""
    monkeypatch.setattr(run, "join_processes", lambda: None)
    monkeypatch.setattr(terminal, "TURNS", 1)
    monkeypatch.setattr(sys, "stdin", None)
    (tmp_path / "lines").write_text("Hi\n\nWhat is 3 + 4?\nTell me a story.")
    run_lines(tmp_path)
    one = json.loads((tmp_path / "found").read_text())
    (tmp_path / "page.html").unlink()
    assert fork(tmp_path, 2, run_lines, tmp_path) == [0, 0], (tmp_path / "err").read_text()
    two = json.loads((tmp_path / "found").read_text())
    assert one == two
    assert "<html" in (tmp_path / "page.html").read_text()


# How ranks end


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """ended(change): run.py on two ranks, after ``change(rank)``: exit codes, and what was said."""
    monkeypatch.setattr(tensor_parallel, "AT_EXIT", 1)

    def run_changed(change):
        sys.argv = "run.py --target 70b --json --max-new-tokens 8".split()
        change(int(os.environ["RANK"]))
        return run.main(sys.argv[1:])

    def run_on_two(change):
        began = time.monotonic()
        codes = fork(tmp_path, 2, run_changed, change)
        assert time.monotonic() - began < 30 and not (tmp_path / "out").read_text()
        lines = (tmp_path / "err").read_text().splitlines()
        return codes, [line for line in lines if line.startswith(("run.py: ", "interrupted"))]

    return run_on_two


def fail_in_a_pass(monkeypatch, fail):
    """Call ``fail(rank)`` in the third target pass or so."""
    sums = []

    def sum_or_fail(module, inputs, output):
        sums.append(output)
        if len(sums) == 25:
            fail(dist.get_rank())
        dist.all_reduce(output)

    monkeypatch.setattr(tensor_parallel, "sum_over_ranks", sum_or_fail)


@pytest.mark.parametrize(
    ("words", "said"),
    [("--seed RANK", "rank 1 was started with '--"), ("--exits 9", "exits [9]: the draft has 4")],
)
def test_what_ranks_find_wrong_is_said_once(words, said, ended):
    codes, [line] = ended(lambda rank: sys.argv.extend(words.replace("RANK", str(rank)).split()))
    assert 2 in codes and 0 not in codes and said in line


def test_a_rank_that_fails_inside_a_pass_ends_all_and_says_why(ended, monkeypatch):
    def fail(rank):
        if rank == 1:
            raise ValueError("no memory on rank 1")

    fail_in_a_pass(monkeypatch, fail)
    codes, lines = ended(lambda rank: None)
    assert codes[1] == 2 and 0 not in codes
    assert lines == ["run.py: no memory on rank 1"]


def test_ctrl_c_ends_all_and_is_said_once(ended, monkeypatch):
    fail_in_a_pass(monkeypatch, lambda rank: os.kill(os.getpid(), signal.SIGINT))
    codes, lines = ended(lambda rank: None)
    assert 130 in codes and 0 not in codes and lines == ["interrupted"]


def test_every_rank_has_a_key_value_head_and_a_gpu_of_its_own(monkeypatch, tmp_path):
    save_model(random_llama(0, num_key_value_heads=1), tmp_path / "one", WEIGHTS / "mini-7b")
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    line = "1 key/value heads cannot be divided among 2 processes"
    one = read_folder(tmp_path / "one")
    raises_line(tensor_parallel.load_part, ValueError, line, one, "cpu", "auto")
    current = []
    claim_devices(monkeypatch, "cuda:0", "cuda:1")
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert tensor_parallel.own_device("auto") == torch.device("cuda:1") and len(current) == 1


def test_a_rank_that_is_killed_ends_all(ended, monkeypatch):
    fail_in_a_pass(monkeypatch, lambda rank: rank == 1 and os.kill(os.getpid(), signal.SIGKILL))
    codes, _ = ended(lambda rank: None)
    assert codes[1] == -signal.SIGKILL and codes[0] not in (0, -signal.SIGKILL)
