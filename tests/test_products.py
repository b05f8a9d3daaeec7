"""Products of a few rows: the quickest way here, what passes cost, and what is decided by that."""

import copy
import io
import random
from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from helpers import WEIGHTS, random_llama, random_tokens
from s2d.extras.costs import SIZES, kept
from s2d.extras.products import WAYS, Product, possible_ways, quicken
from s2d.extras.worth import TRUST, most_tokens_a_second, worth_a_row

from s2d import generate, load_model
from s2d.extras import costs, products, worth
from s2d.generate import start

LIBRARY = "by_layout" in possible_ways(torch.float32)


@pytest.mark.parametrize("dtype", products.DTYPES)
def test_every_way_is_as_near_the_truth_as_the_plain_product(dtype):
    torch.manual_seed(0)
    for name in possible_ways(dtype):
        for rows in (1, 2, 3, 8, 16, 17):
            weight, x = torch.randn(96, 160).to(dtype), torch.randn(1, rows, 160).to(dtype)
            linear = Product(torch.nn.Parameter(weight, requires_grad=False), [name] * 6)
            linear.lay_out()
            truth, plain = F.linear(x.double(), weight.double()), F.linear(x, weight)
            found = linear(x)
            assert found.shape == plain.shape and found.is_contiguous() and found.dtype == dtype
            error, allowed = ((each.double() - truth).abs().mean() for each in (found, plain))
            assert error <= 2.0 * allowed, (name, rows)
    assert linear.packed.is_mkldnn == (name == "by_layout")


def test_the_quickest_way_is_taken_for_each_number_of_rows(monkeypatch):
    left, layout, plain = "from_left", "by_layout", "by_linear"
    timed = {plain: [3, 3, 3, 3, 3], left: [1, 2, 9, 9, 9], layout: [2, 4, 1, 2, 4]}
    assert costs.quickest(timed) == [left, left, layout, layout, plain]
    found, product = [], Product(torch.ones(2, 2), [*"abcdef"])
    for name in "abcdef":
        monkeypatch.setitem(WAYS, name, lambda x, weight, name=name: found.append(name))
    for rows in range(1, 19):
        product(torch.ones(rows, 2))
    assert "".join(found) == "ab" + "c" * 2 + "d" * 4 + "e" * 8 + "f" * 2


