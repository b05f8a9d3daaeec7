"""Full-size shapes; and the benchmark for GPUs, on a tiny shape and whatever device there is."""

import re
from functools import partial
from math import prod

import pytest
import torch

from s2d import generate
from s2d.bench import __main__ as bench
from s2d.bench import shapes
from s2d.weights import shapes_of

METHODS = "ar", "s2d", "s2d-tree"


@pytest.mark.parametrize(("shape", "count"), [("7b", 6_738_415_616), ("13b", 13_015_864_320)])
def test_full_size_shapes_have_the_published_parameter_counts(shape, count):
    assert sum(map(prod, shapes_of(shapes.SHAPES[shape]).values())) == count


@torch.inference_mode()
def test_the_draft_is_the_targets_first_layers():
    """And is accepted the more, the less the layers above add; the text is the target's own."""
    accepted = []
    for scale in (0.02, 0.3):
        given = shapes.SHAPES["tiny"], torch.device("cpu"), torch.float64
        model = shapes.random_model(*given, scale)
        ask = partial(generate, model, [5, 3, 1, 9], model, max_new_tokens=96)
        alone, chain, tree = (ask(method=method) for method in METHODS)
        assert alone.tokens == chain.tokens == tree.tokens
        accepted.append(chain.stats.acceptance_rate)
    assert accepted[0] > 0.85 and accepted[1] < 0.7


def test_the_benchmark_runs_on_a_cpu(capsys):
    arguments = "shapes --shapes tiny --device cpu --dtype float64 --context 40 --rounds 1"
    assert bench.main(f"{arguments} --max-new-tokens 20 --hf".split()) == 0
    text = capsys.readouterr().out
    difference, same = re.search(r"a logit (\S+) of.* token at (\S+)% of 128 pos", text).groups()
    assert float(difference) < 1e-3 and same == "100.0"  # theirs: RMSNorm rounds to float32
    rows = [line.split("  ")[0] for line in text.splitlines() if "  " in line]
    nodes = ["1 node", *(f"{n} nodes" for n in (2, 4, 8, 16, 32, 64))]
    segments = [f"draft layers {layers}" for layers in ("1-2", "3-3", "4-4")]
    assert rows == ["pass", *nodes, *segments, "method", *METHODS]
    assert re.search(r"^64 nodes +[\d.]+ +\d+%$", text, re.M)
    assert re.search(r"^ar +1\.00 / 1\.00 +1\.00-1\.00 +[\d.]+ ", text, re.M)
