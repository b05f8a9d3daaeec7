"""Answers to the prompts of a file, shown as they end. Knows nothing about models."""

import json
import sys
import time

from ..program import CONTROLS, one_line, tell
from .terminal import as_json


def answer_all(file, prompts, ids_of, seed, run_all, tokenizer, about):
    """Answer ``prompts`` [(name, text)] of ``file``; 2 where one could not be run, else 0.

    ``ids_of``: a text -> its ids; prompt i has ``seed`` + i. ``run_all``: prompts and seeds -> as
    extras/many.py's ``as_finished``. ``about``: a Plan -> what JSON says of it; None: no JSON.
    """
    fitting, failed = [], 0
    for i, (name, text) in enumerate(prompts):
        try:
            fitting.append((name, text, ids_of(text), seed + i))
        except ValueError as error:
            tell(f"{file}, {name}: {error}")
            failed = 2
    began, tokens, note = time.monotonic(), 0, ""
    names, texts, ids, seeds = zip(*fitting) if fitting else ((),) * 4
    for done, (i, each) in enumerate(run_all(ids, seeds=seeds), 1):
        if note:  # off the terminal before anything else is shown there
            print(" " * len(note), end="\r", file=sys.stderr, flush=True)
        if isinstance(each, ValueError):
            tell(f"{file}, {names[i]}: {each}")
            failed = 2
            continue
        if about:
            line = {"prompt": names[i]} | as_json(each, ids[i], tokenizer, about(each.plan))
            print(json.dumps(line), flush=True)
        else:
            said = tokenizer.decode(each.tokens)
            said = said.translate(CONTROLS) if sys.stdout.isatty() else said
            print(f"## {names[i]}: {one_line(texts[i])}\n\n{said}\n", flush=True)
        tokens += len(each.tokens)
        if sys.stderr.isatty():
            seconds = time.monotonic() - began
            left = seconds / done * (len(ids) - done) / 60
            speed = f"{tokens / seconds:.1f} tokens/s"
            note = f"{done} of {len(ids)} prompts, {speed}, {left:.1f} min left"
            tell(note, end="\r")
    return failed
