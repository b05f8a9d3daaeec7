"""A tokenizer.model that says everything about a folder's tokens, by SentencePiece."""

import re
from itertools import groupby
from pathlib import Path
from typing import Any

from sentencepiece import SentencePieceProcessor

from .files import read_json

# Appended to a tokenizer.model, this changes its normalizer_spec, as in protobuf the last value of
# a setting counts: an empty precompiled_charsmap, no add_dummy_prefix, no
# remove_extra_whitespaces, escape_whitespaces. The package has no public switch for them. Llama's
# tokenizer puts the space before a text itself, and not before each part between special tokens.
PIECES_ALONE = b"\x1a\x08\x12\x00\x18\x00\x20\x00\x28\x01"
# A folder with one of these files says more about its tokens than the tokenizer.model does.
OTHER_FILES = ("tokenizer.json", "added_tokens.json", "chat_template.jinja")
# What tokenizer_config.json may say beside it, as Llama 1's and Vicuna's do.
EXPECTED = {
    "tokenizer_class": ("LlamaTokenizer", "LlamaTokenizerFast"),
    "add_bos_token": (True, False, None),
    "add_eos_token": (False, None),
    "legacy": (True, False, None),
    "sp_model_kwargs": ({}, None),
    "pad_token": ("<unk>", "</s>", None),
}
# What it may say in any way, as that changes neither ids nor texts.
IGNORED = ("model_max_length", "padding_side", "clean_up_tokenization_spaces")
IGNORED += ("use_default_system_prompt",)


class SentencePieceModel:
    """Text <-> ids by the tokenizer.model in a folder, as Llama's tokenizer has it.

    ``special`` is {id: text} of the tokens that leave no text: BOS, EOS and the unknown token.
    ``eos`` is the text of the EOS.
    """

    chat_template = None

    def __init__(self, pieces: SentencePieceProcessor, config: dict[str, Any]) -> None:
        """``config`` is what is in tokenizer_config.json."""
        self.pieces = pieces
        self.adds_bos = config.get("add_bos_token") is not False
        self.is_legacy = bool(config.get("legacy"))
        numbers = pieces.bos_id(), pieces.eos_id(), pieces.unk_id()
        self.special = {number: pieces.id_to_piece(number) for number in numbers}
        self.eos = pieces.id_to_piece(pieces.eos_id())
        self.ids = {text: number for number, text in self.special.items()}
        self.pattern = re.compile(f"({'|'.join(map(re.escape, self.ids))})")

    def encode(self, text: str, with_bos: bool) -> list[int]:
        ids = []
        for part in filter(None, self.pattern.split(text)):
            if part in self.ids:
                ids.append(self.ids[part])
                continue
            # A text begins with a space. Legacy tokenizers put one behind a special token, too.
            space = (not ids or self.is_legacy) and not part.startswith((" ", "▁"))
            ids += self.pieces.encode(" " + part if space else part)
        return [self.pieces.bos_id(), *ids] if with_bos and self.adds_bos else ids

    def decode(self, ids: list[int]) -> str:
        text = ""
        for is_special, run in groupby(ids, self.special.__contains__):
            if not is_special:
                text += self.pieces.decode([number for number in run if number < len(self.pieces)])
        return text.removeprefix(" ")


def read_sentencepiece(folder: Path) -> SentencePieceModel | None:
    """The model in ``folder``; None if there is none, or if other files say more about tokens."""
    file = folder / "tokenizer.model"
    if not file.is_file() or any((folder / name).exists() for name in OTHER_FILES):
        return None
    config = read_json(folder / "tokenizer_config.json", missing={})
    config |= read_json(folder / "special_tokens_map.json", missing={})
    pieces = SentencePieceProcessor()
    try:
        pieces.load_from_serialized_proto(file.read_bytes() + PIECES_ALONE)
    except RuntimeError as error:
        raise ValueError(f"{file} is damaged: {' '.join(str(error).split())}") from None
    named = {"bos_token": pieces.bos_id(), "eos_token": pieces.eos_id()}
    named["unk_token"] = pieces.unk_id()
    if min(named.values()) < 0:
        return None
    expected = EXPECTED | {name: (pieces.id_to_piece(each),) for name, each in named.items()}
    for name, value in config.items():
        if isinstance(value, dict) and "content" in value:  # a token with flags
            if value.get("lstrip") or value.get("rstrip") or value.get("single_word"):
                return None
            value = value["content"]
        if name not in IGNORED and value not in expected.get(name, ()):
            return None
    return SentencePieceModel(pieces, config)
