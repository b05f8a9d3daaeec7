"""From dialogues to rows of tokens and labels. Knows nothing about models."""

import json
import re
import sys
from array import array
from collections import Counter
from itertools import islice

import numpy as np
import torch

from .corpus import GROUPS, conversations

# Groups that must look things up in the prompt come more often: that takes a model longest to learn.
MIX = (*GROUPS, "translation", "translation", "math_reasoning", "math_reasoning", "rag")

LONGEST_TOKEN = (
    16  # characters that JSON's longest token outside strings may take, with room to spare
)


def corpus_dialogues(seed):
    """The miniature corpus as endless dialogues: messages, user and assistant in turn."""
    for conversation in conversations(seed, "train", MIX):
        yield [message for turn in conversation.turns for message in turn]


def read_sharegpt(path, skipped):
    """ShareGPT's JSON, a list of {"conversations": [{"from": "human"|"gpt", "value": text}, ...]} -> dialogues.

    The file is read bit by bit. What the assistant says before the user's first word, and a question that stays without
    an answer at the end, are left out; a record that still is no dialogue is passed over, and ``skipped``, a Counter,
    counts the reason.
    """
    for record in _json_list(path):
        try:
            messages = [(message["from"], message["value"]) for message in record["conversations"]]
        except (TypeError, KeyError):
            skipped["not a list of conversations with from and value"] += 1
            continue
        speakers, texts = zip(*messages) if messages else ((), ())
        first = 1 if speakers[:1] == ("gpt",) else 0
        end = first + (len(messages) - first) // 2 * 2
        if end == first:
            skipped["no question with an answer"] += 1
        elif speakers[first:end] != ("human", "gpt") * ((end - first) // 2):
            skipped["human and gpt do not take turns"] += 1
        elif not all(isinstance(text, str) and text.strip() for text in texts[first:end]):
            skipped["a message without text"] += 1
        else:
            yield list(texts[first:end])


def first_prompts(data, seed, count, tokenizer, template):
    """Prompts, lists of ids, of the first messages of ``count`` dialogues: of the built-in corpus ("mini") or a ShareGPT file."""
    skipped = Counter()
    dialogues = corpus_dialogues(seed) if data == "mini" else read_sharegpt(data, skipped)
    prompts = [
        tokenizer.encode_chat(messages[:1], template) for messages in islice(dialogues, count)
    ]
    report_skipped(skipped)
    return prompts


def report_skipped(skipped):
    """One line on stderr about the records that ``read_sharegpt`` passed over, if there were any."""
    if skipped:
        reasons = ", ".join(f"{count} ({reason})" for reason, count in skipped.most_common())
        print(f"records passed over: {reasons}", file=sys.stderr)


def _json_list(path, block=2**20):
    """The items, objects, of a JSON list in a file too large to hold."""
    decoder, separator = json.JSONDecoder(), re.compile(r"[\s,]*")
    wrong = f"{path} is not ShareGPT JSON, a list of conversations"
    with open(path, encoding="utf-8") as file:
        try:
            text = file.read(block).lstrip("\ufeff \t\r\n")
            if not text.startswith("["):
                raise ValueError(f"it begins with {text[:10]!r}")
            at, wanted = 1, block
            while (at := separator.match(text, at).end()) == len(text) or text[at] != "]":
                try:
                    item, at = decoder.raw_decode(text, at)
                except (
                    json.JSONDecodeError
                ) as error:  # a mistake, or the item goes on in the next block
                    goes_on = (
                        error.msg.startswith("Unterminated string")
                        or len(text) - error.pos < LONGEST_TOKEN
                    )
                    if not goes_on or not (more := file.read(wanted)):
                        raise
                    text, at, wanted = (
                        text[at:] + more,
                        0,
                        2 * wanted,
                    )  # so that copying a long item stays linear
                else:
                    wanted = block
                    yield item
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{wrong} ({error})") from None


def encode_dialogue(tokenizer, messages, template="vicuna"):
    """Messages, user and assistant in turn -> (ids, is_answer): the assistant's words and its EOS are to be learnt."""
    ids, is_answer = [], []
    for prompt, answer in tokenizer.rounds(messages, template):
        ids += prompt + answer
        is_answer += [False] * len(prompt) + [True] * len(answer)
    return ids, is_answer


def one_a_row(conversations, length):
    """(ids of a prompt, ids of its answer) pairs, each to a row of its own: (tokens, labels), (R, length) int32 each.

    Too long ones are cut, short ones filled up. Labels are the tokens that follow, -100 where no loss is taken: only the
    answer is learnt.
    """
    tokens, labels = (
        np.full((len(conversations), length), fill, dtype=np.int32) for fill in (0, -100)
    )
    for row, (prompt, answer) in enumerate(conversations):
        ids, first = np.array(prompt + answer, dtype=np.int32)[: length + 1], len(prompt) - 1
        tokens[row, : len(ids) - 1] = ids[:-1]
        labels[row, first : len(ids) - 1] = ids[first + 1 :]
    return torch.from_numpy(tokens), torch.from_numpy(labels)


def pack(dialogues, tokenizer, rows, length, answers_only, template="vicuna"):
    """Dialogues laid end to end and cut into at most ``rows`` rows (None: all): (tokens, labels), (R, length) int32 each.

    Labels are the tokens that follow, -100 where no loss is taken: with ``answers_only`` everywhere but on the
    assistant's words and its EOS.
    """
    ids, is_answer = array("i"), array("b")  # four bytes and one a token, however long the text
    for messages in dialogues:
        new_ids, new_is_answer = encode_dialogue(tokenizer, messages, template)
        ids.extend(new_ids)
        is_answer.extend(new_is_answer)
        if rows is not None and len(ids) > rows * length:
            break
    whole = max(0, (len(ids) - 1) // length)
    shape = (whole if rows is None else min(rows, whole), length)
    count = shape[0] * length
    tokens = np.asarray(ids)[: count + 1]
    learnt = np.asarray(is_answer)[1 : count + 1] if answers_only else True
    labels = np.where(learnt, tokens[1:], np.int32(-100))
    return torch.from_numpy(tokens[:-1].copy()).view(shape), torch.from_numpy(labels).view(shape)
