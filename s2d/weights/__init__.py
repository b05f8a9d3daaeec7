"""A Hugging Face folder (config.json and safetensors) <-> a Llama. Knows nothing about decoding."""

import json
import os
import re
import shutil
import zlib
from dataclasses import replace
from math import isclose, prod
from pathlib import Path

import torch
from torch import nn

from ..extras.draft_head import DraftHead, draft_head
from ..extras.products import CACHED, quicken
from ..extras.products import DTYPES as QUICK_DTYPES
from ..extras.static import StaticLlama
from ..fields import read_json
from ..files import staged_folder
from ..model import Llama
from .adapter import ADAPTER, Adapter, write_adapter
from .config import config_to_dict, read_config
from .shards import INDEX, SINGLE, read_tensors, split, write_shards

# What a model is spoken to with, and where its answers end: it goes wherever its weights go.
COMPANIONS = (
    "tokenizer.model tokenizer.json tokenizer_config.json special_tokens_map.json "
    "added_tokens.json chat_template.jinja generation_config.json"
).split()
# Beside a draft's config.json: the ids of the only tokens that it drafts.
DRAFT_VOCABULARY = "draft_vocabulary.json"
# What an adapter may not change of its base, besides what shows in the shapes of weights.
SAME_IN_BASE = (
    "num_attention_heads num_key_value_heads head_dim rms_norm_eps rope_theta rope_factor "
    "rope_llama3 tie_word_embeddings"
).split()
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}


def load_model(
    path,
    device="cpu",
    dtype="auto",
    num_layers=None,
    share=None,
    compile=False,
    quick=True,
    config=None,
):
    """Load a Llama from ``path``, tensor by tensor straight onto ``device``.

    ``device``: see ``check_device``; ``dtype``: see ``choose_dtype``. ``num_layers`` keeps only the
    first layers. ``share``, a function of a tensor's name and shape, returns the slices of it to
    read, one for each dimension (divided.py). With ``compile`` its short passes are
    compiled (extras/static.py), which takes a minute the first time. On a CPU, products of few rows
    of a model over 40 MB go the fastest way there is (extras/products.py) in float32 and bfloat16,
    unless ``quick`` is False. ``config`` is what ``read_config`` said of it, if that is known.
    Raises FileNotFoundError for a missing folder or file and ValueError for anything that is not a
    Llama this project can run.
    """
    path, device = Path(path), check_device(device)
    config = config or read_config(path)
    source, layers, adapter = weights_of(path, config)
    if num_layers is not None:
        if not 1 <= num_layers <= (count := config.num_hidden_layers):
            raise ValueError(f"{path}: cannot keep the first {num_layers} of {count} layers")
        config = replace(config, num_hidden_layers=num_layers, exit_layers=(), thresholds=())
    dtype = choose_dtype(dtype, device, path)
    model = empty_model(config, StaticLlama if compile else Llama)
    shapes = {name: tuple(each.shape) for name, each in model.named_parameters()}
    large = sum(map(prod, shapes.values())) * dtype.itemsize > CACHED
    on_cpu, quick = device.type == "cpu", quick and large and dtype in QUICK_DTYPES
    # One token's products are a third faster with weights by columns, where nothing else is done.
    by_columns = on_cpu and dtype.itemsize >= 4 and not compile and not quick
    products = ("_proj", "lm_head", *["embed_tokens"][: config.tie_word_embeddings])
    changes = adapter.changes(shapes) if adapter else {}
    for name, tensor in read_tensors(source, shapes, layers, device, share):
        if name in changes:
            change = changes.pop(name)
            change = change[share(name, shapes[name])] if share else change
            tensor = tensor.float() + change.to(device)
        parent, _, leaf = name.rpartition(".")
        if by_columns and parent.endswith(products):
            tensor = tensor.t().contiguous().t()
        parameter = nn.Parameter(tensor.to(dtype), requires_grad=False)
        setattr(model.get_submodule(parent), leaf, parameter)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.model["embed_tokens"].weight
    kept = None if num_layers else draft_vocabulary(path, config.vocab_size)
    if kept is not None:
        model.draft_head = DraftHead(model.lm_head, kept)
    model = model.to(device=device, dtype=dtype).eval()  # moves what is left: the rotary table
    if on_cpu and (compile or quick):
        quicken(model)
    if compile:
        model.prepare()
    return model


def weights_of(path, config):
    """(folder, its number of layers, adapter or None) of the weights of the model in ``path``.

    Of an adapter it is the base's folder; ValueError where the two describe different models.
    """
    if not (path / ADAPTER).is_file():
        return path, config.num_hidden_layers, None
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            raise ValueError(f"{path} holds {name} and {ADAPTER}; only one can be its weights")
    adapter = Adapter(path)
    base = read_config(adapter.base)
    for key in SAME_IN_BASE:
        own, other = getattr(config, key), getattr(base, key)
        if own != other and not (type(own) is float and isclose(own, other, rel_tol=1e-6)):
            of = f"{adapter.base}/config.json, which it is an adapter of, has {other}"
            raise ValueError(f"{path}/config.json has {key} {own}, but {of}")
    return adapter.base, base.num_hidden_layers, adapter


