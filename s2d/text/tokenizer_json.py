"""tokenizer.json, by the package ``tokenizers``."""

import re
from pathlib import Path

import tokenizers

from .special import AddedToken, SpecialTokens

BYTE = re.compile(r"<0x[0-9A-F]{2}>")  # a piece that stands for one byte


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``."""

    def __init__(self, folder: Path, tokens: SpecialTokens) -> None:
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        found = {each.content for each in self.tokenizer.get_added_tokens_decoder().values()}
        missing = [token for _, token in sorted(tokens.added.items()) if token.text not in found]
        missing += [AddedToken(text) for text in tokens.others if text not in found]
        for token in missing:
            self.add(token)
        by_id = self.tokenizer.get_added_tokens_decoder()
        # Dropped here, since the package forgets to if a special token is ``normalized``.
        self.special = {number for number, token in by_id.items() if token.special}
        self.eos_id = self.tokenizer.token_to_id(tokens.names.get("eos_token", ""))

    def add(self, token: AddedToken) -> None:
        flags = {name: getattr(token, name) for name in ("lstrip", "rstrip", "single_word")}
        added = tokenizers.AddedToken(
            token.text, special=token.special, normalized=token.normalized, **flags
        )
        self.tokenizer.add_tokens([added])

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

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
