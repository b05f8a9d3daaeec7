"""Passes of static shape: the same numbers, tokens and statistics as without, at any length."""

import os
import random
import subprocess
import sys
from dataclasses import replace
from functools import partial, partialmethod
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from helpers import ROOT, TINY, WEIGHTS, limit_to, raises_line, random_llama, random_parents
from s2d.extras.compiled import compiled_block, compiled_head, shape_of, way_of
from s2d.extras.draft_head import draft_head
from s2d.extras.products import quicken
from s2d.extras.static import ROWS, StaticLlama
from s2d.user_cache import private_folder

from s2d import generate, load_model
from s2d.extras import compiled as compiling
from s2d.extras import graphs, static
from s2d.tree import Dynamic, TreeAttention

FIELDS = ("accept_lengths", "exit_counts", "draft_forwards", "draft_levels", "accepted")
close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)
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
    monkeypatch.setattr(StaticLlama, "prepare", lambda self: None)


def compile_all():
    """What these tests need, the last first: this file as a program, which conftest.py starts."""
    torch.set_num_threads(1)
    half, some, plain = (torch.bfloat16, torch.float32), (16, 4, 1), shape_of(TINY)
    wanted = [(plain, rows, dtype, (61,)) for dtype in half for rows in some]
    wanted += [(plain, rows, torch.float64, (61, 31)) for rows in reversed(ROWS)]
    wanted += [(replace(plain, rms_norm_eps=0.0), 4, torch.float64, (61,))]
    for shape, rows, dtype, vocabularies in wanted:
        quicken(tiny := StaticLlama(TINY).to(dtype))
        way = tiny.way(rows)
        compiled_block(shape, rows, dtype, way)
        for tokens in vocabularies:
            compiled_head(shape, tokens, rows, dtype, way)


def static_twin(model):
    """The StaticLlama with the weights of ``model``."""
    twin = StaticLlama(model.config).to(model.dtype).eval().requires_grad_(False)
    twin.load_state_dict(model.state_dict())
    if head := draft_head(model):
        limit_to(twin, head.tokens)
    if not static.on_gpu(twin.device):
        quicken(twin)
    return twin


def models(**changes):
    """A target and a draft, each as it is and compiled."""
    target = random_llama(0, **changes)
    draft = random_llama(1, exit_layers=(1, 2, 4), thresholds=(0.3, 0.3, 0.0))
    limit_to(draft, torch.arange(0, 61, 2))
    return (target, draft), (static_twin(target), static_twin(draft))


@pytest.fixture
def replayed_on_the_cpu(monkeypatch):
    """As on a GPU: recorded passes, fixed caches, lengths in buckets; a replay is another run."""

    def record(function, inputs):
        output = function(*inputs)
        return lambda: output.copy_(function(*inputs)), output

    monkeypatch.setattr(graphs, "recorded", record)
    monkeypatch.setattr(static, "on_gpu", lambda device: True)


def check_passes(model, compiled, trials, behind):
    """Random passes over chains and trees of 1 to 17 rows, by random layers, beside eager ones."""
    rng, new = random.Random(0), partial(torch.randn, dtype=torch.float64)
    for _ in range(trials):
        first, end = sorted(rng.sample(range(5), 2))
        caches = [each.new_cache(127, first, end) for each in (model, compiled)]
        both = [
            partial(each.run_layers, first=first, end=end, cache=cache)
            for each, cache in zip((model, compiled), caches)
        ]
        prompt = new(1, rng.choice((1, 2, 3, 7, 30, 63, 64, 65, 90)), 32)
        close(*(run(prompt) for run in both))
        for _ in range(4):
            n, size = caches[0].length, rng.randrange(1, 18)
            if n + size > 127:
                break
            parents = random_parents(rng, size) if rng.random() < 0.7 else list(range(-1, size - 1))
            attention = TreeAttention(torch.tensor(parents), torch.float64)
            pair = attention.span(n, n, n + size) if rng.random() < 0.8 else (None, None)
            hidden, (positions, mask) = new(1, size, 32), pair
            for rows in (caches[1].keys, caches[1].values):  # nothing may come from there
                rows[:, :, :, n:] = behind
            expected, found = (run(hidden, positions=positions, mask=mask) for run in both)
            close(found, expected)
            close(compiled.logits(found[0]), model.logits(expected[0]))
            heads = draft_head(compiled), draft_head(model)
            close(compiled.logits(found[0], heads[0]), model.logits(expected[0], heads[1]))
            assert caches[0].length == caches[1].length == n + size
            for part in ("keys", "values"):
                old, held = (getattr(cache, part)[:, :, :, : n + size] for cache in caches)
                close(held, old)
            kept = sorted(rng.sample(range(size), rng.randrange(size + 1)))
            for cache in caches:
                cache.keep(n, kept)


