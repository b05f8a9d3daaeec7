"""tokenizer.json, by the package ``tokenizers``."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from .files import read_json
from .special import DEFAULT_TOKENS, Settings, read_added, read_names, space_scheme

# Classes that take all that a tokenizer.json says.
PLAIN_CLASSES = ("None", "PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer")
QWENS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``; attributes as of SentencePieceModel."""

    def __init__(self, folder: Path, config: Settings) -> None:
        """Raises ValueError for what is not supported, or if files contradict one another."""
        content = read_json(folder / "tokenizer.json")
        name = class_name(folder, config, content)
        named = read_names(folder, DEFAULT_TOKENS.get(name, {}) | config)
        self.names = {key: token["content"] for key, token in named.items()}
        listed = {token["id"]: token for token in content["added_tokens"]}
        described = read_added(folder, config)
        for number, token in described.items():
            own = listed.get(number, {})
            if own | token != own:
                raise ValueError(f"tokenizer.json has another token {number} than {token}")
        if name not in PLAIN_CLASSES:
            content |= class_steps(name, config, content["model"])
            # If there is an added_tokens_decoder, they take no other tokens from tokenizer.json.
            if config.get("added_tokens_decoder") is not None and described.keys() != listed.keys():
                raise ValueError("added_tokens_decoder has not all tokens of tokenizer.json")
        for key, text in self.names.items():
            if text not in [token["content"] for token in listed.values()]:
                raise ValueError(f"tokenizer.json has no added token {text!r}, the {key}")
        self.special = {}
        for number, token in listed.items():
            has_name = token["content"] in self.names.values()
            if token["special"] or has_name:
                self.special[number] = token["content"]
            if has_name and name == "Qwen2Tokenizer":
                token |= dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        for number, token in listed.items():
            found = self.tokenizer.token_to_id(token["content"])
            if found != number:  # the package gives ids without gaps
                raise ValueError(f"the token {token['content']!r} has the ids {number} and {found}")

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def decode(self, ids: list[int]) -> str:
        # The package forgets a special token that is "normalized", so it is left out here.
        return self.tokenizer.decode([number for number in ids if number not in self.special])


def class_name(folder: Path, config: Settings, content: Settings) -> str:
    """The class of transformers 5 for a folder, without "Fast"; ValueError: it is not known."""
    of_model = read_json(folder / "config.json", missing={})
    name = str(config.get("tokenizer_class") or of_model.get("tokenizer_class"))
    name = name.removesuffix("Fast")
    kind = of_model.get("model_type")
    if kind == "qwen2" or (kind == "qwen3" and name == "None"):
        return "Qwen2Tokenizer"
    steps = json.dumps([content.get("pre_tokenizer"), content.get("decoder")])
    if name == "LlamaTokenizer" and '"ByteLevel"' in steps:
        return "TokenizersBackend"  # of Llama 3's kind
    if name not in (*PLAIN_CLASSES, *DEFAULT_TOKENS):
        raise ValueError(f"tokenizer_class {name!r}, which has rules of its own, is not known")
    return name


def class_steps(name: str, config: Settings, model: dict[str, Any]) -> Settings:
    """What the classes of Llama and Qwen2 put in the place of what tokenizer.json says.

    They take the pieces and merges of its ``model``, its added tokens and its post_processor.
    """
    pieces = {"type": "BPE", "vocab": model["vocab"], "merges": model["merges"]}
    if name == "LlamaTokenizer":
        scheme = space_scheme(config)
        spaces = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": scheme, "split": False}
        decoders = [
            {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
            {"type": "ByteFallback"},
            {"type": "Fuse"},
        ]
        if scheme != "never":
            decoders.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
        return {
            "model": pieces | {"fuse_unk": True, "byte_fallback": True},
            "normalizer": None,
            "pre_tokenizer": spaces,
            "decoder": {"type": "Sequence", "decoders": decoders},
        }
    words = {"type": "Split", "pattern": {"Regex": QWENS_SPLIT}, "behavior": "Isolated"}
    to_bytes = {"type": "ByteLevel", "trim_offsets": True, "use_regex": False}
    to_bytes["add_prefix_space"] = bool(config.get("add_prefix_space"))
    return {
        "model": pieces,
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [words | {"invert": False}, to_bytes],
        },
        "decoder": to_bytes,
    }
