"""A GGUF file, llama.cpp's format, as what a folder of safetensors holds.

Needs the package ``gguf``. Names, shapes and the order of rows differ; quantised blocks are
multiplied out. Its tokenizer: gguf_tokenizer.py.
"""

import numpy as np
import torch

from ..fields import errors_name, number, refuse_unknown, shown, whole
from ..model import rope_frequencies
from ..program import optional
from ..text.gguf_tokenizer import tokenizer_files
from . import shapes_of
from .config import LLAMA, LLAMA3, config_from_dict
from .shards import check_shape, split

PACKAGE = "gguf==0.19.0"

# No weight, but what the rotary embedding's frequencies are divided by.
FREQUENCIES = "rope_freqs.weight"
# All other types are quantised.
WHOLE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

# What the metadata may say of a Llama: what is read here or changes nothing, or has one value.
KNOWN = set(
    "embedding_length feed_forward_length block_count context_length vocab_size "
    "attention.head_count attention.head_count_kv attention.key_length attention.value_length "
    "attention.layer_norm_rms_epsilon tensor_data_layout rope.dimension_count rope.freq_base "
    "rope.scaling.type rope.scaling.factor rope.scaling.finetuned".split()
)
ONLY = {"attention.causal": True, "expert_count": 0, "expert_used_count": 0}


class GGUFFile:
    """A GGUF file of a Llama as a sequence of shards {name: tensor}; one is in memory at a time.

    ``raw`` is its config.json. Quantised tensors become float32, which holds their values exactly;
    others stay what they are, unless ``dtype`` says otherwise. Raises ValueError for a file that is
    damaged or not a Llama.
    """

    def __init__(self, path, dtype, max_shard_bytes=5 * 2**30):
        self.path, self.dtype, self.gguf = path, dtype, optional("gguf", PACKAGE)
        if not path.is_file():
            raise FileNotFoundError(f"no file {path}")
        try:
            reader = self.gguf.GGUFReader(path)
            self.fields = {name: field.contents() for name, field in reader.fields.items()}
        except Exception as error:  # parsing what is damaged can fail in every way
            reason = shown(str(error))[1:-1]
            raise ValueError(f"{path} is damaged or no GGUF file ({reason})") from None
        with errors_name(path):
            if (kind := self.fields.get("general.architecture")) != "llama":
                raise ValueError(f"architecture is {shown(kind)}; only 'llama' is supported")
            tensors = {tensor.name: tensor for tensor in reader.tensors}
            self.raw = config_json(self.fields, tensors)
            self.config = config_from_dict(self.raw)
            self.shapes, arch = shapes_of(self.config), self.gguf.MODEL_ARCH.LLAMA
            names = self.gguf.get_tensor_name_map(arch, self.config.num_hidden_layers)
            known = {names.get_name(name, (".weight",)): name for name in self.shapes}
            if foreign := sorted(tensors.keys() - known.keys()):
                raise ValueError(f"{shown(foreign[0])} is none of the Llama's in its metadata")
            self.tensors = {known[name]: tensor for name, tensor in tensors.items()}
        empty = {name: torch.empty(self.shapes[name], device="meta") for name in self.tensors}
        self.shards = [list(shard) for shard in split(empty, max_shard_bytes)]

    def __len__(self):
        return len(self.shards)

    def __getitem__(self, number):
        return {name: self._tensor(name) for name in self.shards[number]}

    def _tensor(self, name):
        stored, dtype = self.tensors[name], self.tensors[name].tensor_type.name
        check_shape(self.path, name, stored.shape.tolist()[::-1], self.shapes[name])
        try:
            values = self.gguf.quants.dequantize(stored.data, stored.tensor_type)
        except NotImplementedError:
            which = f"tensor {name} is of type {dtype}"
            raise ValueError(f"{self.path}: {which}, which cannot be read") from None
        tensor = torch.from_numpy(np.require(values, requirements="W")).float()
        tensor = tensor.reshape(self.shapes[name])
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # llama.cpp rotates neighbouring dimensions of a head, Hugging Face i and i + D/2.
            pairs = tensor.view(-1, self.config.head_dim // 2, 2, tensor.shape[1])
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        return tensor.to(self.dtype or WHOLE.get(dtype, torch.float32)).contiguous()

    def write_companions(self, folder):
        with errors_name(self.path):
            try:
                files = tokenizer_files(self.fields)
            except ValueError:
                raise
            except Exception as error:  # what is damaged can fail in every way
                raise ValueError(f"its tokenizer is damaged ({shown(repr(error))})") from None
        for name, content in files.items():
            (folder / name).write_bytes(content)


def config_json(fields, tensors):
    """The metadata of a GGUF file as config.json has it; frequencies are taken from ``tensors``."""
    names = [name for name in fields if name.startswith("llama.")]
    own = {name.removeprefix("llama."): fields[name] for name in names}
    refuse_unknown(own, KNOWN, ONLY)
    width, heads = whole(own, "embedding_length"), whole(own, "attention.head_count")
    head_dim = whole(own, "attention.key_length", width // heads)
    if (rotated := whole(own, "rope.dimension_count", head_dim)) != head_dim:
        raise ValueError(f"only {rotated} of a head's {head_dim} dimensions are rotated")
    if (embedding := tensors.get("token_embd.weight")) is None:
        raise ValueError("it has no tensor token_embd.weight")
    rows = int(embedding.shape[-1])
    if (said := own.get("vocab_size", rows)) != rows:
        raise ValueError(f"vocab_size is {said}, but token_embd.weight has {rows} rows")
    factor = number(own, "rope.scaling.factor", 1.0)
    scaling = own.get("rope.scaling.type", "none" if factor == 1.0 else "linear")
    rope = None if scaling == "none" else {"rope_type": scaling, "factor": factor}
    theta = number(own, "rope.freq_base", 10000.0)
    if FREQUENCIES in tensors:
        if rope:
            raise ValueError(f"it has both {FREQUENCIES} and rope scaling {rope}")
        rope = llama3_rope(tensors.pop(FREQUENCIES).data, head_dim, theta)
    ids = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot")]
    ends = {whole(fields, name, low=0) for name in ids if name in fields}
    computed = WHOLE.get(embedding.tensor_type.name, torch.bfloat16)  # precise enough for others
    return {
        **LLAMA,
        "vocab_size": rows,
        "hidden_size": width,
        "intermediate_size": whole(own, "feed_forward_length"),
        "num_hidden_layers": whole(own, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": whole(own, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": whole(own, "context_length"),
        "rms_norm_eps": number(own, "attention.layer_norm_rms_epsilon"),
        "rope_theta": theta,
        "rope_scaling": rope,
        "tie_word_embeddings": "output.weight" not in tensors,
        "bos_token_id": fields.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": sorted(ends) or None,
        "torch_dtype": str(computed).removeprefix("torch."),
    }


def llama3_rope(divisors, head_dim, theta):
    """config.json's rope_scaling for ``divisors`` (D/2,) of frequencies by Llama 3's rule."""
    divisors, bounds = torch.tensor(divisors.reshape(-1).tolist()), (1.0, 4.0, 8192)  # of all 3.x
    factor = round(max(divisors.tolist(), default=1.0), 4)
    scaled = rope_frequencies(head_dim, theta, factor, bounds)
    expected = rope_frequencies(head_dim, theta, 1.0, None) / scaled
    if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
        raise ValueError("its rope_freqs are not those of Llama 3; others are not supported")
    return {"rope_type": "llama3", "factor": factor, **dict(zip(LLAMA3, bounds))}
