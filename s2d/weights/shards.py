"""The safetensors files of a checkpoint <-> {name: tensor}: one file, or several and an index.

Knows nothing about models but the names of their tensors. What nobody claims is refused.
"""

import json
import re
from contextlib import contextmanager

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..fields import read_json, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model*.bin"
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
FREQUENCIES = ".rotary_emb.inv_freq"  # the end of tables that old checkpoints have
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
            for name in shard.keys():
                if located.get(name) != file and not name.endswith(FREQUENCIES):
                    says = f"but {located.get(name, 'not')} in {INDEX}"
                    raise ValueError(f"{path}: {shown(name)} is in {file}, {says}")
            for name in (name for name in shapes if located[name] == file):
                stored = shard.get_slice(name)
                check_dtype(path / file, name, stored.get_dtype(), FULL)
                check_shape(path, name, stored.get_shape(), shapes[name])
                yield name, stored[share(name, shapes[name])] if share else shard.get_tensor(name)


def locate(path):
    """{tensor's name: its file} of a checkpoint. A single file is preferred, as in transformers."""
    located = read_index(path / INDEX) if (path / INDEX).is_file() else {}
    if (path / SINGLE).is_file():
        shards = {file for file in located.values() if (path / file).is_file()} - {SINGLE}
        if shards:
            both = f"both {SINGLE} and {INDEX} with {min(shards)}"
            raise ValueError(f"{path} has {both}; remove what does not belong to config.json")
        with opened(path / SINGLE) as file:
            return dict.fromkeys(file.keys(), SINGLE)
    if not (path / INDEX).is_file():
        how = "; turn its pytorch_model*.bin into them with python -m s2d.weights convert"
        how = how if any(path.glob(PICKLED)) else ""
        raise FileNotFoundError(f"{path} has neither {SINGLE} nor {INDEX}{how}")
    return located


def read_index(path):
    """The index of a sharded checkpoint: {tensor name: file beside it}."""
    located = read_json(path).get("weight_map")
    if not isinstance(located, dict):
        raise ValueError(f"{path}: weight_map is no object of tensor names and files")
    for file in located.values():
        if not re.fullmatch(r"[\w.-]+\.safetensors", str(file)):
            raise ValueError(f"{path}: {str(file)[:80]!r} is no name of a file in this folder")
    return located


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
    """Raise ValueError where the checkpoint has a tensor that no Llama of so many layers has."""
    known = {*shapes, HEAD}  # of a tied one: ``check_tied``
    for name in sorted(names):
        layer = re.match(r"model\.layers\.(0|[1-9][0-9]{0,8})\.", name)
        inside = layer is None or int(layer[1]) < layers
        first = name.replace(layer[0], "model.layers.0.", 1) if layer else name
        if not (inside and first in known or name.endswith(FREQUENCIES)):
            whose = "which is none of the Llama in config.json, or belongs to quantised weights"
            raise ValueError(f"{path} has the tensor {shown(name)}, {whose}; that is not supported")


def check_tied(head, embedding):
    """Raise ValueError where config.json ties the LM head to the embedding but the files do not."""
    with opened(head) as one, opened(embedding) as other:
        heads, rows = one.get_tensor(HEAD), other.get_tensor(EMBEDDING)
    if heads.dtype != rows.dtype or not torch.equal(heads, rows):
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
    """Write a sequence of {name: tensor}: a file, or shards and an index -> {name: file}."""
    weight_map, total, count = {}, 0, len(shards)
    for number in range(count):
        shard = shards[number]
        file = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
        del shard  # before the next is read
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return weight_map
