"""On another device each method writes the text of the CPU, and waits for the device rarely."""

import functools
import multiprocessing
from unittest.mock import Mock

import torch
from helpers import ByLastToken, nearly_equal, raises_line
from other_device import NAME, register, waits

from s2d import generate, generate_many
from s2d.decoder import Decoder
from s2d.generation import start
from s2d.mcsd.decision import with_decision
from s2d.mcsd.roots import RootsDecoder
from s2d.passes import batch
from s2d.tree import GrowingShape

PROMPT = [5, 3, 1]
GROWING = dict(method="s2d-tree", tree=GrowingShape(2, 3, 6))
REJECTION = dict(rule="rejection", temperature=1.0)
DECIDED = dict(drafter=with_decision(ByLastToken()))
WAYS = [
    dict(method="ar"),
    dict(method="s2d"),
    GROWING,
    GROWING | dict(temperature=1.0),
    dict(method="s2d", exits=[0, 1, 2], temperature=1.0),
    dict(method="s2d", exits=[0, 1, 2]) | REJECTION,
    dict(tree=(3, 2, 1)) | REJECTION,
    GROWING | REJECTION,
    DECIDED | dict(temperature=1.0),
    DECIDED | REJECTION,
    dict(tree=(3, 2, 1), decoder=RootsDecoder, temperature=1.0),
    dict(tree=(3, 2, 1), decoder=RootsDecoder) | REJECTION,
]


@functools.cache
def models(device: str, dtype: torch.dtype = torch.float64) -> tuple:
    sizes = dict(num_hidden_layers=2, vocab_size=29, hidden_size=16, intermediate_size=24)
    exits = dict(exits=(1, 2), thresholds=(0.3, 0.0))
    pair = nearly_equal(0, device="cpu", eos_token_ids=(), **sizes, **exits)
    return tuple(model.to(device, dtype) for model in pair)


def check_text_and_waits() -> None:
    """Each way writes on the device what it writes on the CPU, and waits no more than it must.

    That is once for each exit that is asked, and once to verify. Rejection sampling waits for the
    chances of the drafted tokens, and for the bonus token. No row of the vocabulary is brought.
    """
    for way in WAYS:
        options = dict(max_new_tokens=6, seed=3) | way
        (cpu_target, cpu_draft), (target, draft) = models("cpu"), models(NAME)
        expected = generate(cpu_target, PROMPT, cpu_draft, **options).tokens
        decoder = start(target, PROMPT, draft, **options)
        for each in decoder.drafter.exits:
            each.predict = Mock(wraps=each.predict)
        waits.clear()
        trees = [step.tree for step in decoder]
        assert decoder.tokens == expected, way
        asked = sum(each.predict.call_count for each in decoder.drafter.exits)
        must = asked + len(trees)
        if "rule" in way:
            must += sum(len(tree.nodes) > 1 for tree in trees)
        roots = 3 if way is WAYS[-1] else 1  # which are verified one by one
        assert must <= len(waits) <= roots * must, f"{way}: {len(waits)} waits, not {must}"
        if "tree" not in way:  # of each exit a token, its estimate and the confidence
            assert sum(waits) == 3 * asked + sum(len(tree.nodes) for tree in trees)


def check_batches_and_dtypes() -> None:
    texts = []
    for device in ("cpu", NAME):
        target, draft = models(device)
        prompts = [PROMPT, [2], [7, 7]]
        found = generate_many(target, prompts, draft, batch=2, max_new_tokens=6, **GROWING)
        texts.append([each.tokens for each in found])
    assert texts[0] == texts[1]
    target, draft = models(NAME, torch.bfloat16)
    for way in (WAYS[4], WAYS[6]):
        generate(target, PROMPT, draft, max_new_tokens=4, **way)


def check_all() -> None:
    kept = register()  # noqa: F841 - as long as the process is
    for owner, name in ((Decoder, "decode"), (batch, "decode_one"), (batch, "run_together")):
        setattr(owner, name, torch.no_grad()(getattr(owner, name).__wrapped__))
    there = torch.ones(2, device=NAME)
    raises_line(torch.add, RuntimeError, "tensors on two devices", there, torch.ones(2))
    check_text_and_waits()
    check_batches_and_dtypes()


def test_a_device_that_is_not_the_cpu():
    """In a process of its own, as the device in other_device.py cannot be taken back."""
    process = multiprocessing.get_context("fork").Process(target=check_all)
    process.start()
    process.join()
    assert process.exitcode == 0
