"""The weights in a Hugging Face folder: safetensors or pickled ``.bin``, one file or shards.

``read_tensors`` maps the files into memory: a tensor is read when it is copied.
"""

from collections.abc import Iterator
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors import safe_open
from torch import Tensor

from ..files import lack_of_room, read_json

FILES = ("model.safetensors", "pytorch_model.bin")  # the first that is there, as in transformers


def read_tensors(folder: Path) -> Iterator[tuple[Path, str, Tensor]]:
    """Yield (file, name, tensor) of every tensor in ``folder``, with one file open at a time."""
    for file in find_files(folder):
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; download it again")
        try:
            for name, tensor in read_file(file):
                yield file, name, tensor
        except Exception as error:  # reading a damaged file can fail in many ways
            if lack_of_room(error):
                raise
            reason = str(error).partition("\n")[0]
            what = f"{file} is damaged, or holds more than tensors ({reason})"
            raise ValueError(f"{what}; download it again") from None


def find_files(folder: Path) -> list[Path]:
    """The files with the weights of ``folder``: a single one, or those that an index names."""
    for name in FILES:
        single = folder / name
        index = folder / f"{name}.index.json"
        if single.is_file():
            return [single]
        if index.is_file():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ValueError(f"{index} has no weight_map from names of tensors to files")
            names = set(weight_map.values())
            if not all(isinstance(name, str) for name in names):
                raise ValueError(f"{index} names files by something else than text")
            return [folder / name for name in sorted(names)]
    raise FileNotFoundError(f"{folder} has no {' and no '.join(FILES)}, whole or in shards")


def read_file(file: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) of a file. Nothing that a pickle holds is run."""
    if file.suffix == ".bin":
        # PyTorch's format from before version 1.6 is no zip file, and cannot be mapped.
        mapped = is_zipfile(file)
        state = torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)
        for name in state:
            yield str(name), state[name].detach()
        return
    with safe_open(file, framework="pt") as opened:
        for name in opened.keys():
            yield name, opened.get_tensor(name)
