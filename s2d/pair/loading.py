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
from ..generation import decide
from ..model import Llama
from ..options import Options, expect
from ..passes.tensor_parallel import load_part
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


def choose_pair(
    target: Path | str,
    draft: Path | str | None = None,
    init: str = "draft",
    decision: Path | None = None,
    datastore: Path | None = None,
    bitwise: bool = False,
    **options: Any,
) -> Choice:
    """Find the folders and decide the ``options``, which are given by name, as to ``generate``.

    Raises ValueError or FileNotFoundError for what cannot be found, read or run.

    Args:
        target, draft: as ``find_target`` and ``find_draft`` know them.
        init: what proposes the first level of a tree: "draft", or "target" (mcsd/roots.py).
        decision: the file of a decision model (mcsd/decision.py).
        datastore: the file of a datastore for exit 0; by default what ``find_draft`` finds.
        bitwise: whether all passes have one form (passes/bitwise.py); drafts are chains then.
    """
    if bitwise and (init == "target" or is_initialized()):
        raise ValueError("bitwise: expected without roots from the target, and in one process")
    if bitwise:
        from ..passes.bitwise import BitwiseDecoder, check_chain

        options["decoder"] = BitwiseDecoder
        if not {"method", "tree"} & options.keys():
            options["method"] = "s2d"  # the default of exit 0 alone would be a tree
    folder = read_folder(find_target(target))
    if options.get("method") == "ar":
        found = FoundDraft(draft=None, datastore=None, description="none")
    else:
        found = find_draft(folder, draft, options.get("exits"), datastore)
        options = named_parts(folder, found, init, decision, options)
    decided = decide(found.draft, **options)
    if bitwise:
        check_chain(decided)
    if found.draft is not None:
        refuse_other_size(found.draft, folder)
    # After all other checks, as transformers takes seconds to import.
    tokenizer = Tokenizer(folder.path, folder.config.vocab_size)
    return Choice(folder, found, decided, tokenizer)


def named_parts(
    folder: ModelFolder,
    found: FoundDraft,
    init: str,
    decision_file: Path | None,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The ``options`` of ``generate``, with the parts that files and names stand for."""
    options = dict(options)
    exits = options.get("exits")
    if exits is None and found.draft is None:
        exits = (0,)
    elif exits is None:
        exits = found.draft.drafting.get("exits", ())
    if found.datastore is not None:
        from ..ngram.datastore import load_datastore, reading

        if 0 not in exits:
            raise ValueError("datastore: expected exit 0 among the exits, which reads it")
        exit_0 = reading(load_datastore(found.datastore, folder.config))
        options["exits"] = [exit_0 if each == 0 else each for each in exits]
    if decision_file is not None:
        from ..mcsd.decision import load_decision, with_decision

        if 0 in exits:
            raise ValueError("decision: expected exits with layers, and not exit 0")
        decision = load_decision(decision_file)
        if fingerprint_of(found.draft) != decision.draft:
            words = f"expected a model for {found.draft.path}, not for another draft"
            raise ValueError(f"decision: {words}")
        options["drafter"] = with_decision(decision)
        options.setdefault("stop", decision.threshold)
    expect(init in ("draft", "target"), "init: expected 'draft' or 'target'", init)
    if init == "target":
        from ..mcsd.roots import RootsDecoder

        options["decoder"] = RootsDecoder
    return options


def fingerprint_of(draft: ModelFolder) -> str:
    """What a decision model knows its draft by."""
    from ..mcsd.decision import fingerprint

    not_read = "model.layers.", "model.embed_tokens.", "lm_head."
    tensors = {name: tensor for _, name, tensor in read_tensors(draft.path, not_read)}
    return fingerprint(tensors["model.norm.weight"])


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