@torch.inference_mode()
def test_passes_are_the_eager_ones_and_read_nothing_behind_the_context(compiler):
    model = random_llama(0)
    limit_to(model, torch.arange(0, 61, 2))
    check_passes(model, static_twin(model), trials=60, behind=torch.nan)


@torch.inference_mode()
def test_recorded_passes_are_the_eager_ones(replayed_on_the_cpu):
    short = random_llama(0, max_position_embeddings=64)  # less than the shortest bucket
    options = dict(method="ar", max_new_tokens=63)
    texts = [generate(each, [5], **options).tokens for each in (short, static_twin(short))]
    assert texts[0] == texts[1]
    model = random_llama(0)
    compiled = static_twin(model)
    check_passes(model, compiled, trials=60, behind=1e9)  # masked, but read: as buckets are
    replays = compiled.recordings.replays
    assert replays and {key[-1] for key in replays} == {128, 256}


@torch.inference_mode()
def test_norms_without_a_floor_and_rows_that_lie_apart(compiler, monkeypatch):
    """Padding is no zeros: a norm with eps 0 could not divide them. Views are made contiguous."""
    monkeypatch.setattr(static, "ROWS", (4,))  # one compilation: each pass of less is padded
    model = random_llama(0, rms_norm_eps=0.0)
    compiled = static_twin(model)
    check_passes(model, compiled, trials=20, behind=torch.nan)
    hidden = torch.randn(4, 3, 32, dtype=torch.float64)[:, 1]
    close(compiled.logits(hidden), model.logits(hidden))


def test_changed_weights_are_run_plainly(compiler):
    other, model = random_llama(1), static_twin(random_llama(0))
    options = dict(tokens=[5, 3, 1], method="ar", max_new_tokens=20)
    first = generate(model, **options).tokens
    model.load_state_dict(other.state_dict(), assign=True)
    assert first != generate(model, **options).tokens == generate(other, **options).tokens


def check_generations(eager, compiled, setting, lengths):
    for length, temperature in zip(lengths, (0.0, 0.9)):
        options = dict(max_new_tokens=200, temperature=temperature, seed=length, **setting)
        prompt = [(3 * i) % 61 for i in range(length)]
        found = []
        for target, draft in (eager, compiled):
            output = generate(target, prompt, draft, **options)
            found.append([output.tokens, *(getattr(output.stats, name) for name in FIELDS)])
        assert found[0] == found[1]


@pytest.mark.parametrize("setting", SETTINGS)
def test_compiled_generations_are_the_eager_ones(setting, compiler):
    """To the end of the context, and with an end token inside a padded pass; statistics too."""
    check_generations(*models(eos_token_ids=()), setting, (1, 60))
    check_generations(*models(eos_token_ids=(2, 5, 8, 11)), setting, (10, 17))


@pytest.mark.parametrize("setting", SETTINGS)
def test_recorded_generations_are_the_eager_ones(setting, replayed_on_the_cpu):
    check_generations(*models(eos_token_ids=()), setting, (7, 119))


@pytest.mark.parametrize("rows", ROWS)
def test_what_was_compiled_holds_at_every_length_and_for_every_layer(rows, compiler):
    """The compiler's own conditions, which calls do not check, in inference mode or out of it.

    Lengths: the shortest, those around powers of two and around the example's own, and long ones.
    """
    new = partial(torch.randn, dtype=torch.float64)
    around = (17, 32, 64, 128, 256, 1024, 8 * rows + 5)
    lengths = {rows + 1, rows + 2, 4097, *(each + i for each in around for i in (-1, 0, 1))}
    held = []
    for inference in (True, False):
        compiled_block.cache_clear()  # what is read from disk takes on the mode it is read in
        with torch.inference_mode(inference):
            models, each = [random_llama(seed) for seed in (2, 3)], []
            for model in models:
                quicken(model)
            way = way_of(rows, "by_linear")
            run_block = compiled_block(shape_of(models[0].config), rows, torch.float64, way)
            for number, length in enumerate(sorted(n for n in lengths if n > rows)):
                keys, values = (new(1, length, 2, 8).transpose(1, 2) for _ in range(2))
                block = models[number % 2].model["layers"][number % 4]
                hidden, rope, mask = new(1, rows, 32), new(2, rows, 8).unbind(), new(rows, length)
                passed = hidden, rope, mask, torch.arange(length - rows, length), keys, values
                each.append(run_block.guard_check(way, block, *passed))
            held.append(all(each))
    assert any(held)


