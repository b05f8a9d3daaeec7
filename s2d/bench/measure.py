"""Measuring: all methods answer the same questions, round after round; no word about tables."""

import random
import time
from collections import defaultdict
from functools import partial

from ..generate import generate
from ..program import tell
from .specbench import group_of


def runners(models, methods, peers, temperature, max_new_tokens):
    """{name: run(prompt, seed) -> (tokens, seconds, Generation or None)}: our methods, the peer's.

    ``models`` {whether compiled: (target, draft)}; ``methods`` {name: (whether compiled, options of
    ``generate``)}; ``peers`` as methods.transformers_methods returns them.
    """
    context_size = models[False][0].config.max_position_embeddings

    def ours(compiled, options, prompt, seed):
        how = dict(temperature=temperature, seed=seed, **options)
        how["max_new_tokens"] = min(max_new_tokens, context_size)
        target, draft = models[compiled]
        generation = generate(target, prompt, draft, **how)
        return generation.tokens, generation.stats.seconds, generation

    def theirs(peer, prompt, seed):
        longest = min(max_new_tokens, context_size - len(prompt))
        return *peer(prompt, longest, temperature, seed), None

    own = {name: partial(ours, *method) for name, method in methods.items()}
    return own | {name: partial(theirs, peer) for name, peer in peers.items()}


def answer(run, question, seed, tokenizer, template, context_size):
    """Ask the turns of ``question`` until the context is full; a record, lists by turn."""
    messages, record = [], defaultdict(list)
    for turn in question["turns"]:
        prompt = tokenizer.encode_chat([*messages, turn], template)
        if len(prompt) >= context_size:
            break
        tokens, seconds, generation = run(prompt, seed)
        text = tokenizer.decode(tokens)
        messages += [turn, text]
        found = {"turns": text, "prompts": prompt, "tokens": tokens, "generations": generation}
        found |= {"new_tokens": len(tokens), "wall_time": seconds}
        for key, value in found.items():
            record[key].append(value)
    return dict(record)


def measure(runs, questions, rounds, label, *chat):
    """Yield the records of each of ``rounds`` rounds, one for every question and method.

    ``runs`` is what ``runners`` returns, ``chat`` the last three arguments of ``answer``. Methods
    take turns at each question, so that what slows the machine for a while slows all alike, each
    time in another order. Before the first round each warms up on the first question.
    """
    began, done, total = time.monotonic(), 0, 1 + rounds * len(questions)
    for number in range(rounds + 1):
        records = []
        for index, question in enumerate(questions if number else questions[:1]):
            seed = 1000 * number + index
            order = random.Random(seed).sample(list(runs), len(runs))
            answers = {name: answer(runs[name], question, seed, *chat) for name in order}
            about = {key: question[key] for key in ("question_id", "category")}
            about |= {"round": number, "group": group_of(question)}
            records += [about | {"method": name} | answers[name] for name in runs if answers[name]]
            done += 1
            left = (time.monotonic() - began) / done * (total - done) / 60
            tell(f"{label}: {done}/{total} questions, {left:.1f} min left here")
        if number:
            yield records
