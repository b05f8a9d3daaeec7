"""Several processes give what one gives. Under torchrun this file is what those processes do."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, WEIGHTS, random_llama, refuses

import run
from s2d import generate, load_model
from s2d.extras import parallel
from s2d.text.tokenizer import Tokenizer
from s2d.train import __main__ as train
from s2d.weights import save_model
from s2d.weights.divided import load_target

METHODS = ("ar", False), ("s2d", False), ("s2d", True), ("s2d-tree", False)  # and whether coupled
CPU = torch.device("cpu")


def torchrun(ranks, *arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    command = list(map(str, [*start, ranks, *arguments]))
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def answer_of(ranks, *arguments, **options):
    """What rank 0 of this file's job prints, as JSON."""
    done = torchrun(ranks, __file__, *arguments, **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A grouped-query target whose vocabulary no number of ranks divides, and a similar draft."""
    folder = tmp_path_factory.mktemp("family")
    heads = dict(scale=0.25, num_attention_heads=8, num_key_value_heads=4, head_dim=4)
    target, draft = (random_llama(0, **heads, num_hidden_layers=layers) for layers in (3, 2))
    weights = target.state_dict()
    draft.load_state_dict({name: weights[name] for name in draft.state_dict()})
    save_model(target, folder / "target", dtype=torch.float64)
    save_model(draft, folder / "draft", dtype=torch.float64)
    return folder


def load_pair(family):
    return [load_model(family / name, dtype="float64") for name in ("target", "draft")]


def answers(target, draft, seed=3):
    """[method, temperature, tokens] for every method, greedy and sampled."""
    found = []
    for method, coupled in METHODS:
        for temperature in (0.0, 1.0):
            options = dict(temperature=temperature, max_new_tokens=20, seed=seed, coupled=coupled)
            options |= dict(exits=(1, 2)) if method != "ar" else {}
            output = generate(target, [1, 5, 9, 33], draft, method, **options)
            found.append([method, temperature, output.tokens])
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_target_writes_the_same_tokens(family, ranks):
    """In float64. Every rank holds its part of divided weights, whole norms and its own heads.

    Rank 0 decides alone: the others' drafts and random choices differ, and nothing hangs.
    """
    result = answer_of(ranks, "decode_on_every_rank", family, timeout=300)
    target, draft = load_pair(family)
    assert result["answers"] == [answers(target, draft)] * ranks
    sampled = [tokens for _, temperature, tokens in result["answers"][0] if temperature]
    alone, _, coupled, growing = sampled
    assert alone == coupled == growing
    assert result["logits_error"] < 1e-12
    norms = sum(p.numel() for p in target.parameters() if p.dim() == 1)
    divided = sum(p.numel() for p in target.parameters() if p.dim() == 2)
    assert sum(result["held"]) == divided + ranks * norms
    assert max(result["held"]) < divided / ranks + norms + 2 * target.config.hidden_size * ranks
    assert result["cache_heads"] == 4 // ranks


def decode_on_every_rank(family):
    with parallel.joined(CPU) as mesh:
        target = load_target(family / "target", CPU, "float64", mesh)
        whole, draft = load_pair(family)
        tokens, rank = torch.arange(1, 30)[None], mesh.get_local_rank()
        local = [getattr(p, "to_local", lambda p=p: p)() for p in target.parameters()]
        error = (target(tokens) - whole(tokens)).abs().max().item()
        for parameter in draft.parameters():
            parameter += rank * torch.randn_like(parameter)
        every, held = [None] * mesh.size(), [None] * mesh.size()
        dist.all_gather_object(every, answers(target, draft, seed=3 + rank))
        dist.all_gather_object(held, sum(tensor.numel() for tensor in local))
        result = {"answers": every, "logits_error": error, "held": held}
        print(json.dumps(result | {"cache_heads": target.new_cache(8).keys.shape[-3]}))


def test_run_py_under_torchrun_reads_stdin_once_and_prints_once(tmp_path):
    """Rank 0 alone reads the prompt, prints the answer and writes the page."""
    page, question = tmp_path / "page.html", "What is the capital of Tadastan?"
    options = ["--target", "70b", "--dtype", "float64", "--prompt", "-", "--json", "--trace", page]
    done = torchrun(2, ROOT / "run.py", *options, input=question)
    assert done.returncode == 0, done.stderr
    names = "mini-70b", "mini-draft"
    target, draft = (load_model(WEIGHTS / name, dtype="float64") for name in names)
    prompt = Tokenizer(WEIGHTS / "mini-70b/tokenizer.model").encode_chat([question])
    expected = generate(target, prompt, draft).tokens
    assert json.loads(done.stdout)["tokens"] == expected
    assert done.stderr.count("target /") == done.stderr.count("every step: ") == 1
    data = json.loads(re.search(r'id="data">(.*?)</script>', page.read_text())[1])
    assert sum((step["tokens"] for step in data["steps"]), []) == expected
    assert data["steps"][-1]["rounds"][0]


@pytest.fixture
def launched(monkeypatch):
    """This process is one that torchrun started, the only one."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in (names | {"MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "x"}).items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


SOFT = "soft --init x --layers 1 --exits 1 --out x"
REFUSED = {
    "--target 70b --interactive": "run.py: --interactive is for a target in one process",
    "--target 70b --compile": "run.py: --compile is for a target in one process",
    "--target 70b --trace /nowhere/page.html": "run.py: /nowhere/page.html",
    "mini --out /nonexistent": "trains in a single process; start it without torchrun",
    f"{SOFT} --data self": "trains in a single process; start it without torchrun",
}


@pytest.mark.parametrize("line", REFUSED)
def test_what_several_processes_do_not_do(line, launched, capsys):
    main = run.main if "--target" in line else train.main
    refuses(main, capsys, REFUSED[line], *line.split())


def test_heads_that_cannot_be_divided():
    done = torchrun(3, ROOT / "run.py", "--target", "70b")
    message = "8 heads with 2 key/value heads cannot be divided among 3 processes"
    assert done.returncode != 0 and message in done.stderr
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]


if __name__ == "__main__":
    job, path, *more = sys.argv[1:]
    globals()[job](Path(path), *more)
