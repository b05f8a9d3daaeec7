"""SmolLM2's GGUF file, as llama.cpp has it, becomes a Hugging Face folder.

Another Llama's file would need more: an LM head of its own, and another tokenizer.
"""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..files import staged_folder
from ..model import LlamaConfig
from .config import LLAMA, config_from_dict
from .load import empty_model

if TYPE_CHECKING:
    import tokenizers  # not every model needs the package

Fields = dict[str, Any]  # of a GGUF file, by name
CONTROL = 3  # the type of a special token
GGUF_NAMES = {  # the name in config.json -> in a GGUF file
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def convert(file: Path, folder: Path) -> None:
    """Write the model in the GGUF ``file`` as a Hugging Face ``folder``, weights in float32."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = make_config(fields)
    tensors = make_tensors(reader, config_from_dict(config))
    with staged_folder(folder) as stage:
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        make_tokenizer(fields).save(str(stage / "tokenizer.json"))
        (stage / "tokenizer_config.json").write_text(json.dumps(make_tokenizer_config(fields)))
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def make_config(fields: Fields) -> dict[str, Any]:
    """What is in the config.json."""
    sizes = {name: fields[f"llama.{key}"] for name, key in GGUF_NAMES.items()}
    ids = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    vocab_size = len(fields["tokenizer.ggml.tokens"])
    more = {"vocab_size": vocab_size, "tie_word_embeddings": True}
    # In which it was published. The weights, quantised since, are stored as they are, in float32.
    more["torch_dtype"] = "bfloat16"
    return LLAMA | sizes | ids | more


def make_tensors(reader: Any, config: LlamaConfig) -> dict[str, Tensor]:
    """{Hugging Face's name: tensor} of the weights in the file, multiplied out to float32."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tensors = {}
    for name, parameter in empty_model(config).named_parameters():
        own = stored[names.get_name(name, (".weight",))]
        tensor = torch.tensor(gguf.quants.dequantize(own.data, own.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates dimensions 2i and 2i + 1 of a head, Hugging Face i and i + D/2.
            pairs = tensor.view(-1, config.head_dim // 2, 2, config.hidden_size)
            tensor = pairs.transpose(1, 2)
        tensors[name] = tensor.reshape(parameter.shape)
    return tensors


def make_tokenizer_config(fields: Fields) -> dict[str, Any]:
    """What is in the tokenizer_config.json."""
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "add_bos_token": False,
    }


def make_tokenizer(fields: Fields) -> "tokenizers.Tokenizer":
    """SmolLM2's byte-level BPE (Radford et al. 2019), which takes digits one by one."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = dict(zip(tokens, range(len(tokens))))
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    model = tokenizers.Tokenizer(models.BPE(vocabulary, merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    model.decoder = decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"])
    model.add_special_tokens([token for token, kind in kinds if kind == CONTROL])
    return model
