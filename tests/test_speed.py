"""Faster matmuls and compiled passes: the same values, names and texts as without."""

import json
import random
from functools import partial

import pytest
import torch
from helpers import raises_line, random_llama, random_parents, random_tokens

from s2d import generate
from s2d import speed as cpu
from s2d import timing as costs
from s2d.mask import positions_and_mask
from s2d.ngram.costs import ROW_COST, SIZES, TRUST, best_node_count, min_paying_prob, pass_costs
from s2d.speed import compiled, static
from s2d.speed.linear import use_fastest
from s2d.timing import timed_once
from s2d.tree import GrowingShape

close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "s2d"


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
    raises_line(compiled.cache_folder, FileNotFoundError, "set XDG_CACHE_HOME")


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
    assert len(pass_costs(model, rows=17)) == 17
    assert rows == [*SIZES] * costs.ROUNDS
    seconds = dict(zip(SIZES, [1.0, 2.0, 3.0, 4.0, 4.8]))
    monkeypatch.setattr("s2d.ngram.costs.timed_once", lambda what, sizes, measure: seconds)
    expected = [1.0, 2.0, 3.0, 3.0, *[4.0] * 4, *[4.8] * 8, 4.9, 5.0]
    assert pass_costs(model, rows=18) == pytest.approx(expected)


def test_costs_that_are_not_timed_are_assumed():
    """In float64, in a short context, for a target that is not this project's."""
    long = random_llama(0, max_position_embeddings=512)
    for target in (long, random_llama(0).float(), object()):
        costs = pass_costs(target, rows=18)
        assert costs[0] == 1.0 and costs[16] == 1.0 + 16 * ROW_COST and len(costs) == 18


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


def test_costs_change_what_is_sent_and_not_the_text(monkeypatch):
    target, prompt, steps = random_llama(3), [5, 6, 7, 5, 6, 8, 5, 6, 9, 5, 6], []
    text = generate(target, prompt, method="ar").tokens
    for row_cost in (0.0, 0.1, 3.0):
        monkeypatch.setattr("s2d.ngram.costs.ROW_COST", row_cost)
        output = generate(target, prompt)
        assert output.tokens == text
        steps.append(output.stats.steps)
    assert steps[0] <= steps[1] < steps[2] == len(text)


@pytest.fixture
def static_twin(compiler, monkeypatch):
    """static_twin(model) -> the CompiledLlama with the weights of ``model``, for 1 and 4 rows."""
    monkeypatch.setattr(static, "SIZES", (1, 4))

    def twin_of(model):
        twin = (
            static.CompiledLlama(model.config, model.drafting)
            .to(model.dtype)
            .eval()
            .requires_grad_(False)
        )
        twin.load_state_dict(model.state_dict())
        twin.prepare()
        return twin

    return twin_of


@torch.inference_mode()
def test_compiled_passes_are_the_eager_ones_and_read_nothing_behind_the_context(static_twin):
    rng, model = random.Random(0), random_llama(0)
    twin, new = static_twin(model), partial(torch.randn, dtype=torch.float64)
    for _ in range(30):
        first, end = sorted(rng.sample(range(5), 2))
        pair = [(each, each.new_cache(60, first, end)) for each in (model, twin)]
        prompt = new(1, rng.choice((1, 2, 7, 30)), 32)
        close(*(each.run_layers(prompt, first, end, cache=cache) for each, cache in pair))
        for _ in range(4):
            n, size = pair[0][1].length, rng.randrange(1, 6)  # 5 rows are not compiled
            pair[1][1].keys[..., n:, :] = pair[1][1].values[..., n:, :] = torch.nan
            parents = random_parents(rng, size)
            positions, mask = positions_and_mask(n, n, parents, model.device, model.dtype)
            hidden = new(1, size, 32)
            found = [
                each.run_layers(hidden, first, end, positions, mask, cache) for each, cache in pair
            ]
            close(*found)
            close(model.logits(found[0]), twin.logits(found[1][0])[None])
            path = sorted(rng.sample(range(size), rng.randrange(size + 1)))
            for _, cache in pair:
                cache.keep(n, path)
            close(*(cache.keys[..., : n + len(path), :] for _, cache in pair))


