"""A target and what drafts for it, as all programs load them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed import is_initialized

from ..checkpoint.config import ModelFolder, read_folder
from ..checkpoint.load import load_model, read_tensors
from ..checkpoint.tokenizer import Tokenizer
from ..generation import decide
from ..model import Llama
from ..options import Options, expect
from .names import find_datastore, find_draft, find_target


@dataclass(frozen=True)
class Choice:
    """A target and what drafts for it, before models are loaded."""

    folder: ModelFolder  # of the target
    draft_folder: ModelFolder | None  # without one, exit 0 drafts alone, or nothing does
    datastore: Path | None  # the file that exit 0 reads
    options: Options
    tokenizer: Tokenizer

    @property
    def drafting(self) -> str:
        """What drafts, in words."""
        parts = [] if self.draft_folder is None else [str(self.draft_folder.path)]
        if 0 in self.options.exits:
            parts.append("exit 0, the n-grams of the text")
        if self.datastore is not None:
            parts.append(f"exit 0, the n-grams of the text and of {self.datastore}")
        return " and ".join(parts) or "none"


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
        datastore: the file of a datastore for exit 0, by default the one next to the target. Exit 0
            drafts alone if a datastore is given, and neither a draft nor exits are.
        bitwise: whether all passes have one size (passes/bitwise.py); drafts are chains then.
    """
    expect(init in ("draft", "target"), "init: expected 'draft' or 'target'", init)
    options = {name: value for name, value in options.items() if value is not None}
    if options.get("method") == "ar":  # what is given for drafting is passed over
        init, decision, datastore = "draft", None, None
    if bitwise and (init == "target" or is_initialized()):
        raise ValueError("bitwise: expected without roots from the target, and in one process")
    if init == "target":
        from ..mcsd.roots import RootsDecoder  # few programs need it, or the other parts below

        options["decoder"] = RootsDecoder
    if bitwise:
        from ..passes.bitwise import BitwiseDecoder, check_chain

        options["decoder"] = BitwiseDecoder
        if not {"method", "tree"} & options.keys():
            options["method"] = "s2d"  # the default of exit 0 alone would be a tree
    if datastore is not None and draft is None:
        options.setdefault("exits", (0,))
    folder = read_folder(find_target(target))
    found = None
    if options.get("method") != "ar":
        found = find_draft(folder, draft, options.get("exits"))
    if decision is not None:
        from ..mcsd.decision import load_decision, with_decision

        model = load_decision(decision)
        options = {"drafter": with_decision(model), "stop": model.threshold} | options
    decided = decide(found, **options)
    if bitwise:
        check_chain(decided)
    if decision is not None:
        check_decision(model.draft, found, decided)
    if datastore is None and 0 in decided.exits:
        datastore = find_datastore(folder)
    if datastore is not None:
        if 0 not in decided.exits:
            raise ValueError("datastore: expected exit 0 among the exits, which reads it")
        from ..ngram.datastore import load_datastore, reading

        exit_0 = reading(load_datastore(datastore, folder.config))
        exits = [exit_0 if each == 0 else each for each in decided.exits]
        decided = replace(decided, exits=tuple(exits))
    # After all other checks, as transformers takes seconds to import.
    tokenizer = Tokenizer(folder.path, folder.config.vocab_size)
    return Choice(folder, found, datastore, decided, tokenizer)


def check_decision(made_for: str, draft: ModelFolder | None, options: Options) -> None:
    """ValueError if exit 0 drafts, or another draft than a decision model was made for."""
    from ..mcsd.decision import fingerprint

    if draft is None or 0 in options.exits:
        raise ValueError("decision: expected exits with layers, and not exit 0")
    not_read = "model.layers.", "model.embed_tokens.", "lm_head."
    tensors = {name: tensor for _, name, tensor in read_tensors(draft.path, not_read)}
    if fingerprint(tensors["model.norm.weight"]) != made_for:
        raise ValueError(f"decision: expected a model for {draft.path}, not for another draft")


def load_chosen(
    choice: Choice, device: str, dtype: str, load: Callable[..., Llama] = load_model
) -> Pair:
    """Load the models of a ``choice``, each once, and no layer after the last exit that drafts.

    torchrun's processes divide the target among them, and no draft.
    """
    found = choice.draft_folder
    divided = is_initialized()
    if divided:
        from ..passes.tensor_parallel import load_part

        target = load_part(choice.folder, device, dtype)
    else:
        target = load(choice.folder, device, dtype)
    draft = None
    if found is not None and not divided and found.path.samefile(choice.folder.path):
        draft = target  # it drafts for itself: its first layers are in memory already
    elif found is not None:
        layers = max(choice.options.layers, default=0) or None
        draft = load(found, device, target.dtype, layers=layers)
    return Pair(**vars(choice), target=target, draft=draft)
