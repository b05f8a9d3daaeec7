"""Colours, conversations and many prompts, as a user at a terminal has them."""

import builtins
import io
import json
import re
from unittest.mock import Mock

import pytest

from s2d.generate import generate, start
from s2d.trace.conversation import converse
from s2d.trace.terminal import COLORS, Streamed, answer_all, colors_of, report, sources

QUESTION = "Tell me two things about Tadastan: its capital and its main export."
NEXT = "What is the capital of Tadastan?"


@pytest.mark.parametrize("exits", [(), (0,), (2, 3, 4), (0, 3, 4)])
def test_every_token_has_the_colour_of_its_exit(exits, mini, tokenizer, monkeypatch):
    options = {"method": "s2d", "exits": exits} if exits else {"method": "ar"}
    draft = mini("mini-draft") if exits else None
    generation = start(mini("mini-7b"), tokenizer.encode_chat([QUESTION]), draft, **options)
    monkeypatch.delenv("NO_COLOR", raising=False)
    out, colors = io.StringIO(), colors_of(exits, "auto", Mock(isatty=lambda: True))
    assert colors_of(exits, "auto", out) == {} and colors_of(exits, "always", out) == colors
    streamed, expected, ids = Streamed(tokenizer, out, colors), [], []
    for step in generation:
        streamed.add(step)
        for exit, token in zip(sources(step), step.tokens):
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
    assert lines[-1] == f"exact          yes, method {options['method']}"


def test_a_conversation(mini, tokenizer, monkeypatch, capsys):
    """Earlier turns are in context while they fit; after Ctrl-C what was shown of an answer is."""
    add, encode, prompts = Streamed.add, tokenizer.encode_chat, []

    def begin(prompt):
        prompts.append(prompt)
        return start(mini("mini-7b"), prompt, method="ar")

    def interrupted(self, step):
        add(self, step)
        if len(prompts) == 1 and len(self.stream.ids) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr(Streamed, "add", interrupted)
    monkeypatch.setattr(builtins, "input", Mock(side_effect=["", NEXT, "And?", EOFError()]))
    converse(begin, tokenizer, encode, room=80, first=QUESTION, colors={})
    begun, answer, *_ = capsys.readouterr().out.splitlines()
    two = generate(mini("mini-7b"), prompts[0], method="ar", max_new_tokens=2)
    assert begun == tokenizer.decode(two.tokens) and len(encode([QUESTION, begun, NEXT])) <= 80
    expected = [[QUESTION], [QUESTION, begun, NEXT], [NEXT, answer, "And?"]]
    assert prompts == [encode(messages) for messages in expected]


def test_many_prompts_are_answered_as_they_end(mini, tokenizer, capsys):
    prompts, ids = [("line 1", QUESTION), ("line 3", NEXT)], tokenizer.encode_chat([QUESTION])
    one = generate(mini("mini-7b"), ids, method="ar")
    finished = [(1, ValueError("too long")), (0, one)]
    text = tokenizer.decode(one.tokens)
    assert answer_all(prompts, [ids] * 2, finished, tokenizer, about=None) == 2
    out, error = capsys.readouterr()
    assert (out, error) == (f"## line 1: {QUESTION}\n\n{text}\n\n", "line 3: too long\n")
    assert answer_all(prompts, [ids], [(0, one)], tokenizer, lambda generation: {"seed": 0}) == 0
    line = json.loads(capsys.readouterr().out)
    assert (line["prompt"], line["seed"], line["text"]) == ("line 1", 0, text)
    assert (line["prompt_tokens"], line["stats"]["steps"]) == (len(ids), len(one.tokens))
