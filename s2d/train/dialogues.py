"""From dialogues to rows of tokens and labels. Knows nothing about models."""

import json
from array import array
from collections import Counter
from pathlib import Path

import numpy as np
import torch

from ..program import tell
from .corpus import GROUPS, conversations

# Groups that need what the prompt says come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")


def dialogues_of(data, seed):
    """Lists of messages, user and assistant in turn: of "mini", the corpus, or a ShareGPT file."""
    if data != "mini":
        return read_sharegpt(data)
    corpus = conversations(seed, "train", MIX)  # without end
    return ([message for turn in each.turns for message in turn] for each in corpus)


def read_sharegpt(path):
    """The dialogues of ShareGPT's JSON: records of "conversations", lists of "from" and "value".

    What the assistant says before the user's first word, and a last question without an answer, are
    left out; a record that still is no dialogue is passed over, and one line on stderr says why.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8-sig"))
        if not isinstance(records, list):
            raise ValueError(f"it is a {type(records).__name__}")
    except (ValueError, RecursionError) as error:
        what = f"{path} is not ShareGPT JSON, a list of conversations"
        raise ValueError(f"{what} ({error})") from None
    checked = [check_record(record) for record in records]
    skipped = Counter(reason for reason, _ in checked if reason)
    if skipped:
        reasons = ", ".join(f"{count} ({reason})" for reason, count in skipped.most_common())
        tell(f"records passed over: {reasons}")
    return [texts for reason, texts in checked if not reason]


def check_record(record):
    """(why a record is no dialogue, None) or (None, its messages)."""
    try:
        messages = [(message["from"], message["value"]) for message in record["conversations"]]
    except (TypeError, KeyError):
        return "not a list of conversations with from and value", None
    if messages and messages[0][0] == "gpt":
        messages = messages[1:]
    messages = messages[: len(messages) // 2 * 2]
    if not messages:
        return "no question with an answer", None
    speakers, texts = zip(*messages)
    if speakers != ("human", "gpt") * (len(messages) // 2):
        return "human and gpt do not take turns", None
    if not all(isinstance(text, str) and text.strip() for text in texts):
        return "a message without text", None
    return None, list(texts)


def encode_dialogue(tokenizer, messages, template="vicuna"):
    """Messages -> (ids, is_answer): the assistant's words and its EOS are to be learnt."""
    ids, is_answer = [], []
    for prompt, answer in tokenizer.rounds(messages, template):
        ids += prompt + answer
        is_answer += [False] * len(prompt) + [True] * len(answer)
    return ids, is_answer


def one_a_row(conversations, length):
    """A row for each (prompt, answer), cut or filled up: (tokens, labels), int32 (R, length).

    Labels are the tokens that follow, -100 where no loss is taken: only the answer is learnt.
    """
    tokens = torch.zeros((len(conversations), length), dtype=torch.int32)
    labels = torch.full_like(tokens, -100)
    for row, (prompt, answer) in enumerate(conversations):
        ids, first = torch.tensor(prompt + answer, dtype=torch.int32)[: length + 1], len(prompt) - 1
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, first : len(ids) - 1] = ids[first + 1 :]
    return tokens, labels


def pack(dialogues, tokenizer, rows, length, answers_only, template="vicuna"):
    """Dialogues end to end in at most ``rows`` rows (None: all): (tokens, labels), (R, length).

    Labels are the tokens that follow, -100 where no loss is taken: with ``answers_only`` everywhere
    but on the assistant's words and its EOS.
    """
    ids, is_answer = array("i"), array("b")  # four bytes and one a token, however long the text
    for messages in dialogues:
        new_ids, new_is_answer = encode_dialogue(tokenizer, messages, template)
        ids.extend(new_ids)
        is_answer.extend(new_is_answer)
        if rows and len(ids) > rows * length:
            break
    whole = max(0, len(ids) - 1) // length
    count = min(rows or whole, whole) * length
    tokens = torch.from_numpy(np.array(ids[: count + 1]))
    learnt = torch.from_numpy(np.array(is_answer[1 : count + 1], dtype=bool))
    labels = tokens[1:].where(learnt, -100) if answers_only else tokens[1:]
    return tokens[:-1].view(-1, length), labels.view(-1, length)