@pytest.mark.parametrize("way", ["sums", "from_left", "by_linear"])
def test_products_are_the_eager_ones_whichever_way_they_are_compiled(way):
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        weight = torch.randint(-3, 4, (24, 32)).to(dtype)  # no product of these is rounded
        for rows in range(1, 18):
            x = torch.randint(-3, 4, (1, rows, 32)).to(dtype)
            expected = torch.nn.functional.linear(x.double(), weight.double())
            assert torch.equal(compiling.product(x, weight, way).double(), expected)
            assert torch.equal(compiling.product(x[0], weight, way).double(), expected[0])


@torch.inference_mode()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_passes_are_as_near_the_truth_as_eager_ones(dtype, compiler):
    truth = random_llama(0, scale=0.1)
    eager, prompt = random_llama(0, scale=0.1).to(dtype), torch.tensor([[5, 3, 1, 8, 40]])
    both, rng = (eager, static_twin(eager)), torch.Generator().manual_seed(0)
    for rows in (1, 4, 16):
        errors = torch.zeros(2, dtype=torch.float64)  # squared, of many passes
        for _ in range(30):
            tokens = torch.randint(61, (1, rows), generator=rng)
            expected = truth(torch.cat((prompt, tokens), dim=1))[0, -rows:]
            for i, model in enumerate(both):
                cache = model.new_cache(40)
                model(prompt, cache=cache)
                logits = model.logits(model.run_layers(model.embed(tokens), cache=cache)[0])
                errors[i] += (logits - expected).square().mean()
        assert errors[1] <= 1.2**2 * errors[0]


def test_one_compilation_serves_all_layers_lengths_and_models(compiler, nothing_compiled, capfd):
    shape = dict(hidden_size=24, head_dim=6, num_attention_heads=4, num_key_value_heads=4)
    for seed in (0, 1):
        model = static_twin(random_llama(seed, **shape))
        generate(model, [5, 3, 1] * (seed + 1), method="ar", max_new_tokens=60)
    lines = capfd.readouterr().err.splitlines()
    head, block = "a head of 61 tokens", "a block of width 24"
    expected = [f"compiling {what}, rows: 1" for what in (head, block)]
    assert [line.rpartition(" ... ")[0] for line in lines] == expected


