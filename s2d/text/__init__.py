"""Text and ids: tokenizers (``tokenizer``), chat templates (``chat``)."""
