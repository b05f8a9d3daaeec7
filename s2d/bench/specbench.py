"""Questions and answers in Spec-Bench's files (arXiv 2401.07851)."""

import json
import re
import time
from collections import Counter, defaultdict
from itertools import islice
from pathlib import Path

from ..checkpoint.files import read_text, staged
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
    """A file in Spec-Bench's form; at most ``limit`` questions of each of the six groups."""
    taken: Counter[str] = Counter()
    questions = []
    try:
        for line in filter(str.strip, read_text(path).split("\n")):
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
    if not questions:
        raise ValueError(f"{path} has no questions")
    return questions


def write_answers(folder: Path, column: str, records: list[Record]) -> None:
    """A file per method, as Spec-Bench's evaluation/speed.py and equal.py read it: last round."""
    files: defaultdict[str, str] = defaultdict(str)
    for record in (each for each in records if each.round == records[-1].round):
        name = re.sub(r"[^\w.,]+", "-", f"{column.replace(' T=', '-T')}-{record.method}")
        made = [turn.generation for turn in record.turns if turn.generation]
        lengths = [each.stats.accept_lengths for each in made]
        choice = dict(index=0, turns=[turn.text for turn in record.turns])
        choice["wall_time"] = [turn.seconds for turn in record.turns]
        choice["new_tokens"] = [len(turn.tokens) for turn in record.turns]
        choice["decoding_steps"] = [len(each) for each in lengths] or choice["new_tokens"]
        choice["accept_lengths"] = sum(lengths, [])
        line = {key: record.question[key] for key in ("question_id", "category")}
        line |= dict(model_id=name, answer_id=f"{name}-{line['question_id']}")
        line |= dict(tstamp=time.time(), choices=[choice])
        files[name] += json.dumps(line, ensure_ascii=False) + "\n"
    for name, lines in files.items():
        with staged(folder / f"{name}.jsonl") as stage:
            stage.write_text(lines, encoding="utf-8")
