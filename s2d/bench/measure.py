"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from itertools import product

from ..batch import generate_many
from ..generation import generate
from ..notices import progress

LISTS = "messages prompts turns tokens wall_time generations".split()  # of a record, by turn


def run_ours(target, draft, batch, prompts, seed, **options):
    """[(tokens, seconds, Decoder)] of ``prompts``, ``batch`` at once; the i-th has seed + i."""
    if batch == 1:
        numbered = enumerate(prompts, seed)
        found = [generate(target, each, draft, seed=own, **options) for own, each in numbered]
        return [(each.tokens, each.stats.seconds, each) for each in found]
    began = time.perf_counter()
    found = list(generate_many(target, prompts, draft, batch=batch, seed=seed, **options))
    seconds = (time.perf_counter() - began) / len(prompts)  # its share of the time
    return [(each.tokens, seconds, each) for each in found]


def answer(tokenizer, context_size, run, questions, seed, **options):
    """Ask all turns of ``questions``, until a context is full: a record of each with an answer."""
    records = []
    for question in questions:
        about = {key: question[key] for key in ("question_id", "category", "group")}
        records.append(about | {name: [] for name in LISTS})
    for turn in range(max(len(question["turns"]) for question in questions)):
        asked = []
        for question, record in zip(questions, records):
            if len(record["turns"]) == turn < len(question["turns"]):
                record["messages"].append(question["turns"][turn])
                prompt = tokenizer.encode_prompt(record["messages"])
                if len(prompt) < context_size:
                    record["prompts"].append(prompt)
                    asked.append(record)
        if not asked:
            break
        found = run([record["prompts"][-1] for record in asked], seed, **options)
        for record, (tokens, seconds, generation) in zip(asked, found):
            text = tokenizer.decode(tokens)
            record["messages"].append(text)
            record["turns"].append(text)
            record["tokens"].append(tokens)
            record["wall_time"].append(seconds)
            record["generations"].append(generation)
    return [record for record in records if record["turns"]]


def measure(runs, questions, rounds, label, ask, at_once=1, **options):
    """The records of all rounds; ``ask(a run, questions, seed, **options)`` returns some of them.

    Methods take turns, each time in another order, so that what slows the machine for a while
    slows all alike. In round 0, which does not count, each warms up on the first questions.
    """
    records, starts = [], range(0, len(questions), at_once)
    turns = [(0, 0), *product(range(1, rounds + 1), starts)]
    for number, start in progress(turns, f"{label}: turns of all methods", len(turns)):
        seed = 1000 * number + start
        order = random.Random(seed).sample(list(runs), len(runs))
        some = questions[start : start + at_once]
        answers = {name: ask(runs[name], some, seed, **options) for name in order}
        for name in runs:
            records += [{"round": number, "method": name, **each} for each in answers[name]]
    return [record for record in records if record["round"] > 0]
