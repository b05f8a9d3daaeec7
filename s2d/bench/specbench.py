"""Questions and answers in Spec-Bench's files (arXiv 2401.07851)."""

import json
import re
import time
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

from ..files import read_text, staged_file
from ..train.corpus import GROUPS, conversations
from .measure import Question, Record

MT_BENCH = "writing roleplay reasoning math coding extraction stem humanities".split()


def corpus_questions(per_group: int) -> list[Question]:
    """Held-out conversations of the corpus, as ``read_questions`` returns questions."""
    questions = []
    for group in GROUPS:
        category = "writing" if group == "mt_bench" else group
        for conversation in islice(conversations(2, "held-out", [group]), per_group):
            question = {"question_id": len(questions), "category": category, "group": group}
            questions.append(question | {"turns": [asked for asked, _ in conversation.turns]})
    return questions


def read_questions(path: Path, limit: int) -> list[Question]:
    """A file in Spec-Bench's form; at most ``limit`` questions of each of the six groups.

    Raises ValueError if it has none, or is in another form.
    """
    taken: Counter[str] = Counter()
    questions = []
    lines = [line for line in read_text(path).split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} has no questions")
    try:
        for line in lines:
            question = json.loads(line)
            question = {key: question[key] for key in ("question_id", "category", "turns")}
            texts = [question["category"], *question["turns"]]
            if type(question["turns"]) is not list or {*map(type, texts)} != {str}:
                raise ValueError("category is a text, turns is a list of texts")
            in_mt_bench = question["category"] in MT_BENCH
            group = "mt_bench" if in_mt_bench else question["category"]
            taken[group] += 1
            if taken[group] <= limit:
                questions.append(question | {"group": group})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{path} is not in Spec-Bench's question format ({error!r})") from None
    return questions


def model_id(column: str, method: str) -> str:
    """The name of the answer file of a column of a table and a method."""
    return re.sub(r"[^\w.,]+", "-", f"{column.replace(' T=', '-T')}-{method}")


def write_answers(folder: Path, column: str, records: list[Record]) -> None:
    """A file per method, as Spec-Bench's evaluation/speed.py and equal.py read it: last round."""
    files: defaultdict[str, str] = defaultdict(str)
    last = records[-1]["round"]
    for record in (record for record in records if record["round"] == last):
        name = model_id(column, record["method"])
        lengths = [each.stats.accept_lengths for each in record["generations"] if each]
        choice = dict(index=0, turns=record["turns"], wall_time=record["wall_time"])
        choice["new_tokens"] = [len(each) for each in record["tokens"]]
        choice["decoding_steps"] = [len(each) for each in lengths] or choice["new_tokens"]
        choice["accept_lengths"] = sum(lengths, [])
        line = dict(question_id=record["question_id"], category=record["category"])
        line |= dict(model_id=name, answer_id=f"{name}-{record['question_id']}")
        line |= dict(tstamp=time.time(), choices=[choice])
        files[name] += json.dumps(line, ensure_ascii=False) + "\n"
    for name, lines in files.items():
        with staged_file(folder / f"{name}.jsonl") as stage:
            stage.write_text(lines, encoding="utf-8")
