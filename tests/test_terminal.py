"""Colours and conversations, as a user at a terminal has them."""

import builtins
import io
import os
import pty
import re
import sys
from functools import partial
from itertools import groupby
from unittest.mock import Mock

import pytest
from helpers import program as program_of

import run
from s2d import generate
from s2d.trace.terminal import COLORS, Streamed, colors_of

QUESTION = "Tell me two things about Tadastan: its capital and its main export."
NEXT = "What is the capital of Tadastan?"
ESCAPES = re.compile(r"\033\[(\d+)m(.*?)\033\[0m|([^\033]+)", re.DOTALL)
SIZE = 512  # of the miniatures' context

program = partial(program_of, run.main, "--target", "7b")


def in_runs(pairs):
    """Pairs (colour or None, text) with those of one colour put together."""
    runs = groupby((pair for pair in pairs if pair[1]), key=lambda pair: pair[0])
    return [(color, "".join(text for _, text in run)) for color, run in runs]


def plain_colours(steps, tokenizer, exits):
    """(colour or None, text) token by token, without terminal.py; sources are test_trace's."""
    ids, before = [], ""
    for step in steps:
        for source, token in zip(step.sources, step.tokens, strict=True):
            ids.append(token)
            text, before = tokenizer.decode(ids)[len(before) :], tokenizer.decode(ids)
            yield COLORS[exits.index(source)] if source in exits else None, text


LINES = {
    "--method ar": (),
    "--method sd --exits 3": (3,),
    "--method s2d": (2, 3, 4),
    "--method s2d-tree": (2, 3, 4),
    "--method mcsd --tree 3,2 --init target": (4,),
    "--method s2d --exits 2,4 --thresholds .5,0": (2, 4),
    "--method s2d --exits 0,2,4 --thresholds .5,.5,0": (0, 2, 4),
}


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_token_has_the_colour_of_its_exit(line, temperature, tokenizer, capsys, monkeypatch):
    steps, add, exits = [], Streamed.add, LINES[line]
    monkeypatch.setattr(Streamed, "add", lambda self, step: (steps.append(step), add(self, step)))
    common = ["--prompt", QUESTION, "--temperature", temperature, "--max-new-tokens", 40]
    assert program(*common, *line.split(), "--color", "always") == 0
    shown, _, block = capsys.readouterr().out.partition("\n\n")
    pairs = ESCAPES.findall(shown)
    found = in_runs((int(color) if color else None, text or plain) for color, text, plain in pairs)
    assert found == in_runs(plain_colours(steps, tokenizer, exits))
    legend = "".join(line for line in block.splitlines() if line.startswith("colours"))
    colors = [int(color) for color, *_ in ESCAPES.findall(legend) if color]
    assert colors == list(COLORS[: len(exits)]) and bool(legend) == bool(exits)
    assert (len({color for color, _ in found}) > 1) == bool(exits)
    plain = "auto" if temperature else "never"  # this is no terminal
    assert program(*common, *line.split(), "--color", plain) == 0
    assert "".join(text for _, text in found) == capsys.readouterr().out.partition("\n\n")[0]


@pytest.mark.parametrize("term", ["xterm", "dumb"])
@pytest.mark.parametrize("no_color", ["", "1"])
@pytest.mark.parametrize("tty", [True, False])
def test_when_there_are_colours(tty, no_color, term, monkeypatch):
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    out, both = io.StringIO(), {2: COLORS[0], 3: COLORS[1]}
    monkeypatch.setattr(out, "isatty", lambda: tty, raising=False)
    welcome = both if tty and not no_color and term == "xterm" else {}
    for choice, expected in (("auto", welcome), ("always", both), ("never", {})):
        assert colors_of((2, 3), choice, out) == expected


@pytest.mark.parametrize("colors", [{}, {2: 36}])
def test_a_terminal_is_shown_what_it_would_obey(colors, monkeypatch):
    """An answer may hold any character: files and pipes have it as it is, a terminal spelt."""
    said = "\tb\n\x1b]0;\x07\x9b2J\r\x7f 日\u3000."
    spelt = "\tb\n\\x1b]0;\\x07\\x9b2J\\x0d\\x7f 日\u3000."
    tokenizer, step = Mock(decode=lambda ids: said), Mock(tokens=[7], sources=[2])
    for tty, expected in ((False, said), (True, spelt)):
        out = io.StringIO()
        monkeypatch.setattr(out, "isatty", lambda tty=tty: tty, raising=False)
        Streamed(tokenizer, out, colors).add(step)
        assert out.getvalue() == (f"\033[36m{expected}\033[0m" if colors else expected)


