"""What a user names a method -> options of ``generate``; transformers' own decoders.

A method is a name, or a name with options: lists as 2,3,4, trees as ``run.py --tree`` takes them,
``stop`` as a number, the file of a decision model, or "decision" for the one next to the draft.
``batch=8`` answers 8 prompts at once. Two options have no value: ``compile`` and ``rejection``.
"""

import time
from functools import partial

import torch

from ..extras.datastore import load_datastore
from ..extras.node_count import options_for
from ..fast.costs import pass_seconds
from ..fast.linear import lay_out
from ..generate import METHODS
from ..program import comma_separated, parse_tree, read_stop
from ..weights import empty_model
from ..weights.config import config_to_dict, read_config
from ..weights.names import datastore_path

MOST_ROWS = 17  # of a pass over one prompt whose cost is asked for


def default_methods(draft_path):
    """Every method, and ``sd`` from each exit of a draft alone; exit 0 where there is no draft."""
    if not draft_path.is_dir():
        return ["s2d-tree:exits=0"]
    config = read_config(draft_path)
    exits = config.exit_layers or (config.num_hidden_layers,)
    return [*(f"sd:exits={e}" for e in exits), "mcsd", "s2d", "s2d-tree"]


def parse_method(text):
    """Options of ``generate``, with "compile" and "batch", of s2d:draft_length=8 for example."""
    name, *settings = text.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)}")
    readers = {"exits": comma_separated(int), "thresholds": comma_separated(float), "stop": str}
    readers |= {"draft_length": int, "tree": parse_tree, "init": str, "batch": int}
    options = {"method": name, "compile": "compile" in settings, "batch": 1}
    for setting in settings:
        key, _, value = setting.partition("=")
        if setting == "rejection":
            options["coupled"] = False
        elif key in readers:
            options[key] = readers[key](value)
        elif setting != "compile":
            raise ValueError(f"method {text!r}: no option {setting!r}")
    return options


def prepare(method, target, draft, target_path, draft_path):
    """Options of ``generate`` of a parsed method, with what its models and this machine add."""
    options = {key: value for key, value in method.items() if key not in ("compile", "batch")}
    if options.get("stop") == "decision":
        size = target_path.name.removeprefix("mini-")
        options["stop"] = draft_path / f"decision-{size}.safetensors"
    if "stop" in options:
        options["stop"] = read_stop(str(options["stop"]), draft)
    if 0 in options.get("exits", ()):
        file = datastore_path(target_path)
        options["datastore"] = load_datastore(file, target.config) if file.is_file() else None
    return options | tune(method, target, draft)


def tune(method, target, draft):
    """Pack weights for passes of several rows; returns options for how many nodes exit 0 sends."""
    if method["method"] == "ar":
        return {}
    for model in filter(None, (target, draft)):
        lay_out(model)
    if method.get("exits") != (0,) or "stop" in method:
        return {}
    costs = pass_seconds(target, rows=method["batch"] * MOST_ROWS)  # None where not known
    return options_for(costs, method["batch"]) if costs else {}


def peer_of(model):
    """transformers' Llama with the weights of ``model``, in the same memory."""
    import transformers  # which only this needs

    config = transformers.LlamaConfig(**config_to_dict(model.config, model.dtype))
    peer = empty_model(config, transformers.LlamaForCausalLM)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.to(model.device).eval()


def peers_of(target, draft):
    """{name: run} of transformers' ``generate``: alone, assisted by a ``draft``, with look-up."""
    run = partial(run_peer, peer_of(target), target.config.max_position_embeddings)
    peers = {"transformers": partial(run, {})}
    if draft:
        peers["transformers assisted"] = partial(run, {"assistant_model": peer_of(draft)})
    return peers | {"transformers look-up": partial(run, {"prompt_lookup_num_tokens": 10})}


def run_peer(peer, context_size, options, prompts, seed, temperature, max_new_tokens):
    """[(tokens, seconds, None)], one prompt after the other."""
    sampling = {"do_sample": True, "temperature": temperature, "top_k": 0}
    options = options | (sampling if temperature else {"do_sample": False})
    found = []
    for number, prompt in enumerate(prompts):
        torch.manual_seed(seed + number)
        tokens = torch.tensor([prompt], device=peer.device)
        options |= {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0}
        options["max_new_tokens"] = min(max_new_tokens, context_size - len(prompt))
        began = time.perf_counter()
        output = peer.generate(tokens, **options)[0, len(prompt) :].tolist()
        found.append((output, time.perf_counter() - began, None))
    return found
