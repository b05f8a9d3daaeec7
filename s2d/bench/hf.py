"""Does this code compute what transformers computes? For any folder of a Llama.

In float64: logits of the same weights in the same memory, with config.json as each reads it; greedy
text of every lossless method; ids of texts, if SentencePiece reads the tokenizer here. Each has a
line, and the exit code is 1 if one is not as it should be.
"""

from argparse import Namespace
from typing import Any

import torch

from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..checkpoint.tokenizer_model import SentencePieceModel
from ..model import Llama
from .comparison import make_run
from .methods import choose_methods, default_methods, load_methods
from .peers import as_transformers, run_peer

TEXTS = (
    "Hello world",
    "Die Königin hört 123 Vögel.\n\n日本語 🙂",
    "What is 3 + 4? Explain it to a child, in a few sentences, and tell a story about it. " * 3,
)
# How far logits may be apart, as a share of the largest: more than any order of sums rounds.
ALLOWED = 1e-9


def compare_with_transformers(args: Namespace) -> int:
    """Print a line for each comparison; 1 if one found a fault, else 0."""
    methods = {name: name for name in default_methods(args.target, args.draft, args.exits)}
    choices = choose_methods(args.target, methods, args.draft)
    pairs = load_methods(choices, args.device, "float64", quick=False)
    alone = pairs["ar"]
    try:
        peer = as_transformers(alone.target, alone.folder.path)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {alone.folder.path}: {error}") from None
    rights = [compare_tokenizers(alone.tokenizer)]
    longest = max(1, alone.target.config.max_position_embeddings // 2)
    prompts = [alone.tokenizer.encode(text)[:longest] for text in TEXTS]
    rights.append(compare_logits(alone.target, peer, prompts))
    options = {"max_new_tokens": args.max_new_tokens}
    expected = [run_peer(prompt, 0, peer, **options)[0] for prompt in prompts]
    for name, pair in pairs.items():
        run = make_run(pair.target, pair.draft, vars(pair.plan.asked) | options)
        texts = [run(prompt, 0)[0] for prompt in prompts]
        # In float64 no two likely tokens are so close that rounding decides.
        rights.append(show(name, f"greedy text of {len(prompts)} prompts", texts == expected))
    return 0 if all(rights) else 1


def show(what: str, found: str, right: bool) -> bool:
    """Print the line of a comparison; return whether it is ``right``."""
    print(f"{what:24}{found}: {'ok' if right else 'FAULT'}", flush=True)
    return right


def compare_tokenizers(ours: Tokenizer) -> bool:
    """Ids of texts; those of a tokenizer that transformers reads here, too, are not compared."""
    if not isinstance(ours.model, SentencePieceModel):
        tell("the tokenizer is not compared, as transformers itself reads it here")
        return True
    if not (ours.folder / "tokenizer_config.json").is_file():
        # transformers then guesses, and adds neither BOS nor the space before a text.
        tell("the tokenizer is not compared, as there is no tokenizer_config.json")
        return True
    from transformers import AutoTokenizer  # which only this needs

    theirs = AutoTokenizer.from_pretrained(ours.folder)
    wrong = [text for text in TEXTS if ours.encode(text) != theirs(text).input_ids]
    but = f", but not of {wrong[0]!r}" if wrong else ""
    return show("tokenizer", f"ids of {len(TEXTS)} texts{but}", not wrong)


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
