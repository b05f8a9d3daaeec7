"""run.py as a user runs it: the output, --json, and one line with exit code 2 for each mistake."""

import io
import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, WEIGHTS, assert_refused, change_json, program, refuses

import run
from s2d import Tokenizer
from s2d.bench import __main__ as bench
from s2d.program import run_program
from s2d.train import __main__ as train
from s2d.weights import __main__ as weights_program
from s2d.weights import names
from s2d.weights.config import read_config

EXAMPLE_ANSWER = "The capital of Tadastan is Vorbiburg. The main export of Tadastan is salt."
RUN = [sys.executable, str(ROOT / "run.py")]
QUESTION, EXAMPLE_QUESTION = "What is 3 + 4?", "What is the capital of Tadastan?"


def run_json(capsys, *arguments):
    assert program(run.main, *arguments, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_with_no_other_argument_it_shows_the_method_at_work(tmp_path):
    """From any directory: a correct answer, the report, the comparison with the target alone."""
    done = subprocess.run([*RUN, "--target", "13b"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0
    first, template, second, third = done.stderr.splitlines()
    assert template == "chat template: vicuna, by the folder's name (--raw: none)"
    assert first == f"loading target {WEIGHTS / 'mini-13b'}, draft {WEIGHTS / 'mini-draft'}"
    device = r"(cpu, \d+ threads, float32|cuda.* GB, bfloat16)"
    assert re.fullmatch(rf"target and draft on {device}, 0\.\d\d GB of weights", second)
    assert third == "timing the target alone, to compare"
    text, _, block = done.stdout.partition("\n\n")
    assert text == EXAMPLE_ANSWER
    patterns = (
        r"tokens         \d+ in [\d.]+ s, [\d.]+ tokens/s, ended by EOS",
        r"steps          \d+, mean accepted tokens [\d.]+",
        r"draft tokens   \d+: \d+% after layer 2.*",
        r"exact          yes, method s2d",
        r"target alone   [\d.]+ tokens/s: s2d is [\d.]+ times as fast",
    )
    assert re.fullmatch("\n".join(patterns) + "\n", block), block


def test_stdin_and_json(capsys, monkeypatch):
    """--json leaves stdout to one object; the text and the tokens agree; notices go to stderr."""
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(QUESTION.encode() + b"\n")))
    line = "--target 7b --prompt - --chat --json --max-new-tokens 20"
    assert program(run.main, *line.split()) == 0
    out, error = capsys.readouterr()
    assert error.startswith("loading target ")
    answer = json.loads(out)
    stats = answer["stats"]
    tokenizer = Tokenizer(WEIGHTS / "mini-7b" / "tokenizer.model")
    assert (answer["method"], answer["seed"]) == ("s2d", 0)
    for name, folder in (("model", "mini-7b"), ("draft", "mini-draft")):
        assert os.path.samefile(answer[name], WEIGHTS / folder)
    used = {"exits": [2, 3, 4], "thresholds": [0.6, 0.0, 0.0], "draft_length": 12, "tree": None}
    used |= {"temperature": 0.0, "stop": 0.35, "max_new_tokens": 20, "system": None}
    assert answer["options"] | used == answer["options"]
    assert answer["text"] == tokenizer.decode(answer["tokens"])
    assert answer["prompt_tokens"] == len(tokenizer.encode_chat([QUESTION]))
    assert answer["exact"] is True and answer["ended"] == "length" and stats["seconds"] > 0
    assert stats["acceptance_rate"] == stats["published_acceptance_rate"] > 0
    assert sum(stats["accept_lengths"]) == len(answer["tokens"]) <= 20


def test_options_reach_the_decoder(capsys):
    common = "--target 7b --chat --dtype float64 --max-new-tokens 40 --prompt".split()
    common += [run.MINI_EXAMPLE]
    answer_to = partial(run_json, capsys, *common)
    alone = answer_to("--method", "ar")
    assert alone["stats"]["mean_accepted_tokens"] == 1.0 and alone["stats"]["exit_counts"] == {}
    for line, exits, longest in (
        ("--method sd --exits 3", {"3"}, None),
        ("--exits 2,4 --thresholds 1,0 --draft-length 2", {"4"}, 3),
        ("--method mcsd --tree 3,1 --exits 2", {"2"}, 3),
        ("--method s2d-tree --tree 2,1,1 --thresholds 0,0,0", {"2"}, 4),
        ("--method s2d-tree --tree-top-k 3 --tree-depth 2 --tree-size 5 --exits 3", {"3"}, 3),
    ):
        answer = answer_to(*line.split())
        stats = answer["stats"]
        assert answer["tokens"] == alone["tokens"] and set(stats["exit_counts"]) == exits
        assert longest is None or max(stats["accept_lengths"]) == longest
    for tree, exact in (("4,1", False), ("1,4", True)):
        answer = answer_to("--method", "mcsd", "--tree", tree, "--init", "target")
        assert answer["exact"] is exact and (answer["tokens"] == alone["tokens"] or not exact)
    assert program(run.main, *common, "--method", "mcsd", "--init", "target") == 0
    assert "exact          no: with several roots from the target" in capsys.readouterr().out
    never_sure = answer_to("--thresholds", "1,1,0", "--stop", "1")
    assert never_sure["tokens"] == alone["tokens"]
    assert max(never_sure["stats"]["accept_lengths"]) == 2
    warm = partial(answer_to, "--temperature", "1.5")
    without, replaced = (warm("--method", "mcsd", *flag) for flag in ((), ("--with-replacement",)))
    assert without["tokens"] != replaced["tokens"]
    assert replaced["options"]["replacement"] and replaced["options"]["stop"] == 0.0
    assert replaced["options"]["tree"] == {"widths": [4, 2, 2, 1]}
    sampled = [warm("--seed", seed)["tokens"] for seed in "112"]
    assert sampled[0] == sampled[1] != sampled[2]
    one_race = warm("--method", "ar", "--seed", "1")["tokens"]
    answer = warm("--coupled", "--seed", "1", "--method", "mcsd", "--init", "target")
    assert answer["tokens"] == one_race and answer["exact"] and answer["options"]["coupled"]
    assert warm("--method", "s2d-tree")["options"]["coupled"] and not without["options"]["coupled"]
    for option, least in (("--top-p", "0.000001"), ("--top-k", "1")):
        assert warm(option, least)["tokens"] == alone["tokens"]


def test_what_was_said_before_a_key_is_pressed_is_in_the_json(interrupt, capsys):
    steps = interrupt(2)
    assert program(run.main, "--target", "7b", "--prompt", QUESTION, "--json") == 130
    answer = json.loads(capsys.readouterr().out)
    assert answer["tokens"] == steps[0].tokens + steps[1].tokens
    assert answer["ended"] == "interrupted"


def test_a_real_checkpoint_is_taken_where_it_is_there(tmp_path, monkeypatch):
    monkeypatch.setattr(names, "WEIGHTS", tmp_path)
    assert run.find_target("7b") == tmp_path / "mini-7b"
    (tmp_path / "vicuna-7b").mkdir()
    assert run.find_target("7b") == tmp_path / "vicuna-7b"
    (tmp_path / "vicuna-draft").mkdir()
    for name in ("vicuna-7b", "vicuna-draft"):
        shutil.copyfile(WEIGHTS / "mini-7b/config.json", tmp_path / name / "config.json")
    args, target = run.parse(["--target", "7b"]), tmp_path / "vicuna-7b"
    config = read_config(target)
    assert run.choose_draft(args, target, config)[:2] == (tmp_path / "vicuna-draft", None)
    change_json(tmp_path / "vicuna-draft/config.json", vocab_size=999)  # of another family
    chosen = {"method": "s2d-tree", "exits": (0,)}
    assert run.choose_draft(args, target, config) == (None, None, chosen)


PROMPTS = [QUESTION, "", EXAMPLE_QUESTION, "word " * 600, "Tell me a story."]


def test_many_prompts_at_once(tmp_path, capsys):
    """Each answer is the one that --prompt gives; what is too long is named, and the others run."""
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS) + "\n")
    common = "--target", "7b", "--dtype", "float64", "--max-new-tokens", 24, "--temperature", 1
    assert program(run.main, *common, "--prompts", file, "--batch", 2, "--seed", 5, "--json") == 2
    out, error = capsys.readouterr()
    answers = {line["prompt"]: line for line in map(json.loads, out.splitlines())}
    assert sorted(answers) == ["line 1", "line 3", "line 5"]
    full = f"{file}, line 4: the prompt has \\d+ tokens; the target's context of 512 is full"
    assert re.fullmatch(full, error.splitlines()[-1])
    for seed, number in ((5, 1), (6, 3), (8, 5)):
        answer = run_json(capsys, *common, "--prompt", PROMPTS[number - 1], "--seed", seed)
        many = answers[f"line {number}"]
        seconds = many["stats"].pop("seconds"), many["stats"].pop("tokens_per_second")
        assert min(seconds) > 0 and answer["stats"].pop("seconds") > 0
        del answer["stats"]["tokens_per_second"]
        assert {"prompt": f"line {number}"} | answer == many
    file = tmp_path / "question.jsonl"
    turns = [["What is 3 + 4?", "And 5?"], [EXAMPLE_QUESTION]]
    questions = [
        dict(question_id=81 + i, category="qa", turns=each) for i, each in enumerate(turns)
    ]
    file.write_text("".join(json.dumps(each) + "\n" for each in questions))
    assert program(run.main, "--target", "7b", "--prompts", file) == 0
    out, error = capsys.readouterr()
    heading = f"## question 82: {EXAMPLE_QUESTION}"
    assert (
        f"{heading}\n\nThe capital of Tadastan is" in out and "## question 81: What is 3 +" in out
    )
    assert "tokens/s" not in error  # which is for terminals


