"""What a user names a method -> options of ``generate``; transformers' own decoders.

A method is a name, or a name with options: lists as 2,3,4, trees as ``run.py --tree`` takes them,
``stop`` as a number or the file of a decision model. ``batch=8`` answers 8 prompts at once. Two
options have no value: ``compile`` and ``rejection``.
"""

import time
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..checkpoint import empty_model
from ..checkpoint.config import config_to_dict, read_drafting
from ..cli.program import comma_separated, parse_stop, parse_tree
from ..decision import load_decision
from ..model import LlamaConfig
from ..ngram.datastore import find_datastore
from ..options import METHODS, check_whole

READERS = {"exits": comma_separated(int), "thresholds": comma_separated(float)}
READERS["stop"] = parse_stop
READERS |= {"draft_length": int, "tree": parse_tree, "init": str, "batch": int}


def default_methods(draft_path: Path | None) -> list[str]:
    """Every method, and ``sd`` from each exit of a draft alone; exit 0 if there is no draft."""
    if draft_path is None:
        return ["s2d-tree:exits=0"]
    exits = read_drafting(draft_path).exits
    return [*(f"sd:exits={layers}" for layers in exits), "mcsd", "s2d", "s2d-tree"]


def parse_method(text):
    """Options of ``generate``, with "compile" and "batch", of s2d:draft_length=8 for example."""
    name, *settings = text.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)}")
    options = {"method": name, "compile": False, "batch": 1}
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting == "compile":
            options["compile"] = True
        elif setting == "rejection":
            options["rule"] = "rejection"
        elif key in READERS:
            options[key] = READERS[key](value)
        else:
            raise ValueError(f"method {text!r}: no option {setting!r}")
    check_whole("batch", options["batch"], 1)
    return options


def prepare(method: dict[str, Any], config: LlamaConfig, folder: Path) -> dict[str, Any]:
    """Options of ``generate`` of a parsed method, with what the files it names hold.

    ``config`` is of the target in ``folder``.
    """
    options = {key: value for key, value in method.items() if key not in ("compile", "batch")}
    if isinstance(method.get("stop"), str):
        options["decision"] = load_decision(options.pop("stop"))
    if 0 in method.get("exits", ()):
        options["datastore"] = find_datastore(folder, config)
    return options


def as_transformers(model, folder=None):
    """transformers' Llama with the weights of ``model``, in the same memory.

    Its configuration is what transformers reads in ``folder``, or else that of ``model``.
    """
    import transformers  # which only this needs

    if folder is None:
        config = transformers.LlamaConfig(**config_to_dict(model.config, model.dtype))
    else:
        config = transformers.LlamaConfig.from_pretrained(folder)
    peer = empty_model(config, transformers.LlamaForCausalLM)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.to(model.device).eval()


def peers_of(target, draft):
    """{name: run} of transformers' ``generate``: alone, assisted by a ``draft``, with look-up."""
    run = partial(run_peer, as_transformers(target))
    peers = {"transformers": run}
    if draft:
        peers["transformers assisted"] = partial(run, assistant_model=as_transformers(draft))
    return peers | {"transformers look-up": partial(run, prompt_lookup_num_tokens=10)}


def run_peer(peer, prompts, seed, temperature, max_new_tokens, **options):
    """[(tokens, seconds, None)], one prompt after the other."""
    if temperature:
        options |= {"temperature": temperature, "top_k": 0}
    found = []
    for number, prompt in enumerate(prompts):
        torch.manual_seed(seed + number)
        tokens = torch.tensor([prompt], device=peer.device)
        options["attention_mask"] = torch.ones_like(tokens)
        room = peer.config.max_position_embeddings - len(prompt)
        options["max_new_tokens"] = min(max_new_tokens, room)
        began = time.perf_counter()
        output = peer.generate(tokens, do_sample=temperature > 0, pad_token_id=0, **options)
        output = output[0, len(prompt) :].tolist()
        found.append((output, time.perf_counter() - began, None))
    return found
