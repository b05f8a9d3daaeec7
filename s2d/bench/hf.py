"""Does this code compute what transformers computes? For any folder of a Llama.

In float64: logits of the same weights in the same memory, with config.json as each reads it; greedy
text of every lossless method; ids of texts and of the chat template. Each has a line, and the exit
code is 1 if one is not as it should be.
"""

from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from ..checkpoint import load_model
from ..checkpoint.chat import as_dialogue
from ..checkpoint.pair import Pair, choose_pair, load_chosen
from ..generation import generate
from ..options import Options
from .check import explain, first_difference
from .methods import default_methods, parse_method
from .peers import as_transformers, keep_float64, run_peer

TEXTS = (
    "Hello world",
    "Die Königin hört 123 Vögel.\n\n日本語 🙂",
    "What is 3 + 4? Explain it to a child, in a few sentences, and tell a story about it. " * 3,
)
DIALOGUES = (["Hi"], ["Where is Nora?", "In the north.", "Why?"], ["a\n\nb", "c", " d "])
# How far logits may be apart, as a share of the largest: more than any order of sums rounds.
ALLOWED = 1e-9

Line = tuple[str, str, bool | None]  # what is compared, what was found, whether it is right
WORDS = {True: ": ok", False: ": FAULT", None: ""}


def compare_with_transformers(args: Namespace) -> int:
    """Print a line for each comparison; 1 if one found a fault, else 0."""
    choice = choose_pair(args.target, args.draft, Options(exits=args.exits))
    has_template = choice.tokenizer.chat_format.is_template  # a damaged one is refused
    pair = load_chosen(choice, args.device, "float64", partial(load_model, quick=False))
    peer = load_peer(pair)
    ids = compare_tokenizers(pair, has_template)
    code = 0
    for what, found, right in (*ids, *compare_models(pair, peer, args)):
        print(f"{what:24}{found}{WORDS[right]}", flush=True)
        if right is False:
            code = 1
    return code


def compare_tokenizers(pair: Pair, has_template: bool) -> Iterator[Line]:
    """Ids of texts and of dialogues."""
    from transformers import AutoTokenizer  # which only this needs

    tokenizer = pair.tokenizer
    theirs = AutoTokenizer.from_pretrained(pair.folder)
    if (pair.folder / "tokenizer_config.json").is_file():
        wrong = [x for x in TEXTS if tokenizer.encode(x) != theirs(x).input_ids]
        yield "tokenizer", f"ids of {len(TEXTS)} texts{say_which(wrong)}", not wrong
    else:  # transformers then guesses, and adds neither BOS nor the space before a text
        yield "tokenizer", "not compared, no tokenizer_config.json", None
    if has_template:
        options = {"add_generation_prompt": True, "return_dict": False}
        template = partial(theirs.apply_chat_template, **options)
        ours = tokenizer.encode_chat
        wrong = [x for x in DIALOGUES if ours(x) != template(as_dialogue(x))]
        yield "chat template", f"ids of {len(DIALOGUES)} dialogues{say_which(wrong)}", not wrong
    else:
        yield "chat template", "not compared, there is none", None


def say_which(wrong: list[Any]) -> str:
    return f", but {wrong[0]!r} differs" if wrong else " equal"


@torch.inference_mode()
def compare_models(pair: Pair, peer: Any, args: Namespace) -> Iterator[Line]:
    """Logits, and greedy text by every method."""
    target = pair.target
    size = target.config.max_position_embeddings
    prompts = [pair.tokenizer.encode(text)[: max(1, size // 2)] for text in TEXTS]
    difference = 0.0
    scale = 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=target.device)
        ours = target(tokens)[0]
        apart = ours - peer(tokens).logits[0]
        difference = max(difference, apart.abs().max().item())
        scale = max(scale, ours.abs().max().item())
    allowed = ALLOWED * scale
    found = f"float64, up to {scale:.1f}, {difference:.1e} apart"
    yield "logits", found, difference <= allowed
    options = {"max_new_tokens": args.max_new_tokens}
    expected = [run_peer(prompt, 0, peer, **options)[0] for prompt in prompts]
    for name in ["ar", *default_methods(pair.found.draft, args.exits)]:
        how = parse_method(name, pair.found.draft).options | options
        differences = []
        for prompt, tokens in zip(prompts, expected):
            made = generate(target, prompt, pair.draft, **how)
            differences.append(first_difference(target, target, prompt, made, tokens, allowed))
        line, lossless = explain(differences)
        yield name, f"greedy text of {len(prompts)} prompts, {line}", lossless


def load_peer(pair: Pair) -> Any:
    """transformers' model in the place of the target of a ``pair``, with the target's weights."""
    try:
        peer = as_transformers(pair.target, pair.folder)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {pair.folder}: {error}") from None
    peer.generation_config.eos_token_id = list(pair.target.config.eos_token_ids) or None
    keep_float64(peer)
    return peer
