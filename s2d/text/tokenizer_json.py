"""tokenizer.json, by the package ``tokenizers``."""

import tokenizers


class JsonModel:
    """Text <-> ids by tokenizer.json; ``names``: {"eos_token": text, ...}."""

    def __init__(self, folder, config, names):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.eos_id = self.tokenizer.token_to_id(names.get("eos_token", ""))

    def encode(self, text, with_bos):
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)
