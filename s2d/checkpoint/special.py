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
    ids: dict[str, int],
    defaults: dict[str, str],
) -> tuple[dict[str, Token], dict[int, Token]]:
    """({"eos_token": token, ...}, {id: token}): the named tokens, and all that are added.

    ``config`` is what is in tokenizer_config.json, ``content`` that in tokenizer.json. ``ids`` are
    those of the pieces, and ``defaults`` name tokens that no file names, if there are such pieces.
    A token that has a name is special, whatever its own entry says. Raises ValueError if no file
    says the id of one.
    """
    names = read_names(folder, config)
    texts = {token["content"] for token in names.values()}
    added = read_added(folder, config, content, texts)
    ids = ids | {token["content"]: number for number, token in added.items()}
    for name, text in defaults.items():
        if name not in names and text in ids:
            names[name] = complete({"content": text, "special": True})
    names = {name: token for name, token in names.items() if token["content"]}
    for name, token in names.items():
        text = token["content"]
        if text not in ids:
            raise ValueError(f"no file says the id of {name} {text!r}")
        added.setdefault(ids[text], token)["special"] = True
    return names, added


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
