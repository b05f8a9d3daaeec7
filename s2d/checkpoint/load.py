"""A Hugging Face folder (config.json and weights) <-> a Llama, and where its weights lie."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..files import read_json, staged_folder
from ..model import Llama
from ..notices import progress, tell
from ..options import default_drafting, drafting_of
from .config import config_to_dict, read_config, read_drafting, read_generation_config
from .shards import read_tensors

ROTARY = ".rotary_emb."  # in the names of tables in old checkpoints, which are computed here
DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16")}
# What a model is spoken to with, and where its answers end: copied with its weights.
COMPANIONS = (
    "tokenizer.model",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
)
# The name and shape of a tensor -> the slices of it to load.
Share = Callable[[str, tuple[int, ...]], slice | tuple[slice, ...]]


def load_model(
    path: Path | str,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | str = "auto",
    share: Share | None = None,
    graphs: bool = False,
    quick: bool = True,
    layers: int | None = None,
) -> Llama:
    """Load a Llama from the folder ``path``, tensor by tensor straight onto ``device``.

    Args:
        device: see ``check_device``.
        dtype: see ``choose_dtype``.
        share: name and shape of a tensor -> the slices of it to load (tensor_parallel.py).
        graphs: on a CUDA GPU, passes over a few tokens are CUDA graphs (speed/graphs.py), captured
            when they are first needed. Afterwards the model must not be moved, cast or changed.
        quick: on a CPU, lay the weights out anew for matmuls of a few rows (speed/layout.py). The
            model may then be for inference alone: say False if it is to be trained, changed, moved
            or saved.
        layers: how many of the first layers to read: a draft needs those up to its last exit. The
            others need not be in the folder. Exits after them are left out.

    What the folder has that is not needed or cannot be read is left out, and said on stderr. Raises
    FileNotFoundError, or ValueError for what is not a Llama this project can run.
    """
    path = Path(path)
    device = check_device(device)
    config = read_config(path)
    dtype = choose_dtype(dtype, device, path)
    drafting = read_drafting(path)
    tell_of_generation_config(path)
    stored_layers = config.num_hidden_layers
    if layers is not None:
        if not 0 < layers <= stored_layers:
            raise ValueError(f"{path} has {stored_layers} layers, not {layers}")
        config = replace(config, num_hidden_layers=layers)
        drafting = drafting.within(layers)
    kind: type[Llama] = Llama
    if graphs:
        if device.type != "cuda":
            raise ValueError(f"CUDA graphs are for a CUDA GPU, not for {device}")
        from ..speed.graphs import GraphedLlama

        kind = GraphedLlama
    # Whether LM head and embedding are one is known when it is known which of them are stored.
    model = empty_model(replace(config, tie_word_embeddings=False), kind)
    model.drafting = drafting
    missing, left_out = read_parameters(
        model, path, device=device, dtype=dtype, stored_layers=stored_layers, share=share
    )
    if config.tie_word_embeddings:
        tie_head(model, missing, path)
    if missing:
        raise ValueError(f"{path} has no tensor {min(missing)}, which config.json asks for")
    if left_out:
        some = ", ".join(sorted(left_out)[:2]) + (", ..." if len(left_out) > 2 else "")
        tell(f"{path}: config.json does not ask for all tensors; left out {len(left_out)}: {some}")
    model = model.to(device=device, dtype=dtype).eval()  # moves what is left: the rotary table
    if quick and device.type == "cpu":
        from ..speed.layout import quicken

        quicken(model)
    return model


def tell_of_generation_config(path: Path) -> None:
    """Say it if ``read_config`` left generation_config.json out, as it cannot be read."""
    try:
        read_generation_config(path)
    except (ValueError, OSError) as error:
        tell(f"{error}; left out, so that answers end where config.json says")


def read_parameters(
    model: Llama,
    path: Path,
    device: torch.device,
    dtype: torch.dtype,
    stored_layers: int,
    share: Share | None,
) -> tuple[set[str], list[str]]:
    """Read what is in the folder ``path`` into a model that has no memory yet.

    Of the folder's ``stored_layers`` the model may have only the first; the others are not read.
    ``share`` is that of ``load_model``. Returns (the parameters that are not stored, the tensors
    that were left out, as no layer needs them). Raises ValueError for a tensor that does not fit.
    """
    layers = model.config.num_hidden_layers
    not_read = tuple(f"model.layers.{layer}." for layer in range(layers, stored_layers))
    stored = (each for each in read_tensors(path) if not each[1].startswith(not_read))
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    missing = set(shapes)
    left_out = []
    for file, name, tensor in progress(stored, f"reading {path}: tensors", len(shapes)):
        if name in shapes:
            refuse_misfit(file, name, tensor, shapes[name])
            if share is not None:
                tensor = tensor[share(name, shapes[name])].contiguous()
            tensor = tensor.to(device, dtype, copy=True)  # so that the file is not needed any more
            module, _, leaf = name.rpartition(".")
            parameter = nn.Parameter(tensor, requires_grad=False)
            setattr(model.get_submodule(module), leaf, parameter)
            missing.discard(name)
        elif ROTARY in name:
            continue
        elif is_in_a_part(name, layers):
            raise ValueError(f"{file} has the tensor {name!r}, which no such model has")
        else:
            left_out.append(name)
    return missing, left_out


def refuse_misfit(file: Path, name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ValueError if a tensor does not have the ``shape``, or is quantised."""
    plain = tensor.dtype in DTYPES.values() and not (tensor.is_sparse or tensor.is_meta)
    if tuple(tensor.shape) != shape or not plain:
        found = f"{tuple(tensor.shape)} in {tensor.dtype}"
        raise ValueError(f"{file}: {name} is {found}; expected {shape}, not quantised")


