"""Dialogues of the corpus or of a file, and plain texts, as rows of tokens and labels."""

import json
import random
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..checkpoint.chat import Message, as_dialogue
from ..checkpoint.files import read_text
from ..checkpoint.notices import progress, tell
from ..checkpoint.tokenizer import Messages, Tokenizer
from .corpus import GROUPS, conversations

# Groups that need what the prompt says come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")
# What ShareGPT calls those who speak -> what chat templates call them.
ROLES = {"human": "user", "gpt": "assistant"}

Pair = tuple[list[int], list[int]]  # the ids of what is only read, and those of what is learnt
Rows = tuple[Tensor, Tensor]  # tokens and labels, (R, T) each


def refuse_missing(data: str) -> None:
    """Raise FileNotFoundError if ``data`` is neither "mini" nor a file."""
    if data != "mini" and not Path(data).is_file():
        raise FileNotFoundError(f"no file {data}; expected mini, dialogues, or a text in FILE.txt")


def read_records(path: Path) -> list[Any]:
    """The records of a file of JSON, which is one list of them or has one in each line."""
    text = read_text(path).strip()
    try:
        if text.startswith("["):
            return json.loads(text)
        return [json.loads(line) for line in text.split("\n") if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None


def read_dialogue(record: Any) -> list[Message]:
    """The messages of a record; ValueError if they are no dialogue.

    They are its "conversations" or "messages", each with "from" and "value", or "role" and
    "content".
    """
    dialogue = []
    try:
        for each in record.get("conversations") or record["messages"]:
            role = each.get("from") or each["role"]
            content = each.get("value") or each["content"]
            dialogue.append({"role": ROLES.get(role, role), "content": content})
    except (TypeError, KeyError, AttributeError):
        raise ValueError("a record is no dialogue") from None
    return dialogue


def read_dialogues(data: str, seed: int, tokenizer: Tokenizer) -> Iterator[list[Pair]]:
    """Yield the rounds of each dialogue of ``data``; "mini" is the corpus, without end.

    The dialogues of a file are shuffled. What is no dialogue, or cannot be written in the chat
    format, is passed over, and how much that was is told at the end.
    """
    what = f"reading {data}: dialogues"
    if data == "mini":
        for turns in progress(conversations(seed, "train", MIX), what):
            yield list(as_rounds(tokenizer, chain(*turns)))
    records = read_records(Path(data))
    random.Random(seed).shuffle(records)
    reasons = []
    for record in progress(records, what):
        try:
            yield list(as_rounds(tokenizer, read_dialogue(record)))
        except ValueError as error:
            reasons.append(error)
    if reasons:
        tell(f"{data}: {len(reasons)} records are passed over; of the first, {reasons[0]}")


def as_rounds(tokenizer: Tokenizer, messages: Messages) -> Iterator[Pair]:
    """Yield (ids of the prompt, ids of the answer up to its EOS) of each answer.

    The prompt is what a model is given, and the answer what it has to write then. A prompt is only
    what follows the round before it, or whole if that round is encoded otherwise in it. Raises
    ValueError if an answer does not stand right after its prompt, as by templates that leave out
    what the assistant thought.
    """
    dialogue = as_dialogue(messages)
    if dialogue[0]["role"] == "assistant":
        raise ValueError("the assistant speaks first; expected a message to answer")
    done: list[int] = []  # the ids of the rounds so far
    for turn, message in enumerate(dialogue):
        if message["role"] != "assistant":
            continue
        asked = tokenizer.chat_format.render(dialogue[:turn])
        prompt = tokenizer.encode_rendered(asked)
        answer = answer_after(tokenizer, asked, dialogue[: turn + 1])
        whole = tokenizer.encode_rendered(asked + answer)
        if whole[: len(prompt)] != prompt:
            raise ValueError("a token holds the end of a prompt and the beginning of its answer")
        new = prompt[len(done) :] if prompt[: len(done)] == done else prompt
        yield new, whole[len(prompt) :]
        done = whole


def answer_after(tokenizer: Tokenizer, asked: str, dialogue: list[Message]) -> str:
    """What a model has to write after the prompt ``asked``: the last message up to its EOS."""
    answered = tokenizer.chat_format.render(dialogue)
    text = answered.removeprefix(asked)
    content = dialogue[-1]["content"].strip()
    if not content:
        raise ValueError("an answer is empty")
    is_whole = answered.startswith(asked) and content in text
    if not asked or not is_whole:
        raise ValueError("the chat template does not write an answer whole after its prompt")
    eos = tokenizer.eos
    said, end, _ = text.partition(eos) if eos else (text, "", "")
    return said + end


def read_pairs(data: str, seed: int, tokenizer: Tokenizer, answers_only: bool) -> Iterator[Pair]:
    """Yield what is only read, and what is learnt after it.

    In dialogues the answers are learnt or, without ``answers_only``, everything. In a file of plain
    text every token is learnt.
    """
    if data.endswith(".txt"):
        yield [], tokenizer.encode(read_text(Path(data)))
        return
    for prompt, answer in chain.from_iterable(read_dialogues(data, seed, tokenizer)):
        yield (prompt, answer) if answers_only else ([], prompt + answer)


def divide(pairs: Iterable[Pair], length: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Pairs end to end, in rows: yield (tokens, labels), (length,) each.

    Labels are the tokens that follow, -100 where they are only read. Rows that have none are left
    out. An example with rows of 3: the pairs ([1, 2], [3, 4]) and ([5], [6, 7]) give

        tokens     1  2  3       4  5  6
        labels  -100  3  4    -100  6  7
    """
    ids = array("i")  # four bytes per token, however long the text
    learnt = array("i")
    for read, said in pairs:
        ids.extend(read + said)
        learnt.extend([-100] * len(read) + said)
        ends = range(length, len(ids), length)  # one more token has to be there: the last label
        for end in ends:
            labels = learnt[end - length + 1 : end + 1]
            if max(labels) != -100:
                yield np.array(ids[end - length : end]), np.array(labels)
        del ids[: len(ends) * length]
        del learnt[: len(ends) * length]


def make_rows(
    pairs: Iterable[Pair], batch: int, length: int, millions: float | None = None
) -> Rows:
    """Rows of ``pairs``: all, or whole batches of about so many ``millions`` of tokens.

    Raises ValueError if they do not fill a batch.
    """
    count = None
    if millions is not None:
        count = round(millions * 1e6 / (batch * length)) * batch
    rows = list(islice(divide(pairs, length), count))
    if len(rows) < batch:
        raise ValueError(f"there are {len(rows)} rows of {length} tokens; a batch needs {batch}")
    tokens, labels = zip(*rows)
    return torch.from_numpy(np.stack(tokens)), torch.from_numpy(np.stack(labels))
