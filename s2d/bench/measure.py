"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from ..checkpoint.notices import progress
from ..checkpoint.pair import Pair
from ..checkpoint.tokenizer import Tokenizer
from ..generation import start
from ..stats import Generation

Question = dict[str, Any]  # question_id, category, group, and turns: a list of texts
# (prompt, seed) -> the tokens of the answer, and all of it; transformers has no more than tokens.
Run = Callable[[list[int], int], tuple[list[int], Generation | None]]


def run_ours(
    prompt: list[int], seed: int, pair: Pair, **options: Any
) -> tuple[list[int], Generation]:
    """The answer of a ``pair`` with its own options and these ``options``."""
    options = vars(replace(pair.options, seed=seed, **options))
    made = start(pair.target, prompt, pair.draft, **options).run()
    return made.tokens, made


class Turn(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # of the answer
    text: str
    seconds: float  # of the whole call
    generation: Generation | None


class Record(NamedTuple):
    """How a method answered a question in a round."""

    round: int
    method: str
    question: Question
    turns: list[Turn]


def answer(
    tokenizer: Tokenizer, context_size: int, run: Run, question: Question, seed: int
) -> list[Turn]:
    """Ask all turns of a ``question``, until the context is full."""
    messages: list[str] = []
    turns = []
    for text in question["turns"]:
        messages.append(text)
        prompt = tokenizer.encode_prompt(messages)
        if len(prompt) >= context_size:
            break
        began = time.perf_counter()
        tokens, generation = run(prompt, seed)
        seconds = time.perf_counter() - began
        messages.append(tokenizer.decode(tokens))
        turns.append(Turn(prompt, tokens, messages[-1], seconds, generation))
    return turns


def measure(
    runs: dict[str, Run],
    questions: Sequence[Question],
    rounds: int,
    label: str,
    ask: Callable[[Run, Question, int], list[Turn]],
) -> list[Record]:
    """The records of all rounds; ``ask(a run, a question, a seed)`` returns the turns.

    Methods take turns, each time in another order, so that what slows the machine for a while
    slows all alike. In round 0, which does not count, each warms up on the first question.
    """
    records = []
    every = [(0, 0), *product(range(1, rounds + 1), range(len(questions)))]
    for number, place in progress(every, f"{label}: turns of all methods", len(every)):
        seed = 1000 * number + place
        order = random.Random(seed).sample(list(runs), len(runs))
        answers = {name: ask(runs[name], questions[place], seed) for name in order}
        records += [Record(number, name, questions[place], answers[name]) for name in runs]
    records = [record for record in records if record.round > 0 and record.turns]
    if not records:
        raise ValueError(f"{label}: no question fits the context")
    return records
