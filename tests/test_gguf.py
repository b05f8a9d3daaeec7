"""GGUF files, written here from known Llamas by the package gguf, as transformers reads them."""

import json
import random
from collections import ChainMap
from functools import partial

import gguf
import numpy as np
import pytest
import torch
from helpers import WEIGHTS, program, random_llama, refuses
from safetensors.torch import load_file
from sentencepiece import SentencePieceProcessor
from theirs import load_transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
from vocabularies import PROMPT, assert_agree, messages

from s2d import Tokenizer, load_model
from s2d.model import rope_frequencies
from s2d.text.chat import chat_template
from s2d.weights.__main__ import main
from s2d.weights.gguf import GGUFFile

TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q6_K"]
TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|a|>{% endif %}"
)
LLAMA3 = {"rope_factor": 8.0, "rope_llama3": (1.0, 4.0, 8192)}


def rows_as_llama_cpp_has_them(array, heads):
    """Its rotary embedding turns neighbouring dimensions, Hugging Face i and i + D/2."""
    return array.reshape(heads, 2, len(array) // heads // 2, -1).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, model, kind="F32", arch="llama", tokenizer=None, rope=None, changes=()):
    """A file of ``model`` with matrices of type ``kind``, as llama.cpp's converter writes it."""
    writer, config = gguf.GGUFWriter(path, arch), model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_rope_dimension_count(config.head_dim)
    (tokenizer or byte_level)(writer, config.vocab_size)
    if config.rope_factor != 1.0 and not config.rope_llama3:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_factor)
    if rope is not None:
        writer.add_tensor("rope_freqs.weight", rope)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        array = parameter.float().numpy()
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            array = rows_as_llama_cpp_has_them(array, heads)
        type_ = gguf.GGMLQuantizationType[kind if array.ndim == 2 else "F32"]
        name = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(name, quantised(array, type_), raw_dtype=type_)
    for change in changes:
        change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantised(array, type_):
    """As the package does it; of the types that it only reads, bytes that a file might hold."""
    if not type_.name.endswith("_K"):
        return gguf.quants.quantize(array, type_)
    shape = gguf.quants.quant_shape_to_byte_shape(array.shape, type_)
    return np.random.default_rng(0).integers(0, 60, shape, dtype=np.uint8)  # no infinite scale


