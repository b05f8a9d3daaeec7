"""tokenizer.model: SentencePiece's pieces, and the special and added tokens between them."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from .special import LLAMA_TOKENS, Settings, read_added, read_names, space_scheme

# Appended to a tokenizer.model, this changes its normalizer_spec, as in protobuf the last value of
# a setting counts: an empty precompiled_charsmap, no add_dummy_prefix, no
# remove_extra_whitespaces. transformers' LlamaTokenizer ignores all three, too.
PIECES_ALONE = b"\x1a\x06\x12\x00\x18\x00\x20\x00"
# What protobuf has behind the text of a user-defined symbol: a score and this type.
USER_DEFINED = re.compile(rb"\x15.{4}\x18\x04[\n\x12]", re.DOTALL)
UNSUPPORTED = ("add_eos_token", "split_special_tokens", "sp_model_kwargs")


class SentencePieceModel:
    """Text <-> ids by the tokenizer.model in ``folder``, as transformers' LlamaTokenizer has it.

    ``names`` are {"eos_token": text, ...}, ``special`` {id: text} of what leaves no text.
    """

    def __init__(self, folder: Path, config: Settings, content: Settings) -> None:
        """Raises ValueError for what is not supported, or if the two files differ."""
        for key in UNSUPPORTED:
            if config.get(key):
                raise ValueError(f"{key} in tokenizer_config.json is not supported")
        proto = (folder / "tokenizer.model").read_bytes()
        if USER_DEFINED.search(proto):
            raise ValueError("tokenizer.model has user-defined symbols, which are not supported")
        self.pieces = SentencePieceProcessor()
        self.pieces.load_from_serialized_proto(proto + PIECES_ALONE)
        self.scheme = space_scheme(config)
        ids = {self.pieces.id_to_piece(number): number for number in range(len(self.pieces))}
        if content and content["model"]["vocab"] != ids:
            raise ValueError("tokenizer.model and tokenizer.json have other pieces; remove one")
        added = read_added(folder, config)
        if config.get("added_tokens_decoder") is None:
            added |= {token["id"]: token for token in content.get("added_tokens", [])}
        known = ids | {token["content"]: number for number, token in added.items()}
        names = read_names(folder, LLAMA_TOKENS | config)
        for name, token in names.items():
            number = known.get(token["content"])
            if number is None:
                raise ValueError(f"no file says the id of {name} {token['content']!r}")
            added[number] = added.get(number, token) | {"special": True}
        for text, number in ids.items():
            if self.pieces.is_control(number):
                added.setdefault(number, {"content": text, "special": True})
        for token in added.values():
            for flag in ("lstrip", "rstrip", "single_word"):
                if token.get(flag):
                    raise ValueError(f"{flag} of the token {token['content']!r} is not supported")
        self.names = {name: token["content"] for name, token in names.items()}
        self.added = {token["content"]: number for number, token in added.items()}
        self.special = {}
        self.text_of = {}  # what an added token leaves when it is decoded
        for number, token in added.items():
            self.text_of[number] = "" if token.get("special") else token["content"]
            if token.get("special"):
                self.special[number] = token["content"]
        # Tokens that are not looked for in normalised text are found first.
        plain = []
        normalized = []
        for token in added.values():
            if token.get("normalized", not token.get("special")):
                normalized.append(token["content"])
            else:
                plain.append(token["content"])
        self.patterns = [make_pattern(texts) for texts in (plain, normalized) if texts]
        bos = self.names.get("bos_token") if config.get("add_bos_token", True) else None
        if content:  # as in transformers, tokenizer.json has the last word
            processor = content.get("post_processor") or {"single": [{}]}
            around = processor["single"]
            bos = around[0].get("SpecialToken", {}).get("id")
            if "SpecialToken" in around[-1]:
                raise ValueError("tokenizer.json puts a token behind a text: not supported")
        self.bos_id = self.added.get(bos)

    def encode(self, text: str, with_bos: bool) -> list[int]:
        ids: list[int] = []
        for part in self.divide(text):
            if part in self.added:
                ids.append(self.added[part])
            else:
                space = " " if self.needs_space(part, is_first=not ids) else ""
                ids += self.pieces.encode(space + part)
        return [self.bos_id, *ids] if with_bos and self.bos_id is not None else ids

    def divide(self, text: str) -> Iterator[str]:
        """The added tokens in a text, and the texts between them."""
        parts = [text]
        for pattern in self.patterns:
            divided = []
            for part in parts:
                divided += [part] if part in self.added else pattern.split(part)
            parts = divided
        return filter(None, parts)

    def needs_space(self, part: str, is_first: bool) -> bool:
        """Whether a space is put before a part of a text, which begins it or follows a token."""
        if part.startswith((" ", "▁")):
            return False
        return self.scheme == "always" or (self.scheme == "first" and is_first)

    def decode(self, ids: list[int]) -> str:
        text = ""
        for is_added, run in groupby(ids, self.text_of.__contains__):
            if is_added:
                text += "".join(self.text_of[number] for number in run)
            else:
                text += self.pieces.decode([number for number in run if number < len(self.pieces)])
        return text if self.scheme == "never" else text.removeprefix(" ")


def make_pattern(texts: list[str]) -> re.Pattern[str]:
    """What finds any of ``texts`` in a text; if one begins another, the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
