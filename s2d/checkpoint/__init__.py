"""A folder of other people's files <-> a model, a tokenizer and a chat format; see README.md."""
