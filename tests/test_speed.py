"""Faster matmuls, and costs of passes: the same values, names and texts as without."""

import json
import random
from functools import partial

import pytest
import torch
from helpers import raises_line, random_llama

from s2d import generate
from s2d import timing as costs
from s2d.ngram.costs import ROW_COST, SIZES, TRUST, best_node_count, min_paying_prob, pass_costs
from s2d.timing import timed_once

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
    assert len(pass_costs(model, range(1, 18))) == 17
    assert rows == [*SIZES] * costs.ROUNDS
    seconds = dict(zip(SIZES, [1.0, 2.0, 3.0, 4.0, 4.8]))
    monkeypatch.setattr("s2d.ngram.costs.timed_once", lambda what, sizes, measure: seconds)
    expected = [1.0, 2.0, 3.0, 3.0, *[4.0] * 4, *[4.8] * 8, 4.9, 5.0]
    assert pass_costs(model, range(1, 19)) == pytest.approx(expected)
    assert pass_costs(model, [2, 17]) == pytest.approx([2.0, 4.9])


def test_costs_that_are_not_timed_are_assumed():
    """In float64, in a short context, for a target that is not this project's."""
    long = random_llama(0, max_position_embeddings=512)
    for target in (long, random_llama(0).float(), object()):
        costs = pass_costs(target, range(1, 19))
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
