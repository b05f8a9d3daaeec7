"""tokenizer.json, by the package ``tokenizers``, and the tokens that the files beside it add."""

import json
import os
from contextlib import contextmanager

from ..fields import read_json, shown
from ..program import optional
from .special_tokens import FLAGS

TOKENIZERS_PACKAGE = "tokenizers==0.23.3"
OLD_KEYS = ("add_prefix_space", "str_rep")  # of a Metaspace; the package has new names for them


class JsonModel:
    """Text <-> ids by tokenizer.json; ``beside``: SpecialTokens. See ``Tokenizer``."""

    def __init__(self, path, beside):
        self.package, self.path = optional("tokenizers", TOKENIZERS_PACKAGE), path
        text = self._safely(path.read_text, encoding="utf-8")
        self.tokenizer = self._safely(self.package.Tokenizer.from_str, text)
        given, self.read = read_json(path), json.loads(self.tokenizer.to_str())
        if unread := next(unread_keys(given, self.read), None):
            raise ValueError(f"{path}: {unread} is not known to {TOKENIZERS_PACKAGE}")
        if given["model"].get("dropout"):
            raise ValueError(f"{path}: model.dropout makes ids random; that is not supported")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        for token in given.get("added_tokens", []):
            self._check_id(token["content"], token["id"], "its added_tokens")
        for token in beside.added.values():
            self._add(token)
        self.ids = self.tokenizer.get_vocab()
        self.vocab_size = max(self.ids.values(), default=-1) + 1
        named = beside.named_ids(path, self.ids)
        self.bos_id, self.eos_id = named.get("bos_token"), named.get("eos_token")
        self.start = self._beginning(beside.config)

    def _check_id(self, text, number, source):
        """The token's id, which ``source`` says is ``number``."""
        known = self.tokenizer.token_to_id(text)
        if number not in (None, known):
            says = f"is token {number} in {source}, but {known} in its vocabulary"
            raise ValueError(f"{self.path}: {shown(text)} {says}; make them agree")
        return known

    def _add(self, token):
        """An AddedToken of the files beside it, unless it has no id."""
        number = self._check_id(token.text, token.id, "the files beside it")
        flags = {name: getattr(token, name) for name in FLAGS}
        here = self.tokenizer.get_added_tokens_decoder().get(number)
        if number is not None and here is None:
            self.tokenizer.add_tokens([self.package.AddedToken(token.text, **flags)])
        elif token.id is not None and flags != {name: getattr(here, name) for name in FLAGS}:
            says = f"the files beside it say {flags} of {shown(token.text)}, it says something else"
            raise ValueError(f"{self.path}: {says}; make them agree")

    def _beginning(self, config):
        """The ids that come before those of a text: by its own rule, else as told."""
        plain, whole = self.encode("a"), self._safely(self.tokenizer.encode, "a").ids
        begins = whole[: len(whole) - len(plain)]
        if begins + plain != whole:
            raise ValueError(f"{self.path}: its post_processor puts tokens behind a text")
        told = config.get("add_bos_token") and str(config.get("tokenizer_class"))[:5] == "Llama"
        return begins or ([self.bos_id] if told and self.bos_id is not None else [])

    def encode(self, text):
        return self._safely(self.tokenizer.encode, text, add_special_tokens=False).ids

    def decode(self, ids):
        return self._safely(self.tokenizer.decode, ids)

    def _safely(self, function, *args, **options):
        """The file is a program of somebody else's. What Rust raises of a panic is no Exception."""
        try:
            with silenced():
                return function(*args, **options)
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:
            reason = f"is not a tokenizer that works ({shown(str(error))[1:-1]})"
            raise ValueError(f"{self.path} {reason}; download it again") from None


def unread_keys(given, read, where=""):
    """Yield the keys of a tokenizer.json that are not in what was ``read`` of it."""
    if isinstance(given, list) and isinstance(read, list):
        given, read = dict(enumerate(given)), dict(enumerate(read))
    if isinstance(given, dict) and isinstance(read, dict):
        for key in given:
            if key not in read and key not in OLD_KEYS:
                yield f"{where}{key}"
            elif key in read and key not in ("vocab", "merges"):
                yield from unread_keys(given[key], read[key], f"{where}{key}.")


@contextmanager
def silenced():
    """What Rust itself writes of a panic, to descriptor 2, is not shown."""
    try:
        before = os.dup(2)
    except OSError:  # closed
        yield
        return
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
