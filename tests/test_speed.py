"""Faster matmuls, and costs of passes: the same values, names and texts as without."""

import copy
import json
import random
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from helpers import raises_line, random_llama, random_tokens

from s2d import generate
from s2d import speed as cpu
from s2d import timing as costs
from s2d.checkpoint import load_model, save_model
from s2d.ngram.costs import SIZES, TRUST, best_node_count, min_paying_prob, pass_seconds
from s2d.speed import linear
from s2d.speed.linear import FastLinear, can_pack, fast_linears, use_fastest
from s2d.timing import timed_once

close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "s2d"


@pytest.mark.parametrize("dtype", cpu.DTYPES)
def test_every_kernel_is_within_what_rounding_allows(dtype):
    """In whatever order a kernel sums. A wrong layout is off by the size of a result."""
    torch.manual_seed(0)
    size = 160
    weight = torch.randn(96, size).to(dtype)
    for kernel, packed in (*((each, False) for each in linear.ONE_ROW.values()), (None, True)):
        for rows in (1, 2, 3, 16, 17):
            module = FastLinear(torch.nn.Parameter(weight, requires_grad=False))
            module.one_row, module.keep_plain, module.may_pack = kernel, not packed, False
            if packed and can_pack(dtype):
                module.pack()
                assert module.weight is None
            elif packed:
                continue
            x = torch.randn(1, rows, size).to(dtype)
            found = module(x)
            assert torch.equal(module(x[0]), found[0])
            assert found.shape == (1, rows, 96) and found.is_contiguous() and found.dtype == dtype
            truth = F.linear(x.double(), weight.double())
            # Higham, Accuracy and Stability of Numerical Algorithms, 3.1: sums are in float32, and
            # the result is rounded once more.
            summed = F.linear(x.double().abs(), weight.double().abs())
            allowed = size * torch.finfo(torch.float32).eps * summed
            allowed += torch.finfo(dtype).eps * truth.abs()
            assert ((found.double() - truth).abs() <= allowed).all()


def test_fast_models_keep_names_and_values():
    plain, model = random_llama(1), random_llama(1)
    use_fastest(model)
    assert model.state_dict().keys() == plain.state_dict().keys()
    tokens = torch.tensor([random_tokens(0, 9)])
    close(model(tokens), plain(tokens))
    learned = dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        close(parameter, learned[name])


def test_large_models_are_packed_on_demand_and_small_ones_lie_by_columns(cache, monkeypatch):
    small, large = (random_llama(0, tie_word_embeddings=tied).float() for tied in (True, False))
    tokens = torch.tensor([random_tokens(0, 9)])
    expected = [model(tokens) for model in (small, large)]
    cpu.quicken(small)
    monkeypatch.setattr(cpu, "CACHED", 0)
    cpu.quicken(large)
    assert not fast_linears(small) and small.lm_head.weight.t().is_contiguous()
    assert small.lm_head.weight is small.model.embed_tokens.weight
    assert len(fast_linears(large)) == 1 + 7 * 4
    assert not any(each.is_packed for each in fast_linears(large))
    long = torch.tensor([random_tokens(0, 100)])
    large(long), large(tokens), large(tokens[:, :1])  # prompts, and plain decoding
    assert not any(each.is_packed for each in fast_linears(large))
    for model, logits in zip((small, large), expected):
        torch.testing.assert_close(model(tokens), logits, rtol=1e-4, atol=1e-4)
    assert {each.is_packed for each in fast_linears(large)} == {can_pack(torch.float32)}


@pytest.mark.parametrize(("packed", "free", "both"), [(1, 1e9, 0), (2, 1e9, 1), (2, 1e3, 0)])
def test_weights_are_kept_twice_only_if_that_pays_and_fits(packed, free, both, cache, monkeypatch):
    """If one row is faster with the plain ones, and there is memory for both."""
    if not can_pack(torch.float32):
        return
    seconds = dict.fromkeys(linear.ONE_ROW, 1.0) | {"packed": packed}
    monkeypatch.setattr(linear, "timed_once", lambda what, ways, measure: seconds)
    monkeypatch.setattr(linear, "free_memory", lambda: free)
    model = random_llama(0).float()
    tokens = torch.tensor([random_tokens(0, 9)])
    expected = model(tokens)
    use_fastest(model)
    for _ in range(2):
        torch.testing.assert_close(model(tokens), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model(tokens[:, :1]), expected[:, :1], rtol=1e-4, atol=1e-4)
    linears = fast_linears(model)
    assert all(each.is_packed and (each.weight is not None) == both for each in linears)
    assert model.device.type == "cpu" and model.dtype == torch.float32


