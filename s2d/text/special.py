"""Special and added tokens: what the files of a folder say about them, resolved in one place.

As transformers 5 reads them. tokenizer_config.json names tokens, such as ``eos_token``, and may
describe every added token in ``added_tokens_decoder``. If it does not, special_tokens_map.json may
name more, and added_tokens.json and tokenizer.json describe added tokens.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..files import read_json

# What a Llama's tokenizer calls its tokens unless a file says otherwise.
STANDARD = [f"{name}_token" for name in "bos eos unk sep pad cls mask".split()]
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the text is divided into pieces.

    Attributes:
        text: of the token.
        special: it leaves no text when ids are decoded.
        lstrip, rstrip: it takes the white space to its left or right with it.
        single_word: it is found only if no word goes on to its left or right.
        normalized: it is found after the text was normalised.
    """

    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class SpecialTokens:
    """Attributes:
    config: tokenizer_config.json.
    names: {"eos_token": its text, ...}.
    added: {id: AddedToken} of those whose id a file says.
    others: texts of special tokens of which no file says the id.
    """

    config: dict[str, Any]
    names: dict[str, str]
    added: dict[int, AddedToken]
    others: list[str]


def read_special_tokens(folder: Path) -> SpecialTokens:
    """What the files in ``folder`` say; ValueError, TypeError or KeyError if one is damaged."""
    config = read_json(folder / "tokenizer_config.json", missing={})
    said = dict(config)
    by_id = config.get("added_tokens_decoder")
    if by_id is None:
        said |= read_json(folder / "special_tokens_map.json", missing={})
    llama = str(config.get("tokenizer_class", "")).startswith("LlamaTokenizer")
    names = dict(LLAMA) if llama or is_sentencepiece(folder / "tokenizer.model") else {}
    for key, token in said.items():
        if key.endswith("_token") and not key.startswith("add_"):
            names[key] = token and text_of(token)
    extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # tokens that a model has names of its own for
        names |= {name: text_of(token) for name, token in extra.items()}
        extra = []
    names = {name: text for name, text in names.items() if text}
    special = [*names.values(), *map(text_of, extra)]
    standard = [*(text for name, text in names.items() if name in STANDARD), *map(text_of, extra)]
    if by_id is not None:
        added = {int(number): read_token(token) for number, token in by_id.items()}
    else:
        added = {}
        for text, number in read_json(folder / "added_tokens.json", missing={}).items():
            normalized = text not in standard
            added[number] = AddedToken(text, special=text in special, normalized=normalized)
        for token in read_json(folder / "tokenizer.json", missing={}).get("added_tokens", []):
            added[token["id"]] = read_token(token)
    known = {token.text for token in added.values()}
    others = [text for text in dict.fromkeys(special) if text not in known]
    return SpecialTokens(config, names, added, others)


def is_sentencepiece(file: Path) -> bool:
    """Whether a file may be SentencePiece's; that of Llama 3 has the same name and is another's."""
    with suppress(FileNotFoundError), file.open("rb") as opened:
        return opened.read(1) == b"\n"  # the tag of the first piece
    return False


def text_of(token: str | dict[str, Any]) -> str:
    return token["content"] if isinstance(token, dict) else token


def read_token(token: dict[str, Any]) -> AddedToken:
    special = token.get("special", False)
    flags = {name: token.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
    return AddedToken(token["content"], special, **flags, normalized=token.get("normalized", False))