def is_in_a_part(name: str, layers: int) -> bool:
    """Whether a tensor is in a part of a Llama with so many ``layers``.

    One that the model does not have, such as a bias or the scale of quantised weights, would change
    what that part computes.
    """
    parts = ["model.embed_tokens.", "model.norm.", "lm_head."]
    parts += [f"model.layers.{layer}." for layer in range(layers)]
    return name.startswith(tuple(parts))


def tie_head(model: Llama, missing: set[str], path: Path) -> None:
    """Make LM head and embedding one, by whichever of them is stored, as transformers does.

    ``missing`` are the parameters that are not stored; the one of the two is taken out of it that
    is not needed then. If both are stored and differ, config.json is wrong, and both are kept.
    """
    embedding = model.model.embed_tokens
    head = model.lm_head
    if "model.embed_tokens.weight" in missing and "lm_head.weight" not in missing:
        missing.remove("model.embed_tokens.weight")
        embedding.weight = head.weight
    elif "lm_head.weight" in missing:
        missing.remove("lm_head.weight")
        head.weight = embedding.weight
    elif torch.equal(head.weight, embedding.weight):
        head.weight = embedding.weight
    else:
        tell(
            f"{path}: config.json ties the LM head to the embedding, but they differ; both are kept"
        )
        return
    model.config = replace(model.config, tie_word_embeddings=True)


