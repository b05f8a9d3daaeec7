"""tokenizer.model: SentencePiece's pieces, and the tokens that other files of its folder add."""

import re
from itertools import groupby

from sentencepiece import SentencePieceProcessor

from ..files import read_json

NO_PREFIX = b"\x1a\x02\x18\x00"  # in a tokenizer.model: normalizer_spec { add_dummy_prefix: false }
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}  # of a tokenizer.model


class SentencePieceModel:
    """Text <-> ids by tokenizer.model; ``names``: {"bos_token": text, ...}."""

    def __init__(self, folder, config, names):
        proto = (folder / "tokenizer.model").read_bytes()
        self.pieces, self.bare = SentencePieceProcessor(), SentencePieceProcessor()
        self.pieces.load_from_serialized_proto(proto)
        self.bare.load_from_serialized_proto(proto + NO_PREFIX)
        added = read_added_tokens(folder, config)
        for text in names.values():
            number, _ = added.get(text, (self.pieces.piece_to_id(text), True))
            if text in added or self.pieces.id_to_piece(number) == text:  # else it is no token
                added[text] = (number, True)
        # Where one token's text begins with another's: the special one is found, then the longer.
        order = sorted(added, key=lambda text: (not added[text][1], -len(text)))
        self.ids = {text: added[text][0] for text in order}
        self.texts = {number: "" if special else text for text, (number, special) in added.items()}
        names_of_all = "|".join(map(re.escape, self.ids)) or "(?!)"  # else one that never matches
        self.split = re.compile(f"({names_of_all})").split
        self.bos_id = self.ids.get(names.get("bos_token"))
        self.eos_id = self.ids.get(names.get("eos_token"))
        self.legacy, self.add_bos = config.get("legacy"), config.get("add_bos_token", True)

    def encode(self, text, with_bos):
        ids = []
        for part in filter(None, self.split(text)):
            if part in self.ids:
                ids.append(self.ids[part])
            else:
                # SentencePiece's space: before the whole text; with ``legacy`` before each part.
                pieces = self.pieces if self.legacy or not ids else self.bare
                ids += pieces.encode(part)
        begins = with_bos and self.add_bos and self.bos_id is not None
        return [self.bos_id, *ids] if begins else ids

    def decode(self, ids):
        parts, size = [], self.pieces.vocab_size()
        for plain, run in groupby(ids, lambda token: token < size and token not in self.texts):
            if plain:
                parts.append(self.bare.decode(list(run)))
            else:
                parts += [self.texts.get(token, "") for token in run]
        return "".join(parts).removeprefix(" ")


def read_special_tokens(folder):
    """(tokenizer_config.json, {"bos_token": text, ...}) of a folder."""
    config = read_json(folder / "tokenizer_config.json", missing={})
    names = dict(LLAMA) if (folder / "tokenizer.model").is_file() else {}
    for key, token in config.items():
        if key.endswith("_token") and not key.startswith("add_"):
            names[key] = token["content"] if isinstance(token, dict) else token
    return config, {key: text for key, text in names.items() if text}


def read_added_tokens(folder, config):
    """{text: (id, special)} of the tokens that a folder adds to its tokenizer.model."""
    by_id = config.get("added_tokens_decoder")
    if by_id is not None:
        return {token["content"]: (int(id), token["special"]) for id, token in by_id.items()}
    special = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    by_text = read_json(folder / "added_tokens.json", missing={})
    added = {text: (id, text in special) for text, id in by_text.items()}
    for token in read_json(folder / "tokenizer.json", missing={}).get("added_tokens", []):
        added[token["content"]] = (token["id"], token["special"])
    return added
