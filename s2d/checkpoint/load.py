"""A Hugging Face folder (config.json and weights) -> a Llama, and where its weights lie."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..model import Llama, LlamaConfig
from .config import DTYPES, ModelFolder, read_folder
from .files import read_json
from .layout import quicken
from .notices import progress

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def load_model(
    folder: Path | str | ModelFolder,
    device: torch.device | str = "auto",
    dtype: torch.dtype | str = "auto",
    share: Callable[[str, Tensor], Tensor] | None = None,
    quick: bool = True,
    layers: int | None = None,
) -> Llama:
    """Load a Llama from a ``folder``, tensor by tensor straight onto ``device``.

    Args:
        folder: where it is, or what ``read_folder`` has read there.
        device: see ``check_device``.
        dtype: a dtype, its name, or "auto": see ``choose_dtype``.
        share: (name, tensor) -> the part of it that is loaded (passes/tensor_parallel.py).
        quick: on a CPU, lay weights out anew for matmuls of a few rows (layout.py).
        layers: how many of the first layers to read: a draft needs those up to its last exit. The
            others need not be in the folder. If config.json names exits after these layers, the
            model has none of its drafting options.

    Tensors that no layer needs are left out. Raises FileNotFoundError, ValueError for what is not a
    Llama this project can run, or MemoryError.
    """
    if not isinstance(folder, ModelFolder):
        folder = read_folder(folder)
    path, config, stored_dtype, drafting = folder
    device = check_device(device)
    stored = config.num_hidden_layers
    layers = stored if layers is None else layers
    if layers not in range(1, stored + 1):
        raise ValueError(f"{path} has {stored} layers, not {layers}")
    config = replace(config, num_hidden_layers=layers)
    not_read = tuple(f"model.layers.{layer}." for layer in range(layers, stored))
    if stored_dtype == "auto":
        _, _, first = next(read_tensors(path, not_read))
        stored_dtype = name_of(first.dtype)
    dtype = choose_dtype(dtype, device, stored_dtype)
    model = empty_model(config)
    if device.type == "cpu" and hasattr(os, "sysconf"):  # or Linux would end the process at last
        needed = sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if needed > memory:
            words = f"{path} needs {needed / 1e9:.2f} GB for weights in {name_of(dtype)}"
            raise MemoryError(f"{words}, and the memory has {memory / 1e9:.2f} GB")
    fill(model, read_tensors(path, not_read), path, device, dtype, share)
    if quick and device.type == "cpu":
        quicken(model)
    if device.type == "cuda":
        # On H100 and B200, PyTorch asks cuDNN's attention first (``check_prefer_cudnn_attention``).
        # cuDNN plans on the CPU for each new pair of lengths, and here every pass has new lengths.
        # A plan takes longer than a pass: 22 ms (lablup/mlxcel 1799), 0.4 s (modelscope/FunASR
        # 3704). On a B200 it also changes greedy text (pytorch 193893).
        torch.backends.cuda.enable_cudnn_sdp(False)
    if drafting and drafting["exits"][-1] <= layers:
        model.drafting = drafting
    return model


def fill(
    model: Llama,
    stored: Iterator[tuple[Path, str, Tensor]],
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    share: Callable[[str, Tensor], Tensor] | None,
) -> None:
    """Give an empty ``model`` the ``stored`` tensors, which come from the folder ``path``."""
    tied = model.config.tie_word_embeddings
    parts = ["model.embed_tokens.", "model.norm.", "lm_head."]
    parts += [f"model.layers.{layer}." for layer in range(model.config.num_hidden_layers)]
    # A head that is tied is the embedding, and no parameter besides.
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for file, name, tensor in progress(stored, f"reading {path}: tensors", len(shapes)):
        if tied and name == HEAD:  # a file may have either of the two, or both
            name = EMBEDDING
        if name not in shapes:
            # Old checkpoints have tables of the rotary embedding, which are computed here.
            if name.startswith(tuple(parts)) and ".rotary_emb." not in name:
                raise ValueError(f"{file} has the tensor {name!r}, which no such model has")
            continue
        if share is not None and tensor.dim() == len(shapes[name]):
            tensor = share(name, tensor)
        if tuple(tensor.shape) != shapes[name] or tensor.dtype not in DTYPES.values():
            found = f"{tuple(tensor.shape)} in {tensor.dtype}; expected {shapes[name]}"
            raise ValueError(f"{file}: {name} is {found}, not quantised")
        tensor = tensor.to(device, dtype, copy=True)  # the file is not needed any more
        if name in tensors and not torch.equal(tensors[name], tensor):
            words = f"{name} differs from the one read before; tie_word_embeddings is {tied}"
            raise ValueError(f"{file}: {words}")
        tensors[name] = tensor
    if missing := shapes.keys() - tensors.keys():
        raise ValueError(f"{path} has no tensor {min(missing)}, which config.json asks for")
    model.load_state_dict(tensors, strict=False, assign=True)
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    model.requires_grad_(False).eval()


def read_tensors(folder: Path, not_read: tuple[str, ...]) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield (file, name, tensor) of the weights in ``folder``, with one file open at a time.

    They are safetensors or pickled ``.bin``, one file or shards, mapped into memory: a tensor is
    read when it is copied. Those whose names begin with ``not_read`` are left out, and files that
    have no others need not be there.
    """
    for file in find_files(folder, not_read):
        try:
            for name, tensor in read_file(file):
                if not name.startswith(not_read):
                    yield file, name, tensor.detach()
        except Exception as error:  # reading a damaged file can fail in many ways
            reason = str(error).partition("\n")[0]
            raise ValueError(f"{file} cannot be read: {reason}") from None


