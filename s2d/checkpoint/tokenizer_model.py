"""tokenizer.model: SentencePiece's pieces, and the special and added tokens between them."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from .files import read_json

# Appended to a tokenizer.model, these say whether a space is put before a text: in protobuf, the
# last value of a setting, here normalizer_spec { add_dummy_prefix }, counts.
WITH_PREFIX = b"\x1a\x02\x18\x01"
NO_PREFIX = b"\x1a\x02\x18\x00"
# What protobuf has behind the text of a user-defined symbol: a score and this type.
USER_DEFINED = re.compile(rb"\x15.{4}\x18\x04[\n\x12]", re.DOTALL)
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
UNSUPPORTED = ("add_eos_token", "split_special_tokens", "sp_model_kwargs")
Token = dict[str, Any]  # "content" and flags, as files write them


class SentencePieceModel:
    """Text <-> ids by the tokenizer.model in ``folder``, as transformers' LlamaTokenizer has it.

    ``config`` is tokenizer_config.json, ``content`` tokenizer.json, empty if there is none.
    ``names`` are {"eos_token": text, ...}, ``specials`` {text: id} of what leaves no text.
    """

    def __init__(self, folder: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
        for key in UNSUPPORTED:
            if config.get(key):
                raise ValueError(f"{key} in tokenizer_config.json is not supported")
        proto = (folder / "tokenizer.model").read_bytes()
        if USER_DEFINED.search(proto):
            raise ValueError("tokenizer.model has user-defined symbols, which are not supported")
        self.bare = make_processor(proto + NO_PREFIX)
        self.size = self.bare.vocab_size()
        scheme = space_scheme(config)
        self.first = self.later = self.bare
        if scheme == "first":
            self.first = make_processor(proto + WITH_PREFIX)
        elif scheme == "always":
            self.first = self.later = make_processor(proto)
        self.strips_space = scheme != "never"
        tokens = self.read_added(folder, config, content)
        known = {token["content"]: number for number, token in tokens.items()}
        pieces = {self.bare.id_to_piece(number): number for number in range(self.size)}
        named = read_named(folder, config)
        for name, text in LLAMA_TOKENS.items():
            if text in pieces or text in known:
                named = {name: {"content": text}} | named
        self.names = {name: token["content"] for name, token in named.items() if token["content"]}
        for name, text in self.names.items():
            if text not in known and text not in pieces:
                raise ValueError(f"no file says the id of {name} {text!r}")
            tokens.setdefault(known.get(text, pieces.get(text)), named[name])
        self.added = {token["content"]: number for number, token in tokens.items()}
        special = {token["content"] for token in tokens.values() if token.get("special")}
        self.specials = {text: self.added[text] for text in (*special, *self.names.values())}
        # What an added token leaves when ids are decoded.
        self.text_of = {n: "" if text in self.specials else text for text, n in self.added.items()}
        # Those that are not to be found in normalised text are found first, the longest before all.
        groups: tuple[list[str], list[str]] = ([], [])
        for token in (*tokens.values(), *named.values()):
            for flag in ("lstrip", "rstrip", "single_word"):
                if token.get(flag):
                    raise ValueError(f"{flag} of the token {token['content']!r} is not supported")
        for token in sorted(tokens.values(), key=lambda token: -len(token["content"])):
            text = token["content"]
            groups[bool(token.get("normalized", text not in self.specials))].append(re.escape(text))
        self.splits = [re.compile(f"({'|'.join(group)})").split for group in groups if group]
        self.bos_id = self.added.get(self.names.get("bos_token"))
        self.add_bos = config.get("add_bos_token", True)
        if content.get("post_processor"):  # which has the last word, whatever the config says
            self.add_bos = "SpecialToken" in content["post_processor"].get("single", [{}])[0]

    def read_added(
        self, folder: Path, config: dict[str, Any], content: dict[str, Any]
    ) -> dict[int, Token]:
        """{id: token} of the model's own special tokens, and of those that files describe."""
        control = filter(self.bare.is_control, range(self.size))
        tokens = {n: {"content": self.bare.id_to_piece(n), "special": True} for n in control}
        if config.get("added_tokens_decoder") is not None:
            return tokens | {int(n): token for n, token in config["added_tokens_decoder"].items()}
        for text, number in read_json(folder / "added_tokens.json", missing={}).items():
            tokens[number] = {"content": text}
        return tokens | {token["id"]: token for token in content.get("added_tokens", [])}

    def encode(self, text: str, with_bos: bool, after: int | None) -> list[int]:
        first = self.first
        if after is not None:
            first = self.later if after in self.text_of else self.bare
        parts = [text]  # texts and added tokens in turn
        for split in self.splits:
            halves = (split(part) if place % 2 == 0 else [part] for place, part in enumerate(parts))
            parts = [part for half in halves for part in half]
        ids: list[int] = []
        for place, part in enumerate(parts):
            if place % 2:
                ids.append(self.added[part])
            elif part:
                ids += (self.later if ids else first).encode(part)
        return [self.bos_id, *ids] if with_bos and self.add_bos and self.bos_id is not None else ids

    def decode(self, ids: list[int]) -> str:
        text = ""
        for added, run in groupby(ids, self.text_of.__contains__):
            known = [token for token in run if added or token < self.size]
            text += "".join(map(self.text_of.get, known)) if added else self.bare.decode(known)
        return text.removeprefix(" ") if self.strips_space else text

    def is_open(self, ids: list[int]) -> bool:
        return False


def make_processor(proto: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(proto)
    return processor


def has_pieces(folder: Path, vocabulary: Any) -> bool:
    """Whether ``folder`` has a tokenizer.model whose pieces are in the ``vocabulary``."""
    try:
        pieces = make_processor((folder / "tokenizer.model").read_bytes())
    except (OSError, RuntimeError):  # there is none, or it is not SentencePiece's, as Llama 3's
        return False
    ids = range(pieces.vocab_size())
    known = isinstance(vocabulary, dict)
    return known and all(vocabulary.get(pieces.id_to_piece(number)) == number for number in ids)


def read_named(folder: Path, config: dict[str, Any]) -> dict[str, Token]:
    """{"eos_token": token, ...} that files name, all special; a token of None is none."""
    said = config
    if config.get("added_tokens_decoder") is None:
        said = config | read_json(folder / "special_tokens_map.json", missing={})
    extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        raise ValueError(f"extra_special_tokens is {extra!r:.60}; only a list is supported")
    named = {k: v for k, v in said.items() if k.endswith("_token") and not k.startswith("add_")}
    named |= {f"extra token {place}": token for place, token in enumerate(extra)}
    named = {k: v if isinstance(v, dict) else {"content": v} for k, v in named.items()}
    # Whatever else such a key may have, as a number, names no token.
    return {k: v for k, v in named.items() if isinstance(v.get("content", ...), str | None)}


def space_scheme(config: dict[str, Any]) -> str:
    """Where a Llama's tokenizer puts a space, by its tokenizer_config.json.

    "first": before a text; "always": before each part between two added tokens as well; "never".
    """
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"
