"""A folder's special tokens: tokenizer_config.json, special_tokens_map.json, added_tokens.json.

Knows nothing about how the text between them is encoded. What these files say and nobody here
implements is refused, by the lists of what is known below.
"""

import re
from dataclasses import dataclass, replace
from pathlib import Path

from ..fields import errors_name, flag, read_json, refuse_unknown, shown

CONFIG, NAMES, ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
SWITCHES = ("add_bos_token", "add_prefix_space", "legacy")
LISTS = ("additional_special_tokens", "extra_special_tokens")
READ = {*SWITCHES, *LISTS, "added_tokens_decoder", "chat_template", "tokenizer_class"}
ONLY = dict.fromkeys(("add_eos_token", "do_lower_case", "split_special_tokens"), False)
ONLY |= {"sp_model_kwargs": {}}
# These change no id: they are about padding, truncation, files, and the text of an answer.
INERT = set(
    "backend clean_up_tokenization_spaces device_map errors is_local local_files_only max_length "
    "model_input_names model_max_length name_or_path pad_to_multiple_of pad_token_type_id padding "
    "padding_side processor_class return_token_type_ids spaces_between_special_tokens "
    "special_tokens_map_file stride suffix_first tokenizer_file trust_remote_code truncation "
    "truncation_side truncation_strategy use_default_system_prompt use_fast vocab_file".split()
)
# Unicode's White_Space; str.strip takes four characters more.
SPACES = re.compile("[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")


@dataclass(frozen=True)
class AddedToken:
    """A text that stands for one token wherever it occurs, and which spaces around it belong to it.

    ``id`` is None where only its name is known. Those that are ``normalized`` are searched for in
    what the others leave; those that are ``special`` have no text in an answer.
    """

    text: str
    id: int | None = None
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = True


@dataclass(frozen=True)
class SpecialTokens:
    config: dict  # tokenizer_config.json itself
    names: dict  # {"bos_token": text, ...}
    added: dict  # {text: AddedToken}

    def named_ids(self, path, ids):
        """The ids of BOS and EOS as far as these have names; ``ids``: {text: id} of a tokenizer."""
        for text in self.added:
            if text not in ids:
                says = f"its configuration names the token {shown(text)}"
                raise ValueError(f"{path.parent}: {says}, but {path.name} has no such token")
        named = {"bos_token", "eos_token"} & self.names.keys()
        return {key: ids[self.names[key]] for key in named}

    def without_null(self, given):
        """``given`` {name: value} without the names that are null in tokenizer_config.json."""
        return {key: given[key] for key in given if self.config.get(key, "") is not None}


def read_special_tokens(folder):
    """SpecialTokens of a folder; ValueError where its files disagree or say what is not known."""
    folder = Path(folder)
    config, more = (read_json(folder / file, missing={}) for file in (CONFIG, NAMES))
    with errors_name(folder / CONFIG):
        refuse_unknown(config, READ | INERT | set(filter(is_name, config)), ONLY)
        for key in SWITCHES:
            flag(config, key)
    names, others = ({key: text_of(each[key]) for key in each} for each in (config, more))
    for key in ("bos_token", "eos_token"):
        one, other = names.get(key), others.get(key)
        if key in names and key in others and one != other:
            both = f"{shown(one)} in {CONFIG}, but {shown(other)} in {NAMES}"
            raise ValueError(f"{folder}: {key} is {both}; make them agree")
    names = {key: text for key, text in (others | names).items() if is_name(key) and text}
    named = named_tokens(folder / NAMES, more) | named_tokens(folder / CONFIG, config)
    return SpecialTokens(config, names, named | added_tokens(folder, config, named))


def is_name(key):
    """Whether it names a token: "bos_token", but not "add_bos_token"."""
    return key.endswith("_token") and key not in READ | ONLY.keys()


def named_tokens(file, source):
    """{text: AddedToken} of the tokens that have a name or are listed as special ones."""
    values = [source[key] for key in source if is_name(key)]
    for listed in map(source.get, LISTS):
        listed = list(listed.values()) if isinstance(listed, dict) else listed
        values += listed if isinstance(listed, list) else [listed]
    tokens = [replace(read_token(file, value), special=True) for value in values if value]
    return {token.text: token for token in tokens}


