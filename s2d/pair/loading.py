"""A target and what drafts for it, as all programs load them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch.distributed import is_initialized

from ..checkpoint import load_model
from ..checkpoint.config import ModelFolder, read_folder
from ..checkpoint.load import read_tensors
from ..checkpoint.tokenizer import Tokenizer
from ..model import Llama
from ..options import Options, decide
from ..speed.tensor_parallel import load_part
from .names import FoundDraft, find_draft, find_target, refuse_other_size


@dataclass(frozen=True)
class Choice:
    """A target and what drafts for it, before models are loaded."""

    folder: ModelFolder  # of the target
    found: FoundDraft
    options: Options
    tokenizer: Tokenizer


@dataclass(frozen=True)
class Pair(Choice):
    target: Llama  # or, under torchrun, this process's part of one
    draft: Llama | None


def load_pair(
    target: Path | str,
    draft: Path | str | None = None,
    device: str = "auto",
    dtype: str = "auto",
    **options: Any,
) -> Pair:
    """What ``choose_pair`` chooses, loaded."""
    return load_chosen(choose_pair(target, draft, **options), device, dtype)


def choose_pair(target: Path | str, draft: Path | str | None = None, **options: Any) -> Choice:
    """Find the folders and decide the ``options``, which are given by name.

    By default the draft, or the datastore, is the one that ``find_draft`` finds. In ``options``,
    ``decision`` and ``datastore`` may be files. Raises ValueError or FileNotFoundError for what
    cannot be found, read or run.
    """
    folder = read_folder(find_target(target))
    found = FoundDraft(draft=None, datastore=None, description="none")
    if options.get("method") != "ar":
        found = find_draft(folder, draft, options.get("exits"), options.get("datastore"))
    if isinstance(found.datastore, Path):
        from ..ngram.datastore import load_datastore

        options["datastore"] = load_datastore(found.datastore, folder.config)
    decision_file = options.get("decision")
    if isinstance(decision_file, Path):
        from ..mcsd.decision import load_decision

        options["decision"] = load_decision(decision_file)
    decided = decide(found.draft, **options)
    if isinstance(decision_file, Path) and decided.decision is not None:
        refuse_other_decision(decided, found.draft)
    if found.draft is not None:
        refuse_other_size(found.draft, folder)
    # After all other checks, as transformers takes seconds to import.
    tokenizer = Tokenizer(folder.path, folder.config.vocab_size)
    return Choice(folder, found, decided, tokenizer)


def refuse_other_decision(options: Options, draft: ModelFolder) -> None:
    """Raise ValueError if a decision model was made for another draft."""
    from ..mcsd.decision import fingerprint

    not_read = "model.layers.", "model.embed_tokens.", "lm_head."
    for _, name, tensor in read_tensors(draft.path, not_read):
        if name == "model.norm.weight" and fingerprint(tensor) != options.decision.draft:
            raise ValueError(f"decision: expected a model for {draft.path}, not for another draft")


def load_chosen(
    choice: Choice, device: str, dtype: str, load: Callable[..., Llama] = load_model
) -> Pair:
    """Load the models of a ``choice``, each once, and no layer after the last exit that drafts.

    torchrun's processes divide the target among them, and no draft.
    """
    found = choice.found.draft
    divided = is_initialized()
    load_target = load_part if divided else load
    target = load_target(choice.folder, device, dtype)
    draft = None
    if found is not None and not divided and found.path.samefile(choice.folder.path):
        draft = target  # it drafts for itself: its first layers are in memory already
    elif found is not None:
        last = max(each for each in choice.options.exits if isinstance(each, int))
        draft = load(found, device, target.dtype, layers=last)
        draft = fit_vocabulary(draft, target.config.vocab_size)
    return Pair(**vars(choice), target=target, draft=draft)


def fit_vocabulary(draft: Llama, vocab_size: int) -> Llama:
    """Give ``draft`` the vocabulary of a target with ``vocab_size`` tokens, and return it.

    A token that only one of them has is never drafted. The target may write it nevertheless; then
    the draft reads its last token in the place of this one.
    """
    last = draft.config.vocab_size - 1
    more = vocab_size - draft.config.vocab_size  # padding by a negative number cuts
    if more != 0:
        draft.model.embed_tokens.register_forward_pre_hook(
            lambda module, inputs: (inputs[0].clamp(max=last),)
        )
        draft.lm_head.register_forward_hook(
            lambda module, inputs, logits: F.pad(logits, (0, more), value=float("-inf"))
        )
        draft.config = replace(draft.config, vocab_size=vocab_size)
    return draft