class Uninitialised(TorchFunctionMode):
    """In this context the functions of torch.nn.init leave tensors as they are.

    On the meta device their random numbers are for nothing, and drawing them would import PyTorch's
    compiler, which takes most of a second.
    """

    def __torch_function__(
        self,
        function: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"] if "tensor" in kwargs else args[0]
        return function(*args, **kwargs)


def empty_model(config: Any, kind: type[nn.Module] = Llama) -> nn.Module:
    """A Llama whose parameters have names and shapes but no memory yet.

    ``kind`` makes it of a ``config``: LlamaConfig, or that of transformers for transformers' Llama.
    """
    with torch.device("meta"), Uninitialised():
        return kind(config)


def save_model(
    model: Llama,
    path: Path | str,
    tokenizer_from: Path | str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    learnt_from: str | None = None,
) -> None:
    """Write ``model`` as a Hugging Face folder that transformers loads as LlamaForCausalLM.

    The tokenizer in the folder ``tokenizer_from`` is copied along. ``learnt_from``, in config.json,
    says what data a draft was trained on. ValueError: ``path`` is there.
    """
    state = model.state_dict()
    if model.config.tie_word_embeddings:
        del state["lm_head.weight"]
    tensors = {name: tensor.to("cpu", dtype).contiguous() for name, tensor in state.items()}
    with staged_folder(path) as stage:
        for name in COMPANIONS:
            if tokenizer_from and (Path(tokenizer_from) / name).is_file():
                shutil.copyfile(Path(tokenizer_from) / name, stage / name)
        save_file(tensors, stage / "model.safetensors", metadata={"format": "pt"})
        drafting = drafting_of(model)
        if drafting == default_drafting(model.config):
            drafting = None
        config = config_to_dict(model.config, dtype, drafting)
        if learnt_from is not None:
            config["learnt_from"] = learnt_from
        (stage / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def check_device(device: torch.device | str) -> torch.device:
    """A device's name, or "auto" -> torch.device; ValueError if it is not here.

    "auto" is a CUDA GPU if there is one, else the CPU. Other accelerators, such as "mps" or "xpu",
    are used if they are named.
    """
    name = str(device)
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = "" if accelerator is None else accelerator.type
    here = ["cpu", *(f"{kind}:{number}" for number in range(torch.accelerator.device_count()))]
    if name == "auto":
        name = "cuda" if kind == "cuda" else "cpu"
    if name == kind:  # under torchrun each process has its own GPU
        name = f"{kind}:{os.environ.get('LOCAL_RANK', 0)}"
    if name not in here:
        raise ValueError(f"no device {name!r} here; expected auto, {', '.join(here)}")
    return torch.device(name)


def choose_dtype(dtype: torch.dtype | str, device: torch.device, path: Path | str) -> torch.dtype:
    """A dtype, its name, or "auto": config.json's in ``path``, float32 if that is not fast.

    Raises ValueError for a dtype that is unknown, or that was asked for and the device lacks.
    """
    if isinstance(dtype, torch.dtype):
        return check_dtype(dtype, device)
    raw = read_json(Path(path) / "config.json")
    own = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    name = str(own if dtype == "auto" else dtype)
    if name not in DTYPES:
        raise ValueError(f"unknown dtype {name!r}; expected auto or one of {', '.join(DTYPES)}")
    if dtype == "auto" and not is_fast(DTYPES[name], device):
        return torch.float32
    return check_dtype(DTYPES[name], device)


def check_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """``dtype``; ValueError if the device lacks it, as Apple's GPUs lack float64."""
    if device.type in ("cpu", "cuda"):
        return dtype
    try:
        torch.zeros(1, dtype=dtype, device=device)
    except (TypeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{device} cannot compute in {dtype}: {reason}") from None
    return dtype


def is_fast(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a device computes in a dtype itself.

    Apple's GPUs lack float64; some devices emulate half precision, slower than float32.
    """
    if dtype.itemsize > 2:
        return dtype != torch.float64 or device.type != "mps"
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        return dtype == torch.float16 or capability >= (8, 0)  # T4 and V100 have no bfloat16
    if device.type != "cpu":
        return True
    native = torch.cpu.get_capabilities().get("avx512_bf16", False)
    return dtype == torch.bfloat16 and native


def placement(model: Llama) -> str:
    """One line for people: where a model is, in which dtype, how large, and its memory."""
    in_memory = sum(parameter.numel() for parameter in model.parameters())
    size = in_memory * model.dtype.itemsize
    count = in_memory
    head = model.lm_head.weight
    if model.config.tie_word_embeddings and head is not model.model.embed_tokens.weight:
        count -= head.numel()  # the embedding once more, packed (speed/layout.py)
    dtype = str(model.dtype).removeprefix("torch.")
    millions = f"{count / 1e6:,.1f} M parameters"
    untried = "" if model.device.type == "cpu" else " (untried: this has only run on CPUs)"
    return f"{model.device}{untried}, {dtype}, {millions}, {size / 1e9:.2f} GB of weights"
