"""The text of the miniature models: repeatable, and split cleanly."""

import zlib
from itertools import islice

from s2d.train.corpus import GROUPS, conversations


def first_questions(seed, split, count, *groups):
    return {turns[0][0] for turns in islice(conversations(seed, split, *groups), count)}


def test_the_text_is_that_of_the_shipped_models():
    """To the letter, or they could not be made again."""
    checksum = 0
    for split in ("train", "held-out"):
        for turns in islice(conversations(0, split), 2000):
            checksum = zlib.crc32(repr(turns).encode(), checksum)
    assert f"{checksum:08x}" == "cf6b08f9"


def test_no_held_out_prompt_occurs_in_training():
    """Whatever the seeds. Most prompts of a group are new."""
    training = first_questions(0, "train", 9000) | first_questions(1, "train", 2000)
    held_out = first_questions(0, "held-out", 500)
    assert len(held_out) > 300 and not training & held_out
    for group in GROUPS:
        assert len(first_questions(3, "train", 400, [group])) > 300, group
