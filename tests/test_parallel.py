"""Several processes give what one gives, and end together."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch
import torch.distributed as dist
from helpers import (
    ROOT,
    WEIGHTS,
    claim_accelerators,
    fork,
    program,
    random_llama,
    random_tokens,
    refuses,
)

import run
from s2d import load_model, notices
from s2d.batch import decode_many
from s2d.checkpoint import check_device, save_model
from s2d.cli import terminal, torchrun
from s2d.generation import make_decoder
from s2d.options import Options, drafting_of, resolve
from s2d.speed import tensor_parallel
from s2d.speed.ranks import is_rank_0, new_sums_group, own_device
from s2d.train import __main__ as train

SIZES = dict(num_attention_heads=8, num_key_value_heads=4, head_dim=4, num_hidden_layers=3)
SIZES |= dict(max_position_embeddings=400)
SHORT, LONG = random_tokens(0, 7), random_tokens(1, 300)  # the latter is read in a pass of its own
CASES = [  # a prompt, and options
    (LONG, dict(method="ar")),
    (LONG, dict(method="sd", draft_length=3)),
    (LONG, dict(method="s2d", exits=(1, 2))),
    (SHORT, dict(method="s2d", exits=(0, 1, 2), temperature=1.0)),
    (SHORT, dict(method="s2d", temperature=1.0, rule="rejection")),
    (SHORT, dict(method="s2d", exits=(0,))),
    (SHORT, dict(method="s2d-tree", temperature=1.0)),
    (SHORT, dict(method="s2d-tree", temperature=1.0, rule="rejection")),
    (SHORT, dict(method="mcsd", tree=(3, 2), temperature=1.0, rule="rejection")),
    (SHORT, dict(method="mcsd", tree=(3, 2), init="target")),
    (SHORT, dict(method="mcsd", tree=(3, 2), init="target", temperature=1.0, rule="rejection")),
]
QUESTION = "What is the capital of Tadastan?"


# What is computed


def decode(target, folder, make):
    """The logits of every step, and all that decoders say of each case; the first layers draft."""
    draft = None
    if is_rank_0():
        draft = load_model(folder, dtype="float64", layers=2)
    layers = load_model(folder, dtype="float64", layers=2)
    logits = []
    said = []
    for prompt, options in CASES:
        options = Options(max_new_tokens=6, seed=3, **options)
        settings = resolve(options, target.config, layers.config, drafting_of(layers))
        decoder = make(target, prompt, draft, settings)
        logits += [step.logits for step in decoder]
        said.append(what_was_said(decoder.result()))
    prompts = list(enumerate([SHORT, LONG, SHORT[:3]]))
    for index, result in decode_many(target, prompts, draft, settings, 2, make):
        said.append((index, what_was_said(result)))
    return {"logits": logits, "said": said}


def what_was_said(result):
    stats = result.stats
    counts = (stats.accept_lengths, dict(stats.exit_counts), stats.draft_levels)
    return (result.tokens, result.ended, result.exact, *counts)


def decode_on_each_rank(family, names, out):
    found = {}
    for name in names:
        target = tensor_parallel.load_part(family / name, "cpu", "float64")
        found[name] = decode(target, family / name, tensor_parallel.make_shared_decoder)
        found[name]["held"] = sum(p.numel() for p in target.model.layers.parameters())
        found[name]["heads"] = target.new_cache(8).keys.shape[2] // target.config.head_dim
    torch.save(found, out / f"{dist.get_rank()}.pt")


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    """A tied and an untied target of grouped queries."""
    folder = tmp_path_factory.mktemp("family")
    for name, tied in (("tied", True), ("untied", False)):
        target = random_llama(0, scale=0.25, tie_word_embeddings=tied, **SIZES)
        save_model(target, folder / name, dtype=torch.float64)
    return folder


@pytest.fixture(scope="module")
def whole(family):
    """What one process finds."""
    found = {}
    for name in ("tied", "untied"):
        target = load_model(family / name, dtype="float64")
        found[name] = decode(target, family / name, make_decoder)
        found[name]["size"] = sum(p.numel() for p in target.model.layers.parameters())
    return found


@pytest.mark.parametrize(("ranks", "names"), [(2, ["tied", "untied"]), (4, ["untied"])])
def test_a_divided_target_has_the_logits_and_texts_of_a_whole_one(
    ranks, names, family, whole, tmp_path
):
    """On every rank, in float64, for every method; and each holds its share of what is divided."""
    decode = torchrun.run_in_each, "test", decode_on_each_rank, family, names, tmp_path
    assert fork(tmp_path, ranks, *decode) == [0] * ranks, (tmp_path / "err").read_text()
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name in names:
            one, part = whole[name], found[name]
            assert one["said"] == part["said"] and len(one["logits"]) == len(part["logits"])
            assert all((a - b).abs().max() < 1e-9 for a, b in zip(one["logits"], part["logits"]))
            share = one["size"] / ranks
            assert share <= part["held"] < 1.03 * share and part["heads"] == 4 / ranks


# What run.py prints

COMMON = "--target 13b --dtype float64 --max-new-tokens 8"
LINES = {  # what is run, and what is typed
    "--prompt - --json --trace TMP/page.html": QUESTION,
    "--prompt - --method s2d-tree --temperature 1 --compare": QUESTION,
    "--prompts TMP/lines --json --batch 2": "",
    "--exits 0 --prompts TMP/lines --temperature 1": "",
    "--interactive": f"{QUESTION}\n{'word ' * 600}\nAnd its main export?\n",
}


def run_lines(folder):
    """Run the LINES: of each the exit code, and what was printed."""
    found = []
    for line, typed in LINES.items():
        if is_rank_0():
            sys.stdin = io.StringIO(typed)
        out, error = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(error):
            code = run.run(f"{COMMON} {line}".replace("TMP", str(folder)).split())
        found.append([code, out.getvalue(), error.getvalue()])
    if is_rank_0():
        (folder / "found").write_text(json.dumps(found))


def without_clocks(out, error):
    """What does not depend on them, nor on the number of processes."""
    lines = []
    for line in out.splitlines():
        if line.startswith("{"):
            answer = json.loads(line)
            stats = answer.pop("stats")
            lines.append([answer, stats["accept_lengths"], stats["exit_counts"]])
        elif not line.startswith(("tokens  ", "speed  ", "why  ")):
            lines.append(line)
    clocks = "reading ", "target on ", "Ctrl-C "
    return lines, [line for line in error.splitlines() if not line.startswith(clocks)]


def test_run_py_prints_on_rank_0_what_one_process_prints(tmp_path, monkeypatch):
    """It alone reads what is typed and writes the page."""
    monkeypatch.setattr(notices, "PROGRESS_SECONDS", 0)
    monkeypatch.setattr(run, "LONG_PROMPT", 20)
    monkeypatch.setattr(terminal, "TURNS", 1)
    monkeypatch.setattr(sys, "stdin", None)
    (tmp_path / "lines").write_bytes(b"Hi\ncaf\xe9\n\nWhat is 3 + 4?\nTell me a story.")
    run_lines(tmp_path)
    one = json.loads((tmp_path / "found").read_text())
    (tmp_path / "page.html").unlink()
    monkeypatch.setattr(sys, "stdin", None)
    lines = torchrun.run_in_each, "test", run_lines, tmp_path
    assert fork(tmp_path, 2, *lines) == [0, 0], (tmp_path / "err").read_text()
    two = json.loads((tmp_path / "found").read_text())
    for (code, *printed), (code_of_two, *printed_by_two) in zip(one, two, strict=True):
        assert without_clocks(*printed) == without_clocks(*printed_by_two)
        assert code == code_of_two
    assert [code for code, *_ in two] == [0, 0, 2, 2, 0]
    assert "<html" in (tmp_path / "page.html").read_text()
    assert "reading a prompt of" in two[0][-1]
    assert ", in each of 2 processes" in two[0][-1] and "Ctrl-C ends the program" in two[-1][-1]
    assert not (tmp_path / "out").read_text() + (tmp_path / "err").read_text()


# How ranks end


def run_py(*arguments):
    run.main(list(map(str, arguments)))


def train_py(*arguments):
    train.main(list(map(str, arguments)))


def said(folder, main, *arguments):
    """The exit codes of two processes, and the lines that they say but for notices."""
    codes = fork(folder, 2, main, *arguments)
    error = (folder / "err").read_text()
    assert "Traceback" not in error and not (folder / "out").read_text(), error
    return codes, re.findall(r"^(?:run\.py|train|python -m s2d\.train): .*", error, re.MULTILINE)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_inside_a_pass_ends_all(rank, tmp_path, monkeypatch):
    """With its one line; the other one waits for its part of a sum meanwhile, and says nothing."""
    sums = []

    def sum_over_ranks(group, module, inputs, output):
        sums.append(output)
        if dist.get_rank() == rank and len(sums) == 25:  # in the third target pass or so
            raise MemoryError(f"on rank {rank}")
        dist.all_reduce(output, group=group)

    monkeypatch.setattr(tensor_parallel, "sum_over_ranks", sum_over_ranks)
    codes, lines = said(tmp_path, run_py, "--target", "70b", "--json")
    assert lines == [f"run.py: there is not enough memory (on rank {rank})"] and codes[rank] == 2


def test_what_all_ranks_find_wrong_is_said_once(tmp_path):
    model = random_llama(0, vocab_size=1024, num_key_value_heads=1)
    save_model(model, tmp_path / "one", WEIGHTS / "mini-7b")
    codes, lines = said(tmp_path, run_py, "--target", tmp_path / "one", "--method", "ar")
    message = f"run.py: {tmp_path / 'one'}: 1 key/value heads cannot be divided among 2"
    assert lines == [message] and 2 in codes


@pytest.mark.parametrize("main", [run_py, train_py])
def test_rank_0_says_what_is_wrong_with_a_command_line(main, tmp_path):
    """And prints the help, with which all ranks end."""
    codes, lines = said(tmp_path, main, "--tree")
    assert codes[0] == 2 and len(lines) == 1
    assert fork(tmp_path, 2, main, "--help") == [0, 0]
    assert (tmp_path / "out").read_text().count("usage: ") == 1


def test_a_training_that_two_processes_cannot_do_is_said_once(tmp_path):
    line = f"soft --init {WEIGHTS / 'mini-7b'} --layers 3 --exits 3 --out {tmp_path / 'x'} "
    codes, lines = said(tmp_path, train_py, *line.split(), "--device", "cpu")
    assert "cannot be divided among 2 processes" in "".join(lines) and len(lines) == 1
    assert codes[0] == 2


def test_ctrl_c_under_torchrun_ends_all_while_rank_0_waits_for_a_line():
    """They answer one line, and then hear what a terminal sends: it is said once."""
    begin = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    line = "--target 70b --interactive --max-new-tokens 4"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*begin, str(ROOT / "run.py"), *line.split()],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    process.stdin.write(f"{QUESTION}\n")
    process.stdin.flush()
    assert process.stdout.readline().startswith("> ")  # the answer's
    os.killpg(process.pid, signal.SIGINT)
    began = time.monotonic()
    _, error = process.communicate(timeout=100)
    assert time.monotonic() - began < 60 and error.count("interrupted\n") == 1, error
    assert "[rank" not in error and error.count("loading target") == 1


def test_ctrl_c_ends_each_rank_with_130(tmp_path, monkeypatch):
    """Also where one process would go on: in an answer of a conversation."""

    def interrupt_all(self, step):
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(terminal.Streamed, "add", interrupt_all)
    codes, lines = said(tmp_path, run_py, *"--target 70b --interactive --prompt Hi".split())
    assert codes == [130, 130] and not lines
    assert (tmp_path / "err").read_text().endswith("\ninterrupted\n")


@pytest.fixture
def launched(monkeypatch):
    """This process is one that torchrun started, the only one."""
    names = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    names |= {"MASTER_ADDR": "localhost", "MASTER_PORT": 0, "TORCHELASTIC_RUN_ID": "x"}
    for name, value in names.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(os, "_exit", sys.exit)
    heard = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, heard)
    dist.destroy_process_group()


REFUSED = {
    "--exits 9": "exits of 4 draft layers",
    "--tree": "--tree",
    "--prompts nowhere": "nowhere",
    "--graphs": "--graphs does not go with torchrun",
}
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


def test_only_the_wait_for_rank_0_is_long(launched):
    """It may wait for a person; for sums ranks wait as long as PyTorch has them."""
    seconds = []

    def look():
        for group in (dist.group.WORLD, new_sums_group(torch.device("cpu"))):
            timeout = group._get_backend(torch.device("cpu")).options._timeout
            seconds.append(timeout.total_seconds())

    with pytest.raises(SystemExit):
        torchrun.run_in_each("test", look)
    assert seconds == [86400, 1800]
