"""tokenizer.json, by the package ``tokenizers``."""

import tokenizers


class JsonModel:
    """Text <-> ids by tokenizer.json; ``names``: {"bos_token": text, ...}."""

    def __init__(self, path, config, names):
        self.tokenizer = tokenizers.Tokenizer.from_file(str(path))
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        ids = {key: self.tokenizer.token_to_id(text) for key, text in names.items()}
        self.bos_id, self.eos_id = ids.get("bos_token"), ids.get("eos_token")

    def encode(self, text, with_bos):
        return self.tokenizer.encode(text, add_special_tokens=with_bos).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids)
