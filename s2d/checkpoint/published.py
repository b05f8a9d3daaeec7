"""Published tokenizers and their chat templates, by the package ``transformers``."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jinja2 import Environment
from jinja2.meta import find_undeclared_variables
from transformers import AutoTokenizer

from .chat import Message


@contextmanager
def in_one_line(what: str) -> Iterator[None]:
    """Whatever goes wrong in transformers, and in tokenizers in Rust, becomes a ValueError."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is no Exception
        reason = " ".join(str(error).split())
        raise ValueError(f"{what}: {reason:.300}") from None


class PublishedTokenizer:
    """What ``AutoTokenizer`` makes of a folder; attributes as of SentencePieceModel."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with in_one_line(f"transformers does not read the tokenizer in {folder}"):
            # Nothing is looked up on the hub, and code that comes with a folder is never run.
            self.tokenizer = AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
        self.eos = self.tokenizer.eos_token or ""
        self.chat_template = self.tokenizer.chat_template
        added = self.tokenizer.added_tokens_decoder
        # Of the added tokens, those that leave no text.
        self.special = {number: str(token) for number, token in added.items() if token.special}

    def encode(self, text: str, with_bos: bool) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=with_bos, verbose=False)

    def decode(self, ids: list[int]) -> str:
        # Without the clean-up, which takes away spaces, a text does not change when it grows.
        options = dict(skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return self.tokenizer.decode(ids, **options)

    def render(self, dialogue: list[Message], /, **options: Any) -> str:
        """A dialogue by the folder's own template; ValueError if the template refuses it."""
        begins = dialogue[-1]["role"] != "assistant"
        with in_one_line(f"the chat template of {self.folder} fails"):
            template = self.tokenizer.get_chat_template()
            for name in options:
                if name not in variables(template):
                    raise ValueError(f"it has no option {name!r}")
            return self.tokenizer.apply_chat_template(
                dialogue, tokenize=False, add_generation_prompt=begins, **options
            )


def variables(template: str) -> set[str]:
    """The names that a chat template may be given."""
    # transformers has tags of its own around what an assistant says.
    source = re.sub(r"(\{%[-+]?\s*(?:end)?)generation\b", r"\1with", template)
    environment = Environment(extensions=["jinja2.ext.loopcontrols"])
    return find_undeclared_variables(environment.parse(source))
