"""Measuring: all methods answer the same questions in turns, round after round."""

import random
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from types import SimpleNamespace
from typing import Any

from ..checkpoint.notices import progress, tell
from ..checkpoint.tokenizer import Tokenizer
from ..generation import Ids, as_ids, decide, make_decoder
from ..mcsd.decision import fingerprint
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
    every = [(0, 0)] if questions else []
    every += product(range(1, rounds + 1), range(len(questions)))
    for number, place in progress(every, f"{title}: turns of all methods", len(every)):
        own_seed = 10**8 * seed + 1000 * number + place
        question = questions[place]
        order = random.Random(own_seed).sample(list(runs), len(runs))
        turns = {name: ask(runs[name], question, own_seed) for name in order}
        if number > 0 and all(turns.values()):
            records += [Record(number, name, own_seed, question, turns[name]) for name in runs]
    if not records:
        raise ValueError(f"{title}: no question fits the context, or there is none")
    return records


def compare_pairs(
    title: str,
    pairs: dict[str, Any],
    questions: Sequence[Question],
    rounds: int,
    seed: int,
    peers: dict[str, Callable[..., Any]],
) -> Comparison:
    """What methods do, each with its pair, and ``peers``, the decoders of other programs.

    A notice says which questions, or turns of them, do not fit the context.
    """
    alone = pairs["ar"]
    ask = partial(ask_turns, alone.tokenizer, alone.target.config.max_position_embeddings)
    options = {name: pair.options for name, pair in pairs.items()}
    runs = {}
    for name, pair in pairs.items():
        runs[name] = partial(answer, target=pair.target, draft=pair.draft, options=pair.options)
    runs |= {name: partial(run, options=alone.options) for name, run in peers.items()}
    records = measure(runs, questions, rounds, title, ask, seed)
    left_out = []
    for question in questions:
        counts = [len(record.turns) for record in records if record.question is question]
        turns = min(counts, default=0)
        if turns < len(question["turns"]):
            left_out.append(f"{question['question_id']} from turn {turns + 1}")
    if left_out:
        tell(f"{title}: left out, as the context is full: question {', '.join(left_out)}")
    drafts = {name: pair.draft for name, pair in pairs.items() if pair.options.exits}
    models = {"target": describe_model(alone.target)}
    models["drafts"] = {name: each and describe_model(each) for name, each in drafts.items()}
    return Comparison(title, records, options, models)


def compare_methods(
    name: str,
    pairs: dict[str, Pair],
    questions: Sequence[Question],
    args: Namespace,
    peers: dict[str, Callable[..., Any]],
) -> Iterator[Comparison]:
    """Yield a Comparison for each temperature, on a target called ``name``."""
    for temperature in dict.fromkeys(args.temperature):
        made = {}
        for method, pair in pairs.items():
            made[method] = replace(pair, options=replace(pair.options, temperature=temperature))
        title = f"{name} T={temperature:g}"
        yield compare_pairs(title, made, questions, args.rounds, args.seed, peers)


def compare(
    target: Llama,
    draft: Llama | None,
    questions: Sequence[Ids | Question],
    methods: dict[str, dict[str, Any]],
    rounds: int = 3,
    tokenizer: Tokenizer | None = None,
    seed: int = 0,
    **common: Any,
) -> Comparison:
    """Let ``methods`` answer all ``questions`` in turns, next to the target alone.

    Args:
        target, draft: as for ``generate``.
        questions: ids of a prompt each; or questions as ``corpus_questions`` returns them, whose
            turns are texts for the ``tokenizer``. Only their "turns" and "group" are read.
        methods: {name: options of ``generate``}. An "ar" takes the place of the target alone.
        seed: the seeds of all answers are made from it, one for each question and round.
        common: options of all methods, such as ``temperature``.

    Raises ValueError for options that cannot be run.
    """
    pairs = {}
    for name, own in ({"ar": {"method": "ar"}} | methods).items():
        if "seed" in own:
            raise ValueError(f"method {name}: expected no seed, as compare has one for all methods")
        options = decide(draft, seed=seed, **common | own)
        options = replace(options, method=own.get("method", name))
        models = {"target": target, "draft": draft, "tokenizer": tokenizer}
        pairs[name] = SimpleNamespace(**models, options=options)
    asked = []
    for number, each in enumerate(questions):
        if not isinstance(each, dict):
            each = {"turns": [as_ids(each, target.config.vocab_size)]}
        asked.append({"question_id": number, "group": "overall"} | each)
        if tokenizer is None and any(isinstance(turn, str) for turn in each["turns"]):
            raise ValueError("questions that are texts need a tokenizer")
    seed = pairs["ar"].options.seed  # as it was decided: a plain number
    return compare_pairs("compare", pairs, asked, rounds, seed, peers={})


def describe_model(model: Llama) -> dict[str, Any]:
    """The sizes of a model, its dtype, and a checksum that tells it from others."""
    about = {"dtype": str(model.dtype), "device": str(model.device)}
    return vars(model.config) | about | {"checksum": fingerprint(model.model.norm.weight)}
