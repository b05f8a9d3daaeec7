"""Special and added tokens: what the files of a folder say about them, as transformers 5 reads it.

tokenizer_config.json names tokens, such as ``eos_token``, and may describe every added token in
``added_tokens_decoder``. If it does not, special_tokens_map.json may name more tokens, and
added_tokens.json and tokenizer.json describe added tokens.
"""

from collections.abc import Container
from pathlib import Path
from typing import Any

from .files import read_json

# What a Llama's tokenizer calls its tokens unless a file says otherwise.
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# A token that is found only in some places, or takes the white space around it along.
FLAGS = ("lstrip", "rstrip", "single_word")
# As files write a token: "content" is its text; "special": it leaves no text when it is decoded;
# "normalized": it is found after the text was normalised; and FLAGS.
Token = dict[str, Any]


def read_tokens(
    folder: Path,
    config: dict[str, Any],
    content: dict[str, Any],
    vocabulary: Container[str],
    defaults: dict[str, str],
) -> tuple[dict[str, Token], dict[int, Token]]:
    """({"eos_token": token, ...}, {id: token}): the named tokens, and those with a known id.

    Args:
        config, content: what is in tokenizer_config.json and in tokenizer.json.
        vocabulary: the texts of all pieces.
        defaults: names of tokens unless a file says otherwise, if there is such a token.

    A token that has a name is special, whatever its own entry says.
    """
    names = read_names(folder, config)
    texts = {token["content"] for token in names.values()}
    added = read_added(folder, config, content, texts)
    known = {token["content"] for token in added.values()}
    for name, text in defaults.items():
        if name not in names and (text in vocabulary or text in known):
            names[name] = complete({"content": text, "special": True})
    named = {token["content"] for token in names.values()}
    for token in added.values():
        if token["content"] in named:
            token["special"] = True
    return {name: token for name, token in names.items() if token["content"]}, added


def read_names(folder: Path, config: dict[str, Any]) -> dict[str, Token]:
    """{"eos_token": token, ...}; the content of a token is "" if a file says that there is none."""
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
        token = value if isinstance(value, dict) else {"content": value or ""}
        # Whatever else such a key may hold, such as a number, names no token.
        if isinstance(token.get("content"), str):
            names[name] = complete(token | {"special": True})
    return names


def read_added(
    folder: Path, config: dict[str, Any], content: dict[str, Any], special: Container[str]
) -> dict[int, Token]:
    """{id: token} by the files that describe added tokens; the texts of ``special`` are special."""
    described = config.get("added_tokens_decoder")
    if described is not None:
        return {int(number): complete(token) for number, token in described.items()}
    added = {}
    for text, number in read_json(folder / "added_tokens.json", missing={}).items():
        added[number] = complete({"content": text, "special": text in special})
    for token in content.get("added_tokens", []):
        added[token["id"]] = complete(token)
    return added


def complete(token: Token) -> Token:
    """A token with all flags; by default one that is special is not ``normalized``."""
    flags = {flag: token.get(flag, False) for flag in (*FLAGS, "special")}
    normalized = token.get("normalized", not flags["special"])
    return {"content": token["content"], "normalized": normalized} | flags


def space_scheme(config: dict[str, Any]) -> str:
    """Where a Llama's tokenizer puts a space, by its tokenizer_config.json.

    "first": before a text; "always": before each part between two added tokens as well; "never".
    """
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") else "first"
