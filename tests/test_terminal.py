"""Colours and conversations, as a user at a terminal has them."""

import builtins
import io
import os
import pty
import re
import signal
import subprocess
import sys
import time
from functools import partial

import pytest
from helpers import ROOT, WEIGHTS
from helpers import program as program_of

import run
from s2d import Tokenizer, generate, load_model
from s2d.chat import chat_template
from s2d.generate import start
from s2d.proposal import TARGET
from s2d.trace import conversation
from s2d.trace.terminal import COLORS, Streamed, colors_of

QUESTION = "Tell me two things about Tadastan: its capital and its main export."
RUN = [sys.executable, str(ROOT / "run.py"), "--target", "7b"]
ESCAPES = re.compile(r"\033\[(\d+)m(.*?)\033\[0m|([^\033]+)", re.DOTALL)


program = partial(program_of, run.main)


def plain_colours(steps, tokenizer, exits):
    """[(colour or None, text)] of runs of one colour, token by token and without terminal.py."""
    runs, ids = [], []
    for step in steps:
        drafted = step.proposal.exits[: len(step.verdict.path)]
        for token, exit_layer in zip(step.tokens, [*drafted, TARGET]):
            before = tokenizer.decode(ids)
            ids.append(token)
            text = tokenizer.decode(ids)[len(before) :]
            color = None if exit_layer == TARGET else COLORS[exits.index(exit_layer)]
            if text and runs and runs[-1][0] == color:
                runs[-1] = color, runs[-1][1] + text
            elif text:
                runs.append((color, text))
    return runs


LINES = (
    *["--method ar", "--method sd --exits 3", "--method s2d", "--method s2d-tree"],
    *["--method s2d --exits 0,2,4 --thresholds .5,.5,0"],
    *["--method mcsd --tree 3,2 --init target", "--method s2d --exits 2,4 --thresholds .5,0"],
)


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_has_the_colour_of_its_exit(line, temperature, capsys, monkeypatch):
    steps, add, arguments = [], Streamed.add, line.split()
    monkeypatch.setattr(Streamed, "add", lambda self, step: (steps.append(step), add(self, step)))
    few = ["--temperature", temperature, "--max-new-tokens", 40]
    common = ["--target", "7b", "--prompt", QUESTION, *few, *arguments]
    assert program(*common, "--color", "always") == 0
    shown, _, block = capsys.readouterr().out.partition("\n\n")
    exits = [2, 3, 4]
    if "--exits" in arguments:
        exits = [int(each) for each in arguments[arguments.index("--exits") + 1].split(",")]
    exits = exits[-1:] if arguments[1] in ("sd", "mcsd") else exits
    found = []
    for color, text, plain in ESCAPES.findall(shown):
        color = int(color) if color else None
        if found and found[-1][0] == color:
            found[-1] = color, found[-1][1] + (text or plain)
        else:
            found.append((color, text or plain))
    assert found == plain_colours(steps, Tokenizer(WEIGHTS / "mini-7b"), exits)
    legend = [line for line in block.splitlines() if line.startswith("colours")]
    if arguments[1] == "ar":
        assert legend == [] and "\033" not in shown
    else:
        colors = [int(color) for color, text, _ in ESCAPES.findall(legend[0]) if color]
        assert colors == [COLORS[i] for i in range(len(exits))]
        assert len({color for color, _ in found}) > 1
    assert program(*common, "--color", "never") == 0
    assert "".join(text for _, text in found) == capsys.readouterr().out.partition("\n\n")[0]


