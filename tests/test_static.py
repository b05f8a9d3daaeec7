"""Compiled passes of static shape: the same numbers, tokens and statistics as without, at every size and length."""

import os
import random
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from helpers import ROOT, WEIGHTS, random_llama, random_parents

import run
from s2d import generate, load_model, user_cache
from s2d.extras import compiled as compiling
from s2d.extras import graphs, static
from s2d.extras.compiled import compiled_block, shape_of
from s2d.extras.static import ROWS, static_twin
from s2d.tree import Dynamic, TreeAttention, ancestor_mask

EXITS = (1, 2, 4)
SETTINGS = [
    dict(method="ar"),
    dict(method="sd", draft_length=5),
    dict(method="mcsd", tree=(3, 2, 1)),
    dict(method="mcsd", tree=(2, 1, 1), init="target"),
    dict(method="mcsd", tree=(4, 2), replacement=True),
    dict(method="s2d", draft_length=15, stop=0.1),
    dict(method="s2d", draft_length=3, stop=0),
    dict(method="s2d-tree", tree=Dynamic(3, 4, 10)),
    dict(method="s2d-tree", tree=Dynamic(4, 6, 24)),  # more rows than any pass is compiled for
]


@pytest.fixture(autouse=True)
def compile_when_needed(monkeypatch):
    """Not all sizes at once, as most tests need few."""
    monkeypatch.setattr(static.StaticLlama, "prepare", lambda self: None)


def models(**changes):
    """A target and a draft, each as it is and compiled."""
    target = random_llama(0, **changes)
    draft = random_llama(1, exit_layers=EXITS, thresholds=(0.3, 0.3, 0.0))
    draft.keep_tokens(torch.arange(0, 61, 2))
    return (target, draft), (static_twin(target), static_twin(draft))


def poison(cache, value):
    """Put ``value`` where nothing may come from: behind the filled part."""
    for rows in (cache.keys, cache.values):
        rows[:, :, :, cache.length :] = value


@pytest.fixture
def replayed_on_the_cpu(monkeypatch):
    """The way of a GPU: recorded passes, fixed caches, lengths in buckets; to replay is to run again in the same places."""

    def record(function, inputs):
        output = function(*inputs)
        return lambda: output.copy_(function(*inputs)), output

    monkeypatch.setattr(graphs, "recorded", record)
    monkeypatch.setattr(static, "on_gpu", lambda device: True)


def check_passes(model, compiled, trials, behind):
    """Random histories of passes over chains and trees of 1 to 17 rows, by random layers, beside eager ones."""
    rng = random.Random(0)
    for _ in range(trials):
        start, stop = sorted(rng.sample(range(5), 2))
        caches = [each.new_cache(127, start, stop) for each in (model, compiled)]
        attention = TreeAttention(1, 20, "cpu", torch.float64)
        S = rng.choice((1, 2, 3, 7, 30, 63, 64, 65, 90))
        prompt = torch.randn(1, S, 32, dtype=torch.float64)
        before = [
            each.run_layers(prompt, start, stop, cache=cache)
            for each, cache in zip((model, compiled), caches)
        ]
        assert torch.equal(*before)
        for _ in range(4):
            size = rng.randrange(1, 18)
            if caches[0].length + size > 127:
                break
            parents = random_parents(rng, size) if rng.random() < 0.7 else list(range(-1, size - 1))
            attention.set_tree(ancestor_mask(torch.tensor(parents)))
            n = caches[0].length
            positions, mask = attention.span(n, n, n + size) if rng.random() < 0.8 else (None, None)
            hidden = torch.randn(1, size, 32, dtype=torch.float64)
            poison(caches[1], behind)
            expected, found = (each.run_layers(hidden, start, stop, positions, mask, cache)
                               for each, cache in zip((model, compiled), caches))  # fmt: skip
            torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-11)
            assert caches[0].length == caches[1].length == n + size
            for part in ("keys", "values"):
                old, new = (getattr(cache, part)[:, :, :, : n + size] for cache in caches)
                torch.testing.assert_close(new, old, rtol=1e-11, atol=1e-11)
            kept = sorted(rng.sample(range(size), rng.randrange(size + 1)))
            for cache in caches:
                cache.keep(n, kept)


