"""Text <-> ids: a folder's tokenizer in each of its formats, special tokens, chat templates."""