def added_tokens(folder, config, named):
    """{text: AddedToken} of the tokens that are added with an id."""
    by_id, by_text = config.get("added_tokens_decoder"), read_json(folder / ADDED, missing={})
    if not isinstance(by_id, dict | None):
        raise ValueError(f"{folder / CONFIG}: added_tokens_decoder is {shown(by_id)}, no object")
    tokens = []
    for number, value in (by_id or {}).items():
        number = int(number) if number.isdecimal() and len(number) < 9 else number
        tokens.append(read_token(folder / CONFIG, value, number))
    ids = {token.text: token.id for token in tokens}
    for text, number in by_text.items():
        if by_id is None:
            tokens.append(AddedToken(text, number, normalized=text not in named, special=False))
        elif ids.get(text) != number:
            both = f"token {shown(number)} in {ADDED}, but {ids.get(text, 'none')} in {CONFIG}"
            raise ValueError(f"{folder}: {shown(text)} is {both}; make them agree")
    for token in tokens:
        if type(token.id) is not int or not 0 <= token.id < 10**8 or not text_of(token.text):
            raise ValueError(f"{folder}: {shown(token.text)} has the id {shown(token.id)}")
    if not len(tokens) == len({token.id for token in tokens}) == len({t.text for t in tokens}):
        raise ValueError(f"{folder}: two tokens are added with one text or one id")
    return {each.text: replace(each, special=each.special or each.text in named) for each in tokens}


def read_token(file, value, number=None):
    """A token as these files write it, a text or an object -> AddedToken."""
    text, flags = text_of(value), {"special": True}
    if isinstance(value, dict):
        flags = {key: value[key] for key in value if key not in ("content", "__type", "id")}
    if not text or any(key not in FLAGS or type(flag) is not bool for key, flag in flags.items()):
        raise ValueError(f"{file}: {shown(value)} is no token that is known here")
    special = flags.get("special", False)
    return AddedToken(text, number, **{"special": special, "normalized": not special} | flags)


def text_of(token):
    """A special token's text, which may be in an object; None where it is neither or no Unicode."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and not re.search("[\ud800-\udfff]", text) else None


def read_tokenizer_json(folder):
    """(vocabulary, [AddedToken]) of a folder's tokenizer.json; none where there is no such file."""
    file = folder / "tokenizer.json"
    raw = read_json(file, missing={"model": {"vocab": {}}})
    model, added = raw.get("model"), raw.get("added_tokens", [])
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    added = added if isinstance(added, list) else [None]
    good = all(isinstance(each, dict) and type(each.get("id")) is int for each in added)
    if not good or not isinstance(vocabulary, dict | list):
        raise ValueError(f"{file} is not a tokenizer that is known here; download it again")
    return vocabulary, [read_token(file, each, each["id"]) for each in added]


def check_bos(folder, bos_id):
    """ValueError where the tokenizer's BOS is not the one that the model's own files name."""
    for name in ("config.json", "generation_config.json"):
        other = read_json(folder / name, missing={}).get("bos_token_id")
        if None not in (bos_id, other) and bos_id != other:
            both = f"{shown(other)} in {name}, but {bos_id} by the tokenizer's files"
            raise ValueError(f"{folder}: bos_token_id is {both}; make them agree")


def split_at(tokens, text):
    """Text -> the AddedTokens in it and the texts between them (or ""), as transformers does."""
    parts = [text]
    for normalized in (False, True):
        names = [name for name, token in tokens.items() if token.normalized == normalized]
        longest_first = sorted(names, key=len, reverse=True)
        pattern = re.compile("|".join(map(re.escape, longest_first)))
        if names:
            parts = [piece for part in parts for piece in _split(tokens, pattern, part)]
    return parts


def _split(tokens, pattern, text):
    if isinstance(text, AddedToken):
        yield text
        return
    done = 0
    for match in pattern.finditer(text):
        token, before = tokens[match[0]], text[done : match.start()]
        if token.lstrip:
            before = before[: len(before) - len(SPACES.match(before[::-1])[0])]
        yield before
        yield token
        done = SPACES.match(text, match.end()).end() if token.rstrip else match.end()
    yield text[done:]
