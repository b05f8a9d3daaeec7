"""A datastore for exit 0: what a model answers to its own questions, or any text."""

from itertools import accumulate

from ..program import tell
from ..text.chat import chat_template
from ..text.tokenizer import Tokenizer
from ..weights import checksum, load_model
from ..weights.adapter import folders_read
from ..weights.config import read_config
from ..weights.datastore import check_datastore, end_of, tokenizer_checksum, write_datastore
from .self_text import sample_to, ways_to_ask


def make_datastore(target, out, millions, files, device, seed, replace):
    """Write ``out``, of the text in ``files`` or, without any, of ``millions`` sampled tokens."""
    check_datastore(out, replace, [*folders_read(target), *(files or ())])
    config, tokenizer, source = read_config(target), Tokenizer(target), "text"
    about = end_of(config, target), config.vocab_size, tokenizer_checksum(target)
    if files:
        documents = [tokenizer.encode(read_text(file)) for file in files]
    else:
        if not 0 < millions < 1e6:
            raise ValueError(f"expected more than 0 and less than 1e+06 millions, got {millions:g}")
        template = chat_template(target)
        _, after = ways_to_ask(tokenizer, template)  # refused before a model is loaded
        model = load_model(target, device, "auto")
        raw = out.with_suffix(".self.jsonl")
        records = sample_to(raw, model, tokenizer, template, millions * 1e6, seed)
        # An answer's first words depend on the template's before it.
        documents, source = [after[1:] + record["a"] for record in records], checksum(model)
        ends = accumulate(len(record["a"]) for record in records)
        documents = documents[: 1 + sum(end < millions * 1e6 for end in ends)]
    tokens = write_datastore(out, documents, *about, source, replace)
    tell(f"{out}: {len(documents)} documents, {len(tokens)} tokens")


def read_text(file):
    """The text in a file that a user named."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None
    if not text.strip():
        raise ValueError(f"{file} holds no text")
    return text
