"""From what a user names a method to the options that ``generate`` takes, and the peer's methods beside ours.

A method is a name, or a name with options of ``generate``: lists as 2,3,4, a dynamic tree as 4x8x24 (top_k, depth,
size), ``stop`` as a number, the file of a decision model, or "decision" for the one beside the draft. With ``compile`` among
them, which takes no value, its passes are compiled.
"""

import time
from functools import partial
from itertools import product

import torch

from ..decision import read_stop
from ..options import METHODS
from ..program import optional
from ..tree import Dynamic


def default_methods(draft):
    """Every method, and ``sd`` from each exit of the draft alone."""
    exits = draft.config.exit_layers or (draft.config.num_hidden_layers,)
    return ["ar", *(f"sd:exits={e}" for e in exits), "mcsd", "s2d", "s2d-tree"]


def sweep_methods(draft):
    """Settings of s2d and s2d-tree to choose defaults from."""
    exits = len(draft.config.exit_layers)
    thresholds = [",".join([str(t)] * (exits - 1) + ["0"]) for t in (0.5, 0.8, 0.95)]
    lengths = ("6:stop=0", "10:stop=0.4", "10:stop=0.6", "12:stop=0.4", "12:stop=0.5")
    chains = [f"s2d:thresholds={t}:draft_length={n}" for t, n in product(thresholds, lengths)]
    shapes = ("2x6x8", "2x8x12", "3x8x16", "4x8x24", "3x12x32")
    trees = [f"s2d-tree:thresholds={thresholds[1]}:tree={shape}" for shape in shapes]
    return ["ar", *chains, *trees]


def parse_method(text, draft, draft_path, target_path):
    """ "s2d:draft_length=8:thresholds=.9,.9,0" -> (whether it is to run compiled, the options of ``generate``)."""
    name, *settings = text.split(":")
    if name not in METHODS:
        raise ValueError(f"unknown method {name!r}; expected one of {', '.join(METHODS)}")
    options, compiled = {"method": name}, "compile" in settings
    for setting in (setting for setting in settings if setting != "compile"):
        key, _, value = setting.partition("=")
        try:
            if key == "tree":
                shape = [int(number) for number in value.replace("x", ",").split(",")]
                options[key] = Dynamic(*shape) if "x" in value else shape
            elif key in ("exits", "thresholds"):
                options[key] = [
                    (int if key == "exits" else float)(number) for number in value.split(",")
                ]
            elif key == "draft_length":
                options[key] = int(value)
            elif key == "init":
                options[key] = value
            elif key == "stop":
                beside = (
                    draft_path / f"decision-{target_path.name.removeprefix('mini-')}.safetensors"
                )
                options[key] = read_stop(str(beside) if value == "decision" else value, draft)
            else:
                raise ValueError(f"no option {key!r}")
        except TypeError:
            raise ValueError(
                f"method {text!r}: a dynamic tree is three numbers, such as 4x8x24"
            ) from None
        except ValueError as error:
            raise ValueError(f"method {text!r}: {error}") from None
    return compiled, options


def transformers_methods(target_path, target, draft_path, draft):
    """The peer: its greedy or sampling generate, assisted by the same draft (None: not so), and with prompt look-up.

    It is given the weights of our models, into which an adapter is already merged.
    """
    transformers = optional(
        "transformers", "-r tests/requirements.txt"
    )  # measured beside us, not a dependency

    def peer(path, model):
        config = transformers.AutoConfig.from_pretrained(path, dtype=model.dtype)
        own = transformers.LlamaForCausalLM.from_pretrained(
            None, config=config, state_dict=model.state_dict(), dtype=model.dtype
        )
        return own.to(model.device).eval()

    device, draft = target.device, draft and peer(draft_path, draft)
    target = peer(target_path, target)

    def run(prompt, max_new_tokens, temperature, seed, **how):
        torch.manual_seed(seed)
        tokens = torch.tensor([prompt], device=device)
        sampling = (
            {"do_sample": True, "temperature": temperature, "top_k": 0}
            if temperature
            else {"do_sample": False}
        )
        began = time.perf_counter()
        output = target.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=max_new_tokens,
                                 pad_token_id=0, **sampling, **how)  # fmt: skip
        return output[0, len(prompt) :].tolist(), time.perf_counter() - began

    assisted = {"transformers assisted": partial(run, assistant_model=draft)} if draft else {}
    return {
        "transformers": run,
        **assisted,
        "transformers look-up": partial(run, prompt_lookup_num_tokens=10),
    }
