"""Does this code compute what transformers computes? For any folder of a Llama.

In float64: logits, of weights and config.json as each reads them; greedy text of every lossless
method; ids of texts, if SentencePiece reads the tokenizer here. Each has a line, and the exit code
is 1 if one is not as it should be.
"""

from argparse import Namespace
from functools import partial
from typing import Any

import torch

from ..checkpoint.load import placement
from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..checkpoint.tokenizer_model import SentencePieceModel
from ..model import Llama
from .figures import Record, by_method
from .measure import compare_methods
from .methods import choose_methods, default_methods, load_methods
from .peers import as_transformers, run_peer
from .specbench import corpus_questions

TEXTS = (
    "Hello world",
    "Die Königin hört 123 Vögel.\n\n日本語 🙂",
    "What is 3 + 4? Explain it to a child, in a few sentences, and tell a story about it. " * 3,
)
# How far logits may be apart, as a share of the largest: more than any order of sums rounds.
ALLOWED = 1e-9


def main(args: Namespace) -> int:
    """Print a line for each comparison; 1 if one found a fault, else 0."""
    chosen = {}
    for name in args.target:
        methods = default_methods(name, args.draft, args.exits)
        chosen[name] = choose_methods(name, dict(zip(methods, methods)), args)
    questions = corpus_questions(args.limit, turns=1)
    rights = []
    for name, choices in chosen.items():
        pairs = load_methods(choices, args)
        alone = pairs["ar"]
        peer = as_transformers(alone.target, alone.folder.path)
        print(f"{name} on {placement(alone.target)}")
        rights.append(compare_tokenizers(alone.tokenizer))
        peers = {"transformers": partial(run_peer, peer=peer)}
        [comparison] = compare_methods(name, pairs, questions, args, peers)
        theirs = by_method(comparison.records)["transformers"]
        rights.append(compare_logits(alone.target, peer, theirs))
        # In float64 no two likely tokens are so close that rounding decides.
        for method, places in comparison.different_from("transformers").items():
            different = len(places)
            rights.append(show(method, f"greedy text: {different} answers differ", not different))
    return 0 if all(rights) else 1


def show(what: str, found: str, right: bool) -> bool:
    """Print the line of a comparison; return whether it is ``right``."""
    print(f"{what:24}{found}: {'ok' if right else 'FAULT'}", flush=True)
    return right


def compare_tokenizers(ours: Tokenizer) -> bool:
    """Ids of texts; those of a tokenizer that transformers reads here, too, are not compared."""
    has_config = (ours.folder / "tokenizer_config.json").is_file()  # or transformers guesses
    if not has_config or not isinstance(ours.model, SentencePieceModel):
        tell("the tokenizer is not compared; it is no SentencePiece with a tokenizer_config.json")
        return True
    from transformers import AutoTokenizer  # which only this needs

    theirs = AutoTokenizer.from_pretrained(ours.folder)
    wrong = [text for text in TEXTS if ours.encode(text) != theirs(text).input_ids]
    but = f", but not of {wrong[0]!r}" if wrong else ""
    return show("tokenizer", f"ids of {len(TEXTS)} texts{but}", not wrong)


@torch.inference_mode()
def compare_logits(target: Llama, peer: Any, records: list[Record]) -> bool:
    """Logits after each token of the prompts and of their answers."""
    difference = 0.0
    scale = 0.0
    for turn in [turn for record in records for turn in record.turns]:
        tokens = torch.tensor([turn.prompt + turn.tokens], device=target.device)
        ours = target(tokens)[0]
        apart = ours - peer(tokens).logits[0]
        difference = max(difference, apart.abs().max().item())
        scale = max(scale, ours.abs().max().item())
    found = f"float64, up to {scale:.1f}, {difference:.1e} apart"
    return show("logits", found, difference <= ALLOWED * scale)