@torch.inference_mode()
def test_compiled_passes_with_packed_weights(static_twin, monkeypatch):
    monkeypatch.setattr(static, "SIZES", (4,))
    monkeypatch.setattr(cpu, "CACHED", 0)
    eager = random_llama(0, scale=0.1).float()
    twin, tokens = static_twin(eager), torch.tensor([random_tokens(0, 12)])
    for _ in range(2):
        cache = twin.new_cache(20)
        twin(tokens[:, :8], cache=cache)
        mask = torch.full((4, 12), -torch.inf).triu(9)
        logits = twin(tokens[:, 8:], mask=mask, cache=cache)
        torch.testing.assert_close(logits, eager(tokens)[:, 8:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "setting", [dict(method="s2d"), dict(method="s2d-tree", tree=GrowingShape(3, 4, 10))]
)
def test_compiled_generations_are_the_eager_ones(setting, static_twin):
    """To the end of the context, by passes that are compiled, padded, and too large to be."""
    target, draft = (random_llama(0), random_llama(1, exits=(1, 2, 4), thresholds=(0.3, 0.3, 0)))
    twins = static_twin(target), static_twin(draft)
    for temperature in (0.0, 0.9):
        options = dict(max_new_tokens=200, temperature=temperature, seed=3, **setting)
        one, other = (
            generate(each[0], [5, 3], each[1], **options) for each in ((target, draft), twins)
        )
        assert one.tokens == other.tokens
        assert one.stats.accept_lengths == other.stats.accept_lengths


@pytest.mark.parametrize("rows", [1, 4])
def test_what_was_compiled_holds_at_every_length_and_for_every_layer(rows, compiler):
    """The compiler's own conditions, which calls do not check, in inference mode or out of it."""
    new = partial(torch.randn, dtype=torch.float64)
    around = (17, 32, 64, 128, 256, 1024, 8 * rows + 5)
    lengths = {rows + 1, rows + 2, 4097, *(each + i for each in around for i in (-1, 0, 1))}
    held = []
    for inference in (True, False):
        with torch.inference_mode(inference):  # what is read takes on the mode it is read in
            models, each = [random_llama(seed) for seed in (2, 3)], []
            for model in models:
                use_fastest(model)
                run_block, _ = compiled.compiled_passes(model, rows)
            for number, length in enumerate(sorted(lengths)):
                keys, values = (new(1, length, 2, 8).transpose(1, 2) for _ in range(2))
                block = models[number % 2].model.layers[number % 4]
                cos, sin = new(2, rows, 8).unbind()
                slots = torch.arange(length - rows, length)
                passed = new(1, rows, 32), cos, sin, new(rows, length), slots, keys, values
                each.append(run_block.guard_check(block, *passed))
            held.append(all(each))
    assert any(held)


def double(x):
    return 2 * x


def test_compiled_code_is_kept_and_made_again_where_it_is_damaged(compiler, cache, capfd):
    x = torch.ones(2)
    for damage, said in ((False, 1), (False, 0), (True, 1)):
        for file in cache.glob("compiled/*") if damage else ():
            if file.is_file():
                file.write_bytes(b"damaged")
        assert torch.equal(compiled.compiled(double, (x,), "it", key=[])(x), 2 * x)
        assert capfd.readouterr().err.count("compiling it") == said


def test_a_pytorch_that_is_too_old_to_compile_is_one_line(cache, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    with pytest.raises(ValueError, match="--compile needs PyTorch 2.13 or newer; this is 2"):
        compiled.compiled(double, (torch.ones(3),), "it", key=[])


def test_a_compiler_that_is_missing_is_one_line(compiler, cache, monkeypatch):
    from torch._inductor import config

    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        with pytest.raises(
            ValueError, match="--compile failed .it needs a C\\+\\+ compiler.*: "
        ) as caught:
            compiled.compiled(double, (torch.ones(3),), "it", key=[])
    assert "\n" not in str(caught.value)
