"""Training text from the target itself, without any data set: it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn in its own chat template
writes the user's question (Magpie, Xu et al. 2024, arXiv 2406.08464). Its answers, at several
temperatures, are what a draft learns from, or become a datastore for exit 0.
"""

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..batch import generate_many
from ..checkpoint import load_model
from ..checkpoint.chat import as_dialogue
from ..checkpoint.config import read_config
from ..checkpoint.names import datastore_path
from ..checkpoint.tokenizer import Tokenizer
from ..files import read_text, refuse_existing, staged_file
from ..model import Llama
from ..ngram.datastore import save_datastore
from ..notices import progress, tell
from .corpus import TABLES
from .dialogues import Pair
from .fit import Run

QUESTION_TOKENS, ANSWER_TOKENS = 160, 256  # at most; a longer question is dropped
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, a third each
Ways = tuple[list[list[list[int]]], list[int]]  # see ways_to_ask
ASKING = 0.8  # the temperature of questions: at 1 those of small models make no sense


def ways_to_ask(folder: Path) -> Ways:
    """(beginnings of a user's turn by kind, ids from its end to where the assistant speaks)."""
    tokenizer = Tokenizer(folder)
    template = tokenizer.prompt_format
    if not template.is_own:
        raise ValueError(
            f"{folder} has no chat template to ask itself in; give --data FILE (to train a draft) "
            "or --from FILE (for a datastore)"
        )
    before, _, after = template.render(as_dialogue("\0")).partition("\0")
    if not before or not after:
        raise ValueError("the chat template leaves out what the user says, or does not mark it off")
    encode = partial(tokenizer.encode, with_bos=False)
    kinds = [[""], *TABLES["openings"].values()]
    prompts = [[encode(before + first.replace("\\n", "\n")) for first in kind] for kind in kinds]
    return prompts, encode(after)


class Journal:
    """What a model has written so far, a line of JSON each, so that --resume can go on from it."""

    def __init__(self, file: Path, settings: dict, resume: bool) -> None:
        self.file = file
        self.lines: dict[str, list[list[int]]] = defaultdict(list)  # by what they are
        if not resume:
            refuse_existing(file)
        if file.exists():
            first, *others = file.read_text().split("\n")
            if first != json.dumps(settings):
                raise ValueError(f"{file} is of {first}, not of {json.dumps(settings)}")
            for line in others[:-1]:  # the last one may be cut short
                try:
                    kind, ids = json.loads(line)
                except (ValueError, TypeError):
                    raise ValueError(f"{file} is damaged; remove it") from None
                self.lines[kind].append(ids)
            kept = [first, *others[:-1]]
        else:
            kept = [json.dumps(settings)]
        with staged_file(file) as stage:
            stage.write_text("".join(f"{line}\n" for line in kept))

    def said(self, kind: str, prompts: list, model: Llama, **options: Any) -> list[list[int]]:
        """Ids of what the model says to each of ``prompts``; it goes on where it had stopped."""
        known = self.lines[kind]
        begun = len(known)
        options["seed"] += begun
        rest = generate_many(model, prompts[begun:], method="ar", **options)
        with self.file.open("a") as opened:
            for generation in progress(rest, kind, len(prompts) - begun):
                known.append(generation.tokens)
                opened.write(json.dumps([kind, generation.tokens]) + "\n")
                opened.flush()
        return known


def question_count(millions: float) -> int:
    """How many questions have about so many million tokens of answers, if all end."""
    return max(len(TEMPERATURES), round(millions * 1e6 / (ANSWER_TOKENS / 2)))


def ask(
    ways: Ways, model: Llama, count: int, seed: int, said: Callable[..., list[list[int]]]
) -> list[list[int]]:
    """Prompts of at most ``count`` questions that ``model`` asks itself in one of the ``ways``.

    ``said`` is as in Journal. A question without an end is dropped.
    """
    prompts, after = ways
    rng, ends = random.Random(seed), {after[0], *model.config.eos_token_ids}
    beginnings = [rng.choice(rng.choice(prompts)) for _ in range(count)]
    options = dict(seed=seed, temperature=ASKING, max_new_tokens=QUESTION_TOKENS)
    questions = []
    for beginning, tokens in zip(beginnings, said("questions", beginnings, model, **options)):
        length = next((i for i, token in enumerate(tokens) if token in ends), None)
        if length is not None:
            questions.append([*beginning, *tokens[:length], *after])
    return questions


def sample(folder: Path, millions: float, run: Run) -> list[Pair]:
    """[(prompt, answer)] of ids that the model in ``folder`` writes, with about so many tokens."""
    ways, count = ways_to_ask(folder), question_count(millions)
    model = load_model(folder, run.device, "auto")
    settings = {"target": str(folder), "questions": count, "seed": run.seed}
    journal = Journal(run.answers, settings, run.resume)
    questions = ask(ways, model, count, run.seed, journal.said)
    pairs = []
    for number, temperature in enumerate(TEMPERATURES):
        some = questions[number :: len(TEMPERATURES)]
        options = dict(seed=run.seed, temperature=temperature, max_new_tokens=ANSWER_TOKENS)
        answers = journal.said(f"answers at temperature {temperature:g}", some, model, **options)
        pairs += list(zip(some, answers))
    return pairs


def make_datastore(
    run: Run, target: Path, millions: float | None = None, files: list[Path] | None = None
) -> None:
    """Write a datastore for ``target``: the text of ``files``, or answers that it writes itself."""
    if (millions is None) == (files is None):
        raise ValueError("give one of --millions and --from")
    out = run.out or datastore_path(target)
    if run.out is None:
        refuse_existing(out)
    run = replace(run, out=Path(out))
    config = read_config(target)
    if files:
        tokenizer = Tokenizer(target, config.vocab_size)
        documents = [tokenizer.encode(read_text(file)) for file in files]
    else:
        _, after = ways_to_ask(target)  # an answer's first words depend on the last words of this
        documents = [after[1:] + answer for _, answer in sample(target, millions, run)]
        if not documents:
            raise ValueError(f"no question had an end within {QUESTION_TOKENS} tokens")
    count = save_datastore(out, documents, config)
    run.answers.unlink(missing_ok=True)
    tell(f"{out}: {len(documents)} documents, {count} tokens")
    if millions and count < millions * 1e6:
        tell(
            f"these are fewer than {millions * 1e6:,.0f}: {len(documents)} of "
            f"{question_count(millions)} questions had an end within {QUESTION_TOKENS} tokens, and "
            f"a document has {count / len(documents):.0f} tokens on average; "
            f"{ANSWER_TOKENS // 2} for each question were expected"
        )
