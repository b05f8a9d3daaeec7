"""``get`` reads one GGUF file: here a small one of its kind, written from a known Llama."""

import gguf
import torch
from helpers import random_llama
from transformers import AutoTokenizer

from s2d import Tokenizer, load_model
from s2d.checkpoint.gguf import convert

METADATA = dict(context_length=128, embedding_length=64, feed_forward_length=96, block_count=4)
METADATA |= dict(head_count=4, head_count_kv=2, layer_norm_rms_eps=1e-5, rope_freq_base=5000.0)
METADATA |= dict(tokenizer_model="gpt2", token_list=[*map(chr, range(34, 97)), "AB"])
METADATA |= dict(token_types=[gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.NORMAL] * 61)
METADATA |= dict(token_merges=["A B"], bos_token_id=1, eos_token_id=2, chat_template="{{ a }}")
Q4_1, F32 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F32


def test_a_file_becomes_the_folder_of_its_model(tmp_path):
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
    model = random_llama(0, **sizes, tie_word_embeddings=True, rope_theta=5000.0).float()
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    for name, value in METADATA.items():
        getattr(writer, f"add_{name}")(value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 4)
    for name, parameter in model.named_parameters():
        kind = Q4_1 if parameter.dim() == 2 else F32
        values = gguf.quants.quantize(parameter.numpy(), kind)  # each row on its own
        parameter.copy_(torch.tensor(gguf.quants.dequantize(values, kind)))
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # neighbours are rotated together
            values = values.reshape(-1, 2, 8, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    convert(tmp_path / "m.gguf", tmp_path / "m")
    loaded, tokens = load_model(tmp_path / "m", dtype="float32"), torch.arange(40)[None]
    assert (loaded(tokens) - model(tokens)).abs().max() < 1e-4 and loaded.config.eos_token_ids == (
        2,
    )
    ids = AutoTokenizer.from_pretrained(tmp_path / "m")("AB1ABA").input_ids
    assert Tokenizer(tmp_path / "m").encode("AB1ABA") == ids == [63, 15, 63, 31]
