"""Does this code compute what transformers computes? For any folder of a Llama.

In float64: logits of the same weights in the same memory, with config.json as each reads it; greedy
text of every lossless method; ids of texts and of the chat template. Each has a line, and the exit
code is 1 if one is not as it should be.
"""

from argparse import Namespace
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..checkpoint.chat import as_dialogue
from ..checkpoint.notices import tell
from ..checkpoint.pair import Pair
from ..model import Llama
from .comparison import make_run
from .methods import choose_methods, default_methods, load_methods
from .peers import as_transformers, run_peer

TEXTS = (
    "Hello world",
    "Die Königin hört 123 Vögel.\n\n日本語 🙂",
    "What is 3 + 4? Explain it to a child, in a few sentences, and tell a story about it. " * 3,
)
DIALOGUES = (["Hi"], ["Where is Nora?", "In the north.", "Why?"], ["a\n\nb", "c", " d "])
# How far logits may be apart, as a share of the largest: more than any order of sums rounds.
ALLOWED = 1e-9


def compare_with_transformers(args: Namespace) -> int:
    """Print a line for each comparison; 1 if one found a fault, else 0."""
    methods = {name: name for name in default_methods(args.target, args.draft, args.exits)}
    choices = choose_methods(args.target, methods, args.draft)
    has_template = choices["ar"].tokenizer.chat_format.is_template  # a damaged one is refused
    pairs = load_methods(choices, args.device, "float64", quick=False)
    alone = pairs["ar"]
    try:
        peer = as_transformers(alone.target, alone.folder)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {alone.folder}: {error}") from None
    rights = compare_tokenizers(alone, has_template)
    longest = max(1, alone.target.config.max_position_embeddings // 2)
    prompts = [alone.tokenizer.encode(text)[:longest] for text in TEXTS]
    rights.append(compare_logits(alone.target, peer, prompts))
    options = {"max_new_tokens": args.max_new_tokens}
    expected = [run_peer(prompt, 0, peer, **options)[0] for prompt in prompts]
    for name, pair in pairs.items():
        run = make_run(pair.target, pair.draft, vars(pair.options) | options)
        texts = [run(prompt, 0)[0] for prompt in prompts]
        # In float64 no two likely tokens are so close that rounding decides.
        rights.append(show(name, f"greedy text of {len(prompts)} prompts", texts == expected))
    return 0 if all(rights) else 1


def show(what: str, found: str, right: bool) -> bool:
    """Print the line of a comparison; return whether it is ``right``."""
    print(f"{what:24}{found}: {'ok' if right else 'FAULT'}", flush=True)
    return right


def compare_tokenizers(pair: Pair, has_template: bool) -> list[bool]:
    """Ids of texts and of dialogues: whether each is right."""
    from transformers import AutoTokenizer  # which only this needs

    theirs = AutoTokenizer.from_pretrained(pair.folder)

    def encode(text: str) -> list[int]:
        return theirs(text).input_ids

    def encode_chat(texts: list[str]) -> list[int]:
        options = {"add_generation_prompt": True, "return_dict": False}
        return theirs.apply_chat_template(as_dialogue(texts), **options)

    rights = []
    if (pair.folder / "tokenizer_config.json").is_file():
        rights.append(compare_ids("tokenizer", TEXTS, pair.tokenizer.encode, encode))
    else:  # transformers then guesses, and adds neither BOS nor the space before a text
        tell("the tokenizer is not compared, as there is no tokenizer_config.json")
    if has_template:
        ours = pair.tokenizer.encode_chat
        rights.append(compare_ids("chat template", DIALOGUES, ours, encode_chat))
    else:
        tell("the chat template is not compared, as there is none")
    return rights


def compare_ids(
    what: str, texts: Sequence[Any], ours: Callable[..., list], theirs: Callable[..., list]
) -> bool:
    wrong = [text for text in texts if ours(text) != theirs(text)]
    found = f"ids of {len(texts)} texts"
    if wrong:
        found += f", but not of {wrong[0]!r}"
    return show(what, found, not wrong)


@torch.inference_mode()
def compare_logits(target: Llama, peer: Any, prompts: list[list[int]]) -> bool:
    difference = 0.0
    scale = 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=target.device)
        ours = target(tokens)[0]
        apart = ours - peer(tokens).logits[0]
        difference = max(difference, apart.abs().max().item())
        scale = max(scale, ours.abs().max().item())
    found = f"float64, up to {scale:.1f}, {difference:.1e} apart"
    return show("logits", found, difference <= ALLOWED * scale)