def change_in_place(model, other):
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
            parameter.copy_(value)


def replace_weights(model, other):
    for layer, value in zip(fast_linears(model), fast_linears(other), strict=True):
        layer.weight = torch.nn.Parameter(value.weight.detach().clone(), requires_grad=False)
    change_in_place(model, other)


CHANGES = {
    "load_state_dict": lambda model, other: model.load_state_dict(other.state_dict()),
    "assign": lambda model, other: model.load_state_dict(other.state_dict(), assign=True),
    "in place": change_in_place,
    "replaced": replace_weights,
}


# Where only packed weights are left, there is none to change in place.
CASES = [*product(CHANGES, (True, False))]
CASES.remove(("in place", False))


@pytest.mark.parametrize(("change", "keep_plain"), CASES)
def test_packed_weights_follow_the_plain_ones(change, keep_plain, cache):
    """However a model that was used is changed, it computes what its weights say."""
    if not can_pack(torch.float32):
        return
    tokens = torch.tensor([random_tokens(0, 9)])
    model, other = used(0, keep_plain), random_llama(1).float()
    expected = other(tokens)
    use_fastest(other)
    CHANGES[change](model, other)
    for rows in (9, 9, 1, 9):
        found = model(tokens[:, :rows])
        torch.testing.assert_close(found, expected[:, :rows], rtol=1e-4, atol=1e-4)


def used(seed, keep_plain):
    """A model whose weights are packed."""
    model = random_llama(seed).float()
    use_fastest(model)
    for layer in fast_linears(model):
        layer.keep_plain = keep_plain
        layer.pack()
    return model


def test_a_tied_head_stays_the_embedding(cache, monkeypatch):
    if not can_pack(torch.float32):
        return
    monkeypatch.setattr(linear, "free_memory", lambda: 0)
    model = random_llama(0, tie_word_embeddings=True).float()
    use_fastest(model)
    tokens = torch.tensor([random_tokens(0, 9)])
    with torch.no_grad():
        model(tokens), model(tokens)
        assert all(each.is_packed for each in fast_linears(model))
        model.model.embed_tokens.weight.mul_(2.0)
    twin = copy.deepcopy(model)
    for each in (model, twin):
        assert each.lm_head.weight is each.model.embed_tokens.weight
    plain = random_llama(0, tie_word_embeddings=True).float()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(tokens), plain(tokens), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("keep_plain", [True, False])
def test_a_used_model_can_be_saved_copied_moved_and_not_trained(keep_plain, cache, tmp_path):
    if not can_pack(torch.float32):
        return
    plain = random_llama(0).float()
    tokens = torch.tensor([random_tokens(0, 9)])
    expected = plain(tokens)

    def check(model):
        torch.testing.assert_close(model(tokens).float(), expected, rtol=1e-4, atol=1e-4)

    for name, value in used(0, keep_plain).state_dict().items():
        assert torch.equal(value, plain.state_dict()[name])
    save_model(used(0, keep_plain), tmp_path / "saved", dtype=torch.float32)
    check(load_model(tmp_path / "saved"))
    check(copy.deepcopy(used(0, keep_plain)))
    check(used(0, keep_plain).to(torch.float64))
    model = used(0, keep_plain).requires_grad_()
    if keep_plain:
        model(tokens).sum().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
    else:
        with pytest.raises(RuntimeError, match="packed weights have no gradients"):
            model(tokens)