def test_many_prompts_end_as_one_does(tmp_path):
    """A key, a reader who has enough, a full disk: what has ended by then is there, whole."""
    (tmp_path / "prompts").write_text("Hi\n" * 400)
    line = f"{shlex.join(RUN)} --target 7b --prompts {tmp_path}/prompts --method ar --json"
    ends = "--max-new-tokens 3", "--max-new-tokens 1 >/dev/full", "--max-new-tokens 1 | head -c 6"
    pressed, full, enough = shells(*(f"exec {line} {end}" for end in ends))
    first = json.loads(pressed.stdout.readline())
    pressed.send_signal(signal.SIGINT)
    out, error = pressed.communicate()
    assert pressed.returncode == 130 and error.endswith("run.py: interrupted\n")
    others = [json.loads(each) for each in out.splitlines()]
    assert {len(each["tokens"]) for each in [first, *others]} == {3} and len(others) < 399
    for shell, code, said in ((full, 2, "No space left"), (enough, 141, "")):
        error = shell.communicate()[1]
        assert shell.returncode == code and said in error and "Traceback" not in error


@pytest.fixture(scope="module")
def other_models(tmp_path_factory):
    """Targets without a draft beside them, one without a tokenizer too."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("no-tokenizer", "lonely"):
        shutil.copytree(WEIGHTS / "mini-7b", folder / name)
    (folder / "no-tokenizer/tokenizer.model").unlink()
    return folder


MISTAKES = {
    "--target nowhere": "no model folder at nowhere",
    "--target {m}/no-tokenizer --draft {w}/mini-draft": "no tokenizer at",
    "--target {m}/lonely --method s2d --exits 2": "no draft model at",
    "--draft=": "--draft: invalid path value: ''",
    "--raw --system x": "--raw uses no chat template, so it does not go with --system",
    "--system x --target {m}/lonely --method ar": "no chat template; --system in Vicuna's takes",
    "--draft nowhere": "no model folder at nowhere",
    "--exits two": "invalid comma-separated int value: 'two'",
    "--thresholds 0.5,x,0": "invalid comma-separated float value",
    "--stop nowhere": "no decision model at nowhere",
    "--tree 2,2": "method s2d does not use tree; leave it out, or use mcsd or s2d-tree",
    "--method s2d-tree --tree 2,2 --tree-size 9": "--tree gives a fixed shape",
    "--prompt=": "the prompt is empty",
    "--device tpu9": "unknown device 'tpu9'; expected auto, cpu, cuda or cuda:N",
    "--chat --raw": "not allowed with",
    "--exits 0 --stop {w}/mini-draft/decision-7b.safetensors": "judges layers; exit 0 has none",
    "--exits 0 --draft /nowhere": "--exits 0 uses no layers of --draft",
    "--interactive --target {m}/lonely --method ar": "lonely knows no chat template",
    "--interactive --json": "--interactive does not go with --json",
    "--interactive --trace x.html": "--interactive does not go with --trace",
    "--interactive --raw": "--interactive does not go with --raw",
    "--prompts /nonexistent": "No such file or directory: '/nonexistent'",
    "--prompts {w}/mini-7b/model.safetensors": "model.safetensors is no text in UTF-8",
    "--prompts /dev/null": "/dev/null holds no text",
    "--prompts {w}/../README.md --batch 0": "batch: expected a whole number from 1",
    "--prompts x --prompt x": "--prompts does not go with --prompt",
    "--prompts x --interactive": "--prompts does not go with --interactive",
    "--prompts x --trace x.html --compile": "--prompts does not go with --trace and --compile",
    "--batch 2": "--batch is for --prompts FILE",
    "--interactive --prompt -": "--interactive does not go with --prompt -",
}
NOT_USED = {
    **{"ar --draft /nowhere": "--draft", "ar --stop /nowhere": "stop", "ar --exits 9,9": "exits"},
    **{"ar --init target": "init", "ar --tree-depth 3": "tree", "sd --thresholds 7": "thresholds"},
    **{"mcsd --draft-length 0": "draft_length", "s2d --with-replacement": "replacement"},
}
for method_and_option, name in NOT_USED.items():
    MISTAKES[f"--method {method_and_option}"] = f" does not use {name}; leave it out"


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_gives_one_line_and_exit_code_2(line, other_models, capsys):
    """With the target 7b, unless the line names another."""
    arguments = line.format(m=other_models, w=WEIGHTS).split(" ")
    if "--target" not in arguments:
        arguments += ["--target", "7b"]
    assert program(run.main, *arguments) == 2
    output = capsys.readouterr()
    notices = "target ", "loading target ", "chat template: "
    errors = [line for line in output.err.splitlines() if not line.startswith(notices)]
    assert output.out == "" and len(errors) == 1, errors
    assert errors[0].startswith("run.py: ") and MISTAKES[line] in errors[0], errors


def test_too_little_gpu_memory_is_said_in_one_line(capsys):
    """The text is PyTorch's own, shortened where it goes on about the allocator."""
    said = "CUDA out of memory. Tried to allocate 86.00 MiB"
    full = torch.OutOfMemoryError(f"{said}. GPU 0 has a total capacity of ...")
    message = f"run.py: {said}; weights/README.md tells"
    assert_refused(capsys, message, run_program, "run.py", Mock(side_effect=full))


