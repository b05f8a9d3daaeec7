"""The text of the miniature models: repeatable, and split cleanly."""

import zlib
from itertools import islice

from s2d.train.corpus import GROUPS, conversations


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
