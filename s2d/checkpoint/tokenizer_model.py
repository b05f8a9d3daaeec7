"""tokenizer.model: SentencePiece's pieces, and the special and added tokens between them."""

import re
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from .special import DEFAULT_TOKENS, Settings, read_added, read_names, space_scheme

# Appended to a tokenizer.model, this changes its normalizer_spec, as in protobuf the last value of
# a setting counts: an empty precompiled_charsmap, no add_dummy_prefix, no
# remove_extra_whitespaces, escape_whitespaces. transformers' LlamaTokenizer does so, too.
PIECES_ALONE = b"\x1a\x08\x12\x00\x18\x00\x20\x00\x28\x01"
LAST_SCORE = -1e9  # of Llama's pieces of several spaces
UNSUPPORTED = ("add_eos_token", "sp_model_kwargs")


class SentencePieceModel:
    """Text <-> ids by the tokenizer.model in ``folder``, as transformers' LlamaTokenizer has it.

    ``names`` are {"eos_token": text, ...}, ``special`` {id: text} of what leaves no text.
    """

    def __init__(self, folder: Path, config: Settings) -> None:
        """Raises ValueError for what is not supported."""
        if config.get("tokenizer_class") not in (None, "LlamaTokenizer", "LlamaTokenizerFast"):
            raise ValueError(f"tokenizer_class {config['tokenizer_class']!r} is not known")
        for key in UNSUPPORTED:
            if config.get(key):
                raise ValueError(f"{key} in tokenizer_config.json is not supported")
        proto = (folder / "tokenizer.model").read_bytes()
        self.pieces = SentencePieceProcessor()
        self.pieces.load_from_serialized_proto(proto + PIECES_ALONE)
        refuse_other_pieces(self.pieces)
        self.scheme = space_scheme(config)
        ids = {self.pieces.id_to_piece(number): number for number in range(len(self.pieces))}
        added = read_added(folder, config)
        known = ids | {token["content"]: number for number, token in added.items()}
        names = read_names(folder, DEFAULT_TOKENS["LlamaTokenizer"] | config)
        for name, token in names.items():
            number = known.get(token["content"])
            if number is None:
                raise ValueError(f"no file says the id of {name} {token['content']!r}")
            added[number] = added.get(number, token) | {"special": True}
        for text, number in ids.items():
            if self.pieces.is_control(number):
                added.setdefault(number, {"content": text, "special": True})
        beyond = sorted(number for number in added if number >= len(ids))
        if beyond != list(range(len(ids), len(ids) + len(beyond))):
            raise ValueError(f"the ids of added tokens {beyond} leave gaps")
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


def refuse_other_pieces(pieces: SentencePieceProcessor) -> None:
    """Raise ValueError if these are no byte-pair encoding as of Llama's, with a piece per byte.

    Its merges are in the order of their ranks: their scores are 0, -1, -2, ..., but for Llama's
    pieces of several spaces, which are merged last. A Unigram model has other scores, and so has
    one with user-defined symbols, or with pieces that were put into it later.
    """
    numbers = range(len(pieces))
    kinds = (pieces.is_control, pieces.is_unknown, pieces.is_byte)
    merged = [number for number in numbers if not any(is_kind(number) for is_kind in kinds)]
    ranked = all(
        pieces.get_score(number) in (-rank, LAST_SCORE) for rank, number in enumerate(merged)
    )
    if not ranked or sum(map(pieces.is_byte, numbers)) != 256:
        raise ValueError("tokenizer.model is no byte-pair encoding of Llama's kind")


def make_pattern(texts: list[str]) -> re.Pattern[str]:
    """What finds any of ``texts`` in a text; if one begins another, the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first))})")
