"""Several processes give what one gives. Under torchrun this file is what those processes do."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import ROOT, WEIGHTS, claim_accelerators, program, random_llama, random_tokens, refuses

import run
from s2d import load_model
from s2d.checkpoint import check_device, save_model
from s2d.cli.torchrun import run_divided
from s2d.generation import start
from s2d.speed import tensor_parallel
from s2d.speed.ranks import own_device
from s2d.train import __main__ as train

SIZES = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=4, max_position_embeddings=400)
SHORT, LONG = random_tokens(0, 7), random_tokens(1, 300)  # the latter is read in a pass of its own
CASES = [
    dict(method="ar", tokens=LONG),
    dict(method="s2d", tokens=LONG),
    dict(method="s2d", tokens=SHORT, rule="rejection", temperature=1.0),
    dict(method="s2d-tree", tokens=SHORT, temperature=1.0),
    dict(method="mcsd", tokens=SHORT, tree=(3, 2), init="target"),
]


def torchrun(*arguments, **options):
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = list(map(str, [*begin, *arguments]))
    return subprocess.run(command, env=environment, capture_output=True, text=True, **options)


def answers(target, folder):
    """Of each case the tokens, and the logits of every step; the first layers draft."""
    draft, found = load_model(folder, dtype="float64"), []
    draft.drafting = replace(draft.drafting, exits=(2,))
    for case in CASES:
        generation = start(target, draft=draft, max_new_tokens=20, seed=3, **case)
        logits = [step.logits.tolist() for step in generation]
        found.append({"tokens": generation.tokens, "logits": logits})
    return found


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A tied and an untied target of grouped queries."""
    folder = tmp_path_factory.mktemp("family")
    for name, tied in (("tied", True), ("untied", False)):
        target = random_llama(0, scale=0.25, tie_word_embeddings=tied, **SIZES)
        save_model(target, folder / name, dtype=torch.float64)
    return folder


def test_a_divided_target_has_the_logits_and_text_of_a_whole_one(family):
    """In float64, in drafts of all shapes, and each rank holds half of what is divided."""
    done = torchrun(__file__, family)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    for name in ("tied", "untied"):
        target = load_model(family / name, dtype="float64")
        for one, two in zip(answers(target, family / name), result[name]["answers"]):
            assert one["tokens"] == two["tokens"] and len(one["logits"]) == len(two["logits"])
            for a, b in zip(one["logits"], two["logits"]):
                assert (torch.tensor(a) - torch.tensor(b)).abs().max() < 1e-9
        layers = sum(p.numel() for p in target.model.layers.parameters())
        assert 0.5 * layers <= result[name]["held"] < 0.51 * layers
        assert result[name]["heads"] == 2


def answer_on_two_ranks(family, load_target):
    """On rank 0: one target after the other; prints what it finds as JSON."""
    found = {}
    for name in ("tied", "untied"):
        target = load_target(family / name, "cpu", "float64")
        held = sum(p.numel() for p in target.part.model.layers.parameters())
        heads = target.new_cache(8).part.keys.shape[2]
        found[name] = {"answers": answers(target, family / name), "held": held, "heads": heads}
    print(json.dumps(found))


def test_run_py_under_torchrun_reads_stdin_once_and_prints_once(tmp_path, capsys):
    """The answer is that of one process, and rank 0 alone writes the page."""
    line = "--target", "70b", "--dtype", "float64", "--json"
    question = "What is the capital of Tadastan?"
    page = tmp_path / "page.html"
    done = torchrun(ROOT / "run.py", *line, "--prompt", "-", "--trace", page, input=question)
    assert done.returncode == 0, done.stderr
    assert program(run.main, *line, "--prompt", question) == 0
    out, error = capsys.readouterr()
    two, one = json.loads(done.stdout), json.loads(out)
    for name in ("text", "tokens", "options"):
        assert one[name] == two[name]
    assert one["stats"]["accept_lengths"] == two["stats"]["accept_lengths"]
    assert page.is_file() and done.stderr.count("loading target") == 1
    (placed,) = (each for each in error.splitlines() if each.startswith("target on "))
    assert f"{placed}, divided among 2 processes\n" in done.stderr


