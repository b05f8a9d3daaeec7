"""tokenizer.json, by the package ``tokenizers``, as it is."""

import json
import re
from pathlib import Path
from typing import Any

import tokenizers

from .tokenizer_model import LLAMA_TOKENS, read_named, space_scheme

FLAGS = ("content", "special", "lstrip", "rstrip", "single_word", "normalized")
QWENS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
)
QWENS_SPLIT += r"|\s*[\r\n]+|\s+(?!\S)|\s+"


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``; as SentencePieceModel."""

    def __init__(self, folder: Path, config: dict[str, Any], content: dict[str, Any]) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        known = self.tokenizer.get_added_tokens_decoder()
        for number, token in (config.get("added_tokens_decoder") or {}).items():
            said = {"special": False, "normalized": not token.get("special")} | token
            own = known.get(int(number))
            if own is None or any(getattr(own, name) != said.get(name, False) for name in FLAGS):
                raise ValueError(f"tokenizer.json lacks {token} of tokenizer_config.json")
        named = read_named(folder, config)
        if str(config.get("tokenizer_class")).startswith("LlamaTokenizer"):
            vocabulary = self.tokenizer.get_vocab()
            there = {k: v for k, v in LLAMA_TOKENS.items() if v in vocabulary}
            named = {name: {"content": text} for name, text in there.items()} | named
        self.names = {name: token["content"] for name, token in named.items() if token["content"]}
        self.space = refuse_other_class(config, content, self.names)
        texts = {token.content for token in known.values()}
        self.tokenizer.add_special_tokens([t for t in self.names.values() if t not in texts])
        added = self.tokenizer.get_added_tokens_decoder().items()
        special = {t.content for _, t in added if t.special} | {*self.names.values()}
        self.specials = {
            token.content: number for number, token in added if token.content in special
        }
        self.special_ids = set(self.specials.values())

    def encode(self, text: str, with_bos: bool, after: int | None) -> list[int]:
        if after is not None and self.space != "never":
            raise ValueError(
                "this tokenizer.json puts a space before each text; what goes on after a prompt "
                "can be encoded if the folder has a tokenizer.model as well"
            )
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def decode(self, ids: list[int]) -> str:
        # Not by the package, which forgets a special token that is "normalized".
        return self.tokenizer.decode([token for token in ids if token not in self.special_ids])

    def is_open(self, ids: list[int]) -> bool:
        """Whether what follows may change their text: a run of bytes is decoded at once."""
        pieces = [self.tokenizer.id_to_token(n) or "" for n in ids if n not in self.special_ids]
        return re.fullmatch("<0x[0-9A-F]{2}>", "".join(pieces)[-6:]) is not None


def refuse_other_class(
    config: dict[str, Any], content: dict[str, Any], names: dict[str, str]
) -> str:
    """Where the file puts a space, as ``space_scheme``; ValueError if its class has other rules.

    In transformers 5 the class of a Llama's or Qwen's tokenizer takes only the pieces from the
    file. Such a folder is read if file and class say the same.
    """
    steps = json.dumps([content.get("normalizer"), content.get("pre_tokenizer")])
    always = '"Prepend"' in steps or '"always"' in steps or '"add_prefix_space": true' in steps
    space = "always" if always else "first" if '"first"' in steps else "never"
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    if name == "LlamaTokenizer":
        fits = '"ByteLevel"' in steps or space == space_scheme(config)
    elif name == "Qwen2Tokenizer":
        fits = '"NFC"' in steps and json.dumps(QWENS_SPLIT) in steps and "eos_token" in names
        fits = fits and not config.get("add_prefix_space")
    else:
        fits = name in ("None", "PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer")
    if not fits:
        raise ValueError(
            f"the rules of tokenizer_class {config.get('tokenizer_class')!r} are not those of "
            "tokenizer.json; if the file is right, write PreTrainedTokenizerFast there"
        )
    return space
