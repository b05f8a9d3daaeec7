"""tokenizer.json, by the package ``tokenizers``."""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from .special import LLAMA, AddedToken, is_llama, read_special_tokens

SPACE = "▁"  # how SentencePiece writes it
BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a piece that stands for one byte


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``."""

    def __init__(self, folder: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
        """``config`` is what is in tokenizer_config.json, ``content`` that in tokenizer.json."""
        as_llama = is_llama(config) and content["model"].get("type", "BPE") == "BPE"
        as_llama = as_llama and not is_byte_level(content)
        if as_llama:
            settings = llama_settings(content["model"], config)
            self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content | settings))
        else:
            self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab(with_added_tokens=False)
        defaults = LLAMA if as_llama else {}
        tokens = read_special_tokens(folder, config, content, defaults, vocabulary)
        self.names = tokens.names
        added = [token for _, token in sorted(tokens.added.items())]
        # Also known ones, of which other files may say more.
        self.tokenizer.add_tokens([as_package(token) for token in (*added, *tokens.others)])
        by_id = self.tokenizer.get_added_tokens_decoder()
        # Dropped here, since the package forgets to if a special token is ``normalized``.
        self.special = {number for number, token in by_id.items() if token.special}
        ends = {number: token for number, token in by_id.items() if not token.rstrip}
        self.added = {n: token.content for n, token in ends.items() if not token.single_word}
        self.eos_id = self.tokenizer.token_to_id(tokens.names.get("eos_token", ""))

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def encode_after(self, text: str, last_id: int) -> list[int]:
        """The ids of a text that goes on after others, of which the last one is ``last_id``.

        The text is encoded after an added token, so that it is not taken for the beginning. Some
        tokenizers put a space even there. Raises ValueError if that cannot be taken away again.
        """
        if last_id in self.added or not self.spaces("a"):
            return self.after_anchor(text)
        if text.startswith(" "):
            return self.after_anchor(text[1:])
        ids = self.after_anchor(text)
        if ids and self.tokenizer.id_to_token(ids[0]) != SPACE:
            raise ValueError(f"no tokens stand for {text[:9]!r} after other text")
        return ids[1:]

    def after_anchor(self, text: str) -> list[int]:
        """The ids of a text after some added token."""
        if not self.added:
            return self.encode(text, with_bos=False)
        anchor = next(iter(self.added.values()))
        return self.encode(anchor + text, with_bos=False)[1:]

    def spaces(self, text: str) -> bool:
        """Whether a space is put before a text that comes after an added token."""
        ids = self.after_anchor(text)
        return bool(ids) and self.tokenizer.id_to_token(ids[0]).startswith(SPACE)

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


def as_package(token: AddedToken) -> tokenizers.AddedToken:
    """The same for the package."""
    flags = {name: value for name, value in vars(token).items() if name != "text"}
    return tokenizers.AddedToken(token.text, **flags)


def is_byte_level(content: dict[str, Any]) -> bool:
    """Whether a tokenizer.json divides text into bytes, as Llama 3's does."""
    return "ByteLevel" in json.dumps([content.get("pre_tokenizer"), content.get("decoder")])


def llama_settings(model: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' LlamaTokenizer puts in the place of a tokenizer.json's own settings.

    It takes its pieces, and from tokenizer_config.json whether a space is put before a text, and if
    ``legacy``, before each part between two added tokens as well.
    """
    prefix = config.get("add_prefix_space") is not False
    scheme = "first" if prefix else "never"
    if prefix and config.get("legacy"):
        scheme = "always"
    space = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": False}
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bpe = {"fuse_unk": True, "byte_fallback": True, "unk_token": None, "dropout": None}
    return {
        "added_tokens": [],  # those of the other files, and of this one, are added again
        "normalizer": None,
        "pre_tokenizer": space,
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model | bpe | {"ignore_merges": False},
    }
