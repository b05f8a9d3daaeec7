"""A datastore for exit 0: any texts, as ids of a target (ngram/datastore.py)."""

from pathlib import Path

from ..checkpoint.config import read_folder
from ..checkpoint.files import read_text, refuse_existing
from ..checkpoint.notices import tell
from ..checkpoint.tokenizer import Tokenizer
from ..ngram.datastore import save_datastore
from ..pair.names import find_target
from .fit import Run


def make_datastore(run: Run, target: str, files: list[Path]) -> None:
    """Write the texts of ``files`` to one that ``run.py --datastore`` reads."""
    refuse_existing(run.out)
    path, config, _ = read_folder(find_target(target))
    tokenizer = Tokenizer(path, config.vocab_size)
    documents = [tokenizer.encode(read_text(file)) for file in files]
    save_datastore(run.out, documents, config)
    tell(f"{run.out}: {len(documents)} documents, {sum(map(len, documents))} tokens")
