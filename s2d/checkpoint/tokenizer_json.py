"""tokenizer.json, by the package ``tokenizers``."""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from .special import LLAMA_TOKENS, read_tokens, space_scheme

SPACE = "▁"  # how SentencePiece writes it
BYTE = re.compile("<0x[0-9A-F]{2}>")  # a piece that stands for one byte
# What a tokenizer.json that puts a space before each part of a text has among its steps.
SPACE_ALWAYS = '"Prepend"', '"always"', '"add_prefix_space": true'
# Classes that take all that a tokenizer.json says.
PLAIN_CLASSES = ("None", "PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer")
QWENS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``; attributes as of SentencePieceModel."""

    def __init__(self, folder: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
        """``config`` is what is in tokenizer_config.json, ``content`` that in tokenizer.json."""
        steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
        name = str(config.get("tokenizer_class")).removesuffix("Fast")
        settings = content
        defaults = {}
        if name == "LlamaTokenizer" and '"ByteLevel"' not in steps:
            defaults = LLAMA_TOKENS
            settings = content | llama_settings(content["model"], config)
            steps = json.dumps(settings["pre_tokenizer"])
        elif name == "Qwen2Tokenizer":
            refuse_other_steps(config, steps)
        elif name not in ("LlamaTokenizer", *PLAIN_CLASSES):
            raise ValueError(f"tokenizer_class {name!r}, which has rules of its own, is not known")
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        vocabulary = self.tokenizer.get_vocab()
        names, added = read_tokens(folder, config, content, vocabulary, defaults)
        texts = {token["content"] for token in added.values()}
        new = [token for _, token in sorted(added.items())]
        new += [token for token in names.values() if token["content"] not in texts]
        # Also tokens that are there, of which other files may say more.
        self.tokenizer.add_tokens([tokenizers.AddedToken(**token) for token in new])
        for number, token in added.items():
            found = self.tokenizer.token_to_id(token["content"])
            if found != number:
                raise ValueError(f"the token {token['content']!r} has the ids {number} and {found}")
        self.names = {name: token["content"] for name, token in names.items()}
        self.special = {}
        self.added = {}
        for number, token in self.tokenizer.get_added_tokens_decoder().items():
            self.added[number] = token.content
            if token.special or token.content in self.names.values():
                self.special[number] = token.content
        self.space = "first" if '"first"' in steps else "never"
        if any(word in steps for word in SPACE_ALWAYS):
            self.space = "always"

    def encode(self, text: str, with_bos: bool, after: int | None) -> list[int]:
        """The ids of a text, which goes on ``after`` an id unless that is None."""
        if after is None or self.space == "never":
            return self.tokenizer.encode(text, add_special_tokens=with_bos).ids
        # Behind an added token there is no space, or the one that belongs there.
        before = self.added.get(after)
        if self.space == "first":
            before = next(iter(self.special.values()), None)
        ids = self.tokenizer.encode((before or "") + text, add_special_tokens=False).ids
        if before is None or self.added.get(ids[0]) != before:
            raise ValueError(
                "this tokenizer.json puts a space before each part of a text, so that no text can "
                "go on after another; a tokenizer.model alone can do that"
            )
        return ids[1:]

    def decode(self, ids: list[int]) -> str:
        # The package forgets a special token that is "normalized", so it is left out here.
        return self.tokenizer.decode([number for number in ids if number not in self.special])

    def is_open(self, ids: list[int]) -> bool:
        """Whether what follows may change the text of ``ids``: a run of bytes is decoded at once.

        If the run is no text, each of its bytes becomes U+FFFD.
        """
        for number in reversed(ids):
            piece = self.tokenizer.id_to_token(number)
            if piece is not None and number not in self.special:
                return BYTE.fullmatch(piece) is not None
        return False


def llama_settings(model: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """What transformers' LlamaTokenizer puts in the place of a tokenizer.json's own settings.

    It takes the pieces from the file, and from tokenizer_config.json where a space is put.
    """
    scheme = space_scheme(config)
    steps = [{"type": "Replace", "pattern": {"String": SPACE}, "content": " "}]
    steps += [{"type": "ByteFallback"}, {"type": "Fuse"}]
    if scheme != "never":
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    bpe = {"fuse_unk": True, "byte_fallback": True, "unk_token": None, "dropout": None}
    return {
        "added_tokens": [],  # they are added again
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Metaspace",
            "replacement": SPACE,
            "prepend_scheme": scheme,
            "split": False,
        },
        "decoder": {"type": "Sequence", "decoders": steps},
        "model": model | bpe | {"ignore_merges": False},
    }


def refuse_other_steps(config: dict[str, Any], steps: str) -> None:
    """Raise ValueError if Qwen's tokenizer class and tokenizer.json say different things.

    In transformers 5 the class takes only the pieces from the file.
    """
    same = '"NFC"' in steps and json.dumps(QWENS_SPLIT) in steps
    if not same or config.get("add_prefix_space") or config.get("eos_token") is None:
        raise ValueError(
            "the rules of tokenizer_class 'Qwen2Tokenizer' are not those of tokenizer.json; if "
            "the file is right, write PreTrainedTokenizerFast there"
        )
