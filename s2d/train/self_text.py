"""Training text from the target itself, without any data set: it asks, and then answers.

An instruction-tuned model that is given only the opening of a user's turn in its own chat template
writes the user's question (Magpie, Xu et al. 2024, arXiv 2406.08464). Its answers, at several
temperatures, are what a draft learns from, or become a datastore for exit 0.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

from ..batch import generate_many
from ..checkpoint import load_model
from ..checkpoint.chat import ChatTemplate, as_dialogue
from ..checkpoint.config import read_config
from ..checkpoint.tokenizer import Tokenizer
from ..files import read_text, staged_file
from ..model import Llama
from ..ngram.datastore import save_datastore
from ..notices import progress, tell
from .corpus import TABLES
from .dialogues import Counts, Pair
from .fit import Run, keep_settings

QUESTION_TOKENS = 160  # at most; a longer question is dropped
ANSWER_TOKENS = 256  # at most
TEMPERATURES = (0.0, 0.7, 1.0)  # of answers, a third each
ASKING = 0.8  # the temperature of questions: at 1 those of small models make no sense
Ways = tuple[list[list[list[int]]], list[int]]  # see find_ways_to_ask


def find_ways_to_ask(tokenizer: Tokenizer) -> Ways:
    """(beginnings of a user's turn by kind, ids from its end to where the assistant speaks)."""
    template = tokenizer.prompt_format
    if not template.is_own:
        raise ValueError(
            f"{tokenizer.folder} has no chat template to ask itself in; give --data FILE (to train "
            "a draft) or --from FILE (for a datastore)"
        )
    before, _, after = template.render(as_dialogue("\0")).partition("\0")
    if not before or not after:
        raise ValueError("the chat template leaves out what the user says, or does not mark it off")
    beginnings = []
    for kind in [[""], *TABLES["openings"].values()]:
        texts = [before + first.replace("\\n", "\n") for first in kind]
        beginnings.append([tokenizer.encode(text, with_bos=False) for text in texts])
    return beginnings, tokenizer.encode(after, with_bos=False)


def say(
    what: str, prompts: list[list[int]], model: Llama, folder: Path, seed: int, **options: Any
) -> list[list[int]]:
    """Ids of what ``model`` says to each of ``prompts``; ``what`` they are, in words.

    They are kept in ``folder``, a line of JSON each, and what is there is not said again.
    """
    file = folder / f"{what}.jsonl"
    said = read_whole_lines(file) if file.is_file() else []
    rest = prompts[len(said) :]
    answers = generate_many(model, rest, method="ar", seed=seed + len(said), **options)
    with file.open("a") as opened:
        for generation in progress(answers, what, len(rest)):
            said.append(generation.tokens)
            opened.write(json.dumps(generation.tokens) + "\n")
            opened.flush()
    return said


def read_whole_lines(file: Path) -> list[list[int]]:
    """The lists in a file of JSON lines; a last line that was cut short is removed from it."""
    *lines, _ = file.read_text().split("\n")
    with staged_file(file) as stage:
        stage.write_text("".join(f"{line}\n" for line in lines))
    try:
        return [list(json.loads(line)) for line in lines]
    except (ValueError, TypeError):
        raise ValueError(f"{file} is damaged; remove it") from None


def count_questions(millions: float) -> int:
    """How many questions have about so many million tokens of answers, if all end.

    An answer is taken to have half as many tokens as it may have.
    """
    return max(len(TEMPERATURES), round(millions * 1e6 / (ANSWER_TOKENS / 2)))


def ask(
    ways: Ways, model: Llama, count: int, seed: int, folder: Path
) -> tuple[list[list[int]], Counts]:
    """Prompts of at most ``count`` questions that ``model`` asks itself in one of the ``ways``.

    A question without an end is dropped. See ``say`` for ``folder``.
    """
    beginnings, after = ways
    rng = random.Random(seed)
    ends = {after[0], *model.config.eos_token_ids}  # the first says that the user's turn ends
    begun = [rng.choice(rng.choice(beginnings)) for _ in range(count)]
    said = say(
        "questions",
        begun,
        model,
        folder,
        seed=seed,
        temperature=ASKING,
        max_new_tokens=QUESTION_TOKENS,
    )
    questions = []
    counts = Counts(ChatTemplate.name)
    for beginning, tokens in zip(begun, said):
        length = next((i for i, token in enumerate(tokens) if token in ends), None)
        if length is None:
            counts.passed_over["questions without an end"] += 1
        else:
            counts.dialogues += 1
            questions.append([*beginning, *tokens[:length], *after])
    return questions, counts


def sample(
    ways: Ways, tokenizer: Tokenizer, millions: float, run: Run
) -> tuple[list[Pair], Counts]:
    """[(prompt, answer)] of ids that a model writes, with about so many ``millions`` of tokens.

    The model is the one in the folder of its ``tokenizer``; it asks itself in ``ways``.
    """
    count = count_questions(millions)
    model = load_model(tokenizer.folder, run.device)
    settings = {"target": str(tokenizer.folder), "questions": count, "seed": run.seed}
    keep_settings(run.unfinished / "answers.json", settings)
    questions, counts = ask(ways, model, count, run.seed, run.unfinished)
    pairs: list[Pair] = []
    for number, temperature in enumerate(TEMPERATURES):
        some = questions[number :: len(TEMPERATURES)]
        answers = say(
            f"answers at temperature {temperature:g}",
            some,
            model,
            run.unfinished,
            seed=run.seed,
            temperature=temperature,
            max_new_tokens=ANSWER_TOKENS,
        )
        pairs += zip(some, answers)
    return pairs, counts


def make_datastore(
    run: Run, target: Path, millions: float | None = None, files: list[Path] | None = None
) -> None:
    """Write a datastore for ``target``: the text of ``files``, or answers that it writes itself."""
    config = read_config(target)
    tokenizer = Tokenizer(target, config.vocab_size)
    if files:
        documents = [tokenizer.encode(read_text(file)) for file in files]
    else:
        ways = find_ways_to_ask(tokenizer)
        pairs, _ = sample(ways, tokenizer, millions, run)
        # An answer's first words depend on what is before it, where the assistant is announced. The
        # first of these ids, the end of the user's turn, may be an EOS, which ends a document.
        before = ways[1][1:]
        documents = [before + answer for _, answer in pairs]
        if not documents:
            raise ValueError(f"no question had an end within {QUESTION_TOKENS} tokens")
    count = save_datastore(run.out, documents, config)
    shutil.rmtree(run.unfinished, ignore_errors=True)
    tell(f"{run.out}: {len(documents)} documents, {count} tokens")
    if millions is not None and count < millions * 1e6:
        tell(
            f"these are fewer than {millions * 1e6:,.0f}: {len(documents)} of "
            f"{count_questions(millions)} questions had an end within {QUESTION_TOKENS} tokens, "
            f"and a document has {count / len(documents):.0f} tokens on average; "
            f"{ANSWER_TOKENS // 2} for each question were expected"
        )
