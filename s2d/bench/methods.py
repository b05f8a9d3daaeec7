"""From what a user names a method to options; the peer's methods.

A method is a name, or a name with options of ``generate``: lists as 2,3,4, a growing tree as 4x8x24
(top_k, depth, size), ``stop`` as a number, the file of a decision model, or "decision" for the one
beside the draft. Two take no value: ``coupled``, and ``compile``, with which its passes are
compiled. Knows nothing about questions.
"""

import time
from functools import partial

import torch

from ..extras.datastore import datastore_path, load_datastore
from ..extras.decision import read_stop
from ..generate import METHODS
from ..program import comma_separated, optional
from ..tree import Dynamic
from ..weights import empty_model, load_model
from ..weights.config import config_to_dict
from ..weights.names import WEIGHTS, draft_beside


def draft_of(args, source):
    """The folder of the draft: as asked for, else the one beside ``source``, else mini-draft."""
    beside = draft_beside(source)
    return args.draft or (beside if beside.is_dir() else WEIGHTS / "mini-draft")


def datastore_of(target, config):
    """The Datastore of the target in this folder; None where there is none."""
    file = datastore_path(target)
    return load_datastore(file, config) if file.is_file() else None


def choose_methods(args):
    """(names of methods, {whether compiled: draft}), the draft None where only "ar" is asked."""
    needed = args.methods is None or any(name.split(":")[0] != "ar" for name in args.methods)
    load = partial(load_model, args.draft, args.device, args.dtype)
    drafts = {False: load() if needed else None}
    names = ["ar", *(args.methods or default_methods(drafts[False]))]  # all are compared to "ar"
    if args.compile:
        names = [name.replace(":compile", "") for name in names]
        names = [each for name in names for each in (name, f"{name}:compile")]
    if any("compile" in name.split(":") for name in names):
        drafts[True] = load(compile=True) if needed else None
    return list(dict.fromkeys(names)), drafts


def default_methods(draft):
    """Every method, and ``sd`` from each exit of the draft alone."""
    exits = draft.config.exit_layers or (draft.config.num_hidden_layers,)
    return ["ar", *(f"sd:exits={e}" for e in exits), "mcsd", "s2d", "s2d-tree"]


def parse_method(text, draft, draft_path, target_path):
    """(whether it runs compiled, options of ``generate``), of "s2d:draft_length=8" for example."""
    name, *settings = text.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)}")

    def stop(value):
        beside = draft_path / f"decision-{target_path.name.removeprefix('mini-')}.safetensors"
        return read_stop(str(beside) if value == "decision" else value, draft)

    readers = {"exits": comma_separated(int), "thresholds": comma_separated(float)}
    readers |= {"draft_length": int, "tree": tree, "init": str, "stop": stop}
    try:
        valued = [each for each in settings if each not in ("compile", "coupled")]
        pairs = [each.partition("=")[::2] for each in valued]
        options = {key: readers[key](value) for key, value in pairs}
        options |= {"coupled": True} if "coupled" in settings else {}
    except (KeyError, ValueError) as error:
        wrong = f"no option {error}" if isinstance(error, KeyError) else error
        raise ValueError(f"method {text!r}: {wrong}") from None
    return "compile" in settings, {"method": name, **options}


def tree(value):
    """4,2,2,1 -> the numbers of children, level by level; 4x8x24 -> a Dynamic."""
    if "x" not in value:
        return comma_separated(int)(value)
    shape = [int(number) for number in value.split("x")]
    if len(shape) != 3:
        raise ValueError("a dynamic tree is three numbers, such as 4x8x24")
    return Dynamic(*shape)


def peer_of(model):
    """transformers' Llama with the weights of ``model``, in the same memory."""
    transformers = optional("transformers", "-r tests/requirements.txt")  # is no dependency
    config = transformers.LlamaConfig(**config_to_dict(model.config, model.dtype))
    peer = empty_model(config, transformers.LlamaForCausalLM)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.to(model.device).eval()


def peers_of(target, draft):
    """{name: run(temperature, new tokens, prompt, seed) -> (tokens, seconds, None)} of the peer.

    Its own ``generate`` alone, assisted by the same draft if there is one, and with prompt look-up.
    """
    peer, size = peer_of(target), target.config.max_position_embeddings

    def run(temperature, max_new_tokens, prompt, seed, **how):
        torch.manual_seed(seed)
        tokens = torch.tensor([prompt], device=target.device)
        how |= {"attention_mask": torch.ones_like(tokens), "pad_token_id": 0, "do_sample": False}
        how["max_new_tokens"] = min(max_new_tokens, size - len(prompt))
        if temperature:
            how |= {"do_sample": True, "temperature": temperature, "top_k": 0}
        began = time.perf_counter()
        output = peer.generate(tokens, **how)[0, len(prompt) :].tolist()
        return output, time.perf_counter() - began, None

    peers = {"transformers": run}
    if draft:
        peers["transformers assisted"] = partial(run, assistant_model=peer_of(draft))
    return peers | {"transformers look-up": partial(run, prompt_lookup_num_tokens=10)}
