"""Measuring: every method answers the same questions in turn, round after round. Knows nothing about tables."""

import random
import sys
import time
from collections import defaultdict
from functools import partial

from ..decode import generate
from ..options import choose_exits
from ..tune import tuner_for
from .specbench import group_of


def answer(run, question, tokenizer, template, max_new_tokens, context_size):
    """Feed the turns of ``question`` one by one, the answers so far in context; one record, lists by turn.

    Ends before a turn that leaves no room for an answer in the context.
    """
    messages, record = [], defaultdict(list)
    for turn in question["turns"]:
        prompt = tokenizer.encode_chat([*messages, turn], template)
        if len(prompt) >= context_size:
            break
        tokens, seconds, stats = run(prompt, max_new_tokens)
        messages += [turn, tokenizer.decode(tokens)]
        record["turns"].append(messages[-1])
        record["prompts"].append(prompt)
        record["tokens"].append(tokens)
        record["new_tokens"].append(len(tokens))
        record["wall_time"].append(seconds)
        for key, value in stats.items():
            record[key].append(value)
    return dict(record)


def runners(methods, models, tuners, peers, temperature, seed):
    """{name: function of prompt and new tokens -> (tokens, seconds, statistics)} for our methods and the peer's."""

    def ours(tuner, compiled, options, prompt, max_new_tokens):
        (target, draft), steps = models[compiled], []
        output = generate(target, prompt, draft=draft, temperature=temperature, seed=seed, tuner=tuner,
                          max_new_tokens=min(max_new_tokens, target.config.max_position_embeddings),
                          on_step=lambda step: steps.append((step.proposal.plan, len(step.tokens), step.seconds)),
                          **options)  # fmt: skip
        stats, (plans, emitted, seconds) = (
            output.stats,
            list(zip(*steps[1:])) or [()] * 3,
        )  # the first step reads the prompt
        planned = {
            "expected_tokens": sum(plan["expected_tokens"] for plan in plans),
            "expected_seconds": sum(plan["expected_ms"] / 1000 for plan in plans),
            "expected_alone": sum(plan["alone_ms"] * plan["expected_tokens"] / 1000 for plan in plans),  # seconds, without a draft
        } if tuner else {}  # fmt: skip
        return output.tokens, stats.seconds, {
            "decoding_steps": stats.steps, "accept_lengths": stats.accept_lengths, "exact": output.exact,
            "exit_counts": {str(layer): count for layer, count in stats.exit_counts.items()},
            "accepted": stats.accepted, "draft_levels": stats.draft_levels, "draft_forwards": stats.draft_forwards,
            "draft_seconds": stats.draft_seconds, "target_seconds": stats.target_seconds,
            "later_tokens": sum(emitted), "later_seconds": sum(seconds), **planned,
        }  # fmt: skip

    def theirs(run, prompt, max_new_tokens):
        target, _ = models[False]
        return *run(
            prompt,
            min(max_new_tokens, target.config.max_position_embeddings - len(prompt)),
            temperature,
            seed,
        ), {}

    return {name: partial(ours, tuners.get(name), *method) for name, method in methods.items()} | {
        name: partial(theirs, run) for name, run in peers.items()
    }


def measure(
    models,
    questions,
    tokenizer,
    template,
    methods,
    peers,
    temperature,
    rounds,
    max_new_tokens,
    progress,
    costs=None,
):
    """Yield for each of ``rounds`` (numbers) the list of its records, one for every question and method.

    ``models`` {whether compiled: (target, draft)}; ``methods`` {name: (whether compiled, options of ``generate``)}.
    The methods take turns at each question, so that whatever slows the machine for a while slows all alike, and each time
    in another order, so that none always follows the same one. Before the first round each warms up on the first question.
    ``costs`` is the file that "auto" takes its table from.
    """
    for number in (0, *rounds):
        records, tuners = [], {}  # what was learnt is forgotten at the end of a round
        for name, (compiled, options) in methods.items():
            if options["method"] == "auto":
                target, draft = models[compiled]
                tuners[name] = tuner_for(
                    generate,
                    target,
                    draft,
                    choose_exits(draft.config, "auto", options.get("exits"))[0],
                    costs,
                )
        for place, question in enumerate(questions if number else questions[:1]):
            seed = 1000 * number + place
            every = runners(methods, models, tuners, peers, temperature, seed)
            answers = {}
            for name in random.Random(seed).sample(list(every), len(every)):
                answers[name] = answer(every[name], question, tokenizer, template, max_new_tokens,
                                       models[False][0].config.max_position_embeddings)  # fmt: skip
            records += [
                {"round": number, "question_id": question["question_id"], "group": group_of(question),
                 "category": question["category"], "method": name, **answers[name]}
                for name in every if answers[name]
            ]  # fmt: skip
            progress(1 + len(rounds) * len(questions))
        if number:
            yield records


def progress_line(label):
    """A function to call after each question; says on stderr, at most every five seconds, how long it will still take."""
    state = {"done": 0, "began": time.monotonic(), "shown": 0.0}

    def progress(total):
        state["done"] += 1
        now = time.monotonic()
        if now - state["shown"] > 5:
            state["shown"] = now
            left = (now - state["began"]) / state["done"] * (total - state["done"]) / 60
            print(
                f"{label}: {state['done']}/{total} questions, {left:.1f} min left here",
                file=sys.stderr,
                flush=True,
            )

    return progress
