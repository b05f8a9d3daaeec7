"""Several processes give what one gives. Under torchrun this file is what those processes do."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
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
from s2d.train import distributed, fit
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
    f"{SOFT} --draft-vocabulary 9": "soft with --lora, --draft-vocabulary or --data self",
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


ROWS = torch.randint(0, 61, (44, 16), generator=torch.Generator().manual_seed(1), dtype=torch.int32)
UNLABELLED = torch.rand(44, 16, generator=torch.Generator().manual_seed(2)) < 0.4
LABELS = torch.where(UNLABELLED, -100, ROWS.roll(-1, dims=1))
PRECISE = dict(recompute=True, bf16=False)
RECIPE = fit.Recipe(batch=8, micro_batch=2, length=16, lr=5e-3, epochs=2, **PRECISE)


def losses_of(model, checkpoint, resume=False, mesh=None, kill_after=None):
    """Losses (2,) of each of the 11 steps of a small training of exits 1 and 2."""
    losses = []
    how = fit.Run(checkpoint.with_suffix(""), resume=resume, mesh=mesh)
    for step, loss in fit.fit(model, (1, 2), (ROWS, LABELS), RECIPE, how):
        losses.append(loss.tolist())
        if step == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
    return losses


def student():
    return random_llama(2, scale=0.1, num_hidden_layers=2).float().requires_grad_(True)


def test_training_on_two_ranks_gives_the_losses_of_one(tmp_path):
    """To 1e-5 over 11 steps of two epochs, also when both ranks are killed and training resumes."""
    model = student()
    alone = torch.tensor(losses_of(model, tmp_path / "alone.checkpoint"))
    assert len(alone) == 11 and alone[-1].mean() < alone[0].mean() - 0.1
    result = answer_of(2, "train_on_every_rank", tmp_path / "two.checkpoint")
    assert (torch.tensor(result["losses"]) - alone).abs().max() < 1e-5
    weights = {name: torch.tensor(values) for name, values in result["weights"].items()}
    for name, parameter in model.named_parameters():
        assert (weights[name] - parameter).abs().max() < 1e-4
    assert result["held"] < 0.55 * sum(parameter.numel() for parameter in model.parameters())

    killed = torchrun(2, __file__, "train_on_every_rank", tmp_path / "killed.checkpoint", 5)
    assert killed.returncode != 0 and not killed.stdout
    shutil.copytree(tmp_path / "killed.checkpoint", tmp_path / "copy.checkpoint")
    resumed = answer_of(2, "train_on_every_rank", tmp_path / "killed.checkpoint")
    assert resumed["losses"] == result["losses"][5:]
    # One process takes up what two began.
    again = torch.tensor(losses_of(student(), tmp_path / "copy.checkpoint", resume=True))
    assert (again - alone[5:]).abs().max() < 1e-5


def train_on_every_rank(checkpoint, kill_after=None):
    # After every step for rank 0 and never for the other: clocks may disagree; rank 0's counts.
    fit.CHECKPOINT_SECONDS = -1 if os.environ["RANK"] == "0" else 1e9
    if os.environ["RANK"] == "0":  # is slow to make folders: the other could overtake it there
        mkdir = Path.mkdir
        Path.mkdir = lambda *arguments, **options: (time.sleep(0.02), mkdir(*arguments, **options))
    with parallel.joined(CPU) as mesh:
        model = student()
        losses = losses_of(model, Path(checkpoint), True, mesh, kill_after and int(kill_after))
        held = sum(parameter.to_local().numel() for parameter in model.parameters())
        whole = distributed.gathered(model, mesh)
        if whole:
            weights = {name: parameter.tolist() for name, parameter in whole.named_parameters()}
            print(json.dumps({"losses": losses, "weights": weights, "held": held}))


def test_soft_under_torchrun_saves_one_whole_draft(tmp_path):
    """The command line, in bf16, with a teacher: two processes save what one does, only once."""
    for seed, name in enumerate(("base", "teacher")):
        model = random_llama(seed, scale=0.1, vocab_size=1024)
        save_model(model, tmp_path / name, WEIGHTS / "mini-7b", torch.float32)
    turns = [{"from": "human", "value": "Hello"}, {"from": "gpt", "value": "Good morning " * 60}]
    (tmp_path / "d.json").write_text(json.dumps([{"conversations": turns}] * 20))
    arguments = ["soft", "--init", tmp_path / "base", "--layers", 3, "--exits", "1,3"]
    arguments += ["--data", tmp_path / "d.json", "--length", 64, "--batch", 8, "--micro-batch", 2]
    arguments += ["--epochs", 2, "--teacher", tmp_path / "teacher", "--lr", 1e-3]
    done = torchrun(2, "-m", "s2d.train", *arguments, "--out", tmp_path / "two")
    assert done.returncode == 0, done.stderr
    assert train.main([*map(str, arguments), "--out", str(tmp_path / "one")]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"base", "teacher", "d.json", "one", "two"}
    one, two = load_model(tmp_path / "one"), load_model(tmp_path / "two")
    before = load_model(tmp_path / "base", num_layers=3)
    assert one.config == two.config and one.config.exit_layers == (1, 3)
    for a, b, c in zip(one.parameters(), two.parameters(), before.parameters()):
        assert (a - b).norm() < 0.3 * (a - c).norm()


if __name__ == "__main__":
    job, path, *more = sys.argv[1:]
    globals()[job](Path(path), *more)
