"""run.py as a user runs it: the output, --json, and one line with exit code 2 for each mistake."""

import io
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from functools import partial

import pytest
import torch
from helpers import ROOT, WEIGHTS, random_llama

import run
from s2d import Tokenizer
from s2d.bench import __main__ as bench
from s2d.program import run_program
from s2d.train import __main__ as train
from s2d.weights import __main__ as weights_program
from s2d.weights import save_model

EXAMPLE_ANSWER = "The capital of Tadastan is Vorbiburg. The main export of Tadastan is salt."
RUN = [sys.executable, str(ROOT / "run.py")]


def test_with_no_other_argument_it_shows_the_method_at_work(tmp_path):
    """From any directory: a correct answer, the report, the comparison with the target alone."""
    done = subprocess.run([*RUN, "--target", "13b"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    first, second, third = done.stderr.splitlines()
    assert first == f"loading target {WEIGHTS / 'mini-13b'}, draft {WEIGHTS / 'mini-draft'}"
    device = r"(cpu, \d+ threads, float32|cuda.* GB, bfloat16)"
    assert re.fullmatch(rf"target and draft on {device}, 0\.\d\d GB of weights", second)
    assert third == "timing the target alone, to compare"
    text, _, block = done.stdout.partition("\n\n")
    assert text == EXAMPLE_ANSWER
    patterns = [
        r"tokens         \d+ in [\d.]+ s, [\d.]+ tokens/s",
        r"steps          \d+, mean accepted tokens [\d.]+",
        r"draft tokens   \d+: \d+% after layer 2.*",
        r"exact          yes, method s2d",
        r"target alone   [\d.]+ tokens/s: s2d is [\d.]+ times as fast",
    ]
    lines = block.splitlines()
    assert len(lines) == len(patterns)
    for line, pattern in zip(lines, patterns):
        assert re.fullmatch(pattern, line), line


def test_stdin_and_json():
    """--json leaves stdout to one object; the text and the tokens agree; notices go to stderr."""
    arguments = ["--target", "7b", "--prompt", "-", "--chat", "--json", "--max-new-tokens", "20"]
    done = subprocess.run([*RUN, *arguments], input=b"What is 3 + 4?\n", capture_output=True)
    assert done.returncode == 0
    answer = json.loads(done.stdout)
    tokenizer = Tokenizer(WEIGHTS / "mini-7b" / "tokenizer.model")
    assert set(answer) == {"text", "tokens", "prompt_tokens", "exact", "stats"}
    assert answer["text"] == tokenizer.decode(answer["tokens"])
    assert answer["prompt_tokens"] == len(tokenizer.encode_chat(["What is 3 + 4?"]))
    assert answer["exact"] is True
    stats = answer["stats"]
    assert stats["steps"] == len(stats["accept_lengths"])
    assert sum(stats["accept_lengths"]) == len(answer["tokens"]) <= 20
    assert stats["seconds"] > 0 and done.stderr.startswith(b"loading target ")


def run_json(capsys, *arguments):
    assert run.main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_options_reach_the_decoder(capsys):
    common = ["--target", "7b", "--prompt", run.MINI_EXAMPLE, "--chat", "--dtype", "float64"]
    answer_to = partial(run_json, capsys, *common)
    alone = answer_to("--method", "ar")
    assert alone["stats"]["mean_accepted_tokens"] == 1.0 and alone["stats"]["exit_counts"] == {}
    for line, exits, longest in (
        ("--method sd", {"4"}, None),
        ("--method sd --exits 3", {"3"}, None),
        ("--exits 2,4 --thresholds 1,0 --draft-length 2", {"4"}, 3),
        ("--thresholds 0,0,0", {"2"}, None),
        ("--method mcsd", {"4"}, None),
        ("--method mcsd --tree 3,1 --exits 2", {"2"}, 3),
        ("--method s2d-tree --tree 2,1,1 --thresholds 0,0,0", {"2"}, 4),
        ("--method s2d-tree --tree-top-k 3 --tree-depth 2 --tree-size 5 --exits 3", {"3"}, 3),
    ):
        answer = answer_to(*line.split())
        stats = answer["stats"]
        assert answer["tokens"] == alone["tokens"]
        assert set(stats["exit_counts"]) == exits
        if longest:
            assert max(stats["accept_lengths"]) == longest
            assert sum(stats["exit_counts"].values()) > 0
    for tree, exact in (("4,1", False), ("1,4", True)):
        answer = answer_to("--method", "mcsd", "--tree", tree, "--init", "target")
        assert answer["exact"] is exact and (answer["tokens"] == alone["tokens"] or not exact)
    assert run.main([*common, "--method", "mcsd", "--init", "target"]) == 0
    assert "exact          no: with several roots from the target" in capsys.readouterr().out
    never_sure = answer_to("--thresholds", "1,1,0", "--stop", "1")
    assert never_sure["tokens"] == alone["tokens"]
    assert never_sure["stats"]["mean_accepted_tokens"] == 1.0
    warm = partial(answer_to, "--temperature", "1.5")
    without, replaced = (warm("--method", "mcsd", *flag) for flag in ((), ("--with-replacement",)))
    assert without["tokens"] != replaced["tokens"]
    sampled = [warm("--seed", seed)["tokens"] for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]
    assert warm("--top-p", "0.000001")["tokens"] == alone["tokens"]


def test_a_real_checkpoint_is_taken_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "WEIGHTS", tmp_path)
    assert run.find_target("7b") == tmp_path / "mini-7b"
    (tmp_path / "vicuna-7b").mkdir()
    assert run.find_target("7b") == tmp_path / "vicuna-7b"
    (tmp_path / "vicuna-draft").mkdir()
    for name in ("vicuna-7b", "vicuna-draft"):
        shutil.copyfile(WEIGHTS / "mini-7b/config.json", tmp_path / name / "config.json")
    args = run.parse(["--target", "7b"])
    assert run.choose_draft(args, tmp_path / "vicuna-7b") == (tmp_path / "vicuna-draft", "s2d")
    config = json.loads((tmp_path / "vicuna-draft/config.json").read_text())
    (tmp_path / "vicuna-draft/config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    other_family = None, "ar"
    assert run.choose_draft(args, tmp_path / "vicuna-7b") == other_family


@pytest.fixture(scope="module")
def other_models(tmp_path_factory):
    """A folder with models that do not fit: another vocabulary, no exits within the layers."""
    folder = tmp_path_factory.mktemp("models")
    save_model(random_llama(0), folder / "small-vocabulary", dtype=torch.float32)
    size = Tokenizer(WEIGHTS / "mini-7b" / "tokenizer.model").vocab_size
    bad_exits = random_llama(0, vocab_size=size, exit_layers=(2, 9), thresholds=(0.5, 0.0))
    save_model(bad_exits, folder / "bad-exits", dtype=torch.float32)
    for name in ("truncated", "no-tokenizer", "yarn", "lonely"):
        shutil.copytree(WEIGHTS / "mini-7b", folder / name)
    whole = (folder / "truncated/model.safetensors").read_bytes()
    (folder / "truncated/model.safetensors").write_bytes(whole[: len(whole) // 3])
    (folder / "no-tokenizer/tokenizer.model").unlink()
    config = json.loads((folder / "yarn/config.json").read_text())
    config["rope_scaling"] = {"rope_type": "yarn", "factor": 8.0}
    (folder / "yarn/config.json").write_text(json.dumps(config))
    return folder


MISTAKES = [
    ("--target nowhere", "no model folder at nowhere"),
    ("--target {m}/truncated --draft {w}/mini-draft", "is damaged"),
    ("--target {m}/no-tokenizer --draft {w}/mini-draft", "no tokenizer at"),
    ("--target {m}/yarn --draft {w}/mini-draft", "rope type 'yarn' is not supported"),
    ("--target {m}/lonely --method s2d", "no draft model at"),
    ("--target 7b --draft nowhere", "no model folder at nowhere"),
    ("--target 7b --draft {m}/small-vocabulary", "the draft has 61 tokens, the target 1024"),
    ("--target 7b --draft {m}/bad-exits", "lie within the draft's 4 layers"),
    ("--target 7b --exits 2,9", "lie within the draft's 4 layers"),
    ("--target 7b --exits 3,2", "exits must increase"),
    ("--target 7b --exits two", "invalid comma-separated int value: 'two'"),
    ("--target 7b --thresholds 0.5,0", "need as many thresholds, got 2"),
    ("--target 7b --thresholds 0.5,1.5,0", "within 0..1"),
    ("--target 7b --thresholds 0.5,x,0", "invalid comma-separated float value"),
    ("--target 7b --stop 7", "stop is a confidence"),
    ("--target 7b --stop nowhere", "no decision model at nowhere"),
    ("--target 7b --stop {w}/mini-draft/model.safetensors", "is not a decision model"),
    ("--target 7b --init both", "invalid choice: 'both'"),
    ("--target 7b --draft-length -1", "whole numbers of at least 1, got draft_length=-1"),
    ("--target 7b --tree 2,2", "--method s2d does not use --tree; leave it out, or use mcsd or"),
    ("--target 7b --tree-depth 3", "s2d does not use --tree-depth"),
    ("--target 7b --with-replacement", "s2d does not use --with-replacement"),
    ("--target 7b --method mcsd --tree 4,x", "invalid comma-separated int value"),
    ("--target 7b --method mcsd --tree 4,0", "whole numbers of at least 1"),
    ("--target 7b --method mcsd --draft-length 4", "mcsd does not use --draft-length"),
    ("--target 7b --method mcsd --thresholds 0", "mcsd does not use --thresholds"),
    ("--target 7b --method sd --thresholds 0", "sd does not use --thresholds"),
    ("--target 7b --method s2d-tree --tree-size 0", "whole numbers of at least 1"),
    ("--target 7b --method s2d-tree --tree 2,2 --tree-size 9", "--tree gives a fixed shape"),
    (
        "--target 7b --method mcsd --tree 30,30",
        "a tree of 930 nodes, 2 deep, is more than the target's context of 512",
    ),
    ("--target 7b --max-new-tokens -5", "lengths must be at least 1"),
    ("--target 7b --max-new-tokens many", "invalid int value"),
    ("--target 7b --temperature -1", "temperature must be 0 or more"),
    ("--target 7b --top-p 0", "top_p must be above 0"),
    ("--target 7b --prompt=", "the prompt is empty"),
    ("--target 7b --dtype float8", "invalid choice: 'float8'"),
    ("--target 7b --device tpu9", "unknown device 'tpu9'; expected auto, cpu, cuda or cuda:N"),
    ("--target 7b --device mps", "unknown device 'mps'"),
    ("--target 7b --device cpu:1", "unknown device 'cpu:1'"),
    ("--target 7b --device cuda:99", "device 'cuda:99' was asked for, but torch sees "),
    ("--target 7b --method magic", "invalid choice: 'magic'"),
    ("--target 7b --seed -99999999999999999999", "seed must be a whole number"),
    ("--method ar", "the following arguments are required: --target"),
    ("--target 7b --fast", "unrecognized arguments: --fast"),
    *[
        (f"--target 7b --method ar {option}", f"ar does not use {option.split()[0]}; leave it out")
        for option in (
            *["--draft /nonexistent", "--stop /nonexistent", "--exits 9,9", "--thresholds 7"],
            *["--init draft", "--init target", "--with-replacement", "--draft-length 0"],
            *["--tree 2,2", "--tree-top-k 2", "--tree-depth 2", "--tree-size 4"],
        )
    ],
]


@pytest.mark.parametrize(("line", "message"), MISTAKES, ids=[line for line, _ in MISTAKES])
def test_a_mistake_gives_one_line_and_exit_code_2(line, message, other_models, capsys):
    arguments = [word.format(m=other_models, w=WEIGHTS) for word in line.split(" ")]
    try:
        code = run.main(arguments)
    except SystemExit as stopped:  # argparse
        code = stopped.code
    output = capsys.readouterr()
    notices = "target ", "loading target "
    errors = [line for line in output.err.splitlines() if not line.startswith(notices)]
    assert code == 2
    assert output.out == ""
    assert len(errors) == 1 and errors[0].startswith("run.py: ") and message in errors[0], errors


def test_no_gpu_is_said_in_one_line(capsys):
    if torch.cuda.is_available():
        assert run.main(["--target", "7b", "--device", "cuda"]) == 0
        return
    assert run.main(["--target", "7b", "--device", "cuda"]) == 2
    assert "torch sees no GPU here" in capsys.readouterr().err


def test_too_little_gpu_memory_is_said_in_one_line(capsys):
    """The text is PyTorch's own, shortened where it goes on about the allocator."""

    said = "CUDA out of memory. Tried to allocate 86.00 MiB"

    def fails():
        raise torch.OutOfMemoryError(f"{said}. GPU 0 has a total capacity of ...")

    assert run_program("run.py", fails) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"run.py: {said}; weights/README.md tells")
    assert error.count("\n") == 1


def test_over_long_prompt_and_bytes_that_are_not_text(capsys, monkeypatch):
    assert run.main(["--target", "7b", "--prompt", "word " * 600]) == 2
    assert "the target's context of 512 has no room left" in capsys.readouterr().err

    class Stdin:
        buffer = io.BytesIO(b"caf\xe9 \xff")

    for stdin, message in ((Stdin, "is not UTF-8 (byte 3)"), (None, "stdin, which is closed")):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run.main(["--target", "7b", "--prompt", "-"]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def test_closed_streams():
    """No answer is lost with exit code 0, and no notice goes where the answer belongs."""

    def in_a_shell(rest):
        line = shlex.join([*RUN, *"--target 7b --method ar --max-new-tokens 2 --json".split()])
        return subprocess.run(f"{line} {rest}", shell=True, capture_output=True, text=True)

    done = in_a_shell("--prompt - <&-")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.splitlines()[-1].startswith("run.py: ") and "Traceback" not in done.stderr
    done = in_a_shell("--prompt hello >&-")
    assert done.returncode == 2 and done.stderr.startswith("run.py: stdout is closed")
    assert done.stderr.count("\n") == 1
    done = in_a_shell("--prompt hello 2>&-")
    assert done.returncode == 0 and len(json.loads(done.stdout)["tokens"]) == 2


def test_a_full_disk_is_one_line_and_no_success():
    """Found when Python empties its buffer, which may be at the very end."""
    code = "import sys; from s2d.program import *; sys.exit(run_program('run.py', print, 'answer'))"
    environment = os.environ | {"PYTHONUNBUFFERED": ""}
    with open("/dev/full", "wb", buffering=0) as full:
        streams = dict(stdout=full, stderr=subprocess.PIPE, text=True)
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, **streams)
    assert done.returncode == 2
    assert re.fullmatch(r"run\.py: .*No space left.*\n", done.stderr)


def test_letters_that_stdout_lacks_are_escaped():
    """An answer that is not ASCII, to a stdout that is: all of it, as text and as JSON."""
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    command = [*RUN, *"--target 7b --method ar --prompt hello".split()]
    command += "--temperature 4 --seed 2 --max-new-tokens 60 --device cpu".split()
    plain, shown, parsed = (
        subprocess.run([*command, *more], env=env, capture_output=True, check=True).stdout
        for more, env in (([], None), ([], ascii_only), (["--json"], ascii_only))
    )
    text = json.loads(parsed)["text"]
    assert not text.isascii() and plain.startswith(text.encode() + b"\n\n")
    assert shown.startswith(text.encode("ascii", "backslashreplace") + b"\n\n")


def test_a_key_pressed_during_imports_is_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*RUN, "--help"], env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"run.py: interrupted\n")


@pytest.mark.parametrize("program", [bench, train, weights_program])
@pytest.mark.parametrize(
    "room", [[], ["sweep"], ["shapes"], ["quality"], ["soft"], ["mini"], ["decision"], ["check"]]
)
def test_every_program_says_what_is_missing_in_one_line(program, room, capsys):
    with pytest.raises(SystemExit) as left:
        program.main([*room, "--no-such-option"])
    error = capsys.readouterr().err
    assert left.value.code == 2 and error.count("\n") == 1, error


def test_a_package_that_is_not_installed_is_named_in_one_line(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not there
    for line in ("--hf --targets 7b --limit 1", "shapes --shapes tiny --device cpu --hf"):
        assert bench.main(line.split()) == 2
        error = capsys.readouterr().err
        assert "needs the package transformers" in error and "tests/requirements.txt" in error
        assert error.count("\n") == 1


def test_what_is_said_is_put_into_the_template_where_one_is_known(tmp_path, capsys):
    tokenizer, text = Tokenizer(WEIGHTS / "mini-7b"), "What is 3 + 4?"
    base = tmp_path / "base"  # a model of which no template is known
    shutil.copytree(WEIGHTS / "mini-7b", base)
    common = ["--draft", str(WEIGHTS / "mini-draft"), "--max-new-tokens", "4", "--prompt", text]
    chat, plain = len(tokenizer.encode_chat([text])), len(tokenizer.encode(text))

    def check(target, without, with_chat):
        for option, expected in (([], without), (["--chat"], with_chat), (["--raw"], plain)):
            answer = run_json(capsys, "--target", str(target), *common, *option)
            assert answer["prompt_tokens"] == expected

    check("7b", chat, chat)
    check(base, plain, chat)
    config = json.loads((base / "tokenizer_config.json").read_text())
    config["chat_template"] = "Q {{ messages[0]['content'] }} A"
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    own = len(tokenizer.encode(f"Q {text} A")) - 1
    check(base, own, own)
    with pytest.raises(SystemExit) as stopped:
        run.main(["--target", "7b", "--chat", "--raw"])
    assert stopped.value.code == 2 and "not allowed with" in capsys.readouterr().err


def test_without_a_draft_the_target_decodes_alone_unless_a_method_was_asked_for(tmp_path, capsys):
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "mini-lonely")
    arguments = ["--target", str(tmp_path / "mini-lonely"), "--max-new-tokens", "4"]
    assert run.main(arguments) == 0
    out, error = capsys.readouterr()
    assert "method ar" in out
    assert f"no draft at {tmp_path / 'mini-draft'}, so the target decodes alone" in error
    assert run.main([*arguments, "--method", "sd"]) == 2
    assert "no draft model at" in capsys.readouterr().err
