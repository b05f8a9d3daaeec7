"""Several processes give what one gives. Run by torchrun, this file is also what those processes do."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT, WEIGHTS, random_llama

from s2d import generate, load_model
from s2d.tokenizer import Tokenizer
from s2d.weights import save_model

METHODS = ("ar", "s2d", "s2d-tree")


def torchrun(ranks, *arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *arguments]
    return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, **options)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A grouped-query target whose vocabulary no number of ranks divides, and a draft that often agrees with it."""
    folder = tmp_path_factory.mktemp("family")
    target = random_llama(0, scale=0.25, num_attention_heads=8, num_key_value_heads=4, head_dim=4)
    save_model(target, folder / "target", dtype=torch.float64)
    draft = random_llama(0, scale=0.25, num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_hidden_layers=3)
    draft.load_state_dict({name: t for name, t in target.state_dict().items() if name in draft.state_dict()})
    save_model(draft, folder / "draft", dtype=torch.float64)
    return folder


def answers(target, draft):
    """[method, temperature, tokens] for every method, greedy and sampled."""
    exits = {"s2d": (1, 3), "s2d-tree": (1, 3)}
    return [
        [method, temperature, generate(target, [1, 5, 9, 33], draft=draft, method=method, exits=exits.get(method),
                                       temperature=temperature, max_new_tokens=40, seed=3).tokens]
        for method in METHODS for temperature in (0.0, 1.0)
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_divided_target_writes_the_same_tokens(family, ranks):
    """In float64, token by token; and every rank holds its share of the divided weights, whole norms and its own heads."""
    done = torchrun(ranks, __file__, family)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    target, draft = load_model(family / "target", dtype="float64"), load_model(family / "draft", dtype="float64")
    assert result["answers"] == answers(target, draft)
    assert result["logits_error"] < 1e-12
    norms = sum(p.numel() for p in target.parameters() if p.dim() == 1)
    divided = sum(p.numel() for p in target.parameters() if p.dim() == 2)
    assert sum(result["held"]) == divided + ranks * norms
    assert max(result["held"]) < divided / ranks + norms + 2 * target.config.hidden_size * ranks
    assert result["cache_heads"] == 4 // ranks


def on_every_rank(family):
    import torch.distributed as dist

    from s2d import parallel

    with parallel.joined("cpu") as (mesh, device):
        target = parallel.load_target(family / "target", device, "float64", mesh)
        whole, draft = load_model(family / "target", dtype="float64"), load_model(family / "draft", dtype="float64")
        tokens = torch.arange(1, 30)[None]
        held = [None] * mesh.size()
        local = [getattr(p, "to_local", lambda p=p: p)() for p in target.parameters()]
        dist.all_gather_object(held, sum(tensor.numel() for tensor in local))
        print(json.dumps({
            "answers": answers(target, draft),
            "logits_error": (target(tokens) - whole(tokens)).abs().max().item(),
            "held": held,
            "cache_heads": target.new_cache(8).keys.shape[-3],
        }))  # fmt: skip


def test_run_py_under_torchrun_reads_stdin_once_and_prints_once():
    """70b has two key/value heads: two ranks share it; rank 0 alone reads the prompt and prints the answer."""
    arguments = [ROOT / "run.py", "--target", "70b", "--dtype", "float64", "--chat", "--prompt", "-", "--json"]
    question = "What is the capital of Tadastan?"
    done = torchrun(2, *arguments, input=question)
    assert done.returncode == 0, done.stderr
    target, draft = (load_model(WEIGHTS / name, dtype="float64") for name in ("mini-70b", "mini-draft"))
    prompt = Tokenizer(WEIGHTS / "mini-70b/tokenizer.model").encode_chat([question])
    assert json.loads(done.stdout)["tokens"] == generate(target, prompt, draft=draft).tokens
    assert done.stderr.count("target ") == 1


def test_heads_that_cannot_be_divided():
    done = torchrun(3, ROOT / "run.py", "--target", "70b")
    assert done.returncode != 0
    assert "8 heads with 2 key/value heads cannot be divided among 3 processes" in done.stderr
    assert "Traceback" not in done.stderr.split("torch/distributed")[0]


if __name__ == "__main__":
    on_every_rank(Path(sys.argv[1]))
