"""tokenizer.model, SentencePiece's file, and the tokens that the files beside it add to it."""

from dataclasses import replace
from itertools import groupby

from sentencepiece import SentencePieceProcessor

from ..fields import shown
from .special_tokens import AddedToken, read_tokenizer_json, split_at

NO_PREFIX = b"\x1a\x02\x18\x00"  # of a tokenizer.model: normalizer_spec { add_dummy_prefix: false }
CLASSES = ("LlamaTokenizer", "CodeLlamaTokenizer", "PreTrainedTokenizer", "TokenizersBackend")


class SentencePieceModel:
    """Text <-> ids by tokenizer.model; ``beside``: SpecialTokens. See ``Tokenizer``."""

    def __init__(self, path, beside):
        kind = beside.config.get("tokenizer_class") or CLASSES[0]
        if str(kind).removesuffix("Fast") not in CLASSES:
            says = f"tokenizer_class is {shown(kind)} beside {path.name}"
            raise ValueError(f"{path.parent}: {says}; only {CLASSES[0]} is supported")
        try:
            content = path.read_bytes()
            self.bare, self.pieces = load_pieces(content + NO_PREFIX), load_pieces(content)
        except RuntimeError:
            raise ValueError(f"{path} is not a SentencePiece model; download it again") from None
        if beside.config.get("add_prefix_space") is False:
            self.pieces = self.bare
        self.prefixed = self.pieces.encode("a") != self.bare.encode("a")
        self.legacy, self.size = beside.config.get("legacy"), self.pieces.vocab_size()
        self.tokens = self._own_tokens() | dict(self._tokens_beside(path, beside))
        self.texts = {token.id: token.text for token in self.tokens.values()}
        self.special = {token.id for token in self.tokens.values() if token.special}
        self.vocab_size = max([self.size - 1, *self.texts]) + 1
        own = {"bos_token": self.pieces.bos_id(), "eos_token": self.pieces.eos_id()}
        ids = {name: number for name, number in beside.without_null(own).items() if number >= 0}
        ids |= beside.named_ids(path, {text: token.id for text, token in self.tokens.items()})
        self.bos_id, self.eos_id = ids.get("bos_token"), ids.get("eos_token")
        begins = beside.config.get("add_bos_token", True) and self.bos_id is not None
        self.start = [self.bos_id] if begins else []

    def _own_tokens(self):
        """{text: AddedToken} of the tokens that SentencePiece does not read in a text."""
        pieces = self.pieces
        own = (i for i in range(self.size) if pieces.is_control(i) or pieces.is_unknown(i))
        return {pieces.id_to_piece(i): AddedToken(pieces.id_to_piece(i), i) for i in own}

    def _added(self, path, beside):
        """{text: AddedToken} of the files beside it; a tokenizer.json may know more than others."""
        vocabulary, listed = read_tokenizer_json(path.parent)
        by_config, added = beside.config.get("added_tokens_decoder"), dict(beside.added)
        for token in listed:
            known = added.get(token.text, token)
            if known.id not in (None, token.id):
                disagree(path, token.text, token.id, known.id, "the files beside it")
            if known.id is None or by_config is None:
                added[token.text] = replace(token, special=token.special or known.special)
        ids = {text: token.id for text, token in added.items()}
        ids |= {self.pieces.id_to_piece(i): i for i in range(self.size if vocabulary else 0)}
        for text, number in vocabulary.items() if isinstance(vocabulary, dict) else ():
            if ids.get(text) != number:
                disagree(path, text, number, ids.get(text), path.name)
        return added

    def _tokens_beside(self, path, beside):
        """Yield (text, AddedToken) of the added tokens; those that are pieces have their ids."""
        for text, token in self._added(path, beside).items():
            known = self.pieces.piece_to_id(text)  # that of what is unknown, if it is no piece
            if self.pieces.id_to_piece(known) != text:
                known = token.id if token.id is not None and token.id >= self.size else None
            if token.id not in (None, known):
                both = f"{shown(text)} is added as token {token.id}, but in {path.name} its id is"
                raise ValueError(f"{path.parent}: {both} {known}; make them agree")
            if token.single_word:
                raise ValueError(f"{path.parent}: single_word of {shown(text)} is not supported")
            if known is not None:
                yield text, replace(token, id=known)

    def encode(self, text):
        ids = []
        for part in split_at(self.tokens, text):
            if isinstance(part, AddedToken):
                ids.append(part.id)
            else:  # SentencePiece's space: in front of all, of old behind every special token too
                ids += (self.pieces if self.legacy or not ids else self.bare).encode(part)
        return ids

    def decode(self, ids):
        kept = [token for token in ids if token < self.vocab_size and token not in self.special]
        texts = []
        for own, run in groupby(kept, lambda token: token < self.size and token not in self.texts):
            if own:
                texts.append(self.bare.decode(list(run)))
            else:
                texts += [self.texts.get(token, "") for token in run]
        text = "".join(texts)
        return text.removeprefix(" ") if self.prefixed else text


def disagree(path, text, number, other, source):
    both = f"is token {shown(number)} in tokenizer.json, but {other} in {source}"
    raise ValueError(f"{path.parent}: {shown(text)} {both}; make them agree")


def load_pieces(content):
    pieces = SentencePieceProcessor()
    pieces.load_from_serialized_proto(content)  # the constructor takes an empty file for none
    return pieces
