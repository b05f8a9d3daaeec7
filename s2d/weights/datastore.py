"""A datastore: a file of tokens that a model wrote, for exit 0 to draft from.

Knows nothing about n-grams. The file is safetensors with one tensor ``tokens`` (N,): documents,
each with an end-of-text token after it, so that nothing has to be read across two of them.
"""

import json
import zlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ..extras.datastore import Datastore
from ..files import staged_file
from ..text.special_tokens import read_tokenizer_json

DATASTORE = "datastore.safetensors"  # its name in a model's folder
KIND = "s2d datastore"


def tokenizer_checksum(folder):
    """A short name for the vocabulary in ``folder``, of the file that ``Tokenizer`` would read."""
    file = Path(folder) / "tokenizer.model"
    if file.is_file():
        return f"{zlib.crc32(file.read_bytes()):08x}"
    vocabulary, added = read_tokenizer_json(file.parent)
    added = sorted((token.id, token.text) for token in added)  # there they have any order
    return f"{zlib.crc32(json.dumps([vocabulary, added], sort_keys=True).encode()):08x}"


def find_datastore(target, draft, config):
    """The file of the target's datastore, or of its draft's for the same vocabulary, or None."""
    own, other = target / DATASTORE, draft / DATASTORE
    if own.is_file():
        return own
    if not other.is_file():
        return None
    found = [_read(other)[0].get(key) for key in ("vocab_size", "tokenizer")]
    fits = found == [str(config.vocab_size), tokenizer_checksum(target)]
    return other if fits else None


def open_datastore(file, target, config) -> Datastore:
    """The Datastore in ``file`` for the target in the folder ``target`` with its ``config``."""
    tokens = load_datastore(file, config.vocab_size, tokenizer_checksum(target))
    return Datastore(tokens, end_of(config, target))


def end_of(config, target):
    """The id that ends a document; ValueError where ``target`` has none."""
    if not config.eos_token_ids:
        raise ValueError(f"{target} names no eos_token_id, which ends a datastore's documents")
    return config.eos_token_ids[0]


def load_datastore(path, vocab_size, tokenizer):
    """The tokens (N,) int32 in the file ``path``; ValueError: it is not for this vocabulary."""
    metadata, tokens = _read(path)
    if tokens is None:
        raise ValueError(f"{path} is no datastore; make one with python -m s2d.train text")
    for key, wanted in (("vocab_size", str(vocab_size)), ("tokenizer", tokenizer)):
        if (found := metadata.get(key)) != wanted:
            how = f"({key} {found}, not {wanted}); make one with python -m s2d.train text"
            raise ValueError(f"{path} is a datastore for another vocabulary {how}")
    if tokens.dim() != 1 or tokens.dtype not in (torch.uint16, torch.int32) or not len(tokens):
        raise ValueError(f"{path} is damaged: its tokens are not a list of ids")
    tokens = tokens.to(torch.int32)
    if tokens.min() < 0 or tokens.max() >= vocab_size:
        raise ValueError(f"{path} is damaged: it holds ids outside of 0..{vocab_size - 1}")
    return tokens


def _read(path):
    """(metadata, tensor ``tokens`` or None where it is another file) of a safetensors file."""
    if not Path(path).is_file():
        raise FileNotFoundError(f"no datastore at {path}; make one with python -m s2d.train text")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            return metadata, file.get_tensor("tokens") if metadata.get("kind") == KIND else None
    except SafetensorError as error:
        raise ValueError(f"{path} is no datastore, or is damaged ({error})") from None


def write_datastore(path, documents, eos, vocab_size, tokenizer, source):
    """Write lists of ids, an ``eos`` after each; returns the tokens (N,). ``source`` says whose."""
    ids = [token for ids in documents for token in (ids if ids[-1:] == [eos] else [*ids, eos])]
    tokens = torch.tensor(ids, dtype=torch.int32)
    if vocab_size <= 2**16:
        tokens = tokens.to(torch.uint16)
    metadata = {"kind": KIND, "vocab_size": str(vocab_size), "tokenizer": tokenizer}
    with staged_file(path) as stage:
        save_file({"tokens": tokens}, stage, metadata=metadata | {"source": source})
    return tokens
