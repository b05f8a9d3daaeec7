"""Measuring: all methods answer the same questions in turns, round after round.

The programs compare loaded pairs by ``compare_methods``; from Python, ``compare`` does it.
"""

import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from ..checkpoint.notices import progress
from ..checkpoint.tokenizer import Tokenizer
from ..generation import generate
from ..model import Llama
from ..pair.loading import Pair
from ..stats import Generation
from .tables import Comparison, Question, Record, Turn

# (prompt, seed) -> the answer's tokens and the Generation, which transformers does not have.
Run = Callable[[list[int], int], tuple[list[int], Generation | None]]
OptionsOrFunction = dict[str, Any] | Callable[[], dict[str, Any]]


def make_run(target: Llama, draft: Llama | None, own: OptionsOrFunction, **common: Any) -> Run:
    """Answers by ``generate``, with the ``common`` options and those of its ``own``."""

    def run(prompt: list[int], seed: int) -> tuple[list[int], Generation]:
        options = own() if callable(own) else own
        made = generate(target, prompt, draft, **common | options | {"seed": seed})
        return made.tokens, made

    return run


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
        raise ValueError(f"{title}: no question fits the context, or there is none")
    return records


def compare_methods(
    name: str,
    pairs: dict[str, Pair],
    questions: Sequence[Question],
    args: Namespace,
    peers: dict[str, Callable[..., Any]],
) -> Iterator[Comparison]:
    """Yield a Comparison for each temperature, on a target called ``name``.

    ``pairs`` are of the methods, among them "ar"; ``peers`` are decoders of other programs.
    """
    alone = pairs["ar"]
    ask = partial(ask_turns, alone.tokenizer, alone.target.config.max_position_embeddings)
    for temperature in dict.fromkeys(args.temperature):
        title = f"{name} T={temperature:g}"
        common = {"temperature": temperature, "max_new_tokens": args.max_new_tokens}
        runs = {}
        for method, pair in pairs.items():
            runs[method] = make_run(pair.target, pair.draft, vars(pair.plan.options) | common)
        runs |= {peer: partial(run, **common) for peer, run in peers.items()}
        yield Comparison(title, measure(runs, questions, args.rounds, title, ask))


def compare(
    target: Llama,
    draft: Llama | None,
    prompts: Sequence[list[int]],
    methods: dict[str, OptionsOrFunction],
    rounds: int = 3,
    **common: Any,
) -> Comparison:
    """Let ``methods`` answer the ids of all ``prompts`` in turns, next to the target alone.

    Args:
        target, draft: as for ``generate``.
        prompts: lists of ids. All methods answer a prompt with the same seed.
        methods: {name: options of ``generate``}. A function is called for the options of each
            answer: an exit that keeps something between calls has to be a new one each time.
        rounds: how often each method answers each prompt.
        common: options of all methods, such as ``temperature`` and ``max_new_tokens``.

    Raises ValueError for options that cannot be run.
    """

    def ask(run: Run, question: Question, seed: int) -> list[Turn]:
        return [time_run(run, question["prompt"], seed)]

    runs = {"ar": make_run(target, draft, {"method": "ar"}, **common)}
    for name, own in methods.items():
        runs.setdefault(name, make_run(target, draft, own, **common))  # "ar" stays as it is
    questions = []
    for number, prompt in enumerate(prompts):
        questions.append({"question_id": number, "group": "overall", "prompt": list(prompt)})
    return Comparison("compare", measure(runs, questions, rounds, "compare", ask))