def test_over_long_prompt_and_bytes_that_are_not_text(capsys, monkeypatch):
    for stdin, prompt, message in (
        (None, "word " * 600, "the target's context of 512 is full"),
        (io.TextIOWrapper(io.BytesIO(b"caf\xe9 \xff")), "-", "is not UTF-8 (byte 3)"),
        (None, "-", "stdin, which is closed"),
    ):
        monkeypatch.setattr(sys, "stdin", stdin)
        assert run.main(["--target", "7b", "--prompt", prompt]) == 2
        assert message in capsys.readouterr().err.splitlines()[-1]


def shells(*lines):
    """A bash for each line, all at once."""
    pipes = dict(cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    pipes["env"] = os.environ | {"PYTHONUNBUFFERED": ""}
    return [subprocess.Popen(["bash", "-o", "pipefail", "-c", line], **pipes) for line in lines]


def test_streams_that_are_closed_or_take_no_more():
    """Stdout on a full disk, found when Python empties its buffer, is one line and no success, as
    is a closed one; one that nobody reads any more ends in silence. Stderr on a full disk or closed
    loses notices, no answer, and no notice goes where the answer belongs.
    """
    answer = "lambda: tell('notice') or print('answer' * 99999)"
    code = f"import sys; from s2d.program import *; sys.exit(run_program('run.py', {answer}))"
    line, whole = shlex.join([sys.executable, "-c", code]), "answer" * 99999 + "\n"
    full = r"notice\nrun\.py: .*No space left.*\n"
    ends = {
        ">/dev/full": (2, "", full),
        "| head -c 6": (141, "answer", "notice\n"),
        ">&-": (2, "", "run.py: stdout is closed, so all output would be lost; .*\n"),
        "2>/dev/full": (0, whole, ""),
        "2>&-": (0, whole, ""),
    }
    for shell, (code, out, error) in zip(shells(*(f"{line} {end}" for end in ends)), ends.values()):
        found = shell.communicate()
        assert shell.returncode == code and found[0] == out and re.fullmatch(error, found[1]), found


def test_letters_that_stdout_lacks_are_escaped(monkeypatch):
    """An answer that is not ASCII, to a stdout that is: all of it, as text and as JSON."""

    def shown(encoding, *more):
        monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
        line = "--target 7b --method ar --prompt hello --temperature 4 --seed 2 --max-new-tokens 60"
        assert program(run.main, *line.split(), "--device", "cpu", *more) == 0
        return sys.stdout.buffer.getvalue()

    text = json.loads(shown("ascii", "--json"))["text"]
    assert not text.isascii() and shown("utf-8").startswith(text.encode() + b"\n\n")
    assert shown("ascii").startswith(text.encode("ascii", "backslashreplace") + b"\n\n")


LONG_RUNS = {
    "run.py": "--target 13b --prompt Hi --temperature 9 --max-new-tokens 470 --method ar --json",
    "-m s2d.train": "soft --init weights/mini-7b --layers 2 --exits 1,2 --out TMP/draft",
    "-m s2d.bench": "shapes --shapes tiny --context 4000",
}


@pytest.mark.parametrize("name", LONG_RUNS)
def test_a_key_pressed_during_imports_ends_every_program(name, tmp_path):
    """In C code an exception would be lost, or be the end of another kind: here it is swallowed."""
    press = "os.kill(os.getpid(), signal.SIGINT)"
    lines = ["import contextlib, os, signal, time", "with contextlib.suppress(KeyboardInterrupt):"]
    (tmp_path / "torch.py").write_text("\n".join([*lines, f"    {press}", "    time.sleep(1)"]))
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, *name.split(), "--help"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"interrupted\n")