def draft_vocabulary(folder, vocab_size):
    """The tokens (K,) that the draft in ``folder`` drafts; None where it drafts all."""
    path = folder / DRAFT_VOCABULARY
    if not path.is_file():
        return None
    tokens = read_json(path, list)
    good = all(type(token) is int and 0 <= token < vocab_size for token in tokens)
    if not good or not tokens or len(set(tokens)) < len(tokens):
        raise ValueError(f"{path} is no list of different token ids within 0..{vocab_size - 1}")
    return torch.tensor(tokens)


def empty_model(config, kind=Llama):
    """A Llama whose parameters have names and shapes but no memory yet."""
    with torch.device("meta"):
        return kind(config)


def shapes_of(config):
    """{name: shape} of the weights that ``config`` asks for."""
    return {name: tuple(each.shape) for name, each in empty_model(config).named_parameters()}


def save_model(model, path, tokenizer_from=None, dtype=torch.bfloat16, max_shard_bytes=5 * 2**30):
    """Write ``model`` as a Hugging Face folder that transformers loads as LlamaForCausalLM."""
    with staged_folder(path) as stage:
        if tokenizer_from:
            copy_companions(Path(tokenizer_from), stage)
        parameters = model.named_parameters()
        tensors = {name: p.detach().to("cpu", dtype).contiguous() for name, p in parameters}
        write_shards(split(tensors, max_shard_bytes), stage)
        write_config(model, stage, dtype)


def save_adapter(model, pairs, scale, path, base):
    """Write ``pairs`` {weight's name: (A, B)} as PEFT's adapter of the model in ``base``."""
    path, dtype = Path(path), torch.bfloat16
    with staged_folder(path) as stage:
        pairs = {name: (a.to("cpu", dtype), b.to("cpu", dtype)) for name, (a, b) in pairs.items()}
        write_adapter(stage, os.path.relpath(Path(base).resolve(), path.resolve()), pairs, scale)
        write_config(model, stage, dtype)


def write_config(model, folder, dtype):
    """config.json, as of weights in ``dtype``, and what came with a draft."""
    config = json.dumps(config_to_dict(model.config, dtype), indent=2)
    (folder / "config.json").write_text(config + "\n")
    if head := draft_head(model):
        (folder / DRAFT_VOCABULARY).write_text(json.dumps(head.tokens.tolist()) + "\n")


def copy_companions(source, destination):
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, destination / name)


def checksum(model):
    """A short name for a model's weights, by the diagonals of its matrices and its norms."""
    parts = [p.detach().diagonal() if p.dim() == 2 else p.detach() for p in model.parameters()]
    return f"{zlib.crc32(torch.cat(parts).to('cpu', torch.float32).numpy().tobytes()):08x}"


def check_device(device):
    """A device's name, or "auto" -> torch.device; ValueError where it is unknown or not here."""
    count = torch.cuda.device_count()
    name = str(device) if str(device) != "auto" else "cuda" if count else "cpu"
    found = re.fullmatch(r"cpu|cuda(?::(0|[1-9][0-9]*))?", name)
    if not found:
        raise ValueError(f"unknown device {name!r}; expected auto, cpu, cuda or cuda:N")
    if name != "cpu" and int(found[1] or 0) >= count:
        seen = f"torch sees {count or 'no'} GPU{'s'[: count > 1]} here"
        raise ValueError(f"device {name!r} was asked for, but {seen}; use --device cpu")
    return torch.device(name)


def own_device(device):
    """As ``check_device``, for one of several processes: of "cuda" it is a GPU of its own."""
    device = check_device(device)
    return check_device(f"cuda:{os.environ['LOCAL_RANK']}") if device.type == "cuda" else device


def placement(*models):
    """One line for people: where models are, in which dtype, and how much memory that takes."""
    device, dtype = models[0].device, str(models[0].dtype).removeprefix("torch.")
    where = f"cpu, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        memory = torch.cuda.mem_get_info(device)[1] / 1e9
        where = f"{device}, {torch.cuda.get_device_name(device)} with {memory:.0f} GB"
    parameters = [parameter for model in models for parameter in model.parameters()]
    own = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    size = sum({tensor.data_ptr(): tensor.nbytes for tensor in own}.values())  # shared: once
    return f"{where}, {dtype}, {size / 1e9:.2f} GB of weights"


def choose_dtype(dtype, device, path):
    """A dtype, its name, or "auto": config.json's in ``path``, float32 if the device lacks it."""
    if dtype in DTYPES.values():
        return dtype
    if dtype in DTYPES:
        return DTYPES[dtype]
    if dtype != "auto":
        raise ValueError(f"unknown dtype {dtype!r}; expected auto or one of {', '.join(DTYPES)}")
    raw = read_json(Path(path) / "config.json")
    given = {str(raw[key]) for key in ("dtype", "torch_dtype") if raw.get(key) is not None}
    given = given or {"float32"}
    if len(given) > 1 or not given <= DTYPES.keys():
        says = f"dtype is {' and '.join(sorted(given))}; expected one of {', '.join(DTYPES)}"
        raise ValueError(f"{path}/config.json: {says}")
    own = DTYPES[given.pop()]
    quick = own == torch.bfloat16 and torch.cpu._is_avx512_bf16_supported()
    return own if own.itemsize > 2 or device.type == "cuda" or quick else torch.float32