def in_its_own_process(arguments, before="", **environment):
    """What run.py says and does in a process of its own."""
    code = f"{before}\nimport run, sys; sys.exit(run.main())"
    command = [sys.executable, "-c", code, "--target", "7b", "--method", "ar", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_run_compiles_first_and_finds_it_again(compiler, tmp_path):
    """The third finds a file that was cut short, and makes that one again. Nothing is in TMPDIR."""
    cache, temporary = tmp_path / "cache", tmp_path / "temporary"
    temporary.mkdir()
    where = os.environ | {"XDG_CACHE_HOME": str(cache), "TMPDIR": str(temporary)}
    one_row = "from s2d.extras import static; static.ROWS = (1,)"
    arguments = "--prompt hello --max-new-tokens 12 --dtype float64".split()
    said, libraries = [], []
    for options in ([], ["--compile"], ["--compile"], ["--compile"]):
        said.append(in_its_own_process([*arguments, *options], one_row, **where))
        assert said[-1].returncode == 0
        libraries.append(sorted(cache.rglob("*.so")))
        if len(said) == 3:
            cut = next(file for file in cache.glob("s2d/compiled/*/*") if file.is_file())
            cut.write_bytes(cut.read_bytes()[:1000])
    assert len({done.stdout.splitlines()[0] for done in said}) == 1
    assert [done.stderr.count("compiling ") for done in said] == [0, 2, 0, 1]
    assert libraries[1] and libraries[2] == libraries[1]  # none is made in silence
    assert not [path for path in temporary.rglob("*") if path.is_file()]
    assert not [path for path in cache.rglob("s2d/**/*") if path.stat().st_mode & 0o077]


MISSING = {"CXX": "no-such-compiler", "PATH": "/nowhere"}, "C++ compiler"
FAILING = os.environ | {"CXX": "/bin/true"}, "could not be compiled"


@pytest.mark.parametrize(("environment", "message"), [MISSING, FAILING], ids=["none", "fails"])
def test_a_compiler_that_is_missing_or_fails_is_one_line(environment, message, tmp_path):
    done = in_its_own_process(["--compile"], **environment | {"XDG_CACHE_HOME": str(tmp_path)})
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert message in done.stderr.splitlines()[-1]


def test_the_private_folder_is_the_users_alone(tmp_path, monkeypatch):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    names = "compiled", "here"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "link/cache"))
    folder = private_folder(*names)
    assert folder == tmp_path / "real/cache/s2d/compiled/here"
    file, gone = folder / "file", folder / "gone"
    for path, mode in ((file, 0o600), (gone, 0o666)):
        path.touch(mode=mode)
    parts, real = {file: 0o600} | dict.fromkeys((folder, *folder.parents[:2]), 0o700), Path.lstat

    def lstat(self, foreign=None):
        if self == gone:  # since it was listed
            raise FileNotFoundError
        found = real(self)
        return SimpleNamespace(st_uid=found.st_uid + (self == foreign), st_mode=found.st_mode)

    monkeypatch.setattr(Path, "lstat", lstat)
    for path, mode in parts.items():
        assert path.stat().st_mode & 0o777 == mode
        for others in (0o020, 0o002, *[0o1002] * (path in (file, folder))):
            path.chmod(0o700 | others)
            raises_line(private_folder, ValueError, f"{path} can be written by", *names)
        path.chmod(0o700)
    for mode in (0o1777, 0o755):  # above it, a folder may be as /tmp is
        tmp_path.chmod(mode)
        assert private_folder(*names) == folder
    tmp_path.chmod(0o777)
    raises_line(private_folder, ValueError, f"{tmp_path} can be written by", *names)
    tmp_path.chmod(0o755)
    for path in (*parts, folder.parents[2], tmp_path):
        monkeypatch.setattr(Path, "lstat", partialmethod(lstat, foreign=path))
        raises_line(private_folder, ValueError, f"{path} belongs to another user", *names)
    monkeypatch.setattr(Path, "lstat", lstat)
    (folder / "own").symlink_to(file)
    raises_line(private_folder, ValueError, "own can be written by", *names)


def test_nothing_is_read_from_a_folder_that_others_may_write(nothing_compiled, tmp_path):
    (tmp_path / "s2d/compiled").mkdir(parents=True, mode=0o700)
    (tmp_path / "s2d/compiled").chmod(0o777)
    asked = shape_of(random_llama(0).config), 1, torch.float64, "sums"
    raises_line(compiled_block, ValueError, "can be written by other users", *asked)


def test_what_another_processor_compiled_is_not_found(nothing_compiled, monkeypatch):
    folder = Mock(side_effect=ValueError("no folder"))
    monkeypatch.setattr(compiling, "private_folder", folder)
    wanted = shape_of(random_llama(0).config), 1, torch.float64, "sums"
    cpuinfo = "processor : 0\nmodel name : A\ncpu MHz : 1\nflags : sse avx\n\nprocessor : 1\n"
    others = cpuinfo.replace("avx", "avx2"), cpuinfo.replace(": A", ": B")
    for text in (cpuinfo, cpuinfo.replace("MHz : 1", "MHz : 2"), *others):
        monkeypatch.setattr(Path, "read_text", Mock(return_value=text))
        raises_line(compiled_block, ValueError, "no folder", *wanted)
    asked = [call.args for call in folder.call_args_list]
    assert asked[0] == asked[1] and len({*asked}) == 3


def test_weights_lie_by_rows_where_they_are_streamed():
    model = load_model(WEIGHTS / "mini-7b", dtype="float64", compile=True)
    assert all(p.is_contiguous() for p in model.parameters())


if __name__ == "__main__":
    compile_all()
