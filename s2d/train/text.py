"""A datastore for exit 0: what a model answers to its own questions, or any text."""

from itertools import accumulate

from ..program import tell
from ..text.tokenizer import Tokenizer
from ..weights import checksum, datastore
from ..weights.adapter import folders_read
from ..weights.config import read_config
from .self_text import sample_to


def make_datastore(target, run, millions, files):
    """Write ``run.out``, by default in the folder ``target``.

    It is made of the text in ``files`` or, without any, of ``millions`` sampled tokens.
    """
    own = target / datastore.DATASTORE
    out = run.out or own
    datastore.check_datastore(out, run.replace, [*folders_read(target), *(files or ())])
    config, source = read_config(target), "text"
    eos, vocabulary = datastore.end_of(config, target), datastore.tokenizer_checksum(target)
    if files:
        tokenizer = Tokenizer(target)
        documents = [tokenizer.encode(read_text(file)) for file in files]
    else:
        if not 0 < millions < 1e6:
            raise ValueError(f"expected more than 0 and less than 1e+06 millions, got {millions:g}")
        model, after, pairs = sample_to(out.with_suffix(".self.jsonl"), target, millions, run)
        ends = accumulate(len(answer) for _, answer in pairs)
        needed = 1 + sum(end < millions * 1e6 for end in ends)
        # An answer's first words depend on the template's before it.
        documents = [after[1:] + answer for _, answer in pairs[:needed]]
        source = checksum(model)
    about = eos, config.vocab_size, vocabulary, source
    tokens = datastore.write_datastore(out, documents, *about, run.replace)
    tell(f"{out}: {len(documents)} documents, {len(tokens)} tokens")
    if out.resolve() == own.resolve():
        tell("later runs of this target draft from it by default, because it is in its folder")


def read_text(file):
    """The text in a file that a user named."""
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ValueError(f"{file} is no text in UTF-8") from None
    if not text.strip():
        raise ValueError(f"{file} holds no text")
    return text
