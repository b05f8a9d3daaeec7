"""tokenizer.json, by the package ``tokenizers``."""

import json
from pathlib import Path

import tokenizers

from .special import LLAMA_TOKENS, Settings, read_added, read_names, space_scheme

# Classes that take all that a tokenizer.json says.
PLAIN_CLASSES = ("None", "PreTrainedTokenizer", "TokenizersBackend", "GPT2Tokenizer")
QWENS_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class JsonModel:
    """Text <-> ids by the tokenizer.json in ``folder``; attributes as of SentencePieceModel."""

    def __init__(self, folder: Path, name: str, config: Settings, content: Settings) -> None:
        """As SentencePieceModel; ``name`` is that of a class, whose rules have to be the file's."""
        if name == "LlamaTokenizer":
            config = LLAMA_TOKENS | config
        refuse_other_rules(name, config, content)
        self.tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        listed = {token["id"]: token for token in content["added_tokens"]}
        described = read_added(folder, config)
        # If there is an added_tokens_decoder, these classes take no other tokens from the file.
        if name not in PLAIN_CLASSES and config.get("added_tokens_decoder") is not None:
            for number, token in listed.items():
                if number not in described:
                    raise ValueError(f"added_tokens_decoder lacks the token {token['content']!r}")
        for number, token in described.items():
            own = listed.get(number, {})
            if own | token != own:
                raise ValueError(f"tokenizer.json has another token {number} than {token}")
        texts = [token["content"] for token in listed.values()]
        self.names = {key: token["content"] for key, token in read_names(folder, config).items()}
        for key, text in self.names.items():
            if text not in texts:
                raise ValueError(f"tokenizer.json has no added token {text!r}, the {key}")
        self.special = {}
        for number, token in listed.items():
            found = self.tokenizer.token_to_id(token["content"])
            if found != number:  # the package gives ids without gaps
                raise ValueError(f"the token {token['content']!r} has the ids {number} and {found}")
            if token["special"] or token["content"] in self.names.values():
                self.special[number] = token["content"]

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def decode(self, ids: list[int]) -> str:
        # The package forgets a special token that is "normalized", so it is left out here.
        return self.tokenizer.decode([number for number in ids if number not in self.special])


def refuse_other_rules(name: str, config: Settings, content: Settings) -> None:
    """Raise ValueError if transformers' class ``name`` has other rules than tokenizer.json.

    In transformers 5 the classes of Llama and Qwen2 take only pieces and added tokens from it.
    """
    normalizer = content.get("normalizer")
    pre_tokenizer = content.get("pre_tokenizer")
    if name == "LlamaTokenizer":
        spaces = {"type": "Metaspace", "replacement": "▁", "split": False}
        spaces["prepend_scheme"] = space_scheme(config)
        same = normalizer is None and pre_tokenizer == spaces
    elif name == "Qwen2Tokenizer":
        steps = json.dumps([normalizer, pre_tokenizer])
        same = '"NFC"' in steps and json.dumps(QWENS_SPLIT) in steps
        same = same and not config.get("add_prefix_space") and config.get("eos_token") is not None
    elif name in PLAIN_CLASSES:
        return
    else:
        raise ValueError(f"tokenizer_class {name!r}, which has rules of its own, is not known")
    if not same:
        raise ValueError(
            f"the rules of tokenizer_class {name!r} are not those of tokenizer.json; a Llama needs "
            "its tokenizer.model; if tokenizer.json is right, write PreTrainedTokenizerFast there"
        )
