"""Two processes give what one gives, and end together."""

import sys
from datetime import timedelta
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from helpers import fork, program, random_llama, random_tokens

import run
from s2d import load_model, start
from s2d.checkpoint.config import read_folder
from s2d.checkpoint.save import save_model
from s2d.mcsd.roots import RootsDecoder
from s2d.passes import processes, tensor_parallel
from s2d.passes.batch import decode_many

SIZES = dict(head_dim=4, num_hidden_layers=3, max_position_embeddings=400)
SIZES |= dict(intermediate_size=52, num_attention_heads=6, num_key_value_heads=2)
NORMS = 3 * 2 * 32  # parameters of the layers that both ranks hold
SHORT, LONG = random_tokens(0, 7), random_tokens(1, 300)  # the latter is read in a pass of its own
REJECTION = dict(temperature=1.0, rule="rejection")
CASES = [  # a prompt, and options
    (LONG, dict(method="ar")),
    (LONG, dict(method="s2d", exits=(0, 1, 2), temperature=1.0)),
    (SHORT, dict(method="s2d-tree") | REJECTION),
    (SHORT, dict(tree=(3, 2), decoder=RootsDecoder) | REJECTION),
]


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
    said += map(what_was_said, decode_many(target, prompts, draft, decoder.options, 2))
    return {"logits": logits, "said": said}


def what_was_said(result):
    stats = result.stats
    counts = (stats.accept_lengths, dict(stats.sent), stats.draft_levels)
    return (result.tokens, result.ended, result.exact, *counts)


def decode_on_each_rank(folder):
    processes.join_processes()
    target = tensor_parallel.load_part(read_folder(folder), "cpu", "float64")
    found = decode(target, folder)
    found["held"] = sum(p.numel() for p in target.model.layers.parameters())
    found["heads"] = target.new_cache().memory.shape[3]
    torch.save(found, folder / f"{dist.get_rank()}.pt")


def test_a_divided_target_has_the_logits_and_texts_of_a_whole_one(tmp_path):
    """On both ranks, in float64, for every method; and no weight of a matmul is held twice."""
    target = random_llama(0, scale=0.25, tie_word_embeddings=True, **SIZES)
    folder = tmp_path / "m"
    save_model(target, folder, dtype=torch.float64)
    whole = load_model(folder, dtype="float64")
    one = decode(whole, folder)
    assert fork(tmp_path, 2, decode_on_each_rank, folder) == [0, 0], (tmp_path / "err").read_text()
    parts = [torch.load(folder / f"{rank}.pt") for rank in range(2)]
    for part in parts:
        assert one["said"] == part["said"] and len(one["logits"]) == len(part["logits"])
        assert all((a - b).abs().max() < 1e-9 for a, b in zip(one["logits"], part["logits"]))
        assert part["heads"] == 1
    held = sum(part["held"] for part in parts)
    assert held == sum(p.numel() for p in whole.model.layers.parameters()) + NORMS


def read_and_run(typed, words):
    sys.stdin = typed.open() if dist.get_node_local_rank() == 0 else Mock()
    return run.main(words)


def test_two_processes_print_what_one_prints(tmp_path, monkeypatch, capsys):
    """Rank 0 alone prints, and reads what is typed."""
    words = "--target 13b --dtype float64 --max-new-tokens 4 --interactive".split()
    typed = tmp_path / "typed"
    typed.write_text("What is the capital of Tadastan?\nAnd its main export?\n")
    assert fork(tmp_path, 2, read_and_run, typed, words) == [0, 0]
    out = (tmp_path / "out").read_text()
    monkeypatch.setattr(sys, "stdin", typed.open())
    assert program(run.main, *words) == 0
    assert out == capsys.readouterr().out and out.count("\n") == 2
    assert (tmp_path / "err").read_text().count("loading target") == 1


@pytest.fixture
def ended(tmp_path, monkeypatch):
    """ended(words): what two ranks of run.py said in the end, of which none was successful."""
    monkeypatch.setattr(processes, "AT_EXIT", timedelta(seconds=1))

    def run_on_two(words):
        line = f"--target 13b --max-new-tokens 8 {words}".split()
        codes = fork(tmp_path, 2, run.main, line)
        assert 2 in codes and 0 not in codes
        lines = (tmp_path / "err").read_text().splitlines()
        return [line for line in lines if line.startswith("run.py: ")]

    return run_on_two


def test_what_all_ranks_find_wrong_is_said_once(ended):
    [line] = ended("--target 7b")
    assert "mini-7b: 5 key/value heads cannot be divided among 2 processes" in line


def test_a_rank_that_fails_inside_a_pass_ends_all_and_says_why(ended, monkeypatch):
    def fail(module, inputs, output):
        if dist.get_rank() == 1:
            raise ValueError("no memory on rank 1")
        dist.all_reduce(output)

    monkeypatch.setattr(tensor_parallel, "sum_over_ranks", fail)
    assert ended("--json") == ["run.py: no memory on rank 1"]
