"""On another device each method writes the text of the CPU, and waits for the device rarely."""

import functools
import multiprocessing
from unittest.mock import Mock

import torch
from helpers import ByLastToken, nearly_equal, raises_line
from other_device import NAME, register, waits
from s2d.speed import batch

from s2d import generate, generate_many
from s2d.decoder import Decoder
from s2d.generation import start
from s2d.tree import GrowingShape

PROMPT = [5, 3, 1]
GROWING = dict(method="s2d-tree", tree=GrowingShape(2, 3, 6))
REJECTION = dict(rule="rejection", temperature=1.0)
WAYS = [
    dict(method="ar"),
    dict(method="s2d"),
    GROWING,
    GROWING | dict(temperature=1.0),
    dict(method="s2d", exits=[0, 1, 2], temperature=1.0),
    dict(method="s2d", exits=[0, 1, 2]) | REJECTION,
    dict(method="mcsd", tree=(3, 2, 1)) | REJECTION,
    dict(method="mcsd", tree=(3, 2, 1), init="target", temperature=1.0),
    dict(method="mcsd", tree=(3, 2, 1), init="target") | REJECTION,
    dict(method="s2d", decision=ByLastToken(), temperature=1.0),
]


@functools.cache
def models(device: str, dtype: torch.dtype = torch.float64) -> tuple:
    sizes = dict(num_hidden_layers=2, vocab_size=29, hidden_size=16, intermediate_size=24)
    exits = dict(exits=(1, 2), thresholds=(0.3, 0.0))
    pair = nearly_equal(0, device="cpu", eos_token_ids=(), **sizes, **exits)
    return tuple(model.to(device, dtype) for model in pair)


def check_text_and_waits() -> None:
    """Each way writes on the device what it writes on the CPU, and waits no more than it must.

    That is once for each exit with layers that was tried, once for each level (twice if a decision
    model is asked about it), and twice a step.
    """
    for way in WAYS:
        options = dict(max_new_tokens=6, seed=3) | way
        (cpu_target, cpu_draft), (target, draft) = models("cpu"), models(NAME)
        expected = generate(cpu_target, PROMPT, cpu_draft, **options).tokens
        decoder = start(target, PROMPT, draft, **options)
        with_layers = [each for each in decoder.drafter.exits if each.exit_layer > 0]
        for each in with_layers:
            each.predict = Mock(wraps=each.predict)
        waits[0] = 0
        allowed = 1 if way.get("init") == "target" else 0  # for the first roots
        for step in decoder:
            allowed += 2 + step.tree.depth * (2 if "decision" in way else 1)
        allowed += sum(each.predict.call_count for each in with_layers)
        assert decoder.tokens == expected, way
        assert waits[0] <= allowed, f"{way}: {waits[0]} waits, not {allowed}"


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
    Decoder.decode = torch.no_grad()(Decoder.decode.__wrapped__)
    batch.run_together = torch.no_grad()(batch.run_together.__wrapped__)
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