def test_what_was_timed_is_kept_and_timed_again_where_it_is_damaged(cache, monkeypatch):
    calls = []

    def is_timed_again():
        before = len(calls)
        measured = timed_once(
            "it", ["a", "b"], lambda: calls.append(1) or [[0.9, 0.5, 0.5], [0.25]]
        )
        assert measured == {"a": 0.5, "b": 0.25}
        return len(calls) > before

    assert is_timed_again() and not is_timed_again()
    file = cache / "costs.json"
    (key,) = json.loads(file.read_text())
    values = ["[]", "[0.5]", "[0.5, 0.0]", "[0.5, -1.0]", "[0.5, NaN]", "[0.5, 1e999]", '"ab"', "7"]
    values += ["[0.5, null]", '[0.5, "x"]', '{"a": 0.5, "b": 0.25}', "[" * 400 + "]" * 400]
    wrong = [f'{{"{key}": {value}}}' for value in values]
    nested = f'{{"other": {"[" * 900 + "]" * 900}}}'
    cut = file.read_text()[:-9]
    for damaged in ("", cut, "[1, 2]", "3", "{}", *wrong, nested, "[" * 10**5, b"\xff"):
        file.write_bytes(damaged.encode() if isinstance(damaged, str) else damaged)
        assert is_timed_again() and not is_timed_again()
    for name, value in (("get_num_threads", lambda: 77), ("__version__", "another")):
        monkeypatch.setattr(torch, name, value)
        assert is_timed_again() and not is_timed_again()
    assert len(json.loads(file.read_bytes())) == 3
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))  # a file: nothing can be kept there
    assert is_timed_again() and is_timed_again()
    for name in ("XDG_CACHE_HOME", "HOME"):  # and a user whom the system does not know
        monkeypatch.delenv(name)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    assert is_timed_again() and is_timed_again()
    raises_line(costs.cache_folder, FileNotFoundError, "set XDG_CACHE_HOME")


def test_the_first_call_and_slow_moments_do_not_count(cache, monkeypatch):
    clock, durations = [0.0], {"good": iter([9.0, 5.0, *[1.0] * 4]), "fair": iter([2.0] * 6)}

    def run(name):
        clock[0] += next(durations[name])

    monkeypatch.setattr(costs.time, "perf_counter", lambda: clock[0])
    measured = timed_once("it", ["good", "fair"], lambda: costs.time_calls(run, ["good", "fair"]))
    assert measured == {"good": 1.0, "fair": 2.0}


def test_what_was_measured_next_to_other_work_is_not_kept(cache):
    for seconds, kept in (([0.5, 0.9, 0.9], False), ([0.9, 0.5, 0.6], True)):
        assert timed_once("it", ["a"], lambda: [seconds]) == {"a": 0.5}  # noqa: B023
        assert (cache / "costs.json").exists() is kept


def test_passes_cost_as_much_as_the_next_size_and_beyond_as_much_per_row(cache, monkeypatch):
    model = random_llama(0, max_position_embeddings=512).float()
    rows = []
    model.lm_head.register_forward_hook(lambda module, x, y: rows.append(len(y)))
    assert len(pass_seconds(model, rows=3)) == 3
    assert rows == [*SIZES] * costs.ROUNDS
    seconds = dict(zip(SIZES, [1.0, 2.0, 3.0, 4.0, 4.8]))
    monkeypatch.setattr("s2d.ngram.costs.timed_once", lambda what, sizes, measure: seconds)
    expected = [1.0, 2.0, 3.0, 3.0, *[4.0] * 4, *[4.8] * 8, 4.9, 5.0]
    assert pass_seconds(model, rows=18) == pytest.approx(expected)
    assert pass_seconds(model.double(), rows=18) is None
    assert pass_seconds(random_llama(0).float(), rows=18) is None  # its context is too short


def test_as_many_nodes_are_sent_as_give_the_most_tokens_per_second():
    rng = random.Random(0)
    for _ in range(100):
        probs = sorted((rng.random() for _ in range(15)), reverse=True)
        seconds = sorted(0.5 + rng.random() * rows for rows in range(16))
        rates = [(1 + TRUST * sum(probs[:n])) / seconds[n] for n in range(16)]
        assert rates[best_node_count(probs, seconds)] == pytest.approx(max(rates))
        least = min_paying_prob(seconds)
        assert (
            best_node_count([least * 0.999] * 15, seconds)
            == 0
            < best_node_count([least * 1.001] * 15, seconds)
        )


def test_costs_change_what_is_sent_and_not_the_text():
    target, prompt, sent = random_llama(3), [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6], {}
    for more in (0.0, 0.1, 3.0):
        costs = [1.0 + more * rows for rows in range(17)]
        target.pass_costs = lambda rows, costs=costs: costs[:rows]
        output = generate(target, prompt)
        text = generate(target, prompt, method="ar").tokens
        assert output.tokens == text
        sent[more] = output.stats.steps
    assert sent[0.0] <= sent[0.1] <= sent[3.0]
