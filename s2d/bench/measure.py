"""Measuring: all methods answer the same questions, round after round; no word about tables."""

import random
import time
from functools import partial

from ..generate import generate
from ..program import tell
from .specbench import group_of


def runners(models, methods, peers, temperature, max_new_tokens):
    """{name: run(prompt, seed) -> (tokens, seconds, Generation or None)}: our methods, the peer's.

    ``models`` {whether compiled: (target, draft)}; ``methods`` {name: (whether compiled, options of
    ``generate``)}; ``peers`` as methods.peers_of returns them.
    """

    common = dict(temperature=temperature, max_new_tokens=max_new_tokens)
    ours = {
        name: partial(run_ours, *models[compiled], common | options)
        for name, (compiled, options) in methods.items()
    }
    theirs = {name: partial(peer, temperature, max_new_tokens) for name, peer in peers.items()}
    return ours | theirs


def run_ours(target, draft, options, prompt, seed):
    """(tokens, seconds, the Generation) of ``generate``."""
    generation = generate(target, prompt, draft, seed=seed, **options)
    return generation.tokens, generation.stats.seconds, generation


def answer(tokenizer, template, context_size, run, question, seed):
    """Ask the turns of ``question`` until the context is full; a record, lists by turn.

    It is empty where nothing fits.
    """
    messages, turns = [], []
    for turn in question["turns"]:
        prompt = tokenizer.encode_chat([*messages, turn], template)
        if len(prompt) >= context_size:
            break
        tokens, *took = run(prompt, seed)
        text = tokenizer.decode(tokens)
        messages += [turn, text]
        turns.append([text, prompt, tokens, *took])
    names = "turns prompts tokens wall_time generations".split()
    about = {key: question[key] for key in ("question_id", "category")}
    about["group"] = group_of(question)
    return about | dict(zip(names, map(list, zip(*turns)))) if turns else {}


def measure(runs, questions, rounds, label, ask):
    """Yield the records of each of ``rounds`` rounds, one for every question and method.

    ``runs`` {method: anything}; ``ask(its run, question, seed)`` returns a record, or an empty one.
    Methods take turns at each question, so that what slows the machine for a while slows all alike,
    each time in another order. Before the first round each warms up on the first question.
    """
    began, done, total = time.monotonic(), 0, 1 + rounds * len(questions)
    for number in range(rounds + 1):
        records = []
        for index, question in enumerate(questions if number else questions[:1]):
            seed = 1000 * number + index
            order = random.Random(seed).sample(list(runs), len(runs))
            answers = {name: ask(runs[name], question, seed) for name in order}
            for name in filter(answers.get, runs):
                records.append({"round": number, "method": name} | answers[name])
            done += 1
            left = (time.monotonic() - began) / done * (total - done) / 60
            tell(f"{label}: {done}/{total} questions, {left:.1f} min left here")
        if number:
            yield records