def byte_level(writer, size, pre="smollm", flag=True):
    """A small byte-level vocabulary, of bytes and merges, with three special tokens in front."""
    alphabet = [*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 324)]
    merges = [("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("i", "n"), ("Ġ", "Ġ"), ("1", "2")]
    tokens = ["<|end|>", "<|user|>", "<|assistant|>", *map(chr, alphabet), *map("".join, merges)]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * (len(tokens) - 3)
    tokens += [f"<unused{n}>" for n in range(size - len(tokens))]
    types += [gguf.TokenType.UNUSED] * (size - len(types))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    if flag:
        writer.add_add_bos_token(pre != "smollm")
    writer.add_chat_template(TEMPLATE)


def sentencepiece(writer, size, names=(), bos=True):
    pieces = SentencePieceProcessor(model_file=str(WEIGHTS / "mini-7b/tokenizer.model"))
    assert size == pieces.vocab_size()
    kinds = [6 if pieces.is_byte(i) else 1 for i in range(size)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([*names, *map(pieces.id_to_piece, range(len(names), size))])
    writer.add_token_scores([pieces.get_score(i) for i in range(size)])
    writer.add_token_types([2, 3, 3, *kinds[3:]])  # unknown, control, control
    if bos:
        writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)


def llama(seed=0, **changes):
    sizes = {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    return random_llama(seed, **sizes | changes).float()


def converted(path, model, *options, **how):
    """The folder that is made of a GGUF file of ``model``, beside it."""
    write_gguf(path, model, **how)
    folder = path.with_suffix("")
    assert program(main, "convert", path, folder, *options) == 0
    return folder


def differ(logits, expected):
    """By how much, relative to the largest."""
    return (logits - expected).abs().max() / expected.abs().max()


@pytest.mark.parametrize(("kind", "tied"), zip(TYPES, [False, True] * len(TYPES)))
def test_tensors_equal_what_transformers_reads(tmp_path, kind, tied):
    large = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64} if "_K" in kind else {}
    model = llama(tie_word_embeddings=tied, **large)
    ours = load_file(converted(tmp_path / "m.gguf", model, kind=kind) / "model.safetensors")
    how = {"gguf_file": "m.gguf", "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **how).state_dict()
    assert ours.keys() == theirs.keys() - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(tensor.float(), theirs[name]) for name, tensor in ours.items())
    matrices = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert ours["model.embed_tokens.weight"].dtype == matrices
    assert ours["model.norm.weight"].dtype == torch.float32
    tokens = torch.randint(0, 288, (1, 40))
    with torch.inference_mode():
        if kind == "F32":  # nothing was rounded, so it is the model it was written from
            assert torch.equal(ours["model.norm.weight"], model.model["norm"].weight)
            assert differ(load_model(tmp_path / "m")(tokens), model(tokens)) < 1e-4
        if "_K" not in kind:  # random bytes are a tensor, but no model
            precise = load_transformers(tmp_path / "m", torch.float64)(tokens).logits
            assert differ(load_model(tmp_path / "m", dtype="float64")(tokens), precise) < 1e-10


def test_dtype_and_shards(tmp_path):
    folder = converted(tmp_path / "m.GGUF", llama(), "--dtype", "bfloat16", kind="Q8_0")
    written = load_file(folder / "model.safetensors").values()
    assert {tensor.dtype for tensor in written} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["torch_dtype"] == "bfloat16"
    whole, shards = (GGUFFile(tmp_path / "m.GGUF", None, size) for size in (2**30, 100_000))
    assert len(whole) == 1 and len(shards) > 3
    together = dict(ChainMap(*(shards[number] for number in range(len(shards)))))
    assert together.keys() == whole[0].keys()
    assert all(torch.equal(together[name], tensor) for name, tensor in whole[0].items())


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "llama-bpe"])
def test_byte_level_tokenizer_and_chat_template_come_along(tmp_path, pre):
    folder = converted(tmp_path / "m.gguf", llama(), tokenizer=partial(byte_level, pre=pre))
    ours, same = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    texts = "the thin end", " in  the\n\nhinter 12 of 1212", "日本, naïve\t!", "it's 1234567 x"
    texts += ("<|user|>the<|end|>",)
    assert_agree(ours, same, texts)
    # Of smollm transformers forgets that its digits stand alone.
    assert_agree(ours, theirs, [text for text in texts if pre != "smollm" or "1" not in text])
    said = ["the end", "in", "he"]
    expected = theirs.apply_chat_template(messages(said), **PROMPT)
    assert ours.encode_chat(said, chat_template(folder)) == expected
    assert load_model(folder).config.eos_token_ids == (0,)


def test_sentencepiece_tokenizer_comes_along(tmp_path):
    folder = converted(tmp_path / "m.gguf", llama(vocab_size=1024), tokenizer=sentencepiece)
    ours, theirs = Tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    original = Tokenizer(WEIGHTS / "mini-7b")
    assert (ours.bos_id, ours.eos_id, ours.vocab_size) == (1, 2, 1024)
    for text in ("The capital of Tadastan", "  two  spaces ", "日本\n\n2024", "</s>", ""):
        assert ours.encode(text) == original.encode(text)
        assert ours.decode(ours.encode(text)) == original.decode(original.encode(text))
    assert theirs("The capital of Tadastan").input_ids == original.encode("The capital of Tadastan")
    expected = theirs.apply_chat_template(messages(["Where is Nora?"]), **PROMPT)
    assert ours.encode_chat(["Where is Nora?"], chat_template(folder)) == expected


@pytest.mark.parametrize("bos", [True, False])
def test_special_pieces_of_other_names_or_none(tmp_path, bos):
    names = ["<pad>", "<start>", "<stop>"]
    named = partial(sentencepiece, names=names, bos=bos)
    ours = Tokenizer(converted(tmp_path / "m.gguf", llama(vocab_size=1024), tokenizer=named))
    assert (ours.bos_id, ours.eos_id) == (1 if bos else None, 2)
    plain = Tokenizer(WEIGHTS / "mini-7b").encode("Where is Nora?")
    assert ours.encode("Where is Nora?") == plain[not bos :]
    assert ours.decode(plain + [2]) == "Where is Nora?"


def test_what_a_file_does_not_say(tmp_path):
    """Llama 3 begins with BOS, a factor alone is a linear one, an end of turn ends answers."""

    def turn(writer):
        writer.add_eot_token_id(2)
        writer.add_rope_scaling_factor(4.0)

    unsaid = partial(byte_level, pre="llama-bpe", flag=False)
    folder = converted(tmp_path / "m.gguf", llama(), tokenizer=unsaid, changes=[turn])
    assert Tokenizer(folder).encode("the")[0] == 0
    config = load_model(folder).config
    assert config.eos_token_ids == (0, 2) and config.rope_factor == 4.0


