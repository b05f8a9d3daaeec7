"""Dialogues of the corpus or of a file, as rows of tokens and labels; texts as a datastore."""

import json
import random
from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any
from warnings import warn

import torch
from torch import Tensor

from ..checkpoint.chat import Message, as_dialogue
from ..checkpoint.config import read_folder
from ..checkpoint.files import read_text, taken
from ..checkpoint.notices import progress, tell
from ..checkpoint.tokenizer import Messages, Tokenizer
from ..ngram.datastore import save_datastore
from ..pair.names import find_target
from .corpus import GROUPS, conversations
from .fit import Rows, Run

# Groups that need what the prompt says come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")
# The names of those who speak in a record -> what chat templates call them. Others are refused.
ROLES = {role: role for role in ("system", "user", "assistant", "tool")}
ROLES |= {"human": "user", "gpt": "assistant"}  # ShareGPT's
# What a record may have beside its messages, and a template may write. Without a template that
# does, the record is passed over, as its text would be another one.
BESIDE = ("tools", "documents", "functions", "images", "videos", "audios")

Pair = tuple[list[int], list[int]]  # the ids of what is only read, and those of what is learnt


def read_records(data: str, seed: int) -> Iterable:
    """The dialogues that ``data`` names: "mini" is the corpus, without end; else it is a file.

    The file is a JSON list of dialogues, or has one in each line. They are shuffled.
    """
    if data == "mini":
        corpus = conversations(seed, "train", MIX)
        return ({"messages": as_dialogue(chain(*turns))} for turns in corpus)
    if not Path(data).is_file():
        raise FileNotFoundError(f"no file {data}; expected mini, or a file of dialogues")
    text = read_text(Path(data))
    is_list = text.lstrip().startswith("[")
    records = []
    for number, part in enumerate([text] if is_list else text.split("\n")):
        try:
            records += [json.loads(part)] if part.strip() else []
        except (json.JSONDecodeError, RecursionError) as error:  # the latter: nested too deep
            line = number + getattr(error, "lineno", 1)
            where = f"{data} cannot be read: {getattr(error, 'msg', error)} in line {line}"
            raise ValueError(f"{where}; expected one list, or an object in each line") from None
    if is_list:
        [records] = records
    if not records:
        raise ValueError(f"{data} is empty")
    random.Random(seed).shuffle(records)
    return records


def read_dialogue(record: Any) -> list[Message]:
    """The messages of a record, with all that they have; ValueError if they are no dialogue.

    They are its "conversations" or "messages", each with "from" and "value", or "role" and
    "content". If the record has a "system", that is the message before them. A "loss" or "train"
    that is false, as other tools have it, is a "weight" of 0.
    """
    dialogue = []
    try:
        messages = record.get("conversations") or record["messages"]
        if record.get("system"):
            messages = [{"role": "system", "content": record["system"]}, *messages]
        for each in messages:
            role = each.get("from", each.get("role"))
            content = each.get("value", each.get("content"))
            if role not in ROLES:
                raise ValueError(f"the role {role!r:.40} is none of {', '.join(ROLES)}")
            dialogue.append(each | {"role": ROLES[role], "content": content})
            marks = [each.get(name) for name in ("weight", "loss", "train")]
            marks = [mark for mark in marks if mark is not None]
            if marks:
                dialogue[-1]["weight"] = min(marks)
    except (TypeError, KeyError, AttributeError):
        raise ValueError("a record is no dialogue") from None
    return dialogue


def read_dialogues(
    data: str,
    records: Iterable,
    tokenizer: Tokenizer,
    ends: Sequence[str] = (),
    answers_only: bool = True,
) -> Generator[list[Pair], None, None]:
    """Yield, for each dialogue among the ``records`` of ``data``, its rounds; see ``as_rounds``.

    Without ``answers_only`` the prompts are learnt as well. A record that is no dialogue, or cannot
    be written in the chat format, is passed over. How many these were is told when the generator
    ends or is closed. Raises ValueError if these are all records.
    """
    found = 0
    reasons = []
    try:
        for record in progress(records, f"reading {data}: dialogues"):
            try:
                dialogue = read_dialogue(record)
                if isinstance(record.get("tools"), str):  # as trl and LlamaFactory write them
                    record = record | {"tools": json.loads(record["tools"] or "[]")}
                options = {name: record[name] for name in BESIDE if record.get(name)}
                options |= record.get("chat_template_kwargs") or {}
                rounds = as_rounds(tokenizer, dialogue, ends, options)
            except (ValueError, TypeError) as error:
                reasons.append(error)
                continue
            found += 1
            yield rounds if answers_only else [([], read + said) for read, said in rounds]
        if not found:
            raise ValueError(f"{data} has no dialogue that can be learnt: {reasons[0]}")
    finally:
        if found and reasons:
            tell(f"{data}: {len(reasons)} records are passed over; of the first, {reasons[0]}")


