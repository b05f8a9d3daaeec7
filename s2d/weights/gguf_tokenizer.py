"""The tokenizer in a GGUF file's metadata, as the files that a folder has.

Each is written by hand, so that reading a GGUF file needs no further package.
"""

import json
import struct

from .fields import refuse_unknown, shown

# How the text of a byte-level vocabulary falls into words before merging: llama.cpp's name -> what
# tokenizer.json says.
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3_SPLIT = {"type": "Split", "pattern": {"Regex": LLAMA3_WORDS}, "behavior": "Isolated"}
DIGITS = {"type": "Digits", "individual_digits": True}
WORDS = {
    "gpt-2": [BYTES | {"use_regex": True}],
    "smollm": [DIGITS, BYTES | {"use_regex": True}],
    "llama-bpe": [LLAMA3_SPLIT | {"invert": False}, BYTES | {"use_regex": False}],
}
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
    if own.get("model") == "llama":
        if own.get("pre") not in (None, "default", "llama"):
            raise ValueError(
                f"its text falls into words as {shown(own['pre'])} says, unlike llama's"
            )
        files = {"tokenizer.model": sentencepiece_model(own)}
    elif own.get("model") == "gpt2":
        text = json.dumps(byte_level_json(own), ensure_ascii=False)
        files = {"tokenizer.json": text.encode()}
    else:
        kind = shown(own.get("model"))
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


def byte_level_json(own):
    """tokenizer.json of a byte-level BPE (Radford et al. 2019), as package tokenizers writes it."""
    tokens, words = own["tokens"], own.get("pre")
    if words not in WORDS:
        only = f"only {', '.join(WORDS)} are supported"
        raise ValueError(f"its text falls into words as {shown(words)} says; {only}")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, **flags, "special": kind == CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, own["token_type"]))
        if kind in (CONTROL, USER_DEFINED)
    ]
    bos_first = None
    if begins_with_bos(own):
        bos, number = tokens[own["bos_token_id"]], own["bos_token_id"]
        text, pair = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
        bos_first = {"type": "TemplateProcessing", "pair": [text, pair]}
        bos_first["single"] = [{"SpecialToken": {"id": bos, "type_id": 0}}, text]
        bos_first["special_tokens"] = {bos: {"id": bos, "ids": [number], "tokens": [bos]}}
    nothing = "dropout unk_token continuing_subword_prefix end_of_word_suffix".split()
    model = {"type": "BPE", **dict.fromkeys(nothing), "fuse_unk": False, "byte_fallback": False}
    model["ignore_merges"] = words == "llama-bpe"
    model["vocab"] = {token: number for number, token in enumerate(tokens)}
    model["merges"] = [merge.split(" ") for merge in own["merges"]]
    return {
        **{"version": "1.0", "truncation": None, "padding": None, "normalizer": None},
        "added_tokens": added,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": WORDS[words]},
        "post_processor": bos_first,
        "decoder": BYTES | {"use_regex": True},
        "model": model,
    }


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
            parts.append(varint(number << 3) + varint(value))
    return b"".join(parts)


def varint(value):
    """Seven bits a byte, lowest first; the highest bit says that more follow. 64 bits below 0."""
    value, bytes_ = value % 2**64, []
    while value >= 128:
        bytes_.append(value % 128 + 128)
        value //= 128
    return bytes([*bytes_, value])
