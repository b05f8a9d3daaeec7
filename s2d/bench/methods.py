"""From what a user names a method to options; the peer's methods.

A method is a name, or a name with options of ``generate``: lists as 2,3,4, a growing tree as 4x8x24
(top_k, depth, size), ``stop`` as a number, the file of a decision model, or "decision" for the one
beside the draft. With ``compile``, which takes no value, its passes are compiled. Knows nothing
about questions.
"""

import time
from functools import partial
from itertools import product

import torch

from ..extras.decision import read_stop
from ..generate import METHODS
from ..program import comma_separated, optional
from ..tree import Dynamic
from ..weights import empty_model
from ..weights.config import config_to_dict


def default_methods(draft):
    """Every method, and ``sd`` from each exit of the draft alone."""
    exits = draft.config.exit_layers or (draft.config.num_hidden_layers,)
    return ["ar", *(f"sd:exits={e}" for e in exits), "mcsd", "s2d", "s2d-tree"]


def sweep_methods(draft):
    """Settings of s2d and s2d-tree to choose defaults from."""
    deeper = len(draft.config.exit_layers) - 1
    thresholds = [",".join([str(t)] * deeper + ["0"]) for t in (0.5, 0.8)]
    thresholds += [",".join([str(t)] + ["0"] * deeper) for t in (0.4, 0.6, 0.8)]
    stops = (0.2, 0.35, 0.5)
    chains = [f"s2d:thresholds={t}:draft_length=12:stop={p}" for t, p in product(thresholds, stops)]
    shapes = ("2x6x8", "2x8x12", "3x8x16", "4x8x24", "3x12x32")
    return ["ar", *chains, *(f"s2d-tree:tree={shape}" for shape in shapes)]


def parse_method(text, draft, draft_path, target_path):
    """(whether it runs compiled, options of ``generate``), of "s2d:draft_length=8" for example."""
    name, *settings = text.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)}")
    size = target_path.name.removeprefix("mini-")

    def stop(value):
        beside = draft_path / f"decision-{size}.safetensors"
        return read_stop(str(beside) if value == "decision" else value, draft)

    readers = {"exits": comma_separated(int), "thresholds": comma_separated(float)}
    readers |= {"draft_length": int, "tree": tree, "init": str, "stop": stop}
    try:
        pairs = [each.partition("=")[::2] for each in settings if each != "compile"]
        options = {key: readers[key](value) for key, value in pairs}
    except KeyError as error:
        raise ValueError(f"method {text!r}: no option {error}") from None
    except ValueError as error:
        raise ValueError(f"method {text!r}: {error}") from None
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
    # Measured beside us, not a dependency.
    transformers = optional("transformers", "-r tests/requirements.txt")
    config = transformers.LlamaConfig(**config_to_dict(model.config, model.dtype))
    peer = empty_model(config, transformers.LlamaForCausalLM)
    peer.load_state_dict(model.state_dict(), assign=True)
    peer.model.rotary_emb = type(peer.model.rotary_emb)(config)
    return peer.to(model.device).eval()


def transformers_methods(target, draft):
    """{name: function of prompt, new tokens, temperature, seed -> (tokens, seconds)} of the peer.

    Its own ``generate`` alone, assisted by the same draft if there is one, and with prompt look-up.
    """
    device, peer = target.device, peer_of(target)

    def run(prompt, max_new_tokens, temperature, seed, **how):
        torch.manual_seed(seed)
        tokens = torch.tensor([prompt], device=device)
        how |= {"do_sample": False, "max_new_tokens": max_new_tokens, "pad_token_id": 0}
        if temperature:
            how |= {"do_sample": True, "temperature": temperature, "top_k": 0}
        began = time.perf_counter()
        output = peer.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        return output[0, len(prompt) :].tolist(), time.perf_counter() - began

    peers = {"transformers": run}
    if draft:
        peers["transformers assisted"] = partial(run, assistant_model=peer_of(draft))
    return peers | {"transformers look-up": partial(run, prompt_lookup_num_tokens=10)}