def read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a file. Nothing that a pickle holds is run."""
    if file.suffix == ".bin":
        yield from torch.load(file, "cpu", weights_only=True, mmap=True).items()
    else:
        file.open("rb").close()  # see ``read_safetensors``
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():
                yield name, opened.get_tensor(name)


def find_files(folder: Path, not_read: tuple[str, ...]) -> list[Path]:
    """The files with the weights of ``folder``, of the first kind that is there.

    Shards that only have tensors whose names begin with ``not_read`` are left out.
    """
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.is_file():
            file_of = read_json(index).get("weight_map")
            if not isinstance(file_of, dict) or set(map(type, file_of.values())) != {str}:
                raise ValueError(f"{index} has no weight_map from names of tensors to files")
            files = {file for name, file in file_of.items() if not name.startswith(not_read)}
            return [folder / file for file in sorted(files)]
    raise FileNotFoundError(f"{folder} has no model.safetensors and no pytorch_model.bin")


class Uninitialised(TorchFunctionMode):
    """In this context torch.nn.init does nothing: on meta it would import PyTorch's compiler."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(function, "__module__", None) != "torch.nn.init":
            return function(*args, **(kwargs or {}))


def empty_model(config: LlamaConfig) -> Llama:
    """A Llama whose parameters have names and shapes but no memory yet."""
    with torch.device("meta"), Uninitialised():
        return Llama(config)


def check_device(device: torch.device | str) -> torch.device:
    """A device's name, or "auto": a CUDA GPU if there is one, else the CPU; ValueError: not here.

    Other accelerators, such as "mps" or "xpu", are used if they are named.
    """
    name = str(device)
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda":  # under torchrun each process has its own GPU
        name = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    try:
        tried = torch.zeros(1, device=name)
        tried.item()  # which the device "meta" has not
    except Exception:  # PyTorch has many ways to say so
        raise ValueError(f"no device '{device}' here; expected auto, or one such as cpu") from None
    return tried.device


def name_of(dtype: torch.dtype | str) -> str:
    return str(dtype).removeprefix("torch.")


def choose_dtype(dtype: torch.dtype | str, device: torch.device, stored: str) -> torch.dtype:
    """A dtype, its name, or "auto": that of the ``stored`` weights, if the device is fast in it.

    If it is not, a GPU computes in float16, and any other device in float32. ValueError: no dtype.
    """
    name = name_of(stored if dtype == "auto" else dtype)
    if name not in DTYPES:
        raise ValueError(f"dtype: expected auto, {', '.join(DTYPES)}, not {name!r}")
    if dtype != "auto" or is_fast(DTYPES[name], device):
        return DTYPES[name]
    return torch.float16 if device.type == "cuda" else torch.float32


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device computes in a dtype itself, and does not emulate it."""
    if device.type == "cpu":
        native = torch.cpu.get_capabilities().get("avx512_bf16", False)
        return dtype.itemsize > 2 or (dtype == torch.bfloat16 and native)
    if device.type == "cuda" and dtype == torch.bfloat16:  # T4 and V100 lack it
        return torch.cuda.get_device_capability(device) >= (8, 0)
    return device.type != "mps" or dtype != torch.float64


def placement(model: Llama) -> str:
    """One line for people: where a model is, in which dtype, and its memory."""
    gigabytes = sum(parameter.nbytes for parameter in model.parameters()) / 1e9
    return f"{model.device}, {name_of(model.dtype)}, {gigabytes:.2f} GB of weights"
