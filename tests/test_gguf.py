"""``get`` reads one GGUF file: here a small one of its kind, and what transformers reads in it."""

import gguf
import torch
from helpers import random_llama
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from s2d import Tokenizer, load_model
from s2d.weights.__main__ import convert

METADATA = dict(context_length=128, embedding_length=64, feed_forward_length=96, block_count=4)
METADATA |= dict(head_count=4, head_count_kv=2, layer_norm_rms_eps=1e-5, rope_freq_base=5000.0)
METADATA |= dict(tokenizer_model="gpt2", token_list=[*map(chr, range(34, 97)), "AB"])
METADATA |= dict(token_types=[gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 61)
METADATA |= dict(token_merges=["A B"], bos_token_id=1, eos_token_id=2, chat_template="{{ a }}")


def test_tensors_equal_what_transformers_reads(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = random_llama(0, **sizes, tie_word_embeddings=True).float()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in METADATA.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    for name, parameter in model.named_parameters():
        kind = gguf.GGMLQuantizationType["Q4_1" if parameter.dim() == 2 else "F32"]
        values = gguf.quants.quantize(parameter.numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "m.gguf", tmp_path / "m")
    options = {"gguf_file": "m.gguf", "dtype": torch.float32}
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, **options).state_dict()
    tensors = load_file(tmp_path / "m/model.safetensors")
    assert tensors.keys() == theirs.keys() - {"lm_head.weight"}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())
    config = load_model(tmp_path / "m").config
    assert (config.eos_token_ids, config.rope_theta) == ((2,), 5000.0)
    ids = AutoTokenizer.from_pretrained(tmp_path / "m")("AB1ABA").input_ids
    assert Tokenizer(tmp_path / "m").encode("AB1ABA") == ids == [63, 15, 63, 31]
