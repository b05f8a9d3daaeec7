"""Measuring: all methods answer the same questions, round after round; no word about tables."""

import random
import sys
import time
from collections import defaultdict
from functools import partial

from ..generate import generate
from .specbench import group_of


def runners(models, datastore, methods, peers, temperature, max_new_tokens):
    """{name: run(prompt, seed) -> (tokens, seconds, statistics)} of our methods and the peer's.

    ``models`` {whether compiled: (target, draft)}; ``datastore``: for exit 0, or None; ``methods``
    {name: (whether compiled, options of ``generate``)}; ``peers`` as methods.transformers_methods
    returns them.
    """
    context_size = models[False][0].config.max_position_embeddings

    def ours(compiled, options, prompt, seed):
        target, draft = models[compiled]
        sampling = dict(max_new_tokens=min(max_new_tokens, context_size), temperature=temperature)
        sampling |= {"seed": seed, "datastore": datastore}
        output = generate(target, prompt, draft, **sampling, **options)
        return output.tokens, output.stats.seconds, statistics_of(output)

    def theirs(peer, prompt, seed):
        longest = min(max_new_tokens, context_size - len(prompt))
        return *peer(prompt, longest, temperature, seed), {}

    own = {name: partial(ours, *method) for name, method in methods.items()}
    return own | {name: partial(theirs, peer) for name, peer in peers.items()}


def statistics_of(output):
    """What a record keeps of an Output, by the names of Spec-Bench and of ``Stats``."""
    stats = output.stats
    kept = "accept_lengths accepted draft_levels draft_forwards draft_seconds target_seconds"
    exits = {str(layer): count for layer, count in stats.exit_counts.items()}
    found = {"decoding_steps": stats.steps, "exit_counts": exits, "exact": output.exact}
    return found | {name: getattr(stats, name) for name in kept.split()}


def answer(run, question, seed, tokenizer, template, context_size):
    """Ask the turns of ``question`` until the context is full; a record, lists by turn."""
    messages, record = [], defaultdict(list)
    for turn in question["turns"]:
        prompt = tokenizer.encode_chat([*messages, turn], template)
        if len(prompt) >= context_size:
            break
        tokens, seconds, stats = run(prompt, seed)
        text = tokenizer.decode(tokens)
        messages += [turn, text]
        turn_record = {"turns": text, "prompts": prompt, "tokens": tokens, "wall_time": seconds}
        for key, value in (turn_record | {"new_tokens": len(tokens)} | stats).items():
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
            print(f"{label}: {done}/{total} questions, {left:.1f} min left here", file=sys.stderr)
        if number:
            yield records
