"""A Hugging Face folder (config.json, one or many safetensors files) <-> a Llama. Knows nothing about decoding."""

import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import nn

from ..files import staged_folder
from ..model import Llama
from ..static import StaticLlama
from .adapter import CONFIG as ADAPTER
from .adapter import Adapter, write_adapter
from .config import config_to_dict, read_config, read_json, read_json_if_there, shown

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
# What a model is spoken to with, and where its answers end: what belongs to its weights wherever they go.
COMPANIONS = ("tokenizer.model", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
              "chat_template.jinja", "generation_config.json")  # fmt: skip
CHANCES = "chances.json"  # beside it: what targets accepted of the draft, see tune/
DRAFT_VOCABULARY = "draft_vocabulary.json"  # beside a draft's config.json: the ids of the only tokens that it drafts
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


def load_model(path, device="cpu", dtype="auto", num_layers=None, share=None, compile=False):
    """Load a Llama from ``path``, tensor by tensor straight onto ``device``.

    ``device`` is cpu, cuda, cuda:N or auto, ``dtype`` "auto" (bfloat16 on a GPU, float32 on the CPU) or one of float64,
    float32, float16, bfloat16. ``num_layers`` keeps only the first layers. ``share``, a function of a tensor's name and shape,
    returns the slices of it to read, one for each dimension (parallel.py). With ``compile`` its short passes are compiled
    (static.py), which takes a minute the first time. Raises FileNotFoundError for a missing folder or file and ValueError for
    anything that is not a Llama this project can run.
    """
    path, device = Path(path), check_device(device)
    config = read_config(path)
    if num_layers is not None:
        if not 1 <= num_layers <= config.num_hidden_layers:
            raise ValueError(
                f"{path}: cannot keep the first {num_layers} of {config.num_hidden_layers} layers"
            )
        config = replace(config, num_hidden_layers=num_layers, exit_layers=(), thresholds=())
    model, dtype = (
        empty_model(config, StaticLlama if compile else Llama),
        choose_dtype(dtype, device),
    )
    adapter = Adapter(path) if (path / ADAPTER).is_file() else None
    shapes, products = (
        parameter_shapes(model),
        ("_proj", "lm_head", *["embed_tokens"][: config.tie_word_embeddings]),
    )
    # On the CPU, as they are, one token's products are a third faster with weights by columns, no others.
    by_columns = device.type == "cpu" and dtype.itemsize >= 4 and not compile
    changes = adapter.changes(shapes) if adapter else {}
    for name, tensor in read_tensors(adapter.base if adapter else path, shapes, device, share):
        if name in changes:
            change = changes.pop(name)
            tensor = tensor.float() + (change[share(name, shapes[name])] if share else change).to(
                device
            )
        parent, _, leaf = name.rpartition(".")
        if by_columns and parent.endswith(products):
            tensor = tensor.t().contiguous().t()
        setattr(
            model.get_submodule(parent), leaf, nn.Parameter(tensor.to(dtype), requires_grad=False)
        )
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    if num_layers is None and (path / DRAFT_VOCABULARY).is_file():
        model.keep_tokens(read_draft_vocabulary(path / DRAFT_VOCABULARY, config.vocab_size))
    if num_layers is None:
        model.chances = read_json_if_there(path / CHANCES)
    model = model.to(device=device, dtype=dtype).eval()  # moves what is left: the rotary table
    if compile:
        model.prepare()
    return model


def read_draft_vocabulary(path, vocab_size):
    """The tokens (K,) that a draft drafts, from a JSON list of their ids."""
    try:
        tokens = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid JSON ({shown(str(error))[1:-1]})") from None
    good = isinstance(tokens, list) and all(
        type(token) is int and 0 <= token < vocab_size for token in tokens
    )
    if not good or not tokens or len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} is no list of different token ids within 0..{vocab_size - 1}")
    return torch.tensor(tokens)


def empty_model(config, kind=Llama):
    """A Llama whose parameters have names and shapes but no memory yet."""
    with torch.device("meta"):
        return kind(config)


def parameter_shapes(model):
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def save_model(model, path, tokenizer_from=None, dtype=torch.bfloat16, max_shard_bytes=5 * 2**30):
    """Write ``model`` as a Hugging Face folder that transformers loads as LlamaForCausalLM.

    ``tokenizer_from`` is a folder whose tokenizer files are copied along. Everything is written under a temporary name
    first, so ``path`` is either complete or as it was. Raises ValueError where it holds what was not written here.
    """
    with staged_folder(path) as stage:
        if tokenizer_from:
            copy_companions(Path(tokenizer_from), stage)
        tensors = {
            name: p.detach().to("cpu", dtype).contiguous() for name, p in model.named_parameters()
        }
        write_shards(split(tensors, max_shard_bytes), stage)
        write_config(model, stage, dtype)


def save_adapter(model, pairs, scale, path, base):
    """Write the adapters of ``model`` to a folder in PEFT's layout, as changes of the model in the folder ``base``.

    ``pairs`` {weight's name: (A, B)} and their ``scale`` as in adapter.py. What tokenizer it needs, its base has.
    """
    path = Path(path)
    with staged_folder(path) as stage:
        pairs = {
            name: tuple(part.to("cpu", torch.bfloat16) for part in pair)
            for name, pair in pairs.items()
        }
        write_adapter(stage, os.path.relpath(Path(base).resolve(), path.resolve()), pairs, scale)
        write_config(model, stage, torch.bfloat16)


