"""Questions and answers in the files of Spec-Bench (Xia et al. 2024, arXiv 2401.07851). Knows nothing about models."""

import json
import time
from collections import Counter
from itertools import islice
from pathlib import Path

from ..files import staged_file
from ..train.corpus import GROUPS, conversations

MT_BENCH = (
    "writing",
    "roleplay",
    "reasoning",
    "math",
    "coding",
    "extraction",
    "stem",
    "humanities",
)


def held_out_prompts(tokenizer, per_group):
    """Chat prompts of the six groups, ``per_group`` of each, that no training run has seen."""
    return [
        tokenizer.encode_chat(question["turns"][:1])
        for question in corpus_questions("held-out", per_group)
    ]


def corpus_questions(split, per_group):
    """Conversations of the corpus in the form of Spec-Bench's question.jsonl: question_id, category, turns."""
    return [
        {
            "question_id": number,
            "category": "writing" if group == "mt_bench" else group,
            "turns": questions,
        }
        for number, (group, questions) in enumerate(
            (group, [question for question, _ in conversation.turns])
            for group in GROUPS
            for conversation in islice(conversations(2, split, [group]), per_group)
        )
    ]


def read_questions(path, limit):
    """A file in Spec-Bench's form; at most ``limit`` questions of each of the six groups."""
    taken, questions = Counter(), []
    try:
        for line in Path(path).read_text(encoding="utf-8").rstrip("\n").split("\n"):
            question = json.loads(line)
            group = group_of(question)
            taken[group] += 1
            if question["turns"] and taken[group] <= limit:
                questions.append(
                    {key: question[key] for key in ("question_id", "category", "turns")}
                )
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not in Spec-Bench's question format ({error!r})") from None
    return questions


def group_of(question):
    return "mt_bench" if question["category"] in MT_BENCH else question["category"]


def write_answers(path, model_id, records):
    """Answer file for Spec-Bench's own evaluation/speed.py and equal.py: one line for each question of ``records``."""
    lines = []
    for record in records:
        choice = {"index": 0} | {key: record[key] for key in ("turns", "new_tokens", "wall_time")}
        choice["decoding_steps"] = record.get("decoding_steps", record["new_tokens"])
        choice["accept_lengths"] = sum(record.get("accept_lengths", []), [])
        line = {"question_id": record["question_id"], "category": record["category"], "model_id": model_id,
                "answer_id": f"{model_id}-{record['question_id']}", "choices": [choice], "tstamp": time.time()}  # fmt: skip
        lines.append(json.dumps(line, ensure_ascii=False) + "\n")
    with staged_file(path) as stage:
        stage.write_text("".join(lines), encoding="utf-8")