def test_when_there_are_colours(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    both = {2: COLORS[0], 3: COLORS[1]}
    assert colors_of((2, 3), "auto", Terminal()) == both
    assert colors_of((2, 3), "always", io.StringIO()) == both
    assert colors_of((2, 3), "auto", io.StringIO()) == {} == colors_of((2, 3), "never", Terminal())
    monkeypatch.setenv("TERM", "dumb")
    assert colors_of((2, 3), "auto", Terminal()) == {}
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("NO_COLOR", "1")
    assert colors_of((2, 3), "auto", Terminal()) == {} and colors_of((2, 3), "always", Terminal())


def test_on_a_real_terminal(tmp_path):
    """Colours without being asked for, and none into a file."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "NO_COLOR": ""}
    command = [*RUN, "--prompt", QUESTION]
    process = subprocess.Popen(command, stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    shown = b""
    while True:
        try:
            part = os.read(ours, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        shown += part
    assert process.wait() == 0 and b"\033[36m" in shown and b"colours" in shown
    assert b"\033" not in subprocess.run(command, capture_output=True, env=environment).stdout


def said(monkeypatch, *lines):
    """What the user types: texts, and exceptions where a key is pressed instead."""
    waiting = iter([*lines, EOFError()])

    def typed(prompt=""):
        line = next(waiting)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr(builtins, "input", typed)


def talk(capsys, *arguments):
    assert program("--target", "7b", "--interactive", "--dtype", "float64", *arguments) == 0
    return capsys.readouterr()


@pytest.mark.parametrize("method", ["ar", "s2d"])
def test_a_conversation_has_its_earlier_turns_in_context(method, monkeypatch, capsys):
    said(monkeypatch, QUESTION, "", "   ", "What is the capital of Tadastan?")
    out, error = talk(capsys, "--method", method)
    target = load_model(WEIGHTS / "mini-7b", dtype="float64")
    tokenizer, messages = Tokenizer(WEIGHTS / "mini-7b"), []
    for line, shown in zip((QUESTION, "What is the capital of Tadastan?"), out.splitlines()):
        tokens = generate(target, tokenizer.encode_chat([*messages, line]), method="ar").tokens
        messages += [line, tokenizer.decode(tokens)]
        assert shown == messages[-1]
    line = r"(\d+) tokens in (\d+) passes of the target \(([\d.]+) each\), [\d.]+ tokens/s"
    gains = re.findall(line, error)
    assert len(gains) == 2 and all((float(each) > 1) == (method != "ar") for *_, each in gains)


def test_a_prompt_is_the_first_turn(monkeypatch, capsys):
    said(monkeypatch)
    out, error = talk(capsys, "--prompt", QUESTION)
    assert "Vorbiburg" in out and error.count("passes of the target") == 1


def watch_prompts(monkeypatch):
    """A list that takes the prompt of each answer to come."""
    prompts = []

    def watched(target, prompt, **options):
        prompts.append(prompt)
        return start(target, prompt, **options)

    monkeypatch.setattr(conversation, "start", watched)
    return prompts


def test_what_does_not_fit_is_forgotten_and_said(monkeypatch, capsys):
    """A context of 512: the first turns are dropped, and too long a message refused."""
    said(monkeypatch, *[QUESTION] * 12, "far too long " * 400, "What is the capital of Tadastan?")
    prompts = watch_prompts(monkeypatch)
    out, error = talk(capsys, "--max-new-tokens", "60")
    full = r"the context of \d+ tokens is full: turns forgotten: 1\n"
    assert re.search(full, error)
    assert error.count("say it in fewer words") == 1
    size = load_model(WEIGHTS / "mini-7b").config.max_position_embeddings
    longest = max(map(len, prompts))
    assert len(prompts) == 13 and size / 2 < longest <= size - 60
    tokenizer, template = Tokenizer(WEIGHTS / "mini-7b"), chat_template(WEIGHTS / "mini-7b")
    last = tokenizer.encode_chat(["What is the capital of Tadastan?"], template)
    assert prompts[-1][-5:] == last[-5:]
    assert len(prompts[-1]) > len(last) + 100  # what was refused takes nothing with it


def test_an_answer_that_fills_the_context_says_so(monkeypatch, capsys):
    tokenizer, line = Tokenizer(WEIGHTS / "mini-7b"), QUESTION
    size = load_model(WEIGHTS / "mini-7b").config.max_position_embeddings
    while len(tokenizer.encode_chat([line])) < size - 4:
        line = "so " + line
    said(monkeypatch, line)
    _, error = talk(capsys, "--method", "ar")
    assert f"the context of {size} tokens is full: the answer ends here" in error
    assert f"{size - len(tokenizer.encode_chat([line]))} tokens in" in error


def test_keys_end_an_answer_or_the_conversation(monkeypatch, capsys):
    """Ctrl-C at the prompt does nothing, within an answer it ends that; what was said stays."""
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")
    said(monkeypatch, KeyboardInterrupt(), QUESTION, no_text, "And its language?")
    prompts, steps, add = watch_prompts(monkeypatch), [], Streamed.add

    def interrupted(self, step):
        add(self, step)
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Streamed, "add", interrupted)
    out, error = talk(capsys, "--method", "s2d")
    tokenizer = Tokenizer(WEIGHTS / "mini-7b")
    partial = tokenizer.decode(steps[0].tokens + steps[1].tokens)
    assert out.splitlines()[1] == partial and "interrupted" in error and "not UTF-8" in error
    assert prompts[1] == tokenizer.encode_chat([QUESTION, partial, "And its language?"])


def test_a_real_ctrl_c():
    """SIGINT while a process is answering: it asks for the next line."""
    line = "70b --interactive --method ar --max-new-tokens 3000 --temperature 3 --color never"
    pipes = {stream: subprocess.PIPE for stream in ("stdin", "stdout", "stderr")}
    process = subprocess.Popen([*RUN[:-1], *line.split()], **pipes, bufsize=0)
    process.stdin.write(QUESTION.encode() + b"\n")
    shown = b""
    while len(shown) < 6:  # the prompt, and something of an answer
        shown += process.stdout.read(4)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    out, error = process.communicate(b"What is the capital of Tadastan?\n", timeout=120)
    assert process.returncode == 0, error
    assert error.count(b"passes of the target") + error.count(b"interrupted") == 2, error


@pytest.mark.parametrize(
    "arguments", [["--json"], ["--trace", "x.html"], ["--raw"], ["--prompt", "-"]]
)
def test_what_does_not_go_with_a_conversation(arguments, capsys):
    assert program("--target", "7b", "--interactive", *arguments) == 2
    out, error = capsys.readouterr()
    assert error.count("\n") == 1 and arguments[0] in error and out == ""


def test_a_model_without_a_template_has_no_conversation(tmp_path, capsys, monkeypatch):
    (tmp_path / "plain").symlink_to(WEIGHTS / "mini-7b")
    folder = tmp_path / "base"
    folder.mkdir()
    for file in (WEIGHTS / "mini-7b").iterdir():
        (folder / file.name).symlink_to(file)
    assert program("--target", folder, "--interactive", "--method", "ar") == 2
    assert "no chat template" in capsys.readouterr().err.splitlines()[-1]
    said(monkeypatch, QUESTION)
    assert program("--target", folder, "--interactive", "--method", "ar", "--chat") == 0
