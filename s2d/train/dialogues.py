"""Dialogues, of the corpus or of a file, and how they become rows of tokens and labels."""

import json
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.chat import Message, as_dialogue
from ..checkpoint.files import read_text
from ..checkpoint.notices import progress
from ..checkpoint.tokenizer import Tokenizer
from .corpus import GROUPS, conversations

# Groups that need what the prompt says come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")
# What files call those who speak: ShareGPT's, and those of chat templates.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SPEAKERS |= {"system": "system"}

Pair = tuple[list[int], list[int]]  # the ids of a prompt, and those of its answer


@dataclass
class Counts:
    """What of a data set is learnt from, and what is not, counted while it is read."""

    chat_format: str  # of the dialogues, in words
    dialogues: int = 0  # that are learnt from
    passed_over: Counter[str] = field(default_factory=Counter)  # by why

    def __str__(self) -> str:
        text = f"{self.dialogues} dialogues in {self.chat_format}"
        if self.passed_over:
            [(why, number)] = self.passed_over.most_common(1)
            text += f", {self.passed_over.total()} passed over ({number}: {why})"
        return text


def read_records(path: Path) -> list[Any]:
    """The records of a file of JSON, which is one list of them or has one in each line."""
    text = read_text(path).strip()
    try:
        records = json.loads(text)
    except ValueError:
        try:
            records = [json.loads(line) for line in text.split("\n") if line.strip()]
        except ValueError as error:
            raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(records, list):
        records = [records]  # a single line
    return records


def read_dialogue(record: Any) -> list[Message]:
    """The messages of a record: one of the system first, or none, then user and assistant in turn.

    They are its "conversations" or "messages", each with "from" and "value", or "role" and
    "content". Raises ValueError if they are no dialogue. The last one may be a question.
    """
    try:
        found = record["conversations"] if "conversations" in record else record["messages"]
        dialogue = [
            {
                "role": SPEAKERS[each.get("from") or each["role"]],
                "content": each["value"] if "value" in each else each["content"],
            }
            for each in found
        ]
    except (TypeError, KeyError, AttributeError):
        raise ValueError("a record is no dialogue") from None
    begin = 1 if dialogue and dialogue[0]["role"] == "system" else 0
    turns = dialogue[begin:]
    in_turn = all(each["role"] == ("user", "assistant")[n % 2] for n, each in enumerate(turns))
    if not in_turn or not all(isinstance(each["content"], str) for each in dialogue):
        raise ValueError("a record is no dialogue of texts, user and assistant in turn")
    if len(turns) < 2 or not all(each["content"].strip() for each in turns):
        raise ValueError("a record has no answer, or an empty message")
    return dialogue


def read_dialogues(
    data: str, seed: int, tokenizer: Tokenizer, counts: Counts
) -> Iterator[tuple[list[Message], list[Pair]]]:
    """Yield each dialogue of ``data``, and its rounds; "mini" is the corpus, without end.

    What is no dialogue, or cannot be written in the chat format, is passed over in a file. Raises
    ValueError if no dialogue is left.
    """
    corpus = conversations(seed, "train", MIX)
    if data == "mini":
        records = ({"messages": as_dialogue(chain(*each.turns))} for each in corpus)
    else:
        records = read_records(Path(data))
    for record in progress(records, f"reading {data}: dialogues"):
        try:
            dialogue = read_dialogue(record)
            answered = dialogue if dialogue[-1]["role"] == "assistant" else dialogue[:-1]
            rounds = list(tokenizer.rounds(answered))
            if not any(answer for _, answer in rounds):
                raise ValueError("the chat template leaves out what the assistant says")
        except ValueError as error:
            if data == "mini":
                raise
            counts.passed_over[str(error)] += 1
            continue
        counts.dialogues += 1
        yield dialogue, rounds
    if counts.dialogues == 0:
        raise ValueError(f"there is nothing to learn from in {data}: {counts}")


def join(
    pairs: Iterable[Pair], answers_only: bool, length: int, enough: int | None = None
) -> tuple[Tensor, Tensor]:
    """Pairs end to end, up to the first with which ``divide`` finds ``enough`` rows in them.

    Returns (tokens, labels), (N,) each. Labels are the tokens themselves, -100 where no loss is
    taken: with ``answers_only`` everywhere but on the answers.
    """
    ids = array("i")  # four bytes per token, however long the text
    labels = array("i")
    begin = 0  # of the row that is to be counted next, as ``divide`` makes rows
    found = 0
    for prompt, answer in pairs:
        ids.extend(prompt)
        ids.extend(answer)
        labels.extend([-100] * len(prompt) if answers_only else prompt)
        labels.extend(answer)
        while enough is not None and len(ids) > begin + length:
            found += max(labels[begin + 1 : begin + length + 1]) != -100
            begin += length
        if enough is not None and found >= enough:
            break
    return torch.tensor(ids, dtype=torch.int32), torch.tensor(labels, dtype=torch.int32)


def divide(tokens: Tensor, labels: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Text (N,) and its labels (N,) -> (tokens, labels) of rows, (R, length) each.

    Now labels are the tokens that follow. Rows that have none are left out.
    """
    count = max(0, len(tokens) - 1) // length * length
    rows = tokens[:count].view(-1, length)
    following = labels[1 : count + 1].view(-1, length)
    learnt = (following != -100).any(dim=1)
    return rows[learnt], following[learnt]
