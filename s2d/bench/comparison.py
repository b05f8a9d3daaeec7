"""Methods next to each other: of loaded pairs, or from Python by ``compare``."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from ..generation import generate
from ..model import Llama
from ..pair.loading import Pair
from ..stats import Generation
from .measure import Question, Run, Turn, ask_turns, measure, time_run
from .tables import Comparison

OptionsOrFunction = dict[str, Any] | Callable[[], dict[str, Any]]


def make_run(target: Llama, draft: Llama | None, own: OptionsOrFunction, **common: Any) -> Run:
    """Answers by ``generate``, with the ``common`` options and those of its ``own``."""

    def run(prompt: list[int], seed: int) -> tuple[list[int], Generation]:
        options = own() if callable(own) else own
        made = generate(target, prompt, draft, **common | options | {"seed": seed})
        return made.tokens, made

    return run


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
            runs[method] = make_run(pair.target, pair.draft, vars(pair.plan.asked) | common)
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
