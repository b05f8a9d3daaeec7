"""Full-size shapes; and the benchmark for GPUs, on a tiny shape and whatever device there is."""

import re

import pytest
import torch
from helpers import refuses

from s2d import generate
from s2d.bench import __main__ as bench
from s2d.bench import shapes
from s2d.weights import empty_model


@pytest.mark.parametrize(("shape", "count"), [("7b", 6_738_415_616), ("13b", 13_015_864_320)])
def test_full_size_shapes_have_the_published_parameter_counts(shape, count):
    assert sum(p.numel() for p in empty_model(shapes.SHAPES[shape]).parameters()) == count


def test_the_draft_is_the_targets_first_layers():
    """And agrees with it the more, the less the layers above add; the text is the target's own."""
    device, agreeing = torch.device("cpu"), {}
    for scale in (0.02, 0.3):
        model = shapes.random_model(shapes.SHAPES["tiny"], device, torch.float64, 2, scale)
        draft = shapes.first_layers(model, (2, 3, 4))
        agreeing[scale] = shapes.agreement(model, draft, 200)
    assert min(agreeing[0.02]) > 0.85 and max(agreeing[0.3]) < 0.6
    assert agreeing[0.3] == sorted(agreeing[0.3])
    alone, *others = (
        generate(model, [5, 3, 1, 9], draft, method, max_new_tokens=24).tokens
        for method in ("ar", "s2d", "s2d-tree")
    )
    assert others == [alone, alone]


def test_the_benchmark_runs_on_a_cpu(capsys):
    arguments = "shapes --shapes tiny --device cpu --dtype float64 --context 40 --rounds 1"
    arguments += " --repetitions 1 --max-new-tokens 20 --hf"
    assert bench.main(arguments.split()) == 0
    text = capsys.readouterr().out
    difference = re.search(r"largest difference of a logit (\S+) of", text)[1]
    assert float(difference) < 1e-3  # transformers' RMSNorm rounds to float32
    assert "same likeliest token at 100.0% of 128 positions" in text
    assert "agree: exit 2 " in text
    rows = [line.split("  ")[0] for line in text.splitlines() if "  " in line]
    nodes = ["1 node", *(f"{n} nodes" for n in (2, 4, 8, 16, 32, 64))]
    segments = [f"draft layers {layers}" for layers in ("1-2", "3-3", "4-4")]
    assert rows == ["pass", "prompt of 40", *nodes, *segments, "method", "ar", "s2d", "s2d-tree"]
    assert re.search(r"^ar +[\d.]+ +1\.00 +1\.00$", text, re.M)


def test_no_gpu_is_said_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    message = "torch sees no GPU here; use --device cpu"
    refuses(bench.main, capsys, message, "shapes", "--device", "cuda")
