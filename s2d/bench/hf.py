"""Does this code compute what transformers computes? For any folder of a Llama.

Logits of the same weights in the same memory, with config.json as each reads it; greedy text of
every lossless method; ids of texts and of the chat template: a line each, and exit code 1 if one is
not as it should be.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import empty_model, load_model
from ..checkpoint.chat import as_dialogue
from ..checkpoint.config import read_config
from ..checkpoint.names import find_family_draft, find_target
from ..checkpoint.tokenizer import Tokenizer
from ..generation import generate
from ..model import Llama
from ..speed.linear import free_memory
from .methods import as_transformers, default_methods, parse_method, run_peer

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
    count = sum(parameter.numel() for parameter in empty_model(config).parameters())
    dtype = "float64" if 2 * 8 * count < free_memory() else args.dtype
    target = load_model(folder, args.device, dtype, quick=False)
    try:
        peer = as_transformers(target, folder)
    except Exception as error:  # whatever it does not like about the folder
        raise ValueError(f"transformers does not read {folder}: {error}") from None
    peer.generation_config.eos_token_id = list(config.eos_token_ids) or None
    if target.dtype == torch.float64:
        keep_float64(peer)
    tokenizer = Tokenizer(folder)
    own_template = tokenizer.prompt_format.is_own
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    draft_path = args.draft or find_family_draft(folder, config)
    draft = load_model(draft_path, args.device, target.dtype) if draft_path else None
    size = config.max_position_embeddings
    prompts = [tokenizer.encode(text)[: max(1, size // 2)] for text in TEXTS]
    if max(map(max, prompts)) >= config.vocab_size:
        raise ValueError(
            f"the tokenizer has ids above the vocabulary of {config.vocab_size} tokens"
        )
    faults = [
        not compare_ids(folder, tokenizer, theirs),
        not compare_templates(tokenizer, own_template, theirs),
    ]
    allowed, right = compare_logits(target, peer, prompts)
    faults.append(not right)
    for name in ["ar", *default_methods(draft_path)]:
        method = parse_method(name)
        options = {key: method[key] for key in method if key not in ("compile", "batch")}
        options["max_new_tokens"] = args.max_new_tokens
        right = compare_text(name, target, draft, peer, prompts, allowed, options)
        faults.append(not right)
    return int(any(faults))


def keep_float64(peer: Any) -> None:
    """Put PyTorch's RMSNorm in the place of transformers', which rounds float64 to float32."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for name, norm in list(peer.named_modules()):
        if isinstance(norm, LlamaRMSNorm):
            size, eps = norm.weight.shape, norm.variance_epsilon
            precise = torch.nn.RMSNorm(size, eps, device="meta", dtype=torch.float64)
            precise.weight = norm.weight
            peer.set_submodule(name, precise)


def show(what: str, found: str, right: bool) -> bool:
    print(f"{what:24}{found}: {'ok' if right else 'FAULT'}", flush=True)
    return right


def compare_ids(folder: Path, tokenizer: Tokenizer, theirs: Any) -> bool:
    if not (folder / "tokenizer_config.json").is_file():
        # transformers then guesses, and adds neither BOS nor the space before a text.
        return show("tokenizer", "not compared, the folder has no tokenizer_config.json", True)
    wrong = [text for text in TEXTS if tokenizer.encode(text) != theirs(text).input_ids]
    found = f"ids of {len(TEXTS)} texts" + (f", but {wrong[0]!r} differs" if wrong else " equal")
    return show("tokenizer", found, not wrong)


def compare_templates(tokenizer: Tokenizer, own_template: bool, theirs: Any) -> bool:
    if not own_template:
        return show("chat template", "not compared, the folder has none", True)
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
    return show("chat template", found, not wrong)


@torch.inference_mode()
def compare_logits(target: Llama, peer: Any, prompts: list[list[int]]) -> tuple[float, bool]:
    """(how far logits may be apart by rounding, whether they are no farther)."""
    difference = scale = own_error = 0.0
    for prompt in prompts:
        tokens = torch.tensor([prompt], device=target.device)
        ours, others = target(tokens)[0].double(), peer(tokens).logits[0].double()
        difference = max(difference, (ours - others).abs().max().item())
        scale = max(scale, ours.abs().max().item())
        own_error = max(own_error, (ours - one_by_one(target, prompt)).abs().max().item())
    allowed = EXACT * scale if target.dtype == torch.float64 else 2 * own_error
    dtype = str(target.dtype).removeprefix("torch.")
    found = f"{dtype}, largest difference {difference:.1e}, of logits up to {scale:.1f}"
    if target.dtype != torch.float64:
        found += f"; own passes, token by token, are {own_error:.1e} apart"
    return allowed, show("logits", found, difference <= allowed)


def one_by_one(target: Llama, prompt: list[int]) -> Tensor:
    """Logits (T, V) of passes over one token each, which round differently."""
    cache = target.new_cache(len(prompt))
    tokens = torch.tensor([prompt], device=target.device)
    rows = [target(tokens[:, i : i + 1], cache=cache)[0] for i in range(len(prompt))]
    return torch.cat(rows).double()


@torch.inference_mode()
def compare_text(
    name: str,
    target: Llama,
    draft: Llama | None,
    peer: Any,
    prompts: list[list[int]],
    allowed: float,
    options: dict[str, Any],
) -> bool:
    """Greedy text of a method against transformers' own; nearly equal logits may change order."""
    ties = faults = 0
    expected = run_peer(peer, prompts, 0, 0.0, options["max_new_tokens"])
    for prompt, (theirs, _, _) in zip(prompts, expected):
        ours = generate(target, prompt, draft, **options).tokens
        if ours == theirs:
            continue
        same = 0
        while same < min(len(ours), len(theirs)) and ours[same] == theirs[same]:
            same += 1
        if same == min(len(ours), len(theirs)):
            faults += 1  # one of the two has ended
            continue
        tokens = torch.tensor([prompt + ours[:same]], device=target.device)
        logits = target(tokens)[0, -1].double()
        gap = (logits[ours[same]] - logits[theirs[same]]).abs().item()
        ties, faults = (ties + 1, faults) if gap <= 2 * allowed else (ties, faults + 1)
    found = f"greedy text of {len(prompts)} prompts"
    found += f", {faults} differ" if faults else f", {ties} ties by rounding" if ties else " equal"
    return show(name, found, not faults)
