"""Methods next to each other: by their names, or from Python by ``compare``."""

from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

from ..checkpoint import load_model
from ..checkpoint.pair import Choice, Pair, choose_pair, load_chosen
from ..generation import generate
from ..model import Llama
from ..options import Options
from ..stats import Generation
from .measure import Question, Run, Turn, ask_turns, measure, run_ours, time_run
from .methods import Method
from .tables import Comparison


def choose_methods(folder: Path, methods: dict[str, Method]) -> dict[str, Choice]:
    """What ``methods`` need for the target in a ``folder``, before anything is loaded.

    Raises ValueError or FileNotFoundError for what cannot be run.
    """
    choices = {}
    for name, method in methods.items():
        choices[name] = choose_pair(folder, method.draft, Options(**method.options))
    return choices


def load_methods(choices: dict[str, Choice], device: str, dtype: str) -> dict[str, Pair]:
    """Load what is chosen for methods on one target, each model once.

    A draft is loaded up to the last exit that any of the methods uses.
    """
    layers_of: dict[Path, int] = {}
    for choice in choices.values():
        draft = choice.found.draft
        if draft is not None:
            layers_of[draft] = max(choice.options.exits[-1], layers_of.get(draft, 0))
    load_once = cache(load_model)

    def load(folder: Path, device: str, dtype: Any, layers: int | None = None) -> Llama:
        if layers is not None:
            layers = layers_of[folder]
        return load_once(folder, device, dtype, layers=layers)

    return {name: load_chosen(choice, device, dtype, load) for name, choice in choices.items()}


def compare_methods(
    name: str,
    pairs: dict[str, Pair],
    questions: Sequence[Question],
    args: Namespace,
    peers: dict[str, Run],
) -> Iterator[Comparison]:
    """Yield a Comparison for each temperature, on a target called ``name``.

    ``pairs`` are of the methods, among them "ar"; ``peers`` are decoders of other programs.
    """
    alone = pairs["ar"]
    runs = {method: partial(run_ours, pair=pair) for method, pair in pairs.items()}
    runs |= peers
    ask = partial(ask_turns, alone.tokenizer, alone.target.config.max_position_embeddings)
    for temperature in dict.fromkeys(args.temperature):
        title = f"{name} T={temperature:g}"
        options = {"temperature": temperature, "max_new_tokens": args.max_new_tokens}
        ready = {method: partial(run, **options) for method, run in runs.items()}
        yield Comparison(title, measure(ready, questions, args.rounds, title, ask))


def compare(
    target: Llama,
    draft: Llama | None,
    prompts: Sequence[list[int]],
    methods: dict[str, dict[str, Any] | Callable[[], dict[str, Any]]],
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

    def make_run(own: dict[str, Any] | Callable[[], dict[str, Any]]) -> Run:
        def run(prompt: list[int], seed: int) -> tuple[list[int], Generation]:
            options = own() if callable(own) else own
            made = generate(target, prompt, draft, **common | options | {"seed": seed})
            return made.tokens, made

        return run

    def ask(run: Run, question: Question, seed: int) -> list[Turn]:
        return [time_run(run, question["prompt"], seed)]

    runs = {"ar": make_run({"method": "ar"})}
    runs |= {name: make_run(own) for name, own in methods.items()}
    questions = []
    for number, prompt in enumerate(prompts):
        questions.append({"question_id": number, "group": "", "prompt": list(prompt)})
    return Comparison("compare", measure(runs, questions, rounds, "compare", ask))
