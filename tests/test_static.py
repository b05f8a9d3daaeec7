"""Static passes write what ordinary ones write: repeated as by a CUDA graph, and compiled."""

import random
from functools import partial

import pytest
import torch
from helpers import (
    DEVICE,
    WEIGHTS,
    raises_line,
    random_llama,
    random_parents,
    random_tokens,
    twin_of,
)
from test_devices import EXITS, WAYS
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from s2d import generate, generate_many, load_model, start
from s2d.mask import positions_and_mask
from s2d.speed import class_for, static
from s2d.speed.compiled import CompiledLlama
from s2d.speed.graphs import GraphedLlama
from s2d.speed.static import StaticLlama
from s2d.tree import GrowingShape

close = partial(torch.testing.assert_close, rtol=1e-11, atol=1e-11)
WAITS = "aten._local_scalar_dense", "aten.nonzero", "aten.is_nonzero", "aten.equal"


class Recorder(TorchDispatchMode):
    """What a CUDA graph holds: operations on fixed memory, which are repeated without Python."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        assert not str(operation).startswith(WAITS), f"{operation} waits for the GPU"
        result = operation(*args, **(kwargs or {}))
        self.calls.append((operation, args, kwargs or {}, result))
        return result

    def replay(self):
        for operation, args, kwargs, result in self.calls:
            again = operation(*args, **kwargs)
            pair = ([x] if isinstance(x, Tensor) else x for x in (result, again))
            for old, new in zip(*pair):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)  # neither a view nor in place


class RecordedLlama(StaticLlama):
    """As GraphedLlama on a GPU. A result is overwritten when the next pass runs."""

    last = torch.zeros(1)

    def run_static(self, inputs):
        assert (inputs.mask == 0).any(dim=1).all()  # some kernels give NaN for a row of nothing
        shape = inputs.mask.shape
        if shape not in inputs.made:
            with Recorder() as recorder:
                inputs.made[shape] = recorder, super().run_static(inputs)
        recorder, hidden = inputs.made[shape]
        self.last.fill_(torch.nan)
        recorder.replay()
        self.last = hidden
        return hidden


def small_shapes(monkeypatch, *sizes):
    monkeypatch.setattr(static, "SIZES", sizes)
    monkeypatch.setattr(static, "COLUMNS", 16)


@pytest.fixture
def twin(monkeypatch):
    """twin(model) -> one with the same weights; its passes are graphs, or recorded on a CPU."""
    small_shapes(monkeypatch, 1, 2, 4, 8, 16)
    kind = GraphedLlama if DEVICE.startswith("cuda") else RecordedLlama
    return lambda model: twin_of(model, kind)


LARGE = dict(method="s2d-tree", tree=GrowingShape(6, 5, 40))  # some passes are not static


@pytest.mark.parametrize("way", [*(WAYS[number] for number in (0, 2, 3, 4, 6, 7, 10, 12)), LARGE])
def test_every_method_writes_the_same_in_the_same_steps(way, twin):
    target, draft = random_llama(0, eos_token_ids=()), random_llama(1, **EXITS)
    twins = twin(target), twin(draft)
    for temperature, prompt in ((0.0, [5, 3, 1]), (1.0, random_tokens(4, 30))):  # in used memory
        options = dict(max_new_tokens=24, temperature=temperature, seed=3, **way)
        one = generate(target, prompt, draft, **options)
        other = generate(twins[0], prompt, twins[1], **options)
        assert one.tokens == other.tokens
        assert one.stats.accept_lengths == other.stats.accept_lengths
        assert one.stats.exit_counts == other.stats.exit_counts
    assert all(segment.inputs for each in twins for segment in each.segments.values())


@torch.inference_mode()
def test_passes_of_any_segment_after_any_past(twin):
    """What lies after the context does not matter, as long as it is not NaN."""
    rng, model = random.Random(0), random_llama(0)
    other, new = twin(model), partial(torch.randn, dtype=torch.float64, device=model.device)
    for _ in range(20):
        first, end = sorted(rng.sample(range(5), 2))
        pair = [(each, each.new_cache(60, first, end)) for each in (model, other)]
        prompt = new(1, rng.choice((1, 2, 7, 30)), 32)
        close(*(each.run_layers(prompt, first, end, cache=cache) for each, cache in pair))
        found = []
        for _ in range(4):
            n, size = pair[0][1].length, rng.randrange(1, 7)
            pair[1][1].keys[..., n:, :] = pair[1][1].values[..., n:, :] = 1e9
            parents = random_parents(rng, size)
            positions, mask = positions_and_mask(n, n, parents, model.device, model.dtype)
            read = new(1, size, 32), first, end, positions, mask
            found.append([each.run_layers(*read, cache) for each, cache in pair])
            path = sorted(rng.sample(range(size), rng.randrange(size + 1)))
            for _, cache in pair:
                cache.keep(n, path)
            close(*(cache.keys[..., : n + len(path), :] for _, cache in pair))
        for each in found:  # now: what a pass returned stays what it was
            close(*each)


@torch.inference_mode()
def test_padding_has_room_after_the_last_entry(twin):
    model = random_llama(0)
    place = dict(device=model.device)
    tokens = torch.tensor([random_tokens(0, 16)], **place)
    mask = torch.full((3, 16), -torch.inf, dtype=model.dtype, **place).triu(14)
    found = []
    for each in (model, twin(model)):
        cache = each.new_cache(16)
        each(tokens[:, :13], cache=cache)
        found.append(each(tokens[:, 13:], mask=mask, cache=cache))  # 3 rows, or 4
    close(*found)


def test_longer_and_longer_texts_seldom_need_new_memory(twin):
    """And a cache that leaves takes along what it holds, and may grow."""
    model = twin(random_llama(0, max_position_embeddings=600))
    segments = []
    for capacity in range(100, 600, 20):
        cache = model.new_cache(capacity)
        segments.append(cache.segment)
    assert len(set(map(id, segments))) <= 4
    assert segments[-1].capacity < 600 + 2 * static.SIZES[-1] + static.COLUMNS
    tokens = torch.tensor([random_tokens(0, 9)], device=model.device)
    model(tokens, cache=cache)
    held = cache.keys[..., :9, :].clone()
    model.new_cache(50)
    assert cache.segment is None and torch.equal(cache.keys[..., :9, :], held)
    cache.reserve(500)
    assert torch.equal(cache.keys[..., :9, :], held)


def test_several_generations_at_once(twin):
    """The newest has the static memory; the others go on in memory of their own."""
    target, draft = random_llama(0, eos_token_ids=()), random_llama(1, **EXITS)
    twins = twin(target), twin(draft)
    prompts = [[5, 3, 1], [2], [7, 7]]
    options = dict(method="s2d-tree", max_new_tokens=30)
    expected = [generate(target, prompt, draft, **options).tokens for prompt in prompts]
    found = generate_many(twins[0], prompts, twins[1], batch=2, **options)
    assert [each.tokens for each in found] == expected
    running = [start(twins[0], prompt, twins[1], **options) for prompt in prompts]
    while not all(decoder.ended for decoder in running):
        for decoder in running:
            next(iter(decoder), None)
    assert [decoder.tokens for decoder in running] == expected


def test_nan_in_a_generation_does_not_reach_the_next(twin):
    target = random_llama(0, eos_token_ids=())
    other = twin(target)
    cache = other.new_cache(30)
    cache.keys.fill_(torch.nan)
    cache.values.fill_(torch.nan)
    del cache
    options = dict(method="ar", max_new_tokens=20)
    expected = generate(target, [5, 3, 1], **options).tokens
    assert generate(other, [5, 3, 1], **options).tokens == expected


def test_several_positions_after_a_context_need_a_mask_as_in_any_llama(twin):
    model = twin(random_llama(0))
    cache = model.new_cache(20)
    tokens = torch.tensor([random_tokens(0, 4)], device=model.device)
    model(tokens, cache=cache)
    with pytest.raises(ValueError, match="4 positions after a cache of 4 need a mask"):
        model(tokens, cache=cache)


COMPILED = [(1, dict(method="ar")), (4, dict(exits=[2, 4], tree=GrowingShape(2, 2, 3)))]


@pytest.mark.parametrize(("rows", "way"), COMPILED)
def test_compiled_generations_are_the_ordinary_ones(rows, way, compiler, monkeypatch):
    """By passes that are compiled and padded, over more and more columns."""
    small_shapes(monkeypatch, rows)
    target = random_llama(0, device="cpu", eos_token_ids=())
    draft = random_llama(1, device="cpu", **EXITS)
    twins = twin_of(target, CompiledLlama), twin_of(draft, CompiledLlama)
    for temperature in (0.0, 1.0):
        options = dict(max_new_tokens=60, temperature=temperature, seed=3, **way)
        one = generate(target, [5, 3], draft, **options)
        other = generate(twins[0], [5, 3], twins[1], **options)
        assert one.tokens == other.tokens
        assert one.stats.accept_lengths == other.stats.accept_lengths
    segment = twins[0].segments[0, 4]
    assert len(segment.inputs) > 1 and len(segment.made) == 1  # one code for any columns


def test_what_compile_makes_is_chosen_by_device(compiler):
    model = load_model(WEIGHTS / "mini-draft", dtype="float32", compile=True)
    assert type(model) is CompiledLlama and model.lm_head.weight.t().is_contiguous()
    assert class_for(torch.device("cuda", 1)) is GraphedLlama
    line = "--compile is for a CPU or a CUDA GPU, not for mps:0"
    raises_line(class_for, ValueError, line, torch.device("mps", 0))


def test_a_pytorch_that_is_too_old_to_compile_is_one_line(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, fullgraph, dynamic, options: function)
    load = partial(load_model, WEIGHTS / "mini-draft", compile=True)
    raises_line(load, ValueError, "--compile needs PyTorch 2.13 or newer; this is 2")


def test_a_compiler_that_is_missing_is_one_line(compiler, tmp_path, monkeypatch):
    from torch._inductor import config

    small_shapes(monkeypatch, 1)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    model = twin_of(random_llama(0, device="cpu"), CompiledLlama)
    with config.patch({"cpp.cxx": ("no-such-compiler",)}):
        write = partial(generate, model, [5, 3], method="ar")
        raises_line(write, ValueError, "--compile failed .it needs a C\\+\\+ compiler.*: ")
