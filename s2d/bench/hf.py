"""Does this code compute what transformers computes? For any folder of a Llama.

Logits of the same weights in the same memory, with config.json as each reads it; greedy text of
every lossless method; ids of texts and of the chat template: a line each, and exit code 1 if one is
not as it should be.
"""

import math
from argparse import Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import empty_model, load_model
from ..checkpoint.chat import as_dialogue
from ..checkpoint.config import read_config, read_drafting
from ..checkpoint.names import find_family_draft, find_target, is_same_folder, refuse_whole_target
from ..checkpoint.tokenizer import Tokenizer
from ..generation import generate
from ..model import Llama
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

    folder = find_target(args.target)
    config = read_config(folder)
    if args.draft is None:
        draft_path = find_family_draft(folder, config)
    else:
        draft_path = find_target(str(args.draft))
        refuse_whole_target(folder, draft_path, exits=None)
    count = sum(parameter.numel() for parameter in empty_model(config).parameters())
    weights = 8 * count  # bytes in float64; all else together hardly takes as much again
    dtype = "float64" if 2 * weights < free_memory() else args.dtype
    target = load_model(folder, args.device, dtype, quick=False)
    try:
        peer = as_transformers(target, folder)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {folder}: {error}") from None
    peer.generation_config.eos_token_id = list(config.eos_token_ids) or None
    if target.dtype == torch.float64:
        keep_float64(peer)
    tokenizer = Tokenizer(folder)
    # Before transformers' tokenizer, as it says what is wrong with a template in one line.
    has_template = tokenizer.prompt_format.is_own
    their_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    draft = None
    if draft_path is not None:
        draft = target
        if not is_same_folder(draft_path, folder):
            layers = read_drafting(draft_path).exits[-1]
            draft = load_model(draft_path, args.device, target.dtype, layers=layers)
    size = config.max_position_embeddings
    prompts = [tokenizer.encode(text)[: max(1, size // 2)] for text in TEXTS]
    if max(map(max, prompts)) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids above the vocabulary of {config.vocab_size} tokens"
        )
    right = []
    if (folder / "tokenizer_config.json").is_file():
        right.append(compare_ids(tokenizer, their_tokenizer))
    else:  # transformers then guesses, and adds neither BOS nor the space before a text
        show("tokenizer", "not compared, the folder has no tokenizer_config.json")
    if has_template:
        right.append(compare_templates(tokenizer, their_tokenizer))
    else:
        show("chat template", "not compared, the folder has none")
    allowed, logits_right = compare_logits(target, peer, prompts)
    right.append(logits_right)
    expected = run_peer(prompts, range(len(prompts)), peer, args.max_new_tokens)
    for name in ["ar", *default_methods(draft_path)]:
        options = parse_method(name, draft_path).options | {"max_new_tokens": args.max_new_tokens}
        differences = []
        for prompt, (theirs, _, _) in zip(prompts, expected):
            ours = generate(target, prompt, draft, **options)
            found = first_difference(
                target, precise=target, prompt=prompt, own=ours, other=theirs, error=allowed
            )
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


def compare_ids(tokenizer: Tokenizer, theirs: Any) -> bool:
    wrong = [text for text in TEXTS if tokenizer.encode(text) != theirs(text).input_ids]
    found = f"ids of {len(TEXTS)} texts" + (f", but {wrong[0]!r} differs" if wrong else " equal")
    return judge("tokenizer", found, not wrong)


def compare_templates(tokenizer: Tokenizer, theirs: Any) -> bool:
    wrong = []
    for said in DIALOGUES:
        ours = tokenizer.encode_chat(said)  # first, as it says what is wrong in a line
        expected = theirs.apply_chat_template(
            as_dialogue(said), add_generation_prompt=True, return_dict=False
        )
        if ours != expected:
            wrong.append(said)
    found = f"ids of {len(DIALOGUES)} dialogues" + (
        f", but {wrong[0]} differs" if wrong else " equal"
    )
    return judge("chat template", found, not wrong)


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


def free_memory() -> float:
    """Bytes that programs may still take."""
    with suppress(OSError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return 1024 * float(line.split()[1])
    return math.inf  # not known here
