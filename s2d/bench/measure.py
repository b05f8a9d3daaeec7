"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, product
from typing import Any

from ..checkpoint.notices import progress
from ..checkpoint.tokenizer import Tokenizer
from ..generation import Ids, as_ids, decide, make_decoder
from ..model import Llama
from ..options import Options
from ..pair.loading import Pair
from ..stats import Generation
from .figures import Question, Record, Turn
from .tables import Comparison

# (prompt, seed) -> the answer's tokens and the Generation, which transformers does not have.
Run = Callable[[list[int], int], tuple[list[int], Generation | None]]


def answer(
    prompt: list[int], seed: int, target: Llama, draft: Llama | None, options: Options
) -> tuple[list[int], Generation]:
    made = make_decoder(target, prompt, draft, replace(options, seed=seed)).run()
    return made.tokens, made


def ask_turns(
    tokenizer: Tokenizer | None, context_size: int, run: Run, question: Question, seed: int
) -> list[Turn]:
    """Ask all turns of a ``question``, until the context is full. A list of ids is a whole prompt.

    The clock spans the whole call of ``run``, from ids to ids.
    """
    messages: list[str] = []
    turns = []
    for asked in question["turns"]:
        prompt = asked
        if isinstance(asked, str):
            messages.append(asked)
            prompt = tokenizer.encode_chat(messages)
        if len(prompt) >= context_size:
            break
        began = time.perf_counter()
        tokens, generation = run(prompt, seed)
        turns.append(Turn(prompt, tokens, time.perf_counter() - began, generation))
        if isinstance(asked, str):
            messages.append(tokenizer.decode(tokens))
    return turns


def measure(
    runs: dict[str, Run],
    questions: Sequence[Question],
    rounds: int,
    title: str,
    ask: Callable[[Run, Question, int], list[Turn]],
    seed: int = 0,
) -> list[Record]:
    """The records of all rounds; ``ask(a run, a question, a seed)`` returns the turns.

    Methods take turns, each time in another order, so that what slows the machine for a while
    slows all alike. In round 0, which does not count, each warms up on the first question. All
    methods answer a question with one seed. These seeds are made from ``seed``.
    """
    records = []
    every = product(range(1, rounds + 1), range(len(questions)))
    every = chain([(0, 0)] if questions else [], every)
    total = 1 + rounds * len(questions)
    for number, place in progress(every, f"{title}: turns of all methods", total):
        own_seed = 10**8 * seed + 1000 * number + place
        question = questions[place]
        order = random.Random(own_seed).sample(list(runs), len(runs))
        turns = {name: ask(runs[name], question, own_seed) for name in order}
        if number > 0 and all(turns.values()):
            records += [Record(number, name, own_seed, question, turns[name]) for name in runs]
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
        options = {}
        runs = {}
        for method, pair in pairs.items():
            own = options[method] = replace(pair.options, temperature=temperature)
            runs[method] = partial(answer, target=pair.target, draft=pair.draft, options=own)
        runs |= {peer: partial(run, options=options["ar"]) for peer, run in peers.items()}
        records = measure(runs, questions, args.rounds, title, ask, args.seed)
        yield Comparison(title, records, options)


def compare(
    target: Llama,
    draft: Llama | None,
    questions: Sequence[Ids | Question],
    methods: dict[str, dict[str, Any]],
    rounds: int = 3,
    tokenizer: Tokenizer | None = None,
    **common: Any,
) -> Comparison:
    """Let ``methods`` answer all ``questions`` in turns, next to the target alone.

    Args:
        target, draft: as for ``generate``.
        questions: ids of a prompt each; or questions as ``corpus_questions`` returns them, whose
            turns are texts for the ``tokenizer``. Only their "turns" and "group" are read.
        methods: {name: options of ``generate``}. An "ar" takes the place of the target alone.
        common: options of all methods, such as ``temperature``. From ``seed`` the seeds of all
            answers are made, one for each question and round.

    Raises ValueError for options that cannot be run.
    """
    options = {}
    runs = {}
    for name, own in ({"ar": {"method": "ar"}} | methods).items():
        decided = decide(draft, **common | own)
        options[name] = replace(decided, method=own.get("method", name))
        runs[name] = partial(answer, target=target, draft=draft, options=options[name])
    vocab_size = target.config.vocab_size
    asked = []
    for number, each in enumerate(questions):
        given = each if isinstance(each, dict) else {"turns": [as_ids(each, vocab_size)]}
        question: Question = {"question_id": number, "group": "overall"} | given
        if tokenizer is None and any(isinstance(turn, str) for turn in question["turns"]):
            raise ValueError("questions that are texts need a tokenizer")
        asked.append(question)
    ask = partial(ask_turns, tokenizer, target.config.max_position_embeddings)
    records = measure(runs, asked, rounds, "compare", ask, options["ar"].seed)
    return Comparison("compare", records, options)
