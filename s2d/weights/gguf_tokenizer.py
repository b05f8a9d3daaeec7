"""The tokenizer in a GGUF file's metadata, as the files that a folder has.

tokenizer.model or tokenizer.json, and tokenizer_config.json: each is written by hand, so that
reading a GGUF file needs no further package.
"""

import struct

from .fields import shown

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
CONTROL, USER_DEFINED = 3, 4  # types of tokens; those of SentencePiece have the same numbers


def tokenizer_config(fields):
    """tokenizer_config.json: special tokens by name, and the chat template if the file has one."""
    tokens = fields["tokenizer.ggml.tokens"]
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: fields.get(f"tokenizer.ggml.{own}_token_id") for name, own in named.items()}
    sentencepiece = fields["tokenizer.ggml.model"] == "llama"
    config = {
        "tokenizer_class": "LlamaTokenizer" if sentencepiece else "PreTrainedTokenizerFast",
        **{name: tokens[token] for name, token in ids.items() if token is not None},
        "add_bos_token": begins_with_bos(fields),
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    template = fields.get("tokenizer.chat_template")
    return config if template is None else config | {"chat_template": template}


def begins_with_bos(fields):
    """Whether texts begin with BOS; llama.cpp knows it of two kinds that do not say so."""
    kinds = fields["tokenizer.ggml.model"], fields.get("tokenizer.ggml.pre")
    known = kinds[0] == "llama" or kinds[1] == "llama-bpe"
    told = bool(fields.get("tokenizer.ggml.add_bos_token", known))
    return told and fields.get("tokenizer.ggml.bos_token_id") is not None


def byte_level_json(fields):
    """tokenizer.json of a byte-level BPE (Radford et al. 2019), as package tokenizers writes it."""
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    words = fields.get("tokenizer.ggml.pre")
    if words not in WORDS:
        raise ValueError(
            f"its text falls into words as {shown(words)} says; "
            f"only {', '.join(WORDS)} are supported"
        )
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": number, "content": token, **flags, "special": kind == CONTROL}
        for number, (token, kind) in enumerate(zip(tokens, types))
        if kind in (CONTROL, USER_DEFINED)
    ]
    bos = tokens[fields["tokenizer.ggml.bos_token_id"]] if begins_with_bos(fields) else None
    text, pair = ({"Sequence": {"id": name, "type_id": i}} for i, name in enumerate("AB"))
    bos_first = bos and {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": bos, "type_id": 0}}, text],
        "pair": [text, pair],
        "special_tokens": {bos: {"id": bos, "ids": [tokens.index(bos)], "tokens": [bos]}},
    }
    nothing = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")
    model = {
        "type": "BPE",
        **dict.fromkeys(nothing),
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": words == "llama-bpe",
        "vocab": {token: number for number, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]],
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": WORDS[words]},
        "post_processor": bos_first,
        "decoder": BYTES | {"use_regex": True},
        "model": model,
    }


def sentencepiece_model(fields):
    """tokenizer.model: SentencePiece's message ModelProto (sentencepiece_model.proto)."""
    tokens = fields["tokenizer.ggml.tokens"]
    pieces = zip(tokens, fields["tokenizer.ggml.scores"], fields["tokenizer.ggml.token_type"])
    names = {40: "unknown", 41: "bos", 42: "eos", 43: "padding"}  # the fields of their ids
    ids = {field: fields.get(f"tokenizer.ggml.{name}_token_id") for field, name in names.items()}
    texts = {field + 5: tokens[token].encode() for field, token in ids.items() if token is not None}
    ids = {field: -1 if token is None else token for field, token in ids.items()}
    trainer = message({3: 2, 4: len(tokens), 35: 1, **ids, **texts})  # BPE, size, byte fallback
    prefix = int(fields.get("tokenizer.ggml.add_space_prefix", True))
    # A space in front, none removed, each a visible mark.
    normalizer = message({1: b"identity", 3: prefix, 4: 0, 5: 1})
    every = b"".join(
        message({1: message({1: text.encode(), 2: float(score), 3: int(kind)})})
        for text, score, kind in pieces
    )
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
