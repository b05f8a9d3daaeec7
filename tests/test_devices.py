"""On every device each method writes the text of the CPU, and waits for the device rarely.

Under pytest this starts a process of its own for the device in other_device.py, which cannot be
taken back; run as a program, this file is what that process does.
"""

import os
import subprocess
import sys

import pytest
import torch
from helpers import DEVICE, ROOT, ByLastToken, nearly_equal, twin_of

from s2d import generate, generate_many
from s2d.generation import start
from s2d.model import Llama
from s2d.tree import GrowingShape

DEVICES = sorted({"cpu", DEVICE, *(["cuda"] if torch.cuda.is_available() else [])})
EXITS = dict(exits=(1, 2, 3), thresholds=(0.3, 0.3, 0.0))
WAYS = [
    dict(method="ar"),
    dict(method="sd"),
    dict(method="s2d"),
    dict(method="mcsd", tree=(3, 2, 1)),
    dict(method="s2d-tree", tree=GrowingShape(3, 4, 10)),
    dict(exits=[0]),
    dict(method="s2d", exits=[0, 1, 2, 3]),
    dict(method="s2d", rule="rejection"),
    dict(method="mcsd", tree=(3, 2, 1), rule="rejection"),
    dict(method="s2d", exits=[0, 2], rule="rejection"),
    dict(method="mcsd", tree=(3, 2, 1), init="target"),
    dict(method="mcsd", tree=(3, 2, 1), init="target", rule="rejection"),
    dict(method="s2d", decision=ByLastToken()),
]


def models(device: str, dtype: torch.dtype = torch.float64, kind: type = Llama) -> tuple:
    pair = nearly_equal(0, device="cpu", num_hidden_layers=3, eos_token_ids=(), **EXITS)
    return tuple(twin_of(model, kind).to(device, dtype) for model in pair)


@pytest.mark.parametrize("device", DEVICES)
def test_every_device_writes_the_same_text(device):
    expected = generate(models("cpu")[0], [5, 3, 1], method="ar", max_new_tokens=60).tokens
    target, draft = models(device)
    for way in WAYS:
        output = generate(target, [5, 3, 1], draft, max_new_tokens=60, **way)
        assert output.tokens == expected or not output.exact


def test_a_device_that_is_not_the_cpu():
    command = [sys.executable, __file__]
    done = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def check_text_and_waits(kind: type, ways: list[dict]) -> None:
    """Each way writes on the device what it writes on the CPU, and waits no more than it must.

    That is once for each exit with layers that was tried, once for each level (twice if a decision
    model is asked about it), and twice a step. On the device the models are of the class ``kind``.
    """
    import other_device

    for way in ways:
        for temperature in (0.0, 1.0):
            options = dict(max_new_tokens=8, temperature=temperature, seed=3, **way)
            expected = generate(*place(models("cpu")), **options).tokens
            decoder = start(*place(models(other_device.NAME, kind=kind)), **options)
            asked: list[int] = []
            decoder.drafter.exits = [
                other_device.Counted(each, asked) for each in decoder.drafter.exits
            ]
            other_device.waits[0] = 0
            allowed = 1 if way.get("init") == "target" else 0  # for the first roots
            for step in decoder:
                allowed += 2 + step.tree.depth * (2 if "decision" in way else 1)
                allowed += sum(each > 0 for each in asked)
                asked.clear()
            assert decoder.tokens == expected, (way, temperature)
            found = other_device.waits[0]
            assert found <= allowed, f"{way}, T = {temperature:g}: {found} waits, not {allowed}"


def check_batches_and_dtypes() -> None:
    import other_device

    prompts = [[5, 3, 1], [2], [7, 7]]
    for options in (WAYS[2], WAYS[4]):
        texts = []
        for device in ("cpu", other_device.NAME):
            target, draft = models(device)
            found = generate_many(target, prompts, draft, batch=2, max_new_tokens=8, **options)
            texts.append([each.tokens for each in found])
        assert texts[0] == texts[1]
    for dtype in (torch.float16, torch.bfloat16):
        target, draft = models(other_device.NAME, dtype)
        for options in (dict(method="s2d", temperature=1.0), WAYS[3], WAYS[7]):
            generate(target, [5, 3, 1], draft, max_new_tokens=8, **options)


def check_one_device_for_both_models() -> None:
    import other_device

    target, draft = models("cpu")[0], models(other_device.NAME)[1]
    for temperature in (0.0, 1.0):
        try:
            generate(target, [5, 3, 1], draft, temperature=temperature)
        except ValueError as error:
            assert "the draft is on" in str(error)
        else:
            raise AssertionError("nothing was raised")


def check_a_default_device() -> None:
    """What the caller made the default for new tensors does not matter."""
    import other_device

    for device in ("cpu", other_device.NAME):
        pair = models(device)
        for way in (WAYS[6], *WAYS[8:]):  # with exit 0, rejection sampling, roots, decisions
            options = dict(max_new_tokens=3, temperature=1.0, seed=3, **way)
            expected = generate(*place(pair), **options).tokens
            torch.set_default_device(other_device.NAME if device == "cpu" else "cpu")
            found = generate(*place(pair), **options).tokens
            torch.set_default_device(None)
            assert found == expected, (way, device)


def check_that_mixed_devices_raise() -> None:
    import other_device

    try:
        torch.ones(2, device=other_device.NAME) + torch.ones(2)
    except RuntimeError as error:
        assert "tensors on two devices" in str(error)
    else:
        raise AssertionError("nothing was raised")


def place(pair: tuple) -> tuple:
    """Arguments of ``generate``."""
    target, draft = pair
    return target, [5, 3, 1], draft


if __name__ == "__main__":
    from other_device import register

    kept = register()
    check_that_mixed_devices_raise()
    check_text_and_waits(Llama, WAYS)
    check_batches_and_dtypes()
    check_one_device_for_both_models()
    check_a_default_device()
