"""Colours, conversations and many prompts, as a user at a terminal has them."""

import builtins
import io
import json
import re
from unittest.mock import Mock

import pytest

from s2d.generate import generate, start
from s2d.trace.conversation import converse
from s2d.trace.terminal import COLORS, Streamed, answer_all, colors_of, report

QUESTION = "Tell me two things about Tadastan: its capital and its main export."
NEXT = "What is the capital of Tadastan?"


@pytest.mark.parametrize("exits", [(), (0,), (2, 3, 4), (0, 3, 4)])
def test_every_token_has_the_colour_of_its_exit(exits, mini, tokenizer):
    options = {"method": "s2d", "exits": exits} if exits else {"method": "ar"}
    draft = mini("mini-draft") if exits else None
    generation = start(mini("mini-7b"), tokenizer.encode_chat([QUESTION]), draft, **options)
    out, colors = io.StringIO(), colors_of(exits, "always", None)
    streamed, expected, ids = Streamed(tokenizer, out, colors), [], []
    for step in generation:
        streamed.add(step)
        for exit, token in zip(step.sources, step.tokens):
            before, ids = tokenizer.decode(ids), [*ids, token]
            color = "" if exit is None else str(COLORS[exits.index(exit)])
            expected += [(color, letter) for letter in tokenizer.decode(ids)[len(before) :]]
    streamed.finish()
    runs = re.findall(r"\033\[(\d+)m(.*?)\033\[0m|([^\033]+)", out.getvalue(), re.DOTALL)
    found = [(color, letter) for color, text, plain in runs for letter in text + plain]
    assert found == [*expected, ("", "\n")]
    lines = report(generation, colors).splitlines()
    legend = re.findall(r"\033\[(\d+)mexit (\d)", "".join(lines))
    assert legend == [(str(color), str(exit)) for color, exit in zip(COLORS, exits)]
    assert f"steps          {generation.stats.steps}, " in "\n".join(lines)
    assert lines[-1] == f"exact          yes, method {options['method']}"


def test_colours_come_unasked_on_a_terminal_alone(monkeypatch):
    terminal, colors = Mock(isatty=lambda: True), dict(zip((2, 3), COLORS))
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert colors_of((2, 3), "auto", terminal) == colors
    assert colors_of((2, 3), "auto", io.StringIO()) == colors_of((2, 3), "never", terminal) == {}
    monkeypatch.setenv("NO_COLOR", "1")
    assert colors_of((2, 3), "auto", terminal) == {} != colors_of((2, 3), "always", terminal)


@pytest.fixture
def talk(mini, tokenizer, monkeypatch, capsys):
    """talk(lines) -> the prompts of a conversation, and the lines of the answers."""

    def talk(lines, first=None, room=300):
        prompts = []

        def begin(prompt):
            prompts.append(prompt)
            return start(mini("mini-7b"), prompt, method="ar")

        monkeypatch.setattr(builtins, "input", Mock(side_effect=[*lines, EOFError()]))
        converse(begin, tokenizer, tokenizer.encode_chat, room, first, colors={})
        return prompts, capsys.readouterr().out.splitlines()

    return talk


def test_a_conversation_has_its_earlier_turns_in_context(talk, mini, tokenizer):
    first = tokenizer.encode_chat([QUESTION])
    answer = tokenizer.decode(generate(mini("mini-7b"), first, method="ar").tokens)
    both = tokenizer.encode_chat([QUESTION, answer, NEXT])
    prompts, shown = talk([NEXT], first=QUESTION, room=len(both))
    assert prompts == [first, both] and shown[0] == answer
    prompts, _ = talk([QUESTION, "", NEXT], room=len(both) - 1)  # the oldest no longer fits
    assert prompts == [first, tokenizer.encode_chat([NEXT])]


def test_ctrl_c_ends_an_answer_and_what_it_said_stays(talk, tokenizer, monkeypatch):
    add, steps = Streamed.add, []

    def interrupted(self, step):
        add(self, step)
        steps.append(step)
        if len(steps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Streamed, "add", interrupted)
    prompts, shown = talk([QUESTION, NEXT])
    assert shown[0] == tokenizer.decode(steps[0].tokens + steps[1].tokens)
    assert prompts[1] == tokenizer.encode_chat([QUESTION, shown[0], NEXT])


def test_many_prompts_are_answered_as_they_end(mini, tokenizer, capsys):
    prompts, ids = [("line 1", QUESTION), ("line 3", NEXT)], tokenizer.encode_chat([QUESTION])
    one = generate(mini("mini-7b"), ids, method="ar")
    finished = [(1, ValueError("too long")), (0, one)]
    text = tokenizer.decode(one.tokens)
    assert answer_all(prompts, [ids] * 2, finished, tokenizer, about=None) == 2
    out, error = capsys.readouterr()
    assert (out, error) == (f"## line 1: {QUESTION}\n\n{text}\n\n", "line 3: too long\n")
    about = {"seed": 0}
    assert answer_all(prompts, [ids], [(0, one)], tokenizer, lambda generation: about) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["prompt"], line["seed"], line["prompt_tokens"]) == ("line 1", 0, len(ids))
    assert (line["text"], line["tokens"], line["ended"]) == (text, one.tokens, one.ended)
    assert line["stats"]["steps"] == len(one.tokens) and line["exact"]
