"""From dialogues to rows of tokens and labels. Knows nothing about models."""

import json
from pathlib import Path

import numpy as np
import torch

from .corpus import GROUPS, conversations

# Groups that must look things up in the prompt come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")


def corpus_dialogues(seed):
    """The miniature corpus as endless dialogues: messages, user and assistant in turn."""
    for conversation in conversations(seed, "train", MIX):
        yield [message for turn in conversation.turns for message in turn]


def read_sharegpt(path):
    """ShareGPT's JSON, a list of {"conversations": [{"from": "human"|"gpt", "value": text}, ...]} -> dialogues.

    A dialogue starts with the user and ends with the assistant; other records are passed over.
    """
    try:
        records = json.loads(Path(path).read_text(encoding="utf-8"))
        for record in records:
            messages = [message["value"] for message in record["conversations"]]
            speakers = [message["from"] for message in record["conversations"]]
            usable = len(messages) // 2 * 2
            if speakers[:usable] == ["human", "gpt"] * (usable // 2) and usable:
                yield messages[:usable]
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f"{path} is not ShareGPT JSON, a list of conversations ({error!r})") from None


def encode_dialogue(tokenizer, messages):
    """Messages, user and assistant in turn -> (ids, is_answer): the assistant's words and its EOS are to be learnt."""
    ids, is_answer = [], []
    for turn in range(1, len(messages), 2):
        prompt = tokenizer.encode_chat(messages[:turn])[len(ids) :]
        answer = tokenizer.encode(messages[turn])[1:] + [tokenizer.eos_id]
        ids += prompt + answer
        is_answer += [False] * len(prompt) + [True] * len(answer)
    return ids, is_answer


def pack(dialogues, tokenizer, rows, length, answers_only):
    """Dialogues laid end to end and cut into rows: (tokens, labels), (R, length) each, -100 where no loss is taken.

    With ``answers_only`` loss is taken on the assistant's words and its EOS, else on every token.
    """
    ids, is_answer = [], []
    for messages in dialogues:
        new_ids, new_is_answer = encode_dialogue(tokenizer, messages)
        ids += new_ids
        is_answer += new_is_answer
        if len(ids) > rows * length:
            break
    rows = max(0, min(rows, (len(ids) - 1) // length))
    ids, is_answer = np.array(ids[: rows * length + 1]), np.array(is_answer[: rows * length + 1])
    labels = np.where(is_answer[1:], ids[1:], -100) if answers_only else ids[1:]
    shape = (rows, length)
    return torch.from_numpy(ids[:-1]).view(shape), torch.from_numpy(labels).view(shape)
