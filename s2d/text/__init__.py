"""Text: a folder's tokenizer and its chat template."""
