"""Dialogues, of the corpus or of a file, and how they become rows of tokens and labels."""

import json
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..checkpoint.chat import Message, as_dialogue
from ..checkpoint.tokenizer import Tokenizer
from ..files import read_parts
from ..notices import progress
from .corpus import GROUPS, conversations

# Groups that need what the prompt says come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")
# What files call those who speak: ShareGPT's, and those of chat templates.
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant"}
SPEAKERS |= {"system": "system"}
PATIENCE = 200  # dialogues of the corpus: if none of so many can be used, none ever will

Pair = tuple[list[int], list[int]]  # the ids of a prompt, and those of its answer
Encoded = TypeVar("Encoded")


@dataclass
class Counts:
    """What of a data set is learnt from, and what is not, counted while it is read."""

    chat_format: str  # of the dialogues, in words
    dialogues: int = 0  # that are learnt from
    passed_over: Counter[str] = field(default_factory=Counter)  # dialogues, by why
    left_out: Counter[str] = field(default_factory=Counter)  # parts of dialogues, by what they are

    def __str__(self) -> str:
        parts = [f"{self.dialogues} dialogues in {self.chat_format}"]
        if self.passed_over:
            [(why, number)] = self.passed_over.most_common(1)
            parts.append(f"{self.passed_over.total()} passed over ({number}: {why})")
        parts += [f"{number} {what}" for what, number in self.left_out.items() if number > 0]
        return ", ".join(parts)


def check_data(data: str) -> None:
    """Raise FileNotFoundError if ``data`` is neither "mini" nor "self" nor a file."""
    if data not in ("mini", "self") and not Path(data).is_file():
        raise FileNotFoundError(f"no file {data}; --data is mini, self or a file of dialogues")


def find_records(data: str, seed: int) -> Iterable[Any]:
    """What may be dialogues: the corpus without end if ``data`` is "mini", or a file's records."""
    if data != "mini":
        return read_records(data)
    corpus = conversations(seed, "train", MIX)
    return ({"messages": as_dialogue(chain(*each.turns))} for each in corpus)


def read_records(path: Path | str) -> list[Any]:
    """The records of a file of JSON, which is one list of them or has one in each line.

    A line that is not JSON gives None. Raises ValueError if the file has no list and no records.
    """
    text = read_parts(path).strip()
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        records = [parse_line(line) for line in text.split("\n") if line.strip()]
        if not any(isinstance(record, dict) for record in records):
            raise ValueError(f"{path} is not JSON ({error})") from None
        return records
    if isinstance(records, dict) and ("conversations" in records or "messages" in records):
        return [records]  # a single line
    if not isinstance(records, list):
        raise ValueError(f"{path} is no list of dialogues, as ShareGPT's files are")
    return records


def parse_line(line: str) -> Any:
    """What a line of JSON stands for, or None if it is none."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def read_dialogue(record: Any) -> list[Message]:
    """The messages of a record: one of the system first, or none, then user and assistant in turn.

    They are its "conversations" or "messages", each with "from" and "value", or "role" and
    "content". Raises ValueError if they are no dialogue. The last one may be a question.
    """
    try:
        found = record["conversations"] if "conversations" in record else record["messages"]
        dialogue = [read_message(each) for each in found]
    except (TypeError, KeyError):
        raise ValueError("a record is no dialogue") from None
    begin = 1 if dialogue and dialogue[0]["role"] == "system" else 0
    turns = dialogue[begin:]
    in_turn = all(each["role"] == ("user", "assistant")[n % 2] for n, each in enumerate(turns))
    if not in_turn or not all(isinstance(each["content"], str) for each in dialogue):
        raise ValueError("a record is no dialogue of texts, user and assistant in turn")
    if len(turns) < 2 or not all(each["content"].strip() for each in turns):
        raise ValueError("a record has no answer, or an empty message")
    return dialogue


def read_message(record: Any) -> Message:
    if "from" in record:
        return {"role": SPEAKERS[record["from"]], "content": record["value"]}
    return {"role": SPEAKERS[record["role"]], "content": record["content"]}


def encode_dialogues(
    data: str, seed: int, encode: Callable[[list[Message]], Encoded], counts: Counts
) -> Iterator[Encoded]:
    """Yield what ``encode`` makes of each dialogue of ``data``.

    Records that are no dialogue, and dialogues of which ``encode`` raises ValueError, are passed
    over. Raises ValueError if no dialogue is left.
    """
    for record in progress(find_records(data, seed), f"reading {data}: dialogues"):
        try:
            encoded = encode(read_dialogue(record))
        except ValueError as error:
            counts.passed_over[str(error)] += 1
            if data == "mini" and counts.dialogues == 0 and counts.passed_over.total() == PATIENCE:
                break
            continue
        counts.dialogues += 1
        yield encoded
    if counts.dialogues == 0:
        raise ValueError(f"there is nothing to learn from in {data}: {counts}")


def read_pairs(data: str, seed: int, tokenizer: Tokenizer, counts: Counts) -> Iterator[Pair]:
    """Yield the rounds of the dialogues of ``data``."""
    encode = partial(encode_rounds, tokenizer, counts)
    return chain.from_iterable(encode_dialogues(data, seed, encode, counts))


def encode_rounds(tokenizer: Tokenizer, counts: Counts, dialogue: list[Message]) -> list[Pair]:
    """The rounds of a dialogue, without a last question; ValueError if they cannot be divided."""
    answered = dialogue if dialogue[-1]["role"] == "assistant" else dialogue[:-1]
    rounds = list(tokenizer.rounds(answered))
    if not any(answer for _, answer in rounds):
        raise ValueError("the chat template leaves out what the assistant says")
    counts.left_out["last questions without an answer left out"] += len(dialogue) - len(answered)
    said = [message["content"] for message in answered if message["role"] == "assistant"]
    cut = sum(bool(tokenizer.eos) and tokenizer.eos in text for text in said)
    counts.left_out["answers cut after an EOS"] += cut
    return rounds


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


def count_whole_rows(tokens: Tensor, length: int) -> int:
    """The rows of ``length`` that a text (N,) fills, if one more token is left: the last label."""
    return max(0, len(tokens) - 1) // length


def divide(tokens: Tensor, labels: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Text (N,) and its labels (N,) -> (tokens, labels) of rows, (R, length) each.

    Now labels are the tokens that follow. Rows that have none are left out.
    """
    count = count_whole_rows(tokens, length) * length
    rows = tokens[:count].view(-1, length)
    following = labels[1 : count + 1].view(-1, length)
    learnt = (following != -100).any(dim=1)
    return rows[learnt], following[learnt]