def test_a_folder_that_cannot_be_divided_is_one_line_and_no_hang(tmp_path):
    """Both ranks meet the error; only rank 0 prints it."""
    model = random_llama(0, vocab_size=1024, num_key_value_heads=1)
    save_model(model, tmp_path / "one", WEIGHTS / "mini-7b")
    done = torchrun(ROOT / "run.py", "--target", tmp_path / "one", "--method", "ar")
    own = done.stderr.partition("torch/distributed")[0]
    assert own.count("run.py: ") == own.count("1 key/value heads cannot be divided among 2") == 1
    assert "Traceback" not in own and "exitcode  : 2 " in done.stderr and not done.stdout


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_inside_a_pass_ends_all(rank):
    """With its one line; the other one waits for its part of a sum meanwhile, and says nothing."""
    line = "--target", "70b", "--prompt", "What is the capital of Tadastan?"
    done = torchrun(__file__, "fail", rank, *line, timeout=60)
    own = done.stderr.partition("torch/distributed")[0]
    message = f"run.py: there is not enough memory (on rank {rank})"
    assert own.count(message) == own.count("run.py: ") == 1, own
    assert "exitcode  : 2 " in done.stderr and not done.stdout and "[rank" not in done.stderr


def fail_inside_a_pass(rank, *line):
    """run.py, in which this ``rank`` has no memory for its third target pass or so."""
    outputs = []

    def sum_over_ranks(module, inputs, output):
        outputs.append(output)
        if os.environ["RANK"] == rank and len(outputs) == 25:
            raise MemoryError(f"on rank {rank}")
        dist.all_reduce(output)

    tensor_parallel.sum_over_ranks = sum_over_ranks
    return run.main(line)


def test_all_ranks_end_with_rank_0(tmp_path):
    """Help is printed once, and so is what is wrong with a training."""
    done = torchrun(ROOT / "run.py", "--help")
    assert done.returncode == 0 and done.stdout.count("usage: ") == 1, done.stderr
    line = f"--init {WEIGHTS / 'mini-7b'} --layers 3 --exits 3 --out {tmp_path / 'x'} --device cpu"
    done = torchrun("-m", "s2d.train", "soft", *line.split())
    own = done.stderr.partition("torch/distributed")[0]
    assert own.count("train: ") == own.count("cannot be divided among 2 processes") == 1, own
    assert "Traceback" not in own and "exitcode  : 2 " in done.stderr


@pytest.fixture
def launched(monkeypatch):
    """This process is one that torchrun started, the only one."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "x"}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(os, "_exit", sys.exit)
    yield
    dist.destroy_process_group()


REFUSED = {"--exits 9": "exits of 4 draft layers", "--prompts x": "torchrun", "--tree": "--tree"}
REFUSED |= {"--compile": "--prompts and --compile do not go with torchrun"}
SHARED_GPU = "under torchrun each process has its own GPU: cuda, not 'cuda:1'"
MORE_THAN_GPUS = "torchrun started 2 processes, and there are 1 GPUs"


@pytest.mark.parametrize("line", REFUSED)
def test_a_wrong_option_is_one_line_and_exit_code_2(line, launched, capsys):
    refuses(run.main, capsys, REFUSED[line], "--target", "70b", *line.split())


@pytest.mark.parametrize("device", ["auto", "cuda", "cuda:1"])
def test_each_process_has_a_gpu_of_its_own_or_none_has(device, launched, monkeypatch, capsys):
    """By run.py and in training, before weights are read."""
    claim_accelerators(monkeypatch, "cuda", 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    message = SHARED_GPU if device == "cuda:1" else MORE_THAN_GPUS
    assert program(run.main, "--target", "70b", "--device", device) == 2
    assert capsys.readouterr().err.endswith(f"\nrun.py: {message}\n")
    dist.destroy_process_group()
    line = "soft --init x --layers 3 --exits 3 --out y --device".split()
    refuses(train.main, capsys, message, *line, device)


def test_a_training_loads_its_models_onto_the_gpu_of_the_process(monkeypatch):
    current = []
    claim_accelerators(monkeypatch, "cuda", 2)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for name, value in {"LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    device = own_device("auto")
    assert check_device(str(device)) == device == torch.device("cuda:1") and current == [device]


def test_only_the_wait_for_a_command_is_long(launched):
    """In it rank 0 may wait for a person; for all else ranks wait as long as PyTorch has them."""
    seconds = []

    def program(load_target):
        for group in dist.distributed_c10d._world.pg_map:
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            seconds.append(timeout.total_seconds())
        raise OSError("launched destroys the process group")

    with pytest.raises(SystemExit):
        run_divided("test", program)
    assert seconds == [1800, 86400]


if __name__ == "__main__":
    if sys.argv[1] == "fail":
        sys.exit(fail_inside_a_pass(*sys.argv[2:]))
    program = partial(answer_on_two_ranks, Path(sys.argv[1]))
    sys.exit(run_divided("test", program))
