"""Questions and answers in Spec-Bench's files (arXiv 2401.07851)."""

import json
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote_plus
from zlib import crc32

from ..checkpoint.files import read_text, staged
from ..checkpoint.tokenizer import Tokenizer
from ..train.corpus import GROUPS, conversations
from .figures import Question, Record, by_method, stats_of
from .tables import Comparison

MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()


def corpus_questions(limit: int, turns: int | None = None) -> list[Question]:
    """Held-out conversations of the corpus, ``limit`` of each group, up to so many ``turns``."""
    questions = []
    for group in GROUPS:
        category = "writing" if group == "mt_bench" else group
        for conversation in islice(conversations(2, "held-out", [group]), limit):
            asked = [user for user, _ in conversation]
            question = {"question_id": len(questions), "category": category, "group": group}
            questions.append(question | {"turns": asked[:turns]})
    return questions


def read_questions(path: Path, limit: int) -> list[Question]:
    """A file in Spec-Bench's form; at most ``limit`` questions of each of the six groups."""
    taken: Counter[str] = Counter()
    questions = []
    for number, line in enumerate(read_text(path).split("\n"), start=1):
        if not line.strip():
            continue
        try:
            read = json.loads(line)
            question = {key: read[key] for key in ("question_id", "category", "turns")}
            category, turns = question["category"], question["turns"]
            if type(turns) is not list or {*map(type, [category, *turns])} != {str}:
                raise ValueError("category is a text, turns is a list of texts")
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            words = f"is not in Spec-Bench's question format in line {number} ({error!r})"
            raise ValueError(f"{path} {words}") from None
        group = "mt_bench" if category in MT_BENCH else category
        taken[group] += 1
        if taken[group] <= limit:
            questions.append(question | {"group": group})
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions


def write_answers(folder: Path, comparison: Comparison, tokenizer: Tokenizer) -> None:
    """A file per method, of the last round, with what Spec-Bench's evaluation/*.py read."""
    title = comparison.title.replace(" T=", "-T")
    last = [each for each in comparison.records if each.round == comparison.records[-1].round]
    for method, records in by_method(last).items():
        name = quote_plus(f"{title}-{method}", safe="=,")
        if len(name) > 200:  # as with folders that have long names
            name = f"{name[:190]}-{crc32(name.encode()):08x}"
        lines = [json.dumps(answer_of(each, tokenizer), ensure_ascii=False) for each in records]
        with staged(folder / f"{name}.jsonl") as stage:
            stage.write_text("\n".join([*lines, ""]), encoding="utf-8")


def answer_of(record: Record, tokenizer: Tokenizer) -> dict[str, Any]:
    choice = {
        "turns": [tokenizer.decode(turn.tokens) for turn in record.turns],
        "wall_time": [turn.seconds for turn in record.turns],
        "new_tokens": [len(turn.tokens) for turn in record.turns],
        "accept_lengths": stats_of([record]).accept_lengths,
    }
    question = {key: record.question[key] for key in ("question_id", "category")}
    return question | {"choices": [choice]}
