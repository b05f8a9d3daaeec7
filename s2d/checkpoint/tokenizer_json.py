"""tokenizer.json, by the package ``tokenizers``."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from .special import LLAMA_TOKENS, read_tokens, space_scheme

SPACE = "▁"  # how SentencePiece writes it
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
        elif name == "Qwen2Tokenizer":
            refuse_other_steps(config, steps)
        elif name not in ("LlamaTokenizer", *PLAIN_CLASSES):
            raise ValueError(f"tokenizer_class {name!r}, which has rules of its own, is not known")
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(settings))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = self.tokenizer.get_vocab()
        names, added = read_tokens(folder, config, content, ids, defaults)
        # Also tokens that are there, of which other files may say more.
        every = [tokenizers.AddedToken(**token) for _, token in sorted(added.items())]
        self.tokenizer.add_tokens(every)
        for number, token in added.items():
            found = self.tokenizer.token_to_id(token["content"])
            if found != number:
                raise ValueError(f"the token {token['content']!r} has the ids {number} and {found}")
        self.names = {name: token["content"] for name, token in names.items()}
        self.special = {}
        for number, token in self.tokenizer.get_added_tokens_decoder().items():
            if token.special or token.content in self.names.values():
                self.special[number] = token.content

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def decode(self, ids: list[int]) -> str:
        # The package forgets a special token that is "normalized", so it is left out here.
        return self.tokenizer.decode([number for number in ids if number not in self.special])


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
