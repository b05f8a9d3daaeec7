"""Full-size shapes; and the benchmark for GPUs, on a tiny shape and whatever device there is."""

import re

import pytest
import torch

from s2d import generate
from s2d.bench import __main__ as bench
from s2d.bench import shapes
from s2d.extras import static
from s2d.weights import empty_model


@pytest.mark.parametrize(
    "shape, count", [("7b", 6_738_415_616), ("13b", 13_015_864_320), ("70b", 68_976_648_192)]
)
def test_full_size_shapes_have_the_published_parameter_counts(shape, count):
    assert (
        sum(parameter.numel() for parameter in empty_model(shapes.SHAPES[shape]).parameters())
        == count
    )


def test_the_draft_is_the_targets_first_layers_in_the_same_memory():
    """And agrees with it the more, the less the layers above add; the text stays the target's own."""
    device, shares = torch.device("cpu"), {}
    for scale in (0.02, 0.3):
        model = shapes.random_model(shapes.SHAPES["tiny"], device, torch.float64, 0, 2, scale)
        draft = shapes.first_layers(model, (2, 3, 4))
        shares[scale] = shapes.agreement(model, draft, 200, 1)
    assert min(shares[0.02]) > 0.85 and max(shares[0.3]) < 0.6
    assert shares[0.3] == sorted(shares[0.3])
    own = dict(model.named_parameters())
    assert all(
        parameter.data_ptr() == own[name].data_ptr() for name, parameter in draft.named_parameters()
    )
    prompt, expected = [5, 3, 1, 9], None
    for method in ("ar", "s2d", "s2d-tree"):
        tokens = generate(model, prompt, draft=draft, method=method, max_new_tokens=40).tokens
        expected = expected or tokens
        assert tokens == expected


def test_the_benchmark_runs_on_a_cpu(capsys):
    arguments = ["shapes", "--shapes", "tiny", "--device", "cpu", "--dtype", "float64", "--context", "40", "--rounds", "1",
                 "--repetitions", "1", "--max-new-tokens", "20", "--hf", "--markdown"]  # fmt: skip
    assert bench.main(arguments) == 0
    text = capsys.readouterr().out
    difference = re.search(r"largest difference of a logit (\S+) of", text)[1]
    assert float(difference) < 1e-3  # transformers' RMSNorm rounds to float32
    assert "same likeliest token at 100.0% of 128 places" in text
    assert "agree: exit 2 " in text
    rows = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rows == ["pass", "---", "prompt of 40", "1 node", *(f"{n} nodes" for n in (2, 4, 8, 16, 32, 64)),
                    "draft segment", "---", "layers 1-2", "layers 3-3", "layers 4-4",
                    "method", "---", "ar", "s2d", "s2d-tree"]  # fmt: skip
    assert re.search(r"\| ar \| [\d.]+ \| 1\.00 \| 1\.00 \|", text)


def test_compiled_passes_have_tables_of_their_own(nothing_compiled, capsys, monkeypatch):
    monkeypatch.setattr(static, "ROWS", (1,))
    arguments = ["shapes", "--shapes", "tiny", "--device", "cpu", "--dtype", "float64", "--context", "40", "--rounds", "1",
                 "--repetitions", "1", "--max-new-tokens", "8", "--compile"]  # fmt: skip
    assert bench.main(arguments) == 0
    output = capsys.readouterr()
    assert "compiling a block of width 64, rows: 1" in output.err
    names = re.findall(r"^(pass|draft segment|ar|s2d|s2d-tree)(, compiled)? ", output.out, re.M)
    tables = ["pass", "draft segment"]
    assert names == [(name, suffix) for suffix in ("", ", compiled") for name in tables] + [
        (name, suffix) for suffix in ("", ", compiled") for name in ("ar", "s2d", "s2d-tree")]  # fmt: skip


def test_no_gpu_is_said_in_one_line(capsys):
    if not torch.cuda.is_available():
        assert bench.main(["shapes", "--device", "cuda"]) == 2
        assert "torch sees no GPU here; use --device cpu" in capsys.readouterr().err
