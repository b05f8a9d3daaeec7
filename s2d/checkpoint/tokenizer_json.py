"""tokenizer.json, by the package ``tokenizers``."""

import json
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .special import (
    LLAMA_TOKENS,
    AddedToken,
    is_llama,
    read_special_tokens,
    space_scheme,
    strips_space,
)

SPACE = "▁"  # how SentencePiece writes it
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a piece that stands for one byte


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``."""

    def __init__(self, folder: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
        """``config`` is what is in tokenizer_config.json, ``content`` that in tokenizer.json."""
        as_llama = is_llama(config) and content["model"].get("type", "BPE") == "BPE"
        as_llama = as_llama and not is_byte_level(content)
        if as_llama:
            settings = content | make_llama_settings(content["model"], config)
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
        else:
            settings = content
            self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.puts_space = remove_space(settings) != settings  # before a text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        defaults = LLAMA_TOKENS if as_llama else {}
        tokens = read_special_tokens(
            folder, config, content, defaults=defaults, vocabulary=vocabulary
        )
        self.names = tokens.names
        added = [token for _, token in sorted(tokens.added.items())]
        # Also known ones, of which other files may say more.
        self.tokenizer.add_tokens([convert(token) for token in (*added, *tokens.others)])
        by_id = self.tokenizer.get_added_tokens_decoder()
        # ``decode`` drops these itself: the package forgets a special token that is ``normalized``.
        self.special = {number for number, token in by_id.items() if token.special}
        self.added = set(by_id)
        # Those that are found, and take nothing with them, whatever text follows.
        alone = [number for number, each in by_id.items() if not (each.rstrip or each.single_word)]
        self.alone = {number: by_id[number].content for number in alone}
        self.eos_id = self.tokenizer.token_to_id(tokens.names.get("eos_token", ""))

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def encode_after(self, text: str, last_id: int) -> list[int]:
        """The ids of a text that goes on after others, of which the last one is ``last_id``."""
        if last_id in self.alone:
            ids = self.encode(self.alone[last_id] + text, with_bos=False)
            return ids[ids.index(last_id) + 1 :]
        encoding = self.bare.encode(text, add_special_tokens=False)
        ids = encoding.ids
        place = next((place for place, token in enumerate(ids) if token in self.added), None)
        if place is None:
            return ids
        # Some tokenizers put a space after each added token as well, so what begins with one is
        # encoded as a text of its own; whatever that has before the token is cut off again.
        rest = self.encode(text[encoding.offsets[place][0] :], with_bos=False)
        return ids[:place] + rest[rest.index(ids[place]) :]

    @cached_property
    def bare(self) -> tokenizers.Tokenizer:
        """The same without a space that is put before a text."""
        if not self.puts_space:
            return self.tokenizer
        content = json.loads(self.tokenizer.to_str())
        return tokenizers.Tokenizer.from_str(json.dumps(remove_space(content)))

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode([token for token in ids if token not in self.special])

    def is_open(self, ids: list[int]) -> bool:
        """Whether what follows may change the text of ``ids``: they end with bytes.

        The package decodes a run of bytes as a whole, and if it is no text, each as U+FFFD.
        """
        for token in reversed(ids):
            piece = self.tokenizer.id_to_token(token)
            if piece is not None and token not in self.special:  # else it leaves no text
                return BYTE.fullmatch(piece) is not None
        return False


def convert(token: AddedToken) -> tokenizers.AddedToken:
    """An added token as the package has it."""
    flags = {name: value for name, value in vars(token).items() if name != "text"}
    return tokenizers.AddedToken(token.text, **flags)


def is_byte_level(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json divides text into bytes, as Llama 3's does."""
    return "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])


def make_llama_settings(model: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' LlamaTokenizer puts in the place of a tokenizer.json's own settings.

    It takes its pieces, and from tokenizer_config.json where a space is put.
    """
    space = {"type": "Metaspace", "replacement": SPACE, "split": False}
    space["prepend_scheme"] = space_scheme(config)
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if strips_space(config):
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bpe = {"fuse_unk": True, "byte_fallback": True, "unk_token": None, "dropout": None}
    return {
        "added_tokens": [],  # those of the other files, and of this one, are added again
        "normalizer": None,
        "pre_tokenizer": space,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model | bpe | {"ignore_merges": False},
    }


def remove_space(content: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer.json that puts no space before a text."""
    return content | {
        "normalizer": remove_space_of_step(content.get("normalizer")),
        "pre_tokenizer": remove_space_of_step(content.get("pre_tokenizer")),
    }


def remove_space_of_step(step: dict[str, Any] | None) -> dict[str, Any] | None:
    """A normalizer or pre-tokenizer that puts no space before a text; None if it did only that."""
    if step is None or step["type"] == "Prepend":
        return None
    if step["type"] == "Sequence":
        name = "normalizers" if "normalizers" in step else "pretokenizers"
        return step | {
            name: [each for each in map(remove_space_of_step, step[name]) if each is not None]
        }
    off = {"prepend_scheme": "never", "add_prefix_space": False}
    return step | {name: value for name, value in off.items() if name in step}
