"""tokenizer.model: SentencePiece's pieces, and the tokens that other files of its folder add."""

import re
import unicodedata
from collections.abc import Callable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from .special import LLAMA_TOKENS, AddedToken, read_special_tokens, space_scheme, strips_space

# Appended to a tokenizer.model, these change one of its settings, normalizer_spec {
# add_dummy_prefix }: whether a space is put before a text. In protobuf, the last value counts.
WITH_PREFIX = b"\x1a\x02\x18\x01"
NO_PREFIX = b"\x1a\x02\x18\x00"
# Unicode's white space, of which Python knows four separators more.
SPACES = "\t\n\x0b\x0c\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000"
SPACES += "".join(map(chr, range(0x2000, 0x200B)))
WORD = "Lu Ll Lt Lm Lo Mn Mc Me Nd Nl Pc".split()  # categories of what belongs to a word

Finder = Callable[[str], Iterator[re.Match[str]]]


class SentencePieceModel:
    """Text <-> ids by the tokenizer.model in ``folder``."""

    def __init__(self, folder: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
        """``config`` is what is in tokenizer_config.json, ``content`` that in tokenizer.json."""
        proto = (folder / "tokenizer.model").read_bytes()
        self.pieces = make_processor(proto)
        self.bare = make_processor(proto + NO_PREFIX)
        self.strips_space = strips_space(config)
        scheme = space_scheme(config)
        self.first = self.bare
        self.later = self.bare
        if scheme == "first":
            self.first = make_processor(proto + WITH_PREFIX)
        elif scheme == "always":
            self.first = self.pieces
            self.later = self.pieces
        vocabulary = ids_of(self.pieces)
        tokens = read_special_tokens(
            folder, config, content, defaults=LLAMA_TOKENS, vocabulary=vocabulary
        )
        self.names = tokens.names
        added = self.control_tokens() | tokens.added
        for token in tokens.others:
            new = max([len(vocabulary) - 1, *added]) + 1
            added[vocabulary.get(token.text, new)] = token
        self.by_text = {token.text: (number, token) for number, token in added.items()}
        # Those that are not to be found in normalised text are found first.
        every = [token for _, token in self.by_text.values()]
        plain = [token.text for token in every if not token.normalized]
        normalized = [token.text for token in every if token.normalized]
        self.finders = [make_finder(texts) for texts in (plain, normalized) if texts]
        self.text_of = {  # what an added token leaves when ids are decoded
            number: "" if token.special else token.text for number, token in added.items()
        }
        self.bos_id, _ = self.by_text.get(tokens.names.get("bos_token"), (None, None))
        self.eos_id, _ = self.by_text.get(tokens.names.get("eos_token"), (None, None))
        self.add_bos = config.get("add_bos_token", True)
        # "single" is what a text becomes, such as [{"SpecialToken": ...}, {"Sequence": ...}].
        if content.get("post_processor"):  # which has the last word, whatever the config says
            self.add_bos = "SpecialToken" in content["post_processor"].get("single", [{}])[0]

    def control_tokens(self) -> dict[int, AddedToken]:
        """The model's own special tokens, which stand for themselves in a text."""
        numbers = range(self.pieces.vocab_size())
        control = [number for number in numbers if self.pieces.is_control(number)]
        return {number: AddedToken(self.pieces.id_to_piece(number)) for number in control}

    def encode(self, text: str, with_bos: bool) -> list[int]:
        ids = self.encode_parts(text, self.first)
        begins = with_bos and self.add_bos and self.bos_id is not None
        return [self.bos_id, *ids] if begins else ids

    def encode_after(self, text: str, last_id: int) -> list[int]:
        """The ids of a text that goes on after others, of which the last one is ``last_id``."""
        return self.encode_parts(text, self.later if last_id in self.text_of else self.bare)

    def encode_parts(self, text: str, pieces: SentencePieceProcessor) -> list[int]:
        """The ids of a text; if it does not begin with an added token, ``pieces`` begin it."""
        parts: list[str | int] = [text]
        for find in self.finders:
            parts = [piece for part in parts for piece in self.divide(part, find)]
        ids: list[int] = []
        for part in parts:
            if isinstance(part, int):
                ids.append(part)
            elif part:
                ids += (self.later if ids else pieces).encode(part)
        return ids

    def divide(self, part: str | int, find: Finder) -> Iterator[str | int]:
        """The ids of the added tokens in a text, and the texts between them."""
        if isinstance(part, int):
            yield part
            return
        end = 0
        for match in find(part):
            number, token = self.by_text[match[0]]
            start, stop = match.span()
            if token.single_word and is_inside_a_word(part, start, stop):
                continue
            before = part[end:start]
            yield before.rstrip(SPACES) if token.lstrip else before
            yield number
            end = stop
            if token.rstrip:
                end = len(part) - len(part[stop:].lstrip(SPACES))
        yield part[end:]

    def decode(self, ids: list[int]) -> str:
        parts = []
        size = self.pieces.vocab_size()
        for plain, run in groupby(ids, lambda token: token < size and token not in self.text_of):
            if plain:
                parts.append(self.bare.decode(list(run)))
            else:
                parts += [self.text_of.get(token, "") for token in run]
        text = "".join(parts)
        return text.removeprefix(" ") if self.strips_space else text

    def is_open(self, ids: list[int]) -> bool:
        """Whether what follows may change the text of ``ids``, but for half a character."""
        return False


def ids_of(pieces: SentencePieceProcessor) -> dict[str, int]:
    """{piece: its id}."""
    return {pieces.id_to_piece(number): number for number in range(pieces.vocab_size())}


def fits(folder: Path, content: dict[str, Any]) -> bool:
    """Whether ``folder`` has a tokenizer.model with the pieces of its tokenizer.json."""
    try:
        pieces = ids_of(make_processor((folder / "tokenizer.model").read_bytes()))
    except (OSError, RuntimeError):  # there is none, or it is not SentencePiece's, as Llama 3's
        return False
    vocabulary = content["model"]["vocab"]
    return isinstance(vocabulary, dict) and pieces.items() <= vocabulary.items()


def make_processor(proto: bytes) -> SentencePieceProcessor:
    processor = SentencePieceProcessor()
    processor.load_from_serialized_proto(proto)
    return processor


def make_finder(texts: list[str]) -> Finder:
    """What finds any of ``texts`` in a text; if one begins another, the longest."""
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first))).finditer


def is_inside_a_word(text: str, start: int, stop: int) -> bool:
    """Whether a word goes on right before ``start`` or right after ``stop``."""
    around = text[max(0, start - 1) : start] + text[stop : stop + 1]
    return any(unicodedata.category(each) in WORD for each in around)
