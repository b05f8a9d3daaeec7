"""The tokenizer in a GGUF file's metadata, as the files that a folder has."""

import json
import struct

from ..fields import refuse_unknown, shown
from ..program import optional
from .tokenizer_json import TOKENIZERS_PACKAGE

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# What the metadata may say of a tokenizer: what is read here or changes no id, or has one value.
IDS = "bos eos unknown padding seperator separator cls mask eot eom fim_pre fim_suf fim_mid fim_pad"
KNOWN = {f"{name}_token_id" for name in f"{IDS} fim_rep fim_sep prefix suffix middle".split()}
KNOWN |= set("model pre tokens token_type token_type_count scores merges add_bos_token".split())
KNOWN |= {"add_space_prefix", "chat_template"}
ONLY = {"add_eos_token": False, "remove_extra_whitespaces": False, "escape_whitespaces": True}
CONTROL, USER_DEFINED = 3, 4  # types of tokens; those of SentencePiece have the same numbers


def tokenizer_files(fields):
    """{name: bytes} of tokenizer.model or tokenizer.json, and of tokenizer_config.json."""
    names = [name for name in fields if name.startswith("tokenizer.")]
    own = {name.removeprefix("tokenizer.").removeprefix("ggml."): fields[name] for name in names}
    refuse_unknown(own, KNOWN, ONLY)
    kind = own.get("model")
    if kind == "llama" and own.get("pre") in (None, "default", "llama"):
        files = {"tokenizer.model": sentencepiece_model(own)}
    elif kind == "gpt2":
        files = {"tokenizer.json": byte_level(own).to_str().encode()}
    else:
        kind = f"{shown(kind)}, of which text falls into words as {shown(own.get('pre'))} says"
        raise ValueError(f"its tokenizer is {kind}; only 'llama' and 'gpt2' are supported")
    config = json.dumps(tokenizer_config(own), indent=2, ensure_ascii=False)
    return files | {"tokenizer_config.json": f"{config}\n".encode()}


def tokenizer_config(own):
    """tokenizer_config.json: special tokens by name, and the chat template if the file has one."""
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: own.get(f"{of}_token_id") for name, of in names.items()}
    kind = "LlamaTokenizer" if own["model"] == "llama" else "PreTrainedTokenizerFast"
    config = {"tokenizer_class": kind, "chat_template": own.get("chat_template")}
    config |= {name: own["tokens"][id] for name, id in ids.items() if id is not None}
    config |= {"add_bos_token": begins_with_bos(own), "add_eos_token": False}
    return config | {"clean_up_tokenization_spaces": False}


def begins_with_bos(own):
    """Whether texts begin with BOS; llama.cpp knows it of two kinds that do not say so."""
    known = own["model"] == "llama" or own.get("pre") == "llama-bpe"
    return bool(own.get("add_bos_token", known)) and own.get("bos_token_id") is not None


def byte_level(own):
    """The package's Tokenizer that is a byte-level BPE (Radford et al. 2019)."""
    package = optional("tokenizers", TOKENIZERS_PACKAGE)
    cut, kind, tokens = package.pre_tokenizers, own.get("pre"), own["tokens"]
    before_bytes = {  # how text falls into words before merging, by llama.cpp's name for it
        "gpt-2": [],
        "smollm": [cut.Digits(individual_digits=True)],
        "llama-bpe": [cut.Split(package.Regex(LLAMA3_WORDS), "isolated")],
    }
    if kind not in before_bytes:
        only = f"only {', '.join(before_bytes)} are supported"
        raise ValueError(f"its text falls into words as {shown(kind)} says; {only}")
    llama3 = kind == "llama-bpe"
    vocabulary = {token: number for number, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ")) for merge in own["merges"]]
    model = package.Tokenizer(package.models.BPE(vocabulary, merges, ignore_merges=llama3))
    bytes_ = cut.ByteLevel(add_prefix_space=False, use_regex=not llama3)
    model.pre_tokenizer = cut.Sequence([*before_bytes[kind], bytes_])
    model.decoder = package.decoders.ByteLevel()
    for token, type_ in zip(tokens, own["token_type"]):
        if type_ in (CONTROL, USER_DEFINED):
            special = {"special": type_ == CONTROL, "normalized": False}
            model.add_tokens([package.AddedToken(token, **special)])
    if begins_with_bos(own):
        bos = tokens[own["bos_token_id"]], own["bos_token_id"]
        template = package.processors.TemplateProcessing
        model.post_processor = template([bos[0], "$A"], ["$A", "$B:1"], [bos])
    return model


def sentencepiece_model(own):
    """tokenizer.model: SentencePiece's message ModelProto (sentencepiece_model.proto)."""
    tokens = own["tokens"]
    names = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}  # the fields of their ids
    ids = {field: own.get(f"{name}_token_id") for field, name in names.items()}
    texts = {field + 5: tokens[token].encode() for field, token in ids.items() if token is not None}
    ids = {field: -1 if token is None else token for field, token in ids.items()}
    trainer = message({3: 2, 4: len(tokens), 35: 1, **ids, **texts})  # BPE, size, byte fallback
    # A space in front, none removed, each a visible mark.
    prefix = int(own.get("add_space_prefix", True))
    normalizer = message({1: b"identity", 3: prefix, 4: 0, 5: 1})
    pieces = zip(tokens, own["scores"], own["token_type"])
    pieces = [{1: text.encode(), 2: float(score), 3: int(kind)} for text, score, kind in pieces]
    every = b"".join(message({1: message(piece)}) for piece in pieces)
    return every + message({2: trainer, 3: normalizer})


def message(fields):
    """{field number: integer, float, or bytes} -> a message in Protocol Buffers' wire format."""
    parts = []
    for number, value in fields.items():
        if isinstance(value, bytes):
            parts.append(varint(number << 3 | 2) + varint(len(value)) + value)
        elif isinstance(value, float):
            parts.append(varint(number << 3 | 5) + struct.pack("<f", value))
        else:
            parts.append(varint(number << 3) + varint(value % 2**64))
    return b"".join(parts)


def varint(value):
    """Seven bits a byte, lowest first; the highest bit says that more follow."""
    if value < 128:
        return bytes([value])
    return bytes([value % 128 + 128]) + varint(value // 128)
