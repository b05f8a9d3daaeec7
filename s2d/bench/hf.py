"""Does this code compute what transformers computes? For any folder of a Llama.

Logits of the same weights in the same memory, with config.json as each reads it; greedy text of
every lossless method; ids of texts and of the chat template: a line each, and exit code 1 if one is
not as it should be.
"""

from argparse import Namespace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import load_model
from ..checkpoint.chat import as_dialogue
from ..checkpoint.pair import load_pair
from ..generation import generate
from ..model import Llama
from ..options import Options
from .check import first_difference, verdict
from .methods import default_methods, parse_method
from .peers import as_transformers, keep_float64, run_peer

TEXTS = (
    "Hello world",
    "Die Königin hört 123 Vögel.\n\n日本語 🙂",
    "What is 3 + 4? Explain it to a child, in a few sentences, and tell a story about it. " * 3,
)
DIALOGUES = (["Hi"], ["Where is Nora?", "In the north.", "Why?"], ["a\n\nb", "c", " d "])
EXACT = 1e-9  # of the largest logit: more than float64 rounds in any order of sums


def report(args: Namespace) -> int:
    """Print a line for each comparison; 1 if one found a fault, else 0."""
    import transformers  # which only this needs

    dtype = "float64" if args.dtype == "auto" else args.dtype
    load = partial(load_model, quick=False)
    pair = load_pair(args.target, args.draft, Options(), args.device, dtype, load)
    folder, target, tokenizer = pair.folder, pair.target, pair.tokenizer
    try:
        peer = as_transformers(target, folder)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {folder}: {error}") from None
    peer.generation_config.eos_token_id = list(target.config.eos_token_ids) or None
    if target.dtype == torch.float64:
        keep_float64(peer)
    # Before transformers' tokenizer, as it says what is wrong with a template in one line.
    has_template = tokenizer.prompt_format.is_own
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    size = target.config.max_position_embeddings
    prompts = [tokenizer.encode(text)[: max(1, size // 2)] for text in TEXTS]
    right = []
    if (folder / "tokenizer_config.json").is_file():
        wrong = [text for text in TEXTS if tokenizer.encode(text) != theirs(text).input_ids]
        right.append(judge_ids("tokenizer", f"ids of {len(TEXTS)} texts", wrong))
    else:  # transformers then guesses, and adds neither BOS nor the space before a text
        show("tokenizer", "not compared, the folder has no tokenizer_config.json")
    if has_template:
        template = partial(
            theirs.apply_chat_template, add_generation_prompt=True, return_dict=False
        )
        wrong = [s for s in DIALOGUES if tokenizer.encode_chat(s) != template(as_dialogue(s))]
        right.append(judge_ids("chat template", f"ids of {len(DIALOGUES)} dialogues", wrong))
    else:
        show("chat template", "not compared, the folder has none")
    allowed, logits_right = compare_logits(target, peer, prompts)
    right.append(logits_right)
    expected = [run_peer(prompt, 0, peer, args.max_new_tokens)[0] for prompt in prompts]
    for name in ["ar", *default_methods(pair.found.draft)]:
        options = parse_method(name, pair.found.draft).options
        differences = []
        for prompt, tokens in zip(prompts, expected):
            made = generate(
                target, prompt, pair.draft, max_new_tokens=args.max_new_tokens, **options
            )
            found = first_difference(target, target, prompt, made, tokens, error=allowed)
            differences.append(found)
        line, lossless = verdict(list(filter(None, differences)))
        right.append(judge(name, f"greedy text of {len(prompts)} prompts, {line}", lossless))
    return int(not all(right))


def show(what: str, found: str) -> None:
    print(f"{what:24}{found}", flush=True)


def judge(what: str, found: str, right: bool) -> bool:
    """Show what was found and whether it is ``right``, which is returned."""
    show(what, f"{found}: {'ok' if right else 'FAULT'}")
    return right


def judge_ids(what: str, compared: str, wrong: list[Any]) -> bool:
    differs = f", but {wrong[0]!r} differs" if wrong else " equal"
    return judge(what, compared + differs, not wrong)


@torch.inference_mode()
def compare_logits(target: Llama, peer: Any, prompts: list[list[int]]) -> tuple[float, bool]:
    """(how far logits may be apart by rounding, whether they are no farther)."""
    difference = 0.0
    scale = 0.0
    own_error = 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=target.device)
        ours = target(tokens)[0].double()
        others = peer(tokens).logits[0].double()
        difference = max(difference, (ours - others).abs().max().item())
        scale = max(scale, ours.abs().max().item())
        own_error = max(own_error, (ours - one_by_one(target, prompt)).abs().max().item())
    allowed = EXACT * scale if target.dtype == torch.float64 else 2 * own_error
    dtype = str(target.dtype).removeprefix("torch.")
    found = f"{dtype}, largest difference {difference:.1e}, of logits up to {scale:.1f}"
    if target.dtype != torch.float64:
        found += f"; own passes, token by token, are {own_error:.1e} apart"
    return allowed, judge("logits", found, difference <= allowed)


def one_by_one(target: Llama, prompt: list[int]) -> Tensor:
    """Logits (T, V) of passes over one token each, which round differently."""
    cache = target.new_cache(len(prompt))
    tokens = torch.tensor([prompt], device=target.device)
    rows = [target(tokens[:, i : i + 1], cache=cache)[0] for i in range(len(prompt))]
    return torch.cat(rows).double()
