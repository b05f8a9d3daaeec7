"""The text of the miniature models: repeatable, split cleanly, and right."""

import re
import zlib
from itertools import islice

from s2d.train.corpus import GROUPS, WORLD, conversations


def first_questions(seed, split, count, *groups):
    return {c.turns[0][0] for c in islice(conversations(seed, split, *groups), count)}


def test_the_text_is_that_of_the_shipped_models():
    """To the letter, or they could not be made again."""
    checksum = 0
    for split in ("train", "held-out"):
        for conversation in islice(conversations(0, split), 2000):
            checksum = zlib.crc32(repr(conversation).encode(), checksum)
    assert f"{checksum:08x}" == "6072b939"


def test_no_held_out_prompt_occurs_in_training():
    """Whatever the seeds. Most prompts of a group are new."""
    first, second = first_questions(0, "train", 9000), first_questions(1, "train", 2000)
    held_out = first_questions(0, "held-out", 500)
    assert len(held_out) > 300 and not second < first and not (first | second) & held_out
    for group in GROUPS:
        assert len(first_questions(3, "train", 400, [group])) > 300, group


def test_arithmetic_is_right():
    for conversation in islice(conversations(4, "train", ["math_reasoning"]), 100):
        for _, answer in conversation.turns:
            steps = re.findall(r"(\d+ [-+*] \d+) = (\d+)", answer)
            assert [eval(step) for step, _ in steps] == [int(result) for _, result in steps]
            assert len(steps) == 2 and f"the answer is {steps[-1][1]} " in answer


def test_answers_follow_from_the_prompt():
    for conversation in islice(conversations(5, "train", ["rag"]), 300):
        question, answer = conversation.turns[0]
        name, value = answer.split()[0], answer.rstrip(".").removesuffix(" years old").split()[-1]
        sentences = question.split("Question:")[0].split(".")
        assert [value in each for each in sentences if re.search(rf"\b{name}\b", each)] == [True]
    for conversation in islice(conversations(5, "train", ["qa"]), 300):
        country = next(country for country in WORLD if country in conversation.turns[0][0])
        fact = rf"The ([a-z ]+) of {country} is (?:the )?(\w+)\."
        for attribute, value in re.findall(fact, " ".join(a for _, a in conversation.turns)):
            assert WORLD[country][attribute] == value
