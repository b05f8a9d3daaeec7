"""Special and added tokens: what the files of a folder say about them, resolved in one place.

As transformers 5 reads them. tokenizer_config.json names tokens, such as ``eos_token``, and may
describe every added token in ``added_tokens_decoder``. If it does not, special_tokens_map.json may
name more, and added_tokens.json and tokenizer.json describe added tokens. What has such a name is
special, whatever its own entry says.
"""

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..files import read_json

STANDARD = [f"{name}_token" for name in "bos eos unk sep pad cls mask".split()]
# What a Llama's tokenizer calls its tokens unless a file says otherwise.
LLAMA_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
# What Code Llama's class adds, whether a file has these tokens or not.
CODE_LLAMA = {"prefix_token": "▁<PRE>", "middle_token": "▁<MID>", "suffix_token": "▁<SUF>"}
CODE_LLAMA |= {"eot_token": "▁<EOT>", "fill_token": "<FILL_ME>"}


@dataclass(frozen=True)
class AddedToken:
    """A token that is found in a text before the text is divided into pieces.

    Attributes:
        text: of the token.
        special: it leaves no text when ids are decoded.
        lstrip, rstrip: it takes the white space to its left or right with it.
        single_word: it is found only if no word goes on to its left or right.
        normalized: it is found after the text was normalised.
    """

    text: str
    special: bool = True
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


@dataclass(frozen=True)
class SpecialTokens:
    """What the files of a folder say about tokens.

    Attributes:
        names: {"eos_token": its text, ...}.
        added: {id: AddedToken} of those whose id a file says.
        others: special tokens of which no file says the id, in the order in which ids are given.
    """

    names: dict[str, str]
    added: dict[int, AddedToken]
    others: list[AddedToken]


def read_special_tokens(
    folder: Path,
    config: dict[str, Any],
    content: dict[str, Any],
    *,
    defaults: dict[str, str],
    vocabulary: Collection[str],
) -> SpecialTokens:
    """What the files in ``folder`` say; ValueError, TypeError or KeyError if one is damaged.

    Args:
        config: what is in tokenizer_config.json.
        content: what is in tokenizer.json; empty if there is none.
        defaults: names of tokens unless a file says otherwise; they hold if ``vocabulary`` or an
            added token has the text.
    """
    said = dict(config)
    if config.get("added_tokens_decoder") is None:
        said |= read_json(folder / "special_tokens_map.json", missing={})
    named, extra = named_tokens(said)
    special = {token.text for name, token in named.items() if token and name in STANDARD}
    special |= {token.text for token in extra}
    added = added_tokens(folder, config, content, special)
    known = {token.text for token in added.values()}
    for name, text in defaults.items():
        if name not in named and (text in vocabulary or text in known):
            named[name] = AddedToken(text)
    if is_code_llama(config):
        named = {name: AddedToken(text) for name, text in CODE_LLAMA.items()} | named
    named = {name: named[name] for name in (*STANDARD, *named) if named.get(name)}
    names = {name: token.text for name, token in named.items()}
    added = {
        number: replace(token, special=token.special or token.text in names.values())
        for number, token in added.items()
    }
    by_text = {token.text: token for token in (*named.values(), *extra)}
    others = [token for text, token in by_text.items() if text not in known]
    return SpecialTokens(names, added, others)


def named_tokens(said: dict[str, Any]) -> tuple[dict[str, AddedToken | None], list[AddedToken]]:
    """({"eos_token": token, ...}, special tokens without a name) by what files ``said``.

    A token is None if a file says null: then there is none, and no default takes its place.
    """
    named = {}
    for key, token in said.items():
        if key.endswith("_token") and not key.startswith("add_"):
            named[key] = token and read_token(token, special=True)
    extra = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    if isinstance(extra, dict):  # tokens that a model has names of its own for
        named |= {name: read_token(token, special=True) for name, token in extra.items()}
        extra = []
    return named, [read_token(token, special=True) for token in extra]


def added_tokens(
    folder: Path, config: dict[str, Any], content: dict[str, Any], special: Collection[str]
) -> dict[int, AddedToken]:
    """{id: token} by the files that describe added tokens; ``special`` texts are known already."""
    by_id = config.get("added_tokens_decoder")
    if by_id is not None:
        return {int(number): read_token(token) for number, token in by_id.items()}
    added = {}
    for text, number in read_json(folder / "added_tokens.json", missing={}).items():
        added[number] = read_token(text, special=text in special)
    for token in content.get("added_tokens", []):
        added[token["id"]] = read_token(token)
    return added


def is_llama(config: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json names the tokenizer of Llama, or that of Code Llama."""
    name = str(config.get("tokenizer_class")).removesuffix("Fast")
    return name == "LlamaTokenizer" or is_code_llama(config)


def is_code_llama(config: dict[str, Any]) -> bool:
    """Whether tokenizer_config.json names the tokenizer of Code Llama.

    It is Llama's but for a few tokens more; ``legacy`` means nothing to it, and a space that begins
    a text is always taken away from it when ids are decoded.
    """
    return str(config.get("tokenizer_class")).removesuffix("Fast") == "CodeLlamaTokenizer"


def space_scheme(config: dict[str, Any]) -> str:
    """Where a Llama's tokenizer puts a space, by its tokenizer_config.json.

    "first": before a text; "always": before each part between two added tokens as well; "never".
    """
    if config.get("add_prefix_space") is False:
        return "never"
    return "always" if config.get("legacy") and not is_code_llama(config) else "first"


def strips_space(config: dict[str, Any]) -> bool:
    """Whether a space that begins a text is taken away from it when ids are decoded."""
    return space_scheme(config) != "never" or is_code_llama(config)


def read_token(token: str | dict[str, Any], special: bool = False) -> AddedToken:
    """A token as a file writes it; ``special`` if something names it, or its own entry says so.

    Unless the file says whether it is ``normalized``, it is if it is not special, as transformers
    has it.
    """
    if isinstance(token, str):
        return AddedToken(token, special, normalized=not special)
    special = special or token.get("special", False)
    flags = {name: token.get(name, False) for name in ("lstrip", "rstrip", "single_word")}
    normalized = token.get("normalized", not special)
    return AddedToken(token["content"], special, **flags, normalized=normalized)