def as_rounds(
    tokenizer: Tokenizer, messages: Messages, ends: Sequence[str] = (), options: dict | None = None
) -> list[Pair]:
    """(ids of the prompt, ids of the answer up to its end) of each answer that is learnt.

    The answer ends with the first of ``ends``, by default the tokenizer's EOS. The prompt is what
    follows the round before it, or the whole prompt if that round is encoded otherwise in it. An
    answer of weight 0 is a part of the next prompt. ``options`` are the chat template's. Raises
    ValueError if there is no answer, or one that follows no question or not right after its prompt.
    """
    dialogue = as_dialogue(messages)
    chat = tokenizer.chat_format
    if options and not chat.is_template:
        raise ValueError(f"the prompt format is {chat.name}; it writes no {', '.join(options)}")
    answers = (turn for turn, each in enumerate(dialogue) if each["role"] == "assistant")
    turns = [turn for turn in answers if dialogue[turn].get("weight") != 0]
    if not turns:
        raise ValueError("there is no answer to learn")
    render = partial(chat.render, **(options or {}))
    encode = partial(encode_round, tokenizer, render, ends or [tokenizer.eos])
    first = dialogue[: turns[0] + 1]
    rounds = [encode(first)]
    done = [*chain(*rounds[0])]
    for before, turn in pairwise(turns):  # each right after the first one: so a token is read once
        prompt, answer = encode([*first, *dialogue[before + 1 : turn + 1]])
        rounds.append((prompt[len(done) :], answer))
    joined = [*chain(*chain(*rounds))]
    whole = tokenizer.encode_rendered(render(dialogue[: turns[-1] + 1]))
    if whole[: len(joined)] == joined:
        return rounds
    words = "the chat format writes earlier turns otherwise after later ones"
    warn(f"{words}: each turn is encoded with all before it, which takes long", stacklevel=2)
    rounds, done = [], []
    for turn in turns:
        prompt, answer = encode(dialogue[: turn + 1])
        rounds.append((prompt[len(done) :] if prompt[: len(done)] == done else prompt, answer))
        done = prompt + answer
    return rounds


def encode_round(
    tokenizer: Tokenizer, render: Callable[..., str], ends: Sequence[str], dialogue: list[Message]
) -> Pair:
    """The ids of the prompt and of the answer, the last message; ValueError if it is none."""
    weight = dialogue[-1].get("weight")
    if weight not in (None, 1):
        raise ValueError(f"the weight {weight!r:.20} of an answer is neither 0 nor 1")
    if not any(each["role"] in ("user", "tool") for each in dialogue[-2:-1]):
        raise ValueError("an answer follows no question")
    content = dialogue[-1]["content"].strip()
    asked, answered = render(dialogue[:-1]), render(dialogue)
    answer = answered.removeprefix(asked)
    found = [answer.index(end) + len(end) for end in ends if end and end in answer]
    answer = answer[: min(found, default=None)]
    if not answered.startswith(asked) or not content or content not in answer:
        raise ValueError("an answer is empty, or not written whole after its prompt")
    prompt = tokenizer.encode_rendered(asked)
    whole = tokenizer.encode_rendered(asked + answer)
    if whole[: len(prompt)] != prompt:
        raise ValueError("a token holds the end of a prompt and the beginning of its answer")
    return prompt, whole[len(prompt) :]


def make_rows(
    dialogues: Iterable[list[Pair]], batch: int, length: int, millions: float | None = None
) -> Rows:
    """Dialogues end to end, in rows: all, or whole batches of about so many ``millions`` of tokens.

    Labels are the tokens that follow, -100 where they are only read. Rows that have none are left
    out. An example with rows of 3: the rounds ([1, 2], [3, 4]) and ([5], [6, 7]) give

        tokens     1  2  3       4  5  6
        labels  -100  3  4    -100  6  7

    Raises ValueError if the rows do not fill a batch.
    """
    count = None
    if millions is not None:
        count = max(1, round(millions * 1e6 / (batch * length))) * batch
    rows: list[Tensor] = []
    ids: list[int] = []  # those that are in no row yet
    learnt: list[int] = []
    for read, said in chain.from_iterable(dialogues):
        ids += read + said
        learnt += [-100] * len(read) + said
        while len(ids) > length:  # one more token has to be there: the last label
            row = torch.tensor((ids[:length], learnt[1 : length + 1]), dtype=torch.int32)  # (2, T)
            del ids[:length], learnt[:length]
            if row[1].max() != -100:
                rows.append(row)
        if count is not None and len(rows) >= count:
            break
    if len(rows) < batch:
        there = f"there are {len(rows)} rows of {length} tokens, and a batch has {batch}"
        raise ValueError(f"{there}; give more text, or a smaller --batch or --length")
    tokens, labels = torch.stack(rows[:count], dim=1)  # (R, T) each
    return tokens, labels


def make_datastore(run: Run, target: str, files: list[Path]) -> None:
    """Write the texts of ``files``, as ids of ``target``, for ``run.py --datastore`` to read."""
    with taken(run.out):
        folder = read_folder(find_target(target))
        tokenizer = Tokenizer(folder.path, folder.config.vocab_size)
        documents = [tokenizer.encode(read_text(file)) for file in files]
        save_datastore(run.out, documents, folder.config)
    tell(f"{run.out}: {len(documents)} documents, {sum(map(len, documents))} tokens")
