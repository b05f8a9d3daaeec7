"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

from ..batch import decode_many
from ..checkpoint.tokenizer import Tokenizer
from ..decoder import Generation
from ..generation import generate, settings_for
from ..model import Llama
from ..notices import progress
from ..options import Options

Answer = tuple[list[int], float, Generation | None]  # tokens, seconds; transformers has no more
Run = Callable[..., list[Answer]]  # called with prompts and a seed for each
Question = dict[str, Any]  # question_id, category, group, and turns: a list of texts
Record = dict[str, Any]  # how a method answered a question: its fields but turns, and LISTS

LISTS = "messages prompts turns tokens wall_time generations".split()  # turn by turn


def run_ours(
    prompts: list[list[int]],
    seeds: Sequence[int],
    target: Llama,
    draft: Llama | None,
    batch: int,
    **options: Any,
) -> list[Answer]:
    """The answers to ``prompts``, ``batch`` at once, each with its own of ``seeds``.

    Seconds are those of the whole call, and its share of them if a call answers several.
    """
    if batch == 1:
        found = []
        for seed, prompt in zip(seeds, prompts):
            began = time.perf_counter()
            made = generate(target, prompt, draft, seed=seed, **options)
            found.append((made.tokens, time.perf_counter() - began, made))
        return found
    began = time.perf_counter()
    settings = settings_for(target, draft, Options(**options), batch)
    by_seed = dict(decode_many(target, zip(seeds, prompts), draft, settings, batch))
    seconds = (time.perf_counter() - began) / len(prompts)
    return [(by_seed[seed].tokens, seconds, by_seed[seed]) for seed in seeds]


def answer(
    tokenizer: Tokenizer, context_size: int, run: Run, questions: list[Question], seed: int
) -> list[Record]:
    """Ask all turns of ``questions``, until a context is full: a record of each with an answer.

    The i-th question has ``seed`` + i in all its turns, so that methods draw the same for it.
    """
    records = []
    for question in questions:
        about = {key: question[key] for key in ("question_id", "category", "group")}
        records.append(about | {name: [] for name in LISTS})
    for turn in range(max(len(question["turns"]) for question in questions)):
        asked = []
        seeds = []
        for own_seed, (question, record) in enumerate(zip(questions, records), seed):
            has_answered = len(record["turns"]) == turn  # all turns before this one
            if has_answered and turn < len(question["turns"]):
                record["messages"].append(question["turns"][turn])
                prompt = tokenizer.encode_prompt(record["messages"])
                if len(prompt) < context_size:
                    record["prompts"].append(prompt)
                    asked.append(record)
                    seeds.append(own_seed)
        if not asked:
            break
        found = run([record["prompts"][-1] for record in asked], seeds)
        for record, (tokens, seconds, generation) in zip(asked, found):
            text = tokenizer.decode(tokens)
            record["messages"].append(text)
            record["turns"].append(text)
            record["tokens"].append(tokens)
            record["wall_time"].append(seconds)
            record["generations"].append(generation)
    return [record for record in records if record["turns"]]


def measure(
    runs: dict[str, Run],
    questions: Sequence[Question],
    rounds: int,
    label: str,
    ask: Callable[[Run, Sequence[Question], int], list[Record]],
    at_once: int = 1,
) -> list[Record]:
    """The records of all rounds; ``ask(a run, questions, seed)`` returns some of them.

    Methods take turns, each time in another order, so that what slows the machine for a while
    slows all alike. In round 0, which does not count, each warms up on the first questions.
    """
    records = []
    starts = range(0, len(questions), at_once)
    rounds_and_starts = [(0, 0), *product(range(1, rounds + 1), starts)]
    label = f"{label}: turns of all methods"
    for number, start in progress(rounds_and_starts, label, len(rounds_and_starts)):
        seed = 1000 * number + start
        order = random.Random(seed).sample(list(runs), len(runs))
        some = questions[start : start + at_once]
        answers = {name: ask(runs[name], some, seed) for name in order}
        for name in runs:
            records += [{"round": number, "method": name, **each} for each in answers[name]]
    return [record for record in records if record["round"] > 0]