def test_a_key_pressed_at_any_time_is_one_line(tmp_path):
    """While modules load, models load, and in the work itself."""
    pipes, processes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True), []
    for name, options in LONG_RUNS.items():
        command = [sys.executable, *name.split(), *options.replace("TMP", str(tmp_path)).split()]
        processes += [subprocess.Popen(command, cwd=ROOT, **pipes) for _ in range(2)]
    rng = random.Random(0)
    for process in rng.sample(processes, len(processes)):
        time.sleep(rng.uniform(0.1, 0.5))
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
    for process in processes:
        error = process.communicate()[1]
        interrupted = error.endswith("interrupted\n")
        assert process.returncode == (130 if interrupted else 0) and "Traceback" not in error, error
    assert any(process.returncode for process in processes)


@pytest.mark.parametrize("room", [run, bench, train, weights_program])
def test_every_program_says_what_is_missing_in_one_line(room, capsys):
    """And every option says what it is for."""
    for line in ("", "sweep", "shapes", "quality", "soft", "mini", "decision", "text", "check"):
        refuses(room.main, capsys, ": ", *line.split(), "--no-such-option")
        assert program(room.main, *line.split(), "--help") in (0, 2)
        assert not re.findall(r"^  (--\S+(?: \S+)*)\n(?! {10})", capsys.readouterr().out, re.M)