def write_config(model, folder, dtype):
    """config.json, as of weights in ``dtype``, and what came with a draft: its vocabulary, and what targets accept of it."""
    (folder / "config.json").write_text(
        json.dumps(config_to_dict(model.config, dtype), indent=2) + "\n"
    )
    if model.chances:
        (folder / CHANCES).write_text(json.dumps(model.chances, separators=(",", ":")) + "\n")
    if model.draft_vocabulary is not None:
        (folder / DRAFT_VOCABULARY).write_text(json.dumps(model.draft_vocabulary.tolist()) + "\n")


def copy_companions(source, destination):
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def read_tensors(path, shapes, device="cpu", share=None):
    """Yield (name, tensor) for every name in ``shapes``, one shard open at a time; ``share`` as in ``load_model``.

    Raises FileNotFoundError or ValueError where a tensor is missing, damaged or of another shape.
    """
    if (path / INDEX).is_file():
        located = read_index(path / INDEX)
    elif (path / SINGLE).is_file():
        located = dict.fromkeys(shapes, SINGLE)
    else:
        pickled = "; turn its pytorch_model*.bin into them with python -m s2d.weights convert"
        raise FileNotFoundError(
            f"{path} has neither {SINGLE} nor {INDEX}{pickled if torch_files(path) else ''}"
        )
    for name in shapes:
        if name not in located:
            raise ValueError(f"{path}: tensor {name} is in no shard of {INDEX}")
    for file in sorted({located[name] for name in shapes}):
        if not (path / file).is_file():
            raise FileNotFoundError(f"{path}: shard {file} is missing; download it again")
        try:
            with safe_open(path / file, framework="pt", device=str(device)) as shard:
                present = set(shard.keys())
                for name in (name for name in shapes if located[name] == file):
                    if name not in present:
                        raise ValueError(
                            f"{path / file} has no tensor {name}, which config.json asks for"
                        )
                    check_shape(path, name, shard.get_slice(name).get_shape(), shapes[name])
                    yield (
                        name,
                        shard.get_slice(name)[share(name, shapes[name])]
                        if share
                        else shard.get_tensor(name),
                    )
        except SafetensorError as error:
            raise ValueError(f"{path / file} is damaged ({error}); download it again") from None


def read_index(path):
    """The index of a sharded checkpoint: {tensor name: file beside it}."""
    located = read_json(path).get("weight_map")
    if not isinstance(located, dict):
        raise ValueError(
            f"{path}: weight_map is no object of tensor names and files; download it again"
        )
    for file in located.values():
        if (
            not isinstance(file, str)
            or not file.isprintable()
            or Path(file).name != file
            or file in ("", ".", "..")
        ):
            raise ValueError(f"{path}: {str(file)[:80]!r} is no name of a file in this folder")
    return located


def torch_files(path):
    """A checkpoint's pickled shards, in order."""
    return sorted(path.glob("pytorch_model*.bin"))


def check_shape(path, name, shape, wanted):
    if tuple(shape) != wanted:
        raise ValueError(
            f"{path}: tensor {name} has shape {tuple(shape)}, config.json asks for {wanted}; "
            "the two do not belong together"
        )


def split(tensors, max_shard_bytes):
    """{name: tensor} -> the same in groups of at most so many bytes, or of one tensor."""
    shards, room = [{}], max_shard_bytes
    for name, tensor in tensors.items():
        if tensor.nbytes > room and shards[-1]:
            shards.append({})
            room = max_shard_bytes
        shards[-1][name] = tensor
        room -= tensor.nbytes
    return shards


def write_shards(shards, folder):
    """Write a sequence of {name: tensor}: one file if it is one, else numbered shards and their index.

    The sequence may read each shard when it is asked for: one is held at a time. Returns {name: file}.
    """
    weight_map, total = {}, 0
    for number in range(len(shards)):
        shard = shards[number]
        file = (
            SINGLE
            if len(shards) == 1
            else f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors"
        )
        save_file(shard, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
        total += sum(tensor.nbytes for tensor in shard.values())
        del shard  # before the next is read
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return weight_map


def checksum(model):
    """A short name for a model's weights, by the diagonals of its matrices and its norms."""
    parts = [p.detach().diagonal() if p.dim() == 2 else p.detach() for p in model.parameters()]
    return f"{zlib.crc32(torch.cat(parts).to('cpu', torch.float32).numpy().tobytes()):08x}"


def check_device(device):
    """A device's name -> torch.device; "auto" is the GPU where torch sees one, else the CPU.

    Raises ValueError for a device that is unknown or not here.
    """
    count = torch.cuda.device_count()
    name = str(device) if str(device) != "auto" else "cuda" if count else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", name)
    if not found:
        raise ValueError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(found[1] or 0) >= count:
        seen = f"{count or 'no'} GPU{'s'[: count > 1]}"
        raise ValueError(
            f"device {name!r} was asked for, but torch sees {seen} here; use --device cpu"
        )
    return torch.device(name)


def placement(*models):
    """One line for people: where models are, in which dtype, and how much memory that takes."""
    device, dtype = models[0].device, str(models[0].dtype).removeprefix("torch.")
    place = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        place = f"{device}, {torch.cuda.get_device_name(device)} with {torch.cuda.mem_get_info(device)[1] / 1e9:.0f} GB"
    parameters = [parameter for model in models for parameter in model.parameters()]
    own = [
        parameter.to_local() if hasattr(parameter, "to_local") else parameter
        for parameter in parameters
    ]
    size = sum(
        {tensor.data_ptr(): tensor.nbytes for tensor in own}.values()
    )  # what is shared counts once
    return f"{place}, {dtype}, {size / 1e9:.2f} GB of weights"


def choose_dtype(dtype, device):
    """A dtype's name -> torch.dtype; "auto" is bfloat16 on a GPU and float32 on the CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}; expected auto or one of {', '.join(DTYPES)}")
    return DTYPES[dtype]