class Terminal:
    """run.py on a terminal of its own, in a fork: all that it imports is here already."""

    def __init__(self, *arguments):
        self.process, self.ours = pty.fork()
        if self.process == 0:
            sys.stdin, sys.stdout, sys.stderr = (open(i, mode) for i, mode in enumerate("rww"))
            os._exit(program(*arguments))
        self.unread = b""

    def until(self, pattern):
        """What is shown up to the end of a match; the rest waits."""
        while not (found := re.search(pattern, self.unread, re.DOTALL)):
            self.unread += os.read(self.ours, 4096)
        shown, self.unread = self.unread[: found.end()], self.unread[found.end() :]
        return shown

    def types(self, keys):
        os.write(self.ours, keys)

    def exit_code(self):
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def test_a_conversation_on_a_real_terminal(monkeypatch):
    """Colours come unasked, what was typed by a key; a line says that a long prompt is read."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    how = "--interactive --target 70b --temperature 2 --max-new-tokens 100 --prompt".split()
    terminal = Terminal(*how, "word " * 200)
    first = terminal.until(rb" tokens in .*\n> ")
    assert re.search(rb"\nreading a prompt of \d{3} tokens \.{3}\r {34}\r[^ ]", first)
    assert any(b"\033[%dm" % color in first for color in COLORS)
    terminal.types(b"And yoo\x7fu?\n")
    terminal.until(rb"\n.*\033\[\d\dm")  # an answer has begun
    terminal.types(b"\x03")  # Ctrl-C ends it, and nothing else
    terminal.until(rb"(interrupted| tokens in ).*\n> ")
    terminal.types(b"\033[A\n")  # the key up
    terminal.until(rb"And you\?\r\n.* tokens in .*\n> ")
    terminal.types(b"\x04")
    assert terminal.exit_code() == 0


def test_many_prompts_on_a_real_terminal(tmp_path):
    """A line says how far it is; it is wiped off before an answer is shown."""
    (tmp_path / "prompts").write_text("Hi\nWhat is 3 + 4?\n")
    how = "--max-new-tokens", 3, "--prompts", tmp_path / "prompts", "--batch", 1
    terminal = Terminal(*how)
    text = terminal.until(rb"2 of 2 prompts.*left\r")
    pattern = rb"\r(1 of 2 prompts, [\d.]+ tokens/s, [\d.]+ min left)\r( +)\r## line 2: What is 3"
    note, blanks = re.search(pattern, text.replace(b"\n", b"\r")).groups()
    assert len(note) == len(blanks) and terminal.exit_code() == 0


@pytest.fixture
def talk(monkeypatch, capsys):
    """What a conversation prints; of lines typed, an exception is a key that is pressed instead."""

    def talk(lines, *arguments):
        monkeypatch.setattr(builtins, "input", Mock(side_effect=[*lines, EOFError()]))
        assert program("--interactive", "--dtype", "float64", *arguments) == 0
        return capsys.readouterr()

    return talk


@pytest.fixture
def prompts(monkeypatch):
    """The prompts that a conversation gives to the decoder."""
    given, converse = [], run.converse

    def watched(begin, *others):
        converse(lambda prompt: given.append(prompt) or begin(prompt), *others)

    monkeypatch.setattr(run, "converse", watched)
    return given


@pytest.mark.parametrize(("method", "system"), [("ar", None), ("s2d", "Be brief.")])
def test_a_conversation_has_its_earlier_turns_in_context(method, system, talk, mini, tokenizer):
    """--prompt is its first turn, and a system message stays in front."""
    options = ("--system", system) if system else ()
    out, error = talk(["", "   ", NEXT], "--method", method, "--prompt", QUESTION, *options)
    messages = []
    for line, shown in zip((QUESTION, NEXT), out.splitlines()):
        prompt = tokenizer.encode_chat([*messages, line], system=system)
        messages += [line, tokenizer.decode(generate(mini("mini-7b"), prompt, method="ar").tokens)]
        assert shown == messages[-1]
    line = r"(\d+) tokens in (\d+) passes of the target \(([\d.]+) each\), [\d.]+ tokens/s"
    gains = re.findall(line, error)
    assert len(gains) == 2 and all((float(each) > 1) == (method != "ar") for *_, each in gains)


def test_what_does_not_fit_is_forgotten_and_said(talk, prompts, tokenizer):
    """A context of 512: the first turns are dropped, too long a message is refused, answers end."""
    full = QUESTION
    while (n := len(tokenizer.encode_chat([full]))) < SIZE - 4:
        full = "so " + full
    lines = [*[QUESTION] * 12, "far too long " * 400, NEXT, full]
    _, error = talk(lines, "--max-new-tokens", "60")
    assert re.search(rf"the context of {SIZE} tokens is full: turns forgotten: 1\n", error)
    assert error.count("say it in fewer words") == 1
    *others, last_but_one, last = prompts
    assert len(prompts) == 14 and SIZE / 2 < max(map(len, others)) <= SIZE - 60
    asked = tokenizer.encode_chat([NEXT])
    assert last_but_one[-5:] == asked[-5:]
    assert len(last_but_one) > len(asked) + 100  # what was refused takes nothing with it
    assert last == tokenizer.encode_chat([full]) and f"{SIZE - n} tokens in" in error
    assert error.count(f"the context of {SIZE} tokens is full: the answer ends here") == 1


def test_keys_end_an_answer_or_the_conversation(talk, prompts, tokenizer, interrupt):
    """Ctrl-C at the prompt does nothing, within an answer it ends that; what was said stays."""
    steps = interrupt(2)
    no_text = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "no")
    out, error = talk([KeyboardInterrupt(), QUESTION, no_text, "And its language?"])
    begun = tokenizer.decode(steps[0].tokens + steps[1].tokens)
    assert out.splitlines()[1] == begun and "interrupted" in error and "not UTF-8" in error
    assert prompts[1] == tokenizer.encode_chat([QUESTION, begun, "And its language?"])


def test_reset_and_several_lines(talk, prompts, tokenizer):
    out, error = talk([QUESTION, "/reset", "One\\", "two", "three\\", EOFError()])
    answer, encode = out.splitlines()[1], tokenizer.encode_chat
    first, *others = prompts
    assert first == encode([QUESTION])
    assert others == [encode(["One\ntwo"]), encode(["One\ntwo", answer, "three"])]
    assert "/reset begins a new one; a line that ends with \\ goes on in the next" in error