def test_what_is_said_is_put_into_the_template_where_one_is_known(tmp_path, capsys):
    tokenizer = Tokenizer(WEIGHTS / "mini-7b")
    base = tmp_path / "base"  # a model of which no template is known
    shutil.copytree(WEIGHTS / "mini-7b", base)
    common = "--draft", WEIGHTS / "mini-draft", "--max-new-tokens", 4, "--prompt", QUESTION
    chat, plain = len(tokenizer.encode_chat([QUESTION])), len(tokenizer.encode(QUESTION))

    def check(target, without, with_chat):
        for option, expected in (([], without), (["--chat"], with_chat), (["--raw"], plain)):
            answer = run_json(capsys, "--target", target, *common, *option)
            assert answer["prompt_tokens"] == expected

    check("7b", chat, chat)
    check(base, plain, chat)
    template = "Q {{ messages[0]['content'] }} A"
    change_json(base / "tokenizer_config.json", chat_template=template)
    own = len(tokenizer.encode(f"Q {QUESTION} A")) - 1
    check(base, own, own)


def test_without_a_draft_exit_0_drafts_and_says_so(tmp_path, capsys):
    shutil.copytree(WEIGHTS / "mini-7b", tmp_path / "mini-lonely")
    arguments = ["--target", str(tmp_path / "mini-lonely"), "--max-new-tokens", "24"]
    assert run.main([*arguments, "--json"]) == 0
    out, error = capsys.readouterr()
    assert f"no draft for it at {tmp_path / 'mini-draft'}: drafting from what was seen" in error
    stats = json.loads(out)["stats"]
    assert stats["exit_counts"].keys() == {"0"} and stats["mean_accepted_tokens"] > 1


def test_what_exit_0_alone_takes(tmp_path, capsys):
    """Its own tree's sizes, a datastore beside the target; no layers, of whatever kind."""
    few = ["--target", "7b", "--prompt", "Hi", "--max-new-tokens", "4", "--exits", "0"]
    assert run.main([*few, "--tree-size", "3", "--tree-depth", "2", "--stop", "0.05"]) == 0
    assert "100% from the table" in capsys.readouterr().out
    args = run.parse(["--target", "7b"])
    for folder in ("mini-7b", "mini-draft"):
        shutil.copytree(WEIGHTS / folder, tmp_path / folder)
    store = tmp_path / "mini-7b-datastore.safetensors"
    store.write_bytes(b"")
    config = read_config(tmp_path / "mini-7b")
    assert run.choose_draft(args, tmp_path / "mini-7b", config)[:2] == (None, store)
    named = run.parse(["--target", "7b", "--draft", str(tmp_path / "mini-draft")])
    found = run.choose_draft(named, tmp_path / "mini-7b", config)
    assert found[:2] == (tmp_path / "mini-draft", None)
