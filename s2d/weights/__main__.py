"""Getting weights in: pickled checkpoints to safetensors, and whether a folder will load.

    python -m s2d.weights convert weights/vicuna-7b-hub weights/vicuna-7b
    python -m s2d.weights check weights/vicuna-7b
"""

import json
import shutil
import sys
import zipfile
from collections import Counter
from pathlib import Path

import torch

from ..files import staged_folder
from ..program import Parser, run_program
from ..tokenizer import Tokenizer
from . import DTYPES, check_shape, empty_model, parameter_shapes, read_tensors, torch_files, write_shards
from .config import read_config, read_json

COPIED = ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")


class PickledShards:
    """A checkpoint's pytorch_model*.bin files as a sequence of {name: tensor}, of which one is in memory at a time."""

    def __init__(self, path, shapes, dtype):
        self.path, self.shapes, self.dtype = path, shapes, dtype
        self.files = torch_files(path)

    def __len__(self):
        return len(self.files)

    def __getitem__(self, number):
        """The tensors that a Llama has (old checkpoints hold tables beside them), in the wanted dtype."""
        file = self.files[number]
        try:
            # Before torch 1.6 a checkpoint was no zip archive; such a file cannot be mapped, so it is read whole.
            state = torch.load(file, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(file))
            tensors = {name: state[name] for name in state if name in self.shapes}
        except Exception as error:  # unpickling what is damaged can fail in every way
            reason = str(error).partition("\n")[0] or type(error).__name__
            raise ValueError(f"{file} is damaged or holds more than tensors ({reason}); download it again") from None
        for name, tensor in tensors.items():
            check_shape(self.path, name, tensor.shape, self.shapes[name])
        return {name: tensor.to(self.dtype or tensor.dtype).contiguous() for name, tensor in tensors.items()}


def convert(source, destination, dtype):
    """Pickled shards -> a folder of safetensors shards, one by one; ``dtype`` None keeps what the tensors have."""
    config = read_config(source)
    shards = PickledShards(source, parameter_shapes(empty_model(config)), dtype)
    if not len(shards):
        raise FileNotFoundError(f"{source} has no pytorch_model*.bin to convert")
    if destination.exists():
        raise ValueError(f"{destination} is there already; remove it first or name another folder")
    with staged_folder(destination) as stage:
        written = write_shards(shards, stage)
        if missing := [name for name in shards.shapes if name not in written]:
            raise ValueError(f"{source}: {len(missing)} tensors are in no shard, {missing[0]} first; download it again")
        for name in COPIED:
            if (source / name).is_file():
                shutil.copyfile(source / name, stage / name)
        raw = read_json(source / "config.json")
        dtypes = {"torch_dtype": str(dtype).removeprefix("torch.")} if dtype else {}
        # Last of all: without a config.json no folder loads.
        (stage / "config.json").write_text(json.dumps(raw | dtypes, indent=2) + "\n")
    print(check(destination))


def check(path):
    """One line on a folder that will load; raises FileNotFoundError or ValueError with the reason for any other."""
    config = read_config(path)
    shapes, nothing = parameter_shapes(empty_model(config)), lambda _, shape: (slice(0, 0),) * len(shape)
    found = Counter(str(tensor.dtype).removeprefix("torch.") for _, tensor in read_tensors(path, shapes, share=nothing))
    vocab_size = Tokenizer(path / "tokenizer.model").vocab_size
    if vocab_size > config.vocab_size:
        raise ValueError(f"{path}: the tokenizer knows {vocab_size} tokens, config.json has vocab_size {config.vocab_size}")
    count = sum(torch.Size(shape).numel() for shape in shapes.values())
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    exits = f", exits {list(config.exit_layers)}" if config.exit_layers else ""
    return (
        f"{path} will load: {config.num_hidden_layers} layers of width {config.hidden_size}{exits}, {count:,} parameters, "
        f"{size / 1e6:,.0f} MB of {' and '.join(found)}, vocabulary {config.vocab_size}, "
        f"context {config.max_position_embeddings}"
    )


def main(arguments=None):
    parser = Parser(prog="python -m s2d.weights", description=__doc__.splitlines()[0])
    programs = parser.add_subparsers(dest="program", required=True)
    converting = programs.add_parser("convert", help="pytorch_model-*.bin -> sharded safetensors")
    converting.add_argument("source", type=Path, metavar="SRC")
    converting.add_argument("destination", type=Path, metavar="DST")
    converting.add_argument("--dtype", choices=DTYPES, help="default: what the tensors have")
    checking = programs.add_parser("check", help="whether a folder will load, and why not")
    checking.add_argument("folder", type=Path, metavar="DIR")
    return run_program("weights", run, parser.parse_args(arguments))


def run(args):
    if args.program == "check":
        print(check(args.folder))
    else:
        convert(args.source, args.destination, DTYPES.get(args.dtype))


if __name__ == "__main__":
    sys.exit(main())