def test_rotary_embedding_comes_along(tmp_path):
    scaled = llama(rope_theta=500000.0, max_position_embeddings=16384, **LLAMA3)
    plain, factors = rope_frequencies(16, 500000.0, 1.0, None), LLAMA3.values()
    divisors = (plain / rope_frequencies(16, 500000.0, *factors)).numpy()
    assert divisors.min() == 1.0 and divisors.max() == 8.0  # frequencies of all kinds
    tokens = torch.randint(0, 288, (1, 60))
    for name, model, rope in (("a", llama(rope_factor=4.0), None), ("b", scaled, divisors)):
        read = load_model(converted(tmp_path / f"{name}.gguf", model, rope=rope))
        assert read.config.rope_factor == model.config.rope_factor
        assert read.config.rope_llama3 == model.config.rope_llama3
        with torch.inference_mode():
            assert differ(read(tokens), model(tokens)) < 1e-4


def test_what_cannot_be_converted(tmp_path, capsys, monkeypatch):
    file, folder = tmp_path / "m.gguf", tmp_path / "m"

    def refused(message):
        refuses(main, capsys, message, "convert", file, folder)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf"][: file.exists()]

    refused("no file")
    write_gguf(file, llama(), "Q4_1")
    whole = file.read_bytes()
    for length in (0, 3, 40, 400, len(whole) // 2, len(whole) - 40_000):
        file.write_bytes(whole[:length])
        refused("is damaged or no GGUF file")

    def says(method, *values):
        return {"changes": [lambda writer: getattr(writer, method)(*values)]}

    def tensor(name):
        return says("add_tensor", name, np.zeros((32, 32), dtype=np.float32))

    ones, linear = np.ones(8, dtype=np.float32), says("add_rope_scaling_factor", 4.0)
    for how, message in (
        ({"arch": "qwen2"}, "architecture is 'qwen2'; only 'llama' is supported"),
        (tensor("blk.0.ffn_gate_exps.weight"), "'blk.0.ffn_gate_exps.weight' is none of the"),
        ({"rope": ones * 3}, "its rope_freqs are not those of Llama 3"),
        (linear | {"rope": ones}, "it has both rope_freqs.weight and rope scaling {'rope_type': '"),
        (says("add_float32", "llama.rope.scale_linear", 2.0), "'rope.scale_linear' is not known"),
        (says("add_logit_scale", 2.0), "'logit_scale' is not known"),
        (says("add_expert_count", 8), "expert_count is 8; only 0"),
        (says("add_key_length", 32), "only 16 of a head's 32 dimensions are rotated"),
        (says("add_string", "tokenizer.ggml.eot_token_id", "x"), "eot_token_id is 'x'"),
        (says("add_bool", "tokenizer.ggml.add_eos_token", True), "add_eos_token is True; only"),
        (says("add_string", "tokenizer.ggml.nonsense", "x"), "'nonsense' is not known"),
        (says("add_uint32", "llama.vocab_size", 999), "vocab_size is 999, but token_embd.weight"),
        ({"tokenizer": partial(byte_level, pre="poro")}, "falls into words as 'poro' says"),
        ({"tokenizer": lambda writer, size: None}, "its tokenizer is None"),
        ({"tokenizer": lambda writer, size: byte_level(writer, size + 9)}, "knows 297 tokens"),
    ):
        write_gguf(file, llama(), **how)
        refused(message)
    write_gguf(file, llama(), "Q8_0")
    monkeypatch.setattr(gguf.quants, "_type_traits", {})  # as if nobody here knew this type
    refused("is of type Q8_0, which cannot be read")


def test_a_damaged_file_is_one_line_or_a_folder(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", llama(), "Q8_0")
    whole, rng = (tmp_path / "m.gguf").read_bytes(), random.Random(0)
    for number in range(40):
        damaged, folder = bytearray(whole), tmp_path / f"{number}"
        damaged[rng.randrange(8, 9000)] ^= 1 << rng.randrange(8)
        (tmp_path / "d.gguf").write_bytes(damaged)
        code, error = program(main, "convert", tmp_path / "d.gguf", folder), capsys.readouterr().err
        assert code == (0 if folder.exists() else 2) and error.count("\n") == (code == 2), error