@torch.inference_mode()
def test_passes_are_the_eager_ones_and_read_nothing_behind_the_context():
    model = random_llama(0)
    check_passes(model, static_twin(model), trials=60, behind=torch.nan)


@torch.inference_mode()
def test_recorded_passes_are_the_eager_ones(replayed_on_the_cpu):
    short = random_llama(0, max_position_embeddings=64)  # less than the shortest bucket
    assert (
        generate(static_twin(short), [5], method="ar", max_new_tokens=63).tokens
        == generate(short, [5], method="ar", max_new_tokens=63).tokens
    )
    model = random_llama(0)
    compiled = static_twin(model)
    check_passes(model, compiled, trials=60, behind=1e9)  # masked, but read: as buckets are
    replays = compiled.recordings.replays
    assert replays and {key[-1] for key in replays} == {128, 256}


@torch.inference_mode()
def test_norms_without_a_floor_and_rows_that_lie_apart():
    """Padding is no zeros, which a norm with eps 0 could not divide; and views are put in order before compiled code reads them."""
    model = random_llama(0, rms_norm_eps=0.0)
    compiled = static_twin(model)
    check_passes(model, compiled, trials=5, behind=torch.nan)
    hidden = torch.randn(4, 3, 32, dtype=torch.float64)[:, 1]
    torch.testing.assert_close(
        compiled.logits(hidden), model.logits(hidden), rtol=1e-11, atol=1e-11
    )
    by_columns = random_llama(0)
    by_columns.lm_head.weight.data = by_columns.lm_head.weight.data.t().contiguous().t()
    expected = by_columns.logits(hidden)
    torch.testing.assert_close(
        static_twin(by_columns).logits(hidden), expected, rtol=1e-11, atol=1e-11
    )


@torch.inference_mode()
def test_heads_are_the_eager_ones():
    for model in (random_llama(0), models()[0][1]):
        compiled = static_twin(model)
        for rows in range(1, ROWS[-1] + 2):
            hidden = torch.randn(rows, 32, dtype=torch.float64)
            torch.testing.assert_close(
                compiled.logits(hidden), model.logits(hidden), rtol=1e-11, atol=1e-11
            )
            torch.testing.assert_close(
                compiled.draft_logits(hidden), model.draft_logits(hidden), rtol=1e-11, atol=1e-11
            )


def check_generations(eager, compiled, setting, lengths):
    for length in lengths:
        for temperature, seed in ((0.0, 0), (0.9, length)):
            options = dict(max_new_tokens=200, temperature=temperature, seed=seed, **setting)
            prompt = [(3 * i) % 61 for i in range(length)]
            expected, found = (
                generate(target, prompt, draft=draft, **options)
                for target, draft in (eager, compiled)
            )
            assert found.tokens == expected.tokens
            for field in (
                "accept_lengths",
                "exit_counts",
                "draft_forwards",
                "draft_levels",
                "accepted",
            ):
                assert getattr(found.stats, field) == getattr(expected.stats, field), field


@pytest.mark.parametrize("setting", SETTINGS)
def test_compiled_generations_are_the_eager_ones(setting):
    """To the end of the context, and with an end token that comes up inside a padded pass; statistics too."""
    check_generations(*models(eos_token_ids=()), setting, (1, 60))
    check_generations(*models(eos_token_ids=(2, 5, 8, 11)), setting, (10, 17))


@pytest.mark.parametrize("setting", SETTINGS)
def test_recorded_generations_are_the_eager_ones(setting, replayed_on_the_cpu):
    check_generations(*models(eos_token_ids=()), setting, (7, 119))


