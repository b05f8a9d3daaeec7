"""The safetensors files of a checkpoint <-> {name: tensor}: one file, or several and an index.

Knows nothing about models but the names of their tensors. What nobody claims is refused.
"""

import json
import re
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .fields import read_json, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FULL = {"F64", "F32", "F16", "BF16"}  # the dtypes of weights that are not quantised


def read_tensors(path, shapes, layers, device="cpu", share=None):
    """Yield (name, tensor) for every name in ``shapes``, one shard open at a time.

    ``layers`` is the number that the whole model in the folder ``path`` has, of which ``shapes``
    may ask for the first only; ``share`` as in ``load_model``. Raises FileNotFoundError or
    ValueError where a tensor is missing, damaged, quantised, of another shape, or unknown.
    """
    located = locate(path)
    refuse_unclaimed(path, located, shapes, layers)
    if missing := [name for name in shapes if name not in located]:
        raise ValueError(f"{path} has no tensor {missing[0]}, which config.json asks for")
    if HEAD in located and HEAD not in shapes:
        check_tied(path / located[HEAD], path / located[EMBEDDING])
    for file in sorted({located[name] for name in shapes}):
        with opened(path / file, device) as shard:
            present = set(shard.keys())
            refuse_unclaimed(path / file, present, shapes, layers)
            for name in sorted(present & located.keys()):
                if located[name] != file:
                    raise ValueError(f"{path}: {name} is in {file} and in {located[name]}")
            for name in (name for name in shapes if located[name] == file):
                if name not in present:
                    raise ValueError(f"{path / file} has no tensor {name}, though {INDEX} says so")
                stored = shard.get_slice(name)
                check_dtype(path / file, name, stored.get_dtype(), FULL)
                check_shape(path, name, stored.get_shape(), shapes[name])
                part = stored[share(name, shapes[name])] if share else shard.get_tensor(name)
                yield name, part


def locate(path):
    """{tensor's name: its file} of a checkpoint. A single file is preferred, as in transformers."""
    located = read_index(path / INDEX) if (path / INDEX).is_file() else {}
    if (path / SINGLE).is_file():
        shards = sorted({file for file in located.values() if (path / file).is_file()})
        if set(shards) - {SINGLE}:
            both = f"both {SINGLE} and {INDEX} with {shards[0]}"
            raise ValueError(f"{path} has {both}; remove what does not belong to config.json")
        with opened(path / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    if not (path / INDEX).is_file():
        how = "; turn its pytorch_model*.bin into them with python -m s2d.weights convert"
        how = how if torch_files(path) else ""
        raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX}{how}")
    return located


def read_index(path):
    """The index of a sharded checkpoint: {tensor name: file beside it}."""
    located = read_json(path).get("weight_map")
    if not isinstance(located, dict):
        raise ValueError(f"{path}: weight_map is no object of tensor names and files")
    for file in located.values():
        plain = isinstance(file, str) and file.isprintable() and Path(file).name == file
        if not plain or file in ("", ".", ".."):
            raise ValueError(f"{path}: {str(file)[:80]!r} is no name of a file in this folder")
    return located


def torch_files(path):
    return sorted(path.glob("pytorch_model*.bin"))


@contextmanager
def opened(file, device="cpu"):
    """An open file of safetensors; FileNotFoundError or ValueError: it is missing or damaged."""
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing; download it again")
    try:
        with safe_open(file, framework="pt", device=str(device)) as tensors:
            yield tensors
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}); download it again") from None


def refuse_unclaimed(path, names, shapes, layers):
    """Raise ValueError where the checkpoint has a tensor that no Llama of so many layers has.

    Harmless are the rotary embedding's frequencies and a tied LM head (``check_tied``).
    """
    known = {*shapes, HEAD}
    for name in sorted(names):
        layer = re.match(r"model\.layers\.(0|[1-9][0-9]{0,8})\.", name)
        inside = layer is None or int(layer[1]) < layers
        first = name.replace(layer[0], "model.layers.0.", 1) if layer else name
        if not (inside and first in known or name.endswith(".rotary_emb.inv_freq")):
            whose = "which is none of the Llama in config.json, or belongs to quantised weights"
            raise ValueError(f"{path} has the tensor {shown(name)}, {whose}; that is not supported")


def check_tied(head, embedding):
    """Raise ValueError where config.json ties the LM head to the embedding but the files do not."""
    with opened(head) as one, opened(embedding) as other:
        heads, rows = one.get_slice(HEAD), other.get_slice(EMBEDDING)
        same = (heads.get_dtype(), heads.get_shape()) == (rows.get_dtype(), rows.get_shape())
        for start in range(0, max(rows.get_shape()[:1], default=0), 4096) if same else ():
            part = slice(start, start + 4096)
            same = same and torch.equal(heads[part], rows[part])
    if not same:
        says = "but config.json says tie_word_embeddings; set that to false, or take the tensor out"
        raise ValueError(f"{head} has an {HEAD} that is not {EMBEDDING}, {says}")


def check_dtype(path, name, dtype, full):
    if dtype not in full:
        only = "quantised weights are not supported, only float16, bfloat16, float32 and float64"
        raise ValueError(f"{path}: tensor {name} is of dtype {dtype}; {only}")


def check_shape(path, name, shape, wanted):
    if tuple(shape) != wanted:
        found = f"tensor {name} has shape {tuple(shape)}"
        raise ValueError(f"{path}: {found}, config.json asks for {wanted}")


def split(tensors, max_shard_bytes):
    """{name: tensor} -> the same in groups of at most so many bytes, or of one tensor."""
    shards, left = [{}], max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > left and shards[-1]:
            shards.append({})
            left = max_shard_bytes
        shards[-1][name] = tensor
        left -= tensor.nbytes
    return shards


def write_shards(shards, folder):
    """Write a sequence of {name: tensor}: a file, or numbered shards and an index -> {name: file}.

    The sequence may read each shard when it is asked for: one is held at a time.
    """
    weight_map, total = {}, 0
    for number in range(len(shards)):
        shard = shards[number]
        file = f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        file = SINGLE if len(shards) == 1 else file
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
        del shard  # before the next is read
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return weight_map
