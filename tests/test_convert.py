"""Pickled checkpoints become folders that load, or nothing; ``check`` says why one does not."""

import json
import random

import pytest
import torch
from helpers import LLAMA_2, change_json, peak_growth, program, random_llama, refuses, run_and_kill
from safetensors.torch import load_file
from theirs import assert_greedy, load_transformers
from vocabularies import LLAMAS_OWN

from s2d import Tokenizer, generate, load_model
from s2d.files import stage_of
from s2d.weights import get as getting
from s2d.weights import save_model, split
from s2d.weights.__main__ import convert, main

SHAPE = {
    **{"vocab_size": 1024, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 4},
}


def write_vicuna(folder, tokenizer, max_shard_bytes=100_000, **changes):
    """A sharded checkpoint in Vicuna's layout with random weights; returns its shards' names."""
    folder.mkdir()
    shape = SHAPE | changes
    model = random_llama(5, scale=0.15, head_dim=shape["hidden_size"] // 4, **shape)
    tensors = {name: parameter.data.half() for name, parameter in model.named_parameters()}
    shards, weight_map = split(tensors, max_shard_bytes), {}
    for number, shard in enumerate(shards, 1):
        file = f"pytorch_model-{number:05d}-of-{len(shards):05d}.bin"
        tables = {f"model.layers.{number - 1}.self_attn.rotary_emb.inv_freq": torch.ones(8)}
        torch.save(shard | tables, folder / file)
        weight_map |= dict.fromkeys(shard, file)
    index = json.dumps({"metadata": {}, "weight_map": weight_map})
    (folder / "pytorch_model.bin.index.json").write_text(index)
    (folder / "config.json").write_text(json.dumps(LLAMA_2 | shape))
    (folder / "tokenizer.model").write_bytes(tokenizer.model.pieces.serialized_model_proto())
    return sorted(set(weight_map.values()))


@pytest.mark.parametrize("own", [False, True])
def test_a_converted_checkpoint_generates_what_transformers_does(tmp_path, tokenizer, own, capsys):
    """Alone and with a draft; with the miniatures' vocabulary and with Llama's own."""
    if own and LLAMAS_OWN.is_file():
        tokenizer = Tokenizer(LLAMAS_OWN)
    size = tokenizer.vocab_size
    assert len(write_vicuna(tmp_path / "hub", tokenizer, vocab_size=size)) > 3
    assert program(main, "convert", tmp_path / "hub", tmp_path / "v") == 0
    assert program(main, "check", tmp_path / "v") == 0
    assert program(main, "convert", "--replace", tmp_path / "hub", tmp_path / "v") == 0
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 3 and {*said} == {said[0]}
    refuses(main, capsys, "v is there already", "convert", tmp_path / "hub", tmp_path / "v")
    assert "will load: 3 layers of width 64" in said[0]
    assert f"of float16, vocabulary {size}, context 4096" in said[0]
    prompt = tokenizer.encode_chat(["Where is Königsberg?", "In the east.", "Say it again!"])
    target = load_model(tmp_path / "v", dtype="float64")
    draft = load_model(tmp_path / "v", dtype="float64", num_layers=2)
    alone = generate(target, prompt, method="ar", max_new_tokens=40).tokens
    assert_greedy(load_transformers(tmp_path / "hub", torch.float64), prompt, alone, 40)
    for method in ("s2d", "s2d-tree"):
        output = generate(target, prompt, draft, method, exits=(1, 2), max_new_tokens=40)
        assert output.tokens == alone


@pytest.mark.parametrize("shared", [False, True])
def test_dtype_and_a_single_file(tmp_path, tokenizer, shared):
    """Tensors may share their memory in a pickle: safetensors refuse it, so one becomes a copy."""
    [shard] = write_vicuna(tmp_path / "hub", tokenizer, 10**9)
    state = torch.load(tmp_path / "hub" / shard)
    if shared:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    torch.save(state, tmp_path / "hub" / shard)
    how = ["--dtype", "bfloat16"][: 0 if shared else 2]  # a conversion would be a copy
    assert program(main, "convert", tmp_path / "hub", tmp_path / "v", *how) == 0
    written, dtype = load_file(tmp_path / "v/model.safetensors"), how[-1] if how else "float16"
    for name, tensor in written.items():
        assert torch.equal(tensor, state[name].to(getattr(torch, dtype)))
    assert json.loads((tmp_path / "v/config.json").read_text())["torch_dtype"] == dtype


@pytest.mark.parametrize("sizes", [100_000, 10**9])
def test_an_lm_head_that_is_tied_but_not_the_embedding(tmp_path, tokenizer, capsys, sizes):
    shards = write_vicuna(tmp_path / "hub", tokenizer, sizes, tie_word_embeddings=True)
    last = tmp_path / "hub" / shards[-1]
    state, first = torch.load(last), torch.load(tmp_path / "hub" / shards[0])
    head = first["model.embed_tokens.weight"].clone()
    torch.save(state | {"lm_head.weight": head}, last)
    assert program(main, "convert", tmp_path / "hub", tmp_path / "v") == 0
    for other in (head + 1, head[1:]):
        torch.save(state | {"lm_head.weight": other}, last)
        refuses(main, capsys, "lm_head.weight", "convert", tmp_path / "hub", tmp_path / "w")
        assert not (tmp_path / "w").exists()


def test_nothing_is_downloaded_to_a_folder_that_is_taken(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(getting, "WEIGHTS", tmp_path)
    monkeypatch.setattr(getting, "download", None)
    (tmp_path / "smollm2-135m").mkdir()
    refuses(main, capsys, "is there, and no model; remove it first", "get", "smollm2-135m")


def test_what_cannot_be_converted(tmp_path, tokenizer, capsys):
    hub = tmp_path / "hub"
    shards = write_vicuna(hub, tokenizer)

    def refused(message, destination="v"):
        refuses(main, capsys, message, "convert", hub, tmp_path / destination)
        assert not (tmp_path / "v").exists()

    class Anything:
        def __reduce__(self):
            return print, ("this must not run",)

    whole, state = (hub / shards[1]).read_bytes(), torch.load(hub / shards[1])
    name = next(name for name in state if name.endswith("_proj.weight"))
    for changes, message in (
        ({name: state[name].to(torch.int8)}, f"{name} is of dtype torch.int8; quantised weights"),
        ({f"{name}_scale": torch.ones(64)}, f"has the tensor '{name}_scale', which is none of"),
        ({"step": 5}, "is damaged or holds more than tensors"),
        (
            {"lm_head.weight": Anything()},
            "more than tensors (only tensors are read, as a pickle can run any code)\n",
        ),
    ):
        torch.save(state | changes, hub / shards[1])
        refused(message)
    for damaged in (whole[: len(whole) // 2], b"", b"\xff" * 2000):
        (hub / shards[1]).write_bytes(damaged)
        refused("is damaged or holds more than tensors")
    (hub / shards[1]).unlink()
    refused("tensors are missing")
    (hub / shards[1]).write_bytes(whole)
    change_json(hub / "config.json", intermediate_size=160)
    refused("config.json asks for")
    refused("hub would replace", destination="hub")
    for file in hub.glob("pytorch_model*"):
        file.unlink()
    refused("has no pytorch_model*.bin")


def test_check_names_what_is_wrong(tmp_path, tokenizer, capsys):
    write_vicuna(tmp_path / "hub", tokenizer)
    folder, few = tmp_path / "v", tmp_path / "few"
    save_model(random_llama(1, vocab_size=1024), folder, tmp_path / "hub", max_shard_bytes=50_000)
    refuses(main, capsys, "with python -m s2d.weights convert", "check", tmp_path / "hub")
    shard = sorted(folder.glob("model-*"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    refuses(main, capsys, "is damaged", "check", folder)
    shard.write_bytes(whole)
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.2}')
    assert program(main, "check", folder) == 0
    assert "sets repetition_penalty 1.2, which transformers" in capsys.readouterr().err
    save_model(random_llama(1), few, tmp_path / "hub")
    message = "the tokenizer knows 1024 tokens, config.json has vocab_size 61"
    refuses(main, capsys, message, "check", few)
    (folder / "tokenizer.model").unlink()
    refuses(main, capsys, "no tokenizer at", "check", folder)


def test_conversion_holds_few_shards_at_a_time(tmp_path, tokenizer):
    """One shard, and the bytes it is written from, whatever the size of the checkpoint."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2048}
    shards = write_vicuna(tmp_path / "hub", tokenizer, 10 * 2**20, **sizes)
    megabytes = sum((tmp_path / "hub" / shard).stat().st_size for shard in shards) / 2**20
    write_vicuna(tmp_path / "small", tokenizer)
    prepare = "from pathlib import Path; from s2d.weights.__main__ import convert"
    prepare += "; paths = map(Path, sys.argv[1:])"
    run = "convert(next(paths), next(paths), None)"  # the first one also imports what all need
    folders = (tmp_path / folder for folder in ("small", "small-v", "hub", "hub-v"))
    grown = peak_growth(f"{prepare}; {run}", run, *folders)
    assert megabytes > 60
    assert 5 < grown < 30


def test_a_killed_conversion_leaves_nothing_that_loads(tmp_path, tokenizer):
    write_vicuna(tmp_path / "hub", tokenizer, 200_000, hidden_size=256, intermediate_size=700)
    rng, target = random.Random(0), tmp_path / "v"

    def run(seconds):
        return run_and_kill(seconds, convert, tmp_path / "hub", target, None)

    run(60)
    target.rename(tmp_path / "whole")
    needed, killed = run(60), 0
    for number in range(40):
        if killed == 4:
            break
        if target.is_dir():
            assert program(main, "check", target) == 0
            target.rename(tmp_path / f"done-{number}")
        lasted = run(rng.uniform(0, needed))
        if target.is_dir():
            needed = min(needed, lasted)
        else:
            killed += 1
            try:
                load_model(stage_of(target))
            except (FileNotFoundError, ValueError):
                continue
            # The kill came between the last file and the renaming: what loads is whole.
            files = {path.name for path in (tmp_path / "whole").glob("[!.]*")}
            assert files <= {path.name for path in stage_of(target).iterdir()}
    assert killed == 4
    if not target.is_dir():
        convert(tmp_path / "hub", target, None)
    for file in (tmp_path / "whole").iterdir():
        assert (target / file.name).read_bytes() == file.read_bytes()