@torch.inference_mode()
def test_what_was_compiled_holds_at_every_length_and_for_every_layer():
    """The compiler's own conditions, which calls do not look at, are true of whatever a pass may bring."""
    config, weights = random_llama(0).config, [random_llama(seed) for seed in (2, 3)]
    new = lambda *shape: torch.randn(shape, dtype=torch.float64)  # noqa: E731
    for rows in ROWS:
        run_block = compiled_block(shape_of(config), rows, torch.float64)
        for length in (*range(rows + 1, 70), 127, 128, 255, 256, 1000, 4097):
            keys, values = (new(1, length, 2, 8).transpose(1, 2) for _ in range(2))
            block = weights[length % 2].model["layers"][length % 4]
            where = torch.arange(length - rows, length)
            assert run_block.guard_check(
                block,
                new(1, rows, 32),
                new(2, rows, 8).unbind(),
                new(rows, length),
                where,
                keys,
                values,
            )


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_are_as_near_the_truth_as_eager_ones(dtype):
    truth = random_llama(0, scale=0.1)
    eager, prompt = random_llama(0, scale=0.1).to(dtype), torch.tensor([[5, 3, 1, 8, 40]])
    for rows in (1, 4):
        tokens, errors = torch.randint(61, (1, rows)), []
        expected = truth(torch.cat((prompt, tokens), dim=1))[0, -rows:]
        for model in (eager, static_twin(eager)):
            cache = model.new_cache(40)
            model(prompt, cache=cache)
            errors.append(
                (model.logits(model.run_layers(model.embed(tokens), cache=cache)[0]) - expected)
                .square()
                .mean()
                .sqrt()
            )
        assert errors[1] <= 1.2 * errors[0]


def test_one_compilation_serves_all_layers_lengths_and_models(nothing_compiled, capfd):
    shape = dict(hidden_size=24, head_dim=6, num_attention_heads=4, num_key_value_heads=4)
    for seed in (0, 1):
        model = static_twin(random_llama(seed, **shape))
        generate(model, [5, 3, 1] * (seed + 1), method="ar", max_new_tokens=60)
    lines = capfd.readouterr().err.splitlines()
    assert [line.rpartition(" ... ")[0] for line in lines] == [
        "compiling a head of 61 tokens, rows: 1", "compiling a block of width 24, rows: 1"]  # fmt: skip


def test_run_compiles_first_and_finds_it_again(tmp_path):
    """In a process of its own each time; the third finds a file that was cut short, and makes that one again."""
    command = [sys.executable, "-c", "from s2d.extras import static; static.ROWS = (1,); import run, sys; sys.exit(run.main())",
               "--target", "7b", "--prompt", "hello", "--max-new-tokens", "12", "--dtype", "float64"]  # fmt: skip
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    said = []
    for options in ([], ["--compile"], ["--compile"], ["--compile"]):
        said.append(
            subprocess.run(
                [*command, *options],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                check=True,
            )
        )
        if len(said) == 3:
            cut = next((tmp_path / "s2d").iterdir())
            cut.write_bytes(cut.read_bytes()[:1000])
    assert len({done.stdout.splitlines()[0] for done in said}) == 1
    assert [done.stderr.count("compiling ") for done in said] == [0, 2, 0, 1]


def test_no_compiler_is_one_line(monkeypatch):
    command = [sys.executable, "run.py", "--target", "7b", "--compile"]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={"CXX": "no-such-compiler", "PATH": "/nowhere"},
    )
    assert (
        done.returncode == 2
        and "C++ compiler" in done.stderr.splitlines()[-1]
        and "Traceback" not in done.stderr
    )


def test_a_compiler_that_fails_is_one_line(tmp_path):
    command = [sys.executable, "run.py", "--target", "7b", "--method", "ar", "--compile"]
    environment = os.environ | {"CXX": "/bin/true", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert (
        done.returncode == 2
        and "could not be compiled" in done.stderr.splitlines()[-1]
        and "Traceback" not in done.stderr
    )


def test_several_processes_do_not_compile(monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert run.main(["--target", "7b", "--compile"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_weights_lie_by_rows_where_they_are_streamed(monkeypatch):
    monkeypatch.setattr(static, "ROWS", (1,))
    model = load_model(WEIGHTS / "mini-7b", dtype="float64", compile=True)
    assert all(p.is_contiguous() for p in model.parameters())
    assert F.linear is torch.nn.functional.linear  # nothing of PyTorch's is replaced
