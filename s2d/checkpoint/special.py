"""Special and added tokens: what the files next to a tokenizer say about them.

As transformers 5 reads it: tokenizer_config.json names tokens, such as ``eos_token``, and may
describe every added token in ``added_tokens_decoder``. If it does not, special_tokens_map.json may
name more tokens, and added_tokens.json has the ids of added tokens.
"""

from pathlib import Path
from typing import Any

from .files import read_json

# {class of transformers: what it calls its tokens unless a file says otherwise}
DEFAULT_TOKENS = {
    "LlamaTokenizer": {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"},
    "Qwen2Tokenizer": {"eos_token": "<|endoftext|>"},
}
# As files write a token: "content" is its text; "special": it leaves no text when it is decoded;
# "normalized": it is found after the text was normalised; "lstrip", "rstrip", "single_word": it
# takes the white space around it along, or is found only as a word of its own.
Token = dict[str, Any]
# What is in a file of settings: ``config`` is tokenizer_config.json, ``content`` tokenizer.json.
Settings = dict[str, Any]


def read_names(folder: Path, config: Settings) -> dict[str, Token]:
    """{"eos_token": token, ...}: the tokens that have a name."""
    said = dict(config)
    if config.get("added_tokens_decoder") is None:
        said |= read_json(folder / "special_tokens_map.json", missing={})
    extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    if isinstance(extra, dict):
        raise ValueError("extra_special_tokens holds tokens by name, which is not supported")
    found = {f"extra token {place}": token for place, token in enumerate(extra)}
    for key, value in said.items():
        if key.endswith("_token") and not key.startswith("add_"):
            found[key] = value
    names = {}
    for name, value in found.items():
        token = value if isinstance(value, dict) else {"content": value}
        # Whatever else such a key may hold, such as a number, names no token.
        if isinstance(token.get("content"), str) and token["content"]:
            names[name] = token
    return names


def read_added(folder: Path, config: Settings) -> dict[int, Token]:
    """{id: token} of the added tokens that tokenizer_config.json or added_tokens.json has."""
    described = config.get("added_tokens_decoder")
    if described is not None:
        return {int(number): token for number, token in described.items()}
    ids = read_json(folder / "added_tokens.json", missing={})
    return {number: {"content": text} for text, number in ids.items()}


def space_scheme(config: Settings) -> str:
    """Where a Llama's tokenizer puts a space.

    "first": before a text; "always": before each part between two added tokens as well; "never".
    """
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"
