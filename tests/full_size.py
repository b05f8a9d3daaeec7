"""What full-size models take here: not a test, and not run by CI.

    python tests/full_size.py make DIR [--shape 7b]     # random weights, 13.5 GB for 7b
    python tests/full_size.py measure DIR               # a table in markdown

The target has a published shape and random weights. Its layers after the 6th change little, and
those after the 9th and 12th even less, so that a draft of its first 12 layers is often right. The
text means nothing; times and memory are those of a trained model of this shape, but tokens per
step are what the random weights were made for.
"""

import argparse
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch
from safetensors.torch import save_file
from torch import Tensor

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from s2d import generate, load_model  # noqa: E402
from s2d.checkpoint import empty_model  # noqa: E402
from s2d.checkpoint.config import config_to_dict  # noqa: E402
from s2d.checkpoint.files import staged  # noqa: E402
from s2d.model import Drafting, LlamaConfig  # noqa: E402

SHAPES = {  # hidden size, MLP width, layers, heads, key/value heads, vocabulary
    "7b": (4096, 11008, 32, 32, 32, 32000),  # Vicuna 7B, Llama 2 7B
    "1b": (2048, 5632, 22, 32, 4, 32000),  # TinyLlama
    "tiny": (256, 688, 16, 4, 4, 1000),
}
EXITS, DRAFT_LAYERS = (6, 9, 12), 12
# How much a layer adds to the residual stream, by its number: up to 6, up to 9, up to 12, above.
WEIGHT_OF = {6: 1.0, 9: 0.2, 12: 0.12, 10**9: 0.05}
# The published thresholds are 0.5: random weights are hardly ever as confident.
DRAFTING = Drafting(EXITS, thresholds=(0.2, 0.2, 0.0), length=5)
ROUNDS = 3  # the median of which counts
NEW_TOKENS = 48
METHODS = {
    "`ar`": dict(method="ar"),
    "`sd`, exit 6": dict(method="sd", exits=(6,)),
    "`sd`, exit 9": dict(method="sd", exits=(9,)),
    "`sd`, exit 12": dict(method="sd", exits=(12,)),
    "`s2d`": dict(method="s2d"),
}


def config_of(shape: str) -> LlamaConfig:
    """The architecture of a target; its text never ends by itself."""
    hidden, width, layers, heads, kv_heads, vocab_size = SHAPES[shape]
    sizes = dict(vocab_size=vocab_size, hidden_size=hidden, intermediate_size=width)
    sizes |= dict(num_attention_heads=heads, num_key_value_heads=kv_heads)
    sizes |= dict(head_dim=hidden // heads, num_hidden_layers=layers)
    return LlamaConfig(eos_token_ids=(), **sizes)


def draft_config(config: LlamaConfig) -> LlamaConfig:
    """That of the target's first layers."""
    return replace(config, num_hidden_layers=DRAFT_LAYERS, drafting=DRAFTING)


def layer_of(name: str) -> int:
    """The number, from 1 on, of the layer that has the parameter ``name``; 0: none."""
    layer = re.search(r"layers\.(\d+)\.", name)
    return int(layer[1]) + 1 if layer else 0


def fill(name: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Give the target's parameter ``name`` its random values; ``generator`` is on its device."""
    std = tensor.shape[-1] ** -0.5  # a layer's output has the size of its input
    if name.endswith(("o_proj.weight", "down_proj.weight")):
        std *= next(weight for last, weight in WEIGHT_OF.items() if layer_of(name) <= last)
    if name == "lm_head.weight":
        std *= 4  # distributions that are far from uniform
    if "embed" in name:
        std = 1.0
    if tensor.dim() == 2:
        tensor.normal_(0.0, std, generator=generator)
    else:
        tensor.fill_(1.0)


def make(folder: Path, shape: str) -> None:
    """Write a target whose first layers are a draft, a file for each of its tensors."""
    config = replace(config_of(shape), drafting=DRAFTING)
    generator = torch.Generator().manual_seed(0)
    with staged(folder) as stage:
        stage.mkdir(parents=True)
        files = {}
        for name, parameter in empty_model(config).named_parameters():
            tensor = torch.empty(parameter.shape, dtype=torch.bfloat16)
            fill(name, tensor, generator)
            files[name] = f"model-{len(files):05}.safetensors"
            save_file({name: tensor}, stage / files[name], metadata={"format": "pt"})
        raw = config_to_dict(config, torch.bfloat16)
        (stage / "config.json").write_text(json.dumps(raw))
        index = {"metadata": {}, "weight_map": files}
        (stage / "model.safetensors.index.json").write_text(json.dumps(index))


def measure_one(folder: Path, name: str) -> None:
    """Print what one method takes, as a row of a table; in a process of its own."""
    began = time.perf_counter()
    options = METHODS[name]
    target = load_model(folder, dtype="bfloat16")
    weights = sum(parameter.nbytes for parameter in target.parameters())
    draft = None
    if options["method"] != "ar":
        draft = load_model(folder, dtype="bfloat16", layers=DRAFT_LAYERS)
        weights += sum(parameter.nbytes for parameter in draft.parameters())
    loaded = time.perf_counter() - began
    prompt = torch.randint(target.config.vocab_size, (64,), generator=torch.Generator()).tolist()
    generate(target, prompt, draft, max_new_tokens=16, **options)  # packs what is to be packed
    firsts, others = [], []  # seconds: of the first token, of each other
    for _ in range(ROUNDS):
        first = generate(target, prompt, draft, max_new_tokens=1, **options).stats.seconds
        stats = generate(target, prompt, draft, max_new_tokens=NEW_TOKENS, **options).stats
        firsts.append(first)
        others.append((stats.seconds - first) / (NEW_TOKENS - 1))
    peak = 1024 * int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text())[1])
    cells = [f"{median(others):.3f}", f"{stats.mean_accepted_tokens:.2f}"]
    cells += [f"{median(firsts):.2f}", f"{loaded:.0f}"]
    cells += [f"{weights / 1e9:.1f}", f"{peak / 1e9:.1f}"]
    print("| " + " | ".join([name, *cells]) + " |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program", choices=("make", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="7b")
    parser.add_argument("--method", choices=METHODS)
    args = parser.parse_args()
    if args.program == "make":
        make(args.folder, args.shape)
    elif args.method:
        measure_one(args.folder, args.method)
    else:
        titles = "seconds per token, tokens per step, first token, load, weights in GB, peak in GB"
        print("| | " + " | ".join(titles.split(", ")) + " |")
        print("|---" * 7 + "|", flush=True)
        again = [sys.executable, __file__, "measure", str(args.folder)]
        for name in METHODS:
            subprocess.run([*again, "--method", name], check=True)


if __name__ == "__main__":
    main()