@pytest.mark.parametrize("way", WAYS)
def test_a_models_names_values_and_float64_texts_stay(way, monkeypatch):
    monkeypatch.setattr(products, "DTYPES", [torch.float64])
    monkeypatch.setattr(products, "quickest_ways", lambda weights: [way, "by_linear"] * 3)
    plain, model = random_llama(1), random_llama(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    monkeypatch.setattr(products, "laid_out", lambda weight: weight.to_mkldnn())
    quicken(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    if way == "by_layout":  # the library has no float64
        return
    for seed, method in enumerate(("ar", "sd", "mcsd", "s2d-tree")):
        options = dict(draft=None if method == "ar" else plain, method=method, seed=seed)
        options |= dict(temperature=float(seed % 2), max_new_tokens=30)
        prompt = random_tokens(seed, 5)
        texts = [generate(each, prompt, **options).tokens for each in (plain, model)]
        assert texts[0] == texts[1]


@pytest.mark.skipif(not LIBRARY, reason="this processor or PyTorch has no layout of its own")
def test_weights_are_laid_out_for_drafts_alone_and_only_while_they_stay(monkeypatch):
    monkeypatch.setattr(products, "quickest_ways", lambda weights: ["by_layout"] * 6)
    model, prompt = load_model(WEIGHTS / "mini-70b"), random_tokens(0, 9, 900)
    linear = model.lm_head
    generate(model, prompt, method="ar", max_new_tokens=2)
    assert not linear.packed.is_mkldnn
    generate(model, prompt, max_new_tokens=2, exits=(0,), method="s2d-tree")
    every = products.products_of(model)
    assert len(every) == 1 + 4 * model.config.num_hidden_layers
    assert all(module.packed.is_mkldnn for module in every)
    torch.save(model, file := io.BytesIO())
    saved, tokens = io.BytesIO(file.getvalue()), torch.tensor([prompt])
    for copied in (copy.deepcopy(model), torch.load(saved, weights_only=False)):
        torch.testing.assert_close(copied(tokens), model(tokens), rtol=1e-3, atol=1e-3)
        assert not copied.lm_head.packed.is_mkldnn
    x, attention = torch.randn(3, model.config.hidden_size), model.model["layers"][0].self_attn
    joint = attention.joint
    for change in (lambda w: w.mul_(2.0), lambda w: w.copy_(torch.randn_like(w))):
        with torch.no_grad():
            change(linear.weight)
            change(attention.k_proj.weight)
        assert torch.equal(linear(x), F.linear(x, linear.weight))
        assert torch.equal(attention.project(x)[1], joint(x).split(joint.sizes, dim=-1)[1])
        torch.testing.assert_close(attention.project(x)[1], attention.k_proj(x))
    attention.v_proj.requires_grad_(True)
    attention.project(x)[2].sum().backward()
    assert attention.v_proj.weight.grad.abs().sum() > 0
    assert torch.autograd.grad(linear(x.requires_grad_()).sum(), x)[0].abs().sum() > 0
    others = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.load_state_dict(others, assign=True)
    x = x.detach()
    assert torch.equal(linear(x), F.linear(x, others["lm_head.weight"]))
    torch.testing.assert_close(attention.project(x)[0], attention.q_proj(x))
    torch.testing.assert_close(model.bfloat16().lm_head(x.bfloat16()), linear(x.bfloat16()))


def test_without_the_librarys_operation_there_are_other_ways(monkeypatch):
    prompt = random_tokens(0, 9, 900)
    options = dict(exits=(0,), method="s2d-tree", max_new_tokens=20)
    before = generate(load_model(WEIGHTS / "mini-70b"), prompt, **options)

    def missing(weight):
        raise AttributeError("no such operation")

    monkeypatch.setattr(products, "laid_out", missing)
    monkeypatch.setattr(products, "kept", lambda what, measure: measure())
    assert "by_layout" not in possible_ways(torch.float32)
    assert generate(load_model(WEIGHTS / "mini-70b"), prompt, **options).tokens == before.tokens


def test_what_was_timed_is_kept_and_timed_anew_where_it_is_damaged(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    times, calls = {"pass": [0.5] * len(SIZES)}, []

    def measured():
        before = len(calls)
        assert kept("it", lambda: calls.append(1) or times) == times
        return len(calls) > before

    assert [measured(), measured()] == [True, False]
    [file] = (tmp_path / "s2d/costs").iterdir()
    whole = file.read_text()
    for text in ("", whole[:9], whole[:-9], "[" * 99999, whole.replace("0.5", "0.6"), "{}\n{}"):
        file.write_text(text)
        assert [measured(), measured()] == [True, False]
    for name in costs.VARIABLES:
        monkeypatch.setenv(name, "AVX2")
        assert [measured(), measured()] == [True, False]
    monkeypatch.setattr(costs, "machine", lambda: "another")
    assert [measured(), measured()] == [True, False]
    busy = iter([{"pass": [0.5] * 4 + [slow]} for slow in (0.9, 0.5, 0.5, 0.6)])
    for _ in range(3):  # a machine that is busy: the first timings disagree
        assert kept("busy", lambda: next(busy)) == {"pass": [0.5] * 5}
    assert not list(busy)
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file: nothing can be kept there
    assert [measured(), measured()] == [True, True]


def test_a_slow_moment_or_a_hopeless_way_decides_nothing(monkeypatch):
    clock, asked = [0.0], []
    durations = {"good": [9.0, 5.0, 1.0, 1.0, 1.0, 1.0], "fair": [2.0] * 6, "bad": [50.0] * 6}

    def run(name):
        asked.append(name)
        clock[0] += durations[name][asked.count(name) - 1]

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    assert costs.quickest_of_each(run, durations) == {"good": 1.0, "fair": 2.0, "bad": 50.0}
    assert asked.count("bad") == 2 < asked.count("fair")


def test_what_gives_the_most_tokens_a_second_is_sent():
    rng = random.Random(0)
    for _ in range(300):
        probs = sorted((rng.random() for _ in range(rng.randrange(16))), reverse=True)
        seconds = list(accumulate((rng.random() for _ in range(16)), initial=0.5))[1:]
        count = most_tokens_a_second(probs, seconds)
        rates = [(1 + TRUST * sum(probs[:n])) / seconds[n] for n in range(len(probs) + 1)]
        assert rates[count] == pytest.approx(max(rates))
        least = worth_a_row(seconds)
        assert most_tokens_a_second([min(least, 1.0) * 0.999] * 15, seconds) == 0
        assert most_tokens_a_second([min(least * 1.001, 1.0)] * 15, seconds) > 0 or least > 1


def test_rows_that_cost_nothing_are_filled_and_dear_ones_left_out(monkeypatch):
    """The same text from the same target, by passes that seem to cost something else."""
    target, prompt, sent = random_llama(3), [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6], {}
    for name, more in (("free", 0.0), ("dear", 0.1), ("hopeless", 3.0), ("given", 3.0)):
        seconds = [1.0 + more * rows for rows in range(128)]
        monkeypatch.setattr(worth, "row_costs", lambda model, seconds=seconds: seconds)
        stop = {"stop": 0.0} if name == "given" else {}
        generation = start(target, prompt, exits=(0,), method="s2d-tree", **stop)
        sent[name] = [len(step.proposal.tree) for step in generation]
        sent[name, "text"] = generation.tokens
        assert generation.plan.costs == (None if stop else tuple(seconds[:8]))
    assert sent["free"][0] == sent["given"][0] > sent["dear"][0] > sum(sent["hopeless"]) == 0
    assert len({tuple(sent[name, "text"]) for name in ("free", "dear", "hopeless", "given")}) == 1
