"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

from ..checkpoint.notices import progress
from ..checkpoint.tokenizer import Tokenizer
from ..stats import Generation

# question_id, category, group, and turns: a list of texts; in ``compare`` the ids of a prompt.
Question = dict[str, Any]
# (prompt, seed) -> the answer's tokens and the Generation, which transformers does not have.
Run = Callable[[list[int], int], tuple[list[int], Generation | None]]


class Turn(NamedTuple):
    prompt: list[int]
    tokens: list[int]  # of the answer
    seconds: float  # of the whole call
    generation: Generation | None


class Record(NamedTuple):
    """How a method answered a question in a round."""

    round: int
    method: str
    question: Question
    turns: list[Turn]


def time_run(run: Run, prompt: list[int], seed: int) -> Turn:
    """Call ``run``. The clock spans the whole call, from ids to ids."""
    began = time.perf_counter()
    tokens, generation = run(prompt, seed)
    seconds = time.perf_counter() - began
    return Turn(prompt, tokens, seconds, generation)


def ask_turns(
    tokenizer: Tokenizer, context_size: int, run: Run, question: Question, seed: int
) -> list[Turn]:
    """Ask all turns of a ``question``, until the context is full."""
    messages: list[str] = []
    turns = []
    for text in question["turns"]:
        messages.append(text)
        prompt = tokenizer.encode_chat(messages)
        if len(prompt) >= context_size:
            break
        turns.append(time_run(run, prompt, seed))
        messages.append(tokenizer.decode(turns[-1].tokens))
    return turns


def measure(
    runs: dict[str, Run],
    questions: Sequence[Question],
    rounds: int,
    title: str,
    ask: Callable[[Run, Question, int], list[Turn]],
) -> list[Record]:
    """The records of all rounds; ``ask(a run, a question, a seed)`` returns the turns.

    Methods take turns, each time in another order, so that what slows the machine for a while
    slows all alike. In round 0, which does not count, each warms up on the first question.
    """
    records = []
    every = [(0, 0), *product(range(1, rounds + 1), range(len(questions)))] if questions else []
    for number, place in progress(every, f"{title}: turns of all methods", len(every)):
        seed = 1000 * number + place
        question = questions[place]
        order = random.Random(seed).sample(list(runs), len(runs))
        turns = {name: ask(runs[name], question, seed) for name in order}
        if number > 0 and all(turns.values()):
            records += [Record(number, name, question, turns[name]) for name in runs]
    if not records:
        raise ValueError(f"{title}: no question fits the context")
    return records
