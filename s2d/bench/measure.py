"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from itertools import count

from ..extras.many import generate_many
from ..generate import generate
from ..program import tell
from .specbench import group_of

BY_TURN = ("turns", "tokens", "wall_time", "generations", "prompts")  # lists of a record


def run_ours(target, draft, options, batch, prompts, seed):
    """[(tokens, seconds, Generation)] of ``prompts``, ``batch`` at once; the i-th has seed + i."""
    if batch == 1:
        seeded = ((prompt, options | {"seed": seed + i}) for i, prompt in enumerate(prompts))
        found = [generate(target, prompt, draft, **each) for prompt, each in seeded]
        return [(each.tokens, each.stats.seconds, each) for each in found]
    began = time.perf_counter()
    found = list(generate_many(target, prompts, draft, batch=batch, seed=seed, **options))
    seconds = (time.perf_counter() - began) / len(prompts)  # its share of the time
    return [(each.tokens, seconds, each) for each in found]


def answer(tokenizer, template, context_size, run, questions, seed):
    """Ask all turns of ``questions``, until a context is full: a record of each with an answer."""
    records = []
    for question in questions:
        about = {key: question[key] for key in ("question_id", "category")}
        about["group"] = group_of(question)
        records.append(about | {name: [] for name in BY_TURN})
    going = [(each["turns"], record, []) for each, record in zip(questions, records)]
    for turn in count():
        asked = []
        for turns, record, messages in going:
            if turn < len(turns):
                messages.append(turns[turn])
                prompt = tokenizer.encode_chat(messages, template)
                if len(prompt) < context_size:
                    record["prompts"].append(prompt)
                    asked.append((turns, record, messages))
        if not asked:
            return [record for record in records if record["turns"]]
        going = asked
        found = run([record["prompts"][-1] for _, record, _ in going], seed)
        for (_, record, messages), (tokens, seconds, generation) in zip(going, found):
            messages.append(tokenizer.decode(tokens))
            values = (messages[-1], tokens, seconds, generation)
            for name, value in zip(BY_TURN, values):
                record[name].append(value)


def measure(runs, questions, rounds, label, ask, at_once=1):
    """The records of all rounds. ``ask(a run, questions, seed)`` returns those of ``at_once``.

    Methods take turns, each time in another order, so that what slows the machine for a while
    slows all alike. Before the first round each warms up on the first questions.
    """
    starts, records = range(0, len(questions), at_once), []
    for number in range(rounds + 1):
        for start in starts if number else starts[:1]:
            seed = 1000 * number + start
            order = random.Random(seed).sample(list(runs), len(runs))
            some = questions[start : start + at_once]
            answers = {name: ask(runs[name], some, seed) for name in order}
            for name in runs if number else ():
                records += [{"round": number, "method": name, **each} for each in answers[name]]
            tell(f"{label}: round {number} of {rounds}, question {start + 1} of {len(questions)}")
    return records
