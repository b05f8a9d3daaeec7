"""Dialogues, of the corpus or of a ShareGPT file, and how they become rows of tokens and labels."""

import json
from array import array

import torch

from ..cli.program import tell
from ..files import read_text
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

    Records that are no dialogue are passed over; a line on stderr says how many.
    """
    try:
        records = json.loads(read_text(path))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(records, list):
        raise ValueError(f"{path} is no list of dialogues, as ShareGPT's files are")
    dialogues = [messages_of(record) for record in records]
    found = [messages for messages in dialogues if messages]
    if len(found) < len(records):
        tell(f"{path}: {len(records) - len(found)} of {len(records)} records are no dialogue")
    return found


def pairs_of(dialogues, tokenizer):
    """Yield the rounds of ``dialogues`` as pairs of ids (prompt, answer).

    Dialogues that cannot be encoded, or whose rounds cannot be divided, are passed over; a line on
    stderr says how many.
    """
    passed_over, why = 0, ""
    for messages in dialogues:
        try:
            rounds = list(tokenizer.rounds(messages))
        except ValueError as error:
            passed_over, why = passed_over + 1, error
            continue
        yield from rounds
    if passed_over:
        tell(f"{passed_over} dialogues were passed over, the last one since {why}")


def messages_of(record):
    """The texts of a ShareGPT record, without a last question; None if it is no dialogue."""
    try:
        messages = [(message["from"], message["value"]) for message in record["conversations"]]
    except (TypeError, KeyError):
        return None
    rounds = len(messages) // 2
    messages = messages[: 2 * rounds]
    in_turn = [speaker for speaker, _ in messages] == ["human", "gpt"] * rounds
    texts = [text for _, text in messages]
    if in_turn and all(isinstance(text, str) and text.strip() for text in texts):
        return texts
    return None


def pack(pairs, rows, length, answers_only):
    """Pairs of ids (prompt, answer) end to end in at most ``rows`` rows (None: all).

    Returns (tokens, labels), (R, length) each. Labels are the tokens that follow, -100 where no
    loss is taken: with ``answers_only`` everywhere but on the answers.
    """
    ids, labels = array("i"), array("i")  # four bytes per token, however long the text
    for prompt, answer in pairs:
        ids.extend([*prompt, *answer])
        labels.extend([-100] * len(prompt) if answers_only else prompt)
        labels.extend(answer)
        if rows and len(ids) > rows * length:
            break
    whole = max(0, len(ids) - 1) // length
    count = min(rows or whole, whole) * length
    tokens, labels = torch.tensor(ids[:count]), torch.tensor(labels[1 : count + 1])
    return tokens.int().view(-1, length), labels.int().view(-1, length)
